"""The command line: explain on a file or a module, its output formats, and exit status 2 on invalid input."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import attn_pass
from attn_pass.cli.main import app
from attn_pass.devices.cpu.kernel import build
from attn_pass.errors import CaptureError
from attn_pass.report.record import Report
from attn_pass.report.site import SiteReport
from attn_pass.targets.registry import all_targets

MODEL = """
import torch

class Attention(torch.nn.Module):
    def forward(self, q, k, v, scale=1.0):
        return torch.softmax(q @ k.mT * scale, -1) @ v

class Sized(Attention):
    def __init__(self, dim):
        super().__init__()

net = Attention()

def attention(q, k, v):
    return net(q, k, v)

def build():
    x = torch.randn(1, 2, 8, 4)
    return Attention(), (x, x, x), {"scale": 0.5}

def positional():
    x = torch.randn(1, 2, 8, 4)
    return Attention(), [x, x, x]

def by_name():
    return Attention(), dict.fromkeys("qkv", torch.randn(1, 2, 8, 4))

def exported():
    model, args, kwargs = build()
    return torch.export.export(model, args, kwargs), ()

def broken():
    raise OSError("no weights here")

def single():
    return Attention()

def unpacked():
    return Attention(), 3

def listed():
    return Attention(), (), [1]

def numbered():
    return Attention(), (), {1: 2}

def reserved():
    return Attention(), (), {"attn_pass_options": {}}

def leaves():
    raise SystemExit(0)

