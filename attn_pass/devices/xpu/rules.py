"""The rules of oneDNN's attention on Intel GPUs: ``_fused_sdp_choice_xpu`` in aten's native/mkldnn/xpu/Attention.cpp.

Torch's call tries it first, whatever else is compiled in. Its softmax gives 0 for a row of -inf alone, as the call
does (``inf_as_zero`` in native/mkldnn/xpu/detail/Attention.cpp), and a causal flag is aligned to the first key. What it
makes of a first call with a mask is kept for the next one, whatever dtype that mask has: masks are handed over in the
dtype of the operands, in which torch's own call makes boolean ones additive.
"""

from __future__ import annotations

import torch

from attn_pass.targets.kernel_rules import (
    CHECKS,
    HALF,
    NEVER,
    PADDABLE,
    SIZES,
    KernelCall,
    KernelRules,
    Rule,
    dtype_rule,
    known_or,
)

NAME = "onednn"
_WIDEST = 576
_CHOICE = "mkldnn/xpu/Attention.cpp"


def _widest(call: KernelCall) -> int:
    return max(known_or(dim, 0) for dim in call.head_dims)


def _has_masks_of_grouped_heads(call: KernelCall) -> bool:
    """Whether heads that share keys have masks of their own, as a tensor."""
    a = call.attention
    used = a.mask.axes()
    return call.has_mask_tensor and a.groups != 1 and any(axis in used for axis in a.heads if axis.size != 1)


ONEDNN = KernelRules(
    "OVERRIDEABLE",
    lambda dtype: 1,
    (
        dtype_rule(torch.float32, *HALF),
        Rule(
            "dropout",
            lambda c: f"dropout {c.attention.dropout:g}: oneDNN's kernel has no dropout",
            lambda c: not c.attention.dropout,
            f"check_for_dropout in {CHECKS}",
        ),
        PADDABLE.written_in(f"check_head_dim_size_xpu in {_CHOICE}"),
        Rule(
            "head dim",
            lambda c: f"a head dim of {_widest(c)}: oneDNN's kernel takes up to {_WIDEST}",
            lambda c: _widest(c) <= _WIDEST,
            f"check_head_dim_size_xpu in {_CHOICE}; pytorch#152091",
        ),
        SIZES,
        Rule(
            "masks of grouped heads",
            "heads that share keys have masks of their own, and oneDNN's kernel takes a mask for all of a group",
            lambda c: not _has_masks_of_grouped_heads(c),
            "SDPALogicalParams in mkldnn/xpu/detail/Attention.cpp: the query is viewed by groups, the mask is not",
            checked=NEVER,
        ),
        Rule(
            "gradient",
            "oneDNN's kernel has a backward in some versions of torch only, and none for grouped heads",
            lambda c: not c.attention.needs_grad,
            f"check_no_grad in {_CHOICE}; check_grad in {_CHOICE} of other versions",
        ),
    ),
)
