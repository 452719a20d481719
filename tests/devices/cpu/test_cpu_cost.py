"""Predicted times of the CPU kernel and of torch's fused kernel: by sizes, masks and processors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from against_eager import NEG_INF, qkv, randn
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import attn_pass
from attn_pass.devices import roofline
from attn_pass.devices.cpu import facts
from attn_pass.devices.cpu.family import FAMILY
from attn_pass.devices.cpu.kernel import source
from attn_pass.devices.processors import processor
from attn_pass.devices.roofline import Problem

HALF = torch.bfloat16
LENGTH = 1024
Keep = Callable[[Tensor, Tensor], Tensor]


def masked(keep: Keep | None) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * 0.125
        if keep is not None:
            i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None]
            scores = scores.masked_fill(~keep(i, j), NEG_INF)
        return scores.softmax(-1) @ v

    return run


def predicted(fn: Callable[..., Tensor], *inputs: Tensor, dynamic: bool = False) -> dict[str, float]:
    torch._dynamo.reset()
    with torch.no_grad(), FakeTensorMode() as mode:  # explain runs the program, some of whose products take seconds
        (site,) = attn_pass.explain(fn, *map(mode.from_tensor, inputs), attn_pass_dynamic=dynamic).sites
    return site.predicted_us


@pytest.fixture
def of(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets this machine's instruction set."""

    def changed(name: str) -> None:
        here = processor(facts.cpu().cores, name)
        monkeypatch.setattr(FAMILY, "here", lambda at: here)

    return changed


