"""Regions without padding: what is proved, what is not, and that results are those of eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from padded_encoders import LOWEST, B, E, Encoder, H, L, compiled_once, first, ids, left, masks, mean, packed, ran
from torch import Tensor, nn
from torch.nn import functional as F

import attn_pass
from attn_pass.devices.cpu.kernel import build
from attn_pass.padding import cost
from attn_pass.report.region import RegionReport

pytestmark = pytest.mark.skipif(bool(build.missing()), reason="no compiler for the CPU kernel")
# ---------------------------------------------------------------- what is proved


@pytest.mark.parametrize(
    ("after", "padding_left", "eager"), [(first, True, True), (first, False, False), (mean, False, True)]
)
def test_an_encoder_is_packed(after: Callable[..., Any], padding_left: bool, eager: bool) -> None:
    batches = masks(padding_left)
    if not eager:  # a fully masked row of torch's call has no mean
        batches = [m for m in batches if m.any(1).all()]
    region = packed(Encoder(after, eager=eager), batches)
    assert (region.sites, region.packed) == (2, 2)
    assert region.operations["linear"] == 12 and region.operations["layer_norm"] == 5


def test_keys_that_lie_anywhere() -> None:
    assert packed(Encoder(mean), [(torch.rand(B, L) < 0.5).long() for _ in range(3)]).packed == 2


def test_any_size_of_the_batch() -> None:
    full = [m for m in masks() if m.any(1).all()]
    assert packed(Encoder(first, eager=False, layers=1), full, dynamic=True).rows != (B, L)


@pytest.mark.parametrize("position", [0, 3, -1, -2])
def test_a_position_that_is_pooled(position: int) -> None:
    region = packed(Encoder(lambda model, x, mask: model.head(x[:, position]), layers=1))
    assert "is read" in region.exits[0]


def test_a_slice_of_the_first_position() -> None:
    packed(Encoder(lambda model, x, mask: model.head(x[:, 0:1]), layers=1))


def test_a_position_that_is_found_at_run_time() -> None:
    def last_kept(model: Any, x: Tensor, mask: Tensor) -> Tensor:
        return model.head(x[torch.arange(B), mask.sum(1) - 1])

    region = packed(Encoder(last_kept, layers=1))
    assert "found at run time" in region.exits[0]


def test_padding_that_is_filled() -> None:
    def largest(model: Any, x: Tensor, mask: Tensor) -> Tensor:
        return model.head(x.masked_fill(mask[:, :, None] == 0, -1e4).max(1).values)

    packed(Encoder(largest, layers=1))
    packed(Encoder(lambda model, x, mask: torch.where(mask.bool()[..., None], x, 0.0).sum(1), layers=1))
    packed(Encoder(lambda model, x, mask: torch.where(mask[..., None] == 0, 0.0, x).sum(1), layers=1))


@pytest.mark.parametrize(
    "zeroed",
    [
        lambda x, keep: torch.where(keep[..., None].expand_as(x), x, 0.0),
        lambda x, keep: x.index_put((~keep,), torch.zeros(())),
        lambda x, keep: x.flatten(0, 1).index_put((~keep.flatten(),), torch.tensor(0.0)).view_as(x),
    ],
)
def test_padding_that_is_zeroed_behind_every_layer(zeroed: Callable[..., Tensor]) -> None:
    batches = [m for m in masks() if m.any(1).all()]
    region = packed(Encoder(first, zeroed, eager=False), batches)
    assert region.packed == 2
    (region,) = compiled_once(Encoder(first, zeroed, eager=False, layers=1).eval())
    assert region.packed == 1


def test_padding_that_is_zeroed_in_front_of_a_sum() -> None:
    for zeroed in (
        lambda x, mask: torch.where(mask.bool()[..., None].expand_as(x), x, 0.0),
        lambda x, mask: x.index_put((mask == 0,), torch.zeros(())),
        lambda x, mask: x.index_put((mask == 0,), torch.ones(E)),
    ):
        region = packed(Encoder(lambda model, x, mask, zeroed=zeroed: zeroed(x, mask).sum(1), layers=1))
        assert any("a mask replaces rows of padding" in leaving for leaving in region.exits)
    summed = Encoder(lambda model, x, mask: x.index_put((mask == 0,), torch.ones(E), True).sum(1), layers=1)
    assert "index_put may mix" in left(summed).reason


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (lambda x, keep: x[:, :1].expand_as(x), ""),
        (lambda x, keep: x.cumsum(1)[:, -1:].expand_as(x), "cumsum may mix"),
        (lambda x, keep: x.index_put((keep[:, 0],), torch.zeros(())), "index_put may mix"),
        (lambda x, keep: x.index_put((torch.arange(B), torch.arange(B)), torch.zeros(())), "index_put may mix"),
        (lambda x, keep: x.index_put((keep.T.reshape(B, L),), torch.zeros(()), True), "index_put may mix"),
        (lambda x, keep: x.index_put((~keep,), x.flip(1)[0, 0]), "flip may mix"),
        (lambda x, keep: x.index_put((x > 1,), x.mean()), "mean may mix"),
    ],
)
def test_what_looks_as_if_padding_was_zeroed(between: Callable[..., Tensor], reason: str) -> None:
    region = packed(Encoder(first, between, eager=False), [m for m in masks() if m.any(1).all()])
    assert not reason or (region.packed == 1 and reason in "".join(region.stops)), region.stops


def test_a_mask_that_is_another_than_the_attentions() -> None:
    """Rows that the pooling reads and the attention does not are computed as well."""

    def every_other(model: Any, x: Tensor, mask: Tensor) -> Tensor:
        return (x * (torch.arange(L) % 2)[None, :, None]).sum(1)

    _, results, wanted = ran(Encoder(every_other, layers=1), masks())
    for result, expected in zip(results, wanted):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_a_loss_that_ignores_labels() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Encoder(lambda model, x, mask: model.head(x), layers=1)

        def forward(self, words: Tensor, mask: Tensor) -> Tensor:
            labels = torch.where(mask.bool(), words % 3, -100)
            return F.cross_entropy(self.encoder(words, mask).view(-1, 3), labels.view(-1))

    region = packed(Loss())
    assert "ignores labels of -100" in region.exits[0]


def test_a_cross_attention_masks_the_same_keys() -> None:
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Encoder(lambda model, x, mask: x, layers=1)
            self.k, self.v = nn.Linear(E, E), nn.Linear(E, E)
            self.q = nn.Parameter(torch.randn(B, H, 5, E // H))

        def forward(self, words: Tensor, mask: Tensor) -> Tensor:
            x = self.encoder(words, mask)
            k, v = (one(x).view(B, L, H, E // H).transpose(1, 2) for one in (self.k, self.v))
            added = torch.where(mask.bool()[:, None, None, :], 0.0, LOWEST)
            return (self.q @ k.transpose(2, 3) + added).softmax(-1) @ v

    region = packed(Cross())
    assert region.packed == 1 and "masked in another attention" in region.exits[0]


def test_pieces_of_rows_of_which_one_is_seen() -> None:
    """What takes a piece of rows that are computed as they were is where the region begins."""

    class Cut(Encoder):
        def forward(self, words: Tensor, mask: Tensor) -> Any:
            x = torch.cat([self.words(words)] * 2, -1)
            one, other = x.chunk(2, -1)
            return first(self, self.layers[0](self.norm(one), mask.bool()), mask), other.mean(1)

    assert packed(Cut(first, layers=1)).packed == 1


def test_a_slice_of_all_rows() -> None:
    region = packed(Encoder(first, between=lambda x, keep: x[:, slice(0, None), :]))
    assert (region.packed, region.stops) == (2, ())
    assert left(Encoder(lambda model, x, mask: x[:, slice(1, None), :].sum(1), layers=1), masks()[:1]).packed == 0


def test_a_type_that_is_taken_from_another_tensor() -> None:
    region = packed(Encoder(first, between=lambda x, keep: (x.double() * 2).type_as(x)))
    assert (region.packed, region.stops) == (2, ())
    summed = Encoder(lambda model, x, mask: (x.double() * mask[..., None]).sum(1).type_as(x), layers=1)
    assert "type_as may mix" in left(summed, masks()[:1]).reason


@pytest.mark.parametrize("after", [first, mean])
def test_one_sentence_that_is_padded(after: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    model = Encoder(after, layers=1).eval()
    backend = attn_pass.wrap("eager", choose="fused", targets=("cpu_kernel",), on_error="raise")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad(), attn_pass.record() as report, torch._dynamo.config.patch(error_on_recompile=True):
        for mask in (*masks()[0].split(1), *masks(left=True)[0].split(1)):
            words = ids()[:1]
            torch.testing.assert_close(compiled(words, mask), model(words, mask), rtol=1e-4, atol=1e-5)
    (region,) = report.regions
    assert region.packed == 0 and "single sentence" in region.reason


def test_two_encoders_are_two_regions() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = Encoder(first, layers=1), Encoder(mean, layers=1)

        def forward(self, words: Tensor, mask: Tensor) -> Tensor:
            return self.one(words, mask) + self.other(words, mask.flip(0))

    regions, results, wanted = ran(Two(), masks())
    assert [r.outcome for r in regions] == ["packed", "packed"]
    for result, expected in zip(results, wanted):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_causal_attention_keeps_its_order() -> None:
    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.words = nn.ModuleList(nn.Linear(E, E) for _ in range(3)), nn.Embedding(50, E)

        def forward(self, words: Tensor, mask: Tensor) -> Tensor:
            x = self.words(words)
            q, k, v = (one(x).view(B, L, H, E // H).transpose(1, 2) for one in self.qkv)
            keep = torch.ones(L, L, dtype=torch.bool).tril() & mask.bool()[:, None, None, :]
            y = (q @ k.transpose(2, 3)).masked_fill(~keep, LOWEST).softmax(-1) @ v
            return mean_of(y.transpose(1, 2).reshape(B, L, E), mask)

    batches = [(torch.rand(B, L) < 0.6).long() for _ in range(2)]
    for batch in batches:
        batch[:, 0] = 1
    packed(Causal(), batches)


def mean_of(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask[..., None]).sum(1)


def test_autocast_and_half_precision() -> None:
    def program(model: nn.Module) -> nn.Module:
        class Cast(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, words: Tensor, mask: Tensor) -> Tensor:
                with torch.autocast("cpu", torch.bfloat16):
                    return self.model(words, mask)

        return Cast()

    encoders = [Encoder(first, eager=False, layers=1) for _ in range(2)]
    for model in (program(encoders[0]), encoders[1].bfloat16()):
        regions, results, wanted = ran(model, [m for m in masks() if m.any(1).all()])
        assert [r.outcome for r in regions] == ["packed"]
        for result, expected in zip(results, wanted):
            torch.testing.assert_close(result, expected, rtol=0.03, atol=0.03)


def test_a_region_after_hidden_states_that_leave() -> None:
    """The first layer's rows are returned: it is computed as it was, and the second one is packed."""

    class Returned(Encoder):
        def forward(self, ids: Tensor, mask: Tensor) -> Any:
            x = self.layers[0](self.norm(self.words(ids)), mask.bool())
            return x, first(self, self.layers[1](x, mask.bool()), mask)

    region = packed(Returned(first))
    assert (region.sites, region.packed) == (2, 1) and "in the result" in region.stops[0]


