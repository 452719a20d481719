"""OpenVINO: ``openvino.convert_model`` turns torch's call into its own ``ScaledDotProductAttention``.

The rows were tried with OpenVINO 2026.4 on the CPU (docs/howto/runtimes.md). Grouped heads with two key heads and more
end in an error there when the model is compiled; with the queries of a group as rows of one head they run. A row that
is fully masked with -inf gives NaN, as products and a softmax do, where torch's call gives 0: a program by hand that
gives 0 there is left. Inputs that nothing reads are not among the converted model's. With one query row the operator
took 0.98 to 1.9 times what products and a softmax take (32 calls of 2 to 64 batch rows, a busy machine, the tenth
percentiles), so such sites are left. With one batch row as well it took 0.73 to 1.06 (16 calls); which dimension is the
batch a program does not always say.
"""

from __future__ import annotations

import torch

from attn_pass.devices.runtimes.runtime import Runtime, groups_rule, table
from attn_pass.model.attention import Attention
from attn_pass.targets.kernel_rules import HALF, Rule


class OpenVino(Runtime):
    """``openvino.convert_model(program)``, and the backend of torch.compile."""

    name = "openvino"
    types = ("openvino",)
    product = "OpenVINO"
    dynamo_backends = ("openvino",)
    backend_traces_again = True
    takes_unequal_head_dims = True
    drops_unread_inputs = True
    kernel_rules = table(
        "translate_scaled_dot_product_attention_common in "
        "openvino/src/frontends/pytorch/src/op/scaled_dot_product_attention.cpp",
        groups_rule(
            "BrgemmShapeInfer in openvino/src/common/snippets/src/shape_inference/shape_infer_instances.cpp: "
            "'Incompatible MatMul batch dimension'"
        ),
        Rule(
            "fully masked rows",
            "a row may be fully masked with -inf: OpenVINO gives NaN, where the program gives 0",
            lambda c: not (c.empty_rows_are_zero and c.eager_form),  # torch's call is NaN there as it is written
            "of this project: observed in ScaledDotProductAttention of openvino 2026.4 when it ran",
        ),
        dtypes=(torch.float32, torch.float64, *HALF),
    )
    one_row = (1.4, 1.4)
    packages = (("openvino", "runs what openvino.convert_model converts", "pip install openvino"),)

    def takes_as_written(self, attention: Attention) -> bool:
        """Not with grouped heads."""
        return attention.groups == 1


FAMILY = OpenVino()
