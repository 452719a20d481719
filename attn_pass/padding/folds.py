"""Results of attentions whose positions stand in front of their sequences, with both as dimensions of their own.

Models whose tensors are (L, B, E) put heads beside sequences, (L, B * H, D), or positions and sequences into one
dimension, (L * B, E), and take them apart again. In between rows are no dimension, or lie in another order than packed
ones. So they stay apart here; numbers are the same, and lie in memory as they did.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from operator import getitem
from typing import Any

import torch
from torch.fx import GraphModule, Node

from attn_pass.graph.effects import Effects
from attn_pass.graph.names import torch_name
from attn_pass.graph.regions import Regions
from attn_pass.graph.values import Sizes, tensor_value
from attn_pass.model.index import product
from attn_pass.padding.packed import CannotPackError, Emitter
from attn_pass.padding.shared import erase
from attn_pass.reading.vocabulary import Call, one_or_many, understand

aten = torch.ops.aten
_POSITIONS_FIRST = [2, 0, 1, 3]  # of (B, H, L, D)


def keep_positions_apart(gm: GraphModule, operators: Collection[Any], sizes: Sizes, regions: Regions) -> None:
    """Takes such dimensions apart behind all attentions, where the graph was traced with sizes that are symbols."""
    folds = Folds(gm, sizes, regions)
    try:
        for site in [n for n in gm.graph.nodes if n.op == "call_function" and n.target in operators]:
            folds.open(site)
    except CannotPackError:
        return


class Folds:
    """The views of the attentions of one graph."""

    def __init__(self, gm: GraphModule, sizes: Sizes, regions: Regions) -> None:
        self.gm, self.sizes, self.regions, self.effects = gm, sizes, regions, Effects(gm.graph)

    def open(self, site: Node) -> None:
        """Those of one attention."""
        for result in self._results(site):
            for user in list(result.users):
                for copied in self._positions_first(user):
                    self._without_heads(result, copied)
                if _order_of(self._call(user)) == _POSITIONS_FIRST:
                    for merged in list(user.users):
                        self._without_merged_rows(user, merged)

    def _results(self, site: Node) -> list[Node]:
        if tensor_value(site) is not None:
            return [site]
        return [user for user in site.users if user.target is getitem and user.args[1] == 0]

    def _call(self, node: Node) -> Call | None:
        """A call of which neither operand nor result is written to."""
        call = understand(node)
        if call is None or call.in_place or self.effects.mutations(node):
            return None
        return call

    def _shape(self, node: Node) -> tuple[Any, ...]:
        value = tensor_value(node)
        return () if value is None else self.sizes.shape(value)

    # ------------------------------------------------------------ heads beside sequences

    def _positions_first(self, merged: Node) -> Iterator[Node]:
        """Copies of (B * H, L, D), which is a view of a result, as (L, B * H, D)."""
        call = self._call(merged)
        if call is None or call.op != "reshape" or len(self._shape(merged)) != 3:
            return
        for turned in list(merged.users):
            if _order_of(self._call(turned)) == [1, 0, 2]:
                yield from (n for n in list(turned.users) if self._copies(n))

    def _is_view(self, node: Node) -> bool:
        call = self._call(node)
        return call is not None and call.op == "reshape" and _is_of_sizes(node, call["input"])

    def _copies(self, node: Node) -> bool:
        call = self._call(node)
        return call is not None and call.op == "copy" and torch_name(node) in ("contiguous", "clone")

    def _without_heads(self, result: Node, copied: Node) -> None:
        """What is a view of such a copy, in sizes, is one of (L, B, H, D)."""
        batch, heads, length, dim = self._shape(result)
        views = [n for n in list(copied.users) if torch_name(n) in ("view", "reshape") and self._call(n) is not None]
        views = [n for n in views if self._shape(n)[:2] == (length, batch) and _is_of_sizes(n, copied)]
        if self._shape(copied) != (length, product((batch, heads)), dim) or not views:
            return
        emit = self._standing(copied)
        with emit.running():
            apart = emit.call(aten.permute.default, result, _POSITIONS_FIRST)
            apart = emit.call(aten.clone.default, apart, memory_format=torch.contiguous_format)
        for view in views:
            view.replace_input_with(copied, apart)
        erase(self.gm.graph, copied)

    # ------------------------------------------------------------ positions beside sequences

    def _without_merged_rows(self, rows: Node, merged: Node) -> None:
        """Linear layers of (L * B, E), which is a view of (L, B, ..), and whose results are (L, B, ..) again."""
        call, (length, batch, *rest) = self._call(merged), self._shape(rows)
        if call is None or call.op != "reshape" or self._shape(merged) != (product((length, batch)), product(rest)):
            return
        for linear in list(merged.users):
            inner, apart = self._call(linear), list(linear.users)
            shape = (length, batch, *self._shape(linear)[1:])
            if inner is None or inner.op != "linear" or inner["input"] is not merged or not apart:
                continue
            if not all(self._is_view(n) and self._shape(n) == shape for n in apart):
                continue
            emit = self._standing(linear)
            with emit.running():
                source = emit.call(aten.flatten.using_ints, rows, 2, -1)
                source = emit.call(aten.clone.default, source, memory_format=torch.contiguous_format)
                whole = emit.call(aten.linear.default, source, inner["other"], inner["bias"])
            for view in apart:
                view.replace_all_uses_with(whole)
                erase(self.gm.graph, view)

    def _standing(self, node: Node) -> Emitter:
        return Emitter(self.gm, self.sizes, node, node, self.regions)


def _is_of_sizes(view: Node, source: Node) -> bool:
    """Whether a view is one of sizes, and of a tensor that it names first: of another type it has other numbers."""
    return view.args[0] is source and not any(isinstance(a, torch.dtype) for a in (*view.args, *view.kwargs.values()))


def _order_of(call: Call | None) -> list[int] | None:
    """Where the dimensions of a permutation come from."""
    if call is None:
        return None
    value = tensor_value(call.get("input"))
    if value is None or call.op not in ("permute", "transpose"):
        return None
    order = list(range(value.dim()))
    given = one_or_many(call["dims"]) if call.op == "permute" else (call["dim0"], call["dim1"])
    if not all(type(d) is int for d in given):
        return None
    if call.op == "permute":
        return [d % len(order) for d in given]
    a, b = (d % len(order) for d in given)
    order[a], order[b] = order[b], order[a]
    return order
