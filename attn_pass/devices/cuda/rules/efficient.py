"""The rules of the memory-efficient kernel: ``can_use_mem_efficient_attention`` in aten's cuda/sdp_utils.cpp."""

from __future__ import annotations

import torch

from attn_pass.targets.kernel_rules import (
    CHECKS,
    CUDA_CHECKS,
    DROPOUT,
    HALF,
    KNOWN,
    NEVER,
    SIZES,
    KernelRules,
    Rule,
    capability_rule,
    dtype_rule,
    grid,
)

EFFICIENT = KernelRules(
    "EFFICIENT_ATTENTION",
    lambda dtype: 4 if dtype == torch.float32 else 8,
    (
        dtype_rule(torch.float32, *HALF),
        capability_rule((5, 0)),
        Rule(
            "bfloat16",
            "bfloat16 needs compute capability 8.0",
            lambda c: c.dtype != torch.bfloat16 or c.device.capability >= (8, 0),
            f"less_than_sm80_mem_efficient_dtypes in {CUDA_CHECKS}",
        ),
        DROPOUT,
        KNOWN,
        SIZES,
        Rule(
            # From 2.14 on torch's call takes them; its operator still gets one KV head per query head.
            "grouped heads",
            "the efficient kernel does not take grouped heads",
            lambda c: c.attention.groups == 1,
            f"check_batch_size_and_num_heads_dense in {CHECKS}; pytorch#191085",
            checked=((0, 0), (2, 14)),
        ),
        Rule(
            "mask",
            "the efficient kernel takes a band only as a mask tensor",
            lambda c: c.mask != "band",
            "scaled_dot_product_attention in native_functions.yaml: no window",
            checked=NEVER,
        ),
        grid("pytorch#146704, #176096, #177985"),
    ),
    takes_any_mask_rank=True,
)
