"""Heads that give something for each token: under a mask, or as a loss that ignores labels; and their neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from padded_encoders import B, E, Encoder, L, left, masks, packed
from torch import Tensor
from torch.nn import functional as F

from attn_pass.devices.cpu.kernel import build

pytestmark = pytest.mark.skipif(bool(build.missing()), reason="no compiler for the CPU kernel")


def batches() -> list[Tensor]:
    return [m for m in masks() if m.any(1).all()]


def labels(mask: Tensor) -> Tensor:
    return torch.where(mask.bool(), torch.arange(L) % 3, -100)


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (lambda model, x, mask: torch.where(mask.bool(), model.head(x).argmax(-1), -100), "replaces rows"),
        (lambda model, x, mask: model.head(x).amin(-1).masked_fill(mask == 0, 0.0), "replaces rows"),
        (lambda model, x, mask: model.head(x).sigmoid() * mask[..., None], "multiplies rows"),
    ],
)
def test_classes_of_tokens_under_a_mask(after: Callable[..., Any], words: str) -> None:
    region = packed(Encoder(after, layers=1), batches())
    assert words in region.exits[0]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses_that_ignore_labels(reduction: str) -> None:
    def flat(model: Any, x: Tensor, mask: Tensor) -> Tensor:
        return F.cross_entropy(model.head(x).view(-1, 3), labels(mask).view(-1), reduction=reduction)

    def by_class(model: Any, x: Tensor, mask: Tensor) -> Tensor:
        weight = torch.tensor([1.0, 2.0, 0.5])
        logits = model.head(x).transpose(1, 2)
        return F.cross_entropy(logits, labels(mask), weight=weight, label_smoothing=0.1, reduction=reduction)

    def of_logarithms(model: Any, x: Tensor, mask: Tensor) -> Tensor:
        return F.nll_loss(model.head(x).log_softmax(-1).view(-1, 3), labels(mask).view(-1), reduction=reduction)

    for after in (flat, by_class, of_logarithms):
        assert "ignores labels of -100" in packed(Encoder(after, layers=1), batches()[:1]).exits[0]


def test_rows_that_a_mask_selects() -> None:
    """How many there are is known at run time: Dynamo takes that in a graph if it is told to."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        region = packed(Encoder(lambda model, x, mask: model.head(x[mask.bool()]), layers=1), batches())
        assert "a mask selects rows" in region.exits[0]
        packed(Encoder(lambda model, x, mask: x[mask == 0].sum(0), layers=1), batches())


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        (lambda model, x, mask: model.head(x).argmax(1), "argmax may mix"),
        (lambda model, x, mask: model.head(x).argmax(), "argmax may mix"),
        (lambda model, x, mask: model.head(x).argmax(-1), "in the result"),
        (lambda model, x, mask: F.mse_loss(x, x.detach() * 0.5), "mse_loss may mix"),
        (lambda model, x, mask: F.cross_entropy(x, torch.zeros(B, E, dtype=torch.long)), "cross_entropy may mix"),
    ],
)
def test_heads_that_see_padding(after: Callable[..., Any], reason: str) -> None:
    assert reason in left(Encoder(after, layers=1), batches()[:1]).reason
