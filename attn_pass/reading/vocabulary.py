"""The spellings: which call of which dialect is which operation, as one table. A new spelling is one row.

The spellings of the operations that expressions consist of are in `attn_pass.model.operations`, with all their other
properties.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.fx import Node

from attn_pass.graph.values import settled_number
from attn_pass.model.operations import OPERATIONS

# op, parameters in order ("*x" takes the rest, "x=v" has a default), then every spelling:
#   torch.* and F.* functions, operator.* functions (op.), methods (.name), aten overloads (aten.).
# An in-place spelling is not listed: a trailing underscore, operator.i* and setitem are recognised by rule.
TABLE: tuple[tuple[str, str, str], ...] = (
    # views: shapes are taken from the fake values, never from arguments
    (
        "reshape",
        "input, *shape",
        "torch.reshape torch.flatten torch.unsqueeze torch.squeeze torch.unflatten torch.ravel torch.atleast_2d "
        ".view .reshape .flatten .unflatten .unsqueeze .squeeze .view_as .reshape_as .ravel "
        "aten.view.default aten.reshape.default aten._unsafe_view.default aten.unsqueeze.default aten.squeeze.dim "
        "aten.squeeze.dims aten.squeeze.default aten.flatten.using_ints aten.unflatten.int aten._reshape_alias.default "
        "aten.view_as.default",
    ),
    (
        "permute",
        "input, *dims",
        "torch.permute .permute aten.permute.default",
    ),
    (
        "transpose",
        "input, dim0, dim1",
        "torch.transpose torch.swapaxes torch.swapdims .transpose .swapaxes .swapdims aten.transpose.int "
        "aten.swapaxes.default aten.swapdims.default",
    ),
    ("movedim", "input, source, destination", "torch.movedim torch.moveaxis .movedim .moveaxis aten.movedim.int"),
    ("t", "input", "torch.t .t aten.t.default aten.numpy_T.default aten.matrix_H.default"),
    ("mT", "input", "torch.adjoint .adjoint aten.mT.default aten.mH.default aten.adjoint.default"),
    (
        "expand",
        "input, *shape",
        "torch.broadcast_to .expand .expand_as .broadcast_to aten.expand.default aten.broadcast_to.default "
        "aten.expand_as.default",
    ),
    (
        "copy",
        "input, memory_format=None",
        "torch.clone .contiguous .clone .detach_copy aten.clone.default aten.contiguous.default aten.alias.default "
        "aten.lift_fresh_copy.default aten.lift_fresh.default",
    ),
    ("detach", "input", "torch.detach .detach aten.detach.default"),
    (
        "cast",
        "input, *rest",
        ".to .float .half .bfloat16 .double .type .type_as .int .long .bool .cpu torch.Tensor.to "
        "aten.to.dtype aten.to.device aten.to.dtype_layout aten.to.other aten._to_copy.default aten.type_as.default "
        "prims.convert_element_type.default",
    ),
    ("select", "input, dim, index", "torch.select .select aten.select.int"),
    ("slice", "input, dim=0, start=None, end=None, step=1", "aten.slice.Tensor"),
    ("narrow", "input, dim, start, length", "torch.narrow .narrow aten.narrow.default"),
    ("getitem", "input, index", "op.getitem"),
    ("getattr", "input, name", "builtins.getattr"),
    (
        "pieces",
        "input, size=None, dim=0",
        "torch.split torch.chunk torch.tensor_split .split .chunk .tensor_split torch.functional.split "
        "aten.split.Tensor aten.split_with_sizes.default aten.chunk.default aten.split.sizes",
    ),
    ("unbind", "input, dim=0", "torch.unbind .unbind aten.unbind.int"),
    ("meshgrid", "*tensors", "torch.meshgrid torch.functional.meshgrid"),
    ("meshgrid", "tensors", "aten.meshgrid.default aten.meshgrid.indexing"),
    (
        "repeat_interleave",
        "input, repeats, dim=None",
        "torch.repeat_interleave .repeat_interleave aten.repeat_interleave.self_int",
    ),
    ("repeat", "input, *repeats", ".repeat .tile torch.tile aten.repeat.default aten.tile.default"),
    # products
    (
        "matmul",
        "input, other",
        "torch.matmul torch.bmm torch.mm torch.mv torch.dot torch.linalg.matmul op.matmul .matmul .bmm .mm .mv .dot "
        ".__matmul__ aten.matmul.default aten.bmm.default aten.mm.default aten.mv.default aten.dot.default "
        "aten.linalg_matmul.default",
    ),
    (
        "baddbmm",
        "input, batch1, batch2, beta=1, alpha=1",
        "torch.baddbmm .baddbmm torch.addmm .addmm torch.addmv .addmv aten.baddbmm.default aten.addmm.default "
        "aten.addmv.default",
    ),
    ("einsum", "equation, *operands", "torch.einsum torch.functional.einsum aten.einsum.default"),
    ("tensordot", "input, other, dims=2", "torch.tensordot torch.functional.tensordot"),
    ("tensordot", "input, other, dims_self, dims_other", "aten.tensordot.default"),
    ("inner", "input, other", "torch.inner .inner aten.inner.default"),
    ("vecdot", "input, other, dim=-1", "torch.linalg.vecdot aten.linalg_vecdot.default"),
    ("cosine_similarity", "x1, x2, dim=1, eps=1e-08", "torch.cosine_similarity aten.cosine_similarity.default"),
    ("multi_dot", "*tensors", "torch.linalg.multi_dot torch.chain_matmul aten.linalg_multi_dot.default "
     "aten.chain_matmul.default"),
    ("linear", "input, other, bias=None", "torch.nn.functional.linear torch._C._nn.linear aten.linear.default"),
    # softmax and what stands between it and its product
    (
        "softmax",
        "input, dim=None, _stacklevel=3, dtype=None",
        "torch.nn.functional.softmax",
    ),
    (
        "softmax",
        "input, dim=None, dtype=None",
        "torch.softmax .softmax torch.special.softmax aten.softmax.int aten.special_softmax.default "
        "aten._safe_softmax.default",
    ),
    ("softmax", "input, dim, half_to_float=False", "aten._softmax.default"),
    ("dropout", "input, p=0.5, training=True, inplace=False", "torch.nn.functional.dropout torch.dropout "
     "aten.dropout.default torch._C._nn.dropout"),
    ("softmin", "input, dim=None, _stacklevel=3, dtype=None", "torch.nn.functional.softmin"),
    ("log_softmax", "input, dim=None, _stacklevel=3, dtype=None", "torch.nn.functional.log_softmax"),
    (
        "log_softmax",
        "input, dim=None, dtype=None",
        "torch.log_softmax .log_softmax torch.special.log_softmax aten.log_softmax.int "
        "aten.special_log_softmax.default",
    ),
    ("log_softmax", "input, dim, half_to_float=False", "aten._log_softmax.default"),
    (
        "logsumexp",
        "input, dim, keepdim=False",
        "torch.logsumexp torch.special.logsumexp .logsumexp aten.logsumexp.default aten.special_logsumexp.default",
    ),
    ("normalize", "input, p=2.0, dim=1, eps=1e-12, out=None", "torch.nn.functional.normalize"),
    (
        "vector_norm",
        "input, ord=2, dim=None, keepdim=False, dtype=None",
        "torch.linalg.vector_norm aten.linalg_vector_norm.default",
    ),
    ("exp2", "input", "torch.exp2 torch.special.exp2 .exp2 aten.exp2.default aten.special_exp2.default"),
    ("reciprocal", "input", "torch.reciprocal .reciprocal aten.reciprocal.default"),
    ("pow", "input, exponent", "torch.pow op.pow .pow .__pow__ aten.pow.Tensor_Scalar"),
    ("sum", "input, dim=None, keepdim=False, dtype=None", "torch.sum .sum aten.sum.dim_IntList"),
    ("amax", "input, dim=None, keepdim=False", "torch.amax .amax aten.amax.default"),
    ("all", "input, dim=None, keepdim=False", "torch.all .all aten.all.dim aten.all.dims aten.all.default"),
    ("any", "input, dim=None, keepdim=False", "torch.any .any aten.any.dim aten.any.dims aten.any.default"),
    # pointwise: operations of expressions, then what is spelled with another name (`attn_pass.reading.pointwise`)
    *((row.name, row.parameters, row.spellings) for row in OPERATIONS.values()),
    ("rsub", "input, other, alpha=1", "torch.rsub aten.rsub.Tensor aten.rsub.Scalar .__rsub__"),
    (
        "embedding",
        "index, input, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False",
        "torch.nn.functional.embedding",
    ),
    ("embedding", "input, index, padding_idx=-1, scale_grad_by_freq=False, sparse=False", "aten.embedding.default"),
    ("isnan", "input", "torch.isnan .isnan aten.isnan.default"),
    (
        "nan_to_num",
        "input, nan=None, posinf=None, neginf=None",
        "torch.nan_to_num .nan_to_num aten.nan_to_num.default",
    ),
    ("max", "input, other=None, keepdim=False", "torch.max .max aten.max.dim aten.max.other aten.max.default"),
    ("min", "input, other=None, keepdim=False", "torch.min .min aten.min.dim aten.min.other aten.min.default"),
    ("clamp", "input, min=None, max=None", "torch.clamp torch.clip .clamp .clip aten.clamp.default aten.clamp.Tensor"),
    ("clamp", "input, min=None", "torch.clamp_min .clamp_min aten.clamp_min.default aten.clamp_min.Tensor"),
    ("method_where", "input, condition, other", ".where"),
    ("masked_fill", "input, mask, value", "torch.masked_fill .masked_fill aten.masked_fill.Scalar "
     "aten.masked_fill.Tensor"),
    ("tril", "input, diagonal=0", "torch.tril .tril aten.tril.default"),
    ("triu", "input, diagonal=0", "torch.triu .triu aten.triu.default"),
    # tensors made of nothing
    ("arange", "*bounds", "torch.arange aten.arange.default aten.arange.start aten.arange.start_step"),
    ("iota", "length, start=0, step=1", "prims.iota.default"),
    ("zeros", "*size", "torch.zeros torch.zeros_like .new_zeros aten.zeros.default aten.zeros_like.default "
     "aten.new_zeros.default"),
    ("ones", "*size", "torch.ones torch.ones_like .new_ones aten.ones.default aten.ones_like.default "
     "aten.new_ones.default"),
    ("full", "size, fill_value", "torch.full torch.full_like aten.full.default aten.full_like.default"),
    ("full", "input, size, fill_value", ".new_full aten.new_full.default"),
    ("fill", "input, value", "torch.fill .fill aten.fill.Scalar aten.fill.Tensor"),
    ("scalar", "value", "torch.tensor torch.scalar_tensor torch.as_tensor torch.asarray aten.scalar_tensor.default"),
    ("scalar", "input, value", ".new_tensor"),
    ("cat", "input, dim=0", "torch.cat torch.concat torch.concatenate aten.cat.default aten.concat.default"),
    ("hstack", "input", "torch.hstack torch.column_stack aten.hstack.default aten.column_stack.default"),
    ("vstack", "input", "torch.vstack torch.row_stack aten.vstack.default"),
    ("stack", "input, dim=0", "torch.stack aten.stack.default"),
    ("pad", "input, pad, mode=constant, value=None", "torch.nn.functional.pad torch._C._nn.pad aten.pad.default"),
    ("pad", "input, pad, value=0", "torch.constant_pad_nd aten.constant_pad_nd.default"),
    ("index", "input, index", "aten.index.Tensor"),
    ("index_select", "input, dim, index", "torch.index_select .index_select aten.index_select.default"),
    ("copy_to", "like, input, non_blocking=False", "aten.copy.default"),
    ("slice_scatter", "input, src, dim=0, start=None, end=None, step=1",
     "torch.slice_scatter .slice_scatter aten.slice_scatter.default"),
    ("select_scatter", "input, src, dim, index",
     "torch.select_scatter .select_scatter aten.select_scatter.default"),
    ("index_put", "input, indices, values, accumulate=False", "torch.index_put .index_put aten.index_put.default"),
    ("triu_indices", "row, col, offset=0", "torch.triu_indices aten.triu_indices.default"),
    ("tril_indices", "row, col, offset=0", "torch.tril_indices aten.tril_indices.default"),
    ("diff", "input, n=1, dim=-1, prepend=None, append=None", "torch.diff .diff aten.diff.default"),
    ("cumsum", "input, dim", "torch.cumsum .cumsum aten.cumsum.default"),
)  # fmt: skip

_IN_PLACE_OPERATORS: dict[Callable[..., Any], Callable[..., Any]] = {
    operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul,
    operator.itruediv: operator.truediv, operator.iand: operator.and_, operator.ior: operator.or_,
}  # fmt: skip
_SELF_NAMES = {"self": "input", "tensor": "input", "tensors": "input", "indices": "index", "axis": "dim",
               "mat1": "batch1", "weight": "other", "mat2": "batch2", "a": "input", "train": "training",
               "keepdims": "keepdim", "split_size_or_sections": "size", "split_size": "size", "chunks": "size",
               "split_sizes": "size", "indices_or_sections": "size"}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One operation's parameters, as one group of spellings orders them."""

    op: str
    names: tuple[str, ...]
    defaults: tuple[tuple[str, Any], ...]
    rest: str | None


