"""Torch-TensorRT's own check of every call that `attn_pass.rewrite(program, runtime="tensorrt")` writes.

TensorRT needs a GPU, and Torch-TensorRT does not import without it. So its converter's check is taken from its source;
nothing is converted. `make test-runtimes` runs it, in an environment with torch-tensorrt.
"""

from __future__ import annotations

import ast
import logging
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from exported_programs import PROGRAMS, Exported
from whole_models import MODELS

import attn_pass

CALL = torch.ops.aten.scaled_dot_product_attention.default
CHECK = "scaled_dot_product_attention_validator"
SPEC = find_spec("torch_tensorrt")
LEFT = "padding by -inf, zeros for a fully masked row"  # what TensorRT gives for such a row is not documented
pytestmark = pytest.mark.skipif(SPEC is None, reason="needs torch-tensorrt's sources")


def check() -> Callable[[torch.fx.Node], bool]:
    """The function by which the converter says whether it takes a call."""
    assert SPEC is not None and SPEC.origin is not None
    source = Path(SPEC.origin).parent / "dynamo" / "conversion" / "aten_ops_converters.py"
    tree = ast.parse(source.read_text())
    (function,) = (x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == CHECK)
    module = ast.parse("from __future__ import annotations")
    module.body.append(function)
    names: dict[str, Any] = {"_LOGGER": logging.getLogger(CHECK)}
    exec(compile(module, str(source), "exec"), names)
    return lambda node: names[CHECK](node)


def calls(program: torch.export.ExportedProgram) -> list[torch.fx.Node]:
    return program.graph_module.graph.find_nodes(op="call_function", target=CALL)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_call_is_taken(name: str) -> None:
    case: Exported = PROGRAMS[name]
    program = case.program()
    attn_pass.rewrite(program, runtime="tensorrt", choose="fused", on_error="raise")
    assert [check()(call) for call in calls(program)] == ([] if name == LEFT else [True])
    torch.testing.assert_close(program.module()(*case.inputs), case.function(*case.inputs))


def test_the_check_refuses_what_is_not_rewritten() -> None:
    """Values of another size than the keys, and heads that share keys without a word."""

    def narrow(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    q, k, v = torch.randn(2, 4, 7, 16), torch.randn(2, 4, 7, 16), torch.randn(2, 4, 7, 5)
    program = Exported(narrow, (q, k, v)).program()
    assert not check()(calls(program)[0])
    attn_pass.rewrite(program, runtime="tensorrt", on_error="raise")
    assert check()(calls(program)[0])


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers(name: str) -> None:
    module, inputs = MODELS[name].made()
    program = torch.export.export(module, (), inputs)
    attn_pass.rewrite(program, runtime="tensorrt", on_error="raise")
    assert [check()(call) for call in calls(program)] == [True] * MODELS[name].sites
