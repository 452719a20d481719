"""Queries and keys that are scaled in place (fairseq, ESM, torchtune): their values when the product reads them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from against_eager import randn, same
from torch import Tensor
from torch.nn import functional as F

import attn_pass

Change = Callable[[Tensor], object]


def multiplied(q: Tensor) -> None:
    q *= 16**-0.5


def by_method(q: Tensor) -> None:
    q.mul_(0.25)


def divided(q: Tensor) -> None:
    q /= 4.0


def by_a_tensor(q: Tensor) -> None:
    q.mul_(torch.full((), 0.25, dtype=q.dtype))


SCALES = [multiplied, by_method, divided, by_a_tensor]


def heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], 4, -1).transpose(1, 2)


def projected(x: Tensor, *weights: Tensor) -> list[Tensor]:
    return [F.linear(x, w) for w in weights]


def before_heads(scale: Change) -> Callable[..., Tensor]:
    """fairseq: the projection is scaled, then split into heads that are folded into the batch."""

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        q, k, v = projected(x, *weights)
        scale(q)
        length, batch, _ = x.shape
        q, k, v = (t.contiguous().view(length, batch * 4, 16).transpose(0, 1) for t in (q, k, v))
        out = torch.bmm(F.softmax(torch.bmm(q, k.transpose(1, 2)), dim=-1), v)
        return out.transpose(0, 1).contiguous().view(length, batch, 64)

    return run


def on_a_view(scale: Change) -> Callable[..., Tensor]:
    def run(x: Tensor, *weights: Tensor) -> Tensor:
        q, k, v = map(heads, projected(x, *weights))
        scale(q)
        return (q @ k.transpose(-2, -1)).softmax(-1) @ v

    return run


def on_the_key(scale: Change) -> Callable[..., Tensor]:
    def run(x: Tensor, *weights: Tensor) -> Tensor:
        q, k, v = map(heads, projected(x, *weights))
        scale(k)
        return (q @ k.transpose(-2, -1)).softmax(-1) @ v

    return run


def all_three(scale: Change) -> Callable[..., Tensor]:
    """The values are scaled as well, being the same memory: not only the scores are."""

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        q = heads(F.linear(x, weights[0]))
        scale(q)
        return (q @ q.transpose(-2, -1)).softmax(-1) @ q

    return run


def of_a_copied_key(scale: Change) -> Callable[..., Tensor]:
    """The key is what the query was before it was scaled."""

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        q, _, v = map(heads, projected(x, *weights))
        k = q.clone()
        scale(q)
        return (q @ k.transpose(-2, -1)).softmax(-1) @ v

    return run


def after_the_product(scale: Change) -> Callable[..., Tensor]:
    """Nobody sees it: the scores are made already."""

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        q, k, v = map(heads, projected(x, *weights))
        scores = q @ k.transpose(-2, -1)
        scale(q)
        return scores.softmax(-1) @ v + q

    return run


def inputs(dtype: torch.dtype = torch.float32, grad: bool = False) -> list[Tensor]:
    weights = [(randn(64, 64, seed=n) * 0.1).to(dtype).requires_grad_(grad) for n in range(3)]
    return [randn(5, 2, 64, dtype=dtype, grad=grad), *weights]


PROGRAMS = [before_heads, on_a_view, on_the_key, all_three, of_a_copied_key]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_it_is_rewritten(program: Callable[[Change], Callable[..., Tensor]], scale: Change) -> None:
    same(program(scale), *inputs(), rewritten=1)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_rewritten_in_half_precision(
    program: Callable[[Change], Callable[..., Tensor]], dtype: torch.dtype
) -> None:
    same(program(multiplied), *inputs(dtype), rewritten=1, twice=2.5)


@pytest.mark.parametrize("program", PROGRAMS)
def test_it_is_rewritten_in_training(program: Callable[[Change], Callable[..., Tensor]]) -> None:
    same(program(multiplied), *inputs(grad=True), rewritten=1, grad=True)


def test_it_is_rewritten_with_lengths_known_at_run_time() -> None:
    same(before_heads(multiplied), *inputs(), rewritten=1, dynamic=True)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("scale", [multiplied, divided])
def test_it_is_rewritten_in_exported_programs(
    program: Callable[[Change], Callable[..., Tensor]], scale: Change
) -> None:
    class Model(torch.nn.Module):
        def forward(self, *given: Tensor) -> Tensor:
            return program(scale)(*given)

    with torch.no_grad():
        exported = torch.export.export(Model(), tuple(inputs()))
        report = attn_pass.rewrite(exported, choose="fused", on_error="raise")
        assert [s.outcome for s in report.sites] == ["rewritten"]
        torch.testing.assert_close(exported.module()(*inputs()), Model()(*inputs()), atol=1e-5, rtol=1e-5)


def test_a_write_after_the_product_is_not_read_as_the_scale() -> None:
    same(after_the_product(multiplied), *inputs(), rewritten=0)
