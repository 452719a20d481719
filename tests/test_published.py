"""What is published: links of the README, the notebook, the files that a repository is looked at for."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch
from xml.etree import ElementTree

import pytest
import torch

import attn_pass

ROOT = Path(attn_pass.__file__).parents[1]


@pytest.fixture(scope="module")
def setup() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "setup.py"), run_name="read")


def test_the_links_of_the_published_readme_are_absolute(setup: dict[str, Any]) -> None:
    readme = (ROOT / "README.md").read_text()
    text = setup["published"](readme, "https://example.org/attn_pass/")
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert links and all(link.startswith(("https://", "#")) for link in links)
    assert "https://example.org/attn_pass/blob/main/docs/start.md" in links and "<!--" not in text
    bare = setup["published"](readme, "")
    assert not re.search(r"\]\((?!https?://|#)", bare) and "Start in five minutes" in bare


def test_links_of_every_kind(setup: dict[str, Any]) -> None:
    text = "![a](p.png) [b](docs/x.md#y) [c](https://z) [`d [e]`](f.md) [g](#h)"
    shown = setup["published"](text, "https://r")
    assert shown == (
        "![a](https://r/raw/main/p.png) [b](https://r/blob/main/docs/x.md#y) [c](https://z) "
        "[`d [e]`](https://r/blob/main/f.md) [g](#h)"
    )
    assert setup["published"](text, "") == " b [c](https://z) `d [e]` [g](#h)"


def test_a_picture_that_is_a_link(setup: dict[str, Any]) -> None:
    text = "[![a b](docs/p.svg)](docs/x.md) ![c](https://z/q.svg)"
    shown = setup["published"](text, "https://r/")
    assert shown == "[![a b](https://r/raw/main/docs/p.svg)](https://r/blob/main/docs/x.md) ![c](https://z/q.svg)"
    assert setup["published"](text, "") == " ![c](https://z/q.svg)"


def test_the_pictures_of_the_readme_are_of_the_committed_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from bench import results_page

    results = ROOT / "docs" / "results"
    readme = (ROOT / "README.md").read_text()
    made = results_page.badges(results, results_page.documents(results))
    assert len(made) == 3
    for name, svg in made.items():
        assert f"docs/results/pictures/{name}.svg)" in readme
        assert (results / "pictures" / f"{name}.svg").read_text() == svg, "run `python -m bench page`"
        ElementTree.fromstring(svg)
    bars = results_page.readme.speedups(results)
    assert "docs/results/pictures/speedups.png)" in readme
    drawn = (results / "pictures" / "speedups.svg").read_text()
    assert all(f"{value:.2f}x" in drawn for _, value in bars), "run `python -m bench page`"


def test_never_slower_has_its_rule_and_its_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from bench import results_page

    readme, page = (ROOT / "README.md").read_text(), (ROOT / "docs" / "results" / "README.md").read_text()
    assert results_page.readme.RULE in readme.replace("\n", " ") and results_page.readme.RULE in page
    assert results_page.readme.RULE in (ROOT / "docs" / "results" / "pictures" / "never-slower.svg").read_text()
    grids = list(results_page.readme.grids())
    assert grids
    for _, _, rows in grids:
        for row in rows:
            low = row["over_stock"] < 0.97 and row["over_stock_p10"] < 0.97
            assert (f"{row['name']}: {row['over_stock']:.2f}" in readme) >= low, row["name"]


def test_every_link_of_the_readme_leads_somewhere() -> None:
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"):
        for link in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", (ROOT / name).read_text()):
            assert (ROOT / link).exists(), f"{name}: {link}"


def test_what_an_index_asks_for_is_there() -> None:
    """The owner names the repository; everything else is in place."""
    pyproject = (ROOT / "pyproject.toml").read_text()
    for part in (
        "[project.urls]\n",
        "classifiers = [\n",
        "keywords = [",
        'license = "MIT"',
        'readme"]',
        "platformdirs",
    ):
        assert part in pyproject, part
    for name in ("CONTRIBUTING.md", "SECURITY.md", "CITATION.cff", "LICENSE", "examples/first_look.ipynb"):
        assert (ROOT / name).stat().st_size > 100, name
    workflows = "\n".join(path.read_text() for path in (ROOT / ".github" / "workflows").iterdir())
    assert all(f'"{version}"' in workflows for version in ("2.11.0", "2.12.0", "2.13.0"))


def test_the_version_is_one() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{attn_pass.__version__}"' in pyproject
    assert f"version: {attn_pass.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    notebook = json.loads((ROOT / "examples" / "first_look.ipynb").read_text())
    assert notebook["nbformat"] == 4
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell.get("outputs") for cell in notebook["cells"])  # no result of another machine
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    module = ModuleType("first_look")  # what a notebook defines is found by its name, as Dynamo's guards do
    monkeypatch.setitem(sys.modules, module.__name__, module)
    namespace = vars(module)
    grad = torch.is_grad_enabled()
    # No code is generated, and nothing timed.
    with patch("attn_pass.backend", attn_pass.wrap("aot_eager")), patch("attn_pass.benchmark", _no_benchmark):
        try:
            for number, source in enumerate(cells):
                run(compile(source, f"cell {number}", "exec"), namespace)
        finally:
            torch.set_grad_enabled(grad)
    assert "rewritten" in str(namespace["report"]) and bool(namespace["checked"])
    assert (tmp_path / "report.html").is_file()


def _no_benchmark(*args: Any, **kwargs: Any) -> str:
    return "measured elsewhere"


def run(code: Any, namespace: dict[str, Any]) -> None:
    exec(code, namespace)
