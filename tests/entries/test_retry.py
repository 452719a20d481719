"""If the compiler fails on one target's code, only that target is excluded, and the report says so.

Targets are registered as packages do, behind the entry point; they emit custom operators that compilers refuse.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_engine as toy
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config, ir, lowering
from torch._inductor.utils import fresh_cache
from torch.fx import GraphModule, Node

import attn_pass
from attn_pass.graph.edit import Plan, Value
from attn_pass.model.attention import Attention
from attn_pass.report.pages.collect import collect
from attn_pass.targets import registry
from attn_pass.targets.base import Offer, Refusal, Setting
from attn_pass.targets.sdpa import Sdpa

Tensor = torch.Tensor
UNLOWERABLE = toy.UNLOWERABLE
TARGETS = ("broken", "sound", "sdpa")
DYNAMO = torch._dynamo.backends.registry.lookup_backend
pytestmark = pytest.mark.usefixtures("quiet_torch")


@torch.library.custom_op("attn_pass_test::harmless", mutates_args=())
def _harmless(x: Tensor) -> Tensor:
    return x.clone()


_harmless.register_fake(torch.empty_like)
_harmless.register_autograd(lambda ctx, grad: grad, setup_context=lambda ctx, inputs, output: None)
HARMLESS = torch.ops.attn_pass_test.harmless.default


class Emits(Sdpa):
    """Attention for one head dim, at next to no cost, with an operator of its own behind it."""

    def __init__(self, name: str, operator: Any, head_dim: int) -> None:
        self.name, self.operator, self.head_dim = name, operator, head_dim

    def consider(self, attention: Attention, variant: str, setting: Setting) -> Offer | Refusal:
        if attention.head_dim != self.head_dim:
            return Refusal(self.name, f"the head dim is not {self.head_dim}")
        return Offer(self.name, variant, attention, 1e-3, fused=True)

    def emit(self, plan: Plan, nodes: Sequence[Node], offer: Offer, setting: Setting) -> Value:
        as_sdpa = super().consider(offer.attention, offer.variant, setting)
        assert isinstance(as_sdpa, Offer)
        return plan.call(self.operator, super().emit(plan, nodes, as_sdpa, setting))


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = (Emits("broken", UNLOWERABLE, 16), Emits("sound", HARMLESS, 8))
    monkeypatch.setattr(registry, "_registered", lambda: ours)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) * 0.25).softmax(-1) @ v


def two_sites(wide: tuple[Tensor, ...], narrow: tuple[Tensor, ...]) -> Tensor:
    first = attention(*wide)
    return first.mean() + attention(*narrow)


def qkv(dim: int, length: int = 200, grad: bool = False) -> tuple[Tensor, ...]:
    torch.manual_seed(dim)
    return tuple(torch.randn(2, 2, length, dim, requires_grad=grad) for _ in range(3))


class Picky:
    """A Dynamo backend that refuses graphs with the operators it is given, with this message, and counts its calls."""

    def __init__(self, message: str, *refused: Any, inner: str = "aot_eager") -> None:
        self.message, self.refused, self.inner = message, refused, DYNAMO(inner)
        self.graphs: list[set[Any]] = []

    def __call__(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        called = {n.target for n in gm.graph.nodes}
        self.graphs.append(called)
        if called & set(self.refused):
            raise RuntimeError(self.message)
        compiled: Callable[..., Any] = self.inner(gm, inputs)
        return compiled


def compiled_with(
    backend: Any, fn: Callable[..., Any], *args: Any, **options: Any
) -> tuple[Any, attn_pass.Report, list[str]]:
    """The result, the report, and the warnings of attn_pass."""
    torch._dynamo.reset()
    with attn_pass.record() as report, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = torch.compile(fn, backend=attn_pass.wrap(backend, **{"targets": TARGETS, **options}))(*args)
    return out, report, [str(w.message) for w in caught if issubclass(w.category, attn_pass.AttnPassWarning)]


NAMED = "no kernel for attn_pass_test::unlowerable"


def test_the_target_that_failed_is_left_out_and_the_others_stay() -> None:
    picky = Picky(NAMED, UNLOWERABLE)
    out, report, reported = compiled_with(picky, two_sites, qkv(16), qkv(8))
    torch.testing.assert_close(out, two_sites(qkv(16), qkv(8)))
    assert [(s.target, s.outcome) for s in report.sites] == [("sdpa", "rewritten"), ("sound", "rewritten")]
    wide, narrow = report.sites
    assert NAMED in wide.refusals["broken"] and "; before that broken: " in wide.reason and NAMED in wide.reason
    assert "before that" not in narrow.reason and "broken" not in narrow.reason
    assert [UNLOWERABLE in g for g in picky.graphs] == [True, False] and HARMLESS in picky.graphs[1]
    (warning,) = reported
    assert "without broken" in warning and wide.where in warning and "sdpa, sound" in warning
    assert report.graphs == 1 and attn_pass.reports()[-1].sites == report.sites


def test_all_sites_of_the_target_go_to_their_next_offer() -> None:
    def fn(wide: tuple[Tensor, ...]) -> Tensor:
        return attention(attention(*wide), *wide[1:])

    out, report, _ = compiled_with(Picky(NAMED, UNLOWERABLE), fn, qkv(16))
    torch.testing.assert_close(out, fn(qkv(16)))
    assert [s.target for s in report.sites] == ["sdpa", "sdpa"]
    assert all("before that broken" in s.reason for s in report.sites)


def test_the_next_offer_is_the_next_in_a_users_order() -> None:
    for names, became in ((("sound", "broken", "sdpa"), "sdpa"), (("broken",), None)):
        _, report, reported = compiled_with(
            Picky(NAMED, UNLOWERABLE), attention, *qkv(16), choose="first", targets=names, numerics="strict"
        )
        (site,) = report.sites
        assert site.target == became and NAMED in site.refusals["broken"] and len(reported) == 1
        assert site.where in reported[0]


def test_where_the_error_does_not_tell_all_but_torchs_own_are_left_out() -> None:
    picky = Picky("out of registers", UNLOWERABLE)
    out, report, (warning,) = compiled_with(picky, two_sites, qkv(16), qkv(8))
    torch.testing.assert_close(out, two_sites(qkv(16), qkv(8)))
    assert [s.target for s in report.sites] == ["sdpa", "sdpa"]
    assert all("does not say what it failed on (RuntimeError: out of registers)" in s.reason for s in report.sites)
    assert "without broken and sound" in warning


def test_a_graph_that_fails_twice_is_compiled_as_it_was() -> None:
    sdpa = torch.nn.functional.scaled_dot_product_attention
    picky = Picky(NAMED, UNLOWERABLE, sdpa)
    out, report, (warning,) = compiled_with(picky, two_sites, qkv(16), qkv(8))
    torch.testing.assert_close(out, two_sites(qkv(16), qkv(8)))
    assert [s.outcome for s in report.sites] == ["left", "left"]
    assert len(picky.graphs) == 3 and not picky.graphs[-1] & {UNLOWERABLE, HARMLESS, sdpa}
    assert all("nor the one without broken" in s.reason for s in report.sites) and "and 1 more" in warning


def test_torchs_own_calls_are_tried_once() -> None:
    """There is nothing to leave out."""
    picky = Picky("out of registers", torch.nn.functional.scaled_dot_product_attention)
    out, report, reported = compiled_with(picky, attention, *qkv(24), choose="fused")
    torch.testing.assert_close(out, attention(*qkv(24)))
    assert len(picky.graphs) == 2 and [s.outcome for s in report.sites] == ["left"] and len(reported) == 1


def test_on_error_raise_does_not_try_again() -> None:
    picky = Picky(NAMED, UNLOWERABLE)
    with pytest.raises(Exception, match=r"no kernel for .*on_error='warn'"):
        compiled_with(picky, attention, *qkv(16), on_error="raise")
    assert len(picky.graphs) == 1


def test_training_has_the_gradients_of_what_was_written() -> None:
    wide, narrow, ours_wide, ours_narrow = (qkv(d, grad=True) for d in (16, 8, 16, 8))
    two_sites(wide, narrow).sum().backward()
    out, report, _ = compiled_with(Picky(NAMED, UNLOWERABLE), two_sites, ours_wide, ours_narrow)
    out.sum().backward()
    assert [s.target for s in report.sites] == ["sdpa", "sound"]
    for ours, eager in zip((*ours_wide, *ours_narrow), (*wide, *narrow)):
        torch.testing.assert_close(ours.grad, eager.grad, atol=1e-5, rtol=1e-4)


def test_symbolic_sizes_stay_symbolic() -> None:
    picky = Picky(NAMED, UNLOWERABLE)
    inputs = qkv(16)
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 2)
    torch._dynamo.reset()
    compiled = torch.compile(attention, backend=attn_pass.wrap(picky))
    with attn_pass.record() as report, pytest.warns(attn_pass.AttnPassWarning, match="without broken"):
        for given in (inputs, qkv(16, 33), qkv(16, 70)):
            torch.testing.assert_close(compiled(*given), attention(*given))
    assert len(picky.graphs) == 2 and [s.target for s in report.sites] == ["sdpa"]


def test_a_shared_body_is_decided_anew() -> None:
    @torch.compiler.nested_compile_region
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v) * 2

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return layer(layer(q, k, v), k, v)

    inputs = qkv(16, grad=True)
    with toy.refused_by_inductor():
        out, report, reported = compiled_with("inductor", fn, *inputs)
    torch.testing.assert_close(out, fn(*inputs))
    assert [s.target for s in report.sites] == ["sdpa"] and len(reported) == 1


def test_what_is_collected_is_the_graph_that_was_compiled() -> None:
    with collect() as collection:
        compiled_with(Picky(NAMED, UNLOWERABLE), two_sites, qkv(16), qkv(8))
    (graph,) = collection.graphs
    assert [s.target for s in graph.report.sites] == ["sdpa", "sound"] and "unlowerable" not in graph.after


# ---------------------------------------------------------------- through Inductor itself


def test_inductor_names_the_operator_it_has_no_lowering_for() -> None:
    """Forward and backward; a second compile of the same program is served from AOTAutograd's cache."""
    eager = two_sites(qkv(16), qkv(8))
    with toy.refused_by_inductor(), fresh_cache(), config.patch(force_disable_caches=False, fx_graph_cache=True):
        for hits in (0, 1):
            counters.clear()
            wide, narrow = qkv(16, grad=True), qkv(8, grad=True)
            out, report, reported = compiled_with("inductor", two_sites, wide, narrow)
            torch.testing.assert_close(out, eager)
            assert [s.target for s in report.sites] == ["sdpa", "sound"] and len(reported) == 1
            assert "no kernel for this toy" in report.sites[0].reason
            out.sum().backward()
            assert wide[0].grad is not None and narrow[0].grad is not None
            assert counters["aot_autograd"]["autograd_cache_hit"] == hits
            assert counters["aot_autograd"]["autograd_cache_bypass"] == 0


