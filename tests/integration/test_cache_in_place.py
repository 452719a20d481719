"""transformers' static cache is written in place: in what Inductor emits nothing has the size of the cache."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import get_code

import attn_pass

cache_utils = pytest.importorskip("transformers.cache_utils")

HEADS, CACHE, DIM = 2, 1000, 16
OURS = attn_pass.wrap("inductor", choose="fused", targets=("cpu_kernel",), on_error="raise")


def step(layer: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A layer's attention in a decode step, as transformers' models have it."""
    keep = (torch.arange(CACHE) <= layer.cumulative_length)[None, None, None]
    keys, values = layer.update(key, value)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=keep)


def allocated(run: Any, operands: list[Tensor]) -> list[int]:
    """The elements of every tensor that the emitted code allocates."""
    # What get_code leaves in the caches is no compiled code.
    with torch._inductor.config.patch(force_disable_caches=True):
        code = "\n".join(get_code(run, *operands))
    shapes = re.findall(r"= empty_strided_cpu\(\(([^)]*)\)", code)
    assert shapes
    return [math.prod(int(size) for size in shape.split(",") if size.strip()) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["inductor", OURS], ids=["stock", "attn_pass"])
def test_nothing_copies_the_cache(backend: Any, dtype: torch.dtype) -> None:
    layer = cache_utils.StaticLayer(max_cache_len=CACHE)
    operands = [torch.randn(1, HEADS, 1, DIM, dtype=dtype) for _ in range(3)]
    layer.lazy_initialization(*operands[1:])
    run = torch.compile(lambda *given: step(layer, *given), backend=backend, fullgraph=True)
    with torch.no_grad(), attn_pass.record() as report:
        assert max(allocated(run, operands)) < HEADS * CACHE * DIM
    assert [site.target for site in report.sites] == ([] if backend == "inductor" else ["cpu_kernel"])


def test_a_copy_would_be_seen() -> None:
    layer = cache_utils.StaticLayer(max_cache_len=CACHE)
    operands = [torch.randn(1, HEADS, 1, DIM) for _ in range(3)]
    layer.lazy_initialization(*operands[1:])

    def copied(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys = layer.keys.index_copy(2, layer.cumulative_length[None], key)
        return F.scaled_dot_product_attention(query, keys, layer.values)

    with torch.no_grad():
        assert max(allocated(torch.compile(copied, fullgraph=True), operands)) >= HEADS * CACHE * DIM
