"""The documentation that is written from the code is what the code says."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("page", ["rewrites.md", "cuda.md"])
def test_a_page_is_built_from_the_code(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    build = importlib.import_module("build")
    assert set(build.PARTS) == {"rewrites.md", "cuda.md"}
    assert build.built(page) == (DOCS / page).read_text(), "run `make docs`"