@pytest.fixture
def fails_when_generated() -> Iterator[None]:
    """Inductor lowers the operator, and fails where code is generated: no graph node is in sight, as with Triton."""

    def generated(x: Any) -> Any:
        load = x.make_loader()

        def inner(index: Any) -> Any:
            if any(frame.function == "codegen" for frame in inspect.stack()):
                raise RuntimeError("at 61:12: Loop-carried variable top has initial type fp32")
            return load(index)

        made = ir.Pointwise.create(device=x.get_device(), dtype=x.get_dtype(), inner_fn=inner, ranges=x.get_size())
        return made

    lowering.lowerings[UNLOWERABLE] = generated
    yield
    del lowering.lowerings[UNLOWERABLE]


@pytest.mark.usefixtures("fails_when_generated")
def test_code_that_cannot_be_generated_leaves_out_all_but_torchs_own() -> None:
    with torch.no_grad():
        out, report, reported = compiled_with("inductor", two_sites, qkv(16), qkv(8))
    torch.testing.assert_close(out, two_sites(qkv(16), qkv(8)))
    assert [s.target for s in report.sites] == ["sdpa", "sdpa"] and len(reported) == 1
    assert "Loop-carried variable" in report.sites[0].reason


def test_a_package_is_made_without_the_target(tmp_path: Path) -> None:
    class Model(nn.Module):
        def forward(self, wide: tuple[Tensor, ...], narrow: tuple[Tensor, ...]) -> Tensor:
            return attention(*wide) + attention(*narrow).sum()

    args = (qkv(16), qkv(24))
    options = {"choose": "fused", "targets": TARGETS}
    with toy.refused_by_inductor(), pytest.warns(attn_pass.AttnPassWarning, match="without broken"):
        path = attn_pass.aot_compile(Model(), args, package_path=tmp_path / "m.pt2", options=options)
    assert [s.target for s in attn_pass.package_report(path).sites] == ["sdpa", "sdpa"]
    torch.testing.assert_close(torch._inductor.aoti_load_package(path)(*args), Model()(*args))
