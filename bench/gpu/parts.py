"""A run as parts and cases: shares of the time, shards of the cases, errors kept with their case."""

from __future__ import annotations

import faulthandler
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from attn_pass.measuring.timing import why
from bench.gpu.environment import Environment
from bench.gpu.journal import Journal
from bench.harness.document import Column, Row

Tell = Callable[[str], None]
_TRACE = 2500  # characters kept of a traceback
_LONG_S = 40.0  # for a case


@dataclass(frozen=True)
class Case:
    """One row: ``run`` gives its fields, and may raise."""

    name: str
    run: Callable[[], Row]


@dataclass(frozen=True)
class Part:
    """What one part measures; ``share`` of the time is its own, and what others leave.

    A part that is not ``timed`` may run beside others. One that is not ``usual`` runs where it is asked for by name.
    """

    name: str
    title: str
    share: float
    columns: tuple[Column, ...]
    cases: Callable[[Environment], Iterable[Case]]
    timed: bool = True
    usual: bool = True


def one_each(
    subjects: Mapping[str, Any], measure: Callable[..., Row], quick: int
) -> Callable[[Environment], list[Case]]:
    """A case for each subject, measured with what is under its name; every ``quick``-th one in quick runs."""

    def cases(env: Environment) -> list[Case]:
        chosen = list(subjects.items())[:: quick if env.quick else 1]
        return [Case(name, partial(measure, env, subject)) for name, subject in chosen]

    return cases


@dataclass(frozen=True)
class Shard:
    """Every ``count``-th case, from the ``number``-th on, which counts from 1: "2/6"."""

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Raises ValueError with a sentence where the text is not i/n with 1 <= i <= n."""
        number, slash, count = text.partition("/")
        if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise ValueError(f"{text!r} is no shard: give i/n with 1 <= i <= n, such as 2/6")
        return cls(int(number), int(count))

    def of(self, cases: Sequence[Case]) -> list[Case]:
        """The cases that are this shard's."""
        return list(cases[self.number - 1 :: self.count])


class Lost(RuntimeError):
    """The device answers no more in this process."""


def run_parts(
    env: Environment, parts: Iterable[Part], end: float, journal: Journal, tell: Tell, shard: Shard = Shard()
) -> Iterator[Row]:
    """Runs the parts until ``end`` (of `time.time`), each until its share of what is left is used up.

    Yields lines for the journal, and reads it: parts that are over, and cases it has rows of, are not run again.

    Raises:
        Lost: nothing runs in this process any more; another one goes on.
    """
    known = journal.own()
    over = {line["part"] for line in known if line.get("over")}
    todo = [part for part in parts if part.name not in over]
    while todo:
        part = todo.pop(0)
        left = end - time.time()
        deadline = time.time() + left * part.share / (part.share + sum(p.share for p in todo))
        done = {line["row"].get("name") for line in known if "row" in line and line["part"] == part.name}
        for line in _run_part(env, part, deadline, done, tell, shard):
            yield {"part": part.name, **line}
        yield {"part": part.name, "over": True}


def _run_part(env: Environment, part: Part, deadline: float, done: set[str], tell: Tell, shard: Shard) -> Iterator[Row]:
    try:
        cases = [case for case in shard.of(list(part.cases(env))) if case.name not in done]
    except Exception as error:
        yield {"row": {"name": "(all)", "status": "failed", "error_text": f"could not begin: {why(error)}"}}
        tell(f"{part.name}: could not begin: {why(error)}")
        return
    began = time.time()
    for number, case in enumerate(cases):
        if time.time() > deadline:
            names = ", ".join(c.name for c in cases[number:])
            note = f"out of time, {len(cases) - number} of {len(cases)} cases skipped: {names}"
            yield {"note": note}
            tell(f"{part.name}: {note[:200]}")
            break
        yield {"begin": case.name}
        row = _run_case(env, case)
        yield {"row": row}
        tell(f"{part.name}: {case.name}: {_shown(part, row)}"[:230])
        if row.get("lost"):
            raise Lost(case.name)
    yield {"note": f"{time.time() - began:.0f} s"}


def _run_case(env: Environment, case: Case) -> Row:
    """A case that takes long says on stderr where it is, again and again."""
    began = time.perf_counter()
    row: Row = {"name": case.name}
    try:
        faulthandler.dump_traceback_later(_LONG_S, repeat=True)
        env.forget()
        row |= case.run()
        env.wait()
    except Exception as error:
        row |= {"status": "failed", "error_text": why(error), "trace": traceback.format_exc()[-_TRACE:]}
        if not env.dry and _is_lost(env):
            row |= {"error_text": f"{row['error_text']} (the device was lost)", "lost": True}
    finally:
        faulthandler.cancel_dump_traceback_later()
    row["seconds"] = round(time.perf_counter() - began, 2)
    return row


def _is_lost(env: Environment) -> bool:
    try:
        env.wait()
        env.normal(8).sum().item()
    except Exception:
        return True
    return False


def _shown(part: Part, row: Row) -> str:
    if "error_text" in row:
        return f"FAILED {row['error_text']}"
    cells = ((c.title, c.cell(row)) for c in part.columns if c.field != "name")
    return ", ".join(f"{title} {cell}" for title, cell in cells if cell != "-")
