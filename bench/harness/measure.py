"""One program in its own process: all variants built, timed in interleaved blocks, compared with float64."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

import attn_pass
from attn_pass.measuring import machine
from attn_pass.measuring.judging import apart, verdict
from attn_pass.measuring.timing import (
    Candidate,
    in_turns,
    peak_bytes,
    percentile,
    private_caches,
    relative_error,
    why,
    worst,
)
from attn_pass.model.dtype_name import dtype_name
from bench.harness import floors
from bench.harness import variants as w
from bench.harness.document import Row
from bench.harness.environment import no_notices
from bench.harness.floors import Rates, count_flops, moved_bytes
from bench.harness.process import Task, in_child
from bench.harness.programs import Program, Setting, program_of

Tell = Callable[[str], None]
LIMIT_S = 1800.0
_TIMES_KNOWN = 3.0  # so many times the error of eager, or of stock, is allowed if a program has no tolerance,
_ROUNDING = 1e-5  # or what rounding in float32 may do
_TELLS = 0.1  # of the largest value: where eager itself is as wrong, right and wrong cannot be told apart
_REST_S = 0.01  # the threads of the library that ran before wait by working, for milliseconds
_CALLS_OF_A_PEAK = 2  # what another part of the process frees late belongs to neither
_WITHOUT_ARENAS = ("eager", "compile", "AOTInductor")


def quiet(threads: int) -> None:
    """No notices of the libraries, this many threads, no gradients: for the rest of this process."""
    no_notices()
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)


def warm_compiler() -> None:
    """Compile something trivial: the first compile in a fresh cache also builds Inductor's precompiled headers."""
    torch.compile(lambda x: x + 1)(torch.zeros(8))


