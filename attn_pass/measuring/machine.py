"""The machine while it is measured: which processors others use, and staying on those that are free (Linux)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_STAT, _TASKS = Path("/proc/stat"), Path("/proc/self/task")
BUSY = 0.2  # of a processor's time used by others: a measurement on it says little


def shares_in_use(seconds: float = 0.3) -> Mapping[int, float]:
    """The share of each processor of this process that is in use meanwhile; empty where the system does not say."""
    before = _ticks()
    time.sleep(seconds)
    after = _ticks()
    return {cpu: _share(before[cpu], after[cpu]) for cpu in _allowed() if cpu in before and cpu in after}


@contextmanager
def pinned(cpus: Sequence[int]) -> Iterator[None]:
    """Keeps all threads of this process on these processors; does nothing for none, or where that is not possible."""
    before = _affinities() if cpus else {}
    for task in before:
        _pin(task, set(cpus))
    try:
        yield
    finally:
        for task in _affinities() if before else ():
            _pin(task, before.get(task, next(iter(before.values()))))


def freest(shares: Mapping[int, float], number: int) -> tuple[int, ...]:
    """The processors that are used least, as many as there are threads; none where it makes no difference."""
    if len(shares) <= number:
        return ()
    return tuple(sorted(sorted(shares, key=lambda cpu: (shares[cpu], cpu))[:number]))


def why_busy(shares: Mapping[int, float], number: int) -> str:
    """That others use the processors, in words; "" where enough of them are free."""
    used = sorted(shares.values())[:number]
    if not used or max(used) <= BUSY:
        return ""
    return f"other processes use {max(used):.0%} of a processor that is measured on"


def _allowed() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _ticks() -> dict[int, tuple[int, int]]:
    """Of each processor: ticks in use, and in all (proc(5))."""
    ticks = {}
    with suppress(OSError, ValueError):
        for line in _STAT.read_text().splitlines():
            name, *numbers = line.split()
            if name.startswith("cpu") and name != "cpu":
                user, nice, system, idle, waiting, *rest = map(int, numbers[:8])
                total = user + nice + system + idle + waiting + sum(rest)
                ticks[int(name[3:])] = (total - idle - waiting, total)
    return ticks


def _share(before: tuple[int, int], after: tuple[int, int]) -> float:
    total = after[1] - before[1]
    return (after[0] - before[0]) / total if total > 0 else 0.0


def _affinities() -> dict[int, set[int]]:
    tasks: dict[int, set[int]] = {}
    with suppress(OSError, AttributeError):
        for path in _TASKS.iterdir():
            with suppress(OSError, ValueError):
                tasks[int(path.name)] = os.sched_getaffinity(int(path.name))
    return tasks


def _pin(task: int, cpus: set[int]) -> None:
    with suppress(OSError):  # the thread has ended, or the processors are no longer allowed
        os.sched_setaffinity(task, cpus)
