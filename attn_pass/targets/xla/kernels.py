"""JAX's Pallas attention for TPUs as functions of JAX arrays: `flash`, and `splash` for windows and grouped heads.

What the library's kernels ask for is met here, once: the scale is always passed, a bias is divided by it because the
kernel adds before it multiplies, and what is padded is masked. Functions are made once for a `Call` and kept, so that
what caches by a function's identity, as ``torch_xla.core.xla_builder.call_jax`` does, finds them again.

The library is ``jax.experimental.pallas.ops.tpu.flash_attention`` and ``.splash_attention`` (read: jax 0.7.1 and
0.10.2). Nothing of JAX is imported before a function is asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

LOWEST = -1e30
"""Stands for every lower bias. It absorbs any score, stays finite divided by any scale of `SMALLEST_SCALE` or more, and
is above what the kernels mask with (-2.4e38), so that a masked key never weighs what a key with the lowest bias does:
for a row of the lowest bias alone that is the mean of the values."""
SMALLEST_SCALE = 1e-7


@dataclass(frozen=True)
class Blocks:
    """Tiles of (query rows, keys), of the forward and of the backward kernels; the latter 0 without gradients.

    Keys are padded to a multiple of ``keys`` and, with gradients, query rows to one of ``rows_back``.
    """

    rows: int
    keys: int
    rows_back: int = 0
    keys_back: int = 0


@dataclass(frozen=True)
class Call:
    """All that a kernel is made for besides its arrays.

    Keys are kept where ``lower <= key - row <= upper``, None being no bound. ``precision`` is that of products of
    float32: "default", which on a TPU takes one pass of bfloat16, as plain products there do, or "highest".
    """

    kind: str  # "flash" or "splash"
    scale: float
    blocks: Blocks
    lower: int | None = None
    upper: int | None = None
    precision: str = "default"
    interpret: bool = False  # as plain XLA operations, for machines without a TPU


@functools.cache
def forward(call: Call) -> Callable[..., Any]:
    """``(query, key, value, bias, kept) -> result``, the same function whenever it is asked for.

    Shapes: query (B, H, L, D), key (B, Hkv, S, D), value (B, Hkv, S, D), bias broadcastable to (B, H, L, S) or None,
    kept (B, S) boolean, the keys to keep, or None; the result is (B, H, L, D). A row that keeps no key is an average of
    values, and which is not said.
    """
    kernel = {"flash": _flash, "splash": _splash}[call.kind]

    def attention(query: Any, key: Any, value: Any, bias: Any = None, kept: Any = None) -> Any:
        import jax

        with _interpreted(call.interpret), jax.default_matmul_precision(call.precision):
            return kernel(call, query, key, value, bias, kept)

    attention.__name__ = f"attn_pass_{call.kind}"
    return attention


@functools.cache
def backward(call: Call) -> Callable[..., Any]:
    """``(grad, query, key, value, bias, kept) -> (of query, key, value[, bias])``; the forward is computed again.

    None among the arguments, and what is boolean, has no gradient: the result has three or four parts.
    """
    run = forward(call)

    def gradients(grad: Any, query: Any, key: Any, value: Any, bias: Any = None, kept: Any = None) -> Any:
        import jax

        with _interpreted(call.interpret), jax.default_matmul_precision(call.precision):
            parts = (query, key, value) if bias is None else (query, key, value, bias)
            _, pull = jax.vjp(lambda *parts: run(*parts, *([None] * (4 - len(parts))), kept), *parts)
            return pull(grad)

    gradients.__name__ = f"attn_pass_{call.kind}_backward"
    return gradients


@functools.cache
def packed(call: Call, back: bool, biased: bool, masked: bool) -> Callable[..., Any]:
    """`forward` or `backward` of the arrays there are, without None in the place of those there are not."""
    function = backward(call) if back else forward(call)
    first = 4 if back else 3

    def attention(*arrays: Any) -> Any:
        rest = list(arrays[first:])
        bias = rest.pop(0) if biased else None
        kept = rest.pop(0) if masked else None
        return function(*arrays[:first], bias, kept)

    attention.__name__ = function.__name__
    return attention


# ---------------------------------------------------------------- flash


def _flash(call: Call, query: Any, key: Any, value: Any, bias: Any, kept: Any) -> Any:
    from jax import numpy as jnp
    from jax.experimental.pallas.ops.tpu import flash_attention as library

    if (call.lower, call.upper) not in ((None, None), (None, 0)):
        raise ValueError(f"the flash kernel takes no band {call.lower, call.upper}: windows are splash attention's")
    batch, heads, rows, _ = query.shape
    keys = key.shape[2]
    query, key, value, kept = _padded(call.blocks, query, key, value, kept)
    all_rows, all_keys = query.shape[2], key.shape[2]
    if bias is not None:
        # The kernel computes scale * (query @ key + ab).
        bias = jnp.maximum(bias.astype(jnp.float32), LOWEST) / call.scale
        bias = jnp.broadcast_to(bias, (batch, heads, rows, keys))
        bias = jnp.pad(bias, ((0, 0), (0, 0), (0, all_rows - rows), (0, all_keys - keys)))
    segments = None if kept is None else library.SegmentIds(jnp.ones((batch, all_rows), jnp.int32), kept)
    # Without jit: what it caches says nothing of interpretation.
    function = getattr(library.flash_attention, "__wrapped__", library.flash_attention)
    out = function(
        query,
        key,
        value,
        bias,
        segments,
        causal=call.upper == 0,
        sm_scale=call.scale,
        block_sizes=_flash_blocks(library, call.blocks),
    )
    return out[:, :, :rows]


def _flash_blocks(library: Any, b: Blocks) -> Any:
    if not b.rows_back:
        return library.BlockSizes(block_q=b.rows, block_k_major=b.keys, block_k=b.keys, block_b=1)
    return library.BlockSizes(
        block_q=b.rows,
        block_k_major=b.keys,
        block_k=b.keys,
        block_b=1,
        block_q_major_dkv=b.rows_back,
        block_q_dkv=b.rows_back,
        block_k_major_dkv=b.keys_back,
        block_k_dkv=b.keys_back,
        block_q_dq=b.rows_back,
        block_k_major_dq=b.keys_back,
        block_k_dq=b.keys_back,
    )


# ---------------------------------------------------------------- splash


def _splash(call: Call, query: Any, key: Any, value: Any, bias: Any, kept: Any) -> Any:
    import jax
    from jax import numpy as jnp
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    if bias is not None:
        raise ValueError("splash attention takes no bias")
    rows, heads = query.shape[2], query.shape[1]
    query, key, value, kept = _padded(call.blocks, query, key, value, kept, rows_too=True)
    shape = (query.shape[2], key.shape[2])
    # The kernel knows no scale.
    query = (query.astype(jnp.float32) * call.scale).astype(query.dtype)
    if (call.lower, call.upper) == (None, None):
        mask = masks.FullMask(shape)
    else:
        left = None if call.lower is None else -call.lower
        mask = masks.LocalMask(shape, window_size=(left, call.upper), offset=0)
    b = call.blocks
    back = {}
    if b.rows_back:
        back = {"block_q_dkv": b.rows_back, "block_kv_dkv": b.keys_back, "block_kv_dkv_compute": b.keys_back}
        back |= {"block_q_dq": b.rows_back, "block_kv_dq": b.keys_back}
    kernel = library.make_splash_mha(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=library.BlockSizes(block_q=b.rows, block_kv=b.keys, block_kv_compute=b.keys, **back),
        head_shards=1,
        q_seq_shards=1,
        interpret=call.interpret,
    )
    if kept is None:
        return jax.vmap(kernel)(query, key, value)[:, :, :rows]
    segments = library.SegmentIds(jnp.ones((query.shape[0], shape[0]), jnp.int32), kept)
    return jax.vmap(kernel)(query, key, value, segments)[:, :, :rows]


# ---------------------------------------------------------------- shared


def _padded(
    blocks: Blocks, query: Any, key: Any, value: Any, kept: Any, *, rows_too: bool = False
) -> tuple[Any, Any, Any, Any]:
    """Operands of lengths the blocks divide, and the keys to keep as segment ids (B, S): 1 kept, 0 not."""
    from jax import numpy as jnp

    rows, keys = query.shape[2], key.shape[2]
    more_rows = -rows % (blocks.rows_back or (blocks.rows if rows_too else 1))
    more_keys = -keys % blocks.keys
    if kept is None and more_keys:
        kept = jnp.ones((key.shape[0], keys), jnp.int32)
    if kept is not None:
        kept = jnp.pad(kept.astype(jnp.int32), ((0, 0), (0, more_keys)))

    def longer(x: Any, by: int) -> Any:
        return jnp.pad(x, ((0, 0), (0, 0), (0, by), (0, 0))) if by else x

    return longer(query, more_rows), longer(key, more_keys), longer(value, more_keys), kept


@contextmanager
def _interpreted(wanted: bool) -> Iterator[None]:
    """Inside it the flash kernel is traced to plain XLA operations.

    The library's function has no argument for it, and ``force_tpu_interpret_mode`` needs tokens, which
    ``call_jax`` does not pass on. So the library's module sees another ``pallas_call`` while it is traced.
    """
    if not wanted:
        yield
        return
    from jax.experimental.pallas.ops.tpu import flash_attention as library

    real = library.pl
    if isinstance(real, _Interpreting):
        yield
        return
    library.pl = _Interpreting(real)
    try:
        yield
    finally:
        library.pl = real


class _Interpreting:
    """``jax.experimental.pallas`` whose ``pallas_call`` interprets."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def pallas_call(self, kernel: Any, **arguments: Any) -> Any:
        """The call, interpreted; what is meant for the TPU's compiler is left out."""
        arguments.pop("compiler_params", None)
        return self._real.pallas_call(kernel, **{**arguments, "interpret": True})
