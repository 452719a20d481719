"""What compilers make of attention, checked: `python -m bench others [--json FILE] [--backend onnxruntime]`.

Every program goes through `attn_pass.check` with another compiler: those of `tests/integration/miscompiled.py` and the
collected cases (``--cases FOLDER``). Generated programs (``--generated 2000``) are exported and compiled twenty at
once; for runtimes four at once, in float32, and each is a model of its own then. With ``--keep FILE`` a run goes on
where the last one ended. Of stock Inductor it is the passes up to the code that it would generate: its graphs are run
as they are, so that a difference is not one of rounding.
"""

from __future__ import annotations

import importlib
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import attn_pass
from attn_pass.report.units import counted
from bench.harness.command import Json, Only, is_asked, started
from bench.harness.document import Column, Table
from bench.suites import cases, found_elsewhere, others_generated
from bench.suites.elsewhere import BACKENDS, Backend
from bench.suites.others_exported import PARTS
from bench.suites.others_generated import Outcome, generated, keep, outcomes, read

TESTS = Path(__file__).parents[2] / "tests"
COLUMNS = (
    Column("program", "name"),
    Column("sites right", "right"),
    Column("sites wrong", "wrong"),
    Column("fail", "fail"),
    Column("not run", "not_run"),
    Column("whole program", "whole"),
    Column("relative error", "error", ".1e"),
    Column("what it is", "what"),
)
FOUND = (*COLUMNS, Column("what differs, or why it was not run", "why"))
GENERATED, NEAR = "Generated programs", "Generated programs, plain but for one part"
_TOGETHER = dict.fromkeys(PARTS, 4)  # runtimes have no kernel for one program in ten
_LONGEST = 160
_ANY_TYPE = ("inductor", "inductor_compiled")
_OF_LISTED = (
    "each of these programs is a few lines, in `tests/integration/miscompiled.py` and "
    "`bench/suites/found_elsewhere.py`; with the pass all of them are right "
    "(`tests/integration/test_miscompiles.py`, `tests/bench/test_bench_others.py`)",
    "a near miss is no attention: it only looks like one of Inductor's patterns, and only the whole is compared",
)
_NO_ERROR = "no error: the result has another shape than the program's, or a number is missing"


