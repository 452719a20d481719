"""`aot_compile` and `rewrite`: what a user of torch.export and AOTInductor sees."""

from __future__ import annotations

import io
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_engine as toy
from against_eager import FLEX_ON_CPU
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx

import attn_pass
from attn_pass.entries.export import _rename_outputs

pytestmark = pytest.mark.usefixtures("quiet_torch")


class Model(torch.nn.Module):
    """Weights, a buffer that is updated, one relu in the root and one under autocast, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        self.calls.add_(1)
        y = torch.relu(self.linear(x) * 20)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = torch.relu(self.linear(x))
        return {"first": y if scale is None else y * scale, "last": torch.relu(x * 3), "half": z}


def above_six() -> torch.Tensor:
    return torch.arange(-4.0, 8.0).view(3, 4)


def capped(x: torch.Tensor) -> torch.Tensor:
    return (x * 3).clamp(0, 6)


def exported(**kwargs: Any) -> ExportedProgram:
    with torch.no_grad():
        return torch.export.export(Model(), (above_six(),), **kwargs)


def code(program: ExportedProgram) -> str:
    return program.graph_module.code


# ---- aot_compile ----


def test_package_holds_the_rewritten_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = toy.use(monkeypatch, toy.capped())
    x = above_six()
    wanted = tmp_path / "model.pt2"
    with attn_pass.record() as report:
        path = attn_pass.aot_compile(
            Model(),
            (x,),
            {"scale": torch.ones(4)},
            dynamic_shapes={"x": {0: Dim("rows", max=64)}, "scale": None},
            package_path=wanted,
            options={"choose": "fused"},
        )
    assert path == str(wanted) and wanted.is_file()
    assert engine.programs == ["aoti"] and engine.options[0].choose == "fused"
    assert len(report.rewritten) == 3 and report.graphs == 1
    loaded = torch._inductor.aoti_load_package(path)
    for rows in (3, 7):
        x = torch.randn(rows, 4) * 5
        assert torch.equal(loaded(x, scale=torch.ones(4))["last"], capped(x))


def test_when_inductor_cannot_lower_the_package_holds_the_original(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    toy.use(monkeypatch, toy.unlowerable())
    program = exported()
    before = code(program)
    with toy.refused_by_inductor(), attn_pass.record() as report, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        path = attn_pass.aot_compile(program, package_path=str(tmp_path / "model.pt2"))
    assert code(program) == before
    assert torch.equal(torch._inductor.aoti_load_package(path)(above_six())["last"], torch.relu(above_six() * 3))
    assert len(report.left) == 3 and all("no kernel for this toy" in site.reason for site in report.left)
    (message,) = [str(w.message) for w in caught if issubclass(w.category, attn_pass.AttnPassWarning)]
    assert "test_export.py:" in message and "and 2 more" in message
    with toy.refused_by_inductor(), pytest.raises(attn_pass.RewriteError, match="no kernel for this toy"):
        attn_pass.aot_compile(program, options={"on_error": "raise"})


class Reached(Exception):
    """The long compile began."""


@pytest.fixture
def no_compile(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Stops where the long compile would begin; what Inductor would have been given."""
    given: list[dict[str, Any]] = []

    def stop(program: ExportedProgram, **kwargs: Any) -> str:
        given.append(kwargs)
        raise Reached

    monkeypatch.setattr("torch._inductor.aoti_compile_and_package", stop)
    toy.use(monkeypatch, toy.left())
    return given


