"""Gradients through `torch.compile` with the pass: every input that had one gets the same one, and no other does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import NEG_INF, qkv, randn, same
from small_programs import attend, softmax, table, tril
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attn_pass

Program = Callable[..., Any]


# ---- what has a gradient ----

FORMS: dict[str, Program] = {
    "written out": attend,
    "call": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    "causal call": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "causal": lambda q, k, v: softmax((q @ k.mT).masked_fill(~tril(8, 8), NEG_INF)) @ v,
    "scale in the operands": lambda q, k, v: softmax((q * 0.5) @ (k * 0.3).mT) @ v,
    "einsum": lambda q, k, v: torch.einsum("bhij,bhjd->bihd", softmax(torch.einsum("bhid,bhjd->bhij", q, k)), v),
    "products of three dimensions": lambda q, k, v: softmax(q.flatten(0, 1) @ k.flatten(0, 1).mT) @ v.flatten(0, 1),
    "by hand": lambda q, k, v: _by_hand(q @ k.mT) @ v,
    "keys of the first batch row": lambda q, k, v: attend(q, k[:1], v[:1]),
    "keys of one head": lambda q, k, v: attend(q, k[:, :1], v[:, :1]),
    "narrow values": lambda q, k, v: attend(q, k, v[..., :4]),
    "wide values": lambda q, k, v: attend(q[..., :4], k[..., :4], v),
    "one tensor": lambda q, k, v: attend(q, q, q),
    "keys as values": lambda q, k, v: attend(q, k, k),
    "two share their keys": lambda q, k, v: (attend(q, k, v), attend(q + 1, k, v * 2)),
    "one after the other": lambda q, k, v: attend(attend(q, k, v), k, attend(k, q, v)),
    "dropout of nothing": lambda q, k, v: F.dropout(softmax(q @ k.mT), 0.0) @ v,
}


def _by_hand(scores: Tensor) -> Tensor:
    exp = torch.exp(scores - scores.amax(-1, keepdim=True).detach())
    return exp / exp.sum(-1, keepdim=True)


@table(FORMS)
def test_gradients_of_query_key_and_value(row: Program) -> None:
    report = same(row, *qkv(grad=True), grad=True)
    assert not report.left


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_gradients_in_other_dtypes(dtype: torch.dtype) -> None:
    same(attend, *qkv(dtype=dtype, grad=True), grad=True, rewritten=1, twice=3.0)


@pytest.mark.parametrize("wanting", range(1, 8))
def test_only_what_wants_a_gradient_gets_one(wanting: int) -> None:
    inputs = [t.requires_grad_(bool(wanting & (1 << n))) for n, t in enumerate(qkv())]
    same(attend, *inputs, grad=True, rewritten=1)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_gradients_of_grouped_heads_are_summed(kv_heads: int) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Any:
        keys, values = (t.repeat_interleave(4 // kv_heads, 1) for t in (k, v))
        return attend(q, keys, values), F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    same(program, *qkv(heads=4, kv_heads=kv_heads, q_len=3, grad=True), grad=True, rewritten=2)


def test_gradients_of_keys_shared_over_the_batch_are_summed() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k.expand(4, -1, -1, -1), v.expand(4, -1, -1, -1))

    q, (_, k, v) = qkv(batch=4, grad=True)[0], qkv(batch=1, grad=True)
    same(program, q, k, v, grad=True, rewritten=1)


TEMPERATURES = {"0-d": (), "(1,)": (1,), "head": (2, 1, 1), "row": (8, 1), "batch": (2, 1, 1, 1)}


@table(TEMPERATURES)
def test_a_learned_temperature(row: tuple[int, ...]) -> None:
    temperature = (randn(*(row or (1,))).abs() + 0.5).detach().reshape(row).requires_grad_()

    def program(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Any:
        return softmax(q @ k.mT * t * 0.25) @ v, softmax(q @ k.mT * 0.25 / t) @ v

    same(program, *qkv(grad=True), temperature, grad=True, rewritten=2, twice=8.0)


@pytest.mark.parametrize("shape", [(8,), (8, 8), (2, 1, 8), (2, 8, 8), (2, 1, 1, 8), (2, 2, 8, 8), (2, 1, 1)], ids=str)
def test_a_learned_bias(shape: tuple[int, ...]) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
        return softmax(q @ k.mT + bias) @ v, F.scaled_dot_product_attention(q, k, v, bias.expand(2, 2, 8, 8))

    same(program, *qkv(grad=True), randn(*shape, grad=True), grad=True)


def test_a_relative_position_table() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, weights: Tensor) -> Tensor:
        distance = torch.arange(8)[None] - torch.arange(8)[:, None] + 7
        return softmax(q @ k.mT + weights[distance].permute(2, 0, 1)) @ v

    same(program, *qkv(grad=True), randn(15, 2, grad=True), grad=True)


def test_learned_slopes() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        return softmax(q @ k.mT + slopes * torch.arange(-7.0, 1.0)) @ v

    same(program, *qkv(grad=True), randn(2, 1, 1, grad=True), grad=True)


# ---- what has none ----


def keys_without_gradient(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    with torch.no_grad():
        k = k.transpose(-1, -2)
    return softmax(q @ k) @ v


def query_scaled_without_gradient(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    with torch.no_grad():
        q = q * t
    return softmax(q @ k.mT) @ v


def values_copied_without_gradient(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    with torch.no_grad():
        v = v.transpose(1, 2).contiguous().transpose(1, 2)
    return softmax(q @ k.mT) @ v


def bias_without_gradient(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    with torch.no_grad():
        bias = (t * torch.arange(8.0)).clone()
    return softmax(q @ k.mT + bias) @ v


def scores_without_gradient(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    with torch.no_grad():
        scores = q @ k.mT
    return softmax(scores) @ v


def weights_without_gradient(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    with torch.no_grad():
        weights = softmax(q @ k.mT)
    return weights @ v


def nothing_with_gradient(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    with torch.no_grad():
        out = softmax(q @ k.mT) @ v
    return out + q


def gradient_turned_on_again(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    with torch.no_grad(), torch.enable_grad():
        return softmax(q @ k.mT) @ v


def scores_detached(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return softmax((q @ k.mT).detach()) @ v


def weights_detached(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return softmax(q @ k.mT).detach() @ v


def keys_and_values_detached(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return softmax(q @ k.detach().mT) @ v.data


def temperature_detached(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return softmax(q @ k.mT * t.detach()) @ v


def maximum_not_detached(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    scores = q @ k.mT
    exp = torch.exp(scores - scores.amax(-1, keepdim=True))
    return exp / exp.sum(-1, keepdim=True) @ v


STOPPED: tuple[Program, ...] = (
    keys_without_gradient,
    query_scaled_without_gradient,
    values_copied_without_gradient,
    bias_without_gradient,
    scores_without_gradient,
    weights_without_gradient,
    nothing_with_gradient,
    gradient_turned_on_again,
    scores_detached,
    weights_detached,
    keys_and_values_detached,
    temperature_detached,
    maximum_not_detached,
)


@pytest.mark.parametrize("program", STOPPED)
def test_a_stopped_gradient_stays_stopped(program: Program) -> None:
    same(program, *qkv(grad=True), randn(1, grad=True), grad=True)


# ---- fully masked rows ----

LOWEST = torch.finfo(torch.float32).min

EMPTY_ROWS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "filled": lambda scores, keep, fill: scores.masked_fill(~keep, fill),
    "where": lambda scores, keep, fill: torch.where(keep, scores, fill),
    "added": lambda scores, keep, fill: scores + torch.zeros(keep.shape, dtype=scores.dtype).masked_fill(~keep, fill),
    "added, one minus": lambda scores, keep, fill: scores + (1 - keep.to(scores.dtype)) * fill,
    "filled, biased": lambda scores, keep, fill: scores.masked_fill(~keep, fill) + 1.0,
    "biased, filled": lambda scores, keep, fill: (scores + torch.arange(8)).masked_fill(~keep, fill),
}


@pytest.mark.parametrize("fill", [LOWEST, LOWEST / 2, -1e30])
@table(EMPTY_ROWS)
def test_gradients_of_rows_without_a_key(row: Callable[[Tensor, Tensor, float], Tensor], fill: float) -> None:
    keep = randn(2, 1, 8, 8, seed=5) > -0.3
    keep[0, 0, 3] = False

    def program(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return softmax(row(q @ k.mT * 0.25, keep, fill)) @ v

    same(program, *qkv(grad=True), keep, grad=True, rewritten=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fill", ["added", "filled"])
def test_gradients_of_rows_without_a_key_of_grouped_heads(fill: str, dtype: torch.dtype) -> None:
    keep = randn(2, 1, 8, 8, seed=5) > -0.3
    keep[0, 0, 3] = False

    def program(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        k, v = (x[:, :1].expand(-1, q.shape[1], -1, -1) for x in (k, v))
        scores = EMPTY_ROWS[fill](q @ k.mT * -0.25, keep, torch.finfo(q.dtype).min)
        return softmax(scores) @ v

    same(program, *qkv(dtype=dtype, grad=True), keep, grad=True, rewritten=1, twice=3.0)


@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_of_rows_without_a_key_among_sizes_that_change(dynamic: bool) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return softmax(q @ k.mT * 0.25 + mask) @ v

    for rows, keys in ((5, 7), (1, 9)):
        mask = torch.zeros(2, 1, rows, keys)
        mask[1, 0, 0] = LOWEST
        q, k, v = randn(2, 3, rows, 8, grad=True), randn(2, 3, keys, 8, grad=True), randn(2, 3, keys, 8, grad=True)
        same(program, q, k, v, mask, grad=True, rewritten=1, dynamic=dynamic)


def test_gradients_of_rows_that_two_matrices_empty() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return softmax(q @ k.mT * 0.25 + first + second) @ v

    first, second = torch.zeros(8, 8), torch.zeros(8, 8)
    first[3, :4], second[3, 4:], second[3, :4] = LOWEST, LOWEST, LOWEST
    report = same(program, *qkv(grad=True), first, second, grad=True, rewritten=1)
    assert report.sites[0].target == "recompute"


def test_gradients_of_rows_without_a_key_in_a_call_of_three_dimensions() -> None:
    mask = torch.zeros(8, 8).masked_fill(~tril(8, 8, 2), LOWEST)
    mask[3] = LOWEST

    def program(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q[0], k[0], v[0], mask)

    # Torch 2.14 sends three dimensions to its fused kernel as well, whose gradient is wrong in such a row.
    def by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return softmax(q[0] @ k[0].mT * 0.25 + mask) @ v[0]

    same(program, *qkv(grad=True), mask, grad=True, reference=by_hand)


@table(EMPTY_ROWS)
def test_gradients_where_every_row_keeps_a_key(row: Callable[[Tensor, Tensor, float], Tensor]) -> None:
    keep = (randn(2, 1, 8, 8, seed=5) > -0.3) | torch.eye(8, dtype=torch.bool)

    def program(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return softmax(row(q @ k.mT * 0.25, keep, NEG_INF if row is not EMPTY_ROWS["added, one minus"] else -1e30)) @ v

    same(program, *qkv(grad=True), keep, grad=True, assume_nonempty_rows=True)


# ---- dropout ----


@pytest.mark.parametrize(
    "program",
    [
        lambda q, k, v: F.dropout(softmax(q @ k.mT), 0.3) @ v,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.3),
        lambda q, k, v: softmax(F.dropout(q @ k.mT, 0.3)) @ v,
        lambda q, k, v: F.dropout(F.dropout(softmax(q @ k.mT), 0.1), 0.1) @ v,
    ],
    ids=["weights", "call", "scores", "twice"],
)
def test_dropout_is_left(program: Program) -> None:
    torch._dynamo.reset()
    with attn_pass.record() as report:
        torch.compile(program, backend=attn_pass.wrap("aot_eager", choose="fused", on_error="raise"))(*qkv(grad=True))
    assert not report.rewritten
    assert "dropout" in report.left[0].reason


class Dropping(nn.Module):
    """Its rate is a number of the module, which Dynamo makes a symbol where everything is dynamic."""

    def __init__(self, rate: float, rates: int = 1) -> None:
        super().__init__()
        self.drop, self.rates = nn.Dropout(rate), rates

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = softmax(q @ k.mT)
        for _ in range(self.rates):
            weights = self.drop(weights)
        return weights @ v


class DroppingCall(Dropping):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=self.drop.p, scale=0.25)


@pytest.mark.parametrize("form", [Dropping, DroppingCall])
def test_a_rate_that_was_settled_is_a_number(form: type[Dropping]) -> None:
    """And torch guards on it: another rate is another program."""
    model = form(0.0)
    report = same(model, *qkv(grad=True), grad=True, rewritten=1, dynamic=True, targets=("cpu_kernel",))
    assert report.sites[0].formula is not None and "dropout" not in report.sites[0].formula["result"]
    torch._dynamo.reset()
    compiled = torch.compile(
        model, backend=attn_pass.wrap("aot_eager", choose="fused", targets=("cpu_kernel",)), dynamic=True
    )
    q, k, v = qkv(q_len=64, kv_len=64)
    ones = torch.ones_like(v)
    with attn_pass.record() as report:
        for rate in (0.0, 0.5, 1 - 1e-9, 0.0):
            model.drop.p = rate
            got = compiled(q, k, ones)
            assert got.equal(ones * 0) if rate > 0.9 else got.mean().sub(1).abs() < (0.3 if rate else 1e-6), rate
    dropped = ["dropout" in s.formula["result"] for s in report.sites if s.formula is not None]
    assert [s.outcome for s in report.sites] == ["rewritten"] * 3 and dropped == [False, True, True], str(report)


def test_settled_dropout_twice_is_left() -> None:
    torch._dynamo.reset()
    backend = attn_pass.wrap("aot_eager", choose="fused", targets=("cpu_kernel",), on_error="raise")
    with attn_pass.record() as report:
        torch.compile(Dropping(0.1, rates=2), backend=backend, dynamic=True)(*qkv(grad=True))
    assert [s.reason.partition(" (")[0] for s in report.sites] == ["dropout is applied twice"]


# ---- modules ----


class Block(nn.Module):
    """A pre-norm attention block with a packed projection, as vision transformers write it."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.qkv, self.proj = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q * 8**-0.5) @ k.transpose(-2, -1)
        if self.causal:
            scores = scores.masked_fill(~tril(length, length), NEG_INF)
        return x + self.proj((softmax(scores) @ v).transpose(1, 2).reshape(batch, length, 32))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dynamic", [None, True])
