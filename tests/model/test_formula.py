"""An attention as formulas: their text, and that evaluating them gives the program's mask."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

import attn_pass
from attn_pass.model import formula
from attn_pass.model.expression import DOT, Const, apply
from attn_pass.report.site import SiteReport

Tensor = torch.Tensor


def site_of(program: Callable[..., Tensor], *inputs: Tensor) -> SiteReport:
    report = attn_pass.explain(program, *inputs, attn_pass_options={"choose": "fused", "on_error": "raise"})
    (site,) = report.sites
    return site


def qkv(rows: int = 6, keys: int = 10) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 4, rows, 8), torch.randn(2, 4, keys, 8), torch.randn(2, 4, keys, 8)


def grid(rows: int, keys: int) -> tuple[Tensor, Tensor]:
    return torch.arange(rows)[:, None], torch.arange(keys)[None, :]


MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "causal": lambda i, j: j <= i,
    "bottom right": lambda i, j: j <= i + 4,
    "window": lambda i, j: (j <= i) & (i - j < 3),
    "chunks": lambda i, j: (j // 4 == i // 4) & (j <= i),
    "prefix or causal": lambda i, j: (j < 2) | (j <= i),
    "keys": lambda i, j: (j >= 1) & (j <= 7) & (i >= 0),
}


@pytest.mark.parametrize("name", MASKS)
def test_the_condition_is_the_programs(name: str) -> None:
    keep = MASKS[name]

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = grid(q.shape[2], k.shape[2])
        return (q @ k.mT * 0.5).masked_fill(~keep(i, j), float("-inf")).softmax(-1) @ v

    site = site_of(program, *qkv())
    i, j = grid(6, 10)
    holds = eval(site.formula["keep"], {"__builtins__": {}}, {"i": i, "j": j, "b": 0, "h": 0})
    assert torch.equal(torch.as_tensor(holds).expand(6, 10), keep(i, j)), site.formula
    assert site.formula["else"] == "-inf" and site.formula["score"] == "0.5 * dot(q, k)"


def test_what_keeps_every_key_has_no_condition() -> None:
    site = site_of(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, *qkv())
    assert site.formula == {"score": "dot(q, k)", "result": "softmax(score) @ v"}


def test_tensors_are_named_with_what_they_are() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, pad: Tensor) -> Tensor:
        scores = (q @ k.mT + bias).masked_fill(~pad[:, None, None, :], -1e30)
        return scores.softmax(-1) @ v

    site = site_of(program, *qkv(), torch.randn(4, 1, 10), torch.ones(2, 10, dtype=torch.bool))
    bias = next(name for name, text in site.formula.items() if text == "(4, 1, 10) float32, input")
    pad = next(name for name, text in site.formula.items() if text == "(2, 10) bool, input")
    assert site.formula["score"] == f"dot(q, k) + {bias}[h, 0, j]"
    assert site.formula["keep"].startswith(f"{pad}[b, j]") and site.formula["else"] == "-1e+30"


def test_a_soft_cap_and_dropout_are_in_the_formula() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.dropout((30.0 * torch.tanh(q @ k.mT / 30.0)).softmax(-1), 0.25, True) @ v

    reported = site_of(program, *qkv()).formula
    assert reported["score"] == "30.0 * tanh(dot(q, k) / 30.0)"
    assert reported["result"] == "dropout(softmax(score), 0.25) @ v"


def test_grouped_heads_and_rows_have_numbered_axes() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        return (q @ k.mT + slopes[:, None, None]).softmax(-1) @ v

    q, k, v = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 10, 8), torch.randn(1, 2, 10, 8)
    assert site_of(program, q, k, v, torch.randn(4)).formula["score"] == "dot(q, k) + t0[2 * h0 + h1]"


def test_a_score_that_shares_its_parts_is_not_written_out() -> None:
    doubled = DOT
    for _ in range(60):
        doubled = apply("tanh", apply("add", doubled, doubled))  # 2**60 terms as text
    began = time.perf_counter()
    assert formula._terms(doubled, {}) > 2**60
    assert time.perf_counter() - began < 1.0
    assert formula._terms(apply("add", DOT, Const(2.0)), {}) == 3


def test_a_formula_that_fails_leaves_no_site(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_pass import engine

    def fails(_: object) -> dict[str, str]:
        raise RuntimeError("put in on purpose")

    monkeypatch.setattr(engine, "formula_of", fails)
    with pytest.warns(attn_pass.AttnPassWarning, match="put in on purpose"):
        options = {"choose": "fused"}
        report = attn_pass.explain(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, *qkv(), attn_pass_options=options)
    assert report.sites[0].outcome == "rewritten" and report.sites[0].formula == {}
