"""Weights that are divided by their sum after the softmax, and sums that are not 1."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from against_eager import qkv, randn, same
from torch import Tensor

import attn_pass

KEEP = randn(2, 1, 8, 8, seed=5) > -0.3
Change = Callable[[Tensor], Tensor]

READ: dict[str, Change] = {
    "their sum": lambda w: w / w.sum(-1, keepdim=True),
    "their sum and a little": lambda w: w / (w.sum(dim=-1, keepdim=True) + 1e-8),
    "their sum and a number that counts": lambda w: w / (0.25 + w.sum(-1)[..., None]),
    "their sum, clamped": lambda w: w / w.sum(-1, keepdim=True).clamp(min=1e-9),
    "their norm": lambda w: w / torch.linalg.vector_norm(w, 1, -1, keepdim=True),
}
LEFT: dict[str, Change] = {
    "the sum of columns": lambda w: w / w.sum(-2, keepdim=True),
    "the sum, turned": lambda w: w / w.sum(-1).unsqueeze(-2),
    "the sum of some": lambda w: w / w[..., 1:].sum(-1, keepdim=True),
    "the sum of the first": lambda w: w / w[..., :4].sum(-1, keepdim=True),
    "the sum of a part": lambda w: w / w.split(4, -1)[0].sum(-1, keepdim=True),
    "the sum of them and of ones": lambda w: w / F.pad(w, (0, 1), value=1.0).sum(-1, keepdim=True),
    "the sum of them and of others": lambda w: w / torch.cat([w, randn(2, 2, 8, 3).abs()], -1).sum(-1, keepdim=True),
    "twice their sum": lambda w: w / w.repeat(1, 1, 1, 2).sum(-1, keepdim=True),
    "the sum of what is left of them": lambda w: (lambda x: x / x.sum(-1, keepdim=True))(w * KEEP),
    "the sum of squares": lambda w: w / w.square().sum(-1, keepdim=True),
    "their norm of two": lambda w: w / torch.linalg.vector_norm(w, 2, -1, keepdim=True),
    "the sum less a number": lambda w: w / (w.sum(-1, keepdim=True) - 0.5),
    "the sum, clamped above 1": lambda w: w / w.sum(-1, keepdim=True).clamp(min=2.0),
    "the sum and one of each row": lambda w: w / (w.sum(-1, keepdim=True) + randn(8, 1).abs()),
}


def program(change: Change) -> Callable[..., Tensor]:
    return lambda q, k, v: change(torch.softmax(q @ k.mT * 0.25, -1)) @ v


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", list(READ))
def test_read(name: str, grad: bool) -> None:
    same(program(READ[name]), *qkv(grad=grad), grad=grad, rewritten=1)


def is_not_undone(fn: Callable[..., Tensor]) -> bool:
    """Whether the division stays: the site is left, or its weights stay beside the kernel."""
    (site,) = same(fn, *qkv()).sites
    return site.outcome == "left" or site.reason.endswith("and stay")


@pytest.mark.parametrize("name", list(LEFT))
def test_left(name: str) -> None:
    assert is_not_undone(program(LEFT[name]))


def test_what_a_sink_leaves_of_the_weights_does_not_sum_to_one() -> None:
    def joined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.cat([q @ k.mT, torch.zeros(2, 2, 8, 1)], -1)
        weights = torch.softmax(scores, -1)[..., :-1]
        return (weights / weights.sum(-1, keepdim=True)) @ v

    def softmax_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        e = torch.exp(q @ k.mT * 0.25)
        weights = e / (1 + e.sum(-1, keepdim=True))
        return (weights / weights.sum(-1, keepdim=True)) @ v

    assert is_not_undone(joined)
    assert is_not_undone(softmax_one)


def test_dropped_out_weights_do_not_sum_to_one() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.nn.functional.dropout(torch.softmax(q @ k.mT, -1), 0.5)
        return (weights / weights.sum(-1, keepdim=True)) @ v

    with attn_pass.record() as report:
        torch.compile(fn, backend=attn_pass.wrap("eager", choose="fused", on_error="raise"))(*qkv())
    assert [s.outcome for s in report.sites] == ["left"]


@pytest.mark.parametrize("decompose", [False, True], ids=["export", "decomposed"])
@pytest.mark.parametrize("name", list(READ))
def test_exported(name: str, decompose: bool) -> None:
    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return program(READ[name])(q, k, v)

    exported = torch.export.export(Module(), qkv())
    if decompose:
        exported = exported.run_decompositions()
    report = attn_pass.rewrite(exported, choose="fused", on_error="raise")
    assert [s.outcome for s in report.sites] == ["rewritten"], [s.reason for s in report.sites]
    torch.testing.assert_close(exported.module()(*qkv()), Module()(*qkv()), atol=1e-5, rtol=1e-5)


def test_half_precision() -> None:
    same(program(READ["their sum"]), *qkv(dtype=torch.bfloat16), rewritten=1, twice=3.0)
