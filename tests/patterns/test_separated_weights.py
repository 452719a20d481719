"""Weights that are a sum of several softmaxes before one product: a site for each of them, all or none rewritten."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_eager import qkv, randn, same
from torch import Tensor

import attn_pass

Program = Callable[..., Any]
CAUSAL = torch.full((8, 8), float("-inf")).triu(1)


def _two_halves(q: Tensor, k: Tensor, v: Tensor, factor: Tensor) -> Tensor:
    """Differential attention of queries and keys that are two halves each."""
    (q1, q2), (k1, k2) = q.chunk(2, -1), k.chunk(2, -1)
    first, second = (q1 @ k1.mT).softmax(-1), (q2 @ k2.mT).softmax(-1)
    return (first - factor * second) @ v


def _every_other_head(q: Tensor, k: Tensor, v: Tensor, factor: Tensor) -> Tensor:
    """As its authors wrote it: the heads in pairs, the guard before the mask, the softmax in float32."""
    s = torch.nan_to_num(q @ k.mT * 0.25)
    s += torch.full((s.shape[-2], s.shape[-1]), float("-inf"), dtype=s.dtype).triu(1)
    w = torch.softmax(s, -1, dtype=torch.float32).type_as(s)
    w = w.view(w.shape[0], -1, 2, *w.shape[-2:])
    return (w[:, :, 0] - factor * w[:, :, 1]) @ v[:, ::2]


def _in_bmm(q: Tensor, k: Tensor, v: Tensor, factor: Tensor) -> Tensor:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    first, second = torch.bmm(q, k.mT).softmax(-1), torch.bmm(k, q.mT).softmax(-1)
    return torch.bmm((first - factor.exp() * second).to(v.dtype), v)


def _three(q: Tensor, k: Tensor, v: Tensor, factor: Tensor) -> Tensor:
    s = q @ k.mT
    return ((s.softmax(-1) + (s * 2).softmax(-1)) - (s + CAUSAL).softmax(-1) * factor) @ v


def _factor_of_rows(q: Tensor, k: Tensor, v: Tensor, factor: Tensor) -> Tensor:
    gate = q.mean(-1, keepdim=True).sigmoid()
    return ((q @ k.mT).softmax(-1) * gate + (k @ q.mT).softmax(-1) * (factor - gate)) @ v


def _of_one_softmax(q: Tensor, k: Tensor, v: Tensor, factor: Tensor) -> Tensor:
    w = (q @ k.mT).softmax(-1)
    return (w - factor * w.flip(1)) @ v


def _weights_behind(q: Tensor, k: Tensor, v: Tensor, factor: Tensor) -> Tensor:
    first, second = (k @ q.mT).softmax(-2), (q @ k.mT).softmax(-1).mT
    return v.mT @ (first - factor * second)


READ: dict[str, tuple[Program, int]] = {
    "two halves": (_two_halves, 2),
    "every other head": (_every_other_head, 2),
    "in bmm": (_in_bmm, 2),
    "three": (_three, 3),
    "factor of rows": (_factor_of_rows, 2),
    "weights behind": (_weights_behind, 2),
}


def _factor_of_keys(q: Tensor, k: Tensor, v: Tensor, factor: Tensor) -> Tensor:
    return ((q @ k.mT).softmax(-1) - k.mean(-1)[..., None, :] * (k @ q.mT).softmax(-1)) @ v


def _returned(q: Tensor, k: Tensor, v: Tensor, factor: Tensor) -> tuple[Tensor, ...]:
    w = (q @ k.mT).softmax(-1) - factor * (k @ q.mT).softmax(-1)
    return w @ v, w


def _one_returned(q: Tensor, k: Tensor, v: Tensor, factor: Tensor) -> tuple[Tensor, ...]:
    """Beside weights that stay, a product with the others would be one more."""
    first = (q @ k.mT).softmax(-1)
    return (first - factor * (k @ q.mT).softmax(-1)) @ v, first


def _multiplied(q: Tensor, k: Tensor, v: Tensor, factor: Tensor) -> Tensor:
    return ((q @ k.mT).softmax(-1) * (k @ q.mT).softmax(-1)) @ v


def _bias_of_weights(q: Tensor, k: Tensor, v: Tensor, factor: Tensor) -> Tensor:
    return ((q @ k.mT).softmax(-1) + factor) @ v


def _clamped(q: Tensor, k: Tensor, v: Tensor, factor: Tensor) -> Tensor:
    return ((q @ k.mT).softmax(-1) - factor * (k @ q.mT).softmax(-1)).clamp(min=0) @ v


def _one_is_none(q: Tensor, k: Tensor, v: Tensor, factor: Tensor) -> Tensor:
    return ((q @ k.mT).softmax(-1) - factor * q.softmax(-1)[..., :8]) @ v


def _written_between(q: Tensor, k: Tensor, v: Tensor, factor: Tensor) -> Tensor:
    v = v.clone()
    w = (q @ k.mT).softmax(-1) - factor * (k @ q.mT).softmax(-1)
    v.mul_(2)
    out = w @ v
    v.add_(1)
    return out + v


def _dropped(q: Tensor, k: Tensor, v: Tensor, factor: Tensor) -> Tensor:
    w = (q @ k.mT).softmax(-1) - factor * (k @ q.mT).softmax(-1)
    return torch.nn.functional.dropout(w, 0.5) @ v


LEFT: dict[str, Program] = {
    "factor of keys": _factor_of_keys,
    "returned": _returned,
    "one returned": _one_returned,
    "multiplied": _multiplied,
    "bias of weights": _bias_of_weights,
    "clamped": _clamped,
    "one of no product": _one_is_none,
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", READ)
def test_each_softmax_is_a_site(name: str, grad: bool) -> None:
    program, sites = READ[name]
    inputs = (*qkv(2, 4, grad=grad), randn(1, seed=4).squeeze().requires_grad_(grad))
    report = same(program, *inputs, rewritten=sites, grad=grad, choose="fused")
    assert len(report.sites) == sites


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_rounded_before_they_are_added_up(dtype: torch.dtype) -> None:
    """The error is no more than twice that of the weights, which eager rounds as they are added up."""
    same(
        _every_other_head, *qkv(2, 4, 67, 67, dtype=dtype), torch.tensor(0.8, dtype=dtype), rewritten=2, choose="fused"
    )


def test_what_is_rounded_before_it_is_added_up_is_an_assumption() -> None:
    """Results that cancel have the rounding of each, which the weights would not have had."""
    inputs = (*qkv(2, 4), torch.tensor(0.3))
    report = same(_two_halves, *inputs, rewritten=2, choose="fused")
    assert all("rounded each" in text for site in report.sites for text in site.assumptions)
    assert all(site.assumptions for site in report.sites)
    report = same(_two_halves, *inputs, rewritten=0, choose="fused", numerics="strict")
    assert all("rounded each" in site.reason or "added to others" in site.reason for site in report.sites)


@pytest.mark.filterwarnings("error")
def test_under_autocast(caplog: pytest.LogCaptureFixture) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, factor: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return _two_halves(q, k, v, factor)

    report = same(run, *qkv(2, 4), torch.tensor(0.3), choose="fused", reference=False)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], caplog.text
    assert len(report.sites) == 2, [s.reason for s in report.sites]


def test_verified() -> None:
    same(_every_other_head, *qkv(2, 4), torch.tensor(0.3), rewritten=2, choose="fused", verify="graph")


def test_sizes_may_change() -> None:
    inputs = [(*qkv(2, 4, length, length), torch.tensor(0.3)) for length in (8, 13, 29)]
    same(_factor_of_rows, *inputs[0], rewritten=2, choose="fused", dynamic=True, then=inputs[1:])


@pytest.mark.parametrize("name", LEFT)
def test_what_is_no_sum_of_softmaxes_is_left(name: str) -> None:
    same(LEFT[name], *qkv(2, 4), torch.tensor(0.3), rewritten=0, choose="fused")


def test_dropout_of_the_sum_is_left() -> None:
    with attn_pass.record() as report:
        torch.compile(_dropped, backend=attn_pass.wrap("eager", choose="fused"))(*qkv(2, 4), torch.tensor(0.3))
    assert report.sites and all(site.outcome == "left" for site in report.sites)


def test_values_that_are_written_before_the_product_are_read_as_written() -> None:
    same(_written_between, *qkv(2, 4), torch.tensor(0.3), choose="fused")


def test_one_that_is_left_leaves_the_others() -> None:
    """Where it costs less as it is, the product with the sum is back."""
    report = same(_two_halves, *qkv(1, 2, 4, 4), torch.tensor(0.3), rewritten=0, targets=("local",))
    assert {site.outcome for site in report.sites} == {"left"}


@pytest.mark.parametrize("name", ["every other head", "in bmm", "two halves"])
def test_nothing_of_the_sum_is_left_in_an_exported_program(name: str) -> None:
    program, sites = READ[name]

    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, factor: Tensor) -> Any:
            return program(q, k, v, factor)

    inputs = (*qkv(2, 4), torch.tensor(0.3))
    exported = torch.export.export(Model(), inputs)
    report = attn_pass.rewrite(exported, choose="fused", on_error="raise")
    assert [s.outcome for s in report.sites] == ["rewritten"] * sites, [s.reason for s in report.sites]
    names = {str(n.target) for n in exported.graph.nodes}
    assert not any(word in n for n in names for word in ("matmul", "bmm", "softmax", "einsum")), names
    torch.testing.assert_close(exported.module()(*inputs), Model()(*inputs), atol=1e-5, rtol=1e-5)


def test_an_exported_program_that_is_left_is_what_it_was() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, factor: Tensor) -> Tensor:
            return _two_halves(q, k, v, factor)

    exported = torch.export.export(Model(), (*qkv(1, 2, 4, 4), torch.tensor(0.3)))
    before = exported.graph_module.code
    report = attn_pass.rewrite(exported, targets=("local",))
    assert {s.outcome for s in report.sites} == {"left"} and exported.graph_module.code == before
