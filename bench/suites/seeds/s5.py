"""S5, FlashAttention on Ascend NPUs: its four experiments on the device at hand, causal unless said.

Traffic, speedup over the sequence length, tile sizes, and what the causal mask costs; reported for batch 4, heads 32,
head dim 64 in float16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from attn_pass.measuring.timing import compiled, in_turns, percentile, relative_error
from bench.harness import variants as w
from bench.harness.document import LEGEND, STANDARD, Column, Row, Table
from bench.harness.measure import child, judged, quiet, row_of, warm_compiler
from bench.harness.programs import Extra, Program, Setting, Tensors, of_function
from bench.suites.seeds import npu_model, traffic
from bench.suites.seeds.common import Bench, operands
from bench.suites.spellings import below, by_hand, causal

BATCH, HEADS, DIM = 4, 32, 64
LENGTH = 2048
SPEEDUPS = {512: 2.73, 1024: 3.71, 2048: 5.48, 4096: 7.05, 8192: 8.58}  # reported
TILES, TILED = (64, 128, 256, 512), "FlexAttention, tiles of "


# ---------------------------------------------------------------- the programs


def _call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def sizes(setting: Setting) -> tuple[int, int]:
    """Batch and heads: the report's, or fewer on a CPU, where 8192 positions of 128 heads take 34 GB a tensor."""
    return (BATCH, HEADS) if not setting.on_cpu else (1, 4)


def programs(setting: Setting) -> list[Program]:
    """Causal attention by hand, over the sequence length; and as a call, at one length with every tile size."""
    batch, heads = sizes(setting)
    lengths = [n for n in SPEEDUPS if n <= 2048] if setting.quick else list(SPEEDUPS)

    def program(length: int, name: str, *given: Any, **more: Any) -> Program:
        name = f"B{batch} H{heads} L{length} D{DIM}, {name}"
        inputs = partial(operands, batch, heads, length, DIM, seed=length)
        return of_function(name, causal, inputs, *given, tolerance=setting.tolerance, **more)

    hand = "scaled_dot_product_attention, is_causal"
    return [
        *(program(n, "causal by hand", _call, hand=hand, kept=(n + 1) / (2 * n)) for n in lengths),
        program(LENGTH, "causal", extra=tile_ways(setting)),
    ]


# ---------------------------------------------------------------- 1: traffic


def _traffic() -> Iterator[Row]:
    quiet(2)
    for row in traffic.count(causal, (BATCH, HEADS, LENGTH, DIM)):
        yield {"program": "traffic", "way": row["what"], "stage": row["what"], "status": "ok", **row}


TRAFFIC = (
    Column("what", "what"),
    Column("read MiB", "read", ".0f", 2**-20),
    Column("written MiB", "written", ".0f", 2**-20),
    Column("together MiB", "together", ".0f", 2**-20),
    Column("less than unfused", "less", ".1%"),
    Column("how it is known", "how"),
)


# ---------------------------------------------------------------- 2: over the length


SCALING = (
    *STANDARD[:6],
    Column("speedup over eager", "over_eager", ".2f"),
    Column("reported", "reported_speedup", ".2f"),
    *STANDARD[6:],
)


def _scaling(bench: Bench) -> Table:
    *chosen, _ = programs(bench.setting)
    rows = bench.rows(__name__, chosen, w.COMPILED)
    eager = {row["program"]: row["median_us"] for row in rows if row["way"] == w.EAGER and row["status"] == "ok"}
    for row in rows:
        if row["status"] != "ok" or row["program"] not in eager:
            continue
        row["over_eager"] = eager[row["program"]] / row["median_us"]
        row["length"] = next(int(word[1:]) for word in row["program"].split() if word[0] == "L")
        if row["way"] == w.PASS:
            row["reported_speedup"] = SPEEDUPS[row["length"]]
    notes = [
        "reported: fused over unfused on an NPU, batch 4, heads 32, float16; eager is the unfused form here",
        LEGEND,
    ]
    return Table("S5.2: speedup over the sequence length", SCALING, rows, notes)


# ---------------------------------------------------------------- 3: tiles


