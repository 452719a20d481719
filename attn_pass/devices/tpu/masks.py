"""A mask as the Pallas kernels take it: a band of distances, keys kept or not in each batch row, or a matrix."""

from __future__ import annotations

from dataclasses import dataclass

from attn_pass.model.attention import Attention
from attn_pass.model.conditions import structure_of
from attn_pass.model.expression import TRUE, Apply, Expr, apply, expression_axes
from attn_pass.model.structure import Band, row_index


@dataclass(frozen=True)
class KernelMask:
    """``lower <= key - row <= upper``, None being no bound, and ``kept`` over batch and keys; or neither: a matrix."""

    lower: int | None = None
    upper: int | None = None
    kept: Expr | None = None
    matrix: bool = False

    @property
    def is_causal(self) -> bool:
        """Whether keys are kept up to the row's own number, from the first key on."""
        return (self.lower, self.upper) == (None, 0)

    @property
    def has_band(self) -> bool:
        """Whether some distances are masked."""
        return (self.lower, self.upper) != (None, None)

    @property
    def width(self) -> int | None:
        """How many keys a row sees, where the band has two sides."""
        return None if self.lower is None or self.upper is None else self.upper - self.lower + 1

    def leaves_no_row_empty(self, rows: int, keys: int) -> bool:
        """Whether the band alone keeps a key of every row."""
        first = 0 if self.upper is None else self.upper
        last = keys - 1 if self.lower is None else rows - 1 + self.lower
        crossed = self.lower is not None and self.upper is not None and self.lower > self.upper
        return first >= 0 and last < keys and not crossed

    def __str__(self) -> str:
        if self.matrix:
            return "matrix"
        band = f"{self.lower} <= key - row <= {self.upper}" if self.has_band else ""
        return " and ".join(x for x in (band, "keys" if self.kept is not None else "") if x) or "none"


MATRIX = KernelMask(matrix=True)


def mask_of(a: Attention) -> KernelMask:
    """The whole mask of an attention, exactly. A part that is neither a band nor the same for all rows is a matrix."""
    if a.mask.is_none:
        return KernelMask()
    if a.mask.bias is not None or a.mask.condition is None:
        return MATRIX
    mask = _of_condition(a.mask.condition, a)
    deeper = a.mask.deep_condition
    return _of_condition(deeper, a) if mask.matrix and deeper is not None else mask


def _of_condition(condition: Expr, a: Attention) -> KernelMask:
    lowers: list[int] = []
    uppers: list[int] = []
    kept: Expr = TRUE
    for part in _conjuncts(condition):
        band = _band(part, a)
        if band is not None:
            lowers += [] if band.lower is None else [int(band.lower)]  # type: ignore[arg-type]
            uppers += [] if band.upper is None else [int(band.upper)]  # type: ignore[arg-type]
        elif expression_axes(part) <= {*a.batch, a.keys}:
            kept = apply("and", kept, part)
        else:
            return MATRIX
    return KernelMask(max(lowers, default=None), min(uppers, default=None), None if kept == TRUE else kept)


def _band(part: Expr, a: Attention) -> Band | None:
    """A condition as a band with bounds that are numbers, over the rows as they are grouped now."""
    structure = structure_of(part, a.keys, a.rows)
    if structure.row != row_index(a.rows) or len(structure.parts) != 1:
        return None
    (band,) = structure.parts
    known = isinstance(band, Band) and all(b is None or isinstance(b, int) for b in (band.lower, band.upper))
    return band if isinstance(band, Band) and known else None


def _conjuncts(condition: Expr) -> list[Expr]:
    if isinstance(condition, Apply) and condition.op == "and":
        return [c for arg in condition.args for c in _conjuncts(arg)]
    return [] if condition == TRUE else [condition]
