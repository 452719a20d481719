"""Scores over several sets of keys that are joined before the softmax, and the values with them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from against_eager import Together, qkv, randn, same, same_each
from torch import Tensor

import attn_pass

Program = Callable[..., Tensor]
KEEP = randn(2, 1, 8, 13, seed=5) > -0.3
KEEP[..., 0] = True


def values(v: Tensor, w: Tensor) -> Tensor:
    return torch.cat([w, v], dim=-2)


def prefix(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    """Memory in front of the keys, as memory-augmented and prefix-tuned attention write it."""
    scores = torch.cat([q @ m.transpose(-1, -2), q @ k.transpose(-1, -2)], dim=-1) * 0.25
    return scores.softmax(dim=-1) @ values(v, w)


def einsums(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    before = torch.einsum("b h i d, b h j d -> b h i j", q, m) * 0.25
    own = torch.einsum("b h i d, b h j d -> b h i j", q, k) * 0.25
    weights = torch.cat((before, own), dim=-1).masked_fill(~KEEP, float("-inf")).softmax(dim=-1)
    return torch.einsum("b h i j, b h j d -> b h i d", weights, values(v, w))


def keys_first(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    scores = torch.cat([m @ q.mT / 4.0, k @ q.mT / 4.0], dim=-2)
    return scores.softmax(-2).mT @ values(v, w)


def joined_queries(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    return torch.cat([q @ k.mT, q.flip(-2) @ k.mT], -2).softmax(-1) @ v


def masked_by_their_shape(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    """What takes a shape from the joined scores gets another tensor of it."""
    scores = torch.cat([(q @ m.mT) / 4.0, (q @ k.mT) / 4.0], dim=-1)
    return (scores + torch.full_like(scores, -1e9).triu(1)).softmax(dim=-1) @ values(v, w)


BIAS, KEPT = randn(2, 1, 8, 8, seed=6), randn(8, 5, seed=7) > -0.5
KEPT[..., 0] = True


def masks_of_their_own(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    """Of one rank the one, of another the other."""
    before = (q @ m.mT * 0.25).masked_fill(~KEPT, -1e30)
    return torch.cat([before, q @ k.mT * 0.25 + BIAS.to(q.dtype)], -1).softmax(-1) @ values(v, w)


def one_is_masked(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    """Null keys in front, and padding of the others."""
    own = torch.where(KEEP[..., :8], q @ k.mT, -1e30)
    return torch.cat((q @ m.mT, own), -1).softmax(-1) @ values(v, w)


def a_bias_of_each(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    first, second = m[:, :1, :, 0].unsqueeze(-2), k[:1, :, :, 0].unsqueeze(-2)  # over heads, over the batch
    return torch.cat((first + (q @ m.mT) / 4, (q @ k.mT) / 4 + second), -1).softmax(-1) @ values(v, w)


def batches_joined(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    scores = torch.cat([q[:1] @ k[:1].mT, q[1:] @ k[1:].mT], 0)
    return scores.softmax(-1) @ v


def heads_stacked(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    scores = [a @ b.mT * 0.25 for a, b in zip(q.unbind(1), k.unbind(1))]
    return torch.stack(scores, 1).softmax(-1) @ v


def heads_stacked_in_front(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    scores = torch.stack([q[:, h] @ k[:, h].transpose(-1, -2) for h in range(2)])
    return torch.einsum("hbij,bhjd->bihd", scores.softmax(-1), v)


def heads_stacked_of_one_key(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    """Queries that no tensor holds together, over the keys of one head, each with a bias."""
    scores = [(q[:, h] * (h + 1)).tanh() @ k[:, 0].mT + BIAS[:, 0].to(q.dtype) * h for h in range(2)]
    return torch.stack(scores, 1).softmax(-1) @ v


def heads_stacked_in_reverse(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    return torch.stack([q[:, 1 - h] @ k[:, h].mT for h in range(2)], 1).softmax(-1) @ v


READ: dict[str, Program] = {
    "masks of their own": masks_of_their_own,
    "one is masked": one_is_masked,
    "a bias of each": a_bias_of_each,
    "batches": batches_joined,
    "heads stacked": heads_stacked,
    "heads stacked in front": heads_stacked_in_front,
    "heads stacked, of one key": heads_stacked_of_one_key,
    "heads stacked in reverse": heads_stacked_in_reverse,
    "masked by their shape": masked_by_their_shape,
    "in front": prefix,
    "einsums, masked": einsums,
    "keys first": keys_first,
    "rows": joined_queries,
}


def order(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    """The values the other way round: still attention over the joined keys, of these values."""
    return torch.cat([q @ m.mT, q @ k.mT], -1).softmax(-1) @ torch.cat([v, w], -2)


def two_scales(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    return torch.cat([q @ m.mT * 0.5, q @ k.mT * 0.25], -1).softmax(-1) @ values(v, w)


def two_queries(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    return torch.cat([(q + 1) @ m.mT, q @ k.mT], -1).softmax(-1) @ values(v, w)


def used_apart(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    before = q @ m.mT
    return torch.cat([before, q @ k.mT], -1).softmax(-1) @ values(v, w) + before.sum()


def key_written(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    m = m.clone()
    before = q @ m.mT
    m.mul_(2)
    return torch.cat([before, q @ k.mT], -1).softmax(-1) @ values(v, w)


def piece_written(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    before = q @ m.mT
    before.mul_(2)
    return torch.cat([before, q @ k.mT], -1).softmax(-1) @ values(v, w)


def heads_joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(2, -1, 32)  # a copy


def query_written_between_copies(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    q = q.clone()
    before = heads_joined(q)
    q.mul_(2)
    after = heads_joined(q)
    scores = torch.cat([before @ heads_joined(m).mT, after @ heads_joined(k).mT], -1)
    return scores.softmax(-1) @ heads_joined(values(v, w))


def factors(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    """A temperature of each head inside one product, and another in the other."""
    before = torch.einsum("bhid,bhjd,h->bhij", q, m, m[0, :, 0, 0])
    own = torch.einsum("bhid,bhjd,h->bhij", q, k, k[0, :, 0, 0])
    return torch.cat([before, own], -1).softmax(-1) @ values(v, w)


def scaled_factors(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    before = torch.einsum("bhid,bhjd,h->bhij", q, m, m[0, :, 0, 0]) * 0.5
    own = torch.einsum("bhid,bhjd,h->bhij", q, k, k[0, :, 0, 0]) * 0.5
    return torch.cat([before, own], -1).softmax(-1) @ values(v, w)


def two_fills(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    before = (q @ m.mT).masked_fill(~KEPT, -1e9)
    own = (q @ k.mT).masked_fill(~KEEP[..., :8], -1e8)
    return torch.cat([before, own], -1).softmax(-1) @ values(v, w)


def scaled_after_a_bias(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    return torch.cat([(q @ m.mT + 1.5) * 0.5, (q @ k.mT) * 0.5], -1).softmax(-1) @ values(v, w)


def mask_written(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    bias = BIAS * 1.0
    own = q @ k.mT + bias
    bias.zero_()
    return torch.cat([q @ m.mT, own], -1).softmax(-1) @ values(v, w)


def stacked_of_two_sizes(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    """One of them is broadcast over the batch."""
    return torch.stack([q[:, 0] @ k[:, 0].mT, q[:, 1] @ k[:1, 1].mT], 1).softmax(-1) @ v


def stacked_query_written(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    q = q * 1.0
    first = q[:, 0] @ k[:, 0].mT
    q.mul_(2)
    return torch.stack([first, q[:, 1] @ k[:, 1].mT], 1).softmax(-1) @ v


def wider_bias(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    """Every piece of the batch for each of it: what is joined is larger than the products."""
    own = q[:1, :1] @ k[:1, :1].mT + BIAS
    return torch.cat([q[:, :1] @ m[:, :1].mT, own], -1).softmax(-1) @ values(v, w)[:, :1]


LEFT: dict[str, Program] = {
    "two fills": two_fills,
    "scaled after a bias": scaled_after_a_bias,
    "a mask is written": mask_written,
    "stacked, of two sizes": stacked_of_two_sizes,
    "stacked, a query is written": stacked_query_written,
    "a bias wider than the product": wider_bias,
    "two scales": two_scales,
    "two queries": two_queries,
    "a piece is used": used_apart,
    "a key is written": key_written,
    "a piece is written": piece_written,
    "the query is written between two copies": query_written_between_copies,
    "factors of each product": factors,
    "factors of each product, scaled": scaled_factors,
}


def inputs(grad: bool = False) -> tuple[Tensor, ...]:
    return (*qkv(grad=grad), randn(2, 2, 5, 16, seed=8, grad=grad), randn(2, 2, 5, 16, seed=9, grad=grad))


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_read_over_joined_keys(grad: bool) -> None:
    same_each({name: (program, inputs(grad)) for name, program in READ.items()}, grad=grad)


@pytest.mark.parametrize("name", list(LEFT))
def test_left_and_the_graph_is_as_it_was(name: str) -> None:
    class Module(torch.nn.Module):
        def forward(self, *given: Tensor) -> Tensor:
            return LEFT[name](*given)

    same(LEFT[name], *inputs(), rewritten=0)
    program = torch.export.export(Module(), inputs())
    before = [(n.op, str(n.target)) for n in program.graph.nodes]
    report = attn_pass.rewrite(program, choose="fused", on_error="raise")
    assert not report.rewritten and [(n.op, str(n.target)) for n in program.graph.nodes] == before


def test_values_in_another_order() -> None:
    same(order, *inputs(), rewritten=1)


def test_exported() -> None:
    whole, given = Together([(program, 5) for program in READ.values()]), inputs() * len(READ)
    program = torch.export.export(whole, given)
    report = attn_pass.rewrite(program, choose="fused", on_error="raise")
    outcomes = {name: s.outcome for name, s in zip(READ, report.sites, strict=True)}
    assert outcomes == dict.fromkeys(READ, "rewritten"), [s.reason for s in report.sites]
    assert not any("softmax" in str(n.target) or "mm" in str(n.target) for n in program.graph.nodes)
    for name, result, expected in zip(READ, program.module()(*given), whole(*given), strict=True):
        torch.testing.assert_close(
            result, expected, atol=1e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def wide_masked_by_their_shape(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    k, q = k.float(), q.float() * 0.5
    scores = torch.cat([(q @ k.mT) / 3.0, (q @ m.float().mT) / 3.0], dim=-1)
    scores = scores + torch.full_like(scores, -65504.0).triu(1)
    return scores.softmax(dim=-1).to(v.dtype) @ torch.cat([v, w], dim=-2)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_wide_scores_of_half_operands_that_are_masked_by_their_shape(grad: bool) -> None:
    """What takes a shape from the joined scores keeps its own input while they are decided."""
    given = [x.detach().half().requires_grad_(grad) for x in inputs()]
    same(wide_masked_by_their_shape, *given, grad=grad, rewritten=1)


def split(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    """Weights of memory and of keys, apart again after one softmax."""
    weights = torch.cat([q @ m.mT, q @ k.mT], -1).softmax(-1)
    before, own = weights.split([5, 8], -1)
    return before @ w + own @ v


def sliced(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    """In another order, of three, with values that no tensor holds together."""
    weights = (q @ torch.cat([k, m, m + 1], -2).mT * 0.25).softmax(-1).to(v.dtype)
    return weights[..., 13:] @ (w * 2) + (weights[..., 8:13] @ w + torch.matmul(weights[..., :8], v))


def narrowed(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    weights = (m @ q.mT * 0.25).softmax(-2)
    return torch.einsum("bhji,bhjd->bhid", weights.narrow(-2, 0, 2), w[:, :, :2]) + torch.einsum(
        "bhji,bhjd->bhid", weights[:, :, 2:], w[:, :, 2:]
    )


SPLIT: dict[str, Program] = {"split": split, "sliced": sliced, "narrowed": narrowed}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_weights_in_pieces(grad: bool) -> None:
    same_each({name: (program, inputs(grad)) for name, program in SPLIT.items()}, grad=grad)


@pytest.mark.parametrize("programs", [READ, SPLIT], ids=["joined", "in pieces"])
def test_dynamic_verified_and_in_half_precision(programs: dict[str, Program]) -> None:
    fixed = {"split"}  # it names its lengths
    same_each({n: (fn, inputs()) for n, fn in programs.items() if n not in fixed}, dynamic=True)
    report = same_each({n: (fn, inputs()) for n, fn in programs.items()}, verify="graph")
    assert all(site.verified_error is not None for site in report.sites)
    same_each({n: (fn, tuple(x.bfloat16() for x in inputs())) for n, fn in programs.items()})


def overlapping(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    return weights[..., :5] @ w + weights[..., 4:] @ v[..., 4:, :]


def swapped(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    """Not the end of the weights."""
    weights = (q @ k.mT).softmax(-1)
    return weights[..., :3] @ v[..., :3, :] + weights[..., 3:6] @ v[..., 5:, :]


def subtracted(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    return torch.add(weights[..., :3] @ v[..., :3, :], weights[..., 3:] @ v[..., 3:, :], alpha=-1)


def of_two_softmaxes(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    a, b = (q @ k.mT).softmax(-1), (q @ k.mT * 2).softmax(-1)
    return a[..., :3] @ v[..., :3, :] + b[..., 3:] @ v[..., 3:, :]


def piece_also_used(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    weights = F.dropout((q @ k.mT).softmax(-1), 0.5, training=False)
    first = weights[..., :3] @ v[..., :3, :]
    return first + weights[..., 3:] @ v[..., 3:, :] + first


def piece_of_weights_written(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    first = weights[..., :3]
    first.mul_(2)
    return first @ v[..., :3, :] + weights[..., 3:] @ v[..., 3:, :]


def shifted(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    """As many as there are, one of them twice and the last one never."""
    weights = (q @ k.mT).softmax(-1)
    return weights[..., :4] @ v[..., :4, :] + weights[..., 3:7] @ v[..., 4:, :]


def weights_written_between(q: Tensor, k: Tensor, v: Tensor, m: Tensor, w: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    first = weights[..., :3] @ v[..., :3, :]
    weights.mul_(2)
    return first + weights[..., 3:] @ v[..., 3:, :]


NOT_SPLIT: dict[str, Program] = {
    "shifted": shifted,
    "weights written between": weights_written_between,
    "overlapping": overlapping,
    "not all of the weights": swapped,
    "subtracted": subtracted,
    "of two softmaxes": of_two_softmaxes,
    "a product used twice": piece_also_used,
    "a piece is written": piece_of_weights_written,
}


@pytest.mark.parametrize("name", list(NOT_SPLIT))
def test_other_pieces_of_weights(name: str) -> None:
    class Module(torch.nn.Module):
        def forward(self, *given: Tensor) -> Tensor:
            return NOT_SPLIT[name](*given)

    same(NOT_SPLIT[name], *inputs(), rewritten=0)
    program = torch.export.export(Module(), inputs())
    before = [(n.op, str(n.target), n.name) for n in program.graph.nodes]
    report = attn_pass.rewrite(program, choose="fused", on_error="raise")
    assert not report.rewritten and [(n.op, str(n.target), n.name) for n in program.graph.nodes] == before


def axial(q: Tensor, k: Tensor, v: Tensor, text: Tensor) -> Tensor:
    """DALL-E's: every row of an image attends to itself and to one text, of which each row would need a copy."""
    both = torch.cat((torch.einsum("bxid,bjd->bxij", q, text), torch.einsum("bxid,bxjd->bxij", q, k)), -1)
    weights = both.softmax(-1)
    to_text, to_row = weights[..., : text.shape[1]], weights[..., text.shape[1] :]
    return torch.einsum("bxij,bxjd->bxid", to_row, v) + torch.einsum("bxij,bjd->bxid", to_text, text)


