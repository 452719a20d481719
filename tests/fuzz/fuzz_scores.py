"""Operations on the scores between the product and the softmax: scales, biases, masks, and others."""

from __future__ import annotations

from typing import Any

import torch
from fuzz_parts import INF, Row, Table, Tensor, opaque

_SCALES = (0.3, 1.0, 2.0, -0.5, 0.125)
_SMALL = (1e-9, 1e-3)
_TERMS = (0.5, -3.0, 100.0, -200.0)

SCALES: Table = {
    "mul": Row(lambda c, s, e: s * e.x, numbers=_SCALES),
    "left mul": Row(lambda c, s, e: e.x * s, numbers=_SCALES),
    "div": Row(lambda c, s, e: s / e.x, numbers=_SCALES),
    "torch.div": Row(lambda c, s, e: torch.div(s, e.x), numbers=_SCALES),
    "root": Row(lambda c, s, e: s / c.q.shape[-1] ** 0.5),
    "neg": Row(lambda c, s, e: -s),
    "in place": Row(lambda c, s, e: s.clone().mul_(e.x), numbers=_SCALES),
    "imul": Row(lambda c, s, e: _imul(s, e.x), numbers=_SCALES),
    "by out=": Row(lambda c, s, e: torch.mul(s, e.x, out=torch.empty_like(s)), numbers=_SCALES, writes=True),
    "by out= over itself": Row(lambda c, s, e: _div_over(s, e.x), numbers=_SCALES, writes=True),
    "number": Row(lambda c, s, e: s * e.t, "number"),
    "by a number": Row(lambda c, s, e: s / e.t, "number"),
    "tensor": Row(lambda c, s, e: s * torch.tensor(0.3, dtype=s.dtype)),
    "of heads": Row(lambda c, s, e: s * e.t, "heads"),
    "by heads": Row(lambda c, s, e: s / e.t, "heads"),
    "exp of heads": Row(lambda c, s, e: s * e.t.exp(), "heads"),
    "of rows": Row(lambda c, s, e: s * e.t, "rows"),
}  # fmt: skip


