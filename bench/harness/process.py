"""Measurements in fresh processes: results as they arrive, and the outcome of a process that died or hung.

Nothing here needs more than Python: the GPU's benches (`bench.gpu`) run where there may be nothing else.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

Row = dict[str, Any]
Measure = Callable[..., Iterable[Row]]

# Imported once in the server the processes are forked from: seconds saved in every one of them.
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
_PARENT_DEATH_SIGNAL = 1  # prctl(2), PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Task:
    """`measure(*args)` yields rows; `facts` are what its first row is about, and what is told if there is none.

    A task that is ``forked`` starts from a server that has torch and transformers imported; one that is not imports
    what it needs by itself, as CUDA wants it.
    """

    facts: Row
    measure: Measure
    args: tuple[Any, ...]
    forked: bool = True


@dataclass(frozen=True)
class Ended:
    """How a process ended that did not send everything: "died" or "bench failed", and why."""

    status: str
    why: str


def messages(task: Task, tick_s: float) -> Iterator[Row | Ended | None]:
    """What the task yields, None whenever it is silent for ``tick_s``, and in the end perhaps how it ended.

    Closing the iterator kills the process; so does the death of this one (Linux).
    """
    context: Any = multiprocessing.get_context("forkserver" if task.forked else "spawn")
    if task.forked:
        context.set_forkserver_preload(list(PRELOAD))
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, task), daemon=task.forked)
    process.start()
    sender.close()
    try:
        while True:
            try:
                message = receiver.recv() if receiver.poll(tick_s) else ()
            except EOFError:
                process.join()
                yield Ended("died", f"exit code {process.exitcode}")
                return
            if message is None:
                break
            if isinstance(message, str):
                yield Ended("bench failed", message)
                break
            yield message or None
        # Libraries leave threads and hooks behind that may hang an orderly exit.
        process.join(EXIT_S)
    finally:
        process.kill()
        process.join()
        receiver.close()


def in_child(task: Task, limit_s: float) -> list[Row]:
    """The rows of a task, from a fresh process; a last row tells if it ran past its limit or died."""
    began = time.perf_counter()
    rows: list[Row] = []
    failure = None
    said = messages(task, limit_s)
    for message in said:
        if isinstance(message, Ended):
            failure = {"status": message.status, "error": message.why}
        elif message is not None:
            rows.append(message)
        if message is None or time.perf_counter() - began > limit_s:
            failure = {"status": "timeout", "error": f"no end within {limit_s:.0f} s"}
            break
    said.close()  # type: ignore[attr-defined]
    if failure is not None:
        stage = f"after {rows[-1]['stage']}" if rows else task.facts["stage"]
        rows.append({**task.facts, "stage": stage, **failure})
    for row in rows:
        row["wall_s"] = round(time.perf_counter() - began, 1)
    return rows


def _child(sender: Connection, task: Task) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    faulthandler.enable()  # a fault in a library names the line that called it
    try:
        for row in task.measure(*task.args):
            sender.send(row)
    except BaseException as error:
        sender.send(f"{type(error).__name__}: {error}"[:600])
    else:
        sender.send(None)
    sender.close()
