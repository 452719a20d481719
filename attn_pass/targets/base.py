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
from attn_pass.model.attention import Attention
from attn_pass.model.index import Index
from attn_pass.options import Runner


def _static(index: Index) -> int:
    """The hint of a size where nobody gave one: itself, or 1."""
    return index if isinstance(index, int) else 1


FLEX = "flex_attention"  # the operator, where the program calls it itself

# Assumptions, for the report.
EMPTY_ROWS = "a row fully masked with -inf gives 0, where the program gives NaN"
FINITE_KEYS = "masked keys are finite: the program's fill hides one that is NaN or infinite, the kernel's mask does not"
STRICT_KEYS = f"numerics='strict' does not assume that {FINITE_KEYS}"
NAN_GUARD = "a guard against NaN weights serves fully masked rows: other NaN among the scores stay NaN"


def _is_zero(size: Index) -> bool:
    return size == 0


@dataclass(frozen=True)
class Setting:
    """What a target must know besides the attention itself."""

    device: Device
    program: str  # "compile", "export" or "aoti"
    numerics: str = "default"
    assume_nonempty_rows: bool = False
    autocast: torch.dtype | None = None  # the dtype autocast gives to products on this device, where it is on
    allowed_backends: tuple[str, ...] | None = None  # an sdpa_kernel(...) context
    eager_form: bool = True  # written out by hand; False for a call that already is attention
    runner: Runner = "other"
    kernel_as_written: str | None = None  # the fused kernel that call reaches, whose rounding and gradients it has
    deterministic: bool = False  # torch.use_deterministic_algorithms(True)
    same_random_numbers: bool = False  # Inductor's fallback_random: eager's draws are wanted
    may_need_grad: bool = False  # an exported program, which does not tell, and something in it needs a gradient
    is_recomputed: bool = False  # in a checkpoint, or wherever the backward computes the forward again
    wants_logarithm: bool = False  # the scores' log-sum-exp is needed as well, and nothing else of them
    may_be_merged_by_cse: bool = False  # another call that draws dropout may have the same operands
    hint: Callable[[Index], int] = _static
    can_be_zero: Callable[[Index], bool] = _is_zero

    @property
    def fused_as_written(self) -> bool:
        """Whether the program's own call reaches a kernel already that masks and rounds as the targets' do.

        FlexAttention's is compiled around mask and scores: what it makes of a fully masked row is its own.
        """
        return self.kernel_as_written not in (None, FLEX)


Decided = TypeVar("Decided", default=Any)
"""What a target decided on for an offer: a frozen dataclass of its own, None where there is nothing to decide."""


@dataclass(frozen=True)
class Offer(Generic[Decided]):
    """A target takes the attention at a predicted cost in microseconds, under these assumptions.

    ``plan`` is what the target decided on when it was asked, and what the cost is of: its `emit` reads it, and decides
    nothing again. ``moved``: bytes its kernel reads and writes, a mask only where it is given one; None where it is
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
    gives_logarithm: bool = False  # with its result also the scores' log-sum-exp, where `Setting.wants_logarithm`


@dataclass(frozen=True)
class Refusal:
    """A target does not take the attention, and why, in words.

    ``other_device``: because of the device alone. ``package``: it would, were that installed.
    """

    target: str
    reason: str
    other_device: bool = False
    package: str = ""


class Target(Protocol):
    """A kernel or a form: says whether it takes an attention, and emits it.

    One that has a true attribute ``takes_any_score`` is also asked about an attention whose ``not_affine`` is set, one
    that has a true ``takes_valid_range`` about one whose ``valid`` is: it reads the keys of that range alone. One
    that has a method ``alternatives(offer, setting)`` is asked for more offers beside one of its own, with other plans
    and told apart by their variants, where forms are measured. One that has a method ``must_be_named(setting)`` is,
    where that is true, asked only if `options.targets` names it.
    """

    name: str

    def consider(self, attention: Attention, variant: str, setting: Setting) -> Offer | Refusal:
        """An offer with its cost and what was decided for it, or a refusal with its reason.

        Looks at the description alone.
        """

    def emit(self, plan: Plan, nodes: Sequence[Node], offer: Offer, setting: Setting) -> Value:
        """Plans the calls that `Offer.plan` says and returns the value that replaces the site's result.

        ``nodes`` are the sources.
        """
