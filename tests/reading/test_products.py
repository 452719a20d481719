"""Products of every spelling: sums over several indices, einsum of three operands, sums, vectors, inner, linear."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from against_eager import randn, same
from torch import Tensor
from torch.nn import functional as F

import attn_pass

einsum = torch.einsum
Program = Callable[..., Tensor]
PLAIN = ((2, 4, 8, 16), (2, 4, 9, 16), (2, 4, 9, 16))


def msa_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rows of an alignment attend together (ESM's MSA transformer): rows r, columns i and j, batch n."""
    weights = (einsum("rinhd,rjnhd->hnij", q, k) * 0.1).softmax(-1)
    return einsum("hnij,rjnhd->rinhd", weights, v)


def se3(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The orders m of a representation are summed over with its channels (SE(3)-Transformer)."""
    weights = (einsum("bhidm,bhjdm->bhij", q, k) * 0.2).softmax(-1)
    return einsum("bhij,bhjdm->bhidm", weights, v)


def retro_neighbours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All tokens j of all neighbours r of a chunk i are keys (RETRO)."""
    scores = einsum("bihd,birjhd->bihrj", q, k)
    weights = scores.flatten(-2).softmax(-1).view(scores.shape)
    return einsum("bihrj,birjhd->bihd", weights, v)


def keys_of_two_dimensions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = einsum("bhid,brjhd->bhirj", q, k).flatten(-2)
    return einsum("bhik,bkhd->bhid", scores.softmax(-1), v.flatten(1, 2))


def keys_in_another_order(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The weights of one neighbour's tokens go to others' values: a permutation of the keys, and attention."""
    scores = einsum("bhid,brjhd->bhijr", q, k)
    weights = scores.flatten(-2).softmax(-1).view(*scores.shape[:3], *scores.shape[:-3:-1])
    return einsum("bhirj,brjhd->bhid", weights, v)


def three_operands(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    """A temperature of each head is part of the product."""
    return einsum("bhij,bhjd->bhid", einsum("bhid,bhjd,h->bhij", q, k, t).softmax(-1), v)


def three_operands_of_values(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return einsum("bhij,h,bhjd->bhid", einsum("bhid,bhjd->bhij", q, k).softmax(-1), t, v)


def implicit(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return einsum("ij,jd", einsum("id,jd", q, k).softmax(-1), v)


def multiplied_and_summed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1) * 0.25
    return (scores.softmax(-1).unsqueeze(-1) * v.unsqueeze(-3)).sum(-2)


def one_row_summed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q[:, :, :1] * k).sum(dim=-1).softmax(-1)
    return torch.sum(weights[..., None] * v, dim=-2)


def kept(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each place of an image attends to its own neighbourhood, the channels in front (`F.unfold`)."""
    return ((q * k).sum(1, keepdim=True).softmax(2) * v).sum(2)


def kept_at_the_end(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q * k).sum(dim=-1, keepdim=True).mul(0.25).softmax(2)
    return (weights * v).sum(2, keepdim=True)


def pooled(k: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """A learned query."""
    return ((k * w).sum(-1, True).softmax(1) * v).sum(1)


def expanded_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Memory networks and pointers (MemN2N, TRADE): a query as large as the keys."""
    weights = (q.unsqueeze(1).expand_as(k) * k).sum(2).softmax(1)
    return (weights.unsqueeze(2).expand_as(v) * v).sum(1)


def repeated_query_behind(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (k * q.unsqueeze(1).repeat(1, k.size(1), 1)).sum(2).softmax(1)
    return (weights.unsqueeze(2) * v).sum(1)


def expanded_and_scaled(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    query = q.unsqueeze(1).expand(-1, k.size(1), -1) * t
    return einsum("bj,bjd->bd", einsum("bjd,bjd->bj", query * 0.5, k).softmax(-1), v)


def tensordot(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.tensordot(torch.tensordot(q, k, dims=([1], [1])).softmax(-1), v, dims=1)


def inner(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.inner(torch.inner(q, k).softmax(-1), v.t())


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.linear(F.linear(q, k * 0.25).softmax(-1), v.t())


def added_zeros(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.bmm(q, k.mT).softmax(-1)
    return torch.baddbmm(torch.zeros(2, 8, 16, dtype=q.dtype), weights, v)


def nothing_added(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.bmm(q, k.mT).softmax(-1)
    return torch.baddbmm(q, weights, v, beta=0)


def multiply(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.ops.aten.multiply.Tensor(q @ k.mT, 0.25).softmax(-1) @ v


def vectors(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query, of which nothing is a batch."""
    return torch.mv(v.t(), torch.softmax(torch.mv(k, q) * 0.25, 0))


def vectors_as_methods(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return v.t().mv(k.mv(q).softmax(-1))


def vectors_added(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    return torch.addmv(torch.zeros_like(v[0]), v.t(), torch.addmv(b, k, q, alpha=0.25, beta=2.0).softmax(0))


def one_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query, and a value of one number."""
    return torch.dot(torch.mv(k, q).softmax(0), v)


def a_dot_for_each_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.stack([torch.dot(q, key) for key in k]).softmax(0) @ v


def vecdot(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.linalg.vecdot(q.unsqueeze(-2), k.unsqueeze(-3)) / 4
    return scores.softmax(-1) @ v


def vecdot_of_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.linalg.vecdot(q[..., None], k.mT[..., None, :, :], dim=-2).softmax(-1)
    return torch.linalg.vecdot(weights[..., None], v[..., None, :, :], dim=-2)


def vecdot_of_fewer_dimensions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A query that all batches share."""
    return torch.linalg.vecdot(k, q).softmax(-1).unsqueeze(-2) @ v


def linalg(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.linalg.multi_dot([torch.linalg.matmul(q, k.t()).softmax(-1), v])


def chain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.chain_matmul(torch.chain_matmul(q, k.t()).softmax(-1), v)


def lists_of_subscripts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = einsum(q, [0, 1, 2], k, [0, 3, 2], [0, 1, 3]).softmax(-1)
    return einsum(weights, [0, 1, 3], v, [0, 3, 30], [0, 1, 30])


def lists_with_an_ellipsis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return einsum(einsum(q, [..., 1, 2], k, [..., 3, 2]).softmax(-1), [..., 1, 3], v, [..., 3, 2], [..., 1, 2])


BATCHED = ((2, 8, 16), (2, 9, 16), (2, 9, 16))
SINGLE = ((8, 16), (9, 16), (9, 16))
ONE_ROW = ((3, 16), (3, 9, 16), (3, 9, 16))
VECTORS = ((16,), (9, 16), (9, 16))
ROWS = ((3, 8, 2, 4, 16), (3, 9, 2, 4, 16), (3, 9, 2, 4, 16))
READ = {
    msa_rows: ROWS,
    se3: ((2, 4, 8, 5, 3), (2, 4, 9, 5, 3), (2, 4, 9, 5, 3)),
    retro_neighbours: ((2, 8, 4, 16), (2, 8, 3, 5, 4, 16), (2, 8, 3, 5, 4, 16)),
    keys_of_two_dimensions: ((2, 4, 8, 16), (2, 3, 5, 4, 16), (2, 3, 5, 4, 16)),
    keys_in_another_order: ((2, 4, 8, 16), (2, 3, 5, 4, 16), (2, 3, 5, 4, 16)),
    three_operands: (*PLAIN, (4,)),
    three_operands_of_values: (*PLAIN, (4,)),
    implicit: SINGLE,
    multiplied_and_summed: PLAIN,
    one_row_summed: PLAIN,
    kept: ((2, 16, 1, 12), (2, 16, 9, 12), (2, 16, 9, 12)),
    kept_at_the_end: ((2, 12, 1, 16), (2, 12, 9, 16), (2, 12, 9, 16)),
    pooled: ((2, 9, 16), (1, 1, 16), (2, 9, 16)),
    expanded_query: ONE_ROW,
    repeated_query_behind: ONE_ROW,
    expanded_and_scaled: (*ONE_ROW, (3, 1, 1)),
    tensordot: SINGLE,
    inner: SINGLE,
    linear: SINGLE,
    added_zeros: BATCHED,
    nothing_added: BATCHED,
    multiply: BATCHED,
    vectors: VECTORS,
    vectors_as_methods: VECTORS,
    vectors_added: (*VECTORS, (9,)),
    one_number: ((16,), (9, 16), (9,)),
    a_dot_for_each_key: VECTORS,
    vecdot: PLAIN,
    vecdot_of_values: PLAIN,
    vecdot_of_fewer_dimensions: ((16,), (2, 9, 16), (2, 9, 16)),
    linalg: SINGLE,
    chain: SINGLE,
    lists_of_subscripts: BATCHED,
    lists_with_an_ellipsis: PLAIN,
}


def inputs(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype = torch.float32, grad: bool = False) -> list[Tensor]:
    return [randn(*shape, dtype=dtype, grad=grad, seed=n) for n, shape in enumerate(shapes)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("program", READ)
def test_it_is_read(program: Program, dtype: torch.dtype) -> None:
    same(program, *inputs(READ[program], dtype), rewritten=1, twice=2.5)


IN_TRAINING = [
    msa_rows, se3, retro_neighbours, multiplied_and_summed, tensordot, added_zeros, kept, kept_at_the_end, pooled,
    expanded_query, repeated_query_behind, expanded_and_scaled, vectors, vectors_added, vecdot_of_values,
    lists_of_subscripts,
]  # fmt: skip


@pytest.mark.parametrize("program", IN_TRAINING)
def test_it_is_read_in_training(program: Program) -> None:
    same(program, *inputs(READ[program], grad=True), rewritten=1, grad=True)


@pytest.mark.parametrize("program", [se3, multiplied_and_summed, inner, kept, expanded_query, vectors, vecdot])
def test_it_is_read_at_lengths_known_at_run_time(program: Program) -> None:
    same(program, *inputs(READ[program]), rewritten=1, dynamic=True)


@pytest.mark.parametrize("program", READ)
def test_it_is_read_in_exported_programs(program: Program) -> None:
    class Model(torch.nn.Module):
        def forward(self, *given: Tensor) -> Tensor:
            return program(*given)

    given = inputs(READ[program])
    with torch.no_grad():
        exported = torch.export.export(Model(), tuple(given))
        report = attn_pass.rewrite(exported, choose="fused", on_error="raise")
        assert [s.outcome for s in report.sites] == ["rewritten"], report
        torch.testing.assert_close(exported.module()(*given), program(*given), atol=1e-5, rtol=1e-5)


def summed_over_the_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Without an arrow a letter that both have is summed over."""
    return einsum("bij,bjd", einsum("bid,bjd->bij", q, k).softmax(-1), v)


def rows_of_values_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Weights and values do not share the index r: the weights are summed over it, and so are the values."""
    weights = einsum("rid,rjd->rij", q, k).softmax(-1)
    return einsum("rij,sjd->id", weights, v)


def softmax_over_a_part(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each neighbour has a softmax of its own."""
    scores = einsum("bhid,brjhd->bhirj", q, k)
    return einsum("bhirj,brjhd->bhid", scores.softmax(-1), v)


def a_factor_along_the_head_dim(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return einsum("bhij,bhjd,d->bhid", einsum("bhid,bhjd->bhij", q, k).softmax(-1), v, t)


def summed_with_its_dimension_kept(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q[:, :, :1] * k).sum(dim=-1, keepdim=True).softmax(-1) * v


def kept_and_over_the_wrong_dimension(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A softmax over the head dim that was kept, of one element."""
    return ((q * k).sum(1, keepdim=True).softmax(1) * v).sum(2)


def kept_and_summed_over_it(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q * k).sum(1, keepdim=True).softmax(2) * v).sum(1)


def expanded_and_multiplied(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What the query is multiplied by differs from key to key."""
    query = q.unsqueeze(1).expand_as(k) * v[..., :1]
    return ((query * k).sum(2).softmax(1).unsqueeze(2) * v).sum(1)


def repeated_along_the_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every key meets another query."""
    query = q.repeat(k.size(1), 1).view_as(k)
    return ((query * k).sum(2).softmax(1).unsqueeze(2) * v).sum(1)


def repeated_and_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    query = q.unsqueeze(1).repeat(1, k.size(1), 1)
    query[:, 3] = 0.5
    return ((query * k).sum(2).softmax(1).unsqueeze(2) * v).sum(1)


def its_own_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((k * k).sum(2).softmax(1).unsqueeze(2) * v).sum(1)


def written_before_it_is_summed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    product = q[:, :, :1] * k
    product.clamp_(min=0.0)
    return product.sum(-1).softmax(-1).unsqueeze(-2) @ v


def something_added(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.baddbmm(q, torch.bmm(q, k.mT).softmax(-1), v)


def weights_of_other_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The softmax is over the rows, and the product sums over the keys."""
    return torch.mv((q @ k.t()).softmax(0), v)


def a_vector_added_to_the_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.addmv(v[0], v.t(), torch.mv(k, q).softmax(0))


def vecdot_over_another_dimension(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.linalg.vecdot(q, k, dim=-2).softmax(-1).unsqueeze(-2) * v


def vecdot_of_one_element(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A query of one number is broadcast, and multiplies the sum of a key."""
    return torch.linalg.vecdot(q[..., :1].unsqueeze(-2), k.unsqueeze(-3)).softmax(-1) @ v


def vecdot_of_complex_numbers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The real part of a product with the conjugate."""
    one, other = (torch.view_as_complex(x.unflatten(-1, (-1, 2))) for x in (q, k))
    return torch.linalg.vecdot(one.unsqueeze(-2), other.unsqueeze(-3)).real.softmax(-1) @ v


def three_matrices(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A bilinear form: which of its products is taken first is chosen by their sizes."""
    return torch.linalg.multi_dot([q, k.t(), v]).softmax(-1) @ v.t()


def lists_that_sum_the_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return einsum(einsum(q, [0, 1, 2], k, [0, 3, 2], [1, 3]).softmax(-1), [1, 3], v, [0, 3, 2], [1, 2])


def a_product_used_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    products = torch.bmm(q, k.mT).softmax(-1).unsqueeze(-1) * v.unsqueeze(-3)
    return products.sum(-2) + products.amax(-2)


NEIGHBOURS = {
    summed_over_the_batch: BATCHED,
    rows_of_values_alone: BATCHED,
    softmax_over_a_part: READ[keys_of_two_dimensions],
    a_factor_along_the_head_dim: (*PLAIN, (16,)),
    summed_with_its_dimension_kept: PLAIN,
    kept_and_over_the_wrong_dimension: READ[kept],
    kept_and_summed_over_it: READ[kept],
    expanded_and_multiplied: ONE_ROW,
    repeated_along_the_batch: ONE_ROW,
    repeated_and_written: ONE_ROW,
    its_own_key: ONE_ROW,
    written_before_it_is_summed: PLAIN,
    something_added: BATCHED,
    weights_of_other_rows: ((8, 16), (9, 16), (9,)),
    a_vector_added_to_the_values: VECTORS,
    vecdot_over_another_dimension: ((2, 9, 16), (2, 9, 16), (2, 9, 16)),
    vecdot_of_one_element: PLAIN,
    vecdot_of_complex_numbers: PLAIN,
    three_matrices: ((8, 16), (9, 16), (9, 16)),
    lists_that_sum_the_batch: BATCHED,
}


@pytest.mark.parametrize("program", NEIGHBOURS)
def test_look_alikes_mean_something_else(program: Program) -> None:
    same(program, *inputs(NEIGHBOURS[program]), rewritten=0, reference=False)


def test_a_product_that_is_used_again_stays_beside_the_kernel() -> None:
    (site,) = same(a_product_used_twice, *inputs(BATCHED), reference=False).sites
    assert site.reason.endswith("the attention weights are also used by amax, and stay")


def test_a_layer_before_a_softmax_is_not_a_product_of_queries_and_keys() -> None:
    def router(x: Tensor, weight: Tensor, experts: Tensor) -> Tensor:
        return F.linear(x, weight).softmax(-1) @ experts

    report = same(router, randn(8, 16), torch.nn.Parameter(randn(4, 16)), randn(4, 16, seed=2))
    assert not report.sites
