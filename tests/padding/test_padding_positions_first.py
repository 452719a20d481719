"""Tensors whose positions come first, as `nn.MultiheadAttention` and fairseq have them, and masks filled in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import padded_encoders
import pytest
import torch
from padded_encoders import B, E, H, L, anywhere, compiled_once, ids, left, packed, ran, right
from torch import Tensor, nn
from torch.nn import functional as F

import attn_pass
from attn_pass.devices.cpu.kernel import build

pytestmark = pytest.mark.skipif(bool(build.missing()), reason="no compiler for the CPU kernel")
D = E // H


def trained(model: nn.Module, batches: list[Tensor], **options: Any) -> list[Any]:
    """The regions of a model in training, after its gradients were compared with eager's."""
    torch._dynamo.reset()
    model, words = model.eval(), ids()
    backend = attn_pass.wrap("eager", choose="fused", targets=("cpu_kernel",), on_error="raise", **options)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    weights = list(model.parameters())
    with attn_pass.record() as report:
        for mask in batches:
            grads = [torch.autograd.grad(run(words, mask).square().sum(), weights) for run in (compiled, model)]
            torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
    return list(report.regions)


class Modules(nn.Module):
    """Two of torch's own attentions."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.words, self.norm, self.batch_first = nn.Embedding(50, E), nn.LayerNorm(E), batch_first
        self.layers = nn.ModuleList(nn.MultiheadAttention(E, H, batch_first=batch_first) for _ in range(2))

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        x = self.words(words)
        x = x if self.batch_first else x.transpose(0, 1)
        for layer in self.layers:
            x = self.norm(x + layer(x, x, x, key_padding_mask=mask == 0, need_weights=False)[0])
        return x[:, 0] if self.batch_first else x[0]


class Torchs(nn.Module):
    """Torch's own encoder."""

    def __init__(self, batch_first: bool = True, activation: str = "relu") -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(E, H, 2 * E, 0.0, batch_first=batch_first, activation=activation)
        self.words, self.batch_first = nn.Embedding(50, E), batch_first
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        x = self.words(words)
        x = self.layers(x if self.batch_first else x.transpose(0, 1), src_key_padding_mask=mask == 0)
        return x[:, 0] if self.batch_first else x[0]


class Fairseqs(nn.Module):
    """Heads beside sequences behind the positions, (L, B * H, D); ``back`` takes (B * H, L, D) to (L, B, E)."""

    def __init__(self, back: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor] = lambda x: x[0]) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(50, E), nn.LayerNorm(E)
        self.qkv = nn.ModuleList(nn.Linear(E, E) for _ in range(3))
        self.out = nn.ModuleList(nn.Linear(E, E) for _ in range(2))
        self.back, self.after = back, after

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        x = self.words(words).transpose(0, 1)
        for out in self.out:
            q, k, v = (one(x).contiguous().view(L, B * H, D).transpose(0, 1) for one in self.qkv)
            scores = (q @ k.transpose(1, 2)).view(B, H, L, L).masked_fill(mask[:, None, None] == 0, float("-inf"))
            y = scores.view(B * H, L, L).softmax(-1) @ v
            x = self.norm(x + out(self.back(y)))
        return self.after(x)


def _back(y: Tensor) -> Tensor:
    return y.transpose(0, 1).contiguous().view(L, B, E)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "attention, sequences first": lambda: Modules(True),
    "attention, positions first": lambda: Modules(False),
    "encoder, sequences first": lambda: Torchs(True),
    "encoder, positions first": lambda: Torchs(False, "gelu"),
    "fairseq": lambda: Fairseqs(_back),
    "fairseq, permuted": lambda: Fairseqs(lambda y: y.permute(1, 0, 2).clone().reshape(L, -1, E)),
}


@pytest.mark.parametrize("name", MODELS)
def test_an_encoder_whose_positions_come_first(name: str) -> None:
    region = packed(MODELS[name](), [*anywhere(), *right()])
    assert (region.sites, region.packed, region.stops) == (2, 2, ())


@pytest.mark.parametrize("name", ["attention, positions first", "encoder, sequences first", "fairseq"])
def test_a_compiled_encoder_whose_positions_come_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    full = right()
    monkeypatch.setattr(padded_encoders, "masks", lambda: full)  # a fully masked row is NaN, of torch's attentions
    (region,) = compiled_once(MODELS[name]().eval())
    assert region.packed == 2


@pytest.mark.parametrize("name", MODELS)
def test_an_encoder_whose_positions_come_first_in_training(name: str) -> None:
    (region,) = trained(MODELS[name](), [*anywhere(), *right()])
    assert region.packed == 2


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_layer_with_its_activation_is_a_product_of_rows(activation: str) -> None:
    assert packed(Torchs(True, activation), right()).operations["_addmm_activation"] == 2


def test_any_size_of_a_batch_whose_positions_come_first() -> None:
    region = packed(Modules(False), right(), dynamic=True)
    assert region.packed == 2 and region.rows != (B, L)


# ---------------------------------------------------------------- what mixes rows


