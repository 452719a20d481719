"""The flex target for CUDA devices: its results as products and a softmax, its block lists, its rules.

The Triton templates need a GPU, so what they would make of it is computed block by block here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from against_eager import NEG_INF, qkv, randn, same
from gym_programs import GYM, IDS, N
from gym_programs import program as gym_program
from torch import nn
from torch._subclasses import FakeTensorMode, fake_tensor

import attn_pass
from attn_pass.devices import registry
from attn_pass.devices.cuda import cost as cost_cuda
from attn_pass.devices.roofline import Problem
from attn_pass.model.structure import Band, Chunk, Either, Keys, Part
from attn_pass.targets.base import Offer
from attn_pass.targets.flex import blocks as flex_blocks
from attn_pass.targets.flex import rules
from attn_pass.targets.flex.flex import Flex
from attn_pass.targets.flex.lower import kernel_options
from attn_pass.targets.flex.rules import Case, refusal
from attn_pass.targets.flex.score import function_of
from attn_pass.targets.masks import LOWEST_CUDA

Tensor = torch.Tensor
CAP = 5.0
ON_CUDA: dict[str, Any] = {"device": "H200", "targets": ("flex",)}
LOWEST = torch.finfo(torch.float32).min


def capped(q: Tensor, k: Tensor) -> Tensor:
    return torch.tanh(q @ k.mT * 0.25 / CAP) * CAP


def softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return capped(q, k).softmax(-1) @ v


def positions(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(q.size(-2))[:, None], torch.arange(k.size(-2))[None]


def masked(keep: Callable[[Tensor, Tensor], Tensor], fill: float = NEG_INF, cap: bool = False) -> Callable[..., Tensor]:
    """Attention where key j of query i is kept if ``keep(i, j)``."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = capped(q, k) if cap else q @ k.mT * 0.25
        return scores.masked_fill(~keep(*positions(q, k)), fill).softmax(-1) @ v

    return fn


def causal(i: Tensor, j: Tensor) -> Tensor:
    return j <= i


def window(i: Tensor, j: Tensor) -> Tensor:
    return (j <= i) & (i - j < 40)


def prefix(i: Tensor, j: Tensor) -> Tensor:
    return (j <= i) | (j < 20)


def sinks_and_window(i: Tensor, j: Tensor) -> Tensor:
    return ((j <= i) & (i - j < 40)) | ((j < 4) & (j <= i))


