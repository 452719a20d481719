"""When Ascend's operators are chosen, and which; what is left, and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import qkv, randn, same
from by_hand import NONE_IN_ONE, SOME, infinite, plain
from npu_programs import (
    BF16,
    FP32,
    FUSION,
    LOWEST,
    Program,
    Tensor,
    biased,
    calls,
    reason,
    reported,
)
from npu_stand_in import FA1, FA3, FIA

from attn_pass.devices.npu import facts as npu_facts


def test_float32_stays_float32_and_goes_to_the_training_operator() -> None:
    for shape in ((2, 4, 6, 9, 16), (2, 4, 6, 9, 17), (1, 1, 1, 1, 4)):
        report = same(plain, *qkv(*shape), rewritten=1, device="Ascend910B", targets=(FIA, FUSION))
        assert report.sites[0].target == FUSION
    assert "half precision" in reason(plain, *qkv(), target=FIA)
    assert "float64" in reason(plain, *qkv(dtype=torch.float64))


def test_families() -> None:
    inputs = qkv(2, 4, 6, 9, 16, dtype=BF16)
    for device, operator in {"Ascend 910B": FIA, "Ascend 910C": FIA, "Ascend910_9391": FIA, "Ascend 950": FA1}.items():
        assert [c["op"] for c in calls(plain, *inputs, device=device)] == [operator]
    assert "310P" in reported(plain, *inputs, device="Ascend310P3").reason
    assert "first generation" in reported(plain, *inputs, device="Ascend910A").reason
    assert "not documented for Ascend 950" in reported(plain, *inputs, device="Ascend 950").refusals[FIA]


def test_without_torch_npu_the_report_says_what_would_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_pass.devices.npu.operators._overload", lambda name: None)
    inputs = qkv(2, 4, 6, 9, 16, dtype=BF16)
    site = reported(plain, *inputs)
    assert site.outcome == "left" and "pip install 'torch-npu==" in site.reason
    assert site.reason.startswith(f"{FIA} would be taken (")
    assert reported(plain, *qkv(grad=True)).reason.startswith(f"{FA3} would be taken (")
    same(plain, *inputs, rewritten=0, device="Ascend910B")


def test_an_npu_of_no_known_family_is_planned_for_as_a2(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = npu_facts.here()
    monkeypatch.setattr("attn_pass.rewriting.run.device_for", lambda *_: unknown)
    site = reported(plain, *qkv(2, 4, 6, 9, 16, dtype=BF16), device=None)
    assert site.target == FIA and any("planned for A2" in a for a in site.assumptions)


# ---------------------------------------------------------------- what must not match


def by_a_weak_fill(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + torch.where(keep, 0.0, -100.0)).softmax(-1) @ v


def by_a_float(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """A float matrix that may hold anything."""
    return (q @ k.mT * 0.3 + (1.0 - keep) * LOWEST).softmax(-1) @ v


def shifted(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """What is kept is not 0."""
    return (q @ k.mT * 0.3 + torch.where(keep, 2.0, LOWEST) * torch.arange(9)).softmax(-1) @ v


NEVER: dict[str, tuple[Program, tuple[Tensor, ...], str]] = {
    "a bias": (biased, (*qkv(2, 4, 6, 9, 16), randn(1, 4, 6, 9)), "pse"),
    "a weak fill": (by_a_weak_fill, (*qkv(2, 4, 6, 9, 16), SOME), "not proved"),
    "a float mask": (by_a_float, (*qkv(2, 4, 6, 9, 16), SOME.float()), "not proved"),
    "what is kept is not 0": (shifted, (*qkv(2, 4, 6, 9, 16), SOME), "not proved"),
    "a soft cap": (lambda q, k, v: ((q @ k.mT).tanh() * 5).softmax(-1) @ v, qkv(), "tanh"),
    "float64": (plain, qkv(dtype=torch.float64), "float64"),
    "300 heads": (plain, qkv(2, 300, 2, 2, 16), "300 heads"),
    "a head dim of 520": (plain, qkv(1, 2, 2, 2, 520), "512"),
    "no keys": (plain, qkv(1, 2, 2, 0, 16), "size is 0"),
}


@pytest.mark.parametrize("name", list(NEVER))
def test_what_is_left_and_why(name: str) -> None:
    fn, inputs, why = NEVER[name]
    assert why in reason(fn, *inputs)
    same(fn, *inputs, rewritten=0, device="Ascend910B", targets=(FIA, FUSION))


def test_more_rules_on_both_sides() -> None:
    inputs = qkv(2, 4, 6, 9, 16, dtype=BF16)
    leaves = qkv(2, 4, 6, 9, 16, dtype=BF16, grad=True)
    dropping = lambda p: lambda q, k, v: F.dropout((q @ k.mT).softmax(-1), p) @ v
    assert "no dropout" in reason(dropping(0.5), *inputs, target=FIA) and not reason(dropping(0.5), *inputs)
    assert "keeps nothing" in reason(dropping(1.0), *inputs)
    assert "a compiled graph would keep" in reason(dropping(0.5), *inputs, device="Ascend 950")
    assert "no gradient" in reason(plain, *leaves, target=FIA) and not reason(plain, *leaves)
    many = qkv(1, 130, 2, 3, 16, kv_heads=1, dtype=BF16)
    assert "130 heads share" in reason(plain, *many, target=FIA) and not reason(plain, *many)
    sink = lambda q, k, v, s: torch.cat([q @ k.mT, s.expand(2, 4, 6, 1)], -1).softmax(-1)[..., :-1] @ v
    assert "sink" in reason(sink, *inputs, randn(1, 4, 1, 1, dtype=BF16))
    learned = (*leaves, randn(1, 1, 6, 9, dtype=BF16, grad=True))
    assert reason(biased, *learned)
    mask = (*inputs, NONE_IN_ONE)
    assert "strict" in reason(infinite, *mask, numerics="strict") and not reason(infinite, *mask)


def test_deterministic_algorithms_in_training() -> None:
    leaves = qkv(2, 4, 6, 9, 16, dtype=BF16, grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        assert "deterministic" in reason(plain, *leaves)
        assert not reason(plain, *qkv(2, 4, 6, 9, 16, dtype=BF16))
    finally:
        torch.use_deterministic_algorithms(False)


def test_sdpa_kernel_is_honoured() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([SDPBackend.MATH]):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros(8, 8))

    assert "sdpa_kernel allows only MATH" in reported(program, *qkv(dtype=BF16)).reason


# ---------------------------------------------------------------- torch's own call


def test_a_call_that_reaches_the_same_operator_is_left() -> None:
    """Nothing is gained: torch's own call ends in v3 with the same operands."""
    with torch.device("meta"):
        q, k, v = (torch.empty(4, 8, 2048, 128, dtype=BF16, requires_grad=True) for _ in range(3))
    for fn in (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1),
    ):
        site = reported(fn, q, k, v, choose="cheapest")
        assert site.outcome == "left" and "already the cheapest form" in site.reason


