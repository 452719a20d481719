"""Models under torch.compile: how many queries, keys and values of attentions are made by linear layers that are read.

Models are as the census has them, with transformers' own calls of `scaled_dot_product_attention`. Each is traced once
under Inductor's ``freezing``, where projections of one input are one product, and the rewritten graph runs eagerly: so
numbers compared with eager's are those of joined projections. A query, key or value that no linear layer makes, as
where a module makes all three by one convolution, counts as not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule

from attn_pass.entries.known import known_buffers
from attn_pass.entries.transaction import decide
from attn_pass.graph.values import FOLDS_CONSTANTS
from attn_pass.options import make_options
from attn_pass.report.record import Report
from bench.suites.census.dataset import Census, prepared
from bench.suites.census.rows import Row, tried, warned
from bench.suites.census.sdpa import build_with_sdpa

OPERANDS = 3  # of an attention: queries, keys and values
FACTS = {"bench": "projections", "stage": ""}


def measure(census: Census, name: str) -> Iterator[Row]:
    """One row: attentions, operands that linear layers make, what became of these, and the numbers against eager."""
    row: Row = {"numerics": None}
    build_with_sdpa()
    subject = prepared(census, name)
    reports: list[Report] = []
    options = make_options(choose="fused")

    def joining(gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        known = known_buffers(gm, inputs, options) | {FOLDS_CONSTANTS: True}
        reports.append(decide(gm, options, "compile", "inductor", lambda: known).report)
        return gm.forward

    with warned(row), torch._inductor.config.patch(freezing=True), tried(row):
        with torch.no_grad():
            got = subject.run(torch.compile(subject.model, backend=joining))
        row.update(status="ok", numerics=subject.judged(got))
    yield {**row, **_counted(reports)}


def _counted(reports: list[Report]) -> Row:
    sites = sum(site.count for report in reports for site in report.sites if site.kind == "attention")
    projections = [p for report in reports for p in report.projections]
    return {
        "operands": OPERANDS * sites,
        "read": sum(p.operands for p in projections),
        "joined": sum(p.operands for p in projections if p.outcome == "joined"),
        "projections": [p.to_dict() for p in projections],
    }
