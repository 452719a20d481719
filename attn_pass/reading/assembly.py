"""The third step of a description: operands, scores and mask over the sources they load, as an `Attention`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch.fx import Node

from attn_pass.graph.values import tensor_value
from attn_pass.model.attention import Attention, Factor, Source
from attn_pass.model.expression import Const, Expr, Load, loads, walk, with_loads
from attn_pass.model.views import NoView, view_steps
from attn_pass.reading import half
from attn_pass.reading.arrangement import Arrangement, Roles
from attn_pass.reading.masked_scores import MaskedScores, is_view, whole_score
from attn_pass.reading.parts import Described, Shallower
from attn_pass.reading.reader import Used
from attn_pass.reading.scores import is_bounded, weakest_fill
from attn_pass.reading.unreadable import Unreadable

_NEVER = 1 << 60


def operands_of(arrangement: Arrangement, roles: Roles) -> dict[str, Load]:
    """Query, key and value as loads of their sources. Raises `Shallower` for one that is not a view of it."""
    parts, reader = arrangement.parts, arrangement.parts.reader
    operands = {n: Load(reader.source(f.node), arrangement.positions[n]) for n, f in arrangement.forms.items()}
    groups = {
        "query": (roles.batch, roles.heads, roles.rows, (parts.dim,)),
        "key": (roles.batch, roles.heads, (parts.keys,), (parts.dim,)),
        "value": (roles.batch, roles.heads, (parts.keys,), roles.value_dim),
    }
    for name, load in operands.items():
        try:
            view_steps(reader.sources[load.source].shape, load.index, groups[name])
        except NoView as error:
            raise Shallower(name, str(error)) from None
    return operands


def unviewable(arrangement: Arrangement, roles: Roles, read: MaskedScores) -> Load | None:
    """The first load of masks and factors that is not a view of its source; None if all are."""
    groups = (roles.batch, roles.heads, roles.rows, (arrangement.parts.keys,))
    views = (load for e in _viewed(arrangement, read) for load in loads(e))
    return next((load for load in views if not is_view(arrangement.parts.reader, load, groups)), None)


def _viewed(arrangement: Arrangement, read: MaskedScores) -> Iterator[Expr]:
    """What a kernel takes as tensors beside the operands."""
    yield from read.mask.parts()
    yield from (f.value for f in read.scores.factors)
    yield from arrangement.row_terms


@dataclass(frozen=True)
class _Sources:
    """The sources of a description, numbered in the reader's order."""

    number: Mapping[int, int]  # of a source of the reader, in the description
    sources: tuple[Source, ...]
    nodes: tuple[Node, ...]

    @staticmethod
    def of(arrangement: Arrangement, used: Iterable[Load]) -> _Sources:
        """Those that are loaded."""
        reader = arrangement.parts.reader
        numbers = sorted({load.source for load in used})
        number = {n: index for index, n in enumerate(numbers)}
        sources = tuple(replace(reader.sources[n], id=number[n]) for n in numbers)
        return _Sources(number, sources, tuple(reader.source_nodes[n] for n in numbers))

    def load(self, load: Load) -> Load:
        """A load of the reader as one of the description."""
        return Load(self.number[load.source], load.index)

    def expression(self, expression: Expr) -> Expr:
        """An expression with every load as one of the description."""
        return with_loads(expression, {x: self.load(x) for x in loads(expression)})

    def factors(self, factors: Iterable[Factor]) -> tuple[Factor, ...]:
        """Factors in the same way."""
        return tuple(replace(f, value=self.expression(f.value)) for f in factors)


def assemble(
    arrangement: Arrangement, roles: Roles, read: MaskedScores, operands: Mapping[str, Load], used: Used
) -> Described:
    """The description. Raises `Unreadable` where its numbers would not be the program's."""
    used_loads = [*operands.values(), *(load for e in _viewed(arrangement, read) for load in loads(e))]
    used_loads += [load for e in (*read.mask.restated(), read.function) for load in loads(e)]
    sources = _Sources.of(arrangement, [*used_loads, *loads(arrangement.score)])
    attention = _attention(arrangement, roles, read, operands, sources)
    names = dict.fromkeys(used.known)
    return Described(
        attention,
        sources.nodes,
        _read_at(arrangement, used_loads, sources, used),
        tuple(f"{name} keeps the values it has now" for name in names),
        tuple(name.partition(" ")[2] for name in names),  # without "buffer" or "constant"
        _copies(arrangement),
        {name: forms[0] for name, forms in arrangement.parts.forms.items()},
        arrangement.split,
    )


