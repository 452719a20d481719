"""The two ways attention is written in the tests of poor cases: by hand, and as a call; with their masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import NEG_INF, same_each
from torch import Tensor

LOWEST = torch.finfo(torch.float32).min
Program = Callable[..., Any]
Programs = dict[str, tuple[Program, Sequence[Any]]]


def hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    scores = q @ k.mT * 0.25
    if mask is not None:
        scores = scores.masked_fill(~mask, NEG_INF) if mask.dtype == torch.bool else scores + mask
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), NEG_INF)
    return torch.softmax(scores, -1) @ v


def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)


WAYS = {"by hand": hand, "a call": call}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
training = pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])


def all_become(
    programs: Programs, target: str = "sdpa", poor_cases: tuple[str, ...] | None = None, mask: str = "", **more: Any
) -> None:
    """Programs of one site each, in one graph, are the same as eager and become this."""
    for name, site in zip(programs, same_each(programs, **more).sites, strict=True):
        assert site.target == target, f"{name}: {site}"
        assert poor_cases in (None, site.poor_cases) and mask in ("", site.mask), f"{name}: {site}"


def table(rows: dict[str, Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", rows.values(), ids=rows)
