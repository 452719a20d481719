"""Recordings of a block of code, the history of this process, and torch's own logging."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from attn_pass.report import torch_logging
from attn_pass.report.record import LOCK, Report

_HISTORY_SIZE = 256

_ACTIVE: ContextVar[tuple[Report, ...]] = ContextVar("attn_pass_active_reports", default=())
_HISTORY: deque[Report] = deque(maxlen=_HISTORY_SIZE)


@contextmanager
def record() -> Iterator[Report]:
    """A Report that collects every site decided inside, in this thread, by any function; can be nested."""
    report = Report()
    token = _ACTIVE.set((*_ACTIVE.get(), report))
    try:
        yield report
    finally:
        _ACTIVE.reset(token)


def publish(report: Report, *, compiled: bool = True) -> None:
    """Add a graph's report to every active recording, to torch's logging, and to `reports` if it is compiled.

    Recordings get the same SiteReport objects, so a later `mark_left` changes them too. Call it once per graph, when
    the report has all its sites.
    """
    for recording in _ACTIVE.get():
        recording.extend(report)
    if compiled:
        with LOCK:
            if not any(known is report for known in _HISTORY):
                _HISTORY.append(report)
    torch_logging.log_report(report)


def reports() -> list[Report]:
    """The reports of the graphs compiled in this process so far, oldest first; the newest 256 are kept."""
    with LOCK:
        return list(_HISTORY)
