"""The rules of oneDNN's attention on Intel GPUs: ``_fused_sdp_choice_xpu`` in aten's native/mkldnn/xpu/Attention.cpp.

Torch's call tries it first, whatever else is compiled in. Its softmax gives 0 for a row of -inf alone, as the call
does (``inf_as_zero`` in native/mkldnn/xpu/detail/Attention.cpp), and a causal flag is aligned to the first key.
"""

from __future__ import annotations

import torch

from attn_pass.targets.kernel_rules import HALF, PADDABLE, SIZES, Call, KernelRules, Rule, dtype_rule, known_or

NAME = "onednn"
_WIDEST = 576


def _widest(call: Call) -> int:
    return max(known_or(dim, 0) for dim in call.head_dims)


ONEDNN = KernelRules(
    "OVERRIDEABLE",
    lambda dtype: 1,
    (
        dtype_rule(torch.float32, *HALF),
        Rule(
            "dropout",
            lambda c: f"dropout {c.attention.dropout:g}: oneDNN's kernel has no dropout",
            lambda c: not c.attention.dropout,
            "check_for_dropout",
        ),
        PADDABLE,
        Rule(
            "head dim",
            lambda c: f"a head dim of {_widest(c)}: oneDNN's kernel takes up to {_WIDEST}",
            lambda c: _widest(c) <= _WIDEST,
            "check_head_dim_size_xpu; pytorch#152091",
        ),
        SIZES,
        Rule(
            "gradient",
            "oneDNN's kernel has a backward in some versions of torch only, and none for grouped heads",
            lambda c: not c.attention.needs_grad,
            "check_no_grad, check_grad",
        ),
    ),
)
