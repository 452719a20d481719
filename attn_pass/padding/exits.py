"""Where rows leave a region: an operation that gives the same whatever the rows of padding hold.

What an exit reads is part of the region, beside the rows that are kept as keys: the position that is pooled, the rows
that a mask multiplies with something else than 0, the rows whose label counts. All others it reads as zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx import Node

from attn_pass.graph.names import torch_name
from attn_pass.graph.values import tensor_value
from attn_pass.padding.layouts import Layout, Rows
from attn_pass.padding.masks import PaddingMask, averages, counts_positions, hides_padding, mask_of
from attn_pass.padding.rules import Rules
from attn_pass.padding.scores import readers
from attn_pass.reading.vocabulary import Call, understand

Kind = Literal["nothing", "position", "positions", "nonzero", "zero", "other than", "keys"]


_OF_SIZES = frozenset(
    {"size", "dim", "numel", "sym_size", "sym_numel", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones"}
)
_TO_SIZES = frozenset({"expand_as", "view_as", "reshape_as"})  # of a second tensor
FINITE = "a mask multiplies rows of padding with 0"


@dataclass(frozen=True)
class Exit:
    """An operation behind which rows of padding are not seen, in words, and which rows it does read.

    ``tensor`` is (B,) of "positions", the mask (B, 1, L, S) of "keys", and has the layout ``at`` where it says which
    rows are read; ``seen_as`` is what it is read as: a cast or a copy of it, which must not have been written either.
    ``sites`` are the attentions that read it with rows of padding, and are an exit only if they are of
    the region themselves.
    """

    words: str
    reads: Kind
    position: int = 0
    tensor: Node | None = None
    at: Layout | None = None
    seen_as: tuple[Node, ...] = ()
    sites: tuple[Node, ...] = ()

    @property
    def is_loss(self) -> bool:
        """Whether it is a loss, which is the same of the rows that are there alone; ``tensor`` has their labels."""
        return self.reads == "other than"


@dataclass(frozen=True)
class Surroundings:
    """What an exit is told by: the rows of a region, its mask, its kernels."""

    rules: Rules
    rows: Rows
    mask: PaddingMask
    operators: Collection[Any]
    leaving: bool = False  # the user says that rows of padding are not used where they leave the model
    strict: bool = False  # nothing is said of rows of padding, not that they are finite


def exit_of(user: Node, node: Node, layout: Layout, around: Surroundings) -> Exit | None:
    """How the rows of ``node`` leave by ``user``; None where it may see padding."""
    if user.op == "output":
        return Exit("you promised that rows of padding of the result are unused", "nothing") if around.leaving else None
    if _is_of_sizes(user, node):
        return Exit("only its sizes are read", "nothing")
    if sites := readers(user, node, layout, around.rules, around.rows, around.operators):
        return Exit("rows of padding reach only their own scores", "nothing", sites=sites)
    if user.op == "call_function" and user.target in around.operators:
        return _as_keys(user, node, layout, around)
    if torch_name(user) in ("cross_entropy", "nll_loss"):
        return _loss(user, node, layout, around)
    call = understand(user)
    rule = None if call is None or call.in_place else _BY_OPERATION.get(call.op)
    return None if call is None or rule is None else rule(call, node, layout, around)


def _is_of_sizes(user: Node, node: Node) -> bool:
    """Whether an operation reads sizes of a tensor, and none of its numbers."""
    name = torch_name(user)
    if name in _OF_SIZES or (name in _TO_SIZES and list(user.args[1:]) == [node] and user.args[0] is not node):
        return True
    return user.target is getattr and len(user.args) > 1 and user.args[1] in ("shape", "ndim")


def _as_keys(user: Node, node: Node, layout: Layout, around: Surroundings) -> Exit | None:
    """Keys and values of another attention, a cross attention, that masks the same ones, or others."""
    used = [n for n, argument in enumerate(user.args) if argument is node]
    others: list[Node] = []
    torch.fx.node.map_arg(user.kwargs, others.append)
    value = tensor_value(node)
    has_all_rows = value is not None and around.rules.shape(node)[0] == around.rows.batch
    if 0 in used or node in others or layout != Layout(0, 2) or not has_all_rows or not hides_padding(user):
        return None
    mask = mask_of(user)
    if mask == around.mask and not averages((user,)) and not mask.is_of_pairs:  # there a row may read all values
        return Exit("its keys and values of padding are masked in another attention", "nothing")
    other_mask = mask.added if mask.keep is None else mask.keep
    if other_mask is None or mask.nodes != (other_mask,) or counts_positions(user):
        return None
    shape = around.rules.shape(other_mask)
    if len(shape) != 4 or shape[3] != around.rows.length or shape[0] not in (1, around.rows.batch):
        return None
    return Exit("its keys and values that another attention's mask keeps are read", "keys", tensor=other_mask)


def _getitem(call: Call, node: Node, layout: Layout, around: Surroundings) -> Exit | None:
    index = call["index"]
    entries = list(index) if isinstance(index, (tuple, list)) else [index]
    if call["input"] is not node or layout.merged or any(node is e for e in entries):
        return None
    if len(entries) == 1 and isinstance(entries[0], Node) and layout == (0, 1):
        return _selected(entries[0], around)
    if len(entries) == 2 and layout == (0, 1) and all(isinstance(e, Node) for e in entries):
        return _gathered(entries[0], entries[1], around)
    if any(e is Ellipsis or e is None or isinstance(e, Node) for e in entries) or len(entries) <= layout.length:
        return None
    if layout.batch < len(entries) and entries[layout.batch] != slice(None):
        return None
    entry = entries[layout.length]
    if type(entry) is int:
        return _pooled(entry)
    if isinstance(entry, slice) and entry in (slice(0, 1), slice(None, 1), slice(0, 1, None), slice(None, 1, None)):
        return _pooled(0)
    return _pooled(-1) if entry == slice(-1, None) else None


def _select(call: Call, node: Node, layout: Layout, around: Surroundings) -> Exit | None:
    dim, index, rank = call["dim"], call["index"], len(around.rules.shape(node))
    if layout.merged or type(dim) is not int or type(index) is not int or dim % rank != layout.length:
        return None
    return _pooled(index)


def _pooled(position: int) -> Exit:
    named = {0: "only the first position", -1: "only the last position"}
    return Exit(f"{named.get(position, f'only position {position}')} is read", "position", position)


def _selected(mask: Node, around: Surroundings) -> Exit | None:
    """``x[mask]``, a truth value for each row."""
    if not _is_of_rows(mask, around):
        return None
    return Exit("a mask selects rows", "nonzero", tensor=mask, at=Layout(0, 1))


def _is_of_rows(mask: Node, around: Surroundings) -> bool:
    """Whether it is a truth value for each row."""
    value = tensor_value(mask)
    return value is not None and value.dtype == torch.bool and around.rules.shape(mask) == tuple(around.rows)


def _gathered(batch: Node, position: Node, around: Surroundings) -> Exit | None:
    """``x[arange(B), positions]``: one position of each sequence, found at run time."""
    values = tensor_value(batch), tensor_value(position)
    if any(v is None or v.dim() != 1 or v.dtype.is_floating_point for v in values):
        return None
    source = _through(batch, ("cast", "copy"))
    arange = understand(source)
    if arange is None or arange.op != "arange" or around.rules.shape(batch) != (around.rows.batch,):
        return None
    bounds = arange.get("bounds", ())
    start = {1: 0, 2: bounds[0]}.get(len(bounds)) if bounds else None
    steps = any(arange.get(name) is not None for name in ("start", "end")) or arange.get("step", 1) != 1
    one_each = around.rules.shape(position) == (around.rows.batch,)
    if start != 0 or steps or not one_each or values[1] is None or values[1].dtype == torch.bool:
        return None
    words = "one position of each sequence is read, found at run time"
    return Exit(words, "positions", tensor=position, seen_as=(batch,))


def _product(call: Call, node: Node, layout: Layout, around: Surroundings) -> Exit | None:
    """Times a mask: where that is 0 the product is, whatever finite number is multiplied."""
    left, right = call["input"], call["other"]
    other = right if left is node else left
    if left is right or not isinstance(other, Node) or around.strict:
        return None
    return _hidden_by(other, node, layout, around, FINITE, "nonzero")


def _filled(call: Call, node: Node, layout: Layout, around: Surroundings) -> Exit | None:
    if call["input"] is not node or call["value"] is node or call["mask"] is node:
        return None
    return _hidden_by(call["mask"], node, layout, around, "a mask replaces rows of padding", "zero")


def _put(call: Call, node: Node, layout: Layout, around: Surroundings) -> Exit | None:
    """Where a truth value for each row selects it, something else is put."""
    indices = call["indices"]
    if call["input"] is not node or call["values"] is node or call["accumulate"] or layout != (0, 1):
        return None
    mask = indices[0] if isinstance(indices, (tuple, list)) and len(indices) == 1 else None
    if not isinstance(mask, Node) or mask is node or not _is_of_rows(mask, around):
        return None
    return Exit("a mask replaces rows of padding", "zero", tensor=mask, at=Layout(0, 1))


def _chosen(call: Call, node: Node, layout: Layout, around: Surroundings) -> Exit | None:
    condition, yes, no = call["condition"], call["input"], call["other"]
    if condition is node or (yes is node) == (no is node):
        return None
    kind: Kind = "nonzero" if yes is node else "zero"
    return _hidden_by(condition, node, layout, around, "a mask replaces rows of padding", kind)


def _hidden_by(value: Any, node: Node, layout: Layout, around: Surroundings, reason: str, kind: Kind) -> Exit | None:
    """The exit that a mask over rows makes: a tensor of truth values or integers, perhaps as floats, and broadcast."""
    if not isinstance(value, Node) or layout.merged:
        return None
    source = _through(value, ("cast", "copy", "expand"))
    origin = tensor_value(_through(source, ("cast", "copy", "expand", "reshape", "getitem")))
    if origin is None or origin.is_floating_point() or origin.is_complex():
        return None
    at = _rows_alone(around.rules.shape(source), layout, around)
    ranks = {len(around.rules.shape(n)) for n in (source, value, node)}
    return Exit(reason, kind, tensor=source, at=at, seen_as=(value,)) if at is not None and len(ranks) == 1 else None


def _rows_alone(shape: tuple[Any, ...], layout: Layout, around: Surroundings) -> Layout | None:
    """Where batch and positions are in a tensor that varies over them alone."""
    row_sizes = {layout.batch: around.rows.batch, layout.length: around.rows.length}
    alone = all(size == row_sizes.get(dim, 1) for dim, size in enumerate(shape))
    return layout if alone and len(shape) > max(layout) else None


def _loss(user: Node, node: Node, layout: Layout, around: Surroundings) -> Exit | None:
    """A loss without the rows whose label is to be ignored, which are padding by the caller's own word.

    Of rows (N, C), all behind each other, with N labels; or of (B, C, L), with (B, L).
    """
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    arguments = dict(zip(names, user.args)) | user.kwargs
    target, ignored = arguments.get("target"), arguments.get("ignore_index", -100)
    if arguments.get("input") is not node or not isinstance(target, Node) or type(ignored) is not int:
        return None
    labels = tensor_value(target)
    integers = labels is not None and not labels.is_floating_point() and target is not node
    ranks = {Layout(0, 0): 1, Layout(0, 2): 2}
    if not integers or ranks.get(layout) != len(around.rules.shape(target)):
        return None
    return Exit(f"the loss ignores labels of {ignored}", "other than", ignored, target, Layout(0, 0))


def _through(node: Node, operations: tuple[str, ...]) -> Node:
    """What a node is a cast or a copy of."""
    call = understand(node)
    while call is not None and call.op in operations and isinstance(call["input"], Node):
        node = call["input"]
        call = understand(node)
    return node


_BY_OPERATION: Mapping[str, Callable[[Call, Node, Layout, Surroundings], Exit | None]] = {
    "getitem": _getitem,
    "index": _getitem,
    "select": _select,
    "mul": _product,
    "masked_fill": _filled,
    "index_put": _put,
    "where": _chosen,
    "method_where": _chosen,
}
