"""Models with padding under torch.compile: which have a proved region without padding, and why the others have none.

Models are as the census has them, with transformers' own calls of `scaled_dot_product_attention`; the rewritten graph
runs eagerly, and only the CPU kernel is offered, whatever it is predicted to take. Most return `last_hidden_state`,
which shows rows of padding; so each is compiled once more under `assume_padding_unused`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import attn_pass
from bench.suites.census.dataset import Census, NotRunnable, Subject, open_census, prepared, told
from bench.suites.census.rows import Row
from bench.suites.census.sdpa import build_with_sdpa

STAGES: Mapping[str, Mapping[str, Any]] = {"as called": {}, "padding unused": {"assume_padding_unused": True}}


def facts_of(census: Census, name: str) -> Row:
    """What the row of a model is about."""
    return {"bench": "padding", "stage": next(iter(STAGES)), **census.facts(name)}


def measure(folder: Path, name: str) -> Iterator[Row]:
    """A row for each stage: the records of all regions of a model's graphs, and the numbers against eager."""
    census = open_census(folder)
    row = facts_of(census, name)
    build_with_sdpa()
    try:
        subject = prepared(census, name)
    except NotRunnable as error:
        yield {**row, "status": "unbuildable", "error": str(error)}
        return
    for stage, options in STAGES.items():
        torch._dynamo.reset()
        yield {**row, "stage": stage, **compiled(subject, options)}


def compiled(subject: Subject, options: Mapping[str, Any]) -> Row:
    """What becomes of one model. With the user's word its rows of padding are others, and nothing is compared."""
    made: Row = {"status": "ok", "numerics": None}
    backend = attn_pass.wrap("eager", choose="fused", targets=("cpu_kernel",), **options)
    with warnings.catch_warnings(record=True) as caught, attn_pass.record() as report:
        warnings.simplefilter("always", attn_pass.AttnPassWarning)
        try:
            got = subject.run(torch.compile(subject.model, backend=backend))
            made["numerics"] = None if options else subject.judged(got)
        except Exception as error:
            made.update(status="does not run", error=told(error))
    made["warnings"] = [str(w.message) for w in caught if issubclass(w.category, attn_pass.AttnPassWarning)]
    rewritten = sum(site.outcome != "left" for site in report.sites)
    return {**made, "attentions": rewritten, "regions": [region.to_dict() for region in report.regions]}
