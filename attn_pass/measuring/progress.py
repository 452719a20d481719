"""Progress of what takes longer: a line that changes on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Tell = Callable[[str], None]

_LOG = logging.getLogger("attn_pass.progress")
_PATIENCE_S = 3.0  # what is over by then needs no progress


@contextmanager
def progress(*, silent: bool = False) -> Iterator[Tell]:
    """A function to tell what is being done; on stderr where that is a terminal, else to torch's logs after 3 s.

    Nothing is written to stdout, and nothing at all with ``silent``.
    """
    if silent:
        yield lambda _: None
        return
    began = time.perf_counter()
    if not sys.stderr.isatty():

        def log(text: str) -> None:
            passed = time.perf_counter() - began
            if passed >= _PATIENCE_S:
                _LOG.info("%.0f s: %s", passed, text)

        yield log
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status("") as status:
        yield lambda text: status.update(escape(f"{time.perf_counter() - began:.0f} s: {text}"))
