"""The rules of torch's Metal kernels: ``_scaled_dot_product_attention_math_mps`` in aten's mps/operations/Attention.mm.

Torch's call has one operator there in inference. It picks a kernel for few rows ("vector"), in newer versions one for
many ("prefill"), and otherwise builds a graph of products and a softmax, as attention by hand is one.
"""

from __future__ import annotations

import torch

from attn_pass.targets.kernel_rules import (
    HALF,
    KNOWN,
    NEVER,
    SIZES,
    Call,
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
_PREFILL_SINCE = (2, 13)
_VECTOR_DIMS = (64, 96, 128)
_PREFILL_DIMS = (32, 64, 72, 80, 96, 128, 256)


def _dims_of(call: Call, taken: tuple[int, ...]) -> bool:
    first, second = call.head_dims
    return first == second and first in taken


def _few(call: Call) -> bool:
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
        # A boolean mask reaches the kernels as it is; what they give for a row without a key is not known.
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
            lambda c: f"head dims of {' and '.join(map(str, c.head_dims))}: the kernel for few rows takes 64, 96, 128",
            lambda c: _dims_of(c, _VECTOR_DIMS),
            f"sdpa_vector_supported_head_dim in {_CHOICE}",
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
            "the kernel for few rows takes no causal mask in every version of torch",
            lambda c: c.mask != "causal",
            f"supports_sdpa_vector in {_CHOICE}; sdpa_vector in {_VECTOR_KERNEL}, which takes it in torch 2.13",
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
            lambda c: c.torch_version >= _PREFILL_SINCE,
            f"prefill_attention in {_PREFILL_KERNEL}; pytorch#181575",
        ),
        Rule(
            "head dim",
            lambda c: (
                f"head dims of {' and '.join(map(str, c.head_dims))}: the kernel for many rows takes "
                + ", ".join(map(str, _PREFILL_DIMS))
            ),
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
            "causal with unequal lengths",
            equal_causal_lengths,
            f"prefill_attention in {_PREFILL_KERNEL} takes it; not confirmed on a GPU",
            checked=NEVER,
        ),
    ),
)
