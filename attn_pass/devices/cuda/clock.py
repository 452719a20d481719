"""The clock of a GPU: events around calls that wait in its queue, so that launching them costs nothing."""

from __future__ import annotations

import time

import torch

from attn_pass.tuning.clock import Clock, Run

_SLEEP_CYCLES = 2_000_000  # of the GPU before a block, so that the host has queued the block before it runs: about 1 ms
_MOST_CYCLES = 1 << 26  # and at most, where queueing takes the host longer: 35 ms


class EventClock(Clock):
    """Events around a block of calls, which is queued behind a sleeping kernel."""

    def block_us(self, run: Run, calls: int) -> float:
        """Microseconds a call of one block, by the GPU.

        If the GPU woke up before the block was queued, it may have waited for the host in between: 30 us a call, as on
        a machine with an H200, are more than many kernels take. The block is then timed again behind a longer sleep.
        """
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cycles = _SLEEP_CYCLES
        while True:
            torch.cuda.synchronize()
            torch.cuda._sleep(cycles)
            start.record()
            for _ in range(calls):
                run()
            end.record()
            woke_up = start.query()
            end.synchronize()
            if not woke_up or cycles >= _MOST_CYCLES:
                return float(start.elapsed_time(end)) * 1e3 / calls
            cycles = min(4 * cycles, _MOST_CYCLES)

    def host_us(self, run: Run, calls: int) -> float:
        """Microseconds until the host may go on."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        us = (time.perf_counter() - began) * 1e6 / calls
        torch.cuda.synchronize()
        return us
