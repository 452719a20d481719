"""Training on packed rows: losses and gradients are eager's, and what would change a gradient is left."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from padded_encoders import LOWEST, B, E, Encoder, H, L, first, ids, masks, mean
from torch import Tensor, nn
from torch.nn import functional as F

import attn_pass
from attn_pass.devices.cpu.kernel import build
from attn_pass.report.region import RegionReport

pytestmark = pytest.mark.skipif(bool(build.missing()), reason="no compiler for the CPU kernel")


def right() -> list[Tensor]:
    return [m for m in masks() if m.any(1).all()]


def stepped(model: nn.Module, run: Callable[..., Any], given: tuple[Tensor, ...]) -> list[Tensor]:
    """The results of a step, and the gradients of all that has one."""
    model.zero_grad()
    inputs = [x.detach().requires_grad_() if x.is_floating_point() else x for x in given]
    result = run(*inputs)
    results = [result] if isinstance(result, Tensor) else list(result)
    weights = torch.linspace(0.5, 1.5, results[0].numel()).view(results[0].shape)
    (results[0] * weights).sum().backward()
    held = [x.grad for x in (*model.parameters(), *inputs)]
    return [*(x.detach() for x in results), *(torch.zeros(0) if g is None else g for g in held)]


def trained(
    model: nn.Module, batches: list[Tensor], words: Tensor | None = None, tolerance: float = 2e-4, **options: Any
) -> list[RegionReport]:
    """The regions of a model in training, whose results and gradients were compared with eager's for every batch."""
    torch._dynamo.reset()
    words = ids() if words is None else words
    backend = attn_pass.wrap("eager", choose="fused", targets=("cpu_kernel",), on_error="raise", **options)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with attn_pass.record() as report, torch._dynamo.config.patch(error_on_recompile=True):
        for mask in batches:
            got, wanted = (stepped(model, run, (words, mask)) for run in (compiled, model))
            for one, other in zip(got, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance / 10)
    return report.regions


def packed(model: nn.Module, batches: list[Tensor], **given: Any) -> RegionReport:
    (region,) = trained(model.eval(), batches, **given)
    assert region.outcome == "packed", region.reason
    return region


def left(model: nn.Module, batches: list[Tensor], **given: Any) -> RegionReport:
    (region,) = trained(model.eval(), batches, **given)
    assert region.outcome == "left"
    return region


def labels(mask: Tensor) -> Tensor:
    return torch.where(mask.bool(), torch.arange(L) % 3, -100)


