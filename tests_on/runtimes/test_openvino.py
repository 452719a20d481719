"""OpenVINO on the CPU: `attn_pass.rewrite(program, runtime="openvino")`, openvino.convert_model, the results.

`make test-runtimes` runs it, in an environment with openvino.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from exported_programs import PROGRAMS, Exported
from torch import Tensor
from whole_models import MODELS, Model

ov = pytest.importorskip("openvino")

import attn_pass  # noqa: E402

PRECISION = {"INFERENCE_PRECISION_HINT": "f32"}  # bfloat16 otherwise, on processors that have it
OPERATOR = "ScaledDotProductAttention"


def converted(program: torch.export.ExportedProgram) -> tuple[Any, Counter[str]]:
    model = ov.convert_model(program)
    return model, Counter(node.get_type_name() for node in model.get_ops())


def run(model: Any, inputs: tuple[Tensor, ...]) -> Tensor:
    compiled = ov.Core().compile_model(model, "CPU", PRECISION)
    return torch.from_numpy(compiled([x.numpy() for x in inputs])[0].copy())


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_as_its_operator(name: str) -> None:
    case: Exported = PROGRAMS[name]
    program = case.program()
    report = attn_pass.rewrite(program, runtime="openvino", on_error="raise")
    model, found = converted(program)
    if report.rewritten:
        assert (found[OPERATOR], found["Softmax"]) == (1, 0)
    torch.testing.assert_close(run(model, case.inputs), case.function(*case.inputs))


def test_one_row_stays_where_products_are_faster() -> None:
    program = PROGRAMS["one row, grouped heads"].program()
    (site,) = attn_pass.rewrite(program, runtime="openvino").sites
    assert site.outcome == "left" and site.predicted_us["leave"] < min(
        t for name, t in site.predicted_us.items() if name != "leave"
    )


def test_stock_fails_with_grouped_heads() -> None:
    """Why they are packed into rows; once this runs, `groups_rule` of the runtime may go."""
    case = PROGRAMS["torch's call with grouped heads"]
    with pytest.raises(Exception, match="batch dimension"):
        run(converted(case.program())[0], case.inputs)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers(name: str) -> None:
    model: Model = MODELS[name]
    module, inputs = model.made()
    with torch.no_grad():
        expected = module(**inputs)[0]
    program = torch.export.export(module, (), inputs)
    attn_pass.rewrite(program, runtime="openvino", on_error="raise")
    loaded, found = converted(program)
    assert (found[OPERATOR], found["Softmax"]) == (model.sites, 0)
    torch.testing.assert_close(run(loaded, tuple(inputs.values())), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["padding", "a sink, padding, grouped heads", "grouped heads"])
def test_the_backend_of_torch_compile(name: str) -> None:
    pytest.importorskip("openvino.torch")
    case = PROGRAMS[name]
    torch._dynamo.reset()
    with attn_pass.record() as report, torch.no_grad():
        settings = {"config": PRECISION}
        compiled = torch.compile(case.function, backend=attn_pass.wrap("openvino", choose="fused"), options=settings)
        got = compiled(*case.inputs)
    assert [site.rates["device"] for site in report.sites] == ["OpenVINO"] and len(report.rewritten) == 1
    torch.testing.assert_close(got, case.function(*case.inputs))
