"""The HTML page: well-formed, self-contained, everything escaped; it shows the report and the graphs."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import attn_pass
from attn_pass.report.pages.collect import Collection, collect
from attn_pass.report.pages.html import page, short_paths
from attn_pass.report.pages.plot import HEIGHT, WIDTH, plots, short
from attn_pass.report.pages.side_by_side import side_by_side
from attn_pass.report.record import Report
from attn_pass.report.region import RegionReport
from attn_pass.report.site import SiteReport

Tensor = torch.Tensor
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7 * 7 }}"
VOID = {"meta", "link", "br", "input", "hr", "img"}


class Page(HTMLParser):
    """Elements as (tag, attributes), the text without scripts and styles, and what is not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.faults: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.inside: dict[str, str] = {}
        self.feed(text)
        self.close()
        self.faults += [f"{tag} is never closed" for tag in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"{tag} closes something else, line {self.getpos()[0]}")

    def handle_data(self, data: str) -> None:
        where = self.open[-1] if self.open else ""
        if where in ("script", "style"):
            self.inside[where] = self.inside.get(where, "") + data
        else:
            self.text += data

    def having(self, name: str) -> list[dict[str, str]]:
        """The attributes of the elements of a class."""
        return [attrs for _, attrs in self.elements if name in attrs.get("class", "").split()]


def site(**changes: Any) -> SiteReport:
    values: dict[str, Any] = {
        "outcome": "rewritten",
        "target": "sdpa",
        "reason": "predicted 40 us as written, 10 us with sdpa",
        "where": "model.py:12 in forward",
        "shapes": {"query": (1, 8, "s77", 64), "key": (1, 8, "s77", 64), "value": (1, 8, "s77", 64)},
        "dtype": "float32",
        "device": "cpu",
        "mask": "causal",
        "predicted_us": {"leave": 40.0, "sdpa": 10.0, "sdpa (grouped_heads)": 12.0},
        "refusals": {"flex": "no score function is needed"},
        "rates": {"device": "cpu, 2 cores", "gflops": 176.0, "gbytes": 22.0},
        "roofline": {
            "leave": {"flops": 1e6, "bytes": 5e5, "us": 40.0},
            "sdpa": {"flops": 1e6, "bytes": 1e5, "us": 10.0},
        },
        "formula": {"score": "0.125 * dot(q, k)", "keep": "j <= i", "else": "-inf", "result": "softmax(score) @ v"},
        "module": "model.layers.0.self_attn",
        "node": "matmul_1",
    }
    values |= changes
    return SiteReport(**{"taken": values["target"] or "", **values})


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    scores = (q @ k.mT * 0.3).masked_fill(j > i, float("-inf"))
    return scores.softmax(-1) @ v


@pytest.fixture(scope="module")
def collected() -> tuple[Report, Collection]:
    inputs = [torch.randn(2, 4, 70, 16) for _ in range(3)]
    with collect() as collection:
        report = attn_pass.explain(causal, *inputs, attn_pass_options={"choose": "fused", "targets": ("sdpa",)})
    return report, collection


# ---------------------------------------------------------------- one page


def test_a_page_is_well_formed_and_loads_nothing(collected: tuple[Report, Collection]) -> None:
    full = Report([site(), site(outcome="left", target=None), site(kind="near miss", outcome="left", target=None)])
    for text in (page(collected[0], collected[1].graphs), full.to_html(), Report().to_html()):
        html = Page(text)
        assert not html.faults
        loading = [(t, a) for t, a in html.elements if t in ("script", "link", "img", "iframe", "object", "embed")]
        assert [a.get("src") for t, a in loading if t == "script"] == [None]
        for _, attrs in html.elements:
            for name in ("href", "src", "action", "data", "srcset"):
                assert attrs.get(name, "#").startswith(("#", "data:,")), attrs
        assert "url(" not in text.replace("url(#hatch)", "") and "@import" not in text


def test_the_page_allows_only_its_own_script(collected: tuple[Report, Collection]) -> None:
    html = Page(page(collected[0], collected[1].graphs))
    policy = next(a["content"] for t, a in html.elements if a.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(html.inside["script"].encode()).digest()).decode()
    assert "default-src 'none'" in policy and f"script-src 'sha256-{digest}'" in policy
    assert not any(name.startswith("on") for _, attrs in html.elements for name in attrs)


def test_a_report_alone_has_no_graphs_and_no_pictures() -> None:
    html = Page(Report([site()], graphs=1).to_html())
    assert not html.having("code") and not html.having("mask")
    assert html.having("plot") and html.having("formula")


