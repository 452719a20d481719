"""Which linear layers make the queries, keys and values of attentions: found backwards from each operand of a site.

What is met on the way there, norms, rotary embeddings, caches, does not matter: a layer is rewritten as what it is, so
nothing has to be proved of it but that it is one. The layers are marked, as sites and what surrounds them change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from torch.fx import Graph, GraphModule, Node

from attn_pass.graph.effects import Effects
from attn_pass.graph.values import PROJECTION
from attn_pass.patterns.base import Site
from attn_pass.projections.linear import linear_of
from attn_pass.reading.vocabulary import operation_of

ROLES = ("query", "key", "value")
Operand = tuple[str, str]
"""One operand of one attention: the name of the site's node, and "query", "key" or "value"."""
_MOST = 64  # operations between a linear layer and the attention
_ENDS = ("matmul", "baddbmm", "einsum", "tensordot", "softmax", "embedding", "linear")


def mark_projections(sites: Iterable[Site], effects: Effects, bound: Mapping[Node, Node]) -> None:
    """Marks each linear layer with the operands that it makes; ``bound`` is what a body's placeholders are passed."""
    sites = list(sites)
    results = {site.node for site in sites}
    for site in sites:
        if site.described is None or site.kind != "attention":
            continue
        attention, nodes = site.described.attention, site.described.nodes
        for role, load in zip(ROLES, (attention.query, attention.key, attention.value)):
            for linear in _layers_behind(nodes[load.source], effects, bound, results):
                known: frozenset[Operand] = linear.meta.get(PROJECTION, frozenset())
                linear.meta[PROJECTION] = known | {(site.node.name, role)}


def marked(graph: Graph) -> dict[Node, frozenset[Operand]]:
    """The linear layers that are marked, in graph order, with what they make."""
    return {node: node.meta[PROJECTION] for node in graph.nodes if PROJECTION in node.meta}


def has_marks(gm: GraphModule) -> bool:
    """Whether a layer of a graph, or of a body that it calls, is marked."""
    graphs = (module.graph for module in gm.modules() if isinstance(module, GraphModule))
    return any(PROJECTION in node.meta for graph in graphs for node in graph.nodes)


def unmark(gm: GraphModule) -> None:
    """Takes the marks off, in a graph and in the bodies that it calls."""
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            node.meta.pop(PROJECTION, None)


def _layers_behind(start: Node, effects: Effects, bound: Mapping[Node, Node], results: Set[Node]) -> list[Node]:
    """The first linear layers on every way back from a node."""
    layers: list[Node] = []
    waiting, seen = [start], {start}
    while waiting and len(seen) < _MOST:
        node = waiting.pop(0)
        if linear_of(node) is not None:
            layers.append(node)
            continue
        if node.op in ("placeholder", "get_attr"):
            before = [bound[node]] if node in bound else []
        elif (node in results and node is not start) or operation_of(node) in _ENDS:
            continue
        else:
            before = list(node.all_input_nodes)
        written = [] if node in bound else [m.node for m in effects.mutations(node)]
        for operand in (*before, *written):
            if operand not in seen:
                seen.add(operand)
                waiting.append(operand)
    return layers