@pytest.mark.parametrize("grad", [False, True])
def test_calls_that_torch_sends_elsewhere_are_taken(grad: bool) -> None:
    call = F.scaled_dot_product_attention
    dtype = FP32 if grad else BF16
    inputs = qkv(2, 4, 8, 8, 16, dtype=dtype, grad=grad)
    float_mask = torch.full((8, 8), torch.finfo(dtype).min, dtype=dtype).triu(1)
    causal = lambda q, k, v: call(q, k, v, attn_mask=torch.full((8, 8), -1e9, dtype=q.dtype).triu(1))
    report = same(causal, *inputs, rewritten=1, grad=grad, device="Ascend910B", choose="cheapest")
    assert report.sites[0].mask == "causal"
    grouped = qkv(2, 8, 8, 8, 16, kv_heads=2, dtype=dtype, grad=grad)
    program = lambda q, k, v: call(q, *(x.repeat_interleave(4, 1) for x in (k, v)), is_causal=True)
    same(program, *grouped, rewritten=1, grad=grad, device="Ascend910B", choose="cheapest")
    assert "not proved" in reason(call, *inputs, float_mask)


def test_decoding_goes_to_the_inference_operator() -> None:
    with torch.device("meta"):
        q = torch.empty(1, 32, 1, 128, dtype=BF16)
        k, v = (torch.empty(1, 2, 8192, 128, dtype=BF16) for _ in range(2))
    program = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert reported(program, q[:, :8], k, v, choose="cheapest").target == FIA
    assert reported(program, q, k, v, choose="cheapest").outcome == "left"  # every core has a head already


def test_shared_keys_are_folded_into_rows() -> None:
    """Seed S4: torch_npu hands its operator a batch of 1000 queries and one of keys."""
    with torch.device("meta"):
        q = torch.empty(1000, 4, 1, 32, dtype=BF16)
        k, v = (torch.empty(1, 4, 2000, 32, dtype=BF16) for _ in range(2))
    options: dict[str, Any] = {"choose": "cheapest", "poor_cases": None}
    site = reported(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), q, k, v, **options)
    assert site.target == FIA and site.poor_cases == ("shared_kv",)
    small = (randn(10, 4, 1, 32, dtype=BF16), *qkv(1, 4, 1, 20, 32, dtype=BF16)[1:])
    same(plain, *small, rewritten=1, device="Ascend910B", targets=(FIA,))