@dataclass(slots=True)
class Call:
    """A node understood as an operation: its arguments by name, whatever the spelling.

    Nothing changes it; one is made for every node of a graph, and Python takes three times as long to freeze it.
    """

    op: str
    args: dict[str, Any]
    in_place: bool

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    def get(self, name: str, default: Any = None) -> Any:
        """An argument, or ``default`` when the spelling has none of that name."""
        return self.args.get(name, default)


def parse_row(op: str, parameters: str) -> Row:
    """The parameters of an operation, from their text in a table."""
    names: list[str] = []
    defaults: list[tuple[str, Any]] = []
    rest: str | None = None
    for text in (p.strip() for p in parameters.split(",")):
        if text.startswith("*"):
            rest = text[1:]
        elif "=" in text:
            name, value = text.split("=")
            names.append(name)
            defaults.append((name, {"None": None, "True": True, "False": False}.get(value, _number(value))))
        else:
            names.append(text)
    return Row(op, tuple(names), tuple(defaults), rest)


def _number(text: str) -> float | int | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def resolve(spelling: str) -> Any:
    """The callable a spelling names in this torch, or None when this torch has none."""
    root, _, rest = spelling.partition(".")
    owner: Any = {
        "torch": torch, "op": operator, "builtins": builtins, "aten": torch.ops.aten, "prims": torch.ops.prims,
    }[root]  # fmt: skip
    try:
        for name in rest.split("."):
            owner = getattr(owner, name)
    except (AttributeError, RuntimeError):
        return None
    return owner


