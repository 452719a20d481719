"""Random inputs for a part of a program: with its memory layout, and of the kind that its score needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from attn_pass.graph.cut import ALIGNED, Input
from attn_pass.model.attention import Attention
from attn_pass.model.expression import Apply, Const, Expr, Load, walk
from attn_pass.model.operations import COMPARISONS
from attn_pass.model.reference import Evaluation

Draw = Literal["normal", "harsh", "empty"]
"""Normal numbers; masks of fills, flags that fall either way; rows of masks that keep everything or nothing."""
DRAWS: tuple[Draw, ...] = ("normal", "harsh", "empty")
Kind = Literal["number", "factor", "mask", "flag", "positive", "index"]
"""A number; an element of query or key; a matrix that is added, perhaps one of fills; 0 or 1; a number to divide by; an
integer below a limit."""

_FILL = 1e4  # a factor so large makes a fill of a flag
_KEPT = 0.85  # of a mask
_SMALL = 0.25  # so that products of 256 numbers stay below 16, half the distance between float16's lowest numbers
_MUCH = 1 << 20  # elements of memory


@dataclass(frozen=True)
class Spec:
    """The kind of an input's values; of integers, what they stay below."""

    kind: Kind = "number"
    limit: int = 2


def specs(attention: Attention, sizes: Mapping[str, int]) -> tuple[Spec, ...]:
    """The kind of each source's values, as the score uses them."""
    by_source: dict[int, Spec] = {}
    expressions = [attention.score, attention.sink, *(f.value for f in attention.result_factors)]
    if attention.mask.computed is not None:
        expressions += [attention.mask.computed.bias, attention.mask.computed.condition]
    longest = max(2, _number(attention.kv_len, sizes))
    for expression in expressions:
        if expression is not None:
            _visit(expression, Spec("mask", longest), by_source, attention, sizes)
    for factor in (*attention.factors, *attention.result_factors):
        if factor.inverse:
            by_source |= {e.source: Spec("positive") for e in walk(factor.value) if isinstance(e, Load)}
    operands = {attention.value.source: Spec()}
    operands |= dict.fromkeys((attention.query.source, attention.key.source), Spec("factor"))
    learned = {s.id: Spec() for s in attention.sources if s.kind == "table" or s.of_products}  # which masks nothing
    return tuple(operands.get(n) or learned.get(n) or by_source.get(n, Spec()) for n in range(len(attention.sources)))


def _visit(
    expression: Expr, spec: Spec, by_source: dict[int, Spec], attention: Attention, sizes: Mapping[str, int]
) -> None:
    """Notes what is known of each load below ``expression``, of which ``spec`` is the kind."""
    if isinstance(expression, Load):
        before = by_source.get(expression.source)
        if before is None or (_rank(spec), -spec.limit) > (_rank(before), -before.limit):
            by_source[expression.source] = spec
        return
    if not isinstance(expression, Apply):
        return
    if expression.op == "lookup":
        table, row = expression.args
        assert isinstance(table, Load)
        rows = _number(attention.sources[table.source].shape[0], sizes)
        _visit(table, spec, by_source, attention, sizes)
        _visit(row, Spec("index", rows), by_source, attention, sizes)
        return
    below = [spec] * len(expression.args)
    if expression.op in (*COMPARISONS, "not", "and", "or") or _is_truth(expression):
        below = [Spec("flag", spec.limit)] * len(below)
    elif expression.op == "where":
        below[0] = Spec("flag", spec.limit)
    elif expression.op in ("mul", "div") and any(_is_fill(a) for a in expression.args):
        below = [Spec("flag", 2)] * len(below)
    elif expression.op == "div":
        below[1] = Spec("positive")
    elif expression.op == "log":
        below = [Spec("positive")]
    elif expression.op not in ("add", "sub", "cast", "maximum", "minimum"):
        below = [spec if spec.kind in ("flag", "index") else Spec("number", spec.limit)] * len(below)
    for argument, own in zip(expression.args, below):
        _visit(argument, own, by_source, attention, sizes)


def _is_truth(expression: Apply) -> bool:
    return expression.op == "cast" and expression.dtype == torch.bool


def _is_fill(expression: Expr) -> bool:
    return isinstance(expression, Const) and abs(expression.value) >= _FILL


