"""For every row of the tables of kernels for GPUs and TPUs: an attention it takes, and one that it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from described import READ
from kernel_calls import BF16, FP16, FP32, FP64, H200, UNKNOWN, gpu
from sides import Table

from attn_pass.devices import registry
from attn_pass.devices.cpu.facts import cpu
from attn_pass.devices.cuda import decode, flash_attn, flash_attn_3
from attn_pass.devices.tpu import rules as tpu
from attn_pass.devices.tpu.pallas import PallasFlash
from attn_pass.model.expression import Const

SINK = {"sink": Const(1.0)}
SWITCHED_OFF = replace(H200, kernels=())
MAY_BE_EMPTY = {"bias": READ, "never_empty": False, "numerics": "strict"}
OF_ALL: dict[str, Any] = {
    "autocast": [({"autocast": BF16}, {"autocast": FP16})],
    "sdpa_kernel": [({}, {"allowed_backends": ("FLASH_ATTENTION",)})],
    "sizes": [({"kv_len": 1}, {"kv_len": 0}), ({"batch": 1}, {"batch": 0})],
}


def steps(of_row: int) -> dict[str, Any]:
    """Keys and values of which a row begins so many elements after the one before."""
    return {"strides": (1 << 20, 1 << 16, of_row, 1)}


def without(*packages: str) -> dict[str, Any]:
    """Without these modules."""
    names = ("decode", "flash_attn")
    found = lambda name: None if name in packages else object()
    return {"environment": {f"attn_pass.devices.cuda.{module}.find_spec": found for module in names}}


DECODE = Table(
    decode.KERNEL,
    decode.CONSTRAINTS,
    {"q_len": 2, "kv_len": 4096},
    {
        **OF_ALL,
        "device": [({}, {"device": cpu()}), ({}, {"device": SWITCHED_OFF})],
        "compute capability": [({"device": gpu(8, 0)}, {"device": gpu(7, 5)})],
        "package": [({}, without("triton"))],
        "gradient": [({}, {"grad": True})],
        "gradient in an export": [({"program": "export"}, {"program": "export", "may_need_grad": True})],
        "dropout": [({}, {"dropout": 0.1})],
        "dtype": [({"dtype": FP16}, {"dtype": FP32})],
        "numerics": [({**MAY_BE_EMPTY, "never_empty": True}, MAY_BE_EMPTY), ({"numerics": "strict"}, MAY_BE_EMPTY)],
        "query rows": [
            ({"q_len": 64}, {"q_len": 65}),
            ({"kv_len": UNKNOWN}, {"q_len": UNKNOWN}),
            ({"q_len": 64, "heads": 16, "groups": 16}, {"q_len": 64, "heads": 17, "groups": 17}),
        ],
        "head dim": [
            ({"dim": 256}, {"dim": 272}),
            ({"dim": 16}, {"dim": 72}),
            ({"value_dim": 16}, {"value_dim": 8}),
            ({"dim": 128}, {"dim": UNKNOWN}),
        ],
        "strides": [(steps(80), steps(72))],
    },
    environment=without()["environment"],
)
OF_LIBRARY: dict[str, Any] = {
    **OF_ALL,
    "program": [({"program": "export"}, {"program": "aoti"})],
    "gradient": [
        ({"grad": True}, {"grad": True, "program": "export"}),
        ({"program": "export"}, {"grad": True, "program": "export"}),
    ],
    "dropout and sinks": [({}, {"dropout": 0.1}), ({}, SINK)],
    "dtype": [({"dtype": FP16}, {"dtype": FP32})],
}
FLASH_ATTN = Table(
    flash_attn.KERNEL,
    flash_attn.CONSTRAINTS,
    {},
    {
        **OF_LIBRARY,
        "device": [({}, {"device": cpu()}), ({}, {"device": SWITCHED_OFF})],
        "compute capability": [({"device": gpu(8, 0)}, {"device": gpu(7, 5)})],
        "package": [({}, without("flash_attn_2_cuda"))],
        "head dim": [({"dim": 256}, {"dim": 257}), ({"value_dim": 1}, {"value_dim": UNKNOWN})],
    },
    environment=without()["environment"],
)
WIDE = {"dim": 256, "grad": True, "deterministic": True}
FLASH_ATTN_3 = Table(
    flash_attn_3.KERNEL,
    flash_attn_3.CONSTRAINTS,
    {},
    {
        **OF_LIBRARY,
        "device": [({}, {"device": SWITCHED_OFF})],
        "compute capability": [({"device": gpu(9, 0)}, {"device": gpu(c, 0)}) for c in (8, 10)],
        "package": [({}, without("flash_attn_3"))],
        "head dim": [({"dim": 256}, {"dim": 264}), ({"dim": 64, "value_dim": 512}, {"dim": 72, "value_dim": 512})],
        "deterministic": [
            ({**WIDE, "dim": 192}, WIDE),
            ({**WIDE, "grad": False}, WIDE),
            ({**WIDE, "deterministic": False}, WIDE),
        ],
    },
    environment=without()["environment"],
)
V6E = registry.by_name("v6e")
HERE = replace(V6E, is_here=True)


def lacking(*packages: str) -> dict[str, Any]:
    """On a TPU that is here, without these packages."""
    found = lambda name: None if name in packages else object()
    return {"device": HERE, "environment": {"attn_pass.devices.tpu.rules.find_spec": found}}


PALLAS = Table(
    PallasFlash(),
    tpu.RULES,
    {"device": V6E, "q_len": 2048, "kv_len": 2048, "dim": 128},
    {
        **OF_ALL,
        "sizes": [({"batch": 1}, {"batch": 0})],
        "scores": [({}, {"not_affine": "the scores go through tanh"})],
        "packages": [(lacking(), lacking("jax")), (lacking(), lacking("flax"))],
        "program": [({"program": "export"}, {"program": "aoti"})],
        "float16": [({}, {"dtype": FP16})],
        "dtype": [({"dtype": FP32}, {"dtype": FP64})],
        "dropout": [({}, {"dropout": 0.1})],
        "sink": [({}, SINK)],
        "static sizes": [({}, {"q_len": UNKNOWN}), ({}, {"batch": UNKNOWN})],
        "head dim": [({"dim": 512}, {"dim": 513}), ({"value_dim": 512}, {"value_dim": 513})],
        "scale": [({"bias": READ}, {"bias": READ, "scale": 1e-8}), ({"scale": 1e-8}, {"bias": READ, "scale": 1e-8})],
    },
)
TABLES = {"decode": DECODE, "flash_attn": FLASH_ATTN, "flash_attn_3": FLASH_ATTN_3, "pallas": PALLAS}
