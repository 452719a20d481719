"""AMD's GPUs, without one: both sides of every rule, gates, the GPU that is here, and what is emitted, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from other_gpus import by_hand, causal, decided_for, grouped, holed, operands
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as call

import attn_pass
from attn_pass.cli import doctor
from attn_pass.devices import registry
from attn_pass.devices.rocm import gates
from attn_pass.devices.rocm.family import FAMILY
from attn_pass.devices.rocm.rules import EFFICIENT, EFFICIENT_NAME, FLASH, FLASH_NAME

decided = partial(decided_for, device="MI300X")
BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def no_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    for gate in (gates.EXPERIMENTAL_GATE, gates.CK_GATE):
        monkeypatch.delenv(gate, raising=False)


@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16])
@pytest.mark.parametrize("program", [by_hand, causal])
def test_attention_by_hand_becomes_torchs_call(program: Callable[..., Tensor], dtype: torch.dtype) -> None:
    site = decided(program, operands(dtype=dtype))
    assert (site.outcome, site.target) == ("rewritten", "sdpa"), site.reason
    assert site.decided_for == "MI300X"


def test_nvidias_libraries_are_another_devices() -> None:
    def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (20 * torch.tanh(q @ k.mT / 160)).softmax(-1) @ v

    site = decided(capped, operands())
    assert site.outcome == "left" and {"flash_attn", "flash_attn_3"} <= set(site.other_devices)
    assert "flash_attn does not run on rocm devices" in site.refusals["flash_attn"]
    assert "compute capability" not in site.reason


def test_training_does_too() -> None:
    assert decided(causal, operands(grad=True)).target == "sdpa"


@pytest.mark.parametrize(
    ("rule", "taken", "refused", "why"),
    [
        ("dtype", (by_hand, operands()), (by_hand, operands(dtype=torch.float64)), "float64 has no fused kernel"),
        ("sizes", (by_hand, operands(keys=1)), (by_hand, operands(keys=0)), "a size is 0"),
        ("head dim", (by_hand, operands(512, 512)), (by_hand, operands(520, 520)), "the head dim is over"),
        ("mask", (causal, operands()), (holed, operands()), "a whole tile of keys is masked"),
        ("causal lengths", (causal, operands()), (causal, operands(keys=300)), "not as many keys"),
        ("grouped heads", (grouped, operands(heads=2)), (grouped, operands(heads=2, dtype=F32)), "no grouped heads"),
    ],
)
def test_both_sides_of_a_rule(rule: str, taken: Any, refused: Any, why: str) -> None:
    assert rule in {r.name for r in (*FLASH.rules, *EFFICIENT.rules)}
    only = {"choose": "fused", "targets": ("sdpa",)}
    assert decided(*taken, **only).target == "sdpa"
    site = decided(*refused, **only)
    assert site.target is None and why in site.refusals.get("sdpa", site.reason)


@pytest.mark.parametrize("name", ["RX 7900 XTX", "RX 9070 XT"])
def test_an_experimental_gpu_needs_its_gate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = decided(causal, operands(), device=name)
    assert closed.target is None
    assert f"{gates.EXPERIMENTAL_GATE}=1" in closed.refusals.get("sdpa", closed.reason)
    monkeypatch.setenv(gates.EXPERIMENTAL_GATE, "1")
    assert decided(causal, operands(), device=name).target == "sdpa"
    if name == "RX 7900 XTX":  # whose kernels AOTriton has up to 256
        assert decided(by_hand, operands(256, 256), device=name, choose="fused").target == "sdpa"
        assert decided(by_hand, operands(264, 264), device=name, choose="fused").target is None
    monkeypatch.setenv(gates.EXPERIMENTAL_GATE, "true")  # which torch's check_env ignores
    assert decided(causal, operands(), device=name).target is None


def test_a_call_is_left_and_its_mask_with_it() -> None:
    assert decided(call, operands()).outcome == "left"

    def with_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return call(q, k, v, attn_mask=mask)

    assert decided(with_mask, [*operands(), torch.randn(2, 1, 512, 512).to(BF16)]).outcome == "left"


@pytest.mark.parametrize(("program", "heads"), [(by_hand, 8), (causal, 8), (grouped, 2)])
def test_what_is_emitted_computes_the_same(program: Callable[..., Tensor], heads: int) -> None:
    inputs = operands(heads=heads)
    backend = attn_pass.wrap("aot_eager", device="MI300X", choose="fused", on_error="raise")
    torch._dynamo.reset()
    with torch.no_grad(), attn_pass.record() as report, pytest.warns(attn_pass.AttnPassWarning, match="MI300X"):
        got = torch.compile(program, backend=backend)(*inputs)
        expected = program(*(x.double() for x in inputs))
    assert report.sites[0].target == "sdpa"
    torch.testing.assert_close(got.double(), expected, atol=1e-2, rtol=2e-2)


# ---- the GPU that is here


class Properties(SimpleNamespace):
    """A GPU as a torch that is built for ROCm describes one."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def put(name: str, architecture: str, cores: int) -> None:
        properties = Properties(name=name, gcnArchName=f"{architecture}:sramecc+:xnack-", multi_processor_count=cores)
        monkeypatch.setattr(torch.version, "hip", "7.1.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda at=None: properties)

    return put


@pytest.mark.parametrize(
    ("name", "architecture", "row"),
    [
        ("AMD Instinct MI300X", "gfx942", "MI300X"),
        ("AMD Instinct MI300A", "gfx942", "MI300X"),
        ("AMD Instinct MI355X", "gfx950", "MI355X"),
        ("AMD Radeon RX 7900 XTX", "gfx1100", "RX 7900 XTX"),
        ("AMD Radeon RX 7800 XT", "gfx1101", "RX 7900 XTX"),
        ("AMD Radeon Graphics", "gfx906", "MI250X"),
        ("AMD Radeon Graphics", "gfx1030", "MI300X"),
    ],
)
def test_the_gpu_that_is_here(name: str, architecture: str, row: str, gpu: Callable[..., None]) -> None:
    of_row = registry.by_name(row)
    gpu(name, architecture, of_row.cores // 2)
    device = registry.of_type("cuda").here(torch.device("cuda"))
    assert registry.of_type("cuda") is FAMILY and registry.family_of(device) is FAMILY
    assert (device.name, device.generation, device.is_here) == (name, architecture, True)
    assert device.memory_gbytes == of_row.memory_gbytes / 2
    assert device.kernels == (FLASH_NAME, EFFICIENT_NAME)


def test_doctor_names_the_closed_gate(gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu("AMD Radeon RX 7900 XTX", "gfx1100", 96)
    rows = {f.what: f for f in doctor.machine()}
    assert rows["cuda:0"].found == "AMD Radeon RX 7900 XTX (gfx1100)"
    assert f"{gates.EXPERIMENTAL_GATE}=1" in rows["cuda:0"].note and rows["ROCm"].found == "7.1.0"
    monkeypatch.setenv(gates.EXPERIMENTAL_GATE, "1")
    before = list(FAMILY.identity())
    assert {f.what: f for f in doctor.machine()}["cuda:0"].note == "torch's call may use AOTriton"
    gpu("AMD Radeon VII", "gfx906", 60)
    assert "has no fused kernel for gfx906" in {f.what: f for f in doctor.machine()}["cuda:0"].note
    assert list(FAMILY.identity()) != before


def test_a_kernel_that_is_switched_off_is_not_there(gpu: Callable[..., None]) -> None:
    gpu("AMD Instinct MI300X", "gfx942", 304)
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION]):
        device = FAMILY.here(torch.device("cuda"))
        (row,) = (r for r in FAMILY.machine() if r[0] == "cuda:0")
    assert device.kernels == (EFFICIENT_NAME,) and row[2] == f"{FLASH_NAME} is switched off"


def test_ck_is_told(gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu("AMD Instinct MI300X", "gfx942", 304)
    assert FAMILY.here(torch.device("cuda")).flash == "AOTriton"
    monkeypatch.setenv(gates.CK_GATE, "1")
    assert FAMILY.here(torch.device("cuda")).flash == "CK"


def test_ck_has_kernels_where_aotriton_has_none(gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu("AMD Radeon VII", "gfx906", 60)
    before = list(FAMILY.identity())
    monkeypatch.setenv(gates.CK_GATE, "1")
    assert {f.what: f for f in doctor.machine()}["cuda:0"].note == "torch's call may use CK"
    assert list(FAMILY.identity()) != before


def test_a_preference_overrules_the_variable(gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is the preference's initial value."""
    gpu("AMD Instinct MI300X", "gfx942", 304)
    monkeypatch.setenv(gates.CK_GATE, "1")
    choices = torch._C._ROCmFABackend
    for answer, library in ((choices.AOTriton, "AOTriton"), (choices.Ck, "CK"), (choices.Default, "CK")):
        monkeypatch.setattr(torch.backends.cuda, "preferred_rocm_fa_library", lambda answer=answer: answer)
        assert gates.library() == library


def test_switches_of_kernels_are_part_of_the_identity(gpu: Callable[..., None]) -> None:
    """Else Inductor's caches would keep what was compiled for other kernels."""
    gpu("AMD Instinct MI300X", "gfx942", 304)
    before = list(FAMILY.identity())
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION]):
        assert list(FAMILY.identity()) != before


def test_without_rocm_cuda_is_nvidias() -> None:
    assert torch.version.hip is None
    assert registry.of_type("cuda").name == "cuda" and not FAMILY.claims("cuda")
    assert not FAMILY.keeps_inductors_patterns_off
    assert [f.found for f in doctor.machine() if f.what == "ROCm device"] == [""]


def test_names_of_the_table() -> None:
    for name in FAMILY.names:
        device = registry.by_name(name.lower())
        assert registry.family_of(device) is FAMILY and not device.is_here and device.type == "cuda"
        assert gates.is_supported(device.generation) or gates.is_experimental(device.generation)
