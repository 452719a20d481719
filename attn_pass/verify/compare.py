"""How far two results may be apart: the contract of docs/numerics.md in numbers."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from attn_pass.verify.running import Outcome

# Of the largest value, for sums in another order: a few hundred roundings of float32, a few of what is narrow.
_UNITS = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# What a program may be away from its own meaning in float64, by what it computes in.
_ROUNDED = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 2.0**-4, torch.float16: 2.0**-7}
_TWICE = 2.0
_LEAST = (
    0.1  # of the largest value of all: what cancels to nothing, as one key's gradient does, is rounded like the rest
)
_EXACT = 1e-7  # float64 by two ways


def rounding(dtype: torch.dtype) -> float:
    """What sums in another order may differ by in results of a dtype, as a share of the largest; 0 for other types."""
    return _UNITS.get(dtype, 0.0)


def wrong_reading(as_written: Outcome, wide: Outcome | None, described: Outcome) -> str:
    """Why the description is not what the program computes; "" where it is.

    It is if the program in float64 gives the same, or the program as it is gives it to its type's rounding.
    """
    if wide is not None and not _apart(wide, described, as_written, {}, _EXACT):
        return ""
    return _apart(as_written, described, as_written, {}, _ROUNDED[_narrowest(as_written)])


def wrong_result(outcome: Outcome, as_written: Outcome, truth: Outcome) -> str:
    """Why a rewritten program is wrong; "" where its error is the dtype's, or at most twice the original's."""
    own = _errors(as_written, truth, as_written)
    return _apart(outcome, truth, as_written, own, _UNITS[outcome.result.dtype])


def is_conclusive(as_written: Outcome) -> bool:
    """Whether a program gave a number that another can be held to, or had none to give."""
    return not as_written.result.numel() or bool(torch.isfinite(as_written.result).any())


def difference(outcome: Outcome, as_written: Outcome) -> float:
    """The largest absolute difference of the results, where the original's is a number."""
    return _errors(outcome, as_written, as_written)["the result"][0]


def _narrowest(outcome: Outcome) -> torch.dtype:
    dtypes = [outcome.result.dtype, *(g.dtype for g in outcome.gradients.values())]
    return max(dtypes, key=lambda d: _UNITS[d])


def _apart(
    outcome: Outcome, truth: Outcome, defined: Outcome, own: Mapping[str, tuple[float, float]], unit: float
) -> str:
    errors = _errors(outcome, truth, defined)
    least = _LEAST * max(size for _, size in errors.values())
    for name, (error, size) in errors.items():
        allowed = _TWICE * own.get(name, (0.0, 0.0))[0] + unit * max(size, least)
        if not error <= allowed:
            return f"{name} is {error:.3g} away where {allowed:.3g} is allowed"
    missing = set(defined.gradients) ^ set(outcome.gradients)
    if missing:
        return f"input {min(missing) + 1} has a gradient in one of them only"
    return ""


def _errors(outcome: Outcome, truth: Outcome, defined: Outcome) -> dict[str, tuple[float, float]]:
    """For the result and each gradient: the largest error where ``defined`` is finite, and the largest value."""
    pairs = {"the result": (outcome.result, truth.result, defined.result)}
    for n in set(outcome.gradients) & set(truth.gradients) & set(defined.gradients):
        pairs[f"the gradient of input {n + 1}"] = (outcome.gradients[n], truth.gradients[n], defined.gradients[n])
    return {name: _error(*three) for name, three in pairs.items()}


def _error(result: torch.Tensor, truth: torch.Tensor, defined: torch.Tensor) -> tuple[float, float]:
    if result.shape != truth.shape:
        return float("inf"), 0.0
    where = torch.isfinite(defined).cpu()
    exact = truth.cpu().double()[where]
    if not exact.numel():
        return 0.0, 0.0
    apart = (result.cpu().double()[where] - exact).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    return float(apart.max()), float(exact.abs().nan_to_num(nan=0.0, posinf=0.0).max())
