"""Pointwise operations and softmaxes that are written to a tensor the program gives them (``out=``)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from against_eager import NEG_INF, qkv, randn, same
from torch import Tensor

import attn_pass

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # (2, 2, L, 16) each
BIAS = randn(7, 7, seed=4)


def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    torch.mul(scores, 0.25, out=scores)
    return scores.softmax(-1) @ v


def to_another_tensor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    return torch.div(scores, 4.0, out=torch.empty_like(scores)).softmax(-1) @ v


def by_its_tensor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    other = scores.new_zeros(scores.shape)
    torch.add(scores, BIAS.to(q.dtype), out=other)
    return (other * 0.25).softmax(-1) @ v


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    torch.where(BIAS > -1, scores, scores.new_tensor(NEG_INF), out=scores)
    return scores.softmax(-1) @ v


def part_of_the_result(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    other = torch.empty_like(scores)
    torch.mul(scores, 0.25, out=other)[..., 1:] += BIAS[:, 1:].to(q.dtype)
    return other.softmax(-1) @ v


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    weights = torch.empty_like(scores)
    torch.softmax(scores, -1, out=weights)
    return weights @ v


def softmax_of_itself(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.25
    torch.softmax(scores, -1, out=scores)
    return scores @ v


def softmax_of_a_view(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.25
    weights = scores.new_empty(scores.numel())
    torch.softmax(scores, 3, out=weights.view(scores.shape))
    return weights.view(scores.shape) @ v


def all_of_it(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores, result = torch.empty(2, 2, 7, 7, dtype=q.dtype), torch.empty_like(v)
    torch.matmul(q, k.mT, out=scores)
    torch.mul(scores, 0.25, out=scores)
    torch.softmax(scores, -1, out=scores)
    torch.matmul(scores, v, out=result)
    return result


def weights_scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    torch.mul(weights, 2.0, out=weights)
    return weights @ v


READ = [
    part_of_the_result,
    weights_scaled,
    scaled, to_another_tensor, by_its_tensor, masked, softmax, softmax_of_itself, softmax_of_a_view, all_of_it,
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attend", READ)
def test_it_is_read(attend: Attend, dtype: torch.dtype) -> None:
    same(attend, *qkv(q_len=7, kv_len=7, dtype=dtype), rewritten=1, twice=2.5)


@pytest.mark.parametrize(  # decomposed, the two that are left out have copies and slice_scatter in between
    "attend, decompose",
    [*((a, False) for a in READ), *((a, True) for a in READ if a not in (all_of_it, part_of_the_result))],
)
def test_it_is_read_in_exported_programs(attend: Attend, decompose: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, *given: Tensor) -> Tensor:
            return attend(*given)

    given = qkv(q_len=7, kv_len=7)
    program = torch.export.export(Model(), given)
    program = program.run_decompositions() if decompose else program
    report = attn_pass.rewrite(program, choose="fused", on_error="raise")
    assert [s.outcome for s in report.sites] == ["rewritten"], report
    torch.testing.assert_close(program.module()(*given), attend(*given), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attend", [to_another_tensor, masked, softmax, softmax_of_itself])
def test_it_is_read_at_lengths_known_at_run_time(attend: Attend) -> None:
    same(attend, *qkv(q_len=7, kv_len=7), rewritten=1, dynamic=True)


# ---- neighbours ----


def in_a_wider_type(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    return torch.mul(scores, 0.25, out=torch.empty(scores.shape, dtype=torch.float64)).softmax(-1).to(q.dtype) @ v


def weights_in_a_wider_type(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    return torch.softmax(scores, -1, dtype=torch.float64, out=torch.empty(scores.shape).double()).to(q.dtype) @ v


def rows_and_keys_changed_over(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    torch.softmax(scores, -2, out=scores)
    return scores @ v


def the_tensor_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    other = torch.ones_like(scores)
    weights = other.softmax(-1)
    torch.mul(scores, 0.25, out=other)
    return weights @ v + other.sum()


def written_once_more(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    weights = torch.softmax(scores, -1, out=torch.empty_like(scores))
    weights[..., 0] = 1.0
    return weights @ v


def the_scores_seen(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT
    other = torch.zeros_like(scores)
    torch.mul(scores, 0.25, out=other)
    return scores.softmax(-1) @ v, other


def a_tensor_seen_whole(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    room = torch.zeros(3, 2, 2, 7, 7, dtype=q.dtype)
    torch.mul(q @ k.mT, 0.25, out=room[1])
    return room[1].softmax(-1) @ v, room


def a_tensor_of_the_caller(q: Tensor, k: Tensor, v: Tensor, room: Tensor) -> Tensor:
    torch.mul(q @ k.mT, 0.25, out=room)
    return room.softmax(-1) @ v


def weights_for_the_caller(q: Tensor, k: Tensor, v: Tensor, room: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT, -1, out=room) @ v


@pytest.mark.parametrize(
    "attend",
    [
        in_a_wider_type,
        weights_in_a_wider_type,
        rows_and_keys_changed_over,
        the_tensor_before,
        written_once_more,
        a_tensor_seen_whole,
    ],
)
def test_look_alikes_are_left(attend: Attend) -> None:
    same(attend, *qkv(q_len=7, kv_len=7), rewritten=0)


@pytest.mark.parametrize("attend", [a_tensor_of_the_caller, weights_for_the_caller])
def test_a_tensor_of_the_caller_is_written(attend: Attend) -> None:
    same(attend, *qkv(q_len=7, kv_len=7), torch.zeros(2, 2, 7, 7), rewritten=0, targets=("sdpa",))


def test_scores_that_are_seen_stay() -> None:
    same(the_scores_seen, *qkv(q_len=7, kv_len=7), rewritten=0, targets=("sdpa",))


@pytest.mark.parametrize("operation", ["mul", "softmax"])
def test_a_tensor_that_is_resized(operation: str) -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores, room = q @ k.mT, torch.empty(0)
            if operation == "softmax":
                return torch.softmax(scores, -1, out=room) @ v + room.shape[0]
            return torch.mul(scores, 0.25, out=room).softmax(-1) @ v + room.shape[0]

    given = qkv(q_len=7, kv_len=7)
    program = torch.export.export(Model(), given)
    attn_pass.rewrite(program, choose="fused", on_error="raise")
    torch.testing.assert_close(program.module()(*given), Model()(*given), atol=1e-5, rtol=1e-5)
