"""Norms of rows: calls of them, and those written out as a factor of every element."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Literal

import torch
from torch.fx import Node

from attn_pass.graph.values import tensor_value
from attn_pass.model.expression import Apply, Const, Expr, Load
from attn_pass.reading.elements import Elements
from attn_pass.reading.prologue_calls import prologue_call
from attn_pass.reading.reader import Reader
from attn_pass.reading.rows import Rows
from attn_pass.reading.unreadable import Unreadable
from attn_pass.reading.vocabulary import Call, tensor_dims

_CALLS: dict[str, Literal["rms", "layer", "l2"]] = {"rms_norm": "rms", "layer_norm": "layer", "normalize": "l2"}


@dataclass(frozen=True)
class NormCall:
    """A call of a norm: of which kind, of what, over which of its last dimensions, with which eps."""

    kind: Literal["rms", "layer", "l2"]
    input: Node
    dim: int
    eps: float
    weight: Node | None
    bias: Node | None


def norm_call(reader: Reader, node: Node) -> NormCall | None:
    """The call of a norm that a node is the result of; None for another, or one over several dimensions."""
    if node.target is operator.getitem and len(node.args) == 2 and node.args[1] == 0 and isinstance(node.args[0], Node):
        node = node.args[0]
    call = reader.call(node) or prologue_call(node)
    kind = None if call is None else _CALLS.get(call.op)
    if call is None or kind is None or not isinstance(call["input"], Node):
        return None
    fake = tensor_value(call["input"])
    if fake is None:
        return None
    if kind == "l2":
        ordinary = call["p"] == 2 and isinstance(call["dim"], int) and isinstance(call["eps"], float)
        return NormCall(kind, call["input"], call["dim"] % fake.dim(), call["eps"], None, None) if ordinary else None
    shape = call["normalized_shape"]
    if len(shape if isinstance(shape, (list, tuple)) else [shape]) != 1:
        return None
    # That of an RMS norm is by default the machine epsilon of the dtype it is computed in, float32 for half precision.
    computed = torch.promote_types(fake.dtype, torch.float32) if fake.is_floating_point() else torch.float32
    eps = torch.finfo(computed).eps if call["eps"] is None else call["eps"]
    tensors = [call.get(name) for name in ("weight", "bias")]
    if not isinstance(eps, float) or any(t is not None and not isinstance(t, Node) for t in tensors):
        return None
    return NormCall(kind, call["input"], fake.dim() - 1, eps, *tensors)


def is_over_heads(rows: Rows, dim: int, size: object, head_dim: int) -> bool:
    """Whether a norm over a dimension is one of all heads together, and not of a head dim.

    Raises `Unreadable` where it is neither.
    """
    if rows.dims != (dim,):
        raise Unreadable("it is normalised over another dimension than the head dim")
    if size == head_dim and rows.position[dim] == 0:
        return False
    if isinstance(size, int) and size > head_dim and size % head_dim == 0:
        return True
    raise Unreadable("it is normalised over a part of the head dim")


# ---- written out ----


@dataclass(frozen=True)
class NormFactor:
    """A factor that normalises: its kind, the number of the tensor that is the mean or length of a row, and eps."""

    kind: Literal["rms", "l2"]
    reduction: Load
    eps: float
    root: bool = False


def norm_factor(factor: Expr, walk: Elements) -> NormFactor | None:
    """The norm that a factor of an element is, by its form alone; None for another."""
    inner = _under_a_root(factor)
    if inner is not None:
        load, eps = _with_eps(inner, ("add", "maximum"))
        if load is None:
            return None
        op = walk.reductions[load.source][1].op if load.source in walk.reductions else ""
        known = {"mean": "rms", "sum": "l2"}.get(op)
        if known is None or (isinstance(inner, Apply) and inner.op == "maximum" and eps):
            return None
        return NormFactor("rms" if known == "rms" else "l2", load, eps, root=True)
    if isinstance(factor, Apply) and factor.op == "reciprocal":
        load, eps = _with_eps(factor.args[0], ("maximum",))
        if load is None or load.source not in walk.reductions:
            return None
        return NormFactor("l2", load, eps) if walk.reductions[load.source][1].op in ("norm", "vector_norm") else None
    return None


def _under_a_root(factor: Expr) -> Expr | None:
    """``x`` of ``rsqrt(x)``, ``1 / sqrt(x)`` and ``x ** -0.5``."""
    if not isinstance(factor, Apply):
        return None
    if factor.op == "rsqrt":
        return factor.args[0]
    if factor.op == "pow" and factor.args[1] == Const(-0.5):
        return factor.args[0]
    if factor.op == "reciprocal" and isinstance(factor.args[0], Apply):
        inner = factor.args[0]
        if inner.op == "sqrt" or (inner.op == "pow" and inner.args[1] == Const(0.5)):
            return inner.args[0]
    return None


def _with_eps(expression: Expr, ops: tuple[str, ...]) -> tuple[Load | None, float]:
    """A load, and the number that is added to it, or that it is at least."""
    if isinstance(expression, Load):
        return expression, 0.0
    if isinstance(expression, Apply) and expression.op in ops:
        for one, other in (expression.args, expression.args[::-1]):
            if isinstance(one, Load) and isinstance(other, Const):
                return one, float(other.value)
    return None, 0.0


def normalised(walk: Elements, reduction: int) -> tuple[frozenset[Node], tuple[int, ...]]:
    """What a mean of squares or a length is taken of, also without its casts, and over which dimensions.

    Raises `Unreadable` where it is another mean.
    """
    node, call = walk.reductions[reduction]
    fake = tensor_value(call["input"])
    dims = None if fake is None or call["dim"] is None else tensor_dims(call, "dim", fake.dim())
    base = call["input"]
    if call.op in ("mean", "sum"):
        base = _squared(walk.reader, base)
    elif call.get("ord", call.get("p")) not in (2, 2.0, None):
        base = None
    if not isinstance(base, Node) or dims is None or walk.reader.effects.mutations(base):
        raise Unreadable("a factor that depends on the data is no norm", node)
    return frozenset((base, _without_casts(walk.reader, base))), dims


def _squared(reader: Reader, value: object) -> object:
    """``x`` of ``x ** 2`` and ``x * x``."""
    call: Call | None = None
    if isinstance(value, Node):
        value = _without_casts(reader, value)
        call = None if reader.effects.mutations(value) else reader.call(value) or prologue_call(value)
    if call is None or call.in_place:
        return None
    if call.op == "square" or (call.op == "pow" and call["exponent"] in (2, 2.0)):
        return call["input"]
    return call["input"] if call.op == "mul" and call["input"] is call["other"] else None


def _without_casts(reader: Reader, node: Node) -> Node:
    while (call := reader.call(node)) is not None and call.op in ("cast", "copy") and not call.in_place:
        if reader.effects.mutations(node):
            return node
        fake = tensor_value(call["input"])
        if not isinstance(call["input"], Node) or fake is None or not fake.is_floating_point():
            return node
        node = call["input"]
    return node
