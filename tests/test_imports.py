"""No module of the package imports one that imports it, not even for types, and none uses a private name of another."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
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


@cache
def nodes(text: str) -> tuple[ast.AST, ...]:
    """All nodes of a module, itself first."""
    return tuple(ast.walk(ast.parse(text)))


def imported(text: str, known: set[str]) -> set[str]:
    """The modules a text imports anywhere; a name that is no module of its own is one of the package it is from."""
    names: set[str] = set()
    for node in nodes(text):
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


def test_every_module_has_a_layer() -> None:
    """The packages themselves hold no code beside their modules, which are named one by one."""
    contract = (PACKAGE.parent / "pyproject.toml").read_text().split("[[tool.importlinter.contracts]]")[1]
    named = re.findall(r"attn_pass(?:\.\w+)+", contract)
    without = {m for m in modules() if not any(f"{m}.".startswith(f"{layer}.") for layer in named)}
    packages = {f"attn_pass.{name}" for name in ("devices", "report", "targets", "tuning")}
    assert without == {"attn_pass", "attn_pass.__main__", *packages}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def members(of: Iterable[ast.AST]) -> set[str]:
    """The private names that a module or a class binds: functions, classes, variables, attributes that are assigned."""
    names = set()
    for node in of:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return {name for name in names if _is_private(name)}


class Module:
    """What a module of the package imports, binds, and takes from others."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.nodes = name, nodes(text)
        self.own = members(self.nodes)
        self.classes = {node.name: node for node in self.nodes if isinstance(node, ast.ClassDef)}
        self.members = {name: members(ast.walk(node)) for name, node in self.classes.items()}
        self.imports: dict[str, str] = {}  # by the name they have here
        for node in self.nodes:
            if isinstance(node, ast.Import):
                self.imports |= {a.asname or a.name.split(".")[0]: a.name for a in node.names}
            elif isinstance(node, ast.ImportFrom):
                self.imports |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        self.of_class = {name: self._inherited(name) for name in self.classes}

    def bases(self, name: str) -> set[str]:
        """A class of this module with those it inherits from that are classes here; the others by their full names."""
        if name not in self.classes:
            return {self.imports.get(name, name)}
        asked = (base.value if isinstance(base, ast.Subscript) else base for base in self.classes[name].bases)
        return {f"{self.name}.{name}"}.union(*(self.bases(base.id) for base in asked if isinstance(base, ast.Name)))

    def _inherited(self, name: str) -> set[str]:
        """The private names that a class here has from classes here, itself among them."""
        here = (base.rpartition(".")[::2] for base in self.bases(name))
        return set().union(*(self.members[base] for module, base in here if module == self.name))

    def attributes(self) -> Iterator[tuple[ast.Attribute, set[str]]]:
        """The private attributes that are read, each with those that are no other module's."""
        in_class = {n: name for name, of in self.classes.items() for n in ast.walk(of)}
        for node in self.nodes:
            if isinstance(node, ast.Attribute) and _is_private(node.attr):
                root = node.value
                while isinstance(root, ast.Attribute):
                    root = root.value
                if not isinstance(root, ast.Name):
                    yield node, self.own
                elif node in in_class and root is node.value and root.id in ("self", "cls"):
                    yield node, self.of_class[in_class[node]]
                elif root.id == "aten" or not self.imports.get(root.id, "attn_pass").startswith("attn_pass"):
                    continue  # torch's
                else:
                    yield node, set() if root is node.value and root.id in self.imports else self.own


def private_names(texts: Mapping[str, str]) -> set[str]:
    """What modules of the package take from each other that begins with an underscore.

    Imported, as an attribute of a module, a class or a value, inherited, or overridden.
    """
    of = {name: Module(name, text) for name, text in texts.items()}
    classes = {f"{name}.{c}": found for name, module in of.items() for c, found in module.members.items()}
    known = {x for module in of.values() for x in module.own}
    taken = set()
    for name, module in of.items():
        imports = (i for i in module.imports.values() if i.startswith("attn_pass"))
        taken |= {f"{name}: {i}" for i in imports if _is_private(i.rpartition(".")[2])}
        for node, own in module.attributes():
            if node.attr not in own and node.attr in known:
                taken.add(f"{name}: {ast.unparse(node)}")
        for c in module.classes:
            for base in module.bases(c):
                if not base.startswith(f"{name}."):
                    taken |= {f"{name}: {c}.{x}" for x in classes.get(base, set()) & module.of_class[c]}
    return taken


OTHER = "class Base:\n    def _f(self): self._x = 1\ndef _g(): pass\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from attn_pass.b import _g", {"attn_pass.b._g"}),
        ("from attn_pass import b\nb._g()\nb.h()", {"b._g"}),
        ("def f(base): return base._f(), base.of._x, base._other", {"base._f", "base.of._x"}),
        ("def f(): return made()._f", {"made()._f"}),
        ("from attn_pass.b import Base\nclass C(Base):\n    def g(self): return self._f()", {"self._f"}),
        ("from attn_pass.b import Base\nclass C(Base[int]):\n    def _f(self): pass", {"C._f"}),
        ("class C:\n    def g(self): return self._f()\nclass D:\n    def _f(self): pass", {"self._f"}),
        ("class C:\n    def _f(self): pass\nclass D(C):\n    def g(self): return self._f()", set()),
        ("def _g(): pass\nclass C:\n    def g(self, other): return other._g, self.x.__dict__", set()),
        ("from torch import _g\nimport torch\ntorch.ops._g, aten._f, torch._x", set()),
    ],
)
def test_what_is_private(text: str, found: set[str]) -> None:
    assert private_names({"attn_pass.a": text, "attn_pass.b": OTHER}) == {f"attn_pass.a: {x}" for x in found}


def test_no_module_takes_what_is_private_to_another() -> None:
    assert private_names({name: path.read_text() for name, path in modules().items()}) == set()
