"""Ways for a measuring process to fail. Without torch, so that such a process starts at once."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.gpu.journal import Journal


def dies(path: Path, how: str) -> Iterator[dict[str, Any]]:
    """What a process that measures yields; the second case takes it down, or hangs."""
    done = {row["name"] for row in Journal(path).rows().get("p", ())}
    for name in ("one", "two", "three"):
        if name in done:
            continue
        yield {"part": "p", "begin": name}
        if name == "two":
            if how == "hangs":
                time.sleep(60)
            os._exit(11)
        yield {"part": "p", "row": {"name": name}}


def exits() -> Iterator[dict[str, Any]]:
    os._exit(3)
    yield {}
