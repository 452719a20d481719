"""Whether two descriptions are of one function, up to rounding: the same elements of the same tensors, masked alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from attn_pass.model.attention import Attention
from attn_pass.model.expression import Expr, Load, loads, rewrite_indices, transform
from attn_pass.model.index import Axis, Index, axis_index
from attn_pass.model.mask import Mask

_EQUAL = ("compute_dtype", "output_dtype", "dropout")
_ROUNDING = 1e-6  # of a scale that is multiplied by, and divided by


def is_same_function(one: Attention, other: Attention, sources: Mapping[int, int]) -> bool:
    """Whether both compute the same from the same tensors, but for rounding and for rows that are fully masked by -inf.

    Args:
        one: a description whose result has the elements of the other's, in the same order.
        other: the other description.
        sources: for each source of ``other`` that is one of ``one``'s, its number there.

    Only what both say in the same words is found to be the same: a no may be a yes in other words.
    """
    if not (_is_plain(one) and _is_plain(other)):
        return False
    if any(getattr(one, same) != getattr(other, same) for same in _EQUAL):
        return False
    renaming = _axes(one, other)
    if renaming is None or any(e.source not in sources for e in _loads(other)):
        return False
    here = _Renamed({a: 0 for a in _all_axes(one) if a.size == 1}, {n: n for n in range(len(one.sources))})
    there = _Renamed(renaming, sources)
    return (
        math.isclose(one.scale, other.scale, rel_tol=_ROUNDING)
        and all(here(a) == there(b) for a, b in zip(_operands(one), _operands(other)))
        and _same_mask(one.mask, other.mask, here, there)
    )


def _is_plain(a: Attention) -> bool:
    """Whether it is a scaled product with a mask, and nothing else."""
    more = (a.not_affine, a.factors, a.result_factors, a.sink is not None, a.valid is not None)
    return not any((*more, a.nan_guard, a.clamped, a.fill_is_weak)) and a.rescaled == 1.0


@dataclass(frozen=True)
class _Renamed:
    axes: Mapping[Axis, Index]
    sources: Mapping[int, int]

    def __call__(self, expression: Expr) -> Expr:
        def renumbered(part: Expr) -> Expr | None:
            return Load(self.sources[part.source], part.index) if isinstance(part, Load) else None

        return transform(rewrite_indices(expression, self.axes), renumbered)


def _operands(a: Attention) -> tuple[Load, Load, Load]:
    return a.query, a.key, a.value


def _loads(a: Attention) -> list[Load]:
    return [*_operands(a), *(load for part in a.mask.parts() for load in loads(part))]


def _all_axes(a: Attention) -> list[Axis]:
    return [*(axis for group in a.output for axis in group), a.keys, a.dim]


def _axes(one: Attention, other: Attention) -> dict[Axis, Index] | None:
    """What each axis of ``other`` is in ``one``, by the order of the result's elements; None if they do not fit."""
    mine, theirs = ([axis for axis in _all_axes(a)[:-2] if axis.size != 1] for a in (one, other))
    pairs = [*zip(theirs, mine), (other.keys, one.keys), (other.dim, one.dim)]
    if len(mine) != len(theirs) or any(a.size != b.size for a, b in pairs):
        return None
    of_one = {axis: 0 for axis in _all_axes(other) if axis.size == 1}
    return of_one | {a: axis_index(b) for a, b in pairs if a.size != 1}


def _same_mask(one: Mask, other: Mask, here: _Renamed, there: _Renamed) -> bool:
    def both(mask: Mask, by: _Renamed) -> tuple[Expr | None, Expr | None]:
        bias, condition = mask.bias, mask.condition
        return None if bias is None else by(bias), None if condition is None else by(condition)

    if both(one, here) != both(other, there):
        return False
    return one.keep is None or other.keep is None or one.keep.fill == other.keep.fill
