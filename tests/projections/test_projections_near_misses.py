"""Linear layers that look alike and stay products of their own, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from projected import B, E, L, Projected, Traced, compared, left
from torch import Tensor, nn
from torch.nn import functional as F

from attn_pass.devices.registry import device_for

ALONE = "no other projection has the same input"


class Different(Projected):
    def inputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, x + 1, x * 2


class Casts(Projected):
    """The same operation on the same tensor, with another number."""

    def inputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x * 1.0, x * 2.0, x * 3.0


@pytest.mark.parametrize("model", [Different, Casts])
def test_inputs_that_differ(model: type[nn.Module]) -> None:
    assert left(model()) == [ALONE] * 3


class Twice(Projected):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attend(self.q(x), self.q(x), self.v(x)))


def test_a_weight_that_is_used_twice() -> None:
    reasons = left(Twice())
    assert "its weight or its bias is used elsewhere as well" in reasons


class Tied(Projected):
    """The query's weight is the output's, too, by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.out.weight = self.q.weight


def test_a_weight_that_another_layer_has_as_well() -> None:
    records = compared(Tied()).records
    assert ("left", "its weight or its bias is used elsewhere as well") in {(r.outcome, r.reason) for r in records}
    assert {r.roles for r in records if r.outcome == "joined"} == {("key", "value")}


class WrittenInput(Projected):
    """The input is another one when keys are made."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2.0
        q = self.q(x)
        x.add_(1.0)
        return self.out(self.attend(q, self.k(x), self.v(x)))


def test_an_input_that_is_written_between() -> None:
    model, x = WrittenInput(), torch.randn(B, L, E)
    records = compared(model, x).records
    assert {r.reason for r in records if r.roles != ("query",)} == {"its input is written between the products"}
    assert all(r.outcome == "left" for r in records)


class WrittenBefore(Projected):
    """What the input is made of is another tensor's elements when keys are made, by the same operations."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2.0
        q = self.q(x * 3.0 + 1.0)
        x.add_(1.0)
        return self.out(self.attend(q, self.k(x * 3.0 + 1.0), self.v(x * 3.0 + 1.0)))


def test_what_an_input_is_made_of_is_written_between() -> None:
    records = compared(WrittenBefore()).records
    assert {r.roles for r in records if r.outcome == "joined"} == {("key", "value")}


class WrittenResult(Projected):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        k.mul_(2.0)
        q += 1
        return self.out(self.attend(q, k, v))


def test_results_that_are_written() -> None:
    assert set(left(WrittenResult())) == {"its result is written in place", ALONE}


class WrittenWeight(Projected):
    def __init__(self) -> None:
        super().__init__()
        self.calls = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.k.weight.data.mul_(1.5)
        return self.out(self.attend(self.q(x), self.k(x), self.v(x)))


def test_a_weight_that_the_program_writes() -> None:
    model, x = WrittenWeight(), torch.randn(B, L, E)
    traced = Traced(model, frozen=False, join_projections="parameters")
    before = model.k.weight.detach().clone()
    got = traced(x)
    model.k.weight.data.copy_(before)
    torch.testing.assert_close(got, model(x))
    assert [r.roles for r in traced.records if r.outcome == "joined"] == [("query", "value")]


def test_autocast_to_the_other_type_of_half_precision() -> None:
    """Under which torch.cat refuses what a product takes."""
    model, x = Projected().half(), torch.randn(B, L, E, dtype=torch.half)
    with torch.autocast("cpu", torch.bfloat16):
        traced = Traced(model)
        got, wanted = traced(x), model(x)
    torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)
    assert "autocast to bfloat16 joins no tensors of float16" in {r.reason for r in traced.records}


