"""Combinations with other features: modes of torch.compile, regional compilation, checkpoints, autocast, passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_eager import qkv, randn
from torch import nn
from torch.utils.checkpoint import checkpoint

import attn_pass

Tensor = torch.Tensor


class Layer(nn.Module):
    """Attention by hand in a layer with a residual."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        keep = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device).tril()
        scores = (q @ k.mT * q.size(-1) ** -0.5).masked_fill(~keep, float("-inf"))
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))


class Stack(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Checkpointed(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def steps(model: nn.Module, run: Callable[[Tensor], Tensor], count: int = 2) -> list[Tensor]:
    """Results and gradients of a few training steps."""
    tensors = []
    for number in range(count):
        x = randn(2, 7, 32, seed=number).requires_grad_()
        out = run(x)
        out.square().mean().backward()
        tensors += [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        model.zero_grad()
    return tensors


def same_steps(model: nn.Module, run: Callable[[Tensor], Tensor]) -> attn_pass.Report:
    wanted = steps(model, model)
    with attn_pass.record() as report:
        results = steps(model, run)
    torch.testing.assert_close(results, wanted, rtol=1e-4, atol=1e-5)
    return report


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_whole_model(dynamic: bool | None) -> None:
    model = Stack()
    backend = attn_pass.wrap("aot_eager", choose="fused", on_error="raise")
    assert len(same_steps(model, torch.compile(model, backend=backend, dynamic=dynamic)).rewritten) == 3


def test_regions_compiled_alone_share_one_compile() -> None:
    model = Stack()
    for layer in model.layers:
        layer.compile(backend=attn_pass.wrap("aot_eager", choose="fused", on_error="raise"))
    whole = Stack()
    wanted = steps(whole, whole)
    with attn_pass.record() as report:
        results = steps(model, model)
    torch.testing.assert_close(results, wanted, rtol=1e-4, atol=1e-5)
    assert len(report.rewritten) == len(report.sites) == 1


def test_nested_compile_regions() -> None:
    model = Stack()
    mark = torch.compiler.nested_compile_region

    def run(x: Tensor) -> Tensor:
        for layer in model.layers:
            x = mark(layer)(x)
        return x

    backend = attn_pass.wrap("aot_eager", choose="fused", on_error="raise")
    report = same_steps(model, torch.compile(run, backend=backend))
    assert report.rewritten and all(s.outcome == "rewritten" for s in report.sites)


def test_activation_checkpoints() -> None:
    model = Checkpointed()
    backend = attn_pass.wrap("aot_eager", choose="fused", on_error="raise")
    assert len(same_steps(model, torch.compile(model, backend=backend)).rewritten) == 3


@pytest.mark.parametrize("around", [True, False], ids=["around the call", "inside the model"])
def test_autocast(around: bool) -> None:
    model = Stack(1)

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.model(x)

    backend = attn_pass.wrap("aot_eager", choose="fused", on_error="raise")
    program = model if around else Inside()
    compiled = torch.compile(program, backend=backend)
    x = randn(2, 7, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=around), attn_pass.record() as report:
        result, wanted = compiled(x), program(x)
    torch.testing.assert_close(result, wanted, rtol=0.05, atol=0.05)
    assert result.dtype == wanted.dtype and len(report.sites) == 1 and report.sites[0].outcome == "rewritten"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes(mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from attn_pass.tuning import tuner

    # What is measured is another test's matter, and takes a minute.
    monkeypatch.setenv("ATTN_PASS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(
        tuner, "_run", lambda job, _: {"us": {n: [9.0 if n == "leave" else 1.0] for n in job["labels"]}, "failed": {}}
    )
    model = Stack(1)
    options = {"choose": "fused", "mode": mode}
    report = same_steps(model, torch.compile(model, backend=attn_pass.backend, options=options))
    assert [site.outcome for site in report.sites] == ["rewritten"]


@pytest.mark.slow
def test_other_peoples_passes_keep_running(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    ran: list[str] = []

    class Noted(CustomGraphPass):
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, graph: torch.fx.Graph) -> None:
            ran.append(self.name)

        def uuid(self) -> str:
            return self.name

    slots = (
        "joint_custom_pre_pass",
        "joint_custom_post_pass",
        "post_grad_custom_pre_pass",
        "post_grad_custom_post_pass",
    )
    inputs = qkv(2, 3, 9, 9, 8)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * 0.3).softmax(-1) @ v

    with config.patch({slot: Noted(slot) for slot in slots} | {"fx_graph_cache": False}), attn_pass.record() as report:
        with torch._functorch.config.patch(enable_autograd_cache=False):
            result = torch.compile(attend, backend=attn_pass.backend, options={"choose": "fused"})(*inputs)
        assert all(getattr(config, slot).name == slot for slot in slots)
    torch.testing.assert_close(result, attend(*inputs))
    assert set(ran) == set(slots) and len(report.rewritten) == 1
