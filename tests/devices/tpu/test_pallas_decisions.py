"""Which attentions the Pallas kernels for TPUs accept, by name of the device, from shapes alone; and the reasons."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_eager import NEG_INF, qkv, randn, same
from pallas_programs import (
    BF16,
    FP16,
    FP32,
    LONG,
    TPUS,
    added,
    biased_and_filled,
    by_hand,
    capped,
    causal,
    decided,
    dropped,
    grouped_causal,
    masked,
    scaled,
    to_the_last_key,
    window,
    with_sink,
)
from torch import Tensor

import attn_pass
from attn_pass.devices import registry
from attn_pass.devices.registry import device_for
from attn_pass.devices.tpu import facts as tpu_facts
from attn_pass.devices.tpu.kernels import SMALLEST_SCALE, Blocks
from attn_pass.devices.tpu.rules import FLASH, GENERATIONS, SPLASH, Sizes, blocks_for, vmem
from attn_pass.entries.export import rewrite_exported
from attn_pass.options import Options


@pytest.mark.parametrize("device", TPUS)
@pytest.mark.parametrize("program", [by_hand, causal])
@pytest.mark.parametrize("grad", [False, True])
def test_long_attention_goes_to_flash(device: str, program: Callable[..., Tensor], grad: bool) -> None:
    site = decided(program, device, LONG, grad=grad)
    assert site.target == "pallas_flash", site.reason


@pytest.mark.parametrize("device", TPUS)
def test_windows_and_grouped_heads_go_to_splash(device: str) -> None:
    assert decided(window, device, (2, 8, 8, 4096, 4096, 128)).target == "pallas_splash"
    assert decided(to_the_last_key, device, (2, 8, 8, 512, 4096, 128)).target == "pallas_splash"
    site = decided(grouped_causal, device, (1, 64, 4, 1024, 4096, 128))
    assert site.target == "pallas_splash" and site.predicted_us["pallas_splash"] < site.predicted_us["pallas_flash"]


def test_little_work_is_left() -> None:
    site = decided(by_hand, "v5e", (1, 2, 2, 16, 16, 64))
    assert site.outcome == "left" and "already the cheapest form" in site.reason


MASK = torch.empty(4, 1, 2048, 2048, dtype=torch.bool, device="meta")
REFUSED: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], dict[str, Any], str, str]] = {
    "float16": (by_hand, LONG, {"dtype": FP16}, "no float16", "no float16"),
    "float64": (by_hand, LONG, {"dtype": torch.float64}, "bfloat16 and float32, not float64", "not float64"),
    "dropout": (dropped, LONG, {}, "have no dropout", "have no dropout"),
    "a length not known": (by_hand, LONG, {"growing": True}, "not known when the graph is compiled", "not known"),
    "soft caps": (capped, LONG, {}, "a soft cap", "a soft cap"),
    "a size of 0": (by_hand, (0, 2, 2, 64, 64, 64), {}, "a size is 0", "a size is 0"),
    "a sink": (
        with_sink,
        LONG,
        {"extra": (torch.empty(16, dtype=BF16, device="meta"),)},
        "not pass sinks",
        "not pass sinks",
    ),
    "a scale too small for a mask": (
        functools.partial(scaled, scale=1e-8),
        LONG,
        {"extra": (torch.empty(2048, 2048, dtype=BF16, device="meta"),)},
        "too small for a mask",
        "too small for a mask",
    ),
    "rows added for training would be fully masked": (
        functools.partial(window, before=20),
        (1, 2, 2, 130, 128, 64),
        {"grad": True},
        "takes any other band",
        "not a multiple of 128",
    ),
    "a bias that is filled, in training": (
        biased_and_filled,
        LONG,
        {"grad": True, "extra": (torch.empty(2048, 2048, dtype=BF16, device="meta"), MASK)},
        "scores that are replaced and by a matrix that is added",
        "takes no bias",
    ),
    "a window": (window, LONG, {}, "splash attention takes any other band", ""),
    "more rows than keys": (
        to_the_last_key,
        (1, 2, 2, 64, 32, 64),
        {},
        "splash attention takes any other band",
        "outside the band",
    ),
    "any matrix": (masked, LONG, {"extra": (MASK,)}, "", "takes no bias"),
    "a wide head": (by_hand, (1, 2, 2, 256, 256, 640), {}, "over 512", "over 512"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_every_refusal_has_its_reason(name: str) -> None:
    program, shape, options, flash, splash = REFUSED[name]
    site = decided(program, "v6e", shape, **options)
    for name, reason in (("pallas_flash", flash), ("pallas_splash", splash)):
        if reason:
            assert reason in site.refusals[name]
    if flash and splash:
        assert site.outcome == "left" and flash in site.reason


def test_rows_padded_in_training_would_be_fully_masked() -> None:
    near = functools.partial(window, before=20)
    assert "pallas_splash" not in decided(near, "v6e", (1, 2, 2, 130, 128, 64)).refusals
    assert "pallas_splash" not in decided(near, "v6e", (1, 2, 2, 130, 130, 64), grad=True).refusals
    smallest = functools.partial(scaled, scale=SMALLEST_SCALE)
    bias = torch.empty(2048, 2048, dtype=BF16, device="meta")
    assert "pallas_flash" not in decided(smallest, "v6e", LONG, extra=(bias,)).refusals


def test_strict_numerics_leave_rows_that_may_be_empty() -> None:
    site = decided(masked, "v6e", LONG, extra=(MASK,), numerics="strict")
    assert site.target == "pallas_flash"  # the call gives 0 there itself
    infinite = lambda q, k, v, m: (q @ k.mT).masked_fill(~m, NEG_INF).softmax(-1) @ v
    assert "numerics='strict'" in decided(infinite, "v6e", LONG, extra=(MASK,), numerics="strict").reason


def test_packages_are_given_no_kernel_of_a_tpu() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return by_hand(q, k, v)

    inputs = qkv(1, 1, 8, 8, 16)
    program = torch.export.export(Model(), inputs)
    decision = rewrite_exported(program, Options(device="v5e", choose="fused"), "inductor")
    refused = decision.report.sites[0].refusals["pallas_flash"]
    assert not decision.changed and "AOTInductor compiles for no TPU" in refused


@pytest.mark.parametrize("device", ["cpu", "H200", "Ascend 910B", "TPU v4"])
def test_other_devices_have_none(device: str) -> None:
    site = decided(by_hand, device, LONG)
    assert "no Pallas TPU kernel" in site.refusals["pallas_flash"] and not (site.target or "").startswith("pallas")


def test_a_tpu_is_known_by_its_short_name() -> None:
    for name in TPUS:
        device = device_for(torch.device("cpu"), name)
        assert device.name in GENERATIONS and not device.is_here
        assert device == registry.by_name(device.name)
    assert tpu_facts.here("v5litepod") is not None and tpu_facts.here("v3") is None
    assert tpu_facts.here("v6e").is_here  # type: ignore[union-attr]
    assert device_for(torch.device("xla")).kernels == ()


# ---------------------------------------------------------------- tiles


@pytest.mark.parametrize("generation", list(GENERATIONS))
@pytest.mark.parametrize("kind", [FLASH, SPLASH])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_tiles_divide_the_padded_lengths_and_fit(generation: str, kind: str, training: bool, masked: bool) -> None:
    for rows in (1, 7, 128, 200, 777, 2176, 16384):
        for keys in (13, 128, 300, 1024, 1100, 2176, 16384):
            size = Sizes(rows, keys, 128, 2, masked=masked, training=training)
            b = blocks_for(kind, generation, size)
            assert b is not None
            padded = -(-keys // b.keys) * b.keys
            assert vmem(b.rows, b.keys, size, kind=kind) <= GENERATIONS[generation].vmem_bytes
            assert padded - keys < 512 and (b.keys % 128 == 0 or b.keys == keys)
            if training:
                assert padded % b.keys_back == 0 and b.keys_back % 128 == 0
                padded_rows = -(-rows // b.rows_back) * b.rows_back
                assert padded_rows % b.rows == 0 and padded_rows - rows < 128
            else:
                assert (b.rows_back, b.keys_back) == (0, 0)


def test_tiles_of_the_reported_shape() -> None:
    """(1, 5, 16384, 128), seed S1: 4096 x 1024 do not fit in 16 MiB."""
    size = Sizes(16384, 16384, 128, 2)
    assert blocks_for(FLASH, "TPU v5e", size) == Blocks(1024, 1024)
    assert blocks_for(FLASH, "TPU v6e", size) == Blocks(2048, 1024)
    for (rows, keys), mib in {(4096, 512): 20.3, (2048, 2048): 23.8, (4096, 1024): 29.2, (4096, 2048): 46.1}.items():
        assert vmem(rows, keys, size) / (1 << 20) == pytest.approx(mib, rel=0.1)


def test_what_a_generation_has_of_memory_and_what_a_matrix_takes_of_it() -> None:
    """By the compiler's defaults: what was seen to be refused is not asked for."""
    assert {name: g.vmem_bytes >> 20 for name, g in GENERATIONS.items()} == {
        "TPU v5e": 16,
        "TPU v5p": 16,
        "TPU v6e": 32,
        "TPU7x": 32,
    }
    # 2048 x 1024 fit on a v6e without a matrix, and in 64 MiB with one of float32, which is fetched ahead.
    assert blocks_for(FLASH, "TPU v6e", Sizes(16384, 16384, 256, 4, biased=False)) is not None
    for size in (Sizes(16384, 16384, 128, 2, biased=True), Sizes(16384, 16384, 256, 4, biased=True)):
        blocks = blocks_for(FLASH, "TPU v6e", size)
        assert blocks is not None and blocks.rows * blocks.keys < 2048 * 1024
        assert vmem(blocks.rows, blocks.keys, size) <= 32 << 20


