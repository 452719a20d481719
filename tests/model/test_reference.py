"""The executable meaning of an `Attention` equals attention written out in torch, whatever its axes and groups."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_pass.model.attention import Attention, Source
from attn_pass.model.expression import Apply, Const, Dot, Expr, IndexValue, Load, apply
from attn_pass.model.index import Axis, Index, Poly, Quotient, Remainder, Symbol, axis_index
from attn_pass.model.reference import Evaluation, bind_sizes, reference

INF = math.inf
B, H, I, J, D, E = (Axis(n, s) for n, s in zip("bhijde", (2, 3, 4, 5, 6, 2)))
b, h, i, j, d, e = (axis_index(a) for a in (B, H, I, J, D, E))
DOUBLE = torch.float64


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    make = torch.Generator().manual_seed(1)
    return [torch.randn(s, generator=make, dtype=DOUBLE) for s in shapes]


def plain(
    score: Expr, extra: tuple[tuple[int, ...], ...] = (), **changes: object
) -> tuple[Attention, list[torch.Tensor]]:
    """Attention of (B, H, L, D) operands with this score, and its sources; ``extra`` are the shapes of further ones."""
    values = tensors((2, 3, 4, 6), (2, 3, 5, 6), (2, 3, 5, 2), *extra)
    made = Attention(
        batch=(B,),
        heads=(H,),
        rows=(I,),
        keys=J,
        dim=D,
        value_dim=(E,),
        query=Load(0, (b, h, i, d)),
        key=Load(1, (b, h, j, d)),
        value=Load(2, (b, h, j, e)),
        score=score,
        scale=1.0,
        sources=tuple(Source(n, tuple(v.shape), v.dtype, v.device) for n, v in enumerate(values)),
        output=((B,), (H,), (I,), (E,)),
        compute_dtype=DOUBLE,
        output_dtype=DOUBLE,
    )
    return replace(made, **changes), values  # type: ignore[arg-type]


def same(attention: Attention, values: list[torch.Tensor], scores: torch.Tensor) -> None:
    expected = torch.softmax(scores, -1) @ values[2]
    torch.testing.assert_close(reference(attention, values), expected, equal_nan=True)


def test_scale_bias_and_mask_are_what_torch_computes() -> None:
    score = apply("mul", Dot(), Const(0.5))
    score = apply("add", score, Load(3, (h, 0, j)))
    score = apply("where", apply("le", IndexValue(j), IndexValue(i)), score, Const(-INF))
    attention, values = plain(score, ((3, 1, 5),))
    q, k, _, bias = values
    below = torch.ones(4, 5, dtype=torch.bool).tril()
    same(attention, values, (q @ k.mT * 0.5 + bias).masked_fill(~below, -INF))


def test_any_score_is_interpreted_not_only_affine_ones() -> None:
    """A soft cap, a temperature a row, a factor a head."""
    score = apply("mul", apply("tanh", apply("div", Dot(), Const(3.0))), Const(3.0))
    attention, values = plain(apply("div", score, Load(3, (b, h, i))), ((2, 3, 4),))
    q, k, _, row = values
    same(attention, values, 3.0 * torch.tanh(q @ k.mT / 3.0) / row.unsqueeze(-1))


@pytest.mark.parametrize("is_nan", [True, False])
def test_an_empty_row_is_what_the_program_says_it_is(is_nan: bool) -> None:
    """NaN after a plain softmax, zero after a safe one; the other rows are not touched by it."""
    score = apply("where", apply("ne", IndexValue(i), Const(2)), Dot(), Const(-INF))
    attention, values = plain(score, empty_row_is_nan=is_nan)
    out = reference(attention, values)
    assert out[:, :, 2].isnan().all() if is_nan else (out[:, :, 2] == 0).all()
    whole = torch.softmax(values[0] @ values[1].mT, -1) @ values[2]
    kept = [0, 1, 3]
    torch.testing.assert_close(out[:, :, kept], whole[:, :, kept])


def test_a_row_filled_with_a_finite_number_is_the_mean_of_the_values() -> None:
    score = apply("where", apply("ne", IndexValue(i), Const(2)), Dot(), Const(-1e9))
    attention, values = plain(score)
    torch.testing.assert_close(reference(attention, values)[:, :, 2], values[2].mean(-2))


@pytest.mark.parametrize("by", [1.0, 0.3])
def test_a_row_is_masked_where_its_number_joined_not_where_it_was_multiplied(by: float) -> None:
    """float16's lowest number absorbs a score; times 0.3 it is above what masks."""
    lowered = apply("where", apply("ne", IndexValue(i), Const(2)), Const(0.0), Const(-65504.0))
    score = apply("mul", apply("add", apply("mul", Dot(), Const(0.1)), lowered), Const(by))
    attention, values = plain(score, score_dtype=torch.float16, rescaled=by)
    out = reference(attention, values, masked_from=-32752.0)
    torch.testing.assert_close(out[:, :, 2], values[2].mean(-2))
    torch.testing.assert_close(out[:, :, :2], reference(attention, values)[:, :, :2])