def _looked_up(c: Any, table: Tensor) -> Tensor:
    """A column of a table by the distance, up to one: as T5 has it for every head."""
    distance = (torch.arange(c.s) - torch.arange(c.l)[:, None]).abs()
    near = torch.min(distance, torch.full_like(distance, (table.shape[0] - 1) // 2))
    return torch.nn.functional.embedding(near, table[:, None]).squeeze(-1)


BIASES: Table = {
    "add": Row(lambda c, s, e: s + e.t, "scores"),
    "left add": Row(lambda c, s, e: e.t + s, "scores"),
    "add alpha": Row(lambda c, s, e: torch.add(s, e.t, alpha=e.x), "scores", numbers=(0.5, -2.0, 3.0)),
    "method add alpha": Row(lambda c, s, e: s.add(e.t, alpha=e.x), "scores", numbers=(0.5, -2.0, 3.0)),
    "bias plus alpha scores": Row(lambda c, s, e: torch.add(e.t, s, alpha=e.x), "scores", numbers=(0.5, -2.0)),
    "sub": Row(lambda c, s, e: s - e.t, "scores"),
    "left sub": Row(lambda c, s, e: e.t - s, "scores"),
    "rsub": Row(lambda c, s, e: torch.rsub(s, e.t, alpha=e.x), "scores", numbers=(1.0, 0.5)),
    "sub alpha": Row(lambda c, s, e: torch.sub(s, e.t, alpha=e.x), "scores", numbers=(0.5, 2.0)),
    "add in place": Row(lambda c, s, e: s.clone().add_(e.t), "scores"),
    "iadd": Row(lambda c, s, e: _iadd(s, e.t), "scores"),
    "add by out=": Row(lambda c, s, e: torch.add(s, e.t, out=torch.empty_like(s)), "scores", writes=True),
    "a part added to": Row(lambda c, s, e: _part_added_to(s, e.t), "scores"),
    "term": Row(lambda c, s, e: s + e.x, numbers=_TERMS),
    "scaled": Row(lambda c, s, e: s + e.t * e.x, "scores", numbers=(0.5, 10.0)),
    "alibi": Row(lambda c, s, e: s + e.t * (torch.arange(c.s) - torch.arange(c.l)[:, None]), "heads"),
    "distance": Row(
        lambda c, s, e: s - (torch.arange(c.s) - torch.arange(c.l)[:, None]).abs() * e.x, numbers=(0.5, 2.0)
    ),
    "keys": Row(lambda c, s, e: s + torch.arange(c.s) * e.x, numbers=(0.25,)),
    "table": Row(lambda c, s, e: s + e.t[torch.arange(c.s) - torch.arange(c.l)[:, None] + c.l - 1], "table"),
    "looked up": Row(lambda c, s, e: s + _looked_up(c, e.t), "table"),
    "of rows": Row(lambda c, s, e: s + e.t, "rows"),
    "far down, in float32": Row(lambda c, s, e: s + (torch.arange(c.s) * e.x - 7e4).to(c.f32), numbers=(-2e4, 2e4)),
    "far down": Row(lambda c, s, e: s + (torch.arange(c.s) * e.x - 40960).to(s.dtype), numbers=(-512.0, 512.0)),
    "far down, subtracted": Row(lambda c, s, e: s - (torch.arange(c.s) * e.x + 7e4).to(c.f32), numbers=(2e4, -2e4)),
    "far down, scaled": Row(lambda c, s, e: (s.to(c.f32) * 8 - torch.arange(c.s) * 7e5) / e.x, numbers=(8.0, 2.0)),
    "minus the maximum": Row(lambda c, s, e: s - s.amax(-1, keepdim=True)),
    "minus the detached maximum": Row(lambda c, s, e: s - s.detach().amax(-1, keepdim=True)),
}  # fmt: skip


@opaque
def _where_kept_whole(keep: Tensor, s: Tensor, fill: float) -> Tensor:
    return torch.where(keep, s, torch.asarray(fill, dtype=s.dtype))


MASKS: Table = {
    "masked_fill": Row(lambda c, s, e: s.masked_fill(~e.keep, e.fill), masks=True, hides=True),
    "torch.masked_fill": Row(
        lambda c, s, e: torch.masked_fill(s, torch.logical_not(e.keep), e.fill), masks=True, hides=True
    ),
    "masked_fill_": Row(lambda c, s, e: s.clone().masked_fill_(~e.keep, e.fill), masks=True, hides=True),
    "where": Row(lambda c, s, e: torch.where(e.keep, s, e.fill), masks=True, hides=True),
    "where drop": Row(lambda c, s, e: torch.where(~e.keep, e.fill, s), masks=True, hides=True),
    "where tensor": Row(lambda c, s, e: torch.where(e.keep, s, torch.full_like(s, e.fill)), masks=True, hides=True),
    "method where": Row(lambda c, s, e: s.where(e.keep, s.new_full((), e.fill)), masks=True, hides=True),
    "add where": Row(lambda c, s, e: s + torch.where(e.keep, 0.0, e.fill).to(s.dtype), masks=True),
    "add filled": Row(
        lambda c, s, e: s + torch.zeros(e.keep.shape, dtype=s.dtype).masked_fill(~e.keep, e.fill), masks=True
    ),
    "sub where": Row(lambda c, s, e: s - torch.where(e.keep, 0.0, -e.fill).to(s.dtype), masks=True),
    "one minus": Row(lambda c, s, e: s + (1.0 - e.keep.to(s.dtype)) * max(e.fill, e.lowest), masks=True),
    "drop times": Row(lambda c, s, e: s + (~e.keep).to(s.dtype) * max(e.fill, e.lowest), masks=True),
    "== 0": Row(lambda c, s, e: s.masked_fill(e.keep.to(s.dtype) == 0, e.fill), masks=True, hides=True),
    "< 0.5": Row(lambda c, s, e: s.masked_fill(e.keep.to(s.dtype) < 0.5, e.fill), masks=True, hides=True),
    "number == 0": Row(lambda c, s, e: s.masked_fill(e.keep.long() == 0, e.fill), masks=True, hides=True),
    "max": Row(
        lambda c, s, e: torch.maximum(
            s + torch.where(e.keep, 0.0, e.lowest).to(s.dtype), torch.tensor(e.lowest, dtype=s.dtype)
        ),
        masks=True,
    ),
    "float32 where": Row(
        lambda c, s, e: s + torch.where(e.keep, 0.0, e.fill).to(c.f32), masks=True, wide=True
    ),
    "float32 one minus": Row(
        lambda c, s, e: s + (1.0 - e.keep.to(c.f32)) * max(e.fill, e.lowest), masks=True, wide=True
    ),
    "float32 masked_fill": Row(
        lambda c, s, e: s.to(c.f32).masked_fill(~e.keep, e.fill), masks=True, wide=True, hides=True
    ),
    "float32 where drop": Row(
        lambda c, s, e: torch.where(~e.keep, torch.full((1,), e.fill, dtype=c.f32), s),
        masks=True, wide=True, hides=True,
    ),
    "float64 where": Row(
        lambda c, s, e: s + torch.where(e.keep, 0.0, e.fill).to(torch.float64), masks=True, wide=True
    ),
    "input of float32 fills": Row(lambda c, s, e: s + e.t, "float32 fills", wide=True),
    "triu of the scores' shape": Row(
        lambda c, s, e: s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), e.fill), hides=True
    ),
    "new_ones": Row(lambda c, s, e: s.masked_fill(s.new_ones(c.l, c.s).tril() == 0, e.fill), hides=True),
    "full_like": Row(lambda c, s, e: s + torch.full_like(s, e.fill).triu(1)),
    "where in a function kept whole": Row(
        lambda c, s, e: _where_kept_whole(e.keep, s, e.fill), masks=True, hides=True
    ),
    "where by out=": Row(
        lambda c, s, e: torch.where(e.keep, s, s.new_full((), e.fill), out=torch.empty_like(s)),
        masks=True, writes=True, hides=True,
    ),
    "boolean index": Row(lambda c, s, e: _indexed(s, ~e.keep, e.fill), masks=True, hides=True),
    "part added to": Row(lambda c, s, e: _part_added(s, e.x), numbers=(0.5, -3.0)),
    "triu of fills": Row(lambda c, s, e: s + torch.full((c.l, c.s), e.fill, dtype=s.dtype).triu(1)),
    "tail written": Row(lambda c, s, e: _tail_written(s, e.fill, e.n)),
    "input of fills": Row(lambda c, s, e: s + e.t, "fills"),
    "input == 0": Row(lambda c, s, e: s.masked_fill(e.t == 0, e.fill), "binary"),
    "one minus input": Row(lambda c, s, e: s + (1.0 - e.t) * max(e.fill, e.lowest), "binary"),
}  # fmt: skip

