"""Calls whose keys and values have lengths of two symbols: a cache that grows, as transformers' DynamicCache does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import attn_pass

HEADS, KV_HEADS, DIM = 4, 2, 16


def step(q: Tensor, keys: Tensor, values: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = torch.cat([keys, k], -2), torch.cat([values, v], -2)
    return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True), keys, values


def inputs(keys: int, values: int, *, bounded: bool = False) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(keys)
    lengths = ((HEADS, 1), (KV_HEADS, keys), (KV_HEADS, values), (KV_HEADS, 1), (KV_HEADS, 1))
    made = tuple(torch.randn(1, *shape, DIM, generator=generator) for shape in lengths)
    for cache in made[1:3]:
        if bounded:
            torch._dynamo.mark_dynamic(cache, 2, min=2, max=64)
        else:
            torch._dynamo.maybe_mark_dynamic(cache, 2)
    return made


def outcomes(run: Callable[..., object], report: attn_pass.Report, lengths: list[tuple[int, int]]) -> list[list[str]]:
    """What the report says of the graphs that each call adds."""
    added = []
    for keys, values in lengths:
        before, given = len(report.sites), inputs(keys, values)
        torch.testing.assert_close(run(*given), step(*given))
        added.append([site.outcome for site in report.sites[before:]])
    return added


def backend() -> object:
    return attn_pass.wrap(lambda gm, _: gm, choose="fused", targets=("cpu_kernel",), on_error="raise")


def test_one_graph_for_all_equal_lengths_and_another_for_unequal_ones() -> None:
    """Torch's kernel runs with fewer values than keys: that call must not meet a graph that was made for one length."""
    torch._dynamo.reset()
    with attn_pass.record() as report:
        compiled = torch.compile(step, backend=backend(), fullgraph=True)  # type: ignore[arg-type]
        seen = outcomes(compiled, report, [(9, 9), (10, 10), (10, 8), (31, 31), (30, 20)])
    assert seen == [["rewritten"], [], ["left"], [], []]
    assert report.sites[1].reason.startswith("the lengths of keys and values are not provably equal")


def test_bounds_of_the_sizes_stay() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(step, backend=backend(), fullgraph=True)  # type: ignore[arg-type]
    for length in (9, 30):
        given = inputs(length, length, bounded=True)
        torch.testing.assert_close(compiled(*given), step(*given))


@pytest.mark.parametrize("hint", [True, False])
def test_an_exported_program_gets_no_guard(hint: bool) -> None:
    """Its sizes are settled: two lengths of two names are left, and of one name are one length."""
    one, other = torch.export.Dim("one", max=64), torch.export.Dim("other", max=64)
    sizes = ({}, {2: one}, {2: one if hint else other}, {}, {})

    class Step(torch.nn.Module):
        def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
            return step(*given)

    program = torch.export.export(Step(), inputs(9, 9), dynamic_shapes={"given": sizes})
    with attn_pass.record() as report:
        attn_pass.rewrite(program, choose="fused", targets=("sdpa",))
    (site,) = report.sites
    assert ("provably equal" in site.reason) is not hint
