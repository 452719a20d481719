"""Tasks into a JSONL file that can be continued, several processes at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from rich.console import Console

from bench.harness.console import teller
from bench.harness.process import Task, in_child
from bench.suites.census.rows import key, read_rows, row_text


def run_all(tasks: Sequence[Task], out: Path, *, jobs: int, limit_s: float, console: Console) -> None:
    """Run the tasks that have no row in `out` yet, in their order, appending rows as they come."""
    done = {key(row) for row in read_rows([out])} if out.exists() else set()
    left = [task for task in tasks if key(task.facts) not in done]
    tell = teller(console)
    tell(f"{len(left)} to run, {len(tasks) - len(left)} already in {out.name}")
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as file, ThreadPoolExecutor(jobs) as pool:
        try:
            for number, future in enumerate(as_completed([pool.submit(in_child, task, limit_s) for task in left]), 1):
                for row in future.result():
                    file.write(json.dumps(row) + "\n")
                    file.flush()
                    tell(f"{number}/{len(left)} {row_text(row)}")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
