"""The FX graph of a function of tensors in three dialects, with fake values, in milliseconds: no Dynamo, no export.

`dynamo` records what is called on proxies that carry fake tensors: functions, operators and methods stay what they are,
as Dynamo writes them. `export` is pre-dispatch aten, `decomposed` is functional aten in export's own decomposition.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node, Proxy
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.proxy import GraphAppendingTracer
from torch.overrides import TorchFunctionMode

Function = Callable[..., Any]
Dynamic = Sequence[Sequence[int]]  # of each input: the dimensions whose size is a symbol
DIALECTS = ("dynamo", "export", "decomposed")


def graph_of(function: Function, inputs: Sequence[torch.Tensor], dialect: str, dynamic: Dynamic) -> GraphModule:
    """The function's graph; its placeholders are `placeholders(gm, inputs)`."""
    is_dynamic = any(dynamic)
    mode = FakeTensorMode(shape_env=ShapeEnv()) if is_dynamic else _static_mode()
    fakes = [_fake(mode, x, dims) for x, dims in zip(inputs, dynamic)]
    with mode, enable_python_dispatcher() if is_dynamic else nullcontext():  # what symbols need costs time
        if dialect == "dynamo":
            return _recorded(function, fakes)
        if dialect == "export":
            gm = make_fx(function, pre_dispatch=True)(*fakes)
        else:
            functional = torch.func.functionalize(function, remove="mutations")
            gm = make_fx(functional, decomposition_table=_decompositions())(*[x.detach() for x in fakes])
        return _sizes_of_inputs(gm) if is_dynamic else gm


def values(gm: GraphModule, inputs: Sequence[torch.Tensor]) -> list[Any]:
    """What the graph's placeholders are fed: the inputs, and the sizes that a Dynamo graph takes before them."""
    sizes = gm.meta.get("sizes", ())
    return [*(inputs[number].shape[dim] for number, dim in sizes), *inputs]


def _sizes_of_inputs(gm: GraphModule) -> GraphModule:
    """Symbols are taken from the inputs that have them, as torch.export does it, and not from what has the size too."""
    places: dict[Any, tuple[Node, int]] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            sizes = ((d, s) for d, s in enumerate(node.meta["val"].shape) if isinstance(s, torch.SymInt))
            places |= {s.node.expr: (node, d) for d, s in sizes if s.node.expr not in places}
        elif node.target is torch.ops.aten.sym_size.int:
            node.args = places.get(node.meta["val"].node.expr, node.args)
    gm.recompile()
    return gm


def _fake(mode: FakeTensorMode, tensor: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    if not dims or mode.shape_env is None:
        return mode.from_tensor(tensor, static_shapes=True)
    kinds = [DimDynamic.DYNAMIC if d in dims else DimDynamic.STATIC for d in range(tensor.dim())]
    return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))


@lru_cache(maxsize=1)
def _static_mode() -> FakeTensorMode:
    return FakeTensorMode()


@lru_cache(maxsize=1)
def _decompositions() -> dict[Any, Any]:
    return dict(torch.export.default_decompositions().items())


# ---------------------------------------------------------------- Dynamo's dialect


def _recorded(function: Function, fakes: Sequence[torch.Tensor]) -> GraphModule:
    graph = Graph()
    tracer = _Tracer(graph)
    sizes = [(n, d, s) for n, x in enumerate(fakes) for d, s in enumerate(x.shape) if isinstance(s, torch.SymInt)]
    sources = []
    for number, dim, size in sizes:
        if size.node.expr not in tracer.symbols:
            tracer.symbols[size.node.expr] = _placeholder(graph, str(size), size)
            sources.append((number, dim))
    proxies = [tracer.proxy(_placeholder(graph, f"L_x{n}_", x)) for n, x in enumerate(fakes)]
    with _Creations(tracer):
        out = function(*proxies)
    results = tuple(out) if isinstance(out, (tuple, list)) else (out,)
    graph.output(tuple(r.node for r in results))
    gm = GraphModule(torch.nn.Module(), graph)
    gm.meta["sizes"] = tuple(sources)
    return gm


def _placeholder(graph: Graph, name: str, value: Any) -> Node:
    node = graph.placeholder(name)
    node.meta["example_value"] = value
    return node


def _value(argument: Any) -> Any:
    return torch.fx.map_arg(argument, lambda n: n.meta["example_value"])


class _Tracer(GraphAppendingTracer):
    """Runs what it records on fake tensors; a result that is no tensor is given as it is."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.symbols: dict[Any, Node] = {}
        self.running = False

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *_: Any, **__: Any) -> Any:
        node = self.create_node(kind, target, self.create_arg(args), self.create_arg(kwargs))
        given, named = _value(node.args), _value(node.kwargs)
        self.running = True
        try:
            if kind == "call_method":
                result = getattr(given[0], target)(*given[1:], **named)
            else:
                result = target(*given, **named)
        finally:
            self.running = False
        node.meta["example_value"] = result
        return self.proxy(node)

    def proxy(self, node: Node) -> Any:
        return _Recorded(node, self)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, torch.SymInt):
            return self._size(a.node.expr, a)
        if isinstance(a, torch.Size):
            a = tuple(a)
        return super().create_arg(a)

    def _size(self, expression: Any, value: Any) -> Any:
        """The node of a size: the placeholder of a symbol, or operators on such."""
        if expression in self.symbols:
            return self.symbols[expression]
        if expression.is_Integer:
            return int(expression)
        function = {"Add": operator.add, "Mul": operator.mul, "FloorDiv": operator.floordiv}[type(expression).__name__]
        first, *rest = (self._size(part, None) for part in expression.args)
        for part in rest:
            node = self.graph.call_function(function, (first, part))
            node.meta["example_value"] = function(_value(first), _value(part))
            first = node
        self.symbols[expression] = first
        return first


class _Recorded(Proxy):
    """A tensor of the program: what is asked of its type is answered, what is done to it is recorded."""

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "dtype", "device", "ndim"):
            return self._asked(lambda value: getattr(value, name))
        if name in ("mT", "T"):
            return self.tracer.create_proxy("call_function", getattr, (self, name), {})
        return super().__getattr__(name)

    def _asked(self, question: Callable[[Any], Any]) -> Any:
        """An answer that the fake value gives: no node."""
        self.tracer.running = True
        try:
            return question(self.node.meta["example_value"])
        finally:
            self.tracer.running = False

    def dim(self) -> int:
        return self._asked(lambda value: value.dim())

    def __iter__(self) -> Iterator[Any]:
        return (self[n] for n in range(self._asked(len)))

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    def __iadd__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.iadd, (self, other), {})

    def __imul__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.imul, (self, other), {})

    def __invert__(self) -> Any:
        return self.tracer.create_proxy("call_function", operator.invert, (self,), {})


class _Creations(TorchFunctionMode):
    """Records the functions that make tensors of nothing, and every other function called without a proxy's help."""

    def __init__(self, tracer: _Tracer) -> None:
        self.tracer = tracer
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.tracer.running:
            return func(*args, **kwargs)
        if isinstance(func, torch._C._TensorMeta) or getattr(func, "__name__", "") in ("__get__", "__set__"):
            return func(*args, **kwargs)
        if type(func).__name__ in ("method_descriptor", "wrapper_descriptor"):
            return self.tracer.create_proxy("call_method", func.__name__, args, kwargs)
        return self.tracer.create_proxy("call_function", func, args, kwargs)
