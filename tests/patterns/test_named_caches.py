"""Caches of keys and values, and sources of masks: each named form with a look-alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from against_eager import qkv, randn, same
from neighbours import INF, LOWEST, Pair, attend, check_each, groups, softmax
from torch import Tensor, nn

import attn_pass

Change = Callable[..., Any]
NEW, PAST = 3, 12
POSITION = torch.tensor([4, 5, 6])
CACHED = (*qkv(q_len=NEW, kv_len=NEW), *qkv(q_len=1, kv_len=PAST)[1:])


def masked(scores: Tensor, keep: Tensor, fill: float | None = None) -> Tensor:
    """Filled with what models write; a number of the module would be a symbol where sizes are."""
    return scores.masked_fill(~keep, torch.finfo(torch.float32).min if fill is None else fill)


def lower(rows: int, columns: int, diagonal: int = 0) -> Tensor:
    return torch.ones(rows, columns, dtype=torch.bool).tril(diagonal)


# ---------------------------------------------------------------- a cache of fixed size, valid up to a position


def index_copy(cache: Tensor, at: Tensor, new: Tensor) -> None:
    cache.index_copy_(2, at, new)


def index_put(cache: Tensor, at: Tensor, new: Tensor) -> None:
    cache[:, :, at] = new


def slices(cache: Tensor, at: int, new: Tensor) -> None:
    cache[:, :, at : at + new.shape[2]] = new


def copies(cache: Tensor, at: int, new: Tensor) -> None:
    cache.narrow(2, at, new.shape[2]).copy_(new)


def up_to(slot: Tensor, at: Any) -> Tensor:
    """Transformers' condition for a static cache."""
    return slot[None, :] <= (at[:, None] if isinstance(at, Tensor) else at + torch.arange(NEW)[:, None])


def before(slot: Tensor, at: Any) -> Tensor:
    return up_to(slot + 1, at)


def one_further(slot: Tensor, at: Any) -> Tensor:
    return up_to(slot - 1, at)


def up_to_the_first(slot: Tensor, at: Any) -> Tensor:
    return up_to(slot, at)[:1].expand(NEW, -1)


def static(write: Change, keep: Change = up_to, shift: int = 0, late: str = "") -> Change:
    """A layer with a static cache; ``late`` names what is written after it was read, or "between" the two products."""

    def program(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, at: Any) -> Tensor:
        if not late or late == "values":
            write(keys, at, k)
        if "values" not in late:
            write(values, at, v)
        mask = keep(torch.arange(keys.shape[2]), at)
        used = torch.cat([keys[:, :, shift:], keys[:, :, :shift]], 2) if shift else keys
        weights = softmax(masked(q @ used.mT * 0.25, mask))
        if late == "between":
            write(keys, at, k)
        out = weights @ values
        if "keys" in late:
            write(keys, at, k)
        if "values" in late:
            write(values, at, v)
        return out

    return program


INDEX_COPY, INDEX_PUT, SLICES = static(index_copy), static(index_put), static(slices)
STATIC = {
    "index_copy": Pair(INDEX_COPY, static(index_copy, before), (*CACHED, POSITION)),
    "index_copy, one further": Pair(INDEX_COPY, static(index_copy, one_further), (*CACHED, POSITION)),
    "index_copy, same for all": Pair(INDEX_COPY, static(index_copy, up_to_the_first), (*CACHED, POSITION)),
    "index_copy, late": Pair(INDEX_COPY, static(index_copy, late="keys values"), (*CACHED, POSITION)),
    "index_copy, values late": Pair(INDEX_COPY, static(index_copy, late="values"), (*CACHED, POSITION)),
    "index_copy, between": Pair(
        INDEX_COPY,
        static(index_copy, late="between"),
        (*CACHED, POSITION),
        left="is written in place by index_copy",
    ),
    "index_put": Pair(INDEX_PUT, static(index_put, late="keys values"), (*CACHED, POSITION)),
    "index_put, off by one": Pair(INDEX_PUT, static(index_put, shift=1), (*CACHED, POSITION)),
    "slices": Pair(
        SLICES,
        static(slices, before),
        (*CACHED, 4),
        reported={"mask": "causal with offset 4"},
        near_reported={"mask": "causal with offset 3"},
    ),
    "slices, late": Pair(SLICES, static(slices, late="keys"), (*CACHED, 4)),
    "slices, between": Pair(
        SLICES, static(slices, late="between"), (*CACHED, 4), left="is written in place by setitem"
    ),
    "slices, off by one": Pair(SLICES, static(slices, shift=1), (*CACHED, 4)),
    "copies": Pair(static(copies), static(copies, late="keys values"), (*CACHED, 4)),
}


