"""The Pallas targets' rules one by one: settings, descriptions, bands, head dims, costs and tiles."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from pallas_programs import BF16, FP16, FP32, LONG, added, by_hand, considered, decided, masked, window

from attn_pass.devices.device import Device
from attn_pass.devices.registry import device_for
from attn_pass.devices.tpu import cost as cost_xla
from attn_pass.devices.tpu import rules
from attn_pass.devices.tpu.masks import KernelMask
from attn_pass.devices.tpu.pallas import PallasFlash, PallasSplash
from attn_pass.devices.tpu.rules import width
from attn_pass.targets.base import Offer
from attn_pass.targets.problem import problem_of


def here(device: Device) -> Device:
    return dataclasses.replace(device, is_here=True)


REFUSED_HERE: dict[str, tuple[bool, Callable[[Any, Any], tuple[Any, Any]], set[str], str]] = {
    "nothing": (True, lambda a, s: (a, s), set(), ""),
    "autocast to another dtype": (True, lambda a, s: (a, replace(s, autocast=FP16)), set(), "autocast to float16"),
    "autocast to its own": (True, lambda a, s: (a, replace(s, autocast=BF16)), set(), ""),
    "a context that allows torch's kernels": (
        False,
        lambda a, s: (a, replace(s, allowed_backends=("FLASH_ATTENTION",))),
        set(),
        "sdpa_kernel allows only FLASH_ATTENTION",
    ),
    "a scale of 0 under a mask": (True, lambda a, s: (replace(a, scale=0.0), s), set(), "a scale of 0 is too small"),
    "a scale of 0": (False, lambda a, s: (replace(a, scale=0.0), s), set(), ""),
    "scores that are no product": (False, lambda a, s: (replace(a, not_affine="a cap"), s), set(), "a cap"),
    "no jax": (False, lambda a, s: (a, replace(s, device=here(s.device))), {"jax"}, "need jax, not installed"),
    "no flax": (False, lambda a, s: (a, replace(s, device=here(s.device))), {"flax"}, "need flax, not installed"),
    "neither": (False, lambda a, s: (a, replace(s, device=here(s.device))), {"jax", "flax"}, "need jax and flax"),
    "neither, elsewhere": (False, lambda a, s: (a, s), {"jax", "flax"}, ""),
}


@pytest.mark.parametrize("name", list(REFUSED_HERE))
def test_what_a_setting_or_a_description_forbids(name: str) -> None:
    has_bias, changed, absent, reason = REFUSED_HERE[name]
    bias = (torch.empty(2048, 2048, dtype=BF16, device="meta"),)
    attention, setting = considered(added, *bias) if has_bias else considered(by_hand)
    attention, setting = changed(attention, setting)
    with mock.patch.object(rules, "find_spec", lambda name: None if name in absent else object()):
        answer = PallasFlash().consider(attention, "as written", setting)
    assert reason in answer.reason if reason else isinstance(answer, Offer), answer


def test_what_an_offer_is_costed_for() -> None:
    """A matrix, copies, steps and a window all count."""
    device = device_for(torch.device("cpu"), "v6e")
    cost = lambda kind, *given, **o: decided(*given, **o).predicted_us[f"pallas_{kind}"]
    plain = cost("flash", by_hand, "v6e", LONG)
    bias = torch.empty(4, 16, 2048, 2048, dtype=FP32, device="meta")
    assert cost("flash", masked, "v6e", LONG, extra=(bias.to(BF16),)) > 1.2 * plain
    shared = cost("flash", by_hand, "v6e", (4, 16, 4, 2048, 2048, 128), value_dim=96)
    assert shared != cost("flash", by_hand, "v6e", (4, 16, 4, 2048, 2048, 128))
    wide, narrow = (
        cost("splash", functools.partial(window, before=n), "v6e", (1, 8, 8, 16384, 16384, 128)) for n in (8000, 500)
    )
    assert narrow < 0.6 * wide
    problem = problem_of(considered(by_hand)[0], int)
    assert cost_xla.pallas(device, problem, 1000) - cost_xla.pallas(device, problem, 0) > 100


MASKS: tuple[KernelMask, ...] = tuple(
    KernelMask(low, up)
    for low in (None, -9, -5, -3, 0, 1, 4, 6)
    for up in (None, -2, 0, 3, 9)
    if low is not None or up is not None
)


@pytest.mark.parametrize("rows", [1, 4, 7])
@pytest.mark.parametrize("keys", [1, 4, 7])
def test_a_band_leaves_a_row_empty_where_it_does(rows: int, keys: int) -> None:
    for band in MASKS:
        low, up = (-99 if band.lower is None else band.lower), (99 if band.upper is None else band.upper)
        kept = [any(low <= j - i <= up for j in range(keys)) for i in range(rows)]
        assert band.leaves_no_row_empty(rows, keys) == all(kept), (band, kept)


def test_head_dims_over_128_are_multiples_of_it() -> None:
    wanted = {(64, 64): 64, (100, 40): 100, (16, 128): 128, (129, 16): 256, (16, 256): 256, (257, 64): 384}
    assert {dims: width(*dims) for dims in wanted} == wanted


def test_tiles_are_told_of_the_matrix_and_the_window() -> None:
    """What is offered has the tiles for it."""
    shape = (1, 2, 2, 16384, 16384, 128)
    attention, setting = considered(window, shape=shape)
    offer = PallasSplash().consider(attention, "as written", setting)
    assert isinstance(offer, Offer) and (offer.plan.blocks.rows, offer.plan.blocks.keys) == (512, 512)
    bias = torch.empty(16384, 16384, dtype=BF16, device="meta")
    attention, setting = considered(added, bias, shape=shape)
    biased = PallasFlash().consider(attention, "as written", setting)
    attention, setting = considered(by_hand, shape=shape)
    free = PallasFlash().consider(attention, "as written", setting)
    assert isinstance(biased, Offer) and isinstance(free, Offer) and biased.plan.blocks != free.plan.blocks
