"""A cache that is only partly valid: attention over the keys up to a position that is known at run time.

Poor: keys and values are a cache with room for more positions than it holds, under a mask that compares the key with a
run-time value: ``key <= position``, ``key < length[b]``, ``key <= row + position``, or windows of these. The program
computes the scores of all keys, and discards most of them.

Costs: ``S / valid`` times the bytes of keys and values and the FLOPs that are needed, at each step of a decoding loop.

Becomes: the same attention together with its range of valid keys, as expressions for each batch entry. A kernel that
takes such a range reads no key outside of it, and one graph serves every position. Other targets refuse this form, and
may take the one without a range.

Exact because: each bound is a condition of the mask, compared in integers that cannot overflow, or the hull of several
ranges, such as a window and the first key beside it. A masked key has weight zero. The mask still applies inside the
range, and a row without valid keys gets the result that the program gives it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attn_pass.model.added_masks import kept_in_place_of_added
from attn_pass.model.attention import Attention
from attn_pass.model.conditions import conjuncts
from attn_pass.model.expression import TRUE
from attn_pass.model.valid_range import valid_range

NAME = "valid_range"
REFUSAL = "the target reads the whole cache: it takes no range of keys that is known only at run time"


def variants(attention: Attention) -> Iterator[Attention]:
    """The attention with the range of keys that its mask may keep.

    Beside a bias whose fully masked rows average all keys, what is masked with a number is left to the bias. So it is
    in training where it is added and may mask all of a row: such scores have gradients, and replaced ones have none.
    """
    keeps_gradients = not attention.needs_grad or attention.mask.never_empty
    a = (kept_in_place_of_added(attention) if keeps_gradients else None) or attention
    if a.mask.keep is None or (a.mask.bias is not None and not a.mask.never_empty):
        return
    conditions = conjuncts(a.mask.deep_condition or TRUE)
    valid = valid_range(conditions, a.keys, a.rows, lambda load: a.sources[load.source].dtype)
    if valid is not None:
        yield replace(a, valid=valid)
