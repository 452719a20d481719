"""The block lists of a `BlockMask`: which keys they keep, and whether they equal its `mask_mod`.

Compiled FlexAttention computes the blocks that are listed: scores in a partial block are masked by ``mask_mod``, in a
full block by nothing, and all others are not seen. Whether that is ``mask_mod`` and nothing else can be known of one
block that holds everything, and of lists that `create_block_mask` makes in the same program, from the same mask. Lists
from elsewhere are read when the program runs, as a small table of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from attn_pass.graph.effects import Effects
from attn_pass.graph.truth import through_bytes
from attn_pass.graph.values import Sizes, tensor_value
from attn_pass.model.attention import Blocks
from attn_pass.model.conditions import structure_of
from attn_pass.model.expression import Apply, Expr, apply, is_boolean, loads, may_be_boolean
from attn_pass.model.index import Axis, Index, axis_index, is_at_most
from attn_pass.model.structure import Opaque
from attn_pass.reading.reader import Reader
from attn_pass.reading.views import broadcast_position
from attn_pass.reading.vocabulary import Call, tensor_dims, understand

aten = torch.ops.aten
_NO_BLOCKS = 1 << 30  # torch's own size of the one block that stands for no mask, whatever the lengths are
_PARTIAL, _FULL = 1, 2


@dataclass(frozen=True)
class Lists:
    """Four lists and two sizes of ``BlockMask.as_tuple()``, whose first ten entries and last three every torch has."""

    partial: Any  # (B, H, rows of blocks): how many partial blocks each has
    partial_at: Any  # (B, H, rows of blocks, columns): which
    full: Any  # the same of full blocks; None where there are none
    full_at: Any
    rows: Any  # of a block
    keys: Any

    @staticmethod
    def of(block_mask: Sequence[Any]) -> Lists:
        """Of the tuple that the operator takes."""
        return Lists(*block_mask[2:6], *block_mask[-3:-1])


# ---------------------------------------------------------------- what can be known of them


def is_one_block(lists: Lists, q_len: Index, kv_len: Index, effects: Effects) -> bool:
    """Whether they list one block, which holds every score: the mask that stands for none."""
    sizes = ((q_len, lists.rows), (kv_len, lists.keys))
    if lists.full is not None or not all(n == _NO_BLOCKS or _is_within(length, n) for length, n in sizes):
        return False
    return _holds(lists.partial, "ones", effects) and _holds(lists.partial_at, "zeros", effects)


def _is_within(length: Index, size: Any) -> bool:
    return isinstance(size, int) and is_at_most(length, size)


def _holds(node: Any, op: str, effects: Effects) -> bool:
    """Whether a node creates a tensor of one element, a one or a zero, that is never written to."""
    call, value = (understand(node), tensor_value(node)) if isinstance(node, Node) else (None, None)
    if call is None or value is None or value.numel() != 1 or effects.mutations(node):
        return False
    return call.op == op or (call.op == "full" and call["fill_value"] == int(op == "ones"))


def made_from(lists: Lists, sizes: Sizes) -> Node | None:
    """The mask (B, H, L, S) that `create_block_mask` counted for these lists; None where they are from elsewhere."""
    partial = _ordered(lists.partial, lists.partial_at)
    full = None if lists.full is None else _ordered(lists.full, lists.full_at)
    if partial is None or (lists.full is not None and full is None):
        return None
    area = lists.rows * lists.keys if isinstance(lists.rows, int) and isinstance(lists.keys, int) else None
    some = understand(partial)
    if lists.full is None:
        counted = _compared(some, "gt", 0)
    else:
        below = None if some is None or some.op != "and" else (understand(some["input"]), understand(some["other"]))
        counted = None if below is None else _compared(below[0], "gt", 0)
        if below is None or counted is None or counted is not _compared(below[1], "lt", area):
            return None
        if full is None or counted is not _compared(understand(full), "eq", area):
            return None
    return None if counted is None else _counted(counted, lists, sizes)


def _ordered(number: Any, at: Any) -> Node | None:
    """The booleans of which one list has the sums, and the other the places, as `_dense_to_ordered` makes them."""
    total, order = _through_casts(number), _through_casts(at)
    call = understand(total) if isinstance(total, Node) else None
    if call is None or call.op != "sum" or not isinstance(order, Node) or _name(order) != "argsort":
        return None
    value = tensor_value(call["input"])
    options = {"dim": -1, "descending": False, **dict(zip(_parameters(order), order.args)), **order.kwargs}
    last = value is not None and options["dim"] in (-1, value.dim() - 1) and tensor_dims(call, "dim", value.dim())
    if value is None or last != (value.dim() - 1,) or options["descending"] is not True or call["keepdim"]:
        return None
    if options.get("input", options.get("self")) is not call["input"]:
        return None
    matrix = _through_casts(call["input"])
    fake = tensor_value(matrix)
    return matrix if isinstance(matrix, Node) and fake is not None and fake.dtype == torch.bool else None


def _parameters(argsort: Node) -> tuple[str, ...]:
    """The names of what is given by position: the overload ``stable`` takes it as a keyword."""
    return ("input", "dim", "descending", "stable")


def _counted(counted: Node, lists: Lists, sizes: Sizes) -> Node | None:
    """The mask of whose blocks a node has the sums; padded at its ends with what is not kept."""
    blocks = _called(counted, "sum")
    split = None if blocks is None else _called(blocks["input"], "permute")
    padded = None if split is None else _called(split["input"], "reshape")
    if blocks is None or split is None or padded is None or tensor_dims(blocks, "dim", 6) != (4, 5):
        return None
    value, dims = tensor_value(split["input"]), tensor_dims(split, "dims", 6)
    if value is None or value.dim() != 6 or dims != (0, 1, 2, 4, 3, 5):
        return None
    shape = sizes.shape(value)
    mask = tensor_value(padded["input"])
    if (shape[3], shape[5]) != (lists.rows, lists.keys) or mask is None or mask.dim() != 4:
        return None
    if sizes.shape(mask) != (*shape[:2], shape[2] * shape[3], shape[4] * shape[5]):
        return None
    pad = _called(padded["input"], "pad")
    if pad is None:
        return padded["input"]  # type: ignore[no-any-return]
    at_ends = isinstance(pad["pad"], (tuple, list)) and len(pad["pad"]) == 4 and tuple(pad["pad"][::2]) == (0, 0)
    return pad["input"] if at_ends and not pad["value"] and pad.get("mode", "constant") == "constant" else None


def _called(node: Any, *ops: str) -> Call | None:
    call = understand(node) if isinstance(node, Node) else None
    return call if call is not None and call.op in ops and not call.in_place else None


def _compared(call: Call | None, op: str, number: int | None) -> Node | None:
    """What is compared with a number."""
    if call is None or call.op != op or number is None or call["other"] != number:
        return None
    return call["input"] if isinstance(call["input"], Node) else None


def _through_casts(node: Any) -> Any:
    """Back through casts: truth values and small numbers are what they were in every type of integers."""
    while (call := _called(node, "cast", "copy")) is not None:
        node = call["input"]
    return node


def _name(node: Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.partition("::")[2]
    return target if isinstance(target, str) else str(getattr(target, "__name__", ""))


def is_same_mask(reader: Reader, keep: Node, mask: Node, scores: Sequence[Index], at: int) -> bool:
    """Whether ``mask``, which lists were made from, is ``keep`` wherever there is a score; proved element by element.

    One that has a batch or a number of heads of one serves all of them; so it must not depend on which one it is.
    """
    shape = reader.shape(mask)
    if len(shape) != len(scores) or any(n not in (1, size) for n, size in zip(shape[:2], scores[:2])):
        return False
    if tuple(shape[2:]) != tuple(scores[2:]):
        return False
    axes = _axes(keep, scores)
    one, other = (_element(reader, node, axes, at) for node in (keep, mask))
    written = any(reader.effects.mutations(reader.source_nodes[x.source]) for x in loads(one))
    return _in_one_form(one) == _in_one_form(other) and not written


def blocks_of(reader: Reader, keep: Node, scores: Sequence[Index], at: int, *, in_table: bool) -> Blocks:
    """What is known of the blocks in which ``keep``, the mask function on all scores, keeps a key."""
    axes = _axes(keep, scores)
    parts = structure_of(_element(reader, keep, axes, at), axes[3], axes[2:3]).parts
    known = tuple(part for part in parts if not isinstance(part, Opaque))
    return Blocks(known, hides_more=len(known) < len(parts), in_table=in_table)


def _axes(keep: Node, scores: Sequence[Index]) -> tuple[Axis, ...]:
    return tuple(Axis(f"{keep.name}.{n}", size) for n, size in enumerate(scores))


def _element(reader: Reader, node: Node, axes: Sequence[Axis], at: int) -> Expr:
    places = tuple(axis_index(a) for a in axes)
    return reader.element(node, broadcast_position(places, reader.shape(node)), at)


def _in_one_form(e: Expr) -> Expr:
    """The expression as it is with or without the casts and the order in which `torch.vmap` calls an operator."""
    if not isinstance(e, Apply):
        return e
    args = [_in_one_form(a) for a in e.args]
    if e.op in ("add", "sub", "mul") and len(args) == 2:
        # Beside a number a truth value is one as well, whether a cast says so or not.
        args = [a if may_be_boolean(other) else _without_cast(a) for a, other in zip(args, reversed(args))]
    if e.op in ("add", "mul", "and", "or"):
        args = sorted(args, key=str)
    return apply(e.op, *args, dtype=e.dtype)


def _without_cast(e: Expr) -> Expr:
    cast = isinstance(e, Apply) and e.op == "cast" and e.dtype in (torch.int64, torch.int32)
    return e.args[0] if isinstance(e, Apply) and cast and is_boolean(e.args[0]) else e


# ---------------------------------------------------------------- read when the program runs


def keep_by_lists(lists: Lists, keep: Tensor, at: tuple[Tensor, Tensor]) -> Tensor:
    """``keep`` in listed blocks, everything in those that are listed as full, at rows and keys (L, 1) and (S,)."""
    table = _table(lists.partial, lists.partial_at, _PARTIAL)
    if lists.full is not None:
        table = aten.maximum.default(table, _table(lists.full, lists.full_at, _FULL))
    row, key = (aten.floor_divide.Scalar(i, n) for i, n in zip(at, (lists.rows, lists.keys)))
    kind = aten.index.Tensor(table, [None, None, row, key])
    partial = aten.logical_and.default(aten.eq.Scalar(kind, _PARTIAL), keep)
    listed = partial if lists.full is None else aten.logical_or.default(aten.eq.Scalar(kind, _FULL), partial)
    stored: Tensor = through_bytes(lambda operator, *args: operator(*args), listed)
    return stored


def listed_once(lists: Lists) -> bool:
    """Whether every block is listed once at most, of lists that hold values."""
    table, listed = _table(lists.partial, lists.partial_at, 1), lists.partial.sum()
    if lists.full is not None:
        table = aten.maximum.default(table, _table(lists.full, lists.full_at, 1))
        listed = listed + lists.full.sum()
    return bool(table.sum() == listed)


def _table(number: Tensor, at: Tensor, kind: int) -> Tensor:
    """(B, H, rows of blocks, columns of blocks), ``kind`` where the block is listed and 0 elsewhere.

    A list has space for a row of all blocks, as Inductor's template for CPUs requires.
    """
    columns = at.shape[-1]
    places = aten.arange.default(columns, dtype=at.dtype, device=at.device)
    listed = aten.lt.Tensor(places, aten.unsqueeze.default(number, -1))
    # Behind the last block of a row a list holds anything.
    inside = aten.logical_and.default(listed, aten.lt.Scalar(at, columns))
    column = aten.where.ScalarOther(inside, at, columns)
    table = aten.new_zeros.default(at, [*at.shape[:-1], columns + 1], dtype=torch.int8)
    table = aten.scatter.value(table, -1, aten.to.dtype(column, torch.int64), kind)
    kinds: Tensor = aten.slice.Tensor(table, -1, 0, columns)
    return kinds
