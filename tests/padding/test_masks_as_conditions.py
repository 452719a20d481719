"""Added masks that the CPU kernel takes as keep-conditions: one byte of a key, and no tensor over the queries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import attn_pass
from attn_pass.devices.cpu.kernel import build

pytestmark = pytest.mark.skipif(bool(build.missing()), reason="no compiler for the CPU kernel")
B, H, L, D = 3, 2, 20, 8


def kernel_arguments(fill: float, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Any], Tensor, Tensor]:
    """What the kernel is called with for a mask of 0 and ``fill``, its result, and eager's."""

    def program(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        added = torch.where(mask.bool()[:, None, None, :].expand(B, 1, L, L), 0.0, fill).to(q.dtype)
        return (q @ k.transpose(2, 3) * 0.3 + added).softmax(-1) @ v

    graphs: list[GraphModule] = []

    def keep_graph(gm: GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    backend = attn_pass.wrap(keep_graph, choose="fused", targets=("cpu_kernel",), on_error="raise")
    q, k, v = (torch.randn(B, H, L, D, dtype=dtype) for _ in range(3))
    mask = (torch.arange(L) < torch.tensor([20, 0, 7])[:, None]).long()
    with torch.no_grad():
        result, wanted = torch.compile(program, backend=backend)(q, k, v, mask), program(q, k, v, mask)
    target = torch.ops.attn_pass.attention.default
    (call,) = graphs[0].graph.find_nodes(op="call_function", target=target)
    return dict(call.kwargs), result, wanted


@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, -1e30])
def test_a_mask_that_absorbs_every_score_is_a_condition(fill: float) -> None:
    """The second sequence is fully masked: its rows average all values, as in eager."""
    given, result, wanted = kernel_arguments(fill)
    assert "bias" not in given and given["fully_masked"] == "mean"
    assert tuple(given["keep"].meta["example_value"].shape) == (B, 1, 1, L)
    torch.testing.assert_close(result, wanted)


def test_a_number_that_absorbs_not_every_score_stays_added() -> None:
    """-1e4 leaves something of a score: a row whose keys all have it is the softmax of its scores."""
    given, result, wanted = kernel_arguments(-1e4)
    assert "bias" in given and "keep" not in given
    torch.testing.assert_close(result, wanted, rtol=1e-3, atol=1e-3)


def test_bfloat16() -> None:
    given, result, wanted = kernel_arguments(torch.finfo(torch.bfloat16).min, torch.bfloat16)
    assert "keep" in given
    torch.testing.assert_close(result, wanted, rtol=0.03, atol=0.03)
