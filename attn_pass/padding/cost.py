"""Whether a region is worth its packing: what its products take against what finding the rows takes.

How much padding a batch has is known at run time only. Without any, all rows are packed, and a region costs what
finding them does: there is no second program for such batches, which would have to be compiled as well. So a region is
packed only where that is a small share of its products. Where a new number of rows costs more than the rows that are
padding, all rows are packed as well, which is decided at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import Node

from attn_pass.devices.base import LinearLayer
from attn_pass.devices.device import Device
from attn_pass.graph.names import torch_name
from attn_pass.graph.values import tensor_value
from attn_pass.model.index import Index, product
from attn_pass.padding.rules import ACTIVATED, first_tensor
from attn_pass.padding.trace import Proof
from attn_pass.reading.vocabulary import operation_of
from attn_pass.report.units import duration

_PRODUCTS = ("linear", "matmul", "baddbmm")
_SHARE = 0.02  # of its products' time, which a region without padding may cost
_FINDING_US, _ROW_US = 60.0, 0.1  # measured: 60 us for 512 rows, 0.9 ms for 8,192
_PAIR_US = 5e-4  # of a mask that differs from row to row, for each row and key
_PREPARING_SHARE = 0.05  # where some rows are padding, and their number is a new one


def is_product(node: Node) -> bool:
    """Whether an operation is a product of rows with a weight."""
    return operation_of(node) in _PRODUCTS or torch_name(node) == ACTIVATED


@dataclass(frozen=True)
class Cost:
    """What a region's products take, what finding its rows takes, and a number of rows that is new, in microseconds.

    With the rows are counted the copies around attentions that are called as they were: operands in their places, and
    packed results.
    """

    products: float
    finding: float
    preparing: float

    @property
    def too_small(self) -> str:
        """Why packing would not pay even where much is padding; empty where it may."""
        if self.products * _SHARE >= self.finding and self.products * _PREPARING_SHARE >= self.preparing:
            return ""
        finding = duration(self.finding)
        finding += f", and {duration(self.preparing)} where their number is new" if self.preparing else ""
        return (
            f"its products take {duration(self.products)} by prediction, too little beside finding the rows: {finding}"
        )

    @property
    def least_padding(self) -> float:
        """The share of rows that is left out at least: with fewer rows of padding all are packed."""
        return self.preparing / self.products if self.products else 0.0


def cost_of(
    proof: Proof,
    device: Device,
    hint: Callable[[Index], int],
    new_rows_us: Callable[[LinearLayer], float],
    linear_gflops: Callable[[LinearLayer], float],
    frozen: bool = False,
) -> Cost:
    """What a region costs, by the sizes of its weights.

    ``new_rows_us`` tells what a layer costs for a number of rows that is new, ``linear_gflops`` at which rate it is
    multiplied; ``frozen``: weights are constants.
    """
    rows = hint(product(proof.group.rows))
    us = 0.0
    prepared: dict[tuple[torch.dtype, int, int], float] = {}  # a size of weights once
    for node in proof.layouts:
        weights = [
            v
            for n in node.all_input_nodes
            if is_product(node) and n not in proof.layouts and (v := tensor_value(n)) is not None and v.dim() == 2
        ]
        result = first_tensor(node)
        for weight in weights[:1]:
            numbers = weight.numel()
            if not isinstance(numbers, int):
                continue
            dtype = weight.dtype if result is None else result.dtype  # autocast multiplies in its own
            features, width = map(int, reversed(weight.shape))
            layer = LinearLayer(
                dtype=dtype,
                rows=rows,
                features=features,
                width=width,
                has_bias=True,
                has_static_rows=False,
                by_columns=False,
                is_constant=frozen,
            )
            us += 2e-3 * rows * numbers / linear_gflops(layer)
            prepared[dtype, features, width] = new_rows_us(layer)
    pairs = rows * hint(proof.group.rows.length) if proof.group.mask.is_of_pairs else 0
    finding = _FINDING_US + _ROW_US * rows + _PAIR_US * pairs + _copying(proof, device, rows)
    return Cost(us, finding, sum(prepared.values()))


def _copying(proof: Proof, device: Device, rows: int) -> float:
    """Operands and results of attentions that are called as they were, each read and written once more."""
    us = 0.0
    for site in proof.whole:
        operands = [n for n in site.args[:3] if n in proof.layouts]
        for value in (*map(tensor_value, operands), first_tensor(site)):
            assert value is not None
            numbers = value.shape[1] * value.shape[3]
            size = 2 * rows * numbers * value.dtype.itemsize if isinstance(numbers, int) else 0
            us += device.kernel_us + size / (1e3 * device.memory_gbytes)
    return us
