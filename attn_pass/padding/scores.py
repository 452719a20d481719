"""Rows that reach scores alone: what is added to the scores of a row, or of a key, is made of that row.

Such as DeBERTa's products of queries and keys with a table of distances. A score of a row of padding, or of a key that
is padding, is read for nothing but that row and that key. So what leads there may hold anything in their places.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch.fx import Node

from attn_pass.graph.names import torch_name
from attn_pass.model.index import Index, product
from attn_pass.padding.layouts import Layout, Rows, broadcast
from attn_pass.padding.rules import Rules
from attn_pass.reading.vocabulary import understand

_MOST = 200  # operations on the way
ADDED = {"bias": 4, "tables": 5}
"""What the kernel adds to scores, and how many dimensions it has: theirs, and in a table one more."""


class _RowDims(NamedTuple):
    """The dimensions of batch and positions; that of the batch may hold ``inner`` heads for each sequence."""

    batch: int
    length: int
    inner: Index = 1


def readers(
    user: Node, node: Node, layout: Layout, rules: Rules, rows: Rows, operators: Collection[Any]
) -> tuple[Node, ...]:
    """The attentions whose scores ``node`` reaches by ``user``; none if it may reach anything else."""
    if layout.merged:
        return ()
    sites: dict[Node, None] = {}
    waiting = [(user, node, _RowDims(*layout))]
    seen = set(waiting)
    while waiting:
        user, node, at = waiting.pop()
        if user.op == "call_function" and user.target in operators:
            if not _is_of_scores(user, node, at, rules):
                return ()
            sites[user] = None
            continue
        behind = _behind(user, node, at, rules, rows)
        if behind is None or len(seen) > _MOST:
            return ()
        further = {(u, user, behind) for u in user.users} - seen
        seen |= further
        waiting += further
    return tuple(sites)


def _is_of_scores(site: Node, node: Node, at: _RowDims, rules: Rules) -> bool:
    """Whether an attention adds a value to its scores, (B, H, L, S), and reads it for nothing else."""
    reads = [name for name, value in site.kwargs.items() if _holds(value, node)]
    lead = ADDED.get(reads[0], 0) - len(rules.shape(node)) if len(reads) == 1 else None
    in_place = lead is not None and at.inner == 1 and at.batch + lead == 0 and at.length + lead in (2, 3)
    return node not in site.args and in_place


def _holds(value: Any, node: Node) -> bool:
    return any(v is node for v in value) if isinstance(value, (list, tuple)) else value is node


def _behind(user: Node, node: Node, at: _RowDims, rules: Rules, rows: Rows) -> _RowDims | None:
    """Where the rows are behind an operation, each element of which is made of elements of one row."""
    rule = rules.of(user)
    if rule is not None:
        if node in rule.whole:
            return None
        if rule.reshapes:
            return _reshaped(at, rules.shape(node), rules.shape(user), rows)
        flows: list[Mapping[int, int]] = [dims for flow, dims in rule.flows if flow is node]
    else:
        flows = list(_flows(user, node, rules))
    places = {_moved(at, dims) for dims in flows}
    row_dims = places.pop() if len(places) == 1 else None
    return row_dims if row_dims is not None and _has_rows(rules.shape(user), row_dims, rows) else None


def _moved(at: _RowDims, dims: Mapping[int, int]) -> _RowDims | None:
    if at.batch not in dims or at.length not in dims:
        return None
    return _RowDims(dims[at.batch], dims[at.length], at.inner)


def _has_rows(shape: Sequence[Index], at: _RowDims, rows: Rows) -> bool:
    return (shape[at.batch], shape[at.length]) == (product((rows.batch, at.inner)), rows.length)


def _flows(user: Node, node: Node, rules: Rules) -> Iterator[Mapping[int, int]]:
    """For each operand of a product or a look-up that a value is: where its dimensions are in the result."""
    shape, result = rules.shape(node), rules.shape(user)
    if torch_name(user) == "gather":
        arguments = dict(zip(("input", "dim", "index"), user.args)) | user.kwargs
        dim = arguments.get("dim")
        if type(dim) is int and node in (arguments.get("input"), arguments.get("index")):
            dims = (
                range(len(shape)) if arguments.get("input") is not node else set(range(len(shape))) - {dim % len(shape)}
            )
            yield {d: d for d in dims}
        return
    call = understand(user)
    if call is None or call.in_place:
        return
    if call.op == "expand":
        yield broadcast(shape, result)
    names = {"matmul": ("input", "other"), "baddbmm": ("batch1", "batch2")}.get(call.op)
    if names is None or any(not isinstance(call[n], Node) or len(rules.shape(call[n])) < 2 for n in names):
        return
    lead = len(result) - len(shape)
    of_batch = {d: d + lead for d in range(len(shape) - 2)}
    if call.op == "baddbmm" and call["input"] is node:
        yield broadcast(shape, result)
    if call[names[0]] is node:
        yield {**of_batch, len(shape) - 2: len(result) - 2}
    if call[names[1]] is node:
        yield {**of_batch, len(shape) - 1: len(result) - 1}


def _reshaped(at: _RowDims, before: Sequence[Index], after: Sequence[Index], rows: Rows) -> _RowDims | None:
    """The same behind a change of shape, which may put heads and batch together or apart."""
    length = _at(before, at.length, after, rows.length)
    for inner in _inner(at, before):
        batch = _at(before, at.batch, after, product((rows.batch, inner)))
        if batch is not None and length is not None and batch != length:
            return _RowDims(batch, length, inner)
    return None


def _inner(at: _RowDims, before: Sequence[Index]) -> Iterator[Index]:
    """How many heads a sequence may have beside it in one dimension."""
    yield at.inner
    yield 1
    until = at.length if at.length > at.batch else len(before)
    for end in range(at.batch + 2, until + 1):
        yield product((at.inner, *before[at.batch + 1 : end]))


def _at(before: Sequence[Index], dim: int, after: Sequence[Index], size: Index) -> int | None:
    """The dimension of that size with as many elements in front of it."""
    front = product(before[:dim])
    return next((to for to, now in enumerate(after) if now == size and product(after[:to]) == front), None)
