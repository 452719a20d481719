"""Keeps a run going when the process that measures dies or hangs: a kernel that faults takes its whole process along.

The case that was running is written down as failed, and a new process goes on behind it.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.gpu.parts import Journal, Tell

_POLL_S = 0.25
_MOST = 12  # processes


@dataclass(frozen=True)
class Limits:
    """``end`` of the run (of `time.time`), and how long a case may show nothing."""

    end: float
    stall_s: float = 200.0


def keep(command: Sequence[str], journal: Journal, limits: Limits, tell: Tell) -> None:
    """Runs the command, again after each death, until it ends well or the time is over."""
    for _ in range(_MOST):
        before = len(journal.lines())
        code = _run(command, limits, journal)
        if code == 0:
            return
        ended = "was stopped: nothing came of it, or the time was over" if code is None else f"ended with {code}"
        running = journal.unfinished()
        if running is not None:
            journal.add(part=running[0], row={"name": running[1], "error": f"the process {ended}"})
        tell(f"{': '.join(running) if running else 'the run'}: the process {ended}")
        if time.time() > limits.end or len(journal.lines()) == before:
            return  # a process that began no case would not begin the next time either


def _run(command: Sequence[str], limits: Limits, journal: Journal) -> int | None:
    """The exit code; None where it was ended."""
    process = subprocess.Popen(command)
    seen, since = -1, time.time()
    try:
        while process.poll() is None:
            time.sleep(_POLL_S)
            size = journal.path.stat().st_size if journal.path.exists() else 0
            if size != seen:
                seen, since = size, time.time()
            if time.time() > limits.end + _GRACE_S or time.time() - since > limits.stall_s:
                process.kill()
                process.wait()
                return None
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return process.returncode


_GRACE_S = 20.0  # for the case that runs when the time is over
