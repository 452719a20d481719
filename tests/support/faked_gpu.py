"""Inductor for a GPU that is not present: its generated code, and its kernels compiled by Inductor's own code.

For a process of its own: much of what torch asks of a device is kept for the life of the process. Nothing here says how
a kernel is called; the signature, constants, divisibility and strides are those in the code that Inductor writes.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import scheduler
from torch._inductor.codecache import PyCodeCache
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes import joint_graph
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode, fake_tensor
from triton.backends.compiler import GPUTarget

KIB = 1 << 10
NVIDIA = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
CUOBJDUMP = NVIDIA / "cuobjdump"
# Of a block, and of a multiprocessor (CUDA C++ programming guide); the number of multiprocessors.
GPUS = {
    80: ("A100", 163 * KIB, 108),
    89: ("L4", 99 * KIB, 58),
    90: ("H100", 227 * KIB, 132),
    100: ("B200", 227 * KIB, 148),
}


class _Driver:
    """As much of Triton's driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


def _properties(capability: int) -> SimpleNamespace:
    name, shared, cores = GPUS[capability]
    return SimpleNamespace(
        name=name,
        gcnArchName="",
        major=capability // 10,
        minor=capability % 10,
        multi_processor_count=cores,
        shared_memory_per_block_optin=shared,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=1536 if capability == 89 else 2048,
        max_threads_per_block=1024,
        warp_size=32,
        total_memory=80 << 30,
    )


@contextlib.contextmanager
def _a_gpu(capability: int) -> Iterator[None]:
    """As if torch had a GPU, as far as compiling for it goes."""
    properties = _properties(capability)
    replaced: list[tuple[Any, str, Any]] = [
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "get_device_capability", lambda *_: divmod(capability, 10)),
        (torch.cuda, "get_device_properties", lambda *_: properties),
        (torch.cuda, "is_tf32_supported", lambda *_: True),
        (torch.cuda, "get_rng_state", lambda *_: torch.empty(0)),
        (torch.cuda, "set_rng_state", lambda *_: None),
        (torch.cuda, "_exchange_device", lambda *_: 0),
        (torch.cuda, "_maybe_exchange_device", lambda *_: 0),
        (CudaInterface, "get_device_properties", staticmethod(lambda *_: properties)),
        (torch.utils._triton, "triton_hash_with_backend", lambda *_: ""),
        (triton.runtime.driver, "_active", _Driver(capability)),
        (scheduler, "has_triton", lambda: True),
        (triton_helpers, "set_driver_to_gpu", lambda: None),
        (joint_graph, "lazy_init", lambda *_: None),  # traces Inductor's own attention patterns on the device
    ]
    if hasattr(fake_tensor, "init_gpu_context"):  # torch 2.11 allocates on the device before there are fake tensors
        replaced.append((fake_tensor, "init_gpu_context", lambda *_: None))
    with contextlib.ExitStack() as stack:
        for place, name, value in replaced:
            stack.enter_context(mock.patch.object(place, name, value))
        yield


@dataclass(frozen=True)
class Lowered:
    """One graph as Inductor's Python: the whole text, and of each Triton kernel in it the function and its text."""

    code: str
    kernels: dict[str, tuple[str, str]]

    @property
    def calls(self) -> list[tuple[str, list[str]]]:
        """Each launch: the kernel, and the arguments as they are written."""
        matches = re.findall(r"^ *(\w+)\.run\((.*)\)$", self.code, re.MULTILINE)
        calls = [ast.parse(f"f({arguments})", mode="eval").body for _, arguments in matches]
        return [(name, [ast.unparse(a) for a in call.args]) for (name, _), call in zip(matches, calls)]  # type: ignore[attr-defined]

    @property
    def allocated(self) -> list[str]:
        """The dtype and sizes of each buffer that is allocated."""
        return re.findall(r"empty_strided_cuda\((\(.*?\)), \(.*?\), torch\.(\w+)\)", self.code)


def _texts(call: ast.Call) -> tuple[str, str]:
    name, text = (ast.literal_eval(argument) for argument in call.args)
    return name, text


class _Written(Exception):
    """Inductor has written its code, which is not run."""


@contextlib.contextmanager
def _written(graphs: list[Lowered]) -> Iterator[None]:
    def write(graph: GraphLowering) -> Any:
        made: Any = graph.codegen()[0]
        code = made if isinstance(made, str) else made.value
        kernels = {}
        for statement in ast.parse(code).body:
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
                if ast.unparse(statement.value.func) == "async_compile.triton":
                    assert isinstance(statement.targets[0], ast.Name)
                    kernels[statement.targets[0].id] = _texts(statement.value)
        graphs.append(Lowered(code, kernels))
        raise _Written

    with mock.patch.object(GraphLowering, "_compile_to_module", write):
        yield