def test_operands_are_read_where_their_index_says() -> None:
    """Heads last, halves of a fused projection, keys and values shared by the batch, two query heads a KV head."""
    packed, shared = tensors((2, 4, 12), (5, 12))
    kv, g, w = Axis("k", 3), Axis("g", 2), Axis("w", 2)
    kvi, gi, wi = axis_index(kv), axis_index(g), axis_index(w)
    attention, _ = plain(Dot())
    attention = replace(
        attention,
        heads=(kv, g),
        dim=w,
        query=Load(0, (b, i, (kvi * 2 + gi) * 2 + wi)),
        key=Load(1, (j, kvi * 2 + wi)),
        value=Load(1, (j, kvi * 2 + e + 6)),
        output=((B,), (I,), (kv, g, E)),
        sources=(Source(0, (2, 4, 12), DOUBLE, packed.device), Source(1, (5, 12), DOUBLE, packed.device)),
    )
    q = packed.view(2, 4, 6, 2).transpose(1, 2)
    k, v = (x.reshape(5, 3, 2).transpose(0, 1).repeat_interleave(2, 0) for x in shared.chunk(2, -1))
    expected = (torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(reference(attention, [packed, shared]), expected)
    assert attention.kv_heads == (kv,) and attention.groups == 2 and attention.batch_is_shared


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.permutations([B, H, I]), st.integers(0, 3), st.integers(0, 3))
def test_moving_axes_between_the_groups_changes_nothing(order: list[Axis], first: int, second: int) -> None:
    """Batch, heads and rows are other forms of one function; rows hold no axis of the keys."""
    score = apply("add", Dot(), Load(3, (b, 0, i, j)))
    attention, values = plain(score, ((2, 1, 4, 5),), key=Load(1, (0, h, j, d)), value=Load(2, (0, h, j, e)))
    order = [H, *(a for a in order if a is not H)]
    first, second = sorted((first, second))
    moved = attention.regrouped(
        batch=tuple(order[:first]), heads=tuple(order[first:second]), rows=tuple(order[second:])
    )
    if H in moved.rows:
        return
    torch.testing.assert_close(reference(moved, values), reference(attention, values))


def test_axes_must_stay_the_same() -> None:
    attention, _ = plain(Dot())
    with pytest.raises(AssertionError):
        attention.regrouped(batch=(), heads=(H,), rows=(I,))


def test_the_result_has_the_sites_own_dimensions() -> None:
    """Any order, merged, and one that is a single row."""
    attention, values = plain(Dot())
    whole = reference(attention, values)
    for output, expected in (
        (((I,), (B,), (E,), (H,)), whole.permute(2, 0, 3, 1)),
        (((B, H), (I,), (E,)), whole.flatten(0, 1)),
        (((B,), (), (I,), (H, E)), whole.transpose(1, 2).flatten(2).unsqueeze(1)),
    ):
        torch.testing.assert_close(reference(replace(attention, output=output), values), expected)


