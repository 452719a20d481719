"""JAX's Pallas kernels, interpreted: the results of rewritten programs, compared with eager and float64."""

from __future__ import annotations

import dataclasses
import functools
import threading
import types
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from against_eager import NEG_INF, qkv, randn, same

jax = pytest.importorskip("jax")

from interpreted_pallas import interpreted, to_jax, to_torch  # noqa: E402

from attn_pass.devices.tpu import kernels, operators, torch_xla  # noqa: E402
from attn_pass.devices.tpu.kernels import Blocks, PallasCall  # noqa: E402

Tensor = torch.Tensor
BF16 = torch.bfloat16


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float = 0.3) -> Tensor:
    groups = q.size(-3) // k.size(-3)
    if groups != 1:
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    return (q @ k.mT * scale).softmax(-1) @ v


def banded(lower: int | None, upper: int | None, fill: float = NEG_INF) -> Callable[..., Tensor]:
    """``lower <= key - row <= upper``."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        distance = torch.arange(k.size(-2)) - torch.arange(q.size(-2))[:, None]
        keep = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool)
        if lower is not None:
            keep = keep & (distance >= lower)
        if upper is not None:
            keep = keep & (distance <= upper)
        return (q @ k.mT * 0.3).masked_fill(~keep, fill).softmax(-1) @ v

    return program


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + bias).softmax(-1) @ v


def padded(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, fill: float = -1e9) -> Tensor:
    return (q @ k.mT * 0.3).masked_fill(~keep[:, None, None], fill).softmax(-1) @ v


def causal_padded(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    causal = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=causal & keep[:, None, None])


def heads_last() -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(2, 3, 40, 40, 16))


KEPT = torch.arange(160) % 3 != 1
KEPT = torch.stack([KEPT, torch.arange(160) < 100])
FIRST = torch.arange(160) == 0
NONE_IN_ONE = torch.stack([KEPT[0], torch.zeros(160, dtype=torch.bool)])
SPOTTED = torch.where(randn(2, 1, 40, 300, seed=9) > 1, NEG_INF, randn(2, 1, 40, 300, seed=8))
CASES: dict[str, tuple[str, Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "flash, odd lengths": ("flash", plain, qkv(2, 3, 7, 13, 16)),
    "flash, one row": ("flash", plain, qkv(2, 3, 1, 130, 16)),
    "flash, padded keys": ("flash", plain, qkv(1, 2, 40, 1100, 16)),
    "flash, causal": ("flash", banded(None, 0), qkv(1, 2, 300, 300, 16)),
    "flash, causal, fewer rows than keys": ("flash", banded(None, 0), qkv(1, 2, 100, 256, 16)),
    "flash, causal, more rows than keys": ("flash", banded(None, 0), qkv(1, 2, 256, 100, 16)),
    "flash, a negative scale": ("flash", functools.partial(plain, scale=-0.4), qkv(1, 2, 9, 11, 16)),
    "flash, values narrower than keys": ("flash", plain, qkv(1, 2, 9, 11, 24, value_dim=10)),
    "flash, a head dim over 128": ("flash", plain, qkv(1, 1, 9, 128, 144)),
    "flash, shared heads": ("flash", plain, qkv(2, 4, 20, 30, 16, kv_heads=2)),
    "flash, heads last": ("flash", plain, heads_last()),
    "flash, bias": ("flash", biased, (*qkv(2, 2, 40, 300, 16), randn(2, 1, 40, 300, seed=5))),
    "flash, bias with -inf": ("flash", biased, (*qkv(2, 2, 40, 300, 16), SPOTTED)),
    "flash, padding": ("flash", padded, (*qkv(2, 2, 20, 160, 16), KEPT)),
    "flash, padding, a batch row of none": ("flash", padded, (*qkv(2, 2, 20, 160, 16), NONE_IN_ONE)),
    "flash, padding by -inf": (
        "flash",
        functools.partial(padded, fill=NEG_INF),
        (*qkv(2, 2, 20, 160, 16), NONE_IN_ONE),
    ),
    "flash, causal and padding": ("flash", causal_padded, (*qkv(2, 2, 160, 160, 16), KEPT.flip(1))),
    "flash, bfloat16": ("flash", plain, qkv(2, 3, 70, 130, 64, dtype=BF16)),
    "splash, a window": ("splash", banded(-30, 17), qkv(1, 2, 300, 300, 16)),
    "splash, a window before its row": ("splash", banded(-40, -3, -1e9), qkv(1, 2, 20, 300, 16)),
    "splash, causal to the last key": ("splash", banded(None, 100), qkv(1, 2, 60, 160, 16)),
    "splash, shared heads": ("splash", plain, qkv(2, 4, 20, 140, 16, kv_heads=2)),
    "splash, causal and padding": ("splash", causal_padded, (*qkv(2, 2, 160, 160, 16), KEPT.flip(1))),
    "splash, bfloat16": ("splash", banded(None, 0), qkv(1, 2, 130, 130, 64, dtype=BF16)),
}


@pytest.mark.parametrize("name", [n for n in CASES if "before its row" not in n])
def test_the_kernel_equals_the_program(name: str) -> None:
    kind, fn, inputs = CASES[name]
    with interpreted() as calls:
        report = same(fn, *inputs, rewritten=1, device="v5e", targets=(f"pallas_{kind}",))
    assert report.sites[0].target == f"pallas_{kind}" and [c.kind for c in calls] == [kind]


TRAINED = ("flash, odd lengths", "flash, causal", "flash, bias", "flash, shared heads", "splash, a window")


@pytest.mark.parametrize("name", [*TRAINED, "splash, shared heads"])
def test_gradients_through_the_kernel(name: str) -> None:
    kind, fn, inputs = CASES[name]
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    with interpreted() as calls:
        same(fn, *leaves, rewritten=1, grad=True, device="v6e", targets=(f"pallas_{kind}",))
    assert len(calls) == 2 and calls[0].blocks.rows_back


def test_a_bias_reaches_the_kernel_divided_by_the_scale() -> None:
    """The kernel adds before it multiplies: a scale far from 1 would show."""

    def program(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return (q @ k.mT * 8.0 + bias).softmax(-1) @ v

    q, k, v = (0.1 * x for x in qkv(1, 1, 12, 14, 16))
    with interpreted():
        same(program, q, k, v, 3 * randn(1, 1, 12, 14, seed=4), rewritten=1, device="v5e", targets=("pallas_flash",))


# ---------------------------------------------------------------- the operator, on its own


BOTH: dict[str, tuple[PallasCall, tuple[int, int], dict[str, Tensor]]] = {
    "keys in several blocks, the last padded": (PallasCall("flash", 0.7, Blocks(64, 128)), (100, 300), {}),
    "padded and kept": (PallasCall("flash", 0.7, Blocks(100, 256)), (100, 160), {"kept": KEPT}),
    "bias, kept, causal, padded": (
        PallasCall("flash", 0.7, Blocks(128, 128, 128, 128), upper=0),
        (160, 160),
        {"bias": randn(1, 4, 160, 160), "kept": FIRST | KEPT},
    ),
    "a band, padded": (PallasCall("splash", 0.7, Blocks(128, 128, 128, 128), -20, 40), (128, 160), {}),
    "a band, kept": (
        PallasCall("splash", 0.7, Blocks(64, 128), None, 12),
        (128, 160),
        {"kept": FIRST | KEPT},
    ),
}


@pytest.mark.parametrize("name", list(BOTH))
def test_what_runs_elsewhere_is_what_the_kernel_computes(name: str) -> None:
    """So that a graph that was rewritten for a TPU means the same on a machine without one."""
    call, lengths, given = BOTH[name]
    tensors = qkv(2, 4, *lengths, 16, kv_heads=4 if call.kind == "flash" else 2)
    bias, kept = given.get("bias"), given.get("kept")
    with interpreted():
        result = operators._run(call, False, tensors, bias, kept)
    torch.testing.assert_close(result, operators.elsewhere(call, False, tensors, bias, kept), atol=2e-5, rtol=0)
    if not call.blocks.rows_back:
        return
    grad = randn(*result.shape, seed=7)
    with interpreted():
        ours = operators._run(call, True, (grad, *tensors), bias, kept)
    wanted = operators.elsewhere(call, True, (grad, *tensors), bias, kept)
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


SPELLED = PallasCall("flash", 0.5, Blocks(128, 128))
OTHERS = {
    "kind": "splash",
    "scale": 0.25,
    "blocks": Blocks(128, 256),
    "lower": -3,
    "upper": 0,
    "precision": "highest",
    "interpret": True,
}


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(PallasCall)])
def test_a_kernel_of_another_kind_is_another_function(field: str) -> None:
    other = dataclasses.replace(SPELLED, **{field: OTHERS[field]})
    assert other != SPELLED
    for back in (False, True):
        assert kernels.packed(other, back, False, False) is not kernels.packed(SPELLED, back, False, False)


@pytest.mark.parametrize("kind", ["flash", "splash"])
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize(("precision", "seen"), [("default", "DEFAULT"), ("highest", "HIGHEST")])
def test_products_have_the_requested_precision(kind: str, back: bool, precision: str, seen: str) -> None:
    q = jax.ShapeDtypeStruct((1, 1, 128, 128), "float32")
    call = PallasCall(kind, 0.5, Blocks(128, 128, 128, 128), precision=precision)
    text = str(jax.make_jaxpr(kernels.packed(call, back, False, False))(*[q] * (3 + back)))
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) >= 2 and ("HIGHEST" in text) == (seen == "HIGHEST")


@pytest.mark.parametrize("asked", ["default", "high", "highest"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_torch_xla_s_own_precision_is_the_kernels(asked: str, dtype: torch.dtype) -> None:
    backends = types.SimpleNamespace(get_mat_mul_precision=lambda: asked)
    with mock.patch.object(torch_xla, "importlib", mock.Mock(import_module=lambda name: backends)):
        precision = torch_xla._precision(dtype)
    assert precision == ("highest" if dtype == torch.float32 and asked != "default" else "default")


def test_splash_scales_the_query_in_float32() -> None:
    """A scale of bfloat16 would be another one."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library

    scale, q = 1.004, qkv(1, 2, 128, 128, 16, dtype=BF16)[0]
    with mock.patch.object(library, "make_splash_mha", lambda *a, **k: lambda query, key, value: query):
        query = to_jax(q)
        result = kernels.forward(PallasCall("splash", scale, Blocks(128, 128)))(query, query, query)
    assert torch.equal(to_torch(result, BF16), (q.float() * scale).to(BF16))
    assert not torch.equal(to_torch(result, BF16), q * torch.tensor(scale, dtype=BF16))


