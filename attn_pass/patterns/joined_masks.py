"""Joins the biases and masks of the pieces of joined scores to one bias and one mask over the whole length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from attn_pass.graph.values import tensor_value
from attn_pass.patterns.beside import Beside, CannotAdd
from attn_pass.patterns.joined_pieces import Piece
from attn_pass.reading.reader import Reader

aten = torch.ops.aten


def join_bias(beside: Beside, reader: Reader, dim: int, is_stack: bool, pieces: Sequence[Piece]) -> Node | None:
    """The bias over the joined scores, 0 in a piece that has none; None if none has one."""
    return _join(beside, reader, dim, is_stack, pieces, [p.bias for p in pieces], 0.0)


def join_masks(
    beside: Beside, reader: Reader, dim: int, is_stack: bool, pieces: Sequence[Piece]
) -> tuple[Node, float] | None:
    """Where the joined scores are filled, and with what; None if no piece is masked. Raises `CannotAdd`: two fills."""
    fills = {p.fill for p in pieces if p.fill is not None}
    if len(fills) > 1:
        raise CannotAdd("two different numbers are filled in")
    if not fills:
        return None
    masks = [beside.add(aten.logical_not.default, p.mask) if p.mask is not None and p.keeps else p.mask for p in pieces]
    joined = _join(beside, reader, dim, is_stack, pieces, masks, False)
    assert joined is not None
    return joined, fills.pop()


def _join(
    beside: Beside,
    reader: Reader,
    dim: int,
    is_stack: bool,
    pieces: Sequence[Piece],
    terms: Sequence[Node | None],
    nothing: float | bool,
) -> Node | None:
    """One tensor over the joined scores; broadcast where all the terms are, but for what they are joined along."""
    if all(term is None for term in terms):
        return None
    rank = len(reader.shape(pieces[0].product.node))
    shapes = [(1,) * (rank - len(s)) + tuple(s) for s in (reader.shape(t) for t in terms if t is not None)]
    varies = [any(s[d] != 1 for s in shapes) or (d == dim and not is_stack) for d in range(rank)]
    joined = []
    for piece, term in zip(pieces, terms):
        sizes = [_size(beside, piece, d) if v else 1 for d, v in enumerate(varies)]
        joined.append(_of_size(beside, reader, piece, term, sizes, nothing))
    return beside.add(aten.stack.default if is_stack else aten.cat.default, joined, dim)


def _size(beside: Beside, piece: Piece, dim: int) -> int | Node:
    """A size of the scores, taken from what they are a product of: they are to go."""
    p = piece.product
    letter, size = p.out_letters[dim], beside.reader.shape(p.node)[dim]
    for node, letters in ((p.left, p.left_letters), (p.right, p.right_letters)):
        if letter in letters and beside.reader.shape(node)[letters.index(letter)] == size:
            return beside.size(node, letters.index(letter))
    raise CannotAdd("a size that neither operand has")


def _of_size(
    beside: Beside, reader: Reader, piece: Piece, term: Node | None, sizes: list[Any], nothing: float | bool
) -> Node:
    if term is not None:
        same = [s for s in reader.shape(term)] == sizes
        return term if same else beside.add(aten.expand.default, term, sizes)
    value = tensor_value(piece.product.node)
    assert value is not None
    dtype = torch.bool if isinstance(nothing, bool) else value.dtype
    return beside.add(aten.full.default, sizes, nothing, dtype=dtype, device=value.device)
