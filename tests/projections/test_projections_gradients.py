"""Parameters in one buffer have the gradients of parameters apart: none where none comes."""

from __future__ import annotations

import copy

import pytest
import torch
from projected import B, E, L, Projected, compiled
from torch import Tensor

import attn_pass


class WithoutGradient(Projected):
    """Keys and values are made without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)
        with torch.no_grad():
            k, v = self.k(x), self.v(x)
        return self.out(self.attend(q, k, v))


class Stopped(Projected):
    """The gradient of keys goes no further."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, k.detach(), v)


class StoppedByMode(Projected):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            k = k * 2.0
        return super().attend(q, k, v)


class Watched(Projected):
    """What is asked of keys beside the attention has no gradient either."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, k.detach(), v) * (k.argmax(-1, keepdim=True) > 0).to(q.dtype)


SOME = "only some of its layers get a gradient, and the parameters of the others would get zeros"


@pytest.mark.parametrize(
    ("kind", "roles"), [(WithoutGradient, ("key", "value")), (Stopped, ()), (StoppedByMode, ()), (Watched, ())]
)
def test_a_parameter_that_no_gradient_comes_to(
    kind: type[Projected], roles: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradient is none, not zeros: weight decay would change it."""
    model, x = kind(), torch.randn(B, L, E)
    eager = copy.deepcopy(model)
    run = compiled(model, monkeypatch)
    with attn_pass.record() as report:
        for trained, forward in ((model, run), (eager, eager)):
            optimizer = torch.optim.AdamW(trained.parameters(), weight_decay=0.5)
            for _ in range(2):
                forward(x).square().sum().backward()
                optimizer.step()
    joined = [r.roles for r in report.projections if r.outcome == "joined"]
    assert joined == ([roles] if roles else []) and (roles or SOME in {r.reason for r in report.projections})
    for (name, got), wanted in zip(model.named_parameters(), eager.parameters()):
        assert (got.grad is None) == (wanted.grad is None), name
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4, msg=name)


def test_weights_that_are_not_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie beside those that are, which have their gradients alone."""
    model, x = Projected(), torch.randn(B, L, E)
    model.k.weight.requires_grad_(False)
    model.v.bias.requires_grad_(False)
    eager = copy.deepcopy(model)
    run = compiled(model, monkeypatch)
    with attn_pass.record() as report:
        run(x).square().sum().backward()
    eager(x).square().sum().backward()
    assert [r.outcome for r in report.projections] == ["joined"]
    for (name, got), wanted in zip(model.named_parameters(), eager.parameters()):
        assert (got.grad is None) == (wanted.grad is None), name
        if got.grad is not None and wanted.grad is not None:
            torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-4, atol=1e-4, msg=name)


def test_what_training_takes_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Projected(), torch.randn(B, L, E)
    run = compiled(model, monkeypatch)
    with attn_pass.record() as report:
        run(x)
        with torch.no_grad():
            run(x)
    trained, called = (r.predicted_us for r in report.projections)
    assert trained["join"] > trained["leave"] > called["join"] > called["leave"]
