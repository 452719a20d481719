"""Whole training steps, small: the pass's losses are eager's, step by step."""

from __future__ import annotations

import pytest
import torch

import attn_pass
from attn_pass.measuring.timing import compiled
from bench.harness.programs import Setting
from bench.suites import steps

PROGRAMS = {program.name: program for program in steps.programs(Setting(quick=True))}


@pytest.mark.parametrize(("name", "sites"), [("T5 small", 3), ("Swin tiny", 2)])
def test_losses_are_eager_s(name: str, sites: int) -> None:
    """Weights that were trained by a wrong gradient would lead to other losses."""
    program = PROGRAMS[name]
    module, inputs = program.make("cpu")
    eager = program.answer(program.call(module, module), inputs)
    torch._dynamo.reset()
    backend = attn_pass.wrap("aot_eager_default_partitioner", choose="fused", targets=("cpu_kernel",))
    run = program.call(compiled(module, backend=backend), module)  # as the harness compiles it
    with attn_pass.record() as report:
        rewritten = program.answer(run, inputs)
    assert [site.target for site in report.sites] == ["cpu_kernel"] * sites
    assert eager[0] - eager[-1] > 1e-4  # it learns
    assert torch.allclose(rewritten, eager, rtol=2e-6)


def test_all_models_are_made() -> None:
    """Those with dropout are compared with nothing."""
    assert [name for name, program in PROGRAMS.items() if program.draws] == ["BERT small, padded, dropout 0.1"]
    assert all(program.trains and program.tolerance is None for program in PROGRAMS.values())
