"""The executable meaning of an `Attention`, in float64. It is slow and simple, and all else is tested against it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from attn_pass.model.attention import Attention, Source
from attn_pass.model.expression import Apply, Const, Dot, Expr, IndexValue, Load
from attn_pass.model.index import Axis, Index, Poly, Quotient, Remainder, Symbol, product
from attn_pass.model.operations import OPERATIONS

Value = int | torch.Tensor


class Evaluation:
    """Evaluates indices and expressions on a grid: one tensor dimension an axis, in the order given."""

    def __init__(self, order: Sequence[Axis], sources: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> None:
        self.sources = sources
        self.sizes = sizes
        self.shape = [self.size(a.size) for a in order]
        self.grid: dict[Axis, torch.Tensor] = {}
        for position, axis in enumerate(order):
            view = [1] * len(order)
            view[position] = -1
            self.grid[axis] = torch.arange(self.shape[position]).view(view)

    def size(self, index: Index) -> int:
        """The number a size stands for; raises KeyError for a symbol without a value."""
        value = self.index(index)
        assert isinstance(value, int)
        return value

    def index(self, index: Index) -> Value:
        """An index as a number or as a tensor over the grid."""
        if isinstance(index, int):
            return index
        total: Value = 0
        for monomial, coefficient in index.terms.items():
            term: Value = coefficient
            for atom in monomial:
                if isinstance(atom, Symbol):
                    term = term * self.sizes[atom.key]
                elif isinstance(atom, Axis):
                    term = term * self.grid[atom]
                elif isinstance(atom, Quotient):
                    term = term * (self.index(atom.value) // self.index(atom.divisor))
                elif isinstance(atom, Remainder):
                    term = term * (self.index(atom.value) % self.index(atom.divisor))
            total = total + term
        return total

    def load(self, load: Load) -> torch.Tensor:
        """A source's elements over the grid, floating point as float64."""
        source = self.sources[load.source]
        # A branch that is not taken may look beyond a tensor's end.
        position = tuple(
            torch.as_tensor(self.index(i)).clamp(0, max(n - 1, 0)) for i, n in zip(load.index, source.shape)
        )
        elements = source[position] if position else source
        elements = elements.to(torch.float64) if elements.is_floating_point() else elements
        return elements.view([1] * (len(self.shape) - elements.dim()) + list(elements.shape))

    def expression(self, expression: Expr, dot: torch.Tensor | None = None) -> torch.Tensor:
        """An expression over the grid; ``dot`` stands for its dot product."""
        if isinstance(expression, Dot):
            assert dot is not None
            return dot
        if isinstance(expression, Const):
            kind = torch.float64 if isinstance(expression.value, float) else None
            return torch.tensor(expression.value, dtype=kind)
        if isinstance(expression, IndexValue):
            return torch.as_tensor(self.index(expression.index))
        if isinstance(expression, Load):
            return self.load(expression)
        assert isinstance(expression, Apply)
        if expression.op == "lookup":
            table, row = expression.args
            assert isinstance(table, Load)
            index = (self.expression(row, dot), *(torch.as_tensor(self.index(i)) for i in table.index[1:]))
            return self.sources[table.source][index].to(torch.float64)
        args = [self.expression(a, dot) for a in expression.args]
        if expression.op == "cast":
            assert expression.dtype is not None
            # Rounding is not part of the meaning; truncation and truth are.
            return args[0].to(torch.float64 if expression.dtype.is_floating_point else expression.dtype)
        if expression.op in ("maximum", "minimum", "where"):
            pair = args[-2:]
            common = torch.promote_types(pair[0].dtype, pair[1].dtype)
            args[-2:] = [a.to(common) for a in pair]
        return OPERATIONS[expression.op].torch(*args)


