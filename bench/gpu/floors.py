"""Parts 3 and 4: standard cases: stock Inductor and the pass on both spellings, every kernel by hand, the lower bound.

The floor is the longest of products, exponentials and memory at an H200's rates (`bench.gpu.shapes`); shares of what
this device itself reaches stand beside it. Programs written by hand whose scores would not fit in memory are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import attn_pass
from attn_pass.measuring.timing import peak_bytes, why
from bench.gpu.environment import NAMED, Environment, decision_row, passed, stock
from bench.gpu.kernels import chosen_by_hand
from bench.gpu.parts import Case, Column, Part, Row, one_each
from bench.gpu.shapes import Shape, by_hand, call
from bench.gpu.timing import Rates, Times, Variant, compare, rates, sets_of
from bench.harness.programs import doubled

FP16, FP32 = torch.float16, torch.float32


def _prefill(length: int, dim: int, mask: str) -> tuple[str, Shape]:
    name = f"prefill B4 H32 S{length} D{dim} {'causal' if mask == 'causal' else 'full'}"
    return name, Shape(4, 32, 32, length, length, dim, mask)


def _decode(batch: int, keys: int, rows: int = 1) -> tuple[str, Shape]:
    name = f"{'decode' if rows == 1 else 'multi-token decode'} q{rows} B{batch} Hq32 Hkv8 KV{keys} D128"
    return name, Shape(batch, 32, 8, rows, keys, 128)


# Most important first; what the time does not reach is skipped.
CASES: dict[str, Shape] = dict(
    (
        *(_prefill(4096, 128, mask) for mask in ("none", "causal")),
        ("#151287 folded (1,4,1000,32)x(1,4,2048,32) fp16", Shape(1000, 4, 4, 1, 2048, 32, shared=True, dtype=FP16)),
        _decode(1, 32768),
        _decode(1, 131072, 4),
        *(_prefill(8192, 128, mask) for mask in ("none", "causal")),
        ("ViT B64 H12 S197 D64", Shape(64, 12, 12, 197, 197, 64)),
        ("T5 bias B8 H12 S512 D64 bias(1,12,512,512)", Shape(8, 12, 12, 512, 512, 64, "bias")),
        ("sliding window 4k of 32k causal B1 H32 Hkv8 D128", Shape(1, 32, 8, 32768, 32768, 128, "window", 4096)),
        ("softcap causal B4 H32 S4096 D128 (tanh+exp)", Shape(4, 32, 32, 4096, 4096, 128, "softcap")),
        ("ALiBi causal B4 H32 S4096 D128", Shape(4, 32, 32, 4096, 4096, 128, "alibi")),
        *(_prefill(4096, 64, mask) for mask in ("none", "causal")),
        ("diffusion cross B2 H8 Sq4096 Skv77 D40", Shape(2, 8, 8, 4096, 77, 40)),
        ("diffusion self B2 H8 S4096 D40 (padded 64 in kernel)", Shape(2, 8, 8, 4096, 4096, 40)),
        _decode(1, 131072, 16),
        *(_prefill(length, 128, mask) for length in (2048, 1024, 512) for mask in ("none", "causal")),
        ("#151287 folded fp32", Shape(1000, 4, 4, 1, 2048, 32, shared=True, dtype=FP32)),
        ("softcap Gemma-like causal B1 Hq16 Hkv8 S8192 D256", Shape(1, 16, 8, 8192, 8192, 256, "softcap")),
        _decode(8, 32768),
        _decode(1, 2048),
        *(_prefill(length, 64, mask) for length in (512, 8192, 1024, 2048) for mask in ("none", "causal")),
        ("diffusion cross B2 H8 Sq4096 Skv77 D80", Shape(2, 8, 8, 4096, 77, 80)),
        ("diffusion cross B2 H8 Sq4096 Skv77 D160", Shape(2, 8, 8, 4096, 77, 160)),
        *(_prefill(16384, dim, mask) for dim in (128, 64) for mask in ("none", "causal")),
        *(_decode(batch, keys) for batch, keys in ((16, 32768), (64, 8192), (1, 8192), (1, 131072), (8, 2048))),
        *(_decode(batch, keys) for batch, keys in ((8, 8192), (8, 131072), (16, 2048), (16, 8192), (64, 2048))),
    )
)
QUICK = [name for name in CASES if name.startswith(("ViT", "multi-token decode q4", "T5"))]
# What flash has, and what it has not: windows, soft caps, ALiBi.
FLEX_CASES: dict[str, Shape] = {
    **{
        f"window {w} of {s} D128": Shape(1, 32, 8, s, s, 128, "window", w)
        for s, w in ((8192, 256), (8192, 1024), (8192, 4096), (32768, 1024), (32768, 4096))
    },
    "window 1024 of 8192 D64": Shape(4, 16, 16, 8192, 8192, 64, "window", 1024),
    "soft cap S4096 D128": Shape(4, 32, 32, 4096, 4096, 128, "softcap"),
    "soft cap S8192 D256, grouped": Shape(1, 16, 8, 8192, 8192, 256, "softcap"),
    "ALiBi S4096 D128": Shape(4, 32, 32, 4096, 4096, 128, "alibi"),
    "causal S4096 D128": Shape(4, 32, 32, 4096, 4096, 128, "causal"),
}
SPELLINGS: dict[str, Callable[[Shape], Callable[..., Tensor] | None]] = {"by hand": by_hand, "call": call}
_SECONDS = 2.0
_WIDE = 8  # bytes a score takes at once in stock's unfused form: half scores in and out, and float32 between


def fits(env: Environment, shape: Shape) -> bool:
    """Whether the scores of the unfused form fit in this process's share of the memory."""
    scores = shape.batch * shape.heads * shape.q_len * shape.kv_len
    most = 0 if env.dry else torch.cuda.get_device_properties().total_memory / env.processes
    return env.dry or scores * _WIDE < 0.8 * most


