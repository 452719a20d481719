"""What single calls write, compared with what they write when the graph runs."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_eager import randn
from read_graphs import captured
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.nn import functional as F

from attn_pass.devices.registry import families
from attn_pass.graph.random_draws import draws_random_numbers, may_draw
from attn_pass.graph.writes import call_writes, traits_of

aten = torch.ops.aten
Program = Callable[[Tensor, Tensor], Any]


def norm(x: Tensor, y: Tensor, training: bool) -> Tensor:
    return F.batch_norm(x, y[0], y[1], None, None, training)


def increased(x: Tensor, y: Tensor) -> Tensor:
    x += y
    return x


def assigned(x: Tensor, y: Tensor, index: Any) -> Tensor:
    x[index] = y[index]
    return x


# What the call that writes is said to write: whether all elements of its target, and whether the target is rebound.
WRITES: dict[str, tuple[Program, list[tuple[bool, bool]]]] = {
    "add_": (lambda x, y: x.add_(y), [(True, False)]),
    "add_, by keyword": (lambda x, y: x.add_(other=y), [(True, False)]),
    "Tensor.add_": (lambda x, y: torch.Tensor.add_(x, y), [(True, False)]),
    "copy_": (lambda x, y: x.copy_(y), [(True, False)]),
    "zero_": (lambda x, y: x.zero_(), [(True, False)]),
    "masked_fill_": (lambda x, y: x.masked_fill_(y > 0, 1.0), [(True, False)]),
    "relu_": (lambda x, y: torch.relu_(x), [(True, False)]),
    "+=": (increased, [(True, False)]),
    "all by an index": (lambda x, y: assigned(x, y, slice(None)), [(True, False)]),
    "all by an ellipsis and slices": (lambda x, y: assigned(x, y, (..., slice(None))), [(True, False)]),
    "a row": (lambda x, y: assigned(x, y, 0), [(False, False)]),
    "a column": (lambda x, y: assigned(x, y, (slice(None), 0)), [(False, False)]),
    "every second row": (lambda x, y: assigned(x, y, slice(None, None, 2)), [(False, False)]),
    "fill_diagonal_": (lambda x, y: x.fill_diagonal_(2.0), [(False, False)]),
    "index_fill_": (lambda x, y: x.index_fill_(0, torch.tensor([1]), 2.0), [(False, False)]),
    "scatter_": (lambda x, y: x.scatter_(0, torch.zeros(1, 4, dtype=torch.int64), y[:1]), [(False, False)]),
    "t_": (lambda x, y: x.clone().t_(), [(False, True)]),
    "unsqueeze_": (lambda x, y: x.clone().unsqueeze_(0), [(False, True)]),
    "out=": (lambda x, y: torch.add(x, 1, out=y), [(True, False)]),
    "out= of two": (lambda x, y: torch.max(x, 0, out=(y[0], torch.empty(4, dtype=torch.int64))), [(False, False)] * 2),
    "inplace=True": (lambda x, y: F.relu(x, inplace=True), [(True, False)]),
    "inplace=False": (lambda x, y: F.relu(x, inplace=False), []),
    "batch_norm in training": (lambda x, y: norm(x, y, True), [(False, False)] * 2),
    "batch_norm": (lambda x, y: norm(x, y, False), []),
    "an embedding that is renormalised": (
        lambda x, y: F.embedding(torch.tensor([1, 0]), x, max_norm=0.5),
        [(False, False)],
    ),
    "an embedding": (lambda x, y: F.embedding(torch.tensor([1, 0]), x), []),
    "a view": (lambda x, y: x.t()[0], []),
    "a sum": (lambda x, y: torch.add(x, y), []),
}  # fmt: skip


def written(gm: GraphModule) -> list[tuple[bool, bool]]:
    return [(w.whole, w.rebinds) for node in gm.graph.nodes for w in call_writes(node)]


@pytest.mark.parametrize("name", WRITES)
def test_what_a_call_writes(name: str) -> None:
    program, expected = WRITES[name]
    gm = captured(program, randn(4, 4), randn(4, 4))
    assert written(gm) == expected, gm.graph


class Watched(Interpreter):
    """Runs a graph, and notes which tensors each call changed the version of, and what it gave."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.changed: dict[Node, set[Node]] = {}

    def run_node(self, n: Node) -> Any:
        held = {i: self.env[i] for i in n.all_input_nodes if isinstance(self.env[i], Tensor)}
        versions = {i: t._version for i, t in held.items()}
        result = super().run_node(n)
        self.changed[n] = {i for i, t in held.items() if t._version != versions[i]}
        return result


@pytest.mark.parametrize("name", WRITES)
def test_no_write_is_missed(name: str) -> None:
    """Torch counts a tensor's versions: what it counts is among what is told."""
    x, y = randn(4, 4), randn(4, 4)
    gm = captured(WRITES[name][0], x.clone(), y.clone())
    run = Watched(gm)
    run.run(x.clone(), y.clone())
    for node, changed in run.changed.items():
        assert changed <= {w.target for w in call_writes(node)}, f"{node.format_node()} writes {changed}"


@pytest.mark.parametrize("name", [n for n, (_, expected) in WRITES.items() if (True, False) in expected])
def test_a_whole_write_leaves_nothing_of_what_was_there_but_the_result(name: str) -> None:
    x, y = randn(4, 4), randn(4, 4)
    gm = captured(WRITES[name][0], x.clone(), y.clone())
    run = Watched(gm)
    run.run(x.clone(), y.clone())
    for node in gm.graph.nodes:
        whole = [w.target for w in call_writes(node) if w.whole]
        results = run.env[node] if isinstance(run.env[node], tuple) else (run.env[node],)
        for target, result in zip(whole, results):
            if isinstance(result, Tensor):  # setitem gives nothing
                torch.testing.assert_close(run.env[target], result, rtol=0, atol=0)


