"""ONNX, opset 23 and newer: torch's exporter turns torch's call into one ``Attention`` node.

The rows were tried with ONNX Runtime 1.31 on its CPU provider (docs/howto/runtimes.md). A mask needs an element for
each row and key there: one of shape (B, 1, 1, S), which torch and the operator's own text allow, ends in an error when
the model is run, so masks are expanded. A row that is fully masked gives 0 if it is masked with -inf or the lowest
number of the dtype, and the mean of the values for any other number; masks are written with another number.
"""

from __future__ import annotations

import torch

from attn_pass.devices.runtimes.runtime import Runtime, table
from attn_pass.targets.kernel_rules import HALF


class Onnx(Runtime):
    """``torch.onnx.export(program, opset_version=23)``, and what runs the result."""

    name = "onnx"
    types = ("onnx",)
    product = "ONNX (opset 23)"
    dynamo_backends = ("onnxrt",)
    takes_unequal_head_dims = True
    kernel_rules = table(
        "aten_scaled_dot_product_attention_23 in torch/onnx/_internal/exporter/_torchlib/ops/nn.py",
        dtypes=(torch.float32, torch.float64, *HALF),
    )
    broadcasts_masks = False
    one_row = (0.95, 0.5)
    many_rows = (1.0, 0.97)
    packages = (("onnxruntime", "runs what torch.onnx exports", "pip install onnx onnxscript onnxruntime"),)


FAMILY = Onnx()
