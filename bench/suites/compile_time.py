"""The pass's share of a cold compile: real models at their usual depths, stock and pass interleaved.

Each compile is in a fresh process without any cache, which has compiled nothing but one addition: that builds the C++
headers and imports what Inductor needs for any compile.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import attn_pass
from attn_pass.measuring.timing import private_caches
from bench.harness.command import Json, Only, Quick, named, started
from bench.harness.document import Column, Row
from bench.harness.measure import child, quiet, warm_compiler
from bench.suites.zoo import ARCHITECTURES, Built, pixels, ready, timm_model

WAYS = ("stock", "attn_pass")
# Of a cold compile, and in seconds at 48 layers: what the pass may take.
LARGEST_SHARE, LONGEST_S = 0.03, 1.0


def _timm_vit() -> Built:
    sizes = {"img_size": 64, "patch_size": 8, "embed_dim": 128, "depth": 12, "num_heads": 4}
    return ready(timm_model("vit_base_patch16_224", **sizes)), {"x": pixels(2, 64)}


def _deep(name: str, **sizes: Any) -> Callable[[], Built]:
    return partial(ARCHITECTURES[name].build, **sizes)


_SWIN = {"image_size": 224, "embed_dim": 32, "depths": [2, 2, 6, 2], "num_heads": [1, 2, 4, 8], "window_size": 7}
_UNET = {
    "sample_size": 32,
    "block_out_channels": (32, 64, 64, 64),
    "layers_per_block": 2,
    "cross_attention_dim": 64,
    "attention_head_dim": 4,
    "norm_num_groups": 8,
}
MODELS: Mapping[str, Callable[[], Built]] = {
    "GPT-2, 12 layers": _deep("GPT-2", n_layer=12),
    "BERT, 12 layers": _deep("BERT", num_hidden_layers=12),
    "Llama, 12 layers": _deep("Llama", num_hidden_layers=12),
    "Qwen3, 12 layers": _deep("Qwen3", num_hidden_layers=12),
    "T5, 12 + 12 layers": _deep("T5", num_layers=12, num_decoder_layers=12),
    "Whisper, 12 + 12 layers": _deep("Whisper", encoder_layers=12, decoder_layers=12),
    "ViT, 12 layers": _deep("ViT", num_hidden_layers=12),
    "Swin, 12 layers": replace(
        ARCHITECTURES["Swin"], sizes=_SWIN, inputs=lambda: {"pixel_values": pixels(2, 224)}
    ).build,
    "timm ViT, 12 layers": _timm_vit,
    "UNet, diffusers": replace(ARCHITECTURES["UNet"], sizes=_UNET).build,
    "Llama, 48 layers": _deep("Llama", num_hidden_layers=48),
}


def measure(name: str, way: str, choose: str) -> Iterator[Row]:
    """One cold compile, timed."""
    quiet(torch.get_num_threads())
    model, inputs = MODELS[name]()
    ours = way != "stock"
    settings: Mapping[str, Any] = {"backend": attn_pass.backend, "options": {"choose": choose}} if ours else {}
    uncached = torch._inductor.config.patch(force_disable_caches=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache, private_caches(Path(cache)), uncached:
        warm_compiler()
        torch._dynamo.reset()
        compiled = torch.compile(model, **settings)
        with attn_pass.record() if ours else nullcontext(attn_pass.Report()) as report:
            began = time.perf_counter()
            compiled(**inputs)
            first_s = time.perf_counter() - began
        began = time.perf_counter()
        compiled(**inputs)
        run_s = time.perf_counter() - began
    counts = {"sites": len(report.sites), "rewritten": len(report.rewritten), "pass_s": report.seconds}
    yield {"model": name, "way": way, "stage": way, "status": "ok", "compile_s": first_s - run_s, **counts}


COLUMNS = (
    Column("model", "model"),
    Column("sites", "sites"),
    Column("rewritten", "rewritten"),
    Column("rounds", "rounds"),
    Column("stock s", "stock_s", ".1f"),
    Column("attn_pass s", "ours_s", ".1f"),
    Column("ratio", "ratio", ".2f"),
    Column("the pass s", "pass_s", ".3f"),
    Column("share", "share", ".2%"),
)


def summary(runs: Sequence[Row]) -> list[Row]:
    """A row a model that was compiled both ways: medians over the rounds, and the largest share of a compile."""
    groups: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in runs:
        if row["status"] == "ok":
            groups[row["model"]][row["way"]].append(row)
    rows = []
    for model, ways in groups.items():
        if len(ways) == len(WAYS):
            stock_s, ours_s = (statistics.median(row["compile_s"] for row in ways[way]) for way in WAYS)
            ours = ways["attn_pass"]
            rows.append(
                {
                    "model": model,
                    "sites": ours[0]["sites"],
                    "rewritten": ours[0]["rewritten"],
                    "rounds": len(ours),
                    "stock_s": stock_s,
                    "ours_s": ours_s,
                    "ratio": ours_s / stock_s,
                    "pass_s": statistics.median(row["pass_s"] for row in ours),
                    "share": max(row["pass_s"] / row["compile_s"] for row in ours),
                }
            )
    return rows


def target(rows: Sequence[Row]) -> str:
    """Whether the pass took no more than it may, in words."""
    if not rows:
        return "Nothing was compiled both ways."
    worst, slowest = (max(rows, key=lambda row: float(row[field])) for field in ("share", "pass_s"))
    shares = "met" if worst["share"] <= LARGEST_SHARE else "missed"
    seconds = "met" if slowest["pass_s"] <= LONGEST_S else "missed"
    return (
        f"At most {LARGEST_SHARE:.0%} of a cold compile: {shares} (most: {worst['share']:.2%}, {worst['model']}). "
        f"At most {LONGEST_S:.0f} s: {seconds} (most: {slowest['pass_s']:.3f} s, {slowest['model']})."
    )


def main(
    json_file: Json = None,
    quick: Quick = False,
    only: Only = "",
    rounds: Annotated[int, typer.Option(min=1, help="Cold compiles per model and variant.")] = 3,
    choose: Annotated[str, typer.Option(help="The option of attn_pass with that name.")] = "fused",
) -> None:
    """Time cold compiles with stock Inductor and with attn_pass, and the pass's share of them."""
    names = named(only, MODELS, str)[: 1 if quick else None]
    rounds = 1 if quick else rounds
    recorder = started("Cold compiles of real models", json_file, rounds=rounds, choose=choose)
    table = recorder.table("A cold compile", COLUMNS)
    runs: list[Row] = []
    for number in range(rounds):
        for name in names:
            for way in WAYS if number % 2 == 0 else WAYS[::-1]:  # every round starts with the other way
                runs += child(f"{name}, {way}", measure, (name, way, choose), recorder.tell)
            failed = [row for row in runs if row["status"] != "ok"]
            table.rows = [*summary(runs), *failed]
            table.notes = [target(summary(runs))]
            recorder.keep()
    recorder.finish()
