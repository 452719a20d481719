"""Part 5: few queries over long keys: the split-KV kernel and all of torch's kernels, as shares of a copy's rate.

32 query heads, 8 KV heads, head dim 128, bfloat16. Inputs are rotated, so that keys and values come from memory. The
part ``tiles`` launches the kernel with other numbers of splits, key blocks, warps and stages than it takes itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from attn_pass.measuring.timing import why
from bench.gpu.environment import Environment
from bench.gpu.kernels import chosen_by_hand
from bench.gpu.parts import Case, Column, Part, Row
from bench.gpu.shapes import Shape
from bench.gpu.timing import Variant, compare, host_us, rates, sets_of
from bench.suites.spellings import grouped_call

ROWS = (1, 2, 4, 8, 16, 64)
KEYS = (32768, 131072, 8192, 2048)  # the longest matter most
BATCHES = (1, 8, 64)
WAYS = ("decode", "attend", "join", "flash", "flash packed", "cudnn", "efficient")
PIECES = ("attend", "join")  # of decode
_SECONDS = 0.6


def measure(env: Environment, shape: Shape) -> Row:
    """Every way for one number of rows, keys and batches."""
    if env.dry:
        shape = shape.tiny()
    sets = sets_of(env, shape, cold=True)
    variants, refused = chosen_by_hand(shape, env, tuple(w for w in WAYS if w not in PIECES))
    variants["call"] = Variant(grouped_call)
    parts = None
    if "decode" in variants:
        try:
            parts = numbers(env, shape)[1]
            variants |= {} if env.dry else pieces(env, shape)
        except Exception as error:  # what is asked of the kernel's insides must not cost the others their times
            refused |= dict.fromkeys(PIECES, why(error))
    with torch.no_grad():
        times = compare(env, variants, sets, seconds=_SECONDS)
        errors = _errors(variants, sets[0], set(times.found) - set(PIECES))
        host = {n: host_us(env, partial(variants[n].run, *sets[0]), times.found[n].median_us) for n in times.found}
    us = times.us
    best = times.best([n for n in us if n != "decode" and n not in PIECES])
    row: Row = {
        "us": us,
        "how": times.how,
        "failed": {**refused, **times.failed},
        "errors": errors,
        "bytes": shape.bytes,
        "best_other": best,
        "splits": parts,
        "host_us": host,
        "sets": len(sets),
    }
    for name, taken in us.items():
        row[f"us, {name}"], row[f"host, {name}"] = taken, host[name]
        row[f"copy, {name}"] = shape.bytes / taken / 1e6 / rates(env).copy_tbs
    if best and "decode" in us:
        row["gbs"] = shape.bytes / us["decode"] / 1e3
        row["of_best"] = us["decode"] / us[best]
    return row


def _errors(variants: dict[str, Variant], inputs: tuple[Tensor, ...], ran: set[str]) -> dict[str, float]:
    """Against float64 for the first KV head of the first batch row."""
    q, k, v = inputs
    groups = q.size(1) // k.size(1)
    corner = (q[:1, :groups].double(), k[:1, :1].double(), v[:1, :1].double())
    right = (corner[0] @ corner[1].mT * q.size(-1) ** -0.5).softmax(-1) @ corner[2]
    made = {name: variant.run(*inputs)[:1, :groups] for name, variant in variants.items() if name in ran}
    return {name: float((x.double() - right).abs().nan_to_num(nan=torch.inf).max()) for name, x in made.items()}


# ---------------------------------------------------------------- the sweep


SWEPT = ((1, 1, 32768), (64, 1, 8192), (1, 16, 131072))  # batch, rows, keys
BLOCKS = (32, 64, 128)
LAUNCHES = ((4, 2), (4, 3), (4, 4), (8, 2), (8, 3))  # warps, stages
CUT = tuple((b, q, s) for s in (32768, 2048, 8192) for b, q in ((1, 1), (8, 1), (64, 1), (8, 16), (16, 1), (32, 4)))
FACTORS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # times the splits it takes by itself


def launched(shape: Shape, parts: int, tiles: Any, only: Any = None) -> Callable[..., Tensor]:
    """The kernels with these numbers, as the operator launches them; ``only`` one of the two where it is given."""
    from attn_pass.devices.cuda import decode_operator as kernel

    def wrap(triton_kernel: Any) -> Any:
        return triton_kernel if only in (None, triton_kernel) else _Nothing()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        inputs = kernel.Inputs(q, k, v, None, shape.scale)
        return kernel.launched(inputs, tiles, parts, with_lse=False, wrap=wrap)[0]

    return run


class _Nothing:
    """Takes a kernel's place, and launches none."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda **_: None


def numbers(env: Environment, shape: Shape) -> tuple[Any, int]:
    """The tiles the kernel takes by itself, and into how many parts it cuts the keys."""
    from attn_pass.devices.cuda import decode_operator as kernel

    room = kernel.Room() if env.dry else kernel.gpu_of(torch.device("cuda"))[0]
    inputs = kernel.Inputs(*shape.inputs(Environment("meta"))[:3], None, shape.scale)
    tiles, parts = kernel.numbers_for(inputs, room, env.decided_for.cores)
    return tiles, int(parts)


