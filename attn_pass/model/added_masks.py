"""A matrix of zeros and a number that masks, added to the scores: as the keep-condition it amounts to."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_pass.model.attention import Attention
from attn_pass.model.expression import FALSE, Expr, apply
from attn_pass.model.mask import ABSORBING, Computed, Keep
from attn_pass.model.piecewise import pieces


def kept_in_place_of_added(a: Attention) -> Attention | None:
    """The same with a keep-condition instead of a matrix that adds 0 to kept keys and masks the others.

    If a row may be fully masked, the added number must absorb its scores completely, so that they
    could as well have been replaced by it. None if the mask is not such a matrix.
    """
    mask = a.mask
    if mask.keep is not None or mask.bias is None or mask.computed is None or mask.computed.bias is None:
        return None
    values = pieces(mask.computed.bias)
    fills = {float(v.value) for _, v in values or () if v.value != 0}
    if values is None or mask.fills is None or len(fills) != 1:
        return None
    fill = fills.pop()
    absorbs = fill <= ABSORBING and a.score_dtype in (torch.float32, torch.bfloat16)
    if not (absorbs or mask.never_empty or fill == float("-inf")):
        return None
    condition: Expr = FALSE
    for when, value in values:
        condition = apply("or", condition, when) if value.value == 0 else condition
    kept = replace(mask, bias=None, keep=Keep(condition, fill), fills=None, computed=Computed(None, condition))
    return replace(a, mask=replace(kept, by_distance=None))
