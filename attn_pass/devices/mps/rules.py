"""The rules of torch's Metal kernels: ``_scaled_dot_product_attention_math_mps`` in aten's mps/operations/Attention.mm.

Torch's call has one operator there in inference. It picks a kernel for few rows ("vector"), in newer versions one for
many ("prefill"), and otherwise builds a graph of products and a softmax, as attention by hand is one. With torch 2.13
the kernel for few rows also came to take a head dim of 256, a causal mask, and a mask that is added.
"""

from __future__ import annotations

import torch

from attn_pass.targets.kernel_rules import (
    HALF,
    KNOWN,
    NEVER,
    SIZES,
    KernelCall,
    KernelRules,
    Rule,
    dtype_rule,
    equal_causal_lengths,
)

VECTOR_NAME, PREFILL_NAME = "metal vector", "metal prefill"
_CHOICE = "mps/operations/Attention.mm"
_VECTOR_KERNEL, _PREFILL_KERNEL = "mps/kernels/DecodeAttention.h", "mps/kernels/PrefillAttention.h"
_TORCHS_CALL = "scaled_dot_product_attention in transformers/attention.cpp"
_FEW_ROWS = 8
_SINCE = (2, 13)
_VECTOR_DIMS, _VECTOR_DIMS_SINCE = (64, 96, 128), (64, 96, 128, 256)
_PREFILL_DIMS = (32, 64, 72, 80, 96, 128, 256)


def _dims_of(call: KernelCall, accepted: tuple[int, ...]) -> bool:
    first, second = call.head_dims
    return first == second and first in accepted


def _vector_dims(call: KernelCall) -> tuple[int, ...]:
    return _VECTOR_DIMS_SINCE if call.torch_version >= _SINCE else _VECTOR_DIMS


def _wrong_dims(call: KernelCall, rows: str, accepted: tuple[int, ...]) -> str:
    dims = " and ".join(map(str, call.head_dims))
    return f"head dims of {dims}: the kernel for {rows} rows takes {', '.join(map(str, accepted))}"


def _few(call: KernelCall) -> bool:
    a = call.attention
    return isinstance(a.q_len, int) and a.q_len <= _FEW_ROWS


_SHARED: tuple[Rule, ...] = (
    dtype_rule(torch.float32, *HALF, source=f"sdpa_vector_fast_mps, prefill_supported_dtype in {_CHOICE}"),
    Rule(
        "gradient",
        "torch's Metal kernels have no backward",
        lambda c: not c.trains,
        _TORCHS_CALL,
    ),
    Rule("dropout", "torch's Metal kernels have no dropout", lambda c: not c.attention.dropout, _TORCHS_CALL),
    KNOWN.written_in(f"_scaled_dot_product_attention_math_mps in {_CHOICE}"),
    SIZES.written_in(f"supports_sdpa_vector, supports_prefill in {_CHOICE}"),
    Rule(
        # A boolean mask reaches the kernels as it is; what they give for a fully masked row is not known.
        "mask",
        "what torch's Metal kernels give with a mask as a tensor was not confirmed",
        lambda c: not c.has_mask_tensor or c.reached in (VECTOR_NAME, PREFILL_NAME),
        f"sdpa_vector_mask_ok, prefill_mask_compatible in {_CHOICE} take it; not confirmed on a GPU",
        checked=NEVER,
    ),
)
VECTOR = KernelRules(
    "MATH",
    lambda dtype: 1,
    (
        *_SHARED,
        Rule(
            "head dim",
            lambda c: _wrong_dims(c, "few", _vector_dims(c)),
            lambda c: _dims_of(c, _vector_dims(c)),
            f"sdpa_vector_supported_head_dim in {_CHOICE}; INSTANTIATE_SDPA_VECTOR_HEADS in {_VECTOR_KERNEL}",
        ),
        Rule(
            "few rows",
            "the kernel for few rows takes up to 8, and no fewer keys than rows",
            lambda c: (
                _few(c) and isinstance(c.attention.kv_len, int) and int(str(c.attention.q_len)) <= c.attention.kv_len
            ),
            f"supports_sdpa_vector in {_CHOICE}",
        ),
        Rule(
            "causal",
            "torch's Metal kernel for few rows takes causal masks since torch 2.13",
            lambda c: c.mask != "causal" or c.torch_version >= _SINCE,
            f"supports_fast_sdpa in {_CHOICE}; sdpa_vector in {_VECTOR_KERNEL}; pytorch#181855",
        ),
        Rule(
            "additive mask",
            "torch's Metal kernel for few rows takes masks that are added since torch 2.13",
            lambda c: c.mask != "additive" or c.torch_version >= _SINCE,
            f"sdpa_vector_mask_ok in {_CHOICE}; pytorch#183458",
        ),
    ),
)
PREFILL = KernelRules(
    "MATH",
    lambda dtype: 1,
    (
        *_SHARED,
        Rule(
            "version",
            "torch's Metal kernel for many rows came with torch 2.13",
            lambda c: c.torch_version >= _SINCE,
            f"prefill_attention in {_PREFILL_KERNEL}; pytorch#181575",
        ),
        Rule(
            "head dim",
            lambda c: _wrong_dims(c, "many", _PREFILL_DIMS),
            lambda c: _dims_of(c, _PREFILL_DIMS),
            f"prefill_attention_supports_head_dim in {_CHOICE}; instantiate_attn_shapes_helper in {_PREFILL_KERNEL}",
        ),
        Rule(
            "many rows",
            "the kernel for many rows takes 9 or more",
            lambda c: isinstance(c.attention.q_len, int) and not _few(c),
            f"prefill_q_long_enough in {_CHOICE}",
        ),
        Rule(
            "causal lengths",
            "the mask is causal, and there are not as many keys as queries",
            equal_causal_lengths,
            f"prefill_attention in {_PREFILL_KERNEL} takes it; not confirmed on a GPU",
            checked=NEVER,
        ),
    ),
)
