"""Other compilers as backends of torch.compile, for `attn_pass.check`: a function of a graph and its inputs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

Backend = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]
_QUICK: Mapping[str, Any] = {"cpp_wrapper": True, "aot_inductor.compile_wrapper_opt_level": "O0"}


def inductor_patterns(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Stock Inductor, up to the code it would generate: a difference is one of its passes', not of rounding."""
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.compile_fx import compile_fx

    def as_it_is(graph: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        return make_boxed_func(graph.forward)

    made: Callable[..., Any] = compile_fx(gm, list(example_inputs), inner_compile=as_it_is)
    return made


def inductor_compiled(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Stock Inductor with its C++, compiled with less optimisation: the same operations in the same order."""
    from torch._inductor.compile_fx import compile_fx

    made: Callable[..., Any] = compile_fx(gm, list(example_inputs), config_patches=_QUICK)
    return made


def onnxruntime(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """torch.onnx.export at opset 23, in which attention is one operator, and ONNX Runtime's CPU provider."""
    import onnxruntime as ort

    def convert(inputs: tuple[torch.Tensor, ...]) -> Callable[..., Any]:
        program = torch.export.export(gm, inputs)
        exported = torch.onnx.export(program, opset_version=23, dynamo=True, verbose=False)
        assert exported is not None
        options = ort.SessionOptions()
        options.log_severity_level = 4
        with tempfile.TemporaryDirectory() as folder:
            exported.save(Path(folder) / "model.onnx")
            session = ort.InferenceSession(Path(folder) / "model.onnx", options, providers=["CPUExecutionProvider"])
        names = [given.name for given in session.get_inputs()]

        def run(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            fed = {name: x.detach().contiguous().numpy() for name, x in zip(names, given, strict=True)}
            return tuple(map(torch.from_numpy, session.run(None, fed)))

        return run

    return _at_first_call(convert)


def openvino(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """openvino.convert_model and its CPU plugin, in float32."""
    import openvino as ov

    def convert(inputs: tuple[torch.Tensor, ...]) -> Callable[..., Any]:
        model = ov.convert_model(torch.export.export(gm, inputs))
        compiled = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

        def run(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            results = compiled([x.detach().contiguous().numpy() for x in given])
            return tuple(torch.from_numpy(results[n].copy()) for n in range(len(results)))

        return run

    return _at_first_call(convert)


def _at_first_call(convert: Callable[[tuple[torch.Tensor, ...]], Callable[..., Any]]) -> Callable[..., Any]:
    """What is converted for the inputs of the first call, outside of whatever Dynamo has under way."""
    made: list[Callable[..., Any]] = []

    def run(*inputs: Any) -> Any:
        if not made:
            made.append(torch._dynamo.disable(convert)(inputs))
        return made[0](*inputs)

    return run


BACKENDS: Mapping[str, tuple[str, Backend]] = {
    "inductor": ("stock Inductor", inductor_patterns),
    "inductor_compiled": ("stock Inductor, compiled", inductor_compiled),
    "onnxruntime": ("ONNX Runtime", onnxruntime),
    "openvino": ("OpenVINO", openvino),
}
"""By name: what it is called, and the backend."""