number = 3
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("CHOOSE", "ON_ERROR", "VERIFY"):
        monkeypatch.delenv(f"ATTN_PASS_{name}", raising=False)
    modules, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in ("cli_example", "cli_broken", "cli_bare"):
        if name not in modules:
            sys.modules.pop(name, None)


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "cli_example.py"
    path.write_text(MODEL)
    return path


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What explain was called with; stands in for the real one, which has tests of its own."""
    calls: list[dict[str, Any]] = []

    def explain(model: Any, *args: Any, **kwargs: Any) -> Report:
        own = {name: kwargs.pop(f"attn_pass_{name}") for name in ("options", "dynamic", "aot")}
        grad = torch.is_grad_enabled()
        calls.append({"model": model, "args": args, "kwargs": kwargs, "own": own, "grad": grad})
        return Report([SiteReport(outcome="left", reason="a reason", where="model.py:6 in forward")], graphs=1)

    monkeypatch.setattr(attn_pass, "explain", explain, raising=False)
    return calls


def run(*args: str) -> Any:
    return CliRunner().invoke(app, list(args))


def test_explain_prints_the_table(model_file: Path, called: list[dict[str, Any]]) -> None:
    result = run("explain", f"{model_file}:build")
    assert result.exit_code == 0, result.output
    assert "1 attention site: 1 left" in result.stdout and "model.py:6 in forward" in result.stdout
    assert type(called[0]["model"]).__name__ == "Attention" and called[0]["kwargs"] == {"scale": 0.5}
    assert [a.shape for a in called[0]["args"]] == [torch.Size([1, 2, 8, 4])] * 3


def test_explain_takes_a_module_of_the_current_directory_and_two_results(
    model_file: Path, called: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model_file.parent)
    assert run("explain", "cli_example:positional").exit_code == 0
    assert len(called[0]["args"]) == 3 and called[0]["kwargs"] == {}


def test_a_dict_of_inputs_is_given_by_name(model_file: Path, called: list[dict[str, Any]]) -> None:
    assert run("explain", f"{model_file}:by_name").exit_code == 0
    assert called[0]["args"] == () and set(called[0]["kwargs"]) == {"q", "k", "v"}


def test_explain_json(model_file: Path, called: list[dict[str, Any]]) -> None:
    reported = json.loads(run("explain", f"{model_file}:build", "--json").stdout)
    assert reported["sites"][0]["reason"] == "a reason"


def test_the_options_reach_explain(model_file: Path, called: list[dict[str, Any]]) -> None:
    asked = ("--choose", "fused", "--device", "H200", "--dynamic", "--aot")
    assert run("explain", f"{model_file}:build", *asked).exit_code == 0
    options = {"choose": "fused", "device": "H200"}
    assert called[0]["own"] == {"options": options, "dynamic": True, "aot": True}
    assert run("explain", f"{model_file}:build").exit_code == 0
    assert called[1]["own"] == {"options": {}, "dynamic": False, "aot": False}


@pytest.mark.parametrize(("flag", "training"), [("--training", True), ("--inference", False)])
def test_the_mode_is_that_of_the_flag(
    model_file: Path, called: list[dict[str, Any]], flag: str, training: bool
) -> None:
    assert run("explain", f"{model_file}:build", flag).exit_code == 0
    assert called[0]["model"].training is training and called[0]["grad"] is training
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("kind", "flag", "code"), [("attention", "left", 1), ("near miss", "left", 0), ("near miss", "near-miss", 1)]
)
def test_a_site_that_is_left_fails_where_that_is_asked(
    model_file: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, flag: str, code: int
) -> None:
    report = Report([SiteReport(kind=kind, outcome="left", reason="a reason")], graphs=1)
    monkeypatch.setattr(attn_pass, "explain", lambda *args, **kwargs: report, raising=False)
    assert run("explain", f"{model_file}:build", "--fail-on", flag).exit_code == code
    assert run("explain", f"{model_file}:build").exit_code == 0


def test_the_real_thing_for_a_device_that_is_not_here(model_file: Path) -> None:
    result = run("explain", f"{model_file}:build", "--device", "H200", "--inference", "--verbose", "--json")
    assert result.exit_code == 0, result.output
    (site,) = json.loads(result.stdout)["sites"]
    assert site["mask"] == "none" and site["refusals"]
    shown = run("explain", f"{model_file}:build", "--inference", "--choose", "fused", "--verbose").stdout
    assert "rewritten to cpu_kernel" in shown and "flash, efficient: there is no such kernel" in shown
    assert (
        "there is no such kernel"
        not in run("explain", f"{model_file}:build", "--inference", "--choose", "fused").stdout
    )


@pytest.mark.parametrize("more", [(), ("--aot",)])
def test_the_real_thing_with_any_size(model_file: Path, more: tuple[str, ...]) -> None:
    result = run("explain", f"{model_file}:build", "--dynamic", "--json", "--inference", *more)
    assert result.exit_code == 0, result.output
    (site,) = json.loads(result.stdout)["sites"]
    assert isinstance(site["shapes"]["query"][2], str)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("{file}", "does not name a function: give file.py:function or module:function; there are build, positional"),
        ("{file}:", "does not name a function"),
        ("{file}:missing", "has no function 'missing': there are build, positional, by_name, exported, broken, single"),
        ("{file}:attention", "attention takes q, k, v, but is called without arguments: there are build"),
        ("{file}:Sized", "Sized takes dim, but is called without arguments"),
        ("{file}:net", "net is a model without inputs: there are build"),
        ("{file}:number", "has no function 'number'"),
        ("{file}:broken", "raised OSError: no weights here"),
        ("{file}:single", "returned Attention; return (model, args) or (model, args, kwargs)"),
        ("{file}:unpacked", "returned int as args; return a tuple"),
        ("{file}:listed", "returned list of 1 as kwargs; return a dict"),
        ("{file}:numbered", "returned kwargs with the key 1; return a dict"),
        ("{file}:reserved", "returned kwargs with the key 'attn_pass_options'; return a dict"),
        ("{file}:leaves", "raised SystemExit: 0"),
        ("/nowhere/model.py:build", "there is no file /nowhere/model.py"),
        ("no_such_module_at_all:build", "cannot be imported: ModuleNotFoundError"),
    ],
)
def test_bad_input_is_a_sentence_and_exit_code_2(
    model_file: Path, called: list[dict[str, Any]], target: str, said: str
) -> None:
    result = run("explain", target.format(file=model_file))
    assert result.exit_code == 2
    assert said in result.stderr and result.stderr.startswith("attn-pass: ")
    assert result.stdout == "" and called == []


def test_a_file_without_a_function_to_name_gets_one_shown(tmp_path: Path) -> None:
    text = "class Net:\n    def __init__(self, dim):\n        pass\n\ndef attention(q, k):\n    return q @ k\n"
    (tmp_path / "cli_bare.py").write_text(text)
    for name, shown in (("attention", "attention"), ("Net", "Net(dim)"), ("model", "net")):
        result = run("explain", f"{tmp_path / 'cli_bare.py'}:{name}")
        assert result.exit_code == 2 and f"such as def model(): return {shown}, (x,)" in result.stderr


def test_a_file_that_does_not_parse(tmp_path: Path) -> None:
    (tmp_path / "cli_broken.py").write_text("def f(:\n")
    result = run("explain", f"{tmp_path / 'cli_broken.py'}:f")
    assert result.exit_code == 2 and "cannot be imported: SyntaxError" in result.stderr


def test_an_invalid_choice_is_an_error_before_the_model_is_built(
    model_file: Path, called: list[dict[str, Any]]
) -> None:
    result = run("explain", f"{model_file}:broken", "--choose", "fussed")
    assert result.exit_code == 2 and "did you mean 'fused'" in result.stderr


def test_a_model_that_cannot_be_captured(model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def explain(*args: Any, **kwargs: Any) -> Report:
        raise CaptureError("the model cannot be captured: do this")

    monkeypatch.setattr(attn_pass, "explain", explain, raising=False)
    result = run("explain", f"{model_file}:build")
    assert result.exit_code == 2 and result.stderr == "attn-pass: the model cannot be captured: do this\n"


def test_the_doctor_names_every_package_and_every_target() -> None:
    document = json.loads(run("doctor", "--json").stdout)
    reported = {finding["what"]: finding for findings in document.values() for finding in findings}
    assert reported["torch"]["found"] == str(torch.__version__)
    assert set(reported) >= {target.name for target in all_targets()}
    assert reported["C++ compiler"]["found"]
    assert reported["sdpa"]["found"] == "offers" and "s predicted" in reported["sdpa"]["note"]
    if not torch.cuda.is_available():
        assert reported["flash"]["found"] == "" and "cpu" in reported["flash"]["note"]
    missing = [finding for finding in document["packages"] if not finding["found"]]
    assert all("pip install" in finding["note"] for finding in missing)
    printed = run("doctor").stdout
    assert "packages" in printed and "on cpu" in printed and "flash-attn" in printed


def test_the_doctor_says_in_a_sentence_what_the_environment_has_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_PASS_CHOOSE", "fast")
    result = run("doctor")
    assert result.exit_code == 2 and "ATTN_PASS_CHOOSE" in result.stderr


def test_the_doctor_tries_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "g++"  # it is there, and compiles nothing
    broken.write_text("#!/bin/sh\necho 'fatal error: Python.h: No such file or directory' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(build, "compiler", lambda: str(broken))
    machine = json.loads(run("doctor", "--json").stdout)["machine"]
    (finding,) = (row for row in machine if row["what"] == "C++ compiler")
    assert finding["found"] == "" and "fatal error: Python.h" in finding["note"]


def test_version() -> None:
    assert f"torch {torch.__version__}" in run("version").stdout
    assert json.loads(run("version", "--json").stdout)["torch"] == str(torch.__version__)


def test_no_command_shows_the_commands() -> None:
    result = run()
    assert result.exit_code == 2 and "explain" in result.output and "version" in result.output


# ---------------------------------------------------------------- the page


def test_explain_writes_a_page_with_the_graphs(model_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    options = ("--choose", "fused", "--option", 'targets=["sdpa"]')
    result = run("explain", f"{model_file}:build", *options, "--html", str(out))
    assert result.exit_code == 0 and "1 rewritten" in result.stdout, result.output
    text = out.read_text()
    assert 'class="card code"' in text and "scaled_dot_product_attention" in text and "cli_example.py" in text


def test_a_package_has_a_page_of_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = Report([SiteReport(outcome="left", reason="<b>a reason</b>", module="m")], graphs=1)
    monkeypatch.setattr(attn_pass, "package_report", lambda path: stored)
    out = tmp_path / "out.html"
    assert run("explain", "model.pt2", "--html", str(out)).exit_code == 0
    assert "&lt;b&gt;a reason" in out.read_text() and 'class="card code"' not in out.read_text()


@pytest.mark.parametrize("option", ["--training", "--dynamic", "--aot"])
def test_options_that_an_exported_program_cannot_take_are_an_error(option: str, model_file: Path) -> None:
    assert run("explain", f"{model_file}:exported").exit_code == 0
    result = run("explain", f"{model_file}:exported", option)
    assert result.exit_code == 2 and "leave out --" in result.stderr and "already exported" in result.stderr


@pytest.mark.parametrize("option", [["--device", "H200"], ["--choose", "x"], ["--training"], ["--dynamic"], ["--aot"]])
def test_options_that_a_package_cannot_take_are_an_error(option: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attn_pass, "package_report", lambda path: Report())
    result = run("explain", "model.pt2", *option)
    assert result.exit_code == 2 and f"leave out {option[0]}" in result.stderr and result.stdout == ""


def test_a_page_that_cannot_be_written_is_an_error_before_a_model_is_built(model_file: Path, tmp_path: Path) -> None:
    result = run("explain", f"{model_file}:broken", "--html", str(tmp_path / "nowhere" / "out.html"))
    assert result.exit_code == 2 and "there is no folder" in result.stderr and "no weights" not in result.stderr
    result = run("explain", f"{model_file}:build", "--html", str(tmp_path))
    assert result.exit_code == 2 and "cannot be written" in result.stderr


# ---------------------------------------------------------------- compare


def report_file(folder: Path, name: str, *sites: SiteReport) -> str:
    path = folder / name
    path.write_text(Report(list(sites), graphs=1).to_json())
    return str(path)


def compared(tmp_path: Path, before: SiteReport, after: SiteReport, *args: str) -> Any:
    return run("compare", report_file(tmp_path, "a.json", before), report_file(tmp_path, "b.json", after), *args)


FUSED = SiteReport(outcome="rewritten", target="sdpa", reason="cheaper", where="m.py:1 in f")
LEFT = SiteReport(outcome="left", reason="weights are returned", where="m.py:1 in f")
OTHER = SiteReport(outcome="rewritten", target="flex", reason="cheaper", where="m.py:1 in f")
REASON = SiteReport(outcome="rewritten", target="sdpa", reason="by a rule", where="m.py:1 in f")


@pytest.mark.parametrize(
    ("before", "after", "changed", "worse"),
    [(FUSED, FUSED, 0, 0), (FUSED, REASON, 0, 0), (FUSED, OTHER, 1, 0), (FUSED, LEFT, 1, 1), (LEFT, FUSED, 1, 0)],
)
def test_compare_fails_on_what_is_asked(
    before: SiteReport, after: SiteReport, changed: int, worse: int, tmp_path: Path
) -> None:
    assert compared(tmp_path, before, after).exit_code == 0
    assert compared(tmp_path, before, after, "--fail-on", "changed").exit_code == changed
    assert compared(tmp_path, before, after, "--fail-on", "worse").exit_code == worse


def test_compare_prints_a_table_or_json(tmp_path: Path) -> None:
    reported = compared(tmp_path, FUSED, LEFT).stdout
    assert "1 different, 0 the same; 1 left that was not before" in reported and "weights are returned" in reported
    assert json.loads(compared(tmp_path, FUSED, LEFT, "--json").stdout)["changes"][0]["after"]["outcome"] == "left"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])  # what a shell's redirection may write
def test_compare_reads_json_in_any_encoding_of_json(encoding: str, tmp_path: Path) -> None:
    path = Path(report_file(tmp_path, "a.json", FUSED))
    path.write_text(path.read_text(), encoding=encoding)
    assert run("compare", str(path), report_file(tmp_path, "b.json", FUSED)).exit_code == 0


def test_compare_takes_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_pass.entries import package

    monkeypatch.setattr(package, "package_report", lambda path: Report([LEFT]))
    result = run("compare", "model.pt2", report_file(tmp_path, "a.json", FUSED), "--json")
    assert json.loads(result.stdout)["changes"][0]["before"]["reason"] == "weights are returned"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot be read"),
        ("{", "is not a report"),
        ("[]", "is not a report"),
        ('{"sites": [{"outcome": "left"}]}', "is not a report"),
        ('{"sites": 3, "seconds": 1, "graphs": 1}', "is not a report"),
        (
            '{"sites": [{"outcome": "left", "reason": "r", "module": null}], "seconds": 1, "graphs": 1}',
            "'module' is None",
        ),
        ("[" * 100_000, "is not a report"),
    ],
)
def test_compare_rejects_files_that_are_not_reports(content: str | None, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    result = run("compare", str(path), report_file(tmp_path, "a.json", FUSED))
    assert result.exit_code == 2 and sentence in result.stderr and "x.json" in result.stderr
    assert run("compare", str(tmp_path / "no.pt2"), str(path)).exit_code == 2


# ---------------------------------------------------------------- what a pipeline asks


@pytest.mark.parametrize(
    ("found", "asked", "code"),
    [
        (0, ("--fail-on", "none"), 1),
        (1, ("--fail-on", "none"), 0),
        (1, ("--expect", "1"), 0),
        (1, ("--expect", "2"), 1),
        (0, ("--expect", "0"), 0),
        (1, ("--expect", "1", "--fail-on", "left"), 1),
    ],
)
def test_the_number_of_sites_is_what_a_pipeline_expects(
    found: int, asked: tuple[str, ...], code: int, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = [SiteReport(outcome="left", reason="a reason")] * found
    sites += [SiteReport(kind="near miss", outcome="left", reason="no attention")]  # which is none
    report = Report(sites, graphs=1, graph_breaks=("m.py:3 in f: print",))
    monkeypatch.setattr(attn_pass, "explain", lambda *args, **kwargs: report, raising=False)
    result = run("explain", f"{model_file}:build", *asked)
    assert result.exit_code == code, result.output
    assert ("attn-pass: --" in result.stderr) == bool(code)
    assert "graph break" in result.stdout


def test_calls_are_what_is_expected(model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a graph break one graph, and so one site, is run for all layers."""
    report = Report(
        [SiteReport(outcome="left", reason="a reason", count=12)], graphs=1, graph_breaks=("m.py:3: print",)
    )
    monkeypatch.setattr(attn_pass, "explain", lambda *args, **kwargs: report, raising=False)
    assert run("explain", f"{model_file}:build", "--expect", "12").exit_code == 0
    wrong = run("explain", f"{model_file}:build", "--expect", "1")
    assert wrong.exit_code == 1
    assert "expected 1 attention, found 12; 1 graph break: attention that spans it is not detected" in wrong.stderr