def row(name: str, backend: Backend, function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """One program, checked."""
    torch._dynamo.reset()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        result = attn_pass.check(function, *args, backend=backend, attn_pass_progress=False, **kwargs)
    verdicts = [site.verdict for site in result.sites]
    what = "; ".join(dict.fromkeys(f"{s.mask}, {'x'.join(s.shapes[:1])}" for s in result.sites if s.shapes))
    of_sites = next((s.why for s in result.sites if s.verdict != "right" and s.why), "")
    told = (of_sites or result.why) if result.whole == "right" else (result.why or of_sites)
    told = told.split("; reproduce it with")[0]
    return {
        "name": name,
        "right": verdicts.count("right"),
        "wrong": verdicts.count("WRONG"),
        "fail": verdicts.count("FAILS"),
        "not_run": verdicts.count("not run"),
        "whole": result.whole,
        "error": result.whole_error if result.whole_error is not None and math.isfinite(result.whole_error) else None,
        "what": what or "a near miss",
        "why": " ".join(told.replace("|", "/").split())[:_LONGEST],
        "status": "ok",
    }


def is_found(made: dict[str, Any]) -> bool:
    """Whether anything is wrong, or does not compile."""
    return bool(made["wrong"] or made["fail"]) or made["whole"] != "right"


# ------------------------------------------------------------ the programs


def collected(folder: Path) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """The cases of a folder that are compiled, in evaluation mode."""
    try:
        files = cases.paths(folder)
    except FileNotFoundError as error:
        raise typer.BadParameter(str(error), param_hint="--cases") from error
    for path in files:
        module: Any = cases.load(path)
        if module.META.get("path", "compile") == "compile":
            torch.manual_seed(0)
            program, args, kwargs = module.make("cpu")
            yield path.stem, program.eval(), args, kwargs


# ------------------------------------------------------------ the run


def main(
    json_file: Json = None,
    only: Only = "",
    backend: Annotated[str, typer.Option(help=f"One of {', '.join(BACKENDS)}.")] = "inductor",
    folder: Annotated[Path | None, typer.Option("--cases", help="A folder of collected cases.")] = None,
    number: Annotated[int, typer.Option("--generated", help="Programs to generate.")] = 0,
    near: Annotated[int, typer.Option(help="Programs to generate that are plain attention but for one part.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the first generated program.")] = 1,
    until: Annotated[float, typer.Option(help="Seconds after which no more is started.")] = math.inf,
    kept: Annotated[
        Path | None, typer.Option("--keep", help="What is known of generated programs, to go on from.")
    ] = None,
    together: Annotated[
        int, typer.Option(min=0, help="Generated programs in one compile; 0 for 20, or 4 where many are not taken.")
    ] = 0,
) -> None:
    """Check what another compiler makes of programs that are attention, or look like it."""
    if backend not in BACKENDS:
        raise typer.BadParameter(f"{backend!r}: give one of {', '.join(BACKENDS)}", param_hint="--backend")
    title, compiler = BACKENDS[backend]
    sys.path[:0] = [str(TESTS / "support"), str(TESTS / "integration")]
    recorder = started(f"What is wrong elsewhere: {title}", json_file)
    end = time.monotonic() + until
    listed = [
        (name, program.function, program.inputs(torch.float32), {})
        for name, program in importlib.import_module("miscompiled").PROGRAMS.items()
    ]
    listed += [(name, program.function, program.inputs(), {}) for name, program in found_elsewhere.PROGRAMS.items()]
    tables = [("Programs that look like attention", iter(listed), True)]
    if folder is not None:
        tables.append(("Collected cases: what is wrong, or does not compile", collected(folder), False))
    for about, programs, all_shown in tables:
        table = recorder.table(about, COLUMNS if all_shown else FOUND)
        rows: list[dict[str, Any]] = []
        for name, function, args, kwargs in programs:
            if not is_asked(only, name) or time.monotonic() > end:
                continue
            try:
                rows.append(row(name, compiler, function, *args, **kwargs))
            except Exception as error:  # of the program itself: it does not run eagerly
                recorder.tell(f"{name}: left out, {type(error).__name__}: {str(error)[:80]}")
                continue
            table.rows = [r for r in rows if all_shown or is_found(r)]
            table.notes = notes(rows)
            if is_found(rows[-1]):
                recorder.tell(f"{name}: {rows[-1]['whole']}")
            if len(rows) % 20 == 0:
                recorder.keep()
    for count, is_near in ((number, False), (near, True)):
        if count:
            kind = NEAR if is_near else GENERATED
            of_generated = recorder.table(f"{kind}: what is wrong, or does not compile", FOUND)
            for found in checked(count, seed, backend, end, kept, together, near=is_near):
                fill(of_generated, found)
                recorder.tell(f"{len(found)} generated programs, {len(of_generated.rows)} found")
    recorder.document.tables[0].notes += _OF_LISTED
    recorder.finish()


def checked(
    number: int, seed: int, backend: str, end: float, kept: Path | None, together: int, *, near: bool = False
) -> Iterator[list[Outcome]]:
    """What is known of the generated programs, after each compile of so many together; in float32 for runtimes.

    ``together`` is 0 for as many as suit the compiler.
    What is known of those that are near to plain attention is in a file beside ``kept``.
    """
    if kept is not None and near:
        kept = kept.with_name(f"{kept.stem}-near{kept.suffix}")
    together = together or _TOGETHER.get(backend, 20)
    run = others_generated.together(backend)
    found = read(kept) if kept is not None else []
    in_float32 = backend not in _ANY_TYPE
    programs = list(generated(number, seed, start=len(found), in_float32=in_float32, near=near))
    yield list(found)
    for at in range(0, len(programs), together):
        if time.monotonic() > end:
            return
        new = outcomes(programs[at : at + together], run)
        if kept is not None:
            keep(kept, new)
        found += new
        yield list(found)


def fill(table: Table, found: list[Outcome]) -> None:
    """The rows of those that are wrong or fail, where they are new; and the notes."""
    known = {row["name"] for row in table.rows}
    for outcome in found:
        if outcome.verdict in ("right", "not run") or outcome.name in known:
            continue
        known.add(outcome.name)
        table.rows.append(
            {
                **dict.fromkeys(("right", "wrong", "fail", "not_run")),
                "name": outcome.name,
                "whole": outcome.verdict,
                "error": outcome.error,
                "what": "",
                "why": " ".join(outcome.why.replace("|", "/").split())[:_LONGEST],
                "status": "ok",
            }
        )
    wrong, failed, not_run = (sum(o.verdict == verdict for o in found) for verdict in ("WRONG", "FAILS", "not run"))
    table.notes = [
        f"{counted(len(found), 'program')}: {wrong} wrong without a word, {failed} that do not compile, "
        f"{not_run} that were not compared, as eager's own result is no number or torch does not trace them"
    ]


def notes(rows: list[dict[str, Any]]) -> list[str]:
    """How many programs there were, and what became of them."""
    wrong, failed, not_run = (sum(r["whole"] == verdict for r in rows) for verdict in ("WRONG", "FAILS", "not run"))
    alone = sum(r["wrong"] > 0 and r["whole"] == "right" for r in rows)
    counts = f"{counted(len(rows), 'program')}: {wrong} wrong without a word, {failed} that do not compile or run"
    counts += f", {not_run} that were not compared" if not_run else ""
    counts += f"; {alone} more are wrong only in a site that is compiled alone" if alone else ""
    return [counts, _NO_ERROR]
