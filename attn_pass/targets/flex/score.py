"""The inputs of FlexAttention for an attention: a score function, a mask function, and the known parts of the mask.

On the CPU every part of a mask that is not a plain band goes into the score function. On CUDA devices every condition
that hides a key goes into the mask function, which full blocks skip, and is computed from indices if the program
computed it so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from attn_pass.devices.registry import family_of
from attn_pass.model.attention import Attention
from attn_pass.model.conditions import structure_of
from attn_pass.model.expression import DOT, Apply, Const, Expr, Load, apply, contains_dot, loads, transform, walk
from attn_pass.model.index import Axis, product
from attn_pass.model.structure import Band, Keys, Opaque, Part, Structure, row_index
from attn_pass.targets.base import Setting
from attn_pass.targets.flex.blocks import are_known
from attn_pass.targets.masks import LOWEST_CUDA, OVERFLOWS_HALF

_LOWEST = torch.finfo(torch.float32).min
_HALF = torch.finfo(torch.float16).min / 2
_MOST_OPERATIONS = 48  # of a mask that is computed again for every score; not measured

# Functions of the scores that pass an error on without making a jump of it.
_CONTINUOUS = frozenset(("add", "sub", "mul", "neg", "abs", "tanh", "sigmoid", "exp", "maximum", "minimum", "cast"))


@dataclass(frozen=True)
class Function:
    """A score function over `DOT`, the mask function, and conditions every kept key fulfils.

    ``score`` stands for the scaled product where the scores are affine. With ``parts_are_exact`` these conditions, the
    parts, are all of the mask.
    """

    score: Expr
    mask: Expr | None = None
    parts: tuple[Part, ...] = ()
    parts_are_exact: bool = True

    def loads(self) -> tuple[Load, ...]:
        """Every element either function reads."""
        return loads(self.score) + (() if self.mask is None else loads(self.mask))

    def together(self) -> Expr:
        """Both as one expression, for people."""
        return self.score if self.mask is None else apply("where", self.mask, self.score, Const(float("-inf")))


def template_name(setting: Setting) -> str:
    """Inductor's template on the setting's device: "cpp", "triton", or "" where it has none."""
    return family_of(setting.device).flex_template


def function_of(a: Attention, setting: Setting) -> Function:
    """The functions for the template on the device of the setting."""
    return _in_triton(a, setting) if template_name(setting) == "triton" else _in_cpp(a)


def _in_cpp(a: Attention) -> Function:
    band = visible(a)
    parts = () if band == Band() else (band,)
    mask = Structure(a.mask.structure.key, a.mask.structure.row, parts).condition() if is_whole_mask(a) else None
    return Function(score_of(a), mask, parts, mask is not None)


def _in_triton(a: Attention, setting: Setting) -> Function:
    score = multiplied_once(a.modified) if a.not_affine else DOT
    if a.mask.is_none:
        return Function(score)
    # Only bounds on keys mean the same where rows are packed: a band's row is the query's own.
    in_order = a.mask.structure.row == row_index(a.rows) or all(isinstance(p, Keys) for p in a.mask.structure.parts)
    never_empty = a.mask.never_empty or setting.assume_nonempty_rows
    if a.mask.structure.is_exact and (never_empty or a.mask.only_hides):
        parts = a.mask.structure.parts if in_order else ()
        return Function(score, a.mask.structure.condition(), parts, in_order and are_known(parts))
    bias, keep, condition = _bias(a), a.mask.keep, a.mask.deep_condition
    if bias is not None:
        score = apply("add", score, bias)
    if keep is None or condition is None:
        return Function(score)
    keeps = _cheapest(keep.condition, condition)
    if a.mask.replaces_with_number and not never_empty:
        return Function(apply("where", keeps, score, Const(max(float(keep.fill), LOWEST_CUDA))))
    known = structure_of(condition, a.keys, a.rows)
    parts = tuple(p for p in known.parts if not isinstance(p, Opaque))
    mask = known.condition() if known.is_exact else keeps
    return Function(score, mask, parts, known.is_exact and are_known(parts))


def _cheapest(written: Expr, computed: Expr | None) -> Expr:
    """Bias or keep-condition: computed where that takes few operations, else the program's tensor."""
    few = computed is not None and sum(1 for e in walk(computed) if isinstance(e, Apply)) <= _MOST_OPERATIONS
    return computed if few and computed is not None else written


def _bias(a: Attention) -> Expr | None:
    """The bias, its masking fills no lower than the kernel can take in base 2; -inf stays."""
    if a.mask.bias is None:
        return None
    bias = apply("cast", _cheapest(a.mask.bias, a.mask.deep_bias), dtype=torch.float32)
    if a.score_dtype == torch.float16:
        return _as_in_half(bias, LOWEST_CUDA, a.rescaled)
    low = apply("and", apply("le", bias, Const(LOWEST_CUDA)), apply("gt", bias, Const(float("-inf"))))
    return apply("where", low, Const(LOWEST_CUDA), bias)


