"""Weights, or a log-sum-exp, that are needed as well: the kernel's result, and these beside it for who needs them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import qkv, randn, same
from torch import Tensor

import attn_pass

Program = Callable[..., Any]
KEEP = randn(2, 1, 7, 11, seed=5) > -0.3
KEEP[..., 0] = True


def returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    w = (q @ k.mT * 0.25).softmax(-1)
    return w @ v, w


def averaged(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Over the heads, as nn.MultiheadAttention gives them."""
    w = (q @ k.mT * 0.25).masked_fill(~KEEP, float("-inf")).softmax(-1)
    return w @ v, w.mean(1)


def one_row(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """As vision transformers pick tokens by what the class token attends to."""
    w = F.softmax(q @ k.mT * 0.25, -1, dtype=torch.float32).to(q.dtype)
    return w @ v, w[:, :, 0, 1:].mean(1).topk(3, -1)[0]


def written_in_place(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    s = q @ k.mT
    s.mul_(0.25)
    s += torch.where(KEEP, 0.0, -1e9).to(s.dtype)
    w = s.softmax(-1)
    return w @ v, w.sum(-2)


def weights_written_later(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    w = (q @ k.mT * 0.25).softmax(-1)
    x = w @ v
    w.mul_(2)
    return x, w


def several_values(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    w = (q @ k.mT).softmax(-1)
    return w @ v, w @ v.flip(-1), w.amax(1)


def before_dropout(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    w = (q @ k.mT).softmax(-1)
    return F.dropout(w, 0.5, training=False) @ v, w


def logarithm(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    s = q @ k.mT * 0.25
    return s.softmax(-1) @ v, torch.logsumexp(s, -1)


def z_loss(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Of masked scores, as a loss that holds them near 0."""
    s = (q @ k.mT * 0.25).masked_fill(~KEEP, float("-inf")).float()
    return s.softmax(-1).to(v.dtype) @ v, s.logsumexp(-1).square().mean()


def its_own_logarithm(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """The softmax is made of what is returned."""
    s = q @ k.mT * 0.25
    lse = torch.logsumexp(s, dim=-1, keepdim=True)
    return torch.exp(s - lse) @ v, lse


def logarithm_of_unmasked(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    s = q @ k.mT * 0.25
    return s.masked_fill(~KEEP, float("-inf")).softmax(-1) @ v, s.logsumexp(-1), s.logsumexp(-2)


def logarithm_then_written(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """The scores are others once their logarithm is taken."""
    s = q @ k.mT
    lse = s.logsumexp(-1)
    s *= 0.25
    return torch.softmax(s, -1) @ v, lse, s.logsumexp(-1)


def weights_and_logarithm(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    s = q @ k.mT
    w = s.softmax(-1)
    return w @ v, w.mean(1), s.logsumexp(-1)


KEPT: dict[str, tuple[Program, int]] = {
    "returned": (returned, 1),
    "averaged over the heads": (averaged, 1),
    "one row": (one_row, 1),
    "written in place": (written_in_place, 1),
    "weights written later": (weights_written_later, 1),
    "several values": (several_values, 2),
    "before a dropout that is off": (before_dropout, 1),
    "log-sum-exp": (logarithm, 1),
    "z-loss": (z_loss, 1),
    "log-sum-exp that the softmax is made of": (its_own_logarithm, 1),
    "log-sum-exp of scores without a mask": (logarithm_of_unmasked, 1),
    "log-sum-exp of scores written later": (logarithm_then_written, 1),
    "weights and log-sum-exp": (weights_and_logarithm, 1),
}


def scores_too(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    s = q @ k.mT
    w = s.softmax(-1)
    return w @ v, w, s


def dropped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    w = F.dropout((q @ k.mT).softmax(-1), 0.5)
    return w @ v, w


def dropped_logarithm(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    s = q @ k.mT
    return F.dropout(s.softmax(-1), 0.5) @ v, s.logsumexp(-1)


def logarithm_and_scores(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    s = q @ k.mT
    return s.softmax(-1) @ v, s.logsumexp(-1), s.square().mean()


def logarithm_by_hand(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    s = q @ k.mT
    return s.softmax(-1) @ v, s.exp().sum(-1).log()


def query_written_after_logarithm(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    q = q + 1.0
    s = q @ k.mT
    w = s.softmax(-1)
    q.mul_(2)
    return w @ v, s.logsumexp(-1)


def query_written(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """It is another one by the time the result is computed."""
    q = q + 1.0
    w = (q @ k.mT).softmax(-1)
    q.mul_(2)
    return w @ v, w


LEFT: dict[str, tuple[Program, str]] = {
    "scores as well": (scores_too, "weights are returned|scores are returned"),
    "dropped out": (dropped, "weights are returned"),
    "query written": (query_written, "weights are returned"),
    "log-sum-exp, dropped out": (dropped_logarithm, "scores are also used by"),
    "log-sum-exp, and scores as well": (logarithm_and_scores, "scores are also used by"),
    "log-sum-exp by hand": (logarithm_by_hand, "scores are also used by"),
    "log-sum-exp, query written": (query_written_after_logarithm, "scores are also used by"),
}


def inputs(dtype: torch.dtype = torch.float32, grad: bool = False) -> tuple[Tensor, ...]:
    return qkv(q_len=7, kv_len=11, dtype=dtype, grad=grad)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", list(KEPT))
def test_result_by_a_kernel_and_weights_as_they_were(name: str, grad: bool) -> None:
    program, count = KEPT[name]
    if grad and program in (weights_written_later, logarithm_then_written):
        pytest.skip("eager has no gradient for it")
    same(program, *inputs(grad=grad), grad=grad, rewritten=count)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", list(KEPT))
def test_in_half_precision(name: str, dtype: torch.dtype) -> None:
    program, count = KEPT[name]
    same(program, *inputs(dtype), rewritten=count)


@pytest.mark.parametrize("program", [returned, logarithm, its_own_logarithm])
def test_dynamic_and_verified(program: Program) -> None:
    same(program, *inputs(), dynamic=True, rewritten=1)
    same(program, *inputs(), rewritten=1, verify="graph")


def test_rows_without_a_key_have_the_logarithm_they_had() -> None:
    keep = KEEP.clone()
    keep[1, 0, 3] = False

    def program(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        s = (q @ k.mT).masked_fill(~keep, float("-inf"))
        return s.softmax(-1).nan_to_num(0.0) @ v, s.logsumexp(-1)

    q, k, v = inputs()
    same(program, q, k, v, rewritten=1)
    backend = attn_pass.wrap("eager", choose="fused", on_error="raise")
    assert torch.compile(program, backend=backend)(q, k, v)[1][1, :, 3].eq(float("-inf")).all()


@pytest.mark.parametrize("name", list(LEFT))
def test_left(name: str) -> None:
    program, reason = LEFT[name]
    with attn_pass.record() as report:
        torch.compile(program, backend=attn_pass.wrap("eager", choose="fused", on_error="raise"))(*inputs())
    assert [s.outcome for s in report.sites] == ["left"] and re.search(reason, report.sites[0].reason), str(report)


def test_weights_that_are_dropped_out_are_those_of_the_program_on_any_device() -> None:
    """A kernel of a GPU would draw other numbers than the weights that are returned were drawn with."""
    inputs = qkv(q_len=64, kv_len=64, dim=64, dtype=torch.bfloat16)
    report = attn_pass.explain(dropped, *inputs, attn_pass_options={"device": "H200", "choose": "fused"})
    assert [s.reason for s in report.sites] == ["the attention weights are returned by the model"], str(report)


def large(dtype: torch.dtype) -> tuple[Tensor, ...]:
    return qkv(batch=1, heads=2, q_len=256, kv_len=256, dim=64, dtype=dtype)


def test_left_with_what_was_predicted_where_the_product_alone_is_cheaper() -> None:
    report = same(returned, *large(torch.float32), rewritten=0, choose="cheapest")
    (site,) = report.sites
    assert site.reason.startswith("the attention weights are returned by the model; without them: already the cheapest")
    assert site.predicted_us["leave"] < site.predicted_us["sdpa"]


def test_taken_where_a_kernel_beats_the_product() -> None:
    """Products in float16 are slow on the CPU, and the fused kernel is not."""
    report = same(returned, *large(torch.float16), rewritten=1, choose="cheapest")
    assert report.sites[0].reason.endswith("the attention weights are returned by the model, and stay")


def test_the_logarithm_by_what_was_predicted() -> None:
    report = same(logarithm, *large(torch.float32), rewritten=0, choose="cheapest")
    (site,) = report.sites
    assert site.reason.startswith("the attention scores are also used by")
    assert "; without them: already the cheapest" in site.reason
    report = same(logarithm, *large(torch.float16), rewritten=1, choose="cheapest")
    assert re.search("the attention scores are also used by .*, and stay$", report.sites[0].reason)
    report = same(its_own_logarithm, *inputs(), rewritten=1)
    assert report.sites[0].reason.endswith("the scores' log-sum-exp is returned by the model, and stay")


def test_nn_multihead_attention() -> None:
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(32, 4, batch_first=True).eval()
    x = randn(2, 9, 32, seed=3)

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        return module(x, x, x, need_weights=True)

    report = same(program, x, rewritten=1, reference=False)
    assert "the attention weights are used, and stay" in report.sites[0].reason
    report = same(program, x, rewritten=0, reference=False, choose="cheapest")
    assert report.sites[0].reason.startswith("the attention weights are used; without them: already the cheapest")


@pytest.mark.parametrize(("written", "softmaxes"), [(averaged, 1), (logarithm, 0)])
def test_exported(written: Program, softmaxes: int) -> None:
    """The product with the values goes, and so does a softmax that nobody needs any more."""

    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return written(q, k, v)

    program = torch.export.export(Module(), inputs())
    report = attn_pass.rewrite(program, choose="fused", on_error="raise")
    assert [s.outcome for s in report.sites] == ["rewritten"], str(report)
    names = [str(n.target) for n in program.graph.nodes]
    assert sum("matmul" in n for n in names) == 1 and sum("softmax" in n for n in names) == softmaxes
    torch.testing.assert_close(program.module()(*inputs()), Module()(*inputs()), atol=1e-5, rtol=1e-5)
