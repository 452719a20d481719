"""The clock of a GPU: events around calls that wait in its queue, so that launching them costs nothing."""

from __future__ import annotations

import time

import torch

from attn_pass.tuning.clock import Clock, Run

_SLEEP_CYCLES = 2_000_000  # of the GPU before a block, so that the host has queued the block before it runs: about 1 ms


class EventClock(Clock):
    """Events around a block of calls, which is queued behind a sleeping kernel."""

    def block_us(self, run: Run, calls: int) -> float:
        """Microseconds a call of one block, by the GPU."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(_SLEEP_CYCLES)
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / calls

    def host_us(self, run: Run, calls: int) -> float:
        """Microseconds until the host may go on."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        us = (time.perf_counter() - began) * 1e6 / calls
        torch.cuda.synchronize()
        return us
