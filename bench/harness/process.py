"""Measurements that each run in a process of their own, with a time limit, into a JSONL file that can be continued."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.suites.census.rows import Row, key, read_rows, told_row

Measure = Callable[..., Iterable[Row]]

# Imported once in the server the children are forked from: seconds saved in every one of them.
PRELOAD = (
    "torch",
    "torch.export",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "transformers",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
)


EXIT_S = 10.0
"""How long a process that has sent everything may take to end."""


@dataclass(frozen=True)
class Task:
    """`measure(*args)` yields rows; `facts` are what its first row is about, and what is told if there is none."""

    facts: Row
    measure: Measure
    args: tuple[Any, ...]


def run_all(tasks: Sequence[Task], out: Path, *, jobs: int, limit_s: float, console: Console) -> None:
    """Run the tasks that have no row in `out` yet, in their order, appending rows as they come."""
    done = {key(row) for row in read_rows([out])} if out.exists() else set()
    left = [task for task in tasks if key(task.facts) not in done]
    console.print(f"{len(left)} to run, {len(tasks) - len(left)} already in {out.name}", highlight=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        out.open("a") as file,
        ThreadPoolExecutor(jobs) as pool,
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
    ):
        bar = progress.add_task("measured", total=len(left))
        running = {pool.submit(in_child, task, limit_s): task for task in left}
        try:
            for future in as_completed(running):
                for row in future.result():
                    file.write(json.dumps(row) + "\n")
                    file.flush()
                    told = f"[{time.perf_counter() - start:6.0f} s] {told_row(row)}"
                    progress.console.print(told, markup=False, highlight=False)
                progress.advance(bar)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def in_child(task: Task, limit_s: float) -> list[Row]:
    """The rows of a task, from a fresh process; a last row tells if it ran past its limit or died."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    receiver, sender = context.Pipe(duplex=False)
    began = time.perf_counter()
    process = context.Process(target=_child, args=(sender, task), daemon=True)
    process.start()
    sender.close()
    rows: list[Row] = []
    failure = None
    while True:
        try:
            if not receiver.poll(max(0.0, began + limit_s - time.perf_counter())):
                failure = {"status": "timeout", "error": f"no answer within {limit_s:.0f} s"}
                process.kill()
                break
            message = receiver.recv()
        except EOFError:
            process.join()
            failure = {"status": "died", "error": f"exit code {process.exitcode}"}
            break
        if message is None:
            break
        if isinstance(message, str):
            failure = {"status": "bench failed", "error": message}
            break
        rows.append(message)
    # Libraries leave threads and hooks behind that may hang an orderly exit.
    process.join(EXIT_S)
    process.kill()
    process.join()
    receiver.close()
    if failure is not None:
        stage = f"after {rows[-1]['stage']}" if rows else task.facts["stage"]
        rows.append({**task.facts, "stage": stage, **failure})
    for row in rows:
        row["wall_s"] = round(time.perf_counter() - began, 1)
    return rows


def _child(sender: Connection, task: Task) -> None:
    try:
        for row in task.measure(*task.args):
            sender.send(row)
    except BaseException as error:
        sender.send(f"{type(error).__name__}: {error}"[:600])
    else:
        sender.send(None)
    sender.close()