def test_sizes_are_taken_from_the_sources_or_given() -> None:
    """A symbolic number of keys; and a factor that is no source's size."""
    length, factor = Poly.of(Symbol("s0")), Poly.of(Symbol("s1"))
    keys = Axis("j", length)
    jj = axis_index(keys)
    score = apply("where", apply("lt", IndexValue(jj), IndexValue(factor)), Dot(), Const(-INF))
    attention, values = plain(
        score,
        keys=keys,
        key=Load(1, (b, h, jj, d)),
        value=Load(2, (b, h, jj, e)),
    )
    sources = list(attention.sources)
    sources[1] = replace(sources[1], shape=(2, 3, length, 6))
    attention = replace(attention, sources=tuple(sources))
    assert bind_sizes(attention.sources, values) == {"s0": 5}
    out = reference(attention, values, {"s1": 2})
    expected = torch.softmax(values[0] @ values[1][:, :, :2].mT, -1) @ values[2][:, :, :2]
    torch.testing.assert_close(out, expected)
    with pytest.raises(KeyError):
        reference(attention, values)


def test_everything_is_computed_in_float64() -> None:
    """Sources of half precision are widened before the first product, and casts round nothing."""
    score = apply("cast", apply("mul", Dot(), Const(0.5)), dtype=torch.bfloat16)
    attention, values = plain(score)
    halves = [v.bfloat16() for v in values]
    q, k, v = (x.double() for x in halves)
    torch.testing.assert_close(reference(attention, halves), torch.softmax(q @ k.mT * 0.5, -1) @ v)


def test_no_axis_at_all() -> None:
    """One query, one head, one value column: sizes of 1 everywhere."""
    one = torch.ones(1, 1, dtype=DOUBLE)
    attention, _ = plain(Dot())
    single = Axis("x", 1)
    attention = replace(
        attention,
        batch=(),
        heads=(),
        rows=(single,),
        keys=single,
        dim=single,
        value_dim=(),
        query=Load(0, (0, 0)),
        key=Load(1, (0, 0)),
        value=Load(2, (0, 0)),
        sources=tuple(Source(n, (1, 1), DOUBLE, one.device) for n in range(3)),
        output=((), ()),
    )
    torch.testing.assert_close(reference(attention, [one, one, 3 * one]), 3 * one)


def test_casts_truncate_and_integers_stay_integers() -> None:
    grid = Evaluation((J,), [torch.tensor([0.0, 0.9, 1.5, -1.5, 2.0])], {})
    load = Load(0, (j,))
    assert grid.expression(Apply("cast", (load,), torch.int64)).tolist() == [0, 0, 1, -1, 2]
    assert grid.expression(Apply("cast", (load,), torch.bool)).tolist() == [False, True, True, True, True]
    assert grid.expression(Apply("maximum", (IndexValue(j), Const(2)))).dtype == torch.int64


@pytest.mark.parametrize(
    "index, expected",
    [
        (j * 3 + 1, [1, 4, 7, 10, 13]),
        (Poly.of(Quotient(j * 3, 2)), [0, 1, 3, 4, 6]),  # type: ignore[arg-type]
        (Poly.of(Remainder(j * 3, 4)) * 2, [0, 6, 4, 2, 0]),  # type: ignore[arg-type]
        (j * j, [0, 1, 4, 9, 16]),
        (j * Poly.of(Symbol("s0")), [0, 7, 14, 21, 28]),
    ],
)
def test_indices_are_evaluated_exactly(index: Index, expected: list[int]) -> None:
    value = Evaluation((J,), [], {"s0": 7}).index(index)
    assert isinstance(value, torch.Tensor) and value.tolist() == expected
