"""Attention inside torch's own modules and in bodies of higher-order operators, each with a look-alike."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_eager import qkv, randn, same
from neighbours import LOWEST, NO_SITE, Pair, check, pairs, softmax
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_each
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

import attn_pass

Change = Callable[..., Any]

# ---------------------------------------------------------------- torch's own modules

UPPER = nn.Transformer.generate_square_subsequent_mask(6)
PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
X, MEMORY = randn(2, 6, 32, seed=1), randn(2, 5, 32, seed=2)


def built(kind: type[nn.Module], **more: Any) -> nn.Module:
    torch.manual_seed(0)
    if kind is not nn.MultiheadAttention:
        more = {"dim_feedforward": 64, **more}
    return kind(32, 4, dropout=0.0, batch_first=True, **more)


class Called(nn.Module):
    def __init__(self, inner: nn.Module, call: Change) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, *inputs: Tensor) -> Any:
        return self.call(self.inner, *inputs)


def upper(x: Tensor) -> Tensor:
    return UPPER.to(x.dtype)


STAY = re.compile("the attention weights are (requested|also used).*, and stay")
MHA, ENCODER, DECODER = nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer
MODULES: dict[str, tuple[type[nn.Module], dict[str, Any], Change, list[str]]] = {
    "weights thrown away": (MHA, {}, lambda m, x, y: m(x, y, y)[0], ["rewritten"]),
    "weights used": (MHA, {}, lambda m, x, y: m(x, y, y), ["rewritten"]),
    "weights of each head used": (MHA, {}, lambda m, x, y: m(x, y, y, average_attn_weights=False), ["rewritten"]),
    "weights not asked for": (MHA, {}, lambda m, x, y: m(x, y, y, need_weights=False)[0], ["rewritten"]),
    "weights thrown away, causal": (MHA, {}, lambda m, x, y: m(x, x, x, attn_mask=upper(x))[0], ["rewritten"]),
    "weights used once": (MHA, {}, lambda m, x, y: (lambda o, w: o * w.sum())(*m(x, y, y)), ["rewritten"]),
    "encoder": (ENCODER, {}, lambda m, x, y: m(x, src_key_padding_mask=PADDING), ["rewritten"]),
    "encoder, norm first": (ENCODER, {"norm_first": True}, lambda m, x, y: m(x, src_mask=upper(x)), ["rewritten"]),
    "decoder": (DECODER, {}, lambda m, x, y: m(x, y, tgt_mask=upper(x)), ["rewritten", "rewritten"]),
    "decoder, norm first": (DECODER, {"norm_first": True}, lambda m, x, y: m(x, y), ["rewritten", "rewritten"]),
}


@pytest.mark.parametrize("mode", ["training", "evaluation", "inference"])
@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str, mode: str) -> None:
    kind, options, call, outcomes = MODULES[name]
    module = Called(built(kind, **options), call).train(mode == "training")
    grad = mode != "inference"
    with torch.set_grad_enabled(grad):
        report = same(module, *(x.clone().requires_grad_(grad) for x in (X, MEMORY)), grad=grad, twice=3.0)
    assert [s.outcome for s in report.sites] == outcomes, [(s.form, s.reason) for s in report.sites]
    assert all(bool(STAY.search(s.reason)) == (" used" in name) for s in report.sites), [s.reason for s in report.sites]


@pytest.mark.parametrize("decompose", [False, True], ids=["exported", "decomposed"])
@pytest.mark.parametrize("name", MODULES)
def test_exported_modules(name: str, decompose: bool) -> None:
    """Torch takes them apart then: weights stay only where they are used."""
    kind, options, call, outcomes = MODULES[name]
    module = Called(built(kind, **options), call).train()
    with torch.no_grad():
        program = torch.export.export(module, (X, MEMORY))
        if decompose:
            program = program.run_decompositions()
        report = attn_pass.rewrite(program, choose="fused", on_error="raise")
        got, want = program.module()(X, MEMORY), module(X, MEMORY)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert [s.outcome for s in report.sites] == outcomes, [s.reason for s in report.sites]
    assert all(bool(STAY.search(s.reason)) == (" used" in name) for s in report.sites), [s.reason for s in report.sites]


# ---------------------------------------------------------------- bodies


def over(dim: int) -> Change:
    """Attention if ``dim`` is the last; no ``.mT``, which torch 2.13 does not take in bodies."""
    return lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2) * 0.25, dim) @ v


attention, wrong_axis = over(-1), over(-2)


def branches(positive: Change, negative: Change) -> Change:
    return lambda q, k, v: torch.cond(q.sum() > 0, positive, negative, (q, k, v))


def attention_of(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return softmax((q @ k.transpose(-1, -2) * 0.25).masked_fill(~keep, LOWEST)) @ v


def repeated(*diagonals: int) -> Change:
    """One body for each call, as a stack of layers is compiled; bound to its caller's mask if there is one call."""
    layer = torch.compiler.nested_compile_region(attention_of)

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for diagonal in diagonals:
            q = layer(q, k, v, torch.ones(8, 8, dtype=torch.bool).tril(diagonal))
        return q

    return program


def mapped(body: Change) -> Change:
    return lambda q, k, v: map_each(lambda x, k, v: body(x, k, v), q, k[0], v[0])


def scanned(body: Change) -> Change:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return scan(lambda total, x: (total + body(x, k[0], v[0]), total + 0), torch.zeros_like(q[0]), q)

    return program


def looped(body: Change) -> Change:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return while_loop(lambda n, x: n < 3, lambda n, x: (n + 1, body(x, k, v)), (torch.tensor(0), q + 0))[1]

    return program


TRAINED = qkv(grad=True)
OTHER_AXIS = "the softmax runs over another dimension"
BODIES = {
    **{
        name: Pair(within(attention), within(wrong_axis), qkv(), reported={"target": "sdpa"}, left=OTHER_AXIS)
        for name, within in {"map": mapped, "scan": scanned, "a loop": looped}.items()
    },
    "a checkpoint": Pair(
        lambda q, k, v: checkpoint(attention, q, k, v, use_reentrant=False),
        lambda q, k, v: checkpoint(wrong_axis, q, k, v, use_reentrant=False),
        TRAINED,
        grad=True,
        left=OTHER_AXIS,
    ),
    "a checkpoint of the scores": Pair(
        lambda q, k, v: checkpoint(attention, q, k, v, use_reentrant=False),
        lambda q, k, v: softmax(checkpoint(lambda q, k: q @ k.mT, q, k, use_reentrant=False)) @ v,
        TRAINED,
        grad=True,
        left=NO_SITE,
    ),
    "a region": Pair(
        repeated(0),
        repeated(0, 2),
        qkv(),
        reported={"mask": "causal", "count": 1},
        near_reported={"mask": "dense", "count": 2},
    ),
    "a region, called twice": Pair(
        repeated(0, 0), repeated(0, 2), qkv(), reported={"count": 2}, near_reported={"mask": "dense", "count": 2}
    ),
}


@pairs(BODIES)
def test_bodies(pair: Pair, near: bool) -> None:
    check(pair, near)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
def test_of_two_branches_one_is_attention(sign: int, swapped: bool) -> None:
    """Whichever is taken, each is what it was."""
    chosen = (wrong_axis, attention) if swapped else (attention, wrong_axis)
    report = same(branches(*chosen), *(sign * x.abs() + 0.1 * x for x in qkv()), rewritten=1)
    assert "another dimension" in report.left[0].reason