@pytest.mark.parametrize(
    "back",
    [
        lambda y: y.transpose(0, 1).contiguous().view(B, L, E).transpose(0, 1),
        lambda y: y.transpose(0, 1).contiguous().flip(0).view(L, B, E),
        lambda y: y.contiguous().view(L, B, E),
        lambda y: y.transpose(0, 1).contiguous().view(torch.int32).view(L, B, E).float() * 1e-9,
        lambda y: y.transpose(0, 1).contiguous().view(L, B, E) + y.sum(),
        lambda y: y.transpose(0, 1).contiguous().view(L * B, E).cumsum(0).view(L, B, E),
    ],
)
def test_what_looks_as_if_positions_came_first(back: Callable[[Tensor], Tensor]) -> None:
    model = Fairseqs(back)
    regions, results, wanted = ran(model, right())
    for result, expected in zip(results, wanted):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    assert regions[0].packed < 2


@pytest.mark.parametrize(
    "between",
    [
        lambda rows, linear: linear(rows).cumsum(0),
        lambda rows, linear: linear(rows) + linear(rows).mean(),
        lambda rows, linear: linear(rows.flip(0)),
        lambda rows, linear: F.linear(rows, rows[:E]),
        lambda rows, linear: linear(rows).view(B, L, E).transpose(0, 1),
    ],
)
def test_rows_of_positions_and_sequences_that_are_mixed(between: Callable[..., Tensor]) -> None:
    class Merged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.qkv, self.out = nn.Embedding(50, E), nn.Linear(E, 3 * E), nn.Linear(E, E)

        def forward(self, words: Tensor, mask: Tensor) -> Tensor:
            q, k, v = self.qkv(self.words(words)).view(B, L, 3, H, D).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, mask.bool()[:, None, None, :])
            return between(y.permute(2, 0, 1, 3).reshape(L * B, E), self.out).reshape(L, B, E)[0]

    assert left(Merged(), right()).packed == 0


# ---------------------------------------------------------------- masks that are filled in place


class Filled(nn.Module):
    """Two layers whose mask is made by ``made``, and what is computed beside it."""

    def __init__(self, made: Callable[[Tensor], tuple[Tensor, Any]]) -> None:
        super().__init__()
        self.words, self.made = nn.Embedding(50, E), made
        self.qkv, self.out = (nn.ModuleList(nn.Linear(E, n * E) for _ in range(2)) for n in (3, 1))

    def forward(self, words: Tensor, mask: Tensor) -> Any:
        x, (added, beside) = self.words(words), self.made(mask == 0)
        for qkv, out in zip(self.qkv, self.out):
            q, k, v = qkv(x).view(B, L, 3, H, D).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, added[:, None, None, :])
            x = x + out(y.transpose(1, 2).reshape(B, L, E))
        return x[:, 0] + beside


INF = float("-inf")


def _by_its_result(pad: Tensor) -> tuple[Tensor, Any]:
    return torch.zeros(B, L).masked_fill_(pad, INF), 0.0


def _by_its_memory(pad: Tensor) -> tuple[Tensor, Any]:
    added = torch.zeros_like(pad, dtype=torch.float32)
    before = added + 1
    added.masked_fill_(pad, INF)
    return added, before.sum() + added.exp().sum()


@pytest.mark.parametrize("made", [_by_its_result, _by_its_memory])
def test_a_mask_that_is_filled_in_place(made: Callable[[Tensor], tuple[Tensor, Any]]) -> None:
    assert packed(Filled(made), right()).packed == 2
    (region,) = trained(Filled(made), right())
    assert (region.packed == 2) == (made is _by_its_result)  # else it is not known to mask


def _seen_through_a_view(pad: Tensor) -> tuple[Tensor, Any]:
    added = torch.zeros(B, L)
    seen = added[:, 1:]
    added.masked_fill_(pad, INF)
    return added, seen.exp().sum()


def _of_a_view(pad: Tensor) -> tuple[Tensor, Any]:
    added = torch.zeros(B, L)
    added[:, 1:].masked_fill_(pad[:, 1:], INF)
    return added, 0.0


def _twice(pad: Tensor) -> tuple[Tensor, Any]:
    added = torch.zeros(B, L)
    added.masked_fill_(pad, INF)
    added.masked_fill_(pad.roll(1, 1), INF)
    return added, 0.0


@pytest.mark.parametrize("made", [_seen_through_a_view, _of_a_view, _twice])
def test_a_mask_that_is_filled_and_seen_elsewhere(made: Callable[[Tensor], tuple[Tensor, Any]]) -> None:
    regions = trained(Filled(made), right())
    assert all(region.outcome == "left" for region in regions)


def test_a_mask_that_the_caller_keeps() -> None:
    """Filled in a buffer, which the next call sees."""

    class Buffered(Filled):
        def __init__(self) -> None:
            super().__init__(lambda pad: (self.kept.masked_fill_(pad, INF), 0.0))
            self.register_buffer("kept", torch.zeros(B, L))

    torch._dynamo.reset()
    models = [Buffered().eval() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    backend = attn_pass.wrap("eager", choose="fused", targets=("cpu_kernel",), on_error="raise")
    compiled, words = torch.compile(models[0], backend=backend, fullgraph=True), ids()
    for mask in reversed(right()):
        torch.testing.assert_close(compiled(words, mask), models[1](words, mask), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(models[0].kept, models[1].kept)
