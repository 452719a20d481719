"""Runs the decode kernel under Triton's interpreter and prints its errors against float64 as JSON.

    python -m bench.gpu.interpreted [NAME ...]

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

from attn_pass.devices.cuda.decode_operator import Inputs, Room, launched, numbers_for, reference_with_lse
from bench.gpu.decode_cases import CASES, Case, error, error_of_lse, exact_with_lse, inputs_of, lengths_of, starts_of

_dot = InterpreterBuilder.create_dot


def _dot_of_values(self: InterpreterBuilder, a: Any, b: Any, *rest: Any) -> Any:
    """The interpreter keeps bfloat16 as its bits, and its product would multiply those (triton 3.7.1)."""
    a, b = (self.cast_impl(x, tl.float32) if x.dtype == tl.bfloat16 else x for x in (a, b))
    return _dot(self, a, b, *rest)


InterpreterBuilder.create_dot = _dot_of_values
_convert = interpreter._convert_float


def _convert_to_nearest(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """A GPU rounds float32 to the nearest bfloat16 (cvt.rn); the interpreter cuts its bits off (triton 3.7.1)."""
    if (source, target) != (tl.float32, tl.bfloat16):
        return _convert(data, source, target, rounding)
    return torch.tensor(data).bfloat16().view(torch.int16).numpy().view("uint16")


interpreter._convert_float = _convert_to_nearest
_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_with_index(tensor: Any, scope: Any) -> None:
    """A loop's bound is an array of one element, which numpy 2.4 turns into no number (triton 3.6)."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))


interpreter._patch_lang_tensor = _patch_tensor_with_index


_JOINED: set[tuple[Any, ...]] = set()  # kinds of joins that ran without the logarithm as well


def run(case: Case) -> dict[str, float]:
    """The largest errors of the kernel, and of the plain operators, against float64."""
    q, k, v, mask = inputs_of(case)
    given = (case.scale, case.causal, case.window, lengths_of(case), starts_of(case), case.mean)
    inputs = Inputs(q, k, v, mask, *given)
    tiles, splits = numbers_for(inputs, Room(case.shared_bytes), case.cores)
    parts = launched(inputs, tiles, splits, with_lse=True, wrap=lambda kernel: kernel)
    kind = (case.dtype, splits > 1, splits > 32, bool(case.lengths), case.mask == "empty")
    if kind not in _JOINED:  # only the kernel that joins the splits knows of it
        _JOINED.add(kind)
        alone, none = launched(inputs, tiles, splits, with_lse=False, wrap=lambda kernel: kernel)
        assert none is None and torch.equal(alone, parts[0])
    errors: dict[str, float] = {"splits": splits, "one mask row": inputs.has_one_mask_row}
    right, right_lse = exact_with_lse(q, k, v, mask, case)
    for name, (out, lse) in {"kernel": parts, "plain": reference_with_lse(inputs)}.items():
        assert lse is not None and lse.dtype == torch.float32
        errors |= {name: error(out, right), f"lse, {name}": error_of_lse(lse, right_lse)}
    return errors


def results(names: list[str]) -> Iterator[tuple[str, dict[str, float]]]:
    """The named cases, all where none is named."""
    for case in CASES:
        if not names or case.name in names:
            yield case.name, run(case)


if __name__ == "__main__":
    print(json.dumps(dict(results(sys.argv[1:]))))
