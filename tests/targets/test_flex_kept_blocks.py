"""The flex target for CUDA devices with a mask that is passed in: blocks it hides are found in it, and in no list."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import NEG_INF, qkv, randn
from flex_graphs import Blockwise, blockwise, call_of, rewritten
from flex_programs import LOWEST, ON_CUDA, capped, positions

import attn_pass
from attn_pass.targets import looking
from attn_pass.targets.flex.flex import SKIPPED

Tensor = torch.Tensor
L, S = 200, 419  # 2 x 4 blocks, the last ones in part; a prime
BLOCK = 128
HALF = torch.bfloat16


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if looking cost nothing: these shapes are small."""
    monkeypatch.setattr(looking, "pays", lambda *_: True)


def at() -> Tensor:
    return torch.arange(S)


def row() -> Tensor:
    return torch.arange(L)[:, None]


def of_batch(*numbers: int) -> Tensor:
    return torch.tensor(numbers)[:, None, None, None]


def of_head(*numbers: int) -> Tensor:
    return torch.tensor(numbers)[:, None, None]


def somewhere(keeps: Tensor, *shape: int) -> Tensor:
    """Of some blocks a few keys, which differ from row to row."""
    return keeps.expand(shape) & (randn(*shape) > 1)


# What is kept, of two batch entries, 2 heads and L queries.
KEPT: dict[str, Tensor] = {
    "padding": at() < of_batch(90, 300),
    "left padding": at() >= of_batch(400, 60),
    "holes": (at() // 64 % 3 == of_batch(0, 2)) & (at() % 5 > 0),
    "a single key": at() == of_batch(384, 0),
    "every key": torch.ones(2, 1, 1, S, dtype=torch.bool),
    "no key of one entry": at() < of_batch(0, 200),
    "no key at all": torch.zeros(2, 1, 1, S, dtype=torch.bool),
    "one mask for all": (at() < 140)[None, None, None],
    "two dimensions": (at() < 140)[None],
    "another for each head": at() >= of_head(300, 10)[None],
    "another for each head and entry": at() < torch.tensor([[30, 400], [129, 256]])[:, :, None, None],
    "rows": (at() <= row() + 30)[None, None].expand(2, 1, -1, -1),
    "rows and padding": (at() <= row() + 30) & (at() < of_batch(100, 300)),
    "rows of two kinds": torch.where(row() < 128, at() < 128, at() >= 384)[None, None],
    "no key of one row": ((at() < 200) & (row() != 150))[None, None],
    "no key of a block of rows": ((at() < 200) & (row() < 128))[None, None],
    "rows of each head": somewhere(at() // BLOCK % 2 == of_head(0, 1), 2, 2, L, S),
}


def given_keep(fill: float) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT * 0.3).masked_fill(~mask, fill).softmax(-1) @ v

    return run


def given_matrix(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + mask).softmax(-1) @ v


def as_matrix(mask: Tensor, fill: float) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, fill)


def run_by_blocks(fn: Callable[..., Any], *inputs: Tensor, dynamic: bool = False, **options: Any) -> tuple[Any, int]:
    """The result by the lists of blocks, and how many were visited."""
    torch._dynamo.reset()
    Blockwise.visited = 0
    backend = attn_pass.wrap(blockwise, **{"choose": "fused", "on_error": "raise", **ON_CUDA, **options})
    with attn_pass.record() as report:
        result = torch.compile(fn, backend=backend, dynamic=dynamic)(*inputs)
    assert {s.target for s in report.sites} == {"flex"}
    return result, Blockwise.visited


def blocks_with(mask: Tensor, *, empty_rows_count: bool) -> int:
    """How many blocks hold a key that counts, over batch entries and heads that have a list of their own."""
    mask = mask[(None,) * (4 - mask.dim())]
    if empty_rows_count:
        mask = mask | ~mask.any(-1, True)
    mask = mask.expand(-1, -1, L, -1)
    starts = itertools.product(range(0, L, BLOCK), range(0, S, BLOCK))
    return sum(int(mask[:, :, i : i + BLOCK, j : j + BLOCK].flatten(2).any(-1).sum()) for i, j in starts)


