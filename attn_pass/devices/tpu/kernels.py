"""JAX's Pallas attention for TPUs as functions of JAX arrays: `flash`, and `splash` for windows and grouped heads.

This module meets the requirements of the library's kernels: the scale is always passed, a bias is passed so that it
counts as if it were added to the scaled scores, although the kernel adds before it multiplies, and what is padded is
masked. Functions are created once per `PallasCall` and kept, so that caches by a function's identity, such as
``torch_xla.core.xla_builder.call_jax`` does, finds them again.

The library is ``jax.experimental.pallas.ops.tpu.flash_attention`` and ``.splash_attention`` (read: jax 0.7.1 and
0.10.2). JAX is imported only when a function is requested.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock
from typing import Any

LOWEST = -(2.0**80)
"""Stands for every lower number that is added. It absorbs any score, and is above `NEVER`, so that a row of the lowest
number alone is the mean of the values, of those only that are not masked by -inf."""
NEVER = -(2.0**100)
"""Stands for -inf, which makes a row whose first block of keys is masked NaN. It stays finite divided by any scale of
`SMALLEST_SCALE` or more, and is above what the kernels mask padded keys with (-2.4e38)."""
SMALLEST_SCALE = 1e-7
_MASKING = -0.99e9  # what is at or below it hides any score, and only the order of such numbers matters
_HIDES = 2.0**10  # they are made so much lower where they are rounded, to hide scores all the same


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
class PallasCall:
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
def forward(call: PallasCall) -> Callable[..., Any]:
    """``(query, key, value, bias, kept) -> result``, the same function at every request.

    Shapes: query (B, H, L, D), key (B, Hkv, S, D), value (B, Hkv, S, D), bias broadcastable to (B, H, L, S) or None,
    kept (B, S) boolean, the keys to keep, or None; the result is (B, H, L, D). A fully masked row is an average of
    values with unspecified weights.
    """

    def attention(query: Any, key: Any, value: Any, bias: Any = None, kept: Any = None) -> Any:
        import jax

        with _interpreted(call.interpret), jax.default_matmul_precision(call.precision):
            return _KERNELS[call.kind](call, query, key, value, _added(call, query, bias), kept)

    attention.__name__ = f"attn_pass_{call.kind}"
    return attention


@functools.cache
def backward(call: PallasCall) -> Callable[..., Any]:
    """``(grad, query, key, value, bias, kept) -> (of query, key, value[, bias])``; the forward is computed again.

    None among the arguments, and what is boolean, has no gradient: the result has three or four parts. A bias of any
    number has the gradient of its score, even if the kernel gets another number.
    """

    def gradients(grad: Any, query: Any, key: Any, value: Any, bias: Any = None, kept: Any = None) -> Any:
        import jax

        with _interpreted(call.interpret), jax.default_matmul_precision(call.precision):
            if bias is None:
                _, pull = jax.vjp(lambda *parts: _KERNELS[call.kind](call, *parts, None, kept), query, key, value)
                return pull(grad)
            added = _added(call, query, bias)
            _, pull = jax.vjp(lambda *parts: _KERNELS[call.kind](call, *parts, kept), query, key, value, added)
            *of_operands, of_added = pull(grad)
            return (*of_operands, (of_added / _scale_inside(call, query, bias)).astype(bias.dtype))

    gradients.__name__ = f"attn_pass_{call.kind}_backward"
    return gradients


@functools.cache
def packed(call: PallasCall, back: bool, biased: bool, masked: bool) -> Callable[..., Any]:
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


def _scale_inside(call: PallasCall, query: Any, bias: Any) -> float:
    """The scale that the kernel multiplies by; 1 where the query is multiplied before.

    The kernel computes ``scale * (query @ key + added)``. In float32 the query takes the scale, and a bias is added as
    it is; in bfloat16 that would round the query.
    """
    return 1.0 if bias is not None and query.dtype.itemsize == 4 else call.scale


def _added(call: PallasCall, query: Any, bias: Any) -> Any:
    """What the kernel adds before it multiplies by its scale, float32, for a bias that is added afterwards.

    A kernel that is compiled may compute ``scale * x - maximum`` without rounding the product. For the largest of a row
    the rest is not 0 then but a part of the maximum, exp of which is infinite in a row of very low numbers alone. So
    such numbers are passed as powers of two, whose products are exact; they mask the same scores.
    """
    import jax
    from jax import numpy as jnp

    if bias is None:
        return None
    bias = bias.astype(jnp.float32)
    scale = _scale_inside(call, query, bias)
    if scale == 1.0:
        return jnp.where(jnp.isneginf(bias), NEVER, jnp.maximum(bias, LOWEST))
    low = jnp.where(jnp.isneginf(bias), NEVER, jnp.maximum(bias * _HIDES, LOWEST)) / scale
    bits = jax.lax.bitcast_convert_type(low, jnp.int32) & jnp.int32(-(1 << 23))  # sign and exponent
    return jnp.where(bias <= _MASKING, jax.lax.bitcast_convert_type(bits, jnp.float32), bias / scale)


def _flash(call: PallasCall, query: Any, key: Any, value: Any, added: Any, kept: Any) -> Any:
    from jax import numpy as jnp
    from jax.experimental.pallas.ops.tpu import flash_attention as library

    if (call.lower, call.upper) not in ((None, None), (None, 0)):
        raise ValueError(f"the flash kernel takes no band {call.lower, call.upper}: windows are splash attention's")
    batch, heads, rows, _ = query.shape
    keys = key.shape[2]
    query, key, value, kept = _padded(call.blocks, query, key, value, kept)
    all_rows, all_keys = query.shape[2], key.shape[2]
    scale = _scale_inside(call, query, added)
    if added is not None:
        query = query if scale == call.scale else query * call.scale
        added = jnp.broadcast_to(added, (batch, heads, rows, keys))
        added = jnp.pad(added, ((0, 0), (0, 0), (0, all_rows - rows), (0, all_keys - keys)))
    segments = None if kept is None else library.SegmentIds(jnp.ones((batch, all_rows), jnp.int32), kept)
    # Without jit: what it caches says nothing of interpretation.
    function = getattr(library.flash_attention, "__wrapped__", library.flash_attention)
    out = function(
        query,
        key,
        value,
        added,
        segments,
        causal=call.upper == 0,
        sm_scale=scale,
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


def _splash(call: PallasCall, query: Any, key: Any, value: Any, added: Any, kept: Any) -> Any:
    import jax
    from jax import numpy as jnp
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    if added is not None:
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


_KERNELS: dict[str, Callable[..., Any]] = {"flash": _flash, "splash": _splash}


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


_LOCK = Lock()
_INSIDE: ContextVar[bool] = ContextVar("attn_pass_interpreted", default=False)


@contextmanager
def _interpreted(interpret: bool) -> Iterator[None]:
    """Inside it the flash kernel is traced to plain XLA operations.

    The library's function has no argument for it, and ``force_tpu_interpret_mode`` needs tokens, which
    ``call_jax`` does not pass on. So the library's module gets another ``pallas_call``, which interprets for callers
    inside, in this thread only: other threads may trace for a TPU in the meantime.
    """
    if not interpret:
        yield
        return
    from jax.experimental.pallas.ops.tpu import flash_attention as library

    with _LOCK:
        if not _Interpreting.users:
            library.pl = _Interpreting(library.pl)
        _Interpreting.users += 1
    token = _INSIDE.set(True)
    try:
        yield
    finally:
        _INSIDE.reset(token)
        with _LOCK:
            _Interpreting.users -= 1
            if not _Interpreting.users:
                library.pl = library.pl.real


class _Interpreting:
    """``jax.experimental.pallas`` whose ``pallas_call`` interprets inside `_interpreted`."""

    users = 0

    def __init__(self, real: Any) -> None:
        self.real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def pallas_call(self, kernel: Any, **arguments: Any) -> Any:
        """The call, interpreted; what is meant for the TPU's compiler is left out."""
        if not _INSIDE.get():
            return self.real.pallas_call(kernel, **arguments)
        arguments.pop("compiler_params", None)
        return self.real.pallas_call(kernel, **{**arguments, "interpret": True})
