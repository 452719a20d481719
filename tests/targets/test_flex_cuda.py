"""The flex target for CUDA devices, by its numbers: what it emits as products and a softmax is what was written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from against_eager import qkv, same
from flex_graphs import blockwise, rewritten, tensor_of
from flex_programs import BIG, CASES, FILLED, ON_CUDA, causal, chunks, masked, positions, prefix, window
from gym_programs import GYM, IDS, N
from gym_programs import program as gym_program
from torch import nn

import attn_pass
from attn_pass.targets.masks import LOWEST_CUDA

Tensor = torch.Tensor


@pytest.mark.parametrize("name", list(CASES))
def test_it_equals_the_program(name: str) -> None:
    fn, inputs = CASES[name]
    report = same(fn, *inputs, rewritten=1, **ON_CUDA)
    assert report.sites[0].target == "flex"


@pytest.mark.parametrize("name", list(CASES))
def test_its_gradients_equal_the_programs(name: str) -> None:
    fn, inputs = CASES[name]
    leaves = tuple(x.detach().requires_grad_() if n < 3 and x.is_floating_point() else x for n, x in enumerate(inputs))
    report = same(fn, *leaves, rewritten=int(name not in FILLED), grad=True, **ON_CUDA)
    if name in FILLED:  # a row may hold nothing but a fill, beside which its length is lost in the logsumexp
        assert "fully masked by a number" in report.sites[0].refusals["flex"]
        if name != "fully masked rows, finite fill":
            same(fn, *leaves, rewritten=1, grad=True, assume_nonempty_rows=True, **ON_CUDA)


def test_fills_stay_finite_in_the_base_the_kernel_computes_in() -> None:
    """It multiplies scores by log2(e) before it looks for the highest: float32's lowest number would be -inf."""
    for name in FILLED:
        fn, inputs = CASES[name]
        _, report = rewritten(fn, *inputs)
        assert str(LOWEST_CUDA) in report.sites[0].score_mod, name


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qv"])
def test_gradients_of_some_operands_only(wanted: str) -> None:
    inputs = [x.requires_grad_(n in wanted) for x, n in zip(qkv(**BIG), "qkv")]
    same(masked(window, cap=True), *inputs, rewritten=1, grad=True, **ON_CUDA)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["soft cap", "causal and soft cap", "window", "alibi", "grouped heads"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    fn, inputs = CASES[name]
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    same(fn, *leaves, rewritten=1, grad=True, **ON_CUDA)


def test_float16_scores_that_are_multiplied_after_they_were_masked() -> None:
    """What counts is the number that was added: -65504 absorbs a score, and times 0.3 it would not."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = positions(q, k)
        matrix = torch.where((j < i) & (i - j < 40), 0.0, -65504.0).to(q.dtype)
        twice = torch.where(j < 20, -65504.0, 0.0).to(q.dtype)  # and -inf where both are added
        return ((q @ k.mT * 0.25 + matrix + twice) * 0.3).softmax(-1) @ v

    with torch.no_grad():
        report = same(fn, *qkv(**BIG, dtype=torch.float16), rewritten=1, reference=False, **ON_CUDA)
    assert report.sites[0].target == "flex"


@pytest.mark.parametrize("name", GYM)
def test_the_masks_of_attention_gym_without_a_matrix(name: str) -> None:
    if name in ("causal",):
        pytest.skip("torch's own kernels take it")
    inputs = qkv(2, 2, N, N)
    report = same(gym_program(GYM[name]), *inputs, IDS, rewritten=1, reference=False, **ON_CUDA)
    # What a score reads is indices and the program's small tensors, never a matrix of scores' size.
    assert f"{N}, {N}" not in str(report.sites[0].score_mod) and report.sites[0].score_mod


def test_no_matrix_is_made() -> None:
    for name in ("window", "prefix", "dilated", "alibi", "documents"):
        fn, inputs = CASES[name]
        graph, _ = rewritten(fn, *inputs)
        sizes = [n.meta["example_value"].numel() for n in graph.graph.nodes if tensor_of(n) is not None]
        assert max(sizes) <= max(x.numel() for x in inputs), name


def test_lengths_may_be_symbolic() -> None:
    for fn in (masked(causal, cap=True), masked(window), masked(prefix), masked(chunks)):
        inputs = qkv(q_len=300, kv_len=300)
        for x in inputs:
            torch._dynamo.mark_dynamic(x, 2)
        torch._dynamo.reset()
        with attn_pass.record() as report:
            compiled = torch.compile(fn, backend=attn_pass.wrap(blockwise, choose="fused", on_error="raise", **ON_CUDA))
            for given in (inputs, qkv(q_len=130, kv_len=130), qkv(q_len=700, kv_len=700)):
                torch.testing.assert_close(compiled(*given), fn(*given), atol=1e-5, rtol=1e-5)
        assert [s.target for s in report.sites] == ["flex"]


def test_a_checkpointed_layer_trains() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layer: Any = torch.utils.checkpoint.checkpoint(masked(window, cap=True), q, k, v, use_reentrant=False)
        return layer * 2

    same(fn, *qkv(grad=True, **BIG), rewritten=1, grad=True, aot=True, **ON_CUDA)


def test_an_exported_program_stays_valid() -> None:
    class Model(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return masked(window)(q, k, v)

    inputs, length = qkv(**BIG), torch.export.Dim("length", min=2, max=2048)
    with torch.no_grad():
        program = torch.export.export(Model(), inputs, dynamic_shapes=({2: length},) * 3)
        report = attn_pass.rewrite(program, choose="fused", on_error="raise", **ON_CUDA)
        assert [s.target for s in report.sites] == ["flex"]
        for given in (inputs, qkv(q_len=77, kv_len=77)):
            torch.testing.assert_close(program.module()(*given), Model()(*given), atol=1e-5, rtol=1e-5)
