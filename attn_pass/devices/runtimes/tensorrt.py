"""TensorRT: Torch-TensorRT turns torch's call into TensorRT's own ``IAttention`` layer, everything else into products.

The rows are those of Torch-TensorRT 2.13's converter (``dynamo/conversion``), whose check the tests ask about every
call; TensorRT itself has not run, here or anywhere. It adds a mask in the dtype of the query, has no dropout, and takes
grouped heads. What it makes of a fully masked row is not documented.
"""

from __future__ import annotations

import torch

from attn_pass.devices.runtimes.runtime import Runtime, table
from attn_pass.model.attention import Attention
from attn_pass.targets.kernel_rules import HALF, Rule


class TensorRt(Runtime):
    """``torch_tensorrt.dynamo.compile(program, inputs)``, and the backend of torch.compile."""

    name = "tensorrt"
    types = ("tensorrt",)
    product = "TensorRT"
    dynamo_backends = ("tensorrt", "torch_tensorrt")
    masks_in_compute_dtype = True
    kernel_rules = table(
        "scaled_dot_product_attention_validator in torch_tensorrt/dynamo/conversion/aten_ops_converters.py",
        Rule(
            "fully masked rows",
            "a row may be fully masked, where the program gives 0: what TensorRT gives is not documented",
            lambda c: not c.empty_rows_are_zero,
            "of this project: TensorRT's documentation of IAttention does not mention such rows",
        ),
        dtypes=(torch.float32, *HALF),
    )
    packages = (("torch-tensorrt", "hands programs to TensorRT", "pip install torch-tensorrt"),)

    def takes_as_written(self, attention: Attention) -> bool:
        """Not with values of another size than the keys."""
        return attention.head_dim == attention.value_head_dim


FAMILY = TensorRt()
