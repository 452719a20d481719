"""A softmax that is written back slice by slice is one softmax, if the slices cover all of it exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_eager import randn, same
from torch import Tensor

import attn_pass
from attn_pass.model.index import Poly, Symbol
from attn_pass.patterns.by_slices import _slice_bound

Write = Callable[[Tensor], Any]


def inputs(dtype: torch.dtype = torch.float32, *, grad: bool = False, batch: int = 6) -> tuple[Tensor, ...]:
    sizes = ((batch, 5, 8), (batch, 7, 8), (batch, 7, 8))
    return tuple(randn(*s, dtype=dtype, grad=grad, seed=n) for n, s in enumerate(sizes))


def sliced(write: Write) -> Callable[..., Tensor]:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = torch.einsum("b i d, b j d -> b i j", q, k)
        s *= 0.3
        result = write(s)
        return torch.einsum("b i j, b j d -> b i d", s, v) + (0 if result is None else result)

    return program


def compvis(s: Tensor) -> None:
    s[4:] = s[4:].softmax(dim=-1)
    s[:4] = s[:4].softmax(dim=-1)


def one_by_one(s: Tensor) -> None:
    for n in range(0, 6, 2):
        s[n : n + 2] = torch.softmax(s[n : n + 2], -1)


def rows(s: Tensor) -> None:
    s[:, 3:, :] = s[:, 3:, :].softmax(2)
    s[:, :-2, :] = s[:, :-2, :].softmax(2)


def after_a_mask(s: Tensor) -> None:
    s.masked_fill_(torch.ones(5, 7, dtype=torch.bool).triu(3), -1e9)
    compvis(s)


def rows_by_an_ellipsis(s: Tensor) -> None:
    s[..., 3:, :] = s[..., 3:, :].softmax(2)
    s[..., :3, :] = s[..., :3, :].softmax(2)


READ: dict[str, Write] = {
    "as Stable Diffusion does": compvis,
    "one by one": one_by_one,
    "rows": rows,
    "rows, by an ellipsis": rows_by_an_ellipsis,
    "after a mask in place": after_a_mask,
}


@pytest.mark.parametrize("name", READ)
def test_all_slices_together_are_one_softmax(name: str) -> None:
    report = same(sliced(READ[name]), *inputs(grad=True), grad=True, rewritten=1)
    assert len(report.sites) == 1
    with torch.no_grad():
        same(sliced(READ[name]), *inputs(), rewritten=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_in_any_type(dtype: torch.dtype) -> None:
    same(sliced(compvis), *inputs(dtype, grad=True), grad=True, rewritten=1)


def test_a_slice_of_nothing() -> None:
    same(sliced(compvis), *inputs(batch=3), rewritten=1)


def test_of_any_size() -> None:
    """Dynamo guards on where a slice ends; smaller sizes are another graph."""
    torch._dynamo.reset()
    with attn_pass.record() as report:
        compiled = torch.compile(sliced(compvis), backend=attn_pass.wrap("eager", choose="fused"), dynamic=True)
        for batch in (6, 9, 4, 3, 1):
            given = inputs(batch=batch)
            torch.testing.assert_close(compiled(*given), sliced(compvis)(*given))
    assert report.rewritten


def test_a_slice_of_a_size_that_may_be_smaller() -> None:
    """Torch guards on such sizes; where nobody has, it is not known where the slice is."""
    free, long = (Poly.of(Symbol("s", minimum, 100)) for minimum in (0, 4))
    assert [_slice_bound(n, 0, free) for n in (4, -2)] == [None, None] and _slice_bound(0, 0, free) == 0
    assert [_slice_bound(n, 0, long) for n in (4, 5, -2)] == [4, None, long - 2]
    assert [_slice_bound(n, 0, 3) for n in (4, 2, -4)] == [3, 2, None]


class Model(torch.nn.Module):
    def forward(self, *given: Tensor) -> Tensor:
        return sliced(compvis)(*given)


def test_in_an_exported_program() -> None:
    program = torch.export.export(Model(), inputs())
    report = attn_pass.rewrite(program, choose="fused")
    assert len(report.rewritten) == 1 and "softmax" not in program.graph_module.code
    torch.testing.assert_close(program.module()(*inputs()), Model()(*inputs()))


def some(s: Tensor) -> None:
    s[4:] = s[4:].softmax(dim=-1)


def with_a_gap(s: Tensor) -> None:
    s[:3] = s[:3].softmax(dim=-1)
    s[4:] = s[4:].softmax(dim=-1)


def twice(s: Tensor) -> None:
    s[:4] = s[:4].softmax(dim=-1)
    s[3:] = s[3:].softmax(dim=-1)


def over_what_is_cut(s: Tensor) -> None:
    s[..., 4:] = s[..., 4:].softmax(dim=-1)
    s[..., :4] = s[..., :4].softmax(dim=-1)


def of_other_slices(s: Tensor) -> None:
    s[:3], s[3:] = s[3:].softmax(dim=-1), s[:3].softmax(dim=-1)


def of_two_dimensions(s: Tensor) -> None:
    s[4:] = s[4:].softmax(dim=-1)
    s[:4] = s[:4].softmax(dim=-2)


def seen_in_between(s: Tensor) -> Tensor:
    s[4:] = s[4:].softmax(dim=-1)
    seen = s.sum()
    s[:4] = s[:4].softmax(dim=-1)
    return seen


def written_in_between(s: Tensor) -> None:
    s[4:] = s[4:].softmax(dim=-1)
    s[0] = 1.0
    s[:4] = s[:4].softmax(dim=-1)


def written_later(s: Tensor) -> None:
    compvis(s)
    s[0] = 1.0


def seen_through_a_view(s: Tensor) -> Tensor:
    view = s[0]
    compvis(s)
    return view.sum()


def kept(s: Tensor) -> Tensor:
    s[4:] = (part := s[4:].softmax(dim=-1))
    s[:4] = s[:4].softmax(dim=-1)
    return part.sum()


def in_another_type(s: Tensor) -> None:
    s[4:] = s[4:].softmax(dim=-1, dtype=torch.float64)
    s[:4] = s[:4].softmax(dim=-1, dtype=torch.float64)


def without_gradient(s: Tensor) -> None:
    with torch.no_grad():
        s[4:] = s[4:].softmax(dim=-1)
    s[:4] = s[:4].softmax(dim=-1)


LEFT: dict[str, Write] = {
    "some of it": some,
    "a gap": with_a_gap,
    "a slice twice": twice,
    "over what is cut": over_what_is_cut,
    "other slices": of_other_slices,
    "two dimensions": of_two_dimensions,
    "seen in between": seen_in_between,
    "written in between": written_in_between,
    "written later": written_later,
    "seen through a view": seen_through_a_view,
    "a slice that is kept": kept,
    "in another type": in_another_type,
}


@pytest.mark.parametrize("name", LEFT)
def test_anything_else_is_what_it_is(name: str) -> None:
    same(sliced(LEFT[name]), *inputs(), rewritten=0)


def test_one_of_them_without_its_gradient() -> None:
    same(sliced(without_gradient), *inputs(grad=True), grad=True, rewritten=0)


def test_scores_that_the_caller_sees() -> None:
    def program(s: Tensor, v: Tensor) -> Tensor:
        compvis(s)
        return s @ v

    same(program, randn(6, 5, 7), randn(6, 7, 8), rewritten=0)


def test_left_it_is_the_graph_it_was() -> None:
    seen: list[str] = []
    wrapped = attn_pass.wrap("eager", choose="fused", on_error="raise", targets=())

    def backend(gm: torch.fx.GraphModule, example: Any) -> Any:
        seen.append(gm.print_readable(print_output=False))
        result = wrapped(gm, example)
        seen.append(gm.print_readable(print_output=False))
        return result

    torch._dynamo.reset()
    given = inputs()
    torch.testing.assert_close(torch.compile(sliced(compvis), backend=backend)(*given), sliced(compvis)(*given))
    assert seen[0] == seen[1]
