"""Keys and values shared over the batch: the batch is more query rows.

Poor: the fused kernels want equal batches, so stock copies keys and values for every batch row (pytorch#151287: 4.2 GB
a call where 1.6 MB would do), or reads them again for each.

Exact because a softmax row depends on its own query and on all keys and values, and those do not depend on the batch
axis: ``attention[b, h, i] = f(query[b, h, i], key[h], value[h])``, so (b, i) may be one row axis. A bias or
keep-condition is a function of (b, h, i, j) and moves along unchanged. Gradients of keys and
values sum over the batch by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator

from attn_pass.model.attention import Attention

NAME = "shared K/V over the batch"


def variants(attention: Attention) -> Iterator[Attention]:
    """Every shared batch axis moved in front of the query rows."""
    shared = set(attention.shared_axes)
    moved = tuple(a for a in attention.batch if a in shared)
    if moved:
        yield attention.regrouped(
            batch=tuple(a for a in attention.batch if a not in shared), rows=moved + attention.rows
        )