def test_shield_configs_and_mode_reach_inductor(no_compile: list[dict[str, Any]]) -> None:
    from attn_pass.entries.shield import Shield, passes_of

    configs = {"max_autotune": False}
    with pytest.raises(Reached):
        attn_pass.aot_compile(
            Model(), (above_six(),), inductor_configs=configs, options={"epilogue_fusion": False, "shield": True}
        )
    (given,) = no_compile
    assert given["package_path"] is None
    assert given["inductor_configs"]["max_autotune"] is False
    assert given["inductor_configs"]["epilogue_fusion"] is False
    assert any(isinstance(p, Shield) for p in passes_of(given["inductor_configs"]["joint_custom_pre_pass"]))
    assert configs == {"max_autotune": False}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("model.so", r"does not end in \.pt2.*model\.pt2"),
        ("missing/model.pt2", "there is no folder .*missing.*create it"),
        ("folder.pt2", "is a folder"),
        ("/proc/model.pt2", "no file can be made in '/proc'"),
        (3, "give a path that ends in .pt2"),
    ],
)
def test_a_path_that_cannot_be_written_is_an_error_before_the_compile(
    no_compile: list[dict[str, Any]], tmp_path: Path, path: Any, message: str
) -> None:
    (tmp_path / "folder.pt2").mkdir()
    given = os.path.join(tmp_path, path) if isinstance(path, str) else path
    with pytest.raises(attn_pass.PackageError, match=message):
        attn_pass.aot_compile(Model(), (above_six(),), package_path=given)
    assert not no_compile


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"dynamic_shapes": ({5: Dim("n")},)}, attn_pass.CaptureError, r"shapes \(3, 4\) and dynamic_shapes="),
        ({"dynamic_shapes": ({1: Dim("n")},)}, attn_pass.CaptureError, "every size declared dynamic"),
        ({"kwargs": {"no_such": 1}}, attn_pass.CaptureError, "cannot capture Model.*no_such=int"),
        ({"inductor_configs": {"max_autotun": True}}, attn_pass.OptionError, "did you mean 'max_autotune'"),
        ({"options": {"chose": "fused"}}, attn_pass.OptionError, "did you mean 'choose'"),
        (
            {"inductor_configs": {"max_autotune": True}, "options": {"max_autotune": False}},
            attn_pass.OptionError,
            "'max_autotune' is False in options and True in inductor_configs",
        ),
    ],
)
def test_contradictions_are_an_error_before_the_compile(
    no_compile: list[dict[str, Any]], kwargs: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        attn_pass.aot_compile(Model(), (above_six(),), **kwargs)
    assert not no_compile


@pytest.mark.parametrize(
    ("model", "args", "kwargs", "message"),
    [
        (torch.relu, (above_six(),), {}, "takes a torch.nn.Module or an ExportedProgram"),
        (Model(), None, {}, "no example inputs"),
        ("program", None, {"dynamic_shapes": ({0: Dim("n")},)}, "is already exported"),
    ],
)
def test_anything_but_a_model_with_inputs_is_refused(
    no_compile: list[dict[str, Any]], model: Any, args: Any, kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(attn_pass.CaptureError, match=message):
        attn_pass.aot_compile(exported() if model == "program" else model, args, **kwargs)


def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_pass.compat.TORCH_VERSION", (2, 10))
    with pytest.raises(attn_pass.VersionError, match=r"aot_compile needs torch 2\.11"):
        attn_pass.aot_compile(Model(), (above_six(),))


# ---- rewrite ----


@pytest.mark.parametrize("decompositions", [None, {}, "core"], ids=["as exported", "training ir", "decomposed"])
def test_a_rewritten_program_runs_saves_and_loads(monkeypatch: pytest.MonkeyPatch, decompositions: Any) -> None:
    engine = toy.use(monkeypatch, toy.capped())
    x = above_six()
    program = exported(dynamic_shapes={"x": {0: Dim("rows", max=64)}})
    if decompositions is not None:
        program = program.run_decompositions(None if decompositions == "core" else decompositions)
    with attn_pass.record() as recorded:
        report = attn_pass.rewrite(program, numerics="strict")
    assert engine.programs == ["export"] and engine.options[0].numerics == "strict"
    assert len(report.rewritten) == 3 and recorded.sites == report.sites
    program.validate()
    names = [spec.arg.name for spec in program.graph_signature.output_specs]
    assert names == [node.name for node in program.graph.output_node().args[0]]
    stream = io.BytesIO()
    torch.export.save(program, stream)
    stream.seek(0)
    for runs in (program, torch.export.load(stream)):
        module = runs.module()
        for rows in (3, 5):
            x = torch.randn(rows, 4) * 5
            assert torch.equal(module(x)["last"], capped(x))
        assert module.calls == 2


def test_renamed_outputs_are_renamed_in_the_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine keeps the name of the node it replaces; where it cannot, the signature follows."""

    class Renaming(toy.Toy):
        def _replace(self, gm: torch.fx.GraphModule, node: torch.fx.Node) -> None:
            before = set(gm.graph.nodes)
            super()._replace(gm, node)
            for new in set(gm.graph.nodes) - before:
                new.name = f"{new.name}_another"

    toy.use(monkeypatch, Renaming(torch.ops.aten.relu6.default))
    program = exported()
    attn_pass.rewrite(program)
    names = [spec.arg.name for spec in program.graph_signature.output_specs]
    assert any(name.endswith("_another") for name in names)
    assert names == [node.name for node in program.graph.output_node().args[0]]
    assert torch.equal(program.module()(above_six())["last"], capped(above_six()))
    stream = io.BytesIO()
    torch.export.save(program, stream)
    stream.seek(0)
    assert torch.equal(torch.export.load(stream).module()(above_six())["last"], capped(above_six()))


def test_a_program_made_invalid_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python function is no operator an exported program may hold."""
    toy.use(monkeypatch, toy.Toy(torch.relu))
    program = exported()
    before = code(program)
    with pytest.warns(attn_pass.AttnPassWarning, match="not a valid exported program"):
        report = attn_pass.rewrite(program)
    assert code(program) == before and len(report.left) == 3
    assert torch.equal(program.module()(above_six())["last"], torch.relu(above_six() * 3))
    with pytest.raises(attn_pass.RewriteError, match="not a valid exported program"):
        attn_pass.rewrite(program, on_error="raise")


def test_rename_leaves_a_signature_alone_that_fits() -> None:
    program = exported()
    before = str(program.graph_signature)
    names = [node.name for node in program.graph.output_node().args[0]]
    _rename_outputs(program, {name: name for name in names})
    assert str(program.graph_signature) == before


def test_a_graph_module_without_metadata_needs_args(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy.use(monkeypatch, toy.capped())
    linear = torch.nn.Linear(4, 4)

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear
            self.weight = torch.nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> torch.Tensor:
            return torch.relu((self.linear(x) + shift) * self.weight)

    x, shift = above_six(), torch.full((4,), 100.0)
    with pytest.raises(attn_pass.RewriteError, match=r"no metadata.*attn_pass\.rewrite\(program, args\)"):
        attn_pass.rewrite(torch.fx.symbolic_trace(Plain()))
    with pytest.raises(attn_pass.RewriteError, match=r"does not run with inputs of shapes \(3, 5\), shift=\(4,\)"):
        attn_pass.rewrite(torch.fx.symbolic_trace(Plain()), (torch.ones(3, 5),), {"shift": shift})
    with pytest.raises(attn_pass.RewriteError, match="give the inputs"):
        attn_pass.rewrite(torch.fx.symbolic_trace(Plain()), (x,))
    gm = torch.fx.symbolic_trace(Plain())
    report = attn_pass.rewrite(gm, (x,), {"shift": shift})
    assert len(report.rewritten) == 1 and engine.programs == ["compile"]
    for node in gm.graph.nodes:
        if node.op != "output":
            assert isinstance(node.meta["val"], torch._subclasses.FakeTensor)
    assert torch.equal(gm(x, shift=shift), torch.full((3, 4), 6.0))


def test_graph_modules_with_metadata_need_none(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy.use(monkeypatch, toy.capped())
    x = above_six()

    def rewriting(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        assert len(attn_pass.rewrite(gm).rewritten) == 1
        return gm.forward

    assert torch.equal(torch.compile(lambda x: torch.relu(x), backend=rewriting)(x), x.clamp(0, 6))
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda x: torch.relu(x), tracing_mode="fake")(x)
    assert len(attn_pass.rewrite(traced).rewritten) == 1
    assert torch.equal(traced(x), x.clamp(0, 6))
    assert engine.programs == ["compile", "export"]


def test_exported_modules_take_args_as_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    toy.use(monkeypatch, toy.capped())
    module = exported().module(check_guards=False)
    for node in module.graph.nodes:
        node.meta.pop("val", None)
    report = attn_pass.rewrite(module, (above_six(),))
    assert len(report.rewritten) == 3
    assert torch.equal(module(above_six())["last"], capped(above_six()))


def test_anything_but_a_graph_is_refused() -> None:
    with pytest.raises(attn_pass.RewriteError, match=r"got Model; for a model use torch\.compile"):
        attn_pass.rewrite(Model())  # type: ignore[arg-type]
    with pytest.raises(attn_pass.OptionError, match="did you mean 'choose'"):
        attn_pass.rewrite(torch.fx.symbolic_trace(lambda x: x), chose="fused")
    program = exported()
    program.graph.find_nodes(op="placeholder")[0].meta.clear()
    with pytest.raises(attn_pass.RewriteError, match="export the model again"):
        attn_pass.rewrite(program)


# ---- graphs of make_fx, and sizes of 0 ----


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q @ k.mT * 0.25).softmax(-1) @ v


def first_key_written(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.mT * 0.25
    scores[..., 1:].mul_(2.0)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("kwargs", [{}, {"pre_dispatch": True}, {"tracing_mode": "fake"}], ids=str)
@pytest.mark.parametrize("program", [attention, first_key_written])
def test_a_graph_of_make_fx(program: Any, kwargs: dict[str, Any]) -> None:
    """In its default mode each node's value has a fake mode and a memory of its own, and aliases do not show."""
    inputs = [torch.randn(2, 2, 8, 16) for _ in range(3)]
    gm = make_fx(program, **kwargs)(*inputs)
    report = attn_pass.rewrite(gm, choose="fused", on_error="raise")
    assert len(report.sites) == 1 and (program is not attention or report.rewritten), report
    torch.testing.assert_close(gm(*inputs), program(*inputs))


class SoftCap(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(q @ k.mT * 0.25 / 5) * 5).softmax(-1) @ v


@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.skipif(not FLEX_ON_CPU, reason="FlexAttention on the CPU needs torch 2.13")
def test_a_soft_cap_of_a_length_that_may_be_0(least: int) -> None:
    q, k, v = (torch.randn(2, 2, 8, 16) for _ in range(3))
    rows, keys = Dim("rows", min=least, max=64), Dim("keys", min=least, max=64)
    program = torch.export.export(SoftCap(), (q, k, v), dynamic_shapes=({2: rows}, {2: keys}, {2: keys}))
    report = attn_pass.rewrite(program, choose="fused", on_error="raise")
    assert len(report.rewritten) == (least if FLEX_ON_CPU else 0)
    if not least:
        assert "may be 0 at run time" in report.sites[0].reason
    for n, m in ((least, 8), (8, least), (least, least), (5, 7)):
        given = torch.randn(2, 2, n, 16), torch.randn(2, 2, m, 16), torch.randn(2, 2, m, 16)
        torch.testing.assert_close(program.module()(*given), SoftCap()(*given))


def test_lengths_of_0_of_other_attention() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keep = torch.arange(k.shape[2]) <= torch.arange(q.shape[2])[:, None]
            return attention(q, k, v) + (q @ k.mT).masked_fill(~keep, -1e9).softmax(-1) @ v

    q, k, v = (torch.randn(2, 2, 8, 16) for _ in range(3))
    rows, keys = Dim("rows", max=64), Dim("keys", max=64)
    program = torch.export.export(Model(), (q, k, v), dynamic_shapes=({2: rows}, {2: keys}, {2: keys}))
    assert attn_pass.rewrite(program, choose="fused", on_error="raise").rewritten
    for n, m in ((0, 8), (8, 0), (0, 0), (1, 1), (5, 7)):
        given = torch.randn(2, 2, n, 16), torch.randn(2, 2, m, 16), torch.randn(2, 2, m, 16)
        torch.testing.assert_close(program.module()(*given), Model()(*given))
