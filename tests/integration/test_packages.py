"""AOTInductor packages, compiled for real: structured masks for any length in one, arguments named as builtins are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from against_eager import FLEX_ON_CPU, qkv
from gym_programs import GYM, program
from torch import Tensor

import attn_pass

NAMES = ("causal", "alibi", "soft cap", "sliding window", "prefix", "documents", "chunks", "decay")


class Forms(torch.nn.Module):
    """Every form on the same operands, as many as there are names."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        return torch.stack([program(GYM[name])(q, k, v, ids) for name in NAMES])


@pytest.mark.skipif(not FLEX_ON_CPU, reason="FlexAttention on the CPU needs torch 2.13")
def test_one_package_for_every_length(tmp_path: Path) -> None:
    length = torch.export.Dim("length", min=2, max=512)
    model, inputs = Forms(), (*qkv(1, 2, 96, 96, dim=32), torch.arange(96)[None] // 30)
    shapes = ({2: length}, {2: length}, {2: length}, {1: length})
    targets = tuple({GYM[name].target for name in NAMES})  # by torch's own kernels
    with torch.no_grad(), attn_pass.record() as report, torch._inductor.config.patch(force_disable_caches=True):
        package = attn_pass.aot_compile(
            model,
            inputs,
            dynamic_shapes=shapes,
            package_path=str(tmp_path / "forms.pt2"),
            options={"choose": "fused", "on_error": "raise", "targets": targets},
        )
        assert [s.target for s in report.sites] == [GYM[n].target for n in NAMES]
        run = torch._inductor.aoti_load_package(package)
        for n in (96, 2, 33, 257):
            given = (*qkv(1, 2, n, n, dim=32), torch.arange(n)[None] // 30)
            wanted = model(*(t.double() if t.is_floating_point() else t for t in given))
            wrong = {
                x: e for x, e in zip(NAMES, (run(*given).double() - wanted).abs().amax((1, 2, 3, 4))) if not e < 2e-5
            }
            assert not wrong, n


class Builtins(torch.nn.Module):
    """As `nn.Sequential` and `nn.Linear`, its argument is called ``input``."""

    def forward(self, input: Tensor, filter: Tensor) -> Tensor:
        return torch.softmax(input @ filter.mT, -1) @ filter


def test_arguments_may_be_called_as_builtins_are(tmp_path: Path) -> None:
    inputs = (torch.randn(2, 64, 32), torch.randn(2, 48, 32))
    path = attn_pass.aot_compile(Builtins(), inputs, package_path=tmp_path / "model.pt2", options={"choose": "fused"})
    assert len(attn_pass.package_report(path).rewritten) == 1
    torch.testing.assert_close(torch._inductor.aoti_load_package(path)(*inputs), Builtins()(*inputs))
