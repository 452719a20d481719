"""Rows that are taken and put back: either gradient is a gather, and a loss is computed on the rows there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from padded_encoders import Encoder, L, ids, masks, packed
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import functional as F

import attn_pass
from attn_pass.devices.cpu.kernel import build
from attn_pass.padding.row_operators import PUT, TAKE


def rows() -> tuple[Tensor, Tensor, Tensor]:
    """Which rows of seven are there, their numbers, and the place of each of the seven among them."""
    there = torch.tensor([True, False, True, True, False, False, True])
    return there.nonzero().squeeze(1), (there.cumsum(0) - 1).clamp_min(0), there


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("operator", [TAKE, PUT])
def test_first_and_second_gradients(operator: Any, dim: int) -> None:
    index, place, there = rows()
    shape = [2, 3, 2]
    shape[dim] = 7 if operator is TAKE else 4
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        return operator(x, index, place, there, dim)

    assert torch.autograd.gradcheck(run, (x,)) and torch.autograd.gradgradcheck(run, (x,))


def test_rows_are_where_they_were() -> None:
    index, place, there = rows()
    x = torch.randn(2, 7, 3)
    for grad in (False, True):  # two kernels
        x = x.requires_grad_(grad)
        taken = TAKE(x, index, place, there, 1)
        torch.testing.assert_close(taken, x[:, there], rtol=0, atol=0)
        torch.testing.assert_close(PUT(taken, index, place, there, 1), x * there[:, None], rtol=0, atol=0)


def test_a_row_that_is_not_there_may_be_nan() -> None:
    """Its gradient is 0, and so is what stands in its place, whatever row 0 holds."""
    index, place, there = (x[1:] if x.numel() == 7 else x for x in rows())  # the first is not there
    index, place = there.nonzero().squeeze(1), (there.cumsum(0) - 1).clamp_min(0)
    taken = torch.full((3, 2), float("nan"), requires_grad=True)
    put = PUT(taken, index, place, there, 0)
    assert bool((put[~there] == 0).all()) and bool(put[there].isnan().all())
    put.sum().backward()
    torch.testing.assert_close(taken.grad, torch.ones(3, 2), rtol=0, atol=0)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_trace_below_autograd_has_gathers_alone(dynamic: bool) -> None:
    index, place, there = rows()
    graphs: list[str] = []

    def keep(gm: GraphModule, _: Any) -> Any:
        graphs.append(gm.print_readable(print_output=False))
        return gm.forward

    from functorch.compile import aot_function, make_boxed_func

    def step(x: Tensor, index: Tensor, place: Tensor, there: Tensor) -> Tensor:
        return PUT(TAKE(x, index, place, there, 0).exp(), index, place, there, 0)

    compiled = aot_function(step, fw_compiler=lambda gm, _: make_boxed_func(keep(gm, _)), dynamic=dynamic)
    x, other = (torch.linspace(-1, 1, 14).view(7, 2).requires_grad_() for _ in range(2))
    compiled(x, index, place, there).sum().backward()
    step(other, index, place, there).sum().backward()
    torch.testing.assert_close(x.grad, other.grad)
    text = "".join(graphs)
    assert len(graphs) == 2 and text.count("aten.index_select") == 4
    assert not any(name in text for name in ("attn_pass", "index_add", "index_put", "scatter"))


# ---------------------------------------------------------------- losses


def flat(reduction: str) -> Callable[..., Tensor]:
    def loss(model: Any, x: Tensor, mask: Tensor) -> Tensor:
        labels = torch.where(mask.bool(), torch.arange(L) % 3, -100)
        return F.cross_entropy(model.head(x).view(-1, 3), labels.view(-1), reduction=reduction)

    return loss


def by_class(reduction: str) -> Callable[..., Tensor]:
    def loss(model: Any, x: Tensor, mask: Tensor) -> Tensor:
        labels = torch.where(mask.bool(), torch.arange(L) % 3, 7)
        weight, logits = torch.tensor([1.0, 2.0, 0.5]), model.head(x).transpose(1, 2)
        smooth = {"weight": weight, "label_smoothing": 0.1}
        return F.cross_entropy(logits, labels, ignore_index=7, reduction=reduction, **smooth)

    return loss


@pytest.mark.skipif(bool(build.missing()), reason="no compiler for the CPU kernel")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("made", [flat, by_class])
def test_a_loss_and_its_gradients_are_of_the_rows_that_are_there(made: Callable[..., Any], reduction: str) -> None:
    model, words = Encoder(made(reduction), layers=1, eager=False).eval(), ids()
    graphs: list[GraphModule] = []

    def keep(gm: GraphModule, inputs: Any, **_: Any) -> GraphModule:
        graphs.append(gm)
        return gm

    torch._dynamo.reset()
    backend = attn_pass.wrap(keep, choose="fused", targets=("cpu_kernel",), on_error="raise")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for mask in (m for m in masks() if m.any(1).all()):
        results = []
        for run in (compiled, model):
            model.zero_grad()
            result = run(words, mask)
            (result * torch.linspace(0.5, 1.5, result.numel()).view(result.shape)).sum().backward()
            results.append([result.detach(), *(p.grad for p in model.parameters())])
        for got, wanted in zip(*results, strict=True):
            torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-5)
    (graph,) = graphs
    (loss,) = (n for n in graph.graph.nodes if getattr(n.target, "__name__", "") == "cross_entropy")
    logits, labels = (n.meta["example_value"] for n in loss.args[:2])
    assert logits.dim() == 2 and labels.dim() == 1
    assert all(isinstance(x.shape[0], torch.SymInt) for x in (logits, labels)), "of all rows"


@pytest.mark.skipif(bool(build.missing()), reason="no compiler for the CPU kernel")
def test_two_losses_of_the_same_labels() -> None:
    """The first in the graph is not the first that is written down: labels are packed in front of each."""

    def losses(model: Any, x: Tensor, mask: Tensor) -> Tensor:
        labels = torch.where(mask.bool(), torch.arange(L) % 3, -100).view(-1)
        later = model.head(x * 2).view(-1, 3)
        one = F.cross_entropy(model.head(x).view(-1, 3), labels)
        with torch.no_grad():
            seen = F.cross_entropy(later, labels, reduction="none")
        return one + F.cross_entropy(later, labels, reduction="sum") + seen.sum()

    model, words = Encoder(losses, layers=1, eager=False).eval(), ids()
    torch._dynamo.reset()
    backend = attn_pass.wrap("aot_eager", choose="fused", targets=("cpu_kernel",), on_error="raise")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with attn_pass.record() as report:
        results = []
        for run in (compiled, model):
            model.zero_grad()
            result = run(words, masks()[0])
            result.backward()
            results.append([result.detach(), *(p.grad for p in model.parameters())])
    assert [r.outcome for r in report.regions] == ["packed"]
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.skipif(bool(build.missing()), reason="no compiler for the CPU kernel")
def test_losses_of_rows_that_are_put_back() -> None:
    """In inference as well: where each row goes is known in front of both."""

    def losses(model: Any, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        labels = torch.where(mask.bool(), torch.arange(L) % 3, -100).view(-1)
        one, other = model.head(x).view(-1, 3), model.head(x * 2).view(-1, 3)
        return F.cross_entropy(one, labels, reduction="none"), F.cross_entropy(other, labels, reduction="none")

    assert "ignores labels" in packed(Encoder(losses, layers=1), masks()[:1]).exits[0]


@pytest.mark.slow
@pytest.mark.skipif(bool(build.missing()), reason="no compiler for the CPU kernel")
@pytest.mark.filterwarnings("error::attn_pass.AttnPassWarning")
def test_inductor_compiles_the_backward_of_every_loss() -> None:
    """What it cannot lower runs without it, with a warning."""

    def losses(model: Any, x: Tensor, mask: Tensor) -> Tensor:
        logarithms = model.head(x).log_softmax(-1).transpose(1, 2)
        labels = torch.where(mask.bool(), torch.arange(L) % 3, -100)
        each = by_class("none")(model, x, mask).sum() + flat("mean")(model, x, mask)
        return each + F.nll_loss(logarithms, labels)

    model, words, mask = Encoder(losses, layers=1, eager=False).eval(), ids(), masks()[0]
    torch._dynamo.reset()
    options = {"choose": "fused", "targets": ("cpu_kernel",), "on_error": "raise"}
    compiled = torch.compile(model, backend=attn_pass.backend, options=options)
    gradients = []
    with attn_pass.record() as report:
        for run in (compiled, model):
            model.zero_grad()
            run(words, mask).backward()
            gradients.append([p.grad for p in model.parameters()])
    assert [r.outcome for r in report.regions] == ["packed"]
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-5)
