"""Kernels chosen by hand for a shape: how to call each operator directly, or why it does not accept the shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attn_pass.measuring.timing import compiled, why
from bench.gpu.environment import Environment
from bench.gpu.shapes import Shape
from bench.gpu.timing import Variant

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Kernel:
    """``refuses`` says why not, or nothing; ``variant`` is how it is called."""

    refuses: Callable[[Shape], str]
    variant: Callable[[Shape, Environment], Variant]


def _in_rows(shape: Shape, q: Tensor, run: Callable[[Tensor], Tensor], pack: bool = False) -> Tensor:
    """The result for query rows that share keys and values and are given as rows of one another.

    Those of all batch rows, (B, H, L, D) as (1, H, B * L, D); with ``pack`` those of a group's heads, as
    (B, Hkv, G * L, D).
    """
    if pack:
        out = run(q.unflatten(1, (shape.kv_heads, shape.groups)).flatten(2, 3))
        return out.unflatten(2, (shape.groups, shape.q_len)).flatten(1, 2)
    if shape.shared:
        out = run(q.transpose(0, 1).flatten(1, 2)[None])
        return out[0].unflatten(1, (shape.batch, shape.q_len)).transpose(0, 1)
    return run(q)


# ---------------------------------------------------------------- flash


def _no_half(shape: Shape) -> str:
    """Why neither flash nor cuDNN takes the operands."""
    if shape.dtype not in _HALF:
        return "half precision only"
    return "head dims up to 256, multiples of 8" if shape.dim % 8 or shape.dim > 256 else ""


def _flash_refuses(shape: Shape) -> str:
    return _no_half(shape) or ("" if shape.mask in ("none", "causal", "window") else "no mask")


def _flash(shape: Shape, env: Environment, pack: bool = False) -> Variant:
    scale, causal = shape.scale, shape.mask == "causal"

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kernel = aten._scaled_dot_product_flash_attention
        return _in_rows(shape, q, lambda q: kernel(q, k, v, 0.0, causal, False, scale=scale)[0], pack)

    def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        sizes = {"window_size_left": shape.window - 1, "window_size_right": 0}
        lengths = (shape.q_len, shape.kv_len)
        out = aten._flash_attention_forward(q, k, v, None, None, *lengths, 0.0, False, False, scale=scale, **sizes)
        return out[0].transpose(1, 2)

    return Variant(windowed if shape.mask == "window" else run)


def _packs(shape: Shape) -> str:
    if shape.groups == 1:
        return "no groups to pack"
    return "" if shape.mask == "none" else "rows of several heads take no mask of rows"


# ---------------------------------------------------------------- cuDNN, efficient


def _cudnn_refuses(shape: Shape) -> str:
    return _no_half(shape) or ("" if shape.mask in ("none", "causal", "bias") else "no such mask")


def _cudnn(shape: Shape, env: Environment) -> Variant:
    def run(q: Tensor, k: Tensor, v: Tensor, *bias: Tensor) -> Tensor:
        given: tuple[Any, ...] = (k, v, bias[0] if bias else None, False, 0.0, shape.mask == "causal", False)
        kernel = aten._scaled_dot_product_cudnn_attention
        return _in_rows(shape, q, lambda q: kernel(q, *given, scale=shape.scale)[0])

    return Variant(run)


def _efficient_refuses(shape: Shape) -> str:
    if shape.groups > 1 and shape.mask != "none":
        return "no grouped heads, and packed rows take no mask of rows"
    if shape.dim % (4 if shape.dtype == torch.float32 else 8):
        return "the head dim is not aligned"
    if shape.mask == "bias" and shape.kv_len % 8:
        return "the bias is not aligned"
    return "" if shape.mask in ("none", "causal", "bias") else "no such mask but as a tensor"


def _efficient(shape: Shape, env: Environment) -> Variant:
    def run(q: Tensor, k: Tensor, v: Tensor, *bias: Tensor) -> Tensor:
        mask = bias[0].expand(shape.batch, -1, -1, -1) if bias else None
        given: tuple[Any, ...] = (k, v, mask, False, 0.0, shape.mask == "causal")
        kernel = aten._scaled_dot_product_efficient_attention
        return _in_rows(shape, q, lambda q: kernel(q, *given, scale=shape.scale)[0], shape.groups > 1)

    return Variant(run)


# ---------------------------------------------------------------- split keys, flex


def _decode_refuses(shape: Shape) -> str:
    if shape.q_len > 64 or shape.q_len * shape.groups > 1024:
        return "few query rows only"
    if shape.dtype not in _HALF or shape.dim % 8 or not 16 <= shape.dim <= 256:
        return "half precision, head dims of 16 to 256"
    return "" if shape.mask in ("none", "bias") and not shape.shared else "no such mask"


def _decode(shape: Shape, env: Environment) -> Variant:
    from attn_pass.devices.cuda.decode_operator import decode

    def run(q: Tensor, k: Tensor, v: Tensor, *bias: Tensor) -> Tensor:
        out: Tensor = decode(q, k, v, bias[0] if bias else None, shape.scale)
        return out

    return Variant(run)


def _flex_refuses(shape: Shape) -> str:
    if shape.dim < 16:
        return "head dims from 16 on"
    return "shared keys are expanded" if shape.shared else ""


def _flex(shape: Shape, env: Environment) -> Variant:
    """FlexAttention, compiled; in a dry run its plain form."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    slopes: list[Tensor] = []

    def score(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if shape.mask == "softcap":
            return 50.0 * torch.tanh(score / 50.0)
        if shape.mask == "alibi":
            return score - slopes[0][h] * (i - j)
        return score + slopes[0][0, h, i, j]

    def keep(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if shape.mask == "window":
            return (i >= j) & (i - j < shape.window)
        return i >= j

    block = None
    if shape.mask not in ("none", "bias"):
        block = create_block_mask(keep, None, None, shape.q_len, shape.kv_len, device=env.device)
    given: dict[str, Any] = {"block_mask": block, "scale": shape.scale, "enable_gqa": shape.groups > 1}
    if shape.mask in ("softcap", "alibi", "bias"):
        given["score_mod"] = score

    def program(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, **given)

    run = program if env.dry else compiled(program)

    def prepare(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> tuple[Any, ...]:
        slopes[:] = more
        return q, k, v

    return Variant(run, prepare)


KERNELS: dict[str, Kernel] = {
    "cudnn": Kernel(_cudnn_refuses, _cudnn),
    "flash": Kernel(_flash_refuses, _flash),
    "flash packed": Kernel(lambda s: _packs(s) or _flash_refuses(s), partial(_flash, pack=True)),
    "efficient": Kernel(_efficient_refuses, _efficient),
    "decode": Kernel(_decode_refuses, _decode),
    "flex": Kernel(_flex_refuses, _flex),
}


def chosen_by_hand(
    shape: Shape, env: Environment, names: tuple[str, ...] = tuple(KERNELS)
) -> tuple[dict[str, Variant], dict[str, str]]:
    """The kernels that take the shape, and why the others do not."""
    taken: dict[str, Variant] = {}
    refused: dict[str, str] = {}
    for name in names:
        reason = KERNELS[name].refuses(shape)
        if reason:
            refused[name] = reason
            continue
        try:
            taken[name] = KERNELS[name].variant(shape, env)
        except Exception as error:
            refused[name] = why(error)
    return taken, refused
