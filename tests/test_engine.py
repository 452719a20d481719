"""The engine as a user sees it: real programs, faults that must stay with their site, and bodies."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node
from toy_engine import UNLOWERABLE, refused_by_inductor

import attn_pass
from attn_pass.errors import AttnPassWarning
from attn_pass.graph.edit import Plan, Value
from attn_pass.patterns import softmax
from attn_pass.planner import choose as choose_module
from attn_pass.planner import overrides
from attn_pass.targets.base import Offer, Setting
from attn_pass.targets.sdpa import Sdpa


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Hand-written attention without a mask."""
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.size(-1)), -1) @ v


class Twice(nn.Module):
    """Two attentions, so that a fault in one can be told from the other."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        first = attention(q, k, v)
        return attention(first + q, k, v)


def inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, 3, n, 16, generator=generator) for n in (7, 11, 11))


def run(model: Any, args: Sequence[torch.Tensor], **options: Any) -> tuple[torch.Tensor, attn_pass.Report]:
    torch._dynamo.reset()
    with attn_pass.record() as report, torch.no_grad():
        out = torch.compile(model, backend=attn_pass.wrap("aot_eager_default_partitioner", choose="fused", **options))(
            *args
        )
    return out, report


def test_both_sites_are_rewritten_and_equal_eager() -> None:
    args = inputs()
    out, report = run(Twice(), args)
    assert [s.outcome for s in report.sites] == ["rewritten", "rewritten"]
    torch.testing.assert_close(out, Twice()(*args))


def test_a_fault_in_the_reading_of_one_site_leaves_that_site_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = softmax.describe, []

    def faulty(parts: Any, used: Any) -> Any:
        calls.append(parts)
        if len(calls) == 1:
            raise ZeroDivisionError("injected")
        return original(parts, used)

    monkeypatch.setattr(softmax, "describe", faulty)
    args = inputs()
    with pytest.warns(AttnPassWarning, match=r"test_engine.py:\d+ in attention") as caught:
        out, report = run(Twice(), args)
    assert len(caught) == 1
    assert [s.outcome for s in report.sites] == ["left", "rewritten"]
    torch.testing.assert_close(out, Twice()(*args))


def test_a_fault_in_an_emission_leaves_the_site_and_names_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = Sdpa.emit, []

    def faulty(self: Sdpa, plan: Plan, nodes: Sequence[Node], offer: Offer, setting: Setting) -> Value:
        calls.append(offer)
        if len(calls) == 2:
            raise RuntimeError("injected")
        return original(self, plan, nodes, offer, setting)

    monkeypatch.setattr(Sdpa, "emit", faulty)
    args = inputs()
    with pytest.warns(AttnPassWarning, match=r"test_engine.py:\d+ in attention"):
        out, report = run(Twice(), args)
    assert [s.outcome for s in report.sites] == ["rewritten", "left"]
    assert "injected" in report.sites[1].reason
    torch.testing.assert_close(out, Twice()(*args))


def test_with_on_error_raise_the_fault_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(*_: Any) -> Value:
        raise RuntimeError("injected")

    monkeypatch.setattr(Sdpa, "emit", faulty)
    with pytest.raises(Exception, match="injected"):
        run(Twice(), inputs(), on_error="raise")


class Unlowerable(Sdpa):
    """Emits an operator that Inductor refuses to lower."""

    name = "unlowerable"

    def emit(self, plan: Plan, nodes: Sequence[Node], offer: Offer, setting: Setting) -> Value:
        return plan.call(UNLOWERABLE, super().emit(plan, nodes, offer, setting))


def test_the_original_compiles_if_inductor_cannot_lower_the_rewrite(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = (Unlowerable(),)
    monkeypatch.setattr(choose_module, "all_targets", lambda: targets)
    monkeypatch.setattr(overrides, "all_targets", lambda: targets)
    args = inputs()
    torch._dynamo.reset()
    with (
        refused_by_inductor(),
        torch._inductor.config.patch(force_disable_caches=True),
        attn_pass.record() as report,
        torch.no_grad(),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        out = torch.compile(Twice(), backend=attn_pass.backend, options={"choose": "fused"})(*args)
    ours = [w for w in caught if issubclass(w.category, AttnPassWarning)]
    assert len(ours) == 1 and "test_engine.py" in str(ours[0].message)
    assert [s.outcome for s in report.sites] == ["left", "left"]
    assert all("could not lower" in s.reason for s in report.sites)
    torch.testing.assert_close(out, Twice()(*args))


def test_an_unknown_target_names_the_nearest() -> None:
    with pytest.raises(Exception, match="sdpa"):
        run(Twice(), inputs(), targets=("spda",))


# ---------------------------------------------------------------- bodies of higher-order operators


class Checkpointed(nn.Module):
    """A causal mask made outside the checkpointed body: inside it is a bare placeholder."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keep = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).tril()

        def body(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            scores = (q @ k.transpose(-1, -2)).masked_fill(~keep, float("-inf"))
            return torch.softmax(scores, -1) @ v

        return torch.utils.checkpoint.checkpoint(body, q, k, v, keep, use_reentrant=False)


def test_a_checkpointed_body_is_read_with_what_its_caller_passes() -> None:
    q, k, v = (torch.randn(2, 3, 8, 16, requires_grad=True) for _ in range(3))
    torch._dynamo.reset()
    with attn_pass.record() as report:
        out = torch.compile(Checkpointed(), backend=attn_pass.wrap("aot_eager_default_partitioner", choose="fused"))(
            q, k, v
        )
        gradients = torch.autograd.grad(out.sin().sum(), (q, k, v))
    assert [(s.outcome, s.mask) for s in report.sites] == [("rewritten", "causal")]
    expected = Checkpointed()(q, k, v)
    torch.testing.assert_close(out, expected)
    for got, want in zip(gradients, torch.autograd.grad(expected.sin().sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(got, want)


class Branches(nn.Module):
    """Attention in both branches of torch.cond."""

    def forward(self, flag: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.cond(
            flag.sum() > 0, lambda q, k, v: attention(q, k, v), lambda q, k, v: attention(q, k, v) * 2.0, (q, k, v)
        )


@pytest.mark.parametrize("positive", [True, False])
def test_both_branches_of_a_cond_are_rewritten(positive: bool) -> None:
    args = (torch.ones(2) if positive else -torch.ones(2), *inputs())
    out, report = run(Branches(), args)
    assert [s.outcome for s in report.sites] == ["rewritten", "rewritten"]
    want = attention(*args[1:]) * (1.0 if positive else 2.0)
    torch.testing.assert_close(out, want)


class SharedKeysHalf(nn.Module):
    """Seed S4 as it was reported: half autocast, which export turns into a higher-order region."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("decompose", [False, True])
def test_seed_s4_folds_inside_an_exported_autocast_region(decompose: bool) -> None:
    q, k, v = torch.randn(33, 4, 1, 32), torch.randn(1, 4, 64, 32), torch.randn(1, 4, 64, 32)
    shapes = {"q": {0: torch.export.Dim("b", min=1, max=2048)}, "k": None, "v": None}
    with torch.no_grad():
        program = torch.export.export(SharedKeysHalf(), (q, k, v), dynamic_shapes=shapes)
        if decompose:
            program = program.run_decompositions()
        report = attn_pass.rewrite(program)
        assert [s.outcome for s in report.sites] == ["rewritten"], str(report)
        assert report.sites[0].poor_cases == ("shared_kv",)
        for batch in (1, 7, 33, 100):
            other = torch.randn(batch, 4, 1, 32)
            want = F.scaled_dot_product_attention(other.double(), k.double(), v.double())
            got = program.module()(other, k, v)
            assert got.dtype == torch.bfloat16
            torch.testing.assert_close(got.double(), want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("decompose", [False, True])
def test_exported_programs_are_rewritten_in_both_dialects(decompose: bool) -> None:
    args = inputs()
    with torch.no_grad():
        program = torch.export.export(Twice(), args)
        if decompose:
            program = program.run_decompositions()
        report = attn_pass.rewrite(program, choose="fused")
        assert [s.outcome for s in report.sites] == ["rewritten", "rewritten"], str(report)
        torch.testing.assert_close(program.module()(*args), Twice()(*args))


def test_the_pass_adds_no_guard_under_dynamic_shapes() -> None:
    seen: list[int] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        env = next(v.node.shape_env for v in example_inputs if isinstance(v, torch.SymInt))
        seen.append(len(env.guards))
        return attn_pass.wrap(lambda g, _: seen.append(len(env.guards)) or g.forward, choose="fused")(
            gm, example_inputs
        )

    torch._dynamo.reset()
    with torch.no_grad(), attn_pass.record() as report:
        compiled = torch.compile(Twice(), backend=backend, dynamic=True)
        compiled(*inputs())
    assert len(report.rewritten) == 2
    assert seen[0] == seen[1]


class Detached(nn.Module):
    """detach() between scores and softmax: a gradient the program does not have must not appear."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax((q @ k.transpose(-1, -2)).detach(), -1) @ v


def test_detach_is_not_looked_through_in_exported_programs() -> None:
    args = inputs()
    program = torch.export.export(Detached(), args)
    report = attn_pass.rewrite(program, choose="fused")
    assert [s.outcome for s in report.sites] == ["left"]
    assert "detach" in report.sites[0].reason


def test_a_product_made_without_gradients_keeps_none() -> None:
    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scores = q @ k.transpose(-1, -2)
        return torch.softmax(scores, -1) @ v

    q, k, v = (torch.randn(2, 3, 8, 16, requires_grad=True) for _ in range(3))
    torch._dynamo.reset()
    with attn_pass.record() as report:
        torch.compile(fn, backend=attn_pass.wrap("aot_eager_default_partitioner", choose="fused"))(
            q, k, v
        ).sum().backward()
    assert report.sites[0].outcome == "left" and "another context" in report.sites[0].reason
    assert v.grad is not None and not (q.grad is not None and q.grad.abs().max() > 0)


def test_unused_weights_are_not_requested() -> None:
    layer = nn.MultiheadAttention(16, 4, batch_first=True, dropout=0.1).eval()
    x = torch.randn(2, 5, 16)
    layer.requires_grad_(False)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x + 1, x, x)[0]

    model = Model().train()
    layer.dropout = 0.0
    torch._dynamo.reset()
    with attn_pass.record() as report:
        out = torch.compile(model, backend=attn_pass.wrap("aot_eager_default_partitioner", choose="fused"))(x)
    sites = [s for s in report.sites if s.form == "nn.MultiheadAttention"]
    assert [(s.outcome, s.target) for s in sites] == [("rewritten", "sdpa")], str(report)
    torch.testing.assert_close(out, layer(x + 1, x, x)[0])


@pytest.mark.parametrize("spelling", ["returned", "relu", "reshape", "view"])
def test_nobody_can_tell_the_layout_of_the_result(spelling: str) -> None:
    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = attention(q, k, v.transpose(1, 2))
        if spelling == "relu":
            return out.relu()
        if spelling == "reshape":
            return out.transpose(1, 2).reshape(2, 5, 48)
        return out.view(6, 5, 16) if spelling == "view" else out

    args = (torch.randn(2, 3, 5, 16), torch.randn(2, 3, 7, 16), torch.randn(2, 7, 3, 16))
    out, report = run(fn, args, on_error="raise")
    assert len(report.rewritten) == 1
    want = fn(*args)
    assert out.stride() == want.stride()
    torch.testing.assert_close(out, want)


def test_a_checkpoint_without_gradients_is_left() -> None:
    q, k, v = (torch.randn(2, 3, 8, 16) for _ in range(3))
    torch._dynamo.reset()
    with attn_pass.record() as report:
        out = torch.compile(Checkpointed(), backend=attn_pass.wrap("aot_eager_default_partitioner", choose="fused"))(
            q, k, v
        )
    assert [s.outcome for s in report.sites] == ["left"]
    torch.testing.assert_close(out, Checkpointed()(q, k, v))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_checkpoint_called_where_gradients_are_off_is_rewritten(mode: Any) -> None:
    q, k, v = (torch.randn(2, 3, 8, 16) for _ in range(3))
    torch._dynamo.reset()
    with attn_pass.record() as report, mode():
        out = torch.compile(Checkpointed(), backend=attn_pass.wrap("aot_eager_default_partitioner", choose="fused"))(
            q, k, v
        )
    assert [s.outcome for s in report.sites] == ["rewritten"]
    torch.testing.assert_close(out, Checkpointed()(q, k, v))


def test_gradients_that_are_off_inside_a_checkpoint_only_do_not_count() -> None:
    def quiet(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return attention(q, k, v)

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(quiet, q, k, v, use_reentrant=False)

    args = tuple(torch.randn(2, 3, 8, 16) for _ in range(3))
    torch._dynamo.reset()
    with attn_pass.record() as report:
        out = torch.compile(fn, backend=attn_pass.wrap("aot_eager_default_partitioner", choose="fused"))(*args)
    assert [s.outcome for s in report.sites] == ["left"]
    torch.testing.assert_close(out, fn(*args))


CHOSEN: dict[str, Any] = {
    "nonzero": lambda q, k, v, m: attention(q, k[:, :, m.nonzero()[:, 0]], v[:, :, m.nonzero()[:, 0]]),
    "a boolean index": lambda q, k, v, m: attention(q, k[0, :, m], v[0, :, m]),
    "queries": lambda q, k, v, m: attention(k[:, :, m.nonzero()[:, 0]], k, v),
    "a mask of that size": lambda q, k, v, m: (
        (q @ k[:, :, m].mT).masked_fill(torch.ones(7, k[:, :, m].shape[2], dtype=torch.bool).triu(1), -1e9).softmax(-1)
        @ v[:, :, m]
    ),
    "a score function": lambda q, k, v, m: torch.tanh(q @ k[:, :, m].mT).softmax(-1) @ v[:, :, m],
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", list(CHOSEN))
def test_a_number_of_keys_that_is_known_at_run_time_only(name: str, grad: bool) -> None:
    """Left with a reason, and right for every number of keys, none included."""
    args = [x.requires_grad_(grad) for x in inputs()]
    torch._dynamo.reset()
    run = torch.compile(
        CHOSEN[name], backend=attn_pass.wrap("aot_eager_default_partitioner", choose="fused"), fullgraph=True
    )
    with (
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        attn_pass.record() as report,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error", AttnPassWarning)
        for count in (6, 1, 0, 11):
            keep = torch.arange(11) < count
            torch.testing.assert_close(run(*args, keep), CHOSEN[name](*args, keep))
    assert report.sites and all(s.reason and "internal error" not in s.reason for s in report.sites)