def pieces(env: Environment, shape: Shape) -> dict[str, Variant]:
    """The two kernels of the operator, each alone, if there are two.

    The join of parts that nothing has written takes as long.
    """
    from attn_pass.devices.cuda.decode_triton import attend, join

    tiles, parts = numbers(env, shape)
    kernels = (("attend", attend), ("join", join)) if parts > 1 else ()
    return {name: Variant(launched(shape, parts, tiles, kernel)) for name, kernel in kernels}


def sweep(env: Environment, shape: Shape) -> Row:
    """The kernel's own tiles against others."""
    wanted = [dict(zip(("keys", "warps", "stages"), (b, *launch))) for b, launch in product(BLOCKS, LAUNCHES)]
    return _against_own(env, shape, [(1.0, numbers) for numbers in wanted])


def cut(env: Environment, shape: Shape) -> Row:
    """The kernel's own number of splits against others."""
    return _against_own(env, shape, [(factor, {}) for factor in FACTORS])


def _against_own(env: Environment, shape: Shape, others: list[tuple[float, dict[str, int]]]) -> Row:
    """The operator, and its kernels with so many times its splits and other numbers of its tiles."""
    if env.dry:
        return {"verdict": "the sweep launches kernels, which a dry run has none of"}
    sets = sets_of(env, shape, cold=True)
    tiles, own = numbers(env, shape)
    variants, _ = chosen_by_hand(shape, env, ("decode",))
    for factor, changed in others:
        parts = max(1, round(own * factor))
        name = ", ".join([f"{parts} splits", *(f"{number} {what}" for what, number in changed.items())])
        variants[name] = Variant(launched(shape, parts, replace(tiles, **changed)))
    with torch.no_grad():
        times = compare(env, variants, sets, seconds=2.0, rounds=11)
    us = times.us
    best = min(us, key=lambda n: us[n])
    row: Row = {"us": us, "failed": times.failed, "splits": own, "best_other": best, "bytes": shape.bytes}
    if "decode" in us:
        row |= {"us, decode": us["decode"], "of_best": us["decode"] / us[best], "gbs": shape.bytes / us["decode"] / 1e3}
        row["copy, decode"] = shape.bytes / us["decode"] / 1e6 / rates(env).copy_tbs
    return row


def shape_of(batch: int, rows: int, keys: int) -> Shape:
    """One cell of the grid."""
    return Shape(batch, 32, 8, rows, keys, 128)


_MOST_KEYS = 1 << 22  # of all batch rows: 17 GB of keys and values


def cases(env: Environment) -> list[Case]:
    """The grid, long keys first."""
    cells = [(b, q, s) for s in KEYS for b in BATCHES for q in ROWS if b * s <= _MOST_KEYS]
    if env.quick:
        cells = [(1, q, 32768) for q in (1, 4)]
    return [Case(f"q{q} B{b} KV{s}", partial(measure, env, shape_of(b, q, s))) for b, q, s in cells]


def tile_cases(env: Environment) -> list[Case]:
    """The sweep over splits, then over tiles."""
    some = slice(1) if env.quick else slice(None)
    splits = [Case(f"splits q{q} B{b} KV{s}", partial(cut, env, shape_of(b, q, s))) for b, q, s in CUT[some]]
    tiles = [Case(f"tiles q{q} B{b} KV{s}", partial(sweep, env, shape_of(b, q, s))) for b, q, s in SWEPT[some]]
    return splits + tiles


PART = Part(
    "decode",
    "Decoding: 32 heads on 8, head dim 128, bfloat16, microseconds and shares of a copy's rate",
    0.20,
    (
        Column("case", "name"),
        *(Column(f"{way} us", f"us, {way}", ".1f") for way in (*WAYS, "call")),
        *(Column(f"{way}, host us", f"host, {way}", ".1f") for way in ("decode", "flash", "cudnn", "call")),
        Column("GB/s of decode", "gbs", ".0f"),
        *(Column(f"{way}, of copy", f"copy, {way}", ".2f") for way in ("decode", "flash packed", "cudnn")),
        Column("best other", "best_other"),
        Column("decode / best other", "of_best", ".2f"),
        Column("splits", "splits", "d"),
    ),
    cases,
)

TILES = Part(
    "tiles",
    "The decode kernel with other splits, key blocks, warps and stages",
    0.20,
    (
        Column("case", "name"),
        Column("decode us", "us, decode", ".1f"),
        Column("of copy", "copy, decode", ".2f"),
        Column("best", "best_other"),
        Column("decode / best", "of_best", ".2f"),
        Column("splits", "splits", "d"),
        Column("verdict", "verdict"),
    ),
    tile_cases,
    usual=False,
)
