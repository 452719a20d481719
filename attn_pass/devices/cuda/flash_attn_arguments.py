"""An attention as arguments of flash-attn's forward: scale, soft cap, window, ALiBi slopes; or why it has no such form.

The kernel computes ``softcap * tanh(scale * dot / softcap) - slope * |own - key|`` for keys from ``own - left`` to
``own + right``, where ``own = row + kv_len - q_len`` (csrc/flash_attn/src/flash_fwd_kernel.h and mask.h, 2.8.3). A
number added to a whole row does not change a softmax, so every bias that falls with the distance to keys on one side is
ALiBi if the other side is masked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from attn_pass.model.attention import Attention
from attn_pass.model.conditions import structure_of
from attn_pass.model.expression import (
    FALSE,
    TRUE,
    Apply,
    Const,
    Dot,
    Expr,
    apply,
    as_index,
    expression_axes,
    rewrite_indices,
)
from attn_pass.model.index import Axis, Index, axes, axis_index, is_at_most
from attn_pass.model.piecewise import pieces
from attn_pass.model.structure import Band, Keys, Opaque, Structure, keeps_a_key, row_index

_ADDED = Opaque("additive")  # a structure's name for a bias that is not a mask
_EXACT = (torch.float32, torch.float64)  # positions are exact in these
NO_FORM = "the bias is neither a mask nor a multiple of the distance"


class NoForm(Exception):
    """The kernel does not compute it; the message says why."""


@dataclass(frozen=True)
class Arguments:
    """What the operator is given beside its operands; ``negated``: a query of the opposite sign."""

    scale: float
    negated: bool = False
    softcap: float = 0.0
    causal: bool = False
    left: int = -1
    right: int = -1
    slopes: Expr | None = None  # over heads, or batch and heads
    rows_never_empty: bool = True
    finite_fill: bool = False  # what is masked is filled with a number


def arguments_of(a: Attention) -> Arguments:
    """The arguments. Raises `NoForm`."""
    scale, softcap = _scale_and_cap(a)
    arguments = Arguments(abs(scale), scale < 0, softcap)
    if a.mask.is_none:
        return arguments
    finite = a.mask.replaces_with_number
    visible = replace(a.mask.structure, parts=tuple(p for p in a.mask.structure.parts if p != _ADDED))
    term: Expr | None = None
    if a.mask.bias is not None:
        added = _added(a, a.mask.bias)
        term, finite = added.term, finite or added.finite_fill
        if added.condition != TRUE and visible.is_exact:
            # A mask that the reading kept as a bias because of how it is added.
            visible = structure_of(apply("and", visible.condition(), added.condition), a.keys, a.rows)
    own = a.kv_len - a.q_len
    left, right = _sides(_band(a, visible), own)
    if (left > -1 or right > 0) and not is_at_most(a.q_len, a.kv_len):
        raise NoForm("a window may have more rows than keys")
    return replace(
        arguments,
        causal=right == 0,
        left=left,
        right=right,
        slopes=None if term is None else _slopes(a, term, own, after=right == 0 or _is_last(a, own)),
        rows_never_empty=a.mask.never_empty or keeps_a_key(visible, a.keys),
        finite_fill=finite,
    )


# ---------------------------------------------------------------- scores


def _scale_and_cap(a: Attention) -> tuple[float, float]:
    """``scale`` and ``softcap``; ``cap * tanh(k * dot)`` has the scale ``k * cap``."""
    if not a.not_affine:
        return a.scale, 0.0
    outer, inner = _multiple(a.modified)
    if not isinstance(inner, Apply) or inner.op != "tanh":
        raise NoForm(a.not_affine)
    factor, product = _multiple(inner.args[0])
    if not isinstance(product, Dot) or outer == 0 or factor == 0:
        raise NoForm(a.not_affine)
    return factor * outer, abs(outer)


def _multiple(expression: Expr) -> tuple[float, Expr]:
    """``(number, rest)`` of ``number * rest``, through conversions that lose nothing of what the kernel keeps."""
    number = 1.0
    while isinstance(expression, Apply):
        args = expression.args
        if expression.op == "neg" or (expression.op == "cast" and expression.dtype in _EXACT):
            number = -number if expression.op == "neg" else number
            expression = args[0]
            continue
        constant = next((n for n in reversed(range(len(args))) if _is_number(args[n])), None)
        if expression.op not in ("mul", "div") or constant is None or (expression.op == "div" and constant == 0):
            break
        value = float(args[constant].value)  # type: ignore[union-attr]
        if value == 0 or abs(value) == float("inf") or value != value:
            break
        number = number / value if expression.op == "div" else number * value
        expression = args[1 - constant]
    return number, expression


def _is_number(expression: Expr) -> bool:
    return isinstance(expression, Const) and not isinstance(expression.value, bool)


# ---------------------------------------------------------------- masks


def _band(a: Attention, visible: Structure) -> Band:
    """What is kept as a band of ``key - row``. Raises `NoForm` for any other mask."""
    if not visible.parts:
        return Band()
    if visible.row != row_index(a.rows):
        raise NoForm("the mask covers other rows than the call")
    part = visible.parts[0]
    if isinstance(part, Keys) and visible.row == 0:  # one row, at 0
        part = Band(part.lower, part.upper)
    if len(visible.parts) > 1 or not isinstance(part, Band):
        raise NoForm(f"the mask is not a window of keys: {a.mask}")
    return part


def _sides(band: Band, own: Index) -> tuple[int, int]:
    """How many keys a row sees before and after its own, -1 for all."""
    sides = []
    for distance in (
        None if band.lower is None else own - band.lower,
        None if band.upper is None else band.upper - own,
    ):
        if distance is None:
            sides.append(-1)
        elif isinstance(distance, int) and distance >= 0:
            sides.append(distance)
        else:
            raise NoForm("the window is not aligned to the last key, or not known")
    return sides[0], sides[1]


def _is_last(a: Attention, own: Index) -> bool:
    """Whether no key comes after a row's own without any mask: one row."""
    return is_at_most(axis_index(a.keys), row_index(a.rows) + own)


