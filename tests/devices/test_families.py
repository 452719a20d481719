"""What rooms of every device ask about one is a question to its family: none of them compares a device's type."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import attn_pass
from attn_pass.devices import registry
from attn_pass.targets.flex.flex import _BLOCKS
from attn_pass.targets.flex.rules import RULES
from attn_pass.targets.registry import all_targets

PACKAGE = Path(attn_pass.__file__).parent
ROOMS = ("engine.py", "graph", "model", "planner", "poor_cases", "reading", "rewriting", "targets")
TYPES = {kind for family in registry.families() for kind in family.types}


def compared(source: str) -> Iterator[int]:
    """The lines on which a ``.type`` is compared with the type of a device, or looked up by it."""
    for node in ast.walk(ast.parse(source)):
        parts = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        said = {c.value for p in parts for c in ast.walk(p) if isinstance(c, ast.Constant) and isinstance(c.value, str)}
        if any(isinstance(p, ast.Attribute) and p.attr == "type" for p in parts) and said & TYPES:
            yield node.lineno
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Attribute) and node.slice.attr == "type":
            yield node.lineno


@pytest.mark.parametrize("room", ROOMS)
def test_no_device_is_asked_for_its_type(room: str) -> None:
    at = PACKAGE / room
    files = [at] if at.suffix else sorted(at.rglob("*.py"))
    found = [f"{file.relative_to(PACKAGE)}:{n}" for file in files for n in compared(file.read_text())]
    assert files and not found, "ask attn_pass.devices.base.Family instead"


def test_what_counts_as_asking() -> None:
    asking = ('d.type == "cpu"', 'd.type in ("cpu", "cuda")', '"npu" != x.device.type', "TABLE[setting.device.type]")
    others = ('d.type == "meta"', "a.type == b.type", 'kind == "cpu"', 'f"no rule for {d.type} devices"')
    assert [bool(list(compared(line))) for line in (*asking, *others)] == [True] * 4 + [False] * 4


def test_what_families_name_is_there() -> None:
    """A form or a template that nobody has would refuse nothing and offer nothing."""
    targets = {target.name for target in all_targets()}
    for family in registry.families():
        assert set(family.forms) <= targets, family.name
        assert family.flex_template in {"", *RULES}, family.name
    assert set(RULES) == set(_BLOCKS) == {f.flex_template for f in registry.families() if f.flex_template}
