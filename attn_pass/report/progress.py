"""Progress of what takes longer than 3 s: a line that changes on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress as Line

Tell = Callable[[str], None]

PATIENCE_S = 3.0
"""What is over by then shows nothing."""

_LOG = logging.getLogger("attn_pass.progress")


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal; False for none, as daemons have, and for what does not say."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


class _Shown:
    """What is being done, shown from `PATIENCE_S` on; ``tell`` may be called from any thread."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.text = ""
        self.line: Line | None = None
        self.is_shown = False
        self.lock = threading.Lock()
        self.timer = threading.Timer(PATIENCE_S, self._begin)
        self.timer.daemon = True
        self.timer.start()

    def tell(self, text: str) -> None:
        with self.lock:
            if text != self.text:
                self.text = text
                self._show()

    def _begin(self) -> None:
        with self.lock:
            self.is_shown = True
            if is_terminal(sys.stderr):
                self.line = _line()
                self.line.add_task("", total=None, start=True)
                self.line.start()
            self._show()

    def _show(self) -> None:
        passed = time.perf_counter() - self.began
        if self.line is not None:
            self.line.update(self.line.task_ids[0], description=self.text)
        elif self.is_shown and self.text:
            _LOG.info("%.0f s: %s", passed, self.text)

    def end(self) -> None:
        self.timer.cancel()
        with self.lock:
            self.is_shown = False
            if self.line is not None:
                self.line.stop()
                self.line = None


class _Silent:
    """Nothing is shown, of what is inside neither."""

    def tell(self, text: str) -> None:
        pass


_CURRENT: ContextVar[_Shown | _Silent | None] = ContextVar("attn_pass_progress", default=None)


@contextmanager
def progress(*, silent: bool = False) -> Iterator[Tell]:
    """A function to tell what is being done; one inside another tells the outer one.

    After 3 s it is shown: on stderr where that is a terminal, else as lines of the logger ``attn_pass.progress``, which
    ``TORCH_LOGS="attn_pass"`` and the command line show. Nothing is written to stdout, and nothing at all with
    ``silent``.
    """
    outer = _CURRENT.get()
    if outer is not None:
        yield outer.tell
        return
    shown = _Silent() if silent else _Shown()
    token = _CURRENT.set(shown)
    try:
        yield shown.tell
    finally:
        _CURRENT.reset(token)
        if isinstance(shown, _Shown):
            shown.end()


def tell(text: str) -> None:
    """Tells the progress that this is inside of, if there is any."""
    if (shown := _CURRENT.get()) is not None:
        shown.tell(text)


@contextmanager
def logged_to_stderr() -> Iterator[None]:
    """For a command: log lines of progress reach stderr, unless somebody takes them already."""
    if is_terminal(sys.stderr) or _LOG.isEnabledFor(logging.INFO):
        yield
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("attn-pass: %(message)s"))
    level, propagates = _LOG.level, _LOG.propagate
    _LOG.addHandler(handler)
    _LOG.setLevel(logging.INFO)
    _LOG.propagate = False
    try:
        yield
    finally:
        _LOG.removeHandler(handler)
        _LOG.setLevel(level)
        _LOG.propagate = propagates


def _line() -> Line:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    text = TextColumn("{task.description}", markup=False)
    return Progress(SpinnerColumn(), TimeElapsedColumn(), text, console=Console(stderr=True), transient=True)
