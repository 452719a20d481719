"""Operator by operator: which operations work row by row, and which dimension of an operand is which of the result.

An operation that has a rule gives for each row what it would give for that row alone. What has none mixes rows, as a
batch norm, a sum over positions and a convolution do, or is not known: a region ends before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from attn_pass.graph.names import torch_name
from attn_pass.graph.values import Sizes, fake_value, tensor_value
from attn_pass.model.index import Index
from attn_pass.padding.layouts import broadcast
from attn_pass.reading.pointwise import POINTWISE
from attn_pass.reading.vocabulary import Call, one_or_many, understand

Shape = tuple[Index, ...]
ACTIVATED = "_addmm_activation"
"""The product of `nn.TransformerEncoderLayer`'s fast path: `addmm` and relu or gelu."""


@dataclass(frozen=True)
class RowWise:
    """A row-wise operation.

    ``flows`` are the operands whose rows the result's are made of, with the result's dimension for each of theirs;
    ``whole`` those that are read whole for every row, as weights are.
    """

    flows: tuple[tuple[Node, Mapping[int, int]], ...]
    whole: tuple[Node, ...] = ()
    reshapes: bool = False  # the dimensions follow from the shapes
    spreads: bool = False  # an operand may lack the batch or the positions: then it is the same for all of them


class Rules:
    """The rules of one graph's nodes.

    Where ``draws``, dropout works row by row: random numbers need not be those that eager draws for all rows.
    """

    def __init__(self, sizes: Sizes, draws: bool = True) -> None:
        self.sizes, self.draws = sizes, draws
        self._known: dict[Node, RowWise | None] = {}

    def of(self, node: Node) -> RowWise | None:
        """The rule of a node; None where it may mix rows."""
        if node not in self._known:
            self._known[node] = self._rule(node)
        return self._known[node]

    def shape(self, node: Node) -> Shape:
        """The shape of a node's tensor, or of the first where it is a list of them."""
        value = first_tensor(node)
        return () if value is None else self.sizes.shape(value)

    def _rule(self, node: Node) -> RowWise | None:
        if node.op not in ("call_function", "call_method") or first_tensor(node) is None:
            return None
        if torch_name(node) == "type_as":  # of the second operand only the type is read; packed, where it has rows
            same = all(self.shape(n) == self.shape(node) for n in node.all_input_nodes)
            return self.pointwise(node) if same else None
        call = understand(node)
        if call is not None and not call.in_place:
            rule = _BY_OPERATION.get(call.op)
            if rule is not None:
                return rule(self, node, call)
            if call.op in _MIXING:
                return None
            if call.op in POINTWISE:
                return self.pointwise(node)
        if node.kwargs.get("inplace") or "out" in node.kwargs:
            return None
        name = torch_name(node)
        if name in ("layer_norm", "rms_norm"):
            return self._norm(node)
        if name == ACTIVATED:
            return _product_beside(self, node, *node.args[:2]) if len(node.args) == 3 else None
        if name in _OF_PAIRS and node.args and isinstance(source := node.args[0], Node):
            return self.keeping(node, source, range(min(len(self.shape(n)) for n in (node, source))))
        if name in _REDUCTIONS:
            dims = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
            keepdim = node.kwargs.get("keepdim", node.args[2] if len(node.args) > 2 else False)
            return self.reduced(node, node.args[0] if node.args else node.kwargs.get("input"), dims, bool(keepdim))
        return self.pointwise(node) if _is_pointwise(node, name) else None

    def reduced(self, node: Node, source: Any, dims: Any, keepdim: bool) -> RowWise | None:
        """A reduction over ``dims``, which the result has still where they are kept (``keepdim``)."""
        if not isinstance(source, Node) or dims is None:
            return None
        rank, dims = len(self.shape(source)), one_or_many(dims)
        if not dims or not all(type(d) is int for d in dims):  # over none is over all, to torch
            return None
        left = [d for d in range(rank) if d not in {d % rank for d in dims}]
        return RowWise(((source, {d: d if keepdim else n for n, d in enumerate(left)}),))

    def pointwise(self, node: Node) -> RowWise | None:
        """Every element of the result is made of one of each operand, which may be broadcast."""
        if tensor_value(node) is None:
            return None
        shape = self.shape(node)
        flows = tuple((n, broadcast(self.shape(n), shape)) for n in node.all_input_nodes if tensor_value(n) is not None)
        return RowWise(flows, spreads=True)

    def _norm(self, node: Node) -> RowWise | None:
        normalized = node.kwargs.get("normalized_shape", node.args[1] if len(node.args) > 1 else None)
        source = node.args[0] if node.args else node.kwargs.get("input")
        if not isinstance(normalized, (tuple, list, torch.Size)) or not isinstance(source, Node):
            return None
        outer = len(self.shape(node)) - len(normalized)
        return self.keeping(node, source, range(outer))

    def keeping(self, node: Node, source: Any, dims: Any) -> RowWise | None:
        """One operand whose dimensions ``dims`` stay where they are; all others are read whole."""
        if not isinstance(source, Node) or _times_read(node, source) > 1:
            return None
        whole = tuple(n for n in node.all_input_nodes if n is not source and tensor_value(n) is not None)
        return RowWise(((source, {d: d for d in dims}),), whole)


