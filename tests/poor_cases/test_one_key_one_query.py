"""One key, or one query: the result, its gradients, and its memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from against_eager import NEG_INF, randn, same
from torch import Tensor
from ways import LOWEST, WAYS, Program, Programs, all_become, call, table, training, ways

import attn_pass

KEYS = "key_range"
B, H, L, S, D = 2, 2, 5, 7, 16


def operands(q_len: int, kv_len: int, grad: bool = False, value_dim: int = D, kv_batch: int = B) -> list[Tensor]:
    shapes = (B, H, q_len, D), (kv_batch, H, kv_len, D), (kv_batch, H, kv_len, value_dim)
    return [randn(*shape, grad=grad, seed=n) for n, shape in enumerate(shapes, 1)]


def reported(report: attn_pass.Report, target: str, mask: str | None = None) -> None:
    assert [s.target for s in report.sites] == [target], str(report)
    assert mask is None or report.sites[0].mask == mask


# ---------------------------------------------------------------- one key

SHAPES: dict[str, dict[str, int]] = {
    "alike": {},
    "narrow values": {"value_dim": 8},
    "wide values": {"value_dim": 24},
    "shared over the batch": {"kv_batch": 1},
}


@training
def test_one_key(grad: bool) -> None:
    programs: Programs = {}
    for name, row in SHAPES.items():
        for way in WAYS:
            for q_len in (1, L):
                programs[f"{name}, {way}, {q_len} rows"] = WAYS[way], operands(q_len, 1, grad, **row)
    all_become(programs, "sdpa" if grad else "single_key", grad=grad)


@ways
@pytest.mark.parametrize("causal", [False, True])
def test_one_key_gives_queries_and_keys_gradients_of_zero(way: Program, causal: bool) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return way(q, k, v, torch.ones(L, 1, dtype=torch.bool).tril() if causal else None)

    torch._dynamo.reset()
    q, k, v = operands(L, 1, grad=True)
    out = torch.compile(
        program, backend=attn_pass.wrap("aot_eager_default_partitioner", choose="fused", on_error="raise")
    )(q, k, v)
    out.sum().backward()
    assert q.grad is not None and k.grad is not None and v.grad is not None
    assert q.grad.abs().max() <= 1e-6 and k.grad.abs().max() <= 1e-6
    torch.testing.assert_close(v.grad, torch.full_like(v, float(L)))


HIDING: dict[str, Tensor] = {
    "a condition of each batch row": torch.tensor([True, False]).view(2, 1, 1, 1),
    "a condition of each query": torch.tensor([True, False, True, True, False]).view(5, 1),
    "minus infinity": torch.tensor([0.0, NEG_INF]).view(2, 1, 1, 1),
    "the lowest number": torch.tensor([0.0, LOWEST]).view(2, 1, 1, 1),
    "a bias": randn(B, H, L, 1, seed=5),
}


@training
def test_a_mask_may_hide_the_one_key(grad: bool) -> None:
    programs: Programs = {}
    for name, mask in HIDING.items():
        for way in WAYS:
            programs[f"{name}, {way}"] = WAYS[way], (*operands(L, 1, grad), mask)
    all_become(programs, "sdpa", grad=grad)


@ways
def test_a_masked_key_is_not_the_value(way: Program) -> None:
    torch._dynamo.reset()
    run = torch.compile(way, backend=attn_pass.wrap("aot_eager_default_partitioner", choose="fused", on_error="raise"))
    inputs = (*operands(L, 1), HIDING["a condition of each batch row"])
    out, wanted = run(*inputs), way(*inputs)
    defined = wanted.isfinite()  # a fully masked row by hand is NaN
    assert defined[0].all()
    torch.testing.assert_close(out[defined], wanted[defined])


def viewed(out: Tensor) -> Tensor:
    return out.transpose(1, 2)[:, 0].mul_(2.0)


WRITES: dict[str, Program] = {
    "all of it": lambda out: out.add_(1.0),
    "a part": lambda out: out[:, :, :1].zero_(),
    "through a view": viewed,
}


@ways
@pytest.mark.parametrize("q_len", [1, L])
@table(WRITES)
def test_writing_to_the_result_leaves_the_values_as_they_were(row: Program, way: Program, q_len: int) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = way(q, k, v)
        row(out)
        return out, v * 1

    reported(same(program, *operands(q_len, 1)), "single_key")


@ways
@pytest.mark.parametrize("expanded", [False, True])
def test_the_caller_may_write_to_the_result(way: Program, expanded: bool) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return way(q, k.expand(B, -1, -1, -1), v.expand(B, -1, -1, -1))

    q, k, v = operands(1, 1, kv_batch=1 if expanded else B)
    before = v.clone()
    torch._dynamo.reset()
    out = torch.compile(program, backend=attn_pass.wrap("eager", choose="fused", on_error="raise"))(q, k, v)
    out[0].add_(1.0)
    assert torch.equal(v, before)
    torch.testing.assert_close(out[1], before[-1])


def test_one_key_of_many_positions_is_one_key_again() -> None:
    """A slice of length one of a cache, at a place that is not the first."""
    reported(same(lambda q, k, v: call(q, k[:, :, 3:4], v[:, :, 3:4]), *operands(L, S)), "single_key")


# ---------------------------------------------------------------- one query


def flag(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@training
def test_the_flag_shows_one_query_the_first_key(grad: bool) -> None:
    inputs = operands(1, S, grad)
    report = same(flag, *inputs, grad=grad)
    reported(report, "sdpa" if grad else "single_key")
    assert report.sites[0].poor_cases == (KEYS,)
    torch._dynamo.reset()
    run = torch.compile(flag, backend=attn_pass.wrap("aot_eager_default_partitioner", choose="fused", on_error="raise"))
    torch.testing.assert_close(run(*inputs), inputs[2][:, :, :1])


Mask = Callable[[], Tensor]
RUNS: dict[str, tuple[Mask, str, tuple[str, ...]]] = {
    "bottom right": (lambda: torch.ones(1, S, dtype=torch.bool).tril(S - 1), "none", ()),
    "one key less": (lambda: torch.ones(1, S, dtype=torch.bool).tril(S - 2), "prefix (6)", (KEYS,)),
    "a prefix": (lambda: (torch.arange(S) < 4)[None], "prefix (4)", (KEYS,)),
    "a prefix, added": (
        lambda: torch.zeros(1, S).masked_fill(torch.arange(S)[None] >= 4, NEG_INF),
        "prefix (4)",
        (KEYS,),
    ),
    "longer than the keys": (lambda: (torch.arange(S) < S + 2)[None], "none", ()),
    "from before the first": (lambda: (torch.arange(S) >= -1)[None], "none", ()),
}


@training
@ways
@table(RUNS)
def test_one_query_sees_a_run_of_keys(row: tuple[Mask, str, tuple[str, ...]], way: Program, grad: bool) -> None:
    mask, words, cases = row
    report = same(lambda q, k, v: way(q, k, v, mask()), *operands(1, S, grad), grad=grad)
    reported(report, "sdpa", words)
    assert report.sites[0].poor_cases == cases


@training
@ways
@pytest.mark.parametrize("length", [1, 4, S])
def test_padding_of_a_known_length_is_cut_off(way: Program, length: int, grad: bool) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keep = torch.cat([torch.ones(1, length, dtype=torch.bool), torch.zeros(1, S - length, dtype=torch.bool)], -1)
        return way(q, k, v, keep)

    report = same(program, *operands(L, S, grad), grad=grad)
    reported(report, "single_key" if length == 1 and not grad else "sdpa")
    assert report.sites[0].poor_cases == (() if length == S else (KEYS,))


@training
@ways
def test_padding_of_each_batch_row_is_not_cut_off(way: Program, grad: bool) -> None:
    keep = torch.arange(S) < torch.tensor([3, S]).view(2, 1, 1, 1)
    report = same(way, *operands(1, S, grad), keep, grad=grad)
    reported(report, "sdpa", "padding")
    assert report.sites[0].poor_cases == ()


@ways
def test_a_prefix_of_nothing_is_left(way: Program) -> None:
    report = same(lambda q, k, v: way(q, k, v, (torch.arange(S) < 0)[None]), *operands(1, S), rewritten=0)
    assert "every score is -inf" in report.sites[0].reason


# ---------------------------------------------------------------- ranks

LEADS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "2": ((), ()),
    "3": ((4,), (4,)),
    "3, shared": ((4,), (1,)),
    "5": ((2, 3, 2), (2, 3, 2)),
    "5, shared in the middle": ((2, 3, 2), (2, 1, 2)),
    "5, shared outside": ((2, 3, 2), (1, 3, 2)),
}


@training
@pytest.mark.parametrize("q_len, kv_len", [(1, S), (L, 1), (L, S)])
def test_ranks(q_len: int, kv_len: int, grad: bool) -> None:
    programs: Programs = {}
    for name, (lead, kv) in LEADS.items():
        shapes = (*lead, q_len, D), (*kv, kv_len, D), (*kv, kv_len, D)
        for way in WAYS:
            inputs = [randn(*shape, grad=grad, seed=n) for n, shape in enumerate(shapes, 1)]
            programs[f"{name}, {way}"] = WAYS[way], inputs
    all_become(programs, "single_key" if kv_len == 1 and not grad else "sdpa", mask="none", grad=grad)
