"""What operations write, by their name, schema and arguments; and which operations have no side effects."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import Node
from torch.fx.node import Target

from attn_pass.graph.memory import has_memory, sees_same_elements, tensor_inputs
from attn_pass.graph.values import fake_value, nodes_in


class Write(NamedTuple):
    target: Node
    whole: bool
    rebinds: bool = False
    """The target gets another shape or another storage, so its fake tensor says nothing of earlier times."""


Writer = Callable[[Node], list[Write]]


class Traits(NamedTuple):
    """The properties of all calls of a node's target."""

    write: Writer | None = None
    view: bool = False
    """The result is, or may be, a view of the first argument; used only if metadata does not show it."""
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
IN_PLACE_DUNDERS = frozenset(f"__{name}__" for name in _IN_PLACE_NAMES)

_REBINDING = frozenset(
    {
        *("set_", "resize_", "resize_as_", "as_strided_", "sparse_resize_", "sparse_resize_and_clear_"),
        *("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "resize_storage_bytes_"),
        "shallow_copy_data_",  # Dynamo's form of ``x.data = y`` since torch 2.15
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

FUNCTIONAL_HIGHER_ORDER = frozenset(
    {
        *("auto_functionalized", "auto_functionalized_v2", "triton_kernel_wrapper_functional", "out_dtype"),
        *("inline_asm_elementwise", "flex_attention", "flex_attention_backward"),
    }
)

RANDOM = frozenset(
    {
        *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli"),
        *("multinomial", "normal", "poisson", "binomial", "rrelu", "gumbel_softmax", "_sample_dirichlet"),
        *("_standard_gamma", "fractional_max_pool2d", "fractional_max_pool3d", "fractional_max_pool2d_with_indices"),
        "fractional_max_pool3d_with_indices",
    }
)

_IMPURE_METHODS = RANDOM | {"backward", "register_hook", "retain_grad", "record_stream", "tolist", "numpy"}
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

_only_reading: set[str] = set()
"""Functions from elsewhere that are known to write nothing, by name."""

_CHECKS_AND_SWITCHES = ("_assert", "_check", "_functional_assert", "sym_constrain", "_log_api", "set_", "use_", "_set_")
_EFFECTFUL_NAMESPACES = ("c10d", "_c10d", "symm_mem", "profiler", "streams", "_dtensor", "rngprims", "debugprims")


def only_read(names: Iterable[str]) -> None:
    """Notes functions that are none of torch's and write nothing; of any other it is assumed that it may write all."""
    _only_reading.update(names)
    traits_of.cache_clear()


@lru_cache(maxsize=4096)
def traits_of(op: str, target: Target) -> Traits:
    if isinstance(target, str):
        return _method_traits(target)
    if isinstance(target, HigherOrderOperator):
        return Traits(higher_order=True, pure=False, unknown=True)
    if isinstance(target, OpOverload):
        return _overload_traits(target)
    if isinstance(target, OpOverloadPacket):
        return _packet_traits(target)
    return _function_traits(target)


def _method_traits(name: str) -> Traits:
    if name in IN_PLACE_DUNDERS:
        return Traits(_writes_first(whole=True), pure=False)
    if name == "__setitem__":
        return Traits(_writes_item, pure=False)
    if name.endswith("_") and not name.endswith("__"):
        return Traits(_writes_first(name), pure=False)
    known = hasattr(torch.Tensor, name)  # streams and events have methods too
    return Traits(view=name in _VIEWS, pure=known and name not in _IMPURE_METHODS, unknown=not known)


def _overload_traits(target: OpOverload) -> Traits:
    schema = target._schema
    namespace, _, name = schema.name.partition("::")
    written = _written_arguments(schema)
    write: Writer | None = None
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
    return Traits(write, view, returns_input, pure=not impure, drops=_may_drop(name))


def _packet_traits(target: OpOverloadPacket) -> Traits:
    """A packet does not say which overload runs: what any of them writes counts, ``out=`` apart."""
    overloads = [getattr(target, name) for name in target.overloads()]
    overloads = [o for o in overloads if not any(a.is_out for a in o._schema.arguments)]
    traits = [_overload_traits(o) for o in overloads]
    written = tuple(dict.fromkeys(w for o in overloads for w in _written_arguments(o._schema)))
    name = str(target.__name__)
    write = next((t.write for t in traits if t.write is not None), None)
    if written:
        write = _writes_arguments(written, len(written) == 1 and name.endswith("_"), False, name)
    return Traits(
        write,
        view=any(t.view for t in traits),
        returns_input=any(t.returns_input for t in traits),
        pure=bool(traits) and all(t.pure for t in traits),
        drops=_may_drop(name),
    )


def _function_traits(target: Callable[..., Any]) -> Traits:
    if target is operator.setitem:
        return Traits(_writes_item, pure=False)
    if target is setattr:
        return Traits(_writes_attribute, pure=False)
    if target in _IN_PLACE_OPERATORS:
        return Traits(_writes_first(whole=True))  # of a SymInt it writes nothing
    name = str(getattr(target, "__name__", ""))
    owner = getattr(target, "__objclass__", None)
    if owner is not None and issubclass(torch.Tensor, owner):  # torch.Tensor.add_ and its like, as call_function
        return _method_traits(name)
    module = str(getattr(target, "__module__", None) or "")
    if module == "torch._tensor" and str(getattr(target, "__qualname__", "")).startswith("Tensor."):
        return _method_traits(name)
    if name in _only_reading:
        return Traits(drops=True)
    if not f"{module}.".startswith(_TRUSTED) or module.startswith("torch.distributed"):
        return Traits(_writes_all_inputs, pure=False, unknown=True)
    if module in ("_operator", "operator", "math"):
        return Traits(view=target is operator.getitem)
    if module == "builtins":
        return Traits(view=target is getattr, pure=target in _PURE_BUILTINS)
    pure = module in _PURE_MODULES and not name.startswith(_CHECKS_AND_SWITCHES) and name not in RANDOM
    write = _function_writer(target, module, name)
    return Traits(write, name in _VIEWS, name in _DROPOUTS, pure, drops=_may_drop(name))


def _function_writer(target: Callable[..., Any], module: str, name: str) -> Writer | None:
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


# ---------------------------------------------------------------- the writes of one call


def call_writes(node: Node) -> list[Write]:
    if node.op not in ("call_function", "call_method"):
        return []
    write = traits_of(node.op, node.target).write
    writes = write(node) if write is not None else []
    if "out" in node.kwargs and not isinstance(node.target, OpOverload):
        writes = [*writes, *(Write(n, _fills(node, n)) for n in nodes_in(node.kwargs["out"]))]
    return writes


def _fills(node: Node, out: Node) -> bool:
    """Whether a result written to ``out`` has exactly its elements, so that nothing was resized."""
    return sees_same_elements(fake_value(node), fake_value(out))


def _writes_first(name: str = "", whole: bool = False) -> Writer:
    whole = whole or (name not in _PARTIAL and name not in _REBINDING and hasattr(torch.Tensor, name))
    rebinds = name in _REBINDING

    def write(node: Node) -> list[Write]:
        first = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))
        targets = [n for n in nodes_in(first) if has_memory(n)]
        return [Write(n, whole and isinstance(first, Node), rebinds) for n in targets]

    return write


def _writes_item(node: Node) -> list[Write]:
    target = node.args[0]
    return [Write(target, _is_everything(node.args[1]))] if isinstance(target, Node) and has_memory(target) else []


def _is_everything(index: Any) -> bool:
    if isinstance(index, tuple):
        return all(map(_is_everything, index))
    return index is Ellipsis or (isinstance(index, slice) and index == slice(None))


def _writes_attribute(node: Node) -> list[Write]:
    target = node.args[0]
    return [Write(target, False, node.args[1] == "data")] if isinstance(target, Node) else []


def _writes_all_inputs(node: Node) -> list[Write]:
    return [Write(n, False) for n in tensor_inputs(node)]


def _writes_if_inplace(index: int) -> Writer:
    first = _writes_first(whole=True)

    def write(node: Node) -> list[Write]:
        flag = node.args[index] if len(node.args) > index else node.kwargs.get("inplace", False)
        return first(node) if flag is not False else []

    return write


def _writes_statistics(mean: int, variance: int, flag: str) -> Writer:
    def write(node: Node) -> list[Write]:
        training = node.args[_STATISTICS_FLAG] if len(node.args) > _STATISTICS_FLAG else node.kwargs.get(flag, True)
        if training is False:
            return []
        written = [
            node.args[index] if len(node.args) > index else node.kwargs.get(name)
            for index, name in ((mean, "running_mean"), (variance, "running_var"))
        ]
        return [Write(n, False) for n in written if isinstance(n, Node)]

    return write


def _writes_renormed(node: Node) -> list[Write]:
    """F.embedding and F.embedding_bag: ``max_norm`` (fourth of both) renormalises the weight (second) in place."""
    if (node.args[3] if len(node.args) > 3 else node.kwargs.get("max_norm")) is None:
        return []
    weight = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
    return [Write(n, False) for n in nodes_in(weight)]


def _writes_arguments(written: tuple[tuple[int, str], ...], whole: bool, out: bool, name: str) -> Writer:
    whole = whole and name not in _PARTIAL and name not in _REBINDING
    rebinds = name in _REBINDING

    def write(node: Node) -> list[Write]:
        writes = []
        for index, argument in written:
            written_argument = node.args[index] if index < len(node.args) else node.kwargs.get(argument)
            if written_argument is None and argument == "self":
                written_argument = node.kwargs.get("input")
            for target in nodes_in(written_argument):
                fills = _fills(node, target) if out else whole and isinstance(written_argument, Node)
                writes.append(Write(target, fills, rebinds))
        return writes

    return write


def _written_arguments(schema: Any, outs: bool = True) -> tuple[tuple[int, str], ...]:
    return tuple(
        (index, str(argument.name))
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write and (outs or not argument.is_out)
    )
