"""`attn_pass.benchmark`: what it measures, says and refuses; compilers are replaced, so that times cost nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import exc
from typer.testing import CliRunner

import attn_pass
from attn_pass.cli.main import app
from attn_pass.errors import CaptureError, EnvironmentFault, OptionError
from attn_pass.measuring import benchmark as measured
from attn_pass.measuring import judging, machine
from attn_pass.measuring.result import Benchmark, Row
from attn_pass.report.record import Report

Tensor = torch.Tensor
QUIET = {0: 0.0, 1: 0.0}


def causal(q: Tensor, k: Tensor, v: Tensor, *, scale: float = 0.25) -> Tensor:
    later = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).triu(1)
    return (q @ k.mT * scale).masked_fill(later, float("-inf")).softmax(-1) @ v


def heads(**more: Any) -> tuple[Tensor, ...]:
    return tuple(torch.randn(1, 2, 32, 16, **more) for _ in range(3))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No code is generated; and the machine is quiet, unless a test says otherwise."""

    def compiled(program: Callable[..., Any], *, backend: Any = None, **settings: Any) -> Callable[..., Any]:
        settings.pop("options", None)
        chosen = "eager" if backend is None else attn_pass.wrap("aot_eager")
        return torch.compile(program, backend=chosen, **settings)

    monkeypatch.setattr(measured, "compiled", compiled)
    monkeypatch.setattr(measured, "_warm_up", lambda: None)
    monkeypatch.setattr(machine, "shares_in_use", lambda seconds=0.0: QUIET)
    torch._dynamo.reset()


def test_every_way_is_measured_and_compared_with_float64() -> None:
    result = attn_pass.benchmark(causal, *heads(), scale=0.5, attn_pass_seconds=0.2)
    assert [row.way for row in result.rows] == ["eager", "stock", "stock again", "attn_pass"]
    assert not result.failures and result.reference == "float64"
    for row in result.rows:
        assert 0 < row.p10_us <= row.median_us <= row.p90_us
        assert row.error is not None and row.error < 1e-6 and row.verdict != "WRONG"
    assert result["stock"].speedup == 1.0 and result["stock"].verdict == ""
    assert result.speedup == pytest.approx(result["stock"].median_us / result["attn_pass"].median_us)
    assert result["attn_pass"].compile_s is not None and result["eager"].compile_s is None
    assert [site.mask for site in result.report.sites] == ["causal"]
    assert result.conditions["mode"] == "inference" and result.conditions["model"] == "causal"
    table = str(result)
    assert "measured" in table and "predicted" not in table and "noise: two measurements of stock differ by" in table
    stored = json.loads(result.to_json())
    assert [row["way"] for row in stored["rows"]] == [row.way for row in result.rows]
    assert stored["report"]["sites"][0]["mask"] == "causal"


