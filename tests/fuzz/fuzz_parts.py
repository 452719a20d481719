"""What a generated program is made of: a row a spelling. ``miss`` marks what looks like attention and is not, or not
for certain; a row changes the tensor it is given, and says what input of its own it takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Tensor = Any  # a tensor, or what stands for one while a graph is recorded
INF = math.inf


@dataclass(frozen=True)
class Row:
    """``do(c, x, e)``: the program so far, the tensor, and the row's own: ``e.t``, ``e.x``, ``e.n``, ``e.keep``."""

    do: Callable[[Any, Tensor, Any], Tensor]
    takes: str = ""  # a kind of input, see INPUTS
    miss: bool = False
    numbers: tuple[float, ...] = ()  # what e.x may be
    writes: bool = False  # writes to a tensor by ``out=``, which has no gradient
    random: bool = False  # draws random numbers
    masks: bool = False  # takes a mask
    square: bool = False  # as many queries as keys
    wide: bool = False  # a mask of float32, whatever the program's type is: its fills are float32's
    hides: bool = False  # scores are replaced, which hides a key that is no number


Table = dict[str, Row]


def opaque(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """One node of a recorded graph, as Dynamo keeps a function by ``torch.compiler.allow_in_graph``."""

    def called(*args: Any) -> Tensor:
        tracer = next((a.tracer for a in args if isinstance(a, torch.fx.Proxy)), None)
        if tracer is None or tracer.running:
            return function(*args)
        return tracer.create_proxy("call_function", called, args, {})

    return called


# ---------------------------------------------------------------- how operands lie: (shape stored, what shows them)


@dataclass(frozen=True)
class Layout:
    """``stored(shape)`` is the shape of the input, ``shown(x, shape)`` the (.., L, D) in it."""

    stored: Callable[[tuple[int, ...]], tuple[int, ...]]
    shown: Callable[[Tensor, tuple[int, ...]], Tensor]
    rank: int = 2  # what it needs at least


def _merged(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-3], shape[-2], shape[-3] * shape[-1])


LAYOUTS = {
    "as is": Layout(lambda s: s, lambda x, s: x),
    "heads last": Layout(lambda s: (*s[:-3], s[-2], s[-3], s[-1]), lambda x, s: x.transpose(-3, -2), 3),
    "dims first": Layout(lambda s: (*s[:-2], s[-1], s[-2]), lambda x, s: x.mT),
    "dims first, transposed": Layout(lambda s: (*s[:-2], s[-1], s[-2]), lambda x, s: x.transpose(-1, -2)),
    # As a list: Dynamo takes `*range(3, -1, -1)` for its three arguments (torch 2.13.0).
    "reversed": Layout(lambda s: s[::-1], lambda x, s: x.permute([*range(len(s) - 1, -1, -1)])),
    "rotated": Layout(lambda s: (s[-1], *s[:-1]), lambda x, s: x.permute([*range(1, len(s)), 0])),
    "moved": Layout(lambda s: (*s[1:], s[0]), lambda x, s: torch.movedim(x, -1, 0)),
    "copied": Layout(lambda s: s, lambda x, s: x.clone().contiguous()),
    "fused": Layout(lambda s: (*s[:-1], 3 * s[-1]), lambda x, s: x.chunk(3, dim=-1)[1]),
    "split": Layout(lambda s: (*s[:-1], 2 * s[-1]), lambda x, s: x.split(s[-1], dim=-1)[1]),
    "stacked": Layout(lambda s: (2, *s), lambda x, s: x.unbind(0)[1]),
    "selected": Layout(lambda s: (2, *s), lambda x, s: x.select(0, 1)),
    "projected": Layout(
        _merged, lambda x, s: x.view(*x.shape[:-1], s[-3], s[-1]).transpose(-3, -2), 3
    ),
    "expanded": Layout(lambda s: (1, *s[1:]), lambda x, s: x.expand(s[0], *x.shape[1:]), 3),
    "longer": Layout(lambda s: (*s[:-2], s[-2] + 3, s[-1]), lambda x, s: x[..., 2:-1, :]),
    "narrowed": Layout(lambda s: (*s[:-1], s[-1] + 2), lambda x, s: x.narrow(-1, 1, s[-1])),
    "every second": Layout(lambda s: (*s[:-1], 2 * s[-1]), lambda x, s: x[..., ::2]),
    "flat": Layout(lambda s: (*s[:-2], s[-2] * s[-1]), lambda x, s: x.view(*x.shape[:-1], -1, s[-1])),
    "flattened": Layout(lambda s: s, lambda x, s: x.flatten(0, -3).unflatten(0, s[:-2]), 4),
    "one more": Layout(lambda s: s, lambda x, s: x.unsqueeze(0).squeeze(0)),
}  # fmt: skip


