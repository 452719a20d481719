"""A matrix of zeros and a number that masks, alone or in a sum with a bias: as the keep-condition it is."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch

from attn_pass.model.attention import Attention
from attn_pass.model.conditions import structure_of
from attn_pass.model.expression import FALSE, Apply, Const, Expr, IndexValue, Load, apply, expression_axes, walk
from attn_pass.model.index import terms_of
from attn_pass.model.mask import ABSORBING, Computed, Keep
from attn_pass.model.piecewise import pieces
from attn_pass.model.structure import keeps_a_key

_MODERATE = 1e4  # the largest number that a product is multiplied with without masking


def kept_in_place_of_added(a: Attention) -> Attention | None:
    """The same with a keep-condition instead of a matrix that adds 0 to kept keys and masks the others.

    If a row may be fully masked, the added number must absorb its scores completely, so that they
    could as well have been replaced by it. None if the mask is not such a matrix.
    """
    mask = a.mask
    if mask.keep is not None or mask.bias is None or mask.computed is None or mask.computed.bias is None:
        return None
    keep = None if mask.fills is None else _keep(mask.computed.bias)
    if keep is None or not (_absorbs(keep, a) or mask.never_empty):
        return None
    without_bias = replace(mask, bias=None, keep=keep, fills=None, computed=Computed(None, keep.condition))
    return replace(a, mask=replace(without_bias, by_distance=None, bias_by_distance=None, apart=None))


def kept_beside_learned(a: Attention) -> Attention | None:
    """The same with a keep-condition beside a bias, where the program adds a bias and a mask (T5, ALiBi).

    What is learned, and a slope times a place, is taken to mask nothing itself. None if the bias is no such sum.
    """
    mask, apart = a.mask, a.mask.apart
    if mask.keep is not None or apart is None or not _absorbs(apart.keep, a):
        return None
    bias, keep = apart.bias, apart.keep
    if not (_is_learned(bias, a) or _is_sloped(bias, a)):
        return None
    computed = None if mask.computed is None else Computed(bias, keep.condition)
    alone = replace(mask, bias=bias, keep=keep, fills=None, by_distance=None, computed=computed, apart=None)
    never_empty = mask.never_empty or keeps_a_key(structure_of(keep.condition, a.keys, a.rows), a.keys)
    return replace(a, mask=replace(alone, never_empty=never_empty, bias_is_learned=True))


def kept_beside_products(a: Attention) -> Attention | None:
    """The same where scores are replaced and products (DeBERTa), or a slope times a place (MPT), are added to others.

    These are taken to mask nothing themselves. None if something else is added, or nothing is replaced.
    """
    mask, bias = a.mask, a.mask.deep_bias
    if mask.keep is None or bias is None or not _absorbs(mask.keep, a):
        return None
    if not (_is_of_products(bias, a) or _is_sloped(bias, a)):
        return None
    return replace(a, mask=replace(mask, bias=bias, bias_is_learned=True))


def over_fewest_axes(a: Attention) -> Attention:
    """The same with the bias over the axes that it varies over: T5's zeros beside a mask, (1, H, L, S), add none."""
    bias, deeper = a.mask.bias, a.mask.deep_bias
    if bias is None or deeper is None or not expression_axes(deeper) < expression_axes(bias):
        return a
    return replace(a, mask=replace(a.mask, bias=deeper))


def _keep(added: Expr) -> Keep | None:
    """What a matrix of zeros and one other number keeps."""
    values = pieces(added)
    fills = {float(v.value) for _, v in values or () if v.value != 0}
    if values is None or len(fills) != 1:
        return None
    condition: Expr = FALSE
    for when, value in values:
        condition = apply("or", condition, when) if value.value == 0 else condition
    return Keep(condition, fills.pop())


def _absorbs(keep: Keep, a: Attention) -> bool:
    """Whether scores that the fill is added to could as well have been replaced by it."""
    absorbs = keep.fill <= ABSORBING and a.score_dtype in (torch.float32, torch.bfloat16)
    return absorbs or keep.fill == float("-inf")


def bias_beside_mask(added: Expr) -> tuple[Expr, Keep] | None:
    """The two parts of a sum of a bias and a mask, or of a bias in whose place a fill stands where a key is masked.

    The latter's fill is not said to be added: it passes a gradient on to the scores, and none to the bias.
    """
    if not isinstance(added, Apply):
        return None
    if added.op == "cast" and added.dtype is not None and added.dtype.is_floating_point:
        inner = bias_beside_mask(added.args[0])
        if inner is None:
            return None
        fill = float(torch.tensor(inner[1].fill, dtype=torch.float64).to(added.dtype))  # float32's lowest may be -inf
        return apply("cast", inner[0], dtype=added.dtype), replace(inner[1], fill=fill)
    if added.op == "add":
        one, other = added.args
        for bias, mask in ((one, other), (other, one)):
            if (keep := _keep(mask)) is not None:
                return bias, replace(keep, is_added=True)
    if added.op == "where":
        condition, yes, no = added.args
        if isinstance(no, Const) and not isinstance(yes, Const):
            return yes, Keep(condition, float(no.value))
        if isinstance(yes, Const) and not isinstance(no, Const):
            return no, Keep(apply("not", condition), float(yes.value))
    return None


