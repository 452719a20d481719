"""Keys and values shared over the batch: the batch is more query rows.

Poor: queries of a batch ask the same keys and values, which have batch 1 or were expanded over the batch, or over a
part of it such as beams. Fused kernels want equal batches, so torch copies keys and values for every batch row, or
reads them again for each; with one query every row is a matrix-vector product
([pytorch/pytorch#151287](https://github.com/pytorch/pytorch/issues/151287): 4.2 GB a call where 1.6 MB would do).

Costs: ``B`` times the bytes of keys and values; for one query a row, the rate of a matrix-vector product besides.

Becomes: every batch axis that neither keys nor values depend on in front of the query rows, ``(B, H, L, D)`` as
``(1, H, B * L, D)``, one call, unfolded afterwards. A folded query may need a copy, and a mask that varies from row to
row is repeated over what was folded; the target counts both.

Exact because: a softmax row depends on its own query and on all keys and values, and those do not depend on the batch
axis: ``out[b, h, i] = f(query[b, h, i], key[h], value[h])``, so ``(b, i)`` may be one row axis. A bias or
keep-condition is a function of ``(b, h, i, j)`` and moves along. Gradients of keys and values sum over the batch by
themselves.
"""

from __future__ import annotations

from collections.abc import Iterator

from attn_pass.model.attention import Attention

NAME = "shared_kv"


def variants(attention: Attention) -> Iterator[Attention]:
    """Every shared batch axis moved in front of the query rows."""
    shared = set(attention.shared_axes)
    moved = tuple(a for a in attention.batch if a in shared)
    if moved:
        yield attention.regrouped(
            batch=tuple(a for a in attention.batch if a not in shared), rows=moved + attention.rows
        )
