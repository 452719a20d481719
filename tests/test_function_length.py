"""No function is longer than can be read at once; its docstring is not counted."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("attn_pass", "bench", "docs", "tests", "tests_on")
MOST = 60
LONGER = {
    "attn_pass/devices/cuda/decode_triton.py attend",  # a Triton kernel: functions would only rename
    "attn_pass/cli/main.py explain",  # the signature of a command: an option is three lines of it
}


def lengths(text: str) -> Iterator[tuple[str, int]]:
    """The name of each function, methods and inner ones too, and its lines without decorators and docstring."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        first = node.body[0]
        is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        docstring = (first.end_lineno or 0) - first.lineno + 1 if is_docstring else 0
        yield node.name, (node.end_lineno or 0) - node.lineno + 1 - docstring


def test_what_is_counted() -> None:
    text = """class A:
    @cached
    def f(
        self,
    ):
        'Two \\
        lines'
        def g():
            return 1
        return g
"""
    assert dict(lengths(text)) == {"f": 6, "g": 2}


def test_no_function_is_longer_than_can_be_read_at_once() -> None:
    long = {
        f"{path.relative_to(ROOT).as_posix()} {name}": length
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        for name, length in lengths(path.read_text())
        if length > MOST
    }
    assert not long.keys() - LONGER, f"longer than {MOST} lines: {long.keys() - LONGER}"
    assert long.keys() == LONGER, f"no longer too long, and no exception: {LONGER - long.keys()}"