def test_what_a_site_knows_is_on_the_page() -> None:
    reported = site(
        poor_cases=("grouped_heads",),
        assumptions=("no row is fully masked",),
        fixed=("buffer mask",),
        score_mod="def score_mod(score, b, h, q_idx, kv_idx):\n    return score + b",
        verified_error=1.5e-7,
        not_verified="there is no H200 here",
        count=3,
    )
    text = Page(Report([reported], seconds=0.25, graphs=1).to_html()).text
    for part in (
        *("rewritten to sdpa", "×3", "model.py:12 in forward", "model.layers.0.self_attn", "(1, 8, s77, 64)"),
        *("40 us", "10 us", "predicted 40 us as written", "flex", "no score function is needed", "grouped_heads"),
        *("no row is fully masked", "buffer mask", "return score + b", "1.5e-07", "there is no H200 here", "matmul_1"),
        *("0.125 * dot(q, k)", "j <= i", "-inf", "400 kB per call", "250 ms", "1.2 MB"),
    ):
        assert part in text, part


def test_equal_layers_are_one_entry() -> None:
    html = Page(Report([site(module=f"layers.{n}.attn", node=f"n{n}") for n in range(12)]).to_html())
    (entry,) = html.having("site")
    assert "layers.*.attn" in html.text and "layers.7.attn" in entry["data-text"] and "×12" in html.text


def test_the_totals_count_every_call() -> None:
    left = site(outcome="left", target=None, predicted_us={"leave": 100.0}, roofline={}, where="b.py:1 in f")
    text = " ".join(Page(Report([site(count=2), left]).to_html()).text.split())
    assert "120 us180 us as written, 1.5x" in text  # 2 * 10 + 100 of 2 * 40 + 100
    assert "800 kBper run" in text


def test_measured_times_come_before_predictions() -> None:
    text = " ".join(Page(Report([site(measured_us={"leave": 33.0, "sdpa": 11.0})]).to_html()).text.split())
    assert "33 us → 11 us" in text and "Forms, measured" in text and "12 us" not in text


# ---------------------------------------------------------------- nothing is taken for markup


def evil_site() -> SiteReport:
    return site(
        reason=EVIL,
        form=EVIL,
        where=EVIL,
        module=EVIL,
        mask=EVIL,
        dtype=EVIL,
        device=EVIL,
        target=EVIL,
        node=EVIL,
        score_mod=EVIL,
        not_verified=EVIL,
        poor_cases=(EVIL,),
        assumptions=(EVIL,),
        fixed=(EVIL,),
        refusals={EVIL: EVIL},
        predicted_us={EVIL: 3.0, "leave": 4.0},
        shapes={EVIL: (EVIL,)},
        formula={"score": EVIL, "keep": EVIL, "else": EVIL, "result": EVIL, EVIL: EVIL},
        rates={"device": EVIL, "gflops": 100.0, "gbytes": 10.0},
        roofline={"leave": {"flops": 1e6, "bytes": 1e5, "us": 3.0}, EVIL: {"flops": 1e6, "bytes": 1e4, "us": 1.0}},
    )


def markup(text: str) -> str:
    """The page with its own script and style taken out."""
    return re.sub(r"<(script|style)>.*?</\1>", "", text, count=2, flags=re.S)


@pytest.mark.parametrize("stored", [False, True])
def test_text_of_a_model_or_a_stored_report_is_only_text(stored: bool) -> None:
    report = Report([evil_site()], graphs=1)
    if stored:
        report = Report.from_dict(report.to_dict())
    for text in (report.to_html(), report._repr_html_(), report.compare(Report())._repr_html_()):
        html = Page(text)
        assert "<script" not in markup(text).lower() and "<img" not in text.lower()
        assert not html.faults and not any(name.startswith("on") for _, attrs in html.elements for name in attrs)
        assert EVIL in html.text and "49" not in html.text


def test_regions_without_padding_are_on_the_page_as_text() -> None:
    proved = {"operations": {"linear": 12}, "entries": ("ids",), "exits": (EVIL,), "rows": (4, 24)}
    region = RegionReport(outcome="packed", reason="", where="model.py:3", sites=2, packed=2, **proved)
    left = RegionReport(outcome="left", reason=EVIL, sites=1)
    text = page(Report([site()], regions=[region, left]))
    assert "2 of 2 attentions run on packed rows of (4, 24)" in text and "row by row: linear x12" in text
    assert "<script" not in markup(text).lower() and "<img" not in text.lower() and Page(text).text.count(EVIL) == 2
    assert 'id="padding"' not in page(Report([site()]))


