"""Part 4: the field reports about GPUs that started the project: S2, S3 and S4.

The programs are those of `bench.suites.seeds`, at the reports' sizes; each compiled, and as a package of AOTInductor,
which is timed as it is launched. S3 is about what a call costs the host where the work is small.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import attn_pass
from attn_pass.measuring.timing import relative_error, why, worst
from bench.gpu.environment import Environment, decision_row, passed, stock
from bench.gpu.parts import Case, Column, Part, Row
from bench.gpu.timing import Variant, compare, host_us
from bench.harness import variants as w
from bench.harness.programs import Program, Setting
from bench.suites.seeds import s2, s3, s4

aten = torch.ops.aten
Runs = dict[str, Callable[..., Any]]
_DRY_SIZE = 32  # the largest size of a dimension in a dry run
_TOLERANCE = 5e-3  # of the largest value, in float16
_ROWS = 1  # of the batch whose results are compared with float64


# ---------------------------------------------------------------- what the reports have beside torch's call


def _flash_in_its_layout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    lengths = (q.size(1), k.size(1))
    out: Tensor = aten._flash_attention_forward(q, k, v, None, None, *lengths, 0.0, False, False)[0]
    return out


def _kernels(seed: str) -> Runs:
    """The bare kernel, and the package flash_attn where it is installed."""
    bare: dict[str, Runs] = {
        "S2": {"flash": _flash_in_its_layout},
        "S3": {"flash": lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v)[0]},
    }
    try:
        from flash_attn import flash_attn_func
    except Exception:
        return bare.get(seed, {})

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    def copied(q: Tensor, k: Tensor, v: Tensor) -> Any:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2).contiguous() for x in (q, k, v))
        return flash_attn_func(q, k, v).transpose(1, 2).contiguous().transpose(1, 2)

    library: dict[str, Runs] = {
        "S2": {"flash_attn": flash_attn_func, "flash_attn, copies": copied},
        "S3": {"flash_attn": attend},
    }
    return bare.get(seed, {}) | library.get(seed, {})


# ---------------------------------------------------------------- one program


def _inputs(env: Environment, seed: str, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """In a dry run small, and in the dtype that the report has."""
    if not env.dry:
        return inputs
    small = (x[tuple(slice(0, _DRY_SIZE) for _ in x.shape)].clone() for x in inputs)
    return tuple(small) if seed == "S4" else tuple(x.half() for x in small)


def _exact(program: Program, module: Any, inputs: tuple[Tensor, ...]) -> Tensor:
    if program.reference is not None:
        return program.reference(*inputs)[:_ROWS]
    result: Tensor = module(*(x[:_ROWS].double() for x in inputs))
    return result


def measure(env: Environment, seed: str, program: Program, packaged: bool) -> Row:
    """Stock, the pass and the form by hand of one program, their errors, and what a call costs the host."""
    row: Row = {"reported": program.reported, "failed": {}, "build_s": {}}
    module, given = program.make(env.device)
    inputs = _inputs(env, seed, given)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        runs = _packages(env, program, module, inputs, Path(folder), row) if packaged else {}
        if not packaged:
            runs = {"eager": module, "stock": stock(env, module), "pass": passed(env, module)}
            with attn_pass.record() as report:
                runs["pass"](*inputs)
            row |= decision_row(report)
            if program.by_hand is not None:
                runs["by hand"] = program.by_hand(env.device)
            runs |= _kernels(seed)
        if "stock" in runs:
            runs["stock again"] = runs["stock"]
        others = [other(env.device) for other in program.others] if packaged else []
        errors: dict[str, list[float]] = {}
        for some in (inputs, *others):
            right = _exact(program, module, some)
            for name, run in runs.items():
                try:
                    errors.setdefault(name, []).append(relative_error(run(*some)[:_ROWS], right))
                except Exception as error:
                    row["failed"][name] = why(error)
        row["errors"] = {name: worst(results) for name, results in errors.items()}
        limit = program.tolerance if seed == "S4" else _TOLERANCE
        row["wrong"] = ", ".join(n for n, off in row["errors"].items() if not off <= limit) or None
        times = compare(env, {n: Variant(r, capture=not packaged) for n, r in runs.items()}, [inputs])
        host = {name: host_us(env, partial(runs[name], *inputs)) for name in times.found} if seed == "S3" else {}
    us = times.us
    row |= {"us": us, "host_us": host, "stock_us": us.get("stock"), "pass_us": us.get("pass")}
    row["failed"] |= times.failed
    if "stock" in us and "pass" in us:
        row |= {"stock_over_pass": us["stock"] / us["pass"], "a_a": us["stock again"] / us["stock"]}
    row["all"] = ", ".join(f"{name} {taken:.1f}" for name, taken in us.items())
    if host:
        row["all"] = f"device: {row['all']}; host: " + ", ".join(f"{name} {taken:.1f}" for name, taken in host.items())
    return row


def _packages(
    env: Environment, program: Program, module: Any, inputs: tuple[Tensor, ...], folder: Path, row: Row
) -> Runs:
    runs: Runs = {}
    ways = {"pass": w.PACKAGE_PASS, "stock": w.PACKAGE, "decomposed": w.DECOMPOSED}
    for name, way in list(ways.items())[: 1 if env.quick else None]:
        began = time.perf_counter()
        try:
            with attn_pass.record() as report:
                w.package(way, module, inputs, program.dynamic_shapes, folder / f"{name}.pt2")
            runs[name] = torch._inductor.aoti_load_package(str(folder / f"{name}.pt2"))
            row["build_s"][name] = round(time.perf_counter() - began, 1)
            if way == w.PACKAGE_PASS:
                row |= decision_row(report)
        except Exception as error:
            row["failed"][name] = why(error)
    return runs


def cases(env: Environment) -> list[Case]:
    """S4 first: it has a goal. In half precision, as it was reported."""
    setting = Setting(env.device, quick=env.dry)
    programs = {"S4": s4.programs(setting)[-1:], "S2": s2.programs(setting), "S3": s3.programs(setting)}
    listed = []
    for packaged in (False, True):
        for seed, all_of_them in programs.items():
            few = all_of_them[: 1 if env.quick else 3 if packaged else None]
            for program in few if not (packaged and env.quick and env.dry) else ():
                name = f"{seed} {program.name}{', AOTInductor' if packaged else ''}"
                listed.append(Case(name, partial(measure, env, seed, program, packaged)))
    return listed


PART = Part(
    "seeds",
    "The field reports S2, S3 and S4",
    0.17,
    (
        Column("case", "name"),
        Column("stock us", "stock_us", ".1f"),
        Column("pass us", "pass_us", ".1f"),
        Column("stock / pass", "stock_over_pass", ".2f"),
        Column("A/A", "a_a", ".2f"),
        Column("took", "took"),
        Column("predicted us", "predicted_us", ".1f"),
        Column("wrong", "wrong"),
        Column("all, us", "all"),
        Column("reported", "reported"),
    ),
    cases,
)
