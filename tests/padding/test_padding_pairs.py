"""Masks that differ from row to row, and scores that are made of rows: DeBERTa's, on packed rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from padded_encoders import LOWEST, B, E, H, L, compiled_once, ids, left, masks, packed, ran
from torch import Tensor, nn
from torch.nn import functional as F

import attn_pass
from attn_pass.devices.cpu.kernel import build

pytestmark = pytest.mark.skipif(bool(build.missing()), reason="no compiler for the CPU kernel")
D, SPAN = E // H, 8


def distances() -> Tensor:
    """Where each pair is in a table of distances, as a program computes it: proved to be there."""
    return (torch.arange(L)[:, None] - torch.arange(L) + SPAN).clamp(0, 2 * SPAN - 1)


INDEX = distances()


def of_pairs(mask: Tensor) -> Tensor:
    """The product of a mask with itself, as DeBERTa makes it."""
    extended = mask.unsqueeze(1).unsqueeze(2)
    return extended * extended.squeeze(-2).unsqueeze(-1)


class Disentangled(nn.Module):
    """DeBERTa's attention: content to position, and position to content, beside the product of queries and keys.

    Of an ``input`` to the program nothing is proved, so the bias is a matrix.
    """

    def __init__(self, terms: str = "c2p p2c") -> None:
        super().__init__()
        self.qkv, self.terms = nn.ModuleList(nn.Linear(E, E) for _ in range(3)), terms
        self.out, self.norm = nn.Linear(E, E), nn.LayerNorm(E)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], H, -1).permute(0, 2, 1, 3).contiguous().view(-1, x.size(1), D)

    def scores(self, q: Tensor, k: Tensor, table: Tensor) -> Tensor:
        scale = torch.sqrt(torch.tensor(D, dtype=torch.float) * 3)
        scores, more = torch.bmm(q, k.transpose(-1, -2) / scale.to(dtype=q.dtype)), 0
        index = (INDEX if "input" in self.terms else distances())[None].expand(q.size(0), L, L)
        if "c2p" in self.terms:
            positions = self.heads(self.qkv[1](table[None])).repeat(q.size(0) // H, 1, 1)
            to_position = torch.gather(torch.bmm(q, positions.transpose(-1, -2)), dim=-1, index=index)
            more += to_position / scale.to(dtype=to_position.dtype)
        if "p2c" in self.terms:
            positions = self.heads(self.qkv[0](table[None])).repeat(q.size(0) // H, 1, 1)
            to_content = torch.gather(torch.bmm(k, positions.transpose(-1, -2)), dim=-1, index=index)
            more += to_content.transpose(-1, -2) / scale.to(dtype=to_content.dtype)
        return scores + more

    def forward(self, x: Tensor, mask: Tensor, table: Tensor) -> Tensor:
        q, k, v = (self.heads(one(x)) for one in self.qkv)
        scores = self.scores(q, k, table).view(-1, H, L, L)
        weights = scores.masked_fill(~mask.bool(), torch.finfo(q.dtype).min).softmax(-1)
        y = torch.bmm(weights.view(-1, L, L), v).view(-1, H, L, D).permute(0, 2, 1, 3).contiguous()
        return self.norm(self.out(y.view(*y.shape[:-2], -1)) + x)


class Deberta(nn.Module):
    """Two layers of it; ``after(self, x, mask)`` is what becomes of the rows."""

    def __init__(
        self, after: Callable[..., Any], terms: str = "c2p p2c", pairs: Callable[..., Tensor] = of_pairs
    ) -> None:
        super().__init__()
        self.words, self.table, self.head = nn.Embedding(50, E), nn.Parameter(torch.randn(2 * SPAN, E)), nn.Linear(E, 3)
        self.layers, self.after = nn.ModuleList(Disentangled(terms) for _ in range(2)), after
        self.requires_grad_(False)
        self.pairs = pairs

    def forward(self, words: Tensor, mask: Tensor) -> Any:
        x = self.words(words) * mask.unsqueeze(2).to(torch.float32)
        seen = self.pairs(mask)
        for layer in self.layers:
            x = layer(x, seen, self.table)
        return self.after(self, x, mask)


def first(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return model.head(x[:, 0])


def tokens(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return model.head(x).masked_fill(mask[..., None] == 0, 0.0)


def anywhere() -> list[Tensor]:
    return [(torch.rand(B, L) < 0.5).long() for _ in range(2)]


# ---------------------------------------------------------------- masks of pairs


class Plain(Deberta):
    """Without positions in the scores, by torch's call or by hand."""

    def __init__(
        self, after: Callable[..., Any], by_hand: bool = True, pairs: Callable[..., Tensor] = of_pairs
    ) -> None:
        super().__init__(after, pairs=pairs)
        self.by_hand = by_hand

    def forward(self, words: Tensor, mask: Tensor) -> Any:
        x, keep = self.words(words), self.pairs(mask).bool()
        for layer in self.layers:
            q, k, v = (one(x).view(B, L, H, D).transpose(1, 2) for one in layer.qkv)
            if self.by_hand:
                y = (q @ k.mT).masked_fill(~keep, LOWEST).softmax(-1) @ v
            else:
                y = F.scaled_dot_product_attention(q, k, v, torch.where(keep, 0.0, LOWEST))
            x = layer.norm(layer.out(y.transpose(1, 2).reshape(B, L, E)) + x)
        return self.after(self, x, mask)