def test_any_option_reaches_explain(model_file: Path, called: list[dict[str, Any]]) -> None:
    asked = (
        *("--option", "assume_constant_buffers=true", "--option", "targets=sdpa, flex"),
        *("--option", 'rules={"*cross": "sdpa"}', "--choose", "fused"),
    )
    assert run("explain", f"{model_file}:build", *asked).exit_code == 0
    assert called[0]["own"]["options"] == {
        "assume_constant_buffers": True,
        "targets": ("sdpa", "flex"),
        "rules": {"*cross": "sdpa"},
        "choose": "fused",
    }


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (("--option", "assume_constant_buffer=true"), "did you mean 'assume_constant_buffers'"),
        (("--option", "choose"), "give name=value"),
        (("--option", "choose=fused", "--option", "choose=first"), "is given twice"),
        (("--option", "choose=fused", "--choose", "fused"), "are both given"),
        (("--option", "rules={"), "is no JSON"),
        (("--option", "tune=maybe"), "accepted: True or False"),
        (("--option", "targets=sdpaa,flex"), "unknown target 'sdpaa'; did you mean 'sdpa'"),
        (("--option", "runtime=onx"), "unknown runtime 'onx'; did you mean 'onnx'"),
        (("--option", "numerics=strickt"), "did you mean 'strict'"),
        (("--device", "H20"), "unknown device 'H20'; did you mean 'H200'"),
    ],
)
def test_an_option_that_is_wrong_is_a_sentence(asked: tuple[str, ...], sentence: str, model_file: Path) -> None:
    for command in ("explain", "bench") if asked[0] == "--option" and "--choose" not in asked else ("explain",):
        result = run(command, f"{model_file}:broken", *asked)  # before the model is built
        assert result.exit_code == 2 and sentence in result.stderr and "no weights" not in result.stderr


