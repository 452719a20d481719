"""What makes queries and keys in a report: in the table where it is asked for, in JSON, on the page, in no compile."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import attn_pass
from attn_pass.report.record import Report

EXPECTED = "RMS norm over the head dim (eps 1e-05), then rotary over all 8 elements, in halves"


def attends(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    def turned(x: Tensor) -> Tensor:
        x = F.rms_norm(x, (8,), eps=1e-5)
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat((-high, low), -1) * sin

    return (turned(q) @ turned(k).mT).softmax(-1) @ v


def given() -> tuple[Tensor, ...]:
    return (*torch.randn(3, 2, 3, 5, 8), *torch.randn(2, 5, 8))


@pytest.fixture(scope="module")
def report() -> Report:
    return attn_pass.explain(attends, *given(), attn_pass_options={"on_error": "raise"})


def test_a_report_has_it_in_every_form(report: Report) -> None:
    (site,) = report.sites
    assert site.prologue == {"query": EXPECTED, "key": EXPECTED}
    assert Report.from_dict(json.loads(report.to_json())).sites[0].prologue == site.prologue
    assert f"<th>query</th><td>{EXPECTED}</td>" in report.to_html()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_rms_norm_without_an_eps_has_float32s(dtype: torch.dtype) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (F.rms_norm(q, (8,)) @ k.mT).softmax(-1) @ v

    (site,) = attn_pass.explain(run, *torch.randn(3, 2, 3, 5, 8, dtype=dtype)).sites
    assert site.prologue["query"].startswith("RMS norm over the head dim (eps 1.19")
    small = torch.full((8,), 1e-4, dtype=dtype)
    by_hand = small.float() / (small.float().pow(2).mean() + torch.finfo(torch.float32).eps).sqrt()
    torch.testing.assert_close(F.rms_norm(small, (8,)), by_hand.to(dtype))


def test_the_table_has_it_where_all_is_asked_for(report: Report) -> None:
    assert f"query, key: {EXPECTED}" in " ".join(report.table(1000, verbose=True).split())
    assert "rotary" not in report.table(1000)


def test_operands_that_are_made_in_two_ways_have_two_lines() -> None:
    (site,) = attn_pass.explain(lambda q, *rest: attends(q, *rest), *given()).sites
    site.prologue = {"query": "rotary", "key": "not read: because"}
    table = Report([site], graphs=1).table(1000, verbose=True)
    assert "query: rotary" in table and "key: not read: because" in table


def test_compiling_takes_no_time_for_it() -> None:
    with attn_pass.record() as compiled, torch.no_grad():
        torch.compile(attends, backend=attn_pass.wrap("eager", choose="fused"))(*given())
    assert [site.prologue for site in compiled.sites] == [{}]
