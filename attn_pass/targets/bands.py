"""Masks that are one band of keys around the row's own, aligned to the last key, as window sizes of kernels.

FlashAttention treats a size of at least the number of keys as no bound, and a missing bound beside another as that
number (mha_fwd and set_params_fprop in flash_api.cpp): with more queries than keys either gives another mask, except
for the plain causal one.
"""

from __future__ import annotations

from dataclasses import dataclass

from attn_pass.model.attention import Attention
from attn_pass.model.index import Index, is_at_most, is_nonnegative
from attn_pass.model.structure import Band, row_index


@dataclass(frozen=True)
class Window:
    """Row ``i`` keeps the keys from ``i + S - L - left`` to ``i + S - L + right``; None means no bound."""

    left: Index | None
    right: Index | None


def band_of(a: Attention) -> Band | None:
    """The whole mask as one band around the query's own position; None if it is another one.

    A fully masked row must be one that kernels give 0 for, one filled with -inf: where the fill is a number it
    averages the values.
    """
    if a.mask.is_none or a.mask.structure.row != row_index(a.rows) or len(a.mask.structure.parts) != 1:
        return None
    (band,) = a.mask.structure.parts
    if not isinstance(band, Band) or not a.mask.structure.is_exact:
        return None
    return band if a.mask.never_empty or a.mask.only_hides else None


def window_of(a: Attention) -> Window | None:
    """The whole mask as a window whose bounds hold the row's own key; None if it is another one."""
    band = band_of(a)
    if band is None or a.mask.bias is not None:
        return None
    last = a.kv_len - a.q_len
    left = None if band.lower is None else last - band.lower
    right = None if band.upper is None else band.upper - last
    if any(bound is not None and not is_nonnegative(bound) for bound in (left, right)):
        return None
    if (left, right) != (None, 0) and not is_at_most(a.q_len, a.kv_len):
        return None
    return Window(left, right)
