"""Renders Inductor's Triton templates for what flex emits, and compiles them for an H200, without a GPU.

Prints, for each case and each kernel of it, the template and the shared memory it takes, as JSON. A process of its own:
torch is told of a GPU that is not there, on fake tensors alone. Written for torch 2.13.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from test_flex_cuda import CASES, masked, rewritten, softcap, window
from torch._functorch.aot_autograd import aot_module_simplified
from torch._inductor import select_algorithm
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

FAKE = FakeTensorMode(allow_non_fake_inputs=True)
H200: dict[str, Any] = {"index": 0, "multi_processor_count": 132, "cc": 90, "major": 9, "warp_size": 32}
H200 |= {"regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048}


class Sources:
    """In the place of Inductor's cache of kernels: keeps what it is given."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def load(self, code: str, extra: str = "", **_: Any) -> Any:
        self.found.append(code)
        return mock.MagicMock(__file__="kernel.py")


@contextlib.contextmanager
def a_gpu(sources: Sources) -> Iterator[None]:
    """As if torch had an H200."""
    properties = DeviceProperties(type="cuda", **H200)
    replaced: list[tuple[Any, str, Any]] = [
        (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        (torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(name="H200", gcnArchName="", **H200, minor=0)),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "is_tf32_supported", lambda *_: True),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "device_count", lambda: 1),
        (torch.utils._triton, "triton_hash_with_backend", lambda *_: ""),
        (DeviceProperties, "create", lambda *_: properties),
        (select_algorithm, "PyCodeCache", sources),
    ]
    with contextlib.ExitStack() as stack:
        for place, name, value in replaced:
            stack.enter_context(mock.patch.object(place, name, value))
        yield


def on_gpu(value: Any) -> Any:
    """A fake tensor like this one, on the GPU."""
    if isinstance(value, torch.Tensor):
        sizes, strides = (tuple(int(n) for n in x) for x in (value.shape, value.stride()))
        with FAKE:
            return torch.empty_strided(sizes, strides, dtype=value.dtype, device="cuda")
    return type(value)(map(on_gpu, value)) if isinstance(value, (tuple, list)) else value


def lower(gm: torch.fx.GraphModule, inputs: Sequence[Any], sources: Sources, grad: bool) -> None:
    """Lowers a graph of AOTAutograd's for the GPU, which renders the templates in it."""
    for module in gm.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
            node.args = tuple(
                {**a, "OUTPUT_LOGSUMEXP": grad} if isinstance(a, dict) and "PRESCALE_QK" in a else a for a in node.args
            )
            if "val" in node.meta:
                node.meta["val"] = on_gpu(node.meta["val"])
        module.recompile()
    fakes = [on_gpu(x) for x in inputs]
    with a_gpu(sources):
        graph = GraphLowering(gm, example_inputs=fakes, is_inference=not grad)
        with V.set_graph_handler(graph):
            graph.run(*fakes)


def rendered(fn: Callable[..., Any], inputs: Sequence[torch.Tensor], grad: bool) -> list[str]:
    """The kernels' texts, of the forward and of the backward."""
    leaves = [x.detach().requires_grad_(grad) if n < 3 and x.is_floating_point() else x for n, x in enumerate(inputs)]
    gm, _ = rewritten(fn, *leaves)
    sources, mode = Sources(), FakeTensorMode()
    with mode:
        held = [n.meta["example_value"] for n in gm.graph.nodes if n.op == "placeholder"]
        fakes = [torch.empty_strided(h.shape, h.stride(), dtype=h.dtype).requires_grad_(h.requires_grad) for h in held]

    def compiler(graph: torch.fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        traced = graph.forward
        lower(graph, given, sources, grad)
        return traced

    with mode, torch._guards.tracing(torch._guards.TracingContext(mode)):
        compiled = aot_module_simplified(
            gm, fakes, fw_compiler=_run_first(compiler), bw_compiler=compiler, decompositions=select_decomp_table()
        )
        out = compiled(*fakes)
        if grad:
            out = out if isinstance(out, torch.Tensor) else out[0]
            out.backward(torch.ones_like(out))
    return sources.found


def _run_first(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """A compiler whose result runs the graph as it was: what is lowered is another device's."""

    def compile_copy(graph: torch.fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        import copy

        compiler(copy.deepcopy(graph), given)
        return graph.forward

    return compile_copy


def compiled(text: str) -> dict[str, Any]:
    """The kernel compiled down to machine code."""
    kernels: list[tuple[Any, int, int, dict[str, Any]]] = []

    def template(num_stages: int, num_warps: int, triton_meta: dict[str, Any], **_: Any) -> Callable[[Any], Any]:
        def keep(kernel: Any) -> Any:
            kernels.append((kernel, num_stages, num_warps, triton_meta))
            return kernel

        return keep

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(triton_heuristics, "template", template):
        path = Path(folder) / "kernel.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location("kernel", path)
        assert spec is not None and spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
        ((kernel, stages, warps, meta),) = kernels
        source = ASTSource(kernel, meta["signature"], meta["constants"], meta["configs"][0])
        options = {"num_warps": warps, "num_stages": stages}
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert made.asm["cubin"]
    return {"template": kernel.fn.__name__, "shared": made.metadata.shared}


HALF = [x.to(torch.bfloat16) for x in CASES["window and soft cap"][1]]
RENDERED: dict[str, tuple[Callable[..., Any], Sequence[torch.Tensor], bool]] = {
    **{name: (*CASES[name], True) for name in ("window and soft cap", "prefix", "alibi", "documents", "grouped heads")},
    "one query": (*CASES["one query"], False),
    "dense bias": (*CASES["dense bias"], False),
    "odd sizes": (*CASES["odd sizes"], True),
    "half precision": (masked(window, cap=True), HALF, True),
    "few queries, half precision": (softcap, [HALF[0][:, :, :9], *HALF[1:]], False),
}

if __name__ == "__main__":
    found = {name: [compiled(text) for text in rendered(*case)] for name, case in RENDERED.items()}
    sys.stdout.write("\n" + json.dumps(found) + "\n")
