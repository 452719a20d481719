"""Writes the parts of the documentation that come from the code: `python docs/build.py`.

Of `rewrites.md` what is said of poor cases and targets, from their docstrings; of `cuda.md` and `catalogue.md` the
tables; of `architecture.md` the rooms; of `reference.md` the public names; of the README and `comparison.md` the
numbers, from the committed runs.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType

import catalogued
import decisions
import measured
import named
import reference
import rooms
import torch

from attn_pass import poor_cases
from attn_pass.devices.cpu import facts
from attn_pass.targets.registry import built_in

HERE = Path(__file__).parent
TOY = HERE.parent / "tests" / "devices" / "toy_family.py"
_LABEL = re.compile(r"^(Poor|Costs|Becomes|Exact because|Offers)\b:?", re.MULTILINE)
# The pages show the decisions for one processor, wherever they are built.
facts.instruction_set = lambda: "avx512"


def section(name: str, module: ModuleType) -> str:
    """A poor case or target under its name: the docstring of its file, as Markdown."""
    text = ast.get_docstring(ast.parse(inspect.getsource(module))) or ""
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    text = _LABEL.sub(lambda match: f"*{match[0].rstrip(':')}*" + (":" if match[0].endswith(":") else ""), text)
    return f"### `{name}`\n\n{text}\n"


def docstrings(room: str) -> str:
    """The docstrings of a room's files."""
    cases = [(name, inspect.getmodule(case)) for name, case in poor_cases.CASES.items()]
    forms = [(target.name, inspect.getmodule(type(target))) for target in built_in()]
    entries = {"poor_cases": cases, "targets": forms}[room]
    return "\n".join(section(name, module) for name, module in entries if module is not None)


def table(rows: Callable[[], Iterator[str]]) -> str:
    """The rows of a table, each a line."""
    return "".join(f"{row}\n" for row in rows())


# What stands between a mark and its end, page by page.
PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "rewrites.md": {
        "from attn_pass/poor_cases": lambda: docstrings("poor_cases"),
        "from attn_pass/targets": lambda: docstrings("targets"),
    },
    "architecture.md": {"rooms": lambda: table(rooms.rooms)},
    "../README.md": {
        "numbers": lambda: table(measured.numbers),
        "grids": lambda: table(measured.never_slower),
        "models": lambda: table(measured.in_short),
    },
    "usage.md": {"targets": lambda: table(named.targets), "devices": lambda: table(named.devices)},
    "reference.md": {"names": lambda: table(reference.reference)},
    "howto/device.md": {"toy": lambda: f"```python\n{TOY.read_text()}```\n"},
    "howto/runtimes.md": {"rules": lambda: table(named.runtimes)},
    "xpu.md": {"rules": lambda: table(partial(named.rules_of, "xpu"))},
    "rocm.md": {"rules": lambda: table(partial(named.rules_of, "rocm"))},
    "mps.md": {"rules": lambda: table(partial(named.rules_of, "mps"))},
    "comparison.md": {
        "peers": lambda: table(partial(measured.peers, "peers-cpu")),
        "models": lambda: table(partial(measured.whole_models, "peers-cpu")),
        "models-bf16": lambda: table(partial(measured.whole_models, "peers-cpu-bf16")),
        "beside": lambda: table(partial(measured.beside, "peers-cpu")),
        "beside-bf16": lambda: table(partial(measured.beside, "peers-cpu-bf16")),
        "peers-bf16": lambda: table(partial(measured.peers, "peers-cpu-bf16")),
        "breakdown": lambda: table(measured.breakdown),
        "calls": lambda: table(measured.calls),
        "variants": lambda: table(measured.variants),
    },
    "cuda.md": {"decisions": lambda: table(decisions.decisions), "rules": lambda: table(decisions.rules)},
    "catalogue.md": {
        "forms": lambda: table(catalogued.forms),
        "words": lambda: table(catalogued.words),
        "masks": lambda: table(catalogued.masks),
        "cases": lambda: table(catalogued.cases),
        "targets": lambda: table(catalogued.kernels),
        "spellings": lambda: table(catalogued.spellings),
    },
}


@contextmanager
def two_threads() -> Iterator[None]:
    """What is predicted depends on the threads torch has: the pages show it for two, wherever they are built."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@two_threads()
def built(name: str) -> str:
    """A page with every marked part written anew."""
    page = (HERE / name).read_text()
    for mark, text in PARTS[name].items():
        start = f"<!-- {mark}: make docs -->\n"
        head, mark_there, rest = page.partition(start)
        assert mark_there, f"{name} has no mark for {mark}"
        page = f"{head}{start}{text()}{rest[rest.index('<!-- end -->') :]}"
    return page


if __name__ == "__main__":
    for name in PARTS:
        (HERE / name).write_text(built(name))
