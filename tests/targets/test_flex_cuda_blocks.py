"""The flex target for CUDA devices, by its lists of blocks, each computed as the Triton templates would."""

from __future__ import annotations

import itertools

import pytest
import torch
from flex_graphs import Blockwise, blockwise
from flex_programs import CASES, FILLED, ON_CUDA

import attn_pass
from attn_pass.model.structure import Band, Chunk, Either, Keys, Part
from attn_pass.targets.flex import blocks as flex_blocks

Tensor = torch.Tensor


@pytest.mark.parametrize(("name", "grad"), [(n, g) for n in CASES for g in (False, True) if not (g and n in FILLED)])
def test_the_blocks_are_the_ones_that_count(name: str, grad: bool) -> None:
    fn, inputs = CASES[name]
    leaves = [x.detach().requires_grad_(grad) if n < 3 and x.is_floating_point() else x for n, x in enumerate(inputs)]
    torch._dynamo.reset()
    backend = attn_pass.wrap(blockwise, choose="fused", on_error="raise", **ON_CUDA)
    with attn_pass.record() as report:
        result = torch.compile(fn, backend=backend, dynamic=False)(*leaves)
    assert [s.target for s in report.sites] == ["flex"]
    torch.testing.assert_close(result, fn(*inputs), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("soft cap", 9),
        ("causal and soft cap", 6),
        ("window", 5),
        ("prefix", 6),
        ("documents", 6),
        ("alibi", 6),
        ("chunks up to the own", 8),
    ],
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
                    all_kept = [all(kept(p, *((y, x) if of_keys else (x, y))) for p in parts) for x, y in pairs]
                    assert start <= n < end or not any(all_kept), (parts, block, n)
                    assert not full_start <= n < full_end or all(all_kept), (parts, block, n)


def test_one_band_has_no_block_too_many() -> None:
    for part in PARTS[:6]:
        for block in range(6):
            start, end, full_start, full_end = flex_blocks.span(
                (part,), block * 16, 16, 8, 11, flex_blocks.INTEGERS, of_keys=False
            )
            for n in range(11):
                all_kept = [
                    kept(part, i, j) for i in range(block * 16, block * 16 + 16) for j in range(n * 8, n * 8 + 8)
                ]
                assert (start <= n < end, full_start <= n < full_end) == (any(all_kept), all(all_kept))


def test_the_share_counts_what_is_visited() -> None:
    assert flex_blocks.share((), 300, 300, (128, 128)) == 1
    assert flex_blocks.share((Band(None, 0),), 384, 384, (128, 128)) == pytest.approx(6 / 9)
    either = Either(((Band(-39, 0),), (Keys(None, 3), Band(None, 0))))
    assert flex_blocks.share((either,), 512, 512, (128, 128)) == pytest.approx((1 + 2 + 3 + 3) / 16)
    many = tuple(Either(((Band(None, n),), (Keys(None, n),))) for n in range(5))
    assert len(flex_blocks.conjunctions(many)) <= 8
