"""`inspect`: the contents of the folder after a compile, and that nothing about it can break a compile."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from against_eager import qkv
from loaded_modules import loaded

import attn_pass
from attn_pass.errors import AttnPassWarning
from attn_pass.report.pages import collect, outputs
from attn_pass.report.pages import inspect as inspecting
from attn_pass.report.pages.graphs import change_of

Tensor = torch.Tensor


def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).softmax(-1) @ v


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (20.0 * torch.tanh(q @ k.mT / 20.0)).softmax(-1) @ v


class Model(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return program(q, k, v)


def run(backend: Any, what: Callable[..., Tensor] = program) -> None:
    """Compile and run; the numbers must be eager's."""
    inputs = qkv(2, 3, 9, 9, 8)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(what, backend=backend)(*inputs), what(*inputs))


def wrapped() -> Any:
    return attn_pass.wrap("aot_eager", choose="fused")


def links(folder: Path) -> set[str]:
    return set(re.findall(r'href="([^":]+)"', (folder / "index.html").read_text()))


# ---------------------------------------------------------------- what there is


def test_a_compiled_function(tmp_path: Path) -> None:
    with attn_pass.inspect(tmp_path / "out") as seen:
        run(wrapped())
    out = tmp_path / "out"
    assert len(seen.graphs) == 1 and seen.report.sites[0].target == "sdpa"
    before, after = ((out / "graph_1" / name).read_text() for name in ("before.py", "after.py"))
    assert "softmax: " in before and "scaled_dot_product_attention" in after and "softmax: " not in after
    assert "test_inspect.py" in before
    diff = (out / "graph_1" / "changes.diff").read_text()
    assert diff.startswith("--- before.py\n+++ after.py\n@@") and "+        matmul_1" in diff
    reported = attn_pass.Report.from_dict(json.loads((out / "report.json").read_text()))
    assert reported.sites[0].target == "sdpa" and reported.to_dict() == seen.report.to_dict()
    assert "rewritten to sdpa" in (out / "report.txt").read_text()
    assert 'class="card code"' in (out / "report.html").read_text()
    there = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()}
    assert links(out) | {"index.html"} == there, "the index links every file, and no other"


def test_several_graphs_and_score_functions(tmp_path: Path) -> None:
    with attn_pass.inspect(tmp_path, draw=False, bytecode=False) as seen:
        run(wrapped())
        run(attn_pass.wrap("aot_eager", choose="first", targets=("flex",)), capped)
        attn_pass.explain(program, *qkv(1, 2, 5, 5, 4))
    assert seen.graphs[0].title == "torch.compile 0/0" and len(seen.graphs) == 3
    source = (tmp_path / "graph_2" / "score_functions.py").read_text()
    assert "def score_mod(score, b, h, q_idx, kv_idx):" in source and "test_inspect.py" in source
    compile(source, "score_functions.py", "exec")
    assert not (tmp_path / "graph_1" / "score_functions.py").exists() and (tmp_path / "graph_3" / "after.py").exists()


def test_every_entry_is_seen(tmp_path: Path) -> None:
    inputs = qkv(2, 3, 9, 9, 8)
    exported = torch.export.export(Model(), inputs)
    with attn_pass.inspect(tmp_path, draw=False) as seen:
        attn_pass.rewrite(exported, choose="fused")
        with attn_pass.enabled(choose="fused"):
            # Far enough for the hook, which runs first: Inductor itself is another test's.
            torch.compiler.reset()
            torch.compile(program, backend="inductor")(*inputs)
    assert [(g.program, g.report.sites[0].outcome) for g in seen.graphs] == [
        ("export", "rewritten"),
        ("compile", "rewritten"),
    ]
    assert "scaled_dot_product_attention" in (tmp_path / "graph_1" / "after.py").read_text()
    code = (tmp_path / "graph_2" / "output_code.py").read_text()
    assert "def call(" in code or "async_compile" in code
    with attn_pass.inspect(tmp_path / "again"):  # Inductor's cache has the graph, and the pass runs all the same
        run(attn_pass.backend)
        torch.compiler.reset()
    first = (tmp_path / "again" / "graph_1" / "output_code.py").read_text()
    with attn_pass.inspect(tmp_path / "cached"):
        run(attn_pass.backend)
    assert (tmp_path / "cached" / "graph_1" / "output_code.py").read_text() == first


