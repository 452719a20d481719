"""The executable meaning of a prologue: an operand computed from its description and the tensors it is read from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from read_graphs import reader_of
from torch.fx import GraphModule, Interpreter, Node

from attn_pass.model.expression import Apply, Expr
from attn_pass.model.index import Axis, axes, axis_index
from attn_pass.model.prologue import Norm, NotRead, Stage
from attn_pass.model.reference import Evaluation
from attn_pass.patterns import calls, softmax
from attn_pass.reading.prologue import ReadPrologue, prologues
from attn_pass.reading.reader import Reader

Tensor = torch.Tensor
Read = dict[str, ReadPrologue | NotRead]
_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "cos": torch.cos,
    "sin": torch.sin,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "pow": torch.pow,
}


class _Evaluation(Evaluation):
    """With the operations of tables and weights, which are none of scores."""

    def expression(self, expression: Expr, dot: Tensor | None = None) -> Tensor:
        if isinstance(expression, Apply) and expression.op in _FUNCTIONS:
            return _FUNCTIONS[expression.op](*(self.expression(a) for a in expression.args))
        return super().expression(expression, dot)


class _Recorder(Interpreter):
    """Runs a graph and keeps what each node gave, before anything is written to it."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.values: dict[Node, Any] = {}
        self.live: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        result = self.live[n] = super().run_node(n)
        self.values[n] = result.clone() if isinstance(result, Tensor) else result
        return result


def read(gm: GraphModule, **known: Any) -> Iterator[tuple[Reader, Read]]:
    """The prologues of every site of a graph."""
    reader = reader_of(gm, **known)
    for finder in (calls.find, softmax.find):
        for site in finder(reader):
            if site.described is not None:
                yield reader, prologues(reader, site.described)


def captured_graphs(
    function: Callable[..., Any], *inputs: Any, dynamic: bool | None = None, **named: Any
) -> list[tuple[GraphModule, list[Any]]]:
    """Dynamo's graphs of a function or model, with what each is called with."""
    graphs: list[tuple[GraphModule, list[Any]]] = []

    def backend(gm: GraphModule, given: list[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            graphs.append((gm, [a.clone() if isinstance(a, Tensor) else a for a in args]))
            return gm(*args)

        return run

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend, dynamic=dynamic)(*inputs, **named)
    return graphs


def read_function(function: Callable[..., Any], *inputs: Any) -> dict[str, str]:
    """The prologues of the one site of a function as text, each compared with what the program computes."""
    ((gm, given),) = captured_graphs(function, *inputs)
    (found,) = checked(gm, given)
    return {name: str(prologue) for name, prologue in found.items()}


def checked(gm: GraphModule, inputs: Sequence[Any], tolerance: float = 1e-10) -> list[Read]:
    """The prologues of every site of a graph, each compared with what the graph computes for the inputs."""
    sites = list(read(gm))
    recorder = _Recorder(gm)
    with torch.no_grad():
        recorder.run(*inputs)
    for reader, found in sites:
        for name, prologue in found.items():
            if isinstance(prologue, ReadPrologue):
                operand = recorder.live[prologue.operand.node]  # with what was written to it
                compare(reader, name, prologue, operand, recorder.values, tolerance)
    return [found for _, found in sites]


def compare(
    reader: Reader, name: str, read: ReadPrologue, value: Tensor, values: dict[Node, Any], tolerance: float
) -> None:
    """That the operand is what its description makes of the tensors it names."""
    operand = read.operand
    first = read.prologue.stages[0]
    order = sorted((axes(*operand.position) | _outer(first)) - {operand.dim}, key=lambda a: a.key)
    sizes = {key: value for key, value in reader.sizes.hints.items()}
    tensors = [_real(values[node]) for node in read.nodes]
    got = _apply(list(read.prologue.stages), order, operand.heads, tensors, sizes)
    grid = _Evaluation((*order, operand.dim), [_real(value)], sizes)
    position = tuple(torch.as_tensor(grid.index(i)) for i in operand.position)
    expected = _real(value)[position].to(torch.float64).expand(grid.shape)
    error = (got.expand(grid.shape) - expected).abs().max().item()
    assert error <= tolerance * max(1.0, expected.abs().max().item()), f"{name}: {read}: {error}"


def _outer(stage: Stage) -> set[Axis]:
    return axes(*stage.position) - {stage.along}


def _real(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        return torch.as_tensor(value)
    value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    return value.to(torch.float64) if value.is_floating_point() else value


def _apply(
    stages: list[Stage], order: list[Axis], heads: frozenset[Axis], tensors: list[Tensor], sizes: dict[str, int]
) -> Tensor:
    """The rows that the stages make, over the axes of ``order`` and the head dim."""
    stage, *deeper = stages
    grid = _Evaluation((*order, stage.along), tensors, sizes)
    rows = None
    if deeper:
        rows = _apply(deeper, order, heads, tensors, sizes)
    elif stage.norm is not None:
        rows = tensors[stage.source][tuple(torch.as_tensor(grid.index(i)) for i in stage.position)]
    if rows is not None and stage.norm is not None:
        rows = _normalised(rows.expand(grid.shape), stage, stage.norm, order, heads, grid)
    width = max(int(max(_numbers(p.at, p.axis, sizes))) for p in stage.pieces) + 1
    out = torch.full((*grid.shape[:-1], width), float("nan"), dtype=torch.float64)
    for piece in stage.pieces:
        one = _Evaluation((*order, piece.axis), tensors, sizes)
        total = torch.zeros(one.shape, dtype=torch.float64)
        for term in piece.terms:
            elements = one.load(term.element) if rows is None else rows[..., _numbers(term.at, piece.axis, sizes)]
            total = total + one.expression(term.coefficient) * elements
        out[..., _numbers(piece.at, piece.axis, sizes)] = total
    return out


def _numbers(index: Any, axis: Axis, sizes: dict[str, int]) -> Tensor:
    grid = _Evaluation((axis,), [], sizes)
    return torch.as_tensor(grid.index(index)).expand(grid.shape)


def _normalised(
    rows: Tensor, stage: Stage, norm: Norm, order: list[Axis], heads: frozenset[Axis], grid: _Evaluation
) -> Tensor:
    over = [-1]
    if norm.heads:
        over += [n for n, axis in enumerate(order) if axis in heads]
    if norm.kind == "layer":
        centred = rows - rows.mean(over, keepdim=True)
        rows = centred * (centred.square().mean(over, keepdim=True) + norm.eps).rsqrt()
    elif norm.kind == "rms":
        rows = rows * (rows.square().mean(over, keepdim=True) + norm.eps).rsqrt()
    elif norm.root:
        rows = rows * (rows.square().sum(over, keepdim=True) + norm.eps).rsqrt()
    else:
        rows = rows / rows.square().sum(over, keepdim=True).sqrt().clamp_min(norm.eps)
    for number, tensor in ((norm.weight, "weight"), (norm.bias, "bias")):
        if number is not None:
            at = torch.as_tensor(grid.index(stage.position[-1] if stage.position else axis_index(stage.along)))
            held = grid.sources[number][at]
            rows = rows * held if tensor == "weight" else rows + held
    return rows
