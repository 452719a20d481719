"""Where arithmetic of a dtype differs from exact arithmetic: it wraps around, rounds or overflows."""

from __future__ import annotations

import torch
from torch.fx import Node

from attn_pass.graph.values import fake_value
from attn_pass.model.expression import Const, Expr, as_index, walk
from attn_pass.model.index import terms_of
from attn_pass.model.operations import COMPARISONS
from attn_pass.model.piecewise import pieces
from attn_pass.reading.vocabulary import Call

LARGEST = 1 << 20  # of an integer in index arithmetic: with indices beside it, nothing gets near what wraps around
_LARGEST_STEP = 1 << 11  # of an int32: with an index of a million
_ARITHMETIC = ("add", "sub", "rsub", "mul", "div")
_CHOICES = ("where", "method_where", "masked_fill", "clamp", "max", "min", "minimum", "maximum")
_NARROW = (torch.float16, torch.bfloat16)
WRAPPING = (torch.uint8, torch.int8, torch.int16)
_FILL = 1e8  # a number that size is there to mask, and its last digits mean nothing


def leaves_the_type(op: str, result: Expr, dtype: torch.dtype | None) -> bool:
    """Whether an operation done in ``dtype`` may give something else than the expression for it says."""
    if dtype is None:
        return False
    if dtype in WRAPPING and op in (*_ARITHMETIC, "neg", *_CHOICES):
        return True
    if op not in _ARITHMETIC:
        return False
    if not dtype.is_floating_point:
        return any(_is_large(e, dtype) for e in walk(result))
    values_of = pieces(result) if dtype in _NARROW else None
    if values_of is None:
        return False
    limit = torch.finfo(dtype).max
    values = [float(v.value) for _, v in values_of]
    exact = [v == float(torch.tensor(v, dtype=torch.float64).to(dtype)) for v in values]
    fine = [e or abs(v) >= _FILL or op in ("mul", "div") for v, e in zip(values, exact)]
    return not all(fine) or any(limit < abs(v) < float("inf") for v in values)


def _is_large(expression: Expr, dtype: torch.dtype) -> bool:
    if isinstance(expression, Const):
        return isinstance(expression.value, int) and abs(expression.value) >= LARGEST
    index = as_index(expression)
    step = _LARGEST_STEP if dtype == torch.int32 else LARGEST
    return index is not None and any(abs(c) >= (step if monomial else LARGEST) for monomial, c in terms_of(index))


def wraps_in_comparison(call: Call) -> bool:
    """Whether a comparison of integers holds a number their type does not: torch wraps it around first."""
    if call.op not in COMPARISONS:
        return False
    operands = (call.get("input"), call.get("other"))
    compared = [fake_value(a) if isinstance(a, Node) else a for a in operands]
    types = [v.dtype for v in compared if isinstance(v, torch.Tensor)]
    numbers = [v for v in compared if isinstance(v, int)]
    integers = [t for t in types if not (t.is_floating_point or t.is_complex or t == torch.bool)]
    return any(not torch.iinfo(t).min <= n <= torch.iinfo(t).max for t in integers for n in numbers)
