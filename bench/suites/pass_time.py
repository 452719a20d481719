"""The pass's own time over the size of the graph: `python -m bench pass-time [--json FILE]`.

Real decoder graphs (transformers' Llama with grouped KV heads, eager attention) of 12 to 48 layers are captured once
with torch.compile; the pass then runs on fresh copies of the captured graph, and the least of five runs counts, in the
processor's time. Other work on the machine changes that, and does not change the number of Python's function calls.
"""

from __future__ import annotations

import copy
import cProfile
import time
from typing import Any

import torch
from torch.fx import GraphModule

from attn_pass.engine import rewrite_graph
from attn_pass.options import make_options
from attn_pass.report.record import Report
from bench.harness.command import Json, Quick, started
from bench.harness.document import Column
from bench.suites.zoo import ARCHITECTURES

LAYERS = (12, 24, 48)
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 1000}
COLUMNS = (
    Column("layers", "layers"),
    Column("nodes", "nodes"),
    Column("sites rewritten", "sites"),
    Column("Python calls", "calls", ","),
    Column("least s", "min_s", ".3f"),
    Column("most s", "max_s", ".3f"),
    Column("relative to the smallest", "of_smallest", ".2f"),
)


def captured(layers: int) -> GraphModule:
    """Dynamo's graph of a Llama with that many layers, batch 2, 128 tokens."""
    model, inputs = ARCHITECTURES["Llama"].build(num_hidden_layers=layers, **SIZES)
    graphs: list[GraphModule] = []

    def keep(gm: GraphModule, inputs: list[Any]) -> Any:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=keep)(**inputs)
    return max(graphs, key=lambda g: len(g.graph.nodes))


def rewrite(gm: GraphModule) -> int:
    """The sites that one run of the pass rewrites."""
    report = Report()
    with torch.no_grad():
        rewrite_graph(gm, options=make_options(choose="fused"), report=report, program="compile")
    return len(report.rewritten)


def seconds(gm: GraphModule) -> tuple[float, int]:
    """``(seconds of the processor, sites rewritten)`` of one run of the pass on a copy."""
    copied = copy.deepcopy(gm)
    before = time.process_time()
    sites = rewrite(copied)
    return time.process_time() - before, sites


def calls(gm: GraphModule) -> int:
    """How many functions one run calls, of Python and of C."""
    copied, profile = copy.deepcopy(gm), cProfile.Profile()
    profile.runcall(rewrite, copied)
    return sum(entry.callcount for entry in profile.getstats())


def main(json_file: Json = None, quick: Quick = False) -> None:
    """Measure the pass alone over the depth of a model."""
    recorder = started("The pass's own time", json_file, rounds="the least of five runs")
    rows = recorder.table("The engine alone", COLUMNS).rows
    for layers in LAYERS[:1] if quick else LAYERS:
        gm = captured(layers)
        runs = [seconds(gm) for _ in range(6)][1:]
        low, high = (f(taken for taken, _ in runs) for f in (min, max))
        counts = {"nodes": len(gm.graph.nodes), "sites": runs[0][1], "calls": calls(gm)}
        rows.append({"layers": layers, **counts, "min_s": low, "max_s": high})
        rows[-1]["of_smallest"] = low / rows[0]["min_s"]
    recorder.finish()
