"""`tune=True`: forms are measured in a separate process, the results are cached, and the fastest is taken."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from against_eager import qkv, randn

import attn_pass
from attn_pass.entries import dynamo
from attn_pass.tuning import tuner
from attn_pass.tuning.worker import interleaved

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTN_PASS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuner, "_SECONDS", 0.1)  # which of two is the fastest, no test asks


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    return (q @ k.mT * 0.125).softmax(-1) @ v


def site_of(fn: Callable[..., Any], *inputs: Tensor, dynamic: bool = False, **options: Any) -> attn_pass.SiteReport:
    torch._dynamo.reset()
    backend = attn_pass.wrap("aot_eager", tune=True, on_error="raise", **options)
    with attn_pass.record() as report:
        torch.compile(fn, backend=backend, dynamic=dynamic)(*inputs)
    return report.sites[0]


def test_what_is_fastest_is_taken_and_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inputs = qkv(2, 8, 4, 300, 64, kv_heads=2)
    with torch.no_grad():
        site = site_of(grouped, *inputs)
    measured = site.measured_us
    assert {"leave", "sdpa", "sdpa (grouped_heads)"} <= measured.keys()
    assert site.reason.startswith("measured ")
    taken = {(None, ()): "leave", ("sdpa", ()): "sdpa"}.get((site.target, site.poor_cases), "sdpa (grouped_heads)")
    assert measured[taken] <= min(measured.values()) * 1.04
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(tuner, "_run", lambda *_: pytest.fail("measured twice"))
    with torch.no_grad():
        assert site_of(grouped, *inputs).measured_us == measured


def test_measurements_overrule_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(job: dict[str, Any], _: object) -> dict[str, Any]:
        return {"us": {label: [1.0 if label == "sdpa" else 9.0] for label in job["labels"]}, "failed": {}}

    monkeypatch.setattr(tuner, "_run", measured)
    with torch.no_grad():
        site = site_of(grouped, *qkv(2, 8, 4, 300, 64, kv_heads=2))
        assert site.predicted_us["sdpa (grouped_heads)"] < site.predicted_us["sdpa"]
        assert (site.target, site.poor_cases) == ("sdpa", ())
        monkeypatch.setattr(
            tuner, "_run", lambda job, _: {"us": {label: [2.0] for label in job["labels"]}, "failed": {}}
        )
        site = site_of(grouped, *qkv(2, 8, 4, 301, 64, kv_heads=2))
    assert site.outcome == "left" and "already the fastest" in site.reason


def test_what_was_measured_has_a_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(job: dict[str, Any], _: object) -> dict[str, Any]:
        samples = {"leave": [400.0] * 5, "sdpa": [80.0, 90.0, 100.0, 110.0, 120.0]}
        return {"us": {label: samples.get(label, [1000.0]) for label in job["labels"]}, "failed": {}}

    monkeypatch.setattr(tuner, "_run", measured)
    with torch.no_grad():
        site = site_of(grouped, *qkv(2, 8, 4, 302, 64, kv_heads=2))
    assert (site.measured_spread["sdpa"], site.measured_spread["leave"]) == (0.16, 0.0)
    assert site.measured_spread.keys() == site.measured_us.keys()
    assert site.reason == "measured 400 us +-0% as written, 100 us +-16% with sdpa (4x)"


def test_tuning_tells_what_it_measures(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from attn_pass.report import progress

    def slow(job: dict[str, Any], _: object) -> str:
        time.sleep(0.2)
        return "not this time"

    monkeypatch.setattr(progress, "PATIENCE_S", 0.02)
    monkeypatch.setattr(tuner, "_run", slow)
    with caplog.at_level("INFO", "attn_pass.progress"), torch.no_grad():
        site_of(grouped, *qkv(2, 8, 4, 303, 64, kv_heads=2))
    (told,) = {message.split(": ", 1)[1] for message in caplog.messages}
    assert told.startswith("measuring ") and "sdpa" in told and "test_tuner.py" in told


def test_a_worker_that_fails_leaves_the_choice_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "_LIMIT_SECONDS", 0.01)
    with torch.no_grad():
        site = site_of(grouped, *qkv(2, 8, 4, 300, 64, kv_heads=2))
    assert site.outcome == "rewritten" and "the prediction decides" in site.reason and not site.measured_us


def test_another_device_is_not_measured_here() -> None:
    inputs = qkv(2, 8, 300, 300, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        site = attn_pass.explain(grouped, *inputs, attn_pass_options={"device": "A100", "tune": True}).sites[0]
    assert "no A100 here to measure on" in site.reason


def _jobs(monkeypatch: pytest.MonkeyPatch, fn: Callable[..., Any], *inputs: Tensor, **options: Any) -> dict[str, Any]:
    jobs: list[dict[str, Any]] = []

    def keep(job: dict[str, Any], _: object) -> str:
        jobs.append(job)
        return "only looked at"

    monkeypatch.setattr(tuner, "_run", keep)
    site = site_of(fn, *inputs, **options)
    assert "only looked at" in site.reason
    return jobs[0]


def test_the_job_has_the_sites_sizes_strides_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(2, 4, 40, 50, 16))
    mask = randn(2, 1, 1, 50)
    job = _jobs(monkeypatch, lambda q, k, v, m: (q @ k.mT + m).softmax(-1) @ v, q.requires_grad_(), k, v, mask)
    assert [i["shape"] for i in job["inputs"]].count((2, 4, 40, 16)) == 1
    assert {tuple(i["stride"]) for i in job["inputs"]} == {x.stride() for x in (q, k, v, mask)}
    assert [i["requires_grad"] for i in job["inputs"]].count(True) == 1 and job["grad"]


def test_a_dynamic_site_is_measured_at_its_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        job = _jobs(monkeypatch, lambda q, k, v: (q @ k.mT).softmax(-1) @ v, *qkv(2, 8, 4, 300, 64), dynamic=True)
    assert {tuple(i["shape"]) for i in job["inputs"]} == {(2, 8, 4, 64), (2, 8, 300, 64)}


@pytest.mark.parametrize(
    ("settings", "tuned"),
    [
        ({"mode": "max-autotune-no-cudagraphs"}, True),
        ({"options": {"mode": "max-autotune"}}, True),
        ({"options": {"mode": "max-autotune", "tune": False}}, False),
        ({"options": {"tune": True}}, True),
        ({"mode": "reduce-overhead"}, False),
        ({}, False),
    ],
)
def test_max_autotune_tunes_unless_tune_is_false(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], tuned: bool
) -> None:
    seen: list[attn_pass.Options] = []

    def compile_rewritten(gm: torch.fx.GraphModule, inputs: Any, options: attn_pass.Options, *_: Any) -> Any:
        seen.append(options)
        return gm.forward

    monkeypatch.setattr(dynamo, "compile_rewritten", compile_rewritten)
    torch._dynamo.reset()
    torch.compile(grouped, backend=attn_pass.backend, **settings)(*qkv(2, 8, 4, 30, 64, kv_heads=2))
    assert [options.tune for options in seen] == [tuned]


def test_blocks_are_timed_in_turns() -> None:
    order: list[str] = []
    samples = interleaved({n: lambda n=n: order.append(n) for n in "ab"}, 0.1)  # type: ignore[misc]
    assert len(samples["a"]) == len(samples["b"]) >= 7
    assert order.index("b") < len(order) - order[::-1].index("a")


class Masked(torch.nn.Module):
    """Causal by a buffer."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(length, length, dtype=torch.bool).tril(), persistent=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill(~self.mask, float("-inf")).softmax(-1) @ v


