"""The ways attention is written by hand, as values: a `Form` is a function of tensors with inputs of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

Tensor = torch.Tensor
INF = math.inf

# ---------------------------------------------------------------- written by hand

SCALES = (
    "none", "mul", "left mul", "div", "negative", "q mul", "q div", "left q", "k mul", "k div", "split", "0-d mul",
    "0-d div", "0-d q", "head mul", "head div", "head q", "head exp", "head k", "row mul", "alpha",
)  # fmt: skip
BIASES = ("add", "left add", "add alpha", "sub", "sub alpha", "inputs of baddbmm")
MASKS = (
    "masked_fill drop", "masked_fill keep", "where", "where drop", "where tensor", "method where", "add where",
    "one minus", "tril", "triu", "arange", "== 0", "in place",
)  # fmt: skip
SOFTMAXES = ("F", "torch", "method", "float32", "upcast", "special", "by hand", "by hand, no maximum")
AFTER = ("dropout eval", "dropout 0", "clone", "contiguous", "to", "type_as", "unsqueeze")
PRODUCTS = ("matmul", "operator", "bmm", "baddbmm", "einsum", "transposed", "method")
VALUES = ("matmul", "operator", "bmm", "einsum", "transposed", "method")
ORDERS = (
    "as is", "heads last", "last two swapped", "reversed", "permuted", "contiguous", "fused", "projected",
    "stacked", "expanded", "longer",
)  # fmt: skip


@dataclass(frozen=True)
class Form:
    """One way to write attention. ``lead`` are the sizes before (L, D): none, (B,), (B, H) or (B, G, H)."""

    lead: tuple[int, ...] = (2, 3)
    q_len: int = 4
    kv_len: int = 5
    dim: int = 4
    value_dim: int = 2
    dtype: torch.dtype = torch.float32
    orders: tuple[str, str, str] = ("as is", "as is", "as is")
    product: str = "matmul"
    scale: str = "mul"
    scale_last: bool = False
    bias: str = ""
    mask: str = ""
    fill: float = -INF
    broadcast: tuple[bool, ...] = (False,) * 5  # mask and bias: which of their dimensions are 1
    softmax: str = "F"
    after: tuple[str, ...] = ()
    value: str = "matmul"

    def inputs(self) -> list[Tensor]:
        """Query, key, value, and what scale, bias and mask may take."""
        make = torch.Generator().manual_seed(0)
        operands = [stored(shape, order, make).to(self.dtype) for shape, order in zip(self._shapes, self.orders)]
        full = (*self.lead, self.q_len, self.kv_len)
        masked = [1 if one else size for size, one in zip(full, self.broadcast)]
        bias = torch.randn(masked, generator=make).to(self.dtype)
        keep = torch.rand(masked, generator=make) > 0.4
        keep[..., 0] = True  # no fully masked row
        head = torch.rand((*self.lead[-1:], 1, 1), generator=make) + 0.5
        row = torch.rand((*self.lead, self.q_len, 1), generator=make) + 0.5
        return [*operands, bias, keep, head.to(self.dtype), row.to(self.dtype), torch.tensor(0.3, dtype=self.dtype)]

    @property
    def has_einsum_over_one(self) -> bool:
        """Whether an einsum sums a single product, which decomposes to a plain multiplication."""
        return (self.product == "einsum" and self.dim == 1) or (self.value == "einsum" and self.kv_len == 1)

    @property
    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            (*self.lead, *tail)
            for tail in ((self.q_len, self.dim), (self.kv_len, self.dim), (self.kv_len, self.value_dim))
        )

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, keep: Tensor, head: Tensor, row: Tensor, number: Tensor
    ) -> Tensor:
        """The attention as it is written."""
        q, k, v = (shown(x, order, shape) for x, order, shape in zip((q, k, v), self.orders, self._shapes))
        scale = self.scale
        if scale == "q mul":
            q = q * 0.3
        elif scale == "q div":
            q = q / 3.0
        elif scale == "left q":
            q = 0.3 * q
        elif scale == "k mul":
            k = k * 0.3
        elif scale == "k div":
            k = torch.div(k, 3)
        elif scale == "split":
            q, k = q * 0.5, 0.7 * k
        elif scale == "0-d q":
            q = number * q
        elif scale == "head q":
            q = q * head
        elif scale == "head k":
            k = k / head
        s = self._product(q, k, bias)
        if not self.scale_last:
            s = self._scaled(s, head, row, number)
        s = self._masked(s, bias, keep)
        if self.scale_last:
            s = self._scaled(s, head, row, number)
        w = self._weights(s)
        for name in self.after:
            w = self._after(name, w, v)
        return self._times_value(w, v)

    def _product(self, q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
        lead, l, s = self.lead, self.q_len, self.kv_len
        if self.product == "matmul":
            return torch.matmul(q, k.transpose(-2, -1))
        if self.product == "operator":
            return q @ k.mT
        if self.product == "method":
            return q.matmul(k.swapaxes(-1, -2))
        if self.product == "transposed":
            return (k @ q.transpose(-1, -2)).transpose(-1, -2)
        if self.product == "einsum":
            return torch.einsum("...id,...jd->...ij", q, k)
        q3, k3 = q.reshape(-1, l, self.dim), k.reshape(-1, s, self.dim)
        if self.product == "bmm":
            return torch.bmm(q3, k3.transpose(1, 2)).view(*lead, l, s)
        addend = bias.expand(*lead, l, s).reshape(-1, l, s)
        beta = 0.5 if self.bias == "inputs of baddbmm" else 0.0
        alpha = 0.3 if self.scale == "alpha" else 1.0
        return torch.baddbmm(addend, q3, k3.transpose(1, 2), beta=beta, alpha=alpha).view(*lead, l, s)

    def _scaled(self, s: Tensor, head: Tensor, row: Tensor, number: Tensor) -> Tensor:
        forms: dict[str, Callable[[], Tensor]] = {
            "mul": lambda: s * 0.3,
            "left mul": lambda: 0.3 * s,
            "div": lambda: s / 3.0,
            "negative": lambda: -s * 0.3,
            "0-d mul": lambda: s * number,
            "0-d div": lambda: s / number,
            "head mul": lambda: s * head,
            "head div": lambda: s / head,
            "head exp": lambda: s * head.exp(),
            "row mul": lambda: row * s,
        }
        return forms[self.scale]() if self.scale in forms else s

    def _masked(self, s: Tensor, bias: Tensor, keep: Tensor) -> Tensor:
        fill = self.fill
        l, k = self.q_len, self.kv_len
        biased: dict[str, Callable[[], Tensor]] = {
            "add": lambda: s + bias,
            "left add": lambda: bias + s,
            "add alpha": lambda: torch.add(s, bias, alpha=0.5),
            "sub": lambda: s - bias,
            "sub alpha": lambda: torch.sub(s, bias, alpha=2),
        }
        s = biased[self.bias]() if self.bias in biased else s
        lower = torch.ones(l, k, dtype=torch.bool, device=s.device)
        forms: dict[str, Callable[[], Tensor]] = {
            "masked_fill drop": lambda: s.masked_fill(~keep, fill),
            "masked_fill keep": lambda: torch.masked_fill(s, torch.logical_not(keep), fill),
            "where": lambda: torch.where(keep, s, fill),
            "where drop": lambda: torch.where(~keep, fill, s),
            "where tensor": lambda: torch.where(keep, s, torch.full_like(s, fill)),
            "method where": lambda: s.where(keep, s.new_full((), fill)),
            "add where": lambda: s + torch.where(keep, 0.0, fill),
            "one minus": lambda: s + (1.0 - keep.to(s.dtype)) * torch.finfo(s.dtype).min,
            "tril": lambda: s.masked_fill(~torch.tril(lower), fill),
            "triu": lambda: s.masked_fill(lower.triu(diagonal=1), fill),
            "arange": lambda: torch.where(torch.arange(k) <= torch.arange(l).unsqueeze(1), s, fill),
            "== 0": lambda: s.masked_fill(keep.to(s.dtype) == 0, fill),
            "in place": lambda: s.clone().masked_fill_(~keep, fill),
        }
        return forms[self.mask]() if self.mask in forms else s

    def _weights(self, s: Tensor) -> Tensor:
        forms: dict[str, Callable[[], Tensor]] = {
            "F": lambda: F.softmax(s, dim=-1),
            "torch": lambda: torch.softmax(s, s.dim() - 1),
            "method": lambda: s.softmax(-1),
            "special": lambda: torch.special.softmax(s, -1),
            "float32": lambda: F.softmax(s, dim=-1, dtype=torch.float32).to(self.dtype),
            "upcast": lambda: s.float().softmax(-1).to(self.dtype),
            "by hand": lambda: _divided((s - s.amax(-1, keepdim=True)).exp()),
            "by hand, no maximum": lambda: _divided(torch.exp(s)),
        }
        return forms[self.softmax]().to(self.dtype)

    def _after(self, name: str, w: Tensor, v: Tensor) -> Tensor:
        forms: dict[str, Callable[[], Tensor]] = {
            "dropout eval": lambda: F.dropout(w, 0.3, training=False),
            "dropout 0": lambda: F.dropout(w, 0.0, training=True),
            "clone": lambda: w.clone(),
            "contiguous": lambda: w.contiguous(),
            "to": lambda: w.to(v.dtype),
            "type_as": lambda: w.type_as(v),
            "unsqueeze": lambda: w.unsqueeze(0).squeeze(0),
        }
        return forms[name]()

    def _times_value(self, w: Tensor, v: Tensor) -> Tensor:
        if self.value == "matmul":
            return torch.matmul(w, v)
        if self.value == "operator":
            return w @ v
        if self.value == "method":
            return w.matmul(v)
        if self.value == "einsum":
            return torch.einsum("...ij,...jd->...id", w, v)
        if self.value == "transposed":
            return v.transpose(-1, -2) @ w.transpose(-1, -2)
        w3, v3 = w.reshape(-1, self.q_len, self.kv_len), v.reshape(-1, self.kv_len, self.value_dim)
        return torch.bmm(w3, v3).view(*self.lead, self.q_len, self.value_dim)


def _divided(e: Tensor) -> Tensor:
    return e / e.sum(-1, keepdim=True)


def _order(rank: int, order: str) -> list[int]:
    """The permutation that shows an operand which lies in another order."""
    dims = list(range(rank))
    if order == "heads last" and rank >= 3:
        dims[-3], dims[-2] = dims[-2], dims[-3]
    elif order == "last two swapped":
        dims[-1], dims[-2] = dims[-2], dims[-1]
    elif order == "reversed":
        dims.reverse()
    elif order == "permuted":
        dims = dims[1:] + dims[:1]
    return dims


def stored(shape: tuple[int, ...], order: str, make: torch.Generator) -> Tensor:
    """An operand as the program gets it: `shown` makes the (.., L, D) of ``shape`` of it."""
    if order == "fused":
        shape = (*shape[:-1], 3 * shape[-1])
    elif order == "stacked":
        shape = (2, *shape)
    elif order == "expanded" and len(shape) > 2:
        shape = (1, *shape[1:])
    elif order == "longer":
        shape = (*shape[:-2], shape[-2] + 3, shape[-1])
    elif order == "projected" and len(shape) > 2:
        shape = (*shape[:-3], shape[-2], shape[-3] * shape[-1])
    else:
        dims = _order(len(shape), order)
        shape = tuple(shape[dims.index(d)] for d in range(len(shape)))
    return torch.randn(shape, generator=make)


def shown(x: Tensor, order: str, shape: tuple[int, ...]) -> Tensor:
    """The (.., L, D) of ``shape`` that lies in ``x``."""
    if order == "fused":
        return x.chunk(3, dim=-1)[1]
    if order == "stacked":
        return x.unbind(0)[1]
    if order == "expanded" and len(shape) > 2:
        return x.expand(shape)
    if order == "longer":
        return x[..., 2 : 2 + shape[-2], :]
    if order == "projected" and len(shape) > 2:
        return x.view(*shape[:-3], shape[-2], shape[-3], shape[-1]).transpose(-3, -2)
    if order == "heads last" and x.dim() >= 3:
        return x.transpose(-3, -2)
    if order == "last two swapped":
        return x.mT
    if order == "contiguous":
        return x.clone().contiguous()
    return x.permute(_order(x.dim(), order)) if order in ("reversed", "permuted") else x


@st.composite
def forms(draw: Any) -> Form:
    """Any combination that is attention by what is written."""
    pick = lambda *options: draw(st.sampled_from(options))
    rank = pick(0, 1, 2, 2, 2, 3)
    dtype = pick(torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
    size = lambda: pick(1, 2, 3, 4)
    length = lambda: pick(1, 3, 4, 5)
    product, bias = pick(*PRODUCTS), pick("", "", *BIASES)
    scale = pick(*SCALES)
    if bias == "inputs of baddbmm" or scale == "alpha":
        product = "baddbmm"
    mask = pick("", "", *MASKS)
    fills = [-INF, torch.finfo(dtype).min] + ([] if dtype == torch.float16 else [-1e9, -1e30])
    last = scale in ("mul", "left mul", "div") and mask not in ("one minus", "add where") and draw(st.booleans())
    if last:
        fills = [-INF]
    softmax = pick(*SOFTMAXES)
    if softmax == "by hand, no maximum" and mask:
        fills = [-INF]
    return Form(
        lead=tuple(size() for _ in range(rank)),
        q_len=length(),
        kv_len=length(),
        dim=pick(1, 2, 4),
        value_dim=pick(1, 2, 4),
        dtype=dtype,
        orders=(pick(*ORDERS), pick(*ORDERS), pick(*ORDERS)),
        product=product,
        scale=scale,
        scale_last=last,
        bias=bias,
        mask=mask,
        fill=pick(*fills),
        broadcast=tuple(draw(st.booleans()) for _ in range(5)),
        softmax=softmax,
        after=tuple(draw(st.lists(st.sampled_from(AFTER), max_size=2))),
        value=pick(*VALUES),
    )
