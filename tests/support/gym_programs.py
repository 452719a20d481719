"""Score and mask functions of the collection attention-gym, written by hand as attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from against_eager import NEG_INF
from torch import Tensor

N, SIDE = 96, 8
Keep = Callable[[Tensor, Tensor], Tensor]
Scores = Callable[[Tensor, Tensor, Tensor], Tensor]
IDS = (torch.arange(N)[None] * torch.tensor([[1], [2]])) // 40


def causal(i: Tensor, j: Tensor) -> Tensor:
    return j <= i


def neighbourhood(i: Tensor, j: Tensor) -> Tensor:
    """NATTEN on an image of rows of `SIDE`: a window of 5 by 5 that stays inside."""
    rows = N // SIDE
    x, y = (i % SIDE).clamp(2, SIDE - 3), (i // SIDE).clamp(2, rows - 3)
    return ((j % SIDE - x).abs() <= 2) & ((j // SIDE - y).abs() <= 2)


def block_diffusion(i: Tensor, j: Tensor) -> Tensor:
    """Noised tokens first, then clean ones: own block, earlier clean blocks, clean blocks causal."""
    half, size = N // 2, 8
    clean_i, clean_j = i >= half, j >= half
    block_i, block_j = (i - half * clean_i) // size, (j - half * clean_j) // size
    own = (block_i == block_j) & (clean_i == clean_j)
    earlier = (block_i > block_j) & clean_j & ~clean_i
    return own | earlier | ((block_i >= block_j) & clean_i & clean_j)


@dataclass(frozen=True)
class Modification:
    """A mask or a score function, and what the report says of it."""

    mask: str
    keep: Keep | None = None
    scores: Scores | None = None
    target: str = "sdpa"
    ids: bool = False


SLOPES = 2.0 ** -torch.arange(1.0, 3.0)[:, None, None]
GYM: dict[str, Modification] = {
    "causal": Modification("causal", causal),
    "alibi": Modification("causal and additive, by distance", causal, lambda s, i, j: s + SLOPES * (j - i)),
    "alibi, both ways": Modification("additive, by distance", None, lambda s, i, j: s - SLOPES * (j - i).abs()),
    "soft cap": Modification("causal", causal, lambda s, i, j: 20.0 * torch.tanh(s / 20.0), "flex"),
    "sliding window": Modification("sliding window (15, 0)", lambda i, j: causal(i, j) & (i - j < 16), None, "local"),
    "sliding window and soft cap": Modification(
        "sliding window (15, 0)",
        lambda i, j: causal(i, j) & (i - j < 16),
        lambda s, i, j: 20.0 * torch.tanh(s / 20.0),
        "flex",
    ),
    "dilated window": Modification(
        "sliding window (15, 0) and dense, by distance", lambda i, j: causal(i, j) & (i - j < 16) & ((i - j) % 4 == 0)
    ),
    "window and global tokens": Modification("", lambda i, j: ((i - j).abs() <= 8) | (j < 4) | (i < 4)),
    "prefix": Modification("causal or prefix (20)", lambda i, j: causal(i, j) | (j < 20)),
    "documents": Modification("causal and document", causal, ids=True),
    "neighbourhood": Modification("", neighbourhood),
    "shared prefix": Modification("", lambda i, j: (j < 32) | ((i - 32) // 16 == (j - 32) // 16)),
    "block diffusion": Modification("", block_diffusion),
    "chunks": Modification("chunked (32)", lambda i, j: i // 32 == j // 32, None, "local"),
    "relative position": Modification("additive, by distance", None, lambda s, i, j: s + (j - i)),
    "decay": Modification(
        "additive, by distance", None, lambda s, i, j: s + torch.log(torch.tensor(0.9)) * (i - j).abs()
    ),
    "multiplied decay": Modification("none", None, lambda s, i, j: s * torch.exp(-(i - j).abs() / 9.0), "flex"),
}


def program(modification: Modification) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None]
        if modification.scores is not None:
            scores = modification.scores(scores, i, j)
        if modification.keep is not None:
            keep = modification.keep(i, j)
            if modification.ids:
                keep = keep & (ids[:, None, :, None] == ids[:, None, None, :])
            scores = scores.masked_fill(~keep, NEG_INF)
        return torch.softmax(scores, -1) @ v

    return run
