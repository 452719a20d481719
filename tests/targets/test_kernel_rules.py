"""The rules of torch's fused kernels, one row each: a call on both sides of every limit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_pass.hardware import catalog
from attn_pass.hardware.device import Device, cpu
from attn_pass.model.attention import Attention, Source
from attn_pass.model.expression import DOT, Load
from attn_pass.model.index import Axis, Index, Poly, Symbol, axis_index
from attn_pass.targets.kernels import KERNELS, Call, order, picked_by_torch, refusal

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
H200 = catalog.by_name("H200")
UNKNOWN = Poly.of(Symbol("s0"))


def gpu(major: int, minor: int, cudnn: int = 91900, **changes: Any) -> Device:
    return replace(H200, capability=(major, minor), cudnn=cudnn, **changes)


def call(
    *,
    batch: Index = 2,
    heads: int = 4,
    groups: int = 1,
    q_len: Index = 8,
    kv_len: Index = 8,
    dim: Index = 64,
    value_dim: Index | None = None,
    dtype: torch.dtype = BF16,
    dropout: float = 0.0,
    grad: bool = False,
    never_empty: bool = True,
    mask: str = "none",
    device: Device = H200,
    **of_call: Any,
) -> Call:
    b, h, g, i, j, d = (Axis(n, s) for n, s in zip("bhgijd", (batch, heads // groups, groups, q_len, kv_len, dim)))
    e = Axis("e", dim if value_dim is None else value_dim)
    at = {a: axis_index(a) for a in (b, h, g, i, j, d, e)}
    attention = Attention(
        batch=(b,),
        heads=(h, g),
        rows=(i,),
        keys=j,
        dim=d,
        value_dim=(e,),
        query=Load(0, (at[b], at[h], at[g], at[i], at[d])),
        key=Load(1, (at[b], at[h], at[j], at[d])),
        value=Load(2, (at[b], at[h], at[j], at[e])),
        score=DOT,
        scale=1.0,
        sources=tuple(Source(n, (), dtype, torch.device("cpu")) for n in range(3)),
        output=((b,), (h, g), (i,), (e,)),
        compute_dtype=dtype,
        output_dtype=dtype,
        dropout=dropout,
        needs_grad=grad,
        rows_never_empty=never_empty,
    )
    return Call(attention, mask, device, **of_call)


CPU = {"device": cpu()}
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
    ("cudnn", "version"): [({"device": gpu(9, 0, 90000)}, {"device": gpu(9, 0, 89900)})],
    ("cudnn", "dtype"): [({"dtype": FP16}, {"dtype": FP32})],
    ("cudnn", "compute capability"): [({"device": gpu(8, 0)}, {"device": gpu(7, 5)})],
    ("cudnn", "dropout"): [({"dropout": 0.5}, {"dropout": 1.0})],
    ("cudnn", "known head dims"): [({"value_dim": 32}, {"dim": UNKNOWN}), ({}, {"value_dim": UNKNOWN})],
    ("cudnn", "sizes"): [({"q_len": 1}, {"q_len": 0})],
    ("cudnn", "head dim"): [
        ({"dim": 256}, {"dim": 257}),
        ({"dim": 256}, {"dim": 136, "device": gpu(9, 0, 90900)}),
        ({"dim": 128, "device": gpu(8, 0)}, {"dim": 129, "device": gpu(8, 0)}),
        ({"dim": 192, "value_dim": 128, "device": gpu(10, 0)}, {"dim": 192, "device": gpu(10, 0)}),
        (
            {"dim": 192, "value_dim": 128, "device": gpu(10, 0, 91100)},
            {"dim": 192, "value_dim": 128, "device": gpu(10, 0, 91000)},
        ),
        ({"dim": 16, "value_dim": 128, "device": gpu(8, 9)}, {"dim": 16, "value_dim": 136, "device": gpu(8, 9)}),
    ],
    ("cudnn", "mask"): [({"mask": "additive"}, {"mask": "band"})],
    ("cudnn", "mask gradient"): [({"mask": "additive"}, {"mask": "additive", "mask_needs_grad": True})],
    ("cudnn", "empty rows"): [
        ({"mask": "boolean"}, {"mask": "boolean", "never_empty": False}),
        ({"never_empty": False}, {"mask": "additive", "never_empty": False}),
    ],
    ("cudnn", "causal lengths"): [({"mask": "causal"}, {"mask": "causal", "q_len": 7})],
    ("cudnn", "one key"): [({"kv_len": 2}, {"kv_len": 1})],
    ("cudnn", "one query with dropout"): [
        ({"q_len": 2, "dropout": 0.5}, {"q_len": 1, "dropout": 0.5}),
        ({"q_len": 1}, {"q_len": 1, "dropout": 0.5}),
    ],
    ("cudnn", "one query on Blackwell"): [
        ({"q_len": 1}, {"q_len": 1, "device": gpu(10, 0)}),
        ({"q_len": 2, "device": gpu(12, 0)}, {"q_len": 1, "device": gpu(12, 0)}),
    ],
    ("cudnn", "dropout steps"): [({"dropout": 0.125}, {"dropout": 0.1})],
    ("cudnn", "dropout versions"): [
        ({"dropout": 0.25, "device": gpu(9, 0, v)}, {"dropout": 0.25, "device": gpu(9, 0, bad)})
        for v, bad in ((91099, 91100), (91400, 91399))
    ],
    ("cudnn", "grid"): [({"batch": 65535}, {"batch": 65536}), ({"heads": 65535}, {"heads": 65536})],
    ("cudnn", "deterministic"): [({}, {"deterministic": True})],
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
}


def test_every_rule_has_both_sides() -> None:
    assert set(SIDES) == {(kernel, rule.name) for kernel, rules in KERNELS.items() for rule in rules}


@pytest.mark.parametrize(
    ("kernel", "rule", "inside", "outside"),
    [(*key, *pair) for key, pairs in SIDES.items() for pair in pairs],
    ids=[f"{k}, {r}, {n}" for (k, r), pairs in SIDES.items() for n in range(len(pairs))],
)
def test_both_sides(kernel: str, rule: str, inside: dict[str, Any], outside: dict[str, Any]) -> None:
    assert refusal(kernel, call(**inside)) is None
    refused = call(**outside)
    assert rule in [r.name for r in KERNELS[kernel] if not r.holds(refused)]
    assert refusal(kernel, refused)


def test_torch_tries_cudnn_first_on_hopper_alone() -> None:
    assert order(H200) == ("cudnn", "flash", "efficient")
    assert order(gpu(10, 0)) == ("cudnn", "flash", "efficient")
    assert order(gpu(9, 0, 91500)) == ("flash", "efficient")  # behind the unfused form
    assert order(gpu(8, 0)) == order(gpu(12, 0)) == ("flash", "efficient")
    assert order(cpu()) == ("cpu flash",)


@pytest.mark.parametrize(
    ("picked", "given"),
    [
        ("cudnn", {}),
        ("cudnn", {"q_len": 1}),
        ("flash", {"dim": 20}),  # padded by torch for flash alone
        ("cudnn", {"value_dim": 32}),
        (None, {"value_dim": 20}),
        ("efficient", {"dtype": FP32}),
        (None, {"dtype": FP32, "dim": 10}),
        (None, {"dtype": FP32, "groups": 2}),
        (None, {"dtype": FP64}),
        ("cudnn", {"mask": "additive", "never_empty": False}),
        ("efficient", {"mask": "additive", "mask_needs_grad": True}),
        ("flash", {"device": gpu(8, 0)}),
        ("efficient", {"device": gpu(8, 0), "mask": "additive"}),
        (None, {"device": gpu(8, 0), "mask": "additive", "groups": 2}),
        ("flash", {"dropout": 0.1}),
        ("flash", {"kv_len": 1}),
        ("efficient", {"dim": 264}),
    ],
)
def test_what_torch_picks(picked: str | None, given: dict[str, Any]) -> None:
    assert picked_by_torch(call(**given)) == picked


def test_a_restriction_leaves_what_it_names() -> None:
    assert picked_by_torch(call(), ("EFFICIENT_ATTENTION",)) == "efficient"
    assert picked_by_torch(call(), ("MATH",)) is None
