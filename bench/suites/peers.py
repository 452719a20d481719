"""Peers on three whole models: `make bench-peers`, or `python -m bench peers [--json FILE]` where they are installed.

Stock Inductor with and without its patterns, with ``freezing``, the library's own SDPA and FlexAttention under stock
Inductor; zentorch, with ``freezing`` and without it; ONNX Runtime as it is, with its attention fusion and after
`attn_pass.rewrite`; OpenVINO as it is and after it. All on the model with attention written out, but for the two of
the library. The same number of threads, the same inputs. In float32, and in bfloat16 where the peer computes in it:
OpenVINO is given the weights in float32 and computes in bfloat16, as it does by default where the processor can.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

import attn_pass
from attn_pass.measuring.timing import compiled
from bench.harness import variants as w
from bench.harness.programs import Built, Extra, Program, Setting, Tensors, doubled
from bench.suites.models import TOLERANCES, bert, gpt2_body, made, small_bert, vit

TITLE = "Peers on whole models"
SDPA, FLEX = "compile, stock, the library's SDPA", "compile, stock, the library's FlexAttention"
ORT, ORT_FUSED, OPENVINO = "ONNX Runtime", "ONNX Runtime, attention fusion", "OpenVINO"
ORT_PASS, OPENVINO_PASS = "attn_pass, then ONNX Runtime", "attn_pass, then OpenVINO"
ZENTORCH, ZENTORCH_FROZEN = "compile, zentorch", "compile, zentorch, frozen"
WAYS = (w.EAGER, w.STOCK, w.STOCK_AGAIN, w.NO_PATTERNS, w.PASS, *w.FROZEN)
"""Of every program; a program's peers are its own variants."""
PEERS: Mapping[str, Callable[..., Built]] = {
    "BERT base, 4 x 384, padded": partial(bert, batch=4, length=384),
    "GPT-2 small, 1 x 1024": gpt2_body,
    "ViT-B/16, 8 x 197": vit,
}
QUICK: Mapping[str, Callable[..., Built]] = {"BERT, 2 layers, 2 x 128, padded": small_bert}


def _library(
    make: Callable[..., Built], attention: str, module: nn.Module, inputs: Tensors, folder: Path
) -> Callable[..., Any]:
    return compiled(made(partial(make, attention), next(module.parameters()).dtype)[0])


def _zentorch(module: nn.Module, inputs: Tensors, folder: Path, *, freezing: bool) -> Callable[..., Any]:
    """AMD's plug-in, whose backend is Inductor with operators of ZenDNN; it computes without gradients alone."""
    import zentorch  # noqa: F401, it registers its backend

    run = compiled(module, backend="zentorch")
    return w.frozen(run, inputs) if freezing else run


def _exported(module: nn.Module, inputs: Tensors) -> Any:
    # The exporter prints its progress.
    with contextlib.redirect_stdout(io.StringIO()):
        return torch.onnx.export(module, inputs, dynamo=True, optimize=True)


def _onnx(module: nn.Module, inputs: Tensors, folder: Path) -> Path:
    path = folder / "model.onnx"
    if not path.exists():
        _exported(module, inputs).save(str(path), external_data=True)
    return path


def _rewritten(module: nn.Module, inputs: Tensors, runtime: str) -> tuple[Any, str]:
    """The exported program with its attention as the runtime takes it, and what became of it."""
    program = torch.export.export(module, inputs)
    report = attn_pass.rewrite(program, runtime=runtime)
    return program, f"{len(report.rewritten)} of {len(report.sites)} sites"


def _onnx_runtime_after_pass(module: nn.Module, inputs: Tensors, folder: Path) -> Callable[..., Any]:
    program, took = _rewritten(module, inputs, "onnx")
    path = folder / "rewritten.onnx"
    with contextlib.redirect_stdout(io.StringIO()):
        torch.onnx.export(program, opset_version=23, dynamo=True).save(str(path), external_data=True)
    run = in_session(path)
    run.took = took  # type: ignore[attr-defined]
    return run


