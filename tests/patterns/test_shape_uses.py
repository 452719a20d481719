"""Masks computed from the shape of the scores: index arithmetic does not use the scores."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from against_eager import NEG_INF, qkv, same_each
from torch import Tensor

import attn_pass

Program = Callable[[Tensor, Tensor, Tensor], Tensor]


def new_ones(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    keep = scores.new_ones(scores.shape[-2:]).tril().bool()
    return scores.masked_fill(~keep, NEG_INF).softmax(-1) @ v


def ones_like(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    return scores.masked_fill(torch.ones_like(scores).tril() == 0, NEG_INF).softmax(-1) @ v


def boolean_ones_like(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.25
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -1e9).softmax(-1) @ v


def full_like(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    return (scores + torch.full_like(scores, NEG_INF).triu(1)).softmax(-1) @ v


def full_like_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    scores += torch.full_like(scores, NEG_INF).triu_(1)
    return scores.softmax(-1) @ v


def filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    bias = torch.zeros_like(scores)
    bias.masked_fill_(torch.ones_like(scores).triu(1) == 1, NEG_INF)
    return (scores + bias).softmax(-1) @ v


def of_permuted_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The scores lie in memory as (heads, batch, ...), and so does what is as large as they are."""
    scores = (q.transpose(0, 1).contiguous() @ k.transpose(0, 1).mT).transpose(0, 1)
    return scores.masked_fill(torch.ones_like(scores).tril() == 0, NEG_INF).softmax(-1) @ v


def of_a_slice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    return scores.masked_fill(torch.ones_like(scores[:1, 0]).tril() == 0, NEG_INF).softmax(-1) @ v


CAUSAL = [of_a_slice, new_ones, ones_like, boolean_ones_like, full_like, full_like_in_place, filled, of_permuted_scores]


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_triangle_of_the_scores_shape(dynamic: bool | None) -> None:
    report = same_each({p.__name__: (p, qkv(q_len=7, kv_len=7)) for p in CAUSAL}, dynamic=dynamic)
    assert {site.mask for site in report.sites} == {"causal"}, str(report)


def test_in_training() -> None:
    same_each({p.__name__: (p, qkv(q_len=7, kv_len=7, grad=True)) for p in CAUSAL}, grad=True)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("program", CAUSAL)
def test_in_exported_programs(program: Program, dynamic: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return program(q, k, v)

    length = torch.export.Dim("length", min=2)
    shapes = ({2: length},) * 3 if dynamic else None
    with torch.no_grad():
        exported = torch.export.export(Model(), qkv(q_len=7, kv_len=7), dynamic_shapes=shapes)
        report = attn_pass.rewrite(exported, choose="fused", on_error="raise")
        assert [s.outcome for s in report.sites] == ["rewritten"]
        given = qkv(q_len=11, kv_len=11) if dynamic else qkv(q_len=7, kv_len=7)
        torch.testing.assert_close(exported.module()(*given), program(*given), atol=1e-5, rtol=1e-5)


def strips(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The mask is emitted as the program's tensor: it stays, and the scores go."""
    scores = q @ k.mT
    mask = torch.ones_like(scores).cumsum(-1) * torch.ones_like(scores).cumsum(-2)
    return (scores + mask.sin()).softmax(-1) @ v


def strips_of_permuted_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q.transpose(0, 1).contiguous() @ k.transpose(0, 1).mT).transpose(0, 1)
    mask = torch.ones_like(scores).cumsum(-1)
    return (scores + mask.sin()).softmax(-1) @ v + mask.stride(0)


def used_again(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What has the shape of the scores is part of the result."""
    scores = q @ k.mT
    keep = torch.ones_like(scores).tril()
    return scores.masked_fill(keep == 0, NEG_INF).softmax(-1) @ v + keep.sum()


def by_their_size(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    rows, keys = scores.size(-2), scores.size(-1)
    keep = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    return scores.masked_fill(~keep, NEG_INF).softmax(-1) @ v * rows


def of_the_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    return weights @ v + torch.ones_like(weights).sum(-1, keepdim=True)


def strips_of_a_slice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A slice lies in memory with gaps, and what is as large as it is does not."""
    scores = (q.transpose(0, 1).contiguous() @ k.transpose(0, 1).mT).transpose(0, 1)
    mask = torch.ones_like(scores[:1, :, :, 2:].mT[0]).cumsum(-2).mT
    bias = torch.nn.functional.pad(mask.sin(), (2, 0))
    return (scores + bias).softmax(-1) @ v + mask.stride(0) + 10 * mask.stride(1)


STAYING = [strips, strips_of_permuted_scores, strips_of_a_slice, used_again, by_their_size, of_the_weights]


@pytest.mark.parametrize("dynamic", [None, True])
def test_users_of_the_shape_stay_without_the_scores(dynamic: bool | None) -> None:
    same_each({p.__name__: (p, qkv(q_len=7, kv_len=9)) for p in STAYING}, dynamic=dynamic, targets=("sdpa",))


def test_the_scores_are_removed() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return strips(q, k, v)

    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(gm)
        return gm

    torch._dynamo.reset()
    torch.compile(run, backend=attn_pass.wrap(keep, choose="fused", targets=("sdpa",)))(*qkv())
    (graph,) = graphs
    names = [getattr(n.target, "__name__", str(n.target)) for n in graph.graph.nodes]
    assert "matmul" not in names and "scaled_dot_product_attention" in names, names


def values_of_the_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    return (scores + torch.full_like(scores, float(q.shape[0])) * scores.amax().sign()).softmax(-1) @ v


def a_fill_from_the_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    floor = torch.where(torch.ones_like(scores).tril() == 1, scores, scores.new_tensor(0.0) + scores.min())
    return floor.softmax(-1) @ v


def cloned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    return scores.softmax(-1) @ v + torch.empty_like(scores).copy_(scores).sum()


def drawn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    return (scores * scores.bernoulli(0.5)).softmax(-1) @ v


def a_slice_of_them(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    first = scores[..., :1]
    return (scores + torch.zeros_like(first)).softmax(-1) @ v + first


def a_slice_that_is_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    first = scores[..., :1]
    first.mul_(torch.ones_like(first) * scores.sum())
    return scores.softmax(-1) @ v


USED = [values_of_the_scores, a_fill_from_the_scores, cloned, drawn, a_slice_of_them, a_slice_that_is_written]


@pytest.mark.parametrize("program", USED)
def test_a_use_of_their_values_is_one(program: Program) -> None:
    torch._dynamo.reset()
    with attn_pass.record() as report:
        torch.compile(program, backend=attn_pass.wrap("eager", choose="fused", on_error="raise"))(*qkv())
    assert not report.rewritten, report
