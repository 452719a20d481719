"""The first step of a description: axes are split until every index is affine, then sorted by their role."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from attn_pass.model.attention import Factor
from attn_pass.model.expression import Expr, Load, expression_axes, loads, rewrite_indices, with_loads
from attn_pass.model.index import Axis, Index, axes, axis_index, divide_exactly, substitute, terms_of, unsplit_axis
from attn_pass.model.views import NoView, common_stride, digit_axes, split_axes
from attn_pass.reading.operands import OperandForm
from attn_pass.reading.parts import Parts, Shallower
from attn_pass.reading.unreadable import Unreadable
from attn_pass.reading.views import Position

_MOST_SPLITS = 24


@dataclass(frozen=True)
class Arrangement:
    """The parts of a site, with one way to see each operand, over axes that are split alike in all of them."""

    parts: Parts
    chosen: Mapping[str, int]  # which form of each operand, 0 for the tensor as it was written
    positions: Mapping[str, Position]  # of each operand
    outer: tuple[Index, ...]  # the softmax's position without row and keys
    row: Index
    score: Expr
    output: tuple[tuple[Axis, ...], ...]  # the axes of each dimension of the result
    factors: tuple[tuple[Expr, bool], ...]  # of query and key, with whether they are divisors
    result_factors: tuple[Factor, ...]
    sink: Expr | None
    split: Mapping[Axis, Index] = field(default_factory=dict)
    written_at: Mapping[Load, int] = field(default_factory=dict)  # loads of masks as written, with when they are read

    @staticmethod
    def of(parts: Parts, chosen: Mapping[str, int]) -> Arrangement:
        """The parts as they were lifted, nothing split."""
        forms = {name: options[chosen[name]] for name, options in parts.forms.items()}
        outer, row = parts.rows_at
        return Arrangement(
            parts,
            chosen,
            {name: form.position for name, form in forms.items()},
            outer,
            row,
            parts.score,
            tuple((a,) if a.size != 1 else () for a in parts.output),
            (*forms["query"].factors, *forms["key"].factors),
            parts.result_factors,
            parts.sink,
        )

    @property
    def forms(self) -> dict[str, OperandForm]:
        """How each operand is seen."""
        return {name: options[self.chosen[name]] for name, options in self.parts.forms.items()}

    @property
    def row_terms(self) -> tuple[Expr, ...]:
        """What belongs to whole rows of the result."""
        return (*(f.value for f in self.result_factors), *(() if self.sink is None else (self.sink,)))

    def operand_of_factor(self, number: int) -> str:
        """The operand that a factor was taken out of."""
        return "query" if number < len(self.forms["query"].factors) else "key"

    def indices(self) -> Iterator[Index]:
        """Every index that has to be affine."""
        keys = self.parts.keys
        yield from self.outer
        yield self.row
        for position in self.positions.values():
            yield from _apart(position, self.parts.dim, keys)
        for load in loads(self.score):
            yield from _apart(load.index, keys)
        for term in (*(f for f, _ in self.factors), *self.row_terms):
            for load in loads(term):
                yield from load.index

    def with_split(self, axis: Axis, high: Axis, low: Axis) -> Arrangement:
        """The same with an axis as two."""
        values = {axis: axis_index(high) * low.size + axis_index(low)}
        return replace(
            self,
            split={a: substitute(i, values) for a, i in self.split.items()} | values,
            outer=tuple(substitute(i, values) for i in self.outer),
            row=substitute(self.row, values),
            positions={n: tuple(substitute(i, values) for i in p) for n, p in self.positions.items()},
            score=rewrite_indices(self.score, values),
            factors=tuple((rewrite_indices(f, values), inverse) for f, inverse in self.factors),
            result_factors=tuple(replace(f, value=rewrite_indices(f.value, values)) for f in self.result_factors),
            sink=None if self.sink is None else rewrite_indices(self.sink, values),
            output=tuple(
                tuple(b for a in dims for b in ((high, low) if a == axis else (a,)) if b.size != 1)
                for dims in self.output
            ),
        )

    def by_written(self, load: Load) -> Arrangement:
        """The same with a mask's load as it was written, not as far back as it was followed. Raises `Unreadable`."""
        side = next((s for k, s in self.parts.side.items() if self._as_split(k) == load), None)
        if side is None or side.node is side.written:
            raise Unreadable("a mask is read in an order that is not a view of it", self.parts.result)
        position = tuple(substitute(i, self.split) for i in side.written_position)
        shallow = self.parts.reader.load(side.written, position, side.written_at)
        return replace(
            self,
            score=with_loads(self.score, {load: shallow}),
            written_at={**self.written_at, shallow: side.written_at},
        )

    def _as_split(self, load: Load) -> Load:
        """A load of the parts after the splits so far."""
        return Load(load.source, tuple(substitute(i, self.split) for i in load.index))

    def deep(self, expression: Expr) -> Expr:
        """The expression with every load lifted down to index arithmetic where that is possible."""
        reader, parts = self.parts.reader, self.parts
        live = {self._as_split(k): side for k, side in parts.side.items()}
        values: dict[Load, Expr] = {}
        for load in loads(expression):
            side = live.get(load)
            at = self.written_at.get(load, side.at if side is not None else reader.order[parts.result])
            values[load] = reader.element(reader.source_nodes[load.source], load.index, at)
        return with_loads(expression, values)


