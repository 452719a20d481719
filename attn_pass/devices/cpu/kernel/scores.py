"""Score functions: an expression of the product as C++ over the functions of `tiles.hpp`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from attn_pass.model.expression import Apply, Const, Dot, Expr, contains_dot
from attn_pass.model.operations import OPERATIONS

FUNCTIONS = frozenset(row.cpp for row in OPERATIONS.values() if row.cpp)
MOST_CAPTURED, MOST_LOOKUPS = 8, 4  # `CAPTURED` and `LOOKUPS` of `common.hpp`


def written(score: Expr, captured: Callable[[Expr], int]) -> str:
    """The expression as text over ``x``, the product; ``captured`` numbers what does not depend on it, a tensor each.

    Raises:
        NotImplementedError: an operation that has no function, named in the message.
    """
    if isinstance(score, Dot):
        return "x"
    if isinstance(score, Const):
        return f"number({_number(float(score.value))})"
    if not contains_dot(score):
        return f"captured({captured(score)})"
    assert isinstance(score, Apply)
    if score.op == "cast":  # between floating types
        return written(score.args[0], captured)
    function = OPERATIONS[score.op].cpp if score.op in OPERATIONS else ""
    if not function:
        raise NotImplementedError(f"{score.op} of the scores has no function in the CPU kernel")
    return f"{function}({', '.join(written(x, captured) for x in score.args)})"


def checked(text: str) -> str:
    """The text, if it can be a score function.

    Raises:
        ValueError: it holds something else, which would be compiled.
    """
    names = set(re.findall(r"[a-z_]+(?=\()", text))
    if not re.fullmatch(r"(?:[a-z0-9_.,()+\- ]|INFINITY|NAN)+", text) or names - FUNCTIONS - {"number", "captured"}:
        raise ValueError(f"{text!r} is not a score function of x, number(...), captured(...) and {FUNCTIONS}")
    return text


def _number(value: float) -> str:
    if math.isnan(value):
        return "NAN"
    return ("-" if value < 0 else "") + ("INFINITY" if math.isinf(value) else f"{abs(value)!r}f")
