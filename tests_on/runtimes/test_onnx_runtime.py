"""ONNX Runtime on its CPU provider: `attn_pass.rewrite(program, runtime="onnx")`, torch.onnx.export, the results.

`make test-runtimes` runs it, in an environment with onnx, onnxscript and onnxruntime.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from exported_programs import PROGRAMS, Exported
from torch import Tensor
from whole_models import MODELS, Model

ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import attn_pass  # noqa: E402


def session(exported: Any, folder: Path) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    exported.save(folder / "model.onnx")
    return ort.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])


def run(exported: Any, inputs: tuple[Tensor, ...], folder: Path) -> Tensor:
    loaded = session(exported, folder)
    fed = {given.name: x.numpy() for given, x in zip(loaded.get_inputs(), inputs, strict=True)}
    return torch.from_numpy(loaded.run(None, fed)[0])


def to_onnx(program: torch.export.ExportedProgram, **settings: Any) -> Any:
    return torch.onnx.export(program, opset_version=23, dynamo=True, verbose=False, **settings)


def operators(exported: Any) -> Counter[str]:
    return Counter(node.op_type for node in exported.model.graph)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_as_one_node(name: str, tmp_path: Path) -> None:
    case: Exported = PROGRAMS[name]
    program = case.program()
    attn_pass.rewrite(program, runtime="onnx", on_error="raise")
    exported = to_onnx(program)
    found = operators(exported)
    assert (found["Attention"], found["Softmax"]) == (1, 0), found
    if case.grouped:
        (node,) = (node for node in exported.model.graph if node.op_type == "Attention")
        heads, given = (x.shape[0] * x.shape[1] for x in (node.inputs[1], case.inputs[1]))
        assert heads == given, "keys and values are not repeated"
    torch.testing.assert_close(run(exported, case.inputs, tmp_path), case.function(*case.inputs))


def test_stock_fails_where_the_mask_has_one_row_for_all(tmp_path: Path) -> None:
    """Why masks are expanded; once this runs, `broadcasts_masks` of the runtime may go."""
    case = PROGRAMS["torch's call with padding"]
    with pytest.raises(Exception, match="inconsistent q_sequence_length"):
        run(to_onnx(case.program()), case.inputs, tmp_path)


def test_sizes_that_are_not_known(tmp_path: Path) -> None:
    case = PROGRAMS["padding"]
    length, batch = torch.export.Dim("length", min=2), torch.export.Dim("batch")
    sizes = {0: batch, 2: length}
    program = case.program(dynamic_shapes={"inputs": (sizes, sizes, sizes, {0: batch, 1: length})})
    attn_pass.rewrite(program, runtime="onnx", on_error="raise")
    exported = to_onnx(program)
    assert operators(exported)["Attention"] == 1
    loaded = session(exported, tmp_path)
    for b, n in ((2, 7), (3, 13), (1, 2)):
        q, k, v = (torch.randn(b, 4, n, 16) for _ in range(3))
        inputs = (q, k, v, torch.arange(n) < torch.arange(1, b + 1)[:, None])
        got = loaded.run(None, {g.name: x.numpy() for g, x in zip(loaded.get_inputs(), inputs, strict=True)})[0]
        torch.testing.assert_close(torch.from_numpy(got), case.function(*inputs))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers(name: str, tmp_path: Path) -> None:
    model: Model = MODELS[name]
    module, inputs = model.made()
    with torch.no_grad():
        expected = module(**inputs)[0]
    program = torch.export.export(module, (), inputs)
    report = attn_pass.rewrite(program, runtime="onnx", on_error="raise")
    assert len(report.rewritten) == model.sites
    exported = to_onnx(program, kwargs=inputs)
    found = operators(exported)
    assert (found["Attention"], found["Softmax"]) == (model.sites, 0)
    got = run(exported, tuple(inputs.values()), tmp_path)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
