"""Keys and values shared over the batch: the batch becomes query rows.

Poor: the queries of a batch attend to the same keys and values, which have batch 1 or were expanded over the batch, or
over a part of it such as beams. Fused kernels need equal batches, so torch copies keys and values for every batch
entry, or reads them again for each; with one query every row is a matrix-vector product
([pytorch/pytorch#151287](https://github.com/pytorch/pytorch/issues/151287): 4.2 GB per call where 1.6 MB would do).

Costs: ``B`` times the bytes of keys and values; with one query per row also the low rate of a matrix-vector product.

Becomes: one call in which every batch axis that neither keys nor values depend on is in front of the query rows,
``(B, H, L, D)`` as ``(1, H, B * L, D)``, and is unfolded afterwards. Folding the query may need a copy, and a mask that
varies from row to row is repeated over the folded axis; the target counts the cost of both.

Exact because: a softmax row depends on its own query and on all keys and values, and these do not depend on the batch
axis: ``out[b, h, i] = f(query[b, h, i], key[h], value[h])``, so ``(b, i)`` may be one row axis. A bias or
keep-condition is a function of ``(b, h, i, j)`` and keeps its meaning. Gradients of keys and values are summed over the
batch by autograd.
"""

from __future__ import annotations

from collections.abc import Iterator

from attn_pass.model.attention import Attention

NAME = "shared_kv"


def variants(attention: Attention) -> Iterator[Attention]:
    """Every shared batch axis moved in front of the query rows."""
    if (folded := attention.with_shared_rows("batch")) is not None:
        yield folded
