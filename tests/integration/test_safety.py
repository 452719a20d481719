"""Packages and reports from anywhere: nothing in them is unpickled or run, and malformed ones are an error."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import attn_pass
from attn_pass.cli.main import app
from attn_pass.entries.package import KEY
from attn_pass.errors import PackageError

SOURCES = sorted(Path(attn_pass.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("word", ["pickle.load", "import pickle", "weights_only=False", "eval(", "yaml.load"])
def test_no_source_reads_what_could_run(word: str) -> None:
    """`torch.load` is called with weights_only alone; no text from outside is evaluated."""
    for source in SOURCES:
        text = source.read_text().replace(".eval()", "")
        assert word not in text.replace("retrieval(", ""), source
        assert text.count("torch.load(") == text.count("weights_only=True"), source


def package(path: Path, content: Any, name: str = "model/data/aotinductor/model_metadata.json") -> Path:
    with zipfile.ZipFile(path / "model.pt2", "w") as archive:
        archive.writestr(name, content if isinstance(content, (str, bytes)) else json.dumps(content))
    return path / "model.pt2"


MALFORMED: tuple[Any, ...] = (
    b"\xff\xfe\x00",
    "[1, 2",
    [1, 2],
    "null",
    {KEY: 3},
    {KEY: "no JSON"},
    {KEY: "[]"},
    {KEY: '{"sites": 3}'},
    {KEY: '{"sites": [3]}'},
    {KEY: '{"sites": [{"shapes": 3}]}'},
    {KEY: '{"sites": [{}]}'},
)


@pytest.mark.parametrize("content", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_package_is_one_sentence(content: Any, tmp_path: Path) -> None:
    path = package(tmp_path, content)
    with pytest.raises(PackageError):
        attn_pass.package_report(path)
    reported = CliRunner().invoke(app, ["explain", str(path)])
    assert reported.exit_code == 2 and "Traceback" not in reported.output


def test_text_of_a_report_is_text(tmp_path: Path) -> None:
    """Markup and control characters in a stored report change nothing on the terminal."""
    hostile = "[bold red]x[/] \x1b[2J\x1b]0;title\x07 [link=file:///etc/passwd]y[/link]"
    site = {"outcome": "left", "reason": hostile, "where": hostile, "module": hostile, "mask": hostile}
    path = package(tmp_path, {KEY: json.dumps({"seconds": 0.0, "graphs": 1, "sites": [site]})})
    shown = str(attn_pass.package_report(path))
    assert "\x1b" not in shown and "\x07" not in shown
    assert "[bold red]x[/]" in shown.replace("\n", "")


FIELDS: tuple[tuple[str, Any], ...] = (
    *((name, 3) for name in ("outcome", "reason", "where", "module", "mask", "target", "score_mod", "not_verified")),
    *(("count", "many"), ("shapes", {"query": [{}]}), ("refusals", ["x"]), ("refusals", {"x": 3}), ("rates", 3)),
    *(("formula", 3), ("fixed", [[1]]), ("poor_cases", [1]), ("assumptions", [None]), ("verified_error", "x")),
)


@pytest.mark.parametrize(("name", "value"), FIELDS, ids=str)
def test_a_report_of_other_types_is_an_error_before_it_is_shown(name: str, value: Any, tmp_path: Path) -> None:
    site = {"outcome": "left", "reason": "", name: value}
    path = package(tmp_path, {KEY: json.dumps({"seconds": 0.0, "graphs": 1, "sites": [site]})})
    with pytest.raises(PackageError, match="was not written by attn_pass"):
        attn_pass.package_report(path)


@pytest.mark.parametrize(
    "reported", [{"seconds": "x", "graphs": 1, "sites": []}, {"seconds": 0, "graphs": [], "sites": []}]
)
def test_totals_of_other_types_are_an_error(reported: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="was not written by attn_pass"):
        attn_pass.package_report(package(tmp_path, {KEY: json.dumps(reported)}))


def test_a_report_that_is_nested_without_end_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PackageError):
        attn_pass.package_report(package(tmp_path, {KEY: "[" * 100_000}))


def test_a_damaged_archive_is_an_error(tmp_path: Path) -> None:
    path, name = tmp_path / "model.pt2", "model_metadata.json"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, json.dumps({KEY: "x" * 1000}))
    content = bytearray(path.read_bytes())
    begin = content.find(name.encode()) + len(name)
    content[begin : begin + 2] = b"\xff\xff"
    path.write_bytes(content)
    with pytest.raises(PackageError, match="not an AOTInductor package"):
        attn_pass.package_report(path)
