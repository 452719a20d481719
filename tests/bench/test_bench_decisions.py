"""`python -m bench decisions`: what it records, and which differences it reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import attn_pass
from attn_pass.report.site import SiteReport
from bench.__main__ import app
from bench.suites.decisions import differences, questions, site_of

LEFT = SiteReport(outcome="left", reason="a size is 0", refusals={"sdpa": "a size is 0"})


def test_a_decision_that_moved_is_told_apart_from_a_reason_that_is_worded_otherwise() -> None:
    reworded = SiteReport(outcome="left", reason="one size is 0", refusals={"sdpa": "one size is 0"})
    moved = SiteReport(outcome="rewritten", reason="", target="sdpa")
    before = {"a": [site_of(LEFT)], "b": [site_of(LEFT)], "c": [site_of(LEFT)]}
    now = {"a": [site_of(reworded)], "b": [site_of(moved)], "d": [site_of(LEFT)]}
    decisions, wording = differences(before, now)
    assert [line for line in wording if line.startswith("a,")] and not [x for x in decisions if x.startswith("a,")]
    assert {"b, site 0, outcome: 'left' before, 'rewritten' now", "c: 1 sites before, not asked now"} <= set(decisions)
    assert any(line.startswith("b, site 0, refused") for line in decisions)
    assert "d: not asked before, 1 sites now" in decisions


def test_predictions_are_no_part_of_a_decision() -> None:
    one, other = (SiteReport(outcome="left", reason=f"predicted {us} us as written, 2 us with sdpa") for us in (8, 9))
    assert site_of(one) == site_of(other)


def test_the_record_covers_every_kind_of_program(tmp_path: Path) -> None:
    case = tmp_path / "000001_case.py"
    case.write_text("")
    names = [question.name for question in questions(tmp_path, tmp_path)]
    kinds = ("cpu, 1 threads", "cpu, 2 threads", "h200", "ascend 910b", "tpu v6e", "case 000001_case", "model hf/bert")
    assert len(names) == len(set(names))
    assert all(any(name.startswith(kind) for name in names) for kind in kinds)
    assert sum(name.startswith("model ") for name in names) >= 40


def test_a_record_holds_until_a_decision_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, run = tmp_path / "decisions.json", CliRunner()
    ask = ["decisions", str(file), "--only", "a100: prefill"]
    assert run.invoke(app, [*ask, "--record"]).exit_code == 0
    assert run.invoke(app, ask).exit_code == 0
    stored = json.loads(file.read_text())
    assert {site["target"] for sites in stored["decisions"].values() for site in sites} == {"flash"}
    explain = attn_pass.explain

    def without_flash(*args: object, attn_pass_options: dict[str, object], **kwargs: object) -> attn_pass.Report:
        return explain(*args, attn_pass_options={**attn_pass_options, "rules": {"*": ("sdpa",)}}, **kwargs)

    monkeypatch.setattr(attn_pass, "explain", without_flash)
    answer = run.invoke(app, ask)
    assert answer.exit_code == 1 and "'flash' before" in answer.output
