"""Who writes memory, and when: aliases and in-place writes of an FX graph that is not functional yet.

Before AOTAutograd a graph still holds ``m[:, 5:] = -inf``, ``matmul(a, b, out=s)``, ``v.masked_fill_(...)`` on a
view of ``s``, and writes inside the bodies of higher-order operators (traps T1, T2, T3). The value of a node is then a
question of time, which this file answers for graphs of Dynamo and of torch.export, decomposed or not.

Two nodes share memory when their fake tensors share a storage, which is exact where torch itself is. What fake tensors
do not say is added: ``dropout`` in eval mode returns its input in eager, but a copy under the python dispatcher that
Dynamo and export trace with; after ``set_`` a fake tensor shows only its last storage. Where metadata is missing, view
chains decide. All that is in doubt counts as shared and as written. One pass, no symbolic algebra, no guard.
"""

from __future__ import annotations

import inspect
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Target
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from attn_pass.graph.subgraphs import attribute, called_bodies, operator_name, placeholders


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
        found = {member for root in roots for member in self._members[root]} | {node}
        return tuple(sorted(found, key=self.position.__getitem__))

    def mutations(self, node: Node) -> Sequence[Mutation]:
        """All writes that reach, or may reach, the memory ``node`` lives in, in graph order."""
        roots = self._roots_of(node)
        if len(roots) == 1:
            return self._writes_of(roots[0])
        found = {m for root in roots for m in self._writes_of(root)}
        return tuple(sorted(found, key=_position_of))

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
        return _sees_same_elements(_fake(a), _fake(b))

    def geometry_changes_after(self, node: Node, position: int) -> bool:
        """Whether ``node``'s fake tensor shows a shape or storage it gets after ``position`` only.

        ``t_``, ``unsqueeze_``, ``set_`` and the like change the fake tensor in the metadata of every node that has it,
        so sizes read from metadata are those of the end of the graph. Believe none of them where this is true.
        """
        return any(self._rebound.get(root, -1) >= position for root in self._roots_of(node))

    def is_internal(self, node: Node, allowed: Set[Node]) -> bool:
        """Whether nobody but ``allowed`` holds ``node``'s memory, so that in-place operations in it may be erased.

        Every alias is in ``allowed``, none of it is the caller's, and the graph does not return it (unless the output
        node is in ``allowed`` too).
        """
        if not self._owners.keys().isdisjoint(self._roots_of(node)):
            return False
        for alias in self.aliases(node):
            if alias not in allowed or any(u.op == "output" and u not in allowed for u in alias.users):
                return False
        return True

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
        traits_of: dict[Target, _Traits] = {}
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
                keys = _storages(value)
                self._has_values = True
            else:
                keys = () if type(value) in _WITHOUT_MEMORY else None
            if keys is None:
                keys = self._place(node, value)
            memory[node] = keys
            if op == "call_function" or op == "call_method":
                target = node.target
                traits = traits_of.get(target)
                if traits is None:
                    traits = traits_of[target] = _traits(op, target)
                if traits.higher_order:
                    writes += (Mutation(node, n, index, False) for n in self._written_by_bodies(node))
                elif traits.write is not None or "out" in node.kwargs:
                    for write in _call_writes(node):
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
        for key, found in owners.items():
            self._owners.setdefault(self._find(key), []).extend(found)
        self._writes: dict[int, list[Mutation]] = {}
        for mutation in writes:
            for root in self._roots_of(mutation.target):
                self._writes.setdefault(root, []).append(mutation)
        self._rebound = {r: mutation.position for mutation in rebinding for r in self._roots_of(mutation.target)}
        self._reaching: dict[int, Sequence[Mutation]] = {}

    def _place(self, node: Node, value: Any) -> tuple[int, ...]:
        """The memories of a node's value, which is anything but a plain fake tensor."""
        keys = _storages(value)
        if keys is not None and (keys or value is not None):
            return keys
        if node.op == "get_attr":
            held = attribute(node)
            keys = None if held is None else _storages(held)
            return (self._new_key(),) if keys is None else keys
        if node.op == "placeholder":
            return (self._new_key(),)
        if self._has_values and not node.users:
            return ()  # a write or a check that returns nothing
        return self._place_by_views(node)

    def _place_by_views(self, node: Node) -> tuple[int, ...]:
        """The memories of a result nothing is known of but how it was computed."""
        traits = _traits(node.op, node.target) if node.op in ("call_function", "call_method") else _Traits(unknown=True)
        sources = [write.target for write in _call_writes(node)]
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
        if _drops_something(node):
            return
        source = _first_node(node)
        for key in self._memory.get(source, ()) if source is not None else ():
            self._merge(keys[0], key)

    def _merge_rebound(self, graph: Graph, rebinding: list[Mutation]) -> None:
        """After ``set_`` the fake tensors of the past are gone, so all views are merged with what they view."""
        for node in graph.nodes:
            if node.op in ("call_function", "call_method") and _traits(node.op, node.target).view:
                source = _first_node(node)
                for key in self._memory.get(source, ()) if source is not None else ():
                    for own in self._memory[node]:
                        self._merge(own, key)
        for mutation in rebinding:
            keys = [key for n in mutation.node.all_input_nodes for key in self._memory.get(n, ())]
            for key in keys[1:]:
                self._merge(keys[0], key)

    def _owner(self, node: Node, value: Any) -> _Owner:
        held = attribute(node) if node.op == "get_attr" else value
        parameter = node in self._parameters or isinstance(held, torch.nn.Parameter)
        if isinstance(value, torch.Tensor):
            return _Owner(value.dtype, value.device, parameter)
        if isinstance(held, torch.Tensor):
            return _Owner(held.dtype, held.device, parameter)
        return _Owner(None, None, parameter)

    # ------------------------------------------------------------ bodies

    def _written_by_bodies(self, node: Node) -> list[Node]:
        """The operands that a higher-order operator writes: those whose placeholder its bodies write."""
        name = operator_name(node)
        bodies = called_bodies(node)
        if not bodies:
            return [] if name in _FUNCTIONAL_HIGHER_ORDER else _tensor_inputs(node)
        written: dict[Node, None] = {}
        for body in bodies:
            indices = self._summary(body.module)
            operands = [body.operands[i] for i in indices] if indices is not None else [None]
            if any(operand is None for operand in operands):
                return _tensor_inputs(node)  # a loop variable, or memory the body holds itself
            written.update((operand, None) for operand in operands if isinstance(operand, Node))
        return list(written)

    def _written_by_module(self, node: Node) -> list[Node]:
        """The operands that a call_module writes.

        Dynamo and export inline modules, and leave only ``_guards_fn``, which reads. A leaf module of another tracer
        may do anything: torch's own write their input when ``inplace`` is set, others are taken to write all operands.
        """
        if node.target == "_guards_fn" or node.graph.owning_module is None:
            return [] if node.target == "_guards_fn" else _tensor_inputs(node)
        module = node.graph.owning_module.get_submodule(str(node.target))
        if isinstance(module, GraphModule):
            indices = self._summary(module)
            if indices is None or node.kwargs or len(node.args) != len(placeholders(module)):
                return [] if indices == () else _tensor_inputs(node)
            return [operand for i in indices if isinstance(operand := node.args[i], Node)]
        if type(module).__module__.startswith("torch.nn."):
            return _tensor_inputs(node)[:1] if getattr(module, "inplace", False) else []
        return _tensor_inputs(node)

    def _summary(self, module: GraphModule) -> tuple[int, ...] | None:
        """Which placeholders a body writes; None when it writes memory it holds itself, or that of nobody known."""
        if id(module) not in self._summaries:
            body = Effects.__new__(Effects)
            body._parameters, body._summaries = frozenset(), self._summaries
            body._read(module.graph)
            inputs = placeholders(module)
            given = {root for node in inputs for root in body._roots_of(node)}
            held = body._owners.keys() - given
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
    traits = _traits(node.op, node.target)
    if traits.higher_order:
        if operator_name(node) in _FUNCTIONAL_HIGHER_ORDER:
            return True
        bodies = called_bodies(node)
        return bool(bodies) and all(body.kind != "other" and _computes_only(body.module.graph) for body in bodies)
    if not traits.pure or (not traits.drops and node.is_impure()):  # FX knows what libraries registered as effectful
        return False
    return not _call_writes(node)


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
"""Assertions on the dtype, device and layout of a tensor, which ``.to`` leaves behind in exported graphs (trap T4)."""


