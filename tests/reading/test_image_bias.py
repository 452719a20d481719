"""Biases over the rows and columns of an image (SAM, ViTDet), read by keys that are numbered through."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from against_eager import randn, same

Q, KEYS = (5, 7), (3, 4)
Biases = tuple[torch.Tensor, torch.Tensor]


def biases(q: torch.Tensor, rel_h: torch.Tensor, rel_w: torch.Tensor) -> Biases:
    rows = q.reshape(q.shape[0], *Q, -1)
    return torch.einsum("bhwc,hkc->bhwk", rows, rel_h), torch.einsum("bhwc,wkc->bhwk", rows, rel_w)


def as_sam(scores: torch.Tensor, rel: Biases) -> torch.Tensor:
    return scores + (rel[0][..., None] + rel[1][..., None, :]).reshape_as(scores)


def as_vitdet(scores: torch.Tensor, rel: Biases) -> torch.Tensor:
    return (scores.view(-1, *Q, *KEYS) + rel[0][..., None] + rel[1][..., None, :]).view(scores.shape)


def columns_first(scores: torch.Tensor, rel: Biases) -> torch.Tensor:
    """Looks like `as_sam`, and numbers the keys down the columns."""
    return scores + (rel[0][..., None, :] + rel[1][..., None]).reshape_as(scores)


def rows_alone(scores: torch.Tensor, rel: Biases) -> torch.Tensor:
    return scores + rel[0].repeat_interleave(KEYS[1], dim=-1).reshape_as(scores)


def tiled_rows(scores: torch.Tensor, rel: Biases) -> torch.Tensor:
    """Looks like `rows_alone`, and gives each key the bias of its number modulo the rows."""
    return scores + rel[0].repeat(1, 1, 1, KEYS[1]).reshape_as(scores)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("bias", [as_sam, as_vitdet, columns_first, rows_alone, tiled_rows])
def test_bias_of_rows_and_columns_reaches_the_kernel(
    bias: Callable[[torch.Tensor, Biases], torch.Tensor], grad: bool, dtype: torch.dtype
) -> None:
    def attention(q, k, v, rel_h, rel_w):  # type: ignore[no-untyped-def]
        scores = bias(q * 0.25 @ k.transpose(-2, -1), biases(q, rel_h, rel_w))
        return torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype) @ v

    shapes = [(6, 35, 16), (6, 12, 16), (6, 12, 16), (5, 3, 16), (7, 4, 16)]
    inputs = [randn(*shape, dtype=dtype, grad=grad, seed=n) for n, shape in enumerate(shapes)]
    same(attention, *inputs, rewritten=1, grad=grad, choose="fused", twice=2.5)


def test_a_part_of_the_scores_written_in_place_is_named() -> None:
    def attention(q, k, v, bias):  # type: ignore[no-untyped-def]
        scores = q @ k.transpose(-2, -1)
        scores[:, ::2] = scores[:, ::2] * bias
        return scores.softmax(-1) @ v

    inputs = [randn(*s, seed=n) for n, s in enumerate([(2, 8, 16), (2, 8, 16), (2, 8, 16), (4, 8)])]
    report = same(attention, *inputs, rewritten=0, choose="fused")
    assert "a part of it is written in place by setitem" in str(report)
