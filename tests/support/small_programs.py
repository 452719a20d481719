"""What programs in tables are made of: an attention in one line, its parts, and the table itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor


def softmax(scores: Tensor) -> Tensor:
    return torch.softmax(scores, -1)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax(q @ k.mT * 0.25) @ v


def tril(rows: int, columns: int, diagonal: int = 0) -> Tensor:
    return torch.ones(rows, columns, dtype=torch.bool).tril(diagonal)


def table(rows: dict[str, Any]) -> pytest.MarkDecorator:
    """One test a row, named by its key."""
    return pytest.mark.parametrize("row", list(rows.values()), ids=list(rows))