def is_metadata_assertion(node: Node) -> bool:
    """Whether a node only asserts metadata of a tensor, so that it is no use of the tensor's elements."""
    return node.op == "call_function" and node.target in METADATA_ASSERTIONS


# ---------------------------------------------------------------- fake values


_WITHOUT_MEMORY = frozenset({int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Size})


def _fake(node: Node) -> Any:
    value = node.meta.get("example_value")
    return node.meta.get("val") if value is None else value


def _storages(value: Any) -> tuple[int, ...] | None:
    """The storages of a value, empty for a value without memory; None when a tensor does not tell."""
    if type(value) is FakeTensor:
        try:
            return (value.untyped_storage()._cdata,)
        except NotImplementedError:  # sparse and other layouts
            return None
    if isinstance(value, torch.Tensor):
        functorch = torch._C._functorch
        try:
            while functorch.is_functorch_wrapped_tensor(value):  # BatchedTensor, TensorWrapper: no storage of their own
                value = functorch.get_unwrapped(value)
            if is_traceable_wrapper_subclass(value):
                names, _ = value.__tensor_flatten__()
                return _storages([getattr(value, name) for name in names])
            return (value.untyped_storage()._cdata,)
        except (NotImplementedError, RuntimeError):
            return None
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        found: dict[int, None] = {}
        for element in value:
            keys = _storages(element)
            if keys is None:
                return None
            found.update(dict.fromkeys(keys))
        return tuple(found)
    return _storages(list(value.values())) if isinstance(value, dict) else ()


