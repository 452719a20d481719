"""How long a bare kernel takes, and how far its own readings are apart: blocks of calls by the device's own clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

Run = Callable[[], object]
ROUNDS = 9  # blocks of calls of one reading
_SLEEP_CYCLES = 2_000_000  # of the GPU before a block, so that the host has queued the block before it runs: about 1 ms
_MOST_QUEUED = 200  # launches the GPU's queue takes without making the host wait


@dataclass(frozen=True)
class Reading:
    """Microseconds of one call: the 10th percentile of the blocks, and by what share the 90th is above it.

    ``host_us`` is what the host needs to launch it, where that is not the same.
    """

    us: float
    spread: float
    host_us: float | None = None


def read(run: Run, device: torch.device, block_s: float = 0.01) -> Reading:
    """Times a call, after two calls that warm it up; about ``ROUNDS * block_s`` seconds.

    On a GPU by events around calls that wait in the queue behind a sleeping kernel, so that launching costs nothing;
    elsewhere by the clock around the calls. With one thread that is the process's own time, so that what others take of
    a busy machine is not counted.
    """
    run()
    once = _block_us(run, 1, device)
    calls = max(1, min(_MOST_QUEUED, int(block_s * 1e6 / max(once, 0.1))))
    samples = [_block_us(run, calls, device) for _ in range(ROUNDS)]
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    host = _host_us(run, calls) if device.type == "cuda" else None
    return Reading(tenths[0], tenths[-1] / tenths[0] - 1, host)


def _block_us(run: Run, calls: int, device: torch.device) -> float:
    """Microseconds a call of one block."""
    if device.type != "cuda":
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        began = clock()
        for _ in range(calls):
            run()
        return (clock() - began) * 1e6 / calls
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(_SLEEP_CYCLES)
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / calls


def _host_us(run: Run, calls: int) -> float:
    """Microseconds until the host may go on, with an empty queue."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        run()
    taken = (time.perf_counter() - began) * 1e6 / calls
    torch.cuda.synchronize()
    return taken
