"""Fully masked rows through JAX's flash kernel, interpreted: values and gradients of masks that are a matrix."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from against_eager import NEG_INF, qkv, randn, same

jax = pytest.importorskip("jax")

from interpreted_pallas import interpreted  # noqa: E402

from attn_pass.devices.tpu import kernels, operators  # noqa: E402
from attn_pass.devices.tpu.kernels import LOWEST, NEVER, Blocks, PallasCall  # noqa: E402

Tensor = torch.Tensor
BF16 = torch.bfloat16
MIN = torch.finfo(torch.float32).min


def filled(fill: float, scale: float = 128**-0.5) -> Callable[..., Tensor]:
    return lambda q, k, v, keep: (q @ k.mT * scale).masked_fill(~keep, fill).softmax(-1) @ v


def added(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + bias).softmax(-1) @ v


def both_added(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + bias + mask).softmax(-1) @ v


def added_and_filled(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, keep: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + bias).masked_fill(~keep, -1e30).softmax(-1) @ v


def called(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=128**-0.5)


KEEP = torch.ones(1, 1, 40, 130, dtype=torch.bool).tril(5)
KEEP[0, 0, 2] = False
KEEP[0, 0, 7, 100:] = True
WIDE = qkv(1, 2, 40, 130, 16)
NARROW = qkv(1, 2, 40, 130, 16, dtype=BF16)
LEARNED = randn(1, 2, 40, 130, seed=5)


def lowered(fill: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(KEEP.shape, dtype=dtype).masked_fill(~KEEP, fill)


MIXED = torch.where(torch.arange(130) % 3 == 0, lowered(MIN), lowered(NEG_INF))
CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "filled with -1e9": (filled(-1e9), (*WIDE, KEEP)),
    "filled with the lowest number": (filled(MIN), (*WIDE, KEEP)),
    "filled with -inf": (filled(NEG_INF), (*WIDE, KEEP)),
    "filled, bfloat16": (filled(-1e30), (*NARROW, KEEP)),
    "filled with -inf, bfloat16": (filled(NEG_INF), (*NARROW, KEEP)),
    "-1e9 added": (added, (*WIDE, lowered(-1e9))),
    "-1e30 added": (added, (*WIDE, lowered(-1e30))),
    "the lowest number added": (added, (*WIDE, lowered(MIN))),
    "the lowest number and -inf added": (added, (*WIDE, MIXED)),
    "-1e9 and twice that added": (added, (*WIDE, lowered(-1e9) * (1 + torch.arange(130) % 2))),
    "-1e5 added": (added, (*WIDE, lowered(-1e5))),
    "-1e9 added, bfloat16": (added, (*NARROW, lowered(-1e9, BF16))),
    "the lowest number added, bfloat16": (added, (*NARROW, lowered(torch.finfo(BF16).min, BF16))),
    "-1e9 and twice that added, bfloat16": (
        added,
        (*NARROW, lowered(-1e9, BF16) * (1 + torch.arange(130) % 2).to(BF16)),
    ),
    "the lowest number and -inf added, bfloat16": (
        added,
        (*NARROW, MIXED.clamp(torch.finfo(BF16).min).masked_fill(MIXED == NEG_INF, NEG_INF).to(BF16)),
    ),
    "the lowest number given to a call": (called, (*WIDE, lowered(MIN))),
    "learned, and the lowest number added": (both_added, (*WIDE, LEARNED, lowered(MIN))),
}
SHORT = qkv(2, 4, 6, 9, 16)
SOME = randn(2, 1, 6, 9, seed=3) > 0
SOME[1, 0, 2] = False
INFERENCE = {
    **CASES,
    "a bias, then filled": (added_and_filled, (*WIDE, LEARNED, KEEP)),
    "-1e30 added, short": (added, (*SHORT, torch.zeros(2, 1, 6, 9).masked_fill(~SOME, -1e30))),
    "a bias, then filled, short": (added_and_filled, (*SHORT, randn(1, 4, 6, 9, seed=5), SOME)),
}


@pytest.mark.parametrize("name", list(INFERENCE))
def test_in_inference(name: str) -> None:
    fn, inputs = INFERENCE[name]
    with interpreted() as calls:
        same(fn, *inputs, rewritten=1, device="v5e", targets=("pallas_flash",))
    assert len(calls) == 1


@pytest.mark.parametrize("name", list(CASES))
def test_in_training(name: str) -> None:
    """Of the operands, and of what is added."""
    fn, inputs = CASES[name]
    leaves = [t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
    with interpreted() as calls:
        same(fn, *leaves, rewritten=1, grad=True, device="v6e", targets=("pallas_flash",))
    assert len(calls) == 2


def test_gradients_of_rows_that_have_a_key_are_not_touched_by_one_that_has_none() -> None:
    """The loss takes no part of that row: 0 times an infinite weight is what would be seen."""
    q, k, v = (t.detach().clone().requires_grad_() for t in qkv(1, 2, 128, 128, 16))
    keep = torch.ones(1, 1, 128, 128, dtype=torch.bool).tril(5)
    keep[0, 0, 2] = False
    with interpreted():
        same(lambda *a: filled(-1e9)(*a)[:, :, 3:], q, k, v, keep, rewritten=1, grad=True, device="v5e")


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("back", [False, True])
def test_the_operator_elsewhere_is_the_kernel_for_every_low_number(dtype: torch.dtype, back: bool) -> None:
    fills = (0.0, -1e5, -1e9, -2e9, -1e30, MIN, NEG_INF)
    row = torch.tensor([[fills[(i + j * (j % 7 > i)) % 7] for j in range(128)] for i in range(7)])
    bias = torch.cat([row, torch.tensor(fills)[:, None].expand(7, 128)])[None, None]
    call = PallasCall("flash", 0.3, Blocks(128, 128, 128, 128) if back else Blocks(14, 128))
    tensors = qkv(1, 2, 14, 128, 16, dtype=dtype)
    tensors = (randn(1, 2, 14, 16, dtype=dtype, seed=7), *tensors) if back else tensors
    with interpreted():
        ours = operators._run(call, back, tensors, bias, None)
    wanted = operators.elsewhere(call, back, tensors, bias, None)
    for a, b in zip(*(x if back else (x,) for x in (ours, wanted)), strict=True):
        torch.testing.assert_close(a, b, atol=2e-2 if dtype == BF16 else 1e-4, rtol=1e-2)


@pytest.mark.parametrize("scale", [kernels.SMALLEST_SCALE, 0.3, 300.0])
def test_products_of_masking_numbers_are_exact(scale: float) -> None:
    """However the kernel's ``scale * (query @ key + added) - maximum`` is contracted."""
    query = jax.numpy.zeros((1, 1, 1, 8), jax.numpy.bfloat16)
    bias = jax.numpy.asarray([NEG_INF, MIN, -1e38, -1e30, -2e9, -1e9])
    reported = torch.from_numpy(
        jax.device_get(kernels._added(PallasCall("flash", scale, Blocks(8, 8)), query, bias))
    ).double()
    factor = float(torch.tensor(scale))
    products = reported * factor
    assert torch.equal(products.float().double(), products) and torch.isfinite(reported.float()).all()
    assert (products.diff() >= 0).all() and products[0] < 1.5 * LOWEST < products[-1] < -1e11
    assert products[4] < 1.5 * products[5] and products[0] > 2 * NEVER
