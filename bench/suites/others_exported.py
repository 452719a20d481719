"""Runtimes that take exported programs: several are exported at once, and each is then a model of its own.

An export costs seconds whatever it holds, a session milliseconds: what a runtime does not take is found without another
export.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

from attn_pass.measuring.timing import tensors, why
from bench.suites.peers import compiled_by_openvino, session_of

if TYPE_CHECKING:
    import onnx

Results = list[torch.Tensor]
Function = Callable[..., Any]
Inputs = tuple[torch.Tensor, ...]
Part = Callable[[Inputs], Results]
Parts = Callable[["Exported"], Sequence[Part]]


class NotExported(Exception):
    """torch.export does not trace a program: nothing that a runtime could be blamed for."""


class _Together(torch.nn.Module):
    def __init__(self, functions: Sequence[Function]) -> None:
        super().__init__()
        self.functions = tuple(functions)
        self.modules_among_them = torch.nn.ModuleList(f for f in functions if isinstance(f, torch.nn.Module))

    def forward(self, groups: list[Inputs]) -> list[Results]:
        return [tensors(function(*inputs)) for function, inputs in zip(self.functions, groups)]


class Exported:
    """Several functions as one exported program.

    Attributes:
        program: what torch.export made; its inputs and outputs are those of the functions one after another.
        examples: the inputs that it was made with.
        inputs: the positions of each function's inputs among all.
        results: the same of the outputs.

    Raises:
        NotExported: torch.export fails for one of them.
    """

    def __init__(self, functions: Sequence[Function], inputs: Sequence[Inputs]) -> None:
        try:
            self.program = torch.export.export(_Together(functions), (list(inputs),), strict=False)
        except Exception as error:
            raise NotExported(why(error)) from error
        spec = self.program.call_spec.out_spec
        made = pytree.tree_unflatten(range(spec.num_leaves), spec)
        self.examples = tuple(inputs)
        self.inputs = _ranges(map(len, inputs))
        self.results = _ranges(map(len, made))


def _ranges(lengths: Iterable[int]) -> list[range]:
    found, start = [], 0
    for length in lengths:
        found.append(range(start, start + length))
        start += length
    return found


def run_each(parts: Parts, functions: Sequence[Function], inputs: Sequence[Inputs]) -> list[Results | Exception]:
    """The results of each function as the runtime computes it, or what the runtime raised.

    Raises:
        NotExported: torch.export fails for one of them.
        Exception: the runtime does not take the whole, and does not say which of them it is.
    """
    found: list[Results | Exception] = []
    for run, given in zip(parts(Exported(functions, inputs)), inputs, strict=True):
        try:
            found.append(run(given))
        except Exception as error:
            found.append(error)
    return found


def _plain(inputs: Inputs) -> Inputs:
    return tuple(x.detach().contiguous() for x in inputs)


# ------------------------------------------------------------ ONNX Runtime


class _Session:
    """A part of an ONNX model in a session of its own, which is made at the first call."""

    def __init__(self, model: onnx.ModelProto, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        self.model, self.inputs, self.outputs, self.session = model, inputs, outputs, None

    def __call__(self, given: Inputs) -> Results:
        if self.session is None:
            part = _part(self.model, set(self.inputs), self.outputs).SerializeToString()
            self.session = session_of(part, severity=4)
        wanted = {one.name for one in self.session.get_inputs()}
        named = zip(self.inputs, _plain(given), strict=True)
        fed = {name: x.numpy() for name, x in named if name in wanted}
        return [torch.from_numpy(x.copy()) for x in self.session.run(list(self.outputs), fed)]


def onnxruntime(exported: Exported) -> Sequence[Part]:
    """torch.onnx.export at opset 23, in which attention is one operator, and ONNX Runtime's CPU provider."""
    with _torchlib_read_once():
        program = torch.onnx.export(exported.program, opset_version=23, dynamo=True, verbose=False)
    assert program is not None
    model = program.model_proto
    inputs, outputs = [i.name for i in model.graph.input], [o.name for o in model.graph.output]
    both = zip(exported.inputs, exported.results, strict=True)
    return [_Session(model, [inputs[n] for n in taken], [outputs[n] for n in given]) for taken, given in both]


