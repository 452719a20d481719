"""Calls of FlexAttention: ``torch.ops.higher_order.flex_attention`` in graphs of Dynamo and torch.export.

Each call is expanded on trial into the products, score function, mask and softmax that torch's own eager form computes
(torch/_higher_order_ops/flex_attention.py, `math_attention`), so that the attention in it is read like attention
written by hand. If the site is not rewritten, the call stays. The mask is that of the compiled kernels: what its block
lists keep (`flex_lists`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from attn_pass.graph.edit import Plan, SizeNodes
from attn_pass.graph.effects import Effects
from attn_pass.graph.expand import CannotExpand, Expansion, Recorder, expand
from attn_pass.graph.regions import Region, Regions
from attn_pass.graph.subgraphs import attribute_module, operator_name
from attn_pass.graph.values import KNOWN_TENSORS, PLAIN_TENSORS, Sizes, fake_value, settled_number, tensor_value
from attn_pass.model.attention import AsWritten, Blocks
from attn_pass.model.index import Index
from attn_pass.patterns.flex_bodies import on_grid
from attn_pass.patterns.flex_constants import Known, known_to_agree
from attn_pass.patterns.flex_lists import Lists, blocks_of, is_one_block, is_same_mask, keep_by_lists, made_from
from attn_pass.patterns.opaque import Opaque
from attn_pass.reading.reader import Reader
from attn_pass.reading.unreadable import Unreadable

aten = torch.ops.aten
FORM = "flex_attention"
_PARAMETERS = (
    *("query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options"),
    *("score_mod_other_buffers", "mask_mod_other_buffers"),
)
# `_apply_kernel_options` in torch/nn/attention/flex_attention.py: the options of a call that requests nothing. The
# outputs say what the kernel has to write, not what is used.
_DEFAULTS: Mapping[str, Any] = {
    "BACKEND": "AUTO",
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
}
_OUTPUTS = ("OUTPUT_LOGSUMEXP", "OUTPUT_MAX")
LOGARITHM_IS_USED = "the scores' log-sum-exp is used as well"
ONCE_LISTED = "the block lists name each block once"


@dataclass(frozen=True)
class _Call:
    """One call with its arguments by name, and whether its block lists are read when the program runs."""

    node: Node
    arguments: Mapping[str, Any]
    of_one_block: bool  # one block holds everything
    mask: Node | None = None  # what the lists were made from in this program
    known: tuple[str, ...] = ()  # lists and tensors that keep their values, by which the lists say what mask_mod says

    @property
    def reads_lists(self) -> bool:
        return not self.of_one_block and self.mask is None and not self.known


def take_apart(gm: GraphModule, sizes: Sizes, outer: Region, in_body: bool) -> list[Opaque]:
    """Puts an expansion in front of every call of FlexAttention of a graph that runs under ``outer``, where it can."""
    calls = [node for node in gm.graph.nodes if node.op == "call_function" and operator_name(node) == FORM]
    if not calls:
        return []
    effects, regions, size_nodes = Effects(gm.graph), Regions(gm.graph, outer), SizeNodes(gm, sizes)
    values = gm.meta.get(KNOWN_TENSORS, {})
    known = {n: values[n.name] for n in gm.graph.nodes if n.name in values and not effects.mutations(n)}

    masks: dict[Any, _Mask] = {}  # what is kept by lists that are read when the program runs, once for all layers

    def taken_apart(call: _Call, region: Region) -> tuple[Expansion, _Mask]:
        size_nodes.made.clear()  # of another call's expansion, which may not stay
        plan = Plan(gm, call.node, region, size_nodes, effects, in_body)
        key = _same_mask(call, region, effects) if call.reads_lists else None
        recorder = _Parts(plan, call, masks.get(key))
        expansion = expand(plan, recorder.function, lambda _: recorder)
        if key is not None:
            masks[key] = recorder.mask
        return expansion, recorder.mask

    result: list[Opaque] = []
    apart: dict[int, tuple[_Call, _Mask]] = {}
    for node in calls:
        region = regions.of(node)
        try:
            call = _read(node, region, sizes, effects, known)
            expansion, keep = taken_apart(call, region)
            result.append(_opaque(call, region, expansion))
            apart[len(result) - 1] = call, keep
        except Exception as error:
            result.append(_stays(node, region, error))
    if any(call.mask is not None for call, _ in apart.values()):
        reader = Reader(gm.graph, sizes, Effects(gm.graph), Regions(gm.graph, outer))
    for number, (call, keep) in list(apart.items()):
        region = result[number].region
        try:
            if call.mask is None or _is_read_alike(reader, call, keep, sizes):
                continue
            del apart[number]
            result[number].take_back()
            call = replace(call, mask=None)
            expansion, keep = taken_apart(call, region)
            result[number], apart[number] = _opaque(call, region, expansion), (call, keep)
        except Exception as error:
            if apart.pop(number, None) is not None:
                result[number].take_back()
            result[number] = _stays(call.node, region, error)
    if not all(call.of_one_block for call, _ in apart.values()):
        reader = Reader(gm.graph, sizes, Effects(gm.graph), Regions(gm.graph, outer))
    for number, (call, keep) in apart.items():
        try:
            blocks = Blocks() if call.of_one_block else _blocks(reader, call, keep, sizes)
        except Exception as error:
            result[number].take_back()
            result[number] = _stays(call.node, result[number].region, error)
        else:
            result[number] = replace(result[number], written=AsWritten(fused=True, library=FORM, blocks=blocks))
    return result


def _stays(node: Node, region: Region, error: Exception) -> Opaque:
    """A call that is not taken apart, and why."""
    if isinstance(error, CannotExpand):
        return Opaque(node, FORM, region, None, f"the call stays: {error}")
    return Opaque(node, FORM, region, None, error=error)


def _blocks(reader: Reader, call: _Call, keep: _Mask, sizes: Sizes) -> Blocks:
    """The blocks that a call computes, as far as its mask can be read."""
    scores, at = _scores(call.arguments, sizes), reader.order[call.node]
    try:
        return blocks_of(reader, keep.by_function, scores, at, in_table=call.reads_lists)
    except Unreadable:
        return Blocks(hides_more=True, in_table=call.reads_lists)


def _is_read_alike(reader: Reader, call: _Call, keep: _Mask, sizes: Sizes) -> bool:
    """Whether a call's block lists keep what its mask function does; not where that cannot be told."""
    assert call.mask is not None
    try:
        return is_same_mask(reader, keep.kept, call.mask, _scores(call.arguments, sizes), reader.order[call.node])
    except Unreadable:
        return False