def chunks(i: Tensor, j: Tensor) -> Tensor:
    return (i // 32 == j // 32) & (j <= i)


def dilated(i: Tensor, j: Tensor) -> Tensor:
    return (j <= i) & ((i - j) % 4 == 0)


def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = positions(q, k)
    slopes = (2.0 ** -torch.arange(1.0, q.size(1) + 1)[:, None, None]).to(q.dtype)
    return (q @ k.mT * 0.25 - slopes * (i - j)).masked_fill(j > i, NEG_INF).softmax(-1) @ v


def documents(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    i, j = positions(q, k)
    keep = (j <= i) & (ids[:, None, :, None] == ids[:, None, None, :])
    return (q @ k.mT * 0.25).masked_fill(~keep, NEG_INF).softmax(-1) @ v


def padded(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    i, j = positions(q, k)
    return (q @ k.mT * 0.25 + (1 - m[:, None, None]) * LOWEST).masked_fill(j > i, LOWEST).softmax(-1) @ v


def added(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (capped(q, k) + bias).softmax(-1) @ v


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT * 0.25 + bias).softmax(-1) @ v


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return masked(causal, cap=True)(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))


def grouped_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return masked(window)(q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1))


def by_temperature(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return torch.tanh((q * t) @ (k / 4).mT).softmax(-1) @ v


def by_rows(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    i, j = positions(q, k)
    return ((q * t) @ k.mT).masked_fill(((i - j) % 3 == 1), NEG_INF).softmax(-1) @ v


def heads_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return masked(window, cap=True)(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2).flatten(2)


def fused_projection(x: Tensor) -> Tensor:
    q, k, v = x.view(2, -1, 3, 2, 16).permute(2, 0, 3, 1, 4).unbind(0)
    return masked(window)(q * 2, k, v)


def clamped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).clamp(-1.5, 1.5).softmax(-1) @ v


def weakly_filled(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    return (q @ k.mT * 0.25).masked_fill(m, -2.0).softmax(-1) @ v


IDENTITIES = torch.arange(300)[None] * torch.tensor([[1], [3]]) // 70
BIG = {"q_len": 300, "kv_len": 300}
CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "soft cap": (softcap, qkv(**BIG)),
    "causal and soft cap": (masked(causal, cap=True), qkv(**BIG)),
    "window and soft cap": (masked(window, cap=True), qkv(**BIG)),
    "window": (masked(window), qkv(**BIG)),
    "window, finite fill": (masked(window, LOWEST), qkv(**BIG)),
    "causal, more keys than rows": (masked(lambda i, j: j <= i + 50), qkv(q_len=250, kv_len=300)),
    "prefix": (masked(prefix), qkv(**BIG)),
    "sinks and window": (masked(sinks_and_window), qkv(**BIG)),
    "chunks": (masked(chunks), qkv(**BIG)),
    "dilated": (masked(dilated), qkv(**BIG)),
    "alibi": (alibi, qkv(**BIG)),
    "documents": (documents, (*qkv(**BIG), IDENTITIES)),
    "padding and causal": (padded, (*qkv(**BIG), (torch.arange(300)[None] < torch.tensor([[300], [200]])).float())),
    "dense bias": (added, (*qkv(**BIG), randn(2, 1, 300, 300))),
    "bias and affine scores": (biased, (*qkv(**BIG), randn(2, 300, 300))),
    "fully masked rows, finite fill": (added, (*qkv(), torch.eye(8).roll(1, 0)[None, None] * LOWEST)),
    "grouped heads": (grouped, qkv(heads=4, kv_heads=2, **BIG)),
    "grouped heads, a window": (grouped_window, qkv(heads=4, kv_heads=1, **BIG)),
    "a factor of the query's rows": (by_temperature, (*qkv(), randn(2, 2, 8, 1))),
    "affine, a factor of the query's rows": (by_rows, (*qkv(), randn(2, 2, 8, 1))),
    "odd sizes": (masked(window, cap=True), qkv(batch=3, heads=5, q_len=131, kv_len=257, dim=24)),
    "one query": (masked(lambda i, j: (j + i) % 3 == 1), qkv(q_len=1, kv_len=300)),
    "one query, soft cap": (softcap, qkv(q_len=1, kv_len=300)),
    "one key": (softcap, qkv(q_len=5, kv_len=1)),
    "other values": (masked(window), qkv(value_dim=32, **BIG)),
    "heads last": (heads_last, tuple(x.transpose(1, 2).contiguous() for x in qkv(**BIG))),
    "fused projection": (fused_projection, (randn(2, 300, 96),)),
    "clamp": (clamped, qkv(**BIG)),
    "weak fill": (weakly_filled, (*qkv(), randn(8, 8) > 0)),
}


@pytest.mark.parametrize("name", list(CASES))
def test_it_equals_the_program(name: str) -> None:
    fn, inputs = CASES[name]
    report = same(fn, *inputs, rewritten=1, **ON_CUDA)
    assert report.sites[0].target == "flex"


FILLED = ("padding and causal", "dense bias", "bias and affine scores", "fully masked rows, finite fill")


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

    same(fn, *qkv(grad=True, **BIG), rewritten=1, grad=True, **ON_CUDA)


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


# ---- block by block, as the templates do


def tensor_of(node: torch.fx.Node) -> Tensor | None:
    held = node.meta.get("example_value")
    return held if isinstance(held, Tensor) else None


def rewritten(fn: Callable[..., Any], *inputs: Any, **options: Any) -> tuple[torch.fx.GraphModule, attn_pass.Report]:
    """The graph the pass made."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    backend = attn_pass.wrap(keep, **{"choose": "fused", "on_error": "raise", **ON_CUDA, **options})
    with attn_pass.record() as report:
        torch.compile(fn, backend=backend, dynamic=False)(*inputs)
    return graphs[0], report


def call_of(graph: torch.fx.GraphModule) -> torch.fx.Node:
    flex = torch.ops.higher_order.flex_attention
    return next(n for n in graph.graph.nodes if n.target is flex)


class Blockwise(torch.fx.Interpreter):
    """Runs FlexAttention by the lists of its block mask, with the mask function on partial blocks alone."""

    visited = 0

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not torch.ops.higher_order.flex_attention:
            return super().call_function(target, args, kwargs)
        query, key, value, score_mod, mask, scale, _, captured, masked_by = args
        *lists, rows_in_block, keys_in_block, mask_mod = mask
        key, value = (x.repeat_interleave(query.size(1) // x.size(1), 1) for x in (key, value))
        scores = torch.full((*query.shape[:3], key.size(2)), NEG_INF)
        full, partial = (blocks_of(*lists[n : n + 2], lists[0], rows_in_block) for n in (4, 2))
        assert not full & partial
        if lists[6] is not None:  # a backward asks for the same blocks by their keys
            turned = [blocks_of(*lists[n : n + 2], lists[1], keys_in_block) for n in (8, 6)]
            assert [{(r, k) for k, r in found} for found in turned] == [full, partial]
        for blocks, is_full in ((full, True), (partial, False)):
            for row, col in blocks:
                i = torch.arange(row * rows_in_block, min((row + 1) * rows_in_block, query.size(2)))
                j = torch.arange(col * keys_in_block, min((col + 1) * keys_in_block, key.size(2)))
                Blockwise.visited += 1
                b, h = torch.arange(query.size(0)), torch.arange(query.size(1))
                index = [x.to(torch.int32) for x in torch.meshgrid(b, h, i, j, indexing="ij")]
                part = (query[:, :, i] @ key[:, :, j].mT) * scale
                part = elementwise(score_mod, captured, part, *index)
                if not is_full:
                    part = part.masked_fill(~elementwise(mask_mod, masked_by, *index), NEG_INF)
                scores[:, :, i[0] : i[-1] + 1, j[0] : j[-1] + 1] = part
        return torch._safe_softmax(scores, -1) @ value, None, None


def elementwise(mod: Any, captured: Sequence[Tensor], *tensors: Tensor) -> Tensor:
    """A score or mask function of every element."""
    flat = [t.flatten() for t in tensors]
    of_one = torch.vmap(mod, in_dims=(0,) * len(flat) + (None,) * len(captured))
    return of_one(*flat, *captured).view(tensors[0].shape).clone()


def blocks_of(counts: Tensor | None, indices: Tensor | None, length: int, size: int) -> set[tuple[int, int]]:
    """Pairs of a block of the one side and one of the other that it visits, each once."""
    if counts is None or indices is None:
        return set()
    assert counts.dtype == indices.dtype == torch.int32 and counts.is_contiguous() and indices.is_contiguous()
    assert counts.shape[:2] == indices.shape[:2] == (1, 1) and counts.size(2) == indices.size(2) >= -(-length // size)
    pairs = [
        (row, int(indices[0, 0, row, n])) for row in range(-(-length // size)) for n in range(int(counts[0, 0, row]))
    ]
    assert len(set(pairs)) == len(pairs)
    return set(pairs)


def blockwise(gm: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    return Blockwise(gm).run


@pytest.mark.parametrize(("name", "grad"), [(n, g) for n in CASES for g in (False, True) if not (g and n in FILLED)])
def test_the_blocks_are_the_ones_that_count(name: str, grad: bool) -> None:
    fn, inputs = CASES[name]
    leaves = [x.detach().requires_grad_(grad) if n < 3 and x.is_floating_point() else x for n, x in enumerate(inputs)]
    torch._dynamo.reset()
    backend = attn_pass.wrap(blockwise, choose="fused", on_error="raise", **ON_CUDA)
    with attn_pass.record() as report:
        found = torch.compile(fn, backend=backend, dynamic=False)(*leaves)
    assert [s.target for s in report.sites] == ["flex"]
    torch.testing.assert_close(found, fn(*inputs), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "blocks"),
    [("soft cap", 9), ("causal and soft cap", 6), ("window", 5), ("prefix", 6), ("documents", 6), ("alibi", 6)],
)
def test_hidden_blocks_are_skipped(name: str, blocks: int) -> None:
    fn, inputs = CASES[name]
    torch._dynamo.reset()
    Blockwise.visited = 0
    torch.compile(fn, backend=attn_pass.wrap(blockwise, choose="fused", **ON_CUDA), dynamic=False)(*inputs)
    assert Blockwise.visited == blocks


# ---- the arithmetic of blocks, against every pair of positions

PARTS: tuple[Part, ...] = (
    *(Band(None, 0), Band(-3, 0), Band(2, None), Band(-40, 25), Band(5, 9), Band(-9, -5)),
    *(Keys(None, 19), Keys(7, None), Keys(16, 31), Chunk(16), Chunk(7), Chunk(24, 5, 5), Chunk(10, 0, -4)),
)


def kept(part: Part, i: int, j: int) -> bool:
    if isinstance(part, Band):
        return (part.lower is None or j - i >= part.lower) and (part.upper is None or j - i <= part.upper)
    if isinstance(part, Keys):
        return (part.lower is None or j >= part.lower) and (part.upper is None or j <= part.upper)
    if isinstance(part, Chunk):
        return (j + part.key_shift) // part.size == (i + part.row_shift) // part.size
    assert isinstance(part, Either)
    return any(all(kept(p, i, j) for p in option) for option in part.options)


@pytest.mark.parametrize("number", [1, 2])
def test_blocks_hold_every_kept_pair_and_full_ones_no_other(number: int) -> None:
    for parts in itertools.combinations(PARTS, number):
        rows, keys = 16, 8
        for block in range(6):
            around = {
                False: flex_blocks.span(parts, block * rows, rows, keys, 11, flex_blocks.INTEGERS, of_keys=False),
                True: flex_blocks.span(parts, block * keys, keys, rows, 5, flex_blocks.INTEGERS, of_keys=True),
            }
            for of_keys, (start, end, full_start, full_end) in around.items():
                assert start <= full_start <= full_end <= end
                own, other, count = (keys, rows, 5) if of_keys else (rows, keys, 11)
                for n in range(count):
                    pairs = itertools.product(range(block * own, (block + 1) * own), range(n * other, (n + 1) * other))
                    found = [all(kept(p, *((y, x) if of_keys else (x, y))) for p in parts) for x, y in pairs]
                    assert start <= n < end or not any(found), (parts, block, n)
                    assert not full_start <= n < full_end or all(found), (parts, block, n)


def test_one_band_has_no_block_too_many() -> None:
    for part in PARTS[:6]:
        for block in range(6):
            start, end, full_start, full_end = flex_blocks.span(
                (part,), block * 16, 16, 8, 11, flex_blocks.INTEGERS, of_keys=False
            )
            for n in range(11):
                found = [kept(part, i, j) for i in range(block * 16, block * 16 + 16) for j in range(n * 8, n * 8 + 8)]
                assert (start <= n < end, full_start <= n < full_end) == (any(found), all(found))


def test_the_share_counts_what_is_visited() -> None:
    assert flex_blocks.share((), 300, 300, (128, 128)) == 1
    assert flex_blocks.share((Band(None, 0),), 384, 384, (128, 128)) == pytest.approx(6 / 9)
    either = Either(((Band(-39, 0),), (Keys(None, 3), Band(None, 0))))
    assert flex_blocks.share((either,), 512, 512, (128, 128)) == pytest.approx((1 + 2 + 3 + 3) / 16)
    many = tuple(Either(((Band(None, n),), (Keys(None, n),))) for n in range(5))
    assert len(flex_blocks.conjunctions(many)) <= 8


# ---- rules


def reason(fn: Callable[..., Any], *inputs: Any, **options: Any) -> str:
    """Why flex does not take it; empty where it does."""
    _, report = rewritten(fn, *inputs, **options)
    (site,) = report.sites
    return "" if site.target == "flex" else site.reason


def sink(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Tensor:
    scores = torch.cat([capped(q, k), s[None, :, None, None].expand(q.size(0), -1, q.size(2), 1)], -1)
    return scores.softmax(-1)[..., :-1] @ v


def with_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = positions(q, k)
    weights = (q @ k.mT).masked_fill((j > i) | (i - j > 3), NEG_INF).softmax(-1)
    return torch.dropout(weights, 0.1, True) @ v


def threshold(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    return torch.where(s < 0, -1.0, s).softmax(-1) @ v


def test_each_rule_on_both_sides() -> None:
    take = (masked(dilated), *qkv())
    assert reason(*take) == ""
    assert reason(*take, device="A100") == reason(*take, device="L4") == reason(*take, device="B200") == ""
    assert "npu" in reason(softcap, *qkv(), device="Ascend 910B")
    assert "float64" in reason(take[0], *qkv(dtype=torch.float64))
    assert "sink" in reason(sink, *qkv(), randn(2))
    assert "dropout 0.1" in reason(with_dropout, *qkv(grad=True))
    assert "head dim is below 16" in reason(take[0], *qkv(dim=15))
    assert "head dim is below 16" in reason(take[0], *qkv(value_dim=8))
    assert "or are over 256" in reason(take[0], *qkv(dim=257))
    assert reason(take[0], *qkv(dim=24, value_dim=256)) == ""
    assert "without a mask" in reason(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, *qkv())
    assert "without a mask" in reason(masked(causal), *qkv())
    assert "jump" in reason(threshold, *qkv()) or "scores" in reason(threshold, *qkv())


def test_a_batch_past_the_grid_is_left() -> None:
    assert "65535" in reason(masked(window), *qkv(batch=65536, heads=1, q_len=2, kv_len=2), poor_cases=())


@pytest.mark.parametrize("captured", ["bias", "temperature"])
def test_a_captured_tensor_that_wants_a_gradient_is_left(captured: str) -> None:
    fn, more = {"bias": (added, randn(2, 1, 8, 8)), "temperature": (by_temperature, randn(2, 2, 8, 1))}[captured]
    assert "needs a gradient" in reason(fn, *qkv(grad=True), more.clone().requires_grad_())
    assert reason(fn, *qkv(grad=True), more, assume_nonempty_rows=True) == ""
    with torch.no_grad():
        assert reason(fn, *qkv(grad=True), more.clone().requires_grad_()) == ""


def test_a_learned_factor_of_affine_scores_has_its_gradient() -> None:
    same(by_rows, *qkv(grad=True), randn(2, 2, 8, 1, grad=True), rewritten=1, grad=True, **ON_CUDA)


def test_unknown_heads_are_left_and_an_unknown_batch_is_not() -> None:
    for dim, text in ((1, "heads"), (0, "")):
        inputs = qkv(batch=4, heads=4)
        for x in inputs:
            torch._dynamo.mark_dynamic(x, dim)
        torch._dynamo.reset()
        with attn_pass.record() as report:
            backend = attn_pass.wrap("aot_eager_default_partitioner", choose="fused", on_error="raise", **ON_CUDA)
            torch.compile(masked(window, cap=True), backend=backend)(*inputs)
        site = report.sites[0]
        assert (site.target == "flex") == (not text) and text in site.reason


def test_a_captured_tensor_of_unknown_size_is_taken() -> None:
    inputs = (*qkv(batch=3), randn(3, 2, 8, 8))
    same(added, *inputs, rewritten=1, dynamic=False, **ON_CUDA)
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.reset()
    with torch.no_grad(), attn_pass.record() as report:
        backend = attn_pass.wrap("aot_eager_default_partitioner", choose="fused", on_error="raise", **ON_CUDA)
        torch.testing.assert_close(torch.compile(added, backend=backend)(*inputs), added(*inputs), atol=1e-5, rtol=1e-5)
    assert report.sites[0].target == "flex"


def case_of(fn: Callable[..., Any], *inputs: Any, monkeypatch: pytest.MonkeyPatch) -> Case:
    """What the rules are asked about."""
    cases: list[Case] = []
    consider = Flex.consider

    def note(self: Flex, attention: Any, variant: str, setting: Any) -> Any:
        cases.append(Case(attention, setting, function_of(attention, setting)))
        return consider(self, attention, variant, setting)

    monkeypatch.setattr(Flex, "consider", note)
    rewritten(fn, *inputs, poor_cases=())
    return cases[0]


def test_rules_about_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(masked(dilated), *qkv(), monkeypatch=monkeypatch)
    assert refusal(case) is None

    def refused(**changes: Any) -> str:
        return refusal(replace(case, setting=replace(case.setting, **changes))) or ""

    assert refused(autocast=torch.float32) == "" and "would narrow" in refused(autocast=torch.bfloat16)
    for program, runner in itertools.product(("compile", "aoti", "export"), ("inductor", "hook", "other")):
        assert refused(program=program, runner=runner) == ""
    assert "no measured rule" in refused(device=replace(case.setting.device, kernels=()))
    assert "8.0" in refused(device=replace(case.setting.device, capability=(7, 5)))
    assert "cpu" not in refused(device=replace(case.setting.device, type="cpu"))
    assert "no measured rule for xpu" in (
        refusal(replace(case_of(softcap, *qkv(), monkeypatch=monkeypatch), setting=_on(case, "xpu"))) or ""
    )
    monkeypatch.setattr(rules, "TORCH_VERSION", (2, 10))
    assert "from torch 2.11 on" in refused()


def _on(case: Case, kind: str) -> Any:
    return replace(case.setting, device=replace(case.setting.device, type=kind))


def test_sdpa_kernel_is_kept() -> None:
    assert "sdpa_kernel" in reason(_only_math, *qkv())


def _only_math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return masked(window, cap=True)(q, k, v)


def test_rows_that_may_be_empty() -> None:
    strict = reason(documents, *qkv(**BIG), IDENTITIES, numerics="strict")
    assert "strict" in strict
    _, report = rewritten(documents, *qkv(**BIG), IDENTITIES)
    assert "gives 0" in report.sites[0].assumptions[0]
    _, report = rewritten(padded, *CASES["padding and causal"][1], assume_nonempty_rows=True)
    assert report.sites[0].assumptions == ("no row is fully masked",)


def test_a_mask_decided_by_rounded_numbers_stays_the_tensor_it_is() -> None:
    """Buckets by a logarithm: another library's could round to another bucket."""

    def buckets(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        i, j = positions(q, k)
        bucket = (torch.log((i - j).abs() + 1.0) * 2).to(torch.int64)
        return (capped(q, k) + table[bucket].permute(2, 0, 1)).softmax(-1) @ v

    same(buckets, *qkv(), randn(32, 2), rewritten=1, **ON_CUDA)
    _, report = rewritten(buckets, *qkv(), randn(32, 2))
    assert "log" not in report.sites[0].score_mod


def test_a_mask_written_to_between_is_not_computed_from_what_it_was_made_of() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        i, j = positions(q, k)
        keep = (j <= i) & (ids[:, None, :, None] == ids[:, None, None, :])
        ids.add_(torch.arange(ids.size(1)))
        return (q @ k.mT * 0.25).masked_fill(~keep, NEG_INF).softmax(-1) @ v + ids.sum()

    same(fn, *qkv(**BIG), IDENTITIES, rewritten=1, reference=False, **ON_CUDA)


def test_inside_the_hook_and_on_the_device_itself() -> None:
    """The CPU's rules are for the CPU: what is emitted for CUDA may be fused with what follows."""
    fn, inputs = CASES["soft cap"]
    torch._dynamo.reset()
    with torch.no_grad(), attn_pass.record() as report, attn_pass.enabled(choose="fused", **ON_CUDA):
        torch.compile(fn, backend="inductor")(*inputs)
    assert [s.target for s in report.sites] == ["flex"]


# ---- options, decoding, cost


def options_of(fn: Callable[..., Any], *inputs: Any) -> dict[str, Any]:
    graph, _ = rewritten(fn, *inputs)
    return dict(call_of(graph).args[6])


def test_the_options_are_ones_the_templates_know() -> None:
    from torch.nn.attention.flex_attention import FlexKernelOptions

    known = set(FlexKernelOptions.__annotations__)
    given = options_of(softcap, *qkv(**BIG))
    assert given.keys() <= known | {"OUTPUT_LOGSUMEXP", "OUTPUT_MAX"}
    assert {"BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "BACKEND", "ROWS_GUARANTEED_SAFE"} <= known
    assert not given["PRESCALE_QK"]  # the scores would come in powers of two, where a soft cap wants them as they are


@pytest.mark.parametrize(
    ("name", "safe"),
    [("soft cap", True), ("causal and soft cap", True), ("window and soft cap", False), ("documents", False)],
)
def test_rows_are_called_safe_where_no_tile_has_an_empty_one(name: str, safe: bool) -> None:
    fn, inputs = CASES[name]
    assert options_of(fn, *inputs)["ROWS_GUARANTEED_SAFE"] is safe


def test_rows_are_not_safe_where_keys_are_split() -> None:
    assert not options_of(softcap, *qkv(q_len=8, kv_len=300))["ROWS_GUARANTEED_SAFE"]


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"q_len": 1}, None),
        ({"q_len": 127}, None),
        ({"q_len": 128}, "few"),
        ({"q_len": 16, "heads": 8, "kv_heads": 1}, None),
        ({"q_len": 17, "heads": 8, "kv_heads": 1}, "tile"),
        ({"q_len": 4, "heads": 6, "kv_heads": 2}, "power of two"),
    ],
)
def test_decoding_is_asked_for_where_it_can(shape: dict[str, int], reason: str | None) -> None:
    heads, kv_heads = shape.get("heads", 2), shape.get("kv_heads", 2)

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return softcap(q, *(x.repeat_interleave(heads // kv_heads, 1) for x in (k, v)))

    inputs = qkv(1, heads, shape["q_len"], 700, kv_heads=kv_heads)
    graph, _ = rewritten(fn, *inputs, poor_cases=())
    assert call_of(graph).args[6]["BACKEND"] == ("AUTO" if reason is None else "TRITON")


def test_an_unknown_number_of_rows_or_batch_does_not_decode() -> None:
    for dim in (0, 2):
        inputs = qkv(3, 2, 5, 300)
        torch._dynamo.mark_dynamic(inputs[0], dim)
        graphs: list[torch.fx.GraphModule] = []

        def keep(gm: torch.fx.GraphModule, _: Any, graphs: list[Any] = graphs) -> Callable[..., Any]:
            graphs.append(gm)
            return gm.forward

        if dim == 0:
            for x in inputs:
                torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.reset()
        backend = attn_pass.wrap(keep, choose="fused", on_error="raise", **ON_CUDA)
        torch.compile(softcap, backend=backend)(*inputs)
        assert call_of(graphs[0]).args[6]["BACKEND"] == "TRITON"


def test_the_operators_of_a_backward_are_ones_inductor_inlines() -> None:
    """The derivative of the score function becomes part of the kernel, so each of its operators needs a lowering."""
    from torch._inductor.decomposition import decompositions
    from torch._inductor.lowering import lowerings

    for name in ("soft cap", "window and soft cap", "alibi", "clamp", "weak fill", "dense bias"):
        fn, inputs = CASES[name]
        graph, _ = rewritten(fn, *inputs)
        call = call_of(graph)
        captured = [
            torch.zeros(held.shape, dtype=held.dtype) for held in map(tensor_of, call.args[7]) if held is not None
        ]
        places = [torch.zeros((), dtype=torch.int32)] * 4

        module = getattr(graph, call.args[3].target)

        def backward(score: Tensor, *rest: Tensor, module: Any = module) -> Tensor:
            return torch.autograd.grad(module(score, *rest), score)[0]

        score = torch.zeros((), requires_grad=True)
        traced = torch.fx.experimental.proxy_tensor.make_fx(backward)(score, *places, *captured)
        used = {n.target for n in traced.graph.nodes if n.op == "call_function"}
        assert used and not [op for op in used if op not in lowerings and op not in decompositions], name


H200 = registry.by_name("H200")


def problem(**sizes: int) -> Problem:
    shape = {"batch": 1, "heads": 32, "kv_batch": 1, "kv_heads": 32, "q_len": 4096, "kv_len": 4096}
    return Problem(**{**shape, "head_dim": 128, "value_dim": 128, **sizes}, dtype=torch.bfloat16)  # type: ignore[arg-type]


def test_the_cost_is_near_what_is_reported() -> None:
    """275 GFLOP at about half of 790 TFLOP/s; half of it for a causal mask; longer on an older GPU."""
    full = cost_cuda.flex(H200, problem(), 1.0)
    assert full == pytest.approx(4 * 4096 * 4096 * 32 * 128 / 0.5 / 790e6, rel=0.1)
    assert cost_cuda.flex(H200, problem(), 0.5) == pytest.approx(full / 2, rel=0.1)
    a100 = registry.by_name("A100")
    assert cost_cuda.flex(a100, problem(), 1.0) > full


def test_splits_keep_the_device_busy() -> None:
    few = problem(heads=8, kv_heads=8, q_len=4, kv_len=65536)
    assert cost_cuda.flex(H200, few, 1.0) > 5 * cost_cuda.flex(H200, few, 1.0, splits_keys=True)
    grouped = problem(heads=32, kv_heads=8, q_len=4, kv_len=65536)
    assert cost_cuda.flex(H200, grouped, 1.0, splits_keys=True) < cost_cuda.flex(H200, grouped, 1.0)


def predictions(fn: Callable[..., Any], *inputs: Tensor, **options: Any) -> attn_pass.SiteReport:
    options = {"device": "H200", **options}
    torch._dynamo.reset()
    with torch.no_grad():
        return attn_pass.explain(fn, *inputs, attn_pass_options=options).sites[0]


def test_a_long_window_is_chosen_by_cost() -> None:
    q, k, v = (torch.empty(1, 8, 4096, 64, dtype=torch.bfloat16) for _ in range(3))
    site = predictions(masked(window), q, k, v, targets=("flex", "efficient"))
    assert site.target == "flex" and site.predicted_us["flex"] < site.predicted_us["leave"]
    site = predictions(masked(causal), q, k, v)
    assert site.target != "flex" and "flex" not in site.predicted_us


# ---- the tuner


def measured_by(found: Callable[[Sequence[str]], dict[str, float]], **shape: int) -> tuple[Any, list[str]]:
    """The call that is emitted where forms are timed like that, and the labels that were to be timed."""
    from attn_pass.entries import transaction
    from attn_pass.options import make_options

    asked: list[str] = []
    graphs: list[torch.fx.GraphModule] = []
    reports: list[attn_pass.Report] = []

    def measure(_: Any, labels: Sequence[str]) -> dict[str, float]:
        asked.extend(labels)
        return {"leave": 100.0, **found(labels)}

    def compile_as(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        options = make_options(device="H200", on_error="raise")
        reports.append(transaction.decide(gm, options, "compile", "inductor", measure=measure).report)
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(grouped, backend=compile_as, dynamic=False)(*qkv(heads=4, kv_heads=2, **{**BIG, **shape}))
    return (graphs[0], reports[0].sites[0]), asked


def test_block_sizes_are_measured_and_taken_by_their_label() -> None:
    _, labels = measured_by(lambda labels: dict.fromkeys(labels, 50.0))
    assert len(labels) == len(set(labels)) == 4 and labels[0] == "flex"
    assert labels[1:] == [x for x in labels if x.startswith("flex (BLOCK_M=")]
    for label in labels[1:]:
        (graph, site), _ = measured_by(lambda _, label=label: {label: 1.0})
        options = call_of(graph).args[6]
        for word in label[len("flex (") : -1].split():
            name, value = word.split("=")
            assert options[name] == int(value)
        assert site.poor_cases == () and site.measured_us[label] == 1.0


def test_the_worker_gives_a_form_by_its_label() -> None:
    from attn_pass.planner.choose import only

    label = measured_by(lambda labels: dict.fromkeys(labels, 50.0))[1][-1]
    found: list[Any] = []

    def compile_as(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        from attn_pass.entries import transaction
        from attn_pass.options import make_options

        found.append(
            transaction.decide(gm, make_options(device="H200"), "compile", "inductor", measure=only(label)).report
        )
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(grouped, backend=compile_as, dynamic=False)(*qkv(heads=4, kv_heads=2, **BIG))
    assert found[0].sites[0].outcome == "rewritten" and label in found[0].sites[0].reason


def test_without_measuring_no_block_sizes_are_considered() -> None:
    site = predictions(grouped, *qkv(heads=4, kv_heads=2, **BIG))
    assert not [label for label in site.predicted_us if "BLOCK" in label]


def test_block_sizes_divide_the_masks_blocks_and_fit() -> None:
    from attn_pass.targets.flex.flex import _BLOCKS, _DECODING_TILES, _TILES, _WIDE_TILES

    assert all(_BLOCKS["triton"][0] % m == 0 and _BLOCKS["triton"][1] % n == 0 for m, n, *_ in (*_TILES, *_WIDE_TILES))
    assert all(_BLOCKS["triton"][1] % n == 0 for n, *_ in _DECODING_TILES)


@pytest.mark.parametrize(("device", "dim", "tiles"), [("H200", 128, 4), ("H200", 256, 2), ("L4", 128, 1)])
def test_block_sizes_that_do_not_fit_the_device_are_not_tried(
    device: str, dim: int, tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = [x.to(torch.bfloat16) for x in qkv(1, 2, 300, 300, dim)]
    case = case_of(masked(window), *inputs, monkeypatch=monkeypatch)
    setting = replace(case.setting, device=registry.by_name(device))
    offer = Flex().consider(case.attention, "", setting)
    assert (
        isinstance(offer, Offer) and offer.compiled_for_site and len(list(Flex().alternatives(offer, setting))) == tiles
    )


@pytest.mark.parametrize(("backward", "ambient"), [(True, False), (True, True), (False, False)])
def test_a_kernel_keeps_what_its_backward_reads_in_any_grad_mode(backward: bool, ambient: bool) -> None:
    """A graph may be planned under no_grad and run a site that trains: without its log-sum-exp gradients are noise."""
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(name) for name in "qkv"]
    without_driver = mock.patch.object(fake_tensor, "init_gpu_context", lambda *_: None, create=True)  # of torch 2.11
    with without_driver, FakeTensorMode(), torch.set_grad_enabled(ambient):
        for node in nodes:
            node.meta["example_value"] = torch.empty(1, 2, 8, 16, device="cuda")
        assert kernel_options(nodes, backward=backward)["OUTPUT_LOGSUMEXP"] is backward
        assert torch.is_grad_enabled() is ambient