class Attention(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal(q, k, v)


@pytest.mark.parametrize("compiles", ["module", "in place", "function"])
def test_a_model_that_is_compiled_already_is_measured_as_it_is_written(compiles: str) -> None:
    def wrong(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        return lambda *given: [x * 2 for x in gm.forward(*given)]

    model: Any = causal if compiles == "function" else Attention()
    if compiles == "in place":
        model.compile(backend=wrong)
    else:
        model = torch.compile(model, backend=wrong)
    result = attn_pass.benchmark(model, *heads(), attn_pass_seconds=0.2)
    assert result["eager"].error is not None and result["eager"].error < 1e-5
    assert result.conditions["model"] == ("causal" if compiles == "function" else "Attention")
    assert attn_pass.check(model, *heads(), backend="aot_eager")
    torch.testing.assert_close(model(*heads()).shape, heads()[0].shape)


def test_the_table_says_what_became_of_the_attention() -> None:
    assert "attn_pass: 1 attention site: " in str(attn_pass.benchmark(causal, *heads(), attn_pass_seconds=0.2))
    assert "no attention found" in str(attn_pass.benchmark(torch.nn.ReLU(), torch.randn(4), attn_pass_seconds=0.1))


def test_training_is_measured_with_its_gradients() -> None:
    result = attn_pass.benchmark(causal, *heads(requires_grad=True), attn_pass_seconds=0.2)
    assert result.conditions["mode"] == "training"
    row = result["attn_pass"]
    assert row.error is not None and row.error < 1e-5
    with torch.no_grad():
        other = attn_pass.benchmark(causal, *heads(requires_grad=True), attn_pass_seconds=0.2)
    assert other.conditions["mode"] == "inference"


def test_a_wrong_result_is_wrong_however_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    made = measured.compiled

    def compiled(program: Any, *, backend: Any = None, **settings: Any) -> Any:
        function = made(program, backend=backend, **settings)
        return function if backend is None else lambda *a, **k: function(*a, **k) * 1.001

    monkeypatch.setattr(measured, "compiled", compiled)
    result = attn_pass.benchmark(causal, *heads(), attn_pass_seconds=0.2)
    assert result["attn_pass"].verdict == "WRONG" and result["stock"].verdict == ""


def test_a_way_that_fails_is_told_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    made = measured.compiled

    def compiled(program: Any, *, backend: Any = None, **settings: Any) -> Any:
        if backend is None:
            raise RuntimeError("no compiler here")
        return made(program, backend=backend, **settings)

    monkeypatch.setattr(measured, "compiled", compiled)
    result = attn_pass.benchmark(causal, *heads(), attn_pass_seconds=0.2)
    assert set(result.failures) == {"stock", "stock again"} and result.speedup is None
    assert "failed: stock: RuntimeError: no compiler here" in str(result)
    assert "nothing to compare" in result.summary()


def test_a_fault_of_the_environment_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(program: Any, **settings: Any) -> Any:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(measured, "compiled", compiled)
    with pytest.raises(EnvironmentFault, match="no rewrite is at fault"):
        attn_pass.benchmark(causal, *heads(), attn_pass_seconds=0.2)


def test_a_package_that_the_environment_refuses_is_told_beside_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any, **named: Any) -> Any:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", refuse)
    result = attn_pass.benchmark(causal, *heads(), attn_pass_package=True, attn_pass_seconds=0.2)
    assert result.speedup and "no C++ compiler works here" in result.failures["package, stock"]


def test_random_numbers_are_not_compared() -> None:
    def noisy(x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    result = attn_pass.benchmark(noisy, torch.randn(4), attn_pass_seconds=0.1)
    assert all(row.error is None for row in result.rows)
    assert "draws random numbers" in str(result)


def test_a_model_that_names_a_narrow_type_is_compared_with_eager() -> None:
    def narrow(x: Tensor) -> Tensor:
        return x.to(torch.bfloat16) * 2

    result = attn_pass.benchmark(narrow, torch.randn(4), attn_pass_seconds=0.1)
    assert result.reference == "eager" and "does not run in float64" in str(result)


def test_a_busy_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "shares_in_use", lambda seconds=0.0: {0: 0.9})
    result = attn_pass.benchmark(causal, *heads(), attn_pass_seconds=0.2)
    assert result.busy == "other processes use 90% of a processor that is measured on"
    assert {row.verdict for row in result.rows} == {"", "cannot tell"}
    assert "too busy to tell" in str(result)


@pytest.mark.parametrize(("model", "error"), [(3, "takes a module or a function"), (causal, "does not run eagerly")])
def test_what_cannot_be_measured_is_a_sentence(model: Any, error: str) -> None:
    with pytest.raises(CaptureError, match=error):
        attn_pass.benchmark(model, torch.randn(2))


def test_an_option_is_checked_before_anything_runs() -> None:
    with pytest.raises(OptionError, match="did you mean 'choose'"):
        attn_pass.benchmark(causal, *heads(), attn_pass_options={"chose": "fused"})


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = tuple(Row(way, 10.0, 9.0, 12.0, 1.0, "", 0.0, 0, 1.0) for way in ("eager", "stock", "attn_pass"))
    result = Benchmark(rows, {}, 0.03, "", "float64", {"model": "M", "mode": "inference"}, Report())
    assert result.plot(tmp_path / "times.svg").read_text().count("attn_pass") >= 1


# ---------------------------------------------------------------- the command


MODEL = """
import torch

def model():
    x = torch.randn(1, 2, 16, 8)
    return (lambda q, k, v: (q @ k.mT).softmax(-1) @ v), (x, x, x)
"""


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "bench_example.py").write_text(MODEL)
    target = f"{tmp_path / 'bench_example.py'}:model"
    shown = CliRunner().invoke(app, ["bench", target, "--seconds", "0.2", "--inference"])
    assert shown.exit_code == 0 and "speedup over stock" in shown.stdout, shown.output
    plotted = CliRunner().invoke(app, ["bench", target, "--seconds", "0.1", "--plot", str(tmp_path / "no" / "x.png")])
    assert plotted.exit_code == 2 and "there is no folder" in plotted.stderr
    stored = CliRunner().invoke(app, ["bench", target, "--seconds", "0.1", "--json", "--option", "choose=fused"])
    assert json.loads(stored.stdout)["speedup"] > 0


# ---------------------------------------------------------------- the parts


def test_the_noise_is_that_of_medians_and_percentiles() -> None:
    assert judging.noise_of([10.0] * 9, [10.0] * 9) == judging.LEAST_NOISE
    assert judging.noise_of([10.0] * 9, [12.0] * 9) == pytest.approx(0.1823, abs=1e-3)
    assert judging.verdict(1.2, 1.2, 0.1) == "faster" and judging.verdict(1.2, 1.0, 0.1) == "same"


def test_the_freest_processors_are_those_that_are_used_least() -> None:
    assert machine.freest({0: 0.9, 1: 0.1, 2: 0.0, 5: 0.2}, 2) == (1, 2)
    assert machine.freest({0: 0.9, 1: 0.1}, 2) == ()
    assert machine.why_busy({0: 0.9, 1: 0.1}, 1) == "" and "90%" in machine.why_busy({0: 0.9, 1: 0.1}, 2)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system pins no threads")
def test_threads_are_pinned_and_let_go() -> None:
    before = os.sched_getaffinity(0)
    with machine.pinned((min(before),)):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before


def test_where_eager_overflows_nothing_is_called_wrong() -> None:
    def no_numbers(q: Tensor) -> Tensor:
        wide = q.exp() * 1e38 * 1e38
        return wide / wide.amax(-1, keepdim=True)

    with torch.no_grad():
        result = attn_pass.benchmark(no_numbers, torch.rand(4, 4), attn_pass_seconds=0.1)
    assert "WRONG" not in {row.verdict for row in result.rows}