# ---------------------------------------------------------------- ALiBi


@dataclass(frozen=True)
class _Added:
    """What is added to the scores: the masks in it as a condition, and one term or none."""

    term: Expr | None
    condition: Expr
    finite_fill: bool


def _added(a: Attention, bias: Expr) -> _Added:
    """The bias taken apart. Raises `NoForm`."""
    bias = _over_places(a, bias)
    terms: list[Expr] = []
    finite = False
    condition: Expr = TRUE
    for sign, term in _terms(bias, 1):
        if _is_number(term):
            continue
        values = pieces(term)
        if values is None:
            terms.append(term if sign > 0 else apply("neg", term))
            continue
        fills = [sign * float(v.value) for _, v in values if v.value != 0]
        if any(not f <= torch.finfo(a.score_dtype).min / 2 for f in fills):
            raise NoForm(NO_FORM)
        finite = finite or any(f != float("-inf") for f in fills)
        keeps: Expr = FALSE
        for piece, value in values:
            keeps = apply("or", keeps, piece) if value.value == 0 else keeps
        condition = apply("and", condition, keeps)
    if len(terms) > 1:
        raise NoForm(NO_FORM)
    return _Added(terms[0] if terms else None, condition, finite)


def _over_places(a: Attention, bias: Expr) -> Expr:
    """The bias over key and row, by index arithmetic where it is known over distances."""
    by = a.mask.by_distance
    if by is None or by.bias is None or not by.is_over(a.rows):
        return bias
    return rewrite_indices(by.bias, {by.axis: axis_index(a.keys) - axis_index(by.row) + by.row.size - 1})


def _terms(expression: Expr, sign: int) -> Iterator[tuple[int, Expr]]:
    if isinstance(expression, Apply):
        args = expression.args
        if expression.op in ("add", "sub") and as_index(expression) is None:
            yield from _terms(args[0], sign)
            yield from _terms(args[1], sign if expression.op == "add" else -sign)
            return
        if expression.op == "neg" or (expression.op == "cast" and expression.dtype in _EXACT):
            yield from _terms(args[0], -sign if expression.op == "neg" else sign)
            return
    yield sign, expression


@dataclass(frozen=True)
class _Slope:
    """``factor * place``, or ``factor * |place|``; the place is index arithmetic over key and row."""

    factor: Expr
    place: Index | None
    absolute: bool = False


def _slopes(a: Attention, term: Expr, own: Index, *, after: bool) -> Expr:
    """The slopes of a term ``-slope * |own - key|``; with ``after`` no key comes after its row's own."""
    where = {a.keys, *a.rows}
    slope = _slope(term, where)
    if slope is None or slope.place is None or not expression_axes(slope.factor) <= {*a.batch, *a.heads}:
        raise NoForm(NO_FORM)
    key, row = axis_index(a.keys), row_index(a.rows)
    down = apply("neg", slope.factor)
    for sign, place in ((1, slope.place), (-1, -1 * slope.place)):
        rest = place - (key - row)  # how far place is from the distance to the row
        if slope.absolute:
            if not axes(rest) and rest == -1 * own:
                return down
            if after and not axes(rest) and is_at_most(rest, -1 * own):
                return down  # |place| is -place for every key that is kept
        elif after and a.keys not in axes(rest):
            return slope.factor if sign > 0 else down
    raise NoForm("the bias is a multiple of a distance that is not aligned to the last key")


def _slope(expression: Expr, where: set[Axis]) -> _Slope | None:
    """The expression as a product of what varies with heads alone and of one place."""
    index = as_index(expression)
    if index is not None and axes(index) & where:
        return _Slope(Const(1.0), index)
    if not expression_axes(expression) & where:
        return _Slope(expression, None)
    if not isinstance(expression, Apply):
        return None
    args = expression.args
    if expression.op in ("neg", "cast", "abs"):
        inner = _slope(args[0], where)
        if inner is None or (expression.op == "cast" and expression.dtype not in (*_EXACT, torch.int64, torch.int32)):
            return None
        if expression.op == "neg":
            return replace(inner, factor=apply("neg", inner.factor))
        if expression.op == "abs":
            return replace(inner, absolute=True) if inner.factor in (Const(1.0), Const(-1.0)) else None
        return inner
    if expression.op in ("mul", "div"):
        left, right = (_slope(x, where) for x in args)
        if left is None or right is None or (left.place is not None and right.place is not None):
            return None
        if expression.op == "div" and right.place is not None:
            return None
        place = left if left.place is not None else right
        return replace(place, factor=apply(expression.op, left.factor, right.factor))
    return None