_WEAK = (-4.5, -8.0, -1e4)  # few, and seen in any type: programs come in clumps that share their numbers
OTHERS: Table = {
    "weak fill": Row(lambda c, s, e: s.masked_fill(~e.keep, e.x), masks=True, numbers=(*_WEAK, 0.0, INF)),
    "weak where": Row(lambda c, s, e: torch.where(e.keep, s, e.x), masks=True, numbers=(*_WEAK, -1e8)),
    "weak matrix": Row(lambda c, s, e: s + torch.where(e.keep, 0.0, e.x), masks=True, numbers=_WEAK),
    "weakened": Row(lambda c, s, e: s.masked_fill(~e.keep, e.fill) * e.x, masks=True, numbers=_SMALL),
    "weakened by alpha": Row(
        lambda c, s, e: torch.add(s, torch.where(e.keep, 0.0, e.fill).to(s.dtype), alpha=e.x), masks=True,
        numbers=_SMALL,
    ),
    "turned over": Row(lambda c, s, e: s.masked_fill(e.keep, e.fill), masks=True),
    "times the mask": Row(lambda c, s, e: s * e.keep, masks=True),
    "times a matrix": Row(lambda c, s, e: s * e.t, "scores"),
    "by a matrix": Row(lambda c, s, e: s / e.t.exp(), "scores"),
    "by out= to a tensor of before": Row(lambda c, s, e: _before_it_is_written(s), writes=True),
    "other scores": Row(lambda c, s, e: torch.where(e.keep, s, s * 2), masks=True),
    "filled by a tensor": Row(lambda c, s, e: torch.where(e.t > 0, s, e.t), "scores"),
    "filled by a number": Row(lambda c, s, e: torch.where(e.keep, s, torch.tensor(0.5, dtype=s.dtype)), masks=True),
    "no binary mask": Row(lambda c, s, e: s + (1.0 - e.t) * -3.0, "scores"),
    "no binary mask, lowest": Row(lambda c, s, e: s + (1.0 - e.t.abs()) * max(e.fill, e.lowest), "scores"),
    "mask == 1": Row(lambda c, s, e: s.masked_fill(e.t == 1, e.fill), "binary"),
    "mask > 1": Row(lambda c, s, e: s.masked_fill(e.t > 1, e.fill), "counts"),
    "soft cap": Row(lambda c, s, e: torch.tanh(s / 2) * 2),
    "clamp": Row(lambda c, s, e: s.clamp(-1, 1)),
    "relu": Row(lambda c, s, e: s.relu()),
    "abs": Row(lambda c, s, e: s.abs()),
    "squared": Row(lambda c, s, e: s * s),
    "pow": Row(lambda c, s, e: s**2),
    "from the scores": Row(lambda c, s, e: torch.where(s > 0, s, e.fill)),
    "top": Row(lambda c, s, e: s.masked_fill(s < s.amax(-1, keepdim=True) - 1, -INF)),
    "rounded": Row(lambda c, s, e: s.to(torch.int32).to(s.dtype)),
    "to half": Row(lambda c, s, e: s.to(c.half).to(s.dtype)),
    "of keys": Row(lambda c, s, e: s * e.t, "keys"),
    "by keys": Row(lambda c, s, e: s / (torch.arange(c.s) + 1)),
    "flipped": Row(lambda c, s, e: s.flip(-1)),
    "rolled": Row(lambda c, s, e: s.roll(1, -1)),
    "rows flipped": Row(lambda c, s, e: s.flip(-2)),
    "summed up": Row(lambda c, s, e: s.cumsum(-1)),
    "transposed": Row(lambda c, s, e: s.mT, square=True),
    "transposed in place": Row(lambda c, s, e: s.clone().transpose_(-1, -2), square=True),
    "symmetric": Row(lambda c, s, e: s + s.mT, square=True),
    "heads mixed": Row(lambda c, s, e: s + s.flip(0)),
    "head averaged": Row(lambda c, s, e: s.mean(0, keepdim=True).expand(s.shape)),
    "detached": Row(lambda c, s, e: s.detach()),
    "no grad": Row(lambda c, s, e: _no_grad(s)),
    "minus the mean": Row(lambda c, s, e: s - s.mean(-1, keepdim=True)),
    "minus the maximum of queries": Row(lambda c, s, e: s - s.amax(-2, keepdim=True)),
    "every second written": Row(lambda c, s, e: _every_second(s, e.fill)),
    "written through a view": Row(lambda c, s, e: _through_a_view(s)),
    "row written": Row(lambda c, s, e: _row_written(s)),
    "diagonal written": Row(lambda c, s, e: _diagonal(s)),
    "masked after it was copied": Row(lambda c, s, e: _mask_written_after(s, e.t), "scores"),
    "triu of fills off by one": Row(lambda c, s, e: s + torch.full((c.l, c.s), e.fill, dtype=s.dtype).triu(2)),
    "triu of the scores' shape off by one": Row(
        lambda c, s, e: s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(2), e.fill)
    ),
    "full_like of scores": Row(lambda c, s, e: s + torch.ones_like(s).triu(1) * s),
    "boolean index of the scores": Row(lambda c, s, e: _indexed(s, s > 0.5, -2.0)),
    "boolean index added to": Row(lambda c, s, e: _indexed(s, ~e.keep, 0.25), masks=True),
    "tril of fills": Row(lambda c, s, e: s + torch.full((c.l, c.s), -2.0, dtype=s.dtype).tril(-1)),
}  # fmt: skip


