"""A learned bias by positions beside a padding mask, as T5 adds it: the mask is a condition, the bias masks nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from padded_encoders import LOWEST, B, E, H, L, ids, masks, packed, ran
from torch import Tensor, nn
from torch.nn import functional as F

from attn_pass.devices.cpu.kernel import build

pytestmark = pytest.mark.skipif(bool(build.missing()), reason="no compiler for the CPU kernel")


class Biased(nn.Module):
    """Two layers with one table of biases; ``spelling`` says how bias and mask come together."""

    def __init__(self, spelling: str = "added", looked_up: bool = True, bucketed: bool = False) -> None:
        super().__init__()
        self.words, self.table = nn.Embedding(50, E), nn.Embedding(2 * L, H)
        self.matrix = nn.Parameter(torch.randn(L, L, H), requires_grad=False)
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(E, E) for _ in range(4)) for _ in range(2))
        self.spelling, self.looked_up, self.bucketed = spelling, looked_up, bucketed

    def forward(self, words: Tensor, mask: Tensor) -> Any:
        x, position = self.words(words), torch.arange(L)
        distance = position[None] - position[:, None]
        place = (3 * (distance.abs() + 1).log()).long() if self.bucketed else distance + L
        numbers = self.table(place) if self.looked_up else self.matrix
        bias, keep = numbers.permute(2, 0, 1)[None], mask.bool()[:, None, None, :]
        lowest = torch.finfo(bias.dtype).min
        for query, key, value, out in self.layers:
            q, k, v = (one(x).view(B, L, H, E // H).transpose(1, 2) for one in (query, key, value))
            if self.spelling == "call":
                y = F.scaled_dot_product_attention(q, k, v, torch.where(keep, bias, lowest), scale=1.0)
            else:
                y = (q @ k.transpose(2, 3) + bias + torch.where(keep, 0.0, lowest).to(bias)).softmax(-1) @ v
            x = x + out(y.transpose(1, 2).reshape(B, L, E))
        return (x * mask[..., None]).sum(1)


@pytest.mark.parametrize("spelling", ["added", "call"])
@pytest.mark.parametrize("padding_left", [False, True])
def test_a_table_of_biases(spelling: str, padding_left: bool) -> None:
    """Also with a sequence that is fully masked: its rows average all values."""
    region = packed(Biased(spelling), masks(padding_left))
    assert region.packed == 2


def test_a_table_that_is_frozen() -> None:
    """With Inductor's ``freezing`` parameters are attributes of the graph."""
    with torch._inductor.config.patch(freezing=True):
        assert packed(Biased(), masks()[:1]).packed == 2


@pytest.mark.parametrize("bucketed", [False, True])
def test_positions_of_rows_that_lie_anywhere(bucketed: bool) -> None:
    """By buckets the kernel gets one vector of distances, and rows that lie between others stay in their places."""
    region = packed(Biased(bucketed=bucketed), [(torch.rand(B, L) < 0.5).long() for _ in range(3)])
    assert region.packed == 2


def test_a_matrix_that_is_passed_in_may_mask() -> None:
    """Where it does, a row's keys that are left are those of the padding mask: eager averages all of them."""
    model = Biased(looked_up=False)
    model.matrix[:, :7] = LOWEST
    regions, results, wanted = ran(model, masks())
    assert regions == []
    for result, expected in zip(results, wanted):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_strict_numerics_assume_nothing_of_a_table() -> None:
    regions, _, _ = ran(Biased(), masks()[:1], numerics="strict")
    assert all(region.outcome == "left" for region in regions)


def test_in_bfloat16() -> None:
    """Its error against the same weights in float32 is at most twice eager's."""
    model = Biased().bfloat16()
    regions, results, wanted = ran(model, masks())
    assert [r.outcome for r in regions] == ["packed"]
    model.float()
    for result, expected, mask in zip(results, wanted, masks(), strict=True):
        exact = model(ids(), mask)
        assert (result - exact).abs().max() <= 2 * (expected - exact).abs().max()


def test_a_bias_of_the_rows_themselves_is_left() -> None:
    class OfRows(Biased):
        def forward(self, words: Tensor, mask: Tensor) -> Any:
            x = self.words(words)
            query, key, value, out = self.layers[0]
            q, k, v = (one(x).view(B, L, H, E // H).transpose(1, 2) for one in (query, key, value))
            bias = torch.tanh(x @ x.mT)[:, None]
            keep = mask.bool()[:, None, None, :]
            y = F.scaled_dot_product_attention(q, k, v, torch.where(keep, bias, float("-inf")))
            return out(y.transpose(1, 2).reshape(B, L, E))[:, 0]

    batches = [m for m in masks() if m.any(1).all()]
    regions, results, wanted = ran(OfRows(), batches)
    assert all(region.outcome == "left" for region in regions)
    for result, expected in zip(results, wanted):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_dropout_inside_an_attention_draws_what_it_draws_with_padding() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.qkv = nn.Embedding(50, E), nn.ModuleList(nn.Linear(E, E) for _ in range(3))

        def forward(self, words: Tensor, mask: Tensor) -> Tensor:
            x = self.words(words)
            q, k, v = (one(x).view(B, L, H, E // H).transpose(1, 2) for one in self.qkv)
            y = F.scaled_dot_product_attention(q, k, v, mask.bool()[:, None, None, :], dropout_p=0.3)
            return y.transpose(1, 2).reshape(B, L, E)[:, 0]

    model, results = Dropped(), []
    for unpad in (True, False):
        torch.manual_seed(1)
        regions, (result,), (eager,) = ran(model, [m for m in masks() if m.any(1).all()][:1], unpad=unpad)
        results.append(result)
        assert not torch.equal(result, eager)
        assert [region.outcome for region in regions] == ["packed"] * unpad
    torch.testing.assert_close(*results)
