"""`Target`: a form that an attention can take; `Offer` and `Refusal`: its answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol

import torch
from torch.fx import Node
from typing_extensions import TypeVar

from attn_pass.devices.device import Device
from attn_pass.graph.edit import Plan, Value
from attn_pass.model.attention import Attention, Blocks
from attn_pass.model.index import Index
from attn_pass.options import Runner


def _static(index: Index) -> int:
    """The default hint of a size: itself, or 1."""
    return index if isinstance(index, int) else 1


FLEX = "flex_attention"  # the operator, where the program calls it itself

# Assumptions, for the report.
EMPTY_ROWS = "a row fully masked with -inf gives 0, where the program gives NaN"
NONEMPTY_ROWS = "no row is fully masked"
FINITE_KEYS = (
    "masked keys are finite: the program replaces the scores of a key that is NaN or infinite, and the kernel would not"
)
STRICT_KEYS = f"numerics='strict' does not assume that {FINITE_KEYS}"
LEARNED_BIAS = (
    "a bias that is learned, made of products or a slope times a place masks no key: "
    "its numbers are far above those that mask"
)
CLAMP = "a clamp of the scores to a number that masks serves masked keys: no row of other keys is -inf throughout"
TERM = (
    "results that the program would have had as one are rounded each, and added up: they neither cancel nor exceed the "
    "range of their dtype"
)
WEAK_FILL = (
    "every row has scores far above the number that masked ones are filled with: their weights, which are set to zero "
    "afterwards, take no share of its sum"
)
NAN_GUARD = "a guard against NaN serves fully masked rows: other scores that are NaN or infinite make NaN of their rows"


def _is_zero(size: Index) -> bool:
    return size == 0


@dataclass(frozen=True)
class Setting:
    """All that a target may consult besides the attention itself."""

    device: Device
    program: str  # "compile", "export" or "aoti"
    numerics: str = "default"
    assume_nonempty_rows: bool = False
    autocast: torch.dtype | None = None  # the dtype autocast gives to products on this device, where it is on
    allowed_backends: tuple[str, ...] | None = None  # an sdpa_kernel(...) context
    eager_form: bool = True  # hand-written; False for a call that already is attention
    runner: Runner = "other"
    kernel_as_written: str | None = None  # the fused kernel that the program's call reaches, with its rounding
    blocks: Blocks | None = None  # that it computes, if it is a call of FlexAttention
    deterministic: bool = False  # torch.use_deterministic_algorithms(True), which does not only warn
    same_random_numbers: bool = False  # Inductor's fallback_random: eager's random numbers are requested
    may_need_grad: bool = False  # an exported program that may be trained, and something in it needs a gradient
    is_recomputed: bool = False  # in a checkpoint, or wherever the backward computes the forward again
    wants_logarithm: bool = False  # the scores' log-sum-exp is needed too, but not the scores themselves
    may_be_merged_by_cse: bool = False  # another call with dropout may have the same operands
    sharing_mask: int = 1  # attentions whose masks read the same tensors, this one among them
    over_cache: bool = False  # the keys' tensor was written in place before: a cache, of which a part may be valid
    hint: Callable[[Index], int] = _static
    can_be_zero: Callable[[Index], bool] = _is_zero

    def may_be_trained(self, attention: Attention) -> bool:
        """Whether a gradient may be asked for: the values of an exported program do not show it."""
        return attention.needs_grad or self.may_need_grad

    @property
    def fused_as_written(self) -> bool:
        """Whether the program's own call already reaches a kernel that masks and rounds as the targets' do.

        FlexAttention's kernel is compiled around mask and scores, and handles fully masked rows in its own way.
        """
        return self.kernel_as_written not in (None, FLEX)


Decided = TypeVar("Decided", default=Any)
"""The decisions behind an offer: a frozen dataclass of the target's own, or None if there are none."""


@dataclass(frozen=True)
class Offer(Generic[Decided]):
    """A target accepts the attention at a predicted cost in microseconds, under these assumptions.

    ``plan`` holds the decisions of `consider`, and the cost is that of this plan: `emit` reads it, and makes no
    decisions of its own. ``moved``: bytes that the kernel reads and writes, with a mask only if it reads one; None for
    several kernels.
    """

    target: str
    variant: str
    attention: Attention
    microseconds: float
    fused: bool
    plan: Decided = None  # type: ignore[assignment]
    assumptions: tuple[str, ...] = ()
    score_mod: str = ""  # the score function that would be emitted, as Python
    moved: int | None = None
    handles: tuple[str, ...] = ()  # poor cases without variants, which the kernel itself does away with
    compiled_for_site: bool = False  # Inductor compiles its kernel for this site, with tiles of its choice
    remark: str = ""  # what the reason says besides its times
    gives_logarithm: bool = False  # also gives the scores' log-sum-exp, if `Setting.wants_logarithm`


@dataclass(frozen=True)
class Refusal:
    """A target refuses the attention, with the reason in words.

    ``other_device``: the reason is the device alone. ``package``: the target needs this package to be installed.
    """

    target: str
    reason: str
    other_device: bool = False
    package: str = ""


class Target(Protocol):
    """A kernel or a form: decides whether it accepts an attention, and emits it.

    A target with a true attribute ``takes_any_score`` is also offered attention whose ``not_affine`` is set; one with a
    true ``takes_valid_range`` is also offered attention whose ``valid`` is set, and reads only the keys of that range.
    If it has a method ``alternatives(offer, setting)``, the tuner asks it for more offers with other plans,
    distinguished by their variants. If it has a method ``must_be_named(setting)`` that returns True, it is considered
    only if `options.targets` names it.
    """

    name: str

    def consider(self, attention: Attention, variant: str, setting: Setting) -> Offer | Refusal:
        """An offer with its cost and plan, or a refusal with its reason; sees only the description and the setting."""

    def emit(self, plan: Plan, nodes: Sequence[Node], offer: Offer, setting: Setting) -> Value:
        """Plans the calls for `Offer.plan` and returns the value that replaces the site's result.

        ``nodes`` are the sources.
        """