@pytest.mark.slow
def test_a_package(tmp_path: Path) -> None:
    with attn_pass.inspect(tmp_path / "out") as seen:
        options = {"choose": "fused", "targets": ("sdpa",)}
        path = attn_pass.aot_compile(Model(), qkv(2, 3, 9, 9, 8), package_path=tmp_path / "m.pt2", options=options)
    assert [g.title for g in seen.graphs] == ["AOTInductor"] and attn_pass.package_report(path).sites
    folder = tmp_path / "out" / "graph_1"
    assert "scaled_dot_product_attention" in (folder / "after.py").read_text()
    assert "AOTInductorModel" in (folder / "aot_wrapper_code.cpp").read_text()


def test_the_index_of_a_graph_that_did_not_compile_names_what_runs(tmp_path: Path) -> None:
    def fails(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        if "scaled_dot_product_attention" in gm.code:
            raise RuntimeError("put in on purpose")
        return gm.forward

    with attn_pass.inspect(tmp_path), pytest.warns(AttnPassWarning, match="put in on purpose"):
        run(attn_pass.wrap(fails, choose="fused"))
    assert "before.py runs instead" in (tmp_path / "index.html").read_text()
    assert "did not take the graph" in (tmp_path / "report.html").read_text()


def test_an_empty_collection_says_why(tmp_path: Path) -> None:
    with attn_pass.inspect(tmp_path) as seen:
        pass
    assert not seen.graphs and "No graph was decided inside" in (tmp_path / "index.html").read_text()
    assert (tmp_path / "report.html").exists()


def test_collecting_ends_with_the_block(tmp_path: Path) -> None:
    watchers = list(outputs.logging.getLogger("torch.__trace").handlers)
    with attn_pass.inspect(tmp_path) as outer:
        with collect.collect() as inner:
            run(wrapped())
        run(wrapped())
    run(wrapped())
    assert (len(outer.graphs), len(inner.graphs)) == (2, 1)
    assert outputs.logging.getLogger("torch.__trace").handlers == watchers


def test_the_time_of_collecting_is_not_part_of_the_passes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setattr(collect, "printed", lambda _: time.sleep(1.0) or "")
    with collect.collect() as seen:
        run(wrapped())
    assert seen.graphs[0].seconds > 2.0 and seen.report.seconds < 1.0


def test_only_the_programs_own_sites_are_kept() -> None:
    own, aside = (attn_pass.SiteReport(outcome="left", reason=r) for r in ("the program's", "a smaller one, to verify"))
    gm = torch.fx.symbolic_trace(program)
    with collect.collect() as seen, collect.root_graph(gm, attn_pass.Report([own]), "compile"):
        for record in (own, aside):
            with collect.site(gm.graph, record, lambda: None):
                pass
    assert [c.record for c in seen.graphs[0].sites] == [own] and change_of(seen.graphs, aside) is None


# ---------------------------------------------------------------- depyf and graphviz, where they are


def test_without_depyf_and_pydot_the_index_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("depyf", "pydot"):
        monkeypatch.setitem(sys.modules, name, None)
    with attn_pass.inspect(tmp_path):
        run(wrapped())
    index = (tmp_path / "index.html").read_text()
    assert "needs depyf" in index and "needs pydot" in index and "pip install pydot" in index


class Depyf:
    """Stands in for the package."""

    @staticmethod
    def decompile(code: Any) -> str:
        return f"def {code.co_name}(): ...\n"


def test_bytecode_is_decompiled_beside_its_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "depyf", Depyf)
    with attn_pass.inspect(tmp_path):
        run(wrapped())
    text = (tmp_path / "graph_1" / "bytecode" / "program.py").read_text()
    assert "def program()" in text and "test_inspect.py" in text
    assert "graph_1/bytecode/program.py" in links(tmp_path)


def test_functions_whose_names_are_alike_get_a_file_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "depyf", Depyf)
    names = ["f", "f", "f_2", "<lambda>", "_lambda_", "F"]
    with attn_pass.inspect(tmp_path):
        for number, name in enumerate(names):
            made = FunctionType(program.__code__.replace(co_name=name, co_firstlineno=number + 1), globals())
            torch.compiler.reset()
            torch.compile(made, backend="eager")(*qkv(1, 1, 4, 4, 4))
    files = {link for link in links(tmp_path) if link.startswith("other/")}
    assert len({link.lower() for link in files}) == len(names), files


