"""Programs that look as if nothing depended on their padding, or count positions: eager's results, packed or left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from padded_encoders import LOWEST, B, E, Encoder, H, L, anywhere, left, masks, packed, ran, right
from torch import Tensor, nn
from torch.nn import functional as F

import attn_pass
from attn_pass.devices.cpu.kernel import build
from attn_pass.graph.values import Sizes
from attn_pass.padding.rules import Rules

pytestmark = pytest.mark.skipif(bool(build.missing()), reason="no compiler for the CPU kernel")


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
    return x[:, 0] + x.sum(dim=()) / x.numel()


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


@pytest.mark.parametrize("module", ["torch_geometric.nn", "torchvision.ops", "torch", "torch.nn.functional"])
def test_a_function_of_another_package_is_none_of_torch_by_its_name(module: str) -> None:
    """In a package whose name merely begins as torch's does, what is called ``relu`` may be anything."""

    def relu(x: Tensor) -> Tensor:
        return x.cumsum(1)

    relu.__module__ = module
    graph = torch.fx.Graph()
    node = graph.call_function(relu, (graph.placeholder("x"),))
    for each in graph.nodes:
        each.meta["val"] = torch.empty(B, L, E, device="meta")
    assert (Rules(Sizes()).of(node) is None) == (not f"{module}.".startswith("torch."))


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
def test_a_window(after: Callable[..., Any]) -> None:
    """Rows between two that are kept stay, so that distances do; a fully masked row averages all values."""
    packed(Attention(after, within=3), [*right(), *masks(left=True), *anywhere()])


@pytest.mark.parametrize("position", [0, -1])
def test_a_row_of_padding_that_sees_no_key_averages_all_values(position: int) -> None:
    packed(Attention(lambda x, mask: x[:, position], causal=True), [*masks(left=True), *masks()])


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


# ---------------------------------------------------------------- sizes that are equal by chance, and other orders


