"""Tensors whose values are known, as index arithmetic: a constant, positions, distances, or a band.

What a tensor holds is looked at once in a graph: its layers share one causal buffer, of millions of elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from attn_pass.model.expression import Const, Expr, apply, index_value
from attn_pass.model.index import Index
from attn_pass.reading.dtype_range import LARGEST, WRAPPING
from attn_pass.reading.views import Position

_MOST_ELEMENTS = 1 << 26
_INTEGERS = (torch.int64, torch.int32)
_Form = Callable[[Sequence[Index]], Expr]


def form_of(tensor: torch.Tensor) -> Callable[[Position], Expr] | None:
    """The element at each position, exact by value; None where the values follow none of the forms looked for."""
    if tensor.numel() == 0 or tensor.numel() > _MOST_ELEMENTS or tensor.device.type == "meta" or tensor.is_complex():
        return None
    dims = [n for n, size in enumerate(tensor.shape) if size != 1]
    of_values = _form_of(tensor.detach().reshape([tensor.shape[n] for n in dims]).cpu())
    return None if of_values is None else lambda position: of_values([position[n] for n in dims])


def _form_of(values: torch.Tensor) -> _Form | None:
    """That of values without dimensions of one element."""
    if bool((values == values.flatten()[0]).all()):
        number = None if values.dtype in WRAPPING else _number(values.flatten()[0])
        return None if number is None else lambda _: number
    if values.dim() > 2:
        return _same_for_all(values)
    return _linear(values) or (_band(values) if values.dim() == 2 else None)


def _same_for_all(values: torch.Tensor) -> _Form | None:
    """A matrix repeated along leading dimensions."""
    first = values.flatten(0, -3)[0]
    form = _form_of(first) if torch.equal(values, first.expand_as(values)) else None
    return None if form is None else lambda at: form(at[-2:])


def _number(value: torch.Tensor) -> Const | None:
    number = value.item()
    if number != number:
        return None
    if isinstance(number, int) and abs(number) >= LARGEST:
        return None
    return Const(number)


def _linear(values: torch.Tensor) -> _Form | None:
    """Whole numbers that go up or down by the same step along each dimension: positions and distances."""
    if values.dtype not in _INTEGERS:
        return None
    start = values.flatten()[0]
    expected, steps = torch.zeros_like(values) + start, []
    for dim in range(values.dim()):
        step = values.select(dim, 1).flatten()[0] - start
        along = torch.arange(values.shape[dim]) * step
        expected += along.view([-1 if d == dim else 1 for d in range(values.dim())])
        steps.append(int(step))
    if not torch.equal(values, expected):
        return None

    first = int(start)

    def form(at: Sequence[Index]) -> Expr:
        total: Index = first
        for index, step in zip(at, steps, strict=True):
            total = total + index * step
        return index_value(total)

    return form


def _band(values: torch.Tensor) -> _Form | None:
    """One value where ``lower <= column - row <= upper`` and another elsewhere: triangles and windows."""
    corner = values[0, -1]
    outside = values == corner
    if not bool((values[~outside] == values[~outside][0]).all()):
        return None
    inside, other = _number(values[~outside][0]), _number(corner)
    rows, columns = values.shape
    distance = torch.arange(columns)[None] - torch.arange(rows)[:, None]
    lower, upper = int(distance[~outside].min()), int(distance[~outside].max())
    dtype = values.dtype
    if dtype in WRAPPING and {int(v) for v in (corner, values[~outside][0])} != {0, 1}:
        return None
    if inside is None or other is None or not torch.equal((distance >= lower) & (distance <= upper), ~outside):
        return None

    def form(at: Sequence[Index]) -> Expr:
        row, column = at
        condition: Expr = Const(True)
        if upper < columns - 1:
            condition = apply("le", index_value(column), index_value(row + upper))
        if lower > 1 - rows:
            condition = apply("and", condition, apply("ge", index_value(column), index_value(row + lower)))
        if dtype in WRAPPING:  # as a truth value: arithmetic in these wraps around, and is not followed
            return apply("cast", condition if inside == Const(1) else apply("not", condition), dtype=dtype)
        return apply("where", condition, inside, other)

    return form