def in_float64(fn: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
    """What is NaN there, a row fully masked with -inf, is 0 in the kernel."""
    wide = (t.double() if t.is_floating_point() else t for t in more)
    return fn(q.double(), k.double(), v.double(), *wide).nan_to_num(0.0).to(q.dtype)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", KEPT)
def test_only_blocks_with_a_key_that_counts_are_visited(name: str) -> None:
    mask = KEPT[name]
    programs: tuple[tuple[Callable[..., Tensor], Tensor, bool], ...] = (
        (given_keep(NEG_INF), mask, False),
        (given_keep(LOWEST), mask, True),
        (given_matrix, as_matrix(mask, LOWEST), True),
        (given_matrix, as_matrix(mask, NEG_INF), True),
    )
    for fn, given, empty_rows_count in programs:
        inputs = (*qkv(2, 2, L, S, 16), given)
        with torch.no_grad():
            result, visited = run_by_blocks(fn, *inputs)
        torch.testing.assert_close(result.nan_to_num(0.0), in_float64(fn, *inputs), atol=1e-5, rtol=1e-5)
        assert visited == blocks_with(mask, empty_rows_count=empty_rows_count)


@pytest.mark.usefixtures("always")
def test_keys_of_hidden_blocks_are_never_read() -> None:
    mask = KEPT["padding"]
    q, k, v = qkv(2, 2, L, S, 16)
    nothing = k.clone()
    nothing[0, :, 128:], nothing[1, :, 384:] = torch.nan, torch.inf
    for fn, given in ((given_keep(NEG_INF), mask), (given_keep(LOWEST), mask), (given_matrix, as_matrix(mask, LOWEST))):
        with torch.no_grad():
            result, _ = run_by_blocks(fn, q, nothing, v, given)
        torch.testing.assert_close(result, in_float64(fn, q, k, v, given), atol=1e-5, rtol=1e-5)


def two_masks_and_filled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).masked_fill(~(mask & rows), LOWEST).softmax(-1) @ v


def of_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def padding_is_true(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).masked_fill(padding[:, None, None, :], NEG_INF).softmax(-1) @ v


def zeros_and_ones(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).masked_fill(mask[:, None, None, :] == 0, NEG_INF).softmax(-1) @ v


def of_numbers(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + (1.0 - mask[:, None, None, :].to(q.dtype)) * LOWEST).softmax(-1) @ v


def part_of_a_wider_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return of_sdpa(q, k, v, mask[:, :, :, : k.shape[-2]])


def soft_cap(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return capped(q, k).masked_fill(~mask, NEG_INF).softmax(-1) @ v


def grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def two_masks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).masked_fill(~(mask & rows), NEG_INF).softmax(-1) @ v


def beside_a_bias(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + bias).masked_fill(~mask, NEG_INF).softmax(-1) @ v


TOKENS = torch.tensor([[90], [300]])
# The program, what it is given beside the operands, and how many blocks are visited: of 2 x 4 in each of two entries,
# or in a list that both share.
SPELLINGS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], int]] = {
    "of sdpa": (of_sdpa, (KEPT["padding"],), 8),
    "padding is true": (padding_is_true, (at() >= TOKENS,), 8),
    "zeros and ones": (zeros_and_ones, ((at() < TOKENS).long(),), 8),
    "numbers made of them": (of_numbers, ((at() < TOKENS).long(),), 8),
    "a part of a wider mask": (part_of_a_wider_mask, ((torch.arange(500) < of_batch(90, 300)).expand(2, 1, L, -1),), 8),
    "a soft cap": (soft_cap, (KEPT["padding"],), 8),
    "two masks": (two_masks, (KEPT["padding"], KEPT["rows"]), 2 + 4),
    "two masks, a number": (two_masks_and_filled, (KEPT["padding"], KEPT["rows"]), 2 + 4),
    "two masks, of empty rows": (two_masks_and_filled, (KEPT["left padding"], KEPT["rows"]), 8 + 4 + 2),
    "two masks, a matrix for both": (two_masks_and_filled, (KEPT["left padding"], KEPT["rows"][:1]), 8),
    "two masks, a map for each": (two_masks, (KEPT["padding"], KEPT["rows"][:1]), 2 + 4),
    "beside a bias": (beside_a_bias, (KEPT["padding"], randn(1, 2, L, S)), 8),
}


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name: str) -> None:
    fn, given, blocks = SPELLINGS[name]
    inputs = (*qkv(2, 2, L, S, 16), *given)
    with torch.no_grad():
        result, visited = run_by_blocks(fn, *inputs)
    torch.testing.assert_close(result, in_float64(fn, *inputs), atol=1e-5, rtol=1e-5)
    assert visited == blocks


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("mask", ["padding", "rows and padding", "another for each head"])
def test_heads_that_share_keys(mask: str) -> None:
    for poor_cases in ((), ("grouped_heads",)):
        inputs = (*qkv(2, 2, L, S, 16, kv_heads=1), KEPT[mask])
        with torch.no_grad():
            result, visited = run_by_blocks(grouped, *inputs, poor_cases=poor_cases)
        torch.testing.assert_close(result, in_float64(grouped, *inputs), atol=1e-5, rtol=1e-5)
        assert visited < 2 * 2 * 8


