"""Linear layers of one input that make queries, keys and values become one product, with the same results."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from padded_encoders import Encoder, first, ids, masks
from projected import B, E, H, L, Projected, Traced, compared, joined
from torch import Tensor, nn

import attn_pass
from attn_pass.devices.cpu.kernel import build
from attn_pass.entries.export import exported, rewrite_exported
from attn_pass.options import make_options


@pytest.mark.parametrize("bias", [(True, True, True), (False, False, False), (True, False, True), (False, True, False)])
def test_biases_of_all_of_none_and_of_some(bias: tuple[bool, bool, bool]) -> None:
    model = Projected(bias)
    traced = compared(model)
    (record,) = traced.records
    assert record.outcome == "joined" and record.roles == ("query", "key", "value") and record.operands == 3
    assert record.widths == (E, E, E) and record.features == E
    assert traced.products == 2


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_heads_have_unequal_widths(kv_heads: int) -> None:
    assert joined(Projected(kv_heads=kv_heads)).widths == (E, kv_heads * E // H, kv_heads * E // H)


class Between(Projected):
    """Queries and keys are turned by position, and normalised, before the attention by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(E // H)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.view(B, L, H, E // H).transpose(1, 2) for t in (q, k, v))
        angle = torch.arange(L)[:, None] * torch.arange(1, E // H + 1)
        q, k = (
            self.norm(t) * angle.cos() + torch.cat((-t[..., E // H // 2 :], t[..., : E // H // 2]), -1) * angle.sin()
            for t in (q, k)
        )
        return ((q @ k.transpose(2, 3) * 0.3).softmax(-1) @ v).transpose(1, 2).reshape(B, L, E)


def test_what_stands_between_a_layer_and_its_attention_does_not_matter() -> None:
    assert joined(Between()).operands == 3


class Thrice(Projected):
    def inputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.double() * 2, x.double() * 2, x.double() * 2


def test_an_input_that_is_computed_for_each() -> None:
    model = Thrice().double()
    x = torch.randn(B, L, E)
    traced = Traced(model)
    torch.testing.assert_close(traced(x), model(x))
    assert [r.outcome for r in traced.records] == ["joined"]


class Cross(nn.Module):
    """Two layers that look at one state of an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Projected() for _ in range(2))

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer.attend(layer.q(x), layer.k(state), layer.v(state))
        return x


def test_keys_and_values_of_one_encoder_state_over_all_layers() -> None:
    traced = compared(Cross(), torch.randn(B, L, E), torch.randn(B, L, E))
    outcomes = {(r.outcome, r.roles, r.reason if r.outcome == "left" else "") for r in traced.records}
    assert outcomes == {
        ("joined", ("key", "value", "key", "value"), ""),
        ("left", ("query",), "no other projection has the same input"),
    }
    assert traced.products == 3


class Lora(Projected):
    """Low-rank additions beside two of the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(E, 4, bias=False), nn.Linear(4, E, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        more = self.up(self.down(x))
        return self.out(self.attend(self.q(x) + more, self.k(x), self.v(x) + more))


def test_what_is_added_to_a_result_is_added_to_its_columns() -> None:
    assert any(r.outcome == "joined" and r.widths == (E, E, E) for r in compared(Lora()).records)


class Returned(Projected):
    """Keys and values are returned for a cache: values as they are in memory, keys as a copy."""

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.q(x), self.k(x), self.v(x)
        return self.out(self.attend(q, k, v)), k.view(B, L, H, -1) * 1.0, v.view(B, L, H, -1)


def test_a_result_that_is_returned_keeps_its_memory() -> None:
    model, x = Returned(), torch.randn(B, L, E)
    traced = Traced(model)
    for got, wanted in zip(traced(x), model(x)):
        torch.testing.assert_close(got, wanted)
        assert got.stride() == wanted.stride()
    by_outcome = {r.outcome: r for r in traced.records}
    assert by_outcome["joined"].roles == ("query", "key") and by_outcome["left"].roles == ("value",)
    assert by_outcome["left"].reason == "the memory layout of its result is observable"


class Turned(Projected):
    """Products with weights that are transposed, in three spellings."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = x @ self.q.weight.T, torch.matmul(x, self.k.weight.transpose(-1, 0)), x @ self.v.weight.mT
        return self.out(self.attend(q, k, v))


def test_products_with_transposed_weights() -> None:
    assert joined(Turned()).widths == (E, E, E)


def test_sizes_that_are_known_at_run_time_only() -> None:
    model = Projected().eval()
    traced = Traced(model)
    torch._dynamo.reset()
    dynamic = torch.compile(model, backend=traced._backend, fullgraph=True, dynamic=True)
    with (
        torch.no_grad(),
        torch._inductor.config.patch(freezing=True),
        torch._dynamo.config.patch(error_on_recompile=True),
    ):
        for length in (L, 3, 17):
            x = torch.randn(3, length, E)
            torch.testing.assert_close(dynamic(x), model(x))
    assert [r.outcome for r in traced.records] == ["joined"]


def test_autocast_rounds_as_it_did() -> None:
    model, x = Projected(), torch.randn(B, L, E)
    with torch.autocast("cpu", torch.bfloat16):
        traced = Traced(model)
        got, wanted = traced(x), model(x)
    assert got.dtype is torch.bfloat16 and [r.outcome for r in traced.records] == ["joined"]
    as_near(got, wanted, copy.deepcopy(model).double()(x.double()))


def test_in_bfloat16() -> None:
    model, x = Projected().bfloat16(), torch.randn(B, L, E, dtype=torch.bfloat16)
    traced = Traced(model)
    as_near(traced(x), model(x), copy.deepcopy(model).double()(x.double()))
    assert [r.outcome for r in traced.records] == ["joined"]


def as_near(got: torch.Tensor, wanted: torch.Tensor, exact: torch.Tensor) -> None:
    """A wider product is cut into other pieces, and rounds otherwise by an amount of the same size."""
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    errors = [float((x.detach().double() - exact.detach()).abs().max()) for x in (got, wanted)]
    assert errors[0] <= 1.5 * errors[1], errors


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_exported_programs(decomposed: bool, bias: bool) -> None:
    model, x = Projected((bias, bias, bias)).eval(), torch.randn(B, L, E)
    program = exported(model, (x,), None, None)
    if decomposed:
        program = program.run_decompositions()
    report = rewrite_exported(program, make_options(choose="fused"), "inductor", folds=True).report
    assert [r.outcome for r in report.projections] == ["joined"]
    torch.testing.assert_close(program.module()(x), model(x))


@pytest.mark.skipif(bool(build.missing()), reason="no compiler for the CPU kernel")
def test_on_packed_rows() -> None:
    """Where rows of padding are not computed, projections are those of packed rows."""
    model, words = Encoder(first), ids()
    traced = Traced(model, targets=("cpu_kernel",))
    exact = copy.deepcopy(model).double()
    for mask in masks():
        got = traced(words, mask)
        torch.testing.assert_close(got, exact(words, mask).float(), rtol=1e-4, atol=1e-5)
    (record,) = (r for r in traced.records if r.outcome == "joined")
    assert record.groups == 2 and record.operands == 6


def test_the_report_tells() -> None:
    options = {"choose": "fused"}
    model = Projected().eval()
    torch._dynamo.reset()
    with torch.no_grad(), attn_pass.record() as report:
        torch.compile(model, backend=attn_pass.wrap("eager", **options))(torch.randn(B, L, E))
    (record,) = report.projections
    assert record.outcome == "left" and record.predicted_us["join"] < record.predicted_us["leave"]
    assert "projections not joined: query, key, value (32 to 32 + 32 + 32 features): " in report.table(verbose=True)
    assert "multiplied" not in str(report)
    again = attn_pass.Report.from_dict(report.to_dict())
    assert again.projections[0].line() == record.line()
    assert "Projections" in report.to_html()


def test_what_a_frozen_package_would_be() -> None:
    model, x = Projected().eval(), torch.randn(B, L, E)
    for frozen, outcome in ((True, "joined"), (False, "left")):
        with torch._inductor.config.patch(freezing=frozen):
            report = attn_pass.explain(model, x, attn_pass_aot=True, attn_pass_options={"choose": "fused"})
        assert [r.outcome for r in report.projections] == [outcome]


class OnALayerOfAnother(Projected):
    """The input of the second attention's layers is one of the first's, which is replaced before them."""

    def __init__(self) -> None:
        super().__init__()
        self.z, self.q2 = nn.Linear(E, E), nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        q, z = self.q(x), self.z(x)
        return self.attend(q, z, z) + self.attend(self.q2(z), self.k(z), self.v(z))


def test_a_layer_that_is_joined_is_the_input_of_others() -> None:
    records = compared(OnALayerOfAnother()).records
    assert [(r.outcome, r.roles) for r in records][-1] == ("joined", ("query", "key", "value"))
    assert sum(r.outcome == "joined" for r in records) == 2


class ZerosOfALaterProduct(nn.Module):
    """The first group's first layer stays apart, so that its product stands behind that of the second group."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (Projected((True, True, False)) for _ in range(2))

    def forward(self, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
        key = self.a.k(one)
        b = self.b.attend(self.b.q(two), self.b.k(two), self.b.v(two))
        return self.a.attend(self.a.q(one), key, self.a.v(one)) + b, key


def test_zeros_for_missing_biases_are_each_group_s_own() -> None:
    inputs = (torch.randn(B, L, E), torch.randn(B, L, E))
    model = ZerosOfALaterProduct()
    traced = Traced(model)
    torch.testing.assert_close(traced(*inputs), model(*inputs), rtol=1e-5, atol=1e-5)
    assert sum(r.outcome == "joined" for r in traced.records) == 2
