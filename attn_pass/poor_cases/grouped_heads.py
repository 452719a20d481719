"""Grouped query heads: the heads of one KV head are more query rows.

Poor: with few query rows each head of a group is a matrix-vector product that reads the keys and values of the group
again; packed, they are one matrix product that reads them once.

Exact because ``head = kv_head * groups + group`` and neither keys nor values depend on ``group`` (proved by the
reading, interleaved order only). A mask that differs from row to row has to be repeated for the group, which is the
target's cost to count; ``is_causal`` does not survive, since a packed row is no position any more.
"""

from __future__ import annotations

from collections.abc import Iterator

from attn_pass.model.attention import Attention

NAME = "grouped heads"


def variants(attention: Attention) -> Iterator[Attention]:
    """Every shared head axis moved in front of the query rows."""
    shared = set(attention.shared_axes)
    moved = tuple(a for a in attention.heads if a in shared)
    if moved:
        yield attention.regrouped(
            heads=tuple(a for a in attention.heads if a not in shared), rows=moved + attention.rows
        )
