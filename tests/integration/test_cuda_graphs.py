"""Graphs rewritten for a GPU, compiled, exported and packaged here: the operators are the CPU stand-ins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from against_eager import qkv, randn
from torch import Tensor, nn
from torchgen.aoti.fallback_ops import inductor_fallback_ops

import attn_pass
from bench.gpu import stand_ins

stand_ins.install()
BF16 = torch.bfloat16


class Mixed(nn.Module):
    """A plain attention, a window over its result, one with padding, and grouped heads over many keys."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, few: Tensor) -> tuple[Tensor, Tensor]:
        out = (q @ k.mT * 0.25).softmax(-1) @ v
        i, j = torch.arange(q.size(-2))[:, None], torch.arange(k.size(-2))
        inside = (j <= i + k.size(-2) - q.size(-2)) & (j >= i + k.size(-2) - q.size(-2) - 3)
        out = (out @ k.mT * 0.25).masked_fill(~inside, float("-inf")).softmax(-1) @ v
        out = (out @ k.mT * 0.25).masked_fill(~keep, torch.finfo(q.dtype).min).softmax(-1) @ v
        return out, (few @ k.repeat_interleave(2, 1).mT * 0.25).softmax(-1) @ v.repeat_interleave(2, 1)


def inputs(kv_len: int = 40) -> tuple[Tensor, ...]:
    q, k, v = qkv(2, 4, 6, kv_len, 16, dtype=BF16)
    keep = torch.arange(kv_len) < torch.tensor([kv_len, 5])[:, None, None, None]
    return q, k, v, keep, randn(2, 8, 2, 16, dtype=BF16, seed=3)


OPTIONS = {"device": "H200", "choose": "first", "targets": ("decode", "flash", "efficient"), "on_error": "raise"}
NO_DECODE = {**OPTIONS, "targets": ("flash", "efficient")}


def close(result: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> None:
    want = Mixed()(*(x.double() if x.is_floating_point() else x for x in values))
    for a, b in zip(result, want, strict=True):
        torch.testing.assert_close(a.double(), b, atol=2e-2, rtol=2e-2)


def names(graph: torch.fx.Graph) -> list[str]:
    return [str(n.target) for n in graph.nodes if n.op == "call_function" and "attention" in str(n.target)]


@pytest.mark.parametrize(("options", "last"), [(OPTIONS, "decode"), (NO_DECODE, "flash")])
def test_inductor_compiles_what_was_emitted(options: dict[str, object], last: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(Mixed(), backend=attn_pass.backend, options=dict(options))
    with torch.no_grad(), attn_pass.record() as report, stand_ins.lowered_by_inductor():
        close(compiled(*inputs()), inputs())
    assert [s.outcome for s in report.sites] == ["rewritten"] * 4 and report.sites[-1].target == last, str(report)


def test_inductor_compiles_the_backward() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(Mixed(), backend=attn_pass.backend, options=dict(NO_DECODE))
    values = [x.requires_grad_() if x.is_floating_point() else x for x in inputs()]
    with attn_pass.record() as report, stand_ins.lowered_by_inductor():
        out, _ = compiled(*values)
    assert [s.target for s in report.sites] == ["flash", "flash", "efficient", "flash"]
    exact = [x.detach().double().requires_grad_() if x.is_floating_point() else x for x in values]
    want = torch.autograd.grad(Mixed()(*exact)[0].sum(), exact[:3])
    for a, b in zip(torch.autograd.grad(out.sum(), values[:3]), want):
        torch.testing.assert_close(a.double(), b, atol=6e-2, rtol=6e-2)


def test_exported_programs_take_any_number_of_keys() -> None:
    keys = torch.export.Dim("keys", min=8, max=4096)
    at = {2: keys}
    exported = torch.export.export(
        Mixed(), inputs(), dynamic_shapes={"q": None, "k": at, "v": at, "keep": {3: keys}, "few": None}
    )
    attn_pass.rewrite(exported, **NO_DECODE)
    targets = names(exported.graph)
    assert any("_flash_attention_forward" in n for n in targets)
    assert any("_efficient_attention" in n for n in targets)
    for length in (40, 41, 9, 333):
        close(exported.module()(*inputs(length)), inputs(length))


EMITTED = [
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._flash_attention_forward.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]


def test_every_operator_has_a_c_function_for_cuda_packages() -> None:
    header = Path(torch.__file__).parent / "include/torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h"
    functions = header.read_text()
    for operator in EMITTED:
        assert str(operator) in inductor_fallback_ops
        assert f"aoti_torch_cuda_{operator.name().removeprefix('aten::')}(" in functions


def test_a_package_takes_any_number_of_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch's own the efficient kernel and ours: the others return numbers, which only their C functions can."""
    for operator in EMITTED:  # they have a C function for CUDA alone: here the dispatcher is asked, as for any other
        monkeypatch.delitem(inductor_fallback_ops, str(operator))
    keys = torch.export.Dim("keys", min=8, max=4096)
    at = {2: keys}
    exported = torch.export.export(
        Mixed(), inputs(), dynamic_shapes={"q": None, "k": at, "v": at, "keep": {3: keys}, "few": None}
    )
    options = {**OPTIONS, "targets": ("efficient", "decode")}
    with attn_pass.record() as report:
        path = attn_pass.aot_compile(exported, package_path=str(tmp_path / "mixed.pt2"), options=options)
    assert {s.target for s in report.sites} == {"efficient"}
    loaded = torch._inductor.aoti_load_package(path)
    with stand_ins.lowered_by_inductor():
        for length in (40, 41, 333):
            close(loaded(*inputs(length)), inputs(length))
