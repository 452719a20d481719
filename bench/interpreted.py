"""Runs the decode kernel under Triton's interpreter and prints its errors against float64 as JSON.

    python -m bench.interpreted [NAME ...]

A process of its own: `TRITON_INTERPRET` is read when the kernels are defined, and nothing can be traced under it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder

from attn_pass.kernels.decode import Parts, Room, launch, power, reference, splits_for, tiles_for
from attn_pass.kernels.decode_triton import attend, join
from bench.decode_cases import CASES, Case, error, exact, inputs_of

_dot = InterpreterBuilder.create_dot


def _dot_of_values(self: InterpreterBuilder, a: Any, b: Any, *rest: Any) -> Any:
    """The interpreter keeps bfloat16 as its bits, and its product would multiply those (triton 3.7.1)."""
    a, b = (self.cast_impl(x, tl.float32) if x.dtype == tl.bfloat16 else x for x in (a, b))
    return _dot(self, a, b, *rest)


InterpreterBuilder.create_dot = _dot_of_values
_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_with_index(tensor: Any, scope: Any) -> None:
    """A loop's bound is an array of one element, which numpy 2.4 turns into no number (triton 3.6)."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))


interpreter._patch_lang_tensor = _patch_tensor_with_index


def run(case: Case) -> dict[str, float]:
    """The largest error of the kernel, and of the plain operators, against float64."""
    q, k, v, mask = inputs_of(case)
    rows = case.heads // case.kv_heads * case.q_len
    mask_bytes = 0 if mask is None else mask.itemsize
    tiles = tiles_for(rows, case.dim, v.size(3), mask_bytes, Room(case.shared_bytes))
    row_blocks = -(-rows // tiles.rows)
    windowed = case.causal and case.window >= 0
    seen = min(case.kv_len, case.window + case.q_len) if windowed else case.kv_len
    splits = splits_for(case.batch * case.kv_heads * row_blocks, seen, case.cores)
    partial = torch.full((splits, case.batch, case.heads, case.q_len, v.size(3)), float("nan"))
    tops, totals = (torch.full(partial.shape[:-1], float("nan")) for _ in range(2))
    parts = Parts(splits, partial, tops, totals)
    arguments = launch(q, k, v, mask, case.scale, case.causal, case.window, parts, tiles)
    attend[(case.batch * case.kv_heads, row_blocks, splits)](**arguments)
    result = torch.full((case.batch, case.heads, case.q_len, v.size(3)), float("nan"), dtype=case.dtype)
    count = case.batch * case.heads * case.q_len
    join[(count,)](partial, tops, totals, result, splits, count, DIM=v.size(3), BLOCK_DIM=power(v.size(3)))
    right = exact(q, k, v, mask, case)
    plain = reference(q, k, v, mask, case.scale, case.causal, case.window)
    return {"splits": splits, "kernel": error(result, right), "plain": error(plain, right)}


def results(names: list[str]) -> Iterator[tuple[str, dict[str, float]]]:
    """The named cases, all where none is named."""
    for case in CASES:
        if not names or case.name in names:
            yield case.name, run(case)


if __name__ == "__main__":
    print(json.dumps(dict(results(sys.argv[1:]))))