def _attention(
    arrangement: Arrangement, roles: Roles, read: MaskedScores, operands: Mapping[str, Load], sources: _Sources
) -> Attention:
    parts, scores = arrangement.parts, read.scores
    value = tensor_value(parts.result)
    assert value is not None
    score = whole_score(arrangement, arrangement.score)
    never_empty = read.mask.never_empty and is_bounded(read.function)
    compute_dtype = _compute_dtype(arrangement, read, value.dtype)
    _check_empty_rows(arrangement, read, score, never_empty)
    if parts.score_dtype == torch.float64 != compute_dtype:
        _check_narrowed(arrangement, read)
    return Attention(
        batch=roles.batch,
        heads=roles.heads,
        rows=roles.rows,
        keys=parts.keys,
        dim=parts.dim,
        value_dim=roles.value_dim,
        query=sources.load(operands["query"]),
        key=sources.load(operands["key"]),
        value=sources.load(operands["value"]),
        score=sources.expression(score),
        scale=scores.scale,
        sources=sources.sources,
        output=arrangement.output,
        score_rows=roles.score_rows if parts.plain_scores else (),
        compute_dtype=compute_dtype,
        output_dtype=value.dtype,
        score_dtype=parts.score_dtype,
        rescaled=scores.rescaled,
        factors=sources.factors(scores.factors),
        result_factors=sources.factors(arrangement.result_factors),
        sink=None if arrangement.sink is None else sources.expression(arrangement.sink),
        mask=replace(read.mask.rewritten(sources.expression), never_empty=never_empty),
        dropout=parts.dropout,
        empty_row_is_nan=parts.empty_row_is_nan,
        nan_guard=parts.nan_guard,
        clamped=scores.clamped,
        fill_is_weak=parts.fill_is_weak,
        needs_grad=bool(value.requires_grad),
        not_affine="" if read.modified is None else read.modified.reason,
        modified=sources.expression(read.function),
    )


def _check_empty_rows(arrangement: Arrangement, read: MaskedScores, score: Expr, never_empty: bool) -> None:
    """Raises `Unreadable` where a fully masked row would be another one."""
    parts, sink = arrangement.parts, arrangement.sink
    if never_empty:
        return
    if sink is not None and any(_masks(e, parts.score_dtype) for e in walk(sink)):
        # Where all keys are masked as well, how much of the row it takes is lost in the numbers.
        raise Unreadable("a sink may be masked, in a fully masked row", parts.result)
    fills = any(_fills(e, parts.score_dtype) for e in walk(score))
    if parts.by_logarithm and (read.mask.bias is not None or fills):
        # Beside a fill of -1e9 the logarithm of how many keys there are is lost: eager sums the values.
        raise Unreadable("a logarithm is subtracted from scores of a row that a number may mask fully", parts.result)


def _check_narrowed(arrangement: Arrangement, read: MaskedScores) -> None:
    """Raises `Unreadable` where float64 scores of narrower operands would be others in the operands' type."""
    mask, result = read.mask, arrangement.parts.result
    # Where scores are only added to, a row can be shifted to what float32 keeps of it, and a sink cannot.
    other = read.modified is not None or (mask.keep is not None and mask.keep.fill != float("-inf"))
    if (mask.bias is not None and other) or half.adds_to_scores(arrangement.deep(read.function)):
        raise Unreadable("a matrix is added to float64 scores of narrower operands, beside another mask", result)
    if mask.bias is not None and arrangement.sink is not None:
        raise Unreadable("a matrix is added to float64 scores of narrower operands, beside a sink", result)


def _masks(expression: Expr, dtype: torch.dtype) -> bool:
    return isinstance(expression, Const) and expression.value <= weakest_fill(dtype)


def _fills(expression: Expr, dtype: torch.dtype) -> bool:
    return _masks(expression, dtype) and isinstance(expression, Const) and expression.value != float("-inf")


def _compute_dtype(arrangement: Arrangement, read: MaskedScores, output: torch.dtype) -> torch.dtype:
    """The widest type that the operands are multiplied in."""
    parts, kinds = arrangement.parts, [output]
    for name, product in (("query", 0), ("key", 0), ("value", 1)):
        own, of_product = arrangement.forms[name].dtype, parts.product_dtypes[product]
        kinds.append(own if torch.promote_types(own, of_product) == of_product else of_product)
    if read.has_factors or any(not isinstance(f, Const) for f, _ in arrangement.factors):
        kinds.append(parts.factor_dtype or parts.score_dtype)  # the factor was applied to scores of that type
    return reduce(torch.promote_types, kinds)


def _read_at(arrangement: Arrangement, loaded: Iterable[Load], sources: _Sources, used: Used) -> dict[int, int]:
    """The time from which each source must hold its value."""
    reader = arrangement.parts.reader
    of_operands = {f.node: f.at for f in arrangement.forms.values()}
    read_at: dict[int, int] = {}
    for load in loaded:
        node = reader.source_nodes[load.source]
        at = min(of_operands.get(node, _NEVER), used.read_times.get(node, _NEVER))
        read_at[sources.number[load.source]] = min(at, reader.order[arrangement.parts.result])
    return read_at


def _copies(arrangement: Arrangement) -> tuple[Node, ...]:
    """The operands as written that are copies of what is now read."""
    nodes = []
    for name, form in arrangement.forms.items():
        node = arrangement.parts.forms[name][0].node
        written, source = tensor_value(node), tensor_value(form.node)
        if written is None or source is None:
            continue
        if written.untyped_storage()._cdata != source.untyped_storage()._cdata:
            nodes.append(node)
    return tuple(nodes)
