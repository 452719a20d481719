"""Where the rows are in a tensor: which of its dimensions are the batch and the positions, through changes of shape.

A row is one position of one sequence. Packed, a tensor keeps its rank: the batch is 1, and the positions are all rows
of the region behind each other. So nearly every operation is called as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from attn_pass.model.index import Index, product


class Rows(NamedTuple):
    """What a region's rows are: of so many sequences, so many positions each."""

    batch: Index
    length: Index


class Layout(NamedTuple):
    """The dimensions of batch and positions; one dimension where they are merged."""

    batch: int
    length: int

    @property
    def merged(self) -> bool:
        """Whether one dimension is all rows."""
        return self.batch == self.length


def through(layout: Layout, dims: Mapping[int, int]) -> Layout | None:
    """The layout behind an operation that keeps dimensions apart, by where each goes; None where one goes nowhere."""
    if layout.batch not in dims or layout.length not in dims:
        return None
    return Layout(dims[layout.batch], dims[layout.length])


def reshaped(layout: Layout, before: Sequence[Index], after: Sequence[Index], rows: Rows) -> Layout | None:
    """The layout behind a change of shape; None where rows are mixed with something else."""
    merged_size = product((rows.batch, rows.length))
    if layout.merged:
        if (dim := _moved(layout.batch, before, after, merged_size)) is not None:
            return Layout(dim, dim)
        apart = _moved(layout.batch, before, after, rows.batch)
        if apart is not None and apart + 1 < len(after) and after[apart + 1] == rows.length:
            return Layout(apart, apart + 1)
        return None
    batch, length = (
        _moved(dim, before, after, size) for dim, size in ((layout.batch, rows.batch), (layout.length, rows.length))
    )
    if batch is not None and length is not None and batch != length:
        return Layout(batch, length)
    if layout.length == layout.batch + 1 and (dim := _moved(layout.batch, before, after, merged_size)) is not None:
        return Layout(dim, dim)
    return None


def _moved(dim: int, before: Sequence[Index], after: Sequence[Index], size: Index) -> int | None:
    """The dimension of that size with as many elements in front of it."""
    front = product(before[:dim])
    for to, now in enumerate(after):
        if now == size and product(after[:to]) == front:
            return to
    return None


def broadcast(operand: Sequence[Index], result: Sequence[Index]) -> dict[int, int]:
    """Where the dimensions of a broadcast operand are in the result, but for those of size 1 that are spread."""
    lead = len(result) - len(operand)
    return {dim: dim + lead for dim, size in enumerate(operand) if size == result[dim + lead]}
