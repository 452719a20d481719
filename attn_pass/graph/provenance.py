"""Records which nodes were inserted for each site, and finds the target that an error of the compiler is about."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.fx import Node

from attn_pass.errors import chain_of


@dataclass(frozen=True)
class Emission:
    """What a target emitted for one site: its operators by name, and the program's stack that all of them carry."""

    target: str
    operators: frozenset[str]
    stack_trace: str


_ORIGIN = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node", "seq_nr", "custom")


def origin_of(node: Node) -> dict[str, Any]:
    """What a node's ``meta`` says of where in the program it is from, for the nodes that take its place."""
    return {key: node.meta[key] for key in _ORIGIN if key in node.meta}


_CUSTOM = "custom"  # AOTAutograd copies what is under it to the nodes that it makes
_SITE, _LEFT_TO_STOCK = "attn_pass_site", "attn_pass_left_to_stock"


def mark(nodes: Iterable[Node], name: str) -> None:
    """Names the site that nodes compute, for `site_of` of the nodes that a compiler makes of them."""
    for node in nodes:
        if not node._erased:
            node.meta[_CUSTOM] = {**_marks(node), _SITE: name}


def site_of(node: Node) -> str:
    """The name that `mark` gave, "" for none."""
    return str(_marks(node).get(_SITE, ""))


def mark_left_to_stock(nodes: Iterable[Node]) -> None:
    """Says of nodes, and of those that a compiler makes of them, that Inductor's attention patterns may have them."""
    for node in nodes:
        node.meta[_CUSTOM] = {**_marks(node), _LEFT_TO_STOCK: True}


def is_left_to_stock(node: Node) -> bool:
    """Whether `mark_left_to_stock` was told of a node, or of what it was made of."""
    return _LEFT_TO_STOCK in _marks(node)


def _marks(node: Node) -> dict[str, Any]:
    custom = node.meta.get(_CUSTOM)
    return custom if isinstance(custom, dict) else {}


def operator_name(target: Callable[..., Any] | str) -> str:
    """What the compiler's messages call the target of a call: "row_blocks.attention.default", "flex_attention"."""
    if isinstance(target, (str, torch._ops.OpOverload)):
        return str(target)
    name = getattr(target, "__name__", None)
    return name if isinstance(name, str) else str(target)


def culprits(error: BaseException, emissions: Sequence[Emission]) -> frozenset[str]:
    """The targets that the error is about; none if it does not show them.

    The graph node that was being worked on is found in the frames of the traceback, and the operator in Inductor's
    message (``target: ...``). An operator that one target alone emitted names that target; otherwise the source line
    names the sites there. Code that is generated later (Triton, C++) belongs to no node, so such an error may show
    none.
    """
    chain = list(chain_of(error))
    nodes = list(_nodes(chain))
    text = "\n".join(map(str, chain))
    operators = [operator_name(n.target) for n in nodes]
    operators += _TARGET.findall(text)
    for named in (operators[:1], operators, _spelled_out(text, emissions)):
        targets = {e.target for e in emissions if e.operators & set(named) & _distinctive(emissions)}
        if targets:
            return frozenset(targets)
    lines = "\n".join([str(n.meta.get("stack_trace")) for n in nodes[:1]] + [text])
    return frozenset(e.target for e in emissions if e.stack_trace and e.stack_trace in lines)


_TARGET = re.compile(r"^\s*target: (\S+)", re.MULTILINE)  # torch/_inductor/exc.py: OperatorIssue


def _distinctive(emissions: Sequence[Emission]) -> set[str]:
    """The operators that one target alone emitted."""
    by: dict[str, set[str]] = {}
    for emission in emissions:
        for operator in emission.operators:
            by.setdefault(operator, set()).add(emission.target)
    return {operator for operator, targets in by.items() if len(targets) == 1}


def _spelled_out(text: str, emissions: Sequence[Emission]) -> list[str]:
    """Custom operators that a message names as torch does elsewhere: "row_blocks::attention"."""
    operators = {operator for e in emissions for operator in e.operators if operator.count(".") == 2}
    custom = (o for o in operators if not o.startswith(("aten.", "prims.")))
    return [o for o in custom if re.search(rf"\b{'::'.join(map(re.escape, o.split('.')[:2]))}\b", text)]


def _nodes(errors: Iterable[BaseException]) -> Iterator[Node]:
    """The graph nodes that were worked on when it happened, innermost first."""
    for error in reversed(list(errors)):
        frames = list(_frames(error.__traceback__))
        for frame in reversed(frames):
            for name in ("n", "node"):  # of torch.fx.Interpreter.run_node, and of Inductor's own
                value = frame.f_locals.get(name)
                if isinstance(value, Node) and value.op == "call_function":
                    yield value


def _frames(traceback: TracebackType | None) -> Iterator[Any]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next
