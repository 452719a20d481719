"""Pointwise operations as expressions: which a reading may pass, and what each computes of its operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

from attn_pass.graph.values import tensor_value
from attn_pass.model.expression import OPERATIONS, Const, Expr, apply, loads
from attn_pass.reading.dtype_range import leaves_the_type, wraps_in_comparison
from attn_pass.reading.unreadable import Unreadable
from attn_pass.reading.views import Position
from attn_pass.reading.vocabulary import Call

# Pointwise operations a spine may pass; the operands by name.
POINTWISE: Mapping[str, tuple[str, ...]] = {
    "add": ("input", "other"),
    "sub": ("input", "other"),
    "rsub": ("input", "other"),
    "mul": ("input", "other"),
    "div": ("input", "other"),
    "floordiv": ("input", "other"),
    "remainder": ("input", "other"),
    "neg": ("input",),
    "tanh": ("input",),
    "sigmoid": ("input",),
    "abs": ("input",),
    "exp": ("input",),
    "log": ("input",),
    "maximum": ("input", "other"),
    "minimum": ("input", "other"),
    "max": ("input", "other"),
    "clamp": ("input",),
    "where": ("condition", "input", "other"),
    "method_where": ("condition", "input", "other"),
    "masked_fill": ("input", "mask"),
    "eq": ("input", "other"),
    "ne": ("input", "other"),
    "lt": ("input", "other"),
    "le": ("input", "other"),
    "gt": ("input", "other"),
    "ge": ("input", "other"),
    "and": ("input", "other"),
    "or": ("input", "other"),
    "not": ("input",),
}
ReadOperand = Callable[[Any, Position], Expr]


def pointwise(node: Node, call: Call, position: Position, read: ReadOperand) -> Expr:
    """A pointwise call as an expression; ``read(value, position)`` gives its operands."""
    result, value = _expression(node, call, position, read), tensor_value(node)
    dtype = None if value is None else value.dtype
    if leaves_the_type(call.op, result, dtype) or wraps_in_comparison(call):
        raise Unreadable("numbers that may leave the range or the digits of their type", node)
    return result


def _expression(node: Node, call: Call, position: Position, read: ReadOperand) -> Expr:
    a = call.args
    op = call.op
    if op in ("add", "sub", "rsub"):
        left, right = read(a["input"], position), read(a["other"], position)
        alpha = a.get("alpha", 1)
        if op == "rsub":
            left, right = right, left
        if alpha != 1:
            if not isinstance(alpha, (int, float)):
                raise Unreadable("a symbolic alpha", node)
            if op == "rsub":
                left, right = left, apply("mul", right, Const(alpha))
            else:
                right = apply("mul", right, Const(alpha))
        return apply("sub" if op == "rsub" else op, left, right)
    if op == "div" and a.get("rounding_mode") == "floor":
        return apply("floordiv", read(a["input"], position), read(a["other"], position))
    if op == "div" and a.get("rounding_mode") is not None:
        raise Unreadable("a rounding division", node)
    if op in ("where", "method_where"):
        condition, *values = (read(a[name], position) for name in ("condition", "input", "other"))
        return apply("where", condition, *(rounded(value, node) for value in values))
    if op == "masked_fill":
        condition, fill, inner = (read(a[name], position) for name in ("mask", "value", "input"))
        return apply("where", condition, rounded(fill, node), inner)
    if op == "max":
        if not isinstance(a["other"], Node) or tensor_value(node) is None:
            raise Unreadable("a maximum along a dimension", node)
        return apply("maximum", *(rounded(read(a[name], position), node) for name in ("input", "other")))
    if op == "clamp":
        out = read(a["input"], position)
        for bound, name in ((a.get("min"), "maximum"), (a.get("max"), "minimum")):
            if bound is not None:
                out = apply(name, out, rounded(read(bound, position), node))
        return out
    if op == "cast":
        before, after = tensor_value(a["input"]), tensor_value(node)
        if before is None or after is None:
            raise Unreadable("a cast of something without a value", node)
        inner = read(a["input"], position)
        if before.device != after.device and loads(inner):
            raise Unreadable("a tensor that moves between devices", node)
        return inner if before.dtype == after.dtype else apply("cast", inner, dtype=after.dtype)
    if op in ("and", "or", "not"):
        value = tensor_value(node)
        if value is None or value.dtype != torch.bool:
            raise Unreadable("bitwise logic of integers", node)
    if op not in OPERATIONS:
        raise Unreadable(f"{op} is not pointwise", node)
    return apply(op, *(read(a[name], position) for name in POINTWISE[op]))


def rounded(value: Expr, node: Node) -> Expr:
    """A constant as it lies in a node's tensor: -1e30 is -1.00026e30 in bfloat16, however it was written there."""
    held = tensor_value(node)
    if not isinstance(value, Const) or held is None or not held.is_floating_point():
        return value
    return apply("cast", value, dtype=held.dtype)