def _times_read(node: Node, operand: Node) -> int:
    """How many arguments of a call an operand is: as the weights of its own product it is read whole, too."""
    read: list[Node] = []
    torch.fx.node.map_arg((node.args, node.kwargs), read.append)
    return read.count(operand)


def first_tensor(node: Node) -> torch.Tensor | None:
    """The fake tensor of a node, or the first of several."""
    value = fake_value(node)
    if isinstance(value, (tuple, list)) and value and all(isinstance(v, torch.Tensor) for v in value):
        value = value[0]
    return value if isinstance(value, torch.Tensor) else None


def _is_pointwise(node: Node, name: str) -> bool:
    """Whether torch itself says that every element of the result depends on one element of each operand."""
    target = node.target
    overloads: list[Any] = [target] if isinstance(target, torch._ops.OpOverload) else []
    packet = getattr(torch.ops.aten, name, None) if name and not overloads and not name.endswith("_") else None
    if packet is not None:
        named = [getattr(packet, o) for o in packet.overloads() if not o.endswith("out")]
        overloads = [o for o in named if any(isinstance(a.type, torch.TensorType) for a in o._schema.arguments)]
    tags = [o.tags for o in overloads]
    pointwise, random = torch.Tag.pointwise, torch.Tag.nondeterministic_seeded
    if not tags or not all(pointwise in t and random not in t for t in tags):
        return False
    return not any(o._schema.is_mutable for o in overloads)


# ---------------------------------------------------------------- by operation


def _reshape(rules: Rules, node: Node, call: Call) -> RowWise | None:
    source = call["input"]
    before, after = tensor_value(source), tensor_value(node)
    if not isinstance(source, Node) or before is None or after is None or before.dtype != after.dtype:
        return None  # `x.view(torch.int32)` is no change of shape
    return RowWise(((source, {}),), reshapes=True)


def _same(rules: Rules, node: Node, call: Call) -> RowWise | None:
    return rules.keeping(node, call["input"], range(len(rules.shape(node))))


def _dropout(rules: Rules, node: Node, call: Call) -> RowWise | None:
    off = call["training"] is False or call["p"] == 0
    return _same(rules, node, call) if off or (rules.draws and call["training"] is True) else None


def _moved(order: Callable[[Call, int], tuple[int, ...] | None]) -> Callable[[Rules, Node, Call], RowWise | None]:
    def rule(rules: Rules, node: Node, call: Call) -> RowWise | None:
        source, dims = call["input"], order(call, len(rules.shape(node)))
        if dims is None or not isinstance(source, Node):
            return None
        return RowWise(((source, {old: new for new, old in enumerate(dims)}),))

    return rule


def _permuted(call: Call, rank: int) -> tuple[int, ...] | None:
    dims = one_or_many(call["dims"])
    return tuple(d % rank for d in dims) if all(isinstance(d, int) for d in dims) else None


def _transposed(call: Call, rank: int) -> tuple[int, ...] | None:
    a, b = call["dim0"], call["dim1"]
    if not isinstance(a, int) or not isinstance(b, int):
        return None
    order = list(range(rank))
    order[a % rank], order[b % rank] = order[b % rank], order[a % rank]
    return tuple(order)


def _reversed(call: Call, rank: int) -> tuple[int, ...]:
    return tuple(reversed(range(rank)))


def _last_two(call: Call, rank: int) -> tuple[int, ...] | None:
    return (*range(rank - 2), rank - 1, rank - 2) if rank >= 2 else None


def _all_but_last(rules: Rules, node: Node, call: Call) -> RowWise | None:
    return rules.keeping(node, call["input"], range(len(rules.shape(node)) - 1))


