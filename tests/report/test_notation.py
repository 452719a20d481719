"""One notation for times and numbers of cores, wherever they are shown."""

from __future__ import annotations

import logging
import re
from html import unescape

import pytest
import torch
import torch.nn.functional as F

import attn_pass
from attn_pass.cli import doctor
from attn_pass.devices.processors import processor
from attn_pass.measuring.result import Benchmark, Row
from attn_pass.report.pages.html import fragment
from attn_pass.report.record import Report
from attn_pass.report.site import SiteReport
from attn_pass.report.torch_logging import log_report
from attn_pass.report.units import counted, duration
from bench.harness import environment

TIME = re.compile(r"(?<![\w.])([\d.,]+(?:e[+-]?\d+)?) ?(us|µs|ms|s)\b")


def times_in(text: str) -> list[tuple[float, str]]:
    """Every time in a text, as a number and its unit."""
    return [(float(number.replace(",", "")), unit) for number, unit in TIME.findall(unescape(text))]


def check(text: str, *shown: str) -> None:
    for part in shown:
        assert part in text, part
    for number, unit in times_in(text):
        assert unit in ("us", "ms", "s") and (number < 1000 or unit == "s"), (number, unit)


def site(leave: float, sdpa: float) -> SiteReport:
    return SiteReport(
        outcome="rewritten",
        target="sdpa",
        taken="sdpa",
        where="model.py:12 in forward",
        reason=f"predicted {duration(leave)} as written, {duration(sdpa)} with sdpa",
        predicted_us={"leave": leave, "sdpa": sdpa},
    )


@pytest.mark.parametrize(
    ("microseconds", "shown"),
    [
        *(
            (0.04, "0.04 us"),
            (7.126, "7.13 us"),
            (999.4, "999 us"),
            (999.6, "1 ms"),
            (1000, "1 ms"),
            (51_708, "51.7 ms"),
        ),
        *((999_400, "999 ms"), (999_600, "1 s"), (7_117_700, "7.12 s")),
    ],
)
def test_a_time_has_the_unit_of_its_size(microseconds: float, shown: str) -> None:
    report = Report([site(microseconds, microseconds / 8)])
    check(report.table(200), shown, duration(microseconds / 8))
    check(report.to_html().partition("<script")[0], shown)


def test_every_output_has_the_same_notation(caplog: pytest.LogCaptureFixture) -> None:
    before, after = Report([site(51_708.0, 999.7)]), Report([site(51_708.0, 15_196.0)])
    check(str(before), "51.7 ms", "1 ms")
    check(fragment(before))
    check(str(before.compare(after)), "51.7 ms as written, 1 ms as taken", "15.2 ms as taken")
    with caplog.at_level(logging.DEBUG, "attn_pass"):
        log_report(before)
    check(caplog.text, "predicted: leave 51.7 ms, sdpa 1 ms")
    rows = tuple(Row(way, 139_000.0, 998.0, 2e6, 1.0, "", 0.0, 0, 1.0) for way in ("eager", "stock"))
    check(
        Benchmark(rows, {}, 0.0, "", "float64", {"model": "m", "mode": "inference"}, before).table(200),
        "139 ms",
        "998 us to 2 s",
    )


def test_the_times_of_a_row_agree() -> None:
    """The reason is made of the times themselves, the other lines of what the record holds of them."""
    for length in (4, 6, 40, 120):
        q, k, v = (torch.randn(1, 2, length, 16) for _ in range(3))
        (site,) = attn_pass.explain(F.scaled_dot_product_attention, q, k, v).sites
        times = {f"{number:g} {unit}" for number, unit in times_in(site.reason)}
        assert times and times <= {duration(us) for us in site.predicted_us.values()}, site


def test_the_doctor_has_it_too() -> None:
    notes = [finding.note for finding in doctor.targets("cpu") if finding.found == "offers"]
    assert notes
    for note in notes:
        check(note, " us predicted" if " us" in note else " ms predicted")


def test_a_comparison_gives_no_reason_that_only_repeats_the_times() -> None:
    before, after = Report([site(51_708.0, 999.7)]), Report([site(51_708.0, 15_196.0)])
    ((_, _, _, one, other),) = before.compare(after).rows()
    assert one.splitlines() == ["rewritten to sdpa", "predicted 51.7 ms as written, 1 ms as taken"]
    assert other.splitlines() == ["rewritten to sdpa", "predicted 51.7 ms as written, 15.2 ms as taken"]


@pytest.mark.parametrize(("cores", "shown"), [(1, "1 core"), (2, "2 cores"), (64, "64 cores")])
def test_cores_are_counted_in_words(cores: int, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert counted(cores, "core") == shown
    assert processor(cores).name == f"cpu, {shown}"
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    assert environment.device_name("cpu").endswith(f", {shown}")


def test_a_report_of_one_thread_says_one_core() -> None:
    threads = torch.get_num_threads()
    x = torch.randn(1, 2, 64, 64)
    try:
        torch.set_num_threads(1)
        report = attn_pass.explain(torch.nn.functional.scaled_dot_product_attention, x, x, x)
    finally:
        torch.set_num_threads(threads)
    page = report.to_html()
    assert "1 core" in page and "1 cores" not in page + str(report)
