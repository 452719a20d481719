"""From what was lifted to an `Attention`: axes are split until every index is affine, then sorted by their role."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Node

from attn_pass.graph.values import tensor_value
from attn_pass.model.attention import Attention, Factor
from attn_pass.model.distance import ByDistance
from attn_pass.model.expression import (
    Const,
    Dot,
    Expr,
    Load,
    apply,
    expression_axes,
    loads,
    rewrite_indices,
    walk,
    with_dot,
    with_loads,
)
from attn_pass.model.index import (
    Axis,
    Index,
    axes,
    axis_index,
    divide_exactly,
    substitute,
    unsplit_axis,
)
from attn_pass.model.mask import Computed, Mask
from attn_pass.model.rematerializable import is_repeatable
from attn_pass.model.views import NoView, _digit_axes, split_axes, view_steps
from attn_pass.reading import half
from attn_pass.reading.masks import name_mask
from attn_pass.reading.operands import OperandForm
from attn_pass.reading.reader import Reader, Used
from attn_pass.reading.scores import (
    Modified,
    NotAffine,
    Scores,
    is_bounded,
    modified,
    normalise,
    weakest_fill,
)
from attn_pass.reading.unreadable import Unreadable
from attn_pass.reading.use_def import SideLoad
from attn_pass.reading.views import Position

# A fused backward takes exp(score - logsumexp), and beside 1e38 the logarithm of how many keys there are is lost.
_TURNED = "what was added to the scores, perhaps a mask, is multiplied by a negative number, in training"
# Minus -inf is inf, its row NaN, and the guard makes it zero.
_TURNED_UNDER_A_GUARD = (
    "a guard against NaN weights, beside something that was added to the scores and multiplied by a negative number"
)
NO_GRAD_DTYPES = (torch.bool, torch.int64, torch.int32)


@dataclass
class Parts:
    """What a finder lifted of one site, before it is sorted out."""

    reader: Reader
    result: Node
    output: tuple[Axis, ...]  # an axis a dimension of the result
    rows_at: tuple[Position, Index]  # the softmax's position without its key dimension: outer dimensions, row
    keys: Axis
    dim: Axis
    query: list[OperandForm]
    key: list[OperandForm]
    value: list[OperandForm]
    score: Expr
    side: dict[Load, SideLoad]
    score_dtype: torch.dtype  # in which masks and biases join the scores
    product_dtypes: tuple[torch.dtype, torch.dtype]  # of the two products
    dropout: float = 0.0
    empty_row_is_nan: bool = True
    nan_guard: bool = False  # weights that are NaN are set to zero
    result_factors: tuple[Factor, ...] = ()  # of the weights, the same for all keys of a row
    sink: Expr | None = None  # one more logit of every row, without a value
    by_logarithm: bool = False  # the softmax takes the logarithm of its sum off the scores
    plain_scores: bool = False  # the softmax is of ``score`` itself: nothing that it does not feel was left out
    factor_dtype: torch.dtype | None = None  # in which they are multiplied, where that is narrower
    chosen: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Described:
    """An attention, the node behind each of its sources, and the time from which each must hold its value."""

    attention: Attention
    nodes: tuple[Node, ...]
    read_at: dict[int, int]
    assumptions: tuple[str, ...] = ()  # what was concluded from values that a tensor has now
    fixed: tuple[str, ...] = ()  # those tensors, by name
    copies: tuple[Node, ...] = ()  # operands as written, where they are copies of the source that is now read


def describe(parts: Parts, used: Used) -> Described:
    """Sorts out the parts, lifted while ``used`` was noted. Raises `Unreadable` with what does not fit first."""
    forms = {"query": parts.query, "key": parts.key, "value": parts.value}
    parts.chosen = {name: len(found) - 1 for name, found in forms.items()}
    while True:
        try:
            return _Assembly(parts, used, {n: forms[n][parts.chosen[n]] for n in forms}).build()
        except _Shallower as shallower:
            if parts.chosen[shallower.operand] == 0:
                raise Unreadable(
                    f"the {shallower.operand} is no view of a tensor: {shallower.why}", parts.result
                ) from None
            parts.chosen[shallower.operand] -= 1


class _Shallower(Exception):
    def __init__(self, operand: str, why: str) -> None:
        super().__init__(operand)
        self.operand, self.why = operand, why


class _Assembly:
    def __init__(self, parts: Parts, used: Used, forms: dict[str, OperandForm]) -> None:
        self.parts = parts
        self.used = used
        self.forms = forms
        self.positions = {name: form.position for name, form in forms.items()}
        self.outer, self.row = parts.rows_at
        self.score = parts.score
        self.output: list[tuple[Axis, ...]] = [(a,) if a.size != 1 else () for a in parts.output]
        self.split: dict[Axis, Index] = {}
        self.side_times: dict[Load, int] = {}
        self.modified: Modified | None = None
        self.has_factors = False
        self.factors = [f for name in ("query", "key") for f in forms[name].factors]
        self.result_factors = parts.result_factors
        self.sink = parts.sink

    # ------------------------------------------------------------ axes

    def build(self) -> Described:
        self._split_axes()
        try:
            rows = _chain(self.row)
            self.score_rows = tuple(_chain(p) for p in (*self.outer, self.row))
            outer = [a for dims in self.score_rows[:-1] for a in dims]
        except NoView as error:
            raise Unreadable(f"the rows of the softmax cannot be told apart: {error}", self.parts.result) from None
        shared = self._shared(outer + list(rows))
        outer += [a for a in rows if a not in shared]
        rows = tuple(a for a in rows if a in shared)
        known = set(outer) | set(rows)
        self._check_operands(known)
        value_dim = tuple(a for dims in self.output for a in dims if a not in known)
        if not axes(*self.positions["value"]) >= {a for a in value_dim if a.size != 1}:
            raise Unreadable("the values do not have the result's last dimension", self.parts.result)
        last = _chain(self.outer[-1]) if self.outer else ()
        batch, heads = _batch_and_heads(outer, shared, tuple(a for a in last if a in outer))
        scores = self._normalised()
        return self._finish(batch, heads, rows, value_dim, scores)

    def _split_axes(self) -> None:
        for _ in range(24):
            found = unsplit_axis(self._indices())
            if found is None:
                return
            axis, by = found
            size = divide_exactly(axis.size, by)
            if size is None or axis in (self.parts.keys, self.parts.dim):
                self._give_up(axis)
                continue
            high, low = Axis(f"{axis.key}h", size), Axis(f"{axis.key}l", by)
            self._substitute({axis: axis_index(high) * by + axis_index(low)})
            self.output = [
                tuple(b for a in dims for b in ((high, low) if a == axis else (a,)) if b.size != 1)
                for dims in self.output
            ]
        raise Unreadable("the layout has too many nested groups", self.parts.result)

    def _give_up(self, axis: Axis) -> None:
        """An axis that cannot be split: whichever operand or mask asked for it is taken less far back."""
        for name, position in self.positions.items():
            if unsplit_axis(position) is not None and self.parts.chosen[name] > 0:
                raise _Shallower(name, f"axis {axis.key} is divided")
        for load in loads(self.score):
            if unsplit_axis(load.index) is not None:
                self._replace_by_written(load)
                return
        raise Unreadable("a view divides an axis unevenly", self.parts.result)

    def _replace_by_written(self, load: Load) -> None:
        original = next((k for k, v in self._live.items() if v == load), None)
        side = None if original is None else self.parts.side.get(original)
        if side is None or side.node is side.written:
            raise Unreadable("a mask is read in an order that is no view of it", self.parts.result)
        reader = self.parts.reader
        shallow = reader.load(
            side.written, tuple(substitute(i, self.split) for i in side.written_position), side.written_at
        )
        self.side_times[shallow] = side.written_at
        self.score = with_loads(self.score, {load: shallow})

    @property
    def _live(self) -> dict[Load, Load]:
        """The side loads as they are after the splits so far."""
        return {k: Load(k.source, tuple(substitute(i, self.split) for i in k.index)) for k in self.parts.side}

    def _indices(self) -> Iterable[Index]:
        yield from self.outer
        yield self.row
        for position in self.positions.values():
            yield from self._apart(position, self.parts.dim, self.parts.keys)
        for load in loads(self.score):
            yield from self._apart(load.index, self.parts.keys)
        for term in (*(f for f, _ in self.factors), *self._row_terms()):
            for load in loads(term):
                yield from load.index

    def _apart(self, index: Sequence[Index], *own: Axis) -> Sequence[Index]:
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

    def _row_terms(self) -> tuple[Expr, ...]:
        """What belongs to whole rows of the result."""
        return (*(f.value for f in self.result_factors), *(() if self.sink is None else (self.sink,)))

    def _substitute(self, values: dict[Axis, Index]) -> None:
        self.split = {a: substitute(i, values) for a, i in self.split.items()} | values
        self.outer = tuple(substitute(i, values) for i in self.outer)
        self.row = substitute(self.row, values)
        self.positions = {n: tuple(substitute(i, values) for i in p) for n, p in self.positions.items()}
        self.score = rewrite_indices(self.score, values)
        self.factors = [(rewrite_indices(f, values), inverse) for f, inverse in self.factors]
        self.result_factors = tuple(replace(f, value=rewrite_indices(f.value, values)) for f in self.result_factors)
        self.sink = None if self.sink is None else rewrite_indices(self.sink, values)

    def _shared(self, candidates: Sequence[Axis]) -> set[Axis]:
        used = axes(*self.positions["key"], *self.positions["value"])
        return {a for a in candidates if a not in used}

    def _check_operands(self, known: set[Axis]) -> None:
        parts = self.parts
        allowed = {
            "query": known | {parts.dim},
            "key": known | {parts.dim, parts.keys},
            "value": known | {parts.keys} | {a for dims in self.output for a in dims},
        }
        for name, position in self.positions.items():
            if not axes(*position) <= allowed[name]:
                raise Unreadable(f"the {name} depends on an index it may not depend on", parts.result)
        for name in ("key", "value"):
            if parts.keys.size != 1 and parts.keys not in axes(*self.positions[name]):
                raise Unreadable(f"the {name} is the same for every key", parts.result)
        if not expression_axes(self.score) <= known | {parts.keys}:
            raise Unreadable("a mask depends on something that is no query or key index", parts.result)

    # ------------------------------------------------------------ scores

    def _normalised(self) -> Scores:
        try:
            scores = normalise(self.score, self.parts.keys, self.parts.score_dtype)
            if scores.turned and self.parts.nan_guard:
                raise Unreadable(_TURNED_UNDER_A_GUARD, self.parts.result)
            if scores.turned and _needs_grad(self.parts.result):
                raise NotAffine(_TURNED)
        except NotAffine as error:
            return self._modified_scores(str(error))
        self.modified = None
        self.has_factors = bool(scores.factors)
        scale = scores.scale
        for name in ("query", "key"):
            scale *= self.forms[name].scale
        extra = []
        for number, (factor, inverse) in enumerate(self.factors):
            if expression_axes(factor) & {self.parts.keys, self.parts.dim}:
                name = "query" if number < len(self.forms["query"].factors) else "key"
                raise _Shallower(name, "a factor differs from key to key or along the head dim")
            extra.append(Factor(factor, inverse))
        return replace(scores, scale=scale, factors=(*scores.factors, *extra))

    def _modified_scores(self, reason: str) -> Scores:
        """The bias and the mask around scores that are no scaled product; what was folded is part of the function."""
        try:
            self.modified = modified(self.score, self.parts.keys, self.parts.score_dtype, reason)
        except NotAffine as error:
            raise Unreadable(str(error), self.parts.result) from None
        if self.parts.score_dtype == torch.float16:
            inside = half.refusal_of_function(self._deep_of(self.modified.function))
            if inside is not None:
                raise Unreadable(inside, self.parts.result)
        for number, (factor, _) in enumerate(self.factors):
            if self.parts.dim in expression_axes(factor):
                name = "query" if number < len(self.forms["query"].factors) else "key"
                raise _Shallower(name, "a factor differs along the head dim")
        self.has_factors = any(expression_axes(f) for f, _ in self.factors)
        return self.modified.around

    def _deep(self, expression: Expr | None) -> Expr | None:
        return None if expression is None else self._deep_of(expression)

    def _deep_of(self, expression: Expr) -> Expr:
        """The expression with every load lifted down to index arithmetic where that is possible."""
        reader = self.parts.reader
        live = {v: self.parts.side[k] for k, v in self._live.items()}
        values: dict[Load, Expr] = {}
        for load in loads(expression):
            side = live.get(load)
            at = self.side_times.get(load, side.at if side is not None else reader.order[self.parts.result])
            values[load] = reader.element(reader.source_nodes[load.source], load.index, at)
        return with_loads(expression, values)

    def _distance(
        self,
        named: Mask,
        scores: Scores,
        batch: tuple[Axis, ...],
        heads: tuple[Axis, ...],
        rows: tuple[Axis, ...],
    ) -> ByDistance | None:
        """The mask over distances alone, where it is that and what it is made of stays what it is."""
        reader, result = self.parts.reader, self.parts.result
        real = [a for a in rows if a.size != 1]
        if len(real) != 1 or self.parts.keys.size == 1 or named.is_none or named.structure.is_causal:
            return None
        bias = None if named.bias is None else self._deep(scores.bias)
        condition = None if named.keep is None or scores.keep is None else self._deep(scores.keep.condition)
        needed = [e for e in (bias, condition) if e is not None]
        if not {self.parts.keys, *real} <= set().union(*(expression_axes(e) for e in needed)):
            return None
        for load in (x for e in needed for x in loads(e)):
            source, node = reader.sources[load.source], reader.source_nodes[load.source]
            written = reader.effects.mutation_between(node, reader.order[node] - 1, reader.order[result])
            if written is not None or (source.needs_grad and _needs_grad(result)):
                return None
        found = ByDistance.of(bias, condition, self.parts.keys, real[0], tuple(s.shape for s in reader.sources))
        kept = [] if found is None else [e for e in (found.bias, found.condition) if e is not None]
        groups = () if found is None else (batch, heads, (), (found.axis,))
        return found if all(self._is_view(x, groups) for e in kept for x in loads(e)) else None

    def _computed(self, named: Mask, bias: Expr | None, condition: Expr | None) -> Computed | None:
        """The mask computed element by element, where that gives what the program's own tensors hold.

        ``bias`` and ``condition`` are lifted as far as they go. What they load must still be what it was.
        """
        reader, result = self.parts.reader, self.parts.result
        bias = None if named.bias is None else bias
        condition = None if named.keep is None else condition
        needed = [e for e in (bias, condition) if e is not None]
        if not needed or named.structure.is_causal:
            return None
        if not all(is_repeatable(e, [s.dtype for s in reader.sources]) for e in needed):
            return None
        for load in (x for e in needed for x in loads(e)):
            source, node = reader.sources[load.source], reader.source_nodes[load.source]
            if node.graph is not result.graph or reader.order[node] >= reader.order[result]:
                return None
            if reader.effects.mutation_between(node, reader.order[node] - 1, reader.order[result]) is not None:
                return None
            if source.needs_grad and _needs_grad(result):
                return None
        return Computed(bias, condition)

    def _finish(
        self,
        batch: tuple[Axis, ...],
        heads: tuple[Axis, ...],
        rows: tuple[Axis, ...],
        value_dim: tuple[Axis, ...],
        scores: Scores,
    ) -> Described:
        parts, reader = self.parts, self.parts.reader
        deep_bias = self._deep(scores.bias)
        deep_keep = None if scores.keep is None else self._deep(scores.keep.condition)
        named = name_mask(scores.bias, scores.keep, deep_bias, deep_keep, parts.keys, rows, parts.score_dtype)
        if parts.score_dtype == torch.float16:
            reason = half.refusal(scores, self._deep_of, nan_guard=parts.nan_guard)
            if reason is not None:
                raise Unreadable(reason, parts.result)
        mask = replace(
            named,
            by_distance=self._distance(named, scores, batch, heads, rows),
            computed=self._computed(named, deep_bias, deep_keep),
        )
        operands = {n: Load(reader.source(f.node), self.positions[n]) for n, f in self.forms.items()}
        groups = {
            "query": (batch, heads, rows, (parts.dim,)),
            "key": (batch, heads, (parts.keys,), (parts.dim,)),
            "value": (batch, heads, (parts.keys,), value_dim),
        }
        for name, load in operands.items():
            try:
                view_steps(reader.sources[load.source].shape, load.index, groups[name])
            except NoView as error:
                raise _Shallower(name, str(error)) from None
        mask_groups = (batch, heads, rows, (parts.keys,))
        used = list(operands.values())
        for expression in (
            *mask.parts(),
            *(f.value for f in scores.factors),
            *self._row_terms(),
        ):
            if expression is not None:
                used += loads(expression)
        views = used[len(operands) :]
        for expression in mask.said_again():
            used += loads(expression)
        function: Expr = Dot() if self.modified is None else self._whole_score(self.modified.function)
        if self.modified is not None:
            used += loads(function)
        for load in views:
            if self._is_view(load, mask_groups):
                continue
            self._replace_by_written(load)
            return self._finish(batch, heads, rows, value_dim, self._normalised())
        all_loads = used + [x for x in loads(self.score)]
        numbers = sorted({load.source for load in all_loads})
        position = {number: index for index, number in enumerate(numbers)}
        sources = tuple(replace(reader.sources[n], id=position[n]) for n in numbers)
        nodes = tuple(reader.source_nodes[n] for n in numbers)
        read_at: dict[int, int] = {}
        times = {f.node: f.at for f in self.forms.values()}
        for load in used:
            node = reader.source_nodes[load.source]
            at = min(times.get(node, 1 << 60), self.used.read_times.get(node, 1 << 60))
            read_at[position[load.source]] = min(at, reader.order[parts.result])

        def renumber(expression: Expr) -> Expr:
            return with_loads(expression, {x: Load(position[x.source], x.index) for x in loads(expression)})

        result = parts.result
        value = tensor_value(result)
        assert value is not None
        score = self._whole_score(self.score)
        never_empty = mask.never_empty and is_bounded(function)
        if self.sink is not None and not never_empty and any(_masks(e, parts.score_dtype) for e in walk(self.sink)):
            # Where all keys are masked as well, how much of the row it takes is lost in the numbers.
            raise Unreadable("a key without a value may be masked, in a fully masked row", result)
        fills = any(_fills(e, parts.score_dtype) for e in walk(score))
        if parts.by_logarithm and not never_empty and (mask.bias is not None or fills):
            # Beside a fill of -1e9 the logarithm of how many keys there are is lost: eager sums the values.
            raise Unreadable("a logarithm is taken off scores that a number may mask in all of a row", result)
        compute_dtype = self._compute_dtype(value.dtype)
        if parts.score_dtype == torch.float64 != compute_dtype:
            # Where scores are only added to, a row can be shifted to what float32 keeps of it, and a sink cannot.
            other = self.modified is not None or (mask.keep is not None and mask.keep.fill != float("-inf"))
            if (mask.bias is not None and other) or half.adds_to_scores(self._deep_of(function)):
                raise Unreadable(
                    "a matrix is added to float64 scores of narrower operands, beside another mask", result
                )
            if mask.bias is not None and self.sink is not None:
                raise Unreadable("a matrix is added to float64 scores of narrower operands, beside a sink", result)
        attention = Attention(
            batch=batch,
            heads=heads,
            rows=rows,
            keys=parts.keys,
            dim=parts.dim,
            value_dim=value_dim,
            query=_moved(operands["query"], position),
            key=_moved(operands["key"], position),
            value=_moved(operands["value"], position),
            score=renumber(score),
            scale=scores.scale,
            sources=sources,
            output=tuple(self.output),
            score_rows=self.score_rows if parts.plain_scores else (),
            compute_dtype=compute_dtype,
            output_dtype=value.dtype,
            score_dtype=parts.score_dtype,
            rescaled=scores.rescaled,
            factors=tuple(Factor(renumber(f.value), f.inverse) for f in scores.factors),
            result_factors=tuple(Factor(renumber(f.value), f.inverse) for f in self.result_factors),
            sink=None if self.sink is None else renumber(self.sink),
            mask=replace(mask.rewritten(renumber), never_empty=never_empty),
            dropout=parts.dropout,
            empty_row_is_nan=parts.empty_row_is_nan,
            nan_guard=parts.nan_guard,
            needs_grad=bool(value.requires_grad),
            not_affine="" if self.modified is None else self.modified.reason,
            modified=renumber(function),
        )
        names = dict.fromkeys(self.used.known)
        assumed = tuple(f"{name} keeps the values it has now" for name in names)
        fixed = tuple(name.partition(" ")[2] for name in names)  # without "buffer" or "constant"
        return Described(attention, nodes, read_at, assumed, fixed, self._copies())

    def _copies(self) -> tuple[Node, ...]:
        forms = {"query": self.parts.query, "key": self.parts.key, "value": self.parts.value}
        found = []
        for name, form in self.forms.items():
            written, source = tensor_value(forms[name][0].node), tensor_value(form.node)
            if written is None or source is None:
                continue
            if written.untyped_storage()._cdata != source.untyped_storage()._cdata:
                found.append(forms[name][0].node)
        return tuple(found)

    def _is_view(self, load: Load, groups: Sequence[tuple[Axis, ...]]) -> bool:
        try:
            view_steps(self.parts.reader.sources[load.source].shape, load.index, groups)
        except NoView:
            return False
        return True

    def _whole_score(self, score: Expr) -> Expr:
        """A function of the product as written, with what was folded out of the operands multiplied back in."""
        extra: Expr | None = None
        number = self.forms["query"].scale * self.forms["key"].scale
        if number != 1.0:
            extra = Const(number)
        dot: Expr = Dot()
        if extra is not None:
            dot = apply("mul", dot, extra)
        for factor, inverse in self.factors:
            dot = apply("div" if inverse else "mul", dot, factor)
        return score if isinstance(dot, Dot) else with_dot(score, dot)

    def _compute_dtype(self, output: torch.dtype) -> torch.dtype:
        kinds = [output]
        for name, product in (("query", 0), ("key", 0), ("value", 1)):
            own, made = self.forms[name].dtype, self.parts.product_dtypes[product]
            kinds.append(own if torch.promote_types(own, made) == made else made)
        if any(not isinstance(f, Const) for f, _ in self.factors) or self.has_factors:
            kinds.append(
                self.parts.factor_dtype or self.parts.score_dtype
            )  # the factor was applied to scores of that type
        out = kinds[0]
        for kind in kinds[1:]:
            out = torch.promote_types(out, kind)
        return out


def _needs_grad(node: Node) -> bool:
    value = tensor_value(node)
    return value is None or value.requires_grad


def _masks(expression: Expr, dtype: torch.dtype) -> bool:
    return isinstance(expression, Const) and expression.value <= weakest_fill(dtype)


def _fills(expression: Expr, dtype: torch.dtype) -> bool:
    return _masks(expression, dtype) and isinstance(expression, Const) and expression.value != float("-inf")


def _moved(load: Load, position: dict[int, int]) -> Load:
    return Load(position[load.source], load.index)


def _chain(position: Index) -> tuple[Axis, ...]:
    """The axes of a mixed-radix position, slowest first. Raises `NoView`."""
    return _digit_axes(position)[1]


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
