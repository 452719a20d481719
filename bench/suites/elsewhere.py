"""Other compilers as backends of torch.compile, for `attn_pass.check`: a function of a graph and its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from bench.suites.others_exported import PARTS, Exported, Part, Parts

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


def exporting(parts: Parts) -> Backend:
    """A runtime that takes exported programs, as a backend: a graph is exported at its first call."""

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        made: list[Part] = []

        def run(*inputs: Any) -> Any:
            if not made:  # outside of whatever Dynamo has under way
                made.extend(torch._dynamo.disable(lambda: parts(Exported([gm], [inputs])))())
            return tuple(made[0](inputs))

        return run

    backend.__name__ = parts.__name__
    return backend


BACKENDS: Mapping[str, tuple[str, Backend]] = {
    "inductor": ("stock Inductor", inductor_patterns),
    "inductor_compiled": ("stock Inductor, compiled", inductor_compiled),
    "onnxruntime": ("ONNX Runtime", exporting(PARTS["onnxruntime"])),
    "openvino": ("OpenVINO", exporting(PARTS["openvino"])),
    "executorch": ("ExecuTorch with XNNPACK", exporting(PARTS["executorch"])),
}
"""By name: what it is called, and the backend."""
