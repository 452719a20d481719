"""`attn_pass::linear`: a linear layer by oneDNN, in inference.

It is torch's `mkldnn::_linear_pointwise` under a name of its own: Inductor's lowering of that takes weights that are
constants of the compiled code alone (`onednn_template.py` has the other).
"""

from __future__ import annotations

import torch
from torch import Tensor

LIBRARY = torch.library.Library("attn_pass", "FRAGMENT")
LIBRARY.define(
    "linear(Tensor input, Tensor weight, Tensor? bias=None, str activation='none') -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
ONEDNNS = {"none": ("none", ""), "gelu": ("gelu", "none"), "gelu, tanh": ("gelu", "tanh"), "silu": ("swish", "")}
"""Activations that oneDNN applies where the result is in registers, by torch's names, with oneDNN's.

NaN stays NaN in these; in its relu it may not.
"""


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none") -> Tensor:
    """``activation(input @ weight.T + bias)``: (..., K) and (N, K), which may be transposed in memory, to (..., N)."""
    name, algorithm = ONEDNNS[activation]
    result: Tensor = torch.ops.mkldnn._linear_pointwise.default(input, weight, bias, name, [], algorithm)
    return result


def _shape(input: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none") -> Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


LIBRARY.impl("linear", linear, "CPU")
torch.library.register_fake("attn_pass::linear", _shape, lib=LIBRARY)
OPERATOR = torch.ops.attn_pass.linear.default
