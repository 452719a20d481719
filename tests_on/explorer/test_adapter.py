"""The adapter in Model Explorer's own extension manager: found, run, and of its own types."""

from __future__ import annotations

from pathlib import Path

import torch
from model_explorer.extension_manager import ExtensionManager
from model_explorer.graph_builder import GraphCollection, GraphNode
from model_explorer.utils import convert_adapter_response

from attn_pass.explorer.main import AttnPassAdapter


class Layer(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ k.mT * 0.3, -1) @ v


def stored(folder: Path) -> str:
    """The path of an exported program in a file."""
    program = torch.export.export(torch.nn.Sequential(Layer())[0], tuple(torch.randn(2, 4, 64, 32) for _ in range(3)))
    torch.export.save(program, folder / "model.pt2")
    return str(folder / "model.pt2")


def test_the_adapter_gives_model_explorers_own_types(tmp_path: Path) -> None:
    (collection,) = AttnPassAdapter().convert(stored(tmp_path), {})["graphCollections"]
    assert isinstance(collection, GraphCollection) and [g.id for g in collection.graphs] == ["before", "after"]
    nodes = [node for graph in collection.graphs for node in graph.nodes]
    assert all(isinstance(node, GraphNode) for node in nodes)
    told = {one.value for node in nodes for one in node.attrs if one.key == "outcome"}
    assert told and all(text.startswith(("rewritten", "left")) for text in told)


def test_model_explorer_finds_and_runs_it(tmp_path: Path) -> None:
    manager = ExtensionManager(["attn_pass.explorer"])
    manager.load_extensions()
    assert "attn_pass" in [known["id"] for known in manager.get_extensions_metadata()]
    command = {
        "cmdId": "convert",
        "extensionId": "attn_pass",
        "modelPath": stored(tmp_path),
        "settings": {},
        "deleteAfterConversion": False,
    }
    answer = manager.run_cmd(command)
    (collection,) = answer["graphCollections"]
    assert {graph["id"] for graph in collection["graphs"]} == {"before", "after"}
    assert answer == convert_adapter_response(AttnPassAdapter().convert(stored(tmp_path), {}))
