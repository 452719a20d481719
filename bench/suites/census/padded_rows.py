"""Results of a model without their rows of padding, which are zeros where nobody uses them: all others are eager's.

Which rows are padding is told by the masks among the model's inputs, and by nothing that the pass found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Seen:
    """What is left of the results of eager and of the pass, in their order.

    Attributes:
        expected: eager's.
        got: the pass's.
        zeros: how many rows of padding were taken out of each, since they became zeros.
    """

    expected: list[Tensor]
    got: list[Tensor]
    zeros: int


def token_masks(inputs: Mapping[str, Any]) -> list[Tensor]:
    """The masks over tokens among a model's inputs, by their names: (B, L), true or not 0 where there is a token."""
    masks = {name: x for name, x in inputs.items() if "mask" in name and isinstance(x, Tensor) and x.dim() == 2}
    return [x == 0 if "padding_mask" in name else x for name, x in masks.items()]


def seen(expected: Sequence[Tensor], got: Sequence[Tensor], masks: Sequence[Tensor]) -> Seen:
    """The results but for rows that are padding by a mask, zeros here and something else in eager.

    Rows are the first two dimensions of a result. One with another number of rows than a mask has, as frames of audio
    are not its samples, has padding where a row's share of the mask keeps not everything, or has the mask's tokens in
    front of something else, or behind it, as patches of an image are.
    """
    pairs = [_without(one, other, masks) for one, other in zip(expected, got)]
    more = [*expected[len(pairs) :]], [*got[len(pairs) :]]  # the comparison says that there are more
    hidden = sum(number for *_, number in pairs)
    return Seen([one for one, *_ in pairs] + more[0], [other for _, other, _ in pairs] + more[1], hidden)


def _without(expected: Tensor, got: Tensor, masks: Sequence[Tensor]) -> tuple[Tensor, Tensor, int]:
    if got.shape != expected.shape or got.dim() < 2:
        return expected, got, 0
    zeros = _are_zeros(got) & ~_are_zeros(expected)
    hidden = [zeros & padding for mask in masks for padding in _paddings(mask, got)]
    most = max(hidden, key=lambda rows: int(rows.sum()), default=torch.zeros_like(zeros))
    return expected[~most], got[~most], int(most.sum())


def _are_zeros(result: Tensor) -> Tensor:
    return (result == 0).flatten(2).all(-1) if result.dim() > 2 else result == 0


def _paddings(mask: Tensor, result: Tensor) -> Iterator[Tensor]:
    """Which rows of a result may be padding, (B, L); none where it has other sequences than a mask."""
    batch, length = result.shape[:2]
    if mask.shape[0] != batch or not length:
        return
    missing = mask == 0
    yield F.adaptive_max_pool1d(missing.float(), length) > 0
    if (more := length - mask.shape[1]) > 0:
        yield F.pad(missing, (0, more))
        yield F.pad(missing, (more, 0))
