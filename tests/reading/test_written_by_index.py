"""Scores written by a boolean tensor, by numbers, by the indices of a triangle, and slices of them changed in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from against_eager import NEG_INF, exported_each, randn, same, same_each
from torch import Tensor

import attn_pass
from attn_pass.targets.base import FINITE_KEYS

Change = Callable[[Tensor, Tensor, Tensor], None]  # scores (2, 4, 8, 8), a tensor like them, a bias (2, 4, 7, 7)


def by_a_triangle(s: Tensor, w: Tensor, b: Tensor) -> None:
    s[torch.ones_like(s, dtype=torch.bool).triu(1)] = -1e9


def by_a_boolean(s: Tensor, w: Tensor, b: Tensor) -> None:
    s[w > 1] = -1e9


def behind_slices(s: Tensor, w: Tensor, b: Tensor) -> None:
    s[:, :, w[0, 0] > 1] = NEG_INF


def behind_an_ellipsis(s: Tensor, w: Tensor, b: Tensor) -> None:
    s[..., w[0, 0] > 1] = torch.finfo(s.dtype).min


def in_a_part(s: Tensor, w: Tensor, b: Tensor) -> None:
    s[:, :, 1:, 1:][..., w[0, 0, 1:, 1:] > 1] = -1e9


def padded_keys(s: Tensor, w: Tensor, b: Tensor) -> None:
    s.permute(0, 3, 1, 2)[w[:, 0, 0] > 1] = -1e9


def by_index_put(s: Tensor, w: Tensor, b: Tensor) -> None:
    s.index_put_((w > 1,), torch.tensor(-1e9, dtype=s.dtype))


def former(s: Tensor, w: Tensor, b: Tensor) -> None:
    """pbloem/former's ``mask_``."""
    rows, columns = s.size(-2), s.size(-1)
    indices = torch.triu_indices(rows, columns, offset=1)
    s[..., indices[0], indices[1]] = NEG_INF


def below(s: Tensor, w: Tensor, b: Tensor) -> None:
    row, column = torch.tril_indices(8, 8, -2)
    s[:, :, row, column] = -1e9


def diagonal(s: Tensor, w: Tensor, b: Tensor) -> None:
    """A token does not attend to itself (small vision transformers)."""
    i = torch.arange(8)
    s[:, :, i, i] = -1e9


def graphormer(s: Tensor, w: Tensor, b: Tensor) -> None:
    s[:, :, 1:, 1:] += b


def graphormer_by_numbers(s: Tensor, w: Tensor, b: Tensor) -> None:
    s[:, :, 1:, 1:] = s[:, :, 1:, 1:] + b
    s[:, :, 1:, 0] = s[:, :, 1:, 0] + b[..., 0]
    s[:, :, 0, :] = s[:, :, 0, :] + w[:, :, 0]


def counted_from_behind(s: Tensor, w: Tensor, b: Tensor) -> None:
    s[..., -1] = -1e9
    s[..., :-3] += 1.0
    s[:, -1, 2:-2] -= w[:, 0, 2:-2]


def one_key(s: Tensor, w: Tensor, b: Tensor) -> None:
    s[:, :, :, 0] = -1e9


def one_row(s: Tensor, w: Tensor, b: Tensor) -> None:
    s[:, :, 3] = 0.0


def multiplied_in_part(s: Tensor, w: Tensor, b: Tensor) -> None:
    s[:, :, 1:, 1:].add_(b).sub_(1.0)


def more_dimensions_than_the_part(s: Tensor, w: Tensor, b: Tensor) -> None:
    s[:, :, 1:, 0] = (s[:, :, 1:, 0] + b[..., 0])[None, None]


READ = [
    by_a_triangle, by_a_boolean, behind_slices, behind_an_ellipsis, in_a_part, padded_keys, by_index_put, former,
    below, diagonal, graphormer, graphormer_by_numbers, counted_from_behind, one_key, multiplied_in_part,
    more_dimensions_than_the_part,
]  # fmt: skip


