"""Programs that look as if nobody saw their padding, or count positions: results are eager's, packed or left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from padded_encoders import LOWEST, B, E, Encoder, H, L, left, masks, packed, ran
from torch import Tensor, nn
from torch.nn import functional as F

from attn_pass.devices.cpu.kernel import build

pytestmark = pytest.mark.skipif(bool(build.missing()), reason="no compiler for the CPU kernel")


def right() -> list[Tensor]:
    return [m for m in masks() if m.any(1).all()]


def anywhere() -> list[Tensor]:
    made = [(torch.rand(B, L) < 0.5).long() for _ in range(2)]
    for mask in made:
        mask[:, L // 2] = 1
    return made


# ---------------------------------------------------------------- rows that are read by another way


def _gram(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    rows = x.reshape(-1, E)
    return F.linear(rows, rows).sum(-1).view(B, L)[:, 0]


def _as_integers(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    """The sign alone, since eager's last bits are others."""
    return (x.view(torch.int32) >> 31)[:, 0] * 3


def _other_sequences(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return x[torch.arange(0, -B, step=-1), mask.sum(1).clamp(min=1) - 1]


def _of_everything(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return x[:, 0] + x.sum(dim=())


def _attention_pooling(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    weights = model.head(x)[..., :1].masked_fill(mask[..., None] == 0, LOWEST).softmax(1)
    return (x * weights).sum(1)


def _rows_as_a_layout(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return x.reshape(B, L // 2, 2 * E)[:, 0]


def _pairs(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return (x.unsqueeze(0) - x.unsqueeze(1)).abs().sum(0)[:, 0]


def _largest_position(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return x[torch.arange(B), x[:, :, 0].argmax(1)]


def _written_elsewhere(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    whole = torch.zeros(B, L, E)
    whole[:] = x
    return whole.sum(1)


def _half_masked(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return (x * (mask.float() * 0.5 + 0.5)[..., None]).sum(1)


def _labels_in_another_order(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    rows = model.head(x).transpose(0, 1).reshape(-1, 3)
    return F.cross_entropy(rows, torch.where(mask.bool(), 1, -100).T.reshape(-1))


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        (_gram, "linear may mix"),
        (_as_integers, "view may mix"),
        (_other_sequences, "getitem may mix"),
        (_of_everything, "sum may mix"),
        (_attention_pooling, "softmax may mix"),
        (_rows_as_a_layout, "reshape may mix"),
        (_pairs, "sub may mix"),
        (_largest_position, "getitem may mix"),
        (_written_elsewhere, "setitem may mix"),
        (_half_masked, "sum may mix"),
        (_labels_in_another_order, "reshape may mix"),
    ],
)
def test_rows_that_are_seen_after_all(after: Callable[..., Any], reason: str) -> None:
    region = left(Encoder(after, layers=1), right()[:1])
    assert reason in region.reason or any(reason in stop for stop in region.stops), (region.reason, region.stops)


@pytest.mark.parametrize(
    "after",
    [
        lambda model, x, mask: torch.addcmul(x, x[:, :1], x)[:, 0],
        lambda model, x, mask: (x * mask.flip(0)[..., None]).sum(1),
        lambda model, x, mask: (x * (1 - mask)[..., None]).sum(1),
        lambda model, x, mask: (x * (x[..., :1] > 0))[:, 0],
        lambda model, x, mask: x[torch.arange(B), mask.sum(1) * 0 - L],
        lambda model, x, mask: torch.zeros(B, L, E).index_put((torch.arange(B), mask.sum(1) - 1), x[:, 0]).sum(1),
        lambda model, x, mask: (x[:, :1].mean(1) + x[:, -1:].mean(1), x[:, L - 1]),
    ],
)
def test_rows_of_padding_that_are_computed_since_they_are_read(after: Callable[..., Any]) -> None:
    packed(Encoder(after, layers=1), right()[:1])


def test_a_mask_that_is_written_between_two_layers() -> None:
    class Written(Encoder):
        def forward(self, ids: Tensor, mask: Tensor) -> Any:
            keep = mask.bool() & True
            seen, x = keep[:, None, None, :], self.words(ids)
            for number, layer in enumerate(self.layers):
                q, k, v = (one(x).view(B, L, H, E // H).transpose(1, 2) for one in layer.qkv)
                y = F.scaled_dot_product_attention(q, k, v, seen)
                x = x + layer.out(y.transpose(1, 2).reshape(B, L, E))
                keep[:, 2:5] &= number > 0
            return x[:, 0]

    regions, results, wanted = ran(Written(lambda model, x, mask: x), right())
    assert sum(region.packed for region in regions) < 2
    for result, expected in zip(results, wanted):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- where positions count


class Attention(nn.Module):
    """One attention whose mask counts positions, and what becomes of its rows: ``after(x, mask)``."""

    def __init__(self, after: Callable[..., Any], causal: bool = False, within: int | None = None) -> None:
        super().__init__()
        self.qkv, self.words = nn.ModuleList(nn.Linear(E, E) for _ in range(3)), nn.Embedding(50, E)
        self.after, self.causal, self.within = after, causal, within

    def rows(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(one(x).view(B, L, H, E // H).transpose(1, 2) for one in self.qkv)

    def kept(self, mask: Tensor) -> Tensor:
        row, key = torch.arange(L)[:, None], torch.arange(L)[None]
        keep = mask.bool()[:, None, None, :]
        keep = keep & (row >= key) if self.causal else keep
        return keep if self.within is None else keep & ((row - key).abs() <= self.within)

    def forward(self, words: Tensor, mask: Tensor) -> Any:
        q, k, v = self.rows(self.words(words))
        y = (q @ k.transpose(2, 3)).masked_fill(~self.kept(mask), LOWEST).softmax(-1) @ v
        return self.after(y.transpose(1, 2).reshape(B, L, E), mask)


def _mean(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask[..., None]).sum(1)


@pytest.mark.parametrize("after", [_mean, lambda x, mask: x[:, 0], lambda x, mask: x[:, -1]])
@pytest.mark.parametrize("batches", [right, lambda: masks(left=True), anywhere], ids=["right", "left", "anywhere"])
def test_a_window(after: Callable[..., Any], batches: Callable[[], list[Tensor]]) -> None:
    """Rows between two that are kept stay, so that distances do; a row that sees no key averages all values."""
    packed(Attention(after, within=3), batches())


@pytest.mark.parametrize("position", [0, -1])
def test_a_row_of_padding_that_sees_no_key_averages_all_values(position: int) -> None:
    packed(Attention(lambda x, mask: x[:, position], causal=True), masks(left=True))
    packed(Attention(lambda x, mask: x[:, position], causal=True), masks())


def test_a_cross_attention_whose_rows_may_see_no_key_is_no_exit() -> None:
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.attention = Encoder(lambda model, x, mask: x, layers=1), Attention(_mean, causal=True)
            self.q = nn.Parameter(torch.randn(B, H, L, E // H))

        def forward(self, words: Tensor, mask: Tensor) -> Tensor:
            _, k, v = self.attention.rows(self.encoder(words, mask))
            scores = (self.q @ k.transpose(2, 3)).masked_fill(~self.attention.kept(mask), LOWEST)
            return scores.softmax(-1) @ v

    assert "in the result" in left(Cross(), masks(left=True)).reason
