"""`explain`: reports what would be done, and leaves torch.compile's state unchanged."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import toy_engine as toy
from torch._dynamo.testing import CompileCounter

import attn_pass
from attn_pass.compat import TORCH_VERSION
from attn_pass.report.pages.collect import collect
from attn_pass.report.record import Report


@pytest.fixture(autouse=True)
def quiet_torch() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("explain compiled something")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", refuse)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.ran: list[tuple[bool, bool, torch.Tensor]] = []

    def forward(self, x: torch.Tensor, *, shift: float = 0.0) -> torch.Tensor:
        return torch.relu(self.linear(x) + shift)


class Broken(torch.nn.Module):
    """Two graphs, with a graph break in the middle of a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x)
        torch._dynamo.graph_break()
        return self.inner(y)


def ones() -> torch.Tensor:
    return torch.ones(2, 4)


def test_explain_tells_the_sites_and_runs_the_model_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy.use(monkeypatch, toy.unlowerable())
    seen: list[torch.Tensor] = []
    model = Model()
    model.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    before = len(attn_pass.reports())
    with attn_pass.record() as recorded:
        report = attn_pass.explain(model, ones(), shift=100.0, attn_pass_options={"choose": "fused"})
    assert [site.outcome for site in report.sites] == ["rewritten"] and recorded.sites == report.sites
    assert report.sites[0].where.startswith("test_explain.py:")
    assert engine.options[0].choose == "fused" and report.graphs == 1
    assert len(attn_pass.reports()) == before
    assert seen and seen[0].min() > 50  # the original ran, with the keyword
    assert str(report).startswith("attn_pass: 1 attention site")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_training_and_gradient_modes_stay(monkeypatch: pytest.MonkeyPatch, training: bool, grad: bool) -> None:
    seen: list[bool] = []

    def look(gm: torch.fx.GraphModule, **kwargs: Any) -> bool:
        seen.append(torch.is_grad_enabled())
        targets = [str(node.target) for node in gm.graph.nodes]
        dropout = next(node for node in gm.graph.nodes if "dropout" in str(node.target))
        seen.append(dropout.args[2])
        assert targets
        return False

    toy.use(monkeypatch, look)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)).train(training)
    with torch.set_grad_enabled(grad):
        attn_pass.explain(model, ones())
    assert seen == [grad, training] and model.training is training


def test_a_compiled_model_is_captured_again_and_stays_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    toy.use(monkeypatch, toy.left())
    model, backend = Model(), CompileCounter()
    compiled = torch.compile(model, backend=backend)
    compiled(ones())
    assert backend.frame_count == 1
    for candidate in (compiled, model, compiled):
        assert len(attn_pass.explain(candidate, ones()).sites) == 1
    compiled(ones())
    assert backend.frame_count == 1
    function = torch.compile(lambda x: torch.relu(x), backend=backend)
    function(ones())
    assert len(attn_pass.explain(function, ones()).sites) == 1
    assert backend.frame_count == 2


def test_a_module_compiled_in_place_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    toy.use(monkeypatch, toy.left())
    model = Model()
    model.compile(backend="eager")
    model(ones())
    assert len(attn_pass.explain(model, ones()).sites) == 1
    outer = torch.nn.Sequential(model, torch.nn.ReLU())
    assert len(attn_pass.explain(outer, ones()).sites) == 2


def test_a_compiled_model_with_a_graph_break_is_captured_only_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the break the model runs as Python, where its own compiled code would take over."""
    toy.use(monkeypatch, toy.left())
    backend = CompileCounter()
    in_place = Broken()
    in_place.compile(backend=backend)
    inside = Broken()
    inside.inner.compile(backend=backend)
    for model in (torch.compile(Broken(), backend=backend), in_place, inside):
        assert len(attn_pass.explain(model, ones()).sites) == 2
    assert backend.frame_count == 0
    in_place(ones())
    assert backend.frame_count == 2


def test_explaining_often_works_without_isolated_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 has none."""
    toy.use(monkeypatch, toy.left())
    monkeypatch.setattr("attn_pass.entries.explain._isolation", dict)
    for _ in range(torch._dynamo.config.recompile_limit + 2):
        assert len(attn_pass.explain(Model(), ones()).sites) == 1


