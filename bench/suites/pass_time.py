"""The pass's own time against the size of the graph: `python -m bench pass-time [--json FILE]`.

Real decoder graphs (transformers' Llama with grouped KV heads, eager attention) of 12 and 48 layers are captured once
with torch.compile; the pass then runs on fresh copies of the captured graph, and the least of five runs counts.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.fx import GraphModule

from attn_pass.engine import rewrite_graph
from attn_pass.options import make_options
from attn_pass.report.record import Report
from bench.harness.environment import command, device_name, versions

LAYERS = (12, 24, 48)


def captured(layers: int) -> GraphModule:
    """Dynamo's graph of a Llama with that many layers, batch 2, 64 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=layers,
        intermediate_size=64,
        vocab_size=128,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).eval()
    graphs: list[GraphModule] = []

    def keep(gm: GraphModule, inputs: list[Any]) -> Any:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=keep)(torch.randint(0, 128, (2, 64)), use_cache=False)
    return max(graphs, key=lambda g: len(g.graph.nodes))


def seconds(gm: GraphModule) -> tuple[float, int]:
    """``(seconds, sites rewritten)`` of one run of the pass on a copy."""
    copied = copy.deepcopy(gm)
    report = Report()
    with torch.no_grad():
        rewrite_graph(copied, options=make_options(choose="fused"), report=report, program="compile")
    return report.seconds, len(report.rewritten)


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write here.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The smallest depth alone.")] = False,
) -> None:
    """Measure the pass alone over the depth of a model."""
    rows = []
    for layers in LAYERS[:1] if quick else LAYERS:
        gm = captured(layers)
        runs = [seconds(gm) for _ in range(6)][1:]
        rows.append(
            {
                "layers": layers,
                "nodes": len(gm.graph.nodes),
                "sites": runs[0][1],
                "min_s": min(r[0] for r in runs),
                "max_s": max(r[0] for r in runs),
            }
        )
    table = Table("layers", "nodes", "sites rewritten", "pass, s (least of 5)", "pass, s (most)", "against 12 layers")
    for row in rows:
        table.add_row(
            str(row["layers"]),
            str(row["nodes"]),
            str(row["sites"]),
            f"{row['min_s']:.3f}",
            f"{row['max_s']:.3f}",
            f"{row['min_s'] / rows[0]['min_s']:.2f}x",
        )
    Console().print(table)
    if json_file is not None:
        json_file.write_text(
            json.dumps(
                {"device": device_name("cpu"), "versions": versions(), "command": command(), "rows": rows}, indent=1
            )
            + "\n"
        )
