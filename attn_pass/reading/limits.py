"""Where arithmetic of a dtype stops being arithmetic of numbers: it wraps around, rounds or overflows."""

from __future__ import annotations

import torch

from attn_pass.model.expression import Const, Expr, as_index, walk
from attn_pass.model.index import terms_of
from attn_pass.model.pieces import pieces

LARGEST = 1 << 20  # of an integer in index arithmetic: with indices beside it, nothing gets near what wraps around
_ARITHMETIC = ("add", "sub", "rsub", "mul", "div")
_NARROW = (torch.float16, torch.bfloat16)
WRAPPING = (torch.uint8, torch.int8, torch.int16)
_FILL = 1e8  # a number that size is there to mask, and its last digits mean nothing


def leaves_the_type(op: str, result: Expr, dtype: torch.dtype | None) -> bool:
    """Whether an operation done in ``dtype`` may give something else than the expression for it says."""
    if op not in _ARITHMETIC or dtype is None:
        return False
    if dtype in WRAPPING:
        return True
    if not dtype.is_floating_point:
        return any(_is_large(e) for e in walk(result))
    found = pieces(result) if dtype in _NARROW else None
    if found is None:
        return False
    limit = torch.finfo(dtype).max
    values = [float(v.value) for _, v in found]
    exact = [v == float(torch.tensor(v, dtype=torch.float64).to(dtype)) for v in values]
    fine = [e or abs(v) >= _FILL or op in ("mul", "div") for v, e in zip(values, exact)]
    return not all(fine) or any(limit < abs(v) < float("inf") for v in values)


def _is_large(expression: Expr) -> bool:
    if isinstance(expression, Const):
        return isinstance(expression.value, int) and abs(expression.value) >= LARGEST
    index = as_index(expression)
    return index is not None and any(abs(c) >= LARGEST for _, c in terms_of(index))
