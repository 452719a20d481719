"""What a forward saves, where its strides depend on a number of rows that is known at run time only."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

import attn_pass
from attn_pass.devices.cpu.kernel import build
from attn_pass.entries.saved_values import OPERATOR, SavedValues

B, L, H, D = 8, 64, 2, 16
E = H * D


def half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., D // 2 :], x[..., : D // 2]), -1)


def pairs(x: Tensor) -> Tensor:
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((-b, a), -1).flatten(-2)


class Rotated(nn.Module):
    """An encoder with rotary embeddings, of which a loss sees the first position."""

    def __init__(self, turned: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.turned = {"half": half, "pairs": pairs}[turned]
        self.qkv, self.out, self.norm = nn.Linear(E, 3 * E), nn.Linear(E, E), nn.LayerNorm(E)
        angles = torch.outer(torch.arange(L).float(), 1e4 ** (-torch.arange(0, D, 2) / D))
        self.cos, self.sin = angles.cos().repeat_interleave(2, -1), angles.sin().repeat_interleave(2, -1)

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        for _ in range(2):
            q, k, v = (t.view(B, L, H, D).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            q, k = (t * self.cos + self.turned(t) * self.sin for t in (q, k))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=~pad[:, None, None])
            x = self.norm(x + self.out(y.transpose(1, 2).reshape(B, L, E)))
        return x[:, 0]


@pytest.mark.slow
@pytest.mark.skipif(bool(build.missing()), reason="no compiler for the CPU kernel")
@pytest.mark.parametrize("turned", ["half", "pairs"])
def test_the_backward_reads_what_the_forward_saved(turned: str) -> None:
    """Inductor laid rotated queries and keys out with heads first, and the backward took them for heads last."""
    x, weights = torch.randn(B, L, E), torch.randn(B, E)
    pad = torch.arange(L) >= torch.linspace(10, L, B).long()[:, None]
    gradients = []
    for compiles in (False, True):
        model = Rotated(turned)
        torch._dynamo.reset()
        options = {"choose": "fused", "on_error": "raise"}
        program = torch.compile(model, backend=attn_pass.backend, options=options) if compiles else model
        with attn_pass.record() as report:
            (program(x, pad) * weights).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert "packed" in [region.outcome for region in report.regions]
    for expected, got in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def forward_of(program: object, *inputs: Tensor) -> torch.fx.GraphModule:
    """The forward of a program in training, as Inductor gets it after its own passes."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, _: object) -> object:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    compiled = torch.compile(program, backend=aot_autograd(fw_compiler=keep))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled(*inputs)
    return graphs[0]


def packed(x: Tensor, keep: Tensor) -> Tensor:
    rows = x[keep.nonzero().squeeze(1)][None]  # (1, rows, heads, dim)
    turned = rows.transpose(1, 2).sin()
    return (turned * turned.cos()).sum()


def test_what_is_saved_is_laid_out_as_it_was_traced() -> None:
    x, keep = torch.randn(20, H, D, requires_grad=True), torch.rand(20) < 0.5
    gm = forward_of(packed, x, keep)
    (output,) = gm.graph.find_nodes(op="output")
    output.meta["user_visible_output_idxs"] = [0]
    before = [n.meta["val"].stride() for n in output.args[0] if isinstance(n.meta.get("val"), Tensor)]
    SavedValues()(gm.graph)
    laid_out = gm.graph.find_nodes(op="call_function", target=OPERATOR)
    assert [3, 1, 2, 0] in [node.args[1] for node in laid_out]
    after = [n.meta["val"].stride() for n in output.args[0] if isinstance(n.meta.get("val"), Tensor)]
    assert list(map(str, before)) == list(map(str, after))
    for node in laid_out:  # all that read the value read this one
        assert list(node.args[0].users) == [node]


def test_what_is_known_or_is_a_result_stays() -> None:
    x, keep = torch.randn(20, H, D, requires_grad=True), torch.rand(20) < 0.5
    gm = forward_of(lambda x, keep: (x.transpose(0, 1).sin() * keep[:, None]).sum(), x, keep)
    (output,) = gm.graph.find_nodes(op="output")
    output.meta["user_visible_output_idxs"] = [0]
    SavedValues()(gm.graph)
    assert not gm.graph.find_nodes(op="call_function", target=OPERATOR)
    gm = forward_of(packed, x, keep)
    SavedValues()(gm.graph)  # without a word of which results are the user's, as in inference, all are
    assert not gm.graph.find_nodes(op="call_function", target=OPERATOR)
