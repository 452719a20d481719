"""Programs that a reader of the code thought up: each was read as another attention than it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import attn_pass
from attn_pass.devices.cpu.kernel import build

INF = float("inf")
Program = Callable[..., Any]


def triangle() -> Tensor:
    return torch.ones(16, 16, dtype=torch.bool).tril()


def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (q @ k.mT * 0.25).masked_fill(~keep, -INF).softmax(-1) @ v


# ---------------------------------------------------------------- rows and columns taken by one index


def rows_and_columns(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    return attend(q, k, v, triangle()[at][:, at])


def rows_and_columns_selected(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    return attend(q, k, v, triangle().index_select(0, at).index_select(1, at))


def distances_of_tokens(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    places = torch.arange(16)
    distance = (places[None] - places[:, None]).abs()[at][:, at]
    return (q @ k.mT * 0.25 - 0.5 * distance).softmax(-1) @ v


# ---------------------------------------------------------------- one row, by an index without dimensions


def one_row(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    return attend(q[:, :, :1], torch.cat([k, k], 2), torch.cat([v, v], 2), triangle().index_select(0, at))


def one_row_of_four_dimensions(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    keep = torch.index_select(triangle().view(1, 1, 16, 16), 2, at)
    return attend(q[:, :, :1], torch.cat([k, k], 2), torch.cat([v, v], 2), keep)


def up_to_a_key(q: Tensor, k: Tensor, v: Tensor, last: Tensor) -> Tensor:
    """The largest number there is means all of them."""
    return (q[:, :, :1] @ k.mT * 0.25).masked_fill(torch.arange(8) > last, -1e9).softmax(-1) @ v


# ---------------------------------------------------------------- numbers that wrap around, and truth values as numbers


def bytes_taken_off(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * 0.25 - mask).softmax(-1) @ v


def bytes_times_alpha(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.add(q @ k.mT * 0.25, mask, alpha=-5).softmax(-1) @ v


def compared_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at = torch.arange(512)
    near, past = (at[None] - at[:, None]).float(), (at[None] - at[:, None]).float()
    near.ge_(-3)
    past.le_(0)
    return (q @ k.mT * 0.25 + (near + past) * 2.0).softmax(-1) @ v


# ---------------------------------------------------------------- masks that a body writes


def filled_by_the_body(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    mask.masked_fill_(~triangle()[:8, :8], -INF)
    return (q @ k.mT * 0.25 + mask).softmax(-1) @ v


def written_by_the_body(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    keep[:, 5:] = False
    return attend(q, k, v, keep)


def checkpointed(body: Program, mask: Callable[[], Tensor]) -> Program:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result: Tensor = checkpoint(body, q, k, v, mask(), use_reentrant=False)
        return result

    return run


# ---------------------------------------------------------------- sinks, and what moves whole rows


def maximum_off_one_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    joined = torch.cat([4 * q @ k.mT * 0.25, sink.view(1, -1, 1, 1).expand(2, 2, 8, 1)], -1)
    return F.pad(joined - joined.amax(-1, keepdim=True), (0, 1)).softmax(-1)[..., :-2] @ v


def of_rows() -> Tensor:
    """A bias that is the same for all keys, and does not look it."""
    return (torch.arange(8)[:, None] + 0 * torch.arange(8)[None, :]).float() * 0.5


def rows_moved_beside_a_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    scores = q @ k.mT * 0.25 + of_rows()
    return torch.cat([scores, sink.view(1, -1, 1, 1).expand(2, 2, 8, 1)], -1).softmax(-1)[..., :-1] @ v


def rows_moved_and_their_logarithm(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT * 0.25 + of_rows()
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


# ---------------------------------------------------------------- fully masked rows that are taken out again


def rows_chosen(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    weights = (q @ k.mT * 0.25).masked_fill(~keep, -INF).softmax(-1)
    return torch.where(keep.any(-1, keepdim=True), weights, 0.0) @ v


def rows_filled(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    weights = (q @ k.mT * 0.25).masked_fill(~keep, -INF).softmax(-1)
    return weights.masked_fill(~keep.any(-1, keepdim=True), 0.0) @ v


AT, TOKEN = torch.tensor([1, 2, 5, 6, 9, 11, 12, 15]), torch.tensor(5)
BYTES = torch.tensor([0, 1, 1, 0, 1, 100, 0, 1], dtype=torch.uint8).expand(2, 1, 1, 8)
SINK = torch.tensor([1.0, 3.0])
KEEP = torch.ones(2, 1, 8, 8, dtype=torch.bool).tril(2).index_fill(2, torch.tensor(3), False)
CASES: tuple[tuple[Program, tuple[Tensor, ...]], ...] = (
    *((program, (AT,)) for program in (rows_and_columns, rows_and_columns_selected, distances_of_tokens)),
    *((program, (TOKEN,)) for program in (one_row, one_row_of_four_dimensions)),
    *((program, (BYTES,)) for program in (bytes_taken_off, bytes_times_alpha)),
    *((program, (SINK,)) for program in (maximum_off_one_sink, rows_moved_beside_a_sink)),
    *((program, (KEEP,)) for program in (rows_chosen, rows_filled)),
    (checkpointed(filled_by_the_body, lambda: torch.zeros(8, 8)), ()),
    (checkpointed(written_by_the_body, lambda: torch.ones(8, 8, dtype=torch.bool)), ()),
    (up_to_a_key, (torch.tensor(torch.iinfo(torch.int64).max),)),
    (rows_moved_and_their_logarithm, ()),
)
NAMES = [program.__name__ + ("" if given else f" {n}") for n, (program, given) in enumerate(CASES)]


def is_right(program: Program, inputs: tuple[Tensor, ...], target: str) -> bool:
    torch._dynamo.reset()
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    backend = attn_pass.wrap("eager", choose="fused", on_error="raise", targets=(target,))
    with torch.no_grad():
        got, want = torch.compile(program, backend=backend)(*inputs), program(*wide)
    pairs = zip(*(x if isinstance(x, tuple) else (x,) for x in (got, want)), strict=True)
    return all(bool((a.double() - b).abs().max() < 1e-5) for a, b in pairs)


@pytest.mark.parametrize("target", ["sdpa", "cpu_kernel"])
@pytest.mark.parametrize(("program", "given"), CASES, ids=NAMES)
def test_the_program_keeps_its_meaning(program: Program, given: tuple[Tensor, ...], target: str) -> None:
    if target == "cpu_kernel" and build.missing():
        pytest.skip("no compiler for the CPU kernel")
    torch.manual_seed(0)
    assert is_right(program, (*(torch.randn(2, 2, 8, 16) for _ in range(3)), *given), target)


def test_a_fully_masked_row_that_is_multiplied_by_its_condition_stays_nan() -> None:
    """Only a choice takes it out."""
    if build.missing():
        pytest.skip("no compiler for the CPU kernel")

    def program(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return ((q @ k.mT * 0.25).masked_fill(~keep, -INF).softmax(-1) * keep.any(-1, keepdim=True)) @ v

    torch._dynamo.reset()
    inputs = (*(torch.randn(2, 2, 8, 16) for _ in range(3)), KEEP)
    backend = attn_pass.wrap("eager", choose="fused", on_error="raise", targets=("cpu_kernel",))
    with torch.no_grad():
        got, want = torch.compile(program, backend=backend)(*inputs), program(*inputs)
    assert want[:, :, 3].isnan().all()
    torch.testing.assert_close(got, want, equal_nan=True)


def test_comparisons_in_place_are_numbers() -> None:
    torch.manual_seed(0)
    assert is_right(compared_in_place, tuple(torch.randn(1, 1, 512, 8) for _ in range(3)), "sdpa")


@pytest.mark.parametrize("program", [rows_and_columns, one_row, bytes_taken_off, rows_chosen])
def test_they_are_attention_as_before(program: Program) -> None:
    given = next(given for known, given in CASES if known is program)
    inputs = (*(torch.randn(2, 2, 8, 16) for _ in range(3)), *given)
    assert len(attn_pass.explain(program, *inputs, attn_pass_options={"choose": "fused"}).rewritten) == 1
