"""Every kernel the targets for TPUs emit, compiled by the TPU's own compiler for each generation. Nothing is run.

`make test-tpu-aot` runs it, in an environment with jax and libtpu. The times the compiler predicts are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("libtpu")

import attn_pass
from attn_pass.devices.tpu.kernels import Blocks, PallasCall, packed
from attn_pass.devices.tpu.rules import FLASH, GENERATIONS, SPLASH, Sizes, blocks_for
from bench.suites.seeds import tpu_aot

BF16, FP32 = torch.bfloat16, torch.float32
NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.bool: "bool"}


def compiled(generation: str, call: PallasCall, back: bool, arrays: list[tuple[tuple[int, ...], str] | None]) -> int:
    """How many kernels the compiled program has; ``arrays`` are query, key, value, bias, kept."""
    *three, bias, kept = arrays
    first = [three[0], *three] if back else three
    given = [*first, *(x for x in (bias, kept) if x is not None)]
    return tpu_aot.compiled(generation, packed(call, back, bias is not None, kept is not None), given).kernels


# ---------------------------------------------------------------- what programs become


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.125).softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def positions(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(q.size(-2), device=q.device)[:, None], torch.arange(k.size(-2), device=q.device)


def masked(keep: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.125).masked_fill(~keep, float("-inf")).softmax(-1) @ v


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = positions(q, k)
    return masked((j <= i) & (j >= i - 512), q, k, v)


def to_the_last_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = positions(q, k)
    return masked(j <= i + (k.size(-2) - q.size(-2)), q, k, v)


def padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keep = k[:, :1, None, :, 0] > 0
    return (q @ k.mT * 0.125).masked_fill(~keep, -1e9).softmax(-1) @ v


def biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = q[:, :1, :, :1] + k[:, :1, None, :, 0]
    return (q @ k.mT * 0.125 + bias).softmax(-1) @ v


# B, H, Hkv, L, S, D
PROGRAMS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], torch.dtype, str]] = {
    "plain": (by_hand, (1, 4, 4, 2048, 2048, 128), BF16, FLASH),
    "plain, float32": (by_hand, (1, 4, 4, 1024, 1024, 64), FP32, FLASH),
    "odd lengths": (by_hand, (2, 4, 4, 197, 197, 64), BF16, FLASH),
    "an odd head dim": (by_hand, (2, 4, 4, 256, 256, 72), BF16, FLASH),
    "a head dim of 192": (by_hand, (1, 2, 2, 1024, 1024, 192), BF16, FLASH),
    "cross attention to 77 keys": (by_hand, (2, 4, 4, 4096, 77, 64), BF16, FLASH),
    "keys no tile divides": (by_hand, (1, 2, 2, 512, 5000, 128), BF16, FLASH),
    "causal": (causal, (1, 4, 4, 2048, 2048, 128), BF16, FLASH),
    "causal, grouped": (causal, (1, 8, 2, 2048, 2048, 128), BF16, SPLASH),
    "a window": (window, (1, 4, 4, 4096, 4096, 128), BF16, SPLASH),
    "to the last key": (to_the_last_key, (1, 4, 4, 300, 1500, 64), BF16, SPLASH),
    "padding": (padded, (2, 4, 4, 512, 512, 64), BF16, FLASH),
    "bias": (biased, (1, 4, 4, 1024, 1024, 64), BF16, FLASH),
}


def emitted(name: str, device: str, grad: bool) -> tuple[PallasCall, list[tuple[tuple[int, ...], str] | None]]:
    """The operator's call in the rewritten graph, and what it is given."""
    program, (batch, heads, kv_heads, rows, keys, dim), dtype, target = PROGRAMS[name]
    found: list[torch.fx.Node] = []

    def keep(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        found.extend(n for n in gm.graph.nodes if n.target is torch.ops.attn_pass_xla.attention.default)
        return gm.forward

    with torch.device("meta"):
        q = torch.empty(batch, heads, rows, dim, dtype=dtype, requires_grad=grad)
        k, v = (torch.empty(batch, kv_heads, keys, dim, dtype=dtype, requires_grad=grad) for _ in range(2))
    torch._dynamo.reset()
    backend = attn_pass.wrap(keep, device=device, targets=(target,), choose="fused", on_error="raise")
    with torch.set_grad_enabled(grad):
        torch.compile(program, backend=backend)(q, k, v)
    (node,) = found
    given = [None if x is None else x.meta["example_value"] for x in node.args[:5]]
    kind, scale, lower, upper, blocks = node.args[5:]
    arrays = [None if t is None else (tuple(t.shape), NAMES[t.dtype]) for t in given]
    return PallasCall(kind, scale, Blocks(*blocks), lower, upper), arrays


@pytest.mark.parametrize("generation", list(GENERATIONS))
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_what_a_program_becomes_compiles(generation: str, name: str) -> None:
    call, arrays = emitted(name, generation, grad=False)
    assert compiled(generation, call, False, arrays) == 1


@pytest.mark.parametrize("generation", list(GENERATIONS))
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_what_a_program_in_training_becomes_compiles(generation: str, name: str) -> None:
    call, arrays = emitted(name, generation, grad=True)
    assert compiled(generation, call, True, arrays) == 3


# ---------------------------------------------------------------- the table of tiles


# Head dim, dtype, mask, training; of float32 with products of full precision, which take the most room.
TABLE = (
    (64, "bfloat16", "bias", True),
    (128, "bfloat16", "none", False),
    (128, "bfloat16", "kept", True),
    (128, "float32", "none", True),
    (128, "float32", "splash", True),
    (256, "bfloat16", "splash", True),
    (256, "float32", "bias", False),
    (512, "bfloat16", "none", True),
    (512, "float32", "kept", False),
)


@pytest.mark.parametrize("generation", list(GENERATIONS))
@pytest.mark.parametrize(("dim", "dtype", "mask", "training"), TABLE)
def test_the_tiles_of_a_shape_fit(generation: str, dim: int, dtype: str, mask: str, training: bool) -> None:
    kind, size = (SPLASH if mask == "splash" else FLASH), 4 if dtype == "float32" else 2
    rows, keys = 1000, 2176
    asked = Sizes(rows, keys, dim, size, biased=mask == "bias", masked=mask == "kept", training=training)
    blocks = blocks_for(kind, generation, asked)
    assert blocks is not None
    precision = "highest" if dtype == "float32" else "default"
    call = PallasCall("splash" if kind == SPLASH else "flash", 0.1, blocks, precision=precision)
    arrays: list[tuple[tuple[int, ...], str] | None] = [((1, 2, n, dim), dtype) for n in (rows, keys, keys)]
    arrays.append(((1, 1, rows, keys), "float32") if mask == "bias" else None)
    arrays.append(((1, keys), "bool") if mask == "kept" else None)
    assert compiled(generation, call, training, arrays) == (3 if training else 1)


# ---------------------------------------------------------------- why there are rules


ONE = [((1, 2, 4096, 128), "bfloat16")] * 3 + [None, None]


def refused(generation: str, call: PallasCall, arrays: Any) -> str:
    with pytest.raises(Exception) as error:
        compiled(generation, call, False, arrays)
    return " ".join(str(error.value).split())


@pytest.mark.parametrize("generation", list(GENERATIONS))
def test_float16_is_refused_by_the_compiler(generation: str) -> None:
    half = [((1, 2, 4096, 128), "float16")] * 3 + [None, None]
    refused(generation, PallasCall("flash", 0.1, Blocks(512, 512)), half)


@pytest.mark.parametrize("generation", list(GENERATIONS))
def test_tiles_of_4096_by_1024_need_more_than_16_mib(generation: str) -> None:
    call = PallasCall("flash", 0.1, Blocks(4096, 1024))
    if GENERATIONS[generation].vmem_bytes == 16 << 20:
        assert "memory" in refused(generation, call, ONE)
    else:
        assert compiled(generation, call, False, ONE) == 1


def test_a_lower_bound_is_no_flag_of_flash() -> None:
    with pytest.raises(ValueError, match="splash"):
        compiled("TPU v5e", replace(PallasCall("flash", 0.1, Blocks(512, 512)), lower=-3), False, ONE)
