"""torch_tpu, as far as it goes without a device: operators are made, traced, and lowered for a TPU. Nothing is run.

Skipped where torch_tpu is not installed: `pip install torch_tpu` in the environment of `make test-tpu-aot`.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("torch_tpu")

from attn_pass.devices.tpu import torch_tpu
from attn_pass.devices.tpu.kernels import Blocks, PallasCall


@pytest.mark.parametrize("kind", ["flash", "splash"])
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_an_operator_is_made_and_traced(kind: str, back: bool, masked: bool) -> None:
    blocks = Blocks(128, 128, 128, 128) if back else Blocks(128, 128)
    operator = torch_tpu.operator(PallasCall(kind, 0.3, blocks, upper=0), back, kind == "flash", masked)
    with FakeTensorMode():
        q = torch.empty(1, 2, 256, 64, device="meta")
        given = [q] * (4 if back else 3)
        given += [torch.empty(1, 1, 256, 256, device="meta")] * (kind == "flash")
        given += [torch.empty(1, 256, dtype=torch.bool, device="meta")] * masked
        found = operator(*given)
    shapes = [tuple(x.shape) for x in (found if back else [found])]
    assert shapes == [(1, 2, 256, 64)] * (3 if back else 1) + [(1, 1, 256, 256)] * (back and kind == "flash")


def test_an_operator_is_made_once() -> None:
    call = PallasCall("flash", 0.3, Blocks(128, 128))
    assert torch_tpu.operator(call, False, False, False) is torch_tpu.operator(call, False, False, False)


@pytest.mark.skipif("not torch.accelerator.is_available()", reason="not verified on hardware")
def test_on_a_tpu_it_computes_attention() -> None:
    q = torch.randn(1, 2, 256, 64, device="tpu")
    found = torch_tpu.run(PallasCall("flash", 0.125, Blocks(128, 128)), False, (q, q, q), None, None)
    wanted = torch.nn.functional.scaled_dot_product_attention(*[q.cpu()] * 3)
    torch.testing.assert_close(found.cpu(), wanted, atol=1e-2, rtol=1e-2)
