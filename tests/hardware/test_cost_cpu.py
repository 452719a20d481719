"""The CPU's cost model against microseconds that were measured: of two forms it takes the faster one."""

from __future__ import annotations

import pytest
import torch

from attn_pass.hardware import cost
from attn_pass.hardware.device import cpu_with

# (batch, heads, queries, keys, head dim), dtype, a mask of keys, threads, us of the fused kernel and of two products
# around a softmax. Rows whose two times are within 1.2 of each other are left out: either may be taken.
MEASURED = (
    ((8, 16, 16, 16, 32), torch.float32, False, 2, 382, 173),
    ((8, 16, 16, 16, 32), torch.bfloat16, True, 2, 400, 255),
    ((8, 16, 16, 16, 32), torch.bfloat16, True, 1, 334, 200),
    ((32, 4, 64, 64, 32), torch.float32, False, 1, 2446, 3288),
    ((32, 4, 64, 64, 32), torch.float32, True, 2, 1622, 1151),
    ((32, 4, 64, 64, 32), torch.bfloat16, True, 2, 1611, 842),
    ((64, 3, 49, 49, 32), torch.float32, False, 1, 2803, 3641),
    ((64, 3, 49, 49, 32), torch.bfloat16, True, 2, 1914, 1075),
    ((64, 3, 49, 49, 32), torch.bfloat16, True, 1, 3152, 1960),
    ((16, 8, 32, 32, 64), torch.float32, False, 2, 921, 575),
    ((16, 8, 32, 32, 64), torch.float32, False, 1, 1334, 1664),
    ((4, 8, 128, 128, 64), torch.float32, False, 1, 3235, 4237),
    ((4, 8, 256, 256, 64), torch.float32, False, 1, 9583, 14090),
    ((2, 8, 512, 512, 64), torch.float32, False, 2, 10270, 14741),
    ((8, 8, 4, 512, 64), torch.float32, False, 2, 2281, 2831),
    ((8, 8, 16, 128, 64), torch.float32, False, 1, 1079, 1395),
    ((1, 4, 64, 64, 32), torch.bfloat16, False, 2, 55, 199),
    ((1, 4, 64, 64, 32), torch.bfloat16, False, 1, 62, 134),
    ((16, 8, 1, 256, 64), torch.bfloat16, False, 2, 2819, 444),
    ((1, 8, 1, 2048, 64), torch.bfloat16, False, 2, 1394, 260),
)


@pytest.mark.parametrize(("sizes", "dtype", "masked", "threads", "fused", "products"), MEASURED)
def test_the_faster_form_is_predicted_to_be(
    sizes: tuple[int, ...], dtype: torch.dtype, masked: bool, threads: int, fused: float, products: float
) -> None:
    batch, heads, q_len, kv_len, dim = sizes
    mask = batch * kv_len if masked else 0
    problem = cost.Problem(
        batch, heads, batch, heads, q_len, kv_len, dim, dim, dtype, mask_elements=mask, mask_bytes=dtype.itemsize
    )
    device = cpu_with(threads)
    assert (cost.fused(device, problem) < cost.unfused(device, problem)) == (fused < products)