def _reset(stack: contextlib.ExitStack) -> None:
    torch._dynamo.reset()
    stack.enter_context(torch._inductor.config.patch(fx_graph_cache=False))
    stack.enter_context(FakeTensorMode())


def lowered(
    capability: int, fn: Callable[..., Any], make: Callable[[], Sequence[torch.Tensor]], backend: Any = None
) -> Lowered:
    """What Inductor writes for a function of tensors on that GPU; ``make`` makes them, fake ones.

    ``backend``: for torch.compile, given a backend that compiles with Inductor; by default that one.
    """
    from torch._inductor.compile_fx import compile_fx

    kernels: list[Lowered] = []

    def on_gpu(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        with _a_gpu(capability), _written(kernels):
            return (backend(compile_fx) if backend is not None else compile_fx)(gm, inputs)

    with contextlib.ExitStack() as stack:
        # Dynamo would save the state of the random numbers of a GPU that is available: it is there when Inductor runs.
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_properties", lambda *_: _properties(capability)))
        stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context", lambda *_: None, create=True))
        _reset(stack)
        stack.enter_context(torch.no_grad())
        inputs = make()
        try:
            torch.compile(fn, backend=on_gpu, fullgraph=True)(*inputs)
        except Exception:
            if not kernels:
                raise
    return kernels[0]


def lowered_graphs(
    capability: int, fn: Callable[..., Any], make: Callable[[], Sequence[torch.Tensor]], backend: Any
) -> list[Lowered]:
    """What Inductor writes on that GPU for a function's forward, and for its backward where an input wants gradients.

    A torch that was not built for CUDA computes no gradient there, and refuses ``~x`` and ``x[None]`` of fake tensors.
    So ``make`` makes fake ones on the CPU, and the graphs that AOTAutograd makes of them move to the GPU on their way
    to Inductor's ``GraphLowering``.
    """
    from torch._inductor.compile_fx import compile_fx, record_original_output_strides

    kernels: list[Lowered] = []

    def inner(gm: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        fakes = on_gpu(inputs)
        inference, backward = options.get("is_inference", False), options.get("is_backward", False)
        with _a_gpu(capability), _written(kernels), contextlib.suppress(_Written):
            moved = _moved(gm)
            record_original_output_strides(moved)
            graph = GraphLowering(moved, example_inputs=fakes, is_inference=inference, is_backward=backward)
            with V.set_graph_handler(graph), DebugContext():
                graph.run(*fakes)
                graph.compile_to_module()
        return _not_run

    def on_cpu(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return backend(partial(compile_fx, inner_compile=inner))(gm, inputs)

    with contextlib.ExitStack() as stack:
        _reset(stack)
        stack.enter_context(torch._functorch.config.patch(force_non_lazy_backward_lowering=True))
        stack.enter_context(contextlib.suppress(_Written))
        torch.compile(fn, backend=on_cpu, fullgraph=True)(*make())
    return kernels


def _not_run(*_: Any) -> Any:
    raise _Written


def _moved(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy of a graph of AOTAutograd's and of the graphs in it, on the GPU."""
    moved = copy.deepcopy(gm)
    for module in moved.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
            if "val" in node.meta:
                node.meta["val"] = on_gpu(node.meta["val"])
        if isinstance(module, torch.fx.GraphModule):
            module.recompile()
    return moved


def on_gpu(value: Any) -> Any:
    """A fake tensor like this one, or a list of them, on the GPU."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
    return type(value)(map(on_gpu, value)) if isinstance(value, (tuple, list)) else value


def compiled(capability: int, function: str, text: str) -> list[dict[str, Any]]:
    """A kernel down to machine code, as Inductor compiles it, and what is to be known of it; one for each config."""
    by_driver = mock.patch.object(triton_heuristics.StaticTritonCompileResult, "can_statically_launch", lambda *_: None)
    with _a_gpu(capability), by_driver:  # the other way to launch keeps no text
        kernel = getattr(PyCodeCache.load(text), function)
        assert isinstance(kernel, triton_heuristics.CachingAutotuner)
        binaries = [kernel._precompile_config(config).kernel for config in kernel.configs]
    return [_facts(function, kernel.triton_meta, binary) for binary in binaries]


def _facts(function: str, meta: dict[str, Any], binary: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", usage)
    assert registers is not None, usage
    return {
        "function": function,
        "signature": dict(meta["signature"]),
        "constants": {str(name): value for name, value in meta["constants"].items()},
        "stages": binary.metadata.num_stages,
        "shared": binary.metadata.shared,
        "spilled": int(registers[2]) + int(registers[3]),
        "ptx": binary.asm["ptx"],
    }