def _is_learned(bias: Expr, a: Attention) -> bool:
    """Whether a bias is made of learned tables alone, by operations that make no large number of small ones.

    A row of a table may be looked up by any number, if that leaves a vector of distances to look up.
    """
    if isinstance(bias, Load):
        return a.sources[bias.source].kind == "table"
    if not isinstance(bias, Apply):
        return False
    if bias.op == "lookup":
        table = bias.args[0]
        is_parameter = isinstance(table, Load) and a.sources[table.source].kind == "parameter"
        return is_parameter and a.mask.bias_by_distance is not None
    return bias.op in ("cast", "add", "sub", "neg") and all(_is_learned(e, a) for e in bias.args)


def _is_of_products(bias: Expr, a: Attention) -> bool:
    """Whether a bias is a sum of products, each perhaps times a number that is the same for all scores."""
    parts = list(walk(bias))
    read = [a.sources[e.source] for e in parts if isinstance(e, Load) and e.index != ()]
    if not any(s.of_products for s in read) or any(not s.of_products and s.kind != "table" for s in read):
        return False
    known = all(isinstance(e, Apply | Load) or (isinstance(e, Const) and abs(e.value) <= _MODERATE) for e in parts)
    return known and all(_is_moderate(e) for e in parts if isinstance(e, Apply))


def _is_moderate(e: Apply) -> bool:
    if e.op in ("mul", "div"):
        scalars = [x for x in map(_uncast, e.args) if isinstance(x, Const) or (isinstance(x, Load) and x.index == ())]
        small = e.op == "div" and isinstance(e.args[1], Const) and abs(e.args[1].value) < 1 / _MODERATE
        return bool(scalars) and not small
    return e.op in ("cast", "add", "sub", "neg")


def _is_sloped(bias: Expr, a: Attention) -> bool:
    """Whether a bias is a number of each head times a place, a distance or a count, or a sum of such: ALiBi."""
    times = _slope(bias, a)
    return times is not None and times <= _MODERATE


def _slope(e: Expr, a: Attention) -> float | None:
    """What constants make of a number of each head times a place; None of anything else."""
    if not isinstance(e, Apply):
        return None
    if e.op in ("cast", "neg", "add", "sub"):
        parts = [_slope(x, a) for x in e.args]
        return None if None in parts else sum(x for x in parts if x is not None)
    if e.op not in ("mul", "div"):
        return None
    for one, other in (e.args, reversed(e.args)) if e.op == "mul" else (e.args,):
        number = abs(other.value) if isinstance(other, Const) else 1.0
        is_number = isinstance(other, Const) or (isinstance(other, Load) and other.index == ())
        if is_number and number and (inner := _slope(one, a)) is not None:
            return inner / number if e.op == "div" else inner * number
        if _is_of_heads(other, a) and (place := _place(one, a)) is not None and place.counts:
            return place.times
    return None


def _is_of_heads(e: Expr, a: Attention) -> bool:
    """Whether it is a number for each head: a slope."""
    used = expression_axes(e)
    is_moderate = all(abs(x.value) <= _MODERATE for x in walk(e) if isinstance(x, Const))
    return bool(used) and used <= set(a.heads) and is_moderate


class _Place(NamedTuple):
    """A whole number, of positions and of what the program counts; ``times`` is what constants make of it.

    ``counts``: it is a position or a count, or one of its factors is. An integer of an input alone may be a mask.
    """

    counts: bool
    times: float


def _place(e: Expr, a: Attention) -> _Place | None:
    if isinstance(e, IndexValue):
        return _Place(True, float(max((abs(c) for axes, c in terms_of(e.index) if axes), default=1)))
    if isinstance(e, Const):
        return _Place(False, abs(float(e.value))) if float(e.value).is_integer() else None
    if isinstance(e, Load):
        source = a.sources[e.source]
        counts = source.kind == "computed" and source.dtype != torch.bool
        return None if source.dtype.is_floating_point or source.dtype.is_complex else _Place(counts, 1.0)
    if not isinstance(e, Apply) or e.op not in ("cast", "neg", "abs", "add", "sub", "mul"):
        return None
    if e.op == "cast" and e.dtype == torch.bool:
        return _Place(False, 1.0)
    parts = [_place(x, a) for x in e.args]
    known = [x for x in parts if x is not None]
    if len(known) < len(parts):
        return None
    times = math.prod(x.times for x in known) if e.op == "mul" else sum(x.times for x in known)
    return _Place(any(x.counts for x in known), times)


def _uncast(e: Expr) -> Expr:
    while isinstance(e, Apply) and e.op == "cast":
        e = e.args[0]
    return e
