"""Query heads that share a KV head: packed into query rows in the right order, with any mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import randn, same
from torch import Tensor
from ways import LOWEST, WAYS, Program, all_become, hand, table, training, ways

import attn_pass
from attn_pass.rewriting import decision

NAME, SHARED, KEYS = "grouped_heads", "shared_kv", "key_range"
B, GROUPS, KV, S, D = 2, 3, 2, 7, 16
H = GROUPS * KV


LENGTHS = (1, 5)


def keep(*shape: int) -> Tensor:
    mask = randn(*shape, seed=9) > -0.2
    mask[..., 0] = True
    return mask


def operands(q_len: int, grad: bool = False, kv_heads: int = KV, value_dim: int = D, kv_len: int = S) -> list[Tensor]:
    shapes = (B, H, q_len, D), (B, kv_heads, kv_len, D), (B, kv_heads, kv_len, value_dim)
    return [randn(*shape, grad=grad, seed=n) for n, shape in enumerate(shapes, 1)]


def repeat(k: Tensor) -> Tensor:
    return k.repeat_interleave(GROUPS, 1)


def tile(k: Tensor) -> Tensor:
    return k.repeat(1, GROUPS, 1, 1)


REPEATS: dict[str, Callable[[Tensor], Tensor]] = {
    "repeat_interleave": repeat,
    "expand and reshape": lambda k: k[:, :, None].expand(-1, -1, GROUPS, -1, -1).reshape(B, H, *k.shape[2:]),
    "expand, flatten, copy": lambda k: k[:, :, None].expand(-1, -1, GROUPS, -1, -1).flatten(1, 2).contiguous(),
    "repeat in a dimension of its own": lambda k: k.unsqueeze(2).repeat(1, 1, GROUPS, 1, 1).flatten(1, 2),
    "tiled": tile,
    "tiled by expand": lambda k: k[:, None].expand(-1, GROUPS, -1, -1, -1).reshape(B, H, *k.shape[2:]),
}
MASKS: dict[str, Callable[[int], Tensor | None]] = {
    "none": lambda n: None,
    "padding for all": lambda n: keep(1, 1, 1, S),
    "padding of each batch row": lambda n: keep(B, 1, 1, S),
    "of each query": lambda n: keep(n, S),
    "bias of each head": lambda n: randn(H, n, S, seed=5),
    "bias of each head and key": lambda n: randn(H, 1, S, seed=5),
    "everything": lambda n: keep(B, H, n, S),
    "bias of everything": lambda n: randn(B, H, n, S, seed=5),
}


@pytest.fixture(params=["packed", "as a group"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """The only form on offer, so that a cost does not hide the other."""
    wanted = (NAME,) if request.param == "packed" else ()
    every = decision.variants
    monkeypatch.setattr(decision, "variants", lambda a, allowed: [f for f in every(a, allowed) if f[0] == wanted])
    return wanted


def reported(report: attn_pass.Report, form: tuple[str, ...], target: str = "sdpa") -> None:
    assert [(s.target, s.poor_cases) for s in report.sites] == [(target, form)], str(report)


def attention_calls(fn: Program, *inputs: Tensor) -> list[torch.fx.Node]:
    calls: list[torch.fx.Node] = []

    def look(gm: torch.fx.GraphModule, _: Any) -> Any:
        calls.extend(n for n in gm.graph.nodes if n.target is F.scaled_dot_product_attention)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=attn_pass.wrap(look, choose="fused", on_error="raise"))(*inputs)
    return calls


@training
def test_heads_are_packed_whatever_repeated_them(form: tuple[str, ...], grad: bool) -> None:
    all_become(
        {
            f"{name}, {way}, {q_len} rows": (
                lambda q, k, v, way=WAYS[way], row=row: way(q, row(k), row(v)),
                operands(q_len, grad),
            )
            for name, row in REPEATS.items()
            for way in WAYS
            for q_len in LENGTHS
        },
        poor_cases=form,
        grad=grad,
    )


@training
@pytest.mark.parametrize("order", [repeat, tile], ids=["interleaved", "tiled"])
def test_a_mask_follows_its_heads(form: tuple[str, ...], order: Program, grad: bool) -> None:
    all_become(
        {
            f"{name}, {way}, {q_len} rows": (
                lambda q, k, v, m, way=WAYS[way]: way(q, order(k), order(v), m),
                (*operands(q_len, grad), row(q_len)),
            )
            for name, row in MASKS.items()
            for way in WAYS
            for q_len in LENGTHS
        },
        poor_cases=form,
        grad=grad,
    )


@training
def test_enable_gqa(form: tuple[str, ...], grad: bool) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, m: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, m, enable_gqa=True)

    all_become(
        {
            f"{name}, {q_len} rows": (program, (*operands(q_len, grad), row(q_len)))
            for name, row in MASKS.items()
            for q_len in LENGTHS
        },
        poor_cases=form,
        grad=grad,
    )


@training
def test_one_kv_head_for_all_by_broadcasting(form: tuple[str, ...], grad: bool) -> None:
    all_become(
        {
            f"{name}, {way}": (WAYS[way], (*operands(5, grad, kv_heads=1), row(5)))
            for name, row in MASKS.items()
            for way in WAYS
        },
        poor_cases=form,
        grad=grad,
    )


@training
@ways
@pytest.mark.parametrize("order", [repeat, tile], ids=["interleaved", "tiled"])
def test_a_causal_mask_stays_with_the_position(
    form: tuple[str, ...], order: Callable[[Tensor], Tensor], way: Program, grad: bool
) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return way(q, order(k), order(v), causal=True)

    reported(same(program, *operands(5, grad), grad=grad), form)
    (node,) = attention_calls(program, *operands(5))
    assert (node.args[3] is not None, node.args[5]) == ((True, False) if form else (False, True))


@training
@ways
def test_keys_of_one_head_and_values_of_several(form: tuple[str, ...], way: Program, grad: bool) -> None:
    """Keys are the same for every head, values for a group only: packed as far as the values allow."""
    q, _, v = operands(5, grad)
    k = randn(B, 1, S, D, grad=grad)
    reported(same(lambda q, k, v: way(q, k, repeat(v)), q, k, v, grad=grad), form)


@training
@ways
@pytest.mark.parametrize("of", ["keys", "values"])
def test_what_only_one_of_them_shares_is_not_packed(way: Program, grad: bool, of: str) -> None:
    q, k, v = operands(5, grad, kv_heads=H)
    shared = randn(B, 1, S, D, grad=grad)
    inputs = (q, shared, v) if of == "keys" else (q, k, shared)
    reported(same(way, *inputs, grad=grad), ())


@training
@ways
def test_keys_and_values_in_different_orders_are_not_packed(way: Program, grad: bool) -> None:
    reported(same(lambda q, k, v: way(q, repeat(k), tile(v)), *operands(5, grad), grad=grad), ())


@training
@ways
def test_a_group_whose_heads_were_changed_is_not_packed(way: Program, grad: bool) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return way(q, repeat(k) + torch.arange(H).view(H, 1, 1) * repeat(k).sin(), repeat(v))

    reported(same(program, *operands(5, grad), grad=grad), ())


@training
@ways
def test_shared_by_heads_and_batch(way: Program, grad: bool) -> None:
    q, k, v = operands(1, grad)
    k, v = (t.detach()[:1].requires_grad_(grad) for t in (k, v))
    report = same(lambda q, k, v: way(q, repeat(k), repeat(v)), q, k, v, grad=grad)
    assert report.sites[0].poor_cases in ((NAME,), (SHARED,), (SHARED, NAME))


# ---------------------------------------------------------------- decoding


@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "up to its own"])
@pytest.mark.parametrize("form", ["packed"], indirect=True)
def test_a_token_asks_a_cache(causal: bool, form: tuple[str, ...]) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, past_k: Tensor, past_v: Tensor) -> Tensor:
        k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
        keep = torch.ones(1, k.shape[2], dtype=torch.bool).tril(k.shape[2] - 1) if causal else None
        return F.scaled_dot_product_attention(q, k, v, keep, enable_gqa=True)

    cache = operands(1, kv_len=31)[1:]
    report = same(program, *operands(1, kv_len=1), *cache)
    reported(report, form)
    assert report.sites[0].mask == "none"


@ways
def test_decoding_is_packed_by_its_cost(way: Program) -> None:
    q, k, v = randn(2, 32, 1, 64), randn(2, 4, 512, 64, seed=2), randn(2, 4, 512, 64, seed=3)
    mask = torch.arange(512) < torch.tensor([400, 512]).view(2, 1, 1, 1)

    def program(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return way(q, k.repeat_interleave(8, 1), v.repeat_interleave(8, 1), m)

    reported(same(program, q, k, v, mask, choose="cheapest"), (NAME,))


def test_one_query_with_the_flag_sees_the_first_key_of_its_own_kv_head() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    report = same(program, *operands(1))
    reported(report, (KEYS,), "single_key")


# ---------------------------------------------------------------- what else a site has

EXTRAS: dict[str, tuple[Program, Tensor]] = {
    "a temperature of each head": (lambda s, v, t: torch.softmax(s * t, -1) @ v, randn(H, 1, 1).exp()),
    "a head mask": (lambda s, v, t: (torch.softmax(s, -1) * t) @ v, randn(1, H, 1, 1)),
    "fully masked rows": (lambda s, v, t: torch.softmax(s.masked_fill(t < 0, LOWEST), -1) @ v, randn(B, H, 5, 1)),
    "an added matrix with fully masked rows": (
        lambda s, v, t: torch.softmax(s + t, -1) @ v,
        torch.zeros(B, H, 5, S).masked_fill(randn(B, H, 5, 1) < 0, LOWEST),
    ),
}


@training
@table(EXTRAS)
def test_what_belongs_to_a_head_follows_it(form: tuple[str, ...], row: tuple[Program, Tensor], grad: bool) -> None:
    last, extra = row
    report = same(lambda q, k, v, t: last(q @ repeat(k).mT * 0.25, repeat(v), t), *operands(5, grad), extra, grad=grad)
    reported(report, form)


@training
@pytest.mark.parametrize("value_dim", [8, 24])
def test_values_of_another_width(form: tuple[str, ...], value_dim: int, grad: bool) -> None:
    reported(
        same(lambda q, k, v: hand(q, repeat(k), repeat(v)), *operands(5, grad, value_dim=value_dim), grad=grad), form
    )


@pytest.mark.parametrize("form", ["as a group"], indirect=True)
@ways
def test_wide_values_where_a_row_may_have_no_key(form: tuple[str, ...], way: Program) -> None:
    mask = torch.zeros(B, 1, 5, S).masked_fill(randn(B, 1, 5, 1) < 0, LOWEST)
    inputs = (*operands(5, True, value_dim=24), mask)
    reported(same(lambda q, k, v, m: way(q, repeat(k), repeat(v), m), *inputs, grad=True), form)


def test_a_learned_bias_gets_its_gradient() -> None:
    bias = randn(H, 5, S, grad=True, seed=5)
    inputs = (*operands(5, True), bias)
    reported(same(lambda q, k, v, m: hand(q, repeat(k), repeat(v), m), *inputs, grad=True), (NAME,), "recompute")
