"""Linear layers by torch's library, oneDNN and the CPU kernel: `python -m bench linear-layers [--json FILE]`.

What `attn_pass.devices.cpu.linear.rules` decides by. Types of which torch has no fast product here are multiplied by
torch and the CPU kernel alone, without products that would take torch a minute. Up to 256 rows every call reads
another weight, of 100 MB in all, as the layers of a model do; each cell is the median of samples of about 10 ms, in
turns. "Packed by MKL" is what Inductor's ``freezing`` calls in float32, "packed by oneDNN" what it calls in bfloat16
and in packages.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from itertools import cycle, product
from typing import Any

import torch

from attn_pass.devices.base import LinearLayer
from attn_pass.devices.cpu.linear import kernel_call, rules
from attn_pass.measuring.timing import in_turns
from attn_pass.model.dtype_name import dtype_name
from bench.harness.command import Json, Quick, Rounds, Threads, started
from bench.harness.document import Column, Row, Table

SHAPES = (
    *((96, 384), (192, 192), (192, 768), (768, 192), (384, 384), (384, 1536)),
    *((768, 768), (768, 3072), (3072, 768), (4096, 4096)),
)
ROWS = (1, 2, 4, 8, 16, 64, 512, 2048)
_BYTES, _FEW, _SECONDS = 100e6, 256, 0.01
_MOST_OF_KERNEL = 16
_MOST_WORK, _MOST_WORK_BY_COLUMNS = 2e10, 1e9  # FLOPs of torch's own loops
COLUMNS = (
    Column("features", "features"),
    Column("width", "width"),
    Column("rows", "rows"),
    Column("torch us", "torch", ",.1f"),
    Column("A/A", "again", ".2f"),
    Column("oneDNN", "plain", ".2f"),
    Column("CPU kernel", "kernel", ".2f"),
    Column("oneDNN by columns", "columns", ".2f"),
    Column("CPU kernel by columns", "kernel columns", ".2f"),
    Column("no bias", "unbiased", ".2f"),
    Column("packed by MKL", "mkl", ".2f"),
    Column("packed by oneDNN", "packed", ".2f"),
    Column("taken", "taken"),
)
_NOTE = (
    "Speedup over torch.addmm(bias, rows, weight.t()), whose time is in microseconds; by columns: the weight is stored "
    "transposed, compared with torch.addmm of it; no bias: compared with torch.mm. Taken: what the pass gives it to on "
    "this processor, with a bias and without `freezing`; by columns to oneDNN, from 4 rows on."
)


def _calls(rows: int, features: int, width: int, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """The ways to multiply; each reads the next weight at every call."""
    copies = max(1, min(64, int(_BYTES / (features * width * dtype.itemsize)))) if rows <= _FEW else 1
    x, bias = torch.randn(rows, features, dtype=dtype), torch.randn(width, dtype=dtype)
    weights = [torch.randn(width, features, dtype=dtype) for _ in range(copies)]
    turned = [w.t().contiguous().t() for w in weights]  # stored by columns
    lacks, work = rules.lacks_product(dtype), 2.0 * rows * features * width
    knows = not lacks and (dtype == torch.float32 or rules.is_onednns(dtype))
    packed = [torch.ops.mkldnn._reorder_linear_weight(w, rows) for w in weights if knows]

    def by_torch(of: list[torch.Tensor], added: torch.Tensor | None = bias) -> Callable[[], Any]:
        turn = cycle(of)
        if added is None:
            return lambda: torch.mm(x, next(turn).t())
        return lambda: torch.addmm(added, x, next(turn).t())

    def by_onednn(of: list[torch.Tensor], added: torch.Tensor | None = bias) -> Callable[[], Any]:
        turn = cycle(of)
        return lambda: torch.ops.mkldnn._linear_pointwise.default(x, next(turn), added, "none", [], "")

    def by_kernel(of: list[torch.Tensor]) -> Callable[[], Any]:
        turn = cycle(of)
        return lambda: kernel_call.OPERATOR(x, next(turn), bias)

    calls = {"torch": by_torch(weights), "again": by_torch(weights)}
    if knows:
        calls |= {
            "plain": by_onednn(weights),
            "columns": by_onednn(turned),
            "torch unbiased": by_torch(weights, None),
            "unbiased": by_onednn(weights, None),
            "packed": by_onednn(packed),
        }
    by_columns = knows or work <= _MOST_WORK_BY_COLUMNS
    if by_columns:
        calls["torch columns"] = by_torch(turned)
    if lacks or rows <= _MOST_OF_KERNEL:
        calls |= {"kernel": by_kernel(weights)} | ({"kernel columns": by_kernel(turned)} if by_columns else {})
    if dtype == torch.float32 and torch.backends.mkl.is_available():
        both = cycle([(torch.ops.mkl._mkl_reorder_linear_weight(w, rows), w) for w in weights])
        calls["mkl"] = lambda: torch.ops.mkl._mkl_linear(x, *next(both), bias, rows)
    return calls


def _row(rows: int, features: int, width: int, dtype: torch.dtype, rounds: int) -> Row:
    samples = in_turns(_calls(rows, features, width, dtype), (), rounds, seconds=_SECONDS)
    us = {name: statistics.median(of) for name, of in samples.items()}
    beside = {"columns": "torch columns", "kernel columns": "torch columns", "unbiased": "torch unbiased"}
    speedups = {n: us[beside.get(n, "torch")] / us[n] for n in us if not n.startswith("torch")}
    layer = LinearLayer(dtype, rows, features, width, True, True, False, False)
    faster = rules.faster_linear(layer)
    taken = "-" if faster is None else faster.library.removeprefix("the ")
    return {"features": features, "width": width, "rows": rows, "torch": us["torch"], **speedups, "taken": taken}


def _tables(rounds: int, quick: bool) -> Iterator[Table]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        table = Table(f"Linear layers, {dtype_name(dtype)}", COLUMNS, notes=[_NOTE])
        shapes = product(SHAPES[-3:-2] if quick else SHAPES, ROWS[:2] if quick else ROWS)
        most = _MOST_WORK if rules.lacks_product(dtype) else math.inf
        table.rows += [
            _row(rows, features, width, dtype, rounds)
            for (features, width), rows in shapes
            if 2.0 * rows * features * width <= most
        ]
        yield table


def main(json_file: Json = None, threads: Threads = 2, rounds: Rounds = 7, quick: Quick = False) -> None:
    """Linear layers by the library that torch calls, by oneDNN, and by the CPU kernel."""
    recorder = started("Linear layers by another library", json_file, threads=threads, rounds=rounds)
    recorder.document.tables += _tables(rounds, quick)
    recorder.finish()