def test_the_worker_gets_the_known_buffers_and_measures_training_with_its_backward() -> None:
    inputs = qkv(2, 2, 64, 64, 32, grad=True)
    site = site_of(Masked(64), *inputs, assume_constant_buffers=True)
    assert site.mask == "causal" and {"leave", "sdpa"} <= site.measured_us.keys(), site.reason


def job_of(fn: Callable[..., Any], *inputs: Tensor, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a worker is asked to measure."""
    jobs: list[dict[str, Any]] = []

    def noted(job: dict[str, Any], _: object) -> str:
        jobs.append(job)
        return "only looked at"

    monkeypatch.setattr(tuner, "_run", noted)
    with torch.no_grad():
        site_of(fn, *inputs)
    return jobs[0]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    later = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).triu(1)
    return (q @ k.mT * 0.125).masked_fill(later, float("-inf")).softmax(-1) @ v


def test_a_mask_that_the_program_makes_is_measured_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not as a random one, in which no kernel can skip a key; one that is given is random, and of its own."""
    job = job_of(causal, *qkv(1, 8, 256, 256, 64), monkeypatch=monkeypatch)
    assert "triu" in job["text"] and [i["dtype"] for i in job["inputs"]] == ["float32"] * 3

    def given(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT * 0.125).masked_fill(~mask, float("-inf")).softmax(-1) @ v

    job = job_of(given, *qkv(1, 8, 256, 256, 64), torch.rand(256, 256) > 0.5, monkeypatch=monkeypatch)
    assert [i["dtype"] for i in job["inputs"]].count("bool") == 1


def test_the_worker_runs_under_the_same_kernels_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            k, v = (x.repeat_interleave(4, 1) for x in (k, v))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    inputs = qkv(1, 8, 256, 256, 64, kv_heads=2)
    assert list(job_of(attention, *inputs, monkeypatch=monkeypatch)["backends"]) == ["MATH"]
    torch.use_deterministic_algorithms(True)
    try:
        assert job_of(grouped, *inputs, monkeypatch=monkeypatch)["deterministic"] is True
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_failed_is_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Such as for want of a compiler."""
    only_leave = {"us": {"leave": [1.0]}, "failed": {"sdpa": "no compiler"}}
    monkeypatch.setattr(tuner, "_run", lambda *_: only_leave)
    with torch.no_grad():
        assert "no compiler" in site_of(grouped, *qkv(2, 8, 4, 300, 64, kv_heads=2)).reason
    assert list(tmp_path.iterdir()) == []