def _imul(s: Tensor, x: float) -> Tensor:
    s = s.clone()
    s *= x
    return s


def _iadd(s: Tensor, t: Tensor) -> Tensor:
    s = s.clone()
    s += t
    return s


def _tail_written(s: Tensor, fill: float, n: int) -> Tensor:
    s = s.clone()
    s[..., 1 + n :] = fill
    return s


def _indexed(s: Tensor, where: Tensor, number: float) -> Tensor:
    s = s * 1.0
    s[where.expand(s.shape)] = number
    return s


def _part_added(s: Tensor, number: float) -> Tensor:
    s = s * 1.0
    s[..., 1:, 1:] += number
    return s


def _before_it_is_written(s: Tensor) -> Tensor:
    other = torch.ones_like(s)
    before = other * s
    torch.mul(s, 0.5, out=other)
    return before * other


def _part_added_to(s: Tensor, t: Tensor) -> Tensor:
    s = s * 1.0
    s[..., 1:, 1:] += t.expand(s.shape)[..., 1:, 1:]
    return s


def _div_over(s: Tensor, number: float) -> Tensor:
    s = s * 1.0
    torch.div(s, number, out=s)
    return s


def _no_grad(s: Tensor) -> Tensor:
    with torch.no_grad():
        return s * 0.5


def _every_second(s: Tensor, fill: float) -> Tensor:
    s = s.clone()
    s[..., 1::2] = fill
    return s


def _through_a_view(s: Tensor) -> Tensor:
    s = s.clone()
    s.flatten(0, -2)[:, 1:].fill_(-2.0)
    return s


def _row_written(s: Tensor) -> Tensor:
    s = s.clone()
    s[..., 0, :] = 1.0
    return s


def _diagonal(s: Tensor) -> Tensor:
    s = s.clone()
    s.diagonal(dim1=-2, dim2=-1).zero_()
    return s


def _mask_written_after(s: Tensor, t: Any) -> Tensor:
    t = t.clone()
    s = s + t
    t.zero_()
    return s + t