@lru_cache(maxsize=1)
def _rows() -> tuple[dict[Callable[..., Any], Row], dict[str, Row]]:
    functions: dict[Callable[..., Any], Row] = {}
    methods: dict[str, Row] = {}
    for op, parameters, spellings in TABLE:
        row = parse_row(op, parameters)
        for spelling in spellings.split():
            if spelling.startswith("."):
                methods[spelling[1:]] = row
                continue
            target = resolve(spelling)
            if target is not None:
                functions[target] = row
    return functions, methods


@lru_cache(maxsize=4096)
def _row_of(kind: str, target: Any) -> tuple[Row, bool] | None:
    """The row of a target, and whether the spelling writes its input."""
    functions, methods = _rows()
    if kind == "call_method":
        if target in methods:
            return methods[target], False
        if target.endswith("_") and not target.endswith("__") and target[:-1] in methods:
            return methods[target[:-1]], True
        return None
    if target in functions:
        return functions[target], False
    if target in _IN_PLACE_OPERATORS:
        return functions[_IN_PLACE_OPERATORS[target]], True
    if isinstance(target, torch._ops.OpOverloadPacket):
        # Dynamo's for attributes since torch 2.15, ``x.mT``: overloads of one argument are for other ways to call them.
        overloads = [getattr(target, name) for name in target.overloads()]
        return _row_of(kind, overloads[0]) if all(len(o._schema.arguments) == 1 for o in overloads) else None
    if isinstance(target, torch._ops.OpOverload):
        (namespace, packet), overload = target._schema.name.split("::"), target._overloadname
        if namespace != "aten":
            return None
        if overload == "out" or overload.endswith("_out"):
            names = (overload[:-4],) if overload != "out" else ("default", "Tensor")
            rows = [functions[p] for name in names if (p := resolve(f"aten.{packet}.{name}")) in functions]
            return (rows[0], False) if rows else None
        if packet.endswith("_"):
            plain = resolve(f"aten.{packet[:-1]}.{overload or 'default'}")
            if plain in functions:
                return functions[plain], True
        return None
    name, owner = getattr(target, "__name__", ""), getattr(target, "__module__", None) or "torch"
    if name.endswith("_") and not name.endswith("__") and owner.partition(".")[0] == "torch":
        plain = getattr(torch, name[:-1], None)
        if plain in functions:
            return functions[plain], True
    return None


