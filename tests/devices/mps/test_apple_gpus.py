"""Apple's GPUs, without one: both sides of every rule, the GPU that is here, and what is emitted, run on the CPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_calls import call as asked
from other_gpus import by_hand, causal, decided_for, holed, operands
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as call

import attn_pass
from attn_pass.cli import doctor
from attn_pass.compat import TORCH_VERSION
from attn_pass.devices import registry
from attn_pass.devices.mps.family import FAMILY, GATE
from attn_pass.devices.mps.rules import PREFILL, PREFILL_NAME, VECTOR, VECTOR_NAME
from attn_pass.targets.kernel_rules import KernelRules

decided = partial(decided_for, device="M4")
KERNELS = Path(torch.__file__).parent / "include/ATen/native/mps/kernels"
F16, F32 = torch.float16, torch.float32
many_rows = pytest.mark.skipif(TORCH_VERSION < (2, 13), reason="torch's Metal kernels of 2.13 take more")


@pytest.fixture(autouse=True)
def no_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GATE, raising=False)


@many_rows
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16, F16])
@pytest.mark.parametrize("program", [by_hand, causal])
def test_attention_by_hand_becomes_torchs_call(program: Callable[..., Tensor], dtype: torch.dtype) -> None:
    site = decided(program, operands(dtype=dtype))
    assert (site.outcome, site.target) == ("rewritten", "sdpa"), site.reason
    assert site.decided_for == "M4"


def test_few_rows_do_in_any_version() -> None:
    assert decided(by_hand, operands(rows=8), choose="fused").target == "sdpa"


@many_rows
@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("keys", [4, 9])
def test_few_rows_may_be_causal(keys: int, dim: int) -> None:
    """With fewer rows than keys as well: row ``i`` keeps the keys up to ``i``, as torch's call does."""
    site = decided(causal, operands(dim, dim, rows=4, keys=keys), choose="fused")
    assert site.target == "sdpa" and site.mask == "causal", site.reason


@many_rows
@pytest.mark.parametrize(
    ("rule", "taken", "refused", "why"),
    [
        ("dtype", operands(), operands(dtype=torch.float64), "float64 has no fused kernel"),
        ("gradient", operands(), operands(grad=True), "no backward"),
        ("sizes", operands(), operands(keys=0), "a size is 0"),
        ("head dim", operands(256, 256), operands(48, 48), "head dims of 48 and 48"),
        ("causal lengths", operands(), operands(keys=300), "not as many keys"),
    ],
)
def test_both_sides_of_a_rule(rule: str, taken: Any, refused: Any, why: str) -> None:
    assert rule in {r.name for r in PREFILL.rules}
    only = {"choose": "fused", "targets": ("sdpa",)}
    assert decided(causal, taken, **only).target == "sdpa"
    site = decided(causal, refused, **only)
    assert site.target is None and why in site.refusals.get("sdpa", site.reason)


def test_masks_as_tensors_are_left() -> None:
    site = decided(holed, operands(rows=8), choose="fused", targets=("sdpa",))
    assert site.target is None and "with a mask as a tensor" in site.refusals.get("sdpa", site.reason)


@many_rows
@pytest.mark.parametrize(
    ("rules", "header", "macro", "shape"),
    [
        (
            PREFILL,
            "PrefillAttention.h",
            "instantiate_attn_shapes_helper",
            r"instantiate_attn\(iname,itype,\d+,\d+,(\d+)",
        ),
        (VECTOR, "DecodeAttention.h", "INSTANTIATE_SDPA_VECTOR_HEADS", r"INSTANTIATE_SDPA_VECTOR\(DTYPE,(\d+),\1\)"),
    ],
)
def test_head_dims_of_the_installed_kernels(rules: KernelRules, header: str, macro: str, shape: str) -> None:
    """As the headers of torch's own Metal kernels instantiate them, which every build of torch brings."""
    text = (KERNELS / header).read_text()
    listed = text.partition(f"#define {macro}")[2].partition("#define")[0]
    shapes = re.findall(shape, re.sub(r"[\s\\]", "", listed))
    (rule,) = (r for r in rules.rules if r.name == "head dim")
    m4 = registry.by_name("M4")
    taken = {dim for dim in range(1, 513) if rule.holds(asked(dim=dim, device=m4))}
    assert shapes and taken == set(map(int, shapes))


@many_rows
def test_the_installed_kernels_for_few_rows_are_causal_without_a_mask_alone() -> None:
    kernels = re.findall(r'true, (\w+), \w+, "(\w+)"', (KERNELS / "DecodeAttention.h").read_text())
    assert set(kernels) == {("false", "_masknone_causal")}


def test_a_call_is_left() -> None:
    assert decided(call, operands()).outcome == "left"


@many_rows
def test_the_gate_closes_the_kernel_for_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GATE, "1")
    assert decided(causal, operands(), choose="fused").target is None
    assert decided(by_hand, operands(rows=8), choose="fused").target == "sdpa"
    monkeypatch.setenv(GATE, "0")
    assert decided(causal, operands(), choose="fused").target == "sdpa"


@many_rows
@pytest.mark.parametrize("program", [by_hand, causal])
def test_what_is_emitted_computes_the_same(program: Callable[..., Tensor]) -> None:
    inputs = operands(dtype=F32)
    backend = attn_pass.wrap("aot_eager", device="M4", choose="fused", on_error="raise")
    torch._dynamo.reset()
    with torch.no_grad(), attn_pass.record() as report, pytest.warns(attn_pass.AttnPassWarning, match="M4"):
        got = torch.compile(program, backend=backend)(*inputs)
        expected = program(*(x.double() for x in inputs))
    assert report.sites[0].target == "sdpa"
    torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("name", "row"), [("Apple M4", "M4"), ("Apple M4 Max", "M4 Max"), ("Apple M1", "M4")])
def test_the_gpu_that_is_here(name: str, row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of_row = registry.by_name(row)
    assert list(FAMILY.identity()) == [] and FAMILY.here(torch.device("mps")).kernels == ()
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: name, raising=False)
    device = FAMILY.here(torch.device("mps"))
    assert (device.name, device.cores, device.kernels) == (name, of_row.cores, (VECTOR_NAME, PREFILL_NAME))
    assert registry.of_type("mps") is FAMILY is registry.family_of(device)
    assert not FAMILY.keeps_inductors_patterns_off
    (before,) = FAMILY.identity()
    (row_of,) = (f for f in doctor.machine() if f.what == "mps")
    assert row_of.found == name and GATE not in row_of.note
    monkeypatch.setenv(GATE, "1")
    assert GATE in next(f for f in doctor.machine() if f.what == "mps").note
    assert [before] != list(FAMILY.identity())


def test_doctor_says_why_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def note() -> str:
        return next(f.note for f in doctor.machine() if f.what == "MPS device")

    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: False)
    assert "torch is not built for Apple's GPUs" in note()
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)
    assert "torch sees none" in note()


def test_names_of_the_table() -> None:
    for name in FAMILY.names:
        device = registry.by_name(name.lower().replace(" ", ""))
        assert device.type == "mps" and not device.is_here
