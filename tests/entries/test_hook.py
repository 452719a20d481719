"""`enabled`, `install` and `uninstall`: the pass inside Inductor's own hook."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_engine as toy
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache

import attn_pass
from attn_pass.compat import TORCH_VERSION
from attn_pass.entries.hook import RewritePass, is_root
from attn_pass.entries.shield import Shield, Unshield, passes_of
from attn_pass.options import make_options

SLOTS = (
    *("pre_grad_custom_pass", "pre_grad_pass_timing", "joint_custom_pre_pass", "joint_custom_post_pass"),
    "post_grad_custom_post_pass",
)


@pytest.fixture(autouse=True)
def nothing_installed(quiet_torch: None) -> Iterator[None]:
    yield
    attn_pass.uninstall()


def slots() -> dict[str, Any]:
    return {name: getattr(config, name) for name in SLOTS if hasattr(config, name)}


def ours() -> list[RewritePass]:
    return [p for p in passes_of(config.pre_grad_custom_pass) if isinstance(p, RewritePass)]


def theirs(graph: torch.fx.Graph) -> None:
    """Somebody else's pass."""


def above_six() -> torch.Tensor:
    return torch.arange(-4.0, 8.0).view(3, 4)


class Branching(torch.nn.Module):
    """One relu outside, one in each branch: with bodies of higher-order operations."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x * 3)
        return torch.cond(x.sum() > 0, lambda t: torch.relu(t - 1), lambda t: torch.relu(1 - t), (y,))

    def capped(self, x: torch.Tensor) -> torch.Tensor:
        """What it gives after the toy's rewriting, where x.sum() > 0."""
        return ((x * 3).clamp(0, 6) - 1).clamp(0, 6)


def test_plain_compile_runs_the_pass_once_for_the_whole_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy.use(monkeypatch, toy.capped())
    x, model = above_six(), Branching()
    with attn_pass.enabled(numerics="strict"), attn_pass.record() as report, torch.no_grad():
        assert torch.equal(torch.compile(model)(x), model.capped(x))
    assert engine.programs == ["compile"] and engine.options[0].numerics == "strict"
    assert len(report.rewritten) == 3 and report.graphs == 1
    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.equal(torch.compile(model)(x), model(x))


@pytest.mark.parametrize("loaded", [False, True], ids=["exported", "loaded from disk"])
def test_aotinductor_runs_the_pass_once_for_the_whole_graph(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, loaded: bool
) -> None:
    """A program loaded from disk has lost the metadata by which a root graph could be told from a body."""
    engine = toy.use(monkeypatch, toy.capped())
    x, model = above_six(), Branching()
    exported = torch.export.export(model, (x,))
    if loaded:
        stream = io.BytesIO()
        torch.export.save(exported, stream)
        stream.seek(0)
        exported = torch.export.load(stream)
    path = str(tmp_path / "model.pt2")
    with attn_pass.enabled(), attn_pass.record() as report:
        torch._inductor.aoti_compile_and_package(exported, package_path=path)
    assert engine.programs == ["aoti"] and len(report.rewritten) == 3
    assert torch.equal(torch._inductor.aoti_load_package(path)(x), model.capped(x))


def test_report_is_filled_when_the_compiled_graph_comes_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    toy.use(monkeypatch, toy.capped())
    x = above_six()

    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * 3) + 1

    with fresh_cache(), config.patch(force_disable_caches=False, fx_graph_cache=True), attn_pass.enabled():
        for hits in (0, 1):
            torch._dynamo.reset()
            counters.clear()
            with attn_pass.record() as report, torch.no_grad():
                assert torch.equal(torch.compile(model)(x), (x * 3).clamp(0, 6) + 1)
            assert len(report.rewritten) == 1
            assert counters["aot_autograd"]["autograd_cache_hit"] == hits


def test_backend_inside_enabled_decides_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy.use(monkeypatch, toy.capped())
    x, model = above_six(), Branching()
    with attn_pass.enabled(), attn_pass.record() as report, torch.no_grad():
        assert torch.equal(torch.compile(model, backend=attn_pass.backend)(x), model.capped(x))
    assert len(engine.programs) == 1 and len(report.sites) == 3


def test_enabled_puts_everything_back_and_keeps_what_others_registered() -> None:
    with config.patch(pre_grad_custom_pass=theirs, joint_custom_post_pass=theirs):
        before = slots()
        with attn_pass.enabled():
            assert passes_of(config.pre_grad_custom_pass)[0] is theirs and len(ours()) == 1
            assert [type(p) for p in passes_of(config.joint_custom_pre_pass)] == [Shield]
            assert type(passes_of(config.joint_custom_post_pass)[0]) is Unshield
            assert getattr(config, "pre_grad_pass_timing", "early") == "early"  # older torch has no such setting
            with attn_pass.enabled(choose="fused", shield=False):
                assert [p.options.choose for p in ours()] == ["fused"]
                assert config.joint_custom_pre_pass is None
            assert [p.options.choose for p in ours()] == ["cheapest"]
        assert slots() == before
        with pytest.raises(KeyError), attn_pass.enabled():
            raise KeyError("leaves the slots clean")
        assert slots() == before


