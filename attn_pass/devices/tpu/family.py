"""The family of TPUs: tensors of torch_xla, or of torch_tpu."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attn_pass.devices.base import Family
from attn_pass.devices.device import Device
from attn_pass.devices.processors import unknown
from attn_pass.devices.roofline import Problem
from attn_pass.devices.tpu import cost, facts
from attn_pass.devices.tpu.pallas import PallasFlash, PallasSplash
from attn_pass.model.attention import Attention
from attn_pass.targets.base import Setting, Target


class Tpu(Family):
    """TPUs. torch_xla's tensors may be another device's as well, of which nothing is known."""

    name = "tpu"
    types = ("xla",)
    names = tuple(sheet.name for sheet in facts.SHEETS)
    packages = (
        ("torch-xla", "the targets for TPUs, through torch_xla", "pip install torch-xla with its torch"),
        ("jax", "the kernels of the targets for TPUs", "pip install jax"),
        ("libtpu", "the compiler of the targets for TPUs", "pip install libtpu"),
    )

    def here(self, at: torch.device) -> Device:
        """The TPU that torch_xla runs on."""
        return facts.here(facts.tpu_generation()) or unknown(at.type)

    def by_name(self, name: str) -> Device | None:
        """A TPU of the table of data sheets."""
        return facts.by_name(name)

    def targets(self) -> Sequence[Target]:
        """JAX's two Pallas kernels."""
        return (PallasFlash(), PallasSplash())

    def unfused_cost(self, attention: Attention, problem: Problem, setting: Setting) -> float:
        """As XLA compiles it."""
        if setting.device.kernels:
            return cost.unfused(setting.device, problem)
        return super().unfused_cost(attention, problem, setting)


FAMILY = Tpu()
