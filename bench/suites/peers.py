"""Whole models beside other systems: `make bench-peers`, or `python -m bench peers` where they are installed.

The models of `python -m bench models`, and in each, beside eager, stock Inductor and the pass, frozen or not, and as
frozen packages: zentorch with ``freezing``, as its documentation asks; ONNX Runtime as it is and with its attention
fusion; OpenVINO. The same number of threads, the same inputs. In float32, and in bfloat16 where the peer computes in
it: OpenVINO is given the weights in float32 and computes in bfloat16, as it does by default where the processor can.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attn_pass.measuring.timing import compiled
from bench.harness import variants as w
from bench.harness.programs import Extra, Program, Setting, Tensors, doubled
from bench.suites import models

TITLE = "Whole models beside other systems"
ORT, ORT_FUSED, OPENVINO = "ONNX Runtime", "ONNX Runtime, attention fusion", "OpenVINO"
OPENVINO_AGAIN = "OpenVINO (A/A)"
ZENTORCH = "compile, zentorch, frozen"
WAYS = (w.EAGER, w.STOCK, w.STOCK_AGAIN, w.PASS, *w.FROZEN, *w.PACKAGED_FROZEN)
"""Of every program; a program's peers are its own variants."""
TOO_LARGE = ("Llama, 4 layers, 32/8 heads, 1 x 2048", "Llama, 4 layers, 32/8 heads, 1 x 2048, SDPA")
"""Programs in float32 of 1.5 GB of weights, of which each system packs a copy: with all ways in 24 GiB they end."""


def _zentorch(module: nn.Module, inputs: Tensors, folder: Path) -> Callable[..., Any]:
    """AMD's plug-in, whose backend is Inductor with operators of ZenDNN; it computes without gradients alone.

    It is given a copy: it packs weights where they lie, and the model itself gives other numbers afterwards (2.13.0.2).
    """
    import zentorch  # noqa: F401, it registers its backend

    return w.frozen(compiled(copy.deepcopy(module), backend="zentorch"), inputs)


def onnx_file(module: nn.Module, inputs: Tensors, folder: Path) -> Path:
    """The model exported to ONNX, once for a folder."""
    path = folder / "model.onnx"
    if not path.exists():
        with contextlib.redirect_stdout(io.StringIO()):  # the exporter prints its progress
            program: Any = torch.onnx.export(module, inputs, dynamo=True, optimize=True)
            program.save(str(path), external_data=True)
    return path


def session_of(model: Path | bytes, profiled: bool = False, severity: int = 3) -> Any:
    """A model in ONNX Runtime, on as many threads as torch has; one that is profiled writes a file beside its own."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = severity
    if isinstance(model, Path):
        options.enable_profiling = profiled
        options.profile_file_prefix = str(model.with_suffix(""))
    given = str(model) if isinstance(model, Path) else model
    return onnxruntime.InferenceSession(given, options, providers=["CPUExecutionProvider"])


def called(session: Any) -> Callable[..., Any]:
    """A session as a function of tensors."""
    names = [given.name for given in session.get_inputs()]

    def run(*tensors: torch.Tensor) -> Tensors:
        return _tensors(session.run(None, dict(zip(names, (x.numpy() for x in tensors), strict=True))))

    return run


def _tensors(results: Iterable[Any]) -> Tensors:
    return tuple(torch.from_numpy(x) for x in results)


def in_onnx_runtime(module: nn.Module, inputs: Tensors, folder: Path) -> Callable[..., Any]:
    """The model exported to ONNX, in ONNX Runtime."""
    return called(session_of(onnx_file(module, inputs, folder)))


def _onnx_runtime_fused(module: nn.Module, inputs: Tensors, folder: Path) -> Callable[..., Any]:
    """With the fusions of onnxscript: those of `onnxruntime.transformers` find nothing in what torch exports now."""
    from onnxscript import ir
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    model, _ = optimize_for_ort(ir.load(onnx_file(module, inputs, folder)))
    path = folder / "fused.onnx"
    ir.save(model, path, external_data="fused.data")
    fused = Counter(node.op_type for node in model.graph if "Attention" in node.op_type)
    run = called(session_of(path))
    run.took = ", ".join(f"{count} {name}" for name, count in fused.items()) or "no attention fused"  # type: ignore[attr-defined]
    return run


def in_openvino(module: nn.Module, inputs: Tensors, folder: Path, precision: str = "f32") -> Callable[..., Any]:
    """The model exported to ONNX, in OpenVINO, which may compute in this precision."""
    import openvino

    return openvino_model(openvino.Core().read_model(onnx_file(module, inputs, folder)), precision)


def openvino_in_bfloat16(module: nn.Module, inputs: Tensors, folder: Path) -> Callable[..., Any]:
    """The same for a model in bfloat16, exported in float32: NumPy, by which it is called, has no bfloat16."""
    run = in_openvino(copy.deepcopy(module).float(), doubled(inputs, torch.float32), folder, "bf16")

    def widened(*tensors: torch.Tensor) -> Tensors:
        results: Tensors = run(*doubled(tensors, torch.float32))
        return results

    widened.took = run.took  # type: ignore[attr-defined]
    return widened


def openvino_model(converted: Any, precision: str = "f32") -> Callable[..., Any]:
    """A model in OpenVINO, as a function of tensors."""
    model = compiled_by_openvino(converted, precision)
    kinds = [str(node.get_rt_info()["layerType"].value) for node in model.get_runtime_model().get_ops()]

    def run(*tensors: torch.Tensor) -> Tensors:
        # Without copies of its own: a result is read before the next call.
        return _tensors(model([x.numpy() for x in tensors], share_inputs=True, share_outputs=True).to_tuple())

    # Its CPU plugin fuses attention into a subgraph of its own, whose inside it does not tell.
    run.took = f"{kinds.count('Softmax')} softmaxes left, {kinds.count('Subgraph')} subgraphs"  # type: ignore[attr-defined]
    return run


def compiled_by_openvino(converted: Any, precision: str = "f32", profiled: bool = False) -> Any:
    """A model in OpenVINO, on as many threads as torch has."""
    import openvino

    # By default it may compute in bfloat16 where the processor has it.
    settings = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    return openvino.Core().compile_model(converted, "CPU", {**settings, "PERF_COUNT": profiled})


def peers_of(dtype: torch.dtype) -> dict[str, Extra]:
    """The peers that compute in this dtype; zentorch where it is installed, which it is for few processors."""
    peers: dict[str, Extra] = {} if find_spec("zentorch") is None else {ZENTORCH: _zentorch}
    if dtype == torch.float32:
        peers |= {ORT: in_onnx_runtime, ORT_FUSED: _onnx_runtime_fused}
    in_dtype = in_openvino if dtype == torch.float32 else openvino_in_bfloat16
    return peers | {OPENVINO: in_dtype, OPENVINO_AGAIN: in_dtype}


def programs(setting: Setting) -> list[Program]:
    """Those of `bench models` in float32 and in bfloat16."""
    own = (program for program in models.programs(setting) if not program.name.endswith(models.AUTOCAST))
    return [
        replace(
            program,
            extra=peers_of(program.dtype or torch.float32),
            without=(*w.PACKAGED_FROZEN, ORT_FUSED) if program.name in TOO_LARGE else (),
        )
        for program in own
    ]
