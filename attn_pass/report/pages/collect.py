"""Collects, for each root graph that is decided inside a block, its code before and after, and the edits of every site.

It costs nothing if it is off: the switch is a context variable, and every function here returns at once if it is not
set. A failure in here is one warning and affects nothing else.
"""

from __future__ import annotations

import inspect
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch._guards import CompileContext
from torch.fx import Graph, GraphModule, Node

from attn_pass.errors import AttnPassWarning, first_line
from attn_pass.report.pages.graphs import GraphRecord, SiteChange
from attn_pass.report.pages.model_explorer import nodes_of
from attn_pass.report.pages.picture import Picture
from attn_pass.report.record import Report
from attn_pass.report.site import SiteReport

_ADDRESS = re.compile(r" at 0x[0-9a-f]{6,}")


@dataclass(eq=False)
class Collection:
    """The graphs decided while it was active, in order.

    Attributes:
        graphs: one record a root graph.
        draw: whether graphs are to be drawn.
    """

    graphs: list[GraphRecord] = field(default_factory=list)
    draw: bool = False

    @property
    def report(self) -> Report:
        """All sites, as one report."""
        merged = Report()
        for graph in self.graphs:
            merged.extend(graph.report)
        return merged


_ACTIVE: ContextVar[tuple[Collection, ...]] = ContextVar("attn_pass_collections", default=())
_CURRENT: ContextVar[GraphRecord | None] = ContextVar("attn_pass_collected_graph", default=None)


@contextmanager
def collect(*, draw: bool = False) -> Iterator[Collection]:
    """A Collection that fills with every root graph decided inside, in this thread, by whatever entry; may be nested.

    Args:
        draw: describe each graph to graphviz as well, which takes seconds for large ones.
    """
    collection = Collection(draw=draw)
    token = _ACTIVE.set((*_ACTIVE.get(), collection))
    try:
        yield collection
    finally:
        _ACTIVE.reset(token)


def forget(report: Report) -> None:
    """Take a graph out of what is collected: it is decided anew."""
    for collection in _ACTIVE.get():
        collection.graphs = [graph for graph in collection.graphs if graph.report is not report]


@contextmanager
def root_graph(gm: GraphModule, report: Report, program: str) -> Iterator[GraphRecord]:
    """Around the rewriting of a root graph; its value is empty if no collection is active."""
    active = _ACTIVE.get()
    graph = GraphRecord(program, report)
    if not active:
        yield graph
        return
    began = time.perf_counter()
    graph.before = printed(gm)
    graph.nodes_before = _tried("listing the nodes", lambda: nodes_of(gm)) or []
    graph.compile_id = str(CompileContext.current_compile_id() or "") if program == "compile" else ""
    token = _CURRENT.set(graph)
    graph.seconds += time.perf_counter() - began
    try:
        yield graph
    finally:
        began = time.perf_counter()
        _CURRENT.reset(token)
        graph.after = printed(gm)
        graph.nodes_after = _tried("listing the nodes", lambda: nodes_of(gm)) or []
        own = {id(record) for record in report.sites}
        graph.sites = [c for c in graph.sites if id(c.record) in own]  # verifying rewrites smaller sites on the side
        if any(collection.draw for collection in active):
            graph.drawing, graph.not_drawn = drawing_of(gm)
        for collection in active:
            collection.graphs.append(graph)
        graph.seconds += time.perf_counter() - began


@contextmanager
def site(
    graph: Graph,
    record: SiteReport,
    picture: Callable[[], Picture | None],
    on_trial: Set[Node] = frozenset(),
    operands: Sequence[Node] = (),
) -> Iterator[None]:
    """Around the rewriting of one site of the graph, or of a body of it; ``on_trial`` were no part of it so far.

    ``operands`` are its query, key and value: what they enter makes no mask.
    """
    current = _CURRENT.get()
    if current is None:
        yield
        return
    before = {node: node.name for node in graph.nodes if node not in on_trial}
    entered = _entered(graph, operands)
    try:
        yield
    finally:
        began = time.perf_counter()
        after = {node: node.name for node in graph.nodes}
        entered |= _entered(graph, operands)
        gone = {node: name for node, name in before.items() if node not in after}
        came = {node: name for node, name in after.items() if node not in before}
        current.sites.append(
            SiteChange(
                record,
                tuple(gone.values()),
                tuple(came.values()),
                tuple(name for node, name in (gone | came).items() if operands and node not in entered),
                _tried("drawing a mask", picture),
            )
        )
        current.seconds += time.perf_counter() - began


def _entered(graph: Graph, operands: Sequence[Node]) -> set[Node]:
    """The nodes that a value of these enters, and these."""
    entered = set(operands)
    for node in graph.nodes:
        if not entered.isdisjoint(node.all_input_nodes):
            entered.add(node)
    return entered


def drawing_of(gm: GraphModule) -> tuple[str, str]:
    """The graph in graphviz's language, by torch.fx's drawer; or "" and why not."""
    try:
        import pydot  # noqa: F401  what the drawer builds on
    except ImportError:
        return "", "torch.fx's drawer needs pydot: pip install pydot"
    number = len(gm.graph.nodes)
    if number > MOST_DRAWN:
        return "", f"it has {number} nodes, and a drawing of more than {MOST_DRAWN} is not legible"
    from torch.fx.passes.graph_drawer import FxGraphDrawer

    try:
        return str(FxGraphDrawer(gm, "graph").get_dot_graph().to_string()), ""
    except Exception as error:
        return "", f"torch.fx's drawer failed on it: {type(error).__name__}: {error}"


MOST_DRAWN = 600


def printed(gm: GraphModule) -> str:
    """The graph as code with source lines for comments, bodies included; "" with a warning where that fails."""

    def readable() -> str:
        parameters = inspect.signature(gm.print_readable).parameters
        more: dict[str, Any] = (
            {"expanded_def": True} if "expanded_def" in parameters else {}
        )  # one argument a line, since torch 2.9
        return _ADDRESS.sub("", gm.print_readable(print_output=False, **more))

    return _tried("printing a graph", readable) or ""


def _tried(action: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:
        warn_once(action, error)
        return None


def warn_once(action: str, error: Exception) -> None:
    """Warn of something that was to be shown and could not be made."""
    warnings.warn(
        f"attn_pass: {action} failed ({type(error).__name__}: {first_line(error)}); compilation is not affected",
        AttnPassWarning,
        stacklevel=3,
    )