def _tiled(tile: int, module: nn.Module, inputs: Tensors, folder: Path) -> Callable[..., Any]:
    """Compiled FlexAttention; a tile that does not fit on the chip raises, and that is an answer."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    device = inputs[0].device.type
    block = {"device": device, "BLOCK_SIZE": tile}
    mask = create_block_mask(lambda b, h, i, j: below(i, j), None, None, LENGTH, LENGTH, **block)
    # A GPU's kernel walks a block of the mask in tiles of its own; a CPU's takes the block as the tile.
    options: Any = {} if device == "cpu" else {"BLOCK_M": min(tile, 128), "BLOCK_N": tile}
    return compiled(lambda q, k, v: flex_attention(q, k, v, block_mask=mask, kernel_options=options))


def tile_ways(setting: Setting) -> dict[str, Extra]:
    """FlexAttention with every tile size, scaled_dot_product_attention beside it, twice."""
    chosen = (64, 256) if setting.quick else TILES
    calls = {f"scaled_dot_product_attention, {name}": lambda *_: _call for name in ("call", "call again")}
    return {**{f"{TILED}{tile}": partial(_tiled, tile) for tile in chosen}, **calls}


def _tiles(bench: Bench) -> Table:
    """The sizes in turns."""
    *_, program = programs(bench.setting)
    rows = bench.rows(__name__, [program], tuple(program.extra))
    tiled = {row["way"]: row["median_us"] for row in rows if row["way"].startswith(TILED) and row["status"] == "ok"}
    for row in rows:
        if row["status"] == "ok":
            row["of_best"] = min(tiled.values(), default=math.nan) / row["median_us"]
        if row["way"] in tiled:
            row["tile"] = int(row["way"].removeprefix(TILED))
            row["loops"] = LENGTH // row["tile"]
    note = "reported for an NPU, estimated: tiles of 64, 128, 256, 512 in 32, 16, 8, 4 loops"
    return Table("S5.3: tile sizes", TILE_COLUMNS, rows, [note])


TILE_COLUMNS = (
    Column("program", "program"),
    Column("variant", "way"),
    Column("loops over the keys", "loops"),
    *STANDARD[2:5],
    Column("of the best tile", "of_best", ".0%"),
    Column("error", "error", ".0e"),
    Column("verdict", "verdict"),
)


# ---------------------------------------------------------------- 4: the mask


def mask_cost(setting: Setting) -> Iterator[Row]:
    """Causal and full attention in turns, each way; the extra time of the mask."""
    import attn_pass

    quiet(setting.threads)
    warm_compiler()
    batch, heads = sizes(setting)
    given = operands(batch, heads, LENGTH, DIM, seed=LENGTH, device=setting.device)
    made: Mapping[str, Callable[..., Any]] = {
        "eager, unfused": lambda f: f,
        w.STOCK: compiled,
        w.STOCK_AGAIN: compiled,
        w.PASS: partial(compiled, backend=attn_pass.backend),
    }
    runs: dict[str, Callable[..., Any]] = {
        f"{name}: {mask}": make(function)
        for name, make in made.items()
        for mask, function in (("full", by_hand), ("causal", causal))
    }
    samples = in_turns(runs, given, setting.rounds, seconds=setting.block_s)
    doubles = [x.double() for x in given]
    for name in made:
        error = relative_error(runs[f"{name}: causal"](*given), causal(*doubles))
        without = percentile(samples[f"{name}: full"], 50)
        row = row_of(f"B{batch} H{heads} L{LENGTH} D{DIM}", name, samples[f"{name}: causal"], error, setting.tolerance)
        yield {**row, "plain_us": without, "extra": row["median_us"] / without - 1}


MASK_COLUMNS = (
    Column("program", "program"),
    Column("variant", "way"),
    Column("full, ms", "plain_us", ".3f", 1e-3),
    Column("causal, ms", "median_us", ".3f", 1e-3),
    *STANDARD[3:5],
    Column("the mask costs", "extra", "+.1%"),
    *STANDARD[5:8],
    Column("error", "error", ".0e"),
)


# ---------------------------------------------------------------- an NPU, by the model


def npu() -> Iterator[Table]:
    """The four experiments as the model predicts them of an Ascend 910B, at the report's sizes."""
    sizes = {"heads": HEADS, "dim": DIM, "batch": BATCH}
    made = {
        "S5.1, predicted for an NPU: memory traffic": npu_model.traffic((LENGTH,), **sizes),
        "S5.2, predicted for an NPU: speedup over the sequence length": npu_model.speed_up(
            lengths=tuple(SPEEDUPS), **sizes
        ),
        "S5.3, predicted for an NPU: tiles in its 256 KB buffer": npu_model.tiles(DIM, LENGTH, TILES),
        "S5.4, predicted for an NPU: bytes of causal masks, 32 layers": npu_model.causal_masks((LENGTH,), heads=HEADS),
    }
    for title, predicted in made.items():
        rows = list(predicted)
        columns = [Column(name, name, ".4g") for name in rows[0] if name != "source"]
        yield Table(title, columns, rows, ["predicted from data sheets and counted bytes: nothing ran on an NPU"])


def tables(bench: Bench) -> Iterator[Table]:
    """The four experiments."""
    counted = child("S5.1 traffic", _traffic, (), bench.tell)
    title = f"S5.1: memory traffic of one call, batch {BATCH}, heads {HEADS}, L {LENGTH}, D {DIM}, float16, causal"
    reported = "reported on an NPU: 3420 read and 3240 written unfused, 180 and 160 fused (-94.7 %, -95.1 %)"
    yield Table(title, TRAFFIC, counted, [reported])
    yield _scaling(bench)
    yield _tiles(bench)
    cost = judged(child("S5.4 mask", mask_cost, (bench.setting,), bench.tell))
    note = "reported on an NPU: the causal mask costs 7.5 % fused, 16.2 % unfused; where it is less than nothing, the "
    yield Table("S5.4: what the causal mask costs", MASK_COLUMNS, cost, [note + "kernel skips what the mask hides"])
    yield from npu()
