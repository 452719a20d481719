"""The lists of targets and devices in usage.md."""

from __future__ import annotations

from collections.abc import Iterator

from attn_pass.devices.registry import families
from attn_pass.targets.registry import built_in


def targets() -> Iterator[str]:
    """Rows: a kind of device, and the names of the targets for it alone; last those for several."""
    yield "| for | targets |"
    yield "|---|---|"
    own = {target.name: family.name for family in families() for target in family.targets()}
    for family in families():
        yield f"| {family.name} | {_listed(name for name, of in own.items() if of == family.name)} |"
    yield f"| several | {_listed(target.name for target in built_in() if target.name not in own)} |"


def devices() -> Iterator[str]:
    """Rows: a family, and its devices that need not be here."""
    yield "| family | devices |"
    yield "|---|---|"
    for family in families():
        if family.names:
            yield f"| {family.name} | {_listed(family.names)} |"


def _listed(names: Iterator[str] | tuple[str, ...]) -> str:
    return ", ".join(f'`"{name}"`' for name in names)
