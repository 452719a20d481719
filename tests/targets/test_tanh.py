"""The hyperbolic tangent in pointwise operators, against float64."""

from __future__ import annotations

import torch

from attn_pass.targets.tanh import tanh


def _tanh(x: torch.Tensor) -> torch.Tensor:
    result = tanh(lambda operator, *args: operator(*args), x)
    assert isinstance(result, torch.Tensor) and result.dtype == x.dtype
    return result


def test_it_is_right_to_float32_rounding_everywhere() -> None:
    sizes = torch.logspace(-37, 2, 200_001, dtype=torch.float64).float()
    around = torch.linspace(0.6, 0.65, 20_001)
    x = torch.cat([sizes, -sizes, around, -around, torch.randn(100_000)])
    want = torch.tanh(x.double())
    assert float(((_tanh(x).double() - want) / want).abs().max()) < 1.5e-7


def test_its_limits_are_torchs() -> None:
    inf = float("inf")
    x = torch.tensor([0.0, inf, -inf, float("nan"), 1e30, -1e30, 1e-45])
    torch.testing.assert_close(_tanh(x), torch.tanh(x), rtol=0, atol=0, equal_nan=True)