def _same_mask(call: _Call, region: Region, effects: Effects) -> Any:
    """What calls have in common that keep the same; None where something that says what is written by the program."""
    arguments = call.arguments
    listed = (*arguments["block_mask"][2:-1], *arguments.get("mask_mod_other_buffers", ()))
    if any(isinstance(x, Node) and effects.mutations(x) for x in listed):
        return None
    query, key = (tensor_value(arguments[name]) for name in ("query", "key"))
    assert query is not None and key is not None
    sizes = tuple(str(n) for n in (*query.shape[:3], key.shape[2]))
    return listed, function_of(arguments["block_mask"]).code, sizes, region


def _opaque(call: _Call, region: Region, expansion: Expansion) -> Opaque:
    return Opaque(
        call.node,
        FORM,
        region,
        expansion,
        also=LOGARITHM_IS_USED,
        assumes=(ONCE_LISTED,) if call.reads_lists else tuple(f"{n} keeps the values it has now" for n in call.known),
        fixed=tuple(name.partition(" ")[2] for name in call.known),  # without "buffer" or "constant"
    )


# ---------------------------------------------------------------- what a call says


def _read(node: Node, region: Region, sizes: Sizes, effects: Effects, known: Known) -> _Call:
    """The call, if its parts would compute the same. Raises `CannotExpand`."""
    arguments: dict[str, Any] = {**dict(zip(_PARAMETERS, node.args)), **node.kwargs}
    query, key, value = (tensor_value(arguments[name]) for name in _PARAMETERS[:3])
    if query is None or key is None or value is None or not query.dtype == key.dtype == value.dtype:
        raise CannotExpand("query, key and value are not of one type")
    for tensor in (tensor_value(n) for n in node.all_input_nodes):
        if tensor is not None and not isinstance(tensor, PLAIN_TENSORS):
            raise CannotExpand(f"it is given a {type(tensor).__name__}, not a plain tensor")
    if region.functorch:
        raise CannotExpand(f"it runs under {region.describe()}")
    if region.autocast_dtype(query.device.type) is not None:
        raise CannotExpand("autocast changes the dtypes of the call, and would change those of its parts otherwise")
    _check_options(arguments.get("kernel_options") or {})
    lists = Lists.of(arguments["block_mask"])
    scores = _scores(arguments, sizes)
    if is_one_block(lists, scores[2], scores[3], effects):
        return _Call(node, arguments, True)
    if any(n not in (1, size) for n, size in zip(_shape(lists.partial, sizes), scores[:2])):
        raise CannotExpand("its block lists are for another batch or another number of heads")
    if lists.full is not None and _shape(lists.full_at, sizes) != _shape(lists.partial_at, sizes):
        raise CannotExpand("its lists of partial and of full blocks have different shapes")
    mask = made_from(lists, sizes)
    agree = (
        None
        if mask is not None
        else known_to_agree(lists, function_of(arguments["block_mask"]), arguments, scores, known)
    )
    return _Call(node, arguments, False, mask, agree or ())


