"""Graph breaks: where Dynamo stopped, so that what runs eagerly there is not taken for a program without attention."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.fx import GraphModule

from attn_pass.errors import first_line_of
from attn_pass.report.places import source_line

_BRANCH = ("generic_jump", "Data-dependent branching")  # Dynamo's words for a branch whose condition is a tensor
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # of an object, another in every process


def break_after(gm: GraphModule) -> tuple[str, ...]:
    """The break that ended a Dynamo graph, as "file.py:12 in forward: reason"; empty where the graph ends by itself."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return _break_texts([reason] if reason is not None and reason.graph_break else [])


@contextmanager
def breaks_noted() -> Iterator[list[str]]:
    """A list that is filled, at the end, with the breaks of everything that Dynamo traced inside, each once."""
    from torch._dynamo.utils import graph_break_reasons

    before = len(graph_break_reasons)
    noted: list[str] = []
    try:
        yield noted
    finally:
        noted.extend(_break_texts(graph_break_reasons[before:]))


def _break_texts(reasons: Iterable[Any]) -> tuple[str, ...]:
    """One for each place and cause: Dynamo notes some twice, for the function and for what calls it."""
    return tuple(dict.fromkeys(f"{_where(reason)}: {_why(str(reason.reason))}" for reason in reasons))


def _where(reason: Any) -> str:
    frames = [f'  File "{f.filename}", line {f.lineno}, in {f.name}' for f in reason.user_stack or ()]
    return source_line({"stack_trace": "\n".join(frames)})


def _why(reason: str) -> str:
    if reason.startswith(_BRANCH):
        return "a branch depends on the values of a tensor"
    reason = _ADDRESS.sub("", reason)
    lines = [line.strip() for line in reason.splitlines()]
    explained = next((line for line in lines if line.startswith("Explanation:")), "")
    with_explanation = f"{first_line_of(reason)} ({explained.removeprefix('Explanation:').strip().rstrip('.')})"
    return with_explanation if explained else first_line_of(reason)
