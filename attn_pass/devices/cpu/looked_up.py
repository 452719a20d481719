"""A bias that is looked up in tables of products: the kernel reads the numbers where it needs them.

    c2p = torch.gather(query @ distances.mT, -1, bucket.expand(B * H, L, S))
    p2c = torch.gather(key @ distances.mT, -1, bucket.expand(B * H, S, L)).mT
    softmax((query @ key.mT + c2p + p2c) * scale) @ value
    ->
    attn_pass.attention(query, key, value, scale, tables=[query @ distances.mT, key @ distances.mT],
                        places=[bucket, bucket.mT], factors=[scale, scale])

So the matrix of the bias, (B, H, L, S), is not made: DeBERTa's two terms are computed for the keys that a row keeps.

Exact because: the bias is a sum of such numbers, each times one that is the same for all scores, and a clamp on the way
of the places proves that they are in the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.fx import Node

from attn_pass.devices.cpu.kernel.scores import MOST_LOOKUPS
from attn_pass.devices.cpu.kernel.source import ELEMENTS
from attn_pass.graph.edit import Plan, Value, aten, fake_of
from attn_pass.graph.names import torch_name
from attn_pass.graph.values import tensor_value
from attn_pass.model.expression import Apply, Const, Expr, Load, apply, walk
from attn_pass.model.index import Axis, Index, axis_index
from attn_pass.model.views import NoView, view_steps
from attn_pass.reading.views import VIEWS
from attn_pass.reading.vocabulary import understand
from attn_pass.targets.lower import Lowering

_STEPS = 40  # on the way from a place to its clamp


class _Gather(NamedTuple):
    table: Node
    dim: int
    place: Node


@dataclass(frozen=True)
class _Term:
    number: Load
    factor: Expr
    casts: tuple[torch.dtype, ...]  # what the number is rounded to on its way to the scores


class _NotLookedUpError(Exception):
    """What is added is something else."""


def looked_up(lower: Lowering) -> dict[str, object] | None:
    """The operator's arguments for what is added to the scores; None where it is no sum of numbers of tables."""
    a, bias = lower.attention, lower.attention.mask.deep_bias
    if bias is None or a.score_dtype == torch.float64:
        return None
    try:
        terms = list(_terms(bias, _Term(Load(0, ()), Const(1.0), ())))
        sources = [a.sources[term.number.source] for term in terms]
        if len(terms) > MOST_LOOKUPS or not all(source.of_products for source in sources):
            return None
        if any(_rounds(c, s.dtype, a.score_dtype) for term, s in zip(terms, sources) for c in term.casts):
            return None
        gathers = [_gather(lower.nodes[term.number.source], lower.plan) for term in terms]
        read = [_operands(lower, term.number, gather) for term, gather in zip(terms, gathers)]
    except (NoView, _NotLookedUpError):
        return None
    return {
        "tables": [table for table, _ in read],
        "places": [place for _, place in read],
        "factors": [_in_float32(lower, term.factor) for term in terms],
    }


def _rounds(cast: torch.dtype, table: torch.dtype, scores: torch.dtype) -> bool:
    """Whether a cast takes something of a number that the program's scores could hold."""
    known = cast in (torch.float64, *ELEMENTS)
    return not known or cast not in (torch.promote_types(cast, table), torch.promote_types(cast, scores))


def _terms(bias: Expr, term: _Term) -> Iterator[_Term]:
    """What is looked up, and what it is multiplied with.

    Raises:
        _NotLookedUpError: there is something else.
    """
    if isinstance(bias, Load) and bias.index != ():
        yield replace(term, number=bias)
        return
    if not isinstance(bias, Apply):
        raise _NotLookedUpError
    first, *others = bias.args
    negative = replace(term, factor=apply("neg", term.factor))
    if bias.op == "cast" and bias.dtype is not None and bias.dtype.is_floating_point:
        yield from _terms(first, replace(term, casts=(*term.casts, bias.dtype)))
    elif bias.op == "neg":
        yield from _terms(first, negative)
    elif bias.op in ("add", "sub"):
        yield from _terms(first, term)
        yield from _terms(others[0], term if bias.op == "add" else negative)
    elif bias.op == "mul" and any(map(_is_number, bias.args)):
        number, rest = (first, others[0]) if _is_number(first) else (others[0], first)
        yield from _terms(rest, replace(term, factor=apply("mul", term.factor, _wide(number))))
    elif bias.op == "div" and _is_number(others[0]):
        yield from _terms(first, replace(term, factor=_divided(term.factor, others[0])))
    else:
        raise _NotLookedUpError


