"""Sizes of 0 on every device that is known: a decision, and the program's own result, without an internal error."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import attn_pass
from attn_pass.compat import TORCH_VERSION
from attn_pass.devices import registry


def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / 8).softmax(-1) @ v


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    return (q @ k.mT / 8).masked_fill(hidden, float("-inf")).softmax(-1) @ v


def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.as_tensor(flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + (i - j) * 0.1))


FORMS: tuple[Callable[..., Tensor], ...] = (written, masked, F.scaled_dot_product_attention)
EMPTY = {
    "no batch": ((0, 2, 16, 8), (0, 2, 16, 8)),
    "no heads": ((1, 0, 16, 8), (1, 0, 16, 8)),
    "no queries": ((1, 2, 0, 8), (1, 2, 16, 8)),
    "no keys": ((1, 2, 16, 8), (1, 2, 0, 8)),
    "a head dim of 0": ((1, 2, 16, 0), (1, 2, 16, 0)),
}
CASES = [(form, empty) for form in FORMS for empty in EMPTY] + [(flex, "no batch")]  # torch's own call takes no other
DEVICES = ("H100", "Arc B580", "MI300X", "M4 Max", "Ascend 910B", "TPU v5e", "Graviton4")


def test_every_family_with_sheets_is_asked() -> None:
    asked, known = ({registry.by_name(name).type for name in names} for names in (DEVICES, registry.names()))
    assert asked == known


@pytest.mark.parametrize(("form", "empty"), CASES)
def test_every_device_decides(form: Callable[..., Tensor], empty: str) -> None:
    if TORCH_VERSION < (2, 13) and form is F.scaled_dot_product_attention and empty == "no heads":
        pytest.skip("torch's own call divides by zero")
    query, key = (torch.randn(shape) for shape in EMPTY[empty])

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return form(q, k, v)

    for device in DEVICES:
        with warnings.catch_warnings():
            warnings.simplefilter("error", attn_pass.AttnPassWarning)
            report = attn_pass.explain(call, query, key, key, attn_pass_options={"device": device})
        assert report.sites and not any("internal error" in site.reason for site in report.sites), device
