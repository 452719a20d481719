"""`backend` and `wrap`: what a user of torch.compile sees."""

from __future__ import annotations

import functools
import importlib.metadata
import pickle
import threading
import warnings
from typing import Any

import pytest
import torch
import toy_engine as toy
from loaded_modules import loaded
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import symbolic_trace

import attn_pass
from attn_pass.entries.known import known_buffers
from attn_pass.entries.snapshot import Snapshot
from attn_pass.graph.values import PARAMETERS
from attn_pass.options import Options

pytestmark = pytest.mark.usefixtures("quiet_torch")


def model(x: torch.Tensor) -> torch.Tensor:
    y = x * 3
    return torch.relu(y) + 1


WRITTEN = f"test_dynamo.py:{model.__code__.co_firstlineno + 2} in model"


def above_six() -> torch.Tensor:
    return torch.arange(-4.0, 8.0).view(3, 4)


def warned(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if issubclass(w.category, attn_pass.AttnPassWarning)]


# ---- backend ----


def test_backend_compiles_the_rewritten_graph_and_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy.use(monkeypatch, toy.capped())
    x = above_six()
    with attn_pass.record() as report:
        out = torch.compile(model, backend=attn_pass.backend, options={"choose": "fused", "max_autotune": False})(x)
    assert torch.equal(out, (x * 3).clamp(0, 6) + 1)
    assert [site.where for site in report.rewritten] == [WRITTEN]
    assert report.graphs == 1 and report.seconds > 0
    assert attn_pass.reports()[-1].sites == report.sites
    assert engine.programs == ["compile"] and engine.options[0].choose == "fused"


def test_when_inductor_cannot_lower_the_original_runs_and_one_warning_names_the_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    toy.use(monkeypatch, toy.unlowerable())
    x = above_six()
    with toy.refused_by_inductor(), attn_pass.record() as report, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = torch.compile(model, backend=attn_pass.backend)(x)
    assert torch.equal(out, model(x))
    assert not report.rewritten
    (site,) = report.left
    assert "NotImplementedError: no kernel for this toy" in site.reason
    (message,) = warned(caught)
    assert WRITTEN in message and "no kernel for this toy" in message


