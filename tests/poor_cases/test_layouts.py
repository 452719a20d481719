"""Memory layouts: of operands, of masks and of the result. Copies that a program makes for a kernel are removed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import NEG_INF, randn, same
from torch import Tensor
from ways import WAYS, Program, Programs, all_become, call, hand, table, training, ways

import attn_pass

B, H, L, S, D = 2, 2, 5, 7, 16
COPIES = {"contiguous", "clone", "clone.default", "copy_", "to"}


def operands(dim: int = D, value_dim: int | None = None, grad: bool = False) -> list[Tensor]:
    shapes = (B, H, L, dim), (B, H, S, dim), (B, H, S, value_dim or dim)
    return [randn(*shape, grad=grad, seed=n) for n, shape in enumerate(shapes, 1)]


def reported(report: attn_pass.Report, mask: str | None = None) -> None:
    assert [s.target for s in report.sites] == ["sdpa"], str(report)
    assert mask is None or report.sites[0].mask == mask


def rewritten_calls(fn: Program, *inputs: Tensor, **options: Any) -> list[tuple[str, torch.fx.Node]]:
    """The calls of the rewritten graph in order, with their names."""
    calls: list[tuple[str, torch.fx.Node]] = []

    def look(gm: torch.fx.GraphModule, _: Any) -> Any:
        for node in gm.graph.nodes:
            if node.op in ("call_function", "call_method"):
                calls.append((str(getattr(node.target, "__name__", node.target)), node))
        return gm.forward

    torch._dynamo.reset()
    backend = attn_pass.wrap(look, **{"choose": "fused", "on_error": "raise", **options})
    torch.compile(fn, backend=backend)(*inputs)
    return calls


def copies_before_the_call(calls: list[tuple[str, torch.fx.Node]]) -> list[str]:
    names = [name for name, _ in calls]
    return [n for n in names[: names.index("scaled_dot_product_attention")] if n in COPIES]


# ---------------------------------------------------------------- operands


@training
def test_head_dims(grad: bool) -> None:
    dims = (1, 3, 20, 40, 72)
    all_become({f"{dim}, {way}": (WAYS[way], operands(dim, grad=grad)) for dim in dims for way in WAYS}, grad=grad)


WIDTHS = [(16, 1), (16, 17), (3, 16), (1, 20), (20, 1), (40, 72)]


@training
@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
def test_values_of_another_width(strided: bool, grad: bool) -> None:
    programs: Programs = {}
    for widths in WIDTHS:
        inputs = [t.mT.contiguous().mT if strided else t for t in operands(*widths)]
        for way in WAYS:
            programs[f"{widths}, {way}"] = WAYS[way], [t.detach().requires_grad_(grad) for t in inputs]
    all_become(programs, grad=grad)


@training
@ways
@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1, 2)], ids=["q", "k", "v", "all"])
def test_a_last_dimension_that_is_not_dense(way: Program, which: tuple[int, ...], grad: bool) -> None:
    inputs = [t.mT.contiguous().mT if n in which else t for n, t in enumerate(operands())]
    assert any(t.stride(-1) != 1 for t in inputs)
    reported(same(way, *(t.requires_grad_(grad) for t in inputs), grad=grad))
    calls = rewritten_calls(way, *inputs)
    (node,) = (n for name, n in calls if name == "scaled_dot_product_attention")
    assert [t.meta["example_value"].stride(-1) for t in node.args[:3]] == [1, 1, 1]
    assert len(copies_before_the_call(calls)) == len(which)


def heads(t: Tensor) -> Tensor:
    return t.transpose(1, 2)


def copied(t: Tensor) -> Tensor:
    return t.transpose(1, 2).contiguous()


Way = Callable[[Tensor, Tensor, Tensor], Tensor]
COPIED: dict[str, Callable[[Way], Program]] = {
    "operands and result": lambda way: lambda q, k, v: copied(way(copied(q), copied(k), copied(v))),
    "operands": lambda way: lambda q, k, v: way(copied(q), copied(k), copied(v)),
    "operands, result transposed": lambda way: lambda q, k, v: heads(way(copied(q), copied(k), copied(v))),
    "operands, heads merged": lambda way: (
        lambda q, k, v: copied(way(copied(q), copied(k), copied(v))).view(B, L, H * D)
    ),
    "operands, heads merged by reshape": lambda way: (
        lambda q, k, v: heads(way(copied(q), copied(k), copied(v))).reshape(B, L, H * D)
    ),
    "clones": lambda way: lambda q, k, v: way(heads(q).clone(), heads(k).clone(), heads(v).clone()),
    "keys transposed twice": lambda way: lambda q, k, v: way(copied(q), heads(k).mT.contiguous().mT, copied(v)),
}


@training
@ways
@table(COPIED)
def test_operands_are_not_copied_and_the_layout_is_equivalent(
    row: Callable[[Way], Program], way: Way, grad: bool
) -> None:
    program = row(way)
    inputs = [randn(B, n, H, D, grad=grad, seed=s) for s, n in enumerate((L, S, S), 1)]
    reported(same(program, *inputs, grad=grad))
    assert copies_before_the_call(rewritten_calls(program, *(t.detach() for t in inputs))) == []


def test_copies_of_real_size_are_saved_by_their_cost() -> None:
    inputs = [randn(2, 256, 8, 64, seed=s) for s in range(3)]
    program = COPIED["operands and result"](call)
    reported(same(program, *inputs, choose="cheapest"))
    assert copies_before_the_call(rewritten_calls(program, *inputs, choose="cheapest")) == []


def by_third(order: str) -> Callable[[Tensor], tuple[Tensor, ...]]:
    def split(x: Tensor) -> tuple[Tensor, ...]:
        parts = dict(zip(order, x.chunk(3, -1), strict=True))
        return tuple(heads(parts[n].view(B, L, H, D)) for n in "qkv")

    return split


PACKED: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    **{order: by_third(order) for order in ("qkv", "kqv", "vkq", "kvq")},
    "3 h d": lambda x: x.view(B, L, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0),
    "h 3 d": lambda x: x.view(B, L, H, 3 * D).transpose(1, 2).chunk(3, -1),
    "h 3 d, unbound": lambda x: x.view(B, L, H, 3, D).permute(3, 0, 2, 1, 4).unbind(0),
    "copied": lambda x: tuple(t.contiguous() for t in by_third("qkv")(x)),
}


@training
def test_one_projection_is_cut_in_three_without_a_copy(grad: bool) -> None:
    programs: Programs = {}
    for name, row in PACKED.items():
        for spelled, way in WAYS.items():
            inputs = (randn(B, L, 32, grad=grad), (randn(32, 3 * H * D) * 0.2).requires_grad_(grad))
            program = lambda x, w, row=row, way=way: heads(way(*row(x @ w))).reshape(B, L, H * D)
            programs[f"{name}, {spelled}"] = program, inputs
    all_become(programs, grad=grad, twice=8.0)
    for name, (program, inputs) in programs.items() if not grad else ():
        assert copies_before_the_call(rewritten_calls(program, *inputs)) == [], name


SCALES: dict[str, tuple[Program, float]] = {
    "on both operands and the scores": (lambda q, k, v: torch.softmax((q * 0.5) @ (k / 2).mT * 0.3 * 2, -1) @ v, 0.15),
    "around a call": (lambda q, k, v: F.scaled_dot_product_attention(q * 2, k * 0.25, v, scale=0.5), 0.25),
    "root by root": (lambda q, k, v: torch.softmax((q * D**-0.25) @ (k * D**-0.25).mT, -1) @ v, 0.25),
    "negative twice": (lambda q, k, v: torch.softmax(-((q * -0.5) @ k.mT), -1) @ v, 0.5),
}


@training
@table(SCALES)
def test_scales_of_several_places_are_one(row: tuple[Program, float], grad: bool) -> None:
    program, scale = row
    reported(same(program, *operands(grad=grad), grad=grad))
    ((_, node),) = ((n, c) for n, c in rewritten_calls(program, *operands()) if "attention" in n)
    assert node.kwargs["scale"] == pytest.approx(scale)
    assert not any("mul" in n or "div" in n or "neg" in n for n, _ in rewritten_calls(program, *operands()))


# ---------------------------------------------------------------- masks


def kept(*shape: int) -> Tensor:
    mask = randn(*shape, seed=9) > -0.3
    mask[..., :3] = True
    return mask


def transposed_keep() -> Tensor:
    mask = randn(B, H, S, L, seed=9) > -0.3
    mask[:, :, 0] = True
    return mask.mT


ROW = torch.tensor([2])
GIVEN: dict[str, Tensor] = {
    "transposed": randn(B, H, S, L, seed=9).mT,
    "transposed condition": transposed_keep(),
    "misaligned": randn(B, H, L, S + 1, seed=9)[..., 1:],
    "misaligned condition": kept(B, H, L, S + 1)[..., 1:],
    "every second": randn(B, H, 9, 16, seed=4)[:, :, :L, 1:15:2],
    "every second condition": kept(B, H, 9, 16)[:, :, :L, 1:15:2],
    "one row for all": randn(1, 1, 1, S, seed=3).expand(B, H, L, S),
    "one condition for all": kept(1, 1, 1, S).expand(B, H, L, S),
    "one column for all": randn(B, 1, L, 1, seed=3).expand(B, H, L, S),
    "everything kept": torch.ones(L, S, dtype=torch.bool),
    "nothing added": torch.zeros(L, S),
    "a fully masked row": torch.ones(L, S, dtype=torch.bool).index_fill(0, ROW, False),
    "a row of minus infinity": torch.zeros(L, S).index_fill(0, ROW, NEG_INF),
    "nothing kept": torch.zeros(L, S, dtype=torch.bool),
    "minus infinity everywhere": torch.full((L, S), NEG_INF),
}


@training
def test_masks_of_any_layout_and_value(grad: bool) -> None:
    programs: Programs = {}
    for name, mask in GIVEN.items():
        for way in WAYS:
            programs[f"{name}, {way}"] = WAYS[way], (*operands(grad=grad), mask)
    all_become(programs, grad=grad, assume_nonempty_rows=False)


CHANGED: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "sliced": (lambda m: m[..., 1:], kept(B, H, L, S + 1)),
    "a bias sliced": (lambda m: m[..., 1:], randn(B, H, L, S + 1)),
    "transposed": (lambda m: m.mT, randn(B, H, S, L)),
    "every second": (lambda m: m[:, :, :L, 1:15:2], kept(B, H, 9, 16)),
    "expanded": (lambda m: m.expand(B, H, L, S), kept(B, 1, 1, S)),
    "turned round": (lambda m: m.flip(-1), randn(B, H, L, S)),
    "split": (lambda m: m.view(B, H, L, S), randn(B * H, L, S)),
}


@training
def test_masks_viewed_by_the_program(grad: bool) -> None:
    programs: Programs = {}
    for name, (view, mask) in CHANGED.items():
        for spelled, way in WAYS.items():
            program = lambda q, k, v, m, way=way, view=view: way(q, k, v, view(m))
            programs[f"{name}, {spelled}"] = program, (*operands(grad=grad), mask)
    all_become(programs, grad=grad)


SEEN_BY_NO_KEY: dict[str, Any] = {
    "everything kept": lambda: torch.ones(L, S, dtype=torch.bool),
    "nothing added": lambda: torch.zeros(L, S),
    "a number for each query": lambda: torch.arange(L)[:, None] * 0.5,
    "a number for all": lambda: torch.full((L, S), -100.0),
    "more keys than there are": lambda: (torch.arange(S) < 9)[None],
}
MASKS_A_ROW: dict[str, Any] = {
    "by a condition": lambda: (torch.arange(L)[:, None] != 2).expand(L, S),
    "by minus infinity": lambda: torch.where(torch.arange(L)[:, None] == 2, NEG_INF, 0.0).expand(L, S),
}


@training
@ways
@table(SEEN_BY_NO_KEY)
def test_a_constant_that_cancels_in_a_softmax_is_not_a_mask(
    row: Callable[[], Tensor], way: Program, grad: bool
) -> None:
    reported(same(lambda q, k, v: way(q, k, v, row()), *operands(grad=grad), grad=grad), "none")


def test_a_floating_number_for_each_query_is_not_a_mask() -> None:
    reported(same(lambda q, k, v: hand(q, k, v, torch.arange(float(L))[:, None]), *operands()), "none")


@training
@ways
@table(MASKS_A_ROW)
def test_a_constant_that_masks_a_row_is_a_mask(row: Callable[[], Tensor], way: Program, grad: bool) -> None:
    reported(same(lambda q, k, v: way(q, k, v, row()), *operands(grad=grad), grad=grad), "dense")
