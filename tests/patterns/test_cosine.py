"""`F.cosine_similarity` of queries and keys: a product of normalised ones, and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from against_eager import exported_each, qkv, randn, same, same_each
from torch import Tensor
from torch.nn import functional as F

import attn_pass

Program = Callable[..., Tensor]


def pairs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (F.cosine_similarity(q[..., None, :], k[..., None, :, :], dim=-1) * 10).softmax(-1) @ v


def memory(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A neural Turing machine: one query for the rows of a memory, and a small number that is added to both."""
    scores = F.cosine_similarity(k + 1e-16, q.unsqueeze(-2) + 1e-16, dim=-1)
    return (F.softmax(5.0 * scores, dim=-1).unsqueeze(-2) @ v).squeeze(-2)


def module(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.nn.CosineSimilarity(dim=2)(k, q.unsqueeze(1)).softmax(1)
    return torch.bmm(weights.unsqueeze(1), v)


def fewer_dimensions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A query that all batches share."""
    return torch.cosine_similarity(q, x2=k, dim=-1).softmax(-1).unsqueeze(-2) @ v


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = F.cosine_similarity(q.unsqueeze(-2), k.unsqueeze(-3), dim=4, eps=1e-6) / 0.07
    return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf")).softmax(-1) @ v


def heads_as_features(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Over the default dimension; every feature of a head is a batch of its own."""
    scores = F.cosine_similarity(q.unsqueeze(3), k.unsqueeze(2))
    return torch.einsum("blsd,bhsd->bhld", scores.softmax(2), v)


def long_eps(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Most rows are shorter than what they are divided by at least."""
    return F.cosine_similarity(q[..., None, :], k[..., None, :, :], -1, 4.0).softmax(-1) @ v


ONE_ROW = (randn(3, 16), randn(3, 9, 16, seed=1), randn(3, 9, 16, seed=2))
SHORT = tuple(x * scale for x, scale in zip(qkv(), (1e-9, 1e-10, 1.0)))
ZERO = (qkv()[0] * (torch.arange(8) % 3 > 0)[:, None], *qkv()[1:])
PERMUTED = tuple(x.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3) for x in qkv(3, 5, 7, 11, 13))
EXPANDED = (qkv(1, 1)[0].expand(2, 2, 8, 16), *qkv()[1:])
PAIRS: dict[str, tuple[Tensor, ...]] = {
    "plain": qkv(),
    "primes": qkv(3, 5, 7, 11, 13),
    "one key": qkv(kv_len=1),
    "one query": qkv(q_len=1),
    "one feature": qkv(dim=1),
    "wider values": qkv(value_dim=5),
    "shorter than eps": SHORT,
    "rows of zeros": ZERO,
    "permuted": PERMUTED,
    "expanded": EXPANDED,
}
READ: dict[str, tuple[Program, tuple[Tensor, ...]]] = {
    **{name: (pairs, given) for name, given in PAIRS.items()},
    "memory": (memory, ONE_ROW),
    "module": (module, ONE_ROW),
    "fewer dimensions": (fewer_dimensions, (randn(16), *ONE_ROW[1:])),
    "masked": (masked, qkv()),
    "heads as features": (heads_as_features, qkv(heads=3)),
    "a long eps": (long_eps, qkv()),
}


def test_read() -> None:
    same_each(READ)


@pytest.mark.parametrize("name", ["plain", "shorter than eps", "rows of zeros", "memory", "masked", "a long eps"])
def test_read_in_training(name: str) -> None:
    """Where a row is shorter than eps torch passes on the gradient of its length, which `F.normalize` does not."""
    program, given = READ[name]
    # In float64: a gradient of rows as short as 1e-9 has only as many digits as their length.
    leaves = [x.double().detach().clone().requires_grad_() for x in given]
    same(program, *leaves, rewritten=1, grad=True, targets=("sdpa",), reference=False)


def test_read_in_exported_programs() -> None:
    exported_each(READ)


def test_trained_after_export() -> None:
    """A row shorter than eps has the gradient of torch's formula, though the export saw no gradient."""

    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return long_eps(q, k, v)

    given = qkv()
    exported = torch.export.export(Model(), given)
    assert attn_pass.rewrite(exported, choose="fused", on_error="raise").rewritten
    results = []
    for run in (exported.module(), long_eps):
        leaves = [x.clone().requires_grad_() for x in given]
        results.append(torch.autograd.grad(run(*leaves).square().sum(), leaves))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_read_in_half_precision(dtype: torch.dtype) -> None:
    same(pairs, *qkv(dtype=dtype), rewritten=1)


def test_read_at_lengths_known_at_run_time() -> None:
    same(pairs, *qkv(), rewritten=1, dynamic=True)


def its_own_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A sum over positions: both tensors differ from key to key."""
    return F.cosine_similarity(q, k, dim=-2).softmax(-1).unsqueeze(-2) @ v.mT


def expanded_along_the_dimension(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A query of one number, which is longer once it is expanded."""
    return F.cosine_similarity(q[..., None, :1], k[..., None, :, :], dim=-1).softmax(-1) @ v


def two_types(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each length is rounded in a type of its own."""
    return F.cosine_similarity(q.bfloat16()[..., None, :], k[..., None, :, :], dim=-1).softmax(-1) @ v


def under_autocast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        scores = F.cosine_similarity(q[..., None, :], k[..., None, :, :], dim=-1)
    return scores.softmax(-1) @ v


def over_the_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.cosine_similarity(q[..., None, :], k[..., None, :, :], dim=-1).softmax(-2) @ v


@pytest.mark.parametrize(
    "program", [its_own_rows, expanded_along_the_dimension, two_types, under_autocast, over_the_queries]
)
def test_look_alikes_mean_something_else(program: Program) -> None:
    same(program, *qkv(), rewritten=0, reference=False)


def test_a_call_that_is_no_attention_is_one_call_again() -> None:
    """A loss, and a call whose scores the program returns, beside one that is read."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        loss = F.cosine_similarity(q, k, dim=-1).mean()
        scores = F.cosine_similarity(q.unsqueeze(-2), k.unsqueeze(-3), dim=-1)
        return loss, pairs(q, k, v), scores, scores.softmax(-1) @ v

    graphs = list[torch.fx.GraphModule]()

    def keep(gm: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(gm)
        return gm

    torch._dynamo.reset()
    compiled = torch.compile(run, backend=attn_pass.wrap(keep, choose="fused", on_error="raise"))
    for got, wanted in zip(compiled(*qkv()), run(*qkv()), strict=True):
        torch.testing.assert_close(got, wanted)
    (gm,) = graphs
    calls = [node for node in gm.graph.nodes if node.target is torch.cosine_similarity]
    assert len(calls) == 2 and not any("idle" in node.name for node in gm.graph.nodes)
    gm.graph.lint()
