"""The documentation that is written from the code is what the code says."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def test_rewrites_is_built_from_the_docstrings() -> None:
    path = Path(__file__).parents[1] / "docs" / "build.py"
    spec = importlib.util.spec_from_file_location("docs_build", path)
    assert spec is not None and spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    page = build.PAGE.read_text()
    assert build.built(page) == page, "run `make docs`"