def _as_in_half(bias: Expr, lowest: float, rescaled: float) -> Expr:
    """A float32 bias of float16 scores: a masking fill absorbs any score there, not in the float32 of the kernel.

    What counts is what was added, before the scores were multiplied by ``rescaled``.
    """
    low = apply("where", apply("le", bias, Const(_HALF * rescaled)), Const(lowest), bias)
    return apply("where", apply("le", bias, Const(OVERFLOWS_HALF * rescaled)), Const(float("-inf")), low)


# ---------------------------------------------------------------- the CPU's


def visible(a: Attention) -> Band:
    """A band that holds every key any row attends to; without bounds where a row may have none."""
    bands = [p for p in a.mask.structure.parts if isinstance(p, Band)]
    known = a.mask.never_empty and a.mask.structure.row == row_index(a.rows)
    return bands[0] if known and len(bands) == 1 else Band()


def is_whole_mask(a: Attention) -> bool:
    """Whether the band `visible` gives, with bounds that are known, is all there is to the mask."""
    band = visible(a)
    known = all(b is None or isinstance(b, int) for b in (band.lower, band.upper))
    return known and band != Band() and a.mask.structure.parts == (band,)


def score_of(a: Attention) -> Expr:
    """The score function: the modified product, the bias added, the fill where it is not kept."""
    score = multiplied_once(a.modified)
    if not a.mask.is_none and is_whole_mask(a):
        return score
    if not a.mask.is_none and a.mask.structure.is_exact and a.mask.never_empty:
        # The mask is index arithmetic, and what is masked weighs nothing: no tensor to read, and none to make.
        return apply("where", a.mask.structure.condition(), score, Const(float("-inf")))
    if a.mask.bias is not None:
        bias = a.mask.bias
        if a.score_dtype == torch.float16:
            bias = _as_in_half(apply("cast", bias, dtype=torch.float32), _LOWEST, a.rescaled)
        score = apply("add", score, bias)
    if a.mask.keep is not None:
        fill = float(a.mask.keep.fill)
        score = apply(
            "where", a.mask.keep.condition, score, Const(fill if fill == float("-inf") else max(fill, _LOWEST))
        )
    return score


# ---------------------------------------------------------------- both


def multiplied_once(expression: Expr) -> Expr:
    """Factors and divisors that are numbers as one factor: the kernel's divisions are slow, and it has many scores."""
    return transform(expression, _one_factor)


def _one_factor(expression: Expr) -> Expr | None:
    factor = 1.0
    inner: Expr = expression
    while isinstance(inner, Apply) and inner.op in ("mul", "div"):
        number, rest = inner.args[1], inner.args[0]
        if inner.op == "mul" and isinstance(rest, Const):
            number, rest = rest, number
        if not isinstance(number, Const) or isinstance(number.value, bool) or not contains_dot(rest):
            break
        value = float(number.value)
        factor = factor * value if inner.op == "mul" else factor / value if value else math.inf
        inner = rest
    if inner is expression or not 1e-30 < abs(factor) < 1e30:
        return None
    return apply("mul", multiplied_once(inner), Const(factor))


def amplifies(score: Expr) -> str | None:
    """What in the expression could turn a rounding of the scores into another result; None for nothing."""
    for part in walk(score):
        if not isinstance(part, Apply) or not contains_dot(part) or part.op in _CONTINUOUS:
            continue
        if part.op == "where" and not contains_dot(part.args[0]):
            continue
        if part.op == "div" and not contains_dot(part.args[1]):
            continue
        return f"{part.op} of the scores would turn a rounding error into a jump"
    return None


def outgrows_float32(a: Attention) -> str | None:
    """Why a function of float64 scores cannot be computed in float32: it adds numbers that float32 loses scores beside.

    In a fully masked row the lowest of two fills, -1e30 and -3.4e38, decides which key is attended to.
    """
    if a.score_dtype != torch.float64 or a.compute_dtype == torch.float64:
        return None
    for part in walk(a.modified):
        if isinstance(part, Const) and _TOLD_APART < abs(part.value) < float("inf"):
            return f"{part.value:g} is added to float64 scores inside a function, which is computed in float32"
        if isinstance(part, Load) and a.sources[part.source].dtype == torch.float64:
            return "a float64 tensor is added to scores inside a function, which is computed in float32"
    return None


_TOLD_APART = 1e3  # beside a number so far from 0 float32 still has scores to four digits


def names_of(a: Attention) -> dict[Axis, str]:
    """What each axis is in a score function: the index of its group, or the digit of it that it is."""
    return dict(_names(a))


def _names(a: Attention) -> Iterator[tuple[Axis, str]]:
    for group, name in zip((a.batch, a.heads, a.rows, (a.keys,)), ("b", "h", "q_idx", "kv_idx")):
        real = [x for x in group if x.size != 1]
        for number, axis in enumerate(real):
            faster = product(x.size for x in real[number + 1 :])
            digit = name if faster == 1 else f"{name} // {faster}"
            text = digit if number == 0 else f"({digit}) % {axis.size}"
            yield axis, f"({text})" if len(real) > 1 else text
