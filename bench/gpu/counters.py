"""Part 8: Nsight Compute's counters for the split-KV kernel, if ``ncu`` is installed and may read counters."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys

from bench.gpu.environment import Environment
from bench.gpu.parts import Column, Part, Row, one_each

CASES = {"q1 B1 KV32768": (1, 1, 32768), "q4 B1 KV131072": (1, 4, 131072), "q1 B8 KV8192": (8, 1, 8192)}
METRICS = {
    "gpu__time_duration.sum": "ns",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory, %",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "multiprocessors, %",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps active, %",
    "launch__registers_per_thread": "registers",
    "launch__shared_mem_per_block": "shared memory, bytes",
}
_LIMIT_S = 90
_CALL = """
import torch
from attn_pass.devices.cuda.decode_operator import decode
sizes = ((32, {rows}), (8, {keys}), (8, {keys}))
q, k, v = (torch.randn({batch}, h, n, 128, device="cuda", dtype=torch.bfloat16) for h, n in sizes)
for _ in range(3):
    decode(q, k, v, None, 128**-0.5)
torch.cuda.synchronize()
"""


def measure(env: Environment, sizes: tuple[int, int, int]) -> Row:
    """The counters of one launch of `attend`, after two that warm it up."""
    tool = shutil.which("ncu")
    if tool is None or env.dry:
        return {"wanting": "ncu is not installed" if tool is None else "a dry run launches no kernel"}
    line = [tool, "--csv", "--clock-control", "none", "--kernel-name", "regex:attend", "--launch-skip", "2"]
    line += ["--launch-count", "1", "--metrics", ",".join(METRICS)]
    line += [sys.executable, "-c", _CALL.format(**dict(zip(("batch", "rows", "keys"), sizes)))]
    done = subprocess.run(line, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    counts = counted(done.stdout)
    if not counts:
        raise RuntimeError(f"ncu counted nothing: {' '.join((done.stderr or done.stdout).split())[-300:]}")
    return {**counts, "counted": ", ".join(f"{name} {value}" for name, value in counts.items())}


def counted(output: str) -> dict[str, str]:
    """Metrics by what they are called here, from ncu's output, whose table begins behind its own notices."""
    lines = output.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return {}
    rows = csv.DictReader(io.StringIO("\n".join(lines[start:])))
    return {METRICS[row["Metric Name"]]: row["Metric Value"] for row in rows if row.get("Metric Name") in METRICS}


PART = Part(
    "counters",
    "Nsight Compute on the split-KV kernel",
    0.10,
    (Column("case", "name"), Column("counted", "counted"), Column("not counted", "wanting")),
    one_each(CASES, measure, quick=1),
    timed=False,
    usual=False,
)
