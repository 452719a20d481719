"""Keys and values shared over the batch: the batch becomes query rows, with any mask or bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import randn, same
from torch import Tensor
from ways import LOWEST, Program, Programs, all_become, call, hand, table, training, ways

import attn_pass
from attn_pass.rewriting import decision

NAME = "shared_kv"
B, H, L, S, D, BEAMS = 3, 2, 5, 7, 16, 3


def keep(*shape: int) -> Tensor:
    mask = randn(*shape, seed=9) > -0.2
    mask[..., 0] = True
    return mask


def operands(batch: int = B, kv_batch: int = 1, grad: bool = False, q_len: int = L, kv_len: int = S) -> list[Tensor]:
    shapes = (batch, H, q_len, D), (kv_batch, H, kv_len, D), (kv_batch, H, kv_len, D)
    return [randn(*shape, grad=grad, seed=n) for n, shape in enumerate(shapes, 1)]


@pytest.fixture
def only_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folding is the only form on offer, so that a cost does not hide it."""
    every = decision.variants
    monkeypatch.setattr(decision, "variants", lambda a, allowed: [f for f in every(a, allowed) if f[0] == (NAME,)])


def flags(fn: Program, *inputs: Tensor, **options: Any) -> list[tuple[tuple[int, ...], bool, bool]]:
    """Of each attention call in the rewritten graph: the query's shape, whether it has a mask, whether it is causal."""
    seen: list[tuple[tuple[int, ...], bool, bool]] = []

    def look(gm: torch.fx.GraphModule, _: Any) -> Any:
        for node in gm.graph.nodes:
            if node.target is F.scaled_dot_product_attention:
                q, _, _, mask, _, causal = node.args
                seen.append((tuple(q.meta["example_value"].shape), mask is not None, causal))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=attn_pass.wrap(look, on_error="raise", **options))(*inputs)
    return seen


SHARED: dict[str, Callable[[Tensor], Tensor]] = {
    "broadcast": lambda k: k,
    "of lower rank": lambda k: k[0],
    "expanded": lambda k: k.expand(B, -1, -1, -1),
    "expanded and copied": lambda k: k.expand(B, -1, -1, -1).contiguous(),
    "repeated": lambda k: k.repeat(B, 1, 1, 1),
    "repeat_interleave": lambda k: k.repeat_interleave(B, 0),
}
MASKS: dict[str, Tensor] = {
    "padding for all": keep(1, 1, 1, S),
    "padding of each batch row": keep(B, 1, 1, S),
    "of each query": keep(L, S),
    "of each head": keep(1, H, 1, S),
    "bias of each head": randn(H, L, S, seed=5),
    "bias of each batch row": randn(B, 1, 1, S, seed=5),
    "of everything": keep(B, H, L, S),
    "bias of everything": randn(B, H, L, S, seed=5),
    "bias that no key sees": randn(B, 1, L, 1, seed=5),
}


def folded(report: attn_pass.Report, target: str = "sdpa") -> None:
    assert [(s.target, s.poor_cases) for s in report.sites] == [(target, (NAME,))], str(report)


@training
@ways
def test_the_batch_becomes_query_rows(way: Program, grad: bool) -> None:
    programs: Programs = {}
    for name, row in SHARED.items():
        for mask in (None, MASKS["of everything"]):
            program = lambda q, k, v, m, row=row: way(q, row(k), row(v), m)
            programs[f"{name}, {'no mask' if mask is None else 'a mask'}"] = program, (*operands(grad=grad), mask)
    all_become(programs, poor_cases=(NAME,), grad=grad)


@training
@ways
def test_a_mask_moves_along(way: Program, grad: bool) -> None:
    all_become(
        {name: (way, (*operands(grad=grad), mask)) for name, mask in MASKS.items()}, poor_cases=(NAME,), grad=grad
    )


@training
@ways
@pytest.mark.parametrize("mask", [None, "padding of each batch row"])
def test_a_causal_mask_stays_with_the_position(only_folded: None, way: Program, grad: bool, mask: str | None) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, m: Tensor | None) -> Tensor:
        if way is call and m is not None:
            m = m & torch.ones(L, S, dtype=torch.bool).tril()
        return way(q, k, v, m, causal=way is hand or m is None)

    given = None if mask is None else MASKS[mask]
    folded(same(program, *operands(grad=grad), given, grad=grad))
    assert flags(program, *operands(), given, choose="fused") == [((1, H, B * L, D), True, False)]