def bind_sizes(sources: Sequence[Source], tensors: Sequence[torch.Tensor]) -> dict[str, int]:
    """The value of every symbol that is by itself the size of some source's dimension."""
    sizes: dict[str, int] = {}
    for source, tensor in zip(sources, tensors):
        for index, size in zip(source.shape, tensor.shape):
            if isinstance(index, Poly) and len(index.terms) == 1:
                ((monomial, coefficient),) = index.terms.items()
                if coefficient == 1 and len(monomial) == 1 and isinstance(monomial[0], Symbol):
                    sizes[monomial[0].key] = int(size)
    return sizes


def reference(
    attention: Attention,
    tensors: Sequence[torch.Tensor],
    sizes: Mapping[str, int] | None = None,
    *,
    masked_from: float | None = None,
) -> torch.Tensor:
    """The result of the attention in float64, in the shape of the site's own result.

    ``tensors`` are the values of ``attention.sources``; ``sizes`` gives symbols that are no source's size.
    A row whose every score is -inf is NaN or zero, as ``empty_row_is_nan`` says. With ``masked_from`` a row that holds
    no score above it is masked, and its scores are rounded to the program's type, in which a fill absorbs them.
    """
    known = bind_sizes(attention.sources, tensors) | dict(sizes or {})
    outer = attention.batch + attention.heads
    qk = Evaluation((*outer, *attention.rows, attention.keys, attention.dim), tensors, known)
    width = len(outer)
    rows = product(qk.size(a.size) for a in attention.rows)
    assert isinstance(rows, int)
    lead, keys, dim = qk.shape[:width], qk.shape[-2], qk.shape[-1]

    query = qk.load(attention.query).expand(*qk.shape[:-2], 1, dim).reshape(*lead, rows, dim)
    key = qk.load(attention.key).expand(*lead, *[1] * len(attention.rows), keys, dim).reshape(*lead, keys, dim)
    dot = (query @ key.transpose(-1, -2)).reshape(qk.shape[:-1])
    scores = Evaluation((*outer, *attention.rows, attention.keys), tensors, known).expression(attention.score, dot)
    around = Evaluation((*outer, *attention.rows), tensors, known)
    scores = scores.expand(dot.shape)
    if masked_from is not None and keys:
        joined = scores / attention.rescaled
        masked = joined.amax(-1, keepdim=True) <= masked_from
        rounded = joined.to(attention.score_dtype).to(torch.float64) * attention.rescaled
        scores = torch.where(masked, rounded, scores)
    empty = (scores == float("-inf")).all(-1, keepdim=True) & (not attention.empty_row_is_nan)
    scores = scores.masked_fill(empty, 0.0)  # before the softmax, whose gradient of such a row is NaN as well
    if attention.sink is None:
        weights = scores.softmax(-1)
    else:
        sink = around.expression(attention.sink).to(torch.float64).unsqueeze(-1).expand(*dot.shape[:-1], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    weights = weights.masked_fill(empty, 0.0)

    for factor in attention.result_factors:
        number = around.expression(factor.value).unsqueeze(-1)
        if factor.chooses:
            weights = weights.where(number.bool(), 0.0)
        else:
            weights = weights / number if factor.inverse else weights * number

    pv = Evaluation((*outer, attention.keys, *attention.value_dim), tensors, known)
    value_width = product(pv.shape[width + 1 :])
    assert isinstance(value_width, int)
    value = pv.load(attention.value).expand(pv.shape).reshape(*lead, keys, value_width)
    out = (weights.reshape(*lead, rows, keys) @ value).reshape([*lead, *qk.shape[width:-2], *pv.shape[width + 1 :]])
    order = list(outer + attention.rows + attention.value_dim)
    output_axes = [a for dims in attention.output for a in dims]
    out = out.permute([order.index(a) for a in output_axes] + [i for i, a in enumerate(order) if a not in output_axes])
    return out.reshape([int(product(qk_size(pv, qk, a) for a in dims)) for dims in attention.output])  # type: ignore[arg-type]


def qk_size(pv: Evaluation, qk: Evaluation, axis: Axis) -> int:
    """The number of an axis' size, from whichever evaluation has its symbols."""
    return (qk if axis in qk.grid else pv).size(axis.size)