def test_keys_of_another_shape_are_left_with_the_reason() -> None:
    report = same(axial, *qkv(kv_len=10), randn(2, 11, 16, seed=9), rewritten=0)
    assert len(report.sites) == 2, report
    assert all("other scores are of keys that cannot be joined" in s.reason for s in report.sites), report


def test_one_key_of_another_shape_is_a_sink_whose_weight_stays() -> None:
    report = same(axial, *qkv(), randn(2, 1, 16, seed=9), rewritten=1)
    assert "the attention weights are also used" in report.rewritten[0].reason


def test_pieces_that_no_target_takes_are_as_they_were() -> None:
    class Module(torch.nn.Module):
        def forward(self, *given: Tensor) -> Tensor:
            return sliced(*given)

    program = torch.export.export(Module(), inputs())
    before = [(n.op, str(n.target), n.name) for n in program.graph.nodes]
    report = attn_pass.rewrite(program, targets=("flex",), choose="fused", on_error="raise")
    assert [s.outcome for s in report.sites] == ["left"], str(report)
    assert [(n.op, str(n.target), n.name) for n in program.graph.nodes] == before


def each_head_of_a_stack(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = torch.stack([q[:, h] @ k[:, h].mT * 0.3 for h in range(2)], 1).softmax(-1)
    return torch.cat([w[:, h] @ v[:, h] for h in range(2)], -1)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_values_of_each_head_are_attention_of_that_head(grad: bool) -> None:
    report = same(each_head_of_a_stack, *qkv(grad=grad), grad=grad, rewritten=2)
    assert [s.shapes["query"] for s in report.sites] == [(2, 1, 8, 16)] * 2


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0), (1, 1, 1), (0, 0, 1)])
def test_heads_in_any_order(order: tuple[int, ...]) -> None:
    """As one tensor where each is a step further in it, as a stack where not."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.stack([q[:, a] @ k[:, b].mT for a, b in enumerate(order)], 1).softmax(-1) @ v

    same(program, *qkv(heads=3), rewritten=1)


def test_views_of_one_tensor_are_not_copied() -> None:
    class Module(torch.nn.Module):
        def forward(self, *given: Tensor) -> Tensor:
            return heads_stacked(*given)

    program = torch.export.export(Module(), inputs())
    attn_pass.rewrite(program, choose="fused", on_error="raise")
    assert not any("stack" in str(n.target) for n in program.graph.nodes), program.graph


def in_chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([(c @ k.mT * 0.3).softmax(-1) @ v for c in q.split(3, 2)], 2)


def by_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([(c @ k[:, :1].mT * 0.3).softmax(-1) @ v[:, :1] for c in q.split(1, 1)], 1)


def scaled_chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([(c @ k.mT * 0.3).softmax(-1) @ v * 2 for c in q.split(3, 2)], 2)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(("program", "attentions"), [(in_chunks, 3), (by_heads, 2), (scaled_chunks, 3)])
def test_results_that_are_joined_are_no_site(program: Program, attentions: int, grad: bool) -> None:
    """As one product of joined weights they are no attention, and the program has no such product."""
    report = same(program, *qkv(grad=grad), grad=grad, rewritten=attentions)
    assert len(report.sites) == attentions, str(report)


def chunks_of_joined_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What joins the weights is in the program."""
    return torch.cat([(c @ k.mT * 0.3).softmax(-1) for c in q.split(3, 2)], 2) @ v


def changed_chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([(c @ k.mT * 0.3).softmax(-1).square() @ v for c in q.split(3, 2)], 2)


@pytest.mark.parametrize("program", [chunks_of_joined_weights, changed_chunks])
def test_near_misses_of_the_program_stay_rows(program: Program) -> None:
    report = same(program, *qkv(), rewritten=0)
    assert [s.kind for s in report.sites] == ["near miss"] * 3, str(report)
