"""Names a mask: what is proven about a keep-condition and a bias from their index arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from attn_pass.model.conditions import structure_of
from attn_pass.model.expression import (
    FALSE,
    TRUE,
    Apply,
    Const,
    Expr,
    apply,
    expression_axes,
    index_value,
    loads,
    walk,
)
from attn_pass.model.index import Axis
from attn_pass.model.mask import Keep, Mask
from attn_pass.model.piecewise import as_condition, pieces
from attn_pass.model.structure import keeps_a_key
from attn_pass.reading.scores import WEAKEST_FILL, is_masking, is_small


def name_mask(
    bias: Expr | None,
    keep: Keep | None,
    deep_bias: Expr | None,
    deep_keep: Expr | None,
    keys: Axis,
    rows: tuple[Axis, ...],
    dtype: torch.dtype,
) -> Mask:
    """Names bias and keep-condition. ``deep_*`` are the same expressions lifted down to index arithmetic.

    What keeps everything and what is constant along the keys and finite vanishes; ``key <= query`` becomes that
    condition, written as a condition or as a matrix of zeros and a masking fill. Any other mask stays the tensor it
    is, reused and never rebuilt, and its structure says what it keeps.
    """
    added = _added(deep_bias, keys, dtype)
    condition = TRUE if deep_keep is None else as_condition(deep_keep)
    structure = structure_of(apply("and", condition, added.condition), keys, rows)
    if (added.condition == TRUE or not structure.parts) and not added.rest:
        bias = None
    if condition == TRUE or not structure.parts:
        keep = None
    for term in added.rest:
        structure = structure.and_opaque(_kind_of_bias(term, keys, rows))
    if structure.is_causal:
        fill = keep.fill if keep is not None else added.fill
        causal = apply("le", index_value(structure.key), index_value(structure.row))
        return Mask(keep=Keep(causal, fill), structure=structure, never_empty=True)
    return Mask(bias, keep, _fills(deep_bias, dtype), structure, never_empty=keeps_a_key(structure, keys))


@dataclass(frozen=True)
class _Added:
    """A bias as the keep-condition its terms amount to, and the terms that are none."""

    condition: Expr = TRUE
    fill: float = float("-inf")
    rest: tuple[Expr, ...] = ()


@lru_cache(maxsize=1024)
def _added(bias: Expr | None, keys: Axis, dtype: torch.dtype) -> _Added:
    condition: Expr = TRUE
    fill = float("-inf")
    rest = []
    for term in added_terms(bias):
        if keys not in expression_axes(term) and is_small(term, dtype):
            continue  # the same for every key: the softmax does not see it
        keep = _as_keep(term, dtype)
        if keep is None:
            rest.append(term)
        else:
            condition, fill = apply("and", condition, keep[0]), keep[1]
    return _Added(condition, fill, tuple(rest))


@lru_cache(maxsize=1024)
def _fills(bias: Expr | None, dtype: torch.dtype) -> tuple[float, ...] | None:
    """The numbers a bias masks with, where it is one of them or 0 at every key; None where that is not proved."""
    values = None if bias is None else pieces(bias)
    if values is None or any(v.value != 0 and not is_masking(float(v.value), dtype) for _, v in values):
        return None
    return tuple(float(v.value) for _, v in values if v.value != 0)


def added_terms(bias: Expr | None) -> list[Expr]:
    """What a sum is made of, each of which may be left out by itself."""
    if bias is None:
        return []
    if isinstance(bias, Apply) and bias.op == "add":
        return [t for a in bias.args for t in added_terms(a)]
    return [bias]


def _as_keep(term: Expr, dtype: torch.dtype) -> tuple[Expr, float] | None:
    """``(condition, fill)`` of a matrix that is 0 where kept and masks elsewhere."""
    values = pieces(term)
    if values is None or any(v.value != 0 and not is_masking(float(v.value), dtype) for _, v in values):
        return None
    condition: Expr = FALSE
    fill = float("-inf")
    for piece, value in values:
        if value.value == 0:
            condition = apply("or", condition, piece)
        else:
            fill = float(value.value)
    return condition, fill


def _kind_of_bias(term: Expr, keys: Axis, rows: tuple[Axis, ...]) -> str:
    """A name for a bias that is not a keep-condition: ``(1 - mask) * lowest`` of a run-time mask is padding."""
    of_rows = {a for a in rows if a.size != 1}
    masks = any(isinstance(e, Const) and e.value <= WEAKEST_FILL for e in walk(term))
    if masks and loads(term) and keys in expression_axes(term) and not expression_axes(term) & of_rows:
        return "padding"
    return "additive"