def measure(env: Environment, shape: Shape) -> Row:
    """All variants of one case in turns."""
    full = shape
    if env.dry:
        shape = shape.tiny()
    sets = sets_of(env, shape, cold=shape.memory_bound)
    first = sets[0]
    row: Row = {"floor_us": full.floor_us(), "sets": len(sets), "bytes": shape.bytes, "flops": shape.flops}
    with torch.no_grad():
        variants, made = compiled_ahead(env, shape, first)
        row |= made
        own = "stock, call" if "stock, call" in variants else "stock, by hand"
        if own in variants:
            variants["stock again"] = variants[own]
        chosen, refused = chosen_by_hand(shape, env)
        variants |= chosen
        times = compare(env, variants, sets, seconds=_SECONDS)
        row |= _errors(shape, variants, first, times)
    row["failed"] |= {**refused, **times.failed}
    row |= _summary(row, times, tuple(chosen), own, rates(env))
    return row | planned(full) if env.dry else row


def compiled_ahead(env: Environment, shape: Shape, inputs: tuple[Any, ...]) -> tuple[dict[str, Variant], Row]:
    """Both spellings, stock and with the pass, called once: what the pass did, the memory each takes, what failed."""
    row: Row = {"failed": {}}
    variants: dict[str, Variant] = {}
    for spelling, spelled in SPELLINGS.items():
        program = spelled(shape)
        for who, compiler in (("stock", stock), ("pass", passed)) if program is not None else ():
            name = f"{who}, {spelling}"
            if name == "stock, by hand" and not fits(env, shape):
                row["failed"][name] = "the scores would not fit in memory"
                continue
            try:
                run = compiler(env, program)
                with attn_pass.record() as report:
                    run(*inputs)
                row[f"peak, {name}"] = None if env.dry else peak_bytes(run, inputs)
            except Exception as error:
                row["failed"][name] = why(error)
                continue
            variants[name] = Variant(run)
            if who == "pass":
                row |= _planned(spelling, report)
    return variants, row


def _planned(spelling: str, report: attn_pass.Report) -> Row:
    names = {"took": "took", "predicted": "predicted_us", "reason": "reason"}
    return {f"{name}, {spelling}": decision_row(report)[field] for name, field in names.items()}


def compile_case(env: Environment, shape: Shape) -> Row:
    """Compiles what `measure` will run into Inductor's disk cache."""
    shape = shape.tiny() if env.dry else shape
    with torch.no_grad():
        _, row = compiled_ahead(env, shape, shape.inputs(env))
    row["not compiled"] = "; ".join(f"{name}: {reason}" for name, reason in row["failed"].items())
    return row


