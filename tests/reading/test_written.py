"""A part of the scores written in place (MViT's class token): which part, by what, and when."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from against_eager import NEG_INF, randn, same
from torch import Tensor

import attn_pass

SHAPES = [(2, 3, 36, 16), (2, 3, 13, 16), (2, 3, 13, 16), (5, 3, 16), (7, 4, 16)]
Change = Callable[[Tensor, Tensor, Tensor, Tensor], None]


def biases(q: Tensor, rel_h: Tensor, rel_w: Tensor) -> tuple[Tensor, Tensor]:
    rows = q[:, :, 1:].reshape(*q.shape[:2], 5, 7, -1)
    return torch.einsum("byhwc,hkc->byhwk", rows, rel_h), torch.einsum("byhwc,wkc->byhwk", rows, rel_w)


def as_mvit(s: Tensor, q: Tensor, rel_h: Tensor, rel_w: Tensor) -> None:
    height, width = biases(q, rel_h, rel_w)
    inner = s[:, :, 1:, 1:].view(2, -1, 5, 7, 3, 4) + height.unsqueeze(-1) + width.unsqueeze(-2)
    s[:, :, 1:, 1:] = inner.view(2, -1, 35, 12)


def numbers(s: Tensor, q: Tensor, rel_h: Tensor, rel_w: Tensor) -> None:
    s[..., :3] = NEG_INF


def middle(s: Tensor, q: Tensor, rel_h: Tensor, rel_w: Tensor) -> None:
    s[:, :, 2:9, 4:7] = s[:, :, 2:9, 4:7] + rel_h.mean() * torch.arange(21.0).view(7, 3)


def twice(s: Tensor, q: Tensor, rel_h: Tensor, rel_w: Tensor) -> None:
    s[:, :, 5:] = s[:, :, 5:] + torch.arange(13.0)
    s[:, :, :9, 1:] = s[:, :, :9, 1:] - torch.arange(12.0)


def other_place(s: Tensor, q: Tensor, rel_h: Tensor, rel_w: Tensor) -> None:
    s[:, :, 1:, 1:] = s[:, :, :-1, :-1] + 1.0


def doubled(s: Tensor, q: Tensor, rel_h: Tensor, rel_w: Tensor) -> None:
    s[:, :, 1:, 1:] = s[:, :, 1:, 1:] * 2


def every_second(s: Tensor, q: Tensor, rel_h: Tensor, rel_w: Tensor) -> None:
    s[..., ::2] = s[..., ::2] + 1.0


def by_rows(s: Tensor, q: Tensor, rel_h: Tensor, rel_w: Tensor) -> None:
    s[:, :, torch.tensor([1, 5])] = 0.0


def attention(change: Change) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, rel_h: Tensor, rel_w: Tensor) -> Tensor:
        scores = q * 0.25 @ k.transpose(-2, -1)
        change(scores, q, rel_h, rel_w)
        return scores.softmax(-1) @ v

    return run


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [randn(*shape, dtype=dtype, seed=n) for n, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", [as_mvit, numbers, middle, twice])
def test_a_part_is_read(change: Change, dtype: torch.dtype) -> None:
    same(attention(change), *inputs(dtype), rewritten=1, choose="fused", twice=2.5)


@pytest.mark.parametrize("change", [as_mvit, numbers, middle, twice])
def test_a_part_is_read_in_exported_programs(change: Change) -> None:
    class Model(torch.nn.Module):
        def forward(self, *given: Tensor) -> Tensor:
            return attention(change)(*given)

    with torch.no_grad():
        program = torch.export.export(Model(), tuple(inputs()))
        report = attn_pass.rewrite(program, choose="fused", on_error="raise")
        assert [s.outcome for s in report.sites] == ["rewritten"]
        torch.testing.assert_close(program.module()(*inputs()), Model()(*inputs()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("change", [other_place, doubled, every_second, by_rows])
def test_no_scores_of_one_form(change: Change) -> None:
    same(attention(change), *inputs(), rewritten=0, choose="fused", targets=("sdpa",), reference=False)


@pytest.mark.parametrize("change", [numbers])
def test_gradients(change: Change) -> None:
    q, k, v, rel_h, rel_w = inputs()
    given = [x.requires_grad_() for x in (q, k, v)]
    same(attention(change), *given, rel_h, rel_w, rewritten=1, grad=True, choose="fused", reference=False)


def test_later_writes_are_not_part_of_the_softmax() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, rel_h: Tensor, rel_w: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1)
        weights = scores.softmax(-1)
        numbers(scores, q, rel_h, rel_w)
        return weights @ v + scores[..., 5:].sum()

    same(run, *inputs(), rewritten=0, choose="fused", reference=False)


def test_what_lies_before_a_detach_gets_no_gradient_through_what_is_written() -> None:
    keep = torch.ones(7, 7, dtype=torch.bool).tril()

    def written_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT).clone().masked_fill_(~keep, NEG_INF)
        return (scores.detach().view(scores.shape) * 0.3).softmax(-1) @ v

    def written_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT).clone()
        seen = scores.detach()
        scores.masked_fill_(~keep, NEG_INF)
        return seen.softmax(-1) @ v

    for program in (written_before, written_after):
        inputs = [randn(2, 3, 7, 8, grad=True, seed=n) for n in range(3)]
        same(program, *inputs, grad=True, rewritten=0)
        same(written_before, *(x.detach() for x in inputs), rewritten=1)
