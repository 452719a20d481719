"""attn_pass and the real torch_npu: its schemas, its shapes, its dispatch and its gradients, without a device."""

from __future__ import annotations

from pathlib import Path

import npu_stand_in
import pytest
import torch
from cases import SHAPES
from conftest import Ask, process
from npu_schemas import SCHEMAS
from torch._subclasses.fake_tensor import FakeTensorMode

from attn_pass.devices.npu.generations import INFERENCE, TRAINING, TRAINING_V1

MAX = 2147483647


def test_the_schemas_are_those_the_tests_stand_on(ask: Ask) -> None:
    assert ask("schemas") == {name: f"npu::{name}{schema}" for name, schema in SCHEMAS.items()}


def test_results_have_the_shapes_of_the_wheel_s_own_fakes(ask: Ask) -> None:
    npu_stand_in.install()
    found = {}
    with FakeTensorMode():
        for name, (operator, shapes, more) in SHAPES.items():
            tensors = [torch.empty(s, dtype=torch.float16) for s in shapes]
            results = getattr(torch.ops.npu, operator).default(*tensors, **more)
            found[name] = [[list(r.shape), str(r.dtype)] for r in results if isinstance(r, torch.Tensor)]
    assert ask("shapes") == found


@pytest.mark.parametrize(
    "soc, step, family, operators",
    [
        ("Ascend910B3", 1, "A2", ["", TRAINING]),
        ("Ascend910_9391", 11, "A3", ["", TRAINING]),
        ("Ascend950DT_9571", 11, "950", ["", TRAINING_V1]),
        ("Ascend910A", 11, "910", [""]),
        ("Ascend310P3", 11, "310P", [""]),
    ],
)
def test_torch_s_own_call_goes_where_attn_pass_says(
    ask: Ask, soc: str, step: int, family: str, operators: list[str]
) -> None:
    told = ask(f"dispatch:{step}", soc)
    assert told["wrong"] == []
    assert (told["generation"], told["operators"]) == (family, operators)
    assert told["count"] >= (1000 if step == 1 else 100)


def test_torch_npu_itself_says_what_attn_pass_says(ask: Ask) -> None:
    """The arguments of its own call for the masks both know."""
    told = ask("arguments")
    common = {"head_num": 8, "input_layout": "BNSD", "scale": 0.125, "keep_prob": 1.0}
    for given in told.values():
        assert common == {n: given[n] for n in common}
    assert told["plain"]["mask"] is None
    causal = {"sparse_mode": 2, "pre_tockens": MAX, "next_tockens": 0, "inner_precise": 0, "mask": [2048, 2048]}
    assert causal == {n: told["causal"][n] for n in causal}
    assert {"ones", "triu"} <= set(told["causal"]["made"])  # anew at each site
    masked = {"pre_tockens": MAX, "next_tockens": MAX, "inner_precise": 2, "mask": [2, 1, 128, 256]}
    assert masked == {n: told["masked"][n] for n in masked} and "logical_not" in told["masked"]["made"]


@pytest.mark.parametrize(
    "soc, by_hand, operator",
    [
        ("Ascend910B3", 1, INFERENCE),
        ("Ascend950DT_9571", 0, TRAINING_V1),
    ],
)
def test_an_exported_program_on_the_device(ask: Ask, soc: str, by_hand: int, operator: str) -> None:
    told = ask(f"rewriting:{by_hand}", soc)
    assert told["device"] == soc
    assert told["calls"].count(f"npu.{operator}.default") == 2, told
    assert told["calls"].count("aten.triu.default") == 1  # one mask for both
    assert not any("softmax" in name or "matmul" in name for name in told["calls"])


def test_a_training_step_on_the_device(ask: Ask) -> None:
    told = ask("joint")
    assert told["targets"] == [TRAINING_V1] * 2, told  # the target's name; the operator is the third version
    assert told["rewritten"].count("npu.npu_fusion_attention_v3.default") == 2
    assert told["forward"].count("npu.npu_fusion_attention_v3.default") == 2
    assert told["forward"].count("aten.triu.default") == 1
    assert told["backward"].count("npu.npu_fusion_attention_grad_v3.default") == 2


@pytest.mark.parametrize(
    "soc, family",
    [("Ascend910B3", "A2"), ("Ascend910B", "910"), ("Ascend310P3", "310P")],
)
def test_the_name_the_runtime_gives(ask: Ask, soc: str, family: str) -> None:
    told = ask("device", soc)
    assert told["generation"] == family
    assert told["wrapped"] == "attn_pass.wrap('npu')"


def test_the_operators_on_their_real_schemas(stubs: Path) -> None:
    """The tests of what is emitted, with the wheel's schemas and fake kernels, and the stand-in's CPU kernels alone."""
    run = (
        "import torch_npu, npu_stand_in, pytest, sys; npu_stand_in.install(define=False); "
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', 'tests/devices/npu/test_npu_operators.py', "
        "'tests/devices/npu/test_npu_arguments.py', '-k', '(test_inference or one_query_row or exported_program or "
        "vendor_s_graph_pass or compressed_mask or boolean_mask or treacherous) and not slow']))"
    )
    told = process(stubs, "Ascend910B3", ["-c", run])
    assert " passed" in told and "failed" not in told


def test_nothing_of_torch_npu_is_imported_by_attn_pass(stubs: Path) -> None:
    run = "import sys, attn_pass, attn_pass.targets; print(any(m.startswith('torch_npu') for m in sys.modules))"
    assert process(stubs, "Ascend910B3", ["-c", run]).strip().splitlines()[-1] == "False"
