"""Which nodes write which memory, and when: aliases and in-place writes of an FX graph that is not functional yet.

Before AOTAutograd a graph still holds ``m[:, 5:] = -inf``, ``matmul(a, b, out=s)``, ``v.masked_fill_(...)`` on a
view of ``s``, and writes inside the bodies of higher-order operators. The value of a node is then a
question of time, which this file answers for graphs of Dynamo and of torch.export, decomposed or not.

Two nodes share memory when their fake tensors share a storage, which is exact where torch itself is. What fake tensors
do not say is added: ``dropout`` in eval mode returns its input in eager, but a copy under the python dispatcher that
Dynamo and export trace with; after ``set_`` a fake tensor shows only its last storage. Where metadata is missing, view
chains decide. All that is in doubt counts as shared and as written. One pass, no symbolic algebra, no guard.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Target

from attn_pass.graph.memory import WITHOUT_MEMORY, sees_same_elements, storages, tensor_inputs
from attn_pass.graph.random_draws import drops_something
from attn_pass.graph.subgraphs import attribute, called_bodies, indexed_by_export, operator_name, placeholders
from attn_pass.graph.values import fake_value
from attn_pass.graph.writes import FUNCTIONAL_HIGHER_ORDER, Traits, call_writes, traits_of


@dataclass(frozen=True)
class Mutation:
    """One write of memory.

    ``target`` is the node written: the self argument, the ``out=`` argument, the first argument of ``setitem``, the
    operand of a higher-order operator whose body writes it. ``whole`` says that ``node`` gives a new value to exactly
    all elements that ``target`` sees, as its functional counterpart would (``mul_``, ``masked_fill_``, ``copy_``,
    ``add(out=)``, ``x[:] = y``); a slice, a scatter, a body or anything in doubt is not whole.
    """

    node: Node
    target: Node
    position: int
    whole: bool


# The fake value says that the copy is the literal's memory; the program's is not.
_LITERAL = torch.ops.aten.lift_fresh_copy.default

_position_of: Callable[[Mutation], int] = attrgetter("position")


class _Owner(NamedTuple):
    """Memory that belongs to the caller: a placeholder or an attribute. None is unknown."""

    dtype: torch.dtype | None
    device: torch.device | None
    parameter: bool


class Effects:
    """Aliases and mutations of one graph, as it is now: build a new one after an edit.

    Placeholders and attributes are memory of the caller, and two of them may overlap in ways the trace did not see (it
    is guarded on identity, not on overlap). So a write to one counts as a write, not whole, to every other of the same
    dtype and device that is not a parameter. Parameters are recognised in Dynamo graphs and as attributes; placeholders
    of an ExportedProgram's own graph carry no mark, so pass those that are parameters.
    """

    position: dict[Node, int]
    """Where each node stands in the graph, from 0."""

    def __init__(self, graph: Graph, *, parameters: Iterable[Node] = ()) -> None:
        self._parameters = frozenset(parameters)
        self._summaries: dict[int, tuple[int, ...] | None] = {}
        self._read(graph)

    # ------------------------------------------------------------ questions

    def aliases(self, node: Node) -> Sequence[Node]:
        """All nodes whose memory is, or may be, that of ``node``, itself included, in graph order."""
        roots = self._roots_of(node)
        if len(roots) == 1:
            return tuple(self._members[roots[0]])
        members = {member for root in roots for member in self._members[root]} | {node}
        return tuple(sorted(members, key=self.position.__getitem__))

    def mutations(self, node: Node) -> Sequence[Mutation]:
        """All writes that reach, or may reach, the memory ``node`` lives in, in graph order."""
        if not self._writes:
            return ()
        roots = self._roots_of(node)
        if len(roots) == 1:
            return self._writes_of(roots[0])
        writes = {m for root in roots for m in self._writes_of(root)}
        return tuple(sorted(writes, key=_position_of))

    def last_mutation(self, node: Node, before: int) -> Mutation | None:
        """The last write strictly before position ``before``; it may come before ``node``, if ``node`` is a view."""
        mutations = self.mutations(node)
        index = bisect_left(mutations, before, key=_position_of) - 1
        return mutations[index] if index >= 0 else None

    def mutation_between(self, node: Node, after: int, until: int) -> Mutation | None:
        """The first write with ``after < position < until``."""
        mutations = self.mutations(node)
        index = bisect_right(mutations, after, key=_position_of)
        return mutations[index] if index < len(mutations) and mutations[index].position < until else None

    def same_geometry(self, a: Node, b: Node) -> bool:
        """Whether ``a`` and ``b`` provably see the same elements: one storage, dtype, shape, strides and offset."""
        if a is b:
            return True
        if not self._rebound.keys().isdisjoint(self._roots_of(a)):
            return False
        return sees_same_elements(fake_value(a), fake_value(b))

    def geometry_changes_after(self, node: Node, position: int) -> bool:
        """Whether ``node``'s fake tensor shows a shape or storage it gets after ``position`` only.

        ``t_``, ``unsqueeze_``, ``set_`` and the like change the fake tensor in the metadata of every node that has it,
        so sizes read from metadata are those of the end of the graph. Believe none of them where this is true.
        """
        rebound = self._rebound
        return bool(rebound) and any(rebound.get(root, -1) >= position for root in self._roots_of(node))

    def is_internal(self, node: Node, allowed: Set[Node]) -> bool:
        """Whether only ``allowed`` holds ``node``'s memory, so that in-place operations in it may be erased.

        Every alias is in ``allowed``, none of it is the caller's, and the graph does not return it (unless the output
        node is in ``allowed`` too).
        """
        if not self._owners.keys().isdisjoint(self._roots_of(node)):
            return False
        for alias in self.aliases(node):
            if alias not in allowed or any(u.op == "output" and u not in allowed for u in alias.users):
                return False
        return True

    def add_beside(self, new: Node, old: Node) -> None:
        """Tells of a new node, which writes to nothing and is computed where an old one is."""
        self.position[new] = self.position[old]

    def put_in_place_of(self, new: Node, old: Node) -> None:
        """``new``, which is not in the graph this was read from, stands where ``old`` did and has its memory."""
        self.position[new] = self.position[old]
        self._memory[new] = self._roots_of(old)

    # ------------------------------------------------------------ answers

    def _roots_of(self, node: Node) -> tuple[int, ...]:
        return self._memory.get(node, ())

    def _writes_of(self, root: int) -> Sequence[Mutation]:
        known = self._reaching.get(root)
        if known is None:
            own = self._writes.get(root, ())
            known = self._reaching[root] = (*own, *self._overlapping(root)) if root in self._owners else tuple(own)
            if len(known) > len(own):
                known = self._reaching[root] = tuple(sorted(known, key=_position_of))
        return known

    def _overlapping(self, root: int) -> Iterator[Mutation]:
        """Writes to other memory of the caller that may be this one's."""
        mine = self._owners[root]
        if all(owner.parameter for owner in mine):
            return
        for other in self._owners:
            if other != root and other in self._writes and _may_overlap(mine, self._owners[other]):
                yield from (replace(mutation, whole=False) for mutation in self._writes[other])

    # ------------------------------------------------------------ reading the graph

    def _read(self, graph: Graph) -> None:
        self.position = {}
        self._parents: dict[int, int] = {}
        self._unnamed = 0
        self._has_values = False
        memory: dict[Node, tuple[int, ...]] = {}
        self._memory = memory
        owners: dict[int, list[_Owner]] = {}
        writes: list[Mutation] = []
        rebinding: list[Mutation] = []
        position = self.position
        known_traits: dict[Target, Traits] = {}
        for index, node in enumerate(graph.nodes):
            position[node] = index
            op, meta = node.op, node.meta
            if op == "output":
                continue
            value = meta.get("example_value")
            if value is None:
                value = meta.get("val")
            keys: tuple[int, ...] | None
            if type(value) is FakeTensor:
                keys = storages(value)
                self._has_values = True
            else:
                keys = () if type(value) in WITHOUT_MEMORY else None
            if keys is None:
                keys = self._memories_of(node, value)
            memory[node] = keys
            if op == "call_function" or op == "call_method":
                target = node.target
                traits = known_traits.get(target)
                if traits is None:
                    traits = known_traits[target] = traits_of(op, target)
                if traits.higher_order:
                    writes += (Mutation(node, n, index, False) for n in self._written_by_bodies(node))
                elif traits.write is not None or "out" in node.kwargs:
                    for write in call_writes(node):
                        if write.target.target is _LITERAL:
                            continue  # torch.export detaches its copy of a literal: there is no other alias
                        writes.append(Mutation(node, write.target, index, write.whole))
                        if write.rebinds:
                            rebinding.append(writes[-1])
                if traits.returns_input and keys:
                    self._merge_input(node, keys)
            elif op == "call_module":
                writes += (Mutation(node, n, index, False) for n in self._written_by_module(node))
            elif keys:
                for key in keys:
                    owners.setdefault(key, []).append(self._owner(node, value))
        if rebinding:
            self._merge_rebound(graph, rebinding)
        self._settle(writes, rebinding, owners)

    def _settle(self, writes: list[Mutation], rebinding: list[Mutation], owners: dict[int, list[_Owner]]) -> None:
        """Sorts nodes and writes by memory, once all memories that are one are known to be."""
        parents = self._parents
        members: dict[int, list[Node]] = {}
        for node, keys in self._memory.items():
            if parents and not parents.keys().isdisjoint(keys):
                keys = self._memory[node] = tuple(dict.fromkeys(self._find(key) for key in keys))
            for key in keys:
                known = members.get(key)
                if known is None:
                    members[key] = [node]
                else:
                    known.append(node)
        self._members = members
        self._owners: dict[int, list[_Owner]] = {}
        for key, nodes in owners.items():
            self._owners.setdefault(self._find(key), []).extend(nodes)
        self._writes: dict[int, list[Mutation]] = {}
        for mutation in writes:
            for root in self._roots_of(mutation.target):
                self._writes.setdefault(root, []).append(mutation)
        self._rebound = {r: mutation.position for mutation in rebinding for r in self._roots_of(mutation.target)}
        self._reaching: dict[int, Sequence[Mutation]] = {}

    def _memories_of(self, node: Node, value: Any) -> tuple[int, ...]:
        """The memories of a node's value, which is anything but a plain fake tensor."""
        keys = storages(value)
        if keys is not None and (keys or value is not None):
            return keys
        if node.op == "get_attr":
            tensor = attribute(node)
            keys = None if tensor is None else storages(tensor)
            return (self._new_key(),) if keys is None else keys
        if node.op == "placeholder":
            return (self._new_key(),)
        if self._has_values and not node.users:
            return ()  # a write or a check that returns nothing
        return self._place_by_views(node)

    def _place_by_views(self, node: Node) -> tuple[int, ...]:
        """The memories of a result nothing is known of but how it was computed."""
        traits = (
            traits_of(node.op, node.target) if node.op in ("call_function", "call_method") else Traits(unknown=True)
        )
        sources = [write.target for write in call_writes(node)]
        if traits.unknown:
            sources = node.all_input_nodes
        elif traits.view and not sources and (first := _first_node(node)) is not None:
            sources = [first]
        keys = dict.fromkeys(key for n in sources for key in self._memory.get(n, ()))
        if traits.unknown or not keys:
            keys[self._new_key()] = None
        return tuple(keys)

    def _merge_input(self, node: Node, keys: tuple[int, ...]) -> None:
        """Dropout that may return its input: the fake tensor says copy, eager says alias."""
        if drops_something(node):
            return
        source = _first_node(node)
        for key in self._memory.get(source, ()) if source is not None else ():
            self._merge(keys[0], key)

    def _merge_rebound(self, graph: Graph, rebinding: list[Mutation]) -> None:
        """After ``set_`` the fake tensors of the past are gone, so all views are merged with what they view."""
        for node in graph.nodes:
            if node.op in ("call_function", "call_method") and traits_of(node.op, node.target).view:
                source = _first_node(node)
                for key in self._memory.get(source, ()) if source is not None else ():
                    for own in self._memory[node]:
                        self._merge(own, key)
        for mutation in rebinding:
            keys = [key for n in mutation.node.all_input_nodes for key in self._memory.get(n, ())]
            for key in keys[1:]:
                self._merge(keys[0], key)

    def _owner(self, node: Node, value: Any) -> _Owner:
        tensor = attribute(node) if node.op == "get_attr" else value
        parameter = node in self._parameters or isinstance(tensor, torch.nn.Parameter)
        if isinstance(value, torch.Tensor):
            return _Owner(value.dtype, value.device, parameter)
        if isinstance(tensor, torch.Tensor):
            return _Owner(tensor.dtype, tensor.device, parameter)
        return _Owner(None, None, parameter)

    # ------------------------------------------------------------ bodies

    def _written_by_bodies(self, node: Node) -> list[Node]:
        """The operands that a higher-order operator writes: those whose placeholder its bodies write."""
        name = operator_name(node)
        bodies = called_bodies(node)
        if not bodies:
            reads_only = name in FUNCTIONAL_HIGHER_ORDER or indexed_by_export(node) is not None
            return [] if reads_only else tensor_inputs(node)
        written: dict[Node, None] = {}
        for body in bodies:
            indices = self._summary(body.module)
            operands = [body.operands[i] for i in indices] if indices is not None else [None]
            if any(operand is None for operand in operands):
                return tensor_inputs(node)  # a loop variable, or memory the body holds itself
            written.update((operand, None) for operand in operands if isinstance(operand, Node))
        return list(written)

    def _written_by_module(self, node: Node) -> list[Node]:
        """The operands that a call_module writes.

        Dynamo and export inline modules, and leave only ``_guards_fn``, which reads. A leaf module of another tracer
        may do anything: torch's own write their input when ``inplace`` is set, others are taken to write all operands.
        """
        if node.target == "_guards_fn" or node.graph.owning_module is None:
            return [] if node.target == "_guards_fn" else tensor_inputs(node)
        module = node.graph.owning_module.get_submodule(str(node.target))
        if isinstance(module, GraphModule):
            indices = self._summary(module)
            if indices is None or node.kwargs or len(node.args) != len(placeholders(module)):
                return [] if indices == () else tensor_inputs(node)
            return [operand for i in indices if isinstance(operand := node.args[i], Node)]
        if type(module).__module__.startswith("torch.nn."):
            return tensor_inputs(node)[:1] if getattr(module, "inplace", False) else []
        return tensor_inputs(node)

    def _summary(self, module: GraphModule) -> tuple[int, ...] | None:
        """Which placeholders a body writes; None if it writes memory that it holds itself, or unknown memory."""
        if id(module) not in self._summaries:
            body = Effects.__new__(Effects)
            body._parameters, body._summaries = frozenset(), self._summaries
            body._read(module.graph)
            inputs = placeholders(module)
            input_roots = {root for node in inputs for root in body._roots_of(node)}
            held = body._owners.keys() - input_roots
            if not held.isdisjoint(body._writes):
                self._summaries[id(module)] = None
            else:
                indices = [i for i, n in enumerate(inputs) if not body._writes.keys().isdisjoint(body._roots_of(n))]
                self._summaries[id(module)] = tuple(indices)
        return self._summaries[id(module)]

    # ------------------------------------------------------------ memories that are one

    def _new_key(self) -> int:
        self._unnamed -= 1  # storages have positive keys
        return self._unnamed

    def _find(self, key: int) -> int:
        parents = self._parents
        while (parent := parents.get(key)) is not None:
            parents[key] = parents.get(parent, parent)  # path halving
            key = parent
        return key

    def _merge(self, a: int, b: int) -> None:
        a, b = self._find(a), self._find(b)
        if a != b:
            self._parents[a] = b


