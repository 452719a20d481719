"""No module of the package imports one that imports it, not for types and not inside a function either."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import attn_pass

PACKAGE = Path(attn_pass.__file__).parent


def modules() -> dict[str, Path]:
    """Every module of the package, by its name."""
    by_name = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        by_name[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return by_name


def imported(text: str, known: set[str]) -> set[str]:
    """The modules a text imports anywhere; a name that is no module of its own is one of the package it is from."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            named = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= named & known | (set() if named <= known else {node.module})
    return names & known


def test_what_is_found() -> None:
    text = "from a import b\nfrom a.f import G\ndef f():\n    import a.c\nif TYPE_CHECKING:\n    from a.d import E"
    assert imported(text, {"a", "a.b", "a.c", "a.d", "a.e", "a.f"}) == {"a.b", "a.c", "a.d", "a.f"}
    with pytest.raises(CycleError):
        TopologicalSorter({"a": {"b"}, "b": {"a"}}).prepare()


def test_there_are_no_import_cycles() -> None:
    known = modules()
    TopologicalSorter({m: imported(p.read_text(), set(known)) - {m} for m, p in known.items()}).prepare()


def private_names(text: str) -> list[str]:
    """What a text takes from modules of the package that is theirs alone: a name that begins with an underscore."""
    tree, taken = ast.parse(text), []
    modules_here: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("attn_pass"):
            taken += [f"{node.module}.{alias.name}" for alias in node.names if _is_private(alias.name)]
            modules_here |= {alias.asname or alias.name for alias in node.names if alias.name.islower()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules_here:
            taken += [f"{node.value.id}.{node.attr}"] if _is_private(node.attr) and node.value.id != "aten" else []
    return taken


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_what_is_private() -> None:
    text = "from attn_pass.a import _f\nfrom attn_pass import b\nb._g()\nb.h()\nx._i\nfrom torch import _j"
    assert private_names(text) == ["attn_pass.a._f", "b._g"]


def test_no_module_takes_what_is_private_to_another() -> None:
    taken = {name: names for name, path in modules().items() if (names := private_names(path.read_text()))}
    assert not taken
