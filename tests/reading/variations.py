"""Attention by einsum, with shared keys and values, and as a call: functions of tensors with inputs of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from spellings import INF, ORDERS, Tensor, shown, stored

# ---------------------------------------------------------------- einsum


@dataclass(frozen=True)
class Einsum:
    """Two einsums with their letters in any order. ``lead`` letters that keys or values lack are shared."""

    query: str = "bhid"
    key: str = "bhjd"
    scores: str = "bhij"
    value: str = "bhje"
    result: str = "bhie"
    key_first: bool = False
    value_first: bool = False
    upper: bool = False
    masked: bool = False
    same: bool = False  # every size the same
    sizes: tuple[tuple[str, int], ...] = (("b", 2), ("h", 3), ("g", 2), ("i", 4), ("j", 5), ("d", 3), ("e", 2))

    def inputs(self) -> list[Tensor]:
        make = torch.Generator().manual_seed(0)
        size = {k: 3 if self.same else v for k, v in self.sizes}
        shapes = [[size[c] for c in text] for text in (self.query, self.key, self.value)]
        keep = torch.rand([size[c] for c in self.scores], generator=make) > 0.4
        keep.select(self.scores.index("j"), 0).fill_(True)
        return [*(torch.randn(shape, generator=make) for shape in shapes), keep]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        pair = f"{self.key}, {self.query}" if self.key_first else f"{self.query},{self.key}"
        last = f"{self.value},{self.scores}" if self.value_first else f"{self.scores},{self.value}"
        one, two = f"{pair}->{self.scores}", f"{last} -> {self.result}"
        if self.upper:
            one, two = one.upper(), two.upper()
        s = torch.einsum(one, k, q) if self.key_first else torch.einsum(one, q, k)
        if self.masked:
            s = s.masked_fill(~keep, -INF)
        w = (s * 0.5).softmax(dim=self.scores.index("j"))
        return torch.einsum(two, v, w) if self.value_first else torch.einsum(two, w, v)


@st.composite
def einsums(draw: Any) -> Einsum:
    """Any letters in any order."""
    lead = draw(st.sampled_from(["", "b", "h", "bh", "bh", "bhg"]))
    shared = [c for c in lead if draw(st.booleans()) and draw(st.booleans())]
    own = "".join(c for c in lead if c not in shared)
    mixed = lambda text: "".join(draw(st.permutations(text)))
    size = st.sampled_from([1, 2, 3])
    return Einsum(
        query=mixed(lead + "id"),
        key=mixed(own + "jd"),
        scores=mixed(lead + "ij"),
        value=mixed(own + "je"),
        result=mixed(lead + "ie"),
        key_first=draw(st.booleans()),
        value_first=draw(st.booleans()),
        upper=draw(st.booleans()),
        masked=draw(st.booleans()),
        same=draw(st.booleans()),
        sizes=tuple((c, draw(size)) for c in "bhgi") + tuple((c, draw(size) + 1) for c in "jde"),
    )


# ---------------------------------------------------------------- keys and values that several heads share


REPEATS = (
    "expand reshape", "repeat_interleave", "repeat_interleave method", "tile", "torch.tile", "query in groups",
    "grouped einsum", "stack", "index", "unsqueeze repeat",
)  # fmt: skip


@dataclass(frozen=True)
class Grouped:
    """Grouped query heads: each of ``kv_heads`` serves ``groups`` query heads."""

    repeat: str = "expand reshape"
    batch: int = 2
    kv_heads: int = 2
    groups: int = 3
    q_len: int = 4
    kv_len: int = 5
    heads_last: bool = False
    mask: str = ""
    sdpa: bool = False
    folded: bool = False

    def inputs(self) -> list[Tensor]:
        make = torch.Generator().manual_seed(0)
        heads = self.kv_heads * self.groups
        shapes = [(self.batch, heads, self.q_len, 4), *[(self.batch, self.kv_heads, self.kv_len, 4)] * 2]
        if self.heads_last:
            shapes = [(b, l, h, d) for b, h, l, d in shapes]
        masked = heads if self.mask == "heads" else 1
        keep = torch.rand(self.batch, masked, self.q_len, self.kv_len, generator=make) > 0.4
        keep[..., 0] = True
        return [*(torch.randn(s, generator=make) for s in shapes), keep]

    @property
    def has_einsum_over_one(self) -> bool:
        """Whether an einsum sums a single product, which decomposes to a plain multiplication."""
        return self.repeat == "grouped einsum" and self.kv_len == 1

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        if self.heads_last:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        b, kv, n, heads = self.batch, self.kv_heads, self.groups, self.kv_heads * self.groups
        if self.repeat in ("query in groups", "grouped einsum"):
            q = q.reshape(b, kv, n, self.q_len, 4)
            if self.repeat == "grouped einsum":
                s = torch.einsum("bkgid,bkjd->bkgij", q, k)
            else:
                s = q @ k.unsqueeze(2).mT
            s = s * 0.5
            if self.mask:
                keep = keep.unflatten(1, (kv, n)) if self.mask == "heads" else keep.unsqueeze(2)
                s = s.masked_fill(~keep, -INF)
            w = s.softmax(-1)
            out = torch.einsum("bkgij,bkjd->bkgid", w, v) if self.repeat == "grouped einsum" else w @ v.unsqueeze(2)
            return out.flatten(1, 2)
        k, v = self._repeated(k), self._repeated(v)
        if self.sdpa:
            return F.scaled_dot_product_attention(q, k, v, keep if self.mask else None)
        if self.folded:
            q, k, v = (x.reshape(b * heads, -1, 4) for x in (q, k, v))
            s = torch.bmm(q, k.mT) * 0.5
            if self.mask:
                s = (s.view(b, heads, self.q_len, -1) + torch.where(keep, 0.0, -INF)).view(b * heads, self.q_len, -1)
            return torch.bmm(s.softmax(-1), v).view(b, heads, self.q_len, 4)
        s = q @ k.mT * 0.5
        return (s.masked_fill(~keep, -INF) if self.mask else s).softmax(-1) @ v

    def _repeated(self, x: Tensor) -> Tensor:
        b, kv, n, length = self.batch, self.kv_heads, self.groups, self.kv_len
        if self.repeat == "expand reshape":
            return x[:, :, None, :, :].expand(b, kv, n, length, 4).reshape(b, kv * n, length, 4)
        if self.repeat == "repeat_interleave":
            return torch.repeat_interleave(x, n, dim=1)
        if self.repeat == "repeat_interleave method":
            return x.repeat_interleave(repeats=n, dim=-3)
        if self.repeat == "stack":
            return x.unsqueeze(1).expand(b, n, kv, length, 4).flatten(1, 2)
        if self.repeat == "tile":
            return x.repeat(1, n, 1, 1)
        if self.repeat == "index":
            return x[:, torch.arange(kv * n) // n]
        if self.repeat == "unsqueeze repeat":
            return x.unsqueeze(2).repeat(1, 1, n, 1, 1).view(b, -1, length, 4)
        return torch.tile(x, (n, 1, 1))


@st.composite
def grouped(draw: Any) -> Grouped:
    """Any way to share, any mask, by hand and as a call."""
    pick = lambda *options: draw(st.sampled_from(options))
    return Grouped(
        repeat=pick(*REPEATS),
        batch=pick(1, 2, 3),
        kv_heads=pick(1, 2, 3),
        groups=pick(1, 2, 3),
        q_len=pick(1, 3, 4),
        kv_len=pick(1, 3, 5),
        heads_last=pick(True, False),
        mask=pick("", "shared", "heads"),
        sdpa=pick(True, False),
        folded=pick(True, False),
    )


# ---------------------------------------------------------------- calls of scaled_dot_product_attention


@dataclass(frozen=True)
class Call:
    """One way to call it."""

    lead: tuple[int, ...] = (2, 4)
    q_len: int = 4
    kv_len: int = 5
    value_dim: int = 6
    dtype: torch.dtype = torch.float32
    spelling: str = "keywords"
    mask: str = ""
    broadcast: tuple[bool, ...] = (False,) * 4
    mask_rank: int = 4
    is_causal: bool = False
    scale: float | None = None
    kv_heads: int = 0  # 0: as many as the query has
    kv_batch: str = "own"
    orders: tuple[str, str, str] = ("as is", "as is", "as is")

    @property
    def _shapes(self) -> list[tuple[int, ...]]:
        kv = list(self.lead)
        if kv and self.kv_heads:
            kv[-1] = self.kv_heads
        if len(kv) > 1 and self.kv_batch != "own":
            kv[0] = 1
        return [(*self.lead, self.q_len, 4), (*kv, self.kv_len, 4), (*kv, self.kv_len, self.value_dim)]

    def inputs(self) -> list[Tensor]:
        make = torch.Generator().manual_seed(0)
        operands = [stored(s, o, make).to(self.dtype) for s, o in zip(self._shapes, self.orders)]
        full = [*self.lead, self.q_len, self.kv_len]
        shape = [1 if one else size for size, one in zip(full, self.broadcast)][max(0, len(full) - self.mask_rank) :]
        keep = torch.rand(shape, generator=make) > 0.4
        mask = keep if self.mask == "bool" else torch.randn(shape, generator=make).to(self.dtype)
        return [*operands, mask]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (shown(x, o, s) for x, o, s in zip((q, k, v), self.orders, self._shapes))
        if self.kv_batch == "expanded":
            k, v = (x.expand(self.lead[0], *x.shape[1:]) for x in (k, v))
        given = mask if self.mask else None
        gqa = bool(self.kv_heads)
        if self.spelling == "positional":
            return F.scaled_dot_product_attention(q, k, v, given, 0.0, self.is_causal, scale=self.scale, enable_gqa=gqa)
        if self.spelling == "keywords":
            return F.scaled_dot_product_attention(
                query=q,
                key=k,
                value=v,
                attn_mask=given,
                dropout_p=0.0,
                is_causal=self.is_causal,
                scale=self.scale,
                enable_gqa=gqa,
            )
        options: dict[str, Any] = {}
        if given is not None:
            options["attn_mask"] = given
        if self.is_causal:
            options["is_causal"] = True
        if self.scale is not None:
            options["scale"] = self.scale
        if gqa:
            options["enable_gqa"] = True
        return F.scaled_dot_product_attention(q, k, value=v, **options)


@st.composite
def sdpa_calls(draw: Any) -> Call:
    """Any rank, any mask, any spelling of the arguments."""
    pick = lambda *options: draw(st.sampled_from(options))
    rank = pick(0, 1, 2, 2, 2, 3)
    mask = pick("", "bool", "float")
    causal = not mask and pick(True, False)
    heads = pick(1, 2, 4)
    lead = (*(pick(1, 2, 3) for _ in range(rank - 1)), *([heads] if rank else []))
    return Call(
        lead=lead,
        q_len=pick(1, 3, 4),
        kv_len=pick(1, 3, 4, 5),
        value_dim=pick(2, 4, 6),
        dtype=pick(torch.float32, torch.float64, torch.bfloat16),
        spelling=pick("positional", "keywords", "shortest"),
        mask=mask,
        broadcast=tuple(draw(st.booleans()) for _ in range(5)),
        mask_rank=pick(2, 3, 4, 5) if rank > 1 else 2,
        is_causal=causal,
        # torch 2.13's fused CPU kernel gives NaN for a causal call with a negative scale
        scale=pick(None, 1.0, 0.3, *(() if causal else (-0.5,))),
        kv_heads=pick(0, *(n for n in (1, 2, 4) if heads % n == 0)) if rank == 2 else 0,
        kv_batch=pick("own", "own", "broadcast", "expanded") if rank == 2 else "own",
        orders=(pick(*ORDERS), pick(*ORDERS), pick(*ORDERS)),
    )