# ---------------------------------------------------------------- fewer heads of keys and values than of queries


def _five(c: Any, x: Tensor, groups: int, *, outer: bool) -> Tensor:
    """The repeated heads by a dimension that is expanded, inside or outside of the heads."""
    lead, heads, rest = x.shape[:-3], x.shape[-3], x.shape[-2:]
    x = x.unsqueeze(-4) if outer else x.unsqueeze(-3)
    shape = (groups, heads) if outer else (heads, groups)
    return x.expand(*lead, *shape, *rest).reshape(*lead, heads * groups, *rest)


def _every_head_index(x: Tensor, groups: int) -> Tensor:
    return x[..., torch.arange(x.shape[-3] * groups) // groups, :, :]


GROUPS: dict[str, tuple[Callable[[Any, Tensor, int], Tensor], bool]] = {
    "repeat_interleave": (lambda c, x, g: x.repeat_interleave(g, dim=-3), False),
    "torch.repeat_interleave": (lambda c, x, g: torch.repeat_interleave(x, g, dim=x.dim() - 3), False),
    "expanded inside": (lambda c, x, g: _five(c, x, g, outer=False), False),
    "index": (lambda c, x, g: _every_head_index(x, g), False),
    "repeat": (lambda c, x, g: x.repeat(*[1] * (x.dim() - 3), g, 1, 1), True),
    "expanded outside": (lambda c, x, g: _five(c, x, g, outer=True), True),
    "cat": (lambda c, x, g: torch.cat([x] * g, -3), True),
}


# ---------------------------------------------------------------- what is done to an operand before the product


def _rotated(c: Any, x: Tensor, e: Any) -> Tensor:
    """Rotary position embedding, as transformers writes it."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * e.t.cos() + turned * e.t.sin()


def _under_no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 2


_SCALES = (0.3, 1.0, 2.0, -0.5, 0.125)
OPERANDS: Table = {
    "mul": Row(lambda c, x, e: x * e.x, numbers=_SCALES),
    "div": Row(lambda c, x, e: x / e.x, numbers=_SCALES),
    "left mul": Row(lambda c, x, e: e.x * x, numbers=_SCALES),
    "torch.mul": Row(lambda c, x, e: torch.mul(x, e.x), numbers=_SCALES),
    "number": Row(lambda c, x, e: x * e.t, "number"),
    "of heads": Row(lambda c, x, e: x * e.t, "heads"),
    "of rows": Row(lambda c, x, e: x / e.t, "rows of it"),
    "neg": Row(lambda c, x, e: -x),
    "rope": Row(_rotated, "rope"),
    "clone": Row(lambda c, x, e: x.clone()),
    "mul in place": Row(lambda c, x, e: (x * 1.0).mul_(e.x), numbers=_SCALES),
    "div in place": Row(lambda c, x, e: (x * 1.0).div_(e.x), numbers=_SCALES),
    "a view multiplied in place": Row(lambda c, x, e: _through_a_view(x, e.x), numbers=_SCALES),
    "imul": Row(lambda c, x, e: _multiplied(x, e.x), numbers=_SCALES),
    "last is no number": Row(lambda c, x, e: x + e.t, "no number"),
    "normalised": Row(lambda c, x, e: F.normalize(x, dim=-1)),
    "flipped": Row(lambda c, x, e: x.flip(-2), miss=True),
    "rolled": Row(lambda c, x, e: x.roll(1, -2), miss=True),
    "of dims": Row(lambda c, x, e: x * e.t, "dims", miss=True),
    "detached": Row(lambda c, x, e: x.detach(), miss=True),
    "no grad": Row(lambda c, x, e: _under_no_grad(x), miss=True),
    "written": Row(lambda c, x, e: x.clone().mul_(2), miss=True),
    "written in part": Row(lambda c, x, e: _written_in_part(x), miss=True),
    "heads swapped with rows": Row(lambda c, x, e: _swapped(x), miss=True),
    "rounded": Row(lambda c, x, e: x.round(), miss=True),
}  # fmt: skip


def _multiplied(x: Tensor, number: float) -> Tensor:
    x = x * 1.0
    x *= number
    return x


def _through_a_view(x: Tensor, number: float) -> Tensor:
    x = x * 1.0
    x.transpose(-1, -2).mul_(number)
    return x


def _written_in_part(x: Tensor) -> Tensor:
    x = x.clone()
    x[..., :1] = 0
    return x


def _swapped(x: Tensor) -> Tensor:
    """A permutation that only sizes could tell from none."""
    return x.transpose(-3, -2) if x.dim() > 2 and x.shape[-3] == x.shape[-2] else x.flip(-1)


# ---------------------------------------------------------------- the product


def _folded(c: Any, x: Tensor, other: Tensor) -> Tensor:
    """(.., L, D) as (N, L, D), with the leading sizes of the scores."""
    lead = c.lead
    return x.expand(*lead, *x.shape[-2:]).reshape(-1, *x.shape[-2:])


@opaque
def _product_kept_whole(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("...id,...jd->...ij", q, k)


@opaque
def _softmax_kept_whole(s: Tensor) -> Tensor:
    e = s - s.amax(-1, keepdim=True)
    return _divided(e.exp())


def _by_slices(s: Tensor, overlap: int) -> Tensor:
    """Over the rows, written back; a row of both slices is the softmax of a softmax."""
    s = s * 1.0
    s[..., 1:, :] = s[..., 1:, :].softmax(-1)
    s[..., : 2 - overlap, :] = s[..., : 2 - overlap, :].softmax(-1)
    return s


@opaque
def _queries_kept_whole(s: Tensor) -> Tensor:
    return s.softmax(-2)


def _joined(c: Any, q: Tensor, change: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]) -> Tensor:
    """Scores over the first key and over the others, which are changed on their own, joined."""
    if c.s == 1:
        return change(q @ c.k.mT, lambda t: t)
    others = q @ c.k[..., 1:, :].mT
    return torch.cat([q @ c.k[..., :1, :].mT, change(others, lambda t: t if t.shape[-1] == 1 else t[..., 1:])], -1)


def _changed(s: Tensor, own: Callable[[Tensor], Tensor], e: Any) -> Tensor:
    """Scores as they are, with a bias, or with a mask."""
    return s + own(e.t) if e.x == 1.0 else s.masked_fill(~own(e.keep), e.fill) if e.x == 2.0 else s


def _stacked(c: Any, q: Tensor) -> Tensor:
    """The products of each head, stacked."""
    if len(c.lead) < 1 or not isinstance(c.lead[-1], int):
        return q @ c.k.mT
    k = c.k.expand(*c.lead, *c.k.shape[-2:])
    return torch.stack([q[..., h, :, :] @ k[..., h, :, :].mT for h in range(c.lead[-1])], -3)


def _scores_of(c: Any, q: Tensor) -> Tensor:
    return torch.zeros(c.n, c.l, c.s, dtype=q.dtype)


def _into(c: Any, q: Tensor, scale: float, beta: int = 0) -> Tensor:
    """A scaled product by ``out=``, which is read by the tensor it is written to."""
    scores = _scores_of(c, q) + beta * q.sum()
    torch.baddbmm(scores, _folded(c, q, c.k), _folded(c, c.k, q).mT, beta=beta, alpha=scale, out=scores)
    return scores.view(*c.lead, c.l, c.s)


def _into_more(c: Any, q: Tensor) -> Tensor:
    """The product is half of a tensor, and the other half, of zeros, is added afterwards."""
    both = torch.zeros(2, c.n, c.l, c.s, dtype=q.dtype)
    torch.bmm(_folded(c, q, c.k), _folded(c, c.k, q).mT, out=both[1])
    return both.sum(0).view(*c.lead, c.l, c.s)


PRODUCTS: Table = {
    "matmul": Row(lambda c, q, e: torch.matmul(q, c.k.transpose(-2, -1))),
    "operator": Row(lambda c, q, e: q @ c.k.mT),
    "method": Row(lambda c, q, e: q.matmul(c.k.swapaxes(-1, -2))),
    "transposed": Row(lambda c, q, e: (c.k @ q.transpose(-1, -2)).transpose(-1, -2)),
    "einsum": Row(lambda c, q, e: torch.einsum("...id,...jd->...ij", q, c.k)),
    "einsum, keys first": Row(lambda c, q, e: torch.einsum("...jd,...id->...ij", c.k, q)),
    "bmm": Row(lambda c, q, e: torch.bmm(_folded(c, q, c.k), _folded(c, c.k, q).mT).view(*c.lead, c.l, c.s)),
    "baddbmm": Row(
        lambda c, q, e: torch.baddbmm(
            torch.empty(c.n, c.l, c.s, dtype=q.dtype), _folded(c, q, c.k), _folded(c, c.k, q).mT, beta=0, alpha=e.x
        ).view(*c.lead, c.l, c.s),
        numbers=_SCALES,
    ),
    "into a tensor": Row(lambda c, q, e: _into(c, q, e.x), numbers=_SCALES, writes=True),
    "into a tensor, in place": Row(lambda c, q, e: _scores_of(c, q).baddbmm_(
        _folded(c, q, c.k), _folded(c, c.k, q).mT, beta=0, alpha=e.x
    ).view(*c.lead, c.l, c.s), numbers=_SCALES),
    "into a tensor, added": Row(lambda c, q, e: _into(c, q, e.x, 1), numbers=_SCALES, writes=True, miss=True),
    "into a tensor of more": Row(lambda c, q, e: _into_more(c, q), writes=True, miss=True),
    "baddbmm of a bias": Row(
        lambda c, q, e: torch.baddbmm(
            e.t.expand(*c.lead, c.l, c.s).reshape(c.n, c.l, c.s), _folded(c, q, c.k), _folded(c, c.k, q).mT,
            beta=e.x, alpha=0.5,
        ).view(*c.lead, c.l, c.s),
        "scores", numbers=(1.0, 0.5, -2.0),
    ),
    "in a function kept whole": Row(lambda c, q, e: _product_kept_whole(q, c.k)),
    "joined over keys": Row(
        lambda c, q, e: _joined(c, q, lambda s, own: _changed(s, own, e)), "scores", numbers=(0.0, 1.0, 2.0), masks=True
    ),
    "stacked heads": Row(lambda c, q, e: _stacked(c, q)),
    "query not transposed": Row(lambda c, q, e: torch.einsum("...id,...jd->...ji", q, c.k), miss=True, square=True),
    "keys as they lie": Row(
        lambda c, q, e: q @ c.k if c.k.shape[-2] == q.shape[-1] == c.k.shape[-1] else q @ c.k.mT, miss=True
    ),
    "distance": Row(lambda c, q, e: -(q.unsqueeze(-2) - c.k.unsqueeze(-3)).pow(2).sum(-1), miss=True),
    "product twice": Row(lambda c, q, e: q @ c.k.mT + q @ c.k.mT, miss=True),
    "sum by hand": Row(lambda c, q, e: (q.unsqueeze(-2) * c.k.unsqueeze(-3)).sum(-1), miss=True),
}  # fmt: skip


# ---------------------------------------------------------------- the softmax


def _upcast(c: Any, s: Tensor) -> Tensor:
    return s.to(c.f32)


def _divided(e: Tensor, dim: int = -1) -> Tensor:
    return e / e.sum(dim, keepdim=True)


def _softmax_over(s: Tensor, dim: int) -> Tensor:
    s = s * 1.0
    torch.softmax(s, dim, out=s)
    return s


SOFTMAXES: Table = {
    "F": Row(lambda c, s, e: F.softmax(s, dim=-1)),
    "torch": Row(lambda c, s, e: torch.softmax(s, s.dim() - 1)),
    "method": Row(lambda c, s, e: s.softmax(-1)),
    "special": Row(lambda c, s, e: torch.special.softmax(s, -1)),
    "in float32": Row(lambda c, s, e: F.softmax(s, dim=-1, dtype=c.f32).to(c.dtype)),
    "upcast": Row(lambda c, s, e: _upcast(c, s).softmax(-1).type_as(c.v)),
    "by hand": Row(lambda c, s, e: _divided((s - s.amax(-1, keepdim=True)).exp())),
    "by hand, no maximum": Row(lambda c, s, e: _divided(torch.exp(s))),
    "by out=": Row(lambda c, s, e: torch.softmax(s, -1, out=torch.empty_like(s)), writes=True),
    "by out= over itself": Row(lambda c, s, e: _softmax_over(s, -1), writes=True),
    "of queries by out=": Row(lambda c, s, e: _softmax_over(s, -2), writes=True, miss=True),
    "nan_to_num": Row(lambda c, s, e: torch.nan_to_num(s.softmax(-1), nan=0.0)),
    "guarded": Row(lambda c, s, e: torch.where((s == -INF).all(-1, keepdim=True), 0.0, s.softmax(-1))),
    "on the transposed": Row(lambda c, s, e: s.transpose(-1, -2).softmax(-2).transpose(-1, -2)),
    "in a function kept whole": Row(lambda c, s, e: _softmax_kept_whole(s)),
    "by slices": Row(lambda c, s, e: _by_slices(s, 1)),
    "by slices, one row twice": Row(lambda c, s, e: _by_slices(s, 0), miss=True),
    "of queries, in a function kept whole": Row(lambda c, s, e: _queries_kept_whole(s), miss=True),
    "exp of log_softmax": Row(lambda c, s, e: F.log_softmax(s, -1).exp()),
    "minus logsumexp": Row(lambda c, s, e: (s - s.logsumexp(-1, keepdim=True)).exp()),
    "times the inverse sum": Row(lambda c, s, e: s.exp() * s.exp().sum(-1, keepdim=True).reciprocal()),
    "normalised exp": Row(lambda c, s, e: F.normalize(s.exp(), p=1.0, dim=-1)),
    "minus logsumexp of queries": Row(lambda c, s, e: (s - s.logsumexp(-2, keepdim=True)).exp(), miss=True),
    "minus half the logsumexp": Row(lambda c, s, e: (s - s.logsumexp(-1, keepdim=True) * 0.5).exp(), miss=True),
    "normalised exp, p = 2": Row(lambda c, s, e: F.normalize(s.exp(), p=2.0, dim=-1), miss=True),
    "softmax of both directions": Row(lambda c, s, e: s.softmax(-1) * s.softmax(-2), miss=True),
    "joined with other scores": Row(lambda c, s, e: torch.cat([s, s * 2], -1).softmax(-1)[..., : c.s], miss=True),
    "two sinks": Row(
        lambda c, s, e: torch.cat([s, torch.zeros_like(s[..., :1]), s[..., :1] * 0], -1).softmax(-1)[..., :-2],
        miss=True,
    ),
    "a sink on both sides": Row(
        lambda c, s, e: torch.cat([s[..., :1] * 0, s, s[..., :1] * 0], -1).softmax(-1)[..., 1:-1], miss=True
    ),
    "queries": Row(lambda c, s, e: s.softmax(-2), miss=True),
    "first dimension": Row(lambda c, s, e: s.softmax(0), miss=True),
    "heads": Row(lambda c, s, e: s.softmax(-3 if s.dim() > 2 else -2), miss=True),
    "softmin": Row(lambda c, s, e: F.softmin(s, -1)),
    "twice": Row(lambda c, s, e: s.softmax(-1).softmax(-1), miss=True),
    "sigmoid": Row(lambda c, s, e: s.sigmoid(), miss=True),
    "normalised sigmoid": Row(lambda c, s, e: _divided(s.sigmoid()), miss=True),
    "sum of queries": Row(lambda c, s, e: _divided(s.exp(), -2), miss=True),
    "off by one": Row(lambda c, s, e: s.exp() / (s.exp().sum(-1, keepdim=True) + 1), miss=True),
    "twice the exponent": Row(lambda c, s, e: s.exp() / (s * 2).exp().sum(-1, keepdim=True), miss=True),
    "base 2": Row(lambda c, s, e: _divided(torch.exp2(s))),
    "over all": Row(lambda c, s, e: s.flatten(-2).softmax(-1).view(s.shape), miss=True),
    "with a sink": Row(lambda c, s, e: torch.cat([s, s.new_zeros((*c.lead, c.l, 1))], -1).softmax(-1)[..., :-1]),
    "a sink in front": Row(lambda c, s, e: torch.cat([s.new_zeros((*c.lead, c.l, 1)), s], -1).softmax(-1)[..., 1:]),
    "a sink of the scores' shape": Row(
        lambda c, s, e: torch.cat([s, torch.zeros_like(s[..., :1])], -1).softmax(-1)[..., :-1]
    ),
    "a sink padded in front": Row(lambda c, s, e: F.pad(s, (1, 0)).softmax(-1)[..., 1:]),
    "a sink padded behind": Row(lambda c, s, e: F.pad(s, (0, 1), value=1.5).softmax(-1)[..., :-1]),
    "sinks padded on both sides": Row(lambda c, s, e: F.pad(s, (2, 1)).softmax(-1)[..., 2:-1]),
    "a sink of rows on each side": Row(
        lambda c, s, e: torch.cat([e.t.expand(s[..., :1].shape), s, e.t.sin().expand(s[..., :1].shape)], -1)
        .softmax(-1)[..., 1:-1],
        "rows",
    ),
    "a sink padded, cut wrong": Row(lambda c, s, e: F.pad(s, (1, 0)).softmax(-1)[..., :-1], miss=True),
    "a sink that is cut wrong": Row(
        lambda c, s, e: torch.cat([s, torch.zeros_like(s[..., :1])], -1).softmax(-1)[..., 1:], miss=True
    ),
}  # fmt: skip


# ---------------------------------------------------------------- between the softmax and the values

AFTER: Table = {
    "dropout in eval": Row(lambda c, w, e: F.dropout(w, 0.3, training=False)),
    "no dropout": Row(lambda c, w, e: F.dropout(w, 0.0, training=True)),
    "clone": Row(lambda c, w, e: w.clone()),
    "contiguous": Row(lambda c, w, e: w.contiguous()),
    "to": Row(lambda c, w, e: w.to(c.v.dtype)),
    "unsqueeze": Row(lambda c, w, e: w.unsqueeze(0).squeeze(0)),
    "scaled": Row(lambda c, w, e: w * e.x, numbers=(0.5, 2.0)),
    "head mask": Row(lambda c, w, e: w * e.t, "heads"),
    "dropout": Row(lambda c, w, e: F.dropout(w, 0.5), miss=True, random=True),
    "masked": Row(lambda c, w, e: w * e.keep, miss=True, masks=True),
    "filled with 0": Row(lambda c, w, e: w.masked_fill(~e.keep, 0.0), miss=True, masks=True),
    "added to": Row(lambda c, w, e: w + e.t, "scores", miss=True),
    "one minus": Row(lambda c, w, e: 1 - w, miss=True),
    "squared": Row(lambda c, w, e: w * w, miss=True),
    "renormalised": Row(lambda c, w, e: w / w.sum(-1, keepdim=True), miss=True),
    "transposed": Row(lambda c, w, e: w.mT, miss=True, square=True),
    "written": Row(lambda c, w, e: w.clone().mul_(0.5), miss=True),
    "written in place": Row(lambda c, w, e: _first_key_written(w), miss=True),
    "detached": Row(lambda c, w, e: w.detach(), miss=True),
    "flipped": Row(lambda c, w, e: w.flip(-1), miss=True),
    "rolled": Row(lambda c, w, e: w.roll(1, -1), miss=True),
    "of keys": Row(lambda c, w, e: w * e.t, "keys", miss=True),
    "rounded": Row(lambda c, w, e: w.round(decimals=1), miss=True),
    "heads mixed": Row(lambda c, w, e: w + w.flip(0), miss=True),
}  # fmt: skip


def _first_key_written(w: Tensor) -> Tensor:
    w = w * 1.0
    w[..., :1] = 0
    return w


# ---------------------------------------------------------------- times the values


def _in_pieces(w: Tensor, v: Tensor) -> Tensor:
    return w @ v if v.shape[-2] == 1 else w[..., :1] @ v[..., :1, :] + w[..., 1:] @ v[..., 1:, :]


def _result_of(c: Any, w: Tensor) -> Tensor:
    return torch.zeros(c.n, w.shape[-2], c.v.shape[-1], dtype=c.v.dtype)


def _values_into(c: Any, w: Tensor, part: int = 0) -> Tensor:
    """By ``out=``, into a tensor or a part of one; read by that."""
    result = _result_of(c, w)
    more = torch.stack([result, result]) if part else result
    torch.bmm(_folded(c, w, c.v), _folded(c, c.v, w), out=more[1] if part else more)
    return (more.sum(0) if part else more).view(*c.lead, w.shape[-2], c.v.shape[-1])


def _values_added(c: Any, w: Tensor) -> Tensor:
    result = _result_of(c, w)
    result.baddbmm_(_folded(c, w, c.v), _folded(c, c.v, w))
    return result.view(*c.lead, w.shape[-2], c.v.shape[-1])


VALUES: Table = {
    "matmul": Row(lambda c, w, e: torch.matmul(w, c.v)),
    "operator": Row(lambda c, w, e: w @ c.v),
    "method": Row(lambda c, w, e: w.matmul(c.v)),
    "einsum": Row(lambda c, w, e: torch.einsum("...ij,...jd->...id", w, c.v)),
    "einsum, heads last": Row(
        lambda c, w, e: torch.einsum("...hij,...hjd->...ihd", w, c.v) if w.dim() > 2 else w @ c.v
    ),
    "transposed": Row(lambda c, w, e: (c.v.transpose(-1, -2) @ w.transpose(-1, -2)).mT),
    "left transposed": Row(lambda c, w, e: c.v.mT @ w.mT),
    "bmm": Row(
        lambda c, w, e: torch.bmm(_folded(c, w, c.v), _folded(c, c.v, w)).view(*c.lead, w.shape[-2], c.v.shape[-1])
    ),
    "into a tensor": Row(lambda c, w, e: _values_into(c, w), writes=True),
    "into a tensor, in place": Row(lambda c, w, e: _values_added(c, w)),
    "into a part of a tensor": Row(lambda c, w, e: _values_into(c, w, 1), writes=True),
    "in pieces": Row(lambda c, w, e: _in_pieces(w, c.v)),
    "twice": Row(lambda c, w, e: w @ c.v + w @ (c.v * 2), miss=True),
    "in a chain": Row(lambda c, w, e: w @ (w @ c.v), miss=True, square=True),
    "weights transposed": Row(lambda c, w, e: w.mT @ c.v, miss=True, square=True),
    "values turned": Row(lambda c, w, e: w @ c.v.flip(-2), miss=True),
    "part": Row(lambda c, w, e: w[..., :2] @ c.v[..., :2, :], miss=True),
    "end": Row(lambda c, w, e: w[..., 1:] @ c.v[..., 1:, :], miss=True),
    "shifted": Row(lambda c, w, e: w[..., :-1] @ c.v[..., 1:, :], miss=True),
    "values of the query": Row(lambda c, w, e: (w.unsqueeze(-1) * c.v.unsqueeze(-3)).sum(-2), miss=True),
    "first rows": Row(lambda c, w, e: w[..., :1, :] @ c.v),
    "values as keys": Row(lambda c, w, e: w @ c.k, miss=True),
}  # fmt: skip


# ---------------------------------------------------------------- the result

RESULTS: Table = {
    "heads merged": Row(lambda c, x, e: x.transpose(-3, -2).flatten(-2) if x.dim() > 2 else x),
    "heads merged, reshaped": Row(
        lambda c, x, e: x.transpose(-3, -2).reshape(*x.shape[:-3], x.shape[-2], -1) if x.dim() > 2 else x
    ),
    "contiguous": Row(lambda c, x, e: x.transpose(-1, -2).contiguous()),
    "plus": Row(lambda c, x, e: x + 1),
    "written": Row(lambda c, x, e: x.add_(1), miss=True),
    "written by iadd": Row(lambda c, x, e: _iadd(x), miss=True),
    "written in part": Row(lambda c, x, e: _zeroed(x), miss=True),
    "first": Row(lambda c, x, e: x[0]),
    "float": Row(lambda c, x, e: x.to(c.f32)),
    "normalised by the sum": Row(lambda c, x, e: x / x.sum(-1, keepdim=True).abs().add(1.0)),
}  # fmt: skip


def _iadd(x: Tensor) -> Tensor:
    x += 1
    return x


def _zeroed(x: Tensor) -> Tensor:
    x[..., :1] = 0
    return x