def _corner(shape: Shape, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The operands of one batch row (eight that share keys) and one KV head: what float64 has room for."""
    rows = 8 if shape.shared else 1
    q, k, v, *more = tensors
    cut = [x[: shape.groups] if x.dim() == 1 else x[:, : shape.groups] for x in more]
    return (q[:rows, : shape.groups], k[:1, :1], v[:1, :1], *cut)


def _errors(shape: Shape, variants: dict[str, Variant], inputs: tuple[Any, ...], times: Times) -> Row:
    """Every variant's error in a corner of the result: a fast wrong answer is none."""
    if shape.groups * shape.q_len * shape.kv_len > 1 << 29:
        return {}
    right = by_hand(shape)(*doubled(_corner(shape, inputs)))
    made = {}
    for name, variant in variants.items():
        if name in times.found:
            corner = variant.run(*variant.prepare(*inputs))[: right.size(0), : right.size(1)]
            made[name] = float((corner.double() - right).abs().nan_to_num(nan=torch.inf).max())
    stocks = [off for name, off in made.items() if name.startswith("stock")]
    unit = torch.finfo(shape.dtype).eps * max(1.0, float(right.abs().max()))
    limit = 2 * max(stocks, default=unit) + unit
    return {"errors": made, "wrong": ", ".join(n for n, off in made.items() if not off <= limit) or None}


def planned(shape: Shape) -> Row:
    """What the pass does with both spellings at full size on the device it decides for; nothing is computed."""
    row: Row = {}
    for spelling, spelled in SPELLINGS.items():
        program = spelled(shape)
        if program is not None:
            inputs = shape.inputs(Environment("meta"))
            with torch.no_grad():
                report = attn_pass.explain(program, *inputs, attn_pass_options={"device": NAMED})
            row |= _planned(spelling, report)
    return row


def _summary(row: Row, times: Times, chosen: tuple[str, ...], own: str, reached: Rates) -> Row:
    us = times.us
    best = times.best(chosen)
    ours = times.best([n for n in us if n.startswith("pass")])
    stocks = times.best([n for n in us if n.startswith("stock,")])
    out: Row = {
        "us": us,
        "p10_us": {name: time.p10_us for name, time in times.found.items()},
        "how": times.how,
        "best": best,
        "best_us": us.get(best or ""),
        "a_a": _ratio(us, "stock again", own),
        "pass_of_stock": {s: _ratio(us, f"pass, {s}", f"stock, {s}") for s in SPELLINGS},
        "pass_of_best": None if not (ours and best) else us[ours] / us[best],
        "stock_us": us.get(stocks or ""),
        "pass_us": us.get(ours or ""),
    }
    if ours:
        out["tflops"] = row["flops"] / us[ours] / 1e6
        out["gbs"] = row["bytes"] / us[ours] / 1e3
        out["of_floor"] = row["floor_us"] / us[ours]
        out["of_matmul"] = out["tflops"] / reached.matmul_tflops
        out["of_copy"] = out["gbs"] / reached.copy_tbs / 1e3
    for spelling in SPELLINGS:
        out[f"us, stock, {spelling}"] = us.get(f"stock, {spelling}")
        out[f"us, pass, {spelling}"] = us.get(f"pass, {spelling}")
        out[f"ratio, {spelling}"] = out["pass_of_stock"][spelling]
    return out


def _ratio(us: dict[str, float], above: str, below: str) -> float | None:
    return us[above] / us[below] if above in us and below in us else None


def cases(env: Environment) -> list[Case]:
    """One a shape."""
    names = QUICK if env.quick else list(CASES)
    return [Case(name, partial(measure, env, CASES[name])) for name in names]


def ahead(env: Environment) -> list[Case]:
    """In the order in which the timed parts will want them."""
    shapes = {**CASES, **FLEX_CASES}
    names = QUICK if env.quick else list(shapes)
    return [Case(name, partial(compile_case, env, shapes[name])) for name in names]


PART = Part(
    "floors",
    "Standard cases: stock, the pass, the best kernel by hand, the floor",
    0.30,
    (
        Column("case", "name"),
        Column("floor us", "floor_us", ".1f"),
        Column("stock, by hand", "us, stock, by hand", ".1f"),
        Column("pass, by hand", "us, pass, by hand", ".1f"),
        Column("pass / stock", "ratio, by hand", ".2f"),
        Column("took", "took, by hand"),
        Column("predicted us", "predicted, by hand", ".1f"),
        Column("stock, call", "us, stock, call", ".1f"),
        Column("pass, call", "us, pass, call", ".1f"),
        Column("pass / stock", "ratio, call", ".2f"),
        Column("took", "took, call"),
        Column("A/A", "a_a", ".2f"),
        Column("best by hand", "best"),
        Column("us", "best_us", ".1f"),
        Column("pass / best", "pass_of_best", ".2f"),
        Column("TFLOP/s", "tflops", ".0f"),
        Column("of matmul", "of_matmul", ".2f"),
        Column("GB/s", "gbs", ".0f"),
        Column("of copy", "of_copy", ".2f"),
        Column("of floor", "of_floor", ".2f"),
        Column("sets of inputs", "sets", "d"),
        Column("peak MiB, stock", "peak, stock, by hand", ".0f", 2.0**-20),
        Column("pass", "peak, pass, by hand", ".0f", 2.0**-20),
        Column("wrong", "wrong"),
    ),
    cases,
)
FLEX = Part(
    "flex",
    "FlexAttention against flash: windows, soft caps, ALiBi",
    0.10,
    PART.columns,
    one_each(FLEX_CASES, measure, quick=5),
    usual=False,
)
# In several processes and without a clock: a case compiles for 10 to 25 s, and with the kernels in the cache for a few.
# The cache is where ``TORCHINDUCTOR_CACHE_DIR`` says, which has to be the same for the timed run.
AHEAD = Part(
    "compile",
    "Compiled ahead",
    0.20,
    (
        Column("case", "name"),
        Column("seconds", "seconds", ".1f"),
        Column("by hand", "took, by hand"),
        Column("call", "took, call"),
        Column("not compiled", "not compiled"),
    ),
    ahead,
    timed=False,
    usual=False,
)
