"""Products written to a tensor that the program gives them: ``out=``, and ``baddbmm_``."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import pytest
import torch
from against_eager import qkv, randn, same
from torch import Tensor

import attn_pass

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # (8, L, 16) each


def inputs(dtype: torch.dtype = torch.float32, q_len: int = 5, kv_len: int = 7) -> list[Tensor]:
    return [randn(8, length, 16, dtype=dtype, seed=n) for n, length in enumerate((q_len, kv_len, kv_len))]


def of_scores(q: Tensor, k: Tensor) -> Tensor:
    return torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype)


def by_matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(q, k.mT, out=of_scores(q, k)).softmax(-1) @ v


def by_its_buffer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q.new_empty(q.shape[0], q.shape[1], k.shape[1])
    torch.bmm(q, k.mT, out=scores)
    return scores.mul_(0.25).softmax(-1) @ v


def megatron(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Megatron-LM's: the product scaled into a buffer that adds nothing."""
    buffer = of_scores(q, k)
    scores = torch.baddbmm(buffer, q, k.mT, beta=0.0, alpha=0.25, out=buffer)
    return scores.softmax(-1) @ v


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = of_scores(q, k)
    scores.baddbmm_(q, k.mT, beta=0, alpha=0.25)
    return scores.softmax(-1) @ v


