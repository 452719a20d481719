"""Expressions with a few constant values, each under a condition: sums and products of masks become conditions."""

from __future__ import annotations

from collections.abc import Callable

import torch

from attn_pass.model.conditions import conjuncts, margin_of
from attn_pass.model.expression import (
    FALSE,
    TRUE,
    Apply,
    Const,
    Expr,
    Scalar,
    apply,
    contains_dot,
    is_boolean,
    loads,
    transform,
    walk,
)
from attn_pass.model.index import is_nonnegative
from attn_pass.model.operations import COMPARISONS

Pieces = list[tuple[Expr, Const]]  # conditions that exclude each other and of which one holds, each with a value
_MOST = 8
_BINARY = ("add", "sub", "mul", "maximum", "minimum", *COMPARISONS)


def pieces(expression: Expr) -> Pieces | None:
    """The values of an expression and where it takes them; None if there are too many, or if one is not a constant."""
    if isinstance(expression, Const):
        return [(TRUE, expression)]
    if not isinstance(expression, Apply):
        return None
    result: Pieces | None = None
    if expression.op == "where":
        result = _chosen(expression)
    elif expression.op == "cast":
        result = _cast(expression)
    elif expression.op in _BINARY:
        result = _combined(expression)
    elif expression.op == "neg":
        inner = pieces(expression.args[0])
        result = None if inner is None else [(c, Const(-v.value)) for c, v in inner]
    if result is None and is_boolean(expression):
        result = [(expression, TRUE), (apply("not", expression), FALSE)]
    return None if result is None else _merged(result)


def where_it_is_one(expression: Expr) -> Expr | None:
    """Where a factor is 1, of one that is 0 elsewhere: a truth value, a cast of one, and ``1 - mask``; else None."""
    values = {float(value.value): condition for condition, value in pieces(expression) or ()}
    return values[1.0] if set(values) == {0.0, 1.0} else None


def _chosen(expression: Apply) -> Pieces | None:
    condition, yes, no = expression.args
    condition = as_condition(condition if is_boolean(condition) else apply("cast", condition, dtype=torch.bool))
    result: Pieces = []
    for when, branch in ((condition, yes), (apply("not", condition), no)):
        inner = pieces(branch)
        if inner is None:
            return None
        result += [(_both(when, c), v) for c, v in inner]
    return [(c, v) for c, v in result if c != FALSE]


def _cast(expression: Apply) -> Pieces | None:
    inner = pieces(expression.args[0])
    if inner is None:
        return None
    result: Pieces = []
    for condition, value in inner:
        cast = apply("cast", value, dtype=expression.dtype)
        if not isinstance(cast, Const):
            return None
        result.append((condition, cast))
    return result


def _combined(expression: Apply) -> Pieces | None:
    left, right = (pieces(a) for a in expression.args)
    if left is None or right is None or len(left) * len(right) > _MOST:
        return None
    result: Pieces = []
    for a, x in left:
        for b, y in right:
            condition = _both(a, b)
            if condition == FALSE:
                continue
            value = _computed(expression.op, x, y)
            if value is None:
                return None
            result.append((condition, value))
    return result


def _computed(op: str, x: Const, y: Const) -> Const | None:
    if op in ("maximum", "minimum"):
        if is_boolean(x) or is_boolean(y) or x.value != x.value or y.value != y.value:
            return None
        pair: tuple[Scalar, Scalar] = (x.value, y.value)
        return Const(max(pair) if op == "maximum" else min(pair))
    if is_boolean(x) != is_boolean(y) and op in ("add", "sub", "mul"):  # a truth value beside a number is 0 or 1
        x, y = (Const(type(b.value)(a.value)) if is_boolean(a) else a for a, b in ((x, y), (y, x)))
    value = apply(op, x, y)
    return value if isinstance(value, Const) else None


def _both(given: Expr, condition: Expr) -> Expr:
    """Two conditions, each without what the other decides: of positions alone, which nothing changes between."""
    condition = where_it_holds(given, condition)
    return apply("and", where_it_holds(condition, given), condition)


def _is_of_positions(fact: Expr) -> bool:
    return not loads(fact)


def where_it_holds(given: Expr, expression: Expr, is_lasting: Callable[[Expr], bool] = _is_of_positions) -> Expr:
    """What is left of an expression where a condition holds.

    ``is_lasting`` says whether a part of the condition has one value at all times: what is loaded may be written to.
    """
    facts = [fact for fact in (given, *conjuncts(given)) if is_lasting(fact) and not contains_dot(fact)]
    return transform(expression, lambda part: _decided(part, facts))


def _decided(part: Expr, facts: list[Expr]) -> Const | None:
    """Whether a part of a condition holds where the facts do; None where they do not say."""
    if not is_boolean(part) or isinstance(part, Const):
        return None
    opposite = apply("not", part)
    for fact in facts:
        if part == fact or _follows(part, fact):
            return TRUE
        if opposite == fact or _follows(opposite, fact):
            return FALSE
    return None


def _follows(part: Expr, fact: Expr) -> bool:
    """Whether a bound on indices is no tighter than another one, which holds."""
    wide, tight = margin_of(part), margin_of(fact)
    return wide is not None and tight is not None and is_nonnegative(wide - tight)


def _merged(pieces: Pieces) -> Pieces | None:
    """Equal values as one piece; of two, the one that takes more words is wherever the other is not."""
    out: dict[Const, Expr] = {}
    for condition, value in pieces:
        out[value] = apply("or", out[value], condition) if value in out else condition
    if len(out) == 2:
        short, long = sorted(out, key=lambda value: sum(1 for _ in walk(out[value])))
        out[long] = apply("not", out[short])
    return [(c, v) for v, c in out.items() if c != FALSE] if len(out) <= _MOST else None


def as_condition(expression: Expr) -> Expr:
    """A truth value with comparisons of piecewise constant numbers resolved: ``a * b == 0`` is ``not a or not b``."""
    return transform(expression, _resolved)


def _resolved(part: Expr) -> Expr | None:
    """What a part of a condition is resolved to, itself if it is not; None for a connective, whose parts are."""
    if not isinstance(part, Apply):
        return part
    if part.op in ("and", "or", "not"):
        return None
    rule = {"cast": _cast, "where": _chosen}.get(part.op, _combined if part.op in COMPARISONS else None)
    values = rule(part) if rule is not None and is_boolean(part) else None
    if values is None:
        return _in_branches(part)
    holds: Expr = FALSE
    for condition, value in values:
        if value.value:
            holds = apply("or", holds, condition)
    return holds


def _in_branches(part: Apply) -> Expr:
    """A comparison of what a condition chooses, in both branches: ``where(c, x, 0) == 0`` is ``not c or x == 0``."""
    if not part.args or (part.op not in COMPARISONS and (part.op, part.dtype) != ("cast", torch.bool)):
        return part
    chosen, *others = part.args
    if not (isinstance(chosen, Apply) and chosen.op == "where" and all(isinstance(e, Const) for e in others)):
        return part
    condition, yes, no = chosen.args
    if not (isinstance(yes, Const) or isinstance(no, Const)):
        return part
    if_yes, if_no = (apply(part.op, branch, *others, dtype=part.dtype) for branch in (yes, no))
    condition = as_condition(condition if is_boolean(condition) else apply("cast", condition, dtype=torch.bool))
    return apply("where", condition, if_yes, if_no) if isinstance(if_yes, Const) or isinstance(if_no, Const) else part
