"""Batches of several sizes through one program: without padding, ragged, others than it was compiled for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from padded_encoders import B, E, Encoder, L, first, mean
from torch import Tensor, nn

import attn_pass
from attn_pass.devices.cpu.kernel import build
from attn_pass.report.region import RegionReport

pytestmark = pytest.mark.skipif(bool(build.missing()), reason="no compiler for the CPU kernel")
LENGTHS: dict[str, tuple[int, tuple[int, ...]]] = {
    "some padding": (L, (24, 5, 11, 1)),
    "none": (L, (L,) * B),
    "one sequence is full, and all others are a token": (L, (1, L, 1, 1)),
    "very ragged": (L, (2, 23, 3, 9)),
    "more sequences": (L, (24, 1, 2, 3, 5, 8, 13, 21, 1, 24, 7)),
    "fewer and shorter": (5, (5, 2)),
    "longer than any of them": (17, (3, 1, 12)),
    "some padding again": (L, (24, 5, 11, 1)),
}
"""The positions of a batch, and how many tokens each of its sequences has."""
Batch = tuple[Tensor, Tensor]


def batches(left: bool = False) -> list[Batch]:
    """Tokens and masks."""
    made = []
    for size, lengths in LENGTHS.values():
        mask = (torch.arange(size) < torch.tensor(lengths)[:, None]).long()
        made.append((torch.randint(0, 50, mask.shape), mask.flip(1) if left else mask))
    return made


def served(
    model: nn.Module, given: list[Batch], backend: Any, compare: Callable[[Any, Any, Tensor], None], **more: Any
) -> list[RegionReport]:
    """The regions of one program that serves all batches, which is compiled once."""
    torch._dynamo.reset()
    compiled = torch.compile(model.eval(), backend=backend, fullgraph=True, dynamic=True, **more)
    with torch.no_grad(), attn_pass.record() as report, torch._dynamo.config.patch(error_on_recompile=True):
        for words, mask in given:
            compare(compiled(words, mask), model(words, mask), mask)
    return list(report.regions)


def equal(result: Tensor, expected: Tensor, mask: Tensor) -> None:
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def equal_where_kept(result: Tensor, expected: Tensor, mask: Tensor) -> None:
    equal(result[mask.bool()], expected[mask.bool()], mask)
    assert not result[mask == 0].any()


def eagerly(**options: Any) -> Callable[..., Any]:
    return attn_pass.wrap("eager", choose="fused", targets=("cpu_kernel",), on_error="raise", **options)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("after", [first, mean])
def test_one_program_serves_every_size(after: Callable[..., Any], by_hand: bool) -> None:
    (region,) = served(Encoder(after, eager=by_hand), [*batches(), *batches(left=True)], eagerly(), equal)
    assert region.packed == 2 and all(isinstance(size, str) for size in region.rows)


def test_rows_of_every_size_leave_as_zeros_by_your_word() -> None:
    model = Encoder(lambda model, x, mask: x, eager=False)
    (region,) = served(model, batches(), eagerly(assume_padding_unused=True), equal_where_kept)
    assert region.packed == 2


class Windowed(Encoder):
    """Rows see those that lie at most two before them or behind: distances count, so that rows between are kept."""

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        at = torch.arange(ids.shape[1])
        near = (at[:, None] - at[None]).abs() <= 2
        x = self.words(ids)
        q, k, v = (one(x).view(*x.shape[:2], 2, E // 2).transpose(1, 2) for one in self.layers[0].qkv)
        keep = near & mask.bool()[:, None, None, :]
        lowest = torch.finfo(torch.float32).min
        y = (q @ k.transpose(2, 3)).masked_fill(~keep, lowest).softmax(-1) @ v
        return mean(self, y.transpose(1, 2).reshape(x.shape), mask)


def test_a_window_over_every_size() -> None:
    (region,) = served(Windowed(mean, layers=1), [*batches(), *batches(left=True)], eagerly(), equal)
    assert region.packed == 1


@pytest.mark.slow
def test_inductor_compiles_one_program_for_every_size() -> None:
    own = {"choose": "fused", "targets": ("cpu_kernel",), "on_error": "raise"}
    (region,) = served(Encoder(mean, eager=False), batches(), attn_pass.backend, equal, options=own)
    assert region.packed == 2