def _rank(spec: Spec) -> int:
    return ("mask", "number", "factor", "positive", "flag", "index").index(spec.kind)


def _number(size: object, sizes: Mapping[str, int]) -> int:
    return Evaluation((), (), sizes).size(size)  # type: ignore[arg-type]


def closer(layout: Input) -> Input:
    """The input with less memory between its elements where that is much, as in a view of a long cache of keys.

    What follows without a gap still does, what overlaps stays, and each stride is aligned as it was.
    """
    if layout.memory <= max(_MUCH, 2 * math.prod(layout.shape)):
        return layout
    stride, end, new_end = list(layout.stride), 1, 1
    apart = (d for d, n in enumerate(layout.shape) if n > 1 and layout.stride[d])
    for dim in sorted(apart, key=lambda d: layout.stride[d]):
        old = layout.stride[dim]
        if old < end:
            return layout
        stride[dim] = new_end if old == end else new_end + ((old - new_end) % ALIGNED or ALIGNED)
        end, new_end = old * layout.shape[dim], stride[dim] * layout.shape[dim]
    return replace(layout, stride=tuple(stride))


def random_tensor(layout: Input, spec: Spec, generator: torch.Generator, draw: Draw) -> torch.Tensor:
    """The memory of an input: a flat tensor, of which `Input.in_memory` is the input itself.

    Unless the draw is normal, fully masked rows come about, and scores are small enough that fills absorb them.
    """
    flat = _drawn(layout, spec, generator, harsh=draw != "normal")
    masks = spec.kind in ("flag", "mask") or flat.dtype == torch.bool
    if draw != "normal" and masks and layout.value is None and not flat.dtype.is_complex:
        _write_constant_rows(layout, spec, flat, draw)
    return flat


def _write_constant_rows(layout: Input, spec: Spec, flat: torch.Tensor, draw: Draw) -> None:
    """Writes rows (along the last dimension) of nothing masked and nothing kept, whichever of them a flag's 0 means.

    In the draw "empty" every row is one of them by turns; in "harsh" the row of an input that has one row alone.
    """
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in layout.stride)
    view = layout.in_memory(flat)[once]
    lead = view.shape[:-1]
    rows = math.prod(lead)
    if not view.dim() or not view.numel() or view.numel() > flat.numel() or (draw == "harsh" and rows > 1):
        return
    odd = (torch.arange(rows) + (draw == "harsh")).reshape(*lead, 1) % 2
    if spec.kind == "mask" and flat.dtype.is_floating_point:
        odd = odd.sub(1).to(flat.dtype) * torch.finfo(flat.dtype).max
    view.copy_(odd.expand(view.shape))


def _drawn(layout: Input, spec: Spec, generator: torch.Generator, *, harsh: bool) -> torch.Tensor:
    """The numbers of a draw; ``harsh``: masks are fills and flags fall either way."""
    dtype = getattr(torch, layout.dtype)
    length = layout.memory
    if layout.value is not None:
        flat = torch.zeros(length, dtype=layout.value.dtype)
        layout.in_memory(flat).copy_(layout.value.detach())
        return flat
    if dtype == torch.bool:
        return torch.rand(length, generator=generator) < (0.5 if harsh else _KEPT)
    if not dtype.is_floating_point and not dtype.is_complex:
        limit = max(1, min(spec.limit, 3) if harsh else spec.limit)
        if spec.kind == "flag" and not harsh:
            limit = max(limit, 2)
        return torch.randint(0, limit, (length,), generator=generator).to(dtype)
    if spec.kind == "flag":
        keeps = torch.rand(length, generator=generator) < (0.5 if harsh else _KEPT)
        return keeps.to(dtype)
    numbers = torch.randn(length, generator=generator, dtype=torch.float64)
    if spec.kind == "factor" and harsh:
        numbers = numbers * _SMALL
    if spec.kind == "positive":
        numbers = numbers.abs() + 0.5
    if spec.kind == "mask" and harsh:
        keeps = torch.rand(length, generator=generator) < _KEPT
        lowest = torch.finfo(torch.float32 if dtype.is_complex else dtype).min
        numbers = torch.zeros_like(numbers).masked_fill(~keeps, lowest)
    return numbers.to(dtype)
