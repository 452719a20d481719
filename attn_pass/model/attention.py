"""`Attention`: the description that everything after the reading works on. It is immutable and independent of torch.fx.

Elements are given over *axes*. ``batch``, ``heads`` and ``rows`` are tuples of axes, slowest first,
whose products are the sizes B, H and L of the (B, H, L, D) operands a kernel takes. Moving an axis from one
tuple to another is another form of the same function: that is all that folding shared keys and values or
grouped heads into query rows is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from attn_pass.model.expression import DOT, Expr, Load
from attn_pass.model.index import Axis, Index, axes, product
from attn_pass.model.mask import Mask
from attn_pass.model.structure import Part, row_index
from attn_pass.model.valid_range import ValidRange

SourceKind = Literal["input", "parameter", "table", "buffer", "computed"]
"""``table``: rows of a parameter, looked up by an embedding."""


@dataclass(frozen=True)
class Source:
    """A tensor the attention reads: sizes, not values."""

    id: int
    shape: tuple[Index, ...]
    dtype: torch.dtype
    device: torch.device
    kind: SourceKind = "computed"
    needs_grad: bool = False
    order: tuple[int, ...] | None = None  # its dimensions, slowest in memory first; None where it is not dense
    strides: tuple[Index, ...] | None = None  # None where it has none
    offset: Index = 0  # where in its storage it begins
    of_products: bool = False  # its numbers are those of a product over features, perhaps looked up in it

    def place(self, index: Sequence[Index]) -> Index | None:
        """Where in its storage the element of this index is; None where it has no strides."""
        if self.strides is None:
            return None
        place: Index = self.offset
        for each, stride in zip(index, self.strides):
            place = place + each * stride
        return place


@dataclass(frozen=True)
class Factor:
    """A factor that varies with no key: of the scores a temperature, of the weights a head mask.

    One that ``chooses`` is a condition: what it does not keep is 0, even where it was no number.
    """

    value: Expr
    inverse: bool = False
    chooses: bool = False


@dataclass(frozen=True)
class Blocks:
    """The blocks of scores that a call computes: those in which its mask keeps a key, all of them without a mask.

    ``parts`` is what is known of the mask by position. ``hides_more``: the rest is known at run time only, as in which
    document a token is. ``in_table``: lists that are read at run time say which blocks those are.
    """

    parts: tuple[Part, ...] = ()
    hides_more: bool = False
    in_table: bool = False


@dataclass(frozen=True)
class AsWritten:
    """What the program would run if nothing were done."""

    fused: bool  # a call torch has a fused CPU kernel for, as it is called
    plain: bool = False  # a call on dense operands of rank 4 and one batch size, as all fused kernels ask for
    plain_but_for_mask: bool = False  # the same, if its mask were of rank 2 or 4
    mask: str = "none"  # the call is given: "none", "boolean" or "additive"
    mask_needs_grad: bool = False
    mask_elements: int = 0  # of that mask, whatever it turned out to be
    causal: bool = False  # the call's own flag
    copied_bytes: int = 0  # operands copied before the products or the call
    joined_bytes: int = 0  # of operands that are joined for a kernel, and are not as it is written
    needed_as_well: bool = (
        False  # weights or a log-sum-exp are: all that is saved for sure is the product with the values
    )
    library: str = ""  # the kernel of a package that the call is, as `attn_pass.targets` names it
    blocks: Blocks | None = None  # of a call of FlexAttention

    @property
    def from_library(self) -> bool:
        """Whether the call is one of a package's, not torch's own."""
        return bool(self.library)


@dataclass(frozen=True)
class Attention:
    """``result_factors * softmax(scale * factors * dot(query, key) + bias where keep, else fill) @ value``.

    ``score`` is the score as it was written, which `reference` evaluates; the fields below it are the result of the
    reading. ``query`` and ``key`` are elements over ``dim``, ``value`` over ``value_dim``. If ``not_affine`` gives a
    reason why the scores do not have this form, ``modified``, a function of the product, takes the place of ``scale *
    factors * dot``, and scale and factors have no meaning.
    """

    batch: tuple[Axis, ...]
    heads: tuple[Axis, ...]
    rows: tuple[Axis, ...]
    keys: Axis
    dim: Axis
    value_dim: tuple[Axis, ...]
    query: Load
    key: Load
    value: Load
    score: Expr
    scale: float
    sources: tuple[Source, ...]
    output: tuple[tuple[Axis, ...], ...]  # the site's own result: the axes of each of its dimensions, slowest first
    compute_dtype: torch.dtype  # holds every operand and the result as they are; the kernel's products are exact in it
    output_dtype: torch.dtype
    score_rows: tuple[tuple[Axis, ...], ...] = ()  # the axes of each dimension of the softmax but the keys', in order;
    # none where its scores are not ``score`` itself, but differ from it by what a softmax does not feel
    score_dtype: torch.dtype = torch.float32  # of the scores where bias and mask join them
    rescaled: float = 1.0  # the part of ``scale`` by which float16 scores were multiplied once the bias had joined them
    factors: tuple[Factor, ...] = ()
    result_factors: tuple[Factor, ...] = ()  # of the result's rows, over batch, heads and rows: a head mask
    sink: Expr | None = None  # one more logit of every row, over batch, heads and rows, whose value is zero
    mask: Mask = Mask.none()  # noqa: RUF009
    valid: ValidRange | None = None  # the part of the keys that is read, for targets that take such a range
    dropout: float = 0.0
    empty_row_is_nan: bool = False  # what the program computes for a row whose every score is -inf; zero otherwise
    nan_guard: bool = False  # the program sets rows of NaN weights to zero, whatever made them NaN
    clamped: bool = False  # the program clamps scores from below to a number that masks, whatever made them lower
    fill_is_weak: bool = False  # masked scores become a number that others may have, and their weights zero afterwards
    is_term: bool = False  # the result is added up with others, whose weights the program adds up
    needs_grad: bool = False
    not_affine: str = ""  # why the scores are not a scaled product with a bias and a mask; empty if they are
    modified: Expr = DOT  # what bias and mask apply to where they are not

    @property
    def q_len(self) -> Index:
        """Query length L, all row axes together."""
        return product(a.size for a in self.rows)

    @property
    def kv_len(self) -> Index:
        """Key length S."""
        return self.keys.size

    @property
    def head_dim(self) -> Index:
        """D, of query and key."""
        return self.dim.size

    @property
    def value_head_dim(self) -> Index:
        """D of the values."""
        return product(a.size for a in self.value_dim)

    @property
    def batch_size(self) -> Index:
        """B."""
        return product(a.size for a in self.batch)

    @property
    def query_heads(self) -> Index:
        """H of the query."""
        return product(a.size for a in self.heads)

    @property
    def shared_axes(self) -> tuple[Axis, ...]:
        """The axes of batch and heads that neither keys nor values depend on."""
        used = axes(*self.key.index, *self.value.index)
        return tuple(a for a in self.batch + self.heads if a not in used and a.size != 1)

    @property
    def kv_heads(self) -> tuple[Axis, ...]:
        """The leading axes of ``heads`` that keys and values have; the rest share them (GQA)."""
        shared = set(self.shared_axes)
        return tuple(a for a in self.heads if a not in shared)

    @property
    def groups(self) -> Index:
        """Query heads a KV head serves; 1 without GQA."""
        return product(a.size for a in self.heads if a in set(self.shared_axes))

    @property
    def batch_is_shared(self) -> bool:
        """Whether some batch axis has the same keys and values everywhere."""
        return any(a in self.batch for a in self.shared_axes)

    @property
    def is_causal(self) -> bool:
        """Whether the whole mask is ``key <= row`` for the rows as they are grouped now."""
        return self.mask.structure.is_causal and row_index(self.rows) == self.mask.structure.row

    def with_shared_rows(self, axes: Literal["batch", "heads"]) -> Attention | None:
        """The same function with the shared axes of one of its groups in front of the query rows; None without any."""
        group, shared = getattr(self, axes), set(self.shared_axes)
        moved = tuple(a for a in group if a in shared)
        if not moved:
            return None
        return self.regrouped(**{axes: tuple(a for a in group if a not in shared)}, rows=moved + self.rows)

    def regrouped(self, **groups: tuple[Axis, ...]) -> Attention:
        """The same function with its axes in other groups (``batch``, ``heads``, ``rows``)."""
        # A range was found for the rows as they were.
        out = replace(self, valid=None, **groups)  # type: ignore[arg-type]
        assert sorted(a.key for a in out.batch + out.heads + out.rows) == sorted(
            a.key for a in self.batch + self.heads + self.rows
        )
        return out
