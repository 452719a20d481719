"""`Runtime`: the family of an exporter's target. Attention becomes torch's own call, which its exporter translates.

A runtime decides for itself what it makes of its attention operator: it may fuse it, and has provider kernels for it on
devices that are not here. So the operator is taken wherever it is as fast as products and a softmax; where it was
measured to be slower, the site is left. Times are those of a processor, from the catalogue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from attn_pass.devices import roofline
from attn_pass.devices.base import Family
from attn_pass.devices.device import Device
from attn_pass.devices.processors import ANOTHERS, processor
from attn_pass.devices.roofline import Problem
from attn_pass.model.attention import AsWritten, Attention
from attn_pass.model.expression import expression_axes
from attn_pass.targets.base import Setting
from attn_pass.targets.constraints import Constraint
from attn_pass.targets.kernel_rules import PADDABLE, SIZES, KernelRules, Rule, dtype_rule

CALL = "sdpa"
"""The one kernel of a runtime: torch's call."""

_CORES = 2  # for the rates; ratios of times do not depend on it

INFERENCE_ONLY = "of this project: exporters lower programs for inference"
INFERENCE = Rule(
    "gradient",
    "an exported program runs without gradients, and this one needs them",
    lambda c: not c.trains or c.may_train,  # where it is exported, nothing shows whether somebody would train it
    INFERENCE_ONLY,
)
NO_DROPOUT = Rule(
    "dropout",
    lambda c: f"dropout {c.attention.dropout:g}: the operator has none",
    lambda c: not c.attention.dropout,
)


def table(translation: str, *rules: Rule, dtypes: Sequence[torch.dtype]) -> Mapping[str, KernelRules]:
    """The rules of a runtime's operator, with those that every runtime has.

    Args:
        translation: where its exporter translates torch's call, which shows what the operator has.
        rules: those of this runtime alone.
        dtypes: those that it was tried with.
    """
    shared = (
        INFERENCE,
        NO_DROPOUT.written_in(translation),
        PADDABLE.written_in("of this project: head dims that differ must be known, to be passed on or padded"),
        SIZES.written_in("of this project: the runtime was not tried with tensors without elements"),
        dtype_rule(*dtypes, source=translation),
    )
    return {CALL: KernelRules("MATH", lambda dtype: 1, (*shared, *rules))}


class Runtime(Family):
    """The defaults of a runtime.

    Attributes:
        product: its name for people, "ONNX Runtime".
        one_row: what the operator takes with one query row, in times of products and a softmax; with grouped heads.
        many_rows: the same with more rows.
    """

    product = ""
    one_row: tuple[float, float] = (1.0, 1.0)
    many_rows: tuple[float, float] = (1.0, 1.0)
    is_runtime = True
    joins_sinks = True
    same_call = {CALL: CALL}
    takes_composites = True
    masks_in_compute_dtype = True

    def here(self, at: torch.device) -> Device:
        """What is decided for: a processor's rates under the runtime's name."""
        rates = replace(processor(_CORES), is_measured=False, built_in_rates=ANOTHERS)
        return replace(rates, type=self.name, name=self.product, kernels=(CALL,), is_here=False)

    def rules(self) -> Sequence[Constraint[Any]]:
        """What a site must meet to become its operator, in order."""
        return tuple(rule for kernel in self.kernel_rules.values() for rule in kernel.rules)

    def stock_kernel(
        self, attention: Attention, written: AsWritten, device: Device, *, deterministic: bool
    ) -> str | None:
        """Torch's call, where the exporter takes it as it is written."""
        return CALL if written.plain and self.takes_as_written(attention) else None

    def takes_as_written(self, attention: Attention) -> bool:
        """Whether the runtime runs the call with the mask and the heads that it has in the program."""
        return self.broadcasts_masks or _covers_scores(attention)

    def kernel_cost(self, kernel: str, attention: Attention, problem: Problem, setting: Setting) -> float:
        """The operator, measured against products and a softmax in the same runtime."""
        ratio = (self.one_row if problem.q_len == 1 else self.many_rows)[attention.groups != 1]
        unfused = roofline.unfused(setting.device, problem, materialised_kv=False)
        return ratio * unfused + roofline.traffic(setting.device, 2 * problem.copied_bytes)


def _covers_scores(attention: Attention) -> bool:
    """Whether the mask, if there is one, has an element for every row and key."""
    if attention.mask.is_none or attention.is_causal:
        return True
    used = {axis for part in attention.mask.parts() for axis in expression_axes(part)}
    score_axes = {axis for axis in (*attention.rows, attention.keys) if axis.size != 1}
    return score_axes <= used


def groups_rule(source: str) -> Rule:
    """Query heads that share keys are refused; as rows of one head (the poor case grouped_heads) they are taken."""
    return Rule(
        "grouped heads", "the runtime does not run grouped heads as they are", lambda c: c.attention.groups == 1, source
    )
