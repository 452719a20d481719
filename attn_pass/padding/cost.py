"""Whether a region is worth its packing: what its products take against what finding the rows takes.

How much padding a batch has is known at run time only. Without any, all rows are packed, and a region costs what
finding them does; so only a model whose products take much longer than that is packed.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Node

from attn_pass.devices.device import Device
from attn_pass.graph.values import tensor_value
from attn_pass.model.index import Index, product
from attn_pass.padding.trace import Proof
from attn_pass.reading.vocabulary import operation_of
from attn_pass.report.text import duration

_PRODUCTS = ("linear", "matmul", "baddbmm")
_LEAST_US = 2000.0  # finding rows and taking them takes about 50 us and the reading of some rows of numbers


def is_product(node: Node) -> bool:
    """Whether an operation is a product of rows with a weight."""
    return operation_of(node) in _PRODUCTS


def too_small(proof: Proof, device: Device, hint: Callable[[Index], int]) -> str:
    """Why packing would not pay even where much is padding; empty where it may."""
    rows = hint(product(proof.group.rows))
    us = 0.0
    for node in proof.layouts:
        weights = [
            v
            for n in node.all_input_nodes
            if is_product(node) and n not in proof.layouts and (v := tensor_value(n)) is not None
        ]
        numbers = max((v.numel() for v in weights if v.dim() == 2), default=0)
        if isinstance(numbers, int) and weights:
            us += 2e-3 * rows * numbers / device.matmul(weights[0].dtype)
    if us >= _LEAST_US:
        return ""
    return f"its products take {duration(us)} by prediction, less than packing pays for"
