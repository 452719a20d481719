"""Shared heads, guards, softmaxes by hand, norms, rotary, latent attention: each named form with a look-alike."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from against_eager import qkv, randn, same
from neighbours import INF, LOWEST, NO_SITE, Pair, attend, check, pairs, softmax
from torch import Tensor

QKV = qkv()

# ---------------------------------------------------------------- heads that share keys and values

SHARED = qkv(heads=6, kv_heads=2, q_len=5, kv_len=7)
POSITIONS_FIRST = (randn(2, 6, 5, 16, seed=1), randn(2, 2, 2, 16, seed=2), randn(2, 2, 2, 16, seed=3))
BEAMS = (randn(6, 2, 5, 16, seed=1), *qkv(kv_len=7)[1:])


def repeat_kv(x: Tensor, groups: int = 3) -> Tensor:
    """As transformers writes it."""
    b, h, l, d = x.shape
    return x[:, :, None, :, :].expand(b, h, groups, l, d).reshape(b, h * groups, l, d)


def repeat_groups(x: Tensor, groups: int = 3) -> Tensor:
    b, h, l, d = x.shape
    return x[:, None].expand(b, groups, h, l, d).reshape(b, groups * h, l, d)


def grouped_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bkgid,bkjd->bkgij", q.unflatten(1, (2, 3)), k)
    return torch.einsum("bkgij,bkjd->bkgid", softmax(scores * 0.25), v).flatten(1, 2)


def groups_first_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bgkid,bkjd->bgkij", q.unflatten(1, (3, 2)), k)
    return torch.einsum("bgkij,bkjd->bgkid", softmax(scores * 0.25), v).flatten(1, 2)


GROUPED = {
    "repeat_kv": Pair(
        lambda q, k, v: attend(q, repeat_kv(k), repeat_kv(v)),
        lambda q, k, v: attend(q, repeat_groups(k), repeat_groups(v)),
        SHARED,
        reported={"kv_heads": 2},
    ),
    "repeat_interleave": Pair(
        lambda q, k, v: attend(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)),
        lambda q, k, v: attend(q, k.repeat(1, 3, 1, 1), v.repeat(1, 3, 1, 1)),
        SHARED,
        reported={"kv_heads": 2},
    ),
    "keys and values alike": Pair(
        lambda q, k, v: attend(q, repeat_kv(k), torch.repeat_interleave(v, 3, dim=1)),
        lambda q, k, v: attend(q, repeat_kv(k), v.repeat(1, 3, 1, 1)),
        SHARED,
        reported={"kv_heads": 2},
        near_reported={"poor_cases": ()},
    ),
    "grouped einsum": Pair(grouped_einsum, groups_first_einsum, SHARED, reported={"kv_heads": 2}),
    "before the transpose": Pair(
        lambda q, k, v: attend(q, *(x.repeat_interleave(3, 2).transpose(1, 2) for x in (k, v))),
        lambda q, k, v: attend(q, *(x.repeat_interleave(3, 1) for x in (k, v))),
        POSITIONS_FIRST,
        reported={"kv_heads": 2},
    ),
    "beams": Pair(
        lambda q, k, v: attend(q, k.repeat_interleave(3, 0), v.repeat_interleave(3, 0)),
        lambda q, k, v: attend(q, k.repeat(3, 1, 1, 1), v.repeat(3, 1, 1, 1)),
        BEAMS,
    ),
}


@pairs(GROUPED)
def test_shared_heads(pair: Pair, near: bool) -> None:
    check(pair, near)


# ---------------------------------------------------------------- softmax: masks, guards, by hand

KEEP = randn(2, 1, 8, 8, seed=5) > -0.3
KEEP[0, 0, 3] = False  # a fully masked row
MASKED = (*QKV, KEEP)
PADDED = torch.tensor([[True] * 8, [True] * 6 + [False] * 2])[:, None, None, :]
SMALL = (randn(8, 16, seed=1), randn(8, 16, seed=2), randn(8, 16, seed=3))
FOURS = qkv(4, 4, 4, 4)


def masked(s: Tensor, keep: Tensor, fill: float = -INF) -> Tensor:
    return s.masked_fill(~keep, fill)


def triangle() -> Tensor:
    return torch.ones(8, 8, dtype=torch.bool).tril()


def divided(e: Tensor, dim: int = -1, keepdim: bool = True) -> Tensor:
    return e / e.sum(dim, keepdim=keepdim)


def zeroed(w: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, torch.zeros_like(w), w)


OTHER_MASK = "the attention weights are masked, but not by the mask"
SOFTMAXES = {
    "two masks": Pair(
        lambda q, k, v, p: softmax(masked(masked(q @ k.mT, triangle(), LOWEST), p, LOWEST)) @ v,
        lambda q, k, v, p: softmax(torch.where(p, q @ k.mT, masked(q @ k.mT, triangle(), LOWEST))) @ v,
        (*QKV, PADDED),
        reported={"mask": "causal and padding"},
        left="not a constant",
    ),
    "two masks, one undone": Pair(
        lambda q, k, v, p: softmax(masked(q @ k.mT, triangle() & p)) @ v,
        lambda q, k, v, p: softmax(masked(q @ k.mT, triangle() | p)) @ v,
        (*QKV, PADDED),
        reported={"mask": "causal and padding"},
        near_reported={"mask": "dense"},
    ),
    "a mask expanded as the scores": Pair(
        lambda q, k, v, m: (lambda s: softmax(s.masked_fill(~m.expand_as(s), LOWEST)))(q @ k.mT) @ v,
        lambda q, k, v, m: (lambda s: softmax(s.masked_fill(m.expand_as(s), LOWEST)))(q @ k.mT) @ v,
        MASKED,
        near_reported={"mask": "dense"},
    ),
    "two added masks": Pair(
        lambda q, k, v, p: softmax(q @ k.mT + masked(torch.zeros(8, 8), triangle()) + masked(torch.zeros(()), p)) @ v,
        lambda q, k, v, p: (
            softmax(q @ k.mT + masked(torch.zeros(8, 8), triangle()) - masked(torch.zeros(()), p, -9.0)) @ v
        ),
        (*QKV, PADDED),
    ),
    "clamped, then masked": Pair(
        lambda q, k, v, m: softmax(masked((q @ k.mT).clamp(-2, 2), m, LOWEST)) @ v,
        lambda q, k, v, m: softmax(masked(q @ k.mT, m, LOWEST).clamp(-2, 2)) @ v,
        MASKED,
        reported={"target": "flex"},
        left="clamp",
    ),
    "nan_to_num": Pair(
        lambda q, k, v, m: torch.nan_to_num(softmax(masked(q @ k.mT, m))) @ v,
        lambda q, k, v, m: softmax(torch.nan_to_num(masked(q @ k.mT, m), nan=1.0)) @ v,
        MASKED,
        left="nan_to_num is not a known operation of attention",
    ),
    "nan_to_num of a number": Pair(
        lambda q, k, v, m: torch.nan_to_num(softmax(masked(q @ k.mT, m)), nan=0.0) @ v,
        lambda q, k, v, m: torch.nan_to_num(softmax(masked(q @ k.mT, m)), nan=0.5) @ v,
        MASKED,
        left="nan_to_num is not a known operation of attention",
    ),
    "nan_to_num of the scores": Pair(
        lambda q, k, v, m: softmax(masked(torch.nan_to_num(q @ k.mT, 0.0), m)) @ v,
        lambda q, k, v, m: softmax(torch.nan_to_num(masked(q @ k.mT, m, float("inf")), posinf=3.0)) @ v,
        MASKED,
        left="nan_to_num is not a known operation of attention",
    ),
    "nan_to_num of masked scores": Pair(
        lambda q, k, v, m: softmax(torch.nan_to_num(masked(q @ k.mT, m))) @ v,
        lambda q, k, v, m: softmax(torch.nan_to_num(masked(q @ k.mT, m), neginf=-1.0)) @ v,
        MASKED,
        left="nan_to_num is not a known operation of attention",
    ),
    "where isnan": Pair(
        lambda q, k, v, m: (lambda w: zeroed(w, torch.isnan(w)))(softmax(masked(q @ k.mT, m))) @ v,
        lambda q, k, v, m: (lambda w: zeroed(w, w < 0.1))(softmax(masked(q @ k.mT, m))) @ v,
        MASKED,
        left="changed after the softmax",
    ),
    "fully masked rows by the mask": Pair(
        lambda q, k, v, m: zeroed(softmax(masked(q @ k.mT, m)), ~m.any(-1, keepdim=True)) @ v,
        lambda q, k, v, m: zeroed(softmax(masked(q @ k.mT, m, LOWEST)), ~m.all(-2, keepdim=True)) @ v,
        MASKED,
        left=OTHER_MASK,
    ),
    "a weak fill that is set to zero": Pair(
        lambda q, k, v, m: zeroed(softmax(masked(q @ k.mT, m, -1e4)), ~m) @ v,
        lambda q, k, v, m: zeroed(softmax(masked(q @ k.mT, m, -9.0)), ~m) @ v,
        MASKED,
        reported={"mask": "dense"},
        left=OTHER_MASK,
    ),
    "a weak fill beside another": Pair(
        lambda q, k, v, m: zeroed(softmax(masked(masked(q @ k.mT, triangle(), -INF), m, -1e4)), ~m) @ v,
        lambda q, k, v, m: zeroed(softmax(masked(masked(q @ k.mT, triangle(), -1e4), m, -2e4)), ~m) @ v,
        MASKED,
        left=OTHER_MASK,
    ),
    "fully masked rows by the scores": Pair(
        lambda q, k, v, m: (lambda s: zeroed(softmax(s), (s == -INF).all(-1, keepdim=True)))(masked(q @ k.mT, m)) @ v,
        lambda q, k, v, m: (lambda s: zeroed(softmax(s), (s == -INF).any(-1, keepdim=True)))(masked(q @ k.mT, m)) @ v,
        MASKED,
        reported={"mask": "dense"},
        left="scores are also used by eq",
    ),
    "fully masked rows by a factor": Pair(
        lambda q, k, v, m: (softmax(masked(q @ k.mT, m, LOWEST)) * m.any(-1, keepdim=True)) @ v,
        lambda q, k, v, m: (softmax(masked(q @ k.mT, m, LOWEST)) * m.all(-2, keepdim=True)) @ v,
        MASKED,
        left=OTHER_MASK,
    ),
    "by hand": Pair(
        lambda q, k, v: (lambda s: divided(torch.exp(s - s.max(-1, keepdim=True).values)))(q @ k.mT * 0.25) @ v,
        lambda q, k, v: (lambda s: divided(torch.exp(s - s.max(-2, keepdim=True).values)))(q @ k.mT * 0.25) @ v,
        QKV,
        left="scores are also used by max",
    ),
    "by hand, the sum unsqueezed": Pair(
        lambda q, k, v: (lambda e: e / e.sum(-1).unsqueeze(-1))(torch.exp(q @ k.mT * 0.25)) @ v,
        lambda q, k, v: (lambda e: e / e.sum(-1).unsqueeze(-2))(torch.exp(q @ k.mT * 0.25)) @ v,
        QKV,
        left=NO_SITE,
    ),
    "by hand, exp written twice": Pair(
        lambda q, k, v: (lambda s: torch.exp(s) / torch.exp(s).sum(-1, keepdim=True))(q @ k.mT * 0.25) @ v,
        lambda q, k, v: (lambda s: torch.exp(s) / torch.exp(2 * s).sum(-1, keepdim=True))(q @ k.mT * 0.25) @ v,
        QKV,
        left=NO_SITE,
    ),
    "by hand, the maximum unsqueezed": Pair(
        lambda q, k, v: (lambda s: divided(torch.exp(s - s.max(-1)[0].unsqueeze(-1))))(q @ k.mT * 0.25) @ v,
        lambda q, k, v: (lambda s: divided(torch.exp(s - s.max(-1)[0].unsqueeze(-2))))(q @ k.mT * 0.25) @ v,
        QKV,
        left="scores are also used by max",
    ),
    "by hand, the sum kept": Pair(
        lambda q, k, v: divided(torch.exp(q @ k.mT * 0.25)) @ v,
        lambda q, k, v: divided(torch.exp(q @ k.mT * 0.25), keepdim=False) @ v,
        SMALL,
        left=NO_SITE,
    ),
    "by hand, four sizes alike": Pair(
        lambda q, k, v: divided(torch.exp(q @ k.mT * 0.25)) @ v,
        lambda q, k, v: divided(torch.exp(q @ k.mT * 0.25), keepdim=False) @ v,
        FOURS,
        left=NO_SITE,
    ),
    "by hand, the sum alone": Pair(
        lambda q, k, v: (lambda e: e / e.sum(-1, keepdim=True))(torch.exp(q @ k.mT * 0.25)) @ v,
        lambda q, k, v: (lambda e: e / (e.sum(-1, keepdim=True) - 0.5))(torch.exp(q @ k.mT * 0.25)) @ v,
        QKV,
        left=NO_SITE,
    ),
    "unused mean weights": Pair(
        lambda q, k, v: (lambda w: (w @ v, w.sum(1) / 2)[0])(softmax(q @ k.mT * 0.25)),
        lambda q, k, v: (lambda w: w @ v + (w.sum(1) / 2).mean())(softmax(q @ k.mT * 0.25)),
        QKV,
    ),
    "transposed": Pair(
        lambda q, k, v: (k @ q.mT * 0.25).softmax(-2).mT @ v,
        lambda q, k, v: (k @ q.mT * 0.25).softmax(-1).mT @ v,
        QKV,
        left="the softmax runs over another dimension",
    ),
    "transposed, by hand": Pair(
        lambda q, k, v: divided(torch.exp(k @ q.mT * 0.25), -2).mT @ v,
        lambda q, k, v: divided(torch.exp(k @ q.mT * 0.25), -1).mT @ v,
        QKV,
        left="the softmax runs over another dimension",
    ),
}


@pairs(SOFTMAXES)
def test_softmaxes(pair: Pair, near: bool) -> None:
    check(pair, near)


# ---------------------------------------------------------------- what is done to queries and keys

ROTATED = (*QKV, torch.arange(8))
LATENT = (
    randn(2, 2, 5, 16, seed=1), randn(2, 2, 5, 8, seed=2), randn(2, 2, 7, 16, seed=3), randn(2, 7, 8, seed=4),
    randn(2, 2, 7, 12, seed=5),
)  # fmt: skip
ABSORBED = (randn(2, 5, 3, 16, seed=1), randn(2, 5, 3, 8, seed=2), randn(2, 7, 16, seed=3), randn(2, 7, 8, seed=4))


def rms_norm(x: Tensor, weight: Tensor, dim: int = -1) -> Tensor:
    wide = x.float()
    return (weight * wide * torch.rsqrt(wide.pow(2).mean(dim, keepdim=True) + 1e-6)).to(x.dtype)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of transformers: the second half turned to the front."""
    frequencies = 1.0 / (10000 ** (torch.arange(0, 16, 2).float() / 16))
    angles = positions[:, None].float() * frequencies[None, :]
    cos, sin = (torch.cat([t, t], -1)[None, None].to(x.dtype) for t in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def rotate_complex(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of Llama's own code: pairs of numbers as one complex number."""
    frequencies = 1.0 / (10000 ** (torch.arange(0, 16, 2).float() / 16))
    turned = torch.polar(torch.ones(8, 8), positions[:, None].float() * frequencies)
    return torch.view_as_real(torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * turned).flatten(-2).type_as(x)


def latent(q: Tensor, q_rope: Tensor, k: Tensor, k_rope: Tensor, v: Tensor, in_front: bool = False) -> Tensor:
    """Multi-head latent attention: part of the key is one for all heads, and values are narrower."""
    k_rope = k_rope[:, None].expand(-1, k.shape[1], -1, -1)
    keys = torch.cat([k_rope, k] if in_front else [k, k_rope], -1)
    return attend(torch.cat([q, q_rope], -1), keys, v, 24**-0.5)


def absorbed(q: Tensor, q_rope: Tensor, kv: Tensor, k_rope: Tensor, dim: int = -1) -> Tensor:
    """The same with the projections absorbed, as DeepSeek decodes: two products are one score."""
    scores = torch.einsum("bshc,btc->bsht", q, kv) + torch.einsum("bshr,btr->bsht", q_rope, k_rope)
    return torch.einsum("bsht,btc->bshc", torch.softmax(scores * 24**-0.5, dim), kv)


CHANGED = {
    "RMSNorm of queries and keys": Pair(
        lambda q, k, v, w: attend(rms_norm(q, w), rms_norm(k, w), v),
        lambda q, k, v, w: softmax(rms_norm(q @ k.mT, w[:8])) @ v,
        (*QKV, randn(16, seed=4).abs() + 0.5),
        left="scores are also used by pow",
    ),
    "normalised queries and keys": Pair(
        lambda q, k, v: attend(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, 10.0),
        lambda q, k, v: attend(F.normalize(q, dim=-1), F.normalize(k, dim=-2), v, 10.0),
        QKV,
    ),
    "rotary": Pair(
        lambda q, k, v, p: attend(rotate(q, p), rotate(k, p), v),
        lambda q, k, v, p: attend(rotate(q, p), rotate(k, p + 1), v),
        ROTATED,
    ),
    "rotary, complex": Pair(
        lambda q, k, v, p: attend(rotate_complex(q, p), rotate_complex(k, p), v),
        lambda q, k, v, p: attend(rotate_complex(q, p), rotate_complex(k, p), rotate_complex(v, p)),
        ROTATED,
    ),
    "latent": Pair(latent, lambda *x: latent(*x, in_front=True), LATENT),
    "latent, absorbed": Pair(
        absorbed, lambda *x: absorbed(*x, dim=1), ABSORBED, left="does not sum over the whole softmax"
    ),
}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pairs(CHANGED)
def test_changed_queries_and_keys(pair: Pair, near: bool, grad: bool) -> None:
    wanting = tuple(x.clone().requires_grad_() if grad and x.is_floating_point() else x for x in pair.inputs)
    check(replace(pair, inputs=wanting, grad=grad), near)


LENGTHS = [(1, 1), (1, 13), (13, 1), (7, 13), (31, 17), (1, 127)]


@pytest.mark.parametrize("q_len, kv_len", LENGTHS)
def test_lengths(q_len: int, kv_len: int) -> None:
    """Cross-attention of odd lengths with a padding of the keys; top-left causal is none of bottom-right."""
    padding = torch.arange(kv_len) < torch.tensor([kv_len, max(1, kv_len - 2)])[:, None]

    def program(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
        corner = torch.ones(q_len, kv_len, dtype=torch.bool)
        return (
            attend(q, k, v),
            softmax(masked(q @ k.mT * 0.25, keep[:, None, None], LOWEST)) @ v,
            softmax(masked(q @ k.mT * 0.25, corner.tril())) @ v,
            softmax(masked(q @ k.mT * 0.25, corner.tril(kv_len - q_len), LOWEST)) @ v,
        )

    inputs = qkv(heads=3, q_len=q_len, kv_len=kv_len, dim=24, value_dim=10, grad=True)
    same(program, *inputs, padding, grad=True, rewritten=4)
