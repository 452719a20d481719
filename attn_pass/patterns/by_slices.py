"""A softmax computed slice by slice and written back (``s[4:] = s[4:].softmax(-1); s[:4] = s[:4].softmax(-1)``).

Stable Diffusion does this to need less memory. If the slices make up the whole, that is one softmax out of place. It
replaces the slices in the graph before it is read, and the slices are restored if the site is not rewritten.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from attn_pass.graph.edit import Plan, SizeNodes
from attn_pass.graph.effects import Effects
from attn_pass.graph.expand import without_values
from attn_pass.graph.regions import Region, Regions
from attn_pass.graph.values import Sizes, tensor_value
from attn_pass.model.index import Index, is_at_most, is_nonnegative
from attn_pass.reading.vocabulary import operation_of, understand

aten = torch.ops.aten
Run = tuple[int, Index, Index]  # a dimension, from where, up to where


@dataclass(frozen=True)
class _Piece:
    """One slice's softmax: ``base[run] = softmax(base[run], dim)``; ``nodes`` in graph order, the write last."""

    base: Node
    dim: int
    run: Run
    nodes: tuple[Node, ...]


def _meanwhile() -> None:
    """What a node calls that is not in use."""


@dataclass(eq=False)
class AtOnce:
    """The softmax of all slices, ``new``, in the place of what was in ``base`` after ``idle``, which do nothing."""

    base: Node
    new: Node
    idle: tuple[Node, ...]
    _values: list[dict[str, Any]] = field(default_factory=list)
    _calls: list[tuple[str, Any, Any, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        later = set(_after(self.idle[-1]))
        self.base.replace_all_uses_with(self.new, delete_user_cb=lambda user: user in later)
        for node in self.idle:
            self._calls.append((node.op, node.target, node.args, node.kwargs))
            node.op, node.target, node.args, node.kwargs = "call_function", _meanwhile, (), {}
        self._values = without_values(self.idle)

    def settle(self) -> bool:
        """Puts the slices back where the softmax is still there; returns whether they are gone instead."""
        graph = self.new.graph
        if self.new._erased:
            for node in reversed(self.idle):
                graph.erase_node(node)
            return True
        (base,) = self.new.all_input_nodes  # what it has become, if it was replaced
        for node, (op, target, args, kwargs), meta in zip(self.idle, self._calls, self._values, strict=True):
            node.op, node.target = op, target
            node.meta.update(meta)
            node.args, node.kwargs = torch.fx.map_arg((args, kwargs), lambda n: base if n is self.base else n)
        self.new.replace_all_uses_with(base)
        graph.erase_node(self.new)
        return False


def put_together(gm: GraphModule, sizes: Sizes, outer: Region, in_body: bool) -> list[AtOnce]:
    """Puts one softmax in the place of those that are written back by slices, in a graph that runs under ``outer``."""
    groups: dict[tuple[Node, int], list[_Piece]] = {}
    for node in gm.graph.nodes:
        piece = _piece(node, sizes)
        if piece is not None:
            groups.setdefault((piece.base, piece.dim), []).append(piece)
    if not groups:
        return []
    effects, regions, size_nodes = Effects(gm.graph), Regions(gm.graph, outer), SizeNodes(gm, sizes)
    softmaxes = []
    for (base, dim), pieces in groups.items():
        nodes = tuple(sorted((n for p in pieces for n in p.nodes), key=effects.position.__getitem__))
        if len(pieces) < 2 or not _make_up(pieces, sizes) or len({regions.of(n) for n in nodes}) != 1:
            continue
        if not _is_alone(base, nodes, pieces, effects):
            continue
        plan = Plan(gm, nodes[0], regions.of(nodes[0]), size_nodes, effects, in_body)
        with plan.running():
            planned = plan.call(aten.softmax.int, base, dim)
        if _layout(planned.fake, sizes) == _layout(tensor_value(base), sizes):
            (new,) = plan.insert(planned)
            softmaxes.append(AtOnce(base, new, nodes))
    return softmaxes


def _piece(node: Node, sizes: Sizes) -> _Piece | None:
    """The slice of which ``node`` is the softmax, where all that is done with it is to write it back."""
    if operation_of(node) != "softmax":
        return None
    call, value = understand(node), tensor_value(node)
    if call is None or call.in_place or value is None or not isinstance(call["dim"], int):
        return None
    view, (write, *others) = call["input"], (*node.users, None)
    if not isinstance(view, Node) or write is None or others != [None] or set(view.users) != {node}:
        return None
    source, run = _sliced(view, sizes)
    target, written, nodes = _written(write, node, sizes)
    if source is None or source is not target or run is None or run != written:
        return None
    base, dim = tensor_value(source), call["dim"] % value.dim()
    if base is None or base.dtype != value.dtype or run[0] == dim:
        return None
    return _Piece(source, dim, run, (view, node, *nodes))


def _written(write: Node, value: Node, sizes: Sizes) -> tuple[Node | None, Run | None, tuple[Node, ...]]:
    """What a node writes all of ``value`` to: the tensor, its run, and the nodes of the write."""
    if write.target is operator.setitem and isinstance(write.args[0], Node):
        return write.args[0], _run(write.args[0], write.args[1], sizes), (write,)
    if write.target is aten.copy_.default and write.args[1] is value and not write.users:
        view = write.args[0]
        if isinstance(view, Node) and set(view.users) == {write}:
            return (*_sliced(view, sizes), (view, write))
    return None, None, ()


def _sliced(view: Node, sizes: Sizes) -> tuple[Node | None, Run | None]:
    """What a node is a slice of, along one dimension, and which."""
    call = understand(view)
    base = None if call is None else call.args.get("input")
    if call is None or not isinstance(base, Node) or tensor_value(base) is None:
        return None, None
    if call.op == "getitem":
        return base, _run(base, call["index"], sizes)
    if call.op == "slice" and call["step"] == 1 and isinstance(call["dim"], int):
        entries = [slice(None)] * call["dim"] + [slice(call["start"], call["end"])]
        return base, _run(base, tuple(entries), sizes) if call["dim"] >= 0 else None
    return None, None


def _run(base: Node, index: Any, sizes: Sizes) -> Run | None:
    """The run of one dimension that an index of slices by one selects; None for anything else."""
    value, entries = tensor_value(base), list(index) if isinstance(index, tuple) else [index]
    if value is None:
        return None
    places = [n for n, entry in enumerate(entries) if entry is Ellipsis]
    if len(places) == 1:
        entries[places[0] : places[0] + 1] = [slice(None)] * (value.dim() - len(entries) + 1)
    if any(not isinstance(e, slice) or e.step not in (None, 1) for e in entries):
        return None
    runs = [(n, e) for n, e in enumerate(entries) if (e.start, e.stop) != (None, None)]
    if len(runs) != 1:
        return None
    ((dim, entry),) = runs
    size = sizes.shape(value)[dim]
    start, stop = _slice_bound(entry.start, 0, size), _slice_bound(entry.stop, size, size)
    return None if start is None or stop is None else (dim, start, stop)


def _slice_bound(index: Any, default: Index, size: Index) -> Index | None:
    """Where a slice starts or stops, cut off at the end as Python does; None where that is not known."""
    if index is None:
        return default
    if not isinstance(index, int):
        return None
    position: Index = index if index >= 0 else size + index
    if not is_nonnegative(position):
        return None
    return position if is_at_most(position, size) else size if is_at_most(size, position) else None


def _make_up(pieces: list[_Piece], sizes: Sizes) -> bool:
    """Whether the runs are all along one dimension, and each of its indices is in one of them."""
    (dim, *others) = {p.run[0] for p in pieces}
    value = tensor_value(pieces[0].base)
    if others or value is None:
        return False
    runs = {start: stop for _, start, stop in (p.run for p in pieces) if start != stop}
    number, at = len([p for p in pieces if p.run[1] != p.run[2]]), 0
    end: Index = 0
    while end in runs and at < number:
        end, at = runs[end], at + 1
    return at == number and end == sizes.shape(value)[dim]


def _is_alone(base: Node, nodes: tuple[Node, ...], pieces: list[_Piece], effects: Effects) -> bool:
    """Whether the memory is not used elsewhere while the slices are computed, nor by another view later."""
    inside, position = set(nodes), effects.position
    first, last = position[nodes[0]], position[nodes[-1]]
    writes = {p.nodes[-1] for p in pieces}
    if any(m.position > first and m.node not in writes for m in effects.mutations(base)):
        return False
    if not effects.is_internal(base, set(base.graph.nodes)):
        return False
    for alias in effects.aliases(base):
        if first <= position[alias] <= last and alias not in inside:
            return False
        until = last if alias is base else position[base.graph.output_node()]
        if position[alias] < first and any(first <= position[u] <= until and u not in inside for u in alias.users):
            return False
    return True


def _layout(value: torch.Tensor | None, sizes: Sizes) -> tuple[Any, ...] | None:
    if value is None:
        return None
    return (value.dtype, sizes.shape(value), *(sizes.index(s) for s in value.stride()))


def _after(node: Node) -> list[Node]:
    later = []
    while (node := node.next).op != "root":
        later.append(node)
    return later
