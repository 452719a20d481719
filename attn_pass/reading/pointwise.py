"""Pointwise operations as expressions: which of them a walk may pass, and what each computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from attn_pass.graph.values import fake_value, tensor_value
from attn_pass.model.expression import Const, Expr, apply, as_index, contains_dot, loads
from attn_pass.model.index import is_nonnegative
from attn_pass.model.operations import COMPARISONS, OPERATIONS
from attn_pass.model.piecewise import pieces
from attn_pass.reading.dtype_range import WRAPPING, leaves_the_type, wraps_in_comparison
from attn_pass.reading.unreadable import Unreadable
from attn_pass.reading.views import Position
from attn_pass.reading.vocabulary import Call, understand

# The operands of every operation that a walk may pass, by name: those of expressions, and spellings of them.
POINTWISE: Mapping[str, tuple[str, ...]] = {name: row.operands for name, row in OPERATIONS.items()} | {
    "rsub": ("input", "other"),
    "max": ("input", "other"),
    "min": ("input", "other"),
    "clamp": ("input",),
    "method_where": ("condition", "input", "other"),
    "masked_fill": ("input", "mask"),
}
EXTREMA = {"max": "maximum", "min": "minimum"}
"""Of two tensors what they are; of one they are reductions."""
ReadOperand = Callable[[Any, Position], Expr]


def pointwise(node: Node, call: Call, position: Position, read: ReadOperand) -> Expr:
    """A pointwise call as an expression; ``read(value, position)`` gives its operands."""
    result, value = _expression(node, call, position, read), tensor_value(node)
    dtype = None if value is None else value.dtype
    if leaves_the_type(call.op, result, dtype) or wraps_in_comparison(call):
        raise Unreadable("numbers that may exceed the range or the precision of their dtype", node)
    return result


def _expression(node: Node, call: Call, position: Position, read: ReadOperand) -> Expr:
    def at(name: str) -> Expr:
        return read(call[name], position)

    special = _SPECIAL.get(call.op)
    if special is not None:
        return special(node, call, at)
    if call.op not in OPERATIONS:
        raise Unreadable(f"{call.op} is not pointwise", node)
    return apply(call.op, *map(at, POINTWISE[call.op]))


_At = Callable[[str], Expr]  # the operand of that name, at the element's position


def _comparison(node: Node, call: Call, at: _At) -> Expr:
    """Of two operands in the type they are compared in: in bfloat16 -3.4e38 is -inf, and below no number."""
    dtype, value = _compared_in(call), tensor_value(node)
    operands = [at(name) for name in POINTWISE[call.op]]
    if dtype is not None and any(_overflows(e, dtype) for e in operands if not isinstance(e, Const)):
        raise Unreadable("numbers that may exceed the range of their dtype", node)
    result = apply(call.op, *(_held(e, dtype) for e in operands))
    if value is not None and value.dtype != torch.bool:  # in place, or by out=
        return apply("cast", result, dtype=value.dtype)
    return result


def _compared_in(call: Call) -> torch.dtype | None:
    """The floating type a comparison is done in; None where it is of integers."""
    values = [fake_value(call[name]) if isinstance(call[name], Node) else call[name] for name in POINTWISE[call.op]]
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    if not tensors:
        return None
    is_float = any(isinstance(v, (float, torch.SymFloat)) for v in values)
    dtype = torch.result_type(tensors[0], 1.0 if is_float else tensors[-1])
    return dtype if dtype.is_floating_point else None


def _overflows(value: Expr, dtype: torch.dtype) -> bool:
    """Whether a number that is computed would be infinite in its type: twice the lowest one, say."""
    numbers = [float(v.value) for _, v in pieces(value) or ()]
    return any(torch.finfo(dtype).max < abs(n) < float("inf") for n in numbers)


def _held(value: Expr, dtype: torch.dtype | None) -> Expr:
    """A number as a type holds it; the number itself where that is the same."""
    if not isinstance(value, Const) or dtype is None:
        return value
    held = apply("cast", value, dtype=dtype)
    return value if isinstance(held, Const) and held.value == value.value else held


def _sum(node: Node, call: Call, at: _At) -> Expr:
    """``input + alpha * other``, ``input - alpha * other``, and ``other - alpha * input`` of rsub."""
    first, second = ("other", "input") if call.op == "rsub" else ("input", "other")
    left, right, alpha = at(first), at(second), call.get("alpha", 1)
    value, operand = tensor_value(node), tensor_value(call[second])
    if value is not None and operand is not None and operand.dtype in WRAPPING:
        right = apply("cast", right, dtype=value.dtype)  # before its sign changes
    if alpha != 1:
        if not isinstance(alpha, (int, float)):
            raise Unreadable("a symbolic alpha", node)
        right = apply("mul", right, Const(alpha))
    return apply("add" if call.op == "add" else "sub", left, right)


def _product(node: Node, call: Call, at: _At) -> Expr:
    """``input * other``; of a triangle of ones and whole numbers (``tril * padding``) these where there are ones.

    Where the ones are is known by position: BLOOM's places, which padding is multiplied with, stay a product.
    """
    named = tuple((name, at(name)) for name in ("input", "other"))
    value = tensor_value(node)
    for (_, mask), (name, factor) in (named, named[::-1]):
        operand = tensor_value(call[name])
        if value is None or operand is None or not loads(factor) or not _is_whole(call[name], value.dtype):
            continue
        values = None if loads(mask) or pieces(factor) is not None else pieces(mask)
        if values is None or sorted(float(v.value) for _, v in values) != [0.0, 1.0]:
            continue
        ones = next(condition for condition, v in values if v.value == 1)
        factor = factor if operand.dtype == value.dtype else apply("cast", factor, dtype=value.dtype)
        return apply("where", ones, factor, apply("cast", Const(0), dtype=value.dtype))
    return apply("mul", *(operand for _, operand in named))


def _is_whole(value: Any, dtype: torch.dtype) -> bool:
    """Whether a tensor holds integers, or is cast from one, none of which is infinite there nor in ``dtype``."""
    fake = tensor_value(value)
    if fake is None or fake.dtype == torch.bool or fake.is_complex():
        return False
    if any(t.is_floating_point and torch.finfo(t).max < 2.0**64 for t in (fake.dtype, dtype)):
        return False
    if not fake.is_floating_point():
        return True
    call = understand(value)
    return call is not None and call.op == "cast" and _is_whole(call["input"], dtype)


def _quotient(node: Node, call: Call, at: _At) -> Expr:
    rounding, both = call.get("rounding_mode"), (at("input"), at("other"))
    places = [as_index(value) for value in both]
    if rounding == "trunc" and all(place is not None and is_nonnegative(place) for place in places):
        rounding = "floor"
    if rounding not in (None, "floor"):
        raise Unreadable("a rounding division", node)
    return apply("div" if rounding is None else "floordiv", *both)


def _where(node: Node, call: Call, at: _At) -> Expr:
    condition, *values = map(at, ("condition", "input", "other"))
    return apply("where", condition, *(rounded(value, node) for value in values))


def _masked_fill(node: Node, call: Call, at: _At) -> Expr:
    condition, fill, inner = map(at, ("mask", "value", "input"))
    return apply("where", condition, rounded(fill, node), inner)


def _extremum(node: Node, call: Call, at: _At) -> Expr:
    op = EXTREMA[call.op]
    if not isinstance(call["other"], Node) or tensor_value(node) is None:
        raise Unreadable(f"a {op} along a dimension", node)
    return _larger_or_smaller(node, replace(call, op=op), at)


def _larger_or_smaller(node: Node, call: Call, at: _At) -> Expr:
    """Of two tensors, which share the gradient where they are equal: scores stand second."""
    one, other = (rounded(at(name), node) for name in ("input", "other"))
    swaps = contains_dot(one) and not contains_dot(other)
    return apply(call.op, other, one) if swaps else apply(call.op, one, other)


def _clamp(node: Node, call: Call, at: _At) -> Expr:
    """Of an element and a bound, which stands second: where they are equal the element has the gradient."""
    out = at("input")
    for name, op in (("min", "maximum"), ("max", "minimum")):
        if call.get(name) is not None:
            out = apply(op, out, rounded(at(name), node))
    return out


def _cast(node: Node, call: Call, at: _At) -> Expr:
    before, after = tensor_value(call["input"]), tensor_value(node)
    if before is None or after is None:
        raise Unreadable("a cast of something without a value", node)
    inner = at("input")
    if before.device != after.device and loads(inner):
        raise Unreadable("a tensor that moves between devices", node)
    return inner if before.dtype == after.dtype else apply("cast", inner, dtype=after.dtype)


def _logic(node: Node, call: Call, at: _At) -> Expr:
    value = tensor_value(node)
    if value is None or value.dtype != torch.bool:
        raise Unreadable("bitwise logic of integers", node)
    return apply(call.op, *map(at, POINTWISE[call.op]))


# What is more than the operation of that name on its operands.
_SPECIAL: Mapping[str, Callable[[Node, Call, _At], Expr]] = {
    "add": _sum,
    "sub": _sum,
    "rsub": _sum,
    "mul": _product,
    "div": _quotient,
    **dict.fromkeys(COMPARISONS, _comparison),
    "where": _where,
    "method_where": _where,
    "masked_fill": _masked_fill,
    **dict.fromkeys(EXTREMA, _extremum),
    "maximum": _larger_or_smaller,
    "minimum": _larger_or_smaller,
    "clamp": _clamp,
    "cast": _cast,
    "and": _logic,
    "or": _logic,
    "not": _logic,
}


def rounded(value: Expr, node: Node) -> Expr:
    """A constant as it lies in a node's tensor: -1e30 is -1.00026e30 in bfloat16, however it was written there."""
    fake = tensor_value(node)
    if not isinstance(value, Const) or fake is None or not fake.is_floating_point():
        return value
    return apply("cast", value, dtype=fake.dtype)