def of_a_view(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    flat = torch.empty(q.shape[0] * q.shape[1] * k.shape[1], dtype=q.dtype)
    torch.bmm(q, k.mT, out=flat.view(q.shape[0], q.shape[1], k.shape[1]))
    return flat.view(q.shape[0], q.shape[1], k.shape[1]).softmax(-1) @ v


def added_to_ones(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    buffer = torch.ones(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype)
    return torch.baddbmm(buffer, q, k.mT, alpha=0.25, out=buffer).softmax(-1) @ v


def masked_in_its_buffer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = of_scores(q, k)
    torch.bmm(q, k.mT, out=scores)
    scores.masked_fill_(torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(1), float("-inf"))
    return scores.softmax(-1) @ v


def both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores, result = of_scores(q, k), torch.empty_like(q)
    torch.bmm(q, k.mT, out=scores)
    return torch.bmm(scores.softmax(-1), v, out=result)


def the_result_by_its_buffer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    result = torch.zeros_like(q)
    torch.bmm((q @ k.mT).softmax(-1), v, out=result)
    return result * 2


def the_result_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    result = torch.zeros_like(q)
    again = result.baddbmm_((q @ k.mT).softmax(-1), v)
    return result + again.relu()


def a_part_of_the_result(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    result = torch.ones(3, *q.shape, dtype=q.dtype)
    torch.bmm((q @ k.mT).softmax(-1), v, out=result[1])
    return result


def to_a_result_turned_round(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    result = torch.zeros(q.shape[1], q.shape[0], q.shape[2], dtype=q.dtype).transpose(0, 1)
    return torch.bmm((q @ k.mT).softmax(-1), v, out=result)


SCORES = [
    by_matmul, by_its_buffer, megatron, in_place, of_a_view, added_to_ones, masked_in_its_buffer,
]  # fmt: skip
RESULTS = [both, the_result_by_its_buffer, the_result_in_place, a_part_of_the_result]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("attend", [*SCORES, *RESULTS])
def test_it_is_read(attend: Attend, dtype: torch.dtype) -> None:
    same(attend, *inputs(dtype), rewritten=1, twice=2.5)


@pytest.mark.parametrize("attend", [*SCORES, *RESULTS])
def test_it_is_read_at_lengths_known_at_run_time(attend: Attend) -> None:
    same(attend, *inputs(), rewritten=1, dynamic=True)


@pytest.mark.parametrize("attend", [*SCORES, *RESULTS, to_a_result_turned_round])  # there Dynamo breaks the graph
def test_it_is_read_in_exported_programs(attend: Attend) -> None:
    class Model(torch.nn.Module):
        def forward(self, *given: Tensor) -> Tensor:
            return attend(*given)

    program = torch.export.export(Model(), tuple(inputs()))
    report = attn_pass.rewrite(program, choose="fused", on_error="raise", verify="graph")
    assert [s.outcome for s in report.sites] == ["rewritten"], report
    assert report.sites[0].verified_error is not None, report.sites[0].not_verified
    for given in (inputs(), [3 * t for t in inputs()]):
        torch.testing.assert_close(program.module()(*given), attend(*given), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attend", [in_place, the_result_in_place])
def test_in_training(attend: Attend) -> None:
    """``baddbmm_`` has a gradient; torch has none for ``out=``."""
    same(attend, *(t.requires_grad_() for t in inputs()), rewritten=1, grad=True)


def test_without_gradients_around_it() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            seen = both(q, k, v)
        return (q @ k.mT).softmax(-1) @ v + seen

    same(run, *(t.requires_grad_() for t in inputs()), rewritten=2, grad=True)


def test_under_autocast() -> None:
    """Autocast leaves ``out=`` alone: both products are in float32, where the kernel's call would not be."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return both(q, k, v)

    same(run, *inputs())


def test_a_result_may_be_an_input() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, cache: Tensor) -> Tensor:
        torch.bmm((q @ k.mT).softmax(-1), v, out=cache)
        return cache.sum(-1)

    same(run, *inputs(), torch.zeros(8, 5, 16), rewritten=1)


def test_a_result_may_be_an_unused_input() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, cache: Tensor) -> Tensor:
        return torch.bmm((q @ k.mT).softmax(-1), v, out=cache) * 2

    same(run, *inputs(), torch.zeros(8, 5, 16), rewritten=1)


def test_a_result_may_be_written_to_another_result() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.bmm((q @ k.mT).softmax(-1), v)
        total = first.sum()
        torch.bmm((q @ k.mT * 0.5).softmax(-1), v, out=first)
        return first, total

    same(run, *inputs(), rewritten=2)


def test_a_result_may_be_written_to_its_query() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q * 1.0
        torch.bmm((q @ k.mT).softmax(-1), v, out=q)
        return q

    same(run, *inputs(), rewritten=1)


# ---------------------------------------------------------------- what must stay as it is


def read_afterwards(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = of_scores(q, k)
    torch.bmm(q, k.mT, out=scores)
    return scores.softmax(-1) @ v + scores.sum()


def returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = of_scores(q, k)
    return torch.bmm(q, k.mT, out=scores).softmax(-1) @ v, scores


def shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = of_scores(q, k)
    first = torch.bmm(q, k.mT, out=scores).softmax(-1) @ v
    return first + torch.bmm(q * 2, k.mT, out=scores).softmax(-1) @ v


def a_part_of_more(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.zeros(2, q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype)
    torch.bmm(q, k.mT, out=scores[1])
    return scores[1].softmax(-1) @ v + scores.sum()


def overwritten_before_the_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = of_scores(q, k)
    made = torch.bmm(q, k.mT, out=scores)
    torch.mul(q.sum(-1, keepdim=True), k.sum(-1)[:, None], out=scores)
    return made.softmax(-1) @ v


def read_before_it_is_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.ones(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype)
    weights = scores.softmax(-1)
    torch.bmm(q, k.mT, out=scores)
    return weights @ v


def added_to_what_is_computed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q[..., :1] * k[:, None, :, 0]
    torch.baddbmm(scores, q, k.mT, out=scores)
    return scores.softmax(-1) @ v


def random_numbers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.rand(q.shape[0], q.shape[1], k.shape[1])
    return torch.bmm(q, k.mT, out=scores).softmax(-1) @ v


_SEEN = "the attention scores are|an operation inside writes to memory that others can see"
LEFT = {
    read_afterwards: _SEEN,
    returned: _SEEN,
    shared: _SEEN,
    a_part_of_more: _SEEN,
    added_to_what_is_computed: "is written in place by baddbmm before the result is computed",
    random_numbers: "an operation inside writes to memory that others can see",
}


@pytest.mark.parametrize("attend", LEFT)
def test_scores_that_others_see_are_left(attend: Attend) -> None:
    if attend is random_numbers:
        torch.manual_seed(0)
    report = same(attend, *inputs(), rewritten=0, reference=False)
    assert report.sites and all(re.search(LEFT[attend], site.reason) for site in report.sites), report.sites


@pytest.mark.parametrize("attend", [overwritten_before_the_softmax, read_before_it_is_written])
def test_other_numbers_in_the_buffer_are_not_scores(attend: Attend) -> None:
    same(attend, *inputs(), rewritten=0, reference=False)


def test_transposed_scores_are_not_read_as_the_scores() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = of_scores(q, k)
        transposed = scores.mT
        scores.baddbmm_(q, k.mT, beta=0)
        return transposed.softmax(-1) @ v

    same(run, *inputs(q_len=7))


def test_scores_whose_gradient_is_stopped_are_left() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = of_scores(q, k)
        scores.detach().baddbmm_(q, k.mT, beta=0)
        return scores.softmax(-1) @ v

    same(run, *(t.requires_grad_() for t in inputs()), rewritten=0, grad=True)


@pytest.mark.parametrize("resized", ["scores", "result"])
def test_a_tensor_that_is_resized_is_not_read(resized: str) -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if resized == "result":
                return torch.matmul((q @ k.mT).softmax(-1), v, out=torch.empty(0))
            return torch.matmul(q, k.mT, out=torch.empty(0)).softmax(-1) @ v

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(Model(), tuple(inputs()))
    report = attn_pass.rewrite(program, choose="fused", on_error="raise")
    assert not report.rewritten, report


def test_scores_in_an_input_are_left() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, scores: Tensor) -> Tensor:
        return torch.bmm(q, k.mT, out=scores).softmax(-1) @ v

    report = same(run, *inputs(), torch.zeros(8, 5, 7), rewritten=0)
    assert "memory that others can see" in report.sites[0].reason


def test_a_result_under_a_range_of_keys_is_written() -> None:
    """Nothing but a view of the tensor reads it; where padding may be taken out, unread writes are looked for."""

    def written(q: Tensor, k: Tensor, v: Tensor, last: Tensor) -> Tensor:
        keys, values = (x.expand(-1, 2, -1, -1).reshape(4, 17, 8) for x in (k, v))
        scores = (q.reshape(4, 17, 8) @ keys.mT).view(2, 2, 17, 17)
        weights = scores.masked_fill(torch.arange(17) > last, float("-inf")).softmax(-1)
        result = torch.zeros(4, 17, 8, dtype=q.dtype)
        result.baddbmm_(weights.reshape(4, 17, 17), values)
        return result.view(2, 2, 17, 8) + 1

    q, k, v = qkv(2, 2, 17, 17, 8, kv_heads=1)
    same(written, q, k, v, torch.tensor(5), rewritten=1, choose="fused", targets=("cpu_kernel",))
