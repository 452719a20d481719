"""The README as package indexes show it: they have no repository behind it, so that links into it are made absolute.

Everything else about the package is in pyproject.toml. The repository is the URL named `Repository` there; as long as
there is none, a link into the repository is shown as its text.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
_TO = r"\((?!https?://|#|mailto:)([^)\s]+)\)"
_PICTURE = re.compile(r"!\[([^\]]*)\]" + _TO)
_LINK = re.compile(r"(?<!!)\[((?:!\[[^\]]*\]\([^)]*\)|\[[^\]]*\]|[^\[\]])*)\]" + _TO)
_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
_REPOSITORY = re.compile(r'^Repository\s*=\s*"([^"]+)"', re.MULTILINE)


def published(readme: str, repository: str) -> str:
    """The text with absolute links, and without comments; pictures need the raw files of the repository."""

    base = repository.rstrip("/")
    text = _COMMENT.sub("", readme)
    if not base:
        return _LINK.sub(r"\1", _PICTURE.sub("", text))
    text = _PICTURE.sub(rf"![\1]({base}/raw/main/\2)", text)
    return _LINK.sub(rf"[\1]({base}/blob/main/\2)", text)


def repository() -> str:
    """The URL in pyproject.toml, "" if there is none yet."""
    found = _REPOSITORY.search((HERE / "pyproject.toml").read_text(encoding="utf-8"))
    return found[1] if found else ""


if __name__ == "__main__":
    setup(
        long_description=published((HERE / "README.md").read_text(encoding="utf-8"), repository()),
        long_description_content_type="text/markdown",
    )