# ---- what is known of the mask beside the tensor


def causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, fill: float = NEG_INF) -> Tensor:
    i, j = positions(q, k)
    return (q @ k.mT * 0.3).masked_fill(~((j <= i) & mask), fill).softmax(-1) @ v


def causal_and_filled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return causal(q, k, v, mask, LOWEST)


def prefix_and_padding(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    i, j = positions(q, k)
    return (q @ k.mT * 0.3).masked_fill(~(((j <= i) | (j < 200)) & mask), NEG_INF).softmax(-1) @ v


def square(padding: Tensor) -> tuple[Tensor, ...]:
    return (*qkv(2, 2, S, S, 16), padding)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("fn", "mask", "blocks"),
    [
        (causal, "padding", (1 + 1 + 1 + 1) + (1 + 2 + 3 + 3)),
        (causal, "left padding", (0 + 0 + 0 + 1) + (1 + 2 + 3 + 4)),
        (causal, "every key", 2 * (1 + 2 + 3 + 4)),
        (prefix_and_padding, "padding", (1 + 1 + 1 + 1) + (2 + 2 + 3 + 3)),
    ],
)
def test_what_is_known_hides_blocks_too(fn: Callable[..., Tensor], mask: str, blocks: int, grad: bool) -> None:
    inputs = square(KEPT[mask])
    for t in inputs[:3]:
        t.requires_grad_(grad)
    result, visited = run_by_blocks(fn, *inputs)
    torch.testing.assert_close(result, in_float64(fn, *inputs), atol=1e-5, rtol=1e-5)
    assert visited == blocks


@pytest.mark.usefixtures("always")
def test_which_rows_are_empty_is_not_known_of_two_conditions() -> None:
    """A causal row before all keys that padding leaves is the mean of all values: every block is visited."""
    inputs = square(KEPT["left padding"])
    with torch.no_grad():
        result, visited = run_by_blocks(causal_and_filled, *inputs)
    torch.testing.assert_close(result, in_float64(causal_and_filled, *inputs), atol=1e-5, rtol=1e-5)
    assert visited == 4 * 4
    padded = square(KEPT["padding"])
    with torch.no_grad():
        result, visited = run_by_blocks(causal_and_filled, *padded, assume_nonempty_rows=True)
    torch.testing.assert_close(result, in_float64(causal_and_filled, *padded), atol=1e-5, rtol=1e-5)
    assert visited == (1 + 1 + 1 + 1) + (1 + 2 + 3 + 3)


# ---- sizes


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    ("batch", "queries", "keys"), [(1, 1, 400), (1, 128, 256), (3, 129, 131), (1, 127, 257), (2, 384, 383)]
)
def test_sizes(batch: int, queries: int, keys: int) -> None:
    for mask in (
        torch.arange(keys) < torch.tensor([7, 130, 90])[:batch, None, None, None],
        randn(1, 2, queries, keys) > 2,
    ):
        for fn in (given_keep(NEG_INF), given_keep(LOWEST)):
            inputs = (*qkv(batch, 2, queries, keys, 16), mask)
            with torch.no_grad():
                result, _ = run_by_blocks(fn, *inputs)
            torch.testing.assert_close(result, in_float64(fn, *inputs), atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("always")
def test_sizes_that_are_not_known_stay_as_they_were() -> None:
    for dims in ((0,), (2,)):
        inputs = (*qkv(2, 2, L, S, 16), KEPT["padding"])
        fresh = [t.clone() for t in inputs]
        for t in fresh[: 3 if dims == (0,) else 1]:
            torch._dynamo.mark_dynamic(t, dims[0])
        if dims == (0,):
            torch._dynamo.mark_dynamic(fresh[3], 0)
        with torch.no_grad():
            result, visited = run_by_blocks(given_keep(NEG_INF), *fresh, dynamic=None)  # type: ignore[arg-type]
        torch.testing.assert_close(result, in_float64(given_keep(NEG_INF), *inputs), atol=1e-5, rtol=1e-5)
        assert visited == 2 * 4


# ---- training


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", [n for n in KEPT if not n.startswith("no key")])
def test_gradients(name: str) -> None:
    """The lists of each block of keys hold the same blocks, which the emulation asks for."""
    mask = KEPT[name]
    mask = mask | ((~mask.any(-1, True)) & (at() == 5))  # a fully masked row has no gradient
    programs = (
        (given_keep(NEG_INF), mask, {}),
        (given_matrix, as_matrix(mask, LOWEST), {"assume_nonempty_rows": True}),
    )
    for fn, given, options in programs:
        leaves = [t.requires_grad_() for t in qkv(2, 2, L, S, 16)]
        result, visited = run_by_blocks(fn, *leaves, given, **options)
        assert visited == blocks_with(mask, empty_rows_count=False)
        weights = randn(*result.shape)
        got = torch.autograd.grad(result, leaves, weights)
        wide = [t.detach().double().requires_grad_() for t in leaves]
        wanted = torch.autograd.grad(fn(*wide, given), wide, weights.double())
        for one, other in zip(got, wanted):
            torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-5)