SHARES: dict[str, tuple[Keep, float, float]] = {
    "causal": (lambda i, j: j <= i, 0.5, 0.6),
    "causal to a later key": (lambda i, j: j <= i + 512, 0.85, 0.95),
    "window": (lambda i, j: (j <= i) & (i - j < 128), 0.1, 0.3),
    "keys": (lambda i, j: (j >= 128) & (j < 256), 0.1, 0.2),
    "chunks": (lambda i, j: i // 128 == j // 128, 0.1, 0.3),
    "prefix": (lambda i, j: (j <= i) | (j < 512), 0.6, 0.75),
    "by no name": (lambda i, j: (i * j) % 7 < 3, 1.0, 1.3),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["known", "at run time"])
@pytest.mark.parametrize("name", SHARES)
def test_what_a_mask_leaves_out_costs_nothing(name: str, dynamic: bool, of: Callable[[str], None]) -> None:
    of("avx512")
    keep, least, most = SHARES[name]
    share = in_the_kernel(keep, dynamic) / in_the_kernel(None, dynamic)
    assert least <= share <= most


@cache
def in_the_kernel(keep: Keep | None, dynamic: bool) -> float:
    return predicted(masked(keep), *qkv(1, 8, LENGTH, LENGTH, dim=64), dynamic=dynamic)["cpu_kernel"]


@pytest.mark.parametrize(
    ("name", "dtype", "faster"),
    [
        ("avx512", torch.float32, True),
        ("avx512", HALF, True),
        ("avx512_fp16", torch.float32, True),
        ("avx512_fp16", HALF, True),
        ("avx512_bf16", HALF, True),
        ("amx", torch.float32, True),
        ("amx", HALF, True),
        ("avx2", torch.float32, True),
        ("avx2", HALF, True),
        ("plain", torch.float32, False),
        ("plain", HALF, False),
    ],
)
def test_without_a_mask_the_instruction_set_decides(
    name: str, dtype: torch.dtype, faster: bool, of: Callable[[str], None]
) -> None:
    of(name)
    times = predicted(masked(None), *qkv(1, 8, LENGTH, LENGTH, dim=64, dtype=dtype))
    assert (times["cpu_kernel"] < times["sdpa"]) == faster


@pytest.mark.parametrize("name", ["amx", "plain"])
def test_a_narrow_window_is_worth_it_on_any(name: str, of: Callable[[str], None]) -> None:
    of(name)
    times = predicted(masked(lambda i, j: (j <= i) & (i - j < 8)), *qkv(1, 8, 4096, 4096, dim=64, dtype=HALF))
    assert times["cpu_kernel"] < times["sdpa"]


def test_in_training_only_torchs_kernel_has_tiles(of: Callable[[str], None]) -> None:
    operands = qkv(1, 8, LENGTH, LENGTH, dim=64, dtype=HALF, grad=True)
    for name, faster in (("avx512", True), ("amx", False)):
        of(name)
        torch._dynamo.reset()
        (site,) = attn_pass.explain(masked(None), *operands).sites
        assert (site.predicted_us["cpu_kernel"] < site.predicted_us["sdpa"]) == faster


def test_with_dropout_only_torchs_kernel_has_tiles(of: Callable[[str], None]) -> None:
    """Without gradients, too: the operator that draws is the forward of training."""

    def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.dropout((q @ k.mT * 0.125).softmax(-1), 0.1, True) @ v

    of("amx")
    torch._dynamo.reset()
    operands = qkv(1, 8, LENGTH, LENGTH, dim=64, dtype=HALF)
    options = {"targets": ("cpu_kernel",), "choose": "fused"}
    with torch.no_grad():
        (site,) = attn_pass.explain(dropped, *operands, attn_pass_options=options).sites
    assert site.predicted_us["cpu_kernel"] > 2 * predicted(masked(None), *operands)["cpu_kernel"]


def test_work_beside_products_in_tiles_takes_no_less_time(of: Callable[[str], None]) -> None:
    """A mask that is a tensor is looked at by vectors: it is a larger part of what tiles are faster in."""
    looked_at = {}
    for name in ("avx512", "amx"):
        of(name)
        q, k, v = qkv(1, 8, LENGTH, LENGTH, dim=64, dtype=HALF)
        keep = torch.rand(LENGTH, LENGTH) < 0.5
        with_mask = predicted(lambda q, k, v, m: (q @ k.mT).masked_fill(~m, NEG_INF).softmax(-1) @ v, q, k, v, keep)
        looked_at[name] = with_mask["cpu_kernel"] / predicted(masked(None), q, k, v)["cpu_kernel"]
    assert looked_at["amx"] > looked_at["avx512"] > 1.0


def test_wide_heads_and_short_keys_are_left_to_torch(of: Callable[[str], None]) -> None:
    """Measured: 0.85 to 1.0 times torch's kernel in float32."""
    of("avx512")
    for sizes, dim in (((2, 1, 1024, 1024), 256), ((64, 12, 32, 32), 64)):
        times = predicted(masked(None), *qkv(*sizes, dim=dim))
        assert times["cpu_kernel"] > 0.99 * times["sdpa"]


def test_the_tiles_are_queried_from_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "instruction_set", facts.detected)  # as it is outside of tests
    for tiles in (True, False):
        facts.detected.cache_clear()
        monkeypatch.setattr(source, "has_tiles", lambda tiles=tiles: tiles)
        assert (facts.cpu().instruction_set == "amx") == tiles
    facts.detected.cache_clear()


