"""Comparing two reports: which sites match, what differs, and what that means for CI."""

from __future__ import annotations

import json
from typing import Any

import pytest

from attn_pass.report.record import Report
from attn_pass.report.site import SiteReport


def site(layer: int = 0, **changes: Any) -> SiteReport:
    values: dict[str, Any] = {
        "outcome": "rewritten",
        "target": "sdpa",
        "reason": "predicted 40 us as written, 10 us with sdpa",
        "where": "model.py:12 in forward",
        "predicted_us": {"leave": 40.0, "sdpa": 10.0},
        "module": f"model.layers.{layer}.self_attn",
    }
    values |= changes
    return SiteReport(**{"taken": values["target"] or "", **values})


def left(layer: int = 0, reason: str = "the attention weights are returned", **changes: Any) -> SiteReport:
    return site(layer, outcome="left", target=None, reason=reason, **changes)


def reported(before: list[SiteReport], after: list[SiteReport]) -> list[str]:
    return [change.what for change in Report(before).compare(Report(after)).changes]


def test_the_same_report_does_not_differ() -> None:
    report = Report([site(n) for n in range(4)] + [left(4), left(5, kind="near miss")])
    for other in (report, Report.from_dict(json.loads(report.to_json()))):
        comparison = report.compare(other)
        assert comparison.changes == () and comparison.same == 6
        assert str(comparison) == "attn_pass: nothing differs (6 sites)"


@pytest.mark.parametrize(
    ("after", "what"),
    [
        (left(), "outcome, target, reason"),
        (site(target="flex", predicted_us={"leave": 40.0, "flex": 10.0}), "target"),
        (site(poor_cases=("grouped_heads",)), "target"),
        (site(reason="another reason"), "reason"),
        (site(reason="predicted 41 us as written, 9 us with sdpa"), ""),
        (site(predicted_us={"leave": 40.0, "sdpa": 20.0}), "time"),
        (site(predicted_us={"leave": 80.0, "sdpa": 10.0}), "time"),
        (site(predicted_us={"leave": 40.1, "sdpa": 10.01}), ""),
        (site(predicted_us={"leave": 40.0, "sdpa": 10.0, "flex": 900.0}), ""),
        (site(measured_us={"leave": 44.0, "sdpa": 10.0}), "time"),
        (site(kind="near miss"), "outcome"),
        (site(shapes={"query": (1, 2, 3, 4)}), ""),
    ],
)
def test_what_differs_of_one_site(after: SiteReport, what: str) -> None:
    assert reported([site()], [after]) == ([what] if what else [])


def test_sites_appear_and_go() -> None:
    comparison = Report([site(0), site(1)]).compare(Report([site(1), site(2)]))
    assert [(c.what, c.site.module) for c in comparison.changes] == [
        ("appeared", "model.layers.2.self_attn"),
        ("gone", "model.layers.0.self_attn"),
    ]
    assert comparison.same == 1 and "1 appeared, 1 gone, 1 the same" in str(comparison)


def test_sites_of_one_line_are_matched_in_order() -> None:
    before = [site(mask="causal"), left(mask="none"), site(mask="dense")]
    assert reported(before, [site(), left(), site()]) == []
    assert reported(before, [site(), site(), site()]) == ["outcome, target, reason"]
    comparison = Report(before).compare(Report([site(), site(), site()]))
    assert comparison.changes[0].before is before[1]


def test_a_site_is_found_again_when_the_file_was_edited_above_it() -> None:
    moved = site(where="model.py:90 in forward")
    assert reported([site()], [moved]) == []
    assert reported([site()], [site(where="model.py:90 in other")]) == ["appeared", "gone"]
    # One that did not move is matched first, whatever the order.
    one, two = site(mask="one"), left(mask="two", where="model.py:13 in forward")
    comparison = Report([one, two]).compare(Report([left(where="model.py:13 in forward"), site()]))
    assert comparison.changes == ()


def test_what_is_worse_is_what_is_left_now() -> None:
    def worse(before: list[SiteReport], after: list[SiteReport]) -> int:
        return len(Report(before).compare(Report(after)).worse)

    assert worse([site()], [left()]) == 1 and worse([left()], [site()]) == 0
    assert worse([], [left()]) == 1 and worse([left()], []) == 0 and worse([], [site()]) == 0
    assert worse([], [left(kind="near miss")]) == 0
    assert worse([left()], [left(reason="another")]) == 0
    assert worse([site()], [site(target="flex")]) == 0


def test_only_other_kernels_count_as_changed() -> None:
    before = Report([site(0), site(1), site(2), site(3)])
    after = Report([left(0), site(1, target="flex"), site(2, reason="x"), site(3, predicted_us={"leave": 9.0})])
    comparison = before.compare(after)
    assert len(comparison.changes) == 4 and len(comparison.changed) == 2


def test_layers_with_the_same_change_are_one_row() -> None:
    comparison = Report([site(n) for n in range(12)]).compare(Report([left(n) for n in range(12)]))
    (row,) = comparison.rows()
    assert row[0] == "x12" and "model.layers.*.self_attn" in row[1] and "rewritten to sdpa" in row[3]
    table = comparison.table(160)
    assert "12 left that was not before" in table and "predicted 40 us as written, 10 us as taken" in table
    assert "the attention weights are returned" in table and all(len(line) <= 160 for line in table.splitlines()[1:])


def test_json_has_both_records() -> None:
    document = json.loads(Report([site()]).compare(Report([left()])).to_json())
    assert (document["same"], document["changed"], document["worse"]) == (0, 1, 1)
    (change,) = document["changes"]
    assert (change["before"]["target"], change["after"]["outcome"]) == ("sdpa", "left")


def test_a_notebook_gets_a_table() -> None:
    shown = Report([site()]).compare(Report([left()]))._repr_html_()
    assert "<table>" in shown and "rewritten to sdpa" in shown and "<script" not in shown
    assert "<table>" not in Report([site()]).compare(Report([site()]))._repr_html_()


def test_empty_reports_compare() -> None:
    assert Report().compare(Report()).changes == ()
    assert reported([], [site()]) == ["appeared"] and reported([site()], []) == ["gone"]


def test_where_a_call_went_the_others_on_its_line_stay_paired() -> None:
    def at(length: int, **fields: Any) -> SiteReport:
        shapes: dict[str, tuple[int | str, ...]] = {"query": (1, 8, length, 64)}
        return SiteReport(where="u.py:3 in attention", shapes=shapes, **fields)

    long = at(4096, outcome="rewritten", target="sdpa", reason="cheaper")
    short = at(1, outcome="left", reason="already the cheapest form")
    gone = Report([long, short]).compare(Report([short]))
    assert [change.what for change in gone.changes] == ["gone"] and gone.same == 1 and not gone.worse
    assert [change.what for change in Report([short]).compare(Report([long, short])).changes] == ["appeared"]
