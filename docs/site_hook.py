"""What makes the Markdown of the repository a site: its README as the first page, and pages for linked files.

Pages link to what a reader of the repository would open: `../examples/training.py`, `../README.md`. A site has no such
neighbours, so every linked file outside `docs/` becomes a page that shows it, and a folder a page that lists it. A link
to a file that is not there stops the build, as mkdocs' own check does inside `docs/`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).parents[1]
README, INDEX, SHOWN = "README.md", "index.md", "source"
_LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")
_FENCE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_LANGUAGES = {".py": "python", ".cpp": "cpp", ".toml": "toml", ".yml": "yaml", ".md": "markdown"}


def on_files(files: Any, config: Any) -> Any:
    """Adds the first page, and a page for every file that is linked to from outside its place."""
    from mkdocs.structure.files import File

    readme = File.generated(config, INDEX, content=(ROOT / README).read_text())
    files.append(readme)
    linked: set[str] = set()
    for page in list(files.documentation_pages()):
        text = readme.content_string if page is readme else Path(page.abs_src_path).read_text()
        linked |= {target for _, target in _outside(text, _place(page.src_uri))}
    for target in sorted(linked - {README}):
        files.append(File.generated(config, _page_of(target), content=shown(target), inclusion=_hidden()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to files outside `docs/` lead to the pages that show them; those of the README start from its place."""
    if page.file.src_uri.startswith(f"{SHOWN}/"):
        return markdown
    return moved(markdown, page.file.src_uri)


def moved(markdown: str, src_uri: str) -> str:
    """The text of a page with its links as the site needs them."""
    place, folder = _place(src_uri), PurePosixPath(src_uri).parent
    outside = dict(_outside(markdown, place))

    def link(match: re.Match[str]) -> str:
        start, written, anchor, end = match.groups()
        if written in outside:
            target = _page_of(outside[written]) if outside[written] != README else INDEX
        elif src_uri == INDEX and (ROOT / written).exists():
            target = written.removeprefix("docs/")
        else:
            return match[0]
        return f"{start}{os.path.relpath(target, folder)}{anchor or ''}{end}"

    pieces = _FENCE.split(markdown)
    return "".join(piece if number % 2 else _LINK.sub(link, piece) for number, piece in enumerate(pieces))


def shown(target: str) -> str:
    """A page that shows a file of the repository, or lists a folder."""
    path = ROOT / target
    if path.is_dir():
        rows = sorted(p.name + "/" * p.is_dir() for p in path.iterdir() if p.name[0] not in "._")
        return f"# {target}\n\n" + "".join(f"- `{name}`\n" for name in rows)
    language = _LANGUAGES.get(path.suffix, "text")
    return f"# {target}\n\n````{language}\n{path.read_text()}````\n"


def _outside(markdown: str, place: Path) -> list[tuple[str, str]]:
    """Links as written, with the file outside `docs/` that each means, from the repository's root."""
    links = []
    for piece in _FENCE.split(markdown)[::2]:
        for _, written, _, _ in _LINK.findall(piece):
            if "://" in written or written.startswith("mailto:"):
                continue
            path = Path(os.path.normpath(place / written))
            if path.is_relative_to(ROOT / "docs") or not path.is_relative_to(ROOT):
                continue
            if not path.exists():
                raise FileNotFoundError(f"{written}, linked from {place}, is not in the repository")
            links.append((written, path.relative_to(ROOT).as_posix()))
    return links


def _place(src_uri: str) -> Path:
    """The folder that a page's links start from."""
    return ROOT if src_uri == INDEX else (ROOT / "docs" / src_uri).parent


def _page_of(target: str) -> str:
    return f"{SHOWN}/{target}.md" if target != README else INDEX


def _hidden() -> Any:
    """Built, and not expected in the navigation."""
    from mkdocs.structure.files import InclusionLevel

    return InclusionLevel.NOT_IN_NAV