def test_a_wider_operand_has_smaller_tiles() -> None:
    narrow = blocks_for(FLASH, "TPU v5e", Sizes(4096, 4096, 128, 2))
    wide = blocks_for(FLASH, "TPU v5e", Sizes(4096, 4096, 512, 4, biased=True))
    assert narrow is not None and wide is not None and wide.rows * wide.keys < narrow.rows * narrow.keys


# ---------------------------------------------------------------- what is emitted, in plain operators


def ring(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).masked_fill(~keep, -1e9).softmax(-1) @ v


def infinite(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).masked_fill(~keep, NEG_INF).softmax(-1) @ v


def between_two_bands(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The tighter bound counts, whichever comes first."""
    distance = torch.arange(k.size(-2)) - torch.arange(q.size(-2))[:, None]
    keep = (distance <= 0) & (distance >= -9) & (distance <= 3) & (distance >= -4)
    return (q @ k.mT * 0.3).masked_fill(~keep, NEG_INF).softmax(-1) @ v


def kept_by_numbers(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).masked_fill((keep == 0)[:, None, None], NEG_INF).softmax(-1) @ v


SOME = randn(2, 1, 6, 9, seed=3) > 0
EMPTY = SOME.clone()
EMPTY[1, 0, 2] = False
CASES: dict[str, tuple[str, Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "a matrix of fills": ("flash", ring, (*qkv(2, 4, 6, 9, 16), SOME)),
    "a row of fills": ("flash", ring, (*qkv(2, 4, 6, 9, 16), EMPTY)),
    "a row of fills, bfloat16": ("flash", ring, (*qkv(2, 4, 6, 9, 16, dtype=BF16), EMPTY)),
    "a row of -inf": ("flash", infinite, (*qkv(2, 4, 6, 9, 16), EMPTY)),
    "a row a call masks": ("flash", masked, (*qkv(2, 4, 6, 9, 16), EMPTY)),
    "a row of an added mask": (
        "flash",
        added,
        (*qkv(2, 4, 6, 9, 16), torch.zeros(2, 1, 6, 9).masked_fill(~EMPTY, torch.finfo(FP32).min)),
    ),
    "a row of an added -inf": (
        "flash",
        masked,
        (*qkv(2, 4, 6, 9, 16), torch.zeros(2, 1, 6, 9).masked_fill(~EMPTY, NEG_INF)),
    ),
    "a row of fills, narrow values": ("flash", ring, (*qkv(2, 4, 6, 9, 16, value_dim=5), EMPTY)),
    "shared heads and a row of fills": (
        "flash",
        lambda q, k, v, m: ring(q, *(x.repeat_interleave(2, 1) for x in (k, v)), m),
        (*qkv(2, 4, 6, 9, 16, kv_heads=2), EMPTY),
    ),
    "bias": ("flash", added, (*qkv(2, 4, 6, 9, 16), randn(1, 4, 6, 9, seed=5))),
    "expanded": ("flash", by_hand, tuple(x.expand(3, 2, *x.shape[2:]) for x in qkv(1, 1, 6, 9, 16))),
    "permuted": ("flash", by_hand, tuple(randn(2, 3, 16, n, seed=n).mT for n in (5, 7, 7))),
    "one key": ("flash", by_hand, qkv(2, 3, 5, 1, 16)),
    "bands within bands": ("splash", between_two_bands, qkv(1, 2, 12, 12, 16)),
    "keys kept by numbers": ("flash", kept_by_numbers, (*qkv(2, 2, 6, 9, 16), torch.arange(18).view(2, 9) % 3)),
    "a row of -inf and of the lowest number": (
        "flash",
        added,
        (*qkv(2, 4, 6, 9, 16), torch.where(torch.arange(9) < 4, torch.finfo(FP32).min, NEG_INF).expand(6, 9)),
    ),
    "values of another width": ("splash", by_hand, qkv(2, 4, 6, 9, 16, value_dim=10, kv_heads=2)),
}


@pytest.mark.parametrize("name", list(CASES))
def test_it_has_the_meaning_of_the_program(name: str) -> None:
    kind, fn, inputs = CASES[name]
    report = same(fn, *inputs, rewritten=1, device="v5e", targets=(f"pallas_{kind}",))
    assert report.sites[0].target == f"pallas_{kind}"


@pytest.mark.parametrize("name", list(CASES))
def test_gradients_mean_what_was_written(name: str) -> None:
    kind, fn, inputs = CASES[name]
    learned = inputs if name == "bias" else inputs[:3]
    leaves = [t.detach().clone().requires_grad_() for t in learned]
    same(fn, *leaves, *inputs[len(leaves) :], rewritten=1, grad=True, device="v5e", targets=(f"pallas_{kind}",))


def test_an_exported_program_keeps_the_operator() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return window(q, k, v, 5)

    inputs = qkv(1, 2, 40, 40, 16)
    program = torch.export.export(Model(), inputs)
    report = attn_pass.rewrite(program, device="v6e", choose="fused")
    assert report.sites[0].target == "pallas_splash"
    calls = [n.target for n in program.graph.nodes if n.op == "call_function"]
    assert torch.ops.attn_pass_xla.attention.default in calls
    torch.testing.assert_close(program.module()(*inputs), window(*inputs, 5))


@pytest.mark.parametrize("trained", [True, False])
def test_an_exported_program_that_may_be_trained_has_tiles_of_a_backward(trained: bool) -> None:
    """Its values do not show it: its parameters do, and jax's kernel raises in a backward that has no tiles."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = torch.nn.Linear(128, 128)

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return by_hand(self.query(q), k, v)

    program = torch.export.export(Layer().requires_grad_(trained), qkv(1, 4, 256, 256, 128))
    (site,) = attn_pass.rewrite(program, device="v6e", targets=("pallas_flash",), choose="fused").sites
    assert site.target == "pallas_flash"
    (call,) = (n for n in program.graph.nodes if n.target is torch.ops.attn_pass_xla.attention.default)
    assert len(call.args[9]) == (4 if trained else 2)