@pytest.mark.parametrize(("listed", "name"), [("avx512bw avx512_fp16", "avx512_fp16"), ("avx512bw", "avx512")])
def test_products_of_float16_are_a_feature_of_the_processor(
    listed: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(facts, "instruction_set", facts.detected)
    monkeypatch.setattr(source, "has_tiles", lambda: False)
    monkeypatch.setattr(source, "of_this_machine", lambda tiles: tuple(s for s in source.ALL if s.name == "avx512"))
    (tmp_path / "cpuinfo").write_text(f"flags : fpu {listed}\n")
    monkeypatch.setattr(source, "_PROCESSOR", tmp_path / "cpuinfo")
    facts.detected.cache_clear()
    assert facts.cpu().instruction_set == name
    facts.detected.cache_clear()


def test_with_avx2_products_in_half_precision_are_replaced_at_any_cost(of: Callable[[str], None]) -> None:
    """Torch multiplies bfloat16 one number at a time there: 3 GFLOP/s of a core, where float32 has 80."""
    of("avx2")
    for dtype in (torch.bfloat16, torch.float16):
        times = predicted(masked(None), *qkv(1, 8, 256, 256, dim=64, dtype=dtype))
        assert times["leave"] > 10 * times["cpu_kernel"] and times["sdpa"] > times["cpu_kernel"]


def test_where_products_of_float16_are_fast_they_may_stay(of: Callable[[str], None]) -> None:
    operands = qkv(1, 8, 256, 256, dim=64, dtype=torch.float16)
    of("avx512")
    slow = predicted(masked(None), *operands)
    of("avx512_fp16")
    fast = predicted(masked(None), *operands)
    assert slow["leave"] > 5 * slow["sdpa"] and fast["leave"] < 3 * fast["sdpa"]


def test_small_shapes_are_the_kernels_where_it_was_measured_on_them(of: Callable[[str], None]) -> None:
    operands = qkv(1, 4, 64, 64, dim=32)
    of("plain")
    times = predicted(masked(None), *operands)
    assert times["cpu_kernel"] > times["sdpa"]
    for name in ("avx512", "avx512_bf16", "avx512_fp16", "amx", "avx2"):
        of(name)
        times = predicted(masked(None), *operands)
        assert times["cpu_kernel"] < min(times["sdpa"], times["leave"]), name


@pytest.mark.parametrize(("name", "least"), [("avx512_bf16", 1.0), ("avx512_fp16", 1.3), ("amx", 1.3)])
def test_head_dims_that_end_within_a_vector_cost_more_with_few_rows(
    name: str, least: float, of: Callable[[str], None]
) -> None:
    of(name)
    whole, tail = (predicted(masked(None), *qkv(1, 8, 16, 512, dim=dim))["cpu_kernel"] for dim in (80, 72))
    assert tail > least * whole


@pytest.mark.parametrize(
    ("name", "dtype", "poor"),
    [
        ("avx512", HALF, True),
        ("avx512", torch.float16, True),
        ("avx512", torch.float32, False),
        ("avx512_fp16", HALF, True),
        ("avx512_fp16", torch.float16, False),
        ("amx", HALF, False),
    ],
)
def test_half_precision_that_torch_is_slow_in_is_a_poor_case(
    name: str, dtype: torch.dtype, poor: bool, of: Callable[[str], None]
) -> None:
    of(name)
    operands = qkv(1, 8, LENGTH, LENGTH, dim=64, dtype=dtype)
    options = {"targets": ("cpu_kernel",), "choose": "fused"}
    with torch.no_grad():
        (site,) = attn_pass.explain(masked(None), *operands, attn_pass_options=options).sites
    assert site.target == "cpu_kernel"
    assert site.poor_cases == (("half_precision",) if poor else ())


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT * 0.2 + bias).softmax(-1) @ v


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_few_keys_in_training(dtype: torch.dtype, of: Callable[[str], None]) -> None:
    """Measured with products of bfloat16 pairs: 1.1 to 4 times torch's call; windows of a learned bias in float32."""
    of("avx512_bf16")
    windows = (*qkv(64, 4, 49, 49, dim=32, dtype=dtype, grad=True), randn(1, 4, 49, 49, dtype=dtype, grad=True))
    few = qkv(8, 8, 128, 128, dim=64, dtype=dtype, grad=True)
    wanted = ((masked(lambda i, j: j <= i), few, True), (biased, windows, dtype == torch.float32))
    for fn, inputs, is_taken in wanted:
        torch._dynamo.reset()
        (site,) = attn_pass.explain(fn, *inputs).sites
        assert (site.target == "cpu_kernel") == is_taken, site


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_kernel_takes_longer_a_task_where_two_threads_run(dtype: torch.dtype) -> None:
    device = processor(2, "avx512_bf16")
    alone = replace(device, core_times=replace(device.core_times, contended_us=(0.0, 0.0)))

    def more(batch: int) -> float:
        problem = Problem(batch, 1, batch, 1, 32, 32, 64, 64, dtype)
        return roofline.fused(device, problem) - roofline.fused(alone, problem)

    assert more(1) == 0
    each = device.core_times.contended_us[dtype == torch.bfloat16]
    assert more(64) == pytest.approx(32 * each)