def test_positions_counted_over_the_mask() -> None:
    """RoBERTa's: what counts them sees padding, in front of the region, and stays as it was."""

    class Counted(Encoder):
        def forward(self, ids: Tensor, mask: Tensor) -> Any:
            there = ids.ne(0).int()
            counted = (there.cumsum(1).type_as(there) * there).long().clamp(max=L - 1)
            x = self.norm(self.words(ids) + self.places(counted))
            for layer in self.layers:
                x = layer(x, mask.bool())
            return first(self, x, mask)

    assert packed(Counted(first)).packed == 2


def test_lengths_that_are_computed_are_one_mask() -> None:
    """Speech models count frames: every attention computes where its keys end for itself, and all of them alike."""

    class Frames(Encoder):
        def forward(self, ids: Tensor, mask: Tensor) -> Any:
            lengths = (mask.sum(1) * 2 - 1) // 2 + 1
            keep = torch.arange(ids.shape[1]) < lengths[:, None]
            x = self.norm(self.words(ids))
            for layer in self.layers:
                x = layer(x, keep)
            return self.after(self, x, mask)

    full = [m for m in masks() if m.any(1).all()]
    region = packed(Frames(mean, eager=False), full)
    assert (region.sites, region.packed) == (2, 2)


def test_functions_that_torch_has_for_numbers_too() -> None:
    def gelu(x: Tensor, keep: Tensor) -> Tensor:
        return x * 0.5 * (1.0 + torch.erf(x / 1.4142135))

    region = packed(Encoder(first, gelu))
    assert region.packed == 2 and region.operations["erf"] == 1


