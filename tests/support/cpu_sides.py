"""For every row of the tables that targets on the CPU have: an attention it takes, and one that it refuses."""

from __future__ import annotations

from typing import Any

from described import HIDDEN, READ
from kernel_calls import BF16, FP16, FP32, FP64, H200, UNKNOWN
from sides import Table

from attn_pass.devices.cpu import cpu_kernel
from attn_pass.devices.cpu.facts import cpu
from attn_pass.model.expression import DOT, Const, Load, apply
from attn_pass.model.mask import Keep
from attn_pass.model.structure import Band, Chunk
from attn_pass.targets import decomposed, local, recompute, single_key

CPU: dict[str, Any] = {"device": cpu(), "dtype": FP32}
GPU = {"device": H200}
SINK = {"sink": Const(1.0)}
STRICT = {"numerics": "strict"}
ONLY_MATH = {"allowed_backends": ("MATH",)}
LEARNED = {"bias": READ, "learned": True, "grad": True}
# Scores that are replaced before a matrix is added to them.
FILLED = {"bias": apply("where", Load(3, ()), Load(3, ()), Const(float("-inf"))), "never_empty": False}
BOTH = {"keep": HIDDEN, "bias": READ, "grad": True}
LEAKING = {**BOTH, "keep": Keep(READ, -1e9), "learned": False, "never_empty": False}
ABSORBING = {**LEAKING, "keep": Keep(READ, -1e30)}
CAPPED = {"not_affine": "tanh", "modified": apply("tanh", DOT)}
JUMPING = {"not_affine": "a jump", "modified": apply("where", apply("lt", DOT, Const(0.0)), Const(-1.0), DOT)}
GROWING = {"not_affine": "exp", "modified": apply("mul", DOT, Const(float("inf")))}
SHIFTED = {**BOTH, "score_dtype": FP64}

