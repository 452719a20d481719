"""Edits: planned with fake values, then applied in one step that cannot fail half-way.

A `Plan` collects calls and runs each on fake tensors as it is added, under the context of the site, so that
everything that can go wrong does so before the graph is touched. `Plan.apply` inserts the calls, gives their result
the name of the node it replaces, and erases what only that node needed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node

from attn_pass.compat import no_new_guards
from attn_pass.graph.effects import Effects, is_metadata_assertion, is_pure
from attn_pass.graph.memory import storages
from attn_pass.graph.names import torch_name
from attn_pass.graph.provenance import origin_of
from attn_pass.graph.regions import Region
from attn_pass.graph.values import Sizes, fake_value, tensor_value, value_key
from attn_pass.model.index import Index, Poly, Quotient, Remainder
from attn_pass.model.views import Expand, Pad, Permute, Reshape, Slice, Step

aten = torch.ops.aten


class LayoutError(Exception):
    """A result cannot be given the memory layout of the one it replaces."""


@dataclass(eq=False)
class Planned:
    """A call that will be inserted, with its fake value."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fake: Any
    node: Node | None = field(default=None)
    key: Any = None  # of a value that is made of numbers and sizes alone: equal keys, equal values


Value = Node | Planned


def fake_of(value: Value) -> Any:
    """The fake value of a node or of a planned call."""
    return value.fake if isinstance(value, Planned) else fake_value(value)