def test_one_thread_interprets_while_another_does_not() -> None:
    from jax.experimental import pallas
    from jax.experimental.pallas.ops.tpu import flash_attention as library

    inside, done = threading.Event(), threading.Event()

    def hold() -> None:
        with kernels._interpreted(True):
            inside.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    inside.wait(60)
    q = jax.ShapeDtypeStruct((1, 2, 256, 64), jax.numpy.bfloat16)
    function = kernels.packed(PallasCall("flash", 0.625, Blocks(128, 128)), False, False, False)
    with kernels._interpreted(True):
        pass
    text = jax.export.export(jax.jit(function), platforms=["tpu"])(q, q, q).mlir_module()
    done.set()
    holder.join()
    assert text.count("tpu_custom_call") == 1 and library.pl is pallas


def test_functions_are_made_once() -> None:
    """What caches by a function's identity would else keep one for every call."""
    first = kernels.packed(PallasCall("flash", 0.5, Blocks(128, 128)), False, True, False)
    assert kernels.packed(PallasCall("flash", 0.5, Blocks(128, 128)), False, True, False) is first
    assert kernels.packed(PallasCall("flash", 0.25, Blocks(128, 128)), False, True, False) is not first


def test_the_library_is_as_it_was_after_a_trace() -> None:
    from jax.experimental import pallas
    from jax.experimental.pallas.ops.tpu import flash_attention as library

    call = PallasCall("flash", 0.5, Blocks(8, 8), interpret=True)
    q = jax.numpy.ones((1, 1, 8, 8))
    with pytest.raises(ValueError, match="windows are splash"):
        kernels.forward(dataclasses.replace(call, lower=-3))(q, q, q)
    kernels.forward(call)(q, q, q)
    assert library.pl is pallas


def test_a_kernel_for_the_tpu_is_lowered_without_one() -> None:
    q = jax.ShapeDtypeStruct((1, 2, 256, 64), jax.numpy.bfloat16)
    for kind in ("flash", "splash"):
        for back in (False, True):
            call = PallasCall(kind, 0.5, Blocks(128, 128, 128, 128), upper=0)
            function = kernels.packed(call, back, False, False)
            text = jax.export.export(jax.jit(function), platforms=["tpu"])(*[q] * (3 + back)).mlir_module()
            assert text.count("tpu_custom_call") == (3 if back else 1)