def symbolic(group: dict[str, Pair] | Pair) -> dict[str, Pair] | Pair:
    """Offsets are names of sizes then."""
    if isinstance(group, Pair):
        return replace(group, reported={}, near_reported={})
    return {name: replace(pair, reported={}, near_reported={}) for name, pair in group.items()}


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@groups(STATIC)
def test_static_caches(group: dict[str, Pair] | Pair, near: bool, dynamic: bool | None) -> None:
    check_each(
        symbolic(group) if dynamic else group, near, dynamic=dynamic, aot=dynamic and not isinstance(group, Pair)
    )


@pytest.mark.parametrize("first", [4, 0, 9])
def test_a_position_is_a_value_and_no_constant(first: int) -> None:
    """One compilation for every position, and what it wrote stays written."""
    torch._dynamo.reset()
    program = static(index_copy)
    run = torch.compile(
        program,
        backend=attn_pass.wrap("aot_eager_default_partitioner", choose="fused", on_error="raise"),
        fullgraph=True,
    )
    mine, theirs = ([t.clone() for t in CACHED] for _ in range(2))
    for position in (POSITION, POSITION - POSITION[0] + first):
        torch.testing.assert_close(run(*mine, position), program(*theirs, position), atol=1e-5, rtol=1e-5)
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)


# ---------------------------------------------------------------- a cache that grows, and a part of one


def grown(mask: Change, new_first: bool = False) -> Change:
    def program(q: Tensor, k: Tensor, v: Tensor, past: Tensor, past_v: Tensor) -> Tensor:
        parts = [(past, k), (past_v, v)]
        keys, values = (torch.cat(p[::-1] if new_first else p, dim=2) for p in parts)
        return softmax(mask(q @ keys.mT * 0.25)) @ values

    return program


def bottom_right(s: Tensor) -> Tensor:
    return masked(s, lower(*s.shape[-2:], s.shape[-1] - s.shape[-2]), -INF)


def top_left(s: Tensor) -> Tensor:
    return masked(s, lower(*s.shape[-2:]), -INF)


def one_less(s: Tensor) -> Tensor:
    return masked(s, lower(*s.shape[-2:], s.shape[-1] - s.shape[-2] - 1), -INF)


def called(q: Tensor, k: Tensor, v: Tensor, past: Tensor, past_v: Tensor, corner: bool = False) -> Tensor:
    """The call's own flag is aligned to the first key, whatever the cache holds."""
    k, v = torch.cat([past, k], 2), torch.cat([past_v, v], 2)
    keep = None if corner else lower(q.shape[2], k.shape[2], k.shape[2] - q.shape[2])
    return nn.functional.scaled_dot_product_attention(q, k, v, keep, is_causal=corner, scale=0.25)


def prefix(length: Change, shift: int = 0) -> Change:
    def program(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, n: int) -> Tensor:
        n = length(n)
        return attend(q, keys[:, :, shift : n + shift], values[:, :, :n])

    return program


BOTTOM_RIGHT, PART = grown(bottom_right), prefix(lambda n: n)
ALIGNED = {"mask": f"causal with offset {PAST}"}
GROWN = {
    "cat, top left": Pair(BOTTOM_RIGHT, grown(top_left), CACHED, ALIGNED, {"mask": "causal"}),
    "cat, offset one less": Pair(BOTTOM_RIGHT, grown(one_less), CACHED, ALIGNED, {"mask": "causal with offset 11"}),
    "cat, new keys first": Pair(BOTTOM_RIGHT, grown(bottom_right, new_first=True), CACHED, ALIGNED, ALIGNED),
    "cat, called": Pair(called, lambda *x: called(*x, corner=True), CACHED, ALIGNED, {"mask": "causal"}),
    "a part": Pair(PART, prefix(lambda n: n, shift=1), (*CACHED, 7), {"mask": "none"}, {"mask": "none"}),
    "a part, one longer": Pair(PART, prefix(lambda n: n + 1), (*CACHED, 7), {"mask": "none"}, {"mask": "none"}),
}


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@groups(GROWN)
def test_caches_that_grow(group: dict[str, Pair] | Pair, near: bool, dynamic: bool | None) -> None:
    check_each(symbolic(group) if dynamic else group, near, dynamic=dynamic)


