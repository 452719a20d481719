"""Rotary embeddings in every spelling, and what looks like one: operations over parts of a row, or over rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from padded_encoders import B, E, Encoder, H, L, first, masks, mean, packed
from torch import Tensor, nn
from torch.nn import functional as F

import attn_pass
from attn_pass.devices.cpu.kernel import build

pytestmark = pytest.mark.skipif(bool(build.missing()), reason="no compiler for the CPU kernel")
D = E // H
ANGLES = torch.outer(torch.arange(L).float(), 100.0 ** (-torch.arange(0, D, 2) / D))
COS, SIN = (one.repeat_interleave(2, -1) for one in (ANGLES.cos(), ANGLES.sin()))
SWAPPED = torch.arange(D).view(-1, 2).flip(-1).reshape(-1)
SIGN = torch.tensor([-1.0, 1.0]).repeat(D // 2)


def _stacked(x: Tensor) -> Tensor:
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return x * COS + torch.stack((-b, a), -1).flatten(-2) * SIN


def _stacked_in_front(x: Tensor) -> Tensor:
    """At a dimension in front of the rows, which move on."""
    both = torch.stack((x * COS, torch.stack([-x[..., 1::2], x[..., ::2]], dim=4).reshape(x.shape) * SIN))
    return both[0] + both[1]


def _selected(x: Tensor) -> Tensor:
    return x * COS + x.index_select(-1, SWAPPED) * SIGN * SIN


def _indexed(x: Tensor) -> Tensor:
    return x * COS + x[..., SWAPPED] * SIGN * SIN


def _indexed_by_pairs(x: Tensor) -> Tensor:
    """An index of two dimensions, in front of one that is taken whole."""
    pairs = x.transpose(1, 3)[:, SWAPPED.view(-1, 2)].flatten(1, 2).transpose(1, 3)
    return x * COS + pairs * SIGN * SIN


def _indexed_by_a_list(x: Tensor) -> Tensor:
    return x * COS + x.unflatten(-1, (-1, 2))[..., [1, 0]].flatten(-2) * SIGN * SIN


def _complex(x: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(ANGLES), ANGLES)
    return torch.view_as_real(turned).flatten(-2)


ROTATIONS = [
    _stacked,
    _stacked_in_front,
    _selected,
    _indexed,
    _indexed_by_pairs,
    _indexed_by_a_list,
    _complex,
]


class Rotated(nn.Module):
    """Two layers whose queries and keys are turned by their positions."""

    def __init__(self, turned: Callable[[Tensor], Tensor], after: Callable[..., Any] = mean) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, E), nn.Linear(E, 3)
        self.qkv = nn.ModuleList(nn.Linear(E, 3 * E) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(E, E) for _ in range(2))
        self.turned, self.after = turned, after

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        x = self.words(words)
        for qkv, out in zip(self.qkv, self.out):
            q, k, v = qkv(x).view(B, L, 3, H, D).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, mask.bool()[:, None, None, :])
            x = x + out(y.transpose(1, 2).reshape(B, L, E))
        return self.after(self, x, mask)


def _full() -> list[Tensor]:
    return [m for padding_left in (False, True) for m in masks(padding_left) if m.any(1).all()]


@pytest.mark.parametrize("turned", ROTATIONS)
def test_a_rotation_of_heads_mixes_no_rows(turned: Callable[[Tensor], Tensor]) -> None:
    region = packed(Rotated(turned, first), _full())
    assert (region.packed, region.stops) == (2, ())


@pytest.mark.parametrize(
    ("turned", "backend"),
    [(_stacked_in_front, "inductor"), (_indexed_by_pairs, "aot_eager"), (_complex, "aot_eager")],
)
def test_a_rotation_in_training(turned: Callable[[Tensor], Tensor], backend: str) -> None:
    torch._dynamo.reset()
    model, words = Rotated(turned).eval(), torch.randint(0, 50, (B, L))
    own = {"choose": "fused", "targets": ("cpu_kernel",), "on_error": "raise"}
    compiled = torch.compile(model, backend=attn_pass.wrap(backend, **own))
    weights = list(model.parameters())
    with attn_pass.record() as report:
        for mask in _full()[:2]:
            grads = [torch.autograd.grad(run(words, mask).square().sum(), weights) for run in (compiled, model)]
            torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    assert [region.packed for region in report.regions] == [2]


class InPairs(Rotated):
    """Rows whose pairs lie beside each other in memory, in another order than that of their dimensions."""

    def __init__(self) -> None:
        super().__init__(_stacked)
        self.register_buffer("pairs", torch.randn(B, L, E // 2, 2).mT)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        x = torch.view_as_real(torch.view_as_complex(self.pairs.transpose(2, 3)) * (1 + 2j)).flatten(-2)
        q, k, v = self.qkv[0](x).view(B, L, 3, H, D).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, mask.bool()[:, None, None, :])
        return self.after(self, y.transpose(1, 2).reshape(B, L, E), mask)


def test_pairs_that_packing_parts() -> None:
    assert packed(InPairs(), _full()).operations["view_as_complex"] == 1


def test_an_index_that_is_made_of_rows_that_are_computed() -> None:
    model = Encoder(first, lambda x, keep: x.index_select(2, x[:, 1].sum(0).argsort()), eager=False)
    assert packed(model, _full()).packed == 2


# ---------------------------------------------------------------- what mixes rows


def _numbers_of_rows(x: Tensor, keep: Tensor) -> Tensor:
    """As many numbers as rows: each says a place, and all rows are read at all of these."""
    places = (x.sum(-1).abs() * 100).long().flatten() % E
    return x.flatten(0, 1)[:, places].sum(-1, keepdim=True).view(B, L, 1) + x


@pytest.mark.parametrize(
    "between",
    [
        lambda x, keep: torch.stack(x.unbind(0)[::-1]),
        lambda x, keep: torch.stack((x, x.roll(1, 1)), -1).sum(-1),
        lambda x, keep: torch.stack((x, torch.zeros(B, L, E)), 1)[:, 0].cumsum(1),
        lambda x, keep: torch.stack((x, x), 1).flatten(1, 2)[:, ::2].flip(1),
        lambda x, keep: x[:, torch.arange(L).flip(0)],
        lambda x, keep: x[torch.tensor([3, 2, 1, 0])],
        lambda x, keep: x[[3, 2, 1, 0]],
        lambda x, keep: x.transpose(0, 2)[..., [3, 2, 1, 0]].transpose(0, 2),
        lambda x, keep: x.index_select(1, torch.arange(L).flip(0)),
        lambda x, keep: x.index_select(-3, torch.tensor([3, 2, 1, 0])),
        lambda x, keep: x[..., x.sum((0, 1)).argsort()],
        _numbers_of_rows,
    ],
)
def test_what_looks_like_a_rotation_and_mixes_rows(between: Callable[..., Tensor]) -> None:
    """The second layer is behind it, and the first one is not packed with it."""
    model = Encoder(first, between, eager=False)
    assert packed(model, _full()).packed == 1


@pytest.mark.parametrize("dim", [0, 1])
def test_complex_numbers_whose_parts_are_rows(dim: int) -> None:
    """Of two sequences, or two positions."""

    class Paired(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.qkv = nn.Embedding(50, E), nn.Linear(E, 3 * E)

        def forward(self, words: Tensor, mask: Tensor) -> Tensor:
            q, k, v = self.qkv(self.words(words)).view(*words.shape, 3, H, D).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, mask.bool()[:, None, None, :])
            y = y.transpose(1, 2).flatten(2).transpose(dim, 2).contiguous()
            return torch.view_as_real(torch.view_as_complex(y) * 1j).transpose(dim, 2)[:, 0]

    torch._dynamo.reset()
    shape = (2, L) if dim == 0 else (B, 2)
    model, words, mask = Paired().eval(), torch.randint(0, 50, shape), torch.ones(shape).long()
    mask[1, 1:] = 0
    backend = attn_pass.wrap("eager", choose="fused", targets=("cpu_kernel",), on_error="raise")
    with torch.no_grad(), attn_pass.record() as report:
        result = torch.compile(model, backend=backend, fullgraph=True)(words, mask)
        torch.testing.assert_close(result, model(words, mask), rtol=1e-4, atol=1e-5)
    assert "view_as_complex may mix" in report.regions[0].reason
