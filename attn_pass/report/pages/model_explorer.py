"""Graphs with their sites in the JSON format of Model Explorer (google-ai-edge/model-explorer).

Its own types are in its `graph_builder.py`: nodes in the hierarchy of the modules, sites in colour, with what the
report says of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from attn_pass.report.pages.graphs import GraphRecord
from attn_pass.report.places import module_path, source_line
from attn_pass.report.site import SiteReport
from attn_pass.report.text import shape_lines

COLOURS = {"rewritten": "#d8efdf", "decomposed": "#e6dcf5", "left": "#fbe8c8", "near miss": "#e4e6ea"}
_MOST = 2000  # characters of a value


def nodes_of(gm: GraphModule) -> list[dict[str, Any]]:
    """The nodes of a graph as it is now, without the bodies of higher-order operators."""
    return [_node(node) for node in gm.graph.nodes]


def collections_of(graphs: Sequence[GraphRecord]) -> list[dict[str, Any]]:
    """One collection for each graph: "before" and "after", in both of which the nodes of sites say what became of them.

    ``json.dumps`` of it is a file that Model Explorer opens.
    """
    return [
        {
            "label": f"graph {number}, {graph.title}",
            "graphs": [
                _graph(
                    "before",
                    graph.nodes_before,
                    {n: c.record for c in graph.sites for n in (*c.removed, c.record.node)},
                ),
                _graph(
                    "after", graph.nodes_after, {n: c.record for c in graph.sites for n in (*c.added, c.record.node)}
                ),
            ],
        }
        for number, graph in enumerate(graphs, 1)
    ]


def _graph(name: str, nodes: Sequence[Mapping[str, Any]], sites: Mapping[str, SiteReport]) -> dict[str, Any]:
    return {"id": name, "nodes": [_with_site(node, sites.get(node["id"])) for node in nodes]}


def _with_site(node: Mapping[str, Any], site: SiteReport | None) -> dict[str, Any]:
    if site is None:
        return dict(node)
    attributes = {
        "attention": site.id,
        "outcome": site.became,
        "why": site.reason,
        "mask": site.mask,
        "form": site.form,
        "shapes": "; ".join(shape_lines(site)),
        **{f"formula, {name}": text for name, text in site.formula.items()},
        **{f"{name} made by": text for name, text in site.prologue.items()},
        **{f"refused by {target}": why for target, why in site.refusals.items() if target not in site.other_devices},
    }
    colour = COLOURS["near miss" if site.kind == "near miss" else site.outcome]
    return {**node, "attrs": [*node["attrs"], *_attributes(attributes)], "style": {"backgroundColor": colour}}


def _node(node: Node) -> dict[str, Any]:
    attributes = {"op": node.op, "target": str(node.target), "where": source_line(node.meta)}
    return {
        "id": node.name,
        "label": _label(node),
        "namespace": module_path(node.meta).replace(".", "/"),
        "attrs": _attributes(attributes),
        "incomingEdges": [
            {"sourceNodeId": source.name, "sourceNodeOutputId": "0", "targetNodeInputId": str(number)}
            for number, source in enumerate(node.all_input_nodes)
        ],
        "outputsMetadata": _outputs(node),
    }


def _label(node: Node) -> str:
    if node.op != "call_function":
        return str(node.target) if node.op in ("call_method", "get_attr") else node.name
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    return str(getattr(node.target, "__name__", node.target))


def _outputs(node: Node) -> list[dict[str, Any]]:
    value = node.meta.get("val", node.meta.get("example_value"))
    if not isinstance(value, torch.Tensor):
        return []
    attributes = {"shape": f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}", "device": str(value.device)}
    return [{"id": "0", "attrs": _attributes(attributes)}]


def _attributes(attributes: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value[:_MOST]} for key, value in attributes.items() if value]
