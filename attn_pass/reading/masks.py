"""Naming a mask: what is proved about a keep-condition and a bias from their index arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attn_pass.model.attention import Keep, Structure, is_causal_top_left
from attn_pass.model.expression import (
    TRUE,
    Apply,
    Const,
    Expr,
    IndexValue,
    apply,
    expression_axes,
    walk,
)
from attn_pass.model.index import Axis
from attn_pass.reading.scores import is_masking


@dataclass(frozen=True)
class NamedMask:
    """What a mask turned out to be: the parts still needed, its structure, whether a row can be empty."""

    bias: Expr | None
    keep: Keep | None
    structure: Structure
    rows_never_empty: bool


def constant_parts(bias: Expr) -> tuple[Expr, Const, Const] | None:
    """``(condition, yes, no)`` of a bias that is one of two constants."""
    if isinstance(bias, Apply) and bias.op == "cast" and bias.dtype is not None and bias.dtype.is_floating_point:
        inner = constant_parts(bias.args[0])
        if inner is None:
            return None
        yes, no = (apply("cast", c, dtype=bias.dtype) for c in inner[1:])
        return (inner[0], yes, no) if isinstance(yes, Const) and isinstance(no, Const) else None
    if isinstance(bias, Apply) and bias.op == "where":
        condition, yes, no = bias.args
        if isinstance(yes, Const) and isinstance(no, Const):
            return condition, yes, no
        # where(a, where(b, x, y), z) with two equal constants
        if isinstance(no, Const):
            inner = constant_parts(yes)
            if inner is not None and inner[2].value == no.value:
                return apply("and", condition, inner[0]), inner[1], no
    return None


def name_mask(
    bias: Expr | None,
    keep: Keep | None,
    deep_bias: Expr | None,
    deep_keep: Expr | None,
    keys: Axis,
    rows: tuple[Axis, ...],
    dtype: torch.dtype,
) -> NamedMask:
    """Names bias and keep-condition. ``deep_*`` are the same expressions lifted down to index arithmetic.

    What keeps everything and what is constant along the keys and finite vanishes; ``key <= query`` is causal, written
    as a condition or as a matrix of zeros and a masking fill.
    """
    if deep_bias is not None and keys not in expression_axes(deep_bias) and _is_finite(deep_bias):
        bias = deep_bias = None
    if keep is None and deep_bias is not None:
        return _name_bias(bias, deep_bias, keys, rows, dtype)
    if keep is None:
        return NamedMask(None, None, Structure.NONE, True)
    assert deep_keep is not None
    if deep_keep == TRUE:
        return NamedMask(bias, None, Structure.NONE if bias is None else Structure.DENSE, bias is None)
    causal = is_causal_top_left(deep_keep, keys, rows)
    if causal and bias is None:
        return NamedMask(None, Keep(deep_keep, keep.fill), Structure.CAUSAL, True)
    return NamedMask(bias, keep, Structure.DENSE, False)


def _name_bias(bias: Expr | None, deep: Expr, keys: Axis, rows: tuple[Axis, ...], dtype: torch.dtype) -> NamedMask:
    """Names a matrix that is added to the scores. A dense one stays the tensor it is: reused, never rebuilt."""
    parts = constant_parts(deep)
    found = None if parts is None else _as_keep(*parts, dtype)
    if found is not None:
        condition, fill = found
        if condition == TRUE:
            return NamedMask(None, None, Structure.NONE, True)
        if is_causal_top_left(condition, keys, rows):
            return NamedMask(None, Keep(condition, fill), Structure.CAUSAL, True)
    return NamedMask(bias, None, Structure.DENSE, False)


def _as_keep(condition: Expr, yes: Const, no: Const, dtype: torch.dtype) -> tuple[Expr, float] | None:
    if yes.value == 0 and is_masking(float(no.value), dtype):
        return condition, float(no.value)
    if no.value == 0 and is_masking(float(yes.value), dtype):
        return apply("not", condition), float(yes.value)
    if yes.value == 0 and no.value == 0:
        return TRUE, 0.0
    return None


def _is_finite(expression: Expr) -> bool:
    """Whether an expression of constants alone is finite; loads are not known to be."""
    return all(
        not isinstance(e, Const) or (e.value == e.value and abs(e.value) != float("inf")) for e in walk(expression)
    ) and all(isinstance(e, (Const, IndexValue, Apply)) for e in walk(expression))


def text_of(named: NamedMask) -> str:
    """A few words for the report."""
    if named.structure is not Structure.DENSE:
        return "causal" if named.structure is Structure.CAUSAL else "none"
    return " and ".join(word for word, part in (("additive", named.bias), ("boolean", named.keep)) if part is not None)