def attention(change: Change) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, w: Tensor, b: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) * 0.25
        change(scores, w, b)
        return scores.softmax(-1) @ v

    return run


def inputs(dtype: torch.dtype = torch.float32, grad: bool = False) -> list[Tensor]:
    q, k, v = (randn(2, 4, 8, 16, dtype=dtype, grad=grad, seed=n) for n in range(3))
    return [q, k, v, randn(2, 4, 8, 8, dtype=dtype), randn(2, 4, 7, 7, dtype=dtype)]


def by_name(changes: Sequence[Change], given: list[Tensor]) -> dict[str, tuple[Callable[..., Tensor], list[Tensor]]]:
    return {change.__name__: (attention(change), given) for change in changes}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_read(dtype: torch.dtype) -> None:
    same_each(by_name(READ, inputs(dtype)), twice=2.5)


@pytest.mark.parametrize("change", [by_a_triangle, former, by_a_boolean, one_key, diagonal])
def test_it_is_read_in_training(change: Change) -> None:
    same(attention(change), *inputs(grad=True), rewritten=1, grad=True)


# ---- a part that something is added to: Graphormer's token for the graph has no place in the bias ----


def rows_but_one(s: Tensor, w: Tensor, b: Tensor) -> None:
    s[:, :, 1:] += w[:, :, 1:]


def between(s: Tensor, w: Tensor, b: Tensor) -> None:
    s[:, :, 2:-1, 3:-2] += b[:, :, 1:-1, 2:-2]


def all_but_the_last(s: Tensor, w: Tensor, b: Tensor) -> None:
    s[:, :, :-2] += w[:, :, 2:]


ADDED = [graphormer, multiplied_in_part, more_dimensions_than_the_part, rows_but_one, between, all_but_the_last]


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("change", [*ADDED, graphormer_by_numbers])
def test_a_part_that_is_added_to_is_read_in_training(change: Change, learned: bool) -> None:
    given = inputs(grad=True)
    given[3:] = [x.requires_grad_(learned) for x in given[3:]]
    report = same(attention(change), *given, rewritten=1, grad=True)
    several = change is graphormer_by_numbers
    assert report.sites[0].target == ("recompute" if learned or several else "sdpa")


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("change", [rows_but_one, graphormer, graphormer_by_numbers])
def test_gradients_of_rows_that_the_part_empties(change: Change, learned: bool) -> None:
    """The scores were added to, not replaced, so that their gradient is passed on where every key is masked."""
    given = inputs(grad=True)
    given[3][:, :, 3] = given[4][:, :, 2] = torch.finfo(torch.float32).min
    given[3:] = [x.requires_grad_(learned) for x in given[3:]]
    same(attention(change), *given, rewritten=1, grad=True)


def filled_then_added(s: Tensor, w: Tensor, b: Tensor) -> None:
    s.masked_fill_(w > 1, torch.finfo(s.dtype).min)
    s[:, :, 1:, 1:] += b


def added_then_filled(s: Tensor, w: Tensor, b: Tensor) -> None:
    s[:, :, 1:, 1:] += b
    s.masked_fill_(w[:, :1, :1] > 1, NEG_INF)


def test_scores_that_were_replaced_before_stay_apart_from_those_added_to() -> None:
    given = inputs(grad=True)
    given[3][0, 0, 3], given[4][0, 0, 4] = 2.0, torch.finfo(torch.float32).min
    same(attention(filled_then_added), *given, rewritten=0, grad=True)
    same(attention(added_then_filled), *given, rewritten=1, grad=True)


@pytest.mark.parametrize(
    "change, hides", [(graphormer, False), (filled_then_added, True), (added_then_filled, True), (by_a_boolean, True)]
)
def test_adding_to_a_part_hides_no_key(change: Change, hides: bool) -> None:
    site = same(attention(change), *inputs(), rewritten=1).sites[0]
    assert (FINITE_KEYS in site.assumptions) == hides


