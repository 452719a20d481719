"""Variants of masks and scores, each as users write it by hand: `python -m bench variants [--json FILE] [--quick]`.

Beside stock and the pass, the form a specialist writes today: FlexAttention with its block mask made once, or a call.
The list is that of FlexAttention's and Flashlight's papers, with what transformers and T5 do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attn_pass.measuring.timing import compiled
from bench.harness.programs import Built, Function, Program, Setting, Tensors, normal
from bench.suites.spellings import Keep, below, near, same

TITLE = "Masks and score functions"
HEADS, LENGTH, DIM = 8, 2048, 64
NEG_INF = float("-inf")
SCALE = DIM**-0.5


# ---------------------------------------------------------------- as users write them


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / math.sqrt(q.size(-1))


def _masked(keep: Keep, score: Callable[[Tensor], Tensor] = lambda x: x) -> Callable[..., Tensor]:
    """Attention by hand with the positions that are kept, and a function of the scores before."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = score(_scores(q, k))
        i, j = (torch.arange(n, device=scores.device) for n in scores.shape[-2:])
        ahead = k.size(-2) - q.size(-2)
        kept = keep(i[:, None] + ahead if ahead else i[:, None], j[None, :])
        return torch.softmax(scores.masked_fill(~kept, NEG_INF), -1) @ v

    return attend


def early(i: Any, j: Any) -> Any:
    return (j <= i) | (j < 512)


def capped(score: Any) -> Any:
    return 30.0 * torch.tanh(score / 30.0)


causal = _masked(below)


def full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(_scores(q, k), -1) @ v


def lowest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As transformers writes causal attention: the mask of lowest numbers added, softmax in float32."""
    lowest_number = torch.finfo(torch.float32).min
    mask = torch.full((q.size(-2), k.size(-2)), lowest_number, dtype=q.dtype, device=q.device).triu(1)
    weights = torch.matmul(q, k.transpose(2, 3)) * SCALE + mask[None, None].expand(q.size(0), 1, -1, -1)
    weights = torch.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(F.dropout(weights, p=0.0, training=False), v).transpose(1, 2).contiguous()


def document(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    i, j = (torch.arange(n, device=q.device) for n in (q.size(-2), k.size(-2)))
    keep = (ids[:, None, :, None] == ids[:, None, None, :]) & (j[None, :] <= i[:, None])
    return torch.softmax(_scores(q, k).masked_fill(~keep, NEG_INF), -1) @ v


def _slopes(heads: int, like: Tensor) -> Tensor:
    return 2.0 ** -torch.arange(1, heads + 1, dtype=like.dtype, device=like.device)


def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = (torch.arange(n, device=q.device) for n in (q.size(-2), k.size(-2)))
    distance = j[None, :] - i[:, None]
    scores = _scores(q, k) + _slopes(q.size(1), q)[:, None, None] * distance
    return torch.softmax(scores.masked_fill(distance > 0, NEG_INF), -1) @ v


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    groups = q.size(1) // k.size(1)
    k, v = (x[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for x in (k, v))
    return causal(q, k, v)


def relative(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """T5's: a bias looked up by a logarithmic bucket of the distance."""
    return torch.softmax(q @ k.mT + relative_bias(q.size(-2), k.size(-2), table), -1) @ v


def relative_bias(q_len: int, kv_len: int, table: Tensor) -> Tensor:
    """(1, H, L, S), of a table (32, H)."""
    distance = torch.arange(kv_len, device=table.device) - torch.arange(q_len, device=table.device)[:, None]
    bucket = (distance > 0).long() * 16
    distance = distance.abs()
    large = 8 + (torch.log(distance.float().clamp(min=1) / 8) / math.log(128 / 8) * 8).long()
    bucket = bucket + torch.where(distance < 8, distance, large.clamp(max=15))
    return F.embedding(bucket, table).permute(2, 0, 1)[None]


def head_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(_scores(q, k) + bias, -1) @ v


def differential(q: Tensor, k: Tensor, v: Tensor, q2: Tensor, k2: Tensor) -> Tensor:
    """Differential Transformer: the difference of two attentions."""
    return full(q, k, v) - 0.3 * full(q2, k2, v)


