"""Times a bare kernel, and how far its readings are apart: blocks of calls by the device's own clock."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

Run = Callable[[], object]
ROUNDS = 9  # blocks of calls of one reading
_MOST_QUEUED = 200  # calls of a block: launches that a GPU's queue takes without making the host wait


@dataclass(frozen=True)
class Reading:
    """Microseconds of one call: the 10th percentile of the blocks, and by what share the 90th is above it.

    ``host_us`` is what the host needs to launch it, where that is not the same.
    """

    us: float
    spread: float
    host_us: float | None = None


class Clock:
    """The host's clock around the calls, which is right where a call ends when its work does.

    With one thread that is the process's own time, so that what others take of a busy machine is not counted.
    """

    def block_us(self, run: Run, calls: int) -> float:
        """Microseconds a call of one block."""
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        began = clock()
        for _ in range(calls):
            run()
        return (clock() - began) * 1e6 / calls

    def host_us(self, run: Run, calls: int) -> float | None:
        """Microseconds until the host may go on, with an empty queue; None where it waits for the call."""
        return None


def order_of(round_number: int, names: Iterable[str], seed: str = "") -> list[str]:
    """The order in which a round times its candidates, another every round; with another ``seed`` all are others.

    No one always follows the same other one, whose threads may still spin and whose data fill the caches.
    """
    every = list(names)
    return random.Random(f"{round_number} {seed}" if seed else round_number).sample(every, len(every))


def read(run: Run, clock: Clock, block_s: float = 0.01) -> Reading:
    """Times a call, after two calls that warm it up; about ``ROUNDS * block_s`` seconds."""
    run()
    once = clock.block_us(run, 1)
    calls = max(1, min(_MOST_QUEUED, int(block_s * 1e6 / max(once, 0.1))))
    samples = [clock.block_us(run, calls) for _ in range(ROUNDS)]
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    return Reading(tenths[0], tenths[-1] / tenths[0] - 1, clock.host_us(run, calls))
