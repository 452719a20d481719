"""Common code asks the family about a device: none of it names a device type."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import attn_pass
from attn_pass.devices import registry
from attn_pass.errors import AttnPassWarning
from attn_pass.targets.flex.flex import _BLOCKS
from attn_pass.targets.flex.rules import RULES
from attn_pass.targets.registry import all_targets

PACKAGE = Path(attn_pass.__file__).parent
TYPES = {kind for family in registry.families() for kind in family.types}
NAMED = {
    "devices/processors.py": "the processor's own row says whose it is",
    "devices/registry.py": "the list of built-in families",
    "rewriting/run.py": "a region without a recorded device is decided for the host's",
    "entries/other_device.py": "a device that the options name is looked up as from the host",
    "graph/regions.py": "the devices that torch.autocast has",
    "graph/writes.py": "methods of a tensor that move it, by their names",
    "measuring/benchmark.py": "which processors are free matters only where the host computes",
    "measuring/machine.py": "the lines of Linux's /proc/stat",
    "measuring/timing.py": "torch's own functions for a GPU's queue and memory",
    "reading/graph_reader.py": "a number in a graph is on the host",
    "rewriting/composites.py": "a site without a recorded device is decided for the host's",
    "tuning/worker.py": "a program without inputs runs on the host",
}
"""Where a device's type stands by its name all the same, and why nothing is decided by it."""


def outside_families() -> Iterator[Path]:
    for file in sorted(PACKAGE.rglob("*.py")):
        rooms = file.relative_to(PACKAGE).parts
        if not (rooms[0] == "devices" and len(rooms) > 2):
            yield file


def asked(source: str) -> Iterator[int]:
    """The lines that name a device's type, look something up by one, or ask torch about one of them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            kind, _, number = node.value.partition(":")
            if kind in TYPES and (number.isdigit() or node.value == kind):
                yield node.lineno
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Attribute) and node.slice.attr == "type":
            yield node.lineno
        if isinstance(node, ast.Attribute) and node.attr in {f"is_{kind}" for kind in TYPES}:
            yield node.lineno
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "torch" and node.attr in TYPES:
                yield node.lineno


def test_no_device_is_asked_for_its_type() -> None:
    files = {str(file.relative_to(PACKAGE)): list(asked(file.read_text())) for file in outside_families()}
    assert {"rewriting/run.py", "tuning/clock.py", "cli/doctor.py", "devices/roofline.py"} < set(files)
    asking = {name: lines for name, lines in files.items() if lines}
    assert set(asking) == set(NAMED), "ask attn_pass.devices.base.Family instead; what no longer asks leaves the list"


def test_what_counts_as_asking() -> None:
    asking = (
        *('d.type == "cpu"', 'd.type in ("cpu", "cuda")', '"npu" != x.device.type', "TABLE[setting.device.type]"),
        *('site.device == "cpu"', 'name.startswith("cuda")', 'torch.device("cuda:0")', "torch.cuda.is_available()"),
        *("x.is_cuda", 'TABLE["xla"]'),
    )
    others = ('d.type == "meta"', "a.type == b.type", '"cpu flash"', 'f"no rule for {d.type} devices"', "torch.bool")
    assert [bool(list(asked(line))) for line in asking] == [True] * len(asking)
    assert not any(list(asked(line)) for line in others)


def test_what_families_name_is_there() -> None:
    """A form or a template that nobody has would refuse nothing and offer nothing."""
    targets = {target.name for target in all_targets()}
    for family in registry.families():
        assert set(family.forms) <= targets, family.name
        assert family.flex_template in {"", *RULES}, family.name
    assert set(RULES) == set(_BLOCKS) == {f.flex_template for f in registry.families() if f.flex_template}


def test_a_package_that_cannot_be_loaded_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint("broken", "attn_pass_no_such_module:Target", "attn_pass.targets")
    whole = EntryPoint("whole", "builtins:dict", "attn_pass.targets")
    monkeypatch.setattr(registry, "entry_points", lambda group: [broken, whole])
    with pytest.warns(AttnPassWarning, match="'broken'.* is left out: it could not be loaded"):
        assert list(registry.installed_in("attn_pass.targets")) == [{}]