@pytest.mark.skipif(TORCH_VERSION < (2, 13), reason="this torch has no isolated regions to explain in")
def test_explaining_often_spends_nothing_of_the_models_recompile_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    toy.use(monkeypatch, toy.left())
    model, backend = Broken(), CompileCounter()
    for _ in range(torch._dynamo.config.recompile_limit + 2):
        assert len(attn_pass.explain(model, ones()).sites) == 2
    torch.compile(model, backend=backend)(ones())
    assert backend.frame_count == 2


def test_other_shapes_do_not_make_it_dynamic_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[list[Any]] = []

    def look(gm: torch.fx.GraphModule, **kwargs: Any) -> bool:
        values = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
        shapes.append([type(s) for v in values if isinstance(v, torch.Tensor) and v.ndim == 2 for s in v.shape])
        return False

    toy.use(monkeypatch, look)

    def double(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * 2

    for rows in (2, 3, 5):
        attn_pass.explain(double, torch.ones(rows, 4))
    assert all(sizes == [int, int] for sizes in shapes)
    marked = torch.ones(6, 4)
    torch._dynamo.mark_dynamic(marked, 0)
    attn_pass.explain(double, marked)
    assert shapes[-1] == [torch.SymInt, int]
    # ... and what was explained does not make a later compile dynamic.
    torch.compile(double, backend=attn_pass.wrap("eager"))(torch.ones(7, 4))
    assert shapes[-1] == [int, int]


def test_pieces_of_a_broken_graph_are_all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    toy.use(monkeypatch, toy.capped())
    report = attn_pass.explain(Broken(), ones())
    assert len(report.sites) == 2 and report.graphs == 2


def test_an_exported_program_is_explained_and_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy.use(monkeypatch, toy.capped())
    program = torch.export.export(Model(), (ones(),))
    before = program.graph_module.code
    assert len(attn_pass.explain(program).rewritten) == 1
    assert program.graph_module.code == before and engine.programs == ["aoti"]


def test_a_failing_model_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    toy.use(monkeypatch, toy.left())
    with pytest.raises(attn_pass.CaptureError, match=r"(?s)Model could not be captured.*Check that it runs eagerly"):
        attn_pass.explain(Model(), torch.ones(2, 5))
    with pytest.raises(attn_pass.CaptureError, match="takes a module, a function or an ExportedProgram, got Tensor"):
        attn_pass.explain(ones(), ones())
    with pytest.raises(attn_pass.CaptureError, match=r"captured no graph of disabled.*disable"):
        attn_pass.explain(disabled, ones())
    no_graph = pytest.raises(attn_pass.CaptureError, match="captured no graph of Model")
    with no_graph, torch.compiler.set_stance("force_eager"):
        attn_pass.explain(Model(), ones())
    with pytest.raises(attn_pass.OptionError, match="did you mean 'choose'"):
        attn_pass.explain(Model(), ones(), attn_pass_options={"chose": "fused"})


@torch.compiler.disable
def disabled(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)


def test_with_on_error_raise_the_engines_error_is_raised_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(gm: torch.fx.GraphModule, **kwargs: Any) -> bool:
        raise attn_pass.RewriteError("the reading failed")

    toy.use(monkeypatch, failing)
    with pytest.raises(attn_pass.RewriteError, match=r"^the reading failed$"):
        attn_pass.explain(Model(), ones(), attn_pass_options={"on_error": "raise"})


def test_threads_explain_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    toy.use(monkeypatch, toy.left())
    model, reports = Model(), []
    threads = [
        threading.Thread(target=lambda: reports.append(len(attn_pass.explain(model, ones()).sites))) for _ in "ab"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reports == [1, 1]


# ---- what Dynamo did not show ----


class Printing(torch.nn.Module):
    """Stops Dynamo in the middle, at a line of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.softmax(-1)
        print("between")
        return y @ x


PRINTED = f"test_explain.py:{Printing.forward.__code__.co_firstlineno + 2} in forward: "


def test_graph_breaks_are_counted_and_quoted() -> None:
    report = attn_pass.explain(Printing(), torch.randn(4, 4))
    (told,) = report.graph_breaks
    assert told.startswith(PRINTED) and "print" in told
    assert report.summary().startswith("attn_pass: no attention found; 1 graph break: attention that spans it is not")
    assert told in str(report) and told in report.to_html().replace("&#39;", "'").replace("&lt;", "<")
    assert Report.from_dict(report.to_dict()).graph_breaks == report.graph_breaks
    whole = attn_pass.explain(Model(), ones())
    assert whole.graph_breaks == () and "break" not in str(whole)


def test_a_branch_on_values_is_told_in_words() -> None:
    def branching(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x

    (told,) = attn_pass.explain(branching, ones()).graph_breaks
    assert told.endswith("in branching: a branch depends on the values of a tensor")


def test_what_is_compiled_tells_its_breaks_too() -> None:
    with attn_pass.record() as report:
        torch.compile(Printing(), backend=attn_pass.wrap("eager"))(torch.randn(4, 4))
    assert report.graphs == 2 and [told.startswith(PRINTED) for told in report.graph_breaks] == [True]


class Talking(torch.nn.Module):
    """Attention after two graph breaks on one line."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("largest", x.max().item())
        return torch.softmax(x @ x.mT, -1) @ x


def test_layers_that_share_a_graph_are_counted_by_their_calls() -> None:
    report = attn_pass.explain(torch.nn.Sequential(Talking(), Talking(), Talking()), torch.randn(2, 16, 8))
    assert [site.count for site in report.sites] == [3] and report.attentions == 3
    assert report.summary().startswith("attn_pass: 1 attention site (3 calls): ")
    assert "1 (3 calls)" in report.table()
    apart = attn_pass.explain(torch.nn.Sequential(Model(), Talking()), torch.randn(2, 4, 4))
    assert apart.attentions == 1 and "calls" not in str(apart)


def test_every_cause_of_a_break_is_told_once_and_a_resumed_function_is_the_user_s() -> None:
    report = attn_pass.explain(Talking(), torch.randn(2, 16, 8))
    assert len(report.graph_breaks) == 2
    assert ["item()" in told for told in report.graph_breaks] == [True, False] and "print" in report.graph_breaks[1]
    assert report.sites[0].where.endswith(" in forward")


def test_a_break_quotes_no_address() -> None:
    @torch.compiler.disable
    def aside(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    report = attn_pass.explain(lambda x: aside(x * 2) * 2, ones())
    assert report.graph_breaks and not re.search("0x[0-9a-f]", str(report))


def test_layers_of_torch_s_own_encoder_are_one_row_that_names_the_path_once() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
    report = attn_pass.explain(torch.nn.TransformerEncoder(layer, 2), torch.randn(2, 8, 16))
    assert len(report.sites) == 2 and len(report.groups()) == 1
    for shown in (report.table(400), report._repr_html_()):
        assert shown.count("layers.*.self_attn") == 1 and "layers.0" not in shown


# ---- options that would help ----


class Masked(torch.nn.Module):
    """nanoGPT's attention: the mask is a slice of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tril", torch.ones(256, 256).tril())

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = (q @ k.mT / 8).masked_fill(self.tril[: q.size(-2), : q.size(-2)] == 0, float("-inf"))
        return scores.softmax(-1) @ v


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Masked(), Masked()])

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            q = layer(q, k, v)
        return q


class Numbered(torch.nn.Module):
    """Layers that are no list: their numbers are at the end of their names."""

    def __init__(self) -> None:
        super().__init__()
        self.block1, self.block2 = Masked(), Masked()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.block2(self.block1(q, k, v), k, v)


class NumberedBuffers(torch.nn.Module):
    """One module for all layers, with a buffer for each."""

    def __init__(self) -> None:
        super().__init__()
        for layer in range(2):
            self.register_buffer(f"tril{layer}", torch.ones(256, 256).tril())

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for layer in range(2):
            tril = getattr(self, f"tril{layer}")[: q.size(-2), : q.size(-2)]
            q = (q @ k.mT / 8).masked_fill(tril == 0, float("-inf")).softmax(-1) @ v
        return q


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize(
    ("model", "module", "buffer"),
    [(Layers, "layers.*", "layers.*.tril"), (Numbered, "block*", "block*.tril"), (NumberedBuffers, "", "tril*")],
)
def test_rows_that_differ_in_the_name_of_a_layer_or_buffer_are_one(
    model: type[torch.nn.Module], module: str, buffer: str, constant: bool
) -> None:
    inputs = tuple(torch.randn(2, 4, 200, 64) for _ in range(3))
    options = {"assume_constant_buffers": constant}
    report = attn_pass.explain(model(), *inputs, attn_pass_options=options)
    table = report.table(400)
    assert len(report.sites) == 2 and len(report.groups()) == 1
    assert re.search(r"^ ?x2 ", table, re.MULTILINE) and module in table
    assert (f"buffer {buffer} keeps" if constant else f"if {buffer} is constant") in table
    assert "×2" in report.to_html() and "<td>2</td>" in report._repr_html_()
    assert module in report.to_html() and module in report._repr_html_()


def test_a_mask_in_a_buffer_names_the_option_that_reads_it() -> None:
    inputs = tuple(torch.randn(2, 4, 200, 64) for _ in range(3))
    with collect() as shown:
        report = attn_pass.explain(Layers(), *inputs)
    assert len(shown.graphs) == 1  # what the option would do is on no page
    assert [site.mask for site in report.sites] == ["dense", "dense"]
    assert report.sites[0].hint.startswith(
        "if layers.0.tril is constant, assume_constant_buffers=True makes the mask causal, predicted "
    )
    assert len(report.groups()) == 1 and "if layers.*.tril is constant" in " ".join(str(report).split())
    assumed = attn_pass.explain(Layers(), *inputs, attn_pass_options={"assume_constant_buffers": True})
    assert [(site.mask, site.hint) for site in assumed.sites] == [("causal", "")] * 2
    assert len(assumed.groups()) == 1 and "buffer layers.*.tril keeps" in " ".join(str(assumed).split())


@pytest.mark.parametrize("device", ["MI300X", "Arc B580", "M4", "Graviton4", "H200"])
def test_a_device_by_its_name_is_an_option_and_not_an_input(device: str) -> None:
    """A keyword is the model's: one that it does not take is an error that says how it is spelled."""

    def attention(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.mT, -1) @ x

    x = torch.randn(2, 4, 64, 64)
    with pytest.raises(attn_pass.CaptureError, match=re.escape(f"attn_pass_options={{\"device\": '{device}'}}")):
        attn_pass.explain(attention, x, device=device)
    with torch.no_grad():
        report = attn_pass.explain(attention, x, attn_pass_options={"device": device})
    assert [site.decided_for for site in report.sites] == [device]
    spaceless = attn_pass.explain(attention, x, attn_pass_options={"device": device.lower().replace(" ", "")})
    assert spaceless.sites[0].decided_for == device


def test_a_keyword_that_the_model_takes_stays_its_own() -> None:
    def made(x: torch.Tensor, device: str) -> torch.Tensor:
        return torch.softmax(x @ x.mT, -1) @ torch.ones(64, 64, device=device)

    (site,) = attn_pass.explain(made, torch.randn(2, 4, 64, 64), device="cpu").sites
    assert site.decided_for == ""


def test_a_row_says_which_device_was_decided_for() -> None:
    x = torch.randn(1, 2, 64, 64)
    report = attn_pass.explain(torch.nn.functional.scaled_dot_product_attention, x, x, x)
    assert "decided for" not in str(report)
    other = attn_pass.explain(
        torch.nn.functional.scaled_dot_product_attention, x, x, x, attn_pass_options={"device": "H200"}
    )
    assert "float32 cpu, decided for" in " ".join(str(other).split()) and "H200" in other.sites[0].decided_for


def test_reasons_of_other_devices_are_for_the_verbose() -> None:
    operands = (torch.randn(2, 4, 32, 16) for _ in range(3))
    report = attn_pass.explain(dropped, *operands, attn_pass_options={"targets": ("sdpa", "flex", "flash_attn")})
    assert report.sites[0].outcome == "left"
    assert "flex: " in str(report) and "flash_attn: " not in str(report)
    assert "flash_attn: " in report.table(verbose=True)


def dropped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout((q @ k.mT / 4).softmax(-1), 0.1) @ v


def test_what_was_taken_is_named_as_the_predictions_name_it() -> None:
    """A case that a kernel itself does away with is a poor case of the site, and no part of the name."""

    def grouped(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        repeated = k.repeat_interleave(4, 1)
        return torch.nn.functional.scaled_dot_product_attention(q, repeated, repeated)

    q, k = torch.randn(1, 8, 256, 64, dtype=torch.bfloat16), torch.randn(1, 2, 256, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        by_kernel, by_call, left = (
            attn_pass.explain(grouped, q, k, attn_pass_options=options).sites[0]
            for options in ({}, {"targets": ("sdpa",)}, {"targets": ()})
        )
    assert "half_precision" in by_kernel.poor_cases and "half_precision" not in by_kernel.taken
    assert by_kernel.taken in by_kernel.predicted_us and by_call.taken == "sdpa (grouped_heads)"
    assert left.taken == "" and left.target is None
