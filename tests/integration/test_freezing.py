"""Inductor's `freezing`, which folds weights into what it compiles: the pass decides and computes as without it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import attn_pass


class Windows(nn.Module):
    """Projections, a relative bias that is gathered from a table, and shifted windows, whose mask is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.into, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.table = nn.Parameter(torch.randn(31, 2, generator=generator))
        self.register_buffer("places", torch.arange(16)[:, None] - torch.arange(16) + 15)
        self.register_buffer("shifted", torch.where((torch.arange(16) < 8)[:, None] == (torch.arange(16) < 8), 0, -100))
        for parameter in self.parameters():
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.into(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        bias = self.table[self.places].permute(2, 0, 1)
        scores = q @ k.mT * 0.25 + bias + self.shifted.to(x.dtype)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_model(dtype: torch.dtype) -> None:
    model = Windows().eval().to(dtype)
    x = torch.randn(3, 16, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    settings = {"choose": "fused", "on_error": "raise"}
    frozen = torch._inductor.config.patch(freezing=True)  # Dynamo asks for it, so an option of one compile does nothing
    with torch.no_grad(), frozen, attn_pass.record() as report:
        expected, exact = model(x), copy.deepcopy(model).double()(x.double())
        torch._dynamo.reset()
        got, (code,) = run_and_get_code(torch.compile(model, backend=attn_pass.backend, options=settings), x)
    assert [site.outcome for site in report.sites] == ["rewritten"], report
    assert "_frozen_param" in code, "the weights are folded"
    if dtype == torch.float32:
        assert "mkl._mkl_linear" in code, "the weights are packed"
    elif torch.ops.mkldnn._is_mkldnn_bf16_supported():  # oneDNN asks for AVX-512
        assert "mkldnn._linear_pointwise" in code, "the weights are packed"
    error = (got.double() - exact).abs().max()
    assert error <= 2 * (expected.double() - exact).abs().max() + 1e-6 * exact.abs().max()
    assert model.into.weight.shape == (96, 32), "freezing without discarding leaves the model as it was"