def is_pure(node: Node) -> bool:
    """Whether a node may be erased once it has no users: it writes nothing, checks nothing and changes no state.

    Dropout and attention with dropout count as pure: erasing one moves the random stream, as every rewrite of a site
    with dropout does, which is why such sites are left under ``fallback_random``. Other random operations do not.
    """
    if node.op == "get_attr":
        return True
    if node.op not in ("call_function", "call_method"):
        return False
    traits = traits_of(node.op, node.target)
    if traits.higher_order:
        if operator_name(node) in FUNCTIONAL_HIGHER_ORDER or indexed_by_export(node) is not None:
            return True
        bodies = called_bodies(node)
        return bool(bodies) and all(body.kind != "other" and _computes_only(body.module.graph) for body in bodies)
    if not traits.pure or (not traits.drops and node.is_impure()):  # FX knows what libraries registered as effectful
        return False
    return not call_writes(node)


def _computes_only(graph: Graph) -> bool:
    return all(n.op in ("placeholder", "output") or is_pure(n) for n in graph.nodes)


METADATA_ASSERTIONS: frozenset[Target] = frozenset(
    t
    for t in (
        torch.ops.aten._assert_tensor_metadata,
        torch.ops.aten._assert_tensor_metadata.default,
        getattr(torch, "_assert_tensor_metadata", None),
    )
    if t is not None
)
"""Assertions on the dtype, device and layout of a tensor, which ``.to`` leaves behind in exported graphs."""


def is_metadata_assertion(node: Node) -> bool:
    """Whether a node only asserts metadata of a tensor, and does not use the tensor's elements."""
    return node.op == "call_function" and node.target in METADATA_ASSERTIONS


# ---------------------------------------------------------------- fake values


def _may_overlap(a: list[_Owner], b: list[_Owner]) -> bool:
    return any(
        not one.parameter
        and (one.dtype is None or other.dtype is None or (one.dtype, one.device) == (other.dtype, other.device))
        for one in a
        for other in b
    )


def _first_node(node: Node) -> Node | None:
    first = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))
    return first if isinstance(first, Node) else next(iter(node.all_input_nodes), None)


__all__ = ["METADATA_ASSERTIONS", "Effects", "Mutation", "is_metadata_assertion", "is_pure"]