def test_training_through_a_cat_cache() -> None:
    inputs = [t.clone().requires_grad_() for t in CACHED]
    report = same(grown(bottom_right), *inputs, grad=True, rewritten=1)
    assert report.sites[0].mask == ALIGNED["mask"]


# ---------------------------------------------------------------- where a mask comes from


class Buffered(nn.Module):
    """GPT-2's triangle, sliced to the last rows."""

    def __init__(self, top: bool = False, persistent: bool = True) -> None:
        super().__init__()
        self.top = top
        self.register_buffer("triangle", lower(16, 16).view(1, 1, 16, 16), persistent=persistent)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n, m = q.shape[2], k.shape[2]
        keep = self.triangle[:, :, :n, :m] if self.top else self.triangle[:, :, m - n : m, :m]
        scores = q @ k.mT * 0.25
        return softmax(torch.where(keep, scores, torch.full([], LOWEST, dtype=scores.dtype))) @ v


def given(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return softmax(masked(q @ k.mT * 0.25, keep)) @ v


def made(top: bool) -> Change:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n, m = q.shape[2], k.shape[2]
        keep = torch.zeros(n, m, dtype=torch.bool)
        for row in range(n):
            keep[row, : row + 1 + (0 if top else m - n)] = True
        return given(q, k, v, keep)

    return program


RECTANGLE = qkv(q_len=NEW, kv_len=8)
MASKS = {
    "a buffer": Pair(
        Buffered(), Buffered(top=True), RECTANGLE, reported={"mask": "dense"}, near_reported={"mask": "dense"}
    ),
    "an input": Pair(
        given,
        lambda q, k, v, keep: given(q, k, v, keep.flip(-1)),
        (*RECTANGLE, lower(NEW, 8, 5)),
        reported={"mask": "dense"},
        near_reported={"mask": "dense"},
    ),
    "an input of numbers": Pair(
        lambda q, k, v, m: softmax(q @ k.mT * 0.25 + m) @ v,
        lambda q, k, v, m: softmax(q @ k.mT * 0.25 - m.clamp(min=-9.0)) @ v,
        (*RECTANGLE, torch.zeros(NEW, 8).masked_fill(~lower(NEW, 8, 5), LOWEST)),
        reported={"mask": "additive"},
        near_reported={"mask": "additive"},
    ),
    "an input of whole numbers": Pair(
        lambda q, k, v, m: softmax(masked(q @ k.mT, m[:, None, None, :] == 1)) @ v,
        lambda q, k, v, m: softmax(masked(q @ k.mT, m[:, None, None, :] == 0)) @ v,
        (*RECTANGLE, torch.tensor([[1] * 8, [1] * 5 + [0] * 3])),
        reported={"mask": "padding"},
        near_reported={"mask": "padding"},
    ),
    "a constant": Pair(
        lambda q, k, v: given(q, k, v, lower(NEW, 8, 5)),
        lambda q, k, v: given(q, k, v, lower(8, NEW, -5).T),
        RECTANGLE,
        reported={"mask": "causal with offset 5"},
    ),
    "a constant written row by row": Pair(made(top=False), made(top=True), RECTANGLE),
    "a constant of numbers": Pair(
        lambda q, k, v: softmax(q @ k.mT * 0.25 + torch.full((NEW, 8), -INF).triu(6)) @ v,
        lambda q, k, v: softmax(q @ k.mT * 0.25 + torch.full((NEW, 8), -INF).triu(6).nan_to_num(neginf=-2.0)) @ v,
        RECTANGLE,
        reported={"mask": "causal with offset 5"},
        near_reported={"mask": "additive"},
    ),
}


@groups(MASKS)
def test_where_masks_come_from(group: dict[str, Pair] | Pair, near: bool) -> None:
    check_each(group, near)


@pytest.mark.parametrize("source", ["buffer", "input"])
def test_the_values_of_a_mask_are_not_remembered(source: str) -> None:
    """The compiled program is called again with a triangle that has been turned over."""
    torch._dynamo.reset()
    backend = attn_pass.wrap("aot_eager_default_partitioner", choose="fused", on_error="raise")
    module = Buffered().eval()
    run = torch.compile(module if source == "buffer" else given, backend=backend, fullgraph=True)
    for keep in (lower(16, 16), ~lower(16, 16, -1), randn(16, 16) > 0):
        keep[:, 0] = True
        module.triangle.copy_(keep)
        mine = () if source == "buffer" else (keep[5:8, :8].clone(),)
        want = given(*RECTANGLE, keep[5:8, :8])
        torch.testing.assert_close(run(*RECTANGLE, *mine), want, atol=1e-5, rtol=1e-5)
