"""Parts of masks that are broadcast become buffers of their own, where Inductor compiles the graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from against_eager import qkv, randn
from torch import Tensor
from torch._inductor.inductor_prims import force_stride_order

import attn_pass
from attn_pass.devices.cpu import computed_once
from attn_pass.entries.transaction import compile_rewritten
from attn_pass.options import Runner

BUFFER = force_stride_order
WINDOWS, LENGTH, HEADS = 4, 49, 2


def regions() -> Tensor:
    """As Swin's: a number between positions of different regions of an image, (windows, L, L)."""
    region = (torch.arange(WINDOWS * LENGTH) * 7 // LENGTH % 5).view(WINDOWS, LENGTH).float()
    apart = region[:, None] - region[:, :, None]
    return apart.masked_fill(apart != 0, -3.0)


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * 0.2 + mask).softmax(-1) @ v


def over_images(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    images = q.shape[0] // WINDOWS
    mask = regions()[None, :, None].expand(images, -1, -1, -1, -1).reshape(-1, 1, LENGTH, LENGTH)
    return attended(q, k, v, table + mask)


def written_between(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    part = regions()
    mask = part[None, :, None].expand(q.shape[0] // WINDOWS, -1, -1, -1, -1).reshape(-1, 1, LENGTH, LENGTH)
    part.mul_(2)
    return attended(q, k, v, table + mask) + part.mean()


def copy_written(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """``repeat`` is read as a view, and is a copy."""
    mask = regions().repeat(q.shape[0] // WINDOWS, 1, 1)[:, None]
    mask[..., :9] = -7.0
    return attended(q, k, v, table + mask)


def alias_written(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """A cast that does nothing is its operand."""
    mask = regions().repeat(q.shape[0] // WINDOWS, 1, 1)[:, None]
    same = mask.to(q.dtype)
    same[..., :9] = -7.0
    return attended(q, k, v, table + same) + mask.mean()


def given(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    return attended(q, k, v, table[:1] + table[:, :1])


def of_full_size(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    mask = torch.arange(q.shape[0] * HEADS * LENGTH * LENGTH).view(q.shape[0], HEADS, LENGTH, LENGTH)
    return attended(q, k, v, table + mask % 3)


def operands(images: int = 4) -> tuple[Tensor, ...]:
    return (*qkv(images * WINDOWS, HEADS, LENGTH, LENGTH, dim=16), randn(1, HEADS, LENGTH, LENGTH))


def buffers(fn: Callable[..., Tensor], *inputs: Tensor, runner: Runner = "inductor") -> list[tuple[int, ...]]:
    """The shapes of the buffers that the graph for Inductor has; it is run, and gives eager's result."""
    shapes: list[tuple[int, ...]] = []

    def seen(gm: torch.fx.GraphModule, *_: object) -> torch.fx.GraphModule:
        shapes.extend(tuple(n.meta["example_value"].shape) for n in gm.graph.nodes if n.target is BUFFER)
        return gm

    options = attn_pass.Options(choose="fused", targets=("cpu_kernel",))
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=lambda gm, at: compile_rewritten(gm, at, options, seen, runner))
    assert (compiled(*inputs) - fn(*inputs)).abs().max() < 1e-5
    return shapes


def test_regions_of_windows_are_computed_once_for_all_images() -> None:
    with torch.no_grad():
        assert buffers(over_images, *operands()) == [(WINDOWS, LENGTH, LENGTH)]


def test_beside_a_log_sum_exp() -> None:
    def with_logarithm(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        mask = regions().repeat(q.shape[0] // WINDOWS, 1, 1)[:, None]
        scores = q @ k.mT * 0.2 + (table + mask)
        return scores.softmax(-1) @ v + scores.logsumexp(-1, keepdim=True)

    with torch.no_grad():
        assert buffers(with_logarithm, *operands()) == [(WINDOWS, LENGTH, LENGTH)]


@pytest.mark.parametrize("fn", [written_between, copy_written, alias_written, given, of_full_size])
def test_what_stays_as_it_is(fn: Callable[..., Tensor]) -> None:
    with torch.no_grad():
        assert buffers(fn, *operands()) == []


def test_not_where_inductor_does_not_compile_the_graph() -> None:
    with torch.no_grad():
        assert buffers(over_images, *operands(), runner="other") == []


def test_not_for_few_elements_and_not_for_what_gets_a_gradient() -> None:
    with torch.no_grad():
        assert buffers(over_images, *operands(images=1)) == []

    def learned(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        return attended(q, k, v, table * 2 + q.new_zeros(q.shape[0], 1, 1, 1))

    inputs = operands()
    with torch.no_grad():
        assert buffers(learned, *inputs) == [(1, HEADS, LENGTH, LENGTH)]
    inputs[3].requires_grad_()
    assert buffers(learned, *inputs) == []


def test_compiled_with_inductor() -> None:
    inputs = operands()
    with torch.no_grad():
        compiled = torch.compile(over_images, backend=attn_pass.backend, dynamic=False)(*inputs)
        assert (compiled - over_images(*inputs)).abs().max() < 1e-5


def test_a_failure_leaves_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(computed_once, "_make_buffer", fails)
    with torch.no_grad(), pytest.warns(attn_pass.AttnPassWarning, match="operands of the cpu kernels stay"):
        assert buffers(over_images, *operands()) == []