def test_a_backend_that_is_unknown_is_told_before_the_model_is_built(model_file: Path) -> None:
    result = run("check", f"{model_file}:broken", "--backend", "inducto")
    assert result.exit_code == 2 and "no weights" not in result.stderr
    assert "unknown backend of torch.compile 'inducto'; did you mean 'inductor'" in result.stderr


def test_a_device_to_calibrate_that_is_unknown_is_told() -> None:
    result = run("calibrate", "--device", "cup")
    assert result.exit_code == 2 and "unknown device 'cup'; did you mean 'cpu'?; accepted are" in result.stderr


def test_the_traceback_is_shown_where_it_is_asked_for(model_file: Path) -> None:
    plain = run("explain", f"{model_file}:broken")
    assert plain.exit_code == 2 and "Traceback" not in plain.stderr
    told = run("explain", f"{model_file}:broken", "--traceback")
    assert told.exit_code == 2
    assert "Traceback (most recent call last)" in told.stderr and told.stderr.endswith(plain.stderr)


def test_the_version_is_known_before_any_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = run("--version")
    assert shown.exit_code == 0 and shown.stdout.startswith("attn_pass ")
    assert shown.stdout.split()[1] in run("version").stdout
    monkeypatch.setattr(sys, "argv", ["attn_pass", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("attn_pass", run_name="__main__")  # as `python -m attn_pass` does
    assert not ended.value.code and capsys.readouterr().out == shown.stdout
