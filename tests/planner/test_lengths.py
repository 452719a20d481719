"""A dynamic query length: the form does not depend on the traced length, and serves few and many queries."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attn_pass
from attn_pass.devices.processors import processor
from attn_pass.planner.lengths import worst_losses

HINTS = (2, 64, 1000)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_pass.devices.cpu.family.cpu", lambda: processor(2))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Aligned to the last key, as with a cache."""
    i, j = torch.arange(q.size(2))[:, None], torch.arange(k.size(2))
    scores = (q @ k.mT * 0.125).masked_fill(j > i + k.size(2) - q.size(2), float("-inf"))
    return scores.softmax(-1) @ v


def exported(function: Any, make: Callable[[int], tuple[Tensor, ...]], shapes: Any, hint: int) -> Any:
    class Model(nn.Module):
        def forward(self, *given: Tensor) -> Tensor:
            return function(*given)

    with torch.no_grad():
        return torch.export.export(Model(), make(hint), dynamic_shapes=None if shapes is None else (shapes,))


def decided(program: Any, **options: Any) -> attn_pass.SiteReport:
    (site,) = attn_pass.rewrite(program, on_error="raise", **options).sites
    return site


def inputs(q: tuple[int, ...], k: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(torch.empty(shape, dtype=dtype) for shape in (q, k, k))


ANY = ({2: Dim("length", min=1, max=1024)}, None, None)
GROUPED = (grouped, lambda n, dtype: inputs((1, 32, n, 128), (1, 8, 4096, 128), dtype), ANY)
SHARED = (
    attend,
    lambda n, dtype: inputs((32, 4, n, 32), (1, 4, 2048, 32), dtype),
    ({0: Dim("batch", min=1, max=1024), 2: Dim("length", min=1, max=1024)}, None, None),
)
PLAIN = (attend, lambda n, dtype: inputs((1, 16, n, 64), (1, 16, 1024, 64), dtype), ANY)
CAUSAL = (causal, PLAIN[1], ANY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("case", "taken"),
    [
        (GROUPED, {torch.float32: ("grouped_heads",), torch.bfloat16: ("grouped_heads",)}),
        (SHARED, dict.fromkeys((torch.float32, torch.bfloat16), ("shared_kv",))),
        (PLAIN, dict.fromkeys((torch.float32, torch.bfloat16))),
        (CAUSAL, {torch.float32: (), torch.bfloat16: None}),
    ],
    ids=["grouped heads", "shared K/V", "plain", "causal by hand"],
)
def test_the_traced_length_does_not_decide(case: Any, taken: dict[torch.dtype, Any], dtype: torch.dtype) -> None:
    """What docs/results/dynamic-query.md measured as the right form at both ends; None where that is to leave it."""
    function, make, shapes = case
    for hint in HINTS:
        site = decided(exported(function, lambda n: make(n, dtype), shapes, hint))
        assert site.target == (None if taken[dtype] is None else "sdpa"), (hint, site.reason)
        assert site.poor_cases == (taken[dtype] or ())
        assert f"from 2 to {max(hint, 1024)} queries" in site.reason


def test_with_a_fixed_length_it_does() -> None:
    def model(n: int) -> Any:
        return exported(GROUPED[0], lambda hint: GROUPED[1](hint, torch.float32), None, n)

    assert [decided(model(n)).target for n in HINTS] == ["decomposed", "sdpa", None]
    assert all("queries" not in decided(model(n)).reason for n in HINTS)


def test_a_dynamic_batch_is_taken_as_traced() -> None:
    """Seed S4: the query length is 1, whatever the batch."""
    batch = {0: Dim("batch", min=1, max=2048)}
    make = inputs((1000, 4, 1, 32), (1, 4, 2048, 32), torch.float32)
    site = decided(exported(attend, lambda _: make, (batch, None, None), 0))
    assert site.poor_cases == ("shared_kv",) and "queries" not in site.reason


def test_the_ends_are_those_of_the_program() -> None:
    shapes = ({2: Dim("length", min=16, max=96)}, None, None)
    site = decided(exported(attend, lambda n: PLAIN[1](n, torch.float32), shapes, 32))
    assert "from 16 to 96 queries" in site.reason


@pytest.mark.parametrize(
    ("rows", "hint", "reported"),
    [
        (lambda q: q[:, :, 1:], 3, "from 2 to 1024 queries"),
        (lambda q: q[:, :, 1024:], 1027, "from 2 to 1024 queries"),
        (lambda q: torch.cat((q, q), 2), 5, "from 4 to 1024 queries"),
    ],
    ids=["all but one", "the tail", "twice"],
)
def test_the_ends_are_those_of_the_rows_whatever_they_are_of_the_length(rows: Any, hint: int, reported: str) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (rows(q) @ k.mT * 0.125).softmax(-1) @ v

    free = ({2: Dim.AUTO}, None, None)
    program = exported(model, lambda n: inputs((1, 8, n, 64), (1, 8, 512, 64), torch.float32), free, hint)
    site = decided(program)
    assert reported in site.reason


def test_a_form_that_holds_for_some_sizes_only_is_not_an_internal_error() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q[:, :, ::2].contiguous(), k, v)

    free = ({2: Dim.AUTO}, None, None)
    program = exported(model, lambda n: inputs((1, 1, n, 64), (1, 1, 512, 64), torch.float32), free, 8)
    site = decided(program, targets=("decomposed",), choose="first")
    assert site.outcome == "left" and site.reason.startswith("decomposed would hold for some sizes only")


def test_the_result_holds_at_both_ends() -> None:
    function, _, shapes = GROUPED
    torch.manual_seed(0)
    k, v = torch.randn(2, 1, 2, 70, 16)
    program = exported(function, lambda n: (torch.randn(1, 8, n, 16), k, v), shapes, 24)
    assert decided(program, choose="fused").outcome == "rewritten"
    for n in (1, 2, 3, 200, 1024):
        q = torch.randn(1, 8, n, 16)
        want = function(q.double(), k.double(), v.double())
        torch.testing.assert_close(program.module()(q, k, v).double(), want, atol=1e-5, rtol=1e-5)


def test_the_worst_loss_is_over_all_lengths() -> None:
    few = {"leave": 10.0, "a": 20.0, "b": 12.0, "only here": 15.0}
    many = {"leave": 900.0, "a": 300.0, "b": 310.0, "only there": 1.0}
    assert worst_losses([few]) == {"leave": 1.0, "a": 2.0, "b": 1.2, "only here": 1.5}
    losses = worst_losses([few, many])
    assert losses == {"leave": 3.0, "a": 2.0, "b": 1.2, "only here": 3.0}
    assert min(losses, key=lambda name: losses[name]) == "b"


def test_nothing_is_as_good_as_what_costs_nothing() -> None:
    free, costly = {"leave": 10.0, "free": 0.0, "also free": 0.0}, {"leave": 6.0, "free": 9.0, "also free": 3.0}
    assert worst_losses([free]) == {"leave": math.inf, "free": 1.0, "also free": 1.0}
    assert worst_losses([free, costly]) == {"leave": math.inf, "free": 3.0, "also free": 1.0}