def replace_arguments(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Gives a call other arguments that change neither the shape nor the type of what is taken from its result."""
    node.args, node.kwargs = args, kwargs


class SizeNodes:
    """The nodes of a graph that hold symbolic integers, and the tensors whose dimensions do.

    And ``made``: what was inserted for earlier sites and is made of nothing but numbers and sizes (masks, mostly).
    ``on_trial`` are nodes that may be taken away again.
    """

    def __init__(self, gm: GraphModule, sizes: Sizes, on_trial: Set[Node] = frozenset()) -> None:
        self.sizes = sizes
        self.made: dict[Any, Planned] = {}
        self.integers: dict[Index, Node] = {}
        self.dimensions: dict[Index, tuple[Node, int]] = {}
        for node in gm.graph.nodes:
            value = None if node in on_trial else fake_value(node)
            if isinstance(value, torch.Tensor):
                for dim, size in enumerate(value.shape):
                    if type(size) is not int:
                        self.dimensions.setdefault(sizes.index(size), (node, dim))
            elif isinstance(value, torch.SymInt):
                self.integers.setdefault(sizes.index(value), node)


class Plan:
    """The calls that will replace one node, each already run on fake values."""

    def __init__(
        self,
        gm: GraphModule,
        result: Node,
        region: Region,
        size_nodes: SizeNodes,
        effects: Effects,
        in_body: bool = False,
        stands_for: Node | None = None,
        any_strides: Sequence[Any] = (),
    ) -> None:
        self.any_strides = any_strides  # operators that take operands with any strides, beside torch's own
        self.in_body = in_body
        self.stands_for = stands_for  # whose users the result gets, where it is on trial and has none of its own
        self.gm = gm
        self.result = result
        self.region = region
        self.size_nodes = size_nodes
        self.sizes = size_nodes.sizes
        self.effects = effects
        self.calls: list[Planned] = []
        self.logarithm: Value | None = None  # the scores' log-sum-exp, from a kernel that gives it with its result
        self._known: dict[Any, Value] = {}
        self._sharing = False
        self._moved: list[tuple[Node, torch.Tensor]] = []  # what lies otherwise with the new value, unobserved
        self._mode = _fake_mode(result)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Calls are added inside this context: fake mode, and the ambient state of the site."""
        with self._mode, enable_python_dispatcher(), self.region.restore():
            yield

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Calls added inside this context are emitted once for all sites, even if they read tensors that are never
        written.

        For values that are the same in every region of a graph and have no gradient: masks.
        """
        self._sharing = True
        try:
            yield
        finally:
            self._sharing = False

    def adding_no_guard(self) -> AbstractContextManager[list[str]]:
        """Inside, calls fail instead of adding a fact about symbolic sizes; yields the requested facts."""
        shape_env = self._mode.shape_env
        return nullcontext([]) if shape_env is None else no_new_guards(shape_env)

    def guards(self) -> int:
        """How many facts about symbolic sizes the program rests on so far."""
        shape_env = self._mode.shape_env
        return 0 if shape_env is None else len(shape_env.guards)

    def broken_guard(self, since: int) -> str | None:
        """One that was added since then and fails for a size the program is for; None if none was found to.

        Torch notes down what it saw on the way, and most of it holds for every size: sizes are tried, nothing is
        proved.
        """
        shape_env = self._mode.shape_env
        if shape_env is None:
            return None
        for guard in shape_env.guards[since:]:
            symbols = sorted(guard.expr.free_symbols, key=str)
            ranges = [shape_env.var_to_range.get(s) for s in symbols]
            for tried in _TRIED:
                values = {s: _clamped(tried + 3 * n, r) for n, (s, r) in enumerate(zip(symbols, ranges))}
                if guard.expr.xreplace(values) in (False, sympy.false):
                    return f"{guard.expr} fails for {', '.join(f'{s} = {v}' for s, v in values.items())}"
        return None

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Planned:
        """Adds a call and returns it with its fake value; whatever torch raises on the fake values comes through.

        One that an earlier site of the graph needed too, and that no tensor of the program enters, is that one, but for
        random numbers, which each site draws for itself.
        """
        draws = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
        key = None if draws else self._key((target, args, kwargs))
        known = None if key is None else self.size_nodes.made.get(key)
        if known is not None and known.node is not None and not known.node._erased:
            return known
        fake = target(*_map(args), **_map(kwargs))
        planned = Planned(target, args, kwargs, fake, key=key)
        self.calls.append(planned)
        return planned

    def _key(self, value: Any) -> Any:
        """The identity of a value computed from numbers and sizes only; None if it depends on a tensor."""
        if isinstance(value, (Node, Planned)):
            fake = fake_of(value)
            if isinstance(fake, torch.SymInt):
                return ("size", self.sizes.index(fake))
            if isinstance(value, Node) and self._sharing and not self.effects.mutations(value):
                return ("node", value)
            return value.key if isinstance(value, Planned) else None
        if isinstance(value, dict):
            value = tuple(value.items())
        if isinstance(value, (list, tuple)):
            keys = tuple(self._key(v) for v in value)
            return None if None in keys else keys
        if isinstance(value, float):
            return (float, repr(value))  # 0.0 and -0.0 are equal, and not the same
        return (type(value), value) if isinstance(value, Hashable) else None

    def module(self, name: str, module: GraphModule) -> Planned:
        """A graph as an argument of a higher-order operator: an attribute of the module the calls go into."""
        planned = Planned(_attribute, (name,), {}, module)
        self.calls.append(planned)
        return planned

    def _attribute_node(self, planned: Planned) -> Node:
        (base,) = planned.args
        number = 0
        while hasattr(self.gm, name := f"{base}_{number}"):
            number += 1
        setattr(self.gm, name, planned.fake)
        return self.gm.graph.get_attr(name)

    def size(self, index: Index) -> int | Value:
        """A size as an argument: an integer, or a node that holds it. Raises `ValueError` if no node does."""
        if isinstance(index, int):
            return index
        if not any(index.terms):  # a number in a quotient
            return sum(index.terms.values())
        known = self._known.get(index)
        if known is None:
            known = self._known[index] = self._make_size(index)
        return known

    def _make_size(self, index: Poly) -> Value:
        before = self.effects.position[self.result]
        node = self.size_nodes.integers.get(index)
        if node is not None and not node._erased and self.effects.position[node] < before:
            return node
        dimension = self.size_nodes.dimensions.get(index)
        if dimension is not None and not dimension[0]._erased and self.effects.position[dimension[0]] < before:
            return self.call(aten.sym_size.int, *dimension)
        total: int | Value = 0
        for monomial, coefficient in index.terms.items():
            term: int | Value = coefficient
            for atom in monomial:
                factor: int | Value
                if isinstance(atom, (Quotient, Remainder)):
                    divided = operator.floordiv if isinstance(atom, Quotient) else operator.mod
                    factor = self.call(divided, self.size(atom.value), self.size(atom.divisor))
                elif len(index.terms) == 1 and len(monomial) == 1 and coefficient == 1:
                    raise ValueError(f"no node holds the size {index}")
                else:
                    factor = self.size(Poly.of(atom))
                term = factor if term == 1 else self.call(operator.mul, term, factor)
            total = term if total == 0 else self.call(operator.add, total, term)
        assert not isinstance(total, int)
        return total

    def shape(self, sizes: Sequence[Index]) -> list[Any]:
        """A shape argument; a single symbolic size becomes -1 so that no node is needed for it."""
        symbolic = [n for n, s in enumerate(sizes) if not isinstance(s, int)]
        if len(symbolic) == 1 and 0 not in sizes:
            return [-1 if n == symbolic[0] else s for n, s in enumerate(sizes)]
        return [self.size(s) for s in sizes]

    def steps(self, value: Value, steps: Iterable[Step]) -> Value:
        """Applies view steps."""
        for step in steps:
            if isinstance(step, Slice):
                start = self.size(step.start)
                end = self.size(step.start + step.length)
                value = self.call(aten.slice.Tensor, value, step.dim, start, end)
            elif isinstance(step, Reshape):
                value = self.call(aten.reshape.default, value, self.shape(step.shape))
            elif isinstance(step, Permute):
                value = self.call(aten.permute.default, value, list(step.dims))
            elif isinstance(step, Pad):
                padding = [0, 0] * (fake_of(value).dim() - step.dim - 1) + [step.before, step.after]
                value = self.call(aten.constant_pad_nd.default, value, padding, 0)
            elif isinstance(step, Expand):
                value = self.call(aten.expand.default, value, [self.size(s) for s in step.shape])
        return value

    # ------------------------------------------------------------ applying

    @property
    def inserted(self) -> list[Node]:
        """The nodes that `apply` put into the graph."""
        return [planned.node for planned in self.calls if planned.node is not None]

    def insert(self, new: Value) -> list[Node]:
        """Inserts the calls that a value needs and that are not nodes yet, before the node they replace."""
        inserted = []
        for planned in _needed(self.calls, new):
            if planned.node is not None:
                continue
            if planned.target is _attribute:
                with self.gm.graph.inserting_before(self.result):
                    planned.node = self._attribute_node(planned)
                continue
            args, kwargs = _nodes(planned.args), _nodes(planned.kwargs)
            planned.node = self.insert_node("call_function", planned.target, args, kwargs, planned.fake)
            if planned.key is not None:
                self.size_nodes.made[planned.key] = planned
            inserted.append(planned.node)
        return inserted

    def insert_node(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], fake: Any) -> Node:
        """Inserts one node with this fake value before the node that is replaced, with the provenance of that."""
        old = self.result
        with self.gm.graph.inserting_before(old):
            node = self.gm.graph.create_node(op, target, args, kwargs)
        node.meta = {**origin_of(old), value_key(old): fake, **node.meta}  # last what an observer of the graph noted
        return node

    def apply(self, new: Value, erase: Iterable[Node]) -> Node:
        """Inserts the calls before the node they replace, moves its users over, erases it and ``erase``.

        Also erases operands that nothing needs any more and that are proven pure. Returns the new node.
        """
        old = self.result
        graph = self.gm.graph
        self.insert(new)
        node = new.node if isinstance(new, Planned) else new
        assert node is not None
        name = old.name
        old.replace_all_uses_with(node)
        for user, moved in self._moved:
            user.meta[value_key(user)] = moved
        doomed = [old, *erase]
        inputs = [i for n in doomed for i in n.all_input_nodes]
        _erase(graph, doomed)
        erase_unused(graph, inputs)
        if old._erased:
            node.name = name
        return node

    def put_beside(self, new: Value, old: Node, erased: Set[Node]) -> Node:
        """Inserts a value in the place of another node than the result; what is erased keeps the old one."""
        self.insert(new)
        node = new.node if isinstance(new, Planned) else new
        assert node is not None
        old.replace_all_uses_with(node, delete_user_cb=lambda user: user not in erased)
        return node

    def has_layout_of(self, new: Value, old: Node) -> bool:
        """Whether the new value has the shape, dtype and strides of a node."""
        before, after = tensor_value(old), fake_of(new)
        if before is None or (before.dtype, self.sizes.shape(before)) != (after.dtype, self.sizes.shape(after)):
            return False
        return self._strides(before) == self._strides(after)

    def keeps_layout(self, new: Value) -> bool:
        """Whether no user can distinguish the new value's strides from the old one's.

        Nor a user of what is taken from it: where a copy of the old value is a view of the new one, or the other way
        round, neither may be written.
        """
        before, after = tensor_value(self.result), fake_of(new)
        self._moved = []
        if before is None or self._strides(before) == self._strides(after):
            return True
        results = (self.result,) if self.stands_for is None else (self.result, self.stands_for)
        matters = any(self._layout_matters(node, after, 0) for node in results)
        if matters:
            self._moved = []
        return not matters

    def _layout_matters(self, node: Node, new: torch.Tensor, depth: int) -> bool:
        """Whether a user would fail with the new strides, or have a result with other strides that can be observed.

        Users are run on fake values until their strides are what they were: a reshape or a linear layer ends it.
        """
        for user in node.users:
            name = str(user.target) if user.target in self.any_strides else torch_name(user)
            if not name or depth > _DEPTH or name in _TELLING or _is_in_place(user, name):
                return True  # the graph's output, a write, and code that may look at strides
            if is_metadata_assertion(user):
                continue
            moved, before = _moved(user, node, new), fake_value(user)
            if user.target in self.any_strides and isinstance(moved, tuple) and isinstance(before, (tuple, list)):
                if not self._are_laid_out_alike(moved, before):
                    return True
                continue
            if not isinstance(moved, torch.Tensor) or not isinstance(before, torch.Tensor):
                return True
            if self._is_written_as_other_memory(user, node, moved, new):
                return True
            if self._strides(moved) != self._strides(before):
                if self._layout_matters(user, moved, depth + 1):
                    return True
                self._moved.append((user, moved))
        return False

    def _are_laid_out_alike(self, some: Sequence[Any], others: Sequence[Any]) -> bool:
        """Whether the results of a call have the strides of another one's."""
        if not all(isinstance(x, torch.Tensor) for x in (*some, *others)):
            return False
        return [self._strides(x) for x in some] == [self._strides(x) for x in others]

    def _is_written_as_other_memory(self, user: Node, node: Node, moved: torch.Tensor, new: torch.Tensor) -> bool:
        """Whether a user is a view of the new value and was none, or was one, and one of the two may be written."""
        before = tensor_value(node), tensor_value(user)
        if _share_memory(*before) == _share_memory(new, moved):
            return False
        if self.effects.mutations(user) or self.effects.mutations(node):
            return True
        saves = self.in_body and moved.requires_grad  # what a caller may write to then
        aliases = self.effects.aliases(user) if user in self.effects.position else (user,)
        return saves and any(u.op == "output" for alias in aliases for u in alias.users)

    def may_be_written_later(self) -> bool:
        """Whether the result's memory is written afterwards, or given to a caller who may do so."""
        results = (self.result,) if self.stands_for is None else (self.result, self.stands_for)
        aliases = [alias for result in results for alias in (result, *self.effects.aliases(result))]
        returned = self.in_body and any(user.op == "output" for node in aliases for user in node.users)
        return returned or any(self.effects.mutations(result) for result in results)

    def unwritten(self, value: Value) -> Value:
        """A tensor of the program as it is now: a copy in training, if it is written after the result is computed.

        A kernel saves its operands for the backward as they are, where the program may save copies of them.
        """
        saved = tensor_value(self.result)
        if not isinstance(value, Node) or saved is None or not saved.requires_grad:
            return value
        later = self.effects.mutation_between(value, self.effects.position[self.result], len(self.effects.position))
        return value if later is None else self.call(aten.clone.default, value)

    def in_layout_of_result(self, value: Value) -> Value:
        """A copy of the value in the memory order of the value it replaces. Raises `LayoutError` if it is none."""
        old = tensor_value(self.result)
        assert old is not None
        strides = [self.sizes.hint(self.sizes.index(s)) for s in old.stride()]
        order = sorted(range(old.dim()), key=lambda d: -strides[d])
        moved = self.call(aten.permute.default, value, order)
        copied = self.call(aten.clone.default, moved, memory_format=torch.contiguous_format)
        back = self.call(aten.permute.default, copied, [order.index(d) for d in range(old.dim())])
        if not self.keeps_layout(back):
            raise LayoutError(f"the strides {tuple(old.stride())} of {self.result.name} cannot be kept")
        return back

    def _strides(self, tensor: torch.Tensor) -> tuple[Index, ...]:
        shape = self.sizes.shape(tensor)
        return tuple(self.sizes.index(s) for s, n in zip(tensor.stride(), shape) if n != 1)


_TRIED = (*range(1, 10), 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 255, 256, 257, 1000, 1023, 1024)


def _clamped(value: int, bounds: Any) -> sympy.Integer:
    """The value, or the bound of the range it lies outside of."""
    if bounds is not None:
        value = max(value, int(bounds.lower)) if bounds.lower.is_Integer else value
        value = min(value, int(bounds.upper)) if bounds.upper.is_Integer else value
    return sympy.Integer(value)


def _fake_mode(node: Node) -> FakeTensorMode:
    for other in (node, *node.all_input_nodes):
        value = tensor_value(other)
        if isinstance(value, FakeTensor):
            return value.fake_mode
    raise ValueError(f"{node.name} has no fake value")


def is_attribute(value: Planned) -> bool:
    """Whether it stands for a graph that is an attribute of the module the calls go into."""
    return value.target is _attribute


def _attribute(name: str) -> None:
    """Stands for the module attribute of that name where a planned call has its target."""


def _map(value: Any) -> Any:
    """Arguments with nodes and planned calls replaced by their fake values."""
    if isinstance(value, (Node, Planned)):
        return fake_of(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_map(v) for v in value)
    if isinstance(value, dict):
        return {k: _map(v) for k, v in value.items()}
    return value


def _nodes(value: Any) -> Any:
    """Arguments with planned calls replaced by their nodes."""
    if isinstance(value, Planned):
        assert value.node is not None
        return value.node
    if isinstance(value, (list, tuple)):
        return type(value)(_nodes(v) for v in value)
    if isinstance(value, dict):
        return {k: _nodes(v) for k, v in value.items()}
    return value


def _needed(calls: list[Planned], result: Value) -> list[Planned]:
    """The calls the result needs, in order."""
    needed: set[int] = set()

    def visit(value: Any) -> None:
        if isinstance(value, Planned) and id(value) not in needed:
            needed.add(id(value))
            visit(value.args)
            visit(value.kwargs)
        elif isinstance(value, (list, tuple)):
            for v in value:
                visit(v)
        elif isinstance(value, dict):
            for v in value.values():
                visit(v)

    visit(result)
    return [c for c in calls if id(c) in needed]


def _erase(graph: torch.fx.Graph, doomed: Iterable[Node]) -> None:
    """Erases nodes, users first; one that something still needs stays, and so does what it needs."""
    remaining = list(dict.fromkeys(doomed))
    progress = True
    while progress:
        progress = False
        for node in list(remaining):
            if all(is_metadata_assertion(u) for u in node.users):
                for user in list(node.users):
                    graph.erase_node(user)
                graph.erase_node(node)
                remaining.remove(node)
                progress = True


def erase_unused(graph: torch.fx.Graph, nodes: Iterable[Node]) -> None:
    """Erases pure nodes that nothing needs but assertions on their metadata, and then what only they needed."""
    waiting = list(dict.fromkeys(nodes))
    while waiting:
        node = waiting.pop()
        if node._erased or node.op in ("placeholder", "output", "get_attr") or not is_pure(node):
            continue
        if not all(is_metadata_assertion(u) for u in node.users):
            continue
        inputs = list(node.all_input_nodes)
        for user in list(node.users):
            graph.erase_node(user)
        graph.erase_node(node)
        waiting += inputs


_TELLING = frozenset({"as_strided", "stride", "is_contiguous", "data_ptr", "storage_offset"})
_DEPTH = 12  # operations a change of layout is followed through


def _is_in_place(user: Node, name: str) -> bool:
    in_operator = getattr(user.target, "__module__", "") == "_operator" and name in ("setitem", *_IN_PLACE_OPERATORS)
    return in_operator or (name.endswith("_") and not name.endswith("__"))


def _share_memory(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return not set(storages(one) or ()).isdisjoint(storages(other) or ())


_IN_PLACE_OPERATORS = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor")


def _moved(user: Node, node: Node, new: torch.Tensor) -> Any:
    """The fake value of a user when it gets ``new`` instead of ``node``; None if that fails."""
    args, kwargs = torch.fx.node.map_arg((user.args, user.kwargs), lambda n: new if n is node else fake_of(n))
    call = getattr(args[0], user.target) if isinstance(user.target, str) else user.target
    try:
        return call(*args[1:], **kwargs) if isinstance(user.target, str) else call(*args, **kwargs)
    except Exception:
        return None