def measured(module: str, name: str, chosen: tuple[str, ...], setting: Setting, rates: Rates) -> Iterator[Row]:
    """What a child does: the rows of one program, one a way, with ``status`` "ok"."""
    quiet(setting.threads)
    program = program_of(module, name, setting)
    # Without the graph caches: two ways that end in the same graph must both pay for compiling it.
    uncached = torch._inductor.config.patch(force_disable_caches=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place, private_caches(Path(place)), uncached:
        warm_compiler()
        shop = w.Workshop(program, setting.device, Path(place))
        candidates, failures = _built(shop, chosen)
        runs = {candidate.name: candidate.run for candidate in candidates}
        rates, busy = _again(rates, setting), [_busy(setting)]
        samples = in_turns(runs, shop.inputs, setting.rounds, seconds=setting.block_s, rest_s=_REST_S, seed=name)
        rates, busy = _again(rates, setting), [*busy, _busy(setting)]
        peaks = {candidate.name: _peak(candidate, shop.inputs) for candidate in candidates}
        work = _work(shop, rates) | {"busy": next(filter(None, busy), None)}
        errors = _errors(program, candidates, shop.inputs, setting.device)
        reports = {way: _report_row(report) for way, report in shop.reports.items()}
    for candidate in candidates:
        yield {
            **row_of(name, candidate.name, samples[candidate.name], errors.get(candidate.name), program.tolerance),
            "compile_s": candidate.compile_s,
            "package_bytes": candidate.package_bytes,
            "peak_bytes": peaks[candidate.name],
            **work,
            **reports.get(candidate.name, {}),
            **({"took": program.hand} if candidate.name in (w.HAND, w.PACKAGE_HAND) else {}),
            **({"took": candidate.took} if candidate.took else {}),
        }
    for way, failure in failures.items():
        yield failed_row(name, way, failure)


def row_of(program: str, way: str, taken: Sequence[float], error: float | None, tolerance: float | None) -> Row:
    """What every row has: of a program run in one way, the microseconds it took and its error, if it can be told."""
    times = {f"p{which}_us": percentile(taken, which) for which in (10, 90)}
    facts = {"program": program, "way": way, "stage": way, "status": "ok", "error": error, "tolerance": tolerance}
    return {**facts, "median_us": statistics.median(taken), **times}


def _again(rates: Rates, setting: Setting) -> Rates:
    """The rates measured once more, if that shows them higher; in a quick run those of its start."""
    return rates if setting.quick else rates.fastest(floors.rates(setting.device, 3))


def _busy(setting: Setting) -> str:
    time.sleep(0.2)  # threads of a library may still wait by working
    return machine.why_busy(machine.shares_in_use(), setting.threads)


def _peak(candidate: Candidate, inputs: tuple[torch.Tensor, ...]) -> int | None:
    """The least of a few calls; None for systems that keep their memory, whose further calls add nothing."""
    if not candidate.name.startswith(_WITHOUT_ARENAS):
        return None
    peaks = [peak_bytes(candidate.run, inputs) for _ in range(_CALLS_OF_A_PEAK)]
    return min((peak for peak in peaks if peak is not None), default=None)


def failed_row(program: str, way: str, why_not: str) -> Row:
    return {"program": program, "way": way, "stage": way, "status": "failed", "error_text": why_not}


def _built(shop: w.Workshop, chosen: Sequence[str]) -> tuple[list[Candidate], dict[str, str]]:
    candidates, failures = [], {}
    for way in chosen:
        if way in (w.HAND, w.PACKAGE_HAND) and shop.program.by_hand is None:
            continue
        try:
            candidates.append(shop.build(way))
        except Exception as error:
            failures[way] = why(error)
    return candidates, failures


def _work(shop: w.Workshop, rates: Rates) -> Row:
    program, module = shop.program, shop.module
    # The counter's hooks on modules know no torch.autograd.grad.
    run = program.call(module.forward if program.trains else module, module)
    flops = count_flops(run, shop.inputs) * program.kept
    size = moved_bytes((shop.inputs, read_whole(module)), run(*shop.inputs))
    dtype = dtype_name(program.dtype or shop.inputs[0].dtype)
    return {
        "flops": flops,
        "bytes": size,
        "dtype": dtype,
        "floor_us": rates.floor_us(flops, size, dtype),
        "bound": rates.bound(flops, size, dtype),
        "rates": asdict(rates),
        "reported": program.reported or None,
    }


def read_whole(module: nn.Module) -> list[torch.Tensor]:
    """The weights that a call reads from memory; of an embedding it reads some rows."""
    read = (m for m in module.modules() if not isinstance(m, nn.Embedding))
    return [parameter for m in read for parameter in m.parameters(recurse=False)]


def _errors(
    program: Program, candidates: Sequence[Candidate], inputs: tuple[torch.Tensor, ...], device: str
) -> dict[str, float]:
    """The worst relative error of every candidate over all inputs of the program."""
    if program.draws:
        return {}
    errors: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    # Last of all: other sizes make torch.compile compile again, and that is not what was timed.
    for given in (inputs, *(other(device) for other in program.others)):
        want = program.exact(device, given)
        for candidate in candidates:
            errors[candidate.name].append(relative_error(program.answer(candidate.run, given), want))
    return {name: worst(of_way) for name, of_way in errors.items()}


def _report_row(report: attn_pass.Report) -> Row:
    sites = list(report.sites)
    descriptions = [
        f"left: {site.reason}" if site.outcome == "left" else " + ".join((str(site.target), *site.poor_cases))
        for site in sites
    ]
    for region in report.regions:
        is_packed = region.outcome == "packed"
        descriptions.append(
            f"{region.packed} of {region.sites} on packed rows" if is_packed else f"padded: {region.reason}"
        )
    return {"took": "; ".join(dict.fromkeys(descriptions)) or "no site", "report": str(report)}


# ---------------------------------------------------------------- the caller's side


def run(
    module: str, programs: Sequence[Program], chosen: Sequence[str], setting: Setting, rates: Rates, tell: Tell
) -> list[Row]:
    """Every program in a fresh process; rows with ratios and verdicts. A failure is a row of its own."""
    rows: list[Row] = []
    for program in programs:
        rows += judged(child(program.name, measured, (module, program.name, tuple(chosen), setting, rates), tell))
    return rows


def child(name: str, function: Callable[..., Iterator[Row]], args: tuple[Any, ...], tell: Tell) -> list[Row]:
    """The rows a function yields in a fresh process, told as they are."""
    began = time.perf_counter()
    rows = in_child(Task({"program": name, "stage": name}, function, args), LIMIT_S)
    for row in rows:
        if row["status"] not in ("ok", "failed"):  # the process died, or was late
            row |= {"way": row.get("stage", ""), "error_text": row.pop("error", ""), "status": "failed"}
    failed = [f"{row['way']}: {row['error_text']}" for row in rows if row["status"] == "failed"]
    tell(f"{name}: {time.perf_counter() - began:.0f} s" + "".join(f"\n  failed: {text}" for text in failed))
    return rows


def judged(rows: list[Row]) -> list[Row]:
    """Adds to the rows of each program: the speedup over stock, the noise, and what to make of it."""
    for program in dict.fromkeys(row["program"] for row in rows):
        _judge([row for row in rows if row["program"] == program])
    return rows


def _judge(rows: list[Row]) -> None:
    by_way = {row["way"]: row for row in rows if row["status"] == "ok"}
    ways = {row["way"] for row in rows}
    for row in by_way.values():
        base = by_way.get(w.base_of(row["way"], ways))
        if "floor_us" in row:
            row["of_floor"] = row["floor_us"] / row["median_us"]
        if base is not None:
            row["over_stock"] = base["median_us"] / row["median_us"]
            row["noise"] = noise(base, by_way.get(w.AGAIN[base["way"]]))
            row["verdict"] = verdict(row["over_stock"], base["p10_us"] / row["p10_us"], row["noise"])
        if row["error"] is None:
            continue
        if row["tolerance"] is None:
            known = by_way.get(w.EAGER) or by_way.get(w.base_of(row["way"], ways))
            rounding = _ROUNDING if row.get("dtype") == "float32" else 0.0
            row["tolerance"] = max(rounding, 0.0 if known is None else _TIMES_KNOWN * known["error"])
            if known is not None and known["error"] > _TELLS:
                row["took"] = f"{row.get('took') or ''} (not judged: {known['way']} is off by {known['error']:.0%})"
                continue
        if not row["error"] <= row["tolerance"]:
            row["verdict"] = "WRONG"


def noise(base: Row, again: Row | None) -> float:
    """How far apart the same code is from itself in this run, as a share; NaN where it ran once."""
    if again is None:
        return math.nan
    return apart([base[field] / again[field] for field in ("median_us", "p10_us")])
