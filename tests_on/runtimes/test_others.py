"""Other compilers checked with generated programs: one export for several, each with a session of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bench.suites.others_exported import PARTS
from bench.suites.others_generated import Generated, outcomes, together

Tensor = torch.Tensor


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.25).softmax(-1) @ v


def masked(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT).masked_fill(~keep, float("-inf")).softmax(-1)
    return weights @ v, weights


def unused(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    return plain(q, k, v)


def wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What is exported is not what runs eagerly."""
    return plain(q, k, v) + (1.0 if torch.compiler.is_exporting() else 0.0)


def no_kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(*(x.bfloat16() for x in (q, k, v))).float()


def generated(function: Callable[..., object], number: int, *more: Tensor, wide: Callable[..., object]) -> Generated:
    inputs = tuple(torch.randn(1, 2, 3 + number, 4) for _ in range(3))
    return Generated(number, function.__name__, function, wide, (*inputs, *more))


@pytest.mark.parametrize("runtime", PARTS)
def test_each_program_of_an_export_is_run_and_judged_alone(runtime: str) -> None:
    pytest.importorskip(runtime)
    keep = torch.ones(4, 4, dtype=torch.bool).tril()
    programs = [
        generated(plain, 0, wide=plain),
        generated(masked, 1, keep, wide=masked),
        generated(unused, 2, torch.arange(5), wide=unused),
        generated(wrong, 3, wide=wrong),
        generated(no_kernel, 4, wide=plain),
    ]
    found = outcomes(programs, together(runtime))
    assert [o.verdict for o in found][:4] == ["right", "right", "right", "WRONG"], found
    if runtime == "onnxruntime":
        assert found[4].verdict == "FAILS" and found[4].why.startswith("the compiler fails")