@pytest.mark.parametrize("before", [None, theirs, (theirs,)], ids=["empty", "callable", "tuple"])
def test_install_twice_is_install_once_and_uninstall_restores(before: Any) -> None:
    with config.patch(pre_grad_custom_pass=before, joint_custom_pre_pass=before):
        stock = slots()
        attn_pass.uninstall()
        assert slots() == stock
        attn_pass.install()
        attn_pass.install(choose="fused")
        assert [p.options.choose for p in ours()] == ["fused"]
        assert sum(isinstance(p, Shield) for p in passes_of(config.joint_custom_pre_pass)) == 1
        attn_pass.uninstall()
        assert slots() == stock
        assert config.pre_grad_custom_pass is before


def test_uninstall_keeps_a_pass_that_came_after() -> None:
    attn_pass.install()
    config.pre_grad_custom_pass = [*passes_of(config.pre_grad_custom_pass), theirs]
    attn_pass.uninstall()
    assert passes_of(config.pre_grad_custom_pass) == (theirs,)
    config.pre_grad_custom_pass = None


@pytest.mark.skipif(TORCH_VERSION < (2, 13), reason="torch keeps its configuration for all threads at once")
def test_install_is_for_this_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's configuration is per thread since torch 2.13: a thread that is started has none of it."""
    attn_pass.install()
    sites: list[int] = []
    thread = threading.Thread(target=lambda: sites.append(len(ours())))
    thread.start()
    thread.join()
    assert sites == [0] and len(ours()) == 1


def test_lite_mode_skips_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy.use(monkeypatch, toy.capped())
    x = above_six()
    with attn_pass.enabled(), torch.no_grad():
        torch.compile(torch.relu, mode="lite")(x)
    assert not engine.programs


@pytest.mark.parametrize("entry", [attn_pass.install, attn_pass.enabled])
def test_unknown_options_and_old_torch_are_refused(monkeypatch: pytest.MonkeyPatch, entry: Any) -> None:
    def use(**options: Any) -> None:
        result = entry(**options)
        if result is not None:
            with result:
                pass

    with pytest.raises(attn_pass.OptionError, match="did you mean 'choose'"):
        use(chose="fused")
    monkeypatch.setattr("attn_pass.compat.TORCH_VERSION", (2, 10))
    with pytest.raises(attn_pass.VersionError):
        use()
    assert not ours()


def test_identity_follows_sources_options_devices_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    attn_pass.install()
    (installed,) = ours()
    assert isinstance(installed, CustomGraphPass)
    assert copy.deepcopy(installed) is installed
    again = pickle.loads(pickle.dumps(installed))
    identity = RewritePass(make_options()).uuid()
    assert identity == installed.uuid() == again.uuid()
    assert pickle.dumps(installed) == pickle.dumps(RewritePass(make_options()))
    assert RewritePass(make_options(choose="fused")).uuid() != identity
    for fact in ("package_sources", "_devices"):
        with monkeypatch.context() as changed:
            changed.setattr(f"attn_pass.entries.identity.{fact}", lambda: "another")
            assert installed.uuid() != identity
    with monkeypatch.context() as changed:
        changed.setattr("torch.__version__", "2.99.0")
        assert installed.uuid() != identity


def test_a_body_and_a_decided_graph_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy.use(monkeypatch, toy.capped())
    gm = torch.fx.symbolic_trace(lambda x: torch.relu(x))
    hook = RewritePass(make_options())
    assert not is_root(gm)
    hook(gm.graph)
    assert not engine.programs
    gm.meta["inline_constraints"] = {}
    hook(gm.graph)
    hook(gm.graph)
    assert engine.programs == ["aoti"]


class Causal(torch.nn.Module):
    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("lower", torch.ones(64, 64, dtype=torch.bool).tril(), persistent=persistent)

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return (q @ q.mT * 0.125).masked_fill(~self.lower, float("-inf")).softmax(-1) @ q


@pytest.mark.parametrize("assumed", [True, False])
def test_buffers_are_known_in_the_hook_as_elsewhere(assumed: bool) -> None:
    hook = RewritePass(make_options(choose="fused", assume_constant_buffers=assumed))

    def run(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        hook(gm.graph)
        return gm.forward

    with attn_pass.record() as report, torch.no_grad():
        torch.compile(Causal(persistent=True), backend=run)(torch.randn(1, 4, 64, 64))
    assert [site.mask == "causal" for site in report.sites] == [assumed]


@pytest.mark.parametrize("persistent", [True, False])
def test_constants_of_exported_programs_are_known_in_the_hook(persistent: bool) -> None:
    x = torch.randn(2, 4, 64, 64)
    batch = {0: torch.export.Dim("batch")}
    module = torch.export.export(Causal(persistent), (x,), dynamic_shapes=(batch,)).module()
    with attn_pass.record() as report, torch.no_grad():
        RewritePass(make_options(choose="fused"))(module.graph)
    assert [site.mask == "causal" for site in report.sites] == [not persistent]