class Square(nn.Module):
    """As many sequences as positions and as features, and what becomes of the rows: ``after(x, mask)``."""

    def __init__(self, after: Callable[..., Any]) -> None:
        super().__init__()
        self.qkv, self.words = nn.ModuleList(nn.Linear(E, E) for _ in range(3)), nn.Embedding(50, E)
        self.after = after

    def forward(self, words: Tensor, mask: Tensor) -> Any:
        x = self.words(words)
        q, k, v = (one(x).view(E, E, H, E // H).transpose(1, 2) for one in self.qkv)
        y = F.scaled_dot_product_attention(q, k, v, mask.bool()[:, None, None, :])
        return self.after(self.qkv[0](y.transpose(1, 2).reshape(E, E, E)), mask)


@pytest.mark.parametrize(
    "after",
    [
        lambda x, mask: (x * mask).sum(1),
        lambda x, mask: x.masked_fill(mask == 0, 0.0).sum((0, 1)),
        lambda x, mask: torch.where(mask == 0, 0.0, x).sum(1),
        lambda x, mask: (x * mask[None]).sum(0),
        lambda x, mask: (x * mask[:, :, None].permute(2, 0, 1)).sum(2),
        lambda x, mask: (x.permute(2, 1, 0) * mask).sum(0),
        lambda x, mask: torch.ops.aten.numpy_T(x)[:, 0],
    ],
)
def test_a_mask_over_other_dimensions_of_the_same_sizes(after: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    model, words = Square(after).eval(), torch.randint(0, 50, (E, E))
    backend = attn_pass.wrap("eager", choose="fused", targets=("cpu_kernel",), on_error="raise")
    mask = (torch.arange(E) < torch.arange(1, E + 1)[:, None]).long()
    with torch.no_grad():
        result = torch.compile(model, backend=backend, fullgraph=True)(words, mask)
        torch.testing.assert_close(result, model(words, mask), rtol=1e-4, atol=1e-5)


def test_rows_whose_positions_come_first() -> None:
    """As `nn.TransformerEncoder` has them without ``batch_first``."""
    for index in (0, -1, slice(None, 1), (0, slice(None))):
        region = packed(Encoder(lambda model, x, mask, at=index: x.transpose(0, 1)[at], layers=1), right()[:1])
        assert "is read" in region.exits[0]
    packed(Encoder(lambda model, x, mask: x.transpose(0, 1).select(0, 2), layers=1), right()[:1])
    assert left(Encoder(lambda model, x, mask: x.transpose(0, 1)[:, 0], layers=1), right()[:1]).packed == 0


def test_what_leaves_is_as_contiguous_as_it_was() -> None:
    def seen(model: Any, x: Tensor, mask: Tensor) -> Tensor:
        heads = x.view(B, L, H, E // H).transpose(1, 2).contiguous()
        return heads.masked_fill(mask[:, None, :, None] == 0, 0.0).view(B * H, L, -1)

    packed(Encoder(seen, layers=1), right())


@pytest.mark.parametrize(
    "between",
    [
        lambda x, keep: F.relu(x + 0, True) + x,
        lambda x, keep: torch.relu_(x + 0),
        lambda x, keep: (x + 0).mul_(2.0),
        lambda x, keep: x.as_strided(x.shape, x.stride()),
        lambda x, keep: x.view(-1).view(x.shape),
        lambda x, keep: x.view(L, B, E).view(x.shape),
        lambda x, keep: x + x.flatten()[: x.numel()].view(x.shape),
        lambda x, keep: x.index_select(1, torch.arange(L).flip(0)),
        lambda x, keep: x + x.sort(1).values,
        lambda x, keep: x.topk(L, 1).values,
        lambda x, keep: x.take_along_dim(torch.arange(L).flip(0)[None, :, None], 1),
        lambda x, keep: torch.einsum("ble,bme->bme", x, x),
        lambda x, keep: torch.index_put(x, (torch.arange(B),), x.flip(1)),
        lambda x, keep: x.scatter(1, torch.zeros(B, L, E, dtype=torch.long), x.flip(2)),
        lambda x, keep: torch.cat([x[:, 1:], x[:, :1]], 1),
        lambda x, keep: torch.stack(x.unbind(1)[::-1], 1),
        lambda x, keep: x.repeat(2, 1, 1)[1 : B + 1],
        lambda x, keep: F.pad(x, (0, 0, 1, 0))[:, :-1],
        lambda x, keep: x.unfold(1, 3, 1).sum(-1).repeat(1, 2, 1)[:, :L],
        lambda x, keep: x - x.logcumsumexp(1),
        lambda x, keep: F.layer_norm(x, (L, E)),
        lambda x, keep: F.normalize(x),
        lambda x, keep: x / x.norm(),
        lambda x, keep: x * torch.cummax(x, 1).values,
        lambda x, keep: torch.where(x > x.median(), x, 0.0),
        lambda x, keep: x.swapaxes(0, 1).reshape(B, L, E),
    ],
)
def test_routes_to_other_rows(between: Callable[..., Tensor]) -> None:
    """Whatever a route between two layers is: results are eager's, where the region ends, or where it need not."""
    regions, results, wanted = ran(Encoder(lambda model, x, mask: x[:, 0], between), right())
    for result, expected in zip(results, wanted):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    assert regions


class Kept(nn.Module):
    """A buffer that holds the rows of the call before."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder(lambda model, x, mask: x, layers=1, eager=False)
        self.register_buffer("rows", torch.zeros(B, L, E))

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        x = self.encoder(words, mask)
        before = self.rows.sum((1, 2))
        self.rows.copy_(x)
        return x[:, 0, :1] + before[:, None]


def test_rows_that_a_buffer_keeps() -> None:
    torch._dynamo.reset()
    model, other = Kept().eval(), Kept().eval()
    other.load_state_dict(model.state_dict())
    backend = attn_pass.wrap("eager", choose="fused", targets=("cpu_kernel",), on_error="raise")
    compiled, words = torch.compile(model, backend=backend, fullgraph=True), torch.randint(0, 50, (B, L))
    with torch.no_grad():
        for mask in right():
            torch.testing.assert_close(compiled(words, mask), other(words, mask), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "numbers",
    [
        [lambda m: m.float() * 0.5],
        [lambda m: m * -3, lambda m: m * (1 << 40)],  # of one type, so to one program
        [lambda m: (m * 16).to(torch.uint8)],
    ],
    ids=["float", "negative and large", "uint8"],
)
def test_masks_of_other_numbers(numbers: list[Callable[[Tensor], Tensor]]) -> None:
    """A mask is 0 or not: which number it is counts where rows are multiplied by it."""
    batches = [made(m) for made in numbers for m in right()]
    for after in (lambda model, x, mask: (x * mask[..., None]).sum(1) / 64, lambda model, x, mask: x[:, 0]):
        regions, results, wanted = ran(Encoder(after, layers=1), batches)
        for result, expected in zip(results, wanted):
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
        assert regions
