"""Windows and axes of images, and positions as a bias: each named form with a look-alike."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from against_eager import qkv, randn
from neighbours import INF, Pair, attend, check, pairs, softmax
from torch import Tensor

QKV = qkv()

# ---------------------------------------------------------------- windows and axes of images

IMAGE = (randn(2, 8, 8, 96, seed=1) * 0.7, randn(49, 2, seed=2))
WINDOWS = (*(randn(2, 4, 2, 16, 16, seed=s) for s in range(3)), (randn(4, 16, 16, seed=4) > 0.3) * -100.0)
WINDOWS[3][0, 2] = -100.0  # a row that is masked whole
SQUARE = tuple(randn(2, 6, 6, 2, 16, seed=s) for s in range(3))


def partition(x: Tensor) -> Tensor:
    """(B, 8, 8, C) to (B * 4, 16, C), windows of 4 by 4."""
    x = x.view(x.shape[0], 2, 4, 2, 4, x.shape[-1])
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, 16, x.shape[-1])


def position_index() -> Tensor:
    """(16, 16): the row of Swin's table for each pair of positions in a window of 4 by 4."""
    coords = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")).flatten(1)
    relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0) + 3
    return relative[..., 0] * 7 + relative[..., 1]


def shift_mask() -> Tensor:
    """(4, 16, 16): 0 within a part of the shifted image, -100 between two."""
    parts = (slice(0, -4), slice(-4, -2), slice(-2, None))
    image = torch.zeros(1, 8, 8, 1)
    for number, (rows, columns) in enumerate((r, c) for r in parts for c in parts):
        image[:, rows, columns, :] = number
    windows = partition(image).view(-1, 16)
    mask = windows.unsqueeze(1) - windows.unsqueeze(2)
    return mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)


def swin(x: Tensor, table: Tensor, windows_first: bool = False) -> Tensor:
    windows = partition(torch.roll(x, (-2, -2), (1, 2)))
    q, k, v = windows.reshape(8, 16, 3, 2, 16).permute(2, 0, 3, 1, 4)
    scores = (q * 16**-0.5) @ k.transpose(-2, -1)
    scores = scores + table[position_index().view(-1)].view(16, 16, -1).permute(2, 0, 1).unsqueeze(0)
    if windows_first:
        scores = scores.view(4, 2, 2, 16, 16) + shift_mask()[:, None, None]
    else:
        scores = scores.view(2, 4, 2, 16, 16) + shift_mask().unsqueeze(1).unsqueeze(0)
    return (softmax(scores.view(-1, 2, 16, 16)) @ v).transpose(1, 2).reshape(8, 16, 32)


def rows(x: Tensor) -> Tensor:
    return x.flatten(0, 1).transpose(1, 2)


def columns(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(0, 1).transpose(1, 2)


def axial_einsum(dim: int) -> Pair:
    return Pair(
        lambda q, k, v: torch.einsum(
            "bnhwv,bhvnd->bhwnd", torch.softmax(torch.einsum("bhwnd,bhvnd->bnhwv", q, k) * 0.25, -1), v
        ),
        lambda q, k, v: torch.einsum(
            "bnhwv,bhvnd->bhwnd", torch.softmax(torch.einsum("bhwnd,bhvnd->bnhwv", q, k) * 0.25, dim), v
        ),
        SQUARE,
        left="the softmax runs over another dimension",
    )


IMAGES = {
    "swin, shifted": Pair(swin, lambda x, t: swin(x, t, windows_first=True), IMAGE),
    "swin, five dimensions": Pair(
        lambda q, k, v, m: softmax(q @ k.mT * 0.25 + m[:, None]) @ v,
        lambda q, k, v, m: softmax((q @ k.mT * 0.25).masked_fill(m[:, None] != 0, -100.0)) @ v,
        WINDOWS,
        left="filled with -100",
    ),
    "axial, rows": Pair(
        lambda q, k, v: attend(rows(q), rows(k), rows(v)),
        lambda q, k, v: attend(rows(q), rows(k), columns(v)),
        SQUARE,
    ),
    "axial, columns": Pair(
        lambda q, k, v: attend(columns(q), columns(k), columns(v)).transpose(1, 2).unflatten(0, (2, 6)).transpose(1, 2),
        lambda q, k, v: attend(columns(q), columns(k), columns(v)).transpose(1, 2).unflatten(0, (2, 6)),
        SQUARE,
    ),
    "axial by einsum": axial_einsum(2),
    "axial by einsum, queries": axial_einsum(3),
}


@pairs(IMAGES)
def test_windows_and_axes(pair: Pair, near: bool) -> None:
    check(pair, near)


# ---------------------------------------------------------------- positions as a bias

DISTANCE = torch.arange(8)[None, :] - torch.arange(8)[:, None]
TABLE = randn(32, 2, seed=4) * 2
SLOPES = torch.tensor([0.5, 0.125])


def bucket(distance: Tensor) -> Tensor:
    """T5's buckets, bidirectional, 32 of them, as transformers computes them."""
    offset = (distance > 0).to(torch.long) * 16
    distance = torch.abs(distance)
    large = 8 + (torch.log(distance.float() / 8) / math.log(128 / 8) * 8).to(torch.long)
    large = torch.min(large, torch.full_like(large, 15))
    return offset + torch.where(distance < 8, distance, large)


def t5(q: Tensor, k: Tensor, v: Tensor, table: Tensor, sign: int = 1) -> Tensor:
    distance = torch.arange(k.shape[2])[None, :] - torch.arange(q.shape[2])[:, None]
    bias = F.embedding(bucket(sign * distance), table).permute([2, 0, 1]).unsqueeze(0)
    return softmax(q @ k.mT + bias) @ v


def beit(scores: Tensor, table: Tensor) -> Tensor:
    """A class token before the patches: three rows of the table are its own."""
    index = torch.zeros(8, 8, dtype=torch.long)
    index[1:, 1:] = torch.arange(7)[:, None] - torch.arange(7) + 6
    index[0, 0:], index[0:, 0], index[0, 0] = 13, 14, 15
    return scores + table[index.view(-1)].view(8, 8, -1).permute(2, 0, 1).contiguous().unsqueeze(0)


def bloom(q: Tensor, k: Tensor, v: Tensor, alibi: Tensor) -> Tensor:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    scores = torch.baddbmm(alibi, q, k.mT, beta=1.0, alpha=0.25)
    return torch.bmm(softmax(scores), v).view(2, 2, 8, 16)


def alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, of_queries: bool = False) -> Tensor:
    positions = torch.arange(8)[:, None] if of_queries else torch.arange(8)[None, :]
    keep = torch.ones(8, 8, dtype=torch.bool).tril()
    return softmax((q @ k.mT * 0.25 + slopes.view(-1, 1, 1) * positions).masked_fill(~keep, -INF)) @ v


