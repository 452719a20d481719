"""A mask as a small picture: the keep-condition evaluated at sampled rows and keys, in a logic that knows "unknown"."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import cast

import torch

from attn_pass.model.attention import Attention
from attn_pass.model.expression import TRUE, ZERO, Apply, Expr, Load, apply, expression_axes, walk
from attn_pass.model.formula import condition_of
from attn_pass.model.index import Axis, Index, Poly, Symbol
from attn_pass.model.operations import OPERATIONS
from attn_pass.model.reference import Evaluation
from attn_pass.report.pages.picture import ALL, NONE, SOME, UNKNOWN, Picture

CELLS = 48  # a side
_SAMPLES = 8  # rows and keys of a cell that are looked at, its first and last among them
_MOST_TERMS = 2000

Known = tuple[torch.Tensor, torch.Tensor]
"""Values, and where they are known; what is unknown has any value."""


def picture_of(a: Attention, values: Sequence[torch.Tensor | None], hint: Callable[[Index], int]) -> Picture | None:
    """The keys that the mask keeps; None if it keeps everything, or is a bias and not a mask.

    Batch and head are the first ones, symbolic sizes are at their hint.

    Args:
        a: the attention.
        values: of its sources, where they are known when it is compiled.
        hint: the number that is used for a size.
    """
    condition = _condition(a)
    rows, keys = hint(a.q_len), hint(a.kv_len)
    if condition == TRUE or not rows or not keys or _is_long(condition):
        return None
    row_cells, key_cells = _cells(rows), _cells(keys)
    at_rows = torch.tensor([n for cell in row_cells for n in cell])
    at_keys = torch.tensor([n for cell in key_cells for n in cell])
    keeps, known = _Sampled(a, values, hint, at_rows, at_keys).expression(condition)
    shape = (len(at_rows), len(at_keys))
    keeps, known = (keeps != 0).expand(shape), known.expand(shape)
    cells, top = [], 0
    for row in row_cells:
        line, left = "", 0
        for key in key_cells:
            region = (slice(top, top + len(row)), slice(left, left + len(key)))
            line += _kind(keeps[region], known[region])
            left += len(key)
        cells.append(line)
        top += len(row)
    return Picture(tuple(cells), rows, keys, _remark(a, condition, len(at_rows) < rows or len(at_keys) < keys))


def _condition(a: Attention) -> Expr:
    if a.mask.structure.is_exact and a.mask.structure.parts:
        return a.mask.structure.condition()
    condition = condition_of(a) or TRUE
    if a.mask.bias is not None and a.mask.fills is not None:
        condition = apply("and", condition, apply("eq", a.mask.bias, ZERO))
    return condition


def _is_long(condition: Expr) -> bool:
    return sum(1 for _ in islice(walk(condition), _MOST_TERMS + 1)) > _MOST_TERMS


def _cells(length: int) -> list[list[int]]:
    """The positions that are looked at, cell by cell."""
    number = min(length, CELLS)
    cells = []
    for cell in range(number):
        first, last = cell * length // number, (cell + 1) * length // number - 1
        step = max(1, min(_SAMPLES, last - first + 1) - 1)
        cells.append(sorted({first + (last - first) * n // step for n in range(step + 1)}))
    return cells


def _kind(keeps: torch.Tensor, known: torch.Tensor) -> str:
    if not bool(known.all()):
        return UNKNOWN
    return ALL if bool(keeps.all()) else SOME if bool(keeps.any()) else NONE


def _remark(a: Attention, condition: Expr, sampled: bool) -> str:
    used = expression_axes(condition)
    remarks = ["of the first batch entry and head"] if any(x in used for x in (*a.batch, *a.heads)) else []
    return ", ".join([*remarks, *(["sampled"] if sampled else [])])


class _Sampled:
    """Evaluates expressions at rows (down) and keys (across), the first of every other axis."""

    def __init__(
        self,
        a: Attention,
        values: Sequence[torch.Tensor | None],
        hint: Callable[[Index], int],
        at_rows: torch.Tensor,
        at_keys: torch.Tensor,
    ) -> None:
        self.a, self.values = a, values
        stand_ins = [torch.ones(1, dtype=s.dtype) if v is None else v for s, v in zip(a.sources, values)]
        self.evaluation = Evaluation((), stand_ins, cast("Mapping[str, int]", _Sizes(hint)))
        grid: dict[Axis, torch.Tensor] = {axis: torch.tensor(0) for axis in (*a.batch, *a.heads, a.dim, *a.value_dim)}
        rest = at_rows.view(-1, 1)
        for axis in reversed(a.rows):
            size = max(1, hint(axis.size))
            grid[axis], rest = rest % size, rest // size
        grid[a.keys] = at_keys.view(1, -1)
        self.evaluation.grid = grid
        self.seen: dict[int, Known] = {}

    def expression(self, expression: Expr) -> Known:
        """The expression where it is known. What occurs twice is computed once."""
        if id(expression) not in self.seen:
            self.seen[id(expression)] = self._computed(expression)
        return self.seen[id(expression)]

    def _computed(self, expression: Expr) -> Known:
        yes = torch.tensor(True)
        if isinstance(expression, Load):
            return self._load(expression)
        if not isinstance(expression, Apply):
            return self.evaluation.expression(expression, torch.tensor(1.0)), yes
        if expression.op == "lookup":
            return torch.tensor(1.0, dtype=torch.float64), ~yes
        args = [self.expression(e) for e in expression.args]
        value = self._value(expression, [v for v, _ in args])
        (first, first_known), *others = args
        if expression.op in ("and", "or"):
            (second, second_known) = others[0]
            decides = expression.op == "or"
            by_one = (first_known & ((first != 0) == decides)) | (second_known & ((second != 0) == decides))
            both = first_known & second_known
            return torch.where(both, value, torch.tensor(decides)), both | by_one
        if expression.op == "where":
            (one, one_known), (other, other_known) = others
            chosen = torch.where(first != 0, one_known, other_known)
            return value, (first_known & chosen) | (one_known & other_known & (one == other))
        known = yes
        for _, each in args:
            known = known & each
        return value, known

    def _value(self, expression: Apply, args: list[torch.Tensor]) -> torch.Tensor:
        if expression.op == "cast":
            assert expression.dtype is not None
            return args[0].to(torch.float64 if expression.dtype.is_floating_point else expression.dtype)
        if expression.op in ("maximum", "minimum", "where"):
            common = torch.promote_types(args[-2].dtype, args[-1].dtype)
            args = [*args[:-2], args[-2].to(common), args[-1].to(common)]
        if expression.op == "where":
            args[0] = args[0] != 0
        return OPERATIONS[expression.op].torch(*args)

    def _load(self, load: Load) -> Known:
        if self.values[load.source] is None:
            dtype = self.a.sources[load.source].dtype
            return torch.ones((), dtype=torch.float64 if dtype.is_floating_point else dtype), torch.tensor(False)
        return self.evaluation.load(load), torch.tensor(True)


class _Sizes:
    """Numbers of symbols, by asking the hint of each."""

    def __init__(self, hint: Callable[[Index], int]) -> None:
        self.hint = hint

    def __getitem__(self, key: str) -> int:
        return self.hint(Poly.of(Symbol(key)))