@contextmanager
def _torchlib_read_once() -> Iterator[None]:
    """The exporter reads the sources of all its translations for every program, which takes longer than a small one."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    read = ONNXRegistry.from_torchlib

    @functools.cache
    def known(opset_version: int) -> Any:
        return read(opset_version=opset_version)

    with mock.patch.object(ONNXRegistry, "from_torchlib", staticmethod(_KNOWN.setdefault("", known))):
        yield


_KNOWN: dict[str, Callable[[int], Any]] = {}


def _part(model: onnx.ModelProto, inputs: set[str], outputs: Sequence[str]) -> onnx.ModelProto:
    """The model of these outputs alone: the nodes and constants that they are computed from."""
    import onnx

    made_by = {name: n for n, node in enumerate(model.graph.node) for name in node.output}
    kept: set[int] = set()
    names, open_names = set(outputs), list(outputs)
    while open_names:
        number = made_by.get(open_names.pop())
        if number is not None and number not in kept:
            kept.add(number)
            new = _read(model.graph.node[number]) - names
            names |= new
            open_names += new
    of = {o.name: o for o in model.graph.output}
    graph = onnx.GraphProto(
        name=model.graph.name,
        node=[model.graph.node[number] for number in sorted(kept)],
        input=[i for i in model.graph.input if i.name in inputs],
        output=[of[name] for name in outputs],
        initializer=[i for i in model.graph.initializer if i.name in names],
    )
    functions, opsets = model.functions, model.opset_import
    return onnx.ModelProto(ir_version=model.ir_version, opset_import=opsets, functions=functions, graph=graph)


def _read(node: onnx.NodeProto) -> set[str]:
    """What a node reads, in the branches of a condition too."""
    inner = [g for a in node.attribute for g in (*a.graphs, *([a.g] if a.HasField("g") else []))]
    return {*node.input, *(name for graph in inner for each in graph.node for name in _read(each))}


# ------------------------------------------------------------ OpenVINO


class _Compiled:
    """A part of an OpenVINO model, which is compiled at the first call."""

    def __init__(self, results: Sequence[Any], parameters: Sequence[Any]) -> None:
        self.results, self.parameters, self.compiled = results, parameters, None

    def __call__(self, given: Inputs) -> Results:
        import openvino as ov

        if self.compiled is None:
            self.compiled = compiled_by_openvino(ov.Model(list(self.results), list(self.parameters), "part"))
        results = self.compiled([x.numpy() for x in _plain(given)])
        return [torch.from_numpy(results[n].copy()) for n in range(len(self.results))]


def openvino(exported: Exported) -> Sequence[Part]:
    """openvino.convert_model and its CPU plugin, in float32."""
    import openvino as ov

    model = ov.convert_model(exported.program)
    parameters, results = model.get_parameters(), model.get_results()
    both = zip(exported.inputs, exported.results, strict=True)
    return [_Compiled([results[n] for n in given], [parameters[n] for n in taken]) for taken, given in both]


# ------------------------------------------------------------ as one program


def _slices(exported: Exported, whole: Callable[[Sequence[Inputs]], Sequence[torch.Tensor]]) -> list[Part]:
    """The parts of what runs as one: each call runs the whole, with the other parts' inputs as they were."""
    known = [_plain(given) for given in exported.examples]

    def part(which: int) -> Part:
        def run(given: Inputs) -> Results:
            known[which] = _plain(given)
            results = whole(known)
            return [results[n].clone() for n in exported.results[which]]

        return run

    return [part(which) for which in range(len(known))]


def executorch(exported: Exported) -> Sequence[Part]:
    """ExecuTorch's lowering for XNNPACK, and its runtime."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime

    lowered = to_edge_transform_and_lower(exported.program, partitioner=[XnnpackPartitioner()]).to_executorch()
    loaded = Runtime.get().load_program(lowered.buffer)

    def whole(inputs: Sequence[Inputs]) -> Sequence[torch.Tensor]:
        method = loaded.load_method("forward")
        assert method is not None
        results: Sequence[torch.Tensor] = method.execute([x for given in inputs for x in given])
        return results

    return _slices(exported, whole)


def by_dynamo(backend: Callable[..., Any]) -> Parts:
    """A backend of torch.compile, which is given the exported program as one graph."""

    def parts(exported: Exported) -> Sequence[Part]:
        module = exported.program.module()
        for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.promote_types.default):
            module.graph.erase_node(node)  # its number is in the program already, and Dynamo takes no such call
        module.recompile()
        made = torch.compile(module, backend=backend, dynamic=False, fullgraph=True)
        made(list(exported.examples))  # what it does not compile is told here
        return _slices(exported, lambda inputs: tensors(made(list(inputs))))

    return parts


PARTS: Mapping[str, Parts] = {"onnxruntime": onnxruntime, "openvino": openvino, "executorch": executorch}
"""By name: a runtime's parts of what was exported, each ready to be called with its inputs."""
