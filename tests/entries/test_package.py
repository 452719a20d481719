"""The report inside a package: the stored report is the one that is read, in Python and by the command line."""

from __future__ import annotations

import json
import zipfile
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import attn_pass
from attn_pass.cli.main import app
from attn_pass.entries.package import KEY, with_report
from attn_pass.report.record import Report
from attn_pass.report.site import SiteReport


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    keep = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril()
    return (q @ k.mT).masked_fill(~keep, float("-inf")).softmax(-1) @ v


def report() -> Report:
    x = torch.randn(2, 3, 64, 16)
    with torch.no_grad():
        return attn_pass.explain(attention, x, x, x)


def package(path: Path, metadata: dict[str, str]) -> Path:
    """As much of a package as holds what is read (torch.export.pt2_archive)."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data/aotinductor/model/c1.kernel_metadata.json", json.dumps({"AOTI_DEVICE_KEY": "cpu"}))
        archive.writestr("model/data/aotinductor/model/c2.wrapper_metadata.json", json.dumps(metadata))
    return path


def test_a_report_survives_json() -> None:
    made = report()
    again = Report.from_dict(json.loads(made.to_json()))
    assert str(again) == str(made) and again.to_dict() == made.to_dict()
    assert type(again.sites[0].assumptions) is tuple and type(again.sites[0].shapes["query"]) is tuple


def test_fields_of_another_version_are_ignored() -> None:
    stored = report().to_dict()
    stored["sites"][0]["of a later version"] = 1
    del stored["sites"][0]["measured_us"]
    assert Report.from_dict(stored).sites[0].measured_us == {}


def test_the_user_s_own_metadata_stays(tmp_path: Path) -> None:
    patches = with_report({"aot_inductor.metadata": {"mine": "1"}, "max_autotune": True}, report())
    metadata = patches["aot_inductor.metadata"]
    assert metadata["mine"] == "1" and patches["max_autotune"] is True
    path = package(tmp_path / "m.pt2", metadata)
    assert attn_pass.package_report(path).sites[0].mask == "causal"


def test_the_command_line_prints_it(tmp_path: Path) -> None:
    path = package(tmp_path / "m.pt2", {KEY: report().to_json()})
    run = CliRunner().invoke(app, ["explain", str(path)])
    assert run.exit_code == 0 and "causal" in run.stdout
    as_json = CliRunner().invoke(app, ["explain", str(path), "--json"])
    assert json.loads(as_json.stdout)["sites"][0]["mask"] == "causal"


@pytest.mark.parametrize("wrong", [{"a": [1]}, [[1]], True, 10**400, "\ud800"])
def test_a_field_that_holds_something_else_is_refused_or_can_be_shown(wrong: object) -> None:
    made = report().to_json()
    for field in fields(SiteReport):
        stored = json.loads(made)
        stored["sites"][0][field.name] = wrong
        try:
            read = Report.from_dict(stored)
        except (TypeError, ValueError, KeyError, AttributeError):
            continue
        assert read.table(verbose=True) and read.to_html().encode() and read.to_json().encode(), field.name
        assert read.compare(read).summary()


def test_a_damaged_package_says_so(tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a_metadata.json", json.dumps({KEY: report().to_json()}))
    content = bytearray(path.read_bytes())
    content[50] ^= 0xFF  # in the compressed part
    path.write_bytes(content)
    with pytest.raises(attn_pass.PackageError, match="is not an AOTInductor package"):
        attn_pass.package_report(path)


@pytest.mark.parametrize("what", ["nothing", "no package", "a package of somebody else"])
def test_what_holds_no_report_says_so(what: str, tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    if what == "no package":
        path.write_bytes(b"no zip")
    elif what == "a package of somebody else":
        package(path, {"mine": "1"})
    with pytest.raises(attn_pass.PackageError, match=r"no file|not an AOTInductor package|holds no report"):
        attn_pass.package_report(path)
    run = CliRunner().invoke(app, ["explain", str(path)])
    assert run.exit_code == 2 and "attn-pass:" in run.stderr


def test_metadata_of_the_configuration_around_stays() -> None:
    with torch._inductor.config.patch({"aot_inductor.metadata": {"mine": "1"}}):
        assert with_report({}, report())["aot_inductor.metadata"].keys() == {"mine", "attn_pass"}