LOCAL = Table(
    local.Local(),
    local.CONSTRAINTS,
    {**CPU, "parts": (Band(-3, 0),), "q_len": 64, "kv_len": 64},
    {
        "mask": [
            ({}, {"parts": (Band(None, 0),)}),
            ({"parts": (Chunk(16),)}, {"parts": (Chunk(UNKNOWN),)}),
            ({}, {"never_empty": False}),
            ({}, {"opaque": "padding"}),
        ],
        "device": [({}, GPU)],
        "query rows": [
            ({"packed": True}, {"packed": True, "groups": 2}),
            ({"groups": 2}, {"packed": True, "groups": 2}),
        ],
        "sink": [({}, SINK)],
        "dropout": [({}, {"dropout": 0.1})],
        "batch": [({"shared": True, "batch": 1}, {"shared": True}), ({}, {"shared": True})],
        "head dim": [({"dim": UNKNOWN}, {"dim": UNKNOWN, "value_dim": 8}), ({"value_dim": 8}, {"value_dim": UNKNOWN})],
        "numerics": [({}, STRICT), ({**STRICT, "eager_form": False}, STRICT)],
    },
)
RECOMPUTE = Table(
    recompute.Recompute(),
    recompute.CONSTRAINTS,
    {**CPU, **LEARNED},
    {
        "program": [({}, {"grad": False}), ({}, {"program": "export"})],
        "device": [({}, GPU)],
        "autocast": [({}, {"autocast": FP32})],
        "sink": [({}, SINK)],
        "heads": [({}, {"groups": 2})],
        "torch's call": [({}, {"dropout": 0.1}), ({"dim": UNKNOWN}, {"dim": UNKNOWN, "value_dim": 8})],
        "mask": [({}, {"bias": None}), ({}, {"kernel_as_written": "cpu flash"})],
        "fully masked rows": [
            ({**FILLED, "never_empty": True}, FILLED),
            ({**FILLED, "assume_nonempty_rows": True}, FILLED),
            ({"never_empty": False}, FILLED),
        ],
        "fill": [
            (ABSORBING, LEAKING),
            ({**LEAKING, "never_empty": True}, LEAKING),
            ({**LEAKING, "assume_nonempty_rows": True}, LEAKING),
        ],
        "numerics": [(STRICT, {**STRICT, **BOTH, "learned": False})],
        "condition": [({**BOTH, "learned": False}, BOTH)],
    },
)
DECOMPOSED = Table(
    decomposed.Decomposed(),
    decomposed.CONSTRAINTS,
    {**CPU, "eager_form": False},
    {
        "scores": [({}, {"not_affine": "the scores go through tanh"})],
        "form": [({}, {"eager_form": True})],
        "device": [({}, GPU)],
        "dropout": [({}, {"dropout": 0.1})],
        "autocast": [({}, {"autocast": FP32})],
        "dtype and gradient": [
            ({"dtype": FP64}, {"dtype": BF16}),
            ({}, {"dtype": FP16}),
            ({}, {"grad": True}),
        ],
        "heads": [({}, {"groups": 2})],
        "sizes": [({"kv_len": 1}, {"kv_len": 0}), ({"q_len": 0}, {"dim": 0})],
        "numerics": [
            ({"bias": READ}, {"bias": READ, **STRICT}),
            ({"bias": Const(1.0), **STRICT}, {"bias": READ, **STRICT}),
        ],
    },
)
SINGLE_KEY = Table(
    single_key.SingleKey(),
    single_key.CONSTRAINTS,
    {**CPU, "kv_len": 1},
    {
        "keys": [({}, {"kv_len": 2}), ({}, {"kv_len": UNKNOWN})],
        "mask": [({}, {"bias": READ}), ({}, {"keep": HIDDEN})],
        "sink": [({}, SINK)],
        "gradient": [({}, {"grad": True})],
        "dropout": [({}, {"dropout": 0.1})],
        "inputs": [({"runtime": "onnx"}, {"runtime": "openvino"})],
        "numerics": [({}, STRICT)],
    },
)
CPU_KERNEL = Table(
    cpu_kernel.CpuKernel(),
    cpu_kernel.CONSTRAINTS,
    CPU,
    {
        "device": [({}, GPU)],
        "dtype": [({"dtype": d}, {"dtype": FP64}) for d in (FP32, BF16, FP16)],
        "gradient": [({"grad": True}, {"grad": True, "program": "aoti"}), ({}, {"may_need_grad": True})],
        "dropout": [({"dropout": 0.1}, {"dropout": 0.1, "program": "aoti"})],
        "random numbers": [({"same_random_numbers": True}, {"same_random_numbers": True, "dropout": 0.1})],
        "fully masked rows": [
            ({**FILLED, "grad": True, "never_empty": True}, {**FILLED, "grad": True}),
            (FILLED, {**FILLED, "grad": True}),
        ],
        "infinite scores": [
            ({**CAPPED, "grad": True}, {**GROWING, "grad": True}),
            (GROWING, {**GROWING, "grad": True}),
        ],
        "float64 scores": [
            (BOTH, SHIFTED),
            ({**SHIFTED, "keep": None}, SHIFTED),
            ({**SHIFTED, "grad": False}, SHIFTED),
        ],
        "condition": [
            (BOTH, {**BOTH, "learned": True}),
            ({"keep": HIDDEN, "learned": True}, {**BOTH, "learned": True}),
        ],
        "autocast": [({"autocast": FP32}, {"autocast": BF16})],
        "sdpa_kernel": [({}, ONLY_MATH)],
        "program": [({"program": "aoti"}, {"program": "export"})],
        "heads": [({"heads": 1}, {"heads": 0})],
        "numerics": [
            ({**BOTH, "grad": False}, {**BOTH, "grad": False, **STRICT}),
            ({"keep": Keep(READ, 0.0), **STRICT}, {**BOTH, "grad": False, **STRICT}),
        ],
        "scores": [(CAPPED, JUMPING)],
        "compiler": [({}, {"environment": {"attn_pass.devices.cpu.kernel.build.missing": lambda: "no compiler"}})],
    },
)
TABLES = {
    "local": LOCAL,
    "recompute": RECOMPUTE,
    "decomposed": DECOMPOSED,
    "single_key": SINGLE_KEY,
    "cpu_kernel": CPU_KERNEL,
}
