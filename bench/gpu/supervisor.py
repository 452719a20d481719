"""Continues a run if the measuring process dies or hangs: a kernel fault kills its whole process.

The case that was running is written down as lost, and a new process goes on behind it. While the run lasts its JSON is
written anew from the journal every few seconds, so that whatever ends the machine leaves nearly all of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from bench.gpu.journal import Journal
from bench.gpu.parts import Tell
from bench.harness.process import Ended, Task, messages

_POLL_S = 0.25
_MOST = 12  # processes
_GRACE_S = 20.0  # for the case that runs when the time is over
_BEAT_S = 20.0  # between two lines that say that the run goes on
_WRITE_S = 5.0  # between two writes of what has changed


@dataclass(frozen=True)
class Limits:
    """``end`` of the run (of `time.time`), and how long a case may show nothing; ``write`` keeps what there is."""

    end: float
    stall_s: float = 200.0
    write: Callable[[], None] = lambda: None


def supervise(task: Task, journal: Journal, limits: Limits, tell: Tell) -> None:
    """Runs the task, whose rows are lines of the journal, again after each death, until it ends or the time is over."""
    for _ in range(_MOST):
        before = journal.progress()
        ended = _followed(task, journal, limits)
        if ended is None:
            return
        running = journal.unfinished().get(journal.run)
        if running is not None:
            error = {"status": "failed", "error_text": f"the process ended: {ended}", "lost": True}
            journal.add(part=running[0], row={"name": running[1], **error})
        tell(f"{': '.join(running) if running else 'the run'}: the process ended: {ended}")
        if time.time() > limits.end or journal.progress() == before:
            return  # a process that began no case would not begin the next time either


def _followed(task: Task, journal: Journal, limits: Limits) -> str | None:
    """Writes down what one process says, and how it ended; None where all is done."""
    moved = beaten = written = time.time()
    unwritten = False
    with closing(messages(task, _POLL_S)) as lines:  # type: ignore[type-var]
        for line in lines:
            now = time.time()
            if isinstance(line, Ended):
                return line.why
            if line is not None:
                journal.add(**line)
                moved, unwritten = now, True
            if unwritten and now - written > _WRITE_S:
                limits.write()
                unwritten, written = False, now
            if now - beaten > _BEAT_S:
                journal.add(beat=round(now))
                beaten = now
            if now > limits.end + _GRACE_S or now - moved > limits.stall_s:
                return "stopped, because nothing came of it, or the time was over"
    return None
