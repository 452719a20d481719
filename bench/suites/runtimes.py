"""Whole models in other runtimes, as they are exported and after the pass: `python -m bench runtimes [--json FILE]`.

ONNX Runtime and OpenVINO on the CPU, those that are installed. Both ways of a runtime begin with torch.export and end
in the same exporter; the pass rewrites the program in between. Models have attention written out, real widths and
lengths, and few layers, because all of a model's layers are alike. Speedups are against the same runtime without the
pass.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

import attn_pass
from bench.harness import variants as w
from bench.harness.programs import Built, Extra, Program, Setting, Tensors
from bench.suites import models
from bench.suites.peers import called, openvino_model, session_of
from bench.suites.zoo import Called, library, tokens

TITLE = "Whole models in other runtimes"
WAYS = (w.EAGER,)
LAYERS = 4


def _llama(length: int = 1024) -> Built:
    sizes = {**models.LLAMA, "num_hidden_layers": 2, "vocab_size": 8192}
    model = library("LlamaModel", "LlamaConfig", "eager", **sizes)
    return Called(model, "input_ids", use_cache=False), (tokens(1, length, model.config.vocab_size),)


MODELS: Mapping[str, Callable[[], Built]] = {
    "BERT base, 4 x 384, padded": partial(models.bert, batch=4, length=384, num_hidden_layers=LAYERS),
    "GPT-2 small, 1 x 1024": partial(models.gpt2_body, n_layer=LAYERS),
    "ViT-B/16, 8 x 197": partial(models.vit, num_hidden_layers=LAYERS),
    "T5 base encoder, 1 x 512": partial(models.t5_encoder, num_layers=LAYERS),
    "Whisper small encoder, 1 x 1500": partial(models.whisper_encoder, encoder_layers=LAYERS),
    "Llama, 32/8 heads, 1 x 1024": _llama,
}
QUICK: Mapping[str, Callable[[], Built]] = {
    "BERT, 2 layers, 2 x 128, padded": models.small_bert,
    "GPT-2, 2 layers, 1 x 128": partial(models.gpt2_body, length=128, n_embd=128, n_layer=2, n_head=4),
}


def _translated(
    runtime: str, run: Callable[[ExportedProgram, Path], Any], module: nn.Module, inputs: Tensors, to: Path
) -> Callable[..., Any]:
    """The exported program as it runs, rewritten for the runtime if one is named; ``took`` tells what became of it."""
    program = torch.export.export(module, inputs)
    took = ""
    if runtime:
        report = attn_pass.rewrite(program, runtime=runtime)
        kinds = ", ".join(sorted({str(site.target) for site in report.rewritten}))
        took = f"{len(report.rewritten)} of {len(report.sites)} sites: {kinds}"
    with contextlib.redirect_stdout(io.StringIO()):  # exporters print their progress
        made = run(program, to)
    made.took = ", ".join(filter(None, (took, getattr(made, "took", ""))))
    return made  # type: ignore[no-any-return]


def _onnx_runtime(program: ExportedProgram, to: Path) -> Any:
    path = to / f"{len(list(to.glob('*.onnx')))}.onnx"
    torch.onnx.export(program, opset_version=23, dynamo=True).save(str(path), external_data=True)  # type: ignore[union-attr]
    return called(session_of(path))


def _openvino(program: ExportedProgram, to: Path) -> Any:
    import openvino

    return openvino_model(openvino.convert_model(program))


_INSTALLED = (
    ("onnxruntime", (w.IN_ORT, w.IN_ORT_AGAIN), w.IN_ORT_PASS, "onnx", _onnx_runtime),
    ("openvino", (w.IN_OPENVINO, w.IN_OPENVINO_AGAIN), w.IN_OPENVINO_PASS, "openvino", _openvino),
)


def _ways() -> dict[str, Extra]:
    """As exported, twice, and after the pass, in each runtime that is installed."""
    ways: dict[str, Extra] = {}
    for package, stock, rewritten, runtime, run in _INSTALLED:
        if find_spec(package) is not None:
            ways |= {way: partial(_translated, "", run) for way in stock}
            ways[rewritten] = partial(_translated, runtime, run)
    return ways


def programs(setting: Setting) -> list[Program]:
    """Six models at real sizes; two small ones in quick runs."""
    return [
        Program(
            name,
            partial(models.made, make, torch.float32),
            tolerance=models.TOLERANCES[torch.float32],
            float64="Llama" not in name,
            extra=_ways(),
        )
        for name, make in (QUICK if setting.quick else MODELS).items()
    ]
