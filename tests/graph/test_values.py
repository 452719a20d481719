"""The order in memory of a tensor's dimensions, if it is dense."""

from __future__ import annotations

import pytest
import torch

from attn_pass.graph.values import Sizes, memory_order

X = torch.zeros(2, 3, 4, 5)


@pytest.mark.parametrize(
    "tensor, order",
    [
        (X, (0, 1, 2, 3)),
        (X.transpose(1, 2), (0, 2, 1, 3)),
        (X.mT, (0, 1, 3, 2)),
        (X.to(memory_format=torch.channels_last), (0, 2, 3, 1)),
        (X[:, :1], None),  # steps over the other two
        (X[:1], (0, 1, 2, 3)),
        (X[..., :2], None),
        (X[:, ::2], None),
        (torch.zeros(1, 3).expand(2, 3), None),
        (torch.zeros(1, 3, 1), (0, 2, 1)),  # dimensions of size 1 come first
        (torch.zeros(()), ()),
    ],
)
def test_memory_order(tensor: torch.Tensor, order: tuple[int, ...] | None) -> None:
    assert memory_order(tensor, Sizes()) == order


def test_what_has_no_strides_has_no_order() -> None:
    assert memory_order(torch.eye(3).to_sparse(), Sizes()) is None
