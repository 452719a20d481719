"""CUDA events without a GPU: they take the time from the host's clock."""

from __future__ import annotations

import time


class Event:
    """As much of `torch.cuda.Event` as timing asks for."""

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 1e3

    def query(self) -> bool:
        """No: as of a device that still sleeps before it."""
        return False
