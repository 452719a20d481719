"""Packed rows, ``offsets``: every segment is the attention that it would be alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from attn_pass.devices.cpu.kernel import build
from attn_pass.devices.cpu.kernel.gradients import FORWARD
from attn_pass.devices.cpu.kernel.operator import OPERATOR

pytestmark = pytest.mark.skipif(bool(build.missing()), reason="no compiler for the CPU kernel")
LENGTHS = [(5, 0, 1, 17), (130, 1, 64, 3), (200,), (1, 1, 1)]


def _offsets(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])


def _alone(q: Any, k: Any, v: Any, borders: list[int], **given: Any) -> torch.Tensor:
    """Segment by segment; ``given`` are functions of a segment's number, its first row and its last."""
    parts = []
    for n, (a, b) in enumerate(pairwise(borders)):
        if a < b:
            now = {name: make(n, a, b) for name, make in given.items()}
            parts.append(OPERATOR(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], 0.3, **now))
    return torch.cat(parts, 2)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_segment_is_an_attention_of_its_own(lengths: tuple[int, ...], dtype: torch.dtype, threads: int) -> None:
    offsets, total = _offsets(lengths), sum(lengths)
    q = torch.randn(1, total, 6, 24, dtype=dtype).transpose(1, 2)
    k, v = torch.randn(1, 2, total, 24, dtype=dtype), torch.randn(1, total, 2, 10, dtype=dtype).transpose(1, 2)
    keep = torch.rand(1, 1, 1, total) < 0.7
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        out = OPERATOR(q, k, v, 0.3, offsets=offsets, keep=keep, after=0, fully_masked="mean")
    finally:
        torch.set_num_threads(before)
    kept = {"keep": lambda n, a, b: keep[..., a:b], "after": lambda *_: 0, "fully_masked": lambda *_: "mean"}
    alone = _alone(q, k, v, offsets.tolist(), **kept)
    assert out.shape == (1, 6, total, 10)
    torch.testing.assert_close(out, alone, rtol=1e-3 if dtype == torch.float32 else 2e-2, atol=1e-5)