def _sees_same_elements(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    if a is b:
        return True
    if type(a) is not FakeTensor or type(b) is not FakeTensor:
        return False  # a wrapper shows logical sizes
    return (
        a.layout is torch.strided
        and b.layout is torch.strided
        and a.untyped_storage()._cdata == b.untyped_storage()._cdata
        and a.dtype == b.dtype
        and a.dim() == b.dim()
        and all(map(_same_size, (*a.shape, *a.stride()), (*b.shape, *b.stride())))
        and _same_size(a.storage_offset(), b.storage_offset())
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )


def _same_size(a: Any, b: Any) -> bool:
    """Structural equality of two sizes; never asks a SymInt, which could add a guard."""
    if a is b:
        return True
    a, b = (getattr(s.node, "expr", None) if isinstance(s, torch.SymInt) else s for s in (a, b))
    return a is not None and b is not None and bool(a == b)


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


def _tensor_inputs(node: Node) -> list[Node]:
    """The inputs that hold memory, or may; not the modules a higher-order operator calls."""
    return [n for n in node.all_input_nodes if _has_memory(n)]


def _has_memory(node: Node) -> bool:
    value = _fake(node)
    if value is None:
        return not isinstance(attribute(node), torch.nn.Module)
    return _storages(value) != ()


# ---------------------------------------------------------------- what operations write


class _Write(NamedTuple):
    target: Node
    whole: bool
    rebinds: bool = False
    """The target gets another shape or another storage, so its fake tensor says nothing of earlier times."""


_Writer = Callable[[Node], list[_Write]]


class _Traits(NamedTuple):
    """What the target of a node says of all its calls."""

    write: _Writer | None = None
    view: bool = False
    """The result is, or may be, a view of the first argument; asked only where metadata does not tell."""
    returns_input: bool = False
    """A dropout, which returns its first argument itself when it drops nothing."""
    pure: bool = True
    drops: bool = False
    """Random in that it may drop elements only."""
    unknown: bool = False
    higher_order: bool = False


_IN_PLACE_NAMES = tuple(
    name
    for name in (
        *("iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow"),
        *("ilshift", "irshift", "iand", "ior", "ixor"),
    )
    if hasattr(torch.Tensor, f"__{name}__")  # tensors have no __imatmul__: ``a @= b`` makes a new tensor
)
_IN_PLACE_OPERATORS = frozenset(getattr(operator, name) for name in _IN_PLACE_NAMES)
_IN_PLACE_DUNDERS = frozenset(f"__{name}__" for name in _IN_PLACE_NAMES)

_REBINDING = frozenset(
    {
        *("set_", "resize_", "resize_as_", "as_strided_", "sparse_resize_", "sparse_resize_and_clear_"),
        *("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "resize_storage_bytes_"),
    }
)
"""Operations that change the geometry or the storage of their target."""

_PARTIAL = frozenset(
    {
        *("index_put_", "index_fill_", "index_add_", "index_copy_", "index_reduce_", "put_", "masked_scatter_"),
        *("scatter_", "scatter_add_", "scatter_reduce_", "fill_diagonal_", "_index_put_impl_"),
        *("detach_", "requires_grad_", "rename_", "share_memory_", "embedding_renorm_"),
    }
)
"""Operations that write some elements only, or none: their change of autograd state counts as a write."""

_VIEWS = frozenset(
    {
        *("view", "reshape", "view_as", "reshape_as", "_unsafe_view", "_reshape_alias", "flatten", "unflatten"),
        *("ravel", "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "t", "adjoint"),
        *("mT", "mH", "T", "H"),
        *("expand", "expand_as", "broadcast_to", "broadcast_tensors", "squeeze", "unsqueeze", "atleast_1d"),
        *("atleast_2d", "atleast_3d", "select", "narrow", "slice", "split", "split_with_sizes", "tensor_split"),
        *("chunk", "unsafe_chunk", "unsafe_split", "unbind", "hsplit", "vsplit", "dsplit", "unfold", "as_strided"),
        *("diagonal", "real", "imag", "view_as_real", "view_as_complex", "conj", "resolve_conj", "resolve_neg"),
        *("contiguous", "to", "type", "type_as", "float", "double", "half", "bfloat16", "int", "long", "short"),
        *("bool", "cpu", "cuda", "npu", "detach", "alias", "lift", "lift_fresh", "data", "getitem", "__getitem__"),
        *("getattr", "as_subclass", "positive", "_add_batch_dim", "_remove_batch_dim", "_wrap_for_grad"),
        *("_unwrap_for_grad", "_make_dual", "_unpack_dual", "_set_tensor_requires_grad", "rearrange"),
    }
)

_DROPOUTS = frozenset(
    {
        *("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"),
        *("dropout1d", "dropout2d", "dropout3d"),
    }
)

# (running_mean, running_var, whether they are written): schemas of aten do not mark these writes.
_STATISTICS_OF_F = {"batch_norm": (1, 2, "training"), "instance_norm": (1, 2, "use_input_stats")}
_STATISTICS = {
    "batch_norm": (3, 4, "training"),
    "instance_norm": (3, 4, "use_input_stats"),
    "native_batch_norm": (3, 4, "training"),
    "_batch_norm_impl_index": (3, 4, "training"),
    "cudnn_batch_norm": (3, 4, "training"),
    "miopen_batch_norm": (3, 4, "training"),
}
_STATISTICS_FLAG = 5

_FUNCTIONAL_HIGHER_ORDER = frozenset(
    {
        *("auto_functionalized", "auto_functionalized_v2", "triton_kernel_wrapper_functional", "out_dtype"),
        *("inline_asm_elementwise", "flex_attention", "flex_attention_backward"),
    }
)

_RANDOM = frozenset(
    {
        *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli"),
        *("multinomial", "normal", "poisson", "binomial", "rrelu", "gumbel_softmax", "_sample_dirichlet"),
        *("_standard_gamma", "fractional_max_pool2d", "fractional_max_pool3d", "fractional_max_pool2d_with_indices"),
        "fractional_max_pool3d_with_indices",
    }
)

_IMPURE_METHODS = frozenset({"backward", "register_hook", "retain_grad", "record_stream", "tolist", "numpy"})
_PURE_BUILTINS = frozenset({getattr, len, max, min, abs, round, int, float, bool, sum, pow, divmod, slice, tuple, list})
_PURE_MODULES = frozenset(
    {
        *("torch", "torch.functional", "torch.nn.functional", "torch._tensor", "torch._C._nn", "torch._C._linalg"),
        *("torch._C._special", "torch._C._fft", "torch._C._nested", "torch._C._sparse", "torch._VF"),
        *("_operator", "operator", "math", "einops", "einops.einops"),
    }
)
_TRUSTED = ("torch.", "_operator.", "operator.", "math.", "builtins.", "einops.", "sympy.")
"""Where functions come from that write nothing unless they are known to; any other may write all its tensors."""

_READING_ONLY = frozenset(
    {
        *("npu_fusion_attention", "npu_prompt_flash_attention", "npu_incre_flash_attention"),
        *("npu_fused_infer_attention_score", "flash_attn_func", "flash_attn_varlen_func", "flash_attn_qkvpacked_func"),
        *("memory_efficient_attention", "flash_attention"),
    }
)
"""Attention functions from elsewhere that only read; not ``flash_attn_with_kvcache``, which writes its cache."""

_CHECKS_AND_SWITCHES = ("_assert", "_check", "_functional_assert", "sym_constrain", "_log_api", "set_", "use_", "_set_")
_EFFECTFUL_NAMESPACES = ("c10d", "_c10d", "symm_mem", "profiler", "streams", "_dtensor", "rngprims", "debugprims")


@lru_cache(maxsize=4096)
def _traits(op: str, target: Target) -> _Traits:
    if isinstance(target, str):
        return _method_traits(target)
    if isinstance(target, HigherOrderOperator):
        return _Traits(higher_order=True, pure=False, unknown=True)
    if isinstance(target, OpOverload):
        return _overload_traits(target)
    if isinstance(target, OpOverloadPacket):
        return _packet_traits(target)
    return _function_traits(target)


def _method_traits(name: str) -> _Traits:
    if name in _IN_PLACE_DUNDERS:
        return _Traits(_writes_first(whole=True), pure=False)
    if name == "__setitem__":
        return _Traits(_writes_item, pure=False)
    if name.endswith("_") and not name.endswith("__"):
        return _Traits(_writes_first(name), pure=False)
    known = hasattr(torch.Tensor, name)  # streams and events have methods too
    return _Traits(view=name in _VIEWS, pure=known and name not in _IMPURE_METHODS, unknown=not known)


def _overload_traits(target: OpOverload) -> _Traits:
    schema = target._schema
    namespace, _, name = schema.name.partition("::")
    written = _written_arguments(schema)
    write: _Writer | None = None
    if written:
        whole = len(written) == 1 and name.endswith("_") and namespace in ("aten", "prims")
        write = _writes_arguments(written, whole, any(a.is_out for a in schema.arguments), name)
    elif name in _STATISTICS:
        write = _writes_statistics(*_STATISTICS[name])
    impure = (
        bool(written)
        or not schema.returns
        or (torch.Tag.nondeterministic_seeded in target.tags and not _may_drop(name))
        or namespace.startswith(_EFFECTFUL_NAMESPACES)
        or name.startswith(_CHECKS_AND_SWITCHES)
    )
    view = name in _VIEWS or any(a.alias_info is not None for a in schema.arguments)
    returns_input = namespace == "aten" and name in _DROPOUTS
    return _Traits(write, view, returns_input, pure=not impure, drops=_may_drop(name))


def _packet_traits(target: OpOverloadPacket) -> _Traits:
    """A packet does not say which overload runs: what any of them writes counts, ``out=`` apart."""
    overloads = [getattr(target, name) for name in target.overloads()]
    overloads = [o for o in overloads if not any(a.is_out for a in o._schema.arguments)]
    traits = [_overload_traits(o) for o in overloads]
    written = tuple(dict.fromkeys(w for o in overloads for w in _written_arguments(o._schema)))
    name = str(target.__name__)
    write = next((t.write for t in traits if t.write is not None), None)
    if written:
        write = _writes_arguments(written, len(written) == 1 and name.endswith("_"), False, name)
    return _Traits(
        write,
        view=any(t.view for t in traits),
        returns_input=any(t.returns_input for t in traits),
        pure=bool(traits) and all(t.pure for t in traits),
        drops=_may_drop(name),
    )


def _function_traits(target: Callable[..., Any]) -> _Traits:
    if target is operator.setitem:
        return _Traits(_writes_item, pure=False)
    if target is setattr:
        return _Traits(_writes_attribute, pure=False)
    if target in _IN_PLACE_OPERATORS:
        return _Traits(_writes_first(whole=True))  # of a SymInt it writes nothing
    name = str(getattr(target, "__name__", ""))
    owner = getattr(target, "__objclass__", None)
    if owner is not None and issubclass(torch.Tensor, owner):  # torch.Tensor.add_ and its like, as call_function
        return _method_traits(name)
    module = str(getattr(target, "__module__", None) or "")
    if module == "torch._tensor" and str(getattr(target, "__qualname__", "")).startswith("Tensor."):
        return _method_traits(name)
    if name in _READING_ONLY:
        return _Traits(drops=True)
    if not f"{module}.".startswith(_TRUSTED) or module.startswith("torch.distributed"):
        return _Traits(_writes_all_inputs, pure=False, unknown=True)
    if module in ("_operator", "operator", "math"):
        return _Traits(view=target is operator.getitem)
    if module == "builtins":
        return _Traits(view=target is getattr, pure=target in _PURE_BUILTINS)
    pure = module in _PURE_MODULES and not name.startswith(_CHECKS_AND_SWITCHES) and name not in _RANDOM
    write = _function_writer(target, module, name)
    return _Traits(write, name in _VIEWS, name in _DROPOUTS, pure, drops=_may_drop(name))


def _function_writer(target: Callable[..., Any], module: str, name: str) -> _Writer | None:
    """What a function of torch writes besides ``out=``."""
    if module == "torch.nn.functional":
        if name in _STATISTICS_OF_F:
            return _writes_statistics(*_STATISTICS_OF_F[name])
        if name in ("embedding", "embedding_bag"):
            return _writes_renormed
    elif name in _STATISTICS:
        return _writes_statistics(*_STATISTICS[name])
    if inspect.isbuiltin(target):
        schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
        written = {w for schema in schemas for w in _written_arguments(schema, outs=False)}
        if written:
            return _writes_arguments(tuple(sorted(written)), len(written) == 1 and name.endswith("_"), False, name)
    if name.endswith("_") and not name.endswith("__"):
        return _writes_first(name)
    index = _inplace_parameter(target)
    return _writes_if_inplace(index) if index is not None else None


def _inplace_parameter(target: Callable[..., Any]) -> int | None:
    try:
        names = list(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("inplace") if "inplace" in names else None


def _may_drop(name: str) -> bool:
    return "dropout" in name or "attention" in name


def _drops_something(node: Node) -> bool:
    """Whether a dropout surely makes a new tensor: training, with a probability that is not 0."""
    p = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
    default = "alpha" not in str(getattr(node.target, "__name__", ""))  # of torch.nn.functional; others take no default
    training = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", node.kwargs.get("train", default))
    return training is True and isinstance(p, float) and p > 0


# ---------------------------------------------------------------- the writes of one call


def _call_writes(node: Node) -> list[_Write]:
    if node.op not in ("call_function", "call_method"):
        return []
    write = _traits(node.op, node.target).write
    found = write(node) if write is not None else []
    if "out" in node.kwargs and not isinstance(node.target, OpOverload):
        found = [*found, *(_Write(n, _fills(node, n)) for n in _nodes_in(node.kwargs["out"]))]
    return found


def _nodes_in(argument: Any) -> Iterator[Node]:
    if isinstance(argument, Node):
        yield argument
    elif isinstance(argument, (tuple, list)):
        for element in argument:
            yield from _nodes_in(element)


def _fills(node: Node, out: Node) -> bool:
    """Whether a result written to ``out`` has exactly its elements, so that nothing was resized."""
    return _sees_same_elements(_fake(node), _fake(out))


def _writes_first(name: str = "", whole: bool = False) -> _Writer:
    whole = whole or (name not in _PARTIAL and name not in _REBINDING and hasattr(torch.Tensor, name))
    rebinds = name in _REBINDING

    def write(node: Node) -> list[_Write]:
        first = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))
        targets = [n for n in _nodes_in(first) if _has_memory(n)]
        return [_Write(n, whole and isinstance(first, Node), rebinds) for n in targets]

    return write


def _writes_item(node: Node) -> list[_Write]:
    target = node.args[0]
    return [_Write(target, _is_everything(node.args[1]))] if isinstance(target, Node) and _has_memory(target) else []


def _is_everything(index: Any) -> bool:
    if isinstance(index, tuple):
        return all(map(_is_everything, index))
    return index is Ellipsis or (isinstance(index, slice) and index == slice(None))


def _writes_attribute(node: Node) -> list[_Write]:
    target = node.args[0]
    return [_Write(target, False, node.args[1] == "data")] if isinstance(target, Node) else []


def _writes_all_inputs(node: Node) -> list[_Write]:
    return [_Write(n, False) for n in _tensor_inputs(node)]


def _writes_if_inplace(index: int) -> _Writer:
    first = _writes_first(whole=True)

    def write(node: Node) -> list[_Write]:
        flag = node.args[index] if len(node.args) > index else node.kwargs.get("inplace", False)
        return first(node) if flag is not False else []

    return write


def _writes_statistics(mean: int, variance: int, flag: str) -> _Writer:
    def write(node: Node) -> list[_Write]:
        training = node.args[_STATISTICS_FLAG] if len(node.args) > _STATISTICS_FLAG else node.kwargs.get(flag, True)
        if training is False:
            return []
        found = [
            node.args[index] if len(node.args) > index else node.kwargs.get(name)
            for index, name in ((mean, "running_mean"), (variance, "running_var"))
        ]
        return [_Write(n, False) for n in found if isinstance(n, Node)]

    return write


def _writes_renormed(node: Node) -> list[_Write]:
    """F.embedding and F.embedding_bag: ``max_norm`` (fourth of both) renormalises the weight (second) in place."""
    if (node.args[3] if len(node.args) > 3 else node.kwargs.get("max_norm")) is None:
        return []
    weight = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
    return [_Write(n, False) for n in _nodes_in(weight)]


def _writes_arguments(written: tuple[tuple[int, str], ...], whole: bool, out: bool, name: str) -> _Writer:
    whole = whole and name not in _PARTIAL and name not in _REBINDING
    rebinds = name in _REBINDING

    def write(node: Node) -> list[_Write]:
        found = []
        for index, argument in written:
            given = node.args[index] if index < len(node.args) else node.kwargs.get(argument)
            if given is None and argument == "self":
                given = node.kwargs.get("input")
            for target in _nodes_in(given):
                fills = _fills(node, target) if out else whole and isinstance(given, Node)
                found.append(_Write(target, fills, rebinds))
        return found

    return write


def _written_arguments(schema: Any, outs: bool = True) -> tuple[tuple[int, str], ...]:
    return tuple(
        (index, str(argument.name))
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write and (outs or not argument.is_out)
    )


__all__ = ["METADATA_ASSERTIONS", "Effects", "Mutation", "is_metadata_assertion", "is_pure"]
