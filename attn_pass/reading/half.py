"""Additions to float16 scores that are multiplied later: a number that absorbs a score only in float16.

-65504 absorbs a score in float16; times 0.3 it is -19651, which absorbs none where a kernel adds in float32. If all
that was added was multiplied by one number, targets recover it by dividing (`Attention.rescaled`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from attn_pass.model.expression import Apply, Const, Expr, contains_dot, walk
from attn_pass.reading.scores import Scores, is_small, is_small_times, weakest_fill

_WEAKENS = 1e-3  # times half of float16's lowest number leaves e**-32 of a masked key
_MULTIPLIED = "float16 scores to which something that may mask was added are multiplied by"
_OVERFLOWS = "a fill is -inf once float16 scores are multiplied, under a guard against NaN"
_CHANGED = "something that may mask is added to float16 scores inside a function of them"
_INSIDE = "a number that masks is added to float16 scores inside a function of them"
_EARLIER = "a number that masks is added to float16 scores, which are multiplied before something else is added"


def refusal(scores: Scores, deep: Callable[[Expr], Expr], *, nan_guard: bool) -> str | None:
    """Why an addition to float16 scores could not be distinguished from a mask once it is multiplied; None if it can.

    ``deep`` is the added expression followed back as far as possible.
    """
    if scores.bias is not None and (reason := _refusal(deep(scores.bias), scores.rescaled, nan_guard)) is not None:
        return reason
    if nan_guard and scores.keep is not None and float("-inf") < scores.keep.fill < -torch.finfo(torch.float16).max:
        return _OVERFLOWS
    for earlier in scores.earlier:
        bias = deep(earlier.bias)
        if (reason := _refusal(bias, earlier.rescaled, nan_guard)) is not None:
            return reason
        if _holds_a_fill(bias):
            return _EARLIER
    return None


def _refusal(bias: Expr, by: float, nan_guard: bool) -> str | None:
    if by == 1 or is_small_times(bias, by):
        return None
    if not by > _WEAKENS:
        return f"{_MULTIPLIED} a tensor, or by what is no positive number"
    return f"{_MULTIPLIED} more than 1, under a guard against NaN" if by > 1 and nan_guard else None


def refusal_of_function(function: Expr, *, changed: bool = False) -> str | None:
    """Why a function of float16 scores could not be computed in float32; ``function`` is lifted as far as it is known.

    Nothing looks for a mask inside it. What is squashed is as low as it gets, whether a score was absorbed or not. Of
    what is added and not known it is taken that it does not mask, unless the sum is ``changed``: its sign may flip.
    """
    if not isinstance(function, Apply) or not contains_dot(function) or function.op in ("tanh", "sigmoid"):
        return None
    if function.op in ("add", "sub"):
        added = [e for e in function.args if not contains_dot(e)]
        if any(_holds_a_fill(e) for e in added):
            return _INSIDE
        filled = any(_is_filled(e) for e in function.args)
        if (changed or filled) and not all(is_small(e, torch.float16) for e in added):
            return _CHANGED
    changed = changed or function.op not in ("add", "sub", "where", "maximum", "minimum")
    return next((r for e in function.args if (r := refusal_of_function(e, changed=changed)) is not None), None)


def _is_filled(scores: Expr) -> bool:
    """Whether scores were replaced by a number that masks, which absorbs what is added to it."""
    if not isinstance(scores, Apply) or not contains_dot(scores) or scores.op in ("tanh", "sigmoid"):
        return False
    if scores.op == "where" and any(_holds_a_fill(e) for e in scores.args[1:] if not contains_dot(e)):
        return True
    return any(_is_filled(e) for e in scores.args)


def adds_to_scores(function: Expr) -> bool:
    """Whether something is added inside a function of the scores that is not small in any type."""
    if not isinstance(function, Apply) or not contains_dot(function):
        return False
    added = [e for e in function.args if not contains_dot(e)] if function.op in ("add", "sub") else []
    return not all(is_small(e, torch.float64) for e in added) or any(adds_to_scores(e) for e in function.args)


def _holds_a_fill(added: Expr) -> bool:
    """Whether a number is in it that masks in float16, of either sign: ``s - (1 - mask) * 65504``."""
    weakest = -weakest_fill(torch.float16)
    return any(isinstance(e, Const) and weakest <= abs(e.value) < float("inf") for e in walk(added))
