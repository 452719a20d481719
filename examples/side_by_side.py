"""Code shared by the examples: several variants of one model, timed in turns and compared with the first."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils import _pytree as pytree


def compare(ways: Mapping[str, Callable[[], Any]], rounds: int) -> float:
    """Prints a table of the ways, the first of which is eager's; returns the last one's error.

    An error is the largest difference from eager's results, relative to their largest value. A time is the median of
    the rounds; in each round every way is called once, so that whatever else the machine does meets all of them.
    """
    results = {name: _tensors(run()) for name, run in ways.items()}  # compiles what is not compiled yet
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            began = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - began))
    first = next(iter(ways))
    table = Table("way", "ms", "times eager", "error against eager")
    for name in ways:
        median, ratio = statistics.median(times[name]), statistics.median(times[first]) / statistics.median(times[name])
        table.add_row(name, f"{median:.2f}", f"{ratio:.2f}", f"{error(results[name], results[first]):.1e}")
    Console().print(table)
    return error(results[name], results[first])


def error(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The largest difference, relative to the largest value of that tensor; NaN where one of them has NaN."""
    pairs = zip(found, wanted, strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-12)) for a, b in pairs)


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf.detach().double() for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
