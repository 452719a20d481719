"""What a result may differ by: eager's own error against float64, and the type's unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fuzz_strategy import Case

UNIT = {torch.float32: 1e-5, torch.float64: 1e-11, torch.bfloat16: 2**-9, torch.float16: 2**-12}
_ILL = 30  # units: an element that eager gets that wrong is no measure for the others ..
_ILL_TIMES = 16  # .. and is noise, of which another order of sums makes other noise
_TIMES_ROUNDED = 8  # what a result may be off by, of what those are


@dataclass
class Ran:
    """Results, gradients of the inputs that have one, and the inputs afterwards."""

    results: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    inputs: list[torch.Tensor]


_ADDED = "bias: term"
_MULTIPLIED = ("mask: one minus input", "other: no binary mask, lowest")  # their inputs, by a fill
_FAR_DOWN = "bias: far down"  # 40,000 below the products, and further


UNITS_OF_GRADIENTS = 4  # torch's fused backward is worse than eager's where scores are large: docs/numerics.md
_HALVES_GRADIENTS = "mask: max"  # of ties, in a fully masked row: a known gap (docs/numerics.md)


def all_faults(
    case: Case, ran: Ran, expected: Ran, truth: Ran, rounded: Sequence[Ran], alone: Sequence[tuple[Ran, Ran]] = ()
) -> list[str]:
    faults = []
    # A number that a fill is multiplied by has a gradient times the fill, and what is rounded away of it as well.
    names, without = list(case.program.inputs), _without_gradient(case)
    rows = {name: step.row for name, step, _ in case.program.steps()}
    lowest = torch.finfo(case.program.dtype).max
    # What is added to whole rows cancels in the gradient of a number that divides them, to its own rounding.
    added = max([1.0, *(abs(step.x) for _, step, _ in case.program.steps() if step.row == _ADDED)])
    amplified = [lowest if rows.get(name) in _MULTIPLIED else added for name in names]
    if _FAR_DOWN in rows.values():  # and so it does in that of a number that multiplies them
        amplified = [max(a, 4e4) if rows.get(n, "").startswith("scale") else a for n, a in zip(names, amplified)]
    # Two of them are one sum to a kernel, rounded to units of it in another place than eager's.
    times = sum(step.row.startswith(_FAR_DOWN) for _, step, _ in case.program.steps())
    far = 4e4 * times if times > 1 else 1.0
    for what in ("results", "gradients", "inputs"):
        if what == "gradients" and _HALVES_GRADIENTS in {step.row for _, step, _ in case.program.steps()}:
            continue
        ours, theirs, exact = (getattr(r, what) for r in (ran, expected, truth))
        near = [getattr(r, what) for r in rounded]
        if len(ours) != len(theirs):
            faults.append(f"{len(ours)} {what}, eager has {len(theirs)}")
            continue
        for n, tensors in enumerate(zip(ours, theirs, exact)):
            if what == "gradients" and names[n] in without:
                continue
            if what == "gradients" and names[n].startswith("value") and _overflows(case, expected):
                ours_is_nan = torch.isnan(tensors[0])
                tensors = (tensors[0], tensors[1].masked_fill(ours_is_nan, torch.nan), tensors[2])
            least, units = (max(far, amplified[n]), UNITS_OF_GRADIENTS) if what == "gradients" else (far, 1)
            of_each = [_apart(a.gradients[n], b.gradients[n]) for a, b in alone] if what == "gradients" else []
            fault = fault_of(*tensors, case.program.dtype, [r[n] for r in near], least, units, 2 * sum(of_each))
            faults += [f"{what}[{n}]: {fault}"] if fault else []
    return faults


def _overflows(case: Case, expected: Ran) -> bool:
    """Whether an infinite score met a sum without a maximum, of which the softmax is NaN in all of the row.

    Eager's quotient is NaN at that key alone and 0 at the others, so that the gradient of their values stays finite:
    what overflows without a maximum is the softmax's NaN (docs/numerics.md).
    """
    p = case.program
    infinite = any(step.row == "last is no number" for step in p.key)
    return infinite and p.softmax.row in _WITHOUT_MAXIMUM and any(torch.isnan(r).any() for r in expected.results)


_WITHOUT_MAXIMUM = (
    "by hand, no maximum",
    "base 2",
    "times the inverse sum",
    "normalised exp",
    "minus logsumexp",
)


def _without_gradient(case: Case) -> set[str]:
    """Operands that are normalised over one number, to its sign: what is left of their gradient is rounding."""
    p = case.program
    steps = {"query": p.query, "key": p.key, "value": p.value}
    dims = {"query": p.dim, "key": p.dim, "value": p.value_dim}
    return {name for name in steps if dims[name] == 1 and any(s.row == "normalised" for s in steps[name])}


def fault_of(
    result: Any,
    eager: Any,
    exact: Any,
    dtype: torch.dtype,
    rounded: Sequence[Any],
    least: float,
    units: int,
    more: float = 0.0,
) -> str:
    """The numerics contract: twice eager's error against float64, or the type's unit (`against_eager`)."""
    if result is None and eager is not None and not bool(eager.count_nonzero()):
        return ""  # nothing that is computed depends on it: eager adds up zeros, the rewritten program has no use of it
    if (result is None) != (eager is None):
        return "a gradient that eager has not" if eager is None else "no gradient, eager has one"
    if result is None:
        return ""
    if (result.dtype, result.shape) != (eager.dtype, eager.shape):
        return f"{result.dtype} {tuple(result.shape)}, eager has {eager.dtype} {tuple(eager.shape)}"
    if not eager.is_floating_point():
        return "" if torch.equal(result, eager) else "other integers"
    defined = torch.isfinite(eager)
    if not defined.any():
        return ""
    if not torch.isfinite(result[defined]).all():
        return "not finite where eager is"
    size = max(least, float(eager[defined].abs().max()))
    unit = units * max(UNIT[eager.dtype], UNIT[dtype]) * size
    theirs, ours = ((t.double() - exact.double()).abs().nan_to_num(nan=float("inf")) for t in (eager, result))
    good = defined & (theirs <= _ILL * unit)
    if 2 * good.sum() < defined.sum():
        return ""  # all of it is what eager's rounding left
    for name, where in (("", good), ("where eager is far off itself, ", defined & ~good)):
        if not where.any():
            continue
        worst, error = float(theirs[where].max()), float(ours[where].max())
        if name:
            limit = _ILL_TIMES * worst
        elif torch.float16 != dtype != torch.bfloat16:
            limit = max(2 * worst, unit)
        else:
            limit = 2 * worst + unit
        limit += more
        if rounded:
            limit += _TIMES_ROUNDED * max(float((r - exact.double()).abs()[where].max()) for r in rounded)
        if not error <= limit:
            return f"{name}error {error:.3g} against float64, eager's is {worst:.3g}, allowed {limit:.3g}"
    return ""


def _apart(eager: Any, exact: Any) -> float:
    if eager is None or exact is None:
        return 0.0
    return float((eager.double() - exact.double()).abs().nan_to_num(0.0, 0.0, 0.0).max()) if eager.numel() else 0.0
