"""`attn_pass::linear`: a linear layer by oneDNN, in inference.

It is torch's `mkldnn::_linear_pointwise` under a name of its own: Inductor's lowering of that takes weights that are
constants of the compiled code alone (`lowering.py` has the other).
"""

from __future__ import annotations

import torch
from torch import Tensor

LIBRARY = torch.library.Library("attn_pass", "FRAGMENT")
LIBRARY.define("linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``input @ weight.T + bias``: (..., K) and (N, K), which may be transposed in memory, to (..., N), contiguous."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise.default(input, weight, bias, "none", [], "")
    return result


def _shape(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


LIBRARY.impl("linear", linear, "CPU")
torch.library.register_fake("attn_pass::linear", _shape, lib=LIBRARY)
OPERATOR = torch.ops.attn_pass.linear.default