def test_it_is_read_at_lengths_known_at_run_time() -> None:
    changes = [
        by_a_triangle,
        former,
        by_a_boolean,
        counted_from_behind,
        *ADDED,
        graphormer_by_numbers,
        added_then_filled,
    ]
    same_each(by_name(changes, inputs()), dynamic=True)


@pytest.mark.parametrize("change", [graphormer, graphormer_by_numbers, between, all_but_the_last])
def test_one_program_adds_to_a_part_at_every_length(change: Change) -> None:
    def given(length: int) -> list[Tensor]:
        q, k, v = (randn(2, 4, length, 16, seed=n) for n in range(3))
        return [q, k, v, randn(2, 4, length, length), randn(2, 4, length - 1, length - 1)]

    torch._dynamo.reset()
    backend = attn_pass.wrap("eager", choose="fused", on_error="raise")
    compiled = torch.compile(attention(change), backend=backend, dynamic=True)
    with attn_pass.record() as report:
        for length in (9, 13, 7, 31):
            torch.testing.assert_close(
                compiled(*given(length)), attention(change)(*given(length)), atol=1e-5, rtol=1e-5
            )
    assert len(report.rewritten) == len(report.sites) == 1, report


# Decomposed, a place is one number, and what is written there is selected by it: the scores are read at two places.
TWO_PLACES = [graphormer_by_numbers, counted_from_behind, more_dimensions_than_the_part]
DECOMPOSED = [*(c for c in READ if c not in TWO_PLACES), rows_but_one, between, all_but_the_last, added_then_filled]


@pytest.mark.parametrize("decompose", [False, True])
def test_it_is_read_in_exported_programs(decompose: bool) -> None:
    programs = by_name(DECOMPOSED if decompose else READ, inputs())
    with torch.no_grad():
        report = exported_each(programs, decompose=decompose, targets=("sdpa",))
    assert {n: s.outcome for n, s in zip(programs, report.sites)} == dict.fromkeys(programs, "rewritten"), str(report)


@pytest.mark.parametrize("change", [by_a_triangle, former])
def test_a_triangle_is_causal(change: Change) -> None:
    assert same(attention(change), *inputs(), rewritten=1).sites[0].mask == "causal"


def values_by_a_boolean(s: Tensor, w: Tensor, b: Tensor) -> None:
    s[w > -9] = w.flatten()


def changed_by_a_boolean(s: Tensor, w: Tensor, b: Tensor) -> None:
    s[w > 1] += 1.0


def some_rows(s: Tensor, w: Tensor, b: Tensor) -> None:
    s[:, :, torch.tensor([1, 5])] = -1e9


def some_elements(s: Tensor, w: Tensor, b: Tensor) -> None:
    s[:, :, torch.tensor([0, 1, 5]), torch.tensor([3, 4, 6])] = -1e9


def a_smaller_triangle(s: Tensor, w: Tensor, b: Tensor) -> None:
    row, column = torch.triu_indices(6, 6, 1)
    s[:, :, row, column] = -1e9


def a_triangle_lying_down(s: Tensor, w: Tensor, b: Tensor) -> None:
    row, column = torch.triu_indices(8, 8, 1)
    s[:, :, column, row] = -1e9


def a_triangle_moved_on(s: Tensor, w: Tensor, b: Tensor) -> None:
    row, column = torch.triu_indices(8, 8, 1)
    row += 0 * column
    s[:, :, row, column] = -1e9


def accumulated(s: Tensor, w: Tensor, b: Tensor) -> None:
    s.index_put_((w > 1,), torch.tensor(1.0, dtype=s.dtype), accumulate=True)


def another_place(s: Tensor, w: Tensor, b: Tensor) -> None:
    s[:, :, 1:, 0] = s[:, :, 1:, 1]


def another_row(s: Tensor, w: Tensor, b: Tensor) -> None:
    s[:, :, 3] = s[:, :, 4]


def by_their_own_values(s: Tensor, w: Tensor, b: Tensor) -> None:
    s[s < 0] = -1e9


LEFT = [
    values_by_a_boolean, changed_by_a_boolean, some_rows, some_elements, a_smaller_triangle, a_triangle_lying_down,
    a_triangle_moved_on, accumulated, another_place, another_row, one_row,
]  # fmt: skip