def function_of(argument: Any) -> GraphModule:
    """The graph of a score function, or of the mask function that is the last thing in a block mask."""
    holder = argument[-1] if isinstance(argument, (tuple, list)) else argument
    body = attribute_module(holder) if isinstance(holder, Node) else None
    if body is None:
        raise CannotExpand("a function of its scores is not part of the program")
    return body


def _check_options(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if name not in _OUTPUTS and (name not in _DEFAULTS or _DEFAULTS[name] != value):
            raise CannotExpand(f"kernel_options asks for {name}={value!r}")


def _shape(node: Any, sizes: Sizes) -> tuple[Index, ...]:
    value = tensor_value(node)
    return () if value is None else sizes.shape(value)


def _scores(arguments: Mapping[str, Any], sizes: Sizes) -> tuple[Index, ...]:
    """(B, H, L, S)."""
    query, key = (tensor_value(arguments[name]) for name in ("query", "key"))
    assert query is not None and key is not None
    return (*sizes.shape(query)[:3], sizes.shape(key)[2])


# ---------------------------------------------------------------- its parts


@dataclass(frozen=True)
class _Mask:
    """The nodes of what a call keeps, and of what ``mask_mod`` alone does."""

    kept: Node
    by_function: Node


class _Parts(Recorder):
    """Records what a call computes, and remembers the nodes of what it keeps."""

    def __init__(self, plan: Plan, call: _Call, mask: _Mask | None = None) -> None:
        super().__init__(plan)
        self.call = call
        self.mask = mask or _Mask(call.node, call.node)
        self._made = mask is not None  # by a call before this one
        users = call.node.users
        self._taken = {user.args[1] for user in users if user.users and len(user.args) == 2}

    def function(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        _score_mod: object,
        block_mask: tuple[Any, ...],
        scale: Any,
        kernel_options: object = None,
        score_mod_other_buffers: tuple[Any, ...] = (),
        mask_mod_other_buffers: tuple[Any, ...] = (),
    ) -> tuple[Tensor, ...]:
        """What the operator returns of these arguments, but for the largest scores, which are refused."""
        if 2 in self._taken:
            raise CannotExpand("the largest score of each row is used as well")
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        key, value = (self._for_all_heads(x, query) for x in (key, value))
        product = aten.matmul.default(_in(query, wide), aten.transpose.int(_in(key, wide), -2, -1))
        scores = aten.mul.Tensor(product, settled_number(scale))
        grid = self._grid(scores)
        scores = self._scored(scores, grid, score_mod_other_buffers, wide)
        keep = self._listed_keep(grid, block_mask, mask_mod_other_buffers)
        scores = aten.where.ScalarOther(keep, scores, -math.inf)
        weights = aten._safe_softmax.default(scores, -1)
        out = self._laid_out(aten.matmul.default(_in(weights, query.dtype), value))
        if 1 not in self._taken:
            return (out,)
        return out, aten.div.Tensor(aten.logsumexp.default(scores, [-1]), math.log(2))

    def _listed_keep(self, grid: tuple[Tensor, ...], block_mask: tuple[Any, ...], captured: tuple[Any, ...]) -> Tensor:
        if self._made:
            known: Tensor = fake_value(self.mask.kept)
            self.remember(known, self.mask.kept)
            return known
        keep = on_grid(self, function_of(self.call.arguments["block_mask"]), grid, captured)
        if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
            raise CannotExpand("its mask_mod does not return a bool")
        by_function = self.node_of(keep)
        if self.call.reads_lists:
            rows, keys = aten.view.default(grid[2], [-1, 1]), aten.view.default(grid[3], [-1])
            keep = keep_by_lists(Lists.of(block_mask), keep, (rows, keys))
        self.mask = _Mask(self.node_of(keep), by_function)
        return keep

    def _scored(self, scores: Tensor, grid: tuple[Tensor, ...], captured: tuple[Any, ...], wide: torch.dtype) -> Tensor:
        scored = on_grid(self, function_of(self.call.arguments["score_mod"]), (scores, *grid), captured)
        if not isinstance(scored, Tensor) or torch.promote_types(scored.dtype, wide) != wide:
            raise CannotExpand(f"its score_mod does not return {str(wide)[6:]}")
        return _in(scored, wide)

    def _for_all_heads(self, x: Tensor, query: Tensor) -> Tensor:
        """Keys or values with a head for each of the query's, and a batch entry for each of its."""
        sizes = self.plan.sizes
        (batch, heads), (own, kv_heads) = (sizes.shape(t)[:2] for t in (query, x))
        if heads != kv_heads:
            if not isinstance(heads, int) or not isinstance(kv_heads, int):
                raise CannotExpand("the number of its heads is not known")
            x = aten.repeat_interleave.self_int(x, heads // kv_heads, 1)
        if own != batch:
            x = aten.expand.default(x, [query.shape[0], *x.shape[1:]])
        return x

    def _grid(self, scores: Tensor) -> tuple[Tensor, ...]:
        """The index of each dimension of the scores, along that dimension."""
        grid = []
        for dim, size in enumerate(scores.shape):
            index = aten.arange.default(size, dtype=torch.int64, device=scores.device)
            grid.append(aten.view.default(index, [-1 if n == dim else 1 for n in range(scores.dim())]))
        return tuple(grid)

    def _laid_out(self, out: Tensor) -> Tensor:
        """The result in the memory order of the call's, which is that of its query."""
        expected = fake_value(self.plan.result)[0]
        sizes = self.plan.sizes
        strides = [sizes.hint(sizes.index(s)) for s in expected.stride()]
        order = sorted(range(out.dim()), key=lambda d: -strides[d])
        if order == sorted(order):
            return out
        dense = aten.clone.default(aten.permute.default(out, order), memory_format=torch.contiguous_format)
        permuted: Tensor = aten.permute.default(dense, [order.index(d) for d in range(out.dim())])
        return permuted


def _in(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    converted: Tensor = tensor if tensor.dtype == dtype else aten.to.dtype(tensor, dtype)
    return converted
