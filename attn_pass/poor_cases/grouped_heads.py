"""Grouped query heads: the heads of one KV head become query rows.

Poor: several query heads share one KV head, and there are few query rows (decoding). Each head of the group is then a
matrix-vector product that reads the keys and values of the group again.

Costs: ``G`` times the bytes of keys and values, at the low rate of a matrix-vector product.

Becomes: the group axis in front of the query rows, ``(B, Hkv * G, L, D)`` as ``(B, Hkv, G * L, D)``. The original form
is a call with ``enable_gqa=True``.

Exact because: ``head = kv_head * G + group``, and neither keys nor values depend on ``group``. The reading proves it,
for the interleaved order only. A packed row is no longer a position, so ``is_causal`` cannot be used: a causal mask
becomes a tensor, and a mask that varies from row to row is repeated for the group, which the target's cost includes.
"""

from __future__ import annotations

from collections.abc import Iterator

from attn_pass.model.attention import Attention

NAME = "grouped_heads"


def variants(attention: Attention) -> Iterator[Attention]:
    """Every shared head axis moved in front of the query rows."""
    if (packed := attention.with_shared_rows("heads")) is not None:
        yield packed
