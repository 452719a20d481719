"""Nodes that have nothing to do with an attention, on which finding it must not fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_eager import NEG_INF, qkv, randn, same
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.25).softmax(-1) @ v


BESIDE: dict[str, Callable[..., Any]] = {
    "an exponential of a number less a size": lambda q: torch.exp(torch.arange(4.0) - q.shape[-2]),
    "one less a tensor and a size": lambda q: torch.exp(torch.arange(4.0) - (torch.ones(4) + q.shape[-2])),
    "a sum of a product without dimensions": lambda q: (q[0, 0, 0, 0] * q[0, 0, 0, 1]).sum(-1),
    "two of them": lambda q: (q[0, 0, 0, 0] * q[0, 0, 0, 1]).sum(-1) + (q[0, 0, 0, 0] * q[0, 0, 0, 0]).sum(0),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", list(BESIDE))
def test_the_attention_is_found(name: str, dynamic: bool) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return attention(q, k, v), BESIDE[name](q)

    same(run, *qkv(), rewritten=1, dynamic=dynamic)


def test_joined_scores_in_a_functional_gradient() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        def loss(q: Tensor) -> Tensor:
            scores = torch.cat([q @ k[:, :, :4].mT, q @ k[:, :, 4:].mT], -1)
            return (scores.softmax(-1) @ v).sum()

        return attention(q, k, v), torch.func.grad(loss)(q)

    report = same(run, *qkv(), reference=False)
    assert report.rewritten


def test_joined_scores_of_views_by_keyword() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pieces = [torch.transpose(input=q, dim0=1, dim1=2) @ part.mT for part in (k[:, :, :4], k[:, :, 4:])]
        return torch.cat(pieces, -1).softmax(-1) @ v

    q, k, v = qkv()
    same(run, q.transpose(1, 2).contiguous(), k, v, rewritten=1)


def test_a_mask_of_complex_numbers() -> None:
    z = torch.complex(randn(8, 8), randn(8, 8))
    z[:, 5:] = 0
    same(lambda q, k, v: (q @ k.mT).masked_fill(z == 0, NEG_INF).softmax(-1) @ v, *qkv(), rewritten=1)


def test_a_choice_between_values_of_itself_many_times_over() -> None:
    """Each of them would be twice as large as the one before: such an element is loaded."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        position = torch.arange(q.shape[-2])
        document = torch.zeros_like(position)
        for first in range(2, 26):
            document = torch.where(position >= first, document + 1, document)
        return (q @ k.mT * 0.25).masked_fill(document[:, None] != document, NEG_INF).softmax(-1) @ v

    same(run, *qkv(q_len=32, kv_len=32), rewritten=1)
