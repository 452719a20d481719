"""Packed rows, ``offsets``: every segment is the attention that it would be alone."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from kernel_reference import reference
from test_cpu_attention import DTYPES, ERRORS, SCORE, difference, laid_out, lookups

from attn_pass.devices.cpu.kernel import build, operator
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


# ---------------------------------------------------------------- drawn calls


def draw(rng: random.Random, dtype: torch.dtype) -> tuple[tuple[Any, ...], list[int], dict[str, Any]]:
    """Operands, the borders of segments, and what is given, as the operator takes it beside packed rows."""
    lengths = [rng.choice((0, 1, 2, 5, 17, 63, 64, 65, 97, 130)) for _ in range(rng.randint(1, 5))]
    total, most, segments = sum(lengths), max(lengths), len(lengths)
    kv_heads, groups = rng.choice((1, 2, 3)), rng.choice((1, 1, 2, 4))
    heads, dim = kv_heads * groups, rng.choice((1, 8, 24, 33, 64, 80))
    operands = (
        laid_out(rng, dtype, 1, heads, total, dim),
        laid_out(rng, dtype, 1, kv_heads, total, dim),
        laid_out(rng, dtype, 1, kv_heads, total, rng.choice((dim, 1, 20, 64))),
        rng.choice((dim**-0.5, 0.02)),
    )
    given: dict[str, Any] = {"fully_masked": rng.choice(operator.FULLY_MASKED)}

    def broadcast() -> list[int]:
        return [rng.choice((1, n)) for n in (segments, heads, most, most)]

    makers = {
        "keep": lambda: torch.rand(1, rng.choice((1, heads)), *rng.choice(((1, total), (total, most)))) < 0.7,
        "bias": lambda: torch.randn(broadcast()).to(rng.choice((torch.float32, dtype))),
        "after": lambda: rng.choice((0, 3)),
        "before": lambda: rng.choice((0, 1, 10, 100)),
        "prefix": lambda: rng.choice((1, 20, 200)),
        "chunk": lambda: rng.choice((1, 7, 64, 100)),
        "chunk_rows": lambda: rng.choice((-70, 5)),
        "shift": lambda: torch.randint(-3, 4, (segments,)),
        "ends": lambda: torch.randint(0, most + 1, (segments,)),
        "starts": lambda: torch.randint(0, most + 1, (rng.choice((1, segments)),)),
        "sink": lambda: torch.randn(1, heads, 1, 1),
    }
    given |= {name: make() for name, make in makers.items() if rng.random() < (0.6 if name == "keep" else 0.2)}
    if rng.random() < 0.15:
        given |= {"score": SCORE, "captured": [torch.randn(broadcast()), (torch.rand(broadcast()) < 0.5).float()]}
    if rng.random() < 0.2:
        given |= lookups(rng, dtype, (segments, heads, most, most))
    return operands, _offsets(tuple(lengths)).tolist(), given


def of_segment(given: dict[str, Any], n: int, a: int, b: int) -> dict[str, Any]:
    """What is given of one segment, as it is without packed rows."""

    def of_scores(x: torch.Tensor) -> torch.Tensor:
        own = x[min(n, len(x) - 1)][None]
        return own[:, :, : b - a, : b - a]

    cut = {
        "keep": lambda x: x[..., a:b] if x.size(2) == 1 and x.size(3) != 1 else x[:, :, a:b, : b - a],
        "bias": of_scores,
        **dict.fromkeys(("captured", "tables", "places"), lambda several: [of_scores(x) for x in several]),
        **dict.fromkeys(("shift", "starts", "ends"), lambda x: x[min(n, len(x) - 1)][None]),
    }
    return {name: cut.get(name, lambda x: x)(x) for name, x in given.items()}


def failures(dtype: torch.dtype, count: int, seed: int) -> list[str]:
    """Drawn calls on packed rows that come out wrong, in words, and those whose gradients do."""
    rng, faults = random.Random(seed), []
    torch.manual_seed(seed)
    for number in range(count):
        (*operands, scale), borders, given = draw(rng, dtype)
        segments = [(n, a, b) for n, (a, b) in enumerate(pairwise(borders)) if a < b]
        if not segments:
            continue
        offsets = torch.tensor(borders)
        out = OPERATOR(*operands, scale, offsets=offsets, **given)
        parts = [
            reference(*(x[:, :, a:b] for x in operands), scale, **of_segment(given, n, a, b))[0] for n, a, b in segments
        ]
        wrong = difference(out, torch.cat(parts, 2))
        if not {"bias", "captured", "tables"} & given.keys() and given["fully_masked"] != "nan":
            wrong = max(wrong, _wrong_gradients(operands, scale, offsets, segments, given))
        if wrong > ERRORS[dtype]:
            faults.append(f"{dtype} {seed}.{number}: {wrong:.1e} {borders} {operands[0].shape} {sorted(given)}")
    return faults


def _wrong_gradients(operands: Any, scale: float, offsets: Any, segments: Any, given: dict[str, Any]) -> float:
    """Beside those of segment by segment by the same kernel, in units of the largest."""
    grads, upstream = [], torch.randn(1, operands[0].size(1), operands[0].size(2), operands[2].size(3))
    for packed in (True, False):
        leaves = [x.detach().clone().requires_grad_() for x in operands]
        calls = [(slice(None), {**given, "offsets": offsets})] if packed else []
        calls += [] if packed else [(slice(a, b), of_segment(given, n, a, b)) for n, a, b in segments]
        for rows, own in calls:
            out, *_ = FORWARD(*(x[:, :, rows] for x in leaves), scale, **own)
            (out.float() * upstream[:, :, rows]).sum().backward()
        grads.append([x.grad for x in leaves])
    apart = [float((a - b).abs().max() / b.abs().max().clamp(min=1.0)) for a, b in zip(*grads, strict=True)]
    return max(apart) if all(x == x for x in apart) else float("inf")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_drawn_calls_on_packed_rows_are_right(dtype: torch.dtype) -> None:
    assert failures(dtype, 40, seed=21) == []


def test_a_keep_condition_of_each_row_and_position() -> None:
    """Segments of 3 and 5 rows: columns are positions of keys in a row's own segment."""
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    keep = torch.rand(1, 1, 8, 5) < 0.5
    keep[..., 0] = True
    out = OPERATOR(q, k, v, 0.3, offsets=torch.tensor([0, 3, 8]), keep=keep)
    alone = _alone(q, k, v, [0, 3, 8], keep=lambda n, a, b: keep[:, :, a:b, : b - a])
    torch.testing.assert_close(out, alone)


@pytest.mark.parametrize("rows", [3, 40, 200])
def test_fully_masked_rows_share_one_mean(rows: int) -> None:
    """Of each head its own, and of a segment its own."""
    q, k, v = (torch.randn(2, h, rows, 24) for h in (4, 2, 2))
    keep = torch.rand(2, 1, rows, 1).lt(0.5) & torch.rand(2, 1, 1, rows).lt(0.9)
    out = OPERATOR(q, k, v, 0.3, keep=keep, fully_masked="mean")
    wanted, _ = reference(q, k, v, 0.3, keep=keep, fully_masked="mean")
    assert difference(out, wanted) < ERRORS[torch.float32]


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
