"""The cost model compared with the committed run on an H200, and what it would have taken there."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attn_pass.devices import registry
from attn_pass.devices.cuda import facts
from attn_pass.devices.cuda.points import Point
from attn_pass.planner import margins

ROOT = Path(__file__).parents[3]
H200 = registry.by_name("H200")
Cell = dict[Point, float]


@lru_cache(maxsize=1)
def tables() -> dict[str, list[dict[str, Any]]]:
    run = json.loads((ROOT / "docs" / "results" / "gpu-nvidia-h200.json").read_text())
    return {table["name"]: table["rows"] for table in run["tables"]}


def prefill() -> Iterator[Cell]:
    """Forward times by kernel, one shape each."""
    for row in tables()["kernels"]:
        match = re.fullmatch(r"S(\d+) D(\d+) (causal|full)", row["name"])
        assert match is not None
        length, dim, heads = int(match[1]), int(match[2]), 2048 // int(match[2])
        batch, causal = max(1, 16384 // length), match[3] == "causal"
        yield {
            Point(name.split(", ")[0], batch, heads, heads, length, length, dim, causal): us
            for name, us in row["us"].items()
            if name.endswith(", forward")
        }


def decoding() -> Iterator[Cell]:
    """The kernels of torch; efficient, and flash once more, with a group's heads packed into rows."""
    for row in tables()["decode"]:
        match = re.fullmatch(r"q(\d+) B(\d+) KV(\d+)", row["name"])
        assert match is not None
        rows, batch, keys = map(int, match.groups())
        grouped = {Point(k, batch, 32, 8, rows, keys, 128): row["us"][k] for k in ("cudnn", "flash")}
        packed = {"efficient": "efficient", "flash packed": "flash"}
        yield grouped | {Point(k, batch, 8, 8, 4 * rows, keys, 128): row["us"][n] for n, k in packed.items()}


def test_the_run_has_the_whole_grid() -> None:
    assert len(list(prefill())) == 42 and all(len(cell) == 3 for cell in prefill())
    assert len(list(decoding())) == 66


@pytest.mark.parametrize("kernel", ["cudnn", "flash", "efficient"])
def test_predictions_are_as_near_as_the_margin_takes_them_for(kernel: str) -> None:
    cells = [*prefill(), *decoding()]
    off = sorted(abs(math.log(p.predicted_us(H200) / us)) for c in cells for p, us in c.items() if p.kernel == kernel)
    assert len(off) > 100 and statistics.mean(off) < 0.09
    assert off[int(0.9 * len(off))] < 0.2 and off[-1] < 0.45


def test_what_is_taken_in_place_of_cudnn_is_never_slower() -> None:
    """Torch's own call runs cuDNN in all of these cells; margins as for a call that works."""
    for cell in (*prefill(), *decoding()):
        stock = next(p for p in cell if p.kernel == "cudnn")
        best = min(cell, key=lambda p: p.predicted_us(H200))
        wins = stock.predicted_us(H200) > margins._FITTED * best.predicted_us(H200)
        taken = best if wins else stock
        assert cell[taken] <= 1.02 * cell[stock], (stock.name, taken.name)
        assert cell[taken] <= 1.05 * min(cell.values()) or taken == stock, (stock.name, taken.name)


def test_what_was_measured_is_this_gpu_with_flash_attention_2() -> None:
    assert set(H200.measured_kernels) == {"cudnn", "flash", "efficient"}
    assert set(facts.with_flash(H200, "FA3").measured_kernels) == {"cudnn", "efficient"}
    sheet = facts._named("NVIDIA H200 MIG 1g.18gb")
    part: Any = SimpleNamespace(multi_processor_count=16, name="NVIDIA H200 MIG 1g.18gb")
    assert sheet is not None and sheet.measured and facts._sized(sheet, part).measured == ()