def test_the_folder_is_the_one_that_was_named_when_the_block_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with attn_pass.inspect("out"):
        monkeypatch.chdir(tmp_path / "elsewhere")
    assert (tmp_path / "out" / "index.html").is_file() and not list((tmp_path / "elsewhere").iterdir())
    with pytest.raises(TypeError), attn_pass.inspect(3):  # type: ignore[arg-type]
        raise AssertionError("the block must not begin")


def test_a_drawing_goes_through_graphviz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "drawing_of", lambda gm: ("digraph { softmax }", ""))
    monkeypatch.setattr(inspecting.shutil, "which", lambda name: f"/usr/bin/{name}")
    asked: list[bytes] = []

    def ran(command: list[str], *, input: bytes, **_: Any) -> Any:
        asked.append(input)
        return subprocess.CompletedProcess(command, 0, b"<svg></svg>", b"")

    monkeypatch.setattr(inspecting.subprocess, "run", ran)
    with attn_pass.inspect(tmp_path):
        run(wrapped())
    assert (tmp_path / "graph_1" / "graph.svg").read_text() == "<svg></svg>" and asked == [b"digraph { softmax }"]
    monkeypatch.setattr(inspecting.shutil, "which", lambda name: None)
    with attn_pass.inspect(tmp_path / "two"):
        run(wrapped())
    assert "graphviz is not installed" in (tmp_path / "two" / "index.html").read_text()


def test_a_long_drawing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "drawing_of", lambda gm: ("digraph {}", ""))
    monkeypatch.setattr(inspecting.shutil, "which", lambda name: name)

    def late(*args: Any, **kwargs: Any) -> Any:
        raise subprocess.TimeoutExpired("dot", 60)

    monkeypatch.setattr(inspecting.subprocess, "run", late)
    with attn_pass.inspect(tmp_path):
        run(wrapped())
    assert "timed out after 60 seconds" in (tmp_path / "index.html").read_text()


# ---------------------------------------------------------------- whatever fails


def inspected(folder: Path) -> list[str]:
    """Compiles inside, right numbers asserted; what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with attn_pass.inspect(folder):
            run(wrapped())
    return [str(w.message) for w in caught if issubclass(w.category, AttnPassWarning)]


def test_a_folder_that_cannot_be_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here already")
    (reported,) = inspected(tmp_path / "file")
    assert "compilation is not affected" in reported and (tmp_path / "file").read_text() == "here already"


@pytest.mark.parametrize(
    ("place", "name", "lost"),
    [
        (collect, "printed", {"graph_1"}),
        (inspecting, "page", {"report.html"}),
        (inspecting, "_diff", {"graph_1/changes.diff"}),
        (collect, "_tried", set()),
        (inspecting, "decompiled", set()),
        (inspecting, "index_page", {"index.html"}),
    ],
)
def test_a_part_that_fails_is_a_warning(
    place: Any, name: str, lost: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise OSError("put in on purpose")

    monkeypatch.setattr(place, name, fails)
    reported = inspected(tmp_path)
    assert reported and all("put in on purpose" in message for message in reported)
    if place is inspecting and lost:
        assert len(reported) == 1 and not any((tmp_path / name).exists() for name in lost)
        assert (tmp_path / "report.json").exists() and (tmp_path / "graph_1" / "before.py").exists()


def test_a_picture_that_fails_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_pass.rewriting import record

    def fails(*_: Any) -> Any:
        raise RuntimeError("put in on purpose")

    monkeypatch.setattr(record, "picture_of", fails)
    (reported,) = inspected(tmp_path)
    assert "drawing a mask failed" in reported and (tmp_path / "report.html").exists()


def test_without_jinja2_everything_else_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_pass.report.pages import html

    html._environment.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    reported = inspected(tmp_path)
    assert len(reported) == 2 and all("jinja2" in message for message in reported)
    assert (tmp_path / "report.json").exists() and (tmp_path / "graph_1" / "after.py").exists()


def test_an_error_of_the_program_comes_through_and_what_was_seen_is_written(tmp_path: Path) -> None:
    with pytest.raises(KeyError), attn_pass.inspect(tmp_path):
        run(wrapped())
        raise KeyError("the user's own")
    assert (tmp_path / "graph_1" / "after.py").exists()


def test_importing_loads_no_renderer() -> None:
    before, after = loaded()
    assert "attn_pass" in after and not {"jinja2", "rich", "depyf"} & (after - before)