def test_a_bias_is_read_by_positions_in_the_segment() -> None:
    lengths = (9, 30, 2)
    offsets = _offsets(lengths)
    q, k, v = (torch.randn(1, 4, 41, 16) for _ in range(3))
    bias, sink = torch.randn(1, 4, 32, 32), torch.randn(1, 4, 1, 1)
    ends = torch.tensor([4, 29, 2])
    out = OPERATOR(q, k, v, 0.3, offsets=offsets, bias=bias, sink=sink, ends=ends)
    alone = _alone(
        q,
        k,
        v,
        offsets.tolist(),
        bias=lambda n, a, b: bias[:, :, : b - a, : b - a],
        sink=lambda *_: sink,
        ends=lambda n, a, b: ends[n : n + 1],
    )
    torch.testing.assert_close(out, alone)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    offsets = _offsets((300, 7, 120))
    q, k, v = (torch.randn(1, 4, 427, 32) for _ in range(3))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 8):
            torch.set_num_threads(threads)
            results.append(OPERATOR(q, k, v, 0.3, offsets=offsets))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_compiled_with_a_number_of_rows_that_is_known_at_run_time_only() -> None:
    def program(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        packed = x.index_select(0, rows.flatten().nonzero().squeeze(1)).view(1, -1, 2, 16).transpose(1, 2)
        offsets = torch.nn.functional.pad(rows.sum(1).cumsum(0), (1, 0))
        return OPERATOR(packed, packed, packed, 0.3, offsets=offsets)

    x = torch.randn(60, 32)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(program, fullgraph=True)
        for lengths in ((3, 20, 11), (20, 20, 20), (1, 1, 1)):
            rows = torch.arange(20) < torch.tensor(lengths)[:, None]
            torch.testing.assert_close(compiled(x, rows), program(x, rows))


# ---------------------------------------------------------------- gradients


def _stepped(q: Any, k: Any, v: Any, **given: Any) -> tuple[torch.Tensor, ...]:
    """The result, the log-sum-exp, and the gradients of query, key, value and sink."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    sink = given.pop("sink", None)
    sink = None if sink is None else sink.detach().clone().requires_grad_()
    out, lse, *_ = FORWARD(*leaves, 0.3, sink=sink, **given)
    torch.manual_seed(0)
    (out * torch.randn(out.shape[1:]).to(out.dtype)).sum().backward()
    return out.detach(), lse, *(x.grad for x in (*leaves, *(() if sink is None else (sink,))))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 3])
def test_gradients_of_a_segment_are_those_that_it_has_alone(
    lengths: tuple[int, ...], dtype: torch.dtype, threads: int
) -> None:
    offsets, total = _offsets(lengths), sum(lengths)
    q = torch.randn(1, total, 6, 24, dtype=dtype).transpose(1, 2)
    k, v = torch.randn(1, 2, total, 24, dtype=dtype), torch.randn(1, total, 2, 10, dtype=dtype).transpose(1, 2)
    keep, sink = torch.rand(1, 1, 1, total) < 0.7, torch.randn(1, 6, 1, 1)
    weights = torch.randn(1, 6, total, 10).to(dtype)

    def gradients(parts: list[slice], **given: Any) -> list[torch.Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, sink)]
        for rows in parts:
            some = [x[:, :, rows] for x in leaves[:3]]
            out, *_ = FORWARD(*some, 0.3, keep=keep[..., rows], after=0, sink=leaves[3], fully_masked="zero", **given)
            (out * weights[:, :, rows]).sum().backward(retain_graph=True)
        return [x.grad for x in leaves if x.grad is not None]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        got = gradients([slice(None)], offsets=offsets)
    finally:
        torch.set_num_threads(before)
    wanted = gradients([slice(a, b) for a, b in pairwise(offsets.tolist()) if a < b])
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("fully_masked", ["zero", "mean"])
def test_a_segment_without_keys_in_training(fully_masked: str) -> None:
    """Dropout draws for a row what it draws for that of a batch: both are one and the same call."""
    q, k, v = (torch.randn(3, 4, 9, 16) for _ in range(3))
    keep = torch.ones(3, 1, 1, 9, dtype=torch.bool)
    keep[1], keep[2, ..., 4:] = False, False
    more = {"dropout": 0.4, "seed": torch.tensor([7])} if fully_masked == "zero" else {}
    wanted = _stepped(q, k, v, keep=keep, fully_masked=fully_masked, **more)
    rows = [x.transpose(1, 2).reshape(1, 27, 4, 16).transpose(1, 2) for x in (q, k, v)]
    offsets = torch.tensor([0, 9, 18, 27])
    given = {"keep": keep.reshape(1, 1, 1, 27), "offsets": offsets, "fully_masked": fully_masked, **more}
    out, _, *_ = FORWARD(*rows, 0.3, **given)
    whole = out.transpose(1, 2).reshape(3, 9, 4, 16).transpose(1, 2)
    torch.testing.assert_close(whole, wanted[0])
    leaves = [x.detach().clone().requires_grad_() for x in rows]
    out, lse, *_ = FORWARD(*leaves, 0.3, **given)
    torch.manual_seed(0)
    weights = torch.randn(4, 9, 16)
    (out.transpose(1, 2).reshape(3, 9, 4, 16).transpose(1, 2) * weights).sum().backward()
    for leaf, other in zip(leaves, wanted[2:], strict=True):
        torch.testing.assert_close(leaf.grad.transpose(1, 2).reshape(3, 9, 4, 16).transpose(1, 2), other)
    by_row = wanted[1].transpose(1, 2).reshape(27, 4)
    torch.testing.assert_close(lse[0].T, by_row)


def test_a_bias_has_no_gradient_beside_packed_rows() -> None:
    q, k, v = (torch.randn(1, 2, 12, 16) for _ in range(3))
    bias = torch.randn(1, 2, 8, 8, requires_grad=True)
    out, *_ = FORWARD(q, k, v, 0.3, bias=bias, offsets=torch.tensor([0, 4, 12]))
    with pytest.raises(NotImplementedError, match="beside packed rows"):
        out.sum().backward()
