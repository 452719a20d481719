"""For every row of FlexAttention's tables: an attention it takes, and one that it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kernel_calls import BF16, FP16, FP32, FP64, H200, UNKNOWN, gpu
from sides import Table

from attn_pass.devices import registry
from attn_pass.devices.cpu.facts import cpu
from attn_pass.devices.cuda import flex_flash
from attn_pass.model.expression import DOT, Const, Expr, Load, apply
from attn_pass.model.index import Axis, axis_index
from attn_pass.model.mask import Keep
from attn_pass.model.structure import Band
from attn_pass.targets.constraints import Attended
from attn_pass.targets.flex import flex
from attn_pass.targets.flex.rules import RULES, Case
from attn_pass.targets.flex.score import function_of

TANH = apply("tanh", DOT)
ROW, KEY = (axis_index(Axis(name, 8)) for name in "ij")


def reading(*index: Any) -> dict[str, Any]:
    """Scores that a tensor is added to, read at an index."""
    return {"modified": apply("add", TANH, Load(3, index))}


def looked_up(rows: Any) -> dict[str, Any]:
    """Scores that a row of a table of this many is added to, chosen by numbers of another tensor."""
    chosen: Expr = apply("lookup", Load(3, (0,)), Load(0, (0,)))
    return {"modified": apply("add", TANH, chosen), "read_shape": (rows,)}


CAPPED: dict[str, Any] = {"not_affine": "tanh", "modified": TANH}
AFFINE = {"not_affine": ""}
JUMPING = {"modified": apply("where", apply("lt", DOT, Const(0.0)), Const(-1.0), DOT)}
EMPTY_ROWS = {"never_empty": False, "empty_row_is_nan": True}
STRICT = {"numerics": "strict"}
WINDOW = {"parts": (Band(-3, 0),)}
FILLED = {**WINDOW, "fill": -1e9, "never_empty": False}
ADDED = {"modified": apply("add", DOT, Const(1e4)), "score_dtype": FP64}
OF_FLEX: dict[str, Any] = {
    "sink": [({}, {"sink": Const(1.0)})],
    "dropout": [({}, {"dropout": 0.1})],
    "known heads": [
        ({"q_len": UNKNOWN}, {"dim": UNKNOWN}),
        ({"batch": UNKNOWN}, {"batch": UNKNOWN, "unknown_heads": True}),
    ],
    "sizes": [({"kv_len": 1}, {"kv_len": 0}), ({"batch": 1}, {"batch": 0})],
    "bounds": [
        (reading(ROW), reading(ROW - 1)),
        ({**reading(ROW), "read_shape": (8,)}, {**reading(ROW), "read_shape": (4,)}),
    ],
    "sdpa_kernel": [({}, {"allowed_backends": ("MATH",)})],
    "numerics": [({**EMPTY_ROWS}, {**EMPTY_ROWS, **STRICT}), (STRICT, {**EMPTY_ROWS, **STRICT})],
    "rounding": [({}, JUMPING)],
    "float64 scores": [({**ADDED, "score_dtype": FP32}, ADDED), ({"score_dtype": FP64}, ADDED)],
}


def made(attended: Attended) -> Case:
    """What the tables of FlexAttention look at."""
    return Case(attended.attention, attended.setting, function_of(attended.attention, attended.setting))


PROCESSOR = replace(cpu(), instruction_set="avx2")
CPP = Table(
    flex.Flex(),
    RULES["cpp"],
    {"device": PROCESSOR, "dtype": FP32, "runner": "inductor", **CAPPED},
    {
        **OF_FLEX,
        "scores": [({}, AFFINE)],
        "torch": [({}, {"environment": {"attn_pass.targets.flex.rules.TORCH_VERSION": (2, 12)}})],
        "processor": [
            (
                {"device": replace(PROCESSOR, instruction_set="avx512")},
                {"device": replace(PROCESSOR, instruction_set=s)},
            )
            for s in ("plain", "neon")
        ],
        "hook": [({}, {"runner": "hook"})],
        "gradient": [({}, {"grad": True})],
        "dtype": [({"dtype": d}, {"dtype": FP64}) for d in (BF16, FP16)],
        "head dim and keys": [
            ({"dim": 16, "kv_len": 32}, {"dim": 16, "kv_len": 24}),
            ({"dim": 24, "kv_len": 24}, {"dim": 16, "kv_len": 24}),
            ({"dim": 16, "kv_len": 24, "runner": "other"}, {"dim": 16, "kv_len": 24}),
            ({"dim": 12, "kv_len": UNKNOWN}, {"dim": 16, "kv_len": UNKNOWN}),
        ],
        "known tables": [(looked_up(32), looked_up(UNKNOWN))],
        "autocast": [({"autocast": FP32}, {"autocast": BF16})],
    },
    made,
    {"attn_pass.targets.flex.rules.inductor_vector_floats": lambda: 8},
)
CAPTURED = {**reading(ROW), "grad": True}
TRITON = Table(
    flex.Flex(),
    RULES["triton"],
    {"device": H200, **CAPPED},
    {
        **OF_FLEX,
        "device": [({}, {"device": replace(H200, kernels=())})],
        "torch": [({}, {"environment": {"attn_pass.targets.flex.rules.TORCH_VERSION": (2, 10)}})],
        "compute capability": [({"device": gpu(8, 0)}, {"device": gpu(7, 5)})],
        "dtype": [({"dtype": d}, {"dtype": FP64}) for d in (FP32, FP16)],
        "head dim": [({"dim": 16}, {"dim": 15}), ({"dim": 256}, {"dim": 257}), ({"value_dim": 16}, {"value_dim": 8})],
        "grid": [({"batch": 65535}, {"batch": 65536}), ({"heads": 65535}, {"heads": 65536})],
        "gradient of a captured tensor": [
            (CAPTURED, {**CAPTURED, "learned": True}),
            ({**CAPTURED, "learned": True, "grad": False}, {**CAPTURED, "learned": True}),
        ],
        "gradient of fully masked rows": [
            (FILLED, {**FILLED, "grad": True}),
            ({**FILLED, "grad": True, "assume_nonempty_rows": True}, {**FILLED, "grad": True}),
            ({**FILLED, "grad": True, "fill": float("-inf")}, {**FILLED, "grad": True}),
        ],
        "autocast": [({"autocast": BF16}, {"autocast": FP16})],
        "mask": [
            ({"not_affine": "", **WINDOW}, {"not_affine": ""}),
            ({}, {"not_affine": "", "parts": (Band(None, 0),)}),
        ],
    },
    made,
)
MASKED: dict[str, Any] = {**WINDOW, "q_len": 256, "kv_len": 256}
TRAINED = {**MASKED, "grad": True, "deterministic": True}
FLASH = Table(
    flex_flash.KERNEL,
    flex_flash.CONSTRAINTS,
    {"device": H200, **CAPPED},
    {
        "device": [({}, {"device": replace(H200, kernels=())})],
        "package": [({}, {"environment": {"attn_pass.devices.cuda.flash_attn.find_spec": lambda name: None}})],
        "torch": [({}, {"environment": {"attn_pass.devices.cuda.flex_flash.TORCH_VERSION": (2, 12)}})],
        "program": [({}, {"program": p}) for p in ("export", "aoti")],
        "compute capability": [
            ({"device": gpu(9, 0)}, {"device": gpu(8, 9)}),
            ({"device": registry.by_name("B200")}, {"device": gpu(12, 0)}),
        ],
        "dtype": [({"dtype": FP16}, {"dtype": FP32})],
        "known sizes": [({"q_len": 9}, {"q_len": UNKNOWN}), ({"batch": 9}, {"batch": UNKNOWN})],
        "head dim": [
            ({"dim": 256}, {"dim": 264}),
            ({"dim": 24}, {"dim": 20}),
            ({"dim": 128, "grad": True}, {"dim": 136, "grad": True}),
            ({"dim": 136}, {"dim": 136, "device": registry.by_name("B200")}),
        ],
        "captured numbers": [(reading(ROW), reading())],
        "blocks": [(MASKED, {**MASKED, "keep": Keep(Load(3, (KEY,)), float("-inf")), "opaque": "padding"})],
        "blocks of 128 rows": [
            ({**MASKED, "dim": 128}, {**MASKED, "dim": 136}),
            (MASKED, {**MASKED, "device": registry.by_name("B200")}),
        ],
        "lengths": [(MASKED, {**MASKED, "q_len": 255}), ({"q_len": 255}, {**MASKED, "kv_len": 384 + 64})],
        "fully masked rows": [
            (MASKED, {**MASKED, "never_empty": False}),
            ({**MASKED, "never_empty": False, "assume_nonempty_rows": True}, {**MASKED, "never_empty": False}),
        ],
        "deterministic": [
            ({**TRAINED, "deterministic": False}, TRAINED),
            ({**TRAINED, "grad": False}, TRAINED),
            ({"grad": True, "deterministic": True}, TRAINED),
        ],
    },
    made,
    {
        "attn_pass.devices.cuda.flash_attn.find_spec": lambda name: object(),
        "attn_pass.devices.cuda.flex_flash.TORCH_VERSION": (2, 13),
    },
)
TABLES = {"flex on the CPU": CPP, "flex on CUDA devices": TRITON, "flex_flash": FLASH}
