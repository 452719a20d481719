"""Models with padding under torch.compile: which have a proved region without padding, and why the others have none.

Models are as the census has them, with transformers' own calls of `scaled_dot_product_attention`; those whose inputs
hold a mask with padding in it. The rewritten graphs run eagerly, and only the CPU kernel is offered, whatever it is
predicted to take. Most models return `last_hidden_state`, which shows rows of padding; so each is compiled once more
under `assume_padding_unused`, and compared with eager in all that this word leaves as it is (`padded_rows`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

import attn_pass
from bench.suites.census.dataset import Census, Subject, prepared
from bench.suites.census.padded_rows import seen, token_masks
from bench.suites.census.rows import Row, tried, warned
from bench.suites.census.sdpa import build_with_sdpa

AS_CALLED, UNUSED = "as called", "padding unused"
STAGES: Mapping[str, Mapping[str, Any]] = {AS_CALLED: {}, UNUSED: {"assume_padding_unused": True}}
"""The options of the pass in each."""
FACTS = {"bench": "padding", "stage": AS_CALLED}


def measure(census: Census, name: str) -> Iterator[Row]:
    """A row for each stage: the records of all regions of a model's graphs, and the numbers against eager."""
    build_with_sdpa()
    subject = prepared(census, name, refused=without_padding)
    for stage in STAGES:
        yield {"stage": stage, **compiled(subject, stage)}


def without_padding(inputs: Mapping[str, Any]) -> str:
    """The status of a model none of whose masks, by their names, keeps some positions and not others."""
    return "" if any(bool((mask != mask.flatten()[0]).any()) for mask in token_masks(inputs)) else "no padding"


def compiled(subject: Subject, stage: str) -> Row:
    """What becomes of one model in a stage, and its numbers."""
    torch._dynamo.reset()
    backend = attn_pass.wrap("eager", choose="fused", targets=("cpu_kernel",), **STAGES[stage])
    made: Row = {"status": "ok", "numerics": None}
    with warned(made), attn_pass.record() as report, tried(made):
        made |= judged(subject, stage, subject.run(torch.compile(subject.model, backend=backend)))
    return {**made, "attentions": len(report.rewritten), "regions": [region.to_dict() for region in report.regions]}


def judged(subject: Subject, stage: str, got: list[torch.Tensor]) -> Row:
    """The numbers against eager's; with the user's word without the rows of padding that became zeros."""
    if stage == AS_CALLED:
        return {"numerics": subject.judged(got)}
    both = seen(subject.expected, got, token_masks(subject.kwargs))
    return {"numerics": subject.judged(both.got, both.expected), "zeros": both.zeros}
