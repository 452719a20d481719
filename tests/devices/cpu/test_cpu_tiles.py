"""Products of bfloat16 in tiles (AMX): which kernels have them, and where they are left out.

That results are right is what every test of the operator in bfloat16 shows, on a processor that has tiles.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from against_eager import qkv
from torch import Tensor

import attn_pass
from attn_pass.devices.cpu import facts
from attn_pass.devices.cpu.kernel import build, source, template
from attn_pass.devices.cpu.kernel.gradients import FORWARD
from attn_pass.devices.cpu.kernel.operator import OPERATOR


@pytest.mark.parametrize(
    ("dtype", "kernel", "trains", "has"),
    [
        (torch.bfloat16, "attend_type", False, True),
        (torch.bfloat16, "attend_many", False, True),
        (torch.bfloat16, "attend_few", False, False),
        (torch.bfloat16, "attend_type", True, False),
        (torch.bfloat16, source.BACKWARD, False, False),
        (torch.float16, "attend_type", False, False),
        (torch.float32, "attend_type", False, False),
    ],
)
def test_which_kernels_have_them(dtype: torch.dtype, kernel: str, trains: bool, has: bool) -> None:
    tiles = source.in_tiles(dtype, kernel, trains=trains)
    sets = source.everywhere(dtype, tiles)
    assert tiles == has == ("namespace amx {" in source.kernel_source(sets, kernel=kernel))
    assert f"best_set({str(has).lower()}, " in source.call_of(dtype, sets, kernel)
    pairs = ["avx512_bf16"] if dtype == torch.bfloat16 else []
    assert [s.name for s in sets if not s.has_tiles] == [*pairs, "avx512", "avx2", "plain"]


@pytest.mark.parametrize("granted", [True, False])
def test_where_tiles_are_refused_nothing_counts_on_them(
    granted: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Else a graph with tiles, cached under the processor's name, would run where they are refused."""
    (tmp_path / "cpuinfo").write_text("flags : avx512bw amx_bf16 amx_tile\n")
    monkeypatch.setattr(source, "_PROCESSOR", tmp_path / "cpuinfo")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for name in ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: True)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: granted)
    asked = (source.has_tiles, source.of_this_machine, facts.detected)
    for question in asked:
        question.cache_clear()
    try:
        name = "amx" if granted else "avx512"
        assert (facts.detected(), source.of_this_machine(True)[0].name) == (name, name)
    finally:
        for question in asked:
            question.cache_clear()


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.25).softmax(-1) @ v


@pytest.mark.usefixtures("quiet_torch")
@pytest.mark.parametrize(("q_len", "grad", "has"), [(40, False, True), (40, True, False), (2, False, False)])
def test_what_inductor_compiles(q_len: int, grad: bool, has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def sets(dtype: torch.dtype, tiles: bool) -> tuple[source.InstructionSet, ...]:
        asked.append(tiles)
        return source.of_this_machine(tiles)

    monkeypatch.setattr(template, "_sets", sets)
    operands = qkv(1, 2, q_len, 40, dim=16, dtype=torch.bfloat16, grad=grad)
    options: dict[str, Any] = {"targets": ("cpu_kernel",), "choose": "fused"}
    with torch.set_grad_enabled(grad):
        torch.compile(attention, backend=attn_pass.backend, options=options, dynamic=False)(*operands)
    assert set(asked) == {has}


@pytest.mark.slow
@pytest.mark.parametrize("knows", [True, False], ids=["knows tiles", "does not"])
def test_any_compiler_takes_the_source(knows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not know tiles compiles the same namespace without them."""
    if not knows:
        monkeypatch.setattr(source, "_KNOWS_TILES", "0")
    only = [s for s in source.ALL if s.has_tiles]
    given = f"const auto& args = *static_cast<const {source.namespace_of(only, '')}::Args*>(given);"
    call = f'extern "C" void run(const void* given) {{\n{given}\n{source.call_of(torch.bfloat16, only)}\n}}\n'
    (tmp_path / "kernel.cpp").write_text(f"{source.kernel_source(only)}\n{call}")
    command = [build.compiler(), "-O1", "-std=c++17", "-w"]
    done = subprocess.run(
        [*command, "-S", "-o", str(tmp_path / "kernel.s"), str(tmp_path / "kernel.cpp")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[:2000]
    made = (tmp_path / "kernel.s").read_text()
    assert ("tdpbf16ps" in made) == knows
    assert knows or "vdpbf16ps" not in made  # slower than floats there


@pytest.mark.slow
def test_a_processor_that_is_not_x86_gets_the_compilers_own_vectors(tmp_path: Path) -> None:
    """A package is compiled from the source of all sets, and on ARM there is one of them."""
    given = f"const auto& args = *static_cast<const {source.namespace_of(source.ALL, '')}::Args*>(given);"
    call = f'extern "C" void run(const void* given) {{\n{given}\n{source.call_of(torch.bfloat16)}\n}}\n'
    # The system's headers are x86's: the kernel's source follows them.
    headers = "".join(f"#include <{name}>\n" for name in ("algorithm", "cmath", "cstdint", "cstring", "unistd.h"))
    text = f"{headers}#undef __x86_64__\n{source.kernel_source()}\n{call}"
    (tmp_path / "kernel.cpp").write_text(text)
    command = [build.compiler(), "-O0", "-std=c++17", "-w", "-fsyntax-only", str(tmp_path / "kernel.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:2000]


@pytest.mark.parametrize("dim", [8, 40, 64, 100])
@pytest.mark.parametrize(("q_len", "kv_len"), [(17, 1), (33, 31), (100, 65), (96, 600)])
def test_the_forward_of_training_is_as_near(q_len: int, kv_len: int, dim: int) -> None:
    """It has no tiles: both are as near to float64 as bfloat16 is, wherever rows and keys end."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, dim).to(torch.bfloat16) for n in (q_len, kv_len, kv_len))
    want = (q.double() @ k.double().mT * 0.3).softmax(-1) @ v.double()
    for out in (OPERATOR(q, k, v, 0.3), FORWARD(q, k, v, 0.3)[0]):
        assert float((out.double() - want).abs().max()) < 0.016 * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_no_number_stays_out_of_other_rows(value: float) -> None:
    """Behind a mask, in the same step of a tile as keys that are kept, and beyond the last key."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 32).to(torch.bfloat16) for n in (50, 90, 90))
    keep = torch.ones(1, 1, 50, 90, dtype=torch.bool)
    keep[..., 7, 33] = keep[..., 60] = keep[..., 80:] = False
    v[..., 33, :], v[..., 60, :], v[..., 85, :] = value, value, value
    out = OPERATOR(q, k, v, 0.3, keep=keep)
    assert out[:, :, 7].isfinite().all() and not out[:, :, [0, 6, 8, 49]].isfinite().any()
    v[..., 33, :] = 1.0
    want = (q.double() @ k.double().mT * 0.3).masked_fill(~keep, float("-inf")).softmax(-1) @ v.double().nan_to_num(
        0, 0, 0
    )
    assert float((OPERATOR(q, k, v, 0.3, keep=keep).double() - want).abs().max()) < 0.02