@ways
def test_a_causal_mask_is_folded_as_a_mask_where_that_is_cheapest(way: Program) -> None:
    inputs = operands(batch=128, q_len=2, kv_len=256)
    program = lambda q, k, v: way(q, k, v, causal=True)
    folded(same(program, *inputs, choose="cheapest"))
    assert flags(program, *inputs, choose="cheapest") == [((1, H, 256, D), True, False)]


REAL: dict[str, Tensor | None] = {
    "no mask": None,
    "padding": keep(1, 1, 1, 512),
    "padding of each row": keep(256, 1, 1, 512),
}


@ways
@table(REAL)
def test_one_token_for_many_is_folded_by_its_cost(row: Tensor | None, way: Program) -> None:
    folded(same(way, *operands(batch=256, q_len=1, kv_len=512), row, choose="cheapest"))


def test_a_small_call_may_be_two_products_over_the_folded_rows(only_folded: None) -> None:
    folded(same(call, *operands(), MASKS["of everything"], choose="first", targets=("decomposed",)), "decomposed")


# ---------------------------------------------------------------- some of the batch only

TO_BEAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "expand and flatten": lambda k: k[:, None].expand(-1, BEAMS, *(-1,) * (k.dim() - 1)).flatten(0, 1),
    "expand, reshape, copy": lambda k: (
        k.unsqueeze(1).expand(-1, BEAMS, *k.shape[1:]).reshape(-1, *k.shape[1:]).contiguous()
    ),
    "repeat_interleave": lambda k: k.repeat_interleave(BEAMS, 0),
    "tiled": lambda k: k.repeat(BEAMS, 1, 1, 1),
    "tiled by expand": lambda k: k[None].expand(BEAMS, *k.shape).flatten(0, 1),
}
BEAM_MASKS: dict[str, Tensor | None] = {
    "none": None,
    "padding": keep(2 * BEAMS, 1, 1, S),
    "rows": keep(L, S),
    "bias of each head": randn(H, L, S, seed=5),
    "everything": keep(2 * BEAMS, H, L, S),
}


@training
@ways
def test_beams_of_one_prompt_become_query_rows(way: Program, grad: bool) -> None:
    programs: Programs = {}
    for name, row in TO_BEAMS.items():
        program = lambda q, k, v, m, row=row: way(q, row(k), row(v), m)
        for kind, mask in BEAM_MASKS.items():
            programs[f"{name}, mask: {kind}"] = program, (*operands(2 * BEAMS, 2, grad), mask)
        program = lambda q, k, v, m, row=row: way(q, row(k), row(v), row(m))
        padding = keep(2, 1, 1, S)  # of a prompt, repeated like its keys
        programs[f"{name}, mask: repeated"] = program, (*operands(2 * BEAMS, 2, grad), padding)
    all_become(programs, poor_cases=(NAME,), grad=grad)


FIVE: dict[str, Tensor | None] = {
    "none": None,
    "padding of a prompt": keep(2, 1, 1, 1, S),
    "padding of a beam": keep(2, BEAMS, 1, 1, S),
    "of each query": keep(L, S),
    "bias of each head": randn(H, 1, S, seed=5),
    "everything": randn(2, BEAMS, H, L, S, seed=5),
}


@training
@ways
def test_beams_as_a_dimension(way: Program, grad: bool) -> None:
    _, k, v = operands(1, 2, grad)
    q = randn(2, BEAMS, H, L, D, grad=grad)
    program = lambda q, k, v, m: way(q, k[:, None], v[:, None], m)
    all_become({name: (program, (q, k, v, mask)) for name, mask in FIVE.items()}, poor_cases=(NAME,), grad=grad)


# ---------------------------------------------------------------- what else a site has

