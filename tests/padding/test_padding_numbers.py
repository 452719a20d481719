"""Padding masks that are numbers, added to the scores in inference: which of them rule a key out."""

from __future__ import annotations

import pytest
import torch
from padded_encoders import LOWEST, B, H, L, ids, left, masks, packed, ran
from torch import Tensor, nn

from attn_pass.devices.cpu.kernel import build

pytestmark = pytest.mark.skipif(bool(build.missing()), reason="no compiler for the CPU kernel")
E = 32


class Encoder(nn.Module):
    """One layer of few heads, whose mask is made of ones and zeros as BERT's first code makes it."""

    def __init__(self, fill: float, turned: bool = False) -> None:
        super().__init__()
        self.words, self.qkv, self.out = nn.Embedding(50, E), nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.fill, self.turned = fill, turned

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        kept = mask[:, None, None, :].float()
        added = (kept - 1.0) * -self.fill if self.turned else (1.0 - kept) * self.fill
        x = self.words(ids)
        q, k, v = (t.view(*ids.shape, H, E // H).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = (q @ k.transpose(2, 3) * 0.4 + added).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(*ids.shape, E) + x)[:, 0]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("fill", [LOWEST, -1e30, -1e9])
def test_a_number_that_leaves_no_weight(fill: float, turned: bool) -> None:
    """Also of a sequence that is fully masked: the mean of its values, or its softmax."""
    assert packed(Encoder(fill, turned)).packed == 1


@pytest.mark.parametrize("turned", [False, True])
def test_a_number_that_may_leave_one_is_told(turned: bool) -> None:
    region = left(Encoder(-1e4, turned))
    assert region.reason.startswith("10000 in the mask that is added to its scores leaves masked keys a weight")


def test_numbers_that_are_given_are_compared_when_the_program_runs() -> None:
    """Whatever they are: a mask, a bias that masks nothing, or one whose every number is low."""

    class Given(Encoder):
        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            q, k, v = (t.view(*ids.shape, H, E // H).transpose(1, 2) for t in self.qkv(self.words(ids)).chunk(3, -1))
            y = (q @ k.transpose(2, 3) * 0.4 + mask[:, None, None, :]).softmax(-1) @ v
            return self.out(y.transpose(1, 2).reshape(*ids.shape, E))[:, 0]

    given = [(1.0 - m.float()) * -1e9 for m in masks()]
    given += [torch.randn(B, L) * 3, torch.randn(B, L) - 2e9, (1.0 - masks()[0].float()) * -1e4]
    assert packed(Given(0.0), given).packed == 1


def test_a_row_with_nan_in_its_mask_is_nan() -> None:
    class Given(Encoder):
        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            q, k, v = (t.view(*ids.shape, H, E // H).transpose(1, 2) for t in self.qkv(self.words(ids)).chunk(3, -1))
            return ((q @ k.transpose(2, 3) * 0.4 + mask[:, None, None, :]).softmax(-1) @ v).sum((1, 3))

    mask = torch.zeros(B, L)
    mask[1, 3] = torch.nan
    _, (result,), (wanted,) = ran(Given(0.0), [mask])
    assert torch.equal(result.isnan(), wanted.isnan()) and bool(result[1].isnan().all()), ids