def test_code_of_a_model_is_only_text(collected: tuple[Report, Collection]) -> None:
    report, collection = collected
    graph = collection.graphs[0]
    evil = [type(graph)(EVIL, report, before=f"x = 1  # {EVIL}\n", after=f"y = 2  # {EVIL}\n")]
    text = page(report, evil)
    assert "<script" not in markup(text).lower() and "<img" not in text.lower() and not Page(text).faults
    assert Page(text).text.count(EVIL) == 3


def test_control_characters_do_not_come_through() -> None:
    text = Report([site(reason="a\x1b[31mred\x00 \u202edesrever")]).to_html()
    assert not {"\x1b", "\x00", "\u202e"} & set(text)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1.0, 0.0, None, "12"])
def test_numbers_that_are_none_leave_the_page_whole(number: Any) -> None:
    odd = site(
        predicted_us={"leave": number, "sdpa": number},
        rates={"device": "x", "gflops": number, "gbytes": 22.0},
        roofline={"leave": {"flops": 1e6, "us": number}},
    )
    report = Report([odd])
    if not isinstance(number, float):  # JSON has null for what is no number, and a file may hold anything
        report = Report.from_dict(report.to_dict())
    assert not Page(report.to_html()).faults and str(report) and str(report.compare(Report([site()])))


# ---------------------------------------------------------------- code before and after


def test_what_a_site_removed_and_added_is_marked(collected: tuple[Report, Collection]) -> None:
    report, collection = collected
    (graph,), (change,) = collection.graphs, collection.graphs[0].sites
    assert change.record is report.sites[0] and "softmax" in change.removed
    assert change.added and not set(change.removed) & set(change.added) - {report.sites[0].node}
    for name in change.removed:
        assert re.search(rf"^ +{name}(:.*)? = ", graph.before, re.M), name
    for name in change.added:
        assert re.search(rf"^ +{name}(:.*)? = ", graph.after, re.M), name
    assert "scaled_dot_product_attention" not in graph.before and "scaled_dot_product_attention" in graph.after
    assert "softmax: " in graph.before and "softmax: " not in graph.after
    assert "# File: " in graph.before and "test_html.py" in graph.before
    html = Page(page(report, collection.graphs))
    assert html.having("gone") and html.having("come")
    tags = {attrs["href"] for attrs in html.having("tag")}
    assert tags == {"#site-1"} and any(attrs.get("id") == "site-1" for _, attrs in html.elements)


def test_what_makes_a_mask_is_folded_and_paths_are_short(collected: tuple[Report, Collection]) -> None:
    report, collection = collected
    (change,) = collection.graphs[0].sites
    assert {"arange", "gt"} <= set(change.mask) and not {"softmax", "matmul", "scores"} & set(change.mask)
    html = Page(page(report, collection.graphs))
    assert "lines that make the mask, before" in html.text
    folder = Path(__file__).parent
    assert f"# File: {folder.name}/test_html.py:" in html.text and str(folder) not in html.text
    assert short_paths("# File: C:\\a\\b\\c.py:3 in f") == "# File: b\\c.py:3 in f"
    assert short_paths("# File: c.py:3 in f, code: a / b.py:4") == "# File: c.py:3 in f, code: a / b.py:4"


def test_masks_of_each_side_are_folded_apart() -> None:
    before = "# File: a\ni: 'i64' = arange(3)\nj: 'i64' = i + 1\n\n# File: b\ns = q @ k\nw = s.softmax()\nend"
    after = "m0 = 1\nm1 = 2\nm2 = 3\nw = call(m0)\nend"
    names = {"i": 1, "j": 1, "s": 1, "w": 1}
    runs = side_by_side(before, after, names, {"m0": 1, "m1": 1, "m2": 1, "w": 1}, {"i", "j", "m0", "m1", "m2"})
    assert [(run.changed, run.folded, run.what if run.folded else len(run.rows)) for run in runs] == [
        (True, True, "3 lines that make the mask, before"),
        (True, True, "3 lines that make the mask, after"),
        (True, False, 4),
        (False, False, 1),
    ]
    assert [row.before.text for row in runs[0].rows if row.before] == before.splitlines()[:3]
    few = side_by_side("i = 1\nw = s", "w = t", {"i": 1, "w": 1}, {"w": 1}, {"i"})
    assert not any(run.folded for run in few)


def test_targets_of_other_devices_are_folded() -> None:
    reported = site(refusals={"flex": "no score function", "cudnn": "it is for GPUs"}, other_devices=("cudnn",))
    html = Page(Report([reported]).to_html())
    assert len(html.having("other-devices")) == 1 and "1 for other devices" in html.text
    assert html.text.index("no score function") < html.text.index("it is for GPUs")
    assert not Page(Report([site()]).to_html()).having("other-devices")


