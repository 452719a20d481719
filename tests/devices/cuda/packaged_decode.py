"""What AOTInductor hands to the decode kernels, and what they take, as JSON.

python packaged_decode.py '{"all": []}'
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from forked import answer
from packaged_gpu import packaged

from attn_pass.devices.cuda.decode_operator import decode, decode_with_lse

Tensor = torch.Tensor
KEYS, BATCH = torch.export.Dim("keys", min=4, max=8192), torch.export.Dim("batch", min=1, max=2048)


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def any_number_of_keys(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """Every tensor that may be None is."""
    return decode(q, k, v, None, 0.3)


def all_given(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, lengths: Tensor) -> Any:
    """Every tensor that may be None is given to one of both."""
    of_lengths = decode_with_lse(q, k, v, None, 0.3, True, 300, lengths, lengths, True)
    return (*of_lengths, decode(q, k, v, mask, 0.3))


def any_batch(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """One row, keys shared by the batch: arguments that are 1, and 0."""
    return decode(q, k.expand(q.size(0), -1, -1, -1), v.expand(q.size(0), -1, -1, -1), None, 0.3)


PROGRAMS: dict[str, tuple[Any, ...]] = {
    "any number of keys": (
        any_number_of_keys,
        lambda: [on_gpu(2, 8, 4, 64), on_gpu(2, 2, 1000, 64), on_gpu(2, 2, 1000, 64)],
        (None, {2: KEYS}, {2: KEYS}),
    ),
    "all given": (
        all_given,
        lambda: [
            *(on_gpu(2, 8, 4, 64), on_gpu(2, 2, 1000, 64), on_gpu(2, 2, 1000, 64)),
            *(on_gpu(2, 1, 4, 1000, dtype=torch.bool), on_gpu(2, dtype=torch.int32)),
        ],
        (None, {2: KEYS}, {2: KEYS}, {3: KEYS}, None),
    ),
    "any batch": (
        any_batch,
        lambda: [on_gpu(1000, 4, 1, 32), on_gpu(1, 4, 2048, 32), on_gpu(1, 4, 2048, 32)],
        ({0: BATCH}, None, None),
    ),
}


def job(_: str, __: Sequence[str]) -> dict[str, Any]:
    return {name: packaged(*program) for name, program in PROGRAMS.items()}


if __name__ == "__main__":
    answer(job)
