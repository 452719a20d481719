"""The adapter that Model Explorer loads: an exported program before and after the pass, its attention in colour.

Needs Model Explorer: ``pip install ai-edge-model-explorer``. Without it, ``attn-pass explain --graph OUT.json`` writes
a file that any Model Explorer opens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from model_explorer import Adapter, AdapterMetadata, ModelExplorerGraphs
from model_explorer.graph_builder import (
    Graph,
    GraphCollection,
    GraphNode,
    GraphNodeStyle,
    IncomingEdge,
    KeyValue,
    MetadataItem,
)

from attn_pass.entries.explain import explain
from attn_pass.report.pages.collect import collect
from attn_pass.report.pages.model_explorer import collections_of


class AttnPassAdapter(Adapter):
    """Exported programs (``torch.export.save``), decided as `attn_pass.explain` decides them."""

    metadata = AdapterMetadata(
        id="attn_pass",
        name="attn_pass: attention before and after",
        description="An exported PyTorch program, with what attn_pass makes of each attention and why.",
        fileExts=["pt2"],
    )

    def __init__(self) -> None:
        super().__init__()

    def convert(self, model_path: str, settings: Mapping[str, Any]) -> ModelExplorerGraphs:
        """The graphs of a program in a file."""
        with collect() as collection:
            explain(torch.export.load(model_path))
        return {"graphCollections": [_collection(c) for c in collections_of(collection.graphs)]}


def _collection(collection: Mapping[str, Any]) -> GraphCollection:
    graphs = [Graph(id=graph["id"], nodes=[_node(node) for node in graph["nodes"]]) for graph in collection["graphs"]]
    return GraphCollection(label=collection["label"], graphs=graphs)


def _node(node: Mapping[str, Any]) -> GraphNode:
    return GraphNode(
        id=node["id"],
        label=node["label"],
        namespace=node["namespace"],
        attrs=[KeyValue(**one) for one in node["attrs"]],
        incomingEdges=[IncomingEdge(**one) for one in node["incomingEdges"]],
        outputsMetadata=[
            MetadataItem(id=one["id"], attrs=[KeyValue(**each) for each in one["attrs"]])
            for one in node["outputsMetadata"]
        ],
        style=GraphNodeStyle(**node["style"]) if "style" in node else None,
    )