def _is_number(e: Expr) -> bool:
    """Whether it is the same for all scores."""
    return all(isinstance(x, Const | Apply) or (isinstance(x, Load) and x.index == ()) for x in walk(e))


def _divided(factor: Expr, number: Expr) -> Expr:
    if isinstance(factor, Const) and isinstance(number, Const) and number.value:
        return Const(factor.value / number.value)
    return apply("div", factor, _wide(number))


def _wide(number: Expr) -> Expr:
    return number if isinstance(number, Const) else apply("cast", number, dtype=torch.float32)


def _in_float32(lower: Lowering, factor: Expr) -> Value:
    value = lower.expression(factor, ())
    return value if fake_of(value).dtype == torch.float32 else lower.plan.call(aten.to.dtype, value, torch.float32)


def _gather(node: Node, plan: Plan) -> _Gather:
    """A gather along one dimension, from places that are proved to be in the table.

    Raises:
        _NotLookedUpError: it is none.
    """
    if torch_name(node) != "gather":
        raise _NotLookedUpError
    given = dict(zip(("input", "dim", "index"), node.args)) | node.kwargs
    table, dim, place = given.get("input"), given.get("dim"), given.get("index")
    value = tensor_value(table)
    if not isinstance(table, Node) or not isinstance(place, Node) or type(dim) is not int or value is None:
        raise _NotLookedUpError
    dim %= value.dim()
    if value.dtype not in ELEMENTS or not _is_within(place, value.shape[dim], plan):
        raise _NotLookedUpError
    return _Gather(table, dim, place)


def _is_within(place: Node, numbers: object, plan: Plan) -> bool:
    """Whether a tensor of integers is clamped to from 0 to a number less one, and nobody writes to it."""
    for _ in range(_STEPS):
        call = understand(place)
        if call is None or call.in_place or plan.effects.mutations(place):
            return False
        if call.op == "clamp":
            low, high = call.get("min"), call.get("max")
            if type(low) is not int or type(high) is not int or type(numbers) is not int:
                return False
            return low >= 0 and 0 <= high < numbers
        source = call.args.get("input")
        if call.op not in (*VIEWS, "copy") or not isinstance(source, Node) or not _has_its_numbers(place, source):
            return False
        place = source
    return False


def _has_its_numbers(view: Node, source: Node) -> bool:
    """Whether a view shows numbers as they are: one in another dtype reads their bits as something else."""
    after, before = tensor_value(view), tensor_value(source)
    return after is not None and before is not None and after.dtype == before.dtype


def _operands(lower: Lowering, load: Load, gather: _Gather) -> tuple[Value, Value]:
    """A table, (B, H, L, S, M) with 1 where it does not vary, and its places, (B, H, L, S)."""
    plan, groups = lower.plan, lower.mask_groups()
    table = tensor_value(gather.table)
    assert table is not None
    shape = plan.sizes.shape(table)
    numbers = Axis("numbers", shape[gather.dim])
    index = [axis_index(numbers) if d == gather.dim else i for d, i in enumerate(load.index)]
    seen = plan.steps(gather.table, view_steps(shape, index, (*groups, (numbers,))))
    narrow, at = _narrowed(plan, gather.place, load.index)
    place = plan.steps(narrow, view_steps(plan.sizes.shape(fake_of(narrow)), at, groups))
    return seen, plan.call(aten.to.dtype, place, torch.int32)


def _narrowed(plan: Plan, place: Value, index: Sequence[Index]) -> tuple[Value, list[Index]]:
    """Places without what they are expanded to, and the index there: sequences and heads have one matrix of them."""
    at = list(index)
    for dim, stride in enumerate(fake_of(place).stride()):
        if plan.sizes.index(stride) == 0:
            place = plan.call(aten.slice.Tensor, place, dim, 0, 1)
            at[dim] = 0
    return place, at
