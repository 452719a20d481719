"""Parameters that are sharded keep their memory: those of FSDP2, and those of tensor parallelism."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from projected import B, E, L, Projected, compiled
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import attn_pass

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="gloo")
HELD = (
    "the memory of a weight or a bias is shared, mapped from a file, or held by something else (FSDP, another process, "
    "numpy)"
)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def trained(model: nn.Module, exact: nn.Module, run: Any) -> None:
    """Three steps of training, which are those of float64, and a call without gradients after each."""
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, exact)]
    for _ in range(3):
        x = torch.randn(B, L, E)
        got, wanted = run(x), exact(x.double())
        torch.testing.assert_close(got, wanted.float(), rtol=1e-4, atol=1e-5)
        for each, optimizer in zip((got, wanted), optimizers):
            each.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(run(x), exact(x.double()).float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("laid_out_before", [False, True])
@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp2(reshard: bool, laid_out_before: bool, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph gets is a plain parameter, gathered for the call in memory that FSDP frees after it."""
    model = nn.Sequential(Projected(), Projected())
    exact = copy.deepcopy(model).double()
    run = compiled(model, monkeypatch, fullgraph=False)
    if laid_out_before:
        with torch.no_grad(), attn_pass.record() as report:
            run(torch.randn(B, L, E))
        assert {r.outcome for r in report.projections} == {"joined"}
    for each in (*model, model):
        fully_shard(each, mesh=mesh, reshard_after_forward=reshard)
    with attn_pass.record() as report:
        trained(model, exact, run)
    assert {(r.outcome, r.reason) for r in report.projections} == {("left", HELD)}
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    for got, wanted in zip(model.parameters(), exact.parameters()):
        assert isinstance(got, DTensor)
        torch.testing.assert_close(got.full_tensor(), wanted.float(), rtol=1e-4, atol=1e-5)


def test_tensor_parallelism(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Projected()
    exact = copy.deepcopy(model).double()
    plan = {**dict.fromkeys("qkv", ColwiseParallel()), "out": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    run = compiled(model, monkeypatch, fullgraph=False)
    x = torch.randn(B, L, E)
    with torch.no_grad(), attn_pass.record() as report:
        torch.testing.assert_close(run(x), exact(x.double()).float(), rtol=1e-4, atol=1e-5)
    assert report.projections and {r.outcome for r in report.projections} == {"left"}
    assert "its weight or its bias is a DTensor, a subclass of torch.Tensor" in {r.reason for r in report.projections}
