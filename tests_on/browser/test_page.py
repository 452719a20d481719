"""The page in a real browser: it opens without errors, filters and expands, and is readable on a phone and a desk."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from chromium import Browser, find

import attn_pass
from attn_pass.report.pages.collect import collect
from attn_pass.report.pages.html import page
from attn_pass.report.record import Report
from attn_pass.report.site import SiteReport

CHROMIUM = find()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found: install one, or name it in CHROMIUM")

Tensor = torch.Tensor
SIZES = {"desk": (1440, 900), "phone": (390, 844)}
EVIL = '<script>document.title = "taken"</script><img src=x onerror="document.title = \'taken\'">'


class Layer(torch.nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.project = torch.nn.Linear(64, 192)

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        q, k, v = self.project(x).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(16)
        i, j = torch.arange(x.shape[1])[:, None], torch.arange(x.shape[1])
        if self.kind == "window":
            scores = scores.masked_fill((j > i) | (i - j > 9), float("-inf"))
        if self.kind == "padding":
            scores = scores.masked_fill(~((j <= i) & pad[:, None, None, :]), torch.finfo(x.dtype).min)
        if self.kind == "other axis":
            return x + (scores.softmax(-2) @ v).transpose(1, 2).reshape(x.shape)
        return x + (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        kinds = ("window", "window", "padding", "plain", "other axis")
        self.layers = torch.nn.ModuleList(Layer(kind) for kind in kinds)

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, pad)
        return x


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    inputs = torch.randn(2, 100, 64), torch.ones(2, 100, dtype=torch.bool)
    with collect() as collection, torch.no_grad():
        report = attn_pass.explain(Model().eval(), *inputs, attn_pass_options={"choose": "fused"})
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page(report, collection.graphs), encoding="utf-8")
    return path


@pytest.fixture(params=SIZES)
def browser(request: pytest.FixtureRequest) -> Iterator[Browser]:
    assert CHROMIUM is not None
    with Browser(CHROMIUM, *SIZES[request.param], dark=request.param == "phone") as opened:
        yield opened


def shown(browser: Browser) -> int:
    return int(browser.run("[...document.querySelectorAll('.site')].filter(s => s.offsetParent).length"))


def test_it_opens_without_errors_and_loads_nothing(browser: Browser, file: Path) -> None:
    browser.open(file)
    assert browser.errors == [] and browser.requests == [file.as_uri()]
    assert browser.run("document.title") == "Attention report" and shown(browser) == 4


def test_filters(browser: Browser, file: Path) -> None:
    browser.open(file)
    press = "document.querySelector('[data-choose=\"{}\"]').click()"
    browser.run(press.format("near miss"))
    assert shown(browser) == 1 and browser.run("document.getElementById('shown').textContent") == "1 of 4 shown"
    browser.run(press.format("rewritten"))
    assert shown(browser) == 4
    browser.run(press.format("near miss"))
    assert shown(browser) == 3
    typed = "t = document.getElementById('text'); t.value = '{}'; t.dispatchEvent(new Event('input'))"
    browser.run(typed.format("sliding WINDOW"))
    assert shown(browser) == 1
    browser.run(typed.format("layers.1"))
    assert shown(browser) == 1
    browser.run(typed.format("no such thing"))
    assert shown(browser) == 0 and browser.run("!document.getElementById('nothing').hidden")
    browser.run(typed.format(""))
    browser.run("t = document.getElementById('target'); t.selectedIndex = 1; t.dispatchEvent(new Event('change'))")
    chosen = browser.run("document.getElementById('target').value")
    of_target = browser.run(f"document.querySelectorAll('.site[data-target=\"{chosen}\"]').length")
    assert shown(browser) == of_target > 0 and browser.errors == []


def test_sites_expand_and_collapse(browser: Browser, file: Path) -> None:
    browser.open(file)
    opened = "document.querySelectorAll('.site[open]').length"
    browser.run("document.querySelector('.site summary').click()")
    assert browser.run(opened) == 1
    assert browser.run("document.querySelector('.site[open] .formula').getBoundingClientRect().height") > 20
    browser.run("document.getElementById('every').click()")
    assert browser.run(opened) == 4
    browser.run("document.getElementById('every').click()")
    assert browser.run(opened) == 0 and browser.errors == []


def test_a_tag_in_the_code_leads_to_its_site(browser: Browser, file: Path) -> None:
    browser.open(file)
    browser.run("document.querySelector('.tag').click()")
    browser.run("new Promise(done => setTimeout(done, 200))")
    assert browser.run("document.querySelector(location.hash).open") is True


def test_nothing_is_wider_than_the_window(browser: Browser, file: Path) -> None:
    browser.open(file)
    browser.run("document.getElementById('every').click()")
    browser.run("document.querySelectorAll('.fold').forEach(fold => fold.open = true)")
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    outside = browser.run(
        "[...document.querySelectorAll('main *')].filter(e => e.getClientRects().length && !e.closest('svg') &&"
        " e.getBoundingClientRect().right > innerWidth + 1).map(e => e.className + ': ' + e.textContent.slice(0, 60))"
    )
    assert outside == []
    cut = browser.run(
        "[...document.querySelectorAll('main .site *, main .code *')].filter(e => !e.closest('svg') &&"
        " e.scrollWidth > e.clientWidth + 1 && e.clientWidth).map(e => e.className + ': ' + e.textContent.slice(0, 60))"
    )
    assert cut == []


def test_text_is_large_enough_and_stands_out(browser: Browser, file: Path) -> None:
    browser.open(file)
    browser.run("document.getElementById('every').click()")
    small = browser.run(
        "[...document.querySelectorAll('main *')].filter(e => !e.closest('svg') && e.childNodes.length &&"
        " [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) &&"
        " parseFloat(getComputedStyle(e).fontSize) < 10.9).map(e => e.className)"
    )
    assert small == []
    ratios = browser.run(CONTRAST)
    assert ratios and min(ratios.values()) >= 4.5, ratios


# The contrast of text with what is behind it (WCAG 2.2, 1.4.3), by class.
CONTRAST = """(() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = (rgb) => {
    const [r, g, b] = rgb.slice(0, 3).map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const found = {};
  for (const name of ["soft", "badge", "module", "where", "times", "gone", "come", "tag", "formula", "name"]) {
    for (const e of document.querySelectorAll(`main .${name}`)) {
      if (e.closest("svg") || !e.getClientRects().length) continue;
      const a = light(parse(getComputedStyle(e).color)), b = light(behind(e));
      const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      found[name] = Math.min(found[name] || 99, ratio);
    }
  }
  return found;
})()"""


def test_what_a_report_says_is_never_run(browser: Browser, tmp_path: Path) -> None:
    site = SiteReport(
        outcome="left",
        reason=EVIL,
        where=EVIL,
        module=EVIL,
        mask=EVIL,
        target=EVIL,
        refusals={EVIL: EVIL},
        formula={"score": EVIL, EVIL: EVIL},
        rates={"device": EVIL, "gflops": 10.0, "gbytes": 1.0},
        roofline={"leave": {"flops": 1e6, "bytes": 1e5, "us": 3.0}},
    )
    path = tmp_path / "evil.html"
    Report.from_dict(Report([site]).to_dict()).write_html(path)
    browser.open(path)
    browser.run("document.getElementById('every').click()")
    assert browser.run("document.title") == "Attention report" and browser.errors == []
    assert browser.requests == [path.as_uri()] and browser.run("document.images.length") == 0


def test_markup_that_came_through_would_not_run_either(browser: Browser, file: Path, tmp_path: Path) -> None:
    path = tmp_path / "injected.html"
    path.write_text(file.read_text().replace("<main>", f"<main>{EVIL}"))
    browser.open(path)
    assert browser.run("document.title") == "Attention report"
    assert any("Content Security Policy" in error for error in browser.errors)


def test_an_empty_report_opens(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "empty.html"
    Report().write_html(path)
    browser.open(path)
    assert browser.errors == [] and "No attention was found" in str(browser.run("document.body.innerText"))