# ---- layers


def layers_that_unmask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Each layer keeps one key more, in a block that was hidden, by a write to the mask that all of them read."""
    for layer in range(3):
        q = given_keep(NEG_INF)(q, k, v, mask)
        mask[..., 130 + 128 * layer] = True
    return q


LISTS = slice(2, 10)  # of the block mask, among the operator's arguments


def lists_of(graph: torch.fx.GraphModule) -> list[tuple[Any, ...]]:
    calls = [n for n in graph.graph.nodes if n.target is torch.ops.higher_order.flex_attention]
    return [tuple(n.args[4][LISTS]) for n in calls]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("fill", [NEG_INF, LOWEST])
def test_the_lists_are_made_once_for_all_layers(grad: bool, fill: float) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        for _ in range(3):
            q = given_keep(fill)(q, k, v, mask)
        return q

    inputs = (*(t.requires_grad_(grad) for t in qkv(2, 2, L, S, 16)), KEPT["padding"])
    graph, report = rewritten(fn, *inputs, assume_nonempty_rows=True)
    assert len(set(lists_of(graph))) == 1 and len(lists_of(graph)) == 3
    assert sum("cumsum" in str(n.target) for n in graph.graph.nodes) == 1 + grad
    assert all(SKIPPED in site.reason for site in report.sites)
    result, visited = run_by_blocks(fn, *inputs, assume_nonempty_rows=True)
    torch.testing.assert_close(result, in_float64(fn, *inputs), atol=1e-5, rtol=1e-5)
    assert visited == 3 * 8


@pytest.mark.usefixtures("always")
def test_a_mask_that_later_unmasks_is_looked_at_again() -> None:
    inputs = qkv(2, 2, L, S, 16)
    with torch.no_grad():
        result, visited = run_by_blocks(layers_that_unmask, *inputs, (at() < of_batch(90, 100)).clone())
        wanted = in_float64(layers_that_unmask, *inputs, (at() < of_batch(90, 100)).clone())
    torch.testing.assert_close(result, wanted, atol=1e-5, rtol=1e-5)
    assert visited == 2 * 2 * (1 + 2 + 3)


# ---- what is not looked at


def looks(fn: Callable[..., Any], *inputs: Tensor, **options: Any) -> bool:
    """Whether the lists are made of a mask, as the report says."""
    with torch.no_grad():
        graph, report = rewritten(fn, *inputs, **options)
    (site,) = report.sites
    assert site.target == "flex"
    is_counted = any("cumsum" in str(n.target) for n in graph.graph.nodes)
    assert is_counted == (SKIPPED in site.reason)
    return is_counted


def of_lengths(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    keep = torch.arange(k.size(-2)) < lengths[:, None, None, None]
    return capped(q, k).masked_fill(~keep, NEG_INF).softmax(-1) @ v


def of_documents(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    keep = ids[:, None, : q.size(-2), None] == ids[:, None, None, :]
    return (q @ k.mT).masked_fill(~keep, NEG_INF).softmax(-1) @ v


@pytest.mark.usefixtures("always")
def test_what_is_not_looked_at() -> None:
    operands = qkv(2, 2, L, S, 16)
    assert looks(given_keep(NEG_INF), *operands, KEPT["padding"])
    rows_alone = torch.ones(2, 1, L, 1, dtype=torch.bool)
    assert not looks(given_keep(NEG_INF), *operands, rows_alone)
    assert not looks(of_lengths, *operands, torch.tensor([90, 300]))  # these are bounds of keys
    ids = torch.arange(S)[None] * torch.tensor([[1], [3]]) // 90
    assert not looks(of_documents, *operands, ids)  # the whole matrix would be made
    narrow = [t.half() for t in (*operands, as_matrix(KEPT["padding"], -60000.0))]
    assert not looks(given_matrix, *narrow)  # there such a number does not absorb a score
    assert not looks(given_keep(NEG_INF), *qkv(2, 2, L, 128, 16), KEPT["padding"][..., :128])  # there is one block


@pytest.mark.usefixtures("always")
def test_a_bias_that_masks_no_key_hides_no_block() -> None:
    bias = randn(1, 2, L, S) * 100
    inputs = (*qkv(2, 2, L, S, 16), bias)
    with torch.no_grad():
        result, visited = run_by_blocks(given_matrix, *inputs)
    torch.testing.assert_close(result, in_float64(given_matrix, *inputs), atol=1e-4, rtol=1e-4)
    assert visited == 2 * 8


def beside_a_bias_and_filled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + bias).masked_fill(~mask, LOWEST).softmax(-1) @ v


@pytest.mark.usefixtures("always")
def test_a_bias_may_mask_what_a_condition_keeps() -> None:
    """What is filled with a number then counts more."""
    bias = randn(1, 2, L, S).masked_fill((at() < 90) & (row() % 3 == 0), NEG_INF)
    inputs = (*qkv(2, 2, L, S, 16), KEPT["padding"], bias)
    with torch.no_grad():
        result, visited = run_by_blocks(beside_a_bias_and_filled, *inputs)
    torch.testing.assert_close(result, in_float64(beside_a_bias_and_filled, *inputs), atol=1e-5, rtol=1e-5)
    assert visited == 8


@pytest.mark.usefixtures("always")
def test_strict_numerics_visit_every_block() -> None:
    """A masked key that is not finite makes eager's result NaN."""
    inputs = (*qkv(2, 2, L, S, 16), KEPT["padding"])
    assert looks(of_sdpa, *inputs) and not looks(of_sdpa, *inputs, numerics="strict")
    with torch.no_grad():
        _, visited = run_by_blocks(of_sdpa, *inputs, numerics="strict")
    assert visited == 8


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("mask", ["padding", "another for each head"])
def test_few_queries_of_grouped_heads(mask: str) -> None:
    """The template that splits the keys takes lists that all heads share."""
    inputs = (*qkv(2, 4, 5, S, 16, kv_heads=2), KEPT[mask].repeat_interleave(1 if mask == "padding" else 2, 1))
    for poor_cases in ((), ("grouped_heads",)):
        graph, _ = rewritten(grouped, *inputs, poor_cases=poor_cases, targets=("flex",))
        counts = call_of(graph).args[4][2].meta["example_value"]  # type: ignore[index, union-attr]
        assert counts.shape[1] == 1


# ---- whether it pays, at sizes of models


def predicted(count: int, batch: int, keys: int) -> tuple[float, str]:
    def fn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        for _ in range(count):
            q = given_keep(NEG_INF)(q, k, v, mask)
        return q

    with torch.device("meta"):
        q = torch.empty(batch, 12, keys, 64, dtype=HALF)
        mask = torch.empty(batch, 1, 1, keys, dtype=torch.bool)
    with torch.no_grad():
        report = attn_pass.explain(fn, q, q, q, mask, attn_pass_options={"device": "H100"})
    return report.sites[0].predicted_us["flex"], report.sites[0].reason


def test_it_is_looked_where_that_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    one, all_layers = predicted(1, 16, 512), predicted(12, 16, 512)
    assert SKIPPED not in one[1] and SKIPPED in all_layers[1]
    assert one[0] < all_layers[0] < 1.05 * one[0]  # nothing is known of how much is padded
    assert SKIPPED in predicted(1, 16, 4096)[1] and SKIPPED not in predicted(12, 1, 256)[1]
    monkeypatch.setattr(looking, "pays", lambda *_: False)
    assert predicted(12, 16, 512)[0] == one[0]
