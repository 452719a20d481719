"""Numbers of values: who has one, and that those that are computed only where two may be equal say the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule, Node

from attn_pass.graph.effects import Effects
from attn_pass.graph.numbering import Numbers
from attn_pass.graph.regions import Regions
from tests.support.read_graphs import captured

X, W = torch.randn(4, 4), torch.randn(4)
Tensor = torch.Tensor
Program = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def the_same_twice(x, w):
    return (x * w).relu() + 1, (x * w).relu() + 1


def other_constants(x, w):
    return x * 2, x * 3


def other_operations(x, w):
    return x * w, x + w


def other_inputs(x, w):
    return x.relu(), w.relu()


def other_constants_far_behind(x, w):
    return ((x * 2).relu() + 1).sin(), ((x * 3).relu() + 1).sin()


def other_keywords(x, w):
    return torch.sum(x, dim=0, keepdim=True), torch.sum(x, dim=1, keepdim=True)


def written_between(x, w):
    y = x.clone()
    one = y + 1
    y.mul_(2)
    return one, y + 1


def drawn(x, w):
    return torch.rand_like(x), torch.rand_like(x)


def other_autocast(x, w):
    one = x @ x
    with torch.autocast("cpu", torch.bfloat16):
        other = x @ x
    return one, other


OTHERS = (
    other_constants,
    other_operations,
    other_inputs,
    other_constants_far_behind,
    other_keywords,
    written_between,
    drawn,
    other_autocast,
)


def _numbers(gm: GraphModule) -> Numbers:
    return Numbers(Effects(gm.graph), Regions(gm.graph))


def _results(gm: GraphModule) -> tuple[Node, Node]:
    one, other = gm.graph.output_node().args[0]
    return one, other


def _partition(number: dict[Node, object]) -> set[frozenset[str]]:
    by_number: dict[object, set[str]] = {}
    for node, of_node in number.items():
        by_number.setdefault(of_node, set()).add(node.name)
    return {frozenset(names) for names in by_number.values()}


@pytest.mark.parametrize("program", (the_same_twice, *OTHERS), ids=lambda p: p.__name__)
def test_numbers_among_nodes_tell_the_same_nodes_apart(program: Program) -> None:
    gm = captured(program, X, W)
    nodes = [n for n in gm.graph.nodes if n.op != "output"]
    numbers = _numbers(gm)
    assert _partition(_numbers(gm).among(nodes)) == _partition({n: numbers.of(n) for n in nodes})


def test_what_is_computed_twice_has_one_number() -> None:
    gm = captured(the_same_twice, X, W)
    one, other = _results(gm)
    assert one is not other and len(set(_numbers(gm).among((one, other)).values())) == 1


@pytest.mark.parametrize("program", OTHERS, ids=lambda p: p.__name__)
def test_what_is_computed_otherwise_has_another_number(program: Program) -> None:
    gm = captured(program, X, W)
    one, other = _results(gm)
    number = _numbers(gm).among((one, other))
    assert number[one] != number[other]


def test_nodes_that_look_apart_are_not_numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of a model have inputs of their own, and a number costs what is behind the node."""
    gm = captured(other_operations, X, W)
    asked: list[Node] = []
    monkeypatch.setattr(Numbers, "of", lambda self, node: asked.append(node))
    _numbers(gm).among(_results(gm))
    assert not asked
