"""The family of Ascend NPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attn_pass.devices.base import Family, Finder
from attn_pass.devices.device import Device
from attn_pass.devices.npu import cost, facts, npu_calls
from attn_pass.devices.npu.generations import INFERENCE, TRAINING, TRAINING_V1
from attn_pass.devices.npu.operators import FusionAttention, InferAttention
from attn_pass.devices.npu.rules import stock_operator
from attn_pass.devices.roofline import Problem
from attn_pass.model.attention import AsWritten, Attention
from attn_pass.targets.base import Setting, Target


class Npu(Family):
    """Ascend NPUs, through torch_npu."""

    name = "npu"
    types = ("npu",)
    names = tuple(sheet.name for sheet in facts.SHEETS)
    same_call = {INFERENCE: INFERENCE, TRAINING: TRAINING_V1, TRAINING_V1: TRAINING_V1}
    most_general = ("sdpa", TRAINING_V1)
    reading_functions = (
        *("npu_fusion_attention", "npu_prompt_flash_attention", "npu_incre_flash_attention"),
        "npu_fused_infer_attention_score",
    )
    widens_unfused_half = True
    merges_equal_calls = True
    takes_composites = True
    packages = (
        (
            "torch-npu",
            "the targets for Ascend NPUs",
            "pip install torch-npu of torch's version, beside the vendor's CANN",
        ),
    )

    def here(self, at: torch.device) -> Device:
        """The NPU of this process, by what its runtime says."""
        return facts.here(at)

    def by_name(self, name: str) -> Device | None:
        """An NPU of the table of data sheets, or by its runtime's name."""
        return facts.by_name(name)

    def targets(self) -> Sequence[Target]:
        """torch_npu's two operators."""
        return (InferAttention(), FusionAttention())

    def finders(self) -> Sequence[Finder]:
        """Calls of torch_npu's operators."""
        return (npu_calls.find,)

    def stock_kernel(
        self, attention: Attention, written: AsWritten, device: Device, *, deterministic: bool
    ) -> str | None:
        """What torch_npu's dispatch sends torch's own call to."""
        return stock_operator(attention, written, device)

    def kernel_cost(self, kernel: str, attention: Attention, problem: Problem, setting: Setting) -> float:
        """One of torch_npu's operators."""
        return cost.operator(setting.device, kernel, problem)

    def mask_cost(self, device: Device, problem: Problem, written: AsWritten) -> float:
        """What torch_npu does to a mask before torch's own call; a program's own call of it has done it."""
        if written.from_library:
            return 0.0
        elements = 0 if written.mask == "none" else written.mask_elements
        return cost.stock_mask(device, problem, causal=written.causal, elements=elements)


FAMILY = Npu()