def token_loss(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(model.head(x).view(-1, 3), labels(mask).view(-1))


@pytest.mark.parametrize("after", [first, mean, token_loss])
@pytest.mark.parametrize("by_hand", [True, False])
def test_gradients_are_those_of_eager(after: Callable[..., Any], by_hand: bool) -> None:
    batches = [*right(), masks(left=True)[0]] if after is not token_loss else right()
    region = packed(Encoder(after, eager=by_hand), batches, assume_nonempty_rows=by_hand)
    assert region.packed == 2 and "gradients are 0" in region.assumptions[-1]


class Filled(nn.Module):
    """One attention whose scores are replaced where a key is padding."""

    def __init__(self, after: Callable[..., Any]) -> None:
        super().__init__()
        self.qkv, self.words = nn.ModuleList(nn.Linear(E, E) for _ in range(3)), nn.Embedding(50, E)
        self.after = after

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        x = self.words(words)
        q, k, v = (one(x).view(B, L, H, E // H).transpose(1, 2) for one in self.qkv)
        y = (q @ k.transpose(2, 3)).masked_fill(mask[:, None, None, :] == 0, LOWEST).softmax(-1) @ v
        return self.after(y.transpose(1, 2).reshape(B, L, E), mask)


def test_a_sequence_without_keys() -> None:
    """Its rows average all of its values, and the gradients of all of them are those of eager."""
    packed(Filled(lambda x, mask: x[:, 0]), masks())
    packed(Filled(lambda x, mask: (x * mask[..., None]).sum(1)), masks())


def test_half_precision() -> None:
    packed(Encoder(first, eager=False, layers=1).bfloat16(), right(), tolerance=0.06)


def test_gradients_of_positions_are_summed_in_single_precision() -> None:
    """In half precision a sum of many sequences, one by one, would lose what a sum at once keeps."""

    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places, self.qkv = nn.Embedding(L, E), nn.ModuleList(nn.Linear(E, E) for _ in range(3))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            x = x + self.places(torch.arange(L))[None]
            q, k, v = (one(x).view(-1, L, H, E // H).transpose(1, 2) for one in self.qkv)
            y = F.scaled_dot_product_attention(q, k, v, mask.bool()[:, None, None, :])
            x = y.transpose(1, 2).reshape(-1, L, E) * 1e-3 + x
            return (x * mask[..., None]).sum(1)

    torch._dynamo.reset()
    model, words, mask = Placed(), torch.randn(300, L, E), (torch.arange(L) < 20).long().expand(300, L).contiguous()
    wanted = stepped(model, model, (words, mask))[1]
    model = model.bfloat16()
    backend = attn_pass.wrap("eager", choose="fused", targets=("cpu_kernel",), on_error="raise")
    with attn_pass.record() as report:
        got = stepped(model, torch.compile(model, backend=backend, fullgraph=True), (words.bfloat16(), mask))[1]
    assert [region.outcome for region in report.regions] == ["packed"]
    assert (got.float() - wanted).norm() < 0.02 * wanted.norm()


class Given(nn.Module):
    """An encoder whose rows are given, with a gradient of their own."""

    def __init__(self, after: Callable[..., Any], layers: int = 1) -> None:
        super().__init__()
        self.encoder = Encoder(after, layers=layers, eager=False)

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        for layer in self.encoder.layers:
            x = layer(x, mask.bool())
        return self.encoder.after(self.encoder, x, mask)


def test_rows_that_are_given_have_gradients() -> None:
    region = packed(Given(mean), right(), words=torch.randn(B, L, E))
    assert region.packed == 1


def test_an_accuracy_without_gradients_cuts_none_off() -> None:
    """Both read the same rows, the first under no_grad."""

    def scored(model: Any, x: Tensor, mask: Tensor) -> Any:
        with torch.no_grad():
            share = (x * mask[..., None]).sum(1)
        return (x * mask[..., None]).sum(1), share

    packed(Encoder(scored, layers=1, eager=False), right())


def test_rows_that_are_packed_without_gradients_first() -> None:
    class Twice(Given):
        def forward(self, x: Tensor, mask: Tensor) -> Any:
            keep = mask.bool()
            with torch.no_grad():
                stopped = self.encoder.layers[0](x, keep)
            return mean(self.encoder, self.encoder.layers[0](x + stopped, keep), mask)

    assert packed(Twice(mean), right(), words=torch.randn(B, L, E)).packed == 2


def test_a_frozen_encoder_under_a_head_that_is_trained() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = Encoder(lambda model, x, mask: x, layers=1, eager=False), nn.Linear(E, 3)

        def forward(self, words: Tensor, mask: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.encoder(words, mask)
            return F.cross_entropy(self.head(x).view(-1, 3), labels(mask).view(-1))

    packed(Frozen(), right())


def test_weights_that_are_shared_and_used_outside() -> None:
    def tied(model: Any, x: Tensor, mask: Tensor) -> Tensor:
        weights = mask[..., None]
        return (F.linear(x, model.words.weight) * weights).sum(1) + model.words.weight.sum() * 1e-2

    packed(Encoder(tied, layers=1, eager=False), right())


def test_a_batch_of_any_size() -> None:
    """The number of sequences is a symbol: one program, forward and backward."""
    torch._dynamo.reset()
    model = Encoder(mean, layers=1, eager=False).eval()
    backend = attn_pass.wrap("eager", choose="fused", targets=("cpu_kernel",), on_error="raise")
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    with attn_pass.record() as report, torch._dynamo.config.patch(error_on_recompile=True):
        for mask in (*right(), right()[0].repeat(2, 1)[:7]):
            words = ids().repeat(2, 1)[: len(mask)]
            got, wanted = (stepped(model, run, (words, mask)) for run in (compiled, model))
            for one, other in zip(got, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)
    (region,) = report.regions
    assert region.outcome == "packed", region.reason


# ---------------------------------------------------------------- what is added to scores


class Biased(nn.Module):
    """Two attentions that add ``(table + mask)`` to their scores, the table looked up by distance."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.qkv, self.words = nn.ModuleList(nn.Linear(E, E) for _ in range(6)), nn.Embedding(50, E)
        self.table, self.causal = nn.Embedding(2 * L, H), causal

    def numbers(self, keep: Tensor) -> Tensor:
        return torch.where(keep, 0.0, torch.finfo(torch.float32).min)

    def added(self, mask: Tensor) -> Tensor:
        at = torch.arange(mask.shape[1])
        keep = mask.bool()[:, None, None, :]
        if self.causal:
            keep = keep & (at[:, None] >= at)
        bias = self.table(at[:, None] - at[None] + L).permute(2, 0, 1)[None]
        return bias + self.numbers(keep).to(bias)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        x, added = self.words(words), self.added(mask)
        for parts in (self.qkv[:3], self.qkv[3:]):
            q, k, v = (one(x).view(*x.shape[:2], H, E // H).transpose(1, 2) for one in parts)
            y = (q @ k.transpose(2, 3) + added).softmax(-1) @ v
            x = x + y.transpose(1, 2).reshape(x.shape)
        return (x * mask[..., None]).sum(1)


@pytest.mark.parametrize("causal", [False, True])
def test_the_gradient_of_a_learned_bias_is_that_of_eager(causal: bool) -> None:
    """Of its table as well, which is a sum over all sequences, and where one is fully masked."""
    batches = [*masks(), *masks(left=True)]
    if not causal:  # and where keys lie anywhere
        batches += [(torch.rand(B, L) < 0.5).long() for _ in range(3)]
    region = packed(Biased(causal=causal), batches)
    assert (region.packed, region.sites) == (2, 2)
    assert any("is learned and added" in words for words in region.assumptions)


def test_a_learned_bias_beside_a_condition() -> None:
    """By your word no row is fully masked, so that scores are replaced and the bias stays apart."""

    class Filled(Biased):
        def added(self, mask: Tensor) -> Tensor:
            at = torch.arange(L)
            return self.table(at[:, None] - at[None] + L).permute(2, 0, 1)[None]

        def forward(self, words: Tensor, mask: Tensor) -> Tensor:
            x, hidden = self.words(words), mask[:, None, None, :] == 0
            q, k, v = (one(x).view(*x.shape[:2], H, E // H).transpose(1, 2) for one in self.qkv[:3])
            y = (q @ k.transpose(2, 3) + self.added(mask)).masked_fill(hidden, LOWEST).softmax(-1) @ v
            return (y.transpose(1, 2).reshape(x.shape) * mask[..., None]).sum(1)

    assert packed(Filled(), right(), assume_nonempty_rows=True).packed == 1


@pytest.mark.parametrize("after", [first, mean, token_loss])
def test_a_mask_that_is_added(after: Callable[..., Any]) -> None:
    """The gradient of a row that it masks fully passes through it: its sequence is kept whole."""
    region = packed(Encoder(after), right() if after is token_loss else masks())
    assert region.packed == 2 and not any("learned" in words for words in region.assumptions)


class Half(Biased):
    """The lowest number of bfloat16: that of float32 would be -inf there, and eager NaN in fully masked rows."""

    def numbers(self, keep: Tensor) -> Tensor:
        return torch.where(keep, 0.0, torch.finfo(torch.bfloat16).min)


def test_a_learned_bias_in_half_precision() -> None:
    """Gradients are sums of rounded numbers: together they are as near to those in float64 as eager's."""
    torch._dynamo.reset()
    model, words = Half().bfloat16().eval(), ids()
    wide = copy.deepcopy(model).double()
    backend = attn_pass.wrap("eager", choose="fused", targets=("cpu_kernel",), on_error="raise")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with attn_pass.record() as report:
        for mask in masks():
            got, eager, right = (
                stepped(*run, (words, mask)) for run in ((model, compiled), (model, model), (wide, wide))
            )
            errors = [sum(float((a.double() - b).square().sum()) for a, b in zip(each, right)) for each in (got, eager)]
            assert errors[0] <= 4 * errors[1]
    assert [region.packed for region in report.regions] == [2]


def test_batches_of_any_size_beside_a_learned_bias() -> None:
    torch._dynamo.reset()
    model = Biased()
    backend = attn_pass.wrap("eager", choose="fused", targets=("cpu_kernel",), on_error="raise")
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    with attn_pass.record() as report, torch._dynamo.config.patch(error_on_recompile=True):
        for size, lengths in ((L, (24, 5, 11, 1)), (L, (L,) * B), (9, (3, 9, 1)), (17, (1, 17, 0, 2, 5, 8, 3))):
            mask = (torch.arange(size) < torch.tensor(lengths)[:, None]).long()
            given = torch.randint(0, 50, mask.shape), mask
            for one, other in zip(*(stepped(model, run, given) for run in (compiled, model)), strict=True):
                torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)
    assert [region.packed for region in report.regions] == [2]


class Soft(Biased):
    """Numbers that leave something of a score."""

    def numbers(self, keep: Tensor) -> Tensor:
        return torch.where(keep, 0.0, -30.0)


class Sloped(Biased):
    """A bias that is not learned may mask keys, too: what is added is no sum of a mask and something learned."""

    def added(self, mask: Tensor) -> Tensor:
        slopes = torch.arange(L)[None, None, None] * torch.linspace(0.1, 1.0, H)[None, :, None, None]
        return super().added(mask) + slopes


class OfSequences(Biased):
    """What is learned differs from sequence to sequence."""

    def added(self, mask: Tensor) -> Tensor:
        return super().added(mask) + self.table(mask.sum(1))[:, :, None, None]


@pytest.mark.parametrize("made", [Soft, Sloped, OfSequences])
def test_numbers_that_cannot_be_told_from_a_mask(made: type[Biased]) -> None:
    assert not any(region.packed for region in trained(made(), right()))


# ---------------------------------------------------------------- what is left


def test_strict_numerics_assume_nothing_of_rows_of_padding() -> None:
    def chosen(model: Any, x: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask.bool()[..., None], x, 0.0).sum(1)

    assert "finite" in left(Encoder(chosen, layers=1, eager=False), right(), numerics="strict").reason
    assert packed(Encoder(chosen, layers=1, eager=False), right()).packed == 1


@pytest.mark.parametrize(
    "after",
    [
        lambda model, x, mask: x,
        lambda model, x, mask: x.mean(1),
        lambda model, x, mask: F.cross_entropy(model.head(x).view(-1, 3), labels(mask).abs().view(-1) % 3),
        lambda model, x, mask: F.mse_loss(x, torch.zeros_like(x)),
        lambda model, x, mask: F.batch_norm(x.transpose(1, 2), None, None, training=True)[:, :, 0],
    ],
)
def test_rows_whose_gradients_count(after: Callable[..., Any]) -> None:
    """What every row adds to is left, or computed for all rows: gradients are eager's either way."""
    trained(Encoder(after, layers=1, eager=False).eval(), right()[:1])


# ---------------------------------------------------------------- dropout


def dropped(model: nn.Module, mask: Tensor) -> tuple[RegionReport, Tensor]:
    torch._dynamo.reset()
    backend = attn_pass.wrap("eager", choose="fused", targets=("cpu_kernel",), on_error="raise")
    with attn_pass.record() as report:
        result = torch.compile(model, backend=backend, fullgraph=True)(ids(), mask)
    (region,) = report.regions
    return region, result


def test_dropout_of_rows_draws_for_the_rows_that_are_there() -> None:
    def wide(model: Any, x: Tensor, mask: Tensor) -> Tensor:
        return F.dropout(x * 0.0 + 1.0, 0.5, True) * mask[..., None]

    mask = right()[0]
    region, result = dropped(Encoder(wide, layers=1, eager=False).train(), mask)
    assert region.outcome == "packed" and "dropout" in region.operations
    kept = result.detach()[mask.bool()]
    assert set(kept.unique().tolist()) == {0.0, 2.0} and 0.3 < (kept == 0).double().mean() < 0.7
    assert not result[mask == 0].any()


def test_with_eagers_random_numbers_dropout_is_left() -> None:
    with torch._inductor.config.patch(fallback_random=True):
        model = Encoder(mean, layers=1, eager=False).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.1
        region, _ = dropped(model, right()[0])
    assert region.outcome == "left" and "dropout may mix" in " ".join((region.reason, *region.stops))
