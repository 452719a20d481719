"""Encoders with padding for tests: their masks, and one program compared with eager for several batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attn_pass
from attn_pass.report.region import RegionReport

B, L, H, E = 4, 24, 2, 16
LOWEST = torch.finfo(torch.float32).min
LENGTHS = ((24, 5, 11, 1), (3, 24, 0, 9), (24, 24, 24, 24))


def masks(left: bool = False) -> list[Tensor]:
    """Masks of several batches: lengths that differ, one that is fully masked, none with padding."""
    made = [(torch.arange(L) < torch.tensor(n)[:, None]).long() for n in LENGTHS]
    return [m.flip(1) for m in made] if left else made


def right() -> list[Tensor]:
    """Those with padding on the right in which no sequence is fully masked."""
    return [m for m in masks() if m.any(1).all()]


def anywhere() -> list[Tensor]:
    """Masks of keys that lie anywhere, the middle one among them."""
    made = [(torch.rand(B, L) < 0.5).long() for _ in range(2)]
    for mask in made:
        mask[:, L // 2] = 1
    return made


class Layer(nn.Module):
    """A layer of an encoder as transformers writes it, with its attention by hand or by torch's call."""

    def __init__(self, eager: bool = True) -> None:
        super().__init__()
        self.eager = eager
        self.qkv = nn.ModuleList(nn.Linear(E, E) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(E, E), nn.Linear(E, 2 * E), nn.Linear(2 * E, E)
        self.norm, self.norm_after = nn.LayerNorm(E), nn.LayerNorm(E)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (one(x).view(batch, length, H, E // H).transpose(1, 2) for one in self.qkv)
        if self.eager:
            # Of a number outside of a program Dynamo makes an input where sizes are dynamic.
            lowest = torch.finfo(torch.float32).min
            added = torch.where(keep[:, None, None, :].expand(batch, 1, length, length), 0.0, lowest)
            y = self.dropout((q @ k.transpose(2, 3) * 0.4 + added).softmax(-1)) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, keep[:, None, None, :], scale=0.4)
        y = y.transpose(1, 2).contiguous().reshape(batch, length, E)
        x = self.norm(self.dropout(self.out(y)) + x)
        return self.norm_after(self.dropout(self.down(F.gelu(self.up(x)))) + x)


class Encoder(nn.Module):
    """Embeddings, two layers, and what becomes of the rows: ``after(self, x, mask)``; ``between`` after the first."""

    def __init__(
        self,
        after: Callable[..., Any],
        between: Callable[..., Tensor] | None = None,
        eager: bool = True,
        layers: int = 2,
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, E), nn.Embedding(L, E)
        self.norm, self.head = nn.LayerNorm(E), nn.Linear(E, 3)
        self.layers = nn.ModuleList(Layer(eager) for _ in range(layers))
        self.after, self.between = after, between

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        keep = mask.bool()
        x = self.norm(self.words(ids) + self.places(torch.arange(ids.shape[1]))[None])
        for number, layer in enumerate(self.layers):
            x = layer(x, keep)
            if self.between is not None and number == 0:
                x = self.between(x, keep)
        return self.after(self, x, mask)


def first(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return torch.tanh(model.head(x[:, 0]))


def mean(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    weights = mask.unsqueeze(-1).expand(x.size()).float()
    return model.head((x * weights).sum(1) / weights.sum(1).clamp(min=1e-9))


def ids() -> Tensor:
    return torch.randint(0, 50, (B, L))


def ran(model: nn.Module, batches: list[Tensor], **options: Any) -> tuple[list[RegionReport], list[Any], list[Any]]:
    """The regions of one program, and its results with the pass and in eager for every batch."""
    torch._dynamo.reset()
    model = model.eval()
    words = ids()
    dynamic = options.pop("dynamic", None)
    backend = attn_pass.wrap("eager", choose="fused", targets=("cpu_kernel",), on_error="raise", **options)
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    with torch.no_grad(), attn_pass.record() as report, torch._dynamo.config.patch(error_on_recompile=True):
        results = [compiled(words, mask) for mask in batches]
        wanted = [model(words, mask) for mask in batches]
    return report.regions, results, wanted


def compiled_once(model: nn.Module) -> list[RegionReport]:
    """The regions of a program that Inductor compiles once for all batches; their results are eager's."""
    torch._dynamo.reset()
    words = ids()
    own = {"choose": "fused", "targets": ("cpu_kernel",), "on_error": "raise"}
    compiled = torch.compile(model, backend=attn_pass.backend, options=own)
    with torch.no_grad(), attn_pass.record() as report, torch._dynamo.config.patch(error_on_recompile=True):
        for mask in masks():
            torch.testing.assert_close(compiled(words, mask), model(words, mask), rtol=1e-4, atol=1e-5)
    return list(report.regions)


def packed(model: nn.Module, batches: list[Tensor] | None = None, **options: Any) -> RegionReport:
    """The one region of a model, after its results were compared with eager's."""
    regions, results, wanted = ran(model, masks() if batches is None else batches, **options)
    for result, expected in zip(results, wanted):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    (region,) = regions
    assert region.outcome == "packed", region.reason
    return region


def left(model: nn.Module, batches: list[Tensor] | None = None, **options: Any) -> RegionReport:
    """The one record of a model that is left, after its results were compared with eager's."""
    regions, results, wanted = ran(model, masks() if batches is None else batches, **options)
    for result, expected in zip(results, wanted):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    (region,) = regions
    assert region.outcome == "left" and region.packed == 0
    return region
