"""The lists of targets, devices and runtimes in the pages."""

from __future__ import annotations

import re
from collections.abc import Iterator

from attn_pass.devices.registry import families
from attn_pass.devices.runtimes.runtime import Runtime
from attn_pass.targets.registry import built_in


def targets() -> Iterator[str]:
    """Rows: a kind of device, and the names of the targets for it alone; last those for several."""
    yield "| for | targets |"
    yield "|---|---|"
    own = {target.name: family.name for family in families() for target in family.targets()}
    for family in (f for f in families() if f.targets()):
        yield f"| {family.name} | {_listed(name for name, of in own.items() if of == family.name)} |"
    yield f"| several | {_listed(target.name for target in built_in() if target.name not in own)} |"


def devices() -> Iterator[str]:
    """Rows: a family, and its devices that need not be here."""
    yield "| family | devices |"
    yield "|---|---|"
    for family in families():
        if family.names:
            yield f"| {family.name} | {_listed(family.names)} |"


def runtimes() -> Iterator[str]:
    """Rows: a runtime, its name in options, and a rule that a site must meet to become its attention operator."""
    yield "| runtime | name | rule | source |"
    yield "|---|---|---|---|"
    for family in families():
        if isinstance(family, Runtime):
            for rule in family.rules():
                yield f'| {family.product} | `"{family.name}"` | {rule.name} | {linked(rule.source)} |'


def rules_of(name: str) -> Iterator[str]:
    """Rows: a rule of a family's kernels, and its source; with the kernels' names where there are several."""
    kernels = next(family for family in families() if family.name == name).kernel_rules
    several = len(kernels) > 1
    yield f"| {'kernel | ' if several else ''}rule | source |"
    yield f"|{'---|' if several else ''}---|---|"
    for kernel, rules in kernels.items():
        for rule in rules.rules:
            yield f"| {f'{kernel} | ' if several else ''}{rule.name} | {linked(rule.source)} |"


_CODE = re.compile(r"(?<![\w/])(?:\w+/)+[\w/]*\w+\.\w+|(?<![\w/])\w*_\w+(?:\.\w+)?\b(?![\w/.]*\])")


def linked(source: str) -> str:
    """Where a rule is from, with issues and pull requests as links, and names and files of sources as code."""

    def link(match: re.Match[str]) -> str:
        repository = "pytorch/pytorch" if match["repository"] in (None, "pytorch") else match["repository"]
        return f"[{match[0]}](https://github.com/{repository}/issues/{match['number']})"

    with_links = re.sub(r"(?P<repository>[\w-]+(?:/[\w-]+)?)?#(?P<number>\d+)", link, source)
    return re.sub(_CODE, lambda match: f"`{match[0]}`", with_links)


def _listed(names: Iterator[str] | tuple[str, ...]) -> str:
    return ", ".join(f'`"{name}"`' for name in names)
