"""Models with padding under torch.compile: which have a proved region without padding, and why the others have none.

Models are as the census has them, with transformers' own calls of `scaled_dot_product_attention`; those whose inputs
hold a mask with padding in it. Each is traced once: the rewritten graph runs eagerly, and only the CPU kernel is
offered, whatever it is predicted to take. Most return `last_hidden_state`, which shows rows of padding; so each graph
is rewritten once more under `assume_padding_unused`, and that is not run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule

import attn_pass
from attn_pass.report.record import Report
from bench.suites.census.dataset import Census, Subject, prepared, told
from bench.suites.census.rows import Row
from bench.suites.census.sdpa import build_with_sdpa

AS_CALLED, UNUSED = STAGES = ("as called", "padding unused")


def facts_of(census: Census, name: str) -> Row:
    """What the row of a model is about."""
    return {"bench": "padding", "stage": AS_CALLED, **census.facts(name)}


def measure(census: Census, name: str) -> Iterator[Row]:
    """A row for each stage: the records of all regions of a model's graphs, and the numbers against eager."""
    row = facts_of(census, name)
    build_with_sdpa()
    subject = prepared(census, name, refused=without_padding)
    for stage, of_stage in compiled(subject):
        yield {**row, "stage": stage, **of_stage}


def without_padding(inputs: Mapping[str, Any]) -> str:
    """The status of a model none of whose masks, by their names, keeps some positions and not others."""
    masks = (x for name, x in inputs.items() if "mask" in name and isinstance(x, torch.Tensor) and x.dim() == 2)
    return "" if any(bool((x != x.flatten()[0]).any()) for x in masks) else "no padding"


def compiled(subject: Subject) -> Iterator[tuple[str, Row]]:
    """What becomes of one model. With the user's word its rows of padding are others, and nothing is compared."""
    backends = {AS_CALLED: _backend(), UNUSED: _backend(assume_padding_unused=True)}
    reports: dict[str, list[Report]] = {stage: [] for stage in STAGES}

    def both(gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs = {AS_CALLED: gm, UNUSED: _copied(gm)}
        made = {}
        for stage, backend in backends.items():
            with attn_pass.record() as report:
                made[stage] = backend(graphs[stage], inputs)
            reports[stage].append(report)
        return made[AS_CALLED]

    made: Row = {"status": "ok", "numerics": None}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", attn_pass.AttnPassWarning)
        try:
            made["numerics"] = subject.judged(subject.run(torch.compile(subject.model, backend=both)))
        except Exception as error:
            made.update(status="does not run", error=told(error))
    made["warnings"] = [str(w.message) for w in caught if issubclass(w.category, attn_pass.AttnPassWarning)]
    yield AS_CALLED, {**made, **_told(reports[AS_CALLED])}
    yield UNUSED, {"status": made["status"], "numerics": None, "warnings": [], **_told(reports[UNUSED])}


def _backend(**options: Any) -> Callable[..., Any]:
    return attn_pass.wrap("eager", choose="fused", targets=("cpu_kernel",), **options)


def _copied(gm: GraphModule) -> GraphModule:
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    made = GraphModule(gm, graph)
    made.meta.update(gm.meta)
    return made


def _told(reports: Sequence[Report]) -> Row:
    rewritten = sum(len(report.rewritten) for report in reports)
    return {"attentions": rewritten, "regions": [region.to_dict() for report in reports for region in report.regions]}
