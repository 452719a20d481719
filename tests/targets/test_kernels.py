"""The reasons that the rules of torch's fused kernels give, for a device that need not be present."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import randn
from torch import Tensor

import attn_pass

HALF, SINGLE = torch.bfloat16, torch.float32


def attend(q: Tensor, k: Tensor, v: Tensor, *bias: Tensor, dropout: float = 0.0) -> Tensor:
    scores = q @ k.mT * 0.25
    for term in bias:
        scores = scores + term
    return F.dropout(torch.softmax(scores, -1), dropout) @ v


def site(
    dtype: torch.dtype, *bias: Tensor, dim: int = 16, width: int = 16, dropout: float = 0.0, **options: Any
) -> Any:
    """The report of one site with these operands, for CUDA unless told otherwise."""

    def program(*inputs: Tensor) -> Tensor:
        return attend(*inputs, dropout=dropout)

    q, k, v = (randn(2, 2, 8, n, seed=s, grad=True, dtype=dtype) for s, n in enumerate((dim, dim, width)))
    options = {"device": "cuda", "choose": "fused", **options}
    return attn_pass.explain(program, q, k, v, *bias, attn_pass_options=options).sites[0]


BIAS = randn(1, 2, 8, 8, dtype=HALF)
ROWS: dict[str, tuple[bool, dict[str, Any], str]] = {
    "half": (True, {"dtype": HALF}, ""),
    "float32, dim of 16": (True, {"dtype": SINGLE}, ""),
    "float32, dim of 12": (True, {"dtype": SINGLE, "dim": 12, "width": 12}, ""),
    "float32, dim of 10": (True, {"dtype": SINGLE, "dim": 10, "width": 10}, ""),
    "float32, dim of 10, by torch": (
        False,
        {"dtype": SINGLE, "dim": 10, "width": 10, "targets": ("sdpa",)},
        "pads no head dims",
    ),
    "half, dim of 10": (True, {"dtype": HALF, "dim": 10, "width": 10}, ""),
    "half, dim of 256": (True, {"dtype": HALF, "dim": 256, "width": 256}, ""),
    "half, dim of 264": (True, {"dtype": HALF, "dim": 264, "width": 264}, ""),
    "half, dim of 260": (True, {"dtype": HALF, "dim": 260, "width": 260}, ""),
    "half, biased": (True, {"dtype": HALF, "bias": BIAS}, ""),
    "half, biased, dim of 10": (True, {"dtype": HALF, "bias": BIAS, "dim": 10, "width": 10}, ""),
    "half, narrow values": (True, {"dtype": HALF, "width": 8}, ""),
    "float64": (False, {"dtype": torch.float64}, "float64 has no fused kernel"),
    "half, dropout": (True, {"dtype": HALF, "dropout": 0.1}, ""),
    "float32, dropout": (True, {"dtype": SINGLE, "dropout": 0.1}, ""),
    "half, dropout of everything": (False, {"dtype": HALF, "dropout": 1.0}, "dropout 1"),
    "a learned bias": (True, {"dtype": HALF, "bias": BIAS.clone().requires_grad_()}, ""),
    "cpu": (True, {"dtype": HALF, "device": "cpu"}, ""),
    "cpu, dropout": (True, {"dtype": HALF, "dropout": 0.1, "device": "cpu"}, "with cpu_kernel"),
    "cpu, dropout, by torch": (
        False,
        {"dtype": HALF, "dropout": 0.1, "device": "cpu", "targets": ("sdpa",)},
        "torch's fused CPU kernel has no dropout",
    ),
}


@pytest.mark.parametrize("row", list(ROWS.values()), ids=list(ROWS))
def test_limits(row: tuple[bool, dict[str, Any], str]) -> None:
    taken, given, reason = row
    arguments = dict(given)
    bias = [arguments.pop("bias")] if "bias" in arguments else []
    decided = site(arguments.pop("dtype"), *bias, **arguments)
    assert (decided.outcome == "rewritten") == taken, decided.reason
    assert reason in decided.reason


def test_a_device_that_was_not_requested_by_name_has_no_rules() -> None:
    from attn_pass.devices.registry import device_for

    assert device_for(torch.device("cuda")).kernels == ()
    assert device_for(torch.device("cpu"), "cuda").kernels == ("cudnn", "flash", "efficient", "decode")


def test_eager_s_random_numbers_are_kept_where_they_are_asked_for() -> None:
    with torch._inductor.config.patch(fallback_random=True):
        decided = site(HALF, dropout=0.1)
    assert decided.outcome == "left"
    assert "random numbers" in decided.reason
