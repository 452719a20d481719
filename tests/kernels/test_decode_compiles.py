"""The decode kernel as Triton and ptxas compile it for GPUs that are not here: it fits, and does what makes it fast."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from attn_pass.kernels.decode import Parts, Room, Tiles, launch, tiles_for  # noqa: E402
from attn_pass.kernels.decode_triton import attend  # noqa: E402

NVIDIA = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
pytestmark = pytest.mark.skipif(not (NVIDIA / "cuobjdump").exists(), reason="this Triton has no tools for NVIDIA")

KIB = 1 << 10
SHARED = {80: 163 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB}  # of a block (CUDA C++ programming guide)
_POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.bool: "*i1"}


def room(capability: int) -> Room:
    return Room(SHARED[capability], capability // 10)


@cache
def compiled(capability: int, dim: int, rows: int, mask: torch.dtype | None = None) -> tuple[Any, Tiles]:
    """The kernel for eight KV heads with so many packed rows each, as Inductor launches it, and its tiles."""
    with torch.device("meta"):
        q = torch.empty(1, 8 * min(rows, 4), max(1, rows // 4), dim, dtype=torch.bfloat16)
        k, v = (torch.empty(1, 8, 1024, dim, dtype=torch.bfloat16) for _ in range(2))
        partial = torch.empty(4, 1, q.size(1), q.size(2), dim)
        part = torch.empty(partial.shape[:-1])
        seen = None if mask is None else torch.empty(1, 1, q.size(2), 1024, dtype=mask)
    tiles = tiles_for(rows, dim, dim, 0 if mask is None else mask.itemsize, room(capability))
    values = launch(q, k, v, seen, 0.125, True, -1, Parts(4, partial, part, part), tiles)
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[object]]] = {}
    for at, parameter in enumerate(attend.params):
        value = values[parameter.name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[parameter.name] = "constexpr"
            constants[(at,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _POINTERS[value.dtype]
            attributes[(at,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(at,)] = [["tt.divisibility", 16]]
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    source = ASTSource(attend, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options), tiles


@pytest.mark.parametrize("capability", list(SHARED))
@pytest.mark.parametrize("dim", [32, 128, 256])
@pytest.mark.parametrize(("rows", "mask"), [(4, None), (64, None), (64, torch.float32)])
def test_it_fits(capability: int, dim: int, rows: int, mask: torch.dtype | None, tmp_path: Path) -> None:
    """Shared memory within what a block may have, no register spilled, products on the tensor cores."""
    kernel, _ = compiled(capability, dim, rows, mask)
    assert kernel.metadata.shared <= SHARED[capability]
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    usage = subprocess.run([NVIDIA / "cuobjdump", "-res-usage", binary], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", usage.stdout)
    assert found is not None and (int(found[2]), int(found[3])) == (0, 0), usage.stdout
    assert re.search(r"wgmma\.mma_async|tcgen05\.mma|mma\.sync", kernel.asm["ptx"])


@pytest.mark.parametrize("mask", [None, torch.bfloat16])
def test_keys_and_values_are_copied_sixteen_bytes_at_a_time_ahead_of_their_use(mask: torch.dtype | None) -> None:
    kernel, tiles = compiled(90, 128, 8, mask)
    copies = re.findall(r"cp\.async\.[a-z.]+ .*?, (0x[0-9a-f]+)", kernel.asm["ptx"])
    assert tiles.stages > 1 and len(copies) >= 16 and set(copies) == {"0x10"}


def test_two_blocks_fit_a_multiprocessor_where_the_splits_are_counted_for_two() -> None:
    for dim in (64, 128):
        kernel, _ = compiled(90, dim, 64)
        assert 2 * (kernel.metadata.shared + KIB) <= 228 * KIB


def test_tiles_are_smaller_where_there_is_little_shared_memory() -> None:
    assert tiles_for(64, 128, 128, 0, room(90)) == Tiles(64, 64, 3, 4)
    assert tiles_for(64, 256, 256, 0, room(90)) == Tiles(64, 64, 2, 8)
    assert tiles_for(64, 256, 256, 0, room(89)).rows == 32
    assert tiles_for(1, 64, 64, 0, room(89)) == Tiles(16, 64, 3, 4)
    assert tiles_for(64, 128, 128, 4, room(80)).stages < tiles_for(64, 128, 128, 0, room(80)).stages
