"""The scores' expression, normalised: ``scale * factors * dot + bias`` where kept, a fill elsewhere.

Works on expressions alone. An expression without this form is refused with the first operation that did not fit; it
stays available for targets that take any score function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from attn_pass.model.attention import Factor
from attn_pass.model.expression import (
    Apply,
    Const,
    Dot,
    Expr,
    IndexValue,
    Load,
    apply,
    contains_dot,
    expression_axes,
    is_boolean,
    transform,
    walk,
)
from attn_pass.model.index import Axis, terms_of
from attn_pass.model.mask import ABSORBING, Keep

NEGATIVE_INFINITY = float("-inf")
LOWEST = torch.finfo(torch.float32).min
WEAKEST_FILL = -0.99e9  # that masks outside float16; -1e9 is -998244352 in bfloat16
_FILL = 1e9  # from here on a number may stand for a mask, whatever its sign
_SMALL = 1e6  # a number that neither absorbs a score nor turns a masking fill into a weak one


class NotAffine(Exception):
    """The scores are not a scaled dot product plus a bias; the message names what stands in the way."""


@dataclass(frozen=True)
class Earlier:
    """What was added to float16 scores, and multiplied, before something else joined them."""

    bias: Expr  # multiplied
    rescaled: float


@dataclass(frozen=True)
class Scores:
    """``scale * factors * dot + bias`` where ``keep`` holds, ``keep.fill`` elsewhere.

    ``shift`` is added to all of it: the softmax does not see it, a choice between two forms of the scores does.
    ``sign_flipped``: what was added, of a size that is not known, was multiplied by a negative number with the scores.
    ``clamped``: to at least a number that masks, which changes a score that is -inf by itself.
    ``rescaled``: what float16 scores were multiplied by since something was added that may mask; NaN for a tensor.
    ``earlier``: the same of what had been added before, and is part of the bias.
    """

    scale: float = 1.0
    factors: tuple[Factor, ...] = ()
    bias: Expr | None = None
    keep: Keep | None = None
    shift: float = 0.0
    sign_flipped: bool = False
    clamped: bool = False
    rescaled: float = 1.0
    earlier: tuple[Earlier, ...] = ()


def is_masking(fill: float, dtype: torch.dtype) -> bool:
    """Whether a fill is low enough to mean "not attended to" in scores of ``dtype`` (the numerics contract)."""
    return fill <= weakest_fill(dtype)


def weakest_fill(dtype: torch.dtype) -> float:
    """The highest number that masks in scores of ``dtype``."""
    return torch.finfo(torch.float16).min / 2 if dtype == torch.float16 else WEAKEST_FILL


def is_small(term: Expr, dtype: torch.dtype) -> bool:
    """Whether a term of constants and indices alone leaves the scores it is added to what they are."""
    return _size(term) < (torch.finfo(torch.float16).max / 2 if dtype == torch.float16 else _SMALL)


def is_small_times(term: Expr, number: float) -> bool:
    """Whether a term that was multiplied by a number left float16 scores what they were; -inf is the same anywhere."""
    finite = _replaced(term, Const(NEGATIVE_INFINITY), Const(0.0))
    return _size(finite) < abs(number) * torch.finfo(torch.float16).max / 2


def _size(term: Expr) -> float:
    """An upper bound of the absolute value; infinite where there is none by its form."""
    if isinstance(term, Const):
        return abs(float(term.value))
    if isinstance(term, IndexValue):
        return float(sum(abs(c) * (_LONGEST if monomial else 1) for monomial, c in terms_of(term.index)))
    if not isinstance(term, Apply) or term.op not in _BOUNDS:
        return 1.0 if is_boolean(term) else math.inf
    sizes = [_size(a) for a in term.args]
    if term.op == "div":
        divisor = term.args[1]
        return sizes[0] / sizes[1] if isinstance(divisor, Const) and divisor.value else math.inf
    return _BOUNDS[term.op](sizes)


_LONGEST = 1e5  # a position, for the size of what is computed from it
_BOUNDS: dict[str, Callable[[list[float]], float]] = {
    "add": sum,
    "sub": sum,
    "mul": math.prod,
    "div": max,
    "neg": max,
    "abs": max,
    "cast": max,
    "tanh": lambda _: 1.0,
    "sigmoid": lambda _: 1.0,
    "maximum": max,
    "minimum": max,
    "where": lambda sizes: max(sizes[1:]),
}


def normalise(expression: Expr, keys: Axis, dtype: torch.dtype) -> Scores:
    """Normalises the scores; ``dtype`` is the type they are computed in. Raises `NotAffine`."""
    if isinstance(expression, Dot):
        return Scores()
    if isinstance(expression, Const):
        raise NotAffine(f"every score is {expression.value:g}, whatever queries and keys are")
    if not isinstance(expression, Apply) or not contains_dot(expression):
        raise NotAffine("the scores do not contain a product of queries and keys")
    rule = _RULES.get(expression.op)
    if rule is None:
        raise NotAffine(f"{_WORDS.get(expression.op, expression.op)} of the scores is not a scale, bias or mask")
    return rule(expression, keys, dtype)


_WORDS = {"tanh": "tanh (a soft cap)", "exp": "exp", "sigmoid": "sigmoid", "maximum": "a maximum", "minimum": "a clamp"}


@dataclass(frozen=True)
class Modified:
    """Scores that are not a scaled product: a function of the product, with the bias and the mask around it."""

    function: Expr
    around: Scores
    reason: str


def modified(expression: Expr, keys: Axis, dtype: torch.dtype, reason: str) -> Modified:
    """Splits what bias and mask are off scores that `normalise` refused for ``reason``. Raises `NotAffine`."""
    if not contains_dot(expression):
        raise NotAffine(reason)
    function = _modified(expression, keys, dtype)
    try:
        around = normalise(_replaced(expression, function, Dot()), keys, dtype)
    except NotAffine:
        return Modified(expression, Scores(), reason)
    if around.bias is not None and _replaces(expression) and not is_bounded(function):
        # A fill replaces what was masked inside; as a part of what is added it would be added to it.
        return Modified(expression, Scores(), reason)
    return Modified(function, around, reason)


def is_bounded(function: Expr) -> bool:
    """Whether a function of the product masks nothing: its elements are not fills for any product."""
    return not any(
        (isinstance(e, Const) and abs(e.value) >= _FILL) or (isinstance(e, Load) and e.index != ())
        for e in walk(function)
    )


def _replaces(expression: Expr) -> bool:
    """Whether scores are replaced on the way from the product to here."""
    if not isinstance(expression, Apply) or not contains_dot(expression):
        return False
    return expression.op == "where" or any(_replaces(e) for e in expression.args)


def _modified(expression: Expr, keys: Axis, dtype: torch.dtype) -> Expr:
    """What is left when the biases and masks around it are taken off."""
    if not isinstance(expression, Apply):
        return expression
    inner: Expr | None = None
    if expression.op in ("add", "sub") and contains_dot(expression.args[0]) != contains_dot(expression.args[1]):
        left = contains_dot(expression.args[0])
        inner = expression.args[0] if left else expression.args[1] if expression.op == "add" else None
    elif expression.op == "where" and not contains_dot(expression.args[0]):
        yes, no = expression.args[1:]
        inner, fill = (yes, no) if contains_dot(yes) else (no, yes)
        if not isinstance(fill, Const) or not is_masking(float(fill.value), dtype):
            inner = None
    if inner is None:
        return expression
    try:
        normalise(inner, keys, dtype)
    except NotAffine:
        return _modified(inner, keys, dtype)
    return expression


def _replaced(expression: Expr, part: Expr, by: Expr) -> Expr:
    return transform(expression, lambda e: by if e == part else None)


def _one_with_dot(expression: Apply) -> tuple[Expr, Expr, bool]:
    """``(the operand with the dot product, the other, whether the first was the left one)`` of a binary op."""
    left, right = expression.args
    if contains_dot(left) and contains_dot(right):
        raise NotAffine(f"{expression.op} combines the scores with themselves")
    return (left, right, True) if contains_dot(left) else (right, left, False)


def _add(expression: Apply, keys: Axis, dtype: torch.dtype) -> Scores:
    inner, term, left = _one_with_dot(expression)
    scores = normalise(inner, keys, dtype)
    if expression.op == "sub":
        if not left:
            scores = _scaled(scores, Const(-1.0), False, keys, dtype)
        else:
            term = apply("neg", term)
    if is_boolean(term):
        term = apply("cast", term, dtype=torch.float32)
    if isinstance(term, Const) and is_small(term, dtype):
        # The same for every key: the softmax does not see it, and it is too small to undo a mask.
        return replace(scores, shift=scores.shift + float(term.value))
    _refuse_a_fill_that_leaks(scores.keep, dtype)
    scores = _without_keep(scores, dtype)
    scores = scores if is_small(term, dtype) else _joined_anew(scores)
    bias = term if scores.bias is None else apply("add", _wide(scores.bias, dtype), _wide(term, dtype))
    return replace(scores, bias=bias)


def _refuse_a_fill_that_leaks(keep: Keep | None, dtype: torch.dtype) -> None:
    """A kernel adds the fill to the score it replaces; beside a later addition that score may not be absorbed.

    -1e9 leaves multiples of 64 of a score in float32, and a fully masked row is no longer uniform, whose result
    would be known without its scores.
    """
    if keep is not None and dtype != torch.float16 and keep.fill > ABSORBING:
        raise NotAffine(f"{keep.fill:g} is filled in, which may not absorb a score, and more is added after it")


def _wide(term: Expr, dtype: torch.dtype) -> Expr:
    """A bias as it is once it was added to scores, which are wider than it may be itself."""
    if isinstance(term, Apply) and term.op == "add":
        return apply("add", *(_wide(part, dtype) for part in term.args))
    kind = torch.promote_types(dtype, torch.float32)
    is_tensor = any(isinstance(e, Load) for e in walk(term)) and not (isinstance(term, Apply) and term.dtype == kind)
    return apply("cast", term, dtype=kind) if is_tensor else term


def _shifted(scores: Scores) -> Scores:
    """The same scores with the shift as part of the bias."""
    if not scores.shift:
        return scores
    bias = Const(scores.shift) if scores.bias is None else apply("add", scores.bias, Const(scores.shift))
    return replace(scores, bias=bias, shift=0.0)


def _mul(expression: Apply, keys: Axis, dtype: torch.dtype) -> Scores:
    inner, factor, left = _one_with_dot(expression)
    if expression.op == "div" and not left:
        raise NotAffine("something is divided by the scores")
    return _scaled(normalise(inner, keys, dtype), factor, expression.op == "div", keys, dtype)


def _neg(expression: Apply, keys: Axis, dtype: torch.dtype) -> Scores:
    return _scaled(normalise(expression.args[0], keys, dtype), Const(-1.0), False, keys, dtype)


def _scaled(scores: Scores, factor: Expr, inverse: bool, keys: Axis, dtype: torch.dtype) -> Scores:
    op = "div" if inverse else "mul"
    keep = scores.keep
    if isinstance(factor, Const):
        number = float(factor.value)
        if number == 0 or number != number or abs(number) == float("inf"):
            raise NotAffine(f"the scores are {'divided' if inverse else 'multiplied'} by {number}")
        number = 1 / number if inverse else number
        if keep is not None:
            fill = _fill_times(keep.fill, number, dtype)
            if not is_masking(fill, dtype):
                raise NotAffine(f"the mask's fill becomes {fill:g} by a factor of {number:g}: too weak to mask")
            keep = replace(keep, fill=fill)
        if scores.bias is not None and not 0 < number <= 1 and _fills(scores.bias):
            raise NotAffine(f"masked scores are multiplied by {number:g}")
        bias = None if scores.bias is None else apply("mul", _wide(scores.bias, dtype), Const(number))
        sign_flipped = scores.sign_flipped or (
            number < 0 and scores.bias is not None and not is_small(scores.bias, dtype)
        )
        shift = scores.shift * number
        scores = replace(
            scores,
            scale=scores.scale * number,
            shift=shift,
            sign_flipped=sign_flipped,
            rescaled=_rescaled(scores, number, dtype),
        )
        return replace(scores, bias=bias, keep=keep)
    if keys in expression_axes(factor):
        raise NotAffine("the scores are multiplied by something that differs from key to key")
    if keep is not None:
        raise NotAffine("masked scores are multiplied by a tensor")
    scores = _shifted(scores)
    scores = replace(scores, rescaled=_rescaled(scores, math.nan, dtype))
    bias = None if scores.bias is None else apply(op, _wide(scores.bias, dtype), _wide(factor, dtype))
    return replace(scores, factors=(*scores.factors, Factor(factor, inverse)), bias=bias)


def _rescaled(scores: Scores, number: float, dtype: torch.dtype) -> float:
    """What float16 scores were multiplied by in all, once they are multiplied by ``number`` as well."""
    return number * scores.rescaled if _may_mask_half(scores, dtype) else scores.rescaled


def _fill_times(fill: float, number: float, dtype: torch.dtype) -> float:
    """A fill that is multiplied with the scores, to the last digit what a bias of that number is multiplied to.

    In a fully masked row the higher of two fills counts alone, so that equal ones have to stay equal.
    """
    wide = float(torch.tensor(fill, dtype=torch.promote_types(dtype, torch.float32)) * number)
    return wide if math.isfinite(wide) else fill * number


def _may_mask_half(scores: Scores, dtype: torch.dtype) -> bool:
    return dtype == torch.float16 and scores.bias is not None and not is_small(scores.bias, dtype)


def _joined_anew(scores: Scores) -> Scores:
    """The same scores, for something to join them in float16 that is not multiplied as what joined them before."""
    if scores.rescaled == 1 or scores.bias is None:
        return scores
    return replace(scores, rescaled=1.0, earlier=(*scores.earlier, Earlier(scores.bias, scores.rescaled)))


def _where(expression: Apply, keys: Axis, dtype: torch.dtype) -> Scores:
    condition, yes, no = expression.args
    if contains_dot(condition):
        raise NotAffine("the mask depends on the scores")
    if contains_dot(yes) and contains_dot(no):
        return _either(condition, normalise(yes, keys, dtype), normalise(no, keys, dtype), dtype)
    inner, fill = (yes, no) if contains_dot(yes) else (no, yes)
    if inner is no:
        condition = apply("not", condition)
    if not isinstance(fill, Const):
        raise NotAffine("masked scores are filled with something that is not a constant")
    value = float(fill.value)
    if not is_masking(value, dtype):
        raise NotAffine(f"masked scores are filled with {value:g}, which does not mask in {str(dtype)[6:]}")
    scores = normalise(inner, keys, dtype)
    if scores.keep is not None and scores.keep.fill == value:
        return replace(scores, keep=Keep(apply("and", scores.keep.condition, condition), value))
    if scores.keep is not None and NEGATIVE_INFINITY not in (scores.keep.fill, value):
        raise NotAffine(f"masked scores are filled with {scores.keep.fill:g} and with {value:g}")
    if value != NEGATIVE_INFINITY and scores.bias is not None and _fills(scores.bias) - {value}:
        # In a fully masked row the higher of two fills counts alone, and what is emitted knows one number only.
        raise NotAffine(f"masked scores are filled with {value:g} and with another number before it")
    if scores.keep is not None and scores.bias is None and value == NEGATIVE_INFINITY:
        # Nothing but -inf comes after this fill, so that it may be low enough to absorb any score.
        scores = replace(scores, bias=_as_bias(scores.keep, None, min(scores.keep.fill, LOWEST)), keep=None)
    scores = _without_keep(scores, dtype)
    scores = scores if value == NEGATIVE_INFINITY else _joined_anew(scores)
    return replace(scores, keep=Keep(condition, value))


def _either(condition: Expr, yes: Scores, no: Scores, dtype: torch.dtype) -> Scores:
    """A choice between two forms of the scores that differ in what is added to the same product."""
    if yes.scale != no.scale or yes.factors != no.factors:
        raise NotAffine("where chooses between two forms of the scores")
    yes, no = _without_keep(yes, dtype), _without_keep(no, dtype)
    if yes.shift != no.shift:
        yes, no = _shifted(yes), _shifted(no)
    if yes.bias is no.bias is None:
        return replace(yes, clamped=yes.clamped or no.clamped)
    zero = Const(0.0)
    by = {x.rescaled for x in (yes, no) if _may_mask_half(x, dtype)} or {1.0}
    return replace(
        yes,
        bias=apply("where", condition, yes.bias or zero, no.bias or zero),
        sign_flipped=yes.sign_flipped or no.sign_flipped,
        clamped=yes.clamped or no.clamped,
        rescaled=by.pop() if len(by) == 1 else math.nan,
        earlier=yes.earlier + no.earlier,
    )


def _maximum(expression: Apply, keys: Axis, dtype: torch.dtype) -> Scores:
    inner, bound, _ = _one_with_dot(expression)
    if not isinstance(bound, Const) or not is_masking(float(bound.value), dtype):
        raise NotAffine("the scores are clamped from below by something that is not a mask value")
    scores = normalise(inner, keys, dtype)
    scores = replace(scores, clamped=scores.clamped or bound.value > NEGATIVE_INFINITY)
    if scores.keep is not None and scores.bias is None:
        return replace(scores, keep=replace(scores.keep, fill=max(scores.keep.fill, float(bound.value))))
    scores = _joined_anew(_without_keep(scores, dtype))
    if scores.bias is None:
        return scores
    is_clamp = expression.args[1] is bound  # what shares the gradient with a bound stands behind it
    return replace(scores, bias=apply("maximum", *((scores.bias, bound) if is_clamp else (bound, scores.bias))))


def _without_keep(scores: Scores, dtype: torch.dtype) -> Scores:
    """The same scores with the mask as part of the bias, so that what comes after it applies to it too."""
    if scores.keep is None:
        return scores
    if dtype == torch.float64 and scores.keep.fill != NEGATIVE_INFINITY:
        raise NotAffine(
            f"{scores.keep.fill:g} would not absorb a float64 score, and more is done after it was filled in"
        )
    return replace(scores, bias=_as_bias(scores.keep, scores.bias, scores.keep.fill), keep=None)


def _as_bias(keep: Keep, bias: Expr | None, fill: float) -> Expr:
    return apply("where", keep.condition, bias or Const(0.0), Const(fill))


def _fills(bias: Expr) -> set[float]:
    """The finite mask values that were made part of the bias."""
    return {float(e.value) for e in walk(bias) if isinstance(e, Const) and NEGATIVE_INFINITY < e.value <= -1e9}


def takes_a_mask_back(bias: Expr) -> bool:
    """Whether a sum has numbers of both signs that absorb scores: what is left of these is not what they were."""
    sums = (e for e in walk(bias) if isinstance(e, Apply) and e.op in ("add", "sub"))
    for e in sums:
        one, other = (_signs_of_fills(a) for a in e.args)
        other = {-sign for sign in other} if e.op == "sub" else other
        if any(-sign in other for sign in one):
            return True
    return False


def _signs_of_fills(term: Expr) -> set[int]:
    """The signs of the numbers in a term that are as large as those of masks."""
    if isinstance(term, Const):
        return {1 if term.value > 0 else -1} if abs(float(term.value)) >= -WEAKEST_FILL else set()
    if not isinstance(term, Apply):
        return set()
    if term.op == "where":
        return _signs_of_fills(term.args[1]) | _signs_of_fills(term.args[2])
    if term.op in ("add", "cast"):
        return set().union(*map(_signs_of_fills, term.args))
    if term.op in ("mul", "div", "neg", "sub"):
        one, other = term.args if len(term.args) == 2 else (term.args[0], Const(-1.0))
        if term.op == "sub":
            return _signs_of_fills(one) | {-sign for sign in _signs_of_fills(other)}
        factor, of = (one, other) if isinstance(one, Const) and term.op == "mul" else (other, one)
        turned = isinstance(factor, Const) and factor.value < 0
        return {-sign if turned else sign for sign in _signs_of_fills(of)}
    return set()


_RULES: dict[str, Callable[[Apply, Axis, torch.dtype], Scores]] = {
    "add": _add,
    "sub": _add,
    "mul": _mul,
    "div": _mul,
    "neg": _neg,
    "where": _where,
    "maximum": _maximum,
}