def operation_of(node: Node) -> str | None:
    """The name of the operation a node is, whatever its arguments; None where it is not in the table."""
    if node.op not in ("call_function", "call_method"):
        return None
    try:
        row = _row_of(node.op, node.target)
    except TypeError:  # an unhashable target
        return None
    return None if row is None else row[0].op


def understand(node: Node, into: Node | None = None) -> Call | None:
    """The operation a node is, or None for one that is not in the table.

    None as well for one that writes its result to a tensor it was given (``out=``), unless that tensor is ``into``.
    """
    if node.op not in ("call_function", "call_method"):
        return None
    try:
        row_of_node = _row_of(node.op, node.target)
    except TypeError:  # an unhashable target
        return None
    if row_of_node is None:
        return None
    return bound(node, *row_of_node, into=into)


def bound(node: Node, row: Row, in_place: bool, into: Node | None = None) -> Call | None:
    """The arguments of a node by the names of its operation's parameters; None where they do not fit."""
    names, given, named = row.names, node.args, node.kwargs
    args: dict[str, Any] = dict(row.defaults)
    args.update(zip(names, given))
    if len(given) > len(names):
        if row.rest is None:
            return None
        args[row.rest] = given[len(names) :]
    for name, value in named.items():
        if name == "out" and value is into and "out" not in names:
            continue
        args[_SELF_NAMES.get(name, name) if _SELF_NAMES.get(name) in names else name] = value
    if (len(given) < len(names) and not all(map(args.__contains__, names))) or named.get("out") is not into:
        return None
    if row.op == "dropout":
        args["p"] = settled_number(args["p"])
    return Call(row.op, args, in_place or bool(args.get("inplace", False)))


def one_or_many(values: Any) -> tuple[Any, ...]:
    """``permute(0, 1)`` and ``permute((0, 1))`` are the same."""
    if isinstance(values, (tuple, list)) and len(values) == 1 and isinstance(values[0], (tuple, list, torch.Size)):
        return tuple(values[0])
    return tuple(values) if isinstance(values, (tuple, list, torch.Size)) else (values,)


def tensor_dims(call: Call, name: str, rank: int) -> tuple[int, ...] | None:
    """A ``dim`` argument as a tuple of non-negative dimensions; None when it is not constant."""
    dims = one_or_many(call.get(name))
    if any(not isinstance(d, int) or isinstance(d, bool) for d in dims):
        return None
    return tuple(d % max(1, rank) for d in dims)  # a tensor without dimensions has the dimensions 0 and -1
