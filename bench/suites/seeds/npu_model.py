"""The model's predictions for fused attention on an Ascend NPU, as plain rows: bytes, speedup, tiles, masks.

The numbers of seed S5's table come from a machine; these come from data sheets (`attn_pass.devices.catalog`) and from
counting. Every row says so. Nothing here runs on an NPU, or measures anything.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attn_pass.devices import registry
from attn_pass.devices.npu import generations
from attn_pass.devices.npu.cost import COMPRESSED, operator
from attn_pass.devices.roofline import Problem, unfused
from bench.harness.document import Row

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
TILES = (64, 128, 256, 512)
_MIB = 1 << 20
BUFFER_BYTES = 256 * 1024  # of a vector core
_TENSORS = 5  # that the tile's buffer holds at once: query, key, value, result and scratch


def _row(case: str, values: Row) -> Row:
    """What it is about, and numbers by name and unit."""
    return {"case": case, **values, "source": "predicted"}


def problem(length: int, *, heads: int = 32, dim: int = 128, batch: int = 1, causal: bool = False) -> Problem:
    """Self-attention in half precision, every head with keys of its own."""
    return Problem(batch, heads, batch, heads, length, length, dim, dim, torch.float16, causal=causal)


def traffic(lengths: tuple[int, ...] = LENGTHS, **sizes: int) -> Iterator[Row]:
    """Bytes to and from memory: operands and result once, or with the scores written and read twice between them."""
    for length in lengths:
        given = problem(length, **sizes)
        scores = 4 * given.scores * given.dtype.itemsize
        fused, apart = given.operand_bytes, given.operand_bytes + scores
        values = {"fused MiB": fused / _MIB, "unfused MiB": apart / _MIB, "ratio": apart / fused}
        yield _row(f"L = {length}", values)


def speed_up(device: str = "Ascend 910B", lengths: tuple[int, ...] = LENGTHS, **sizes: int) -> Iterator[Row]:
    """Products and a softmax against the inference operator, by the roofline."""
    here = registry.by_name(device)
    for length in lengths:
        given = problem(length, **sizes)
        apart, fused = unfused(here, given), operator(here, generations.INFERENCE, given)
        values = {"unfused us": apart, "fused us": fused, "speedup": apart / fused}
        yield _row(f"{device}, L = {length}", values)


def buffer_bytes(tile: int, dim: int, itemsize: int = 2) -> int:
    """What a tile of so many rows takes of the buffer; a model (seed S5), not the kernel's own tiling."""
    return tile * dim * itemsize * _TENSORS


def tiles(dim: int = 64, length: int = 4096, sizes: tuple[int, ...] = TILES) -> Iterator[Row]:
    """What a tile takes of the 256 KB buffer, and how many steps over keys and queries it makes of a head."""
    for tile in sizes:
        steps = -(-length // tile)
        values = {
            "buffer bytes": buffer_bytes(tile, dim),
            "fits": "yes" if buffer_bytes(tile, dim) <= BUFFER_BYTES else "no",
            "steps a row block": steps,
            "steps a head": steps * steps,
        }
        yield _row(f"tile {tile}, head dim {dim}, L = {length}", values)


def causal_masks(lengths: tuple[int, ...] = LENGTHS, layers: int = 32, heads: int = 32) -> Iterator[Row]:
    """Bytes of mask a forward pass of so many layers reads or makes, by how the mask is handed over."""
    shared = COMPRESSED * COMPRESSED
    for length in lengths:
        dense = length * length
        values = {
            "one for the graph MiB": shared / _MIB,
            "one a layer MiB": layers * shared / _MIB,  # what torch_npu's own call makes
            "boolean, one a layer MiB": layers * dense / _MIB,
            "boolean, every head MiB": layers * heads * dense / _MIB,
            "matrix in half precision MiB": layers * 2 * dense / _MIB,
        }
        yield _row(f"L = {length}, {layers} layers", values)
