"""Models that call `scaled_dot_product_attention` themselves: the calls that the pass reads, and the names of their
masks.

transformers models are built with `attn_implementation="sdpa"` and compiled with the rewritten graph run eagerly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule

import attn_pass
from bench.suites.census.dataset import Census, prepared
from bench.suites.census.rows import Row, report_row, tried, warned

FACTS = {"bench": "sdpa", "stage": ""}


def measure(census: Census, name: str) -> Iterator[Row]:
    """One row: the calls in Dynamo's graphs, those the report read, and the numbers against eager."""
    row: Row = {}
    build_with_sdpa()
    subject = prepared(census, name, keep_cache=True)
    sites: Counter[str] = Counter()
    graphs = 0
    rewriting = attn_pass.wrap("eager", choose="fused")

    def counting(gm: GraphModule, inputs: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        sites.update(census.counted([gm]))
        return rewriting(gm, inputs)

    torch._dynamo.config.recompile_limit = 64
    with warned(row), attn_pass.record() as report, tried(row):
        got = subject.run(torch.compile(subject.model, backend=counting))
        row.update(status="ok", numerics=subject.judged(got))
    yield {**row, "sites": dict(sites), "graphs": graphs, "seconds": round(report.seconds, 3), **report_row(report)}


def build_with_sdpa() -> None:
    """Let transformers models that are asked for with eager attention have SDPA, and parts that lack it stay eager."""
    from transformers import PreTrainedModel

    original: Any = PreTrainedModel._from_config.__func__

    def from_config(cls: type, config: Any, **kwargs: Any) -> Any:
        if kwargs.get("attn_implementation") == "eager":
            kwargs["attn_implementation"] = "sdpa"
        try:
            return original(cls, config, **kwargs)
        except ValueError as error:
            if "scaled_dot_product_attention" not in str(error):
                raise
            return original(cls, config, **{**kwargs, "attn_implementation": "eager"})

    PreTrainedModel._from_config = classmethod(from_config)
