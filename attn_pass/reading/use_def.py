"""The walk along use-def chains from a node back to one leaf, through views and pointwise operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from attn_pass.graph.effects import Mutation, is_pure
from attn_pass.graph.random_draws import draws_random_numbers
from attn_pass.graph.regions import Region
from attn_pass.graph.values import tensor_value, wants_gradient
from attn_pass.model.expression import (
    TRUE,
    Apply,
    Const,
    Dot,
    Expr,
    Load,
    apply,
    contains_dot,
    index_value,
    is_boolean,
    rewrite_indices,
)
from attn_pass.model.index import Axis, Index, axis_index, is_at_most, is_less, is_nonnegative, substitute
from attn_pass.reading.partial_writes import Part, put_part, scattered_part, written_part
from attn_pass.reading.pointwise import POINTWISE, pointwise, rounded
from attn_pass.reading.reach import SCATTERS
from attn_pass.reading.reader import Reader
from attn_pass.reading.scores import is_masking, is_small
from attn_pass.reading.unreadable import Unreadable
from attn_pass.reading.views import VIEWS, Position, broadcast_position, view_of
from attn_pass.reading.vocabulary import Call


@dataclass(frozen=True)
class SideLoad:
    """A tensor beside the walk: where its elements were followed back to, and how it was written there."""

    node: Node
    at: int
    written: Node
    written_position: Position
    written_at: int


@dataclass
class UseDefWalk:
    """A walk from a node back to one leaf; ``read`` gives the expression, with `Dot` standing for the leaf."""

    reader: Reader
    leaf: Node
    reach: Mapping[Node, frozenset[Node]]
    region: Region
    internal: dict[Node, None] = field(default_factory=dict)  # every node passed, in order of the walk
    leaf_position: Position | None = None
    leaf_at: int = 0
    dropout: float = 0.0
    of_weights: bool = False  # what comes after a softmax, whose elements are between 0 and 1, or NaN
    loads: dict[Load, SideLoad] = field(default_factory=dict)  # every load beside the walk
    joined: list[tuple[torch.dtype, Expr]] = field(default_factory=list)  # to the leaf, in which type; nothing small
    is_guarded: bool = False  # what is NaN or infinite is made a number
    is_beyond_half: bool = False  # something joined that is small in its own type, and in float16 would not be

    def read(self, node: Node, position: Position, at: int) -> Expr:
        """The element of ``node`` at ``position``; raises `Unreadable` for what cannot be passed."""
        reader = self.reader
        if self._is_leaf(node, at):
            self._check_region(self.leaf)
            if self.leaf_position not in (None, position):
                raise Unreadable("the scores are read at two positions at once", node)
            self.leaf_position, self.leaf_at = position, at
            self.internal |= dict.fromkeys((node, self.leaf, *written_into(reader, self.leaf)))
            return Dot()
        defined, call = reader.definition(node, at)
        if call is None or call.op == "fill":  # a number in place of scores
            return self._partly_written(node, position, at)
        self._check_region(defined)
        self.internal[node] = None
        self.internal |= dict.fromkeys((defined, *(written_into(reader, defined) if "out" in defined.kwargs else ())))
        time = reader.order[defined]
        if call.op in VIEWS:
            source = view_of(defined, call, position, reader.sizes)
            if source is None:
                raise Unreadable(f"the view {_name(defined)} cannot be followed", defined)
            return self.read(*source, at if reader.is_alias(defined, call) else time)
        if call.op in ("copy", "detach", "dropout"):
            self._check_transparent(call, defined)
            return self.read(call["input"], position, time)
        if call.op == "cast":
            before, after = tensor_value(call["input"]), tensor_value(defined)
            if before is None or after is None or before.device != after.device:
                raise Unreadable("the scores move between devices", defined)
            known = len(self.joined)
            inner = self.read(call["input"], position, time)
            if not (before.is_floating_point() and after.is_floating_point()):
                raise Unreadable(f"{_name(defined)} casts the scores to {after.dtype}", defined)
            if before.dtype == torch.float64:  # what absorbs no score there does once it is rounded
                self.joined[known:] = [(after.dtype, term) for _, term in self.joined[known:]]
            return inner
        if call.op == "copy_to":
            return self.operand(call["input"], position, time)
        if call.op == "nan_to_num" and self.of_weights and call["nan"] in (None, 0):
            inner = self.read(call["input"], position, time)
            return apply("where", apply("ne", inner, inner), Const(0.0), inner)
        if call.op == "nan_to_num" and not self.of_weights and (lowest := _lowest(call, defined)) is not None:
            self.is_guarded = True
            return self._noted(defined, apply("maximum", self.read(call["input"], position, time), lowest))
        if call.op == "index_put":
            return self._put(defined, call, position, time)
        if call.op in SCATTERS:
            return self._scattered(defined, call, position, time)
        if call.op == "cat":
            return self.operand(*self._joined(defined, call, position), time)
        if call.op == "pad":
            return self._padded(defined, call, position, time)
        if call.op not in POINTWISE:
            raise Unreadable(f"{_name(defined)} is not a known operation of attention", defined)
        return self._noted(defined, pointwise(defined, call, position, lambda v, p: self.operand(v, p, time)))

    def _is_leaf(self, node: Node, at: int) -> bool:
        """Whether the node holds what the leaf computed: it is the leaf, or what the leaf was written to."""
        mutation = self.reader.effects.last_mutation(node, at)
        if mutation is None or mutation.node is not self.leaf:
            return mutation is None and node is self.leaf
        stops = wants_gradient(self.leaf) and not wants_gradient(node)
        return not stops and self.reader.effects.same_geometry(mutation.target, node)

    def _noted(self, node: Node, result: Expr) -> Expr:
        """What a node computes, its operands noted down that join the leaf and may mask it."""
        fake = tensor_value(node)
        if fake is not None and isinstance(result, Apply) and result.op in _JOINING:
            operands = result.args[1:] if result.op == "where" else result.args  # its condition masks by the fill alone
            beside = [e for e in operands if not contains_dot(e) and not is_boolean(e)]
            self.joined += [(fake.dtype, e) for e in beside if not is_small(e, fake.dtype)]
            self.is_beyond_half |= not all(is_small(e, torch.float16) for e in beside if is_small(e, fake.dtype))
        return result

    def _joined(self, node: Node, call: Call, position: Position) -> tuple[Node, Position]:
        """Which of the tensors a ``cat`` joins the position is in, and where."""
        pieces, dim = call["input"], call["dim"]
        if isinstance(pieces, (list, tuple)) and isinstance(dim, int):
            dim %= len(position)
            start: Index = 0
            for piece in pieces:
                size = self.reader.shape(piece)[dim]
                inside = position[dim] - start
                if is_nonnegative(inside) and is_less(inside, size):
                    return piece, (*position[:dim], inside, *position[dim + 1 :])
                start = start + size
        raise Unreadable(f"{_name(node)} joins the scores with something else", node)

    def _padded(self, node: Node, call: Call, position: Position, time: int) -> Expr:
        """An element of what ``F.pad`` gives: one of its input, or the number around it."""
        widths, value = call["pad"], call["value"]
        constant = call.get("mode", "constant") == "constant" and (value is None or isinstance(value, (int, float)))
        if not isinstance(widths, (list, tuple)) or not constant or not all(isinstance(w, int) for w in widths):
            raise Unreadable(f"{_name(node)} pads the scores with a value that cannot be determined", node)
        shape, at = self.reader.shape(call["input"]), list(position)
        for number, before in enumerate(widths[::2]):
            dim = len(at) - 1 - number
            at[dim] = inside = position[dim] - before
            if is_less(inside, 0) or is_at_most(shape[dim], inside):
                return rounded(Const(0.0 if value is None else float(value)), node)
            if not (is_nonnegative(inside) and is_less(inside, shape[dim])):
                raise Unreadable(f"{_name(node)} joins the scores with something else", node)
        return self.operand(call["input"], tuple(at), time)

    def _check_region(self, node: Node) -> None:
        region = self.reader.regions.of(node)
        if region != self.region:
            raise Unreadable(f"{_name(node)} runs under another context ({region.apart_from(self.region)})", node)

    def _check_transparent(self, call: Call, node: Node) -> None:
        value = tensor_value(call["input"])
        if call.op == "detach" and value is not None and self.reader.may_need_grad(value):
            raise Unreadable("detach() stops the gradient of the scores", node)
        if call.op == "dropout" and call["training"] is not False and call["p"] != 0:
            if self.dropout:
                raise Unreadable("dropout is applied twice", node)
            if not isinstance(call["p"], (int, float)) or not isinstance(call["training"], bool):
                raise Unreadable("the rate of the dropout, or whether it is on, is known at run time only", node)
            self.dropout = float(call["p"])

    def operand(self, value: Any, position: Position, at: int) -> Expr:
        """The element of an operand of the scores: a number, or a tensor, which may be broadcast."""
        reader = self.reader
        if not isinstance(value, Node):
            if isinstance(value, (bool, int, float)):
                return Const(value)
            raise Unreadable("an operand of the scores has no value that can be read")
        scalar = reader.scalar(value, at)
        if scalar is not None and not self._is_made_of_leaf(value, at):
            if isinstance(scalar, Load) and tensor_value(value) is not None:
                self.loads[scalar] = SideLoad(value, at, value, scalar.index, at)
            return scalar
        fake = tensor_value(value)
        if fake is None:
            raise Unreadable("an operand of the scores has no value that can be read", value)
        shape = reader.sizes.shape(fake)
        position = broadcast_position(position, shape)
        if self._is_made_of_leaf(value, at) or self._written_from_leaf(value, at):
            return self.read(value, position, at)
        source, where, read_at = reader.through_views(value, position, at, self.region)
        defined, call = reader.definition(source, read_at)
        is_logic = call is not None and call.op in _LOGIC and not call.in_place and _is_of_one_type(call)
        if call is not None and is_logic and self._has_shape_of_leaf(source):
            self.internal[source] = None
            return pointwise(defined, call, where, lambda v, p: self.operand(v, p, reader.order[defined]))
        element = reader.element(source, where, read_at)
        if isinstance(element, Const):
            return element
        load = reader.load(source, where, read_at)
        self.loads[load] = SideLoad(source, read_at, value, position, at)
        return load

    def _partly_written(self, node: Node, position: Position, at: int) -> Expr:
        """Of what was written in place to a part of the node: that where the place is in it, else what was there."""
        reader = self.reader
        mutation = reader.effects.last_mutation(node, at)
        part = None if mutation is None else written_part(reader, node, mutation)
        if mutation is None or part is None:
            raise self._unknown(node, at)
        self._check_region(mutation.node)
        return self._where_written(node, position, part, mutation)

    def _put(self, node: Node, call: Call, position: Position, time: int) -> Expr:
        """``index_put`` of one number, out of place or of the whole of the node's memory."""
        part = put_part(self.reader, node)
        if part is None or any(b is not None for b in part.bounds):
            raise Unreadable(f"{_name(node)} writes scores that cannot be determined", node)
        inside: Expr = TRUE
        for mask, over in part.masks:
            inside = apply("and", inside, self.operand(mask, tuple(position[d] for d in over), time))
        for relation in part.relation_at(position):
            inside = apply("and", inside, relation)
        value = self.operand(part.value, (), time)
        before = self.operand(call["input"], position, time)
        return self._noted(node, apply("where", inside, rounded(value, node), before))

    def _where_written(self, node: Node, position: Position, part: Part, mutation: Mutation) -> Expr:
        """What was written where the position is in the part, and what was there before it elsewhere."""
        self.internal |= dict.fromkeys((node, mutation.node, mutation.target, *part.views))
        at = self.reader.order[mutation.node]
        return self._chosen(node, position, part, at, lambda: self.read(node, position, mutation.position))

    def _scattered(self, node: Node, call: Call, position: Position, time: int) -> Expr:
        """``slice_scatter`` and ``select_scatter``: a part written out of place, as torch.export decomposes it."""
        part = scattered_part(self.reader, node)
        if part is None:
            raise Unreadable(f"{_name(node)} writes scores that cannot be determined", node)
        return self._chosen(node, position, part, time, lambda: self.operand(call["input"], position, time))

    def _chosen(self, node: Node, position: Position, part: Part, at: int, before: Callable[[], Expr]) -> Expr:
        """The part's value, as it is at that time, where the position is in it; ``before`` elsewhere."""
        inside: Expr = TRUE
        at_part: dict[int, Index] = {}
        places: dict[Axis, Index] = {}
        for dim, (bounds, size) in enumerate(zip(part.bounds, self.reader.shape(node))):
            here = at_part[dim] = position[dim]
            if bounds is None:
                continue
            start, length = bounds
            axis = Axis(f"{node.name}.{at}~{dim}", length)
            places[axis] = here - start
            at_part[dim] = axis_index(axis)
            if start != 0:
                inside = apply("and", inside, apply("ge", index_value(here), index_value(start)))
            if start + length != size:
                inside = apply("and", inside, apply("lt", index_value(here), index_value(start + length)))
        within = tuple(at_part.get(d, 0) for d in part.dims)
        written = UseDefWalk(self.reader, self.leaf, self.reach, self.region, of_weights=self.of_weights)
        value = rewrite_indices(written.operand(part.value, within, at + part.is_result), places)
        for mask, over in part.masks:
            held = rewrite_indices(written.operand(mask, tuple(at_part[d] for d in over), at), places)
            inside = apply("and", inside, held)
        for relation in part.relation_at(position):
            inside = apply("and", inside, relation)
        was = before()
        pinned = {position[d]: b[0] for d, b in enumerate(part.bounds) if b is not None and b[1] == 1}
        self._take(written, places, node, pinned)
        if isinstance(was, Apply) and was.op == "where" and was.args[0] == inside:
            was = was.args[2]  # ``x[1:] += y`` writes the sum, and then the slice it is in
        return self._noted(node, apply("where", inside, rounded(value, node), was))

    def _take(self, other: UseDefWalk, places: Mapping[Axis, Index], node: Node, pinned: Mapping[Index, Index]) -> None:
        """Adds what another walk to the same leaf found, its axes being at those places of this one's.

        ``pinned`` are indices that have one value in the part (``x[:, 0] = ...``).
        """

        def moved(position: Position) -> Position:
            return tuple(substitute(i, places) for i in position)

        if other.dropout:
            raise Unreadable("dropout is applied to a part only", node)
        if other.leaf_position is not None:
            at = moved(other.leaf_position)
            mine = at if self.leaf_position is None else self.leaf_position
            if any(a != b and pinned.get(b) != a for a, b in zip(at, mine, strict=True)):
                raise Unreadable("the scores are read at two positions at once", node)
            self.leaf_position, self.leaf_at = mine, other.leaf_at
        self.internal |= other.internal
        self.joined += [(dtype, rewrite_indices(e, places)) for dtype, e in other.joined]
        self.is_beyond_half |= other.is_beyond_half
        self.is_guarded |= other.is_guarded
        for load, side in other.loads.items():
            self.loads[Load(load.source, moved(load.index))] = replace(
                side, written_position=moved(side.written_position)
            )

    def _unknown(self, node: Node, at: int) -> Unreadable:
        """Why `Reader.definition` knows no operation."""
        mutation = self.reader.effects.last_mutation(node, at)
        if mutation is None or self.reader.is_reshaped_in_place(node):
            return Unreadable(f"{_name(node)} is not a known operation of attention", node)
        what = "it is" if mutation.whole else "a part of it is"
        return Unreadable(f"{_name(node)} cannot be read: {what} written in place by {_name(mutation.node)}", node)

    def _has_shape_of_leaf(self, node: Node) -> bool:
        """Whether something the node is made of took its shape from the scores: ``~mask.expand_as(scores)``."""
        waiting, steps = [node], 0
        while waiting and steps < _STEPS:
            current, steps = waiting.pop(), steps + 1
            if self.leaf in self.reach.get(current, ()):
                return True
            waiting += current.all_input_nodes
        return False

    def _is_made_of_leaf(self, node: Node, at: int) -> bool:
        """Whether the node may hold elements of the leaf at that time: never before the leaf is computed."""
        if node is self.leaf or self.leaf not in self.reach.get(node, ()):
            return node is self.leaf
        # What is written beside the graph's own nodes shares a time with its product; a tensor given to one does not.
        return at > self.reader.order[self.leaf] or self.reader.written_by(self.leaf) is None

    def _written_from_leaf(self, node: Node, at: int) -> bool:
        """Whether the last in-place write of the node's memory put the leaf's elements there."""
        mutation = self.reader.effects.last_mutation(node, at)
        return mutation is not None and self.leaf in self.reach.get(mutation.node, ())


