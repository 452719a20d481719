"""Tensors whose values are known, as index arithmetic: a constant, positions, distances, or a band."""

from __future__ import annotations

import torch

from attn_pass.model.expression import Const, Expr, apply, index_value
from attn_pass.model.index import Index
from attn_pass.reading.dtype_range import LARGEST, WRAPPING
from attn_pass.reading.views import Position

_MOST_ELEMENTS = 1 << 26
_INTEGERS = (torch.int64, torch.int32)


def element_of(tensor: torch.Tensor, position: Position) -> Expr | None:
    """The element at a position, exact by value; None where the values follow none of the forms looked for."""
    if tensor.numel() == 0 or tensor.numel() > _MOST_ELEMENTS or tensor.device.type == "meta" or tensor.is_complex():
        return None
    dims = [n for n, size in enumerate(tensor.shape) if size != 1]
    values = tensor.detach().reshape([tensor.shape[n] for n in dims]).cpu()
    at = [position[n] for n in dims]
    if bool((values == values.flatten()[0]).all()):
        return None if values.dtype in WRAPPING else _number(values.flatten()[0])
    if values.dim() > 2:
        return _same_for_all(values, at)
    return _linear(values, at) or (_band(values, at[0], at[1]) if values.dim() == 2 else None)


def _same_for_all(values: torch.Tensor, at: list[Index]) -> Expr | None:
    """A matrix repeated along leading dimensions."""
    first = values.flatten(0, -3)[0]
    return element_of(first, tuple(at[-2:])) if torch.equal(values, first.expand_as(values)) else None


def _number(value: torch.Tensor) -> Expr | None:
    number = value.item()
    if number != number:
        return None
    if isinstance(number, int) and abs(number) >= LARGEST:
        return None
    return Const(number)


def _linear(values: torch.Tensor, at: list[Index]) -> Expr | None:
    """Whole numbers that go up or down by the same step along each dimension: positions and distances."""
    if values.dtype not in _INTEGERS:
        return None
    start = values.flatten()[0]
    total: Index = int(start)
    expected = torch.zeros_like(values) + start
    for dim, index in enumerate(at):
        step = values.select(dim, 1).flatten()[0] - start
        steps = torch.arange(values.shape[dim]) * step
        expected += steps.view([-1 if d == dim else 1 for d in range(values.dim())])
        total = total + index * int(step)
    return index_value(total) if torch.equal(values, expected) else None


def _band(values: torch.Tensor, row: Index, column: Index) -> Expr | None:
    """One value where ``lower <= column - row <= upper`` and another elsewhere: triangles and windows."""
    corner = values[0, -1]
    outside = values == corner
    if not bool((values[~outside] == values[~outside][0]).all()):
        return None
    inside, other = _number(values[~outside][0]), _number(corner)
    rows, columns = values.shape
    distance = torch.arange(columns)[None] - torch.arange(rows)[:, None]
    lower, upper = int(distance[~outside].min()), int(distance[~outside].max())
    if values.dtype in WRAPPING and {int(v) for v in (corner, values[~outside][0])} != {0, 1}:
        return None
    if inside is None or other is None or not torch.equal((distance >= lower) & (distance <= upper), ~outside):
        return None
    condition: Expr = Const(True)
    if upper < columns - 1:
        condition = apply("le", index_value(column), index_value(row + upper))
    if lower > 1 - rows:
        condition = apply("and", condition, apply("ge", index_value(column), index_value(row + lower)))
    if values.dtype in WRAPPING:  # as a truth value: arithmetic in these wraps around, and is not followed
        return apply("cast", condition if inside == Const(1) else apply("not", condition), dtype=values.dtype)
    return apply("where", condition, inside, other)
