"""AOTInductor for a GPU that is not present: its C++ that launches Triton's kernels, and what these take.

For a process of its own, as `faked_gpu`. The kernels are compiled and neither loaded nor run, and no C++ is compiled.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from faked_gpu import CUOBJDUMP, _a_gpu
from torch._inductor.codecache import AotCodeCompiler
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.select_algorithm import AlgorithmSelectorCache
from torch._subclasses import FakeTensorMode, fake_tensor
from triton.compiler import CompiledKernel

_BYTES = {"CUdeviceptr": 8, "double": 8, "float": 4, "int64_t": 8, "int32_t": 4}
_LAUNCH = re.compile(r"^static [^\n]*\bvoid call_(\w+)\(.*?^\}$", re.MULTILINE | re.DOTALL)


class _Written(Exception):
    """AOTInductor has written its C++, which is not compiled."""


def packaged(
    fn: Callable[..., Any], make: Callable[[], Sequence[torch.Tensor]], dynamic_shapes: Any, capability: int = 90
) -> dict[str, Any]:
    """By the name of each launch the bytes of each argument it hands over, and of each parameter of the kernel."""
    sources: list[str] = []
    binaries: dict[str, bytes] = {}

    def compiled(autotuner: CachingAutotuner, *_: Any, **__: Any) -> None:
        """In place of a run at compile time."""
        (config,) = autotuner.configs or [result.config for result in autotuner.compile_results]
        launcher = autotuner._precompile_config(config).make_launcher()
        autotuner.save_gpu_kernel(0, launcher)
        binaries[autotuner.inductor_meta["kernel_name"]] = launcher.bin.asm["cubin"]

    def written(*texts: Any, **_: Any) -> Any:
        sources.extend(text for text in texts if isinstance(text, str))
        raise _Written

    def example(size: Sequence[int], stride: Sequence[int], _: Any, dtype: torch.dtype, *__: Any) -> torch.Tensor:
        """In place of an input on the GPU, which Inductor makes views of (since 2.15)."""
        return torch.empty_strided(size, stride, dtype=dtype, device="meta")

    def loaded(kernel: CompiledKernel) -> None:
        kernel.module = kernel.function = None
        kernel._run = kernel.n_regs = kernel.n_spills = 0

    class Module(torch.nn.Module):
        def forward(self, *inputs: torch.Tensor) -> Any:
            return fn(*inputs)

    replaced: list[tuple[Any, str, Any]] = [
        (torch._C, "_cuda_getCurrentRawStream", lambda *_: 0),
        (torch.cuda, "_DeviceGuard", lambda *_: contextlib.nullcontext()),
        (AlgorithmSelectorCache, "generate_example_value", staticmethod(example)),
        (CachingAutotuner, "_make_launchers", lambda *_: None),
        (CachingAutotuner, "run", compiled),
        (CompiledKernel, "_init_handles", loaded),
        (AotCodeCompiler, "compile", written),
        (fake_tensor, "init_gpu_context", lambda *_: None),
    ]
    with contextlib.ExitStack() as stack:
        for place, name, value in replaced:
            stack.enter_context(mock.patch.object(place, name, value, create=True))
        stack.enter_context(_a_gpu(capability))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._inductor.config.patch(compile_threads=1, fx_graph_cache=False))
        with FakeTensorMode(allow_non_fake_inputs=True):
            program = torch.export.export(Module(), tuple(make()), dynamic_shapes=(dynamic_shapes,))
        try:
            torch._inductor.aoti_compile_and_package(program)
        except Exception:
            if not sources:
                raise
    code = re.sub(r"/\*.*?\*/", "", "\n".join(sources), flags=re.DOTALL)
    return {
        launch[1]: {"given": _given(launch[0]), "taken": _taken(binaries[launch[1]])}
        for launch in _LAUNCH.finditer(code)
    }


def _given(launch: str) -> list[int | str]:
    """The bytes of each variable in the array of arguments; a type of no known size by its name."""
    array = re.search(r"void\* kernel_args_\[\] = \{(.*?)\};", launch)
    assert array is not None, launch
    types = {name: kind for kind, name in re.findall(r"^\s*(\w+) (\w+) = ", launch, re.MULTILINE)}
    kinds = [types[argument.strip().removeprefix("&")] for argument in array[1].split(",")]
    return [_BYTES.get(kind, kind) for kind in kinds]


def _taken(binary: bytes) -> list[int]:
    """The bytes of each of the kernel's parameters, as the driver reads them from the binary."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(binary)
        text = subprocess.run([CUOBJDUMP, "-elf", file], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"Ordinal\s*:\s*0x(\w+)\s+Offset\s*:\s*0x\w+\s+Size\s*:\s*0x(\w+)", text)
    sizes = {int(ordinal, 16): int(size, 16) for ordinal, size in found}
    return [sizes[n] for n in range(len(sizes))]
