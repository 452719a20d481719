"""Graphs for Model Explorer: its documented fields, every node and edge, sites in colour with their reasons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from against_eager import qkv
from typer.testing import CliRunner

import attn_pass
from attn_pass.cli.main import app
from attn_pass.report.pages.collect import collect
from attn_pass.report.pages.model_explorer import COLOURS, collections_of

# google-ai-edge/model-explorer, src/server/package/src/model_explorer/graph_builder.py, version 0.1.34.
FIELDS = {
    "collection": {"label", "graphs"},
    "graph": {"id", "nodes"},
    "node": {"id", "label", "namespace", "attrs", "incomingEdges", "outputsMetadata", "style"},
    "edge": {"sourceNodeId", "sourceNodeOutputId", "targetNodeInputId"},
}


class Layer(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ k.mT * 0.3, -1) @ v


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with attn_pass.leave():
            left = torch.softmax(q @ k.mT, -1) @ v
        return left + sum(layer(q, k, v) for layer in self.layers)


def checked(collections: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The graphs, of the form that Model Explorer takes: known fields, unique ids, edges that begin somewhere."""
    graphs = [graph for collection in collections for graph in collection["graphs"]]
    assert all(set(collection) <= FIELDS["collection"] for collection in collections)
    for graph in graphs:
        assert set(graph) <= FIELDS["graph"]
        ids = [node["id"] for node in graph["nodes"]]
        assert len(ids) == len(set(ids))
        for node in graph["nodes"]:
            assert set(node) <= FIELDS["node"]
            assert all(isinstance(one["value"], str) and set(one) == {"key", "value"} for one in node["attrs"])
            assert all(edge["sourceNodeId"] in ids and set(edge) == FIELDS["edge"] for edge in node["incomingEdges"])
    return graphs


def said(node: dict[str, Any]) -> dict[str, str]:
    return {one["key"]: one["value"] for one in node["attrs"]}


def test_graphs_before_and_after_with_their_sites() -> None:
    with collect() as collection, torch.no_grad():
        report = attn_pass.explain(Model(), *qkv(), attn_pass_options={"choose": "fused", "targets": ("sdpa",)})
    before, after = checked(json.loads(json.dumps(collections_of(collection.graphs))))
    assert (before["id"], after["id"]) == ("before", "after")
    softmaxes = [node for node in before["nodes"] if node["label"] == "softmax"]
    assert {node["namespace"] for node in softmaxes} == {"", "layers/0", "layers/1"}
    inside = next(node for node in softmaxes if node["namespace"] == "layers/1")
    site = next(site for site in report.sites if site.module == "layers.1")
    assert said(inside)["attention"] == site.id and said(inside)["why"] == site.reason
    assert said(inside)["outcome"] == "rewritten to sdpa" and "formula, score" in said(inside)
    assert inside["style"]["backgroundColor"] == COLOURS["rewritten"]
    assert inside["outputsMetadata"][0]["attrs"][0]["value"] == "float32[2, 2, 8, 8]"
    calls = [node for node in after["nodes"] if "scaled_dot_product" in node["label"]]
    assert len(calls) == 2 and all(said(node)["outcome"] == "rewritten to sdpa" for node in calls)
    left = [node for node in after["nodes"] if node.get("style", {}).get("backgroundColor") == COLOURS["left"]]
    assert left and all("left as requested" in said(node)["why"] for node in left)
    assert not any("style" in node for node in before["nodes"] if node["id"].lower().startswith("l_"))


def test_the_command_and_inspect_write_it(tmp_path: Path) -> None:
    program = tmp_path / "explored.py"
    program.write_text(
        "import torch\n"
        "def f(q):\n    return (q @ q.mT).softmax(-1) @ q\n"
        "def model():\n    return f, (torch.ones(1, 2, 8, 4),)\n"
    )
    done = CliRunner().invoke(app, ["explain", f"{program}:model", "--graph", str(tmp_path / "g.json")])
    assert done.exit_code == 0, done.output
    assert len(checked(json.loads((tmp_path / "g.json").read_text()))) == 2
    done = CliRunner().invoke(app, ["explain", f"{program}:model", "--graph", str(tmp_path / "no" / "g.json")])
    assert done.exit_code == 2 and "--graph" in done.output and "no folder" in done.output
    with attn_pass.inspect(tmp_path / "folder", draw=False, bytecode=False):
        attn_pass.explain(lambda q: (q @ q.mT).softmax(-1) @ q, torch.ones(1, 2, 8, 4))
    checked(json.loads((tmp_path / "folder" / "model_explorer.json").read_text()))
    assert "model_explorer.json" in (tmp_path / "folder" / "index.html").read_text()


def test_a_package_has_no_graphs(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["explain", "model.pt2", "--graph", str(tmp_path / "g.json")])
    assert done.exit_code == 2 and "leave out --graph" in done.output


@pytest.mark.parametrize("name", ["rewritten", "decomposed", "left", "near miss"])
def test_every_outcome_has_a_colour(name: str) -> None:
    assert COLOURS[name].startswith("#")