def differential_weights(q: Tensor, k: Tensor, v: Tensor, q2: Tensor, k2: Tensor) -> Tensor:
    """As its authors write it: the difference is one of the weights, and the mask causal."""
    visible = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).tril()
    first, second = (
        torch.softmax(_scores(*each).masked_fill(~visible, float("-inf")), -1) for each in ((q, k), (q2, k2))
    )
    return (first - 0.3 * second) @ v


def pair_biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, gate: Tensor) -> Tensor:
    """Evoformer's row attention: rank 5, a bias over pairs of residues, a gate."""
    return torch.sigmoid(gate) * (torch.softmax(_scores(q, k) + bias[:, None], -1) @ v)


# ---------------------------------------------------------------- inputs


def _qkv(q_len: int, kv_len: int, kv_heads: int = HEADS) -> Tensors:
    keys = (1, kv_heads, kv_len, DIM)
    return normal(q_len, (1, HEADS, q_len, DIM), keys, keys)


def _with(*more: Callable[[int], tuple[int, ...]]) -> Callable[[int], Tensors]:
    """Query, key and value of a length, and random tensors of these shapes."""
    return lambda n: (*_qkv(n, n), *normal(1, *(shape(n) for shape in more)))


def _last(n: int) -> Tensors:
    return _qkv(64, n + 64)


_plain = _with()


def _pairs(n: int) -> Tensors:
    rows, length, dim = 16, n // 8, 32
    operand = (1, rows, HEADS, length, dim)
    return normal(n, operand, operand, operand, (1, HEADS, length, length), operand)


# ---------------------------------------------------------------- as a specialist writes them


def _flex(keep: Keep, score: Any, n: int, device: str) -> nn.Module:
    mask = create_block_mask(lambda b, h, i, j: keep(i, j), None, None, n, n, device=device)
    return Function(lambda q, k, v, *more: flex_attention(q, k, v, score_mod=score, block_mask=mask))


