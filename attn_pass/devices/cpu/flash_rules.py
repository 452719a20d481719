"""The rules of torch's fused CPU kernel: ``use_flash_attention_cpp`` in aten's transformers/sdp_utils_cpp.cpp."""

from __future__ import annotations

import torch

from attn_pass.targets.kernel_rules import CHECKS, HALF, PADDABLE, SIZES, KernelRules, Rule, dtype_rule

CPU_FLASH = KernelRules(
    "FLASH_ATTENTION",
    lambda dtype: 1,
    (
        dtype_rule(torch.float32, torch.float64, *HALF),
        Rule(
            "dropout",
            lambda c: f"dropout {c.attention.dropout:g}: torch's fused CPU kernel has no dropout",
            lambda c: not c.attention.dropout,
            f"check_for_dropout in {CHECKS}",
        ),
        PADDABLE.written_in("check_head_dim_size_cpp in transformers/sdp_utils_cpp.cpp"),
        SIZES,
        Rule(
            "mask gradient",
            "the bias needs a gradient, which the fused kernel does not give",
            lambda c: not c.mask_needs_grad,
            f"check_attn_mask_shape in {CHECKS}",
        ),
    ),
)