def deberta(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, values_too: bool = False) -> Tensor:
    """Content to position and position to content, gathered by distance."""
    index = (DISTANCE + 7).expand(2, 2, 8, 8)
    to_position = torch.gather(q @ positions.mT, -1, index)
    to_content = torch.gather(k @ positions.mT, -1, index).transpose(-1, -2)
    content = torch.gather(q @ torch.cat([k, k], 2).mT, -1, index) if values_too else q @ k.mT
    return softmax((content + to_position + to_content) * 0.15) @ v


def shifted(scores: Tensor) -> Tensor:
    """Transformer-XL's shift of each row by its number."""
    b, h, l, n = scores.shape
    padded = torch.cat([scores.new_zeros(b, h, l, 1), scores], -1).view(b, h, n + 1, l)
    return padded[:, :, 1:].view(b, h, l, n)[..., :8]


BIASES = {
    "T5": Pair(
        t5, lambda q, k, v, t: t5(q, k, v, t, sign=-1), (*QKV, TABLE), reported={"mask": "additive, by distance"}
    ),
    "T5, learned": Pair(
        t5,
        lambda q, k, v, t: t5(q, k, v, t, sign=-1),
        (*qkv(grad=True), (TABLE * 1).requires_grad_()),
        reported={"target": "recompute"},
        grad=True,
    ),
    "BEiT": Pair(
        lambda q, k, v, t: softmax(beit(q @ k.mT * 0.25, t)) @ v,
        lambda q, k, v, t: beit(softmax(q @ k.mT * 0.25), t) @ v,
        (*QKV, TABLE[:16]),
        reported={"mask": "additive"},
        left="changed after the softmax",
    ),
    "ALiBi in the graph": Pair(
        alibi,
        lambda q, k, v, s: alibi(q, k, v, s, of_queries=True),
        (*QKV, SLOPES),
        reported={"mask": "causal and additive"},
    ),
    "ALiBi, as Bloom": Pair(
        lambda q, k, v, s: bloom(q, k, v, (s[:, None, None] * torch.arange(8.0)).repeat(2, 1, 1)),
        lambda q, k, v, s: bloom(q, k, v, (s[:, None, None] * torch.arange(8.0)).repeat_interleave(2, 0)),
        (*QKV, SLOPES),
    ),
    "ALiBi, given": Pair(
        lambda q, k, v, a: softmax(q @ k.mT * 0.25 + a) @ v,
        lambda q, k, v, a: softmax((q @ k.mT + a) * 0.25) @ v,
        (*QKV, SLOPES.view(1, 2, 1, 1) * -DISTANCE.abs()),
        reported={"mask": "additive"},
        near_reported={"mask": "additive"},
    ),
    "DeBERTa": Pair(
        deberta,
        lambda q, k, v, p: deberta(q, k, v, p, values_too=True),
        (*QKV, randn(1, 2, 15, 16, seed=5)),
        left="gather stands",
    ),
    "Transformer-XL": Pair(
        lambda q, k, v, r: softmax((q @ k.mT + shifted(q @ r.mT)) * 0.25) @ v,
        lambda q, k, v, r: softmax(shifted(q @ k.mT + q @ r[:, :, :8].mT) * 0.25) @ v,
        (*QKV, randn(1, 2, 8, 16, seed=5)),
        reported={"mask": "additive"},
        left="cat joins the scores",
    ),
}


@pairs(BIASES)
def test_positions_as_a_bias(pair: Pair, near: bool) -> None:
    check(pair, near)
