"""A target emits the plan of its offer: with another plan in the offer it emits that one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import npu_stand_in
import pytest
import torch
from against_eager import FLEX_ON_CPU, NEG_INF, qkv, randn, same
from torch import Tensor

import attn_pass
from attn_pass.devices.cpu.cpu_kernel import Bounds, CpuKernel
from attn_pass.devices.cuda.decode import Decode, DecodePlan
from attn_pass.devices.npu.layouts import LAYOUTS
from attn_pass.devices.npu.masks import MaskPlan
from attn_pass.devices.npu.operators import InferAttention
from attn_pass.targets.base import Offer
from attn_pass.targets.flex.flex import Flex
from attn_pass.targets.local import Blocks, Local
from attn_pass.targets.masks import MaskForm
from attn_pass.targets.recompute import Recompute
from attn_pass.targets.sdpa import Sdpa

npu_stand_in.install()
N = 150


def near(length: int) -> Tensor:
    i, j = torch.arange(length)[:, None], torch.arange(length)[None]
    return (j <= i) & (i - j < 9)


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).masked_fill(~near(q.size(-2)), NEG_INF).softmax(-1) @ v


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).softmax(-1) @ v


def slopes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = torch.arange(q.size(-2))[:, None], torch.arange(k.size(-2))[None]
    return (q @ k.mT * 0.3 + torch.tensor([0.05, 0.02])[:, None, None] * (j - i)).softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = torch.arange(q.size(-2))[:, None] + k.size(-2) - q.size(-2), torch.arange(k.size(-2))
    return (q @ k.mT * 0.3).masked_fill(j > i, NEG_INF).softmax(-1) @ v


def learned(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + bias).softmax(-1) @ v


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (5 * torch.tanh(q @ k.mT * 0.06)).masked_fill(~near(q.size(-2)), NEG_INF).softmax(-1) @ v


def with_rows(plan: Any, rows: int) -> Any:
    blocks = plan.blocks
    return replace(plan, blocks=Blocks(rows, blocks.first, rows + blocks.width - blocks.rows))


def as_heads_first(plan: Any) -> Any:
    return replace(plan, layout=LAYOUTS[0], result_layout=LAYOUTS[0])


@dataclass(frozen=True)
class Change:
    """A target, a program it takes, another plan for it, and a word of the graph that comes or goes with that plan."""

    target: type[Any]
    program: Callable[..., Tensor]
    change: Callable[[Any], Any]
    word: str
    comes: bool = True
    inputs: tuple[Tensor, ...] = qkv(2, 2, N, N)
    device: str = "cpu"


def as_a_tensor(plan: Any) -> Any:
    """The CPU kernel's plan with its bounds as a condition."""
    return replace(plan, bounds=Bounds(rest=plan.bounds.rest))


LAST = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(2, 2, N, N, dtype=torch.bfloat16))
CHANGES = {
    "local, larger blocks": Change(Local, window, lambda p: with_rows(p, 128), "128"),
    "local, smaller blocks": Change(Local, window, lambda p: with_rows(p, 16), ", 24, 16]"),
    "sdpa, wider operands": Change(Sdpa, plain, lambda p: replace(p, head_dim=24), "constant_pad_nd"),
    "recompute, wider operands": Change(Recompute, learned, lambda p: replace(p, head_dim=24), "constant_pad_nd",
                                        inputs=(*qkv(2, 2, N, N), randn(1, 1, N, N, seed=8).requires_grad_())),
    "sdpa, no distances": Change(Sdpa, slopes, lambda p: replace(p, by_distance=None), "flip", comes=False),
    "sdpa, rows repaired": Change(Sdpa, learned, lambda p: replace(p, mask=MaskForm("additive", True)), "amin",
                                  inputs=(*qkv(2, 2, N, N), randn(1, 1, N, N, seed=8))),
    "flex, larger blocks": Change(Flex, capped, lambda p: replace(p, blocks=(32, 512)), "512"),
    "flex in Triton, a tile": Change(Flex, capped, lambda p: replace(p, options=(("BLOCK_M", 32),)), "'BLOCK_M': 32",
                                     device="H200"),
    "decode, a tensor": Change(Decode, causal, lambda p: DecodePlan(mask="boolean"), "None, 0.3, True", comes=False,
                               inputs=qkv(2, 2, 4, 40, dtype=torch.bfloat16), device="H200"),
    "npu, heads first": Change(InferAttention, window, as_heads_first,
                               "'BSND'", comes=False, inputs=LAST, device="Ascend910B"),
    "npu, a tensor": Change(InferAttention, window, lambda p: replace(p, mask=MaskPlan("boolean", inner_precise=2)),
                            "sparse_mode = 4", comes=False, inputs=LAST, device="Ascend910B"),
}  # fmt: skip


def offered(monkeypatch: pytest.MonkeyPatch, target: type[Any], change: Callable[[Any], Any]) -> None:
    """Lets the target offer what it offers with another plan."""
    consider = target.consider

    def other(self: Any, *args: Any) -> Any:
        answer = consider(self, *args)
        return replace(answer, plan=change(answer.plan)) if isinstance(answer, Offer) else answer

    monkeypatch.setattr(target, "consider", other)


def emitted(program: Callable[..., Tensor], inputs: tuple[Tensor, ...], **options: Any) -> str:
    """The graph that Inductor would get."""
    seen: list[str] = []

    def note(gm: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        seen.append(gm.code)
        return gm.forward

    torch._dynamo.reset()
    with torch.set_grad_enabled(any(x.requires_grad for x in inputs)):
        torch.compile(program, backend=attn_pass.wrap(note, choose="fused", on_error="raise", **options))(*inputs)
    return seen[0]


@pytest.mark.parametrize("name", CHANGES)
def test_another_plan_is_emitted_and_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CHANGES[name]
    if case.target is Flex and case.device == "cpu" and not FLEX_ON_CPU:
        pytest.skip("FlexAttention on the CPU needs torch 2.13 or newer")
    if case.target is Decode:
        pytest.importorskip("triton")
    inputs = case.inputs
    options = {"targets": (case.target.name,), "poor_cases": (), "device": case.device}
    assert (case.word in emitted(case.program, inputs, **options)) is not case.comes
    offered(monkeypatch, case.target, case.change)
    assert (case.word in emitted(case.program, inputs, **options)) is case.comes
    with torch.set_grad_enabled(any(x.requires_grad for x in inputs)):
        same(case.program, *inputs, rewritten=1, **options)


def test_the_cpu_kernel_keeps_what_the_plan_says_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan without bounds is attention over every key: nobody derives them again."""
    inputs = qkv(2, 2, N, N)
    options = {"targets": ("cpu_kernel",)}
    assert "after" in emitted(window, inputs, **options)
    offered(monkeypatch, CpuKernel, as_a_tensor)
    assert "after" not in emitted(window, inputs, **options)
