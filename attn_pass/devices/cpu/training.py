"""What the CPU kernel requires of an attention with gradients or dropout, in addition to what it requires of any."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_pass.devices.cpu.added import gives_apart
from attn_pass.model.attention import Attention
from attn_pass.model.expression import TRUE, may_be_infinite
from attn_pass.targets.base import Setting
from attn_pass.targets.constraints import RANDOM_NUMBERS, Constraint, HasAttention
from attn_pass.targets.empty_rows import replaces_scores
from attn_pass.targets.key_bounds import Bounds, bounds_of
from attn_pass.targets.masks import (
    HALF_ABSORBS,
    absorbing_fill,
    condition_is_learned,
    is_rescaled_in_bfloat16,
    shifts_rows,
)

_LOWEST = torch.finfo(torch.float32).min


def adds_to_empty_rows(a: Attention, setting: Setting) -> bool:
    """Whether an added mask may mask a row fully: the gradient of such a row passes through it."""
    return a.needs_grad and not _never_empty(a, setting)


def _never_empty(a: Attention, setting: Setting) -> bool:
    return a.mask.never_empty or setting.assume_nonempty_rows


def relies_on_nonempty_rows(a: Attention, setting: Setting) -> bool:
    """Whether gradients are right by the user's word alone: `assume_nonempty_rows`."""
    return a.needs_grad and setting.assume_nonempty_rows and not a.mask.never_empty


def _replaces_before_adding(c: HasAttention) -> bool:
    bias = c.attention.mask.bias
    return bias is not None and not _never_empty(c.attention, c.setting) and replaces_scores(bias)


CONSTRAINTS: tuple[Constraint[HasAttention], ...] = (
    Constraint(
        "gradient",
        "the CPU kernel has gradients under torch.compile only",
        lambda c: not (c.setting.may_need_grad or (c.attention.needs_grad and c.setting.program != "compile")),
    ),
    Constraint(
        "dropout",
        "the CPU kernel has dropout under torch.compile only",
        lambda c: not c.attention.dropout or c.setting.program == "compile",
    ),
    RANDOM_NUMBERS,
    Constraint(
        "fully masked rows",
        "a row may be fully masked by scores that are replaced and by a matrix that is added",
        lambda c: not (c.attention.needs_grad and _replaces_before_adding(c)),
    ),
    Constraint(
        "infinite scores",
        "a function of the scores may be infinite: where a row is NaN, not all of eager's gradients are",
        lambda c: not (c.attention.needs_grad and c.attention.not_affine and may_be_infinite(c.attention.modified)),
    ),
    Constraint(
        "float64 scores",
        "a bias is added to float64 scores of narrower operands, beside a mask that replaces them",
        lambda c: not (c.attention.needs_grad and gives_apart(c.attention) and shifts_rows(c.attention)),
    ),
    Constraint(
        "condition",
        "the mask's condition needs a gradient",
        lambda c: not (c.attention.needs_grad and condition_is_learned(c.attention)),
    ),
)
"""What is asked of one with gradients or dropout, in order."""


def fill_that_counts(a: Attention, setting: Setting) -> float | None:
    """What masked scores become for the kernel, if weights follow from it; None where masked keys count for nothing.

    They do in rows that are fully masked: by the condition, whose weights dropout takes some of, or by the condition
    and numbers of the bias together.
    """
    if a.mask.keep is None or not a.mask.replaces_with_number or _never_empty(a, setting):
        return None
    if a.mask.bias is None:
        return _LOWEST if a.dropout else None
    if not gives_apart(a):
        return None
    # As the bias has it (`masks.additive_mask`), so that the two keep their order.
    before = torch.tensor(a.mask.keep.fill / a.rescaled, dtype=a.score_dtype)
    in_half = a.score_dtype == torch.float16 and float(before) <= torch.finfo(torch.float16).min / 2
    if is_rescaled_in_bfloat16(a, setting):
        return absorbing_fill(a, a.mask.keep.fill)
    return float(before.float() * HALF_ABSORBS) if in_half else a.mask.keep.fill


def bounds_beside(a: Attention, setting: Setting, fill: float | None) -> Bounds:
    """The mask as bounds on a row's keys; with a fill every key counts, and the condition says with which score."""
    if fill is not None:
        return Bounds(rest=a.mask.condition or TRUE)
    if gives_apart(a):  # a row that masks all keys with -inf is none of a softmax, whatever is added
        a = replace(a, mask=replace(a.mask, never_empty=True))
    return bounds_of(a, setting)
