"""The adapter for Model Explorer, with a stand-in for its classes: an exported program becomes two graphs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

_GRAPH = ("Graph", "GraphCollection", "GraphNode", "GraphNodeStyle", "IncomingEdge", "KeyValue", "MetadataItem")


class Attention(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT * 0.125).softmax(-1) @ v


class Plain(SimpleNamespace):
    """What every class of Model Explorer is here: what it was made with."""


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Any:
    package, builder = ModuleType("model_explorer"), ModuleType("model_explorer.graph_builder")
    package.Adapter = type("Adapter", (), {})  # type: ignore[attr-defined]
    package.AdapterMetadata = Plain  # type: ignore[attr-defined]
    package.ModelExplorerGraphs = dict  # type: ignore[attr-defined]
    for name in _GRAPH:
        setattr(builder, name, type(name, (Plain,), {}))
    monkeypatch.setitem(sys.modules, "model_explorer", package)
    monkeypatch.setitem(sys.modules, "model_explorer.graph_builder", builder)
    monkeypatch.delitem(sys.modules, "attn_pass.explorer.main", raising=False)
    yield importlib.import_module("attn_pass.explorer.main").AttnPassAdapter
    sys.modules.pop("attn_pass.explorer.main", None)


def test_an_exported_program_is_shown_before_and_after(adapter: Any, tmp_path: Path) -> None:
    inputs = tuple(torch.randn(2, 4, 256, 64) for _ in range(3))
    torch.export.save(torch.export.export(Attention(), inputs), tmp_path / "model.pt2")
    assert adapter.metadata.fileExts == ["pt2"] and adapter.metadata.id == "attn_pass"
    collections = adapter().convert(str(tmp_path / "model.pt2"), {})["graphCollections"]
    nodes = [node for collection in collections for graph in collection.graphs for node in graph.nodes]
    assert collections and any("softmax" in node.label for node in nodes)
    coloured = [node for node in nodes if node.style is not None]
    assert coloured and all(type(node.style).__name__ == "GraphNodeStyle" for node in coloured)
    labels = [node.label for node in nodes]
    assert any("attention" in label for label in labels), labels
    assert all(type(edge).__name__ == "IncomingEdge" for node in nodes for edge in node.incomingEdges)
