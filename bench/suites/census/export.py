"""Exported programs: the pass on the output of torch.export, unchanged and after `run_decompositions()`."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator

import torch
from torch.export import ExportedProgram

import attn_pass
from bench.suites.census.dataset import Census, NotMeasured, Subject, error_text, prepared
from bench.suites.census.rows import Row, report_row, warned

STAGES = ("export", "decomposed")
FACTS = {"bench": "export", "stage": STAGES[0]}
LARGEST_SAVED = 200 * 2**20
"""Programs with more bytes of weights than this are not saved and loaded again, which takes long."""


def measure(census: Census, name: str) -> Iterator[Row]:
    """One row for the exported program, one for the decomposed one."""
    subject = prepared(census, name)
    began = time.perf_counter()
    program, strict = exported(subject)
    facts: Row = {"export_s": round(time.perf_counter() - began, 2), "strict": strict}
    decomposed, refusal = None, ""
    began = time.perf_counter()
    try:
        with torch.no_grad():
            # Before the rewrite, which changes `program` in place.
            decomposed = program.run_decompositions()
    except Exception as error:
        refusal = error_text(error)
    decompose_s = round(time.perf_counter() - began, 2)
    yield {**facts, **rewritten(subject, program)}
    facts.update(stage=STAGES[1], decompose_s=decompose_s)
    if decomposed is None:
        yield {**facts, "status": "not decomposable", "error": refusal}
    else:
        yield {**facts, **rewritten(subject, decomposed)}


def exported(subject: Subject) -> tuple[ExportedProgram, bool]:
    """The program, and whether it was exported strictly; non-strict export is tried first.

    Raises:
        NotMeasured: neither works.
    """
    refusals: list[str] = []
    for strict in (False, True):
        try:
            with torch.no_grad():
                program = torch.export.export(subject.model, subject.args, subject.kwargs, strict=strict)
            return program, strict
        except Exception as error:
            refusals.append(f"strict={strict}: {error_text(error)}")
    raise NotMeasured("not exportable", " | ".join(refusals)[:1200])


def rewritten(subject: Subject, program: ExportedProgram) -> Row:
    """Rewrite the program in place, run it before and after, and tell what became of it."""
    row: Row = {"status": "ok", "sites": subject.census.counted([program.module()])}
    try:
        as_exported = subject.run(program.module())
    except Exception as error:
        return {**row, "status": "does not run as exported", "error": error_text(error)}
    row["exported"] = subject.judged(as_exported)
    began = time.perf_counter()
    with warned(row):
        try:
            report = attn_pass.rewrite(program, choose="fused")
        except Exception as error:
            return {**row, "status": "rewrite failed", "error": error_text(error)}
        row["seconds"] = round(time.perf_counter() - began, 3)
    row.update(report_row(report))
    row["after"] = subject.census.counted([program.module()])
    try:
        got = subject.run(program.module())
    except Exception as error:
        return {**row, "status": "does not run", "error": error_text(error)}
    # What torch.export got wrong is not the pass's: the rewritten program has to equal the one it was made from.
    row["numerics"] = subject.judged(got, None if row["exported"]["ok"] else as_exported)
    row["saved"] = saved(subject, program, got)
    return row


def saved(subject: Subject, program: ExportedProgram, expected: list[torch.Tensor]) -> str:
    """ "ok" if the program comes back from torch.export.save and load and computes the same, else what went wrong."""
    size = sum(t.numel() * t.element_size() for t in program.state_dict.values())
    if size > LARGEST_SAVED:
        return "not tried"
    file = io.BytesIO()
    try:
        torch.export.save(program, file)
        file.seek(0)
        got = subject.run(torch.export.load(file).module())
    except Exception as error:
        return error_text(error)
    return "ok" if subject.judged(got, expected)["ok"] in (True, None) else "other numbers"