def _matmul(rules: Rules, node: Node, call: Call) -> RowWise | None:
    left, right = call["input"], call["other"]
    if not isinstance(right, Node) or len(rules.shape(right)) != 2:
        return None
    return rules.keeping(node, left, range(len(rules.shape(node)) - 1))


def _added_product(rules: Rules, node: Node, call: Call) -> RowWise | None:
    return _product_beside(rules, node, call["input"], call["batch1"])


def _product_beside(rules: Rules, node: Node, added: Any, rows: Any) -> RowWise | None:
    """A product of two dimensions, and a vector that is added to each row."""
    if len(rules.shape(node)) != 2 or not isinstance(added, Node) or len(rules.shape(added)) != 1:
        return None
    return rules.keeping(node, rows, (0,))


def _over(name: str, keeps: bool) -> Callable[[Rules, Node, Call], RowWise | None]:
    """Operations over dimensions ``name``, which the result has still if it ``keeps`` them."""

    def rule(rules: Rules, node: Node, call: Call) -> RowWise | None:
        return rules.reduced(node, call["input"], call.get(name), keeps or bool(call.get("keepdim", False)))

    return rule


def _extremum(rules: Rules, node: Node, call: Call) -> RowWise | None:
    """Of two tensors, as xIELU has it. Over a dimension it gives places beside values, and over all one number."""
    return None if tensor_value(call["other"]) is None else rules.pointwise(node)


def _embedding(rules: Rules, node: Node, call: Call) -> RowWise | None:
    if call.get("max_norm") is not None or call.get("scale_grad_by_freq"):  # the latter counts words of all rows
        return None
    return rules.keeping(node, call["index"], range(len(rules.shape(node)) - 1))


def _cat(rules: Rules, node: Node, call: Call) -> RowWise | None:
    parts, dim = call["input"], call["dim"]
    if not isinstance(parts, (tuple, list)) or not isinstance(dim, int):
        return None
    rank = len(rules.shape(node))
    not_empty = [p for p in parts if not (isinstance(p, Node) and rules.shape(p) == (0,))]
    if len(not_empty) == 1:  # behind nothing, as the first keys in a cache: a copy
        return rules.keeping(node, not_empty[0], range(rank))
    dims = {d: d for d in range(rank) if d != dim % rank}
    return RowWise(tuple((p, dims) for p in dict.fromkeys(parts) if isinstance(p, Node)))


def _stack(rules: Rules, node: Node, call: Call) -> RowWise | None:
    """At a new dimension, in front of which all stay where they are; those behind it move on."""
    parts, dim = call["input"], call["dim"]
    if not isinstance(parts, (tuple, list)) or not isinstance(dim, int) or any(tensor_value(p) is None for p in parts):
        return None
    rank = len(rules.shape(node))
    dims = {d: d + (d >= dim % rank) for d in range(rank - 1)}
    return RowWise(tuple((p, dims) for p in dict.fromkeys(parts)))


def _without_dim(rules: Rules, node: Node, call: Call) -> RowWise | None:
    source, dim = call["input"], call["dim"]
    if not isinstance(source, Node) or not isinstance(dim, int) or not isinstance(call.get("index", 0), int):
        return None
    rank = len(rules.shape(source))
    left = [d for d in range(rank) if d != dim % rank]
    return RowWise(((source, {d: n for n, d in enumerate(left)}),))


def _sliced(rules: Rules, node: Node, call: Call) -> RowWise | None:
    """A part of one dimension; where an index says which, it is read whole."""
    dim, rank = call["dim"], len(rules.shape(node))
    if not isinstance(dim, int) or not rank:
        return None
    return rules.keeping(node, call["input"], [d for d in range(rank) if d != dim % rank])


def _getitem(rules: Rules, node: Node, call: Call) -> RowWise | None:
    source, index = call["input"], call["index"]
    if not isinstance(source, Node):
        return None
    if isinstance(fake_value(source), (tuple, list)):
        return rules.keeping(node, source, range(len(rules.shape(node)))) if isinstance(index, int) else None
    rank = len(rules.shape(source))
    dims = _indexed_dims(index, rank)
    if dims is None:
        return _at_numbers(rules, node, source, _with_slices(index, rank))
    return RowWise(((source, dims),))


def _at_numbers(rules: Rules, node: Node, source: Node, entries: list[Any]) -> RowWise | None:
    """``x[..., numbers]`` beside whole dimensions: what says the numbers is read whole; its dimensions stand there."""
    at = [d for d, e in enumerate(entries) if not (isinstance(e, slice) and e in _WHOLE)]
    ranks = [_rank_of_numbers(entries[d]) for d in at]
    if len(ranks) != 1 or ranks[0] is None or _times_read(node, source) > 1:
        return None
    dims = {d: d if d < at[0] else d + ranks[0] - 1 for d in range(len(rules.shape(source))) if d != at[0]}
    return RowWise(((source, dims),), tuple(n for n in node.all_input_nodes if n is not source))


