"""Weights, or a log-sum-exp, that are needed too: the kernel gives the result, and they stay beside it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from against_eager import qkv, randn, same
from also_used_programs import (
    KEEP,
    KEPT,
    LEFT,
    Program,
    averaged,
    dropped,
    inputs,
    its_own_logarithm,
    logarithm,
    logarithm_then_written,
    returned,
    weights_written_later,
)
from torch import Tensor

import attn_pass


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
    assert "the attention weights are requested, and stay" in report.sites[0].reason
    report = same(program, x, rewritten=0, reference=False, choose="cheapest")
    assert report.sites[0].reason.startswith("the attention weights are requested; without them: already the cheapest")


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
