"""For every rule of torch's fused kernels on all devices a call that it takes, and one that it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from kernel_calls import BF16, FP16, FP32, FP64, UNKNOWN, gpu

from attn_pass.devices import registry
from attn_pass.devices.cpu.facts import cpu

CPU = {"device": cpu()}
XPU = {"device": registry.by_name("Arc B580")}
APPLE = {"device": registry.by_name("M4")}
ADDED: dict[str, Any] = {"mask": "additive", "reached": "metal vector", **APPLE}
MANY_ROWS: dict[str, Any] = {"q_len": 9, "kv_len": 9, **APPLE}


def amd(generation: str = "gfx942", flash: str = "AOTriton") -> dict[str, Any]:
    return {"device": replace(registry.by_name("MI300X"), generation=generation, flash=flash)}


AMD = amd()
GFX12 = amd("gfx1201", "CK")  # which torch asks for no other gate
TRAINED_GFX12: dict[str, Any] = {"grad": True, **GFX12}
DETERMINISTIC: dict[str, Any] = {"deterministic": True, "grad": True}
REACHED = {"reached": "cudnn"}  # the program's own call does
NEWER = {"torch_version": (2, 14)}
WIDE = {"device": gpu(9, 0, 92600), **NEWER}
TILES = UNKNOWN * 128
MASKED: dict[str, Any] = {"mask": "boolean", "grad": True, "finite_mask": True}
LARGE: dict[str, Any] = {"grad": True, "heads": 4, "dim": 128}
HALF_MASK: dict[str, Any] = {"mask": "boolean", "dtype": FP16, "finite_mask": True}
# For each rule a call that holds and one that differs in what the rule is about alone.
SIDES: dict[tuple[str, str], list[tuple[dict[str, Any], dict[str, Any]]]] = {
    ("cpu flash", "dtype"): [
        ({"dtype": d, **CPU}, {"dtype": torch.complex64, **CPU}) for d in (FP32, FP64, BF16, FP16)
    ],
    ("cpu flash", "dropout"): [(CPU, {"dropout": 0.1, **CPU})],
    ("cpu flash", "known head dims"): [({"dim": UNKNOWN, **CPU}, {"dim": UNKNOWN, "value_dim": 8, **CPU})],
    ("cpu flash", "sizes"): [({"kv_len": 1, **CPU}, {"kv_len": 0, **CPU}), ({"batch": 1, **CPU}, {"batch": 0, **CPU})],
    ("cpu flash", "mask gradient"): [
        ({"mask": "additive", **CPU}, {"mask": "additive", "mask_needs_grad": True, **CPU})
    ],
    ("onednn", "dtype"): [({"dtype": FP32, **XPU}, {"dtype": FP64, **XPU})],
    ("onednn", "dropout"): [(XPU, {"dropout": 0.1, **XPU})],
    ("onednn", "known head dims"): [({"dim": UNKNOWN, **XPU}, {"dim": UNKNOWN, "value_dim": 8, **XPU})],
    ("onednn", "head dim"): [
        ({"dim": 576, **XPU}, {"dim": 577, **XPU}),
        ({"value_dim": 576, **XPU}, {"value_dim": 577, **XPU}),
    ],
    ("onednn", "sizes"): [({"kv_len": 1, **XPU}, {"kv_len": 0, **XPU})],
    ("onednn", "masks of grouped heads"): [
        ({"mask": "additive", **shared, **XPU}, {"mask": "additive", "by_head": True, "groups": 2, **XPU})
        for shared in ({"groups": 2}, {"by_head": True})
    ],
    ("onednn", "gradient"): [(XPU, {"grad": True, **XPU}), ({"may_train": True, **XPU}, {"grad": True, **XPU})],
    ("flash", "dtype"): [({"dtype": BF16}, {"dtype": FP32}), ({"dtype": FP16}, {"dtype": FP64})],
    ("flash", "compute capability"): [
        ({"device": gpu(8, 0)}, {"device": gpu(7, 5)}),
        ({"device": gpu(12, 1)}, {"device": gpu(12, 2)}),
    ],
    ("flash", "dropout"): [({"dropout": 0.99}, {"dropout": 1.0})],
    ("flash", "known head dims"): [({"value_dim": 32}, {"dim": UNKNOWN, "value_dim": 32})],
    ("flash", "sizes"): [({"q_len": 1}, {"q_len": 0}), ({"value_dim": 1}, {"value_dim": 0})],
    ("flash", "version"): [
        ({"device": gpu(9, 0, flash="FA3")}, {"device": gpu(10, 0, flash="FA3")}),
        ({"device": gpu(10, 0, flash="FA4")}, {"device": gpu(8, 9, flash="FA4")}),
    ],
    ("flash", "dropout of newer versions"): [
        ({"dropout": 0.1}, {"dropout": 0.1, "device": gpu(9, 0, flash="FA3")}),
        ({"device": gpu(9, 0, flash="FA4")}, {"dropout": 0.1, "device": gpu(9, 0, flash="FA4")}),
    ],
    ("flash", "head dim of newer versions"): [
        ({"dim": 192, "device": gpu(9, 0, flash="FA4")}, {"dim": 192, "device": gpu(10, 0, flash="FA4")}),
        ({"dim": 256, "device": gpu(10, 0, flash="FA4")}, {"dim": 136, "device": gpu(10, 3, flash="FA4")}),
    ],
    ("flash", "window backward"): [
        (
            {"mask": "band", "grad": grad, "device": gpu(9, 0, flash="FA4"), "torch_version": version},
            {"mask": "band", "device": gpu(9, 0, flash="FA4"), "torch_version": (2, 11), **trained},
        )
        for grad, version in ((False, (2, 11)), (True, (2, 13)))
        for trained in ({"grad": True}, {"may_train": True})
    ],
    ("flash", "deterministic backward"): [
        ({**DETERMINISTIC, "device": gpu(10, 0, flash="FA4")}, {**DETERMINISTIC, "device": gpu(9, 0, flash="FA4")}),
        ({**DETERMINISTIC, "dim": 256}, {**DETERMINISTIC, "dim": 256, "device": gpu(9, 0, flash="FA3")}),
        (
            {**DETERMINISTIC, "dim": 192, "device": gpu(9, 0, flash="FA3")},
            {**DETERMINISTIC, "dim": 200, "device": gpu(9, 0, flash="FA3")},
        ),
        (
            {"deterministic": True, "device": gpu(9, 0, flash="FA4")},
            {"deterministic": True, "may_train": True, "device": gpu(9, 0, flash="FA4")},
        ),
    ],
    ("flash", "head dim"): [
        ({"dim": 256}, {"dim": 257}),
        ({"dim": 8, "value_dim": 256}, {"dim": 8, "value_dim": 264}),
        ({"dim": 1}, {"dim": UNKNOWN}),
    ],
    ("flash", "mask"): [({"mask": "band"}, {"mask": "boolean"}), ({"mask": "causal"}, {"mask": "additive"})],
    ("flash", "causal lengths"): [
        ({"mask": "causal"}, {"mask": "causal", "kv_len": 9}),
        ({"mask": "band", "kv_len": 9}, {"mask": "causal", "q_len": UNKNOWN}),
    ],
    ("flash", "backward head dim"): [
        ({"dim": dim, "grad": True, "device": gpu(9, 0)}, {"dim": dim, "grad": True, "device": gpu(*small)})
        for dim in (200, 224)
        for small in ((8, 6), (8, 9), (12, 0))
    ]
    + [
        ({"dim": 192, "grad": True, "device": gpu(8, 6)}, {"dim": 193, "grad": True, "device": gpu(8, 6)}),
        (
            {"dim": 232, "grad": True, "device": gpu(8, 6)},
            {"dim": 232, "grad": True, "dropout": 0.1, "device": gpu(8, 6)},
        ),
        ({"dim": 224, "device": gpu(8, 6)}, {"dim": 224, "grad": True, "device": gpu(8, 6)}),
    ],
    ("cudnn", "version"): [
        ({"device": gpu(9, 0)}, {"device": gpu(9, 0, 89900)}),
        ({"device": gpu(9, 0, 90000), **REACHED}, {"device": gpu(9, 0, 89900), **REACHED}),
    ],
    ("cudnn", "dtype"): [({"dtype": FP16}, {"dtype": FP32})],
    ("cudnn", "compute capability"): [({"device": gpu(8, 0)}, {"device": gpu(7, 5)})],
    ("cudnn", "dropout"): [({"dropout": 0.5}, {"dropout": 1.0})],
    ("cudnn", "known head dims"): [({"value_dim": 32}, {"dim": UNKNOWN}), ({}, {"value_dim": UNKNOWN})],
    ("cudnn", "sizes"): [({"q_len": 2}, {"q_len": 0})],
    ("cudnn", "head dim to torch 2.13"): [
        ({"dim": 256, **REACHED}, {"dim": 257, **REACHED}),
        ({"dim": 136, "device": gpu(9, 0, 91000), **REACHED}, {"dim": 136, "device": gpu(9, 0, 90900), **REACHED}),
        ({"dim": 128, "device": gpu(8, 0)}, {"dim": 129, "device": gpu(8, 0)}),
        ({"dim": 192, "value_dim": 128, "device": gpu(10, 0)}, {"dim": 192, "device": gpu(10, 0)}),
        (
            {"dim": 192, "value_dim": 128, "device": gpu(10, 0, 91100), **REACHED},
            {"dim": 192, "value_dim": 128, "device": gpu(10, 0, 91000), **REACHED},
        ),
        ({"dim": 16, "value_dim": 128, "device": gpu(8, 9)}, {"dim": 16, "value_dim": 136, "device": gpu(8, 9)}),
        ({"dim": 256, "device": gpu(10, 0, 92300), **NEWER}, {"dim": 256, "device": gpu(10, 0, 92300)}),
    ],
    ("cudnn", "head dim"): [
        ({"dim": 128}, {"dim": 136}),
        ({"dim": 192, "value_dim": 128}, {"dim": 192}),
        ({"dim": 192, "value_dim": 128}, {"dim": 184, "value_dim": 128}),
        ({"dim": 256, **REACHED}, {"dim": 256}),
        ({"dim": 256, "device": gpu(9, 0, 92201)}, {"dim": 256, "device": gpu(9, 0, 92200)}),
        ({"dim": 256, "device": gpu(9, 0, 92300), **NEWER}, {"dim": 256, **NEWER, **REACHED}),
        ({"dim": 160, "device": gpu(10, 3, 92300), **NEWER}, {"dim": 264, "device": gpu(10, 3, 92300), **NEWER}),
        (
            {"dim": 256, "device": gpu(10, 7, 92501), **NEWER},
            {"dim": 256, "device": gpu(10, 7, 92500), **NEWER},
        ),
        ({"dim": 128, "device": gpu(12, 0)}, {"dim": 136, "device": gpu(12, 0, 92600), **NEWER}),
    ],
    ("cudnn", "backward head dim"): [
        ({"dim": d, "value_dim": e, "grad": g, **WIDE}, {"dim": 160, "grad": True, **WIDE})
        for d, e, g in ((160, 160, False), (192, 128, True), (256, 256, True), (128, 64, True))
    ]
    + [({"dim": 160, "grad": True, **REACHED}, {"dim": 160, "may_train": True, **WIDE})],
    ("cudnn", "mask"): [({"mask": "additive"}, {"mask": "band"})],
    ("cudnn", "mask gradient"): [({"mask": "additive"}, {"mask": "additive", "mask_needs_grad": True})],
    ("cudnn", "one key"): [({"kv_len": 2}, {"kv_len": 1})],
    ("cudnn", "one query with dropout"): [
        ({"q_len": 2, "dropout": 0.5}, {"q_len": 1, "dropout": 0.5}),
        ({"q_len": 1}, {"q_len": 1, "dropout": 0.5}),
    ],
    ("cudnn", "dropout steps"): [({"dropout": 0.125}, {"dropout": 0.1})],
    ("cudnn", "dropout versions"): [
        ({"dropout": 0.25, "device": gpu(9, 0, v), **REACHED}, {"dropout": 0.25, "device": gpu(9, 0, bad), **REACHED})
        for v, bad in ((91099, 91100), (91400, 91399))
    ],
    **{
        (kernel, "grid"): [({"batch": 65535}, {"batch": 65536}), ({"heads": 65535}, {"heads": 65536})]
        for kernel in ("cudnn", "flash", "efficient")
    },
    ("flash", "backward indices"): [
        # 2**31 elements with the queries rounded up to 128 and a head dim of 16 counted as 32, and one batch more.
        ({**LARGE, "q_len": 10495, "batch": 399}, {**LARGE, "q_len": 10497, "batch": 400}),
        ({**LARGE, "q_len": 16384, "batch": 256}, {**LARGE, "q_len": 16384, "batch": 257}),
        ({**LARGE, "q_len": 16384, "dim": 16, "batch": 1024}, {**LARGE, "q_len": 16384, "dim": 16, "batch": 1025}),
        ({**LARGE, "q_len": 16384, "batch": 257, "grad": False}, {**LARGE, "q_len": 16384, "batch": 257}),
    ],
    ("cudnn", "deterministic"): [({}, {"deterministic": True})],
    ("cudnn", "decoding on Blackwell"): [
        ({"q_len": 1, "device": gpu(10, 0, 92501)}, {"q_len": 1, "device": gpu(10, 0, 92500)}),
        ({"q_len": 1, "device": gpu(10, 0, 92401)}, {"q_len": 1, "device": gpu(10, 3, 92400)}),
        ({"q_len": 2, "device": gpu(11, 0, 91900)}, {"q_len": 1, "device": gpu(11, 0, 91900)}),
        ({"q_len": 1, "device": gpu(9, 0, 91900)}, {"q_len": 1, "device": gpu(10, 0, 91900)}),
    ],
    ("cudnn", "one query on Blackwell"): [
        ({"q_len": 1}, {"q_len": 1, "device": gpu(10, 0, 91800)}),
        ({"q_len": 2, "device": gpu(12, 0)}, {"q_len": 1, "device": gpu(12, 0)}),
        ({"q_len": 1, "device": gpu(12, 0, 92600)}, {"q_len": 1, "device": gpu(12, 0, 92500)}),
    ],
    ("cudnn", "older versions"): [
        ({"device": gpu(9, 0, 91501)}, {"device": gpu(9, 0, 91500)}),
        ({"device": gpu(9, 0, 91400), **REACHED}, {"device": gpu(9, 0, 91400), "reached": "flash"}),
    ],
    ("cudnn", "half a tile in training"): [
        *(
            ({**MASKED, "kv_len": right, "mask": mask}, {**MASKED, "kv_len": wrong, "mask": mask})
            for right, wrong, mask in ((640, 704, "boolean"), (65, 64, "additive"), (128, 192, "boolean"))
        ),
        ({**MASKED, "kv_len": TILES}, {**MASKED, "kv_len": TILES + 64}),
        ({"grad": True, "kv_len": 640}, {"grad": True, "kv_len": 704}),
        ({**MASKED, "kv_len": TILES + 8}, {**MASKED, "kv_len": UNKNOWN}),
        ({**MASKED, "kv_len": 64, "mask": "causal", "q_len": 64}, {**MASKED, "kv_len": 64, "q_len": 64}),
        ({**MASKED, "kv_len": 64, "grad": False}, {**MASKED, "kv_len": 64, "grad": False, "may_train": True}),
        ({**MASKED, "kv_len": 64, "device": gpu(9, 0, 92600)}, {**MASKED, "kv_len": 64, "device": gpu(9, 0, 92599)}),
        ({**MASKED, "kv_len": 64, "device": gpu(10, 0)}, {**MASKED, "kv_len": 64, **REACHED}),
    ],
    ("cudnn", "one query in training"): [
        ({"q_len": 2, "grad": True}, {"q_len": 1, "grad": True}),
        ({"q_len": 1}, {"q_len": 1, "may_train": True, "device": gpu(9, 0, 92600)}),
    ],
    ("cudnn", "fully masked rows"): [
        ({"mask": "boolean"}, {"mask": "boolean", "never_empty": False}),
        ({"never_empty": False}, {"mask": "additive", "never_empty": False}),
    ],
    ("cudnn", "tile of masked keys"): [
        ({**HALF_MASK, "kv_len": 128}, {**HALF_MASK, "kv_len": 129}),
        ({**HALF_MASK, "kv_len": 320, "dtype": BF16}, {**HALF_MASK, "kv_len": 320}),
        ({**HALF_MASK, "kv_len": 320, "mask": "none"}, {**HALF_MASK, "kv_len": 320, "mask": "additive"}),
        ({**HALF_MASK, "kv_len": 320, **REACHED}, {**HALF_MASK, "kv_len": UNKNOWN}),
        ({"mask": "boolean", "kv_len": 320, "finite_mask": True}, {"mask": "boolean", "kv_len": 320}),
    ],
    ("cudnn", "causal lengths"): [({"mask": "causal"}, {"mask": "causal", "q_len": 7})],
    ("efficient", "dtype"): [({"dtype": FP32}, {"dtype": FP64})],
    ("efficient", "compute capability"): [({"dtype": FP16, "device": gpu(5, 0)}, {"dtype": FP16, "device": gpu(3, 7)})],
    ("efficient", "bfloat16"): [
        ({"device": gpu(8, 0)}, {"device": gpu(7, 5)}),
        ({"dtype": FP16, "device": gpu(7, 5)}, {"device": gpu(7, 5)}),
    ],
    ("efficient", "dropout"): [({"dropout": 0.9}, {"dropout": 1.0})],
    ("efficient", "known head dims"): [({"dim": 1000}, {"dim": UNKNOWN})],
    ("efficient", "sizes"): [({"batch": 1}, {"batch": 0})],
    ("efficient", "grouped heads"): [({}, {"groups": 2})],
    ("efficient", "mask"): [({"mask": "additive", "mask_needs_grad": True, "never_empty": False}, {"mask": "band"})],
    **{
        ("aotriton flash", name): rows
        for name, rows in {
            "architecture": [(AMD, amd(generation="gfx1100")), (amd("gfx906", "CK"), amd("gfx906"))],
            "dtype": [({"dtype": FP16, **AMD}, {"dtype": FP32, **AMD})],
            "dropout": [({"dropout": 0.5, **AMD}, {"dropout": 1.0, **AMD})],
            "known head dims": [({"value_dim": 32, **AMD}, {"dim": UNKNOWN, "value_dim": 32, **AMD})],
            "sizes": [({"kv_len": 1, **AMD}, {"kv_len": 0, **AMD})],
            "head dim": [
                ({"dim": 512, **AMD}, {"dim": 513, **AMD}),
                ({"dim": 256, **amd(flash="CK")}, {"dim": 257, **amd(flash="CK")}),
            ],
            "mask": [({"mask": "causal", **AMD}, {"mask": "additive", **AMD})],
            "causal lengths": [({"q_len": 3, **AMD}, {"q_len": 3, "mask": "causal", **AMD})],
            "backward head dim": [
                ({"dim": dim, "grad": True, **GFX12}, {"dim": 200, "grad": True, **GFX12}) for dim in (64, 192, 256)
            ]
            + [({"dim": 256, **TRAINED_GFX12}, {"dim": 256, "dropout": 0.1, **TRAINED_GFX12})],
        }.items()
    },
    **{
        ("aotriton efficient", name): rows
        for name, rows in {
            "architecture": [(AMD, amd("gfx1201"))],
            "dtype": [({"dtype": FP32, **AMD}, {"dtype": FP64, **AMD})],
            "float32": [(amd(flash="CK"), {"dtype": FP32, **amd(flash="CK")})],
            "dropout": [({"dropout": 0.9, **AMD}, {"dropout": 1.0, **AMD})],
            "known head dims": [(AMD, {"dim": UNKNOWN, **AMD})],
            "sizes": [({"batch": 1, **AMD}, {"batch": 0, **AMD})],
            "head dim": [
                ({"dim": 512, **AMD}, {"dim": 520, **AMD}),
                ({"dim": 256, "torch_version": (2, 12), **AMD}, {"dim": 264, "torch_version": (2, 12), **AMD}),
            ],
            "grouped heads": [(AMD, {"groups": 2, **AMD})],
            "mask": [({"mask": "additive", "reached": "aotriton efficient", **AMD}, {"mask": "additive", **AMD})],
            "causal lengths": [({"mask": "causal", **AMD}, {"mask": "causal", "q_len": 3, **AMD})],
        }.items()
    },
    **{
        (kernel, name): rows
        for kernel, plain in (("metal vector", APPLE), ("metal prefill", MANY_ROWS))
        for name, rows in {
            "dtype": [({"dtype": d, **plain}, {"dtype": FP64, **plain}) for d in (FP32, FP16)],
            "gradient": [(plain, {"grad": True, **plain}), (plain, {"may_train": True, **plain})],
            "dropout": [(plain, {"dropout": 0.1, **plain})],
            "known head dims": [(plain, {"dim": UNKNOWN, **plain})],
            "sizes": [(plain, {**plain, "kv_len": 0}), ({"batch": 1, **plain}, {"batch": 0, **plain})],
            "mask": [
                ({"mask": mask, "reached": kernel, **plain}, {"mask": mask, **plain})
                for mask in ("boolean", "additive")
            ],
        }.items()
    },
    ("metal vector", "head dim"): [
        ({"dim": 96, **APPLE}, {"dim": 80, **APPLE}),
        ({"dim": 256, **APPLE}, {"dim": 256, "torch_version": (2, 12), **APPLE}),
        (APPLE, {"value_dim": 128, **APPLE}),
    ],
    ("metal vector", "few rows"): [
        (APPLE, {"q_len": 9, "kv_len": 64, **APPLE}),
        ({"q_len": 3, "kv_len": 3, **APPLE}, {"q_len": 4, "kv_len": 3, **APPLE}),
    ],
    ("metal vector", "causal"): [
        ({"mask": "causal", **APPLE}, {"mask": "causal", "torch_version": (2, 12), **APPLE}),
        ({"mask": "causal", "q_len": 3, **APPLE}, {"mask": "causal", "q_len": 3, "torch_version": (2, 12), **APPLE}),
    ],
    ("metal vector", "additive mask"): [
        (ADDED, {"torch_version": (2, 12), **ADDED}),
        ({"torch_version": (2, 12), **ADDED, "mask": "boolean"}, {"torch_version": (2, 12), **ADDED}),
    ],
    ("metal prefill", "version"): [(MANY_ROWS, {**MANY_ROWS, "torch_version": (2, 12)})],
    ("metal prefill", "head dim"): [
        ({"dim": 72, **MANY_ROWS}, {"dim": 40, **MANY_ROWS}),
        (MANY_ROWS, {"value_dim": 128, **MANY_ROWS}),
    ],
    ("metal prefill", "many rows"): [(MANY_ROWS, {**MANY_ROWS, "q_len": 8})],
    ("metal prefill", "causal lengths"): [
        ({"mask": "causal", **MANY_ROWS}, {"mask": "causal", **MANY_ROWS, "q_len": 10}),
    ],
}