def test_the_original_of_a_body_comes_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both branches of a cond are rewritten in place; the fallback must hold neither."""
    toy.use(monkeypatch, toy.unlowerable())

    def branching(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda t: torch.relu(t) + 1, lambda t: torch.relu(-t), (x,))

    x = above_six()
    with toy.refused_by_inductor(), attn_pass.record() as report, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = torch.compile(branching, backend=attn_pass.backend)(x)
    assert torch.equal(out, torch.relu(x) + 1)
    assert len(report.left) == 2 and not report.rewritten
    (message,) = warned(caught)
    assert "and 1 more" in message


def test_a_defect_of_attn_pass_leaves_the_graph_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an engine has done before it fails is undone: in the root, in bodies, in attributes."""
    rewrite = toy.capped()

    def fails(gm: torch.fx.GraphModule, **kwargs: Any) -> bool:
        rewrite(gm, **kwargs)
        gm.extra = torch.nn.Linear(1, 1)
        for name, body in list(gm.named_children()):
            setattr(gm, name, Snapshot(body).module() if isinstance(body, torch.fx.GraphModule) else body)
        raise ZeroDivisionError("a defect")

    toy.use(monkeypatch, fails)

    def branching(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x * 3)
        return torch.cond(x.sum() > 0, lambda t: torch.relu(t) + 1, lambda t: torch.relu(-t), (y,))

    def look(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        assert not hasattr(gm, "extra")
        return gm.forward

    x = above_six()
    with attn_pass.record() as report, pytest.warns(attn_pass.AttnPassWarning, match="ZeroDivisionError: a defect"):
        out = torch.compile(branching, backend=attn_pass.wrap(look))(x)
    assert torch.equal(out, branching(x))
    assert len(report.left) == 3 and report.graphs == 1
    torch._dynamo.reset()
    with pytest.raises(Exception, match="a defect"):
        torch.compile(branching, backend=attn_pass.wrap(look, on_error="raise"))(x)


def test_the_original_of_a_shared_body_comes_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What AOTAutograd made of the rewritten body it keeps by name: it must not be taken for the original's."""
    toy.use(monkeypatch, toy.unlowerable())
    layer = torch.compiler.nested_compile_region(lambda x: torch.relu(x) - 1)

    def layers(x: torch.Tensor) -> torch.Tensor:
        return layer(layer(x))

    x = above_six().requires_grad_()
    with toy.refused_by_inductor(), pytest.warns(attn_pass.AttnPassWarning):
        out = torch.compile(layers, backend=attn_pass.backend)(x)
        out.sum().backward()
    assert torch.equal(out, torch.relu(torch.relu(x) - 1) - 1)
    assert torch.equal(x.grad, (x > 1).float())


def test_on_error_raise_raises_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    toy.use(monkeypatch, toy.unlowerable())
    compiled = torch.compile(model, backend=attn_pass.backend, options={"on_error": "raise"})
    with toy.refused_by_inductor(), pytest.raises(Exception, match=r"no kernel for this toy.*on_error='warn'"):
        compiled(above_six())


def test_an_error_of_the_original_graph_is_the_one_stock_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    toy.use(monkeypatch, toy.unlowerable())

    def hopeless(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(toy.UNLOWERABLE(x))

    published = len(attn_pass.reports())
    with toy.refused_by_inductor(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(Exception) as stock:
            torch.compile(hopeless)(above_six())
        torch._dynamo.reset()
        with pytest.raises(Exception) as ours:
            torch.compile(hopeless, backend=attn_pass.backend)(above_six())
    assert type(ours.value) is type(stock.value)
    assert str(ours.value).splitlines()[0] == str(stock.value).splitlines()[0]
    assert not warned(caught) and len(attn_pass.reports()) == published


def test_report_is_filled_when_the_compiled_graph_comes_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    toy.use(monkeypatch, toy.capped())
    x = above_six()
    with fresh_cache(), config.patch(force_disable_caches=False, fx_graph_cache=True):
        for hits in (0, 1):
            torch._dynamo.reset()
            counters.clear()
            with attn_pass.record() as report, torch.no_grad():
                out = torch.compile(model, backend=attn_pass.backend)(x)
            assert torch.equal(out, (x * 3).clamp(0, 6) + 1)
            assert len(report.rewritten) == 1
            assert counters["aot_autograd"]["autograd_cache_hit"] == hits
            assert counters["aot_autograd"]["autograd_cache_bypass"] == 0
            assert counters["inductor"]["fxgraph_cache_bypass"] == 0


def test_training_compiles_the_backward_later_under_the_same_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    toy.use(monkeypatch, toy.capped())
    graphs: list[int] = []

    def count_graphs(graph: torch.fx.Graph) -> None:
        graphs.append(len(graph.nodes))

    x = above_six().requires_grad_()
    options: Any = {"post_grad_custom_post_pass": count_graphs}
    out = torch.compile(model, backend=attn_pass.backend, options=options)(x)
    assert len(graphs) == 1
    out.sum().backward()
    assert len(graphs) == 2
    assert torch.equal(x.grad, 3.0 * ((x > 0) & (x * 3 < 6)))


def test_a_backward_inductor_cannot_lower_runs_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    toy.use(monkeypatch, toy.bad_backward())
    x = above_six().requires_grad_()
    with toy.refused_by_inductor(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.compile(model, backend=attn_pass.backend)(x).sum().backward()
    assert torch.equal(x.grad, 3.0 * (x > 0))
    (message,) = warned(caught)
    assert "backward" in message and WRITTEN in message


def test_training_falls_back_to_the_original_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    toy.use(monkeypatch, toy.unlowerable())
    x = above_six().requires_grad_()
    with toy.refused_by_inductor(), pytest.warns(attn_pass.AttnPassWarning):
        torch.compile(model, backend=attn_pass.backend, dynamic=True)(x).sum().backward()
    assert torch.equal(x.grad, 3.0 * (x > 0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"options": {"chose": "fused"}}, "did you mean 'choose'"),
        ({"options": {"max_autotun": True}}, "did you mean 'max_autotune'"),
        ({"options": {"mode": "reduce-overhead"}, "mode": "max-autotune"}, "contradict"),
    ],
)
def test_options_that_cannot_be_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(attn_pass.OptionError, match=message):
        attn_pass.backend(symbolic_trace(model), [above_six()], **given)


def test_mode_and_options_reach_inductor_and_other_passes_stay() -> None:
    from attn_pass.entries.inductor import inductor_patches
    from attn_pass.entries.shield import Shield, Unshield, passes_of

    def theirs(graph: torch.fx.Graph) -> None: ...

    with config.patch(joint_custom_pre_pass=theirs):
        patches = inductor_patches(attn_pass.Options(), {"epilogue_fusion": False}, "max-autotune")
        own = inductor_patches(attn_pass.Options(), {"joint_custom_pre_pass": None}, None)
        bare = inductor_patches(attn_pass.Options(shield=False), {}, None)
    assert patches["max_autotune"] and patches["triton.cudagraphs"] and patches["epilogue_fusion"] is False
    assert passes_of(patches["joint_custom_pre_pass"])[0] is theirs
    assert [type(p) for p in passes_of(own["joint_custom_pre_pass"])] == [Shield]
    assert "joint_custom_pre_pass" not in bare
    assert [type(p) for p in passes_of(bare["joint_custom_post_pass"])] == [Unshield]


def test_backend_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    if not importlib.metadata.entry_points(group="torch_dynamo_backends", name="attn_pass"):
        pytest.skip("the package is not installed, so it has no entry point")
    engine = toy.use(monkeypatch, toy.left())
    x = above_six()
    assert torch.equal(torch.compile(model, backend="attn_pass", options={"numerics": "strict"})(x), model(x))
    assert engine.options[0].numerics == "strict"


def test_importing_attn_pass_does_not_import_inductor() -> None:
    """It takes longer than everything else, and the reading needs nothing of it."""
    _, after = loaded()
    assert "attn_pass" in after and not [name for name in after if name.startswith("torch._inductor")]


# ---- wrap ----


def test_wrap_takes_names_callables_and_partials(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy.use(monkeypatch, toy.capped())
    seen: dict[str, Any] = {}

    def own(gm: torch.fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
        seen.update(kwargs)
        return gm.forward

    x = above_six()
    for inner in ("eager", "aot_eager", own, functools.partial(own, level=1)):
        torch._dynamo.reset()
        wrapped = attn_pass.wrap(inner, choose="fused")
        assert torch.equal(torch.compile(model, backend=wrapped)(x), (x * 3).clamp(0, 6) + 1)
        assert wrapped.__name__ == f"attn_pass_{inner if isinstance(inner, str) else 'own'}"
    assert seen == {"level": 1} and {o.choose for o in engine.options} == {"fused"}
    torch._dynamo.reset()
    torch.compile(model, backend=attn_pass.wrap(own), options={"level": 2})(x)
    assert seen["options"] == {"level": 2}


def test_wrap_needs_no_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    toy.use(monkeypatch, toy.capped())
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", None)
    monkeypatch.setattr("attn_pass.compat.TORCH_VERSION", (2, 9))
    x = above_six()
    assert torch.equal(torch.compile(model, backend=attn_pass.wrap("aot_eager"))(x), (x * 3).clamp(0, 6) + 1)


def test_wrap_of_inductor_is_the_backend_with_these_options(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy.use(monkeypatch, toy.unlowerable())
    x = above_six()
    wrapped = attn_pass.wrap("inductor", numerics="strict")
    with toy.refused_by_inductor(), pytest.warns(attn_pass.AttnPassWarning):
        assert torch.equal(torch.compile(model, backend=wrapped, mode="default")(x), model(x))
    # Once, and once more without what failed: not by both of them.
    assert [o.numerics for o in engine.options] == ["strict", "strict"]


def test_nested_wraps_decide_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy.use(monkeypatch, toy.capped())
    x = above_six()
    with attn_pass.record() as report:
        torch.compile(model, backend=attn_pass.wrap(attn_pass.wrap("eager")))(x)
    assert len(engine.programs) == 1 and len(report.sites) == 1


def test_a_wrapped_backend_that_fails_gets_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    toy.use(monkeypatch, toy.unlowerable())

    def picky(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        if any(node.target is toy.UNLOWERABLE for node in gm.graph.nodes):
            raise RuntimeError("never heard of it")
        return gm.forward

    x = above_six()
    with attn_pass.record() as report, pytest.warns(attn_pass.AttnPassWarning, match="never heard of it"):
        assert torch.equal(torch.compile(model, backend=attn_pass.wrap(picky))(x), model(x))
    assert len(report.left) == 1


def test_a_request_to_skip_the_frame_is_not_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    toy.use(monkeypatch, toy.capped())

    def skipping(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        raise torch._dynamo.exc.SkipFrame("not this one")

    x = above_six()
    with attn_pass.record() as report, warnings.catch_warnings():
        warnings.simplefilter("error", attn_pass.AttnPassWarning)
        assert torch.equal(torch.compile(model, backend=attn_pass.wrap(skipping))(x), model(x))
    assert not report.sites


def test_a_request_to_trace_again_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """So does AOTAutograd ask when a float it took for dynamic turns out to be a constant."""
    engine = toy.use(monkeypatch, toy.capped())

    def hesitant(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        if len(engine.programs) == 1:
            raise torch._dynamo.exc.TensorifyScalarRestartAnalysis(restart_reason="once more")
        return gm.forward

    x = above_six()
    with attn_pass.record() as report:
        assert torch.equal(torch.compile(model, backend=attn_pass.wrap(hesitant))(x), (x * 3).clamp(0, 6) + 1)
    assert len(engine.programs) == 2 and len(report.sites) == 1


def test_equal_wraps_do_not_compile_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy.use(monkeypatch, toy.capped())
    x = above_six()
    for _ in range(2):
        torch.compile(model, backend=attn_pass.wrap("eager"))(x)
    assert len(engine.programs) == 1
    torch.compile(model, backend=attn_pass.wrap("eager", choose="fused"))(x)
    assert len(engine.programs) == 2


@pytest.mark.parametrize(("inner", "error"), [(3, attn_pass.OptionError), ("no_such_backend", Exception)])
def test_wrap_of_no_backend_is_an_error_at_once(inner: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        attn_pass.wrap(inner)


def test_each_piece_of_a_broken_graph_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    toy.use(monkeypatch, toy.left())

    def broken(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x)
        torch._dynamo.graph_break()
        return torch.relu(y - 1)

    with attn_pass.record() as report:
        torch.compile(broken, backend=attn_pass.wrap("eager"))(above_six())
    assert len(report.sites) == 2 and report.graphs == 2


def test_dynamic_shapes_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy.use(monkeypatch, toy.capped())
    compiled = torch.compile(model, backend=attn_pass.wrap("aot_eager"), dynamic=True)
    for rows in (3, 5, 9):
        x = torch.randn(rows, 4) * 5
        assert torch.equal(compiled(x), (x * 3).clamp(0, 6) + 1)
    assert len(engine.programs) == 1


def test_each_thread_records_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    toy.use(monkeypatch, toy.capped())
    by_thread: dict[int, int] = {}

    def work(sites: int) -> None:
        def several(x: torch.Tensor) -> torch.Tensor:
            for _ in range(sites):
                x = torch.relu(x + 1)
            return x

        with attn_pass.record() as report:
            torch.compile(several, backend=attn_pass.wrap("eager"))(above_six())
        by_thread[sites] = len(report.sites)

    threads = [threading.Thread(target=work, args=(sites,)) for sites in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert by_thread == {1: 1, 2: 2, 3: 3}


# ---- the copy that is kept ----


def test_snapshot_keeps_what_dynamo_put_on_nodes_and_shares_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []

    def compare(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        copied = Snapshot(gm).module()
        assert [n.name for n in copied.graph.nodes] == [n.name for n in gm.graph.nodes]
        assert copied.code == gm.code and copied.meta == gm.meta
        for old, new in zip(gm.graph.nodes, copied.graph.nodes, strict=True):
            assert new.meta == old.meta and new is not old
            if old.op == "placeholder":
                checked.append(old.name)
                assert new._dynamo_source is old._dynamo_source
        for name, body in gm.named_children():
            assert getattr(copied, name) is not body
            assert getattr(copied, name).code == body.code
        return copied.forward

    linear = torch.nn.Linear(4, 4)

    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(lambda t: torch.relu(linear(t)), x, use_reentrant=False)

    x = above_six()
    assert torch.equal(torch.compile(checkpointed, backend=compare)(x), checkpointed(x))
    assert len(checked) == 3

    class Lazy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear
            self.register_buffer("table", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + self.table

    traced = symbolic_trace(Lazy())
    copied = Snapshot(traced).module()
    assert copied.linear is linear and copied.table is traced.table
    assert torch.equal(copied(x), traced(x))


@pytest.mark.parametrize(
    ("given", "mode", "tunes"),
    [
        ({}, "max-autotune-no-cudagraphs", True),
        ({"choose": "fused"}, "max-autotune", True),
        ({"tune": False}, "max-autotune", False),
        ({"tune": True}, None, True),
        ({}, None, False),
    ],
)
def test_a_mode_tunes_through_wrap_as_it_does_without(
    given: dict[str, Any], mode: str | None, tunes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attn_pass.entries import dynamo

    seen: list[attn_pass.Options] = []
    monkeypatch.setattr(dynamo, "compile_rewritten", lambda gm, inputs, options, *_: seen.append(options))
    attn_pass.wrap("inductor", **given)(symbolic_trace(model), [above_six()], **({"mode": mode} if mode else {}))
    assert [options.tune for options in seen] == [tunes]
    assert pickle.loads(pickle.dumps(attn_pass.wrap("inductor", **given))) == attn_pass.wrap("inductor", **given)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q @ k.mT * 0.125).softmax(-1) @ v


def test_graphs_that_share_their_metadata_are_decided_one_by_one() -> None:
    """As DistributedDataParallel's are, which splits a graph by its buckets of parameters."""
    inner = attn_pass.wrap("eager", choose="fused")

    def in_two_parts(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        first = Snapshot(gm).module()
        first.meta = gm.meta
        inner(first, inputs)
        return inner(gm, inputs)

    q = torch.randn(1, 4, 64, 64)
    with attn_pass.record() as report, torch.no_grad():
        torch.compile(attention, backend=in_two_parts)(q, q, q)
    assert [site.outcome for site in report.sites] == ["rewritten"] * 2


def test_parameters_that_a_splitter_of_graphs_hands_over_as_fakes_are_not_known() -> None:
    """As DDPOptimizer compiles the parts of a graph."""
    linear, known = torch.nn.Linear(4, 4), []

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        mode = FakeTensorMode()
        for given in (inputs, [mode.from_tensor(x) for x in inputs]):
            known.append(len(known_buffers(gm, given, Options())[PARAMETERS]))
        return gm.forward

    torch.compile(linear, backend=backend)(torch.randn(2, 4))
    assert known == [2, 0]


@pytest.mark.parametrize("by_option", [True, False])
def test_settings_of_one_compile_are_seen_by_decisions(by_option: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers as in eager are promised by an option of this compile as well as by Inductor's configuration."""

    def dropped(q: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout((q @ q.mT * 0.125).softmax(-1), 0.5, True) @ q

    monkeypatch.setattr("attn_pass.entries.dynamo.compile_under", lambda patches, gm, inputs, report: gm.forward)
    given = {"fallback_random": True} if by_option else {}
    own = {"choose": "fused", "targets": ("cpu_kernel",), **given}
    with config.patch(fallback_random=not by_option), attn_pass.record() as report:
        torch.compile(dropped, backend=attn_pass.backend, options=own)(torch.randn(2, 4, 64, 64))
    (site,) = report.sites
    assert site.outcome == "left" and "random numbers" in site.refusals["cpu_kernel"]


def keep_options(given: list[Any], gm: torch.fx.GraphModule, inputs: Any, options: Any) -> Any:
    given.append(options)
    return gm.forward


def test_the_option_that_inductor_has_too_is_left_to_it_unless_it_is_given() -> None:
    given: list[Any] = []
    for wrapped in (attn_pass.wrap("inductor"), attn_pass.wrap("inductor", numerics="strict")):
        with pytest.MonkeyPatch.context() as patched:
            inner = functools.partial(keep_options, given)
            patched.setattr(wrapped, "inner", inner)
            patched.setattr("attn_pass.entries.dynamo.backend", inner)
            wrapped(torch.fx.symbolic_trace(torch.nn.Identity()), [])
    assert "numerics" not in given[0] and given[1]["numerics"] == "strict"
    assert attn_pass.wrap("inductor") != attn_pass.wrap("inductor", numerics="default")