class Computed(Projected):
    """A weight that the program computes."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attend(F.linear(x, self.q.weight * 2.0), self.k(x), self.v(x)))


def test_a_weight_that_is_computed() -> None:
    records = compared(Computed()).records
    assert {r.roles for r in records if r.outcome == "joined"} == {("key", "value")}


class OneNumber(Projected):
    """A bias that is one number for all features."""

    def __init__(self) -> None:
        super().__init__()
        self.k.bias = nn.Parameter(torch.randn(1))


def test_a_bias_that_is_broadcast() -> None:
    records = compared(OneNumber()).records
    assert ("left", "its bias is one number for all features") in {(r.outcome, r.reason) for r in records}
    assert {r.roles for r in records if r.outcome == "joined"} == {("query", "value")}


class ByColumns(Projected):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attend(x @ self.q.weight, x @ self.k.weight, x @ self.v.weight))


def test_weights_by_columns() -> None:
    assert set(left(ByColumns())) == {"its weight is stored by columns, unlike a linear layer's"}


class Passed(Projected):
    """Weights that are inputs of the program."""

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return self.attend(F.linear(x, a), F.linear(x, b), self.v(x))


def test_weights_that_are_passed_in() -> None:
    reasons = left(Passed(), torch.randn(B, L, E), torch.randn(E, E), torch.randn(E, E))
    assert "its weight or its bias is no parameter of the program" in reasons


class OneProduct(Projected):
    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Linear(E, 3 * E)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attend(*self.all(x).chunk(3, -1)))


def test_one_product_already() -> None:
    traced = compared(OneProduct())
    assert [(r.reason, r.operands) for r in traced.records] == [("it is one product already", 3)]


def test_weights_that_are_no_constants() -> None:
    model, x = Projected(), torch.randn(B, L, E)
    traced = Traced(model, frozen=False)
    traced(x)
    (record,) = traced.records
    assert record.reason.startswith("its weights are inputs of the compiled code") and traced.products == 4


def test_weights_whose_values_are_not_told() -> None:
    """As in Inductor's own hook, which is given a graph alone."""
    from attn_pass.entries.transaction import decide
    from attn_pass.options import make_options

    reasons: list[str] = []

    def backend(gm: Any, inputs: Any) -> Any:
        report = decide(gm, make_options(choose="fused"), "compile", "hook").report
        reasons.extend(r.reason for r in report.projections)
        return gm.forward

    model, x = Projected(), torch.randn(B, L, E)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    (reason,) = reasons
    assert reason.startswith("its weights are inputs of the compiled code")


def test_off() -> None:
    assert compared(Projected(), join_projections="off").records == []


def test_too_little_is_gained() -> None:
    from attn_pass.projections.cost import predicted, too_little

    rates = device_for(torch.device("cpu"), None, None)
    assert not too_little(predicted(rates, torch.float32, 1, 256, (256, 256, 256)))
    assert "by prediction" in too_little(predicted(rates, torch.float32, 2048, 4096, (4096, 4096, 4096)))


def test_a_buffer_takes_time_in_training() -> None:
    """Three layers save too few calls for that; keys and values of all layers of a decoder save enough."""
    from attn_pass.projections.cost import predicted, too_little

    rates = device_for(torch.device("cpu"), None, None)
    three, many = (predicted(rates, torch.bfloat16, 16, 256, (256,) * n, buffers=2, trained=True) for n in (3, 48))
    assert "for the buffers that its parameters lie in" in too_little(three)
    assert not too_little(many)


def test_a_buffer_takes_time_at_each_call() -> None:
    """More in float32 than three layers with biases save."""
    from attn_pass.projections.cost import predicted, too_little

    rates = device_for(torch.device("cpu"), None, None)
    looked, constant = (predicted(rates, torch.float32, 1, 256, (256,) * 3, buffers=n) for n in (2, 0))
    assert "for the buffers that its parameters lie in" in too_little(looked) and not too_little(constant)


def test_gradients_are_wanted() -> None:
    model, x = Projected(), torch.randn(B, L, E)
    traced = Traced(model, grad=True)
    traced(x).sum().backward()
    assert all(r.outcome == "left" for r in traced.records) and traced.products == 4


class Loud(torch.Tensor):
    """A subclass with the behaviour of a tensor."""


def test_a_subclass_of_tensor() -> None:
    from attn_pass.projections.groups import refused

    assert "subclass" in refused(torch.randn(4, 4).as_subclass(Loud))
    assert "sparse" in refused(torch.eye(4).to_sparse())
    assert "quantised" in refused(torch.zeros(4, 4, dtype=torch.int8))
    held: Any = nn.Parameter(torch.randn(4, 4))
    assert refused(held) == ""