def written_into(reader: Reader, product: Node) -> list[Node]:
    """The tensor a product is written to, with what it is a view of, as long as nothing but its memory is in it."""
    nodes: list[Node] = []
    node = reader.written_by(product)
    while node is not None and is_pure(node) and not draws_random_numbers(node):
        nodes.append(node)
        call = reader.call(node)
        source = None if call is None or call.op not in VIEWS else call.args.get("input")
        node = source if isinstance(source, Node) and call is not None and reader.is_alias(node, call) else None
    return nodes


def _lowest(call: Call, node: Node) -> Const | None:
    """What ``nan_to_num`` makes of -inf, where NaN becomes 0; None for other numbers."""
    value = tensor_value(node)
    if value is None or not value.is_floating_point() or call["nan"] not in (None, 0) or call["posinf"] is not None:
        return None
    lowest = torch.finfo(value.dtype).min if call["neginf"] is None else call["neginf"]
    is_known = isinstance(lowest, (int, float)) and is_masking(float(lowest), value.dtype)
    return Const(float(lowest)) if is_known else None  # a higher one is no bound: scores below it stay


_LOGIC = ("not", "and", "or", "eq", "ne")
_JOINING = ("add", "sub", "where", "maximum", "minimum")
_STEPS = 8


def _is_of_one_type(call: Call) -> bool:
    """Whether operands have one floating type: of two, which is meant depends on their dimensions, too."""
    values = [tensor_value(call.get(name)) for name in ("input", "other")]
    return len({v.dtype for v in values if v is not None and v.is_floating_point()}) < 2


def _name(node: Node) -> str:
    target = node.target
    return str(target) if isinstance(target, str) else getattr(target, "__name__", str(target))