def test_parameters_of_a_block(causal: bool, dynamic: bool | None) -> None:
    same(Block(causal), randn(2, 6, 32, grad=True), grad=True, rewritten=1, dynamic=dynamic, twice=3.0)


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module, call: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x: Tensor) -> Any:
        return self.call(self.inner, x)


MASK = nn.Transformer.generate_square_subsequent_mask(6)
PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
MULTIHEAD: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "plain": lambda m, x: m(x, x, x)[0],
    "weights not asked for": lambda m, x: m(x, x, x, need_weights=False)[0],
    "weights used": lambda m, x: m(x, x, x),
    "weights of each head": lambda m, x: m(x, x, x, average_attn_weights=False),
    "causal": lambda m, x: m(x, x, x, attn_mask=MASK.to(x.dtype), is_causal=True)[0],
    "masked": lambda m, x: m(x, x, x, attn_mask=MASK.to(x.dtype))[0],
    "padded": lambda m, x: m(x, x, x, key_padding_mask=PADDING)[0],
    "crossed": lambda m, x: m(x[:, :3], x, x * 2)[0],
}


@pytest.mark.parametrize("training", [False, True])
@table(MULTIHEAD)
def test_multihead_attention(row: Callable[[nn.Module, Tensor], Any], training: bool) -> None:
    torch.manual_seed(0)
    module = Wrapped(nn.MultiheadAttention(32, 4, batch_first=True), row).train(training)
    same(module, randn(2, 6, 32, grad=True), grad=True, twice=3.0)


