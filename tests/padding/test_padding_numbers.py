"""Padding masks that are numbers, added to the scores in inference: which of them rule a key out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from padded_encoders import LOWEST, B, H, L, ids, left, masks, packed, ran
from torch import Tensor, nn

from attn_pass.devices.cpu.kernel import build

pytestmark = pytest.mark.skipif(bool(build.missing()), reason="no compiler for the CPU kernel")
E = 512


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


WEAK: dict[str, Callable[[Tensor], Tensor]] = {
    "ones less the mask": lambda m: (1.0 - m[:, None, None, :].float()) * -1e4,
    "the mask less one": lambda m: (m[:, None, None, :].float() - 1.0) * 1e4,
    "a view of it afterwards": lambda m: ((1.0 - m.float()) * -1e4)[:, None, None, :],
    "where": lambda m: torch.where(m.bool(), 0.0, -1e4).unsqueeze(1).unsqueeze(2),
    "filled": lambda m: torch.zeros(m.shape).masked_fill(m == 0, -1e4)[:, None, None, :],
    "times and less": lambda m: (m.float() * 1e4 - 1e4)[:, None, None, :],
    "weaker": lambda m: (1.0 - m[:, None, None, :].float()) * -999.0,
    "of words": lambda m: (1.0 - (m * 50256 != 0)[:, None, None, :].float()) * -1e4,
}


def filled_in_place(mask: Tensor) -> Tensor:
    added = torch.zeros(mask.shape)
    added.view(-1).masked_fill_(mask.view(-1) == 0, -1e9)
    return added[:, None, None, :]


STRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "a logarithm": lambda m: (m * 50256 != 0)[:, None, None, :].float().log(),
    "a view afterwards": lambda m: ((1.0 - m.float()) * -1e9).view(B, 1, 1, L),
    "a product of two": lambda m: (1.0 - m[:, None, None, :].float()) * -1e4 * 1e5,
    "filled in place": filled_in_place,
    "two masks": lambda m: torch.where(m[:, None, None, :] > 0, 0.0, -1e4) + (1.0 - m[:, None, None, :].float()) * -1e9,
}


class Added(Encoder):
    def __init__(self, added: Callable[[Tensor], Tensor]) -> None:
        super().__init__(0.0)
        self.added = added

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (t.view(*ids.shape, H, E // H).transpose(1, 2) for t in self.qkv(self.words(ids)).chunk(3, -1))
        y = (q @ k.transpose(2, 3) * 0.4 + self.added(mask)).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(*ids.shape, E))[:, 0]


@pytest.mark.parametrize("name", WEAK)
def test_a_number_that_may_leave_one_is_told(name: str) -> None:
    number = "999" if name == "weaker" else "10000"
    region = left(Added(WEAK[name]))
    assert region.reason.startswith(f"the mask that is added to its scores lowers them by {number} at the most")


@pytest.mark.parametrize("name", STRONG)
def test_other_numbers_of_the_program_are_not_the_mask_s(name: str) -> None:
    batches = masks()[::2] if name == "a logarithm" else None  # a fully masked row is NaN
    assert packed(Added(STRONG[name]), batches).packed == 1


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
