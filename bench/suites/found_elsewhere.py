"""Minimal programs of what the checks of other compilers found, beside `tests/integration/miscompiled.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Found:
    """A function, its inputs, and which compiler gets it wrong or does not compile it, in words."""

    function: Callable[..., Tensor]
    inputs: Callable[[], tuple[Tensor, ...]]
    where: str


def heads(heads_of_keys: int = 4) -> tuple[Tensor, ...]:
    """Query (2, 4, 8, 16), key and value of as many heads as are given."""
    shapes = ((2, 4, 8, 16), *[(2, heads_of_keys, 8, 16)] * 2)
    return tuple(torch.randn(shape, generator=torch.Generator().manual_seed(n)) for n, shape in enumerate(shapes))


def lowest_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A query whose keys are all masked by the lowest finite number, as transformers' padding does: equal weights."""
    mask = torch.zeros(8, 8).index_fill(0, torch.tensor([3]), torch.finfo(torch.float32).min)
    return F.scaled_dot_product_attention(q, k, v, mask)


def one_row_for_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A mask with one row for all queries (huggingface/diffusers#12987)."""
    keep = torch.ones(2, 1, 1, 8, dtype=torch.bool)
    return F.scaled_dot_product_attention(q, k, v, keep)


def half(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Products in bfloat16, the softmax in float32 (pytorch/pytorch#100452)."""
    q, k, v = (x.bfloat16() for x in (q, k, v))
    return (q @ k.mT * 0.25).float().softmax(-1).bfloat16() @ v


def boolean_added(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A boolean mask that is added, so that True is 1; in the form of T5 in half precision."""
    q, k, v = (x.half().transpose(1, 2) for x in (q, k, v))
    weights = q @ k.permute(0, 1, 3, 2) + torch.ones(4, 4, dtype=torch.bool).tril()
    return F.dropout(weights.float().softmax(-1).type(v.dtype), 0.1, False) @ v


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two heads of keys and values for four of the query."""
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def masked_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A query whose keys are all masked by a boolean mask: torch's call gives 0."""
    keep = torch.ones(8, 8, dtype=torch.bool).index_fill(0, torch.tensor([3]), False)
    return F.scaled_dot_product_attention(q, k, v, keep)


PROGRAMS: Mapping[str, Found] = {
    "a row masked by the lowest number": Found(lowest_row, heads, "ONNX Runtime gives 0"),
    "a mask of one row for all": Found(one_row_for_all, heads, "ONNX Runtime does not run it"),
    "products in bfloat16": Found(half, heads, "ONNX Runtime's CPU provider has no such kernel"),
    "a boolean mask that is added": Found(boolean_added, heads, "Inductor's patterns take it for a condition"),
    "grouped heads": Found(
        grouped, lambda: heads(2), "OpenVINO raises an error, or gives an empty tensor with one thread"
    ),
    "a fully masked row of a call": Found(masked_row, heads, "OpenVINO gives NaN"),
}
