"""The public names of the package with their signatures and docstrings, as `reference.md` shows them."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import attn_pass
from attn_pass.measuring.benchmark import Benchmark
from attn_pass.measuring.checking import Check
from attn_pass.report.linear_layers import LinearLayersReport
from attn_pass.report.projection import ProjectionReport
from attn_pass.report.region import RegionReport

GROUPS: dict[str, tuple[str, ...]] = {
    "Compile": ("backend", "wrap", "aot_compile", "package_report", "enabled", "install", "uninstall"),
    "Ask, and rewrite a graph": ("explain", "rewrite"),
    "Check and measure": ("check", "benchmark", "inspect"),
    "Choose": ("Options", "leave"),
    "Reports": ("record", "reports", "Report", "SiteReport"),
    "Errors and warnings": (
        *("AttnPassError", "OptionError", "CaptureError", "PackageError", "VersionError", "EnvironmentFault"),
        *("RewriteError", "AttnPassWarning"),
    ),
}
"""What `attn_pass.__all__` holds, in the order in which a user meets it."""

RETURNED: dict[str, tuple[type, ...]] = {
    "Check and measure": (Check, Benchmark),
    "Reports": (RegionReport, ProjectionReport, LinearLayersReport),
}
"""Classes that no user creates, beside what returns them."""


def reference() -> Iterator[str]:
    """The lines of the page, group by group."""
    for title, names in GROUPS.items():
        yield f"\n## {title}"
        for name in names:
            yield from _described(f"attn_pass.{name}", getattr(attn_pass, name))
        for returned in RETURNED.get(title, ()):
            yield from _described(returned.__name__, returned)


def _described(name: str, thing: Any) -> Iterator[str]:
    yield f"\n### `{name}`\n"
    if not isinstance(thing, type):
        yield f"```py\n{_signature(name, thing)}\n```\n"
    yield from _as_markdown(inspect.getdoc(thing) or "")
    if isinstance(thing, type) and not issubclass(thing, BaseException | Warning):
        yield from _members(thing)


def _members(owner: type) -> Iterator[str]:
    """A list of the public properties and methods of a class, each with the first sentence said of it."""
    said = {name: member for name, member in vars(owner).items() if not name.startswith("_") and inspect.getdoc(member)}
    members = {n: m for n, m in said.items() if isinstance(m, property | classmethod) or inspect.isfunction(m)}
    if members:
        yield "\n*Members*\n"
    for name, member in members.items():
        shown = name if isinstance(member, property) else _signature(name, getattr(owner, name), bound=True)
        yield f"- `{shown}`: {' '.join((inspect.getdoc(member) or '').split(chr(10) * 2)[0].split())}"


class _Written(str):
    """An annotation, which a signature shows as it is written."""

    def __repr__(self) -> str:
        return str(self)


def _signature(name: str, function: Any, bound: bool = False) -> str:
    """A call as it is declared; a parameter a line where one line is too long and it is no ``bound`` method's."""
    signature = inspect.signature(function)
    given = [p for p in signature.parameters.values() if not (bound and p.name == "self")]
    written = [p.replace(annotation=_Written(p.annotation)) for p in given]
    result = str(signature.return_annotation)
    if inspect.isgeneratorfunction(inspect.unwrap(function)):
        result = result.replace("Iterator[", "AbstractContextManager[")
    parameters = str(signature.replace(parameters=written, return_annotation=_Written(result)))
    if bound or len(name + parameters) <= 100:
        return name + parameters
    inside, _, returned = parameters.removeprefix("(").rpartition(")")
    return f"{name}(\n{textwrap.indent(_one_a_line(inside), '    ')}\n){returned}"


def _one_a_line(parameters: str) -> str:
    """The parameters split at the commas that no bracket holds."""
    lines, depth = [""], 0
    for letter in parameters:
        depth += (letter in "([{") - (letter in ")]}")
        lines[-1] += letter
        if letter == "," and not depth:
            lines.append("")
    return "\n".join(f"{line.strip().removesuffix(',')}," for line in lines)


_OF_NAMES = ("Args", "Attributes", "Raises")
_SECTION = re.compile(rf"^({'|'.join((*_OF_NAMES, 'Returns', 'Yields'))}):$")


def _as_markdown(text: str) -> Iterator[str]:
    """A docstring: its prose as it is, its sections as lists."""
    section = ""
    for block in re.split(r"\n(?=\S+:$)", re.sub(r"``([^`]+)``", r"`\1`", text), flags=re.MULTILINE):
        head, _, rest = block.partition("\n")
        section = head.removesuffix(":") if _SECTION.match(head) else ""
        if not section:
            yield block.rstrip()
            continue
        yield f"\n*{section}*\n"
        inside = textwrap.dedent(rest).strip()
        yield from _entries(inside) if section in _OF_NAMES else [inside]


def _entries(text: str) -> Iterator[str]:
    """The entries of a section, each from its name to the next line that is not indented."""
    for entry in re.split(r"\n(?=\S)", text):
        name, said, rest = entry.partition(": ")
        words = " ".join(f"{rest if said else name}".split())
        yield f"- {', '.join(f'`{one}`' for one in name.split(', '))}: {words}" if said else f"- {words}"
