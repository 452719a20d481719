"""Two gloo processes on the CPU: DDP, FSDP2 and tensor parallelism give eager's results, and sites are rewritten."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from against_eager import FLEX_ON_CPU, qkv
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

import attn_pass

Tensor = torch.Tensor

SCRIPT = r"""
import json, os, sys, traceback
import torch
import torch._functorch.aot_autograd
import torch.distributed as dist
from torch import nn

import attn_pass
from test_composes import Layer, Stack, randn

rank = int(os.fork() == 0)  # two processes, that share what is imported
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[1]}", rank=rank, world_size=2)
options = {"choose": "fused", "on_error": "raise"}
backend = attn_pass.wrap("aot_eager", **options)
everything = [randn(2, 7, 32, seed=r) for r in range(2)]


def plain_gradients(model, x):
    model(x).square().mean().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def ddp(model):
    from torch.nn.parallel import DistributedDataParallel

    return torch.compile(DistributedDataParallel(model), backend=backend)


def fsdp(model):
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    for layer in model.layers:
        layer.compile(backend=backend)
    return model


def tensor_parallel(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))
    for layer in model.layers:
        # Rows of q, k and v lie one after another: heads of each belong together.
        weight = layer.qkv.weight.detach().unflatten(0, (3, 2, -1)).transpose(0, 1).flatten(0, 2).contiguous()
        bias = layer.qkv.bias.detach().unflatten(0, (3, 2, -1)).transpose(0, 1).flatten().contiguous()
        layer.qkv.weight, layer.qkv.bias = nn.Parameter(weight), nn.Parameter(bias)
        layer.heads //= 2
        parallelize_module(layer, mesh, {"qkv": ColwiseParallel(), "out": RowwiseParallel()})
    return torch.compile(model, backend=backend)


def sites(parallel):
    # Of a model run in parallel, whose results and gradients are those of one process.
    torch._dynamo.reset()
    shares_batch = parallel is not tensor_parallel
    reference, model = Stack(2), Stack(2)
    mine = everything[rank if shares_batch else 0]
    with attn_pass.record() as report:
        trained = parallel(model)  # kept: without its wrapper nobody adds the processes' gradients up
        out = trained(mine)
        out.square().mean().backward()
    torch.testing.assert_close(out, reference(mine), rtol=1e-4, atol=1e-5)
    if shares_batch:
        wanted = [sum(g) / 2 for g in zip(*(plain_gradients(reference, x) for x in everything))]
        torch.testing.assert_close([full(p.grad) for p in model.parameters()], wanted, rtol=1e-4, atol=1e-5)
    else:
        named = dict(zip((n for n, _ in reference.named_parameters()), plain_gradients(reference, mine)))
        for name, parameter in model.named_parameters():
            want = named[name]
            if "qkv" in name:
                want = want.unflatten(0, (3, 2, -1)).transpose(0, 1).flatten(0, 2)
            torch.testing.assert_close(full(parameter.grad), want, rtol=1e-4, atol=1e-5)
    return [[s.outcome, s.target, s.reason] for s in report.sites]


for target in ("", "cpu_kernel"):
    if target:
        backend = attn_pass.wrap("aot_eager", targets=(target,), **options)
    for parallel in (ddp, fsdp, tensor_parallel):
        try:
            told = sites(parallel)
        except Exception:
            told = traceback.format_exc()
        os.write(1, (json.dumps([rank, parallel.__name__ + target, told]) + "\n").encode())
        if isinstance(told, str):
            os._exit(1)  # the other process may wait for this one for ever
dist.destroy_process_group()
"""


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.fixture(scope="module")
def in_two_processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes tells of each kind of parallelism: its sites, or what went wrong."""
    script = tmp_path_factory.mktemp("distributed") / "script.py"
    script.write_text(SCRIPT)
    here = Path(__file__).resolve()
    paths = [str(here.parent), str(here.parents[1] / "support"), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(_free_port())],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    reported: list[dict[str, Any]] = [{"errors": done.stderr[-3000:]} for _ in range(2)]
    for line in done.stdout.splitlines():
        if line.startswith("["):
            rank, kind, told = json.loads(line)
            reported[rank][kind] = told
    return reported


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="gloo")
@pytest.mark.parametrize("target", ["", "cpu_kernel"], ids=["any target", "the CPU kernel"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tensor_parallel"])
def test_two_processes(kind: str, target: str, in_two_processes: list[dict[str, Any]]) -> None:
    for reported in in_two_processes:
        sites = reported.get(kind + target, f"not reached: {reported['errors']}")
        assert isinstance(sites, list), sites
        assert sites and all(outcome == "rewritten" and target in (name, "") for outcome, name, _ in sites), sites


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keep = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril()
    return (q @ k.mT * 0.3).masked_fill(~keep, float("-inf")).softmax(-1) @ v


def soft_capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (8 * torch.tanh(q @ k.mT / 8)).softmax(-1) @ v


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).softmax(-1) @ v


def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize(
    ("fn", "reason"), [(causal, "a shard's positions"), (soft_capped, "a shard's positions"), (plain, "ring attention")]
)
@pytest.mark.skipif(not FLEX_ON_CPU, reason="FlexAttention on the CPU needs torch 2.13")
def test_context_parallel_regions(fn: Callable[..., Tensor], reason: str, one_process: DeviceMesh) -> None:
    """Inside one a mask over positions is over a shard's, and any call of torch's would be over the whole sequence."""
    inputs = qkv(1, 2, 8, 8, 8)
    backend = attn_pass.wrap("aot_eager", choose="fused", on_error="raise")
    for inside in (True, False):
        torch._dynamo.reset()
        buffer = torch.zeros(1, 8)
        region = context_parallel(one_process, buffers=[buffer], buffer_seq_dims=[1]) if inside else nullcontext()
        with region, attn_pass.record() as report:
            result = torch.compile(fn, backend=backend)(*inputs)
        torch.testing.assert_close(result, fn(*inputs))
        (site,) = report.sites
        assert site.outcome == ("left" if inside else "rewritten"), site.reason
        assert not inside or (site.reason.startswith("context parallelism is active") and reason in site.reason)


def test_ring_attention_itself_is_never_taken(one_process: DeviceMesh) -> None:
    """In the region a call gets DTensors, which are left; and has no kernels on the CPU (torch 2.13)."""
    torch._dynamo.reset()
    region = context_parallel(one_process, buffers=[torch.zeros(1, 8)], buffer_seq_dims=[1])
    with region, attn_pass.record() as report, contextlib.suppress(Exception):
        torch.compile(call, backend=attn_pass.wrap("aot_eager", choose="fused"))(*qkv(1, 2, 8, 8, 8))
    assert not report.rewritten