@pytest.mark.parametrize("training", [False, True])
def test_encoder_layer(training: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
    module = Wrapped(layer, lambda m, x: m(x, src_mask=MASK.to(x.dtype), is_causal=True)).train(training)
    same(module, randn(2, 6, 32, grad=True), grad=True, twice=3.0)


# ---- checkpointing ----

CHECKPOINTED: dict[str, Program] = {
    "all of it": lambda q, k, v: checkpoint(attend, q, k, v, use_reentrant=False),
    "keys turned outside": lambda q, k, v: checkpoint(
        lambda a, b, c: softmax(a @ b) @ c, q, k.mT, v, use_reentrant=False
    ),
    "mask made outside": lambda q, k, v: checkpoint(_masked, q, k, v, tril(8, 8), use_reentrant=False),
    "keys shared outside": lambda q, k, v: checkpoint(
        attend, q, k[:1].expand_as(q), v[:1].expand_as(q), use_reentrant=False
    ),
    "one in another": lambda q, k, v: checkpoint(
        lambda a, b, c: checkpoint(attend, a, b, c, use_reentrant=False) + attend(a, b, c), q, k, v, use_reentrant=False
    ),
}


def _masked(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return softmax((q @ k.mT).masked_fill(~keep, NEG_INF)) @ v


@table(CHECKPOINTED)
def test_checkpointed_regions(row: Program) -> None:
    report = same(row, *qkv(grad=True), grad=True)
    assert report.rewritten
    assert not report.left


# ---- operands written after the result ----


def _added_to(x: Tensor, w: Tensor) -> Tensor:
    x = x * w
    heads = x.view(2, 8, 2, 16).transpose(1, 2)
    x.add_(attend(heads, heads, heads).transpose(1, 2).reshape(2, 8, 32))
    return x


def _a_second_site_in_between(x: Tensor, w: Tensor) -> Tensor:
    x = x * w
    heads = x.view(2, 8, 2, 16).transpose(1, 2)
    first = attend(heads * 2, heads, heads)
    second = attend(first * 1.5, heads, first)
    x.mul_(2)
    return x + second.transpose(1, 2).reshape(2, 8, 32)


def _a_mask(x: Tensor, w: Tensor) -> Tensor:
    heads = (x * w).view(2, 8, 2, 16).transpose(1, 2)
    mask = torch.zeros(8, 8).masked_fill(~tril(8, 8), -1e9)
    out = softmax(heads @ heads.mT * 0.25 + mask) @ heads
    mask.fill_(0.5)
    return out + mask.sum()


WRITTEN_AFTER = {"added to": _added_to, "between two sites": _a_second_site_in_between, "a mask": _a_mask}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@table(WRITTEN_AFTER)
def test_an_operand_written_in_place_after_the_result(row: Program, backend: str) -> None:
    """Eager's products copy such operands for the backward; the fused call saves what it is given."""
    inputs = [randn(2, 8, 32, grad=True), randn(32, grad=True)]
    want = row(*inputs)
    wanted = torch.autograd.grad(want.sum(), inputs)
    torch._dynamo.reset()
    with attn_pass.record() as report:
        out = torch.compile(row, backend=attn_pass.wrap(backend, choose="fused", on_error="raise"))(*inputs)
        gradients = torch.autograd.grad(out.sum(), inputs)
    assert report.rewritten and not report.left
    torch.testing.assert_close(out, want, atol=1e-4, rtol=1e-4)
    for got, expected in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-4)


# ---- derivatives that the fused kernel does not have ----


def test_forward_mode_under_an_active_level_leaves_the_site() -> None:
    q, k, v = qkv()
    torch._dynamo.reset()
    with attn_pass.record() as report, torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        run = torch.compile(attend, backend=attn_pass.wrap("eager", choose="fused"))
        tangents = [torch.autograd.forward_ad.unpack_dual(f(dual, k, v)).tangent for f in (run, attend)]
    torch.testing.assert_close(*tangents)
    assert not report.rewritten and all("forward-mode AD" in site.reason for site in report.sites)


def test_a_second_backward_fails_as_the_call_itself_does() -> None:
    """Nobody knows in the forward that it will come: docs/numerics.md says what to do."""
    inputs = qkv(grad=True)
    torch._dynamo.reset()
    run = torch.compile(attend, backend=attn_pass.wrap("eager", choose="fused"))
    for program in (run, F.scaled_dot_product_attention):
        (first,) = torch.autograd.grad(program(*inputs).pow(2).sum(), inputs[:1], create_graph=True)
        with pytest.raises(RuntimeError, match=r"derivative for .*attention.* is not implemented"):
            torch.autograd.grad(first.sum(), inputs[:1])
    with attn_pass.record() as report:
        torch._dynamo.reset()
        run = torch.compile(attend, backend=attn_pass.wrap("eager", targets=()))
        (first,) = torch.autograd.grad(run(*inputs).pow(2).sum(), inputs[:1], create_graph=True)
        assert torch.autograd.grad(first.sum(), inputs[:1])[0].isfinite().all()
    assert not report.rewritten


@pytest.mark.parametrize("context", ["a checkpoint", "hooks of the program"])
def test_a_compiled_layer_that_is_compiled_inside(context: str) -> None:
    """What is saved is packed by whoever is around it, and what is saved while a rewrite is planned is not."""
    torch._dynamo.reset()
    run = torch.compile(attend, backend=attn_pass.wrap("aot_eager", choose="fused", on_error="raise"))
    packed: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x)
    inputs = qkv(grad=True)
    with attn_pass.record() as report:
        if context == "a checkpoint":
            out = checkpoint(run, *inputs, use_reentrant=False)
        else:
            with hooks:
                out = run(*inputs)
        gradients = torch.autograd.grad(out.sum(), inputs)
    assert len(report.rewritten) == 1 and all(type(x) is Tensor or type(x) is nn.Parameter for x in packed)
    for ours, eager in zip(gradients, torch.autograd.grad(attend(*inputs).sum(), inputs), strict=True):
        torch.testing.assert_close(ours, eager)