def _apart(index: Sequence[Index], *own: Axis) -> Sequence[Index]:
    """The index of a load, with what is summed over split for this load alone where it reads it by parts.

    Keys that a mask reads by rows and columns of an image, a head dim that is two dimensions of the operand.
    """
    for axis in own:
        apart = [i for i in index if axis in axes(i)]
        try:
            split, _ = split_axes(apart, [(axis,)])
        except NoView:
            continue
        index = [i for i in index if axis not in axes(i)] + list(split)
    return index


def arranged(parts: Parts, chosen: Mapping[str, int]) -> Arrangement:
    """The parts with axes split until every index is affine. Raises `Shallower` or `Unreadable`."""
    arrangement = Arrangement.of(parts, chosen)
    for _ in range(_MOST_SPLITS):
        unsplit = unsplit_axis(arrangement.indices())
        if unsplit is None:
            return arrangement
        axis, by = unsplit
        size = divide_exactly(axis.size, by)
        if size is None or axis in (parts.keys, parts.dim):
            arrangement = _given_up(arrangement, axis)
            continue
        arrangement = arrangement.with_split(axis, Axis(f"{axis.key}h", size), Axis(f"{axis.key}l", by))
    raise Unreadable("the layout has too many nested groups", parts.result)


def _given_up(arrangement: Arrangement, axis: Axis) -> Arrangement:
    """An axis that cannot be split: the operand or mask that needs the split is traced back less far."""
    for name, position in arrangement.positions.items():
        if unsplit_axis(position) is not None and arrangement.chosen[name] > 0:
            raise Shallower(name, f"axis {axis.key} is divided")
    for load in loads(arrangement.score):
        if unsplit_axis(load.index) is not None:
            return arrangement.by_written(load)
    raise Unreadable("a view divides an axis unevenly", arrangement.parts.result)


@dataclass(frozen=True)
class Roles:
    """What the axes of a site are for."""

    batch: tuple[Axis, ...]
    heads: tuple[Axis, ...]
    rows: tuple[Axis, ...]
    value_dim: tuple[Axis, ...]
    score_rows: tuple[tuple[Axis, ...], ...]  # the axes of each dimension of the softmax but that of the keys


def roles_of(arrangement: Arrangement) -> Roles:
    """Sorts the axes by what reads them. Raises `Unreadable`."""
    result, positions = arrangement.parts.result, arrangement.positions
    try:
        rows = _chain(arrangement.row)
        score_rows = tuple(_chain(p) for p in (*arrangement.outer, arrangement.row))
        outer = [a for dims in score_rows[:-1] for a in dims]
    except NoView as error:
        raise Unreadable(f"the rows of the softmax cannot be distinguished: {error}", result) from None
    own = axes(*positions["key"], *positions["value"])
    shared = {a for a in (*outer, *rows) if a not in own}
    outer += [a for a in rows if a not in shared]
    rows = tuple(a for a in rows if a in shared)
    known = {*outer, *rows}
    _check_operands(arrangement, known)
    value_dim = tuple(a for dims in arrangement.output for a in dims if a not in known)
    if not axes(*positions["value"]) >= {a for a in value_dim if a.size != 1}:
        raise Unreadable("the values do not have the result's last dimension", result)
    last = _chain(arrangement.outer[-1]) if arrangement.outer else ()
    batch, heads = _batch_and_heads(outer, shared, tuple(a for a in last if a in outer))
    return Roles(batch, heads, rows, value_dim, score_rows)


def _check_operands(arrangement: Arrangement, known: set[Axis]) -> None:
    """Raises `Unreadable` where something depends on an index that it may not depend on."""
    parts, positions = arrangement.parts, arrangement.positions
    allowed = {
        "query": known | {parts.dim},
        "key": known | {parts.dim, parts.keys},
        "value": known | {parts.keys} | {a for dims in arrangement.output for a in dims},
    }
    for name, position in positions.items():
        if not axes(*position) <= allowed[name]:
            raise Unreadable(f"the {name} depends on an index it may not depend on", parts.result)
    for name in ("key", "value"):
        if parts.keys.size != 1 and parts.keys not in axes(*positions[name]):
            raise Unreadable(f"the {name} is the same for every key", parts.result)
    if not expression_axes(arrangement.score) <= known | {parts.keys}:
        raise Unreadable("a mask depends on something that is no query or key index", parts.result)


def _chain(position: Index) -> tuple[Axis, ...]:
    """The axes of a mixed-radix position, slowest first; it may be one of every n-th only. Raises `NoView`."""
    stride, start = common_stride(position), dict(terms_of(position)).get((), 0)
    return digit_axes(divide_exactly(position - start, stride) or 0)[1]


def _batch_and_heads(
    outer: Sequence[Axis], shared: set[Axis], last: tuple[Axis, ...]
) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """Batch axes and head axes; heads that share keys and values come after the ones that have their own."""
    if len(outer) <= 1:
        return ((), tuple(outer)) if outer and outer[0] in shared else (tuple(outer), ())
    if len(last) > 1 and any(a in shared for a in last) and not all(a in shared for a in last):
        heads = tuple(a for a in last if a not in shared) + tuple(a for a in last if a in shared)
        return tuple(a for a in outer if a not in last), heads
    own = [n for n, a in enumerate(outer) if a not in shared]
    if own and own[-1] < len(outer) - 1:
        return tuple(outer[: own[-1]]), tuple(outer[own[-1] :])
    return tuple(outer[:-1]), tuple(outer[-1:])