def _rank_of_numbers(entry: Any) -> int | None:
    """How many dimensions an index has, of a tensor of whole numbers or of a list; None for any other entry."""
    value = tensor_value(entry)
    if value is not None:
        return value.dim() if value.dim() and value.dtype in (torch.int32, torch.int64) else None
    return 1 if isinstance(entry, list) and all(type(e) is int for e in entry) else None


def _replaced(rules: Rules, node: Node, call: Call) -> RowWise | None:
    """``x.index_put((mask,), number)``: what a mask over all rows selects becomes one number."""
    source, indices, values = call["input"], call["indices"], call["values"]
    if not isinstance(indices, (tuple, list)) or len(indices) != 1 or call["accumulate"]:
        return None
    (mask,) = indices
    selects, number = tensor_value(mask), tensor_value(values)
    if selects is None or number is None or selects.dtype != torch.bool or number.dim() or len({source, mask}) == 1:
        return None
    flows = tuple((n, {d: d for d in range(len(rules.shape(n)))}) for n in (source, mask))
    return RowWise(flows, (values,))


def _index(rules: Rules, node: Node, call: Call) -> RowWise | None:
    """The same with None for a whole dimension."""
    source, index = call["input"], call["index"]
    if not isinstance(source, Node) or not isinstance(index, (tuple, list)):
        return None
    return _at_numbers(rules, node, source, [slice(None) if e is None else e for e in index])


def _with_slices(index: Any, rank: int) -> list[Any]:
    """The entries of an index, with whole dimensions for an ellipsis. A list is one entry: places of one dimension."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in entries:
        at = entries.index(Ellipsis)
        indexed = sum(e is not None and e is not Ellipsis for e in entries)
        entries[at : at + 1] = [slice(None)] * (rank - indexed)
    return entries


def _indexed_dims(index: Any, rank: int) -> dict[int, int] | None:
    """Where the dimensions go that ``x[index]`` takes whole; None for an index that is no slice, number or None."""
    entries = _with_slices(index, rank)
    if any(not (e is None or isinstance(e, slice) or type(e) is int) for e in entries):
        return None
    dims, source, result = {}, 0, 0
    for entry in entries:
        if entry is None:
            result += 1
        elif isinstance(entry, slice):
            if entry in _WHOLE:
                dims[source] = result
            source, result = source + 1, result + 1
        else:
            source += 1
    return dims | {d: result + d - source for d in range(source, rank)}


_WHOLE = (slice(None), slice(0, None))
_BY_OPERATION: Mapping[str, Callable[[Rules, Node, Call], RowWise | None]] = {
    "reshape": _reshape,
    "copy": _same,
    "detach": _same,
    "cast": _same,
    "dropout": _dropout,
    "permute": _moved(_permuted),
    "transpose": _moved(_transposed),
    "mT": _moved(_last_two),
    "t": _moved(_reversed),
    "linear": _all_but_last,
    "matmul": _matmul,
    "baddbmm": _added_product,
    "softmax": _over("dim", keeps=True),
    "log_softmax": _over("dim", keeps=True),
    "normalize": _over("dim", keeps=True),
    "sum": _over("dim", keeps=False),
    "amax": _over("dim", keeps=False),
    "logsumexp": _over("dim", keeps=False),
    "vector_norm": _over("dim", keeps=False),
    "max": _extremum,
    "min": _extremum,
    "embedding": _embedding,
    "cat": _cat,
    "stack": _stack,
    "pieces": _sliced,
    "unbind": _without_dim,
    "select": _without_dim,
    "slice": _sliced,
    "narrow": _sliced,
    "index_select": _sliced,
    "index": _index,
    "index_put": _replaced,
    "getitem": _getitem,
    "method_where": lambda rules, node, call: rules.pointwise(node),
    "masked_fill": lambda rules, node, call: rules.pointwise(node),
    "pow": lambda rules, node, call: rules.pointwise(node),
}
_REDUCTIONS = frozenset({"mean", "argmax", "argmin", "amin"})
_OF_PAIRS = frozenset({"view_as_complex", "view_as_real"})  # of the last dimension, which one of the two has not
_MIXING = frozenset({"cumsum", "expand", "repeat", "pad", "einsum", "all", "any", "lookup"})
