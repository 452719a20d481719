"""The constraints of a kernel, one row each: the first that fails is the reason in the site's report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import torch

from attn_pass.devices.device import Device
from attn_pass.model.attention import Attention
from attn_pass.model.dtype_name import dtype_name
from attn_pass.model.index import Index
from attn_pass.targets.base import Setting

_Case = TypeVar("_Case", contravariant=True)
_Row = TypeVar("_Row", bound="Constraint[Any]")


@dataclass(frozen=True)
class Constraint(Generic[_Case]):
    """One row. A case is whatever a kernel's rows look at: an `Attended`, most of the time.

    Attributes:
        name: what it is about, "head dim".
        reason: why a case that fails is refused, in words.
        holds: whether a case meets it.
        source: where that is written: a name in a file of the kernel's sources ("check_for_dropout in
            transformers/sdp_utils_cpp.h", below torch's aten/src/ATen/native), an issue or a pull request; of rules
            that are this project's own "of this project" and why.
    """

    name: str
    reason: Callable[[_Case], str] | str
    holds: Callable[[_Case], bool]
    source: str = ""

    def why(self, case: _Case) -> str:
        """The reason for a case that it refuses."""
        return self.reason if isinstance(self.reason, str) else self.reason(case)

    def written_in(self: _Row, source: str) -> _Row:
        """The same row of another kernel, whose sources have it elsewhere."""
        return replace(self, source=source)


def first_failed(constraints: Iterable[Constraint[_Case]], case: _Case) -> Constraint[_Case] | None:
    """The first that a case does not meet; None if it meets all."""
    return next((c for c in constraints if not c.holds(case)), None)


def refusal(constraints: Iterable[Constraint[_Case]], case: _Case) -> str | None:
    """Why a case is refused; None if it is taken."""
    failed = first_failed(constraints, case)
    return None if failed is None else failed.why(case)


# ---- rows that many kernels have ----


class HasAttention(Protocol):
    """A case with an attention and the setting it is in."""

    @property
    def attention(self) -> Attention:
        """The description."""

    @property
    def setting(self) -> Setting:
        """The device and what the program runs under."""


@dataclass(frozen=True)
class Attended:
    """The plainest case."""

    attention: Attention
    setting: Setting


Common = Constraint[HasAttention]


def sizes_of(a: Attention) -> tuple[Index, ...]:
    """Of rows, keys, head dims, batch and query heads."""
    return a.q_len, a.kv_len, a.head_dim, a.value_head_dim, a.batch_size, a.query_heads


def unless(name: str, reason: Callable[[HasAttention], str | None]) -> Common:
    """A row that works its reason out: it holds where there is none."""
    return Constraint(name, lambda c: reason(c) or "", lambda c: not reason(c))


def backend(name: str = "") -> Common:
    """What ``sdpa_kernel`` allows: this one of torch's backends, or, without one, that nothing is restricted."""
    return Constraint(
        "sdpa_kernel",
        lambda c: _restriction(c.setting.allowed_backends or ()),
        lambda c: c.setting.allowed_backends is None or name in c.setting.allowed_backends,
    )


_SWITCHES = {
    "FLASH_ATTENTION": "enable_flash_sdp",
    "EFFICIENT_ATTENTION": "enable_mem_efficient_sdp",
    "MATH": "enable_math_sdp",
    "CUDNN_ATTENTION": "enable_cudnn_sdp",
}  # of torch.backends.cuda, which are those of `sdpa_kernel`, and of the CPU's calls


def _restriction(allowed: Sequence[str]) -> str:
    """What is set: by `sdpa_kernel`, which allows what it names, or by switches of what there is a switch for."""
    off = [name for name in _SWITCHES if name not in allowed]
    if not off or "OVERRIDEABLE" not in allowed:
        return f"sdpa_kernel allows only {', '.join(allowed) or 'nothing'}"
    calls = ", ".join(f"torch.backends.cuda.{_SWITCHES[name]}(False)" for name in off)
    return f"{', '.join(off)} {'is' if len(off) == 1 else 'are'} switched off, by {calls} or sdpa_kernel"


def trained_export(kernel: str) -> str:
    """The reason for a kernel without a backward in an exported program that may be trained."""
    return (
        f"{kernel} has no gradient, and parameters or inputs of this exported program need one: "
        "call model.requires_grad_(False) before torch.export if it will not be trained"
    )


def too_wide(most: int) -> str:
    """The reason for a head dim that a kernel does not take, or that may be one."""
    return f"the head dim is over {most}, or not known"


STRICT_ROWS = "numerics='strict': a row may be fully masked, and eager may give NaN or the mean there"
"""The reason where a kernel gives another result for such a row."""


def not_measured(device: Device) -> str:
    """The reason on a device for which nothing is known of any kernel."""
    return f"no measured rule for {device.type} devices yet"


KNOWN_DEVICE = Common("device", lambda c: not_measured(c.setting.device), lambda c: bool(c.setting.device.kernels))
AUTOCAST = Common(
    "autocast",
    lambda c: (
        f"autocast to {dtype_name(c.setting.autocast or torch.float32)} would narrow it from "
        f"{dtype_name(c.attention.compute_dtype)}"
    ),
    lambda c: c.setting.autocast is None or c.setting.autocast == c.attention.compute_dtype,
)
ANY_BACKEND = backend()
RANDOM_NUMBERS = Common(
    "random numbers",
    "fallback_random asks for eager's random numbers, and the kernel draws others",
    lambda c: not (c.attention.dropout and c.setting.same_random_numbers),
)
AFFINE = unless("scores", lambda c: c.attention.not_affine)
PYTHON = Common(
    "program",
    "the operator is written in Python, and a compiled package runs without Python",
    lambda c: c.setting.program != "aoti",
)
EMPTY = "a size is 0"
MAY_BE_EMPTY = "a size is 0, or may be 0 at run time: torch.export.Dim is at least 0 unless min=1 is given"
NOT_EMPTY = Common("sizes", EMPTY, lambda c: 0 not in sizes_of(c.attention))


def takes(kernel: str, *dtypes: torch.dtype) -> Common:
    """One of these dtypes."""
    names = ", ".join(map(dtype_name, dtypes))
    return Constraint(
        "dtype",
        lambda c: f"{kernel} takes {names}, not {dtype_name(c.attention.compute_dtype)}",
        lambda c: c.attention.compute_dtype in dtypes,
    )
