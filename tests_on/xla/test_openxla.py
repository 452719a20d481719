"""torch_xla, on its CPU device: rewritten graphs through openxla, forward and backward, and exported to StableHLO.

`make test-xla` runs it, in an environment with torch 2.9 and torch_xla 2.9. The kernels are interpreted. What needs a
TPU is skipped with the words "not verified on hardware".
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

torch_xla = pytest.importorskip("torch_xla")

from torch_xla import stablehlo  # noqa: E402
from torch_xla.core import xla_builder  # noqa: E402

import attn_pass  # noqa: E402
from attn_pass.devices.registry import device_for  # noqa: E402
from attn_pass.devices.tpu import operators  # noqa: E402
from attn_pass.devices.tpu import torch_xla as adapter  # noqa: E402
from attn_pass.devices.tpu.kernels import Blocks, PallasCall  # noqa: E402

torch_xla.device()  # before the first backward, which counts the devices there are


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).softmax(-1) @ v


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = torch.arange(q.size(-2), device=q.device)[:, None], torch.arange(k.size(-2), device=q.device)
    return (q @ k.mT * 0.3).masked_fill(~((j <= i) & (j >= i - 40)), float("-inf")).softmax(-1) @ v


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], is_causal=True, enable_gqa=True)


def biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + q[:, :1, :, :1] * k[:, :1, None, :, 0]).softmax(-1) @ v


PROGRAMS = {
    "causal": (causal, 256, "pallas_flash"),
    "by hand, an odd length": (by_hand, 77, "pallas_flash"),
    "window": (window, 200, "pallas_splash"),
    "grouped": (grouped, 130, "pallas_splash"),
    "biased": (biased, 60, "pallas_flash"),
}


class Model(nn.Module):
    """Two linear layers around an attention of two heads."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.qkv, self.out, self.attend = nn.Linear(64, 96), nn.Linear(32, 64), attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


def compiled(model: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    options = {"device": "v5e", "choose": "fused", "on_error": "raise", **options}
    return torch.compile(model, backend=attn_pass.wrap("openxla", **options))


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_forward_and_backward(name: str) -> None:
    attend, length, target = PROGRAMS[name]
    torch.manual_seed(len(name))
    model, x = Model(attend), torch.randn(2, length, 64, requires_grad=True)
    exact = copy.deepcopy(model).double()
    wide = x.detach().double().requires_grad_()
    exact(wide).square().sum().backward()
    moved, there = copy.deepcopy(model).to("xla"), x.detach().to("xla").requires_grad_()
    with attn_pass.record() as report:
        out = compiled(moved, targets=(target,))(there)
        out.square().sum().backward()
    torch_xla.sync()
    assert [s.target for s in report.sites] == [target]
    torch.testing.assert_close(out.detach().cpu().double(), exact(wide).detach(), atol=2e-5, rtol=0)
    torch.testing.assert_close(there.grad.cpu().double(), wide.grad, atol=1e-4, rtol=1e-4)
    for (where, ours), (_, theirs) in zip(moved.named_parameters(), exact.named_parameters()):
        assert ours.grad is not None, where
        torch.testing.assert_close(ours.grad.cpu().double(), theirs.grad, atol=1e-3, rtol=1e-4)


def test_a_second_call_traces_no_kernel_again() -> None:
    model, x = Model(causal).to("xla"), torch.randn(2, 256, 64).to("xla")
    run = compiled(model)
    with torch.no_grad():
        run(x)
        torch_xla.sync()
        before = len(xla_builder._JAX_TO_XLA_COMPUTATION_CACHE)
        for _ in range(3):
            run(x)
            torch_xla.sync()
    assert len(xla_builder._JAX_TO_XLA_COMPUTATION_CACHE) == before


def test_the_operator_on_an_xla_tensor_is_the_operator_elsewhere() -> None:
    q, k, v = (torch.randn(2, 4, n, 16, generator=torch.Generator().manual_seed(n)) for n in (40, 300, 300))
    kept = torch.arange(300) < torch.tensor([[300], [123]])
    call = PallasCall("flash", 0.7, Blocks(40, 128))
    wanted = operators.elsewhere(call, False, (q, k, v), None, kept)
    found = operators._run(call, False, tuple(x.to("xla") for x in (q, k, v)), None, kept.to("xla"))
    torch.testing.assert_close(found.cpu(), wanted, atol=2e-5, rtol=0)


def test_the_cpu_device_is_given_no_kernel_unless_a_tpu_is_asked_for() -> None:
    assert device_for(torch.device("xla")).kernels == () and adapter.hardware() == "CPU"
    model, x = Model(causal).to("xla"), torch.randn(2, 256, 64).to("xla")
    with attn_pass.record() as report, torch.no_grad():
        compiled(model, device=None)(x)
    (site,) = report.sites
    assert site.outcome == "left" and "no Pallas TPU kernel for xla" in site.refusals["pallas_flash"]


# ---------------------------------------------------------------- export


def exported(x: Tensor) -> tuple[nn.Module, Any]:
    model = Model(causal).eval()
    program = torch.export.export(model, (x,))
    report = attn_pass.rewrite(program, device="v5e", choose="fused", on_error="raise")
    assert report.sites[0].target == "pallas_flash"
    return model, program


def test_stablehlo_of_a_rewritten_program_runs() -> None:
    x = torch.randn(2, 256, 64)
    model, program = exported(x)
    out = stablehlo.exported_program_to_stablehlo(program)(x)
    torch.testing.assert_close(torch.as_tensor(out).cpu(), model(x).detach(), atol=1e-5, rtol=0)


def test_stablehlo_for_a_tpu_keeps_the_kernel() -> None:
    _, program = exported(torch.randn(2, 256, 64))
    with adapter.lowered_for_tpu():
        text = stablehlo.exported_program_to_stablehlo(program).get_stablehlo_text()
    assert text.count("tpu_custom_call") == 1 and "while" not in text


# ---------------------------------------------------------------- why torch_xla's own flash attention is not used


def test_torch_xla_s_own_operator_pads_keys_without_masking_them() -> None:
    from torch_xla.experimental import custom_kernel

    padded = custom_kernel._pad_to_block_size(torch.randn(1, 1, 640, 64), 512, 2, padding_minus_inf=False)
    assert padded[0].shape[2] == 1024 and not padded[0][:, :, 640:].any()


def test_bare_call_jax_has_no_gradient() -> None:
    q = torch.randn(1, 1, 8, 8).to("xla").requires_grad_()
    assert not xla_builder.call_jax(_double, (q,)).requires_grad


def _double(x: Any) -> Any:
    return 2 * x


@pytest.mark.skipif("adapter.hardware() != 'TPU'", reason="not verified on hardware")
def test_on_a_tpu_it_is_what_it_is_interpreted() -> None:
    model, x = Model(causal), torch.randn(2, 256, 64)
    with torch.no_grad():
        out = compiled(copy.deepcopy(model).to("xla"), device=None)(x.to("xla"))
        torch.testing.assert_close(out.cpu(), model(x), atol=1e-2, rtol=1e-2)