def test_lines_stand_beside_each_other() -> None:
    before = "\n".join([*(f"line {n}" for n in range(20)), "a: 'f32' = b + c", "end"])
    after = "\n".join([*(f"line {n}" for n in range(20)), "a: 'f32' = d + c", "more = 1", "end"])
    runs = side_by_side(before, after, {"a": 3}, {"a": 3, "more": 3})
    reported = [(run.changed, run.folded, len(run.rows)) for run in runs]
    assert reported == [(False, True, 17), (False, False, 3), (True, False, 2), (False, False, 1)]
    first, second = runs[2].rows
    assert first.before and first.after and (first.before.site, first.after.site) == (3, 3)
    assert second.before is None and second.after and (second.after.number, second.after.text) == (22, "more = 1")


def test_every_line_is_there_once() -> None:
    before, after = "\n".join("abcdefgh"), "\n".join("abxdefyzh")
    runs = side_by_side(before, after)
    assert "".join(r.before.text for run in runs for r in run.rows if r.before) == "abcdefgh"
    assert "".join(r.after.text for run in runs for r in run.rows if r.after) == "abxdefyzh"


def test_a_name_that_is_only_read_belongs_to_no_site() -> None:
    (run,) = side_by_side("b = f(a)", "c = a == b", {"a": 1}, {"a": 1})
    assert run.rows[0].before and run.rows[0].after and not run.rows[0].before.site and not run.rows[0].after.site


def test_a_graph_that_was_restored_is_marked(collected: tuple[Report, Collection]) -> None:
    report = Report([site()])
    graph = type(collected[1].graphs[0])("compile", report, before="a", after="b")
    assert "did not take" not in page(report, [graph])
    report.mark_left("the compiler could not lower it")
    assert "did not take" in page(report, [graph])


# ---------------------------------------------------------------- the plot


def test_dots_lie_inside_and_where_they_belong() -> None:
    slow = site(roofline={"leave": {"flops": 1e6, "bytes": 1e6, "us": 1e4}, "sdpa": {"us": 3.0}}, where="b.py:2 in g")
    (plot,) = plots([(1, site()), (2, slow)])
    first, second = plot.dots
    assert second.x1 is None and first.x1 is not None and first.y1 is not None
    assert first.x0 < first.x1 and first.y0 > first.y1  # less traffic, and faster, which is up
    assert second.x0 < first.x0 and second.y0 > first.y0
    points = [(d.x0, d.y0) for d in plot.dots] + list(plot.roof)
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)
    # A form that moves 2 FLOP a byte at 22 GB/s stands on the slope.
    (on_roof,) = plots([(1, site(roofline={"leave": {"flops": 2e6, "bytes": 1e6, "us": 1e6 / 22e3}}))])
    (x0, y0), (x1, y1), _ = on_roof.roof
    dot = on_roof.dots[0]
    assert abs((dot.y0 - y0) / (y1 - y0) - (dot.x0 - x0) / (x1 - x0)) < 0.01


def test_sites_without_numbers_have_no_plot() -> None:
    assert plots([(1, site(roofline={})), (2, site(rates={}))]) == []
    assert "GFLOP/s, predicted" not in Report([site(roofline={})]).to_html()


@pytest.mark.parametrize(("number", "text"), [(0.25, "0.25"), (999, "999"), (12_345, "12.3k"), (3.2e12, "3.2T")])
def test_numbers_are_short(number: float, text: str) -> None:
    assert short(number) == text


# ---------------------------------------------------------------- notebooks


def test_a_notebook_gets_a_small_table_without_scripts() -> None:
    report = Report([site(where=f"m.py:{n} in f", module="") for n in range(30)], graphs=1)
    text = report._repr_html_()
    html = Page(text)
    assert not html.faults and "script" not in html.inside and "style" not in html.inside
    assert len([t for t, _ in html.elements if t == "tr"]) == 21 and "and 10 more rows" in html.text
    assert len(text) < 40_000 and "no attention found" in Report()._repr_html_()


def test_the_page_says_of_what_it_is() -> None:
    report = Report([site()], about={"model": EVIL, "date": "2026-01-01"})
    text = Page(report.to_html()).text
    assert "date: 2026-01-01" in text and "model: <script>" in text and EVIL not in report.to_html()
    assert "model:" not in Page(Report([site()]).to_html()).text
    x = torch.randn(1, 2, 8, 4)
    explained = attn_pass.explain(
        torch.nn.functional.scaled_dot_product_attention, x, x, x, attn_pass_options={"choose": "fused"}
    )
    assert explained.about["model"] == "scaled_dot_product_attention" and "choose='fused'" in explained.about["options"]
    assert f"torch {torch.__version__}" in explained.about["versions"]
    assert Report.from_dict(explained.to_dict()).about == explained.about
