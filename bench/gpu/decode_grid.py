"""Part 5: few queries over long keys: the split-KV kernel against everything torch has, as a share of a copy's rate.

32 query heads, 8 KV heads, head dim 128, bfloat16. Inputs are rotated, so that keys and values come from memory. With
``--sweep`` the kernel is also launched with other numbers of splits, key blocks, warps and stages than it takes itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.kernels import chosen_by_hand
from bench.gpu.parts import Case, Column, Part, Row
from bench.gpu.place import Place
from bench.gpu.shapes import Shape
from bench.gpu.timing import Variant, compare, rates, sets_of

ROWS = (1, 2, 4, 8, 16, 64)
KEYS = (32768, 131072, 8192, 2048)  # the longest matter most
BATCHES = (1, 8)
WAYS = ("decode", "flash", "flash packed", "cudnn", "efficient")
_SECONDS = 0.6


def _by_call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def measure(place: Place, shape: Shape) -> Row:
    """Every way for one number of rows, keys and batches."""
    if place.dry:
        shape = shape.tiny()
    sets = sets_of(place, shape, cold=True)
    variants, refused = chosen_by_hand(shape, place, WAYS)
    variants["call"] = Variant(_by_call)
    with torch.no_grad():
        times = compare(place, variants, sets, seconds=_SECONDS)
        errors = _errors(variants, sets[0], set(times.found))
    us = {name: time.median_us for name, time in times.found.items()}
    best = times.best([n for n in us if n != "decode"])
    row: Row = {
        "us": us,
        "how": {name: f"{time.how} x{time.rounds}" for name, time in times.found.items()},
        "failed": {**refused, **times.failed},
        "errors": errors,
        "bytes": shape.bytes,
        "best_other": best,
        "splits": splits(place, shape),
        "sets": len(sets),
    }
    for name, taken in us.items():
        row[f"us, {name}"] = taken
        row[f"copy, {name}"] = shape.bytes / taken / 1e6 / rates(place).copy_tbs
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


def splits(place: Place, shape: Shape) -> int:
    """Into how many parts the kernel cuts the keys by itself."""
    from attn_pass.kernels.decode import Room, room_of, splits_for, tiles_for

    room = Room() if place.dry else room_of(torch.device("cuda"))
    rows = shape.groups * shape.q_len
    blocks = -(-rows // tiles_for(rows, shape.dim, shape.dim, room=room).rows)
    return int(splits_for(shape.batch * shape.kv_heads * blocks, shape.kv_len, place.decided_for.cores))


# ---------------------------------------------------------------- the sweep


SWEPT = ((1, 8192), (1, 32768), (4, 32768), (16, 131072), (64, 32768))
FACTORS = (0.5, 1.0, 2.0, 4.0)  # times the splits it takes by itself
BLOCKS = (32, 64, 128)
LAUNCHES = ((4, 2), (4, 3), (8, 2), (8, 3))  # warps, stages


def launched(shape: Shape, parts: int, block: int, warps: int, stages: int) -> Callable[..., Tensor]:
    """The kernel with these numbers, as `attn_pass.kernels.decode` launches it."""
    from attn_pass.kernels.decode import Parts, Tiles, launch, power, room_of, tiles_for
    from attn_pass.kernels.decode_triton import attend, join

    rows = shape.groups * shape.q_len
    own = tiles_for(rows, shape.dim, shape.dim, room=room_of(torch.device("cuda")))
    tiles = Tiles(own.rows, block, stages, warps)
    row_blocks = -(-rows // tiles.rows)
    count = shape.batch * shape.heads * shape.q_len

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        partial_sums = q.new_empty((parts, *q.shape[:3], v.size(3)), dtype=torch.float32)
        tops = q.new_empty((parts, *q.shape[:3]), dtype=torch.float32)
        totals = torch.empty_like(tops)
        joined = Parts(parts, partial_sums, tops, totals)
        arguments = launch(q, k, v, None, shape.scale, False, -1, joined, tiles)
        grid = (shape.batch * shape.kv_heads, row_blocks, parts)
        attend[grid](**arguments, num_warps=tiles.warps, num_stages=tiles.stages)
        out = torch.empty_like(q)
        dim = v.size(3)
        join[(count,)](partial_sums, tops, totals, out, parts, count, DIM=dim, BLOCK_DIM=power(dim), num_warps=2)
        return out

    return run


def sweep(place: Place, shape: Shape) -> Row:
    """The kernel's own numbers against others."""
    if place.dry:
        return {"verdict": "the sweep launches kernels, which a dry run has none of"}
    sets = sets_of(place, shape, cold=True)
    own = splits(place, shape)
    variants, _ = chosen_by_hand(shape, place, ("decode",))
    for factor, block, (warps, stages) in product(FACTORS, BLOCKS, LAUNCHES):
        parts = max(1, round(own * factor))
        name = f"{parts} splits, {block} keys, {warps} warps, {stages} stages"
        variants[name] = Variant(launched(shape, parts, block, warps, stages))
    with torch.no_grad():
        times = compare(place, variants, sets, seconds=4.0, rounds=11)
    us = {name: time.median_us for name, time in times.found.items()}
    best = min(us, key=lambda n: us[n])
    row: Row = {"us": us, "failed": times.failed, "splits": own, "best_other": best, "bytes": shape.bytes}
    if "decode" in us:
        row |= {"us, decode": us["decode"], "of_best": us["decode"] / us[best], "gbs": shape.bytes / us["decode"] / 1e3}
        row["copy, decode"] = shape.bytes / us["decode"] / 1e6 / rates(place).copy_tbs
    return row


def shape_of(batch: int, rows: int, keys: int) -> Shape:
    """One cell of the grid."""
    return Shape(batch, 32, 8, rows, keys, 128)


def cases(place: Place) -> list[Case]:
    """The grid, long keys first; then the sweep where it is asked for."""
    cells = [(b, q, s) for s in KEYS for b in BATCHES for q in ROWS]
    if place.quick:
        cells = [(1, q, 32768) for q in (1, 4)]
    found = [Case(f"q{q} B{b} KV{s}", partial(measure, place, shape_of(b, q, s))) for b, q, s in cells]
    if place.sweep:
        found += [Case(f"sweep q{q} KV{s}", partial(sweep, place, shape_of(1, q, s))) for q, s in SWEPT]
    return found


PART = Part(
    "decode",
    "Decoding: 32 heads on 8, head dim 128, bfloat16, microseconds and shares of a copy's rate",
    0.20,
    (
        Column("case", "name"),
        *(Column(f"{way} us", f"us, {way}", ".1f") for way in (*WAYS, "call")),
        Column("GB/s of decode", "gbs", ".0f"),
        *(Column(f"{way}, of copy", f"copy, {way}", ".2f") for way in ("decode", "flash packed", "cudnn")),
        Column("best other", "best_other"),
        Column("decode / best other", "of_best", ".2f"),
        Column("splits", "splits", "d"),
    ),
    cases,
)
