"""Expensive objects, created by one of pytest's workers for all of them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

VARIABLE = "ATTN_PASS_TESTS_SHARED"  # names a folder that belongs to the run (conftest.py)


def once(name: str, make: Callable[[], str]) -> str:
    """The text that ``make`` gave to the first worker of this run that asked for this name; the others wait for it."""
    folder = Path(os.environ[VARIABLE])
    file = folder / name
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            text = make()
            half = file.with_suffix(".half")
            half.write_text(text)
            half.rename(file)
        return file.read_text()
