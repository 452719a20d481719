"""The README as package indexes show it: they have no repository behind it, so that links into it are made absolute.

Everything else about the package is in pyproject.toml. The repository is the URL named `Repository` there; as long as
there is none, a link into the repository is shown as its text.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
_LINK = re.compile(r"(!?)\[([^\]]*(?:\[[^\]]*\][^\]]*)?)\]\((?!https?://|#|mailto:)([^)\s]+)\)")
_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
_REPOSITORY = re.compile(r'^Repository\s*=\s*"([^"]+)"', re.MULTILINE)


def published(readme: str, repository: str) -> str:
    """The text with absolute links, and without comments; pictures need the raw files of the repository."""

    def absolute(link: re.Match[str]) -> str:
        picture, text, path = link.groups()
        if not repository:
            return "" if picture else text
        return f"{picture}[{text}]({repository.rstrip('/')}/{'raw' if picture else 'blob'}/main/{path})"

    return _LINK.sub(absolute, _COMMENT.sub("", readme))


def repository() -> str:
    """The URL in pyproject.toml, "" if there is none yet."""
    found = _REPOSITORY.search((HERE / "pyproject.toml").read_text(encoding="utf-8"))
    return found[1] if found else ""


if __name__ == "__main__":
    setup(
        long_description=published((HERE / "README.md").read_text(encoding="utf-8"), repository()),
        long_description_content_type="text/markdown",
    )
