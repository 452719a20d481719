"""Which expressions give the same value wherever they are computed again, whatever a kernel's compiler rounds.

In a kernel's own code a product and a sum may become one operation, and a logarithm may be another library's.

A rounding changes a number a little, and what is decided by it a lot: a bucket, a comparison. So integers may decide
anything, and rounded numbers nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attn_pass.model.expression import Apply, Const, Dot, Expr, IndexValue, Load
from attn_pass.model.operations import COMPARISONS

_WHOLE, _FLOAT, _ROUNDED = range(3)
_COMPARED = (*COMPARISONS, "maximum", "minimum")
_TRUTHS = (*COMPARISONS, "and", "or", "not")


def is_repeatable(expression: Expr, dtypes: Sequence[torch.dtype]) -> bool:
    """Whether nothing in the expression is decided by a number that may be rounded otherwise; ``dtypes`` by source."""
    return _kind(expression, dtypes) is not None


def _kind(expression: Expr, dtypes: Sequence[torch.dtype]) -> int | None:
    """A whole number, a float that is what it is, or one that was rounded on the way; None where that decides."""
    if isinstance(expression, Dot):
        return None
    if isinstance(expression, Const):
        return _FLOAT if isinstance(expression.value, float) else _WHOLE
    if isinstance(expression, IndexValue):
        return _WHOLE
    if isinstance(expression, Load):
        return _of_dtype(dtypes[expression.source])
    assert isinstance(expression, Apply)
    kinds = [_kind(a, dtypes) for a in expression.args]
    if None in kinds or (expression.op in _COMPARED and len(_float_types(expression.args, dtypes)) > 1):
        return None  # of two types: which of them is meant depends on the operands' dimensions, too
    known = [k for k in kinds if k is not None]
    return _applied(expression, known)


def _applied(expression: Apply, kinds: list[int]) -> int | None:
    op, widest = expression.op, max(kinds)
    if op == "lookup":
        return kinds[0] if kinds[1] == _WHOLE else None
    if op == "cast":
        assert expression.dtype is not None
        if expression.dtype.is_floating_point:
            return max(widest, _FLOAT)
        return _WHOLE if widest < _ROUNDED else None
    if op in COMPARISONS or op in ("and", "or", "not"):
        return _WHOLE if widest < _ROUNDED else None
    if op == "where":
        return max(kinds[1:]) if kinds[0] == _WHOLE else None
    if op in ("neg", "abs", "maximum", "minimum"):
        return widest
    if op in ("floordiv", "remainder"):
        return _WHOLE if widest == _WHOLE else None
    if op in ("add", "sub", "mul") and widest == _WHOLE:
        return _WHOLE
    return _ROUNDED


def _float_types(parts: Sequence[Expr], dtypes: Sequence[torch.dtype]) -> set[torch.dtype]:
    """The floating types that elements come in, of numbers aside."""
    types: set[torch.dtype] = set()
    for part in parts:
        if isinstance(part, Load):
            types.add(dtypes[part.source])
        elif isinstance(part, Apply) and part.op == "cast":
            assert part.dtype is not None
            types.add(part.dtype)
        elif isinstance(part, Apply) and part.op not in _TRUTHS:
            types |= _float_types(part.args[part.op == "where" :], dtypes)
    return {dtype for dtype in types if dtype.is_floating_point}


def _of_dtype(dtype: torch.dtype) -> int:
    return _FLOAT if dtype.is_floating_point else _WHOLE
