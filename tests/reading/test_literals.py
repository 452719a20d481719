"""Numbers that a program writes as tensors, which torch.export turns into inputs of the graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from against_eager import qkv, randn
from torch import Tensor, nn

import attn_pass

KEEP = randn(2, 1, 8, 8, seed=5) > -0.3


class Program(nn.Module):
    """A function as a module, which torch.export wants."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


def filled(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    fill = torch.tensor(torch.finfo(torch.float32).min)
    return torch.softmax(torch.where(keep, q @ k.mT, fill), -1) @ v


def compared(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    weights = torch.softmax((q @ k.mT).masked_fill(keep == torch.tensor(False), float("-inf")), -1)
    return weights.masked_fill(keep == torch.tensor(False), 0.0) @ v


def written_later(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    fill = torch.tensor(torch.finfo(torch.float32).min)
    fill.add_(-fill)
    return torch.softmax(torch.where(keep, q @ k.mT, fill), -1) @ v


@pytest.mark.parametrize("decompose", [False, True], ids=["exported", "decomposed"])
@pytest.mark.parametrize("function", [filled, compared, written_later])
def test_exported(function: Callable[..., Tensor], decompose: bool) -> None:
    inputs = (*qkv(), KEEP)
    program = torch.export.export(Program(function), inputs)
    if decompose:
        program = program.run_decompositions()
    report = attn_pass.rewrite(program, choose="fused", targets=("sdpa",))
    assert [s.outcome for s in report.sites] == ["left" if function is written_later else "rewritten"]
    torch.testing.assert_close(program.module()(*inputs), function(*inputs), atol=1e-5, rtol=1e-5)


def test_a_literal_of_several_elements_is_never_written() -> None:
    """Torch.export copies and detaches it in place; the inputs are other memory."""
    program = Program(lambda q, k, v: torch.softmax(q @ k.mT * torch.tensor([0.1, 0.2])[:, None, None], -1) @ v)
    inputs = qkv(2, 2, 8, 8)
    with torch.no_grad():
        exported = torch.export.export(program, inputs)
        report = attn_pass.rewrite(exported, choose="fused", on_error="raise")
        assert [s.outcome for s in report.sites] == ["rewritten"]
        torch.testing.assert_close(exported.module()(*inputs), program(*inputs), atol=1e-5, rtol=1e-5)
