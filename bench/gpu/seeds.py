"""Part 4: the field reports the project was made from, where a GPU is what they are about: S2, S3 and S4.

S2: transposed copies around the kernel, reported for flash-attn on an A100. S3: what a call costs the host where the
work is small. S4: one-token queries against shared keys through AOTInductor (pytorch/pytorch#151287).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import attn_pass
from bench.gpu.environment import Environment, passed, said, stock
from bench.gpu.parts import Case, Column, Part, Row
from bench.gpu.shapes import Shape, by_hand, call
from bench.gpu.timing import Variant, compare, host_us, why
from bench.harness import variants
from bench.harness.timing import relative_error
from bench.suites.seeds import shared_keys

FP16 = torch.float16
aten = torch.ops.aten
# (B, H, L, D) in float16, with what was reported.
S2: dict[str, tuple[tuple[int, int, int, int], str]] = {
    "S2 B12 H64 L256 D64": ((12, 64, 256, 64), "A100: flash-attn 364.1 us, without copies 120.6; SDPA 98.7"),
    "S2 B16 H128 L784 D128": (
        (16, 128, 784, 128),
        "A100: flash-attn 7392.4 us, without copies 3845.1; SDPA 4085.1",
    ),
}
S3 = tuple((batch, length) for batch in (2, 512) for length in (50, 150, 300))


# ---------------------------------------------------------------- S2


def with_copies(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Operands (B, L, H, D), as the report had it."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()


def without_copies(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same without the copies."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _flash_in_its_layout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    lengths = (q.size(1), k.size(1))
    out: Tensor = aten._flash_attention_forward(q, k, v, None, None, *lengths, 0.0, False, False)[0]
    return out


def _library() -> dict[str, Callable[..., Any]]:
    """The package flash_attn, where it is installed."""
    try:
        from flash_attn import flash_attn_func
    except Exception:
        return {}

    def copied(q: Tensor, k: Tensor, v: Tensor) -> Any:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2).contiguous() for x in (q, k, v))
        return flash_attn_func(q, k, v).transpose(1, 2).contiguous()

    return {"flash_attn": flash_attn_func, "flash_attn, copies": copied}


def copies(env: Environment, sizes: tuple[int, int, int, int], reported: str) -> Row:
    """Eager, stock and the pass, with the copies and without; the kernel itself."""
    batch, heads, length, dim = (min(n, 8) for n in sizes) if env.dry else sizes
    inputs = tuple(env.normal(batch, length, heads, dim, dtype=FP16) for _ in range(3))
    row: Row = {"reported": reported}
    with torch.no_grad():
        runs: dict[str, Callable[..., Any]] = {
            "eager, copies": with_copies,
            "eager, none": without_copies,
            "stock, copies": stock(env, with_copies),
            "stock, none": stock(env, without_copies),
            "pass, copies": passed(env, with_copies),
            "pass, none": passed(env, without_copies),
            "flash": _flash_in_its_layout,
            **_library(),
        }
        with attn_pass.record() as report:
            runs["pass, copies"](*inputs)
        row |= said(report)
        runs["stock again"] = runs["stock, copies"]
        times = compare(env, {name: Variant(run) for name, run in runs.items()}, [inputs])
    return row | _told({n: t.median_us for n, t in times.found.items()}, times.failed, "stock, copies", "pass, copies")


def _told(us: dict[str, float], failed: dict[str, str], stock_name: str, pass_name: str) -> Row:
    """The times, and stock over pass."""
    row: Row = {"us": us, "failed": failed, "stock_us": us.get(stock_name), "pass_us": us.get(pass_name)}
    if stock_name in us and pass_name in us:
        row["stock_over_pass"] = us[stock_name] / us[pass_name]
    if stock_name in us and "stock again" in us:
        row["a_a"] = us["stock again"] / us[stock_name]
    row["all"] = ", ".join(f"{name} {taken:.1f}" for name, taken in us.items())
    return row


# ---------------------------------------------------------------- S3


def small(env: Environment, batch: int, length: int) -> Row:
    """16 heads of 16: device time by graphs, and what a call costs the host."""
    if env.dry:
        batch, length = min(batch, 4), length // 10
    shape = Shape(batch, 16, 16, length, length, 16, dtype=FP16)
    inputs = shape.inputs(env)
    spelled = call(shape)
    assert spelled is not None
    with torch.no_grad():
        runs: dict[str, Callable[..., Any]] = {
            "eager, call": spelled,
            "stock, by hand": stock(env, by_hand(shape)),
            "stock, call": stock(env, spelled),
            "pass, by hand": passed(env, by_hand(shape)),
            "pass, call": passed(env, spelled),
            "flash": lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v)[0],
            **{n: r for n, r in _library().items() if n == "flash_attn"},
        }
        with attn_pass.record() as report:
            runs["pass, call"](*inputs)
        row = said(report)
        runs["stock again"] = runs["stock, call"]
        times = compare(env, {name: Variant(run) for name, run in runs.items()}, [inputs])
        host = {name: host_us(env, partial(runs[name], *inputs)) for name in times.found}
    row |= _told({n: t.median_us for n, t in times.found.items()}, times.failed, "stock, call", "pass, call")
    row["host_us"] = host
    row["all"] = f"device: {row['all']}; host: " + ", ".join(f"{n} {t:.1f}" for n, t in host.items())
    return row


# ---------------------------------------------------------------- S4


def _half(env: Environment) -> bool:
    return not env.dry


def _device(env: Environment) -> str:
    return "cpu" if env.dry else "cuda"


def packaged(env: Environment) -> Row:
    """S4's three packages: stock, decomposed, the pass's; timed as they are launched, answers checked."""
    chosen = (variants.PACKAGE_PASS, variants.PACKAGE, variants.DECOMPOSED)
    if env.quick:
        chosen = chosen[:1]
    row: Row = {"reported": shared_keys.REPORTED, "build_s": {}, "failed": {}}
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        inputs = shared_keys.make_inputs(device=_device(env))
        shapes = ({0: shared_keys.batch_dim()}, None, None)
        runs: dict[str, Callable[..., Any]] = {}
        for number, way in enumerate(chosen):
            began = time.perf_counter()
            try:
                path = Path(folder) / f"{number}.pt2"
                with attn_pass.record() as report:
                    model = shared_keys.SharedKeys(_device(env), _half(env)).eval()
                    variants.package(way, model, inputs, shapes, path)
                runs[way] = torch._inductor.aoti_load_package(str(path))
                row["build_s"][way] = round(time.perf_counter() - began, 1)
                if way == variants.PACKAGE_PASS:
                    row |= said(report)
            except Exception as error:
                row["failed"][way] = why(error)
        if variants.PACKAGE in runs:
            runs["stock again"] = runs[variants.PACKAGE]
        row |= _answers(runs, env)
        times = compare(env, {n: Variant(r, capture=False) for n, r in runs.items()}, [inputs])
    us = {name: time.median_us for name, time in times.found.items()}
    return row | _told(us, {**row["failed"], **times.failed}, variants.PACKAGE, variants.PACKAGE_PASS)


def _answers(runs: dict[str, Callable[..., Any]], env: Environment) -> Row:
    """The worst error over the checked batches, relative to the largest value."""
    errors: dict[str, float] = {}
    for batch in shared_keys.CHECKED_BATCHES:
        inputs = shared_keys.make_inputs(batch, _device(env))
        right = shared_keys.reference(*inputs)
        for name, run in runs.items():
            off = relative_error(run(*inputs), right)
            errors[name] = off if not off <= errors.get(name, 0.0) else errors[name]
    limit = shared_keys.TOLERANCE[_half(env)]
    return {"errors": errors, "wrong": ", ".join(n for n, e in errors.items() if not e <= limit) or None}


def compiled(env: Environment) -> Row:
    """S4 by torch.compile, device time by graphs."""
    with torch.no_grad():
        inputs = shared_keys.make_inputs(4 if env.dry else shared_keys.BATCH, _device(env))
        plain = shared_keys.SharedKeys(_device(env), _half(env)).eval()
        runs: dict[str, Callable[..., Any]] = {
            "stock": stock(env, plain),
            "pass": passed(env, plain),
            "folded by hand": shared_keys.Folded(_device(env), _half(env)).eval(),
        }
        with attn_pass.record() as report:
            runs["pass"](*inputs)
        row = said(report)
        runs["stock again"] = runs["stock"]
        times = compare(env, {n: Variant(r) for n, r in runs.items()}, [inputs])
    return row | _told({n: t.median_us for n, t in times.found.items()}, times.failed, "stock", "pass")


# ---------------------------------------------------------------- S2 and S3 as packages


class _Called(torch.nn.Module):
    """A program as a module, which is what is packaged."""

    def __init__(self, program: Callable[..., Tensor]) -> None:
        super().__init__()
        self._program = program

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._program(q, k, v)


def packages(env: Environment, program: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Row:
    """The packages of stock and of the pass, timed as they are launched; their results against float64."""
    row: Row = {"failed": {}}
    runs: dict[str, Callable[..., Any]] = {}
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        right = program(*(x[:1].double() for x in inputs))
        for way in (variants.PACKAGE_PASS, variants.PACKAGE):
            try:
                path = Path(folder) / f"{len(runs)}.pt2"
                with attn_pass.record() as report:
                    variants.package(way, _Called(program).eval(), inputs, None, path)
                runs[way] = torch._inductor.aoti_load_package(str(path))
                if way == variants.PACKAGE_PASS:
                    row |= said(report)
            except Exception as error:
                row["failed"][way] = why(error)
        row["errors"] = {name: relative_error(run(*inputs)[:1], right) for name, run in runs.items()}
        row["wrong"] = ", ".join(n for n, off in row["errors"].items() if not off <= _PACKAGED_TOLERANCE) or None
        if variants.PACKAGE in runs:
            runs["stock again"] = runs[variants.PACKAGE]
        times = compare(env, {n: Variant(r, capture=False) for n, r in runs.items()}, [inputs])
    us = {name: time.median_us for name, time in times.found.items()}
    return row | _told(us, {**row["failed"], **times.failed}, variants.PACKAGE, variants.PACKAGE_PASS)


_PACKAGED_TOLERANCE = 4e-3  # of the largest value, in float16


def packaged_copies(env: Environment, sizes: tuple[int, int, int, int]) -> Row:
    """S2 with its copies."""
    batch, heads, length, dim = (min(n, 8) for n in sizes) if env.dry else sizes
    inputs = tuple(env.normal(batch, length, heads, dim, dtype=FP16) for _ in range(3))
    return packages(env, with_copies, inputs)


def packaged_small(env: Environment, batch: int, length: int) -> Row:
    """S3's call."""
    shape = Shape(min(batch, 4) if env.dry else batch, 16, 16, length, length, 16, dtype=FP16)
    program = call(shape)
    assert program is not None
    return packages(env, program, shape.inputs(env))


def cases(env: Environment) -> list[Case]:
    """S4 first: it has a goal."""
    found = [Case("S4 by torch.compile", partial(compiled, env))]
    found.append(Case("S4 through AOTInductor", partial(packaged, env)))
    found += [Case(name, partial(copies, env, *sizes)) for name, sizes in S2.items()]
    chosen = S3[:1] if env.quick else S3
    found += [Case(f"S3 B{b} L{n} H16 D16", partial(small, env, b, n)) for b, n in chosen]
    found += [Case(f"{n}, AOTInductor", partial(packaged_copies, env, s)) for n, (s, _) in S2.items()]
    found += [Case(f"S3 B{b} L{n}, AOTInductor", partial(packaged_small, env, b, n)) for b, n in chosen[:2]]
    return [c for c in found if not (env.quick and env.dry and "AOTI" in c.name)]


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
