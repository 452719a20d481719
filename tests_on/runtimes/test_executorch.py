"""ExecuTorch on the CPU: `attn_pass.rewrite(program, runtime="executorch")`, lowered and run.

Everything is lowered twice: for XNNPACK, and without a delegate, for ExecuTorch's own ("portable") kernels alone.

`make test-runtimes` runs it, in an environment with executorch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from executorch_stand_in import SCHEMA, computed, empty
from exported_programs import PROGRAMS, Exported
from torch import Tensor
from whole_models import MODELS

pytest.importorskip("executorch")

from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401  registers the operator
from executorch.runtime import Runtime

import attn_pass

OPERATOR = "llama::custom_sdpa"
PARTITIONERS = {"XNNPACK": (XnnpackPartitioner,), "portable": ()}
lowerings = pytest.mark.parametrize("lowering", PARTITIONERS)


def run(lowering: str, program: torch.export.ExportedProgram, *inputs: Tensor) -> tuple[Any, int]:
    """What the lowered program computes, and how many fused operators it has."""
    partitioners = [make() for make in PARTITIONERS[lowering]]
    lowered = to_edge_transform_and_lower(program, partitioner=partitioners).to_executorch()
    (plan,) = lowered.executorch_program.execution_plan
    assert lowering == "XNNPACK" or not plan.delegates
    called = [op.name for op in plan.operators]
    calls = sum(
        called[i.instr_args.op_index] == OPERATOR
        for chain in plan.chains
        for i in chain.instructions
        if hasattr(i.instr_args, "op_index")
    )
    method = Runtime.get().load_program(lowered.buffer).load_method("forward")
    assert method is not None
    return method.execute(list(inputs))[0].clone(), calls


@lowerings
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs(name: str, lowering: str) -> None:
    case: Exported = PROGRAMS[name]
    program = case.program()
    report = attn_pass.rewrite(program, runtime="executorch", choose="fused", on_error="raise")
    got, calls = run(lowering, program, *case.inputs)
    assert calls == len(report.rewritten)
    torch.testing.assert_close(got, case.function(*case.inputs))


def test_the_stand_in_of_the_tests_is_the_operator() -> None:
    """Its schema, and what it computes where it reads fewer keys than there are."""
    operator = torch.ops.llama.custom_sdpa.default
    assert str(operator._schema) == f"llama::{SCHEMA}"
    torch.manual_seed(0)
    for rows, keys, first, masked, is_causal in (
        *((5, 11, 0, False, False), (5, 11, 6, True, False), (11, 5, -6, False, False)),
        *((5, 11, 3, False, True), (600, 700, 100, False, True), (3, 1200, 1197, True, False)),
    ):
        q, k, v = torch.randn(2, rows, 4, 16), torch.randn(2, keys, 2, 16), torch.randn(2, keys, 2, 16)
        mask = torch.randn(rows, keys) if masked else None
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            given = (*(x.to(dtype) for x in (q, k, v)), first, mask, 0.0, is_causal, 0.3)
            close = {} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
            torch.testing.assert_close(operator(*given), computed(*given), **close)
            assert operator(*(x.to("meta") if isinstance(x, Tensor) else x for x in given)).shape == empty(q).shape


def test_a_row_without_a_key_is_nan() -> None:
    """Why such masks are refused where a program gives 0; once this fails, the rule "fully masked rows" may go."""
    q, k, v = (torch.randn(1, 3, 2, 8) for _ in range(3))
    mask = torch.zeros(3, 3)
    mask[1] = float("-inf")
    out = torch.ops.llama.custom_sdpa.default(q, k, v, 0, mask, 0.0, False, 0.3)
    assert out.isnan().any(-1).any(-1).tolist() == [[False, True, False]]


def _llama() -> tuple[Any, dict[str, Tensor]]:
    return MODELS["Llama"].made()


def _vit() -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.ViTConfig(image_size=32, patch_size=8, attn_implementation="eager", **sizes)
    return transformers.ViTModel(config).eval(), {"pixel_values": torch.randn(2, 3, 32, 32)}


def _bert_with_one_sentence() -> tuple[Any, dict[str, Tensor]]:
    module, inputs = MODELS["BERT"].made()
    return module, {name: x[1:] for name, x in inputs.items()}


@lowerings
@pytest.mark.parametrize("made", [_llama, _vit, _bert_with_one_sentence])
def test_a_model_of_transformers(made: Any, lowering: str) -> None:
    module, inputs = made()
    with torch.no_grad():
        expected = module(**inputs)[0]
    program = torch.export.export(module, (), inputs)
    report = attn_pass.rewrite(program, runtime="executorch", choose="fused", on_error="raise")
    assert len(report.rewritten) == 2
    got, calls = run(lowering, program, *inputs.values())
    assert calls == 2
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