def test_the_smaller_of_two_tensors() -> None:
    """xIELU's: `torch.min` of two tensors mixes no rows."""

    def xielu(x: Tensor, keep: Tensor) -> Tensor:
        return torch.where(x > 0, x * x, torch.expm1(torch.min(x, torch.tensor(-1e-6))) - x)

    assert packed(Encoder(first, xielu)).packed == 2
    assert packed(Encoder(first, lambda x, keep: x.max(x.tanh()))).packed == 2


# ---------------------------------------------------------------- what is not


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        (lambda model, x, mask: x, "rows of padding are in the result of the model"),
        (lambda model, x, mask: model.head(x), "rows of padding are in the result of the model"),
        (lambda model, x, mask: model.head(x.mean(1)), "mean may mix rows of padding"),
        (lambda model, x, mask: model.head(x.max(1).values), "max may mix rows of padding"),
        (lambda model, x, mask: (x * torch.rand(B, L, 1)).sum(1), "sum may mix rows of padding"),
        (lambda model, x, mask: (x * x[:, :, :1].exp()).sum(1), "sum may mix rows of padding"),
        (lambda model, x, mask: x.masked_fill(mask[:, None, :].bool().expand(B, E, L).mT, 0.0).sum(1), ""),
        (lambda model, x, mask: x.flip(1)[:, 0], "flip may mix rows of padding"),
        (lambda model, x, mask: x[mask.bool()].sum(0), ""),
        (lambda model, x, mask: x.softmax(1)[:, 0], "softmax may mix rows of padding"),
        (lambda model, x, mask: x.cumsum(1)[:, 0], "cumsum may mix rows of padding"),
    ],
)
def test_rows_of_padding_that_are_seen(after: Callable[..., Any], reason: str) -> None:
    torch._dynamo.reset()  # else the ninth of these programs is not compiled at all
    torch.manual_seed(0)
    model = Encoder(after, layers=1).eval()
    compiled = torch.compile(
        model, backend=attn_pass.wrap("eager", choose="fused", targets=("cpu_kernel",), on_error="raise")
    )
    words, mask = ids(), masks()[0]
    with torch.no_grad(), attn_pass.record() as report:
        torch.manual_seed(1)
        result = compiled(words, mask)
        torch.manual_seed(1)
        torch.testing.assert_close(result, model(words, mask), rtol=1e-4, atol=1e-5)
    assert report.regions or not reason
    for region in report.regions:
        assert region.outcome == "left" or not reason
        assert reason in region.reason
        hinted = "assume_padding_unused=True" in "".join(region.lines())
        assert hinted == (region.outcome == "left" and "in the result" in region.reason)


class BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(E)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.over = nn.Conv1d(E, E, 3, padding=1)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return self.over(x.transpose(1, 2)).transpose(1, 2)


def _shifted(x: Tensor, keep: Tensor) -> Tensor:
    return x + x.roll(1, 1)


@pytest.mark.parametrize(
    ("between", "name"), [(BatchNorm(), "batch_norm"), (Convolution(), "conv1d"), (_shifted, "roll")]
)
def test_an_operation_that_mixes_rows_ends_the_region(between: Callable[..., Tensor], name: str) -> None:
    """What comes behind it is packed; what is before it is not."""
    region = packed(Encoder(first, between))
    assert (region.sites, region.packed) == (2, 1)
    assert any(f"{name} may mix" in stop for stop in region.stops)
    assert left(Encoder(first, between, layers=1)).reason.startswith(f"{name} may mix")


def test_dropout_that_draws_as_eager() -> None:
    class On(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Encoder(lambda model, x, mask: F.dropout(x, 0.5, training=True)[:, 0], layers=1)

        def forward(self, words: Tensor, mask: Tensor) -> Tensor:
            return self.encoder(words, mask)

    with torch._inductor.config.patch(fallback_random=True):
        regions, _, _ = ran(On(), masks()[:1])
    assert [r.outcome for r in regions] == ["left"] and "dropout may mix" in regions[0].reason


class Masked(nn.Module):
    """An attention whose mask is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(E, E)

    def forward(self, words: Tensor, keep: Tensor) -> Tensor:
        x = self.linear(F.one_hot(words % E, E).float())
        y = x.view(B, L, H, -1).transpose(1, 2)
        return F.scaled_dot_product_attention(y, y, y, keep)[:, :, 0]


def test_a_mask_that_is_not_padding() -> None:
    """One for all sequences, as a triangle in a buffer, can be none: nothing is told of it."""

    def keep(*shape: int) -> Tensor:
        return (torch.rand(shape) < 0.5) | torch.eye(L, dtype=torch.bool)

    assert "head to head" in left(Masked(), [keep(B, H, L, L)]).reason
    assert ran(Masked(), [keep(1, 1, L, L)])[0] == []


def test_a_mask_of_each_query() -> None:
    """What no query of a sequence keeps is padding, and there may be none."""
    keep = (torch.rand(B, 1, L, L) < 0.5) | torch.eye(L, dtype=torch.bool)
    short = keep & (torch.arange(L) < torch.tensor([3, 24, 8, 9])[:, None, None, None])
    short[..., 0] = True
    packed(Masked(), [keep, short])


def test_rows_that_are_written_in_place_are_left() -> None:
    def written(model: Any, x: Tensor, mask: Tensor) -> Tensor:
        x = x + 0
        x[:, 1] = x[:, 2]
        return x[:, 0]

    assert left(Encoder(written, layers=1)).outcome == "left"


def test_a_mask_that_is_written_later_tells_nothing() -> None:
    def pooled(model: Any, x: Tensor, mask: Tensor) -> Tensor:
        weights = mask.clone()
        weights[:, 3] = 1
        return (x * weights[..., None]).sum(1)

    assert left(Encoder(pooled, layers=1)).reason.startswith("mul may mix")


def test_attention_alone_is_left() -> None:
    def alone(x: Tensor, mask: Tensor) -> Tensor:
        y = x.view(B, L, H, E // H).transpose(1, 2)
        return F.scaled_dot_product_attention(y, y, y, mask.bool()[:, None, None, :])[:, :, 0]

    class Alone(nn.Module):
        def forward(self, words: Tensor, mask: Tensor) -> Tensor:
            return alone(F.one_hot(words % E, E).float(), mask)

    assert "nothing but the attention itself" in left(Alone(), masks()[:1]).reason


def test_what_is_small_is_left() -> None:
    model, words, mask = Encoder(first).eval(), ids(), masks()[0]
    with torch.no_grad(), attn_pass.record() as report:
        backend = attn_pass.wrap("eager", rules={"*": ("cpu_kernel",)})
        torch.testing.assert_close(torch.compile(model, backend=backend)(words, mask), model(words, mask))
    assert "too little beside finding the rows" in report.regions[0].reason


def test_where_little_is_padding_all_rows_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program decides for every batch: no more rows are counted where a new number of them costs more."""
    counted: list[int] = []
    monkeypatch.setattr(cost.Cost, "too_small", "")
    monkeypatch.setattr(cost.Cost, "least_padding", 0.1)

    def tell(x: Tensor, keep: Tensor) -> Tensor:
        return x * 1.0

    def run(gm: Any, inputs: Any) -> Any:
        (rows,) = {n.target for n in gm.graph.nodes if "nonzero" in str(n.target)}
        found = [n for n in gm.graph.nodes if n.target is rows]

        class Counting(torch.fx.Interpreter):
            def run_node(self, n: Any) -> Any:
                result = super().run_node(n)
                if n in found:
                    counted.append(len(result))
                return result

        return lambda *given: Counting(gm).run(*given)

    torch._dynamo.reset()
    model, words = Encoder(first, tell).eval(), ids()
    compiled = torch.compile(model, backend=attn_pass.wrap(run, rules={"*": ("cpu_kernel",)}, on_error="raise"))
    batches = [(torch.arange(L) < torch.tensor(n)[:, None]).long() for n in ((24, 22, 23, 24), (24, 12, 3, 20))]
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for mask in batches:
            torch.testing.assert_close(compiled(words, mask), model(words, mask), rtol=1e-4, atol=1e-5)
    assert counted == [B * L, 24 + 12 + 3 + 20]


# ---------------------------------------------------------------- options


def test_by_your_word_rows_of_padding_are_zeros() -> None:
    model = Encoder(lambda model, x, mask: x, layers=1)
    regions, results, wanted = ran(model, masks()[:1], assume_padding_unused=True)
    assert regions[0].outcome == "packed" and "assume_padding_unused" in regions[0].assumptions[0]
    kept = masks()[0].bool()
    torch.testing.assert_close(results[0][kept], wanted[0][kept], rtol=1e-4, atol=1e-5)
    assert not results[0][~kept].any() and wanted[0][~kept].any()


def test_turned_off() -> None:
    regions, _, _ = ran(Encoder(first, layers=1), masks()[:1], unpad=False)
    assert regions == []


def test_strict_numerics_do_not_assume_finite_padding() -> None:
    model = Encoder(mean, eager=False, layers=1)
    batches = masks()[:1]
    assert FINITE in packed(model, batches).assumptions[0]
    regions, _, _ = ran(model, batches, numerics="strict")
    assert [r.outcome for r in regions] == ["left"]


FINITE = "hold finite numbers"


# ---------------------------------------------------------------- the report, and Inductor


def test_the_report_says_the_proof() -> None:
    region = packed(Encoder(first), masks()[:1])
    text = "\n".join(region.lines())
    assert "2 of 2 attentions run on packed rows of (4, 24)" in text and "linear x12" in text
    assert "exit: only the first position is read" in text
    assert RegionReport.from_dict(region.to_dict()).to_dict() == region.to_dict()
    report = attn_pass.Report(regions=[region])
    again = attn_pass.Report.from_dict(report.to_dict())
    assert [r.to_dict() for r in again.regions] == [region.to_dict()]
    report.mark_left("for a reason")
    assert region.outcome == "left" and "for a reason" in region.lines()[0]


def test_one_program_serves_every_batch_under_inductor() -> None:
    assert [r.outcome for r in compiled_once(Encoder(mean).eval())] == ["packed"]


@pytest.mark.parametrize("eager", [True, False])
def test_what_is_frozen_is_read_between_a_mask_and_its_attention(eager: bool) -> None:
    """With Inductor's ``freezing`` a parameter is an attribute, which the graph reads where it is used first."""
    with torch._inductor.config.patch(freezing=True):
        assert packed(Encoder(first, eager=eager)).packed == 2