def everywhere() -> list[Tensor]:
    """Padding behind the tokens, before them and anywhere: batches of one compiled program."""
    return [*masks(), *masks(left=True), *anywhere()]


@pytest.mark.parametrize("after", [first, tokens])
@pytest.mark.parametrize("by_hand", [True, False])
def test_a_product_of_a_mask_with_itself(after: Callable[..., Any], by_hand: bool) -> None:
    """Rows of padding are masked fully: one that is read averages all values of its sequence."""
    assert packed(Plain(after, by_hand), everywhere()).packed == 2


def _themselves(mask: Tensor) -> Tensor:
    return of_pairs(mask).bool() | torch.eye(L, dtype=torch.bool)


def _all_keys_of_padding(mask: Tensor) -> Tensor:
    """Rows of padding keep all keys: none can be left out, though their own results are not read."""
    return (mask[:, None, None, :] > 0) | (mask[:, None, :, None] == 0)


def _drawn(mask: Tensor) -> Tensor:
    number = (torch.arange(L)[:, None] * 7 + torch.arange(L) * 3) % 5 < 2
    return of_pairs(mask).bool() & number


@pytest.mark.parametrize("pairs", [_themselves, _all_keys_of_padding, _drawn])
@pytest.mark.parametrize("after", [first, tokens, lambda model, x, mask: x[:, -1]])
def test_other_masks_of_pairs(pairs: Callable[..., Tensor], after: Callable[..., Any]) -> None:
    packed(Plain(after, pairs=pairs), [*masks(), *anywhere()])


def test_a_mask_that_all_sequences_share_tells_nothing_of_padding() -> None:
    def causal(mask: Tensor) -> Tensor:
        return (torch.arange(L)[:, None] * 5 % 7 >= torch.arange(L) % 3)[None, None]

    regions, results, wanted = ran(Plain(first, pairs=causal), masks()[:1])
    assert not any(region.packed for region in regions)
    torch.testing.assert_close(results[0], wanted[0], rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- scores that are made of rows


@pytest.mark.parametrize("terms", ["c2p p2c", "c2p", "p2c", "c2p p2c of an input", "p2c of an input"])
@pytest.mark.parametrize("after", [first, tokens])
def test_an_encoder_with_disentangled_attention(terms: str, after: Callable[..., Any]) -> None:
    region = packed(Deberta(after, terms), everywhere())
    assert region.packed == 2 and "reach only their own scores" in " ".join(region.exits)


def test_scores_by_hidden_states_that_are_returned() -> None:
    """The first layer is computed as it was, with its scores; the second one is packed."""

    class Returned(Deberta):
        def forward(self, words: Tensor, mask: Tensor) -> Any:
            x = self.layers[0](self.words(words), of_pairs(mask), self.table)
            return x, first(self, self.layers[1](x, of_pairs(mask), self.table), mask)

    region = packed(Returned(first), masks())
    assert (region.sites, region.packed) == (2, 1)


def test_scores_of_an_attention_that_is_seen() -> None:
    """Its scores are made of rows of a layer whose own padding nobody sees."""

    class Lent(Deberta):
        def forward(self, words: Tensor, mask: Tensor) -> Any:
            x, seen = self.words(words), of_pairs(mask)
            y = self.layers[0](x, seen, self.table)
            other = self.layers[1]
            q, k, v = (other.heads(one(x)) for one in other.qkv)
            scores = other.scores(q, k, self.table) + other.scores(other.heads(y), k, self.table)
            keep = ~seen.bool()
            weights = scores.view(-1, H, L, L).masked_fill(keep, LOWEST).softmax(-1)
            return first(self, y, mask), weights @ v.view(-1, H, L, D)

    regions, results, wanted = ran(Lent(first), masks())
    assert all(region.packed < 2 for region in regions)
    for result, expected in zip(results, wanted):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "seen",
    [
        lambda scores: scores.sum((1, 2, 3)),
        lambda scores: scores[:, :, 0].amax(-1),
        lambda scores: scores.softmax(2)[:, 0, 0],
    ],
)
def test_scores_that_something_else_sees(seen: Callable[[Tensor], Tensor]) -> None:
    class Seen(Deberta):
        def forward(self, words: Tensor, mask: Tensor) -> Any:
            x, layer = self.words(words), self.layers[0]
            q, k, v = (layer.heads(one(x)) for one in layer.qkv)
            positions = layer.heads(layer.qkv[1](self.table[None])).repeat(B, 1, 1)
            index = INDEX[None].expand(q.size(0), L, L)
            added = torch.gather(torch.bmm(q, positions.transpose(-1, -2)), -1, index)
            scores = (torch.bmm(q, k.mT) + added).view(-1, H, L, L)
            y = scores.masked_fill(of_pairs(mask) == 0, LOWEST).softmax(-1) @ v.view(-1, H, L, D)
            return y.transpose(1, 2).reshape(B, L, E)[:, 0], seen(added.view(-1, H, L, L))

    regions, results, wanted = ran(Seen(first), masks())
    for result, expected in zip(results, wanted):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    assert not any("only their own scores" in text for region in regions for text in region.exits)


