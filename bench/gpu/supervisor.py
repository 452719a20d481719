"""Keeps a run going when the process that measures dies or hangs: a kernel that faults takes its whole process along.

The case that was running is written down as lost, and a new process goes on behind it. While the run lasts its JSON is
written anew from the journal every few seconds, so that whatever ends the machine leaves nearly all of it.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.gpu.journal import Journal
from bench.gpu.parts import Tell

_POLL_S = 0.25
_MOST = 12  # processes
_GRACE_S = 20.0  # for the case that runs when the time is over
_BEAT_S = 20.0  # between two lines that say that the run goes on
_WRITE_S = 5.0  # between two writes of what has changed
_PARENT_DEATH_SIGNAL = 1  # prctl(2), PR_SET_PDEATHSIG


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Limits:
    """``end`` of the run (of `time.time`), and how long a case may show nothing; ``write`` keeps what there is."""

    end: float
    stall_s: float = 200.0
    write: Callable[[], None] = field(default=_nothing)


def die_with_parent() -> None:
    """From now on this process ends when the one that started it does, however that one ends (Linux)."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def supervise(command: Sequence[str], journal: Journal, limits: Limits, tell: Tell) -> None:
    """Runs the command, again after each death, until it ends well or the time is over."""
    for _ in range(_MOST):
        before = journal.progress()
        code = _run(command, limits, journal)
        if code == 0:
            return
        ended = "was stopped: nothing came of it, or the time was over" if code is None else f"ended with {code}"
        running = journal.unfinished()
        if running is not None:
            row = {"name": running[1], "error": f"the process {ended}", "lost": True}
            journal.add(part=running[0], row=row)
        tell(f"{': '.join(running) if running else 'the run'}: the process {ended}")
        if time.time() > limits.end or journal.progress() == before:
            return  # a process that began no case would not begin the next time either


def _run(command: Sequence[str], limits: Limits, journal: Journal) -> int | None:
    """The exit code; None where it was ended."""
    watch = _Watch(journal, limits)
    process = subprocess.Popen(command)
    try:
        while process.poll() is None:
            time.sleep(_POLL_S)
            if watch.says_stop():
                return None
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return process.returncode


class _Watch:
    """Looks at the journal while a process runs: keeps what there is, and says when to end it."""

    def __init__(self, journal: Journal, limits: Limits) -> None:
        self._journal, self._limits = journal, limits
        self._size, self._progress = -1, -1
        self._unwritten = False
        self._moved = self._beaten = self._written = time.time()

    def says_stop(self) -> bool:
        """Whether the run's time is over, or the process has shown nothing for too long."""
        now = time.time()
        size = self._journal.path.stat().st_size if self._journal.path.exists() else 0
        if size != self._size:
            self._size, self._unwritten = size, True
            progress = self._journal.progress()
            if progress != self._progress:
                self._progress, self._moved = progress, now
        if self._unwritten and now - self._written > _WRITE_S:
            self._limits.write()
            self._unwritten, self._written = False, now
        if now - self._beaten > _BEAT_S:
            self._journal.add(beat=round(now))
            self._beaten = now
        return now > self._limits.end + _GRACE_S or now - self._moved > self._limits.stall_s
