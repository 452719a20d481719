"""Keys that every query ignores: attention over the other keys only.

Poor: every query keeps the same contiguous range of keys. Examples are one query under a causal mask aligned to the
first key (for a call with ``is_causal=True`` that is one key, whatever the cache holds), one query in a sliding window
at the end of a cache, and a prefix of a known length. The program reads all keys and values, computes every score, and
discards most of them.

Costs: ``S / range`` times the bytes of keys and values and the FLOPs that are needed, and the mask.

Becomes: the attention over that range of keys, a slice of the operands, without a mask.

Exact because: a masked score has weight zero, and the mask is proven to be exactly ``lower <= key <= upper``, so no key
in the range is masked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attn_pass.model.attention import Attention
from attn_pass.model.expression import Expr, Load, rewrite_indices
from attn_pass.model.index import Axis, Index, axes, axis_index, is_less, is_nonnegative, substitute
from attn_pass.model.mask import Mask
from attn_pass.model.structure import Band, Keys, Structure

NAME = "key_range"


def variants(attention: Attention) -> Iterator[Attention]:
    """The attention over the keys between the bounds, without a mask."""
    bounds = _bounds(attention.mask.structure)
    if bounds is None or attention.not_affine or attention.sink is not None:
        return
    first: Index = 0 if bounds.lower is None else bounds.lower
    last: Index = attention.kv_len - 1 if bounds.upper is None else bounds.upper
    count = last - first + 1
    if not (is_nonnegative(first) and is_less(last, attention.kv_len) and is_less(0, count)):
        return
    keys = Axis(f"{attention.keys.key}s", count)
    moved = {attention.keys: axis_index(keys) + first}

    def load(old: Load) -> Load:
        return Load(old.source, tuple(substitute(i, moved) for i in old.index))

    score: Expr = rewrite_indices(attention.score, moved)
    yield replace(
        attention,
        keys=keys,
        key=load(attention.key),
        value=load(attention.value),
        score=score,
        mask=Mask.none(),
    )


def _bounds(structure: Structure) -> Keys | None:
    """The run of keys that every row keeps, where the mask is that and nothing else."""
    if len(structure.parts) != 1:
        return None
    (part,) = structure.parts
    row = structure.row
    if isinstance(part, Band) and not axes(row):  # one query
        lower, upper = (None if b is None else row + b for b in (part.lower, part.upper))
        return Keys(lower, upper)
    return part if isinstance(part, Keys) else None
