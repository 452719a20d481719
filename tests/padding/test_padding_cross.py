"""A decoder under its own mask, with attentions to an encoder under another: both on packed rows, results eager's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from padded_encoders import LOWEST, B, E, Encoder, H, L
from torch import Tensor, nn
from torch.nn import functional as F

import attn_pass
from attn_pass.devices.cpu.kernel import build
from attn_pass.padding import cost, regions
from attn_pass.report.region import RegionReport

pytestmark = pytest.mark.skipif(bool(build.missing()), reason="no compiler for the CPU kernel")
TO = 10  # positions of the decoder
Batch = tuple[Tensor, Tensor, Tensor, Tensor]  # tokens and mask of the encoder, and of the decoder


class DecoderLayer(nn.Module):
    """Attention to its own rows, to the encoder's, and two linear layers; ``added`` to the scores of the latter."""

    def __init__(self, by_hand: bool, added: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.own, self.other = (nn.ModuleList(nn.Linear(E, E) for _ in range(4)) for _ in range(2))
        self.up, self.down, self.norm = nn.Linear(E, 2 * E), nn.Linear(2 * E, E), nn.LayerNorm(E)
        self.by_hand, self.added = by_hand, added

    def attend(self, parts: Any, x: Tensor, keys: Tensor, keep: Tensor, added: Tensor | None = None) -> Tensor:
        q, k, v = (
            one(rows).view(rows.shape[0], rows.shape[1], H, E // H).transpose(1, 2)
            for one, rows in zip(parts, (x, keys, keys))
        )
        if self.by_hand:
            scores = q @ k.transpose(2, 3)
            y = (scores if added is None else scores + added).masked_fill(~keep, LOWEST).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, keep, scale=1.0)
        return parts[3](y.transpose(1, 2).reshape(x.shape))

    def forward(self, x: Tensor, there: Tensor, rows: Tensor, keep: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        x = x + self.attend(self.own, self.norm(x), self.norm(x), there[:, None, None, :] & (at[:, None] >= at))
        added = None if self.added is None else self.added(x, rows)
        x = x + self.attend(self.other, self.norm(x), rows, keep, added)
        return x + self.down(F.relu(self.up(self.norm(x))))


class Decoder(nn.Module):
    """An encoder, a decoder, and a loss, or what ``after(self, rows, mask)`` makes of the decoder's rows."""

    def __init__(
        self,
        by_hand: bool = True,
        after: Callable[..., Any] | None = None,
        added: Callable[..., Tensor] | None = None,
        kept: Callable[..., Tensor] | None = None,
        layers: int = 1,
    ) -> None:
        super().__init__()
        self.encoder = Encoder(lambda model, x, mask: x, eager=False, layers=0 if by_hand else layers)
        self.words, self.head = nn.Embedding(50, E), nn.Linear(E, 5)
        self.layers = nn.ModuleList(DecoderLayer(by_hand, added) for _ in range(layers))
        self.after, self.kept = after or loss, kept or (lambda mask, there: mask.bool()[:, None, None, :])

    def forward(self, words: Tensor, mask: Tensor, given: Tensor, there: Tensor) -> Any:
        rows, x = self.encoder(words, mask), self.words(given)
        for layer in self.layers:
            x = layer(x, there.bool(), rows, self.kept(mask, there))
        return self.after(self, x, there)


def loss(model: Any, x: Tensor, there: Tensor) -> Tensor:
    labels = torch.where(there.bool(), torch.arange(x.shape[1]) % 5, -100)
    return F.cross_entropy(model.head(x).flatten(0, 1), labels.flatten())


def first(model: Any, x: Tensor, there: Tensor) -> Tensor:
    return x[:, 0]


def total(model: Any, x: Tensor, there: Tensor) -> Tensor:
    return (x * there[..., None]).sum(1)


def mask_of(lengths: tuple[int, ...], size: int) -> Tensor:
    return (torch.arange(size) < torch.tensor(lengths)[:, None]).long()


def batch(lengths: tuple[int, ...], to: tuple[int, ...], size: int = L, size_to: int = TO) -> Batch:
    words, given = (torch.randint(0, 50, (len(lengths), n)) for n in (size, size_to))
    return words, mask_of(lengths, size), given, mask_of(to, size_to)


def batches(size_to: int = TO) -> list[Batch]:
    lengths = ((24, 5, 11, 1), (3, 24, 7, 9), (24, 24, 24, 24))
    to = ((10, 3, 1, 7), (2, 10, 4, 9), (10, 10, 10, 10))
    return [batch(one, other, size_to=size_to) for one, other in zip(lengths, to)]


def stepped(model: nn.Module, run: Callable[..., Any], given: Batch, trained: bool) -> list[Tensor]:
    """The result of a step, and all gradients."""
    if not trained:
        with torch.no_grad():
            return [run(*given)]
    model.zero_grad()
    result = run(*given)
    (result * torch.linspace(0.5, 1.5, result.numel()).view(result.shape)).sum().backward()
    return [result.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def ran(
    model: nn.Module, given: list[Batch], trained: bool = False, dynamic: bool | None = None, **options: Any
) -> list[RegionReport]:
    """The regions of one program, whose results, and gradients, were compared with eager's for every batch."""
    torch._dynamo.reset()
    options = {"choose": "fused", "targets": ("cpu_kernel",), "on_error": "raise", **options}
    if "rules" in options:
        del options["targets"]
    backend = attn_pass.wrap("eager", **options)
    compiled = torch.compile(model.eval(), backend=backend, fullgraph=True, dynamic=dynamic)
    with attn_pass.record() as report, torch._dynamo.config.patch(error_on_recompile=True):
        for one in given:
            got, wanted = (stepped(model, run, one, trained) for run in (compiled, model))
            for result, expected in zip(got, wanted, strict=True):
                torch.testing.assert_close(result, expected, rtol=2e-4, atol=2e-5)
    return list(report.regions)


def told(found: list[RegionReport]) -> list[tuple[int, int, tuple[Any, ...]]]:
    return [(region.packed, region.sites, region.rows) for region in found]


# ---------------------------------------------------------------- both are packed


@pytest.mark.parametrize(("trained", "size_to", "layers"), [(False, TO, 2), (True, TO, 1), (False, L, 2), (True, L, 1)])
def test_encoder_and_decoder_are_packed(trained: bool, size_to: int, layers: int) -> None:
    """Lengths may be equal by chance: rows of the decoder are none of the encoder's all the same."""
    found = ran(Decoder(by_hand=False, layers=layers), batches(size_to)[:2], trained)
    assert told(found) == [(layers, layers, (B, L)), (layers, layers, (B, size_to))]
    assert found[1].operations["cross attention"] == layers and not found[1].stops


@pytest.mark.parametrize("trained", [False, True])
def test_any_size_of_the_batch_and_of_both_lengths(trained: bool) -> None:
    given = [batches()[0], batch((7, 2, 17), (3, 6, 1), 17, 6), batch((9, 1, 4, 4, 2), (1, 12, 4, 5, 2), 9, 12)]
    found = ran(Decoder(by_hand=False), given, trained, dynamic=True)
    assert [region.packed for region in found] == [1, 1]


@pytest.mark.parametrize("trained", [False, True])
def test_sequences_without_keys_in_the_encoder_and_in_the_decoder(trained: bool) -> None:
    """Their rows average all values, of the encoder's padding as well, and of the decoder's own."""
    given = [batch((0, 5, 24, 1), (3, 0, 10, 1)), batch((3, 0, 0, 24), (0, 2, 0, 5))]
    (found,) = ran(Decoder(after=first), given, trained)
    assert (found.packed, found.rows) == (1, (B, TO))


def test_padding_on_the_left_of_both() -> None:
    given = [(words, mask.flip(1), to, there.flip(1)) for words, mask, to, there in batches()]
    assert [region.packed for region in ran(Decoder(after=total), given)] == [1]


def test_keys_that_a_row_of_the_decoder_chooses_by_its_position() -> None:
    """The attention is called as it was, so that its mask counts positions of the decoder from where they were."""

    def kept(mask: Tensor, there: Tensor) -> Tensor:
        at, key = torch.arange(there.shape[1]), torch.arange(mask.shape[1])
        return mask.bool()[:, None, None, :] & (at[:, None] * 2 >= key)

    assert [region.packed for region in ran(Decoder(kept=kept, after=total), batches())] == [1]


def _fewer(mask: Tensor, there: Tensor) -> Tensor:
    return (mask.bool() & (torch.arange(L) % 3 == 0))[:, None, None, :]


def _others(mask: Tensor, there: Tensor) -> Tensor:
    return mask.flip(0).bool()[:, None, None, :]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("kept", [_fewer, _others])
def test_an_encoder_whose_rows_are_kept_by_another_mask(kept: Callable[..., Tensor], trained: bool) -> None:
    """What the decoder's attention reads is computed, whether the encoder's own mask keeps it or not."""
    found = ran(Decoder(by_hand=False, kept=kept), batches()[:2], trained)
    assert [region.packed for region in found] == [1, 1]
    assert "another attention's mask keeps" in " ".join(found[0].exits)


@pytest.mark.parametrize("trained", [False, True])
def test_rows_of_a_decoder_that_keep_no_key_of_the_encoder(trained: bool) -> None:
    """They average all of its rows, those of padding as well, which are computed then."""

    def kept(mask: Tensor, there: Tensor) -> Tensor:
        return _others(mask, there) & (mask.sum(1) > 9)[:, None, None, None]

    model = Decoder(kept=kept)
    model.encoder = Encoder(lambda model, x, mask: x, eager=False, layers=1)
    assert [region.packed for region in ran(model, batches(), trained)] == [1, 1]


def test_copies_around_an_attention_to_other_rows_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a device whose copies take no time, finding the rows alone is left."""
    costs = []

    def counted(proof: Any, device: Any, *given: Any, **more: Any) -> Any:
        free = replace(device, kernel_us=0.0, memory_gbytes=float("inf"))
        found = (cost.cost_of(proof, on, *given, **more).finding for on in (device, free))
        costs.append(tuple(found))
        return cost.Cost(1.0, 0.0, 0.0)

    monkeypatch.setattr(regions, "cost_of", counted)
    ran(Decoder(by_hand=False), batches()[:1], choose="cheapest", rules={"*": ("cpu_kernel",)})
    (of_encoder, of_its_rows), (of_decoder, of_other_rows) = costs[0], costs[-1]
    assert of_encoder == of_its_rows and of_decoder > of_other_rows


# ---------------------------------------------------------------- what is left


def _of_pairs(x: Tensor, rows: Tensor) -> Tensor:
    return x.sum(-1)[:, None, :, None] * rows.sum(-1)[:, None, None, :]


def _of_keys(x: Tensor, rows: Tensor) -> Tensor:
    return x.sum(-1)[:, None, None, :] * rows.sum(-1)[:, None, :, None]


@pytest.mark.parametrize("added", [_of_pairs, _of_keys])
def test_scores_of_the_encoder_that_are_made_of_rows_of_the_decoder(added: Callable[..., Tensor]) -> None:
    """Rows of the decoder in the place of keys are read by all rows, as only the encoder's mask counts there."""
    found = ran(Decoder(added=added, after=total), batches(L))
    assert found and not any("cross attention" in region.operations for region in found)


@pytest.mark.parametrize("behind", [False, True])
def test_keys_that_are_made_of_rows_of_the_decoder(behind: bool) -> None:
    """Rows in another order are read whole: what they are made of is computed as it was; what is behind is packed."""

    class Own(Decoder):
        def forward(self, words: Tensor, mask: Tensor, given: Tensor, there: Tensor) -> Any:
            keep, x = self.kept(mask, there), self.words(given)
            for layer in self.layers:
                x = layer(x, there.bool(), x.flip(1), keep)
            return self.after(self, x, there)

    found = ran(Own(after=total, layers=1 + behind), batches(L))
    if behind:
        assert (found[0].packed, found[0].sites) == (0, 2) and "flip may mix" in " ".join(found[0].stops)
    else:
        assert found[0].entries == ("x",)


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        (lambda model, x, there: model.head(x), "in the result of the model"),
        (lambda model, x, there: x.mean(1), "mean may mix"),
    ],
)
def test_rows_of_the_decoder_that_are_seen(after: Callable[..., Any], reason: str) -> None:
    (found,) = ran(Decoder(after=after), batches()[:1])
    assert found.packed == 0 and reason in found.reason


# ---------------------------------------------------------------- models of a library


def test_the_loss_of_t5_and_of_whisper() -> None:
    """Keys and values go through a cache that begins; Whisper's encoder has no padding mask."""
    transformers = pytest.importorskip("transformers")
    t5 = transformers.T5Config(vocab_size=50, d_model=E, d_kv=8, d_ff=E, num_layers=1, num_heads=H)
    t5.update({"decoder_start_token_id": 0, "dropout_rate": 0.0})
    words, mask, labels, there = batch((24, 5, 11, 1), (10, 3, 1, 7))
    labels = torch.where(there.bool(), labels, -100)
    given = {"input_ids": words, "attention_mask": mask, "decoder_attention_mask": there, "labels": labels}
    assert told(of_loss(transformers.T5ForConditionalGeneration(t5), given)) == [(1, 1, (B, L)), (1, 1, (B, TO))]

    sizes = dict.fromkeys(("encoder_layers", "decoder_layers"), 1) | {"num_mel_bins": 4, "max_source_positions": 12}
    sizes |= dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim"), E)
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), H)
    tokens = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**sizes, **tokens))
    given = {"input_features": torch.randn(B, 4, 24), "decoder_attention_mask": there, "labels": labels}
    assert told(of_loss(model, given)) == [(1, 1, (B, TO))]


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_the_gradients_of_t5(kind: str) -> None:
    """Its masks are added to its scores beside a table of distances, whose gradient is a sum over all sequences."""
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(vocab_size=50, d_model=E, d_kv=8, d_ff=E, num_layers=2, num_heads=H)
    config.update({"decoder_start_token_id": 0, "dropout_rate": 0.0})
    model = transformers.T5ForConditionalGeneration(config).eval()
    model.set_attn_implementation(kind)
    torch._dynamo.reset()
    words, mask, labels, there = batch((24, 5, 11, 1), (10, 3, 1, 7))
    labels = torch.where(there.bool(), labels, -100)
    given = {"input_ids": words, "attention_mask": mask, "decoder_attention_mask": there, "labels": labels}
    backend = attn_pass.wrap("eager", choose="fused", targets=("cpu_kernel",), on_error="raise")
    with attn_pass.record() as report:
        results = []
        for run in (torch.compile(lambda **given: model(**given).loss, backend=backend), lambda **x: model(**x).loss):
            model.zero_grad()
            result = run(**given)
            result.backward()
            results.append([result.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    torch.testing.assert_close(*results, rtol=2e-4, atol=2e-5)
    assert told(report.regions) == [(2, 2, (B, L)), (2, 2, (B, TO))]


def of_loss(model: nn.Module, given: dict[str, Tensor]) -> list[RegionReport]:
    torch._dynamo.reset()
    model.eval()
    backend = attn_pass.wrap("eager", choose="fused", targets=("cpu_kernel",), on_error="raise")
    with torch.no_grad(), attn_pass.record() as report:
        result = torch.compile(lambda **given: model(**given).loss, backend=backend)(**given)
        torch.testing.assert_close(result, model(**given).loss, rtol=1e-4, atol=1e-5)
    return list(report.regions)
