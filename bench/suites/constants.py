"""`python -m bench constants`: the rates of `attn_pass.devices.device`, measured on this CPU, beside those in use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from attn_pass.devices.cpu.facts import cpu
from attn_pass.measuring.timing import compiled, in_turns, percentile_10
from bench.harness.command import Json, Threads, started
from bench.harness.document import Column

Rate = tuple[str, str, float, float]
"""What, its unit, measured, in use."""
_HALVES = (torch.float32, torch.bfloat16, torch.float16)


def _microseconds(run: Callable[[], Any]) -> float:
    return percentile_10(in_turns({"run": run}, (), 15, seconds=0.02)["run"])


def _products() -> Iterator[Rate]:
    device = cpu()
    for dtype in (*_HALVES, torch.float64):
        a = torch.randn(4, 512, 512, dtype=dtype)
        us = _microseconds(lambda a=a: a @ a)  # type: ignore[misc]
        yield f"matmul_gflops, {dtype}", "GFLOP/s", 4 * 2 * 512**3 / us / 1e3, device.matmul(dtype)
    for dtype in _HALVES:
        q = torch.randn(1, 8, 2048, 64, dtype=dtype)
        us = _microseconds(lambda q=q: F.scaled_dot_product_attention(q, q, q))  # type: ignore[misc]
        yield f"fused_gflops, {dtype}", "GFLOP/s", 4 * 8 * 2048**2 * 64 / us / 1e3, device.fused(dtype)


def _row() -> Iterator[Rate]:
    """A product with one query row, as Inductor makes it."""
    for dtype in _HALVES:
        q, k = torch.randn(1, 8, 1, 64, dtype=dtype), torch.randn(1, 8, 2048, 64, dtype=dtype)
        product = compiled(lambda q, k: q @ k.transpose(-1, -2))
        us = _microseconds(lambda p=product, q=q, k=k: p(q, k))  # type: ignore[misc]
        yield f"vector_gflops, {dtype}", "GFLOP/s", 2 * 8 * 2048 * 64 / us / 1e3, cpu().vector(dtype)


def _softmax() -> Iterator[Rate]:
    x = torch.randn(256, 2048)
    softmax = compiled(lambda x: torch.softmax(x, -1))
    yield "exp_gops", "1e9/s", x.numel() / _microseconds(lambda: softmax(x)) / 1e3, cpu().exp_gops


def _traffic() -> Iterator[Rate]:
    for name, size, used in (
        ("memory_gbytes", 1 << 27, cpu().memory_gbytes),
        ("cache_gbytes", 1 << 20, cpu().cache_gbytes),
    ):
        x = torch.randn(size)
        y = torch.empty_like(x)
        yield name, "GB/s", 8 * size / _microseconds(lambda x=x, y=y: y.copy_(x)) / 1e3, used  # type: ignore[misc]


def _calls() -> Iterator[Rate]:
    x = torch.randn(4, 4, 4)
    q = torch.randn(1, 1, 4, 16)
    one = compiled(lambda x: x.sin() + 1)
    empty = _microseconds(lambda: one(x))
    two = compiled(lambda x: (x.sum(0, keepdim=True).sin() + x).softmax(-1).sum(1, keepdim=True) + x)
    yield "kernel_us", "us", max(0.1, (_microseconds(lambda: two(x)) - empty) / 2), cpu().kernel_us
    bmm = compiled(lambda x: torch.bmm(torch.bmm(x, x), x))
    yield "op_us", "us", (_microseconds(lambda: bmm(x)) - empty) / 2, cpu().op_us
    fused = compiled(lambda q: F.scaled_dot_product_attention(q, q, q))
    yield "fused_op_us", "us", _microseconds(lambda: fused(q)) - empty, cpu().fused_op_us


def rates() -> Iterator[Rate]:
    """Every constant: name, unit, measured here, in use."""
    for group in (_products, _row, _softmax, _traffic, _calls):
        yield from group()


COLUMNS = (
    Column("constant", "name"),
    Column("unit", "unit"),
    Column("measured", "measured", ".1f"),
    Column("in use", "used", ".1f"),
)


def main(json_file: Json = None, threads: Threads = 1) -> None:
    """Measure the rates the cost model is made of."""
    told = "10th percentiles of 15"
    recorder = started("The cost model's constants on the CPU", json_file, threads=threads, rounds=told)
    with torch.no_grad():
        rows = [dict(zip(("name", "unit", "measured", "used"), rate)) for rate in rates()]
    recorder.table("Rates", COLUMNS).rows += rows
    recorder.finish()