@torch._dynamo.config.patch(recompile_limit=32)  # where a graph breaks, all are one function's code
def test_look_alikes_are_not_masked_scores() -> None:
    same_each(by_name([*LEFT, by_their_own_values], inputs()), rewritten=0, targets=("sdpa",), reference=False)


def test_look_alikes_are_left_in_decomposed_programs() -> None:
    changes = [*TWO_PLACES, another_place, another_row, one_row, some_rows, accumulated]
    with torch.no_grad():
        report = exported_each(by_name(changes, inputs()), decompose=True, targets=("sdpa",))
    assert not report.rewritten, str(report)


# ---- a part written out of place ----

Scatter = Callable[[Tensor, Tensor], Tensor]  # of scores (2, 4, 8, 8) and a tensor like them
copied_to = torch.ops.aten.copy.default
SCATTERED: dict[str, Scatter] = {
    "copied": lambda s, w: copied_to(w, s) + w,
    "rows": lambda s, w: torch.slice_scatter(s, s[:, :, 2:] + w[:, :, 2:], 2, 2),
    "keys, from behind": lambda s, w: torch.slice_scatter(s, s[..., -3:-1] - w[..., -3:-1], -1, -3, -1),
    "the whole": lambda s, w: torch.slice_scatter(s, s + w, 1),
    "over all of another tensor": lambda s, w: torch.slice_scatter(torch.zeros_like(w), s + w, 2),
    "one row": lambda s, w: torch.select_scatter(s, s[:, :, 3] + w[:, :, 3], 2, 3),
    "twice": lambda s, w: torch.slice_scatter(
        s, torch.slice_scatter(s[:, :, 1:], s[:, :, 1:, :4] + w[:, :, 1:, :4], 3, 0, 4), 2, 1
    ),
}  # fmt: skip
OTHER_PARTS: dict[str, Scatter] = {
    "every second row": lambda s, w: torch.slice_scatter(s, s[:, :, ::2] + w[:, :, ::2], 2, step=2),
    "every second key masked": lambda s, w: torch.slice_scatter(
        s, torch.full_like(w[..., 1::2], NEG_INF), 3, 1, step=2
    ),
    "rows moved on": lambda s, w: torch.slice_scatter(s, s[:, :, :6] + w[:, :, :6], 2, 2),
    "another row's": lambda s, w: torch.select_scatter(s, s[:, :, 4] + w[:, :, 4], 2, 3),
    "another tensor": lambda s, w: torch.slice_scatter(w, s[:, :, 2:], 2, 2),
    "copied to whole numbers": lambda s, w: copied_to(torch.empty_like(s, dtype=torch.int64), s * 8).to(s.dtype),
    "one head's for all": lambda s, w: copied_to(w, s[:, :1]) * w,
    "rounded on the way": lambda s, w: torch.slice_scatter(s, (s[:, :, 2:] + w[:, :, 2:]).round(), 2, 2),
}  # fmt: skip


@pytest.mark.parametrize(
    "name, grad",
    [*((n, False) for n in SCATTERED), *((n, True) for n in SCATTERED if n != "copied")],  # aten.copy has no gradient
)
def test_a_part_written_out_of_place_is_read(name: str, grad: bool) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return SCATTERED[name](q @ k.mT * 0.25, w).softmax(-1) @ v

    same(run, *inputs(grad=grad), rewritten=1, grad=grad)


@pytest.mark.parametrize("name", list(OTHER_PARTS))
def test_other_parts_written_out_of_place(name: str) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return OTHER_PARTS[name](q @ k.mT * 0.25, w).softmax(-1) @ v

    same(run, *inputs(), rewritten=0, targets=("sdpa",))


def test_later_writes_are_not_part_of_the_softmax() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, w: Tensor, b: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1)
        weights = scores.softmax(-1)
        by_a_boolean(scores, w, b)
        return weights @ v + scores.sum()

    same(run, *inputs(), rewritten=0, reference=False)
