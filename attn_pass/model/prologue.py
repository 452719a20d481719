"""What makes the queries and keys of an attention: rotary embeddings and norms, as they were read, for the report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from attn_pass.model.expression import Expr, Load
from attn_pass.model.index import Axis, Index

Pairing = Literal["halves", "neighbours", "other"]


@dataclass(frozen=True)
class Term:
    """``coefficient * element``; the element is number ``at`` along the head dim of what it is loaded from."""

    coefficient: Expr
    element: Load
    at: Index


@dataclass(frozen=True)
class Piece:
    """Elements of the head dim, ``at`` for each value of ``axis``: the sum of their terms."""

    axis: Axis
    at: Index
    terms: tuple[Term, ...]


@dataclass(frozen=True)
class Rotation:
    """Pairs of elements of the head dim, rotated by angles that depend on the position.

    Attributes:
        pairing: "halves" where ``d`` is paired with ``d + n / 2`` of the ``n`` elements of a part (rotate_half),
            "neighbours" where it is with ``d + 1`` (interleaved, complex numbers).
        parts: how many times that arrangement follows itself along the head dim.
        dims: the ranges of the head dim that are rotated, each ``(start, stop)``.
        head_dim: of the operand.
        per_sequence: whether the tables differ between the sequences of a batch.
        sources: the numbers of the tensors that the tables are made of.
    """

    pairing: Pairing
    parts: int
    dims: tuple[tuple[int, int], ...]
    head_dim: int
    per_sequence: bool
    sources: tuple[int, ...]

    def __str__(self) -> str:
        rotated = sum(stop - start for start, stop in self.dims)
        ranges = " and ".join(f"{start} to {stop - 1}" for start, stop in self.dims)
        rotated_part = (
            f"all {self.head_dim} elements" if rotated == self.head_dim else f"elements {ranges} of {self.head_dim}"
        )
        pairs = {"halves": "in halves", "neighbours": "interleaved", "other": "in pairs of another order"}[self.pairing]
        times = f", {self.parts} times" if self.parts > 1 else ""
        tables = ", with tables for each sequence" if self.per_sequence else ""
        return f"rotary over {rotated_part}, {pairs}{times}{tables}"


@dataclass(frozen=True)
class Norm:
    """A norm of each row: ``x * rsqrt(mean(x^2) + eps)`` (rms), ``x / max(|x|, eps)`` (l2), or a layer norm.

    Attributes:
        kind: which.
        eps: what is added to the mean, or the least length; 0 for none.
        heads: whether it is over the head dims of all heads together.
        weight, bias: the numbers of their tensors where a call is given them; else they are in coefficients.
        root: of an l2 norm, whether eps is added below the root instead.
        weighted: whether elements are multiplied by a weight each.
    """

    kind: Literal["rms", "l2", "layer"]
    eps: float
    heads: bool = False
    weight: int | None = None
    bias: int | None = None
    root: bool = False
    weighted: bool = False

    def __str__(self) -> str:
        name = {"rms": "RMS norm", "l2": "L2 norm", "layer": "layer norm"}[self.kind]
        over = "all heads together" if self.heads else "the head dim"
        eps = f" (eps {self.eps:g})" if self.eps else ""
        return f"{name} over {over}{eps}{', with a weight' if self.weighted else ''}"


@dataclass(frozen=True)
class Stage:
    """One step: the pieces of a result over the elements of ``source``, which are normalised first where ``norm`` is.

    ``position`` is where element ``along`` of a row of the source is, over the axes of the attention.
    """

    pieces: tuple[Piece, ...]
    norm: Norm | None
    rotation: Rotation | None
    source: int
    position: tuple[Index, ...]
    along: Axis

    def steps(self) -> Iterator[Norm | Rotation]:
        """What it does, in order."""
        if self.norm is not None:
            yield self.norm
        if self.rotation is not None:
            yield self.rotation


@dataclass(frozen=True)
class Prologue:
    """What makes one operand: its stages, the last first.

    ``cached`` says that it is applied to new keys alone, before they join those that are kept. ``unread`` is why what
    comes before it was not read, if there is something like it.
    """

    stages: tuple[Stage, ...]
    cached: bool = False
    unread: str = ""

    @property
    def steps(self) -> tuple[Norm | Rotation, ...]:
        """What is done to the elements, in order."""
        return tuple(step for stage in reversed(self.stages) for step in stage.steps())

    def __str__(self) -> str:
        text = ", then ".join(map(str, self.steps))
        text += f"; before it not read: {self.unread}" if self.unread else ""
        return f"{text}, of new keys before they enter the cache" if self.cached else text


@dataclass(frozen=True)
class NotRead:
    """Something is done to an operand that was not read as a rotary embedding or norm, and why."""

    reason: str

    def __str__(self) -> str:
        return f"not read: {self.reason}"
