"""Inductor's code for the decode operators on a GPU, with every kernel compiled, as JSON.

    python lowered_decode.py '{"CAPABILITY": ["PROGRAM", ...], ...}'

Processes of their own, see `faked_gpu`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from faked_gpu import compiled, lowered
from forked import answer
from triton.runtime.cache import triton_key

import attn_pass
from attn_pass.devices.cuda.decode_operator import decode, decode_with_lse

Tensor = torch.Tensor
HALF = torch.bfloat16


def on_gpu(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def keys_and_values(dim: int, kv_len: int = 4096, dynamic: bool = False, kv_heads: int = 8) -> list[Tensor]:
    made = [on_gpu(1, kv_heads, kv_len, dim) for _ in range(2)]
    for x in made if dynamic else ():
        torch._dynamo.mark_dynamic(x, 2)
    return made


def by_pass(inner: Callable[..., Any]) -> Any:
    return attn_pass.wrap(inner, device="H100", targets=("decode",), choose="fused", on_error="raise")


def in_a_graph(q: Tensor, k: Tensor, v: Tensor, gain: Tensor) -> Tensor:
    """A query that is made in the graph, as after its projection, norm and rotation."""
    return ((q * gain) @ k.mT * 0.125).softmax(-1) @ v


def padded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * 0.125 + mask).softmax(-1) @ v


def with_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    scores = torch.cat([q @ k.mT * 0.125, sink.view(1, -1, 1, 1).expand(1, -1, q.size(2), 1)], -1)
    return scores.softmax(-1).narrow(-1, 0, k.size(2)) @ v


def of_shapes(*inputs: Tensor) -> list[Tensor]:
    """Head dims 32, 128 and 256: 4 and 64 packed rows, 4 with one boolean row; at 32 also 64 with an added mask."""
    made = []
    for n in range(0, len(inputs), 6):
        few, many, k, v, added, kept = inputs[n : n + 6]
        made += [decode(q, k, v, None, 0.1, True) for q in (few, many)]
        made += [decode(few, k, v, kept, 0.1)]
        made += [decode(many, k, v, added, 0.1)] if n == 0 else []
    return made


def shapes() -> list[Tensor]:
    made: list[Tensor] = []
    for dim in (32, 128, 256):
        queries = [on_gpu(1, 32, rows, dim) for rows in (1, 16)]
        masks = [on_gpu(1, 32, 16, 4096, dtype=torch.float32), on_gpu(1, 1, 1, 4096, dtype=torch.bool)]
        made += [*queries, *keys_and_values(dim), *masks]
    return made


def of_large_tiles(*inputs: Tensor) -> list[Tensor]:
    """What asks most of a program's registers: 32 and 64 packed rows, any number of keys, masks of each row."""
    *of_both, one_row, lengths = inputs
    narrow, wide = of_both[:6], of_both[6:]
    few, many, k, v, added, kept = narrow
    made = [decode(few, k, v, one_row, 0.1), decode(many, k, v, added, 0.1), decode(many, k, v, kept, 0.1)]
    some, many, k, v, added, kept = wide
    made += [decode(many, k, v, None, 0.1, True, 300, lengths), decode(many, k, v, added, 0.1)]
    made += [decode(many, k, v, None, 0.1, True, 300, lengths, lengths, True)]
    return [*made, decode(some, k, v, kept, 0.1)]


def large_tiles() -> list[Tensor]:
    made: list[Tensor] = []
    for dim, rows, of_kept in ((128, 1, 16), (256, 8, 8)):
        masks = [on_gpu(1, 32, 16, 4096, dtype=torch.float32), on_gpu(1, 32, of_kept, 4096, dtype=torch.bool)]
        for mask in masks:
            torch._dynamo.mark_dynamic(mask, 3)
        made += [on_gpu(1, 32, rows, dim), on_gpu(1, 32, 16, dim), *keys_and_values(dim, dynamic=True), *masks]
    return [*made, row_mask(), torch.empty(1, dtype=torch.int32, device="cuda")]


def of_lengths(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Any:
    return decode_with_lse(q, k, v, None, 0.125, True, 300, lengths)


def in_a_cache(q: Tensor, k: Tensor, v: Tensor, position: Tensor, padding: Tensor) -> Tensor:
    """A few rows over a cache: causal from a position, behind left padding, filled with a number."""
    keys, rows = (torch.arange(x.size(2), device=q.device) for x in (k, q))
    keep = (keys <= rows.view(-1, 1) + position) & (keys >= padding.view(-1, 1, 1, 1))
    return torch.where(keep, q @ k.mT * 0.125, torch.finfo(q.dtype).min).softmax(-1) @ v


def cache_inputs() -> list[Tensor]:
    position, padding = (torch.empty(n, dtype=torch.int64, device="cuda") for n in ((), (1,)))
    return [query(8), *keys_and_values(128), position, padding]


def two_layers(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A mask that is passed in, and is the same for both."""
    for _ in range(2):
        q = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return q


def of_two_layers() -> list[Tensor]:
    keys = [on_gpu(8, 8, 32768, 128) for _ in range(2)]
    return [on_gpu(8, 32, 1, 128), *keys, on_gpu(8, 1, 1, 32768, dtype=torch.bool)]


def query(heads: int = 32, rows: int = 4, dim: int = 128) -> Tensor:
    return on_gpu(1, heads, rows, dim)


def row_mask() -> Tensor:
    mask = on_gpu(1, 1, 1, 4096)
    torch._dynamo.mark_dynamic(mask, 3)
    return mask


PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[], Sequence[Tensor]], Any]] = {
    "shapes": (of_shapes, shapes, None),
    "query made in the graph": (in_a_graph, lambda: [query(8), *keys_and_values(128), on_gpu(128)], by_pass),
    "dynamic": (in_a_graph, lambda: [query(8), *keys_and_values(128, dynamic=True), on_gpu(128)], by_pass),
    "dynamic, a mask of one row": (
        padded,
        lambda: [query(8), *keys_and_values(128, dynamic=True), row_mask()],
        by_pass,
    ),
    "lengths": (
        of_lengths,
        lambda: [query(), *keys_and_values(128, dynamic=True), torch.empty(1, dtype=torch.int32, device="cuda")],
        None,
    ),
    "a cache": (in_a_cache, cache_inputs, by_pass),
    "a mask passed in": (two_layers, of_two_layers, by_pass),
    "large tiles": (of_large_tiles, large_tiles, None),
    "sink": (with_sink, lambda: [query(8), *keys_and_values(128), on_gpu(8)], by_pass),
}


def on(capability: str, programs: Sequence[str]) -> dict[str, Any]:
    """What is lowered and compiled of these programs, for the GPU of that capability."""
    compiled_kernels = {}
    for name in programs or list(PROGRAMS):
        graph = lowered(int(capability), *PROGRAMS[name])
        kernels = {n: compiled(int(capability), *text) for n, text in graph.kernels.items()}
        compiled_kernels[name] = {
            **asdict(graph),
            "calls": graph.calls,
            "allocated": graph.allocated,
            "kernels": kernels,
        }
    return compiled_kernels


if __name__ == "__main__":
    triton_key()  # once for all of its children: it reads all of Triton
    answer(on)