def in_session(path: Path) -> Callable[..., Any]:
    """A file in ONNX Runtime, on as many threads as torch has."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        result = session.run(None, dict(zip(names, (x.numpy() for x in tensors), strict=True)))
        return torch.from_numpy(result[0])

    return run


def in_onnx_runtime(module: nn.Module, inputs: Tensors, folder: Path) -> Callable[..., Any]:
    """The model exported to ONNX, in ONNX Runtime."""
    return in_session(_onnx(module, inputs, folder))


def _onnx_runtime_fused(module: nn.Module, inputs: Tensors, folder: Path) -> Callable[..., Any]:
    """With the fusions of onnxscript: those of `onnxruntime.transformers` find nothing in what torch exports now."""
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    program = _exported(module, inputs)
    program.model, _ = optimize_for_ort(program.model)
    path = folder / "fused.onnx"
    program.save(str(path), external_data=True)
    fused = Counter(node.op_type for node in program.model.graph if "Attention" in node.op_type)
    run = in_session(path)
    run.took = _listed(fused) or "no attention fused"  # type: ignore[attr-defined]
    return run


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def in_openvino(module: nn.Module, inputs: Tensors, folder: Path, precision: str = "f32") -> Callable[..., Any]:
    """The model exported to ONNX, in OpenVINO, which may compute in this precision."""
    import openvino

    return openvino_model(openvino.Core().read_model(_onnx(module, inputs, folder)), "", precision)


def openvino_in_bfloat16(module: nn.Module, inputs: Tensors, folder: Path) -> Callable[..., Any]:
    """The same for a model in bfloat16, exported in float32: NumPy, by which it is called, has no bfloat16."""
    run = in_openvino(copy.deepcopy(module).float(), doubled(inputs, torch.float32), folder, "bf16")

    def widened(*tensors: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = run(*doubled(tensors, torch.float32))
        return result

    widened.took = run.took  # type: ignore[attr-defined]
    return widened


def _openvino_after_pass(module: nn.Module, inputs: Tensors, folder: Path) -> Callable[..., Any]:
    import openvino

    program, took = _rewritten(module, inputs, "openvino")
    return openvino_model(openvino.convert_model(program), f"{took}, ")


def openvino_model(converted: Any, took: str, precision: str = "f32") -> Callable[..., Any]:
    """A model in OpenVINO, on as many threads as torch has; ``took`` begins what is told of it."""
    import openvino

    core = openvino.Core()
    # By default it may compute in bfloat16 where the processor has it.
    settings = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    model = core.compile_model(converted, "CPU", settings)
    kinds = [str(node.get_rt_info()["layerType"].value) for node in model.get_runtime_model().get_ops()]

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(model([x.numpy() for x in tensors])[0])

    # Its CPU plugin fuses attention into a subgraph of its own, whose inside it does not tell.
    run.took = f"{took}{kinds.count('Softmax')} softmaxes left, {kinds.count('Subgraph')} subgraphs"  # type: ignore[attr-defined]
    return run


def _extra(make: Callable[..., Built], dtype: torch.dtype) -> dict[str, Extra]:
    """The peers that compute in this dtype; zentorch where it is installed, which it is for few processors."""
    peers: dict[str, Extra] = {SDPA: partial(_library, make, "sdpa"), FLEX: partial(_library, make, "flex_attention")}
    if find_spec("zentorch") is not None:
        peers |= {ZENTORCH: partial(_zentorch, freezing=False), ZENTORCH_FROZEN: partial(_zentorch, freezing=True)}
    if dtype == torch.float32:
        peers |= {ORT: in_onnx_runtime, ORT_FUSED: _onnx_runtime_fused, ORT_PASS: _onnx_runtime_after_pass}
        return peers | {OPENVINO: in_openvino, OPENVINO_PASS: _openvino_after_pass}
    return peers | {OPENVINO: openvino_in_bfloat16}


def programs(setting: Setting) -> list[Program]:
    """BERT, GPT-2 and ViT at real sizes, in float32 and in bfloat16; a small BERT in quick runs."""
    return [
        Program(
            name if dtype == torch.float32 else f"{name}, bfloat16",
            partial(made, make, dtype),
            dtype=dtype,
            tolerance=tolerance,
            extra=_extra(make, dtype),
        )
        for dtype, tolerance in TOLERANCES.items()
        for name, make in (QUICK if setting.quick else PEERS).items()
    ]