# ---------------------------------------------------------------- operators by their schema


def node_of(target: Any, *args: Any, **kwargs: Any) -> Node:
    """A call of a target on placeholders, as many as there are tensors."""
    graph = Graph()
    made = [graph.placeholder(a.name) if isinstance(a, Placeholder) else a for a in args]
    made_kwargs = {k: graph.placeholder(a.name) if isinstance(a, Placeholder) else a for k, a in kwargs.items()}
    for node in graph.nodes:
        node.meta["val"] = randn(2, 2)
    return graph.call_function(target, tuple(made), made_kwargs)


class Placeholder:
    """A tensor among the arguments."""

    def __init__(self, name: str) -> None:
        self.name = name


X, Y = Placeholder("x"), Placeholder("y")


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "expected"),
    [
        (aten.add.Tensor, (X, Y), {}, []),
        (aten.add_.Tensor, (X, Y), {}, [("x", True, False)]),
        (aten.add_, (X, Y), {}, [("x", True, False)]),
        (aten.add_.Tensor, (), {"self": X, "other": Y}, [("x", True, False)]),
        (aten.index_put_.default, (X, [None], Y), {}, [("x", False, False)]),
        (aten.transpose_.default, (X, 0, 1), {}, [("x", False, True)]),
        (aten.native_batch_norm.default, (X, None, None, Y, None, True, 0.1, 1e-5), {}, [("y", False, False)]),
        (aten.native_batch_norm.default, (X, None, None, Y, None, False, 0.1, 1e-5), {}, []),
        (operator.iadd, (X, Y), {}, [("x", True, False)]),
        (operator.add, (X, Y), {}, []),
        (setattr, (X, "data", Y), {}, [("x", False, True)]),
        (setattr, (X, "grad", Y), {}, [("x", False, False)]),
    ],
)
def test_what_an_operator_writes(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], expected: list[tuple[str, bool, bool]]
) -> None:
    writes = call_writes(node_of(target, *args, **kwargs))
    assert [(w.target.name, w.whole, w.rebinds) for w in writes] == expected


@pytest.mark.parametrize(
    ("result", "whole"), [(lambda out: out, True), (lambda out: out[:1], False), (lambda out: out.clone(), False)]
)
def test_a_result_of_another_shape_is_not_all_of_the_tensor_it_is_written_to(
    result: Callable[[Tensor], Tensor], whole: bool
) -> None:
    node = node_of(torch.add, X, Y, out=Placeholder("out"))
    node.meta["val"] = result(node.kwargs["out"].meta["val"])
    assert [(w.target.name, w.whole) for w in call_writes(node)] == [("out", whole)]


def from_elsewhere(x: Tensor, y: Tensor) -> Tensor:
    return x.add_(y)


def flash_attn_func(x: Tensor, y: Tensor) -> Tensor:
    return x @ y


def test_a_function_from_elsewhere_may_write_all_it_gets() -> None:
    writes = call_writes(node_of(from_elsewhere, X, Y))
    assert [(w.target.name, w.whole) for w in writes] == [("x", False), ("y", False)]
    assert traits_of("call_function", from_elsewhere).unknown and not traits_of("call_function", from_elsewhere).pure
    assert families()
    assert not call_writes(node_of(flash_attn_func, X, Y)), "attention functions that a family names only read"


# ---------------------------------------------------------------- what draws, and what is pure


@pytest.mark.parametrize(
    ("program", "draws", "may"),
    [
        (lambda x, y: F.dropout(x, 0.5, True), True, True),
        (lambda x, y: F.dropout(x, 0.5, False), False, False),
        (lambda x, y: F.dropout(x, 0.0, True), False, False),
        (lambda x, y: torch.rand_like(x), False, True),
        (lambda x, y: x.normal_(), False, True),
        (lambda x, y: torch.bernoulli(x.sigmoid()), False, True),
        (lambda x, y: x + y, False, False),
        (lambda x, y: F.scaled_dot_product_attention(x, y, y, dropout_p=0.5), False, True),
        (lambda x, y: F.scaled_dot_product_attention(x, y, y, None, 0.5), False, True),
        (lambda x, y: F.scaled_dot_product_attention(x, y, y, dropout_p=0.0), False, False),
        (lambda x, y: F.scaled_dot_product_attention(x, y, y), False, False),
        (lambda x, y: torch.ops.aten.scaled_dot_product_attention.default(x, y, y, None, 0.5), False, True),
    ],
)
def test_what_draws_random_numbers(program: Program, draws: bool, may: bool) -> None:
    calls = [n for n in captured(program, randn(4, 4), randn(4, 4)).graph.nodes if n.op.startswith("call")]
    assert any(map(draws_random_numbers, calls)) is draws
    assert any(map(may_draw, calls)) is may


@pytest.mark.parametrize(
    ("target", "pure"),
    [
        ("sin", True), ("add_", False), ("__iadd__", False), ("backward", False), ("record_stream", False),
        (torch.sin, True), (torch.rand, False), (torch._assert, False), (F.relu, True), (print, False),
        (aten.sin.default, True), (aten.add_.Tensor, False), (aten.rand.default, False),
        (aten._assert_async.msg, False), (aten.native_dropout.default, True), (aten.sin, True), (aten.sin_, False),
    ],
)  # fmt: skip
def test_what_computes_only(target: Any, pure: bool) -> None:
    op = "call_method" if isinstance(target, str) else "call_function"
    assert traits_of(op, target).pure is pure
