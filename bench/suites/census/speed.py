"""Real architectures at sizes of hundreds, not of tens: the time of each, compiled by stock Inductor and by the pass.

Each model runs twice: as its library writes attention by default, with calls of `scaled_dot_product_attention`, in
float32, and with attention written out, in bfloat16. Two layers of transformers' models, timm's as they are. Stock is
compiled once and timed twice a round, in turns with the pass; one thread.
"""

from __future__ import annotations

import importlib
import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import attn_pass
from attn_pass.measuring.judging import noise_of, verdict
from attn_pass.measuring.timing import in_turns, percentile_10
from bench.suites.census.dataset import Census, NotMeasured, Subject, error_text, prepared
from bench.suites.census.rows import Row, report_row
from bench.suites.census.sdpa import build_with_sdpa

CALLED, WRITTEN = "float32, calls", "bfloat16, written out"
FACTS = {"bench": "speed", "stage": WRITTEN}
ROUNDS = 15
BLOCK_S = 0.04
_TIMES_STOCK = 3.0
# The census's sizes, and what they are here, by the names of its module's globals and by the values in its tables.
_GLOBALS = {"W": 512, "H": 8, "HD": 64, "V": 1024, "S": 256}
_LARGER = {64: 512, 128: 1024, 4: 8, 16: 64, 8: 32, 32: 256}
_LARGER_OF_MODELS = {128: 1024, 16: 64, 64: 512}  # layers and experts stay
_OF_WIDTH = ("head_dim", "num_key_value_heads", "vocab_size")


def measure(census: Census, name: str) -> Iterator[Row]:
    """A row for each way to write attention."""
    if name.startswith("hf/"):
        enlarge(importlib.import_module("zoo_hf"))
    yield timed_row(census, name, _in_bfloat16)
    build_with_sdpa()
    if name.startswith("timm/"):
        keep_calls_of_timm(census)
    yield {"stage": CALLED, **timed_row(census, name)}


def timed_row(
    census: Census,
    name: str,
    changed: Callable[[Subject], Subject] = lambda subject: subject,
    dropout: float | None = None,
) -> Row:
    """The times of the model, or why it has none."""
    try:
        return _timed(changed(prepared(census, name, keep_cache=dropout is None, dropout=dropout)))
    except NotMeasured as error:
        return {"status": error.status, "error": str(error)}


def enlarge(zoo: Any) -> None:
    """Gives the census's recipes for transformers' models other sizes, until the process ends."""
    vars(zoo).update(_GLOBALS)
    for of_tokens in (zoo._ids, zoo._padmask):  # their defaults were taken from the globals
        of_tokens.__defaults__ = (zoo.S, zoo.B)
    zoo.WIDTH.update({name: _LARGER.get(size, size) for name, size in zoo.WIDTH.items()})
    zoo.COMMON.update({name: _LARGER_OF_MODELS.get(size, size) for name, size in zoo.COMMON.items()})
    zoo.FIX.update(
        {model: {name: _fixed(name, value) for name, value in fix.items()} for model, fix in zoo.FIX.items()}
    )


def _fixed(name: str, value: Any) -> Any:
    """What a recipe sets for one model: sections of a head dim, which is four times as large, and sizes."""
    if isinstance(value, Mapping):
        return {inner: _fixed(inner, v) for inner, v in value.items()}
    if name.rpartition(".")[2] == "mrope_section":
        return [4 * part for part in value]
    return _LARGER.get(value, value) if name.rpartition(".")[2] in _OF_WIDTH and isinstance(value, int) else value


def keep_calls_of_timm(census: Census) -> None:
    """timm calls `scaled_dot_product_attention` unless told otherwise, as the census does."""
    census.zoo.stub_torchvision()
    layers = importlib.import_module("timm.layers")
    layers.set_fused_attn(True)
    vars(layers)["set_fused_attn"] = lambda *_: None


def _in_bfloat16(subject: Subject) -> Subject:
    """The same model and inputs in bfloat16."""

    def converted(x: Any) -> Any:
        return x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x

    subject.model.bfloat16()
    subject.args, subject.kwargs = tree_map(converted, (subject.args, subject.kwargs))
    return subject


def _timed(subject: Subject) -> Row:
    """The times of stock and of the pass, and both compared with eager."""
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64
    try:
        subject.expected = subject.run(subject.model)
    except Exception as error:
        return {"status": "unbuildable", "error": error_text(error)}
    with warnings.catch_warnings(), torch._inductor.config.patch(fx_graph_cache=False):
        warnings.simplefilter("ignore")
        try:
            stock = torch.compile(subject.model, backend="inductor")
            expected = subject.run(stock)
        except Exception as error:
            return {"status": "stock does not compile", "error": error_text(error)}
        with attn_pass.record() as report:
            try:
                ours = torch.compile(subject.model, backend=attn_pass.backend)
                got = subject.run(ours)
            except Exception as error:
                return {"status": "does not run", "error": error_text(error)}
    row: Row = {"status": "ok", **report_row(report), "stock_numerics": subject.judged(expected)}
    row["numerics"] = _no_worse(subject.judged(got), row["stock_numerics"])
    with torch.no_grad():
        runs = {way: subject.call(run) for way, run in {"stock": stock, "A/A": stock, "attn_pass": ours}.items()}
        samples = in_turns(runs, (), ROUNDS, seconds=BLOCK_S, seed=type(subject.model).__name__)
    return {**row, **_judged(samples)}


def _no_worse(numerics: Row, of_stock: Row) -> Row:
    """The comparison with eager, which may differ as much as stock does: in bfloat16 every order of sums does."""
    as_near = numerics["rel_l2"] <= _TIMES_STOCK * of_stock["rel_l2"] and math.isfinite(numerics["rel_l2"])
    return {**numerics, "ok": numerics["ok"] or as_near}


def _judged(samples: Mapping[str, list[float]]) -> Row:
    """Medians in milliseconds, the speedup against both runs of stock, and its verdict."""
    both = [*samples["stock"], *samples["A/A"]]
    speedups = [of(both) / of(samples["attn_pass"]) for of in (statistics.median, percentile_10)]
    noise = noise_of(samples["stock"], samples["A/A"])
    ms = {f"{way}_ms": statistics.median(taken) / 1e3 for way, taken in samples.items()}
    return {
        **ms,
        "speedup": speedups[0],
        "speedup_p10": speedups[1],
        "noise": noise,
        "verdict": verdict(*speedups, noise),
    }
