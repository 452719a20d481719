"""Random calls of ``nn.MultiheadAttention`` and encoder layers: every mask with every padding, hint and result."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from against_eager import randn, same
from torch import Tensor, nn

LENGTHS = (1, 2, 5, 7)
MASKS = ("none", "causal", "boolean", "of each head", "added", "added, of each head", "-inf added")
PADDINGS = ("none", "boolean", "added")
PROGRAMS = 10  # a graph: what costs is the compile
NEG_INF = float("-inf")


class Calls(nn.Module):
    """Several drawn calls in one graph: keyword arguments of each beside the module."""

    def __init__(self, layers: list[nn.Module], arguments: list[dict[str, Any]], crossed: list[bool]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.arguments, self.crossed = arguments, crossed

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        results: list[Tensor] = []
        for layer, given, crossed in zip(self.layers, self.arguments, self.crossed):
            fit = {k: _fit(v, x.dtype) for k, v in given.items()}
            if isinstance(layer, nn.MultiheadAttention):
                out, weights = layer(x, *((y, y) if crossed else (x, x)), **fit)
                results += [out] if weights is None or not given.get("average_attn_weights", True) else [out, weights]
            else:
                results.append(layer(x, **fit))
        return results


def _fit(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def masked(kind: str, rows: int, keys: int, batch: int, heads: int, seed: int) -> Tensor | None:
    """A mask that leaves every row its first key."""
    shape = (batch * heads, rows, keys) if "each head" in kind else (rows, keys)
    if kind == "none":
        return None
    if kind == "added" or kind == "added, of each head":
        return randn(*shape, seed=seed)
    hidden = torch.ones(shape, dtype=torch.bool).triu(1) if kind == "causal" else randn(*shape, seed=seed) > 0.4
    hidden[..., 0] = False
    return torch.zeros(shape).masked_fill(hidden, NEG_INF) if kind == "-inf added" else hidden


def padded(kind: str, keys: int, batch: int, seed: int) -> Tensor | None:
    if kind == "none":
        return None
    hidden = randn(batch, keys, seed=seed) > 0.4
    hidden[..., 0] = False
    return hidden if kind == "boolean" else torch.zeros(batch, keys).masked_fill(hidden, NEG_INF)


def consistent(mask: Tensor | None, padding: Tensor | None) -> Tensor | None:
    """Masks of two types are deprecated: they warn, and a warning breaks the graph."""
    if mask is None or padding is None or mask.dtype == padding.dtype:
        return padding
    return padding == NEG_INF if mask.dtype == torch.bool else torch.zeros(padding.shape).masked_fill(padding, NEG_INF)


def drawn(seed: int, layer: bool) -> tuple[Calls, Tensor, Tensor]:
    pick = random.Random(seed)
    batch, rows, keys = pick.choice((1, 2, 3)), pick.choice(LENGTHS), pick.choice(LENGTHS)
    layers: list[nn.Module] = []
    arguments: list[dict[str, Any]] = []
    crossed: list[bool] = []
    torch.manual_seed(seed)
    for number in range(PROGRAMS):
        heads, cross = pick.choice((1, 2, 4)), not layer and pick.random() < 0.5
        count = keys if cross else rows
        mask = masked(pick.choice(MASKS), rows, count, batch, heads, 100 * seed + number)
        padding = consistent(mask, padded(pick.choice(PADDINGS), count, batch, 100 * seed + number + 50))
        hint = mask is not None and pick.random() < 0.3
        if layer:
            options = {"norm_first": pick.random() < 0.5, "activation": pick.choice(("relu", "gelu"))}
            layers.append(nn.TransformerEncoderLayer(16, heads, 24, batch_first=True, **options))
            arguments.append({"src_mask": mask, "src_key_padding_mask": padding, "is_causal": hint})
        else:
            layers.append(nn.MultiheadAttention(16, heads, batch_first=True, bias=pick.random() < 0.8))
            chosen = {"need_weights": pick.random() < 0.5, "average_attn_weights": pick.random() < 0.5}
            arguments.append({"attn_mask": mask, "key_padding_mask": padding, "is_causal": hint, **chosen})
        crossed.append(cross)
    return Calls(layers, arguments, crossed), randn(batch, rows, 16, seed=seed), randn(batch, keys, 16, seed=seed + 1)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_attention(seed: int, grad: bool) -> None:
    calls, x, y = drawn(seed, layer=False)
    with torch.set_grad_enabled(grad):
        report = same(calls, x.requires_grad_(grad), y.requires_grad_(grad), grad=grad, twice=4.0)
    assert len(report.sites) == PROGRAMS and len(report.rewritten) >= PROGRAMS // 2


@pytest.mark.parametrize("seed", range(3, 7))
def test_encoder_layers(seed: int) -> None:
    calls, x, y = drawn(seed, layer=True)
    with torch.no_grad():
        report = same(calls.eval(), x, y, twice=4.0)
    assert len(report.sites) == PROGRAMS and len(report.rewritten) >= PROGRAMS // 2