EXTRAS: dict[str, tuple[Program, Tensor]] = {
    "a temperature of each batch row": (lambda s, v, t: torch.softmax(s * t, -1) @ v, randn(B, 1, 1, 1).exp()),
    "a temperature of each query": (lambda s, v, t: torch.softmax(s / t, -1) @ v, randn(B, H, L, 1).exp()),
    "a head mask": (lambda s, v, t: (torch.softmax(s, -1) * t) @ v, randn(B, H, 1, 1)),
    "fully masked rows": (
        lambda s, v, t: torch.softmax(s.masked_fill(t < 0.5, LOWEST), -1) @ v, randn(B, 1, L, 1),
    ),
    "an added matrix with fully masked rows": (
        lambda s, v, t: torch.softmax(s + t, -1) @ v,
        torch.zeros(B, 1, L, S).masked_fill(randn(B, 1, L, 1) < 0.2, LOWEST),
    ),
}  # fmt: skip


@training
@table(EXTRAS)
def test_what_belongs_to_a_query_moves_along(only_folded: None, row: tuple[Program, Tensor], grad: bool) -> None:
    last, extra = row
    folded(same(lambda q, k, v, t: last(q @ k.mT * 0.25, v, t), *operands(grad=grad), extra, grad=grad))


def test_a_sink_moves_along(only_folded: None) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        scores = torch.cat([q @ k.mT * 0.25, sink.expand(B, H, L, 1)], -1)
        return torch.softmax(scores, -1)[..., :-1] @ v

    folded(same(program, *operands(), randn(B, H, L, 1, seed=6)))


@ways
@pytest.mark.parametrize("shape", [(H, L, S), (B, 1, 1, S), (B, H, L, S)], ids=str)
def test_a_learned_bias_gets_its_gradient(only_folded: None, way: Program, shape: tuple[int, ...]) -> None:
    folded(same(way, *operands(grad=True), randn(*shape, grad=True, seed=5), grad=True), "recompute")


@ways
def test_one_compilation_serves_every_batch(way: Program) -> None:
    torch._dynamo.reset()
    backend = attn_pass.wrap("aot_eager_default_partitioner", choose="fused", on_error="raise")
    run = torch.compile(lambda q, k, v, m: way(q, k, v, m), backend=backend)
    with attn_pass.record() as report:
        for batch in (4, 3, 9, 2):
            q, k, v = operands(batch)
            mask = keep(batch, 1, 1, S)
            for tensor in (q, mask):
                torch._dynamo.mark_dynamic(tensor, 0)
            want = way(q.double(), k.double(), v.double(), mask)
            torch.testing.assert_close(run(q, k, v, mask).double(), want, atol=1e-5, rtol=1e-5)
    folded(report)


# ---------------------------------------------------------------- neighbours

INDEX = torch.tensor([0, 0, 1])
NEIGHBOURS: dict[str, tuple[Callable[..., Any], int]] = {
    "keys shared, values not": (lambda q, k, v: (q, k[:1], v), B),
    "values shared, keys not": (lambda q, k, v: (q, k, v[:1].expand(B, -1, -1, -1)), B),
    "queries shared, keys not": (lambda q, k, v: (q[:1], k, v), B),
    "keys changed for each batch row": (
        lambda q, k, v: (q, k.expand(B, -1, -1, -1) + torch.arange(B).view(B, 1, 1, 1) * k.sin(), v), 1,
    ),
    "values changed for each batch row": (
        lambda q, k, v: (q, k, v.expand(B, -1, -1, -1) + torch.arange(B).view(B, 1, 1, 1)), 1,
    ),
    "keys picked by a table": (lambda q, k, v: (q, k.index_select(0, INDEX), v.index_select(0, INDEX)), 2),
    "keys rolled for each batch row": (lambda q, k, v: (q, torch.cat([k, k.roll(1, 2), k.roll(2, 2)]), v), 1),
}  # fmt: skip


@training
@ways
def test_what_is_not_shared_is_not_folded(way: Program, grad: bool) -> None:
    programs: Programs = {}
    for name, (change, kv_batch) in NEIGHBOURS.items():
        programs[name] = lambda q, k, v, change=change: way(*change(q, k, v)), operands(B, kv_batch, grad)
    all_become(programs, poor_cases=(), grad=grad)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_softmax_over_what_is_shared_is_left(dim: int) -> None:
    report = same(lambda q, k, v: torch.softmax(q @ k.mT * 0.25, dim) @ v, *operands(), rewritten=0)
    assert "does not sum over the whole softmax" in report.sites[0].reason
