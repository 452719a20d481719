"""AOTAutograd's graph of `attn_pass::decode` for tensors on a GPU that is not present: two launches, and no guard."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._functorch.aot_autograd import aot_export_module
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._subclasses import FakeTensorMode, fake_tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402

import attn_pass  # noqa: E402
from attn_pass.devices.cuda.decode_operator import decode, decode_with_lse  # noqa: E402

HOPPER = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=227 << 10, major=9)


class Driver:
    """As much of a driver as the analysis of a kernel asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: HOPPER)
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())


class Step(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor]:
        return (decode(q, k, v, None, 0.1, True, -1),)


def sized(env: ShapeEnv, name: str, hint: int) -> Any:
    return env.create_symintnode(env.create_symbol(hint, ConstantSource(name)), hint=hint)


def traced(env: ShapeEnv, dim: int, batch: Any = 1) -> torch.fx.GraphModule:
    with FakeTensorMode(shape_env=env):
        length = sized(env, "length", 1000)
        q = torch.empty(batch, 8, 4, dim, dtype=torch.bfloat16, device="cuda")
        k, v = (torch.empty(batch, 2, length, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        return aot_export_module(Step(), (q, k, v), trace_joint=False)[0]


def launches(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return [n for n in graph.nodes if "triton_kernel_wrapper" in str(n.target)]


@pytest.mark.usefixtures("hopper")
def test_the_number_of_keys_is_free() -> None:
    env = ShapeEnv()
    first, second = launches(traced(env, 64).graph)
    assert env.guards == []
    splits = first.kwargs["kwargs"]["splits"]  # type: ignore[index, call-overload]
    assert isinstance(splits, torch.fx.Node) and second.kwargs["kwargs"]["splits"] is splits  # type: ignore[index, call-overload]


@pytest.mark.usefixtures("hopper")
def test_the_batch_is_free() -> None:
    env = ShapeEnv()
    assert len(launches(traced(env, 64, sized(env, "batch", 4)).graph)) == 2
    assert env.guards == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_it_is_planned_for_a_gpu_that_is_not_here() -> None:
    """Fake tensors on a GPU, without a driver: the report and the graph, as for tensors on ``meta``."""
    graphs: list[torch.fx.GraphModule] = []

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT * 0.125).softmax(-1) @ v

    def keep(gm: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(gm)
        return lambda *given: (given[0],)

    backend = attn_pass.wrap(keep, device="H100", targets=("decode",), choose="fused", on_error="raise")
    torch._dynamo.reset()
    guarded = mock.patch.object(
        fake_tensor, "init_gpu_context", lambda *_: None, create=True
    )  # torch 2.11 wants a driver
    with guarded, FakeTensorMode(), torch.no_grad():
        q, k, v = (torch.empty(1, 4, n, 64, dtype=torch.bfloat16, device="cuda") for n in (3, 900, 900))
        torch.compile(attention, backend=backend, fullgraph=True)(q, k, v)
    assert torch.ops.attn_pass.decode.default in [n.target for n in graphs[0].graph.nodes]


@pytest.mark.usefixtures("hopper")
def test_nothing_but_its_own_results_is_written() -> None:
    """What Triton's analysis cannot tell to be only read would be copied before every call."""
    first, second = launches(traced(ShapeEnv(), 64).graph)
    assert first.kwargs["tensors_to_clone"] == ["partial", "tops", "totals"]
    assert second.kwargs["tensors_to_clone"] == ["result"]


class Everything(torch.nn.Module):
    def __init__(self, window: int = 500) -> None:
        super().__init__()
        self.window = window

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, mask, lengths = given
        return decode_with_lse(q, k, v, mask, 0.1, True, self.window, lengths)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("mask", [torch.bool, torch.float32])
def test_no_mask_and_no_length_is_written(mask: torch.dtype) -> None:
    def traced_with(window: int) -> list[torch.fx.Node]:
        with FakeTensorMode():
            q, k, v = (torch.empty(2, 4, n, 64, dtype=torch.bfloat16, device="cuda") for n in (3, 900, 900))
            given = torch.empty(2, 1, 3, 900, dtype=mask, device="cuda")
            lengths = torch.empty(2, dtype=torch.int32, device="cuda")
            return launches(
                aot_export_module(Everything(window), (q, k, v, given, lengths), trace_joint=False)[0].graph
            )

    first, second = traced_with(500)
    assert first.kwargs["tensors_to_clone"] == ["partial", "tops", "totals"]
    assert second.kwargs["tensors_to_clone"] == ["result", "lse"]
    (alone,) = traced_with(50)  # so few keys are one split, which writes the result
    assert alone.kwargs["tensors_to_clone"] == ["partial", "tops"]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("dim", "stages"), [(64, 3), (256, 3)])
def test_warps_and_stages_are_those_of_the_tiles(dim: int, stages: int) -> None:
    first, _ = launches(traced(ShapeEnv(), dim).graph)
    kernel: Any = kernel_side_table.get_kernel(first.kwargs["kernel_idx"])
    (config,) = kernel.configs
    assert (config.num_warps, config.num_stages) == (4, stages)
