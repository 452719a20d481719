"""The spellings of softmax, one row each: the operation that computes the result, and the function that reads it.

Where a maximum is taken off first, the sum of exponentials is at least 1. Without one, eager overflows from scores of
about 88 (float32) on, or divides zero by zero; what is read is the softmax that it computes where it does neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from attn_pass.graph.values import tensor_value
from attn_pass.patterns.row_sums import (
    BASES,
    Denominator,
    Exponential,
    read_denominator,
    read_exponential,
    read_logsumexp,
    row_axes,
    row_maximum,
    shifted_maximum,
)
from attn_pass.reading.reader import Reader
from attn_pass.reading.unreadable import Unreadable
from attn_pass.reading.views import broadcast_position
from attn_pass.reading.vocabulary import Call, tensor_dims


@dataclass(frozen=True)
class Softmax:
    """A softmax, however it is spelled: its input, its dimension, the nodes it is made of.

    It is ``exp(scale * input) / (sum exp(scale * input) + exp(sink))``; a sink that is a node has an element a row.
    ``by_logarithm``: the sum is taken off as its logarithm, which is lost next to a number that fills a whole row.
    ``masked``: the exponentials that are summed, and what they were before a mask set some of them to zero. With
    ``masked_before`` that is a softmax only where the scores are filled under the same mask: else the maximum that was
    taken off may be a masked one, and what is added to the sum, or bounds it, counts beside the others.
    """

    input: Node
    dim: int
    nodes: tuple[Node, ...]
    empty_row_is_nan: bool = True
    scale: float = 1.0
    sink: float | Node | None = None
    by_logarithm: bool = False
    masked: tuple[Node, Node] | None = None
    masked_before: bool = False


@dataclass(frozen=True)
class SoftmaxForm:
    """One way to spell a softmax of ``x``, with ``e`` for ``exp(x)`` or ``exp(x - max(x))``."""

    spelling: str
    op: str  # what computes its result
    read: Callable[[Reader, Node, Call], Softmax | None]


def read_softmax(reader: Reader, node: Node) -> Softmax | None:
    """The softmax a node computes; None when it is none."""
    call = reader.result_call(node)
    forms = () if call is None else _BY_OPERATION.get(call.op, ())
    if call is None or not forms or call.in_place:
        return None
    value = tensor_value(node)
    if value is None or value.dim() == 0:
        return None
    read = (form.read(reader, node, call) for form in forms)
    return next((softmax for softmax in read if softmax is not None), None)


def is_softmax(reader: Reader, node: Node) -> bool:
    """Whether a node computes a softmax. It is asked of every node of a graph, so what cannot be read is none."""
    try:
        return read_softmax(reader, node) is not None
    except Unreadable:
        return False


def _plain(reader: Reader, node: Node, call: Call) -> Softmax | None:
    value = tensor_value(node)
    assert value is not None
    dims = tensor_dims(call, "dim", value.dim()) if call.get("dim") is not None else (_implicit_dim(value.dim()),)
    if dims is None or len(dims) != 1 or not isinstance(call["input"], Node):
        return None
    safe = node.target is torch.ops.aten._safe_softmax.default
    return Softmax(call["input"], dims[0], (node,), not safe, -1.0 if call.op == "softmin" else 1.0)


def _implicit_dim(rank: int) -> int:
    """The dimension of ``F.softmax(x)`` without one, deprecated since torch 0.3 (``_get_softmax_dim``)."""
    return 0 if rank in (0, 1, 3) else 1


def _exp_of_log_softmax(reader: Reader, node: Node, call: Call) -> Softmax | None:
    inner = call["input"]
    logarithm = reader.call(inner) if isinstance(inner, Node) else None
    if logarithm is None or logarithm.in_place or logarithm.op != "log_softmax":
        return None
    form = _plain(reader, inner, logarithm)
    return None if form is None else replace(form, nodes=(node, inner))


def _exp_less_logsumexp(reader: Reader, node: Node, call: Call) -> Softmax | None:
    inner = call["input"]
    difference = reader.call(inner) if isinstance(inner, Node) else None
    if difference is None or difference.in_place or difference.op != "sub" or difference["alpha"] != 1:
        return None
    scores, total = difference["input"], difference["other"]
    if not isinstance(scores, Node) or not isinstance(total, Node):
        return None
    if tensor_value(scores) is None or tensor_value(total) is None:
        return None
    if reader.shape(scores) != reader.shape(node):
        return None
    at = row_axes(reader, scores)
    found_sum = read_logsumexp(reader, total, broadcast_position(at, reader.shape(total)), at, scores)
    if found_sum is None:
        return None
    dim, nodes = found_sum
    return Softmax(scores, dim, (node, inner, *nodes), by_logarithm=True)


def _quotient(reader: Reader, node: Node, call: Call) -> Softmax | None:
    top, bottom = call["input"], call["other"]
    if not isinstance(top, Node) or not isinstance(bottom, Node) or call.get("rounding_mode") is not None:
        return None
    return _divided(reader, node, top, bottom)


def _times_inverse(reader: Reader, node: Node, call: Call) -> Softmax | None:
    for top, factor in ((call["input"], call["other"]), (call["other"], call["input"])):
        if not isinstance(top, Node) or not isinstance(factor, Node) or tensor_value(factor) is None:
            continue
        form = _divided(reader, node, top, factor, inverse=True)
        if form is not None:
            return form
    return None


def _normalised(reader: Reader, node: Node, call: Call) -> Softmax | None:
    """``F.normalize(exp(x - max(x)), p=1)``: without the maximum a sum may be below what it divides by at least."""
    value, top = tensor_value(node), call["input"]
    if value is None or not isinstance(top, Node) or call["p"] != 1 or call["out"] is not None:
        return None
    dims = tensor_dims(call, "dim", value.dim())
    exp = read_exponential(reader, top)
    if exp is None or dims is None or len(dims) != 1 or not isinstance(call["eps"], float):
        return None
    return combined(reader, node, exp, Denominator(dims[0], (), at_least=call["eps"]))


def _divided(reader: Reader, node: Node, top: Node, bottom: Node, *, inverse: bool = False) -> Softmax | None:
    exp = read_exponential(reader, top)
    if exp is None or tensor_value(bottom) is None or len(reader.shape(bottom)) > len(reader.shape(top)):
        return None
    at = row_axes(reader, top)
    position = broadcast_position(at, reader.shape(bottom))
    total = read_denominator(reader, bottom, position, at, top, inverse=inverse)
    return None if total is None else combined(reader, node, exp, total)


def combined(reader: Reader, node: Node, exp: Exponential, total: Denominator) -> Softmax | None:
    """The softmax of these exponentials over this sum; None where the sum has something of its own beside them."""
    if exp.unmasked is not None and read_softmax(reader, exp.unmasked) is not None:
        return None  # weights that are masked and divided by their sum again
    nodes = (node, *exp.nodes, *total.nodes)
    maximum = None if exp.shift is None else row_maximum(reader, exp.shift, exp.input, total.dim)
    masked = None if exp.unmasked is None else (exp.node, exp.unmasked)
    # Beside a maximum that may be masked nothing is known of the sum, so that a number counts.
    counts = maximum is not None and (total.at_least > 0 or isinstance(total.added, float))
    masked_before = masked is not None and counts
    form = Softmax(exp.inner, total.dim, nodes, scale=exp.scale, masked=masked, masked_before=masked_before)
    if maximum is not None:
        form = replace(form, input=exp.input, nodes=(*nodes, *maximum))
    if total.at_least > (1.0 if maximum is not None else 0.0):
        return None
    if total.added is None:
        return form
    if isinstance(total.added, float):
        if exp.shift is None:
            return replace(form, sink=math.log(total.added)) if total.added > 0 else None
        # The greatest of the exponentials is 1: what half a unit in its last place holds does not change the sum.
        vanishes = maximum is not None and 0 <= total.added <= torch.finfo(total.added_dtype or torch.float64).eps / 2
        return form if vanishes else None
    return _with_sink(reader, form, exp, total)


def _with_sink(reader: Reader, form: Softmax, exp: Exponential, total: Denominator) -> Softmax | None:
    """A sum with one more exponential, from which the same maximum was taken off: ``exp(-m)``, ``exp(sink - m)``."""
    assert isinstance(total.added, Node)
    sinking = reader.call(total.added)
    if sinking is None or sinking.in_place or sinking.op not in BASES or BASES[sinking.op] != exp.scale:
        return None
    inner = sinking["input"]
    call = reader.call(inner) if isinstance(inner, Node) else None
    nodes = (*form.nodes, total.added)
    if exp.shift is None:
        return replace(form, nodes=nodes, sink=inner) if isinstance(inner, Node) else None
    maximum = shifted_maximum(reader, exp.shift, exp.input, total.dim)
    if maximum is None or call is None or call.in_place or not isinstance(inner, Node):
        return None
    form = replace(form, input=exp.input, nodes=(*nodes, inner, *maximum))
    if call.op == "neg" and call["input"] is exp.shift:
        return replace(form, sink=0.0)
    if call.op in ("sub", "rsub") and call["alpha"] == 1:
        sink, subtracted = (call["input"], call["other"]) if call.op == "sub" else (call["other"], call["input"])
        if subtracted is exp.shift:
            return replace(form, sink=sink if isinstance(sink, Node) else exp.scale * float(sink))
    return None


FORMS = (
    SoftmaxForm("softmax(x)", "softmax", _plain),
    SoftmaxForm("softmax(-x), as softmin(x)", "softmin", _plain),
    SoftmaxForm("exp(log_softmax(x))", "exp", _exp_of_log_softmax),
    SoftmaxForm("exp(x - logsumexp(x))", "exp", _exp_less_logsumexp),
    SoftmaxForm("e / sum(e)", "div", _quotient),
    SoftmaxForm("e * (1 / sum(e))", "mul", _times_inverse),
    SoftmaxForm("normalize(e, p=1)", "normalize", _normalised),
)
_BY_OPERATION = {op: tuple(form for form in FORMS if form.op == op) for op in {form.op for form in FORMS}}