def test_added_products_that_mask_are_added_as_they_are() -> None:
    """What a product is multiplied with may make it a mask: nothing is assumed of it."""

    class Far(Deberta):
        def forward(self, words: Tensor, mask: Tensor) -> Any:
            x, layer = self.words(words), self.layers[0]
            q, k, v = (one(x).view(B, L, H, D).transpose(1, 2) for one in layer.qkv)
            far = (q @ k.mT).relu() * -3e38
            y = (q @ k.mT + far).masked_fill(of_pairs(mask) == 0, LOWEST).softmax(-1) @ v
            return y.transpose(1, 2).reshape(B, L, E)[:, 0]

    left_or_packed, results, wanted = ran(Far(first), masks())
    assert not any(region.packed for region in left_or_packed)
    for result, expected in zip(results, wanted):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_training_computes_scores_of_padding() -> None:
    """What is added to the scores has a gradient."""
    torch._dynamo.reset()
    model, words = Deberta(first).requires_grad_(True), ids()
    backend = attn_pass.wrap("eager", choose="fused", targets=("cpu_kernel",), on_error="raise")
    compiled, gradients = torch.compile(model, backend=backend, fullgraph=True), []
    with attn_pass.record() as report:
        for run in (compiled, model):
            model.zero_grad()
            (run(words, masks()[0]) ** 2).sum().backward()
            gradients.append([x.grad for x in model.parameters() if x.grad is not None])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    assert report.regions and not any(region.packed for region in report.regions)


def test_the_model_of_transformers() -> None:
    """A head that classifies tokens under the mask, as GLiNER and token classification are used."""
    transformers = pytest.importorskip("transformers")

    class Classified(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.DebertaV2Config(
                vocab_size=50,
                hidden_size=E,
                num_attention_heads=H,
                num_hidden_layers=2,
                intermediate_size=2 * E,
                relative_attention=True,
                pos_att_type=["p2c", "c2p"],
                position_buckets=SPAN,
                share_att_key=True,
                norm_rel_ebd="layer_norm",
                type_vocab_size=0,
                position_biased_input=False,
            )
            self.model = transformers.DebertaV2ForTokenClassification(config)

        def forward(self, words: Tensor, mask: Tensor) -> Tensor:
            logits = self.model(input_ids=words, attention_mask=mask, return_dict=False)[0]
            return logits.masked_fill(mask[..., None] == 0, 0.0)

    region = packed(Classified(), masks())
    assert region.packed == 2
    assert packed(Classified(), masks(), dynamic=True).packed == 2  # views take a tuple of sizes that is computed
    regions, results, wanted = ran(Classified().bfloat16(), masks())
    assert [r.packed for r in regions] == [2]
    for result, expected in zip(results, wanted):
        torch.testing.assert_close(result, expected, rtol=0.05, atol=0.02)


def test_heads_are_one_dimension_with_sequences() -> None:
    """As many heads as sequences: sizes alone do not tell them apart."""
    assert ids().shape == (B, L)

    class Square(Deberta):
        def forward(self, words: Tensor, mask: Tensor) -> Any:
            x = self.words(words)
            layer = self.layers[0]
            q, k, v = (one(x).view(B, L, B, E // B).transpose(1, 2) for one in layer.qkv)
            table = self.table.view(1, 2 * SPAN, B, E // B).permute(0, 2, 1, 3)
            index = INDEX.expand(B, B, L, L)
            turned = q.transpose(0, 1).reshape(B * B, L, E // B)  # heads before sequences
            wrong = (turned @ table.expand(B, -1, -1, -1).reshape(B * B, 2 * SPAN, -1).mT).view(B, B, L, -1)
            scores = q @ k.mT + torch.gather(wrong, -1, index)
            y = scores.masked_fill(of_pairs(mask) == 0, LOWEST).softmax(-1) @ v
            return y.transpose(1, 2).reshape(B, L, E)[:, 0]

    regions, results, wanted = ran(Square(first), masks())
    for result, expected in zip(results, wanted):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    del regions


def test_a_mask_of_single_heads_is_left() -> None:
    def by_head(mask: Tensor) -> Tensor:
        return of_pairs(mask).expand(B, H, L, L) * torch.tensor([1, 1]).view(1, H, 1, 1).cumsum(1)

    assert "from head to head" in left(Plain(first, pairs=by_head), masks()[:1]).reason


def test_compiled_by_inductor() -> None:
    assert [(r.sites, r.packed) for r in compiled_once(Deberta(tokens).eval())] == [(2, 2)]


def test_the_first_layer_is_packed_whole() -> None:
    """Its mask is negated beside its scores, behind the rows that these are made of."""
    region = packed(Deberta(first), masks())
    assert not any("linear" in name for name in region.entries)
    assert region.operations["linear"] == 8
