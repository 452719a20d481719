"""The rules of Ascend's operators, one row each: an attention on both sides of every limit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import described
import pytest
import torch
from kernel_calls import UNKNOWN

from attn_pass.devices import registry
from attn_pass.devices.npu import facts, generations
from attn_pass.devices.npu.generations import INFERENCE, TRAINING, TRAINING_V1
from attn_pass.devices.npu.masks import mask_plan
from attn_pass.devices.npu.operators import FusionAttention, InferAttention
from attn_pass.devices.npu.rules import RULES, Case, DispatchedCall, dispatched, has_many_rows, merged_fits, refusal
from attn_pass.model.expression import Const
from attn_pass.model.index import Axis, Poly, Symbol, axis_index
from attn_pass.model.structure import Band
from attn_pass.targets.base import Refusal, Setting

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
A2 = registry.by_name("Ascend 910B")


def reported(operator: str, given: dict[str, Any]) -> str | None:
    return refusal(case(operator, given))


def case(operator: str, given: dict[str, Any]) -> Case:
    attended = described.case(A2, **given)
    return Case(attended.attention, attended.setting, operator)


ROWS = Poly.of(Symbol("s0", 2))
MASKED = {"keep": described.HIDDEN}
# An operator, an attention it takes, one that differs in what a rule is about alone, and what it then says.
SIDES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    (INFERENCE, {}, {"not_affine": "the scores go through tanh"}, "tanh"),
    (TRAINING, {}, {"sink": Const(1.0)}, "sinks are not used"),
    (INFERENCE, {}, {"grad": True}, "has no gradient"),
    (INFERENCE, {"program": "export"}, {"program": "export", "may_need_grad": True}, "requires_grad_(False)"),
    (INFERENCE, {"dtype": torch.float16}, {"dtype": FP32}, "half precision"),
    (TRAINING, {"dtype": FP32}, {"dtype": FP64}, "float64 has no fused operator"),
    (TRAINING, {"dtype": FP32, "autocast": FP32}, {"dtype": FP32, "autocast": BF16}, "autocast to bfloat16"),
    (INFERENCE, {"allowed_backends": ("FLASH_ATTENTION",)}, {"allowed_backends": ("MATH",)}, "allows only MATH"),
    (INFERENCE, {"dropout": 0.0}, {"dropout": 0.1}, "has no dropout"),
    (TRAINING, {"dropout": 0.99}, {"dropout": 1.0}, "keep_prob cannot express"),
    (TRAINING, {"same_random_numbers": True}, {"same_random_numbers": True, "dropout": 0.1}, "fallback_random"),
    (TRAINING_V1, {"dropout": 0.0}, {"dropout": 0.1}, "the seed"),
    (TRAINING_V1, {"runner": "other"}, {"runner": "inductor"}, "torch_npu's Inductor puts npu_fusion_attention_v3"),
    (TRAINING_V1, {}, {"runner": "hook"}, "torch_npu's Inductor puts npu_fusion_attention_v3"),
    (TRAINING, {"is_recomputed": True}, {"is_recomputed": True, "dropout": 0.1}, "in a checkpoint"),
    (TRAINING, {"dropout": 0.1}, {"dropout": 0.1, "may_be_merged_by_cse": True}, "another site may draw dropout"),
    (TRAINING, {"deterministic": True}, {"deterministic": True, "grad": True}, "deterministic"),
    (TRAINING, {"deterministic": True, "grad": True, "kernel_as_written": TRAINING},
     {"deterministic": True, "grad": True}, "deterministic"),
    (TRAINING, {"kv_len": 1}, {"kv_len": 0}, "a size is 0"),
    (TRAINING, {"batch": UNKNOWN}, {"batch": UNKNOWN, "unknown_heads": True}, "number of heads is not known"),
    (INFERENCE, {"heads": 256, "dim": 16}, {"heads": 257, "dim": 16}, "257 heads are over 256"),
    (TRAINING, {"heads": 256, "dim": 16}, {"heads": 257, "dim": 16}, "257 heads are over 256"),
    (INFERENCE, {"heads": 64, "groups": 64}, {"heads": 65, "groups": 65}, "65 heads share a KV head, over 64"),
    (INFERENCE, {"dim": 512}, {"dim": 513}, "over 512"),
    (TRAINING, {"dim": 512}, {"dim": 513}, "over 512"),
    (TRAINING, {"dim": 64}, {"dim": UNKNOWN}, "not known"),
    (INFERENCE, {"batch": 65536}, {"batch": 65537}, "a batch of 65537"),
    (TRAINING, {"batch": 2 << 20}, {"batch": (2 << 20) + 1}, "a batch of 2097153"),
    (INFERENCE, {"kv_len": 20971520}, {"kv_len": 20971521}, "a length is over 20971520"),
    (TRAINING, {"q_len": 1 << 20}, {"q_len": (1 << 20) + 1}, "a length is over 1048576"),
    (INFERENCE, {"q_len": ROWS, **MASKED}, {"q_len": UNKNOWN, **MASKED}, "one query row or more is not known"),
    (INFERENCE, {"q_len": UNKNOWN}, {"q_len": UNKNOWN, **MASKED}, "one query row or more is not known"),
    (INFERENCE, {"q_len": 1, **MASKED}, {"q_len": ROWS, "program": "export", **MASKED}, "one query row or more"),
    (INFERENCE, {"q_len": 1, "kv_len": 262144}, {"q_len": 1, "kv_len": 262145}, "262145 keys of one query row"),
    (INFERENCE, {"q_len": 2, "kv_len": 262145}, {"q_len": 1, "kv_len": 262145}, "262145 keys of one query row"),
    (TRAINING, {"grad": True, **MASKED}, {"grad": True, "learned": True, **MASKED}, "the mask needs a gradient"),
    (INFERENCE, {"learned": True, **MASKED}, {"grad": True, "learned": True, **MASKED}, "gradient"),
    (INFERENCE, {"scale": 0.0}, {"scale": 0.0, **MASKED}, "the scale is 0"),
    (INFERENCE, {"numerics": "strict", **MASKED},
     {"numerics": "strict", "never_empty": False, "empty_row_is_nan": True, **MASKED}, "strict"),
    (INFERENCE, {"numerics": "strict", "never_empty": False, **MASKED},
     {"numerics": "strict", "never_empty": False, "empty_row_is_nan": True, **MASKED}, "strict"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(SIDES)))
def test_both_sides_of_a_rule(number: int) -> None:
    operator, taken, refused, why = SIDES[number]
    assert reported(operator, taken) is None
    assert why in (reported(operator, refused) or "")


def test_every_rule_has_a_row() -> None:
    def failing(operator: str, given: dict[str, Any]) -> set[int]:
        reason = case(operator, given)
        return {
            n for n, rule in enumerate(RULES) if operator in getattr(rule, "of", (operator,)) and not rule.holds(reason)
        }

    assert set().union(*(failing(operator, refused) for operator, _, refused, _ in SIDES)) == set(range(len(RULES)))


def test_positions_lie_before_heads_up_to_a_hidden_size_in_inference_alone() -> None:
    for heads, dim, fits in ((255, 256, True), (256, 256, False), (252, 257, False)):
        assert merged_fits(described.attention(heads=heads, dim=dim), INFERENCE) == fits
        assert merged_fits(described.attention(heads=heads, dim=dim), TRAINING)
    assert not merged_fits(described.attention(batch=UNKNOWN, unknown_heads=True), INFERENCE)


@pytest.mark.parametrize(
    "rows, program, many",
    [
        *((1, "compile", False), (2, "export", True), (UNKNOWN, "compile", False), (ROWS, "compile", True)),
        *((ROWS, "export", False), (Poly.of(Symbol("s0", 3)), "export", True), (ROWS, "aoti", False)),
    ],
)
def test_rows_that_are_surely_several(rows: Any, program: str, many: bool) -> None:
    assert has_many_rows(described.attention(q_len=rows), Setting(A2, program)) == many


@pytest.mark.parametrize(
    "family, operator",
    [("A2", TRAINING), ("A3", TRAINING), ("", TRAINING), ("950", TRAINING_V1), ("310P", ""), ("910", "")],
)
def test_torch_s_own_call_by_family(family: str, operator: str) -> None:
    assert dispatched(DispatchedCall(BF16, 4, 8, 2, (64, 64, 64)), family) == operator
    if family:
        assert generations.generation(family).stock == operator
        assert operator in ("", *generations.generation(family).operators)


@pytest.mark.parametrize(
    "rows, never_empty, operator, plan",
    [
        (6, True, TRAINING, ("compressed", 0, False)),
        (6, False, TRAINING, ("compressed", 2, False)),
        (6, False, INFERENCE, ("compressed", 2, False)),
        (1, True, TRAINING, ("compressed", 0, False)),
        (1, True, INFERENCE, ("boolean", 0, False)),
        (1, False, TRAINING, ("boolean", 0, True)),  # no zeros are asked for at one row, by torch_npu neither
        (1, False, INFERENCE, ("boolean", 0, True)),
    ],
)
def test_a_causal_mask_by_rows(rows: int, never_empty: bool, operator: str, plan: tuple[str, int, bool]) -> None:
    """The kind of mask, ``inner_precise``, and whether fully masked rows are replaced."""
    made = described.attention(q_len=rows, kv_len=9, never_empty=never_empty, parts=(Band(None, 0),))
    mask = mask_plan(made, Setting(A2, "compile"), operator)
    assert (mask.kind, mask.inner_precise, mask.repaired) == plan
    folded = replace(
        made, mask=replace(made.mask, structure=replace(made.mask.structure, row=axis_index(Axis("b", 2))))
    )
    assert mask_plan(folded, Setting(A2, "compile"), operator).kind == "boolean"


def test_an_npu_that_no_row_knows_has_no_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not say what it is, is planned for as the A2 is."""

    class Runtime:
        name = "Ascend999"

        def get_device_name(self, at: torch.device | None = None) -> str:
            return self.name

    monkeypatch.setattr(torch, "npu", Runtime(), raising=False)
    unknown = facts.here()
    assert (unknown.name, unknown.kernels, unknown.generation) == ("Ascend999", (), "")
    attended = described.case(unknown)
    for target in (InferAttention(), FusionAttention()):
        refused = target.consider(attended.attention, "", attended.setting)
        assert isinstance(refused, Refusal) and "Ascend999" in refused.reason
    monkeypatch.setattr(Runtime, "name", "Ascend910B4")
    assert facts.here().kernels == generations.generation("A2").operators
    monkeypatch.delattr(torch, "npu")
    assert facts.here().kernels == generations.generation("A2").operators