def _capped(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return capped(score)


def _sloped(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score + torch.exp2(-(h + 1.0)) * (j - i)


def _call(n: int, device: str, **settings: Any) -> nn.Module:
    return Function(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **settings))


def _call_with(mask: Callable[[Tensor, Tensor], Tensor], n: int, device: str) -> nn.Module:
    """A call with a mask made once: of positions, what is kept, or what is added."""
    i, j = torch.arange(n, device=device)[:, None], torch.arange(n, device=device)
    made = mask(i, j)
    return Function(lambda q, k, v, *more: F.scaled_dot_product_attention(q, k, v, attn_mask=made))


def _alibi_matrix(i: Tensor, j: Tensor) -> Tensor:
    slopes = 2.0 ** -torch.arange(1, HEADS + 1, device=i.device)
    return (slopes[:, None, None] * (j - i)).masked_fill(j > i, NEG_INF)[None]


def _any_length(attend: Callable[..., Tensor]) -> Callable[[int, str], nn.Module]:
    """Of a function that makes nothing beforehand."""
    return lambda n, device: Function(attend)


def _buckets(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """The matrix of T5's bias is made of the table, which is an input; the rest is a call."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=relative_bias(q.size(-2), k.size(-2), table), scale=1.0)


def _last_keys(n: int, device: str) -> nn.Module:
    keep = torch.ones(64, n + 64, dtype=torch.bool, device=device).tril(n)
    return Function(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=keep))


def _heads_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _two_calls(q: Tensor, k: Tensor, v: Tensor, q2: Tensor, k2: Tensor, is_causal: bool = False) -> Tensor:
    first, second = (F.scaled_dot_product_attention(*each, v, is_causal=is_causal) for each in ((q, k), (q2, k2)))
    return first - 0.3 * second


def _folded(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, gate: Tensor) -> Tensor:
    out = F.scaled_dot_product_attention(*(x.flatten(0, 1) for x in (q, k, v)), attn_mask=bias)
    return torch.sigmoid(gate) * out.unflatten(0, q.shape[:2])


# ---------------------------------------------------------------- the list


@dataclass(frozen=True)
class Variant:
    """A program, its inputs for a length, the specialist's form, and the share of the scores the mask keeps.

    ``dense``: where the form is FlexAttention, what the same would be as a call with a mask made once.
    """

    name: str
    run: Callable[..., Tensor]
    inputs: Callable[[int], Tensors]
    by_hand: Callable[[int, str], nn.Module] | None
    hand: str = "FlexAttention"
    kept: float = 1.0
    dense: Callable[[Tensor, Tensor], Tensor] | None = None


HALF = (LENGTH + 1) / (2 * LENGTH)
VARIANTS: Sequence[Variant] = (
    Variant("full", full, _plain, _call, "call"),
    Variant("causal", causal, _plain, partial(_call, is_causal=True), "call, is_causal", HALF),
    Variant("causal as in transformers, finfo.min", lowest, _plain, _any_length(_heads_last), "call, is_causal", HALF),
    Variant("causal to the last key, 64 queries", causal, _last, _last_keys, "call with a mask", 1 - 1 / 66),
    Variant("sliding window 256", _masked(near), _plain, partial(_flex, near, None), kept=0.117, dense=near),
    Variant("prefix of 512", _masked(early), _plain, partial(_flex, early, None), kept=0.53, dense=early),
    Variant(
        "documents of 300, causal",
        document,
        lambda n: (*_qkv(n, n), torch.arange(n)[None] // 300),
        partial(_flex, same, None),
        kept=0.072,
        dense=same,
    ),
    Variant("soft cap, causal", _masked(below, capped), _plain, partial(_flex, below, _capped), kept=HALF),
    Variant("ALiBi, causal", alibi, _plain, partial(_flex, below, _sloped), kept=HALF, dense=_alibi_matrix),
    Variant(
        "grouped heads 8/2, causal",
        grouped,
        lambda n: _qkv(n, n, HEADS // 4),
        partial(_call, is_causal=True, enable_gqa=True),
        "call, is_causal, enable_gqa",
        HALF,
    ),
    Variant("T5's relative bias", relative, _with(lambda n: (32, HEADS)), _any_length(_buckets), "call with the bias"),
    Variant(
        "bias a head",
        head_bias,
        _with(lambda n: (1, HEADS, n, n)),
        _any_length(F.scaled_dot_product_attention),
        "call with a mask",
    ),
    Variant(
        "differential attention",
        differential,
        lambda n: (*_qkv(n, n), *_qkv(n, n)[:2]),
        _any_length(_two_calls),
        "two calls",
    ),
    Variant(
        "differential attention by its weights, causal",
        differential_weights,
        lambda n: (*_qkv(n, n), *_qkv(n, n)[:2]),
        _any_length(partial(_two_calls, is_causal=True)),
        "two calls, is_causal",
        HALF,
    ),
    Variant("Evoformer, rank 5", pair_biased, _pairs, _any_length(_folded), "call, folded"),
)
QUICK = ("causal", "documents of 300, causal")


def _make(variant: Variant, length: int, device: str) -> Built:
    return Function(variant.run), tuple(x.to(device) for x in variant.inputs(length))


DENSE = "compile, by hand: a call with a mask"


def _dense(
    mask: Callable[[Tensor, Tensor], Tensor], n: int, module: nn.Module, inputs: Tensors, folder: Path
) -> Callable[..., Any]:
    return compiled(_call_with(mask, n, inputs[0].device.type))


def programs(setting: Setting) -> list[Program]:
    """Float32, (1, 8, 2048, 64) unless the name says otherwise."""
    return [
        Program(
            variant.name,
            partial(_make, variant, LENGTH),
            None if variant.by_hand is None else partial(variant.by_hand, LENGTH),
            variant.hand,
            kept=variant.kept,
            tolerance=2e-5,
            extra={} if variant.dense is None else {DENSE: partial(_dense, variant.dense, LENGTH)},
        )
        for variant in VARIANTS
        if not setting.quick or variant.name in QUICK
    ]
