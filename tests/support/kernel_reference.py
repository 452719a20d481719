"""The CPU kernel's operators by torch's own functions, in any dtype, dropout as `dropout.hpp` draws it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from philox import left
from torch import Tensor

from attn_pass.devices.cpu.kernel import slopes


def of_score(term: slopes.Term, x: Tensor, captured: Sequence[Tensor]) -> Tensor:
    """A score function, or a derivative of one, of the scaled product ``x``."""
    if term.name == "x":
        return x
    if term.name == "number":
        return torch.tensor(float(term.args[0].name.rstrip("f")), dtype=x.dtype)
    if term.name == "captured":
        return captured[int(term.args[0].name)]
    args = [of_score(a, x, captured) for a in term.args]
    if term.name == "where":
        return torch.where(~(args[0] <= 0), *args[1:])
    made: Tensor = getattr(torch, term.name)(*args)
    return made


def reference(
    query: Tensor, key: Tensor, value: Tensor, scale: float, to: torch.dtype = torch.float64, **given: Any
) -> tuple[Tensor, Tensor]:
    """The operator in float64, or as eager has it, as its docstring says it: the result, and the log-sum-exp."""
    batch, heads, q_len, _ = query.shape
    kv_len, groups = key.size(2), heads // key.size(1)
    q, k, v = query.to(to), key.to(to).repeat_interleave(groups, 1), value.to(to).repeat_interleave(groups, 1)
    scores = q @ k.mT * scale
    if given.get("score"):
        scores = of_score(slopes.parsed(given["score"]), q @ k.mT, [x.to(to) for x in given.get("captured") or ()])
    if (bias := given.get("bias")) is not None:
        scores = scores + bias.to(to)
    if (distances := given.get("distances")) is not None:
        apart = torch.arange(kv_len) - torch.arange(q_len)[:, None] + q_len - 1
        scores = scores + distances.to(to)[:, :, 0][:, :, apart]
    for table, place, factor in zip(*(given.get(name) or () for name in ("tables", "places", "factors"))):
        numbers = table.to(to).expand(*scores.shape, table.size(-1))
        looked_up = numbers.gather(-1, place.long().expand(scores.shape)[..., None])[..., 0]
        scores = scores + factor * looked_up

    def each(name: str, otherwise: int) -> Tensor:
        entry = given.get(name)
        return (torch.tensor([otherwise]) if entry is None else entry).expand(batch)[:, None, None]

    def in_chunks(positions: Tensor, shift: str, size: int) -> Tensor:
        return (positions + (given.get(shift) or 0)).div(size, rounding_mode="floor")

    at = torch.arange(kv_len)[None, None]
    position = torch.arange(q_len)[None, :, None] + each("shift", 0)
    kept = (at >= each("starts", 0)) & (at < each("ends", kv_len))
    for name, keeps in (
        ("before", lambda n: at >= position - n),
        ("after", lambda n: (at <= position + n) | (at < (given.get("prefix") or 0))),
        ("start", lambda n: at >= n),
        ("end", lambda n: at < n),
        ("chunk", lambda n: in_chunks(at, "chunk_keys", n) == in_chunks(position, "chunk_rows", n)),
    ):
        if given.get(name) is not None:
            kept = kept & keeps(given[name])
    kept = kept[:, None].expand(scores.shape)
    if given.get("keep") is not None:
        kept = kept & given["keep"]
    fill, dropped = given.get("fill"), given.get("dropout", 0.0)
    if given.get("fill_is_added"):
        scores = scores + torch.where(kept, torch.zeros((), dtype=to), fill)
    else:
        scores = torch.where(kept, scores, float("-inf") if fill is None else fill)
    stays = torch.ones(()) if not dropped else left(given["seed"], dropped, tuple(scores.shape))
    stays = stays.to(to) / (1 - dropped) if dropped < 1 else torch.zeros(())
    kept = kept if fill is None else torch.ones_like(kept)
    empty = (scores == float("-inf")).all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0.0)  # a softmax of nothing would make NaN of gradients
    lse = scores.logsumexp(-1).masked_fill(empty[..., 0], float("-inf"))
    if (sink := given.get("sink")) is not None:
        scores = torch.cat((scores, sink.to(to).expand(*scores.shape[:3], 1)), -1)
        return scores.softmax(-1)[..., :-1].masked_fill(~kept | empty, 0.0) * stays @ v, lse
    out = scores.softmax(-1).masked_fill(~kept, 0.0) * stays @ v
    otherwise = {"nan": torch.tensor(float("nan")), "zero": torch.tensor(0.0), "mean": v.mean(-2, keepdim=True)}
    return torch.where(empty, otherwise[given.get("fully_masked", "nan")].to(to), out), lse
