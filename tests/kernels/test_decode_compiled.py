"""`attn_pass::decode`'s kernel compiled for GPUs that need not be here: that it compiles, and what it asks of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attn_pass.kernels.decode import launch, tile
from attn_pass.kernels.decode_triton import attend

# Bytes of shared memory a thread block may have, by compute capability (CUDA C++ programming guide, table of technical
# specifications): A100, L4, H200.
ROOM = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}
_TYPES = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.bool: "*i1"}
_UNSPECIALISED = ("kv_len", "splits", "window")


def compiled(capability: int, rows: int, dim: int, mask: torch.dtype | None = None, **more: Any) -> Any:
    """The kernel as it is launched for 8 heads on 8 of ``rows`` query rows."""
    q, k = (torch.empty(1, 8, n, dim, dtype=torch.bfloat16, device="meta") for n in (rows, 512))
    partial = torch.empty(4, 1, 8, rows, dim, device="meta")
    added = None if mask is None else torch.empty(1, 1, rows, 512, dtype=mask, device="meta")
    given = launch(q, k, k, added, 0.1, more.get("causal", False), more.get("window", -1), partial, partial, partial)
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned: dict[tuple[int, ...], Any] = {}
    for number, name in enumerate(attend.arg_names):
        value = given[name]
        if name.isupper() or (isinstance(value, int) and value == 1 and name not in _UNSPECIALISED):
            constants[name], signature[name] = value, "constexpr"
        elif isinstance(value, torch.Tensor):
            signature[name], aligned[(number,)] = _TYPES[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0 and name not in _UNSPECIALISED:
                aligned[(number,)] = [["tt.divisibility", 16]]
    options = {"num_warps": 4, "num_stages": tile(dim, dim, mask is not None)[1]}
    source = ASTSource(attend, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("capability", list(ROOM))
@pytest.mark.parametrize("mask", [None, torch.float32], ids=["no mask", "mask"])
@pytest.mark.parametrize("dim", [128, 256])
def test_it_fits_in_shared_memory(capability: int, dim: int, mask: torch.dtype | None) -> None:
    """With 64 rows, as many as a block takes."""
    kernel = compiled(capability, 64, dim, mask)
    assert kernel.metadata.shared <= ROOM[capability]
    assert "mma" in kernel.asm["ptx"] and "cp.async" in kernel.asm["ptx"]


def test_masks_and_windows_compile() -> None:
    assert compiled(90, 3, 80, torch.bool).asm["cubin"]
    assert compiled(90, 3, 64, causal=True, window=100).asm["cubin"]
