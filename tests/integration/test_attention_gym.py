"""The masks and score functions of attention-gym, written by hand in eager PyTorch: the decision for each."""

from __future__ import annotations

import pytest
import torch
from against_eager import FLEX_ON_CPU, qkv, same
from gym_programs import GYM, IDS, N, program
from torch import Tensor

NAMES = [name for name in GYM if FLEX_ON_CPU or GYM[name].target != "flex"]


@pytest.mark.parametrize("name", NAMES)
def test_modification(name: str) -> None:
    wanted = GYM[name]
    report = same(program(wanted), *qkv(2, 2, N, N), IDS, rewritten=1, choose="fused", reference=False)
    (site,) = report.sites
    assert site.target == wanted.target
    assert not wanted.mask or site.mask == wanted.mask
    assert bool(site.score_mod) == (wanted.target == "flex")


@pytest.mark.parametrize("name", NAMES)
def test_modification_exported_for_any_batch(name: str) -> None:
    """The same through torch.export, the batch unknown."""
    import attn_pass

    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
            return program(GYM[name])(q, k, v, ids)

    inputs = (*qkv(2, 2, N, N), IDS)
    batch = torch.export.Dim("batch", min=1, max=8)
    with torch.no_grad():
        exported = torch.export.export(Model(), inputs, dynamic_shapes=({0: batch},) * 4)
        report = attn_pass.rewrite(exported, choose="fused", on_error="raise")
        assert [s.outcome for s in report.sites] == ["rewritten"]
        more = tuple(torch.cat([x, x, x[:1]]) for x in inputs)
        torch.testing.assert_close(exported.module()(*more), Model()(*more), atol=1e-5, rtol=1e-5)
