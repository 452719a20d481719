"""Caches of which a part is valid: the range is read exactly, kernels that can take it, and the report says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from against_eager import NEG_INF, qkv
from programs import DIALECTS, capture, meanings
from torch import Tensor

import attn_pass
from attn_pass.model.attention import Attention
from attn_pass.poor_cases import valid_range

POSITION, LENGTHS, EACH = torch.tensor(11), torch.tensor([3, 20])[:, None, None, None], torch.tensor([11, 4, 30, 2, 7])
Mask = Callable[[Tensor], Tensor]


def keys(count: int = 50) -> Tensor:
    return torch.arange(count)


def rows() -> Tensor:
    return torch.arange(5)[:, None]


# What is kept, of what the program knows; how many bounds below and above that gives, and what the report calls it.
MASKS: dict[str, tuple[Mask, Tensor, tuple[int, int], str]] = {
    "position": (lambda p: keys() <= p, POSITION, (0, 1), "run-time range"),
    "not behind a position": (lambda p: ~(keys() > p[None]), POSITION, (0, 1), "run-time range"),
    "window": (lambda p: (keys() <= p) & (keys() > p - 4), POSITION, (1, 1), "run-time range"),
    "lengths": (lambda n: keys() < n, LENGTHS, (0, 1), "run-time range"),
    "left padding": (lambda n: keys() >= n, LENGTHS, (1, 0), "run-time range"),
    "from a position": (lambda p: keys() <= rows() + p, POSITION, (0, 1), "causal with a run-time offset"),
    "of each row": (lambda p: keys() <= p[:, None], EACH, (0, 1), "run-time range of each row"),
    "sink": (
        lambda p: ((keys() <= p) & (keys() > p - 4)) | (keys() == 0),
        POSITION,
        (0, 1),
        "run-time range or keys from 0 to 0",
    ),
    "two windows": (lambda p: ((keys() - p).abs() <= 2) | (keys() == p), POSITION, (0, 0), "padding"),
    "ring": (lambda p: (p - keys()) % 50 < 20, POSITION, (1, 1), "ring buffer"),
    "ring of queries": (lambda p: (p[:, None] - keys()) % 50 < 20, EACH, (1, 1), "ring buffer"),
    "ring by what its slots hold": (lambda p: p - (p - keys()) % 50 >= 0, POSITION, (0, 1), "ring buffer"),
    "ring that is smaller": (lambda p: (p - keys()) % 49 < 20, POSITION, (0, 0), "ring buffer"),
    "ages of floats": (lambda p: (p * 1.0 - keys()) % 50 < 20, POSITION, (0, 0), "ring buffer"),
    "ring that fills up": (lambda p: (keys() <= p) | (p >= 49), POSITION, (0, 1), "run-time range or dense"),
    "padding": (lambda p: p[:50] > 3, torch.arange(60) % 9, (0, 0), "padding"),
    "fixed": (lambda p: keys() <= 11, POSITION, (0, 0), "prefix (12)"),
}


def attend(keep: Mask, added: bool = False) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, known: Tensor) -> Tensor:
        scores = q @ k.mT * 0.3
        kept = keep(known)
        scores = scores + torch.where(kept, 0.0, NEG_INF) if added else scores.masked_fill(~kept, NEG_INF)
        return scores.softmax(-1) @ v

    return run


def ranged(a: Attention) -> Attention | None:
    return next(valid_range.variants(a), None)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("added", [False, True], ids=["filled", "added"])
def test_what_is_bounded_holds_every_kept_key(dialect: str, added: bool) -> None:
    for name, (keep, known, (first, last), _) in MASKS.items():
        (meaning,), _ = meanings(capture(attend(keep, added), (*qkv(2, 3, 5, 50), known), dialect))
        meaning.check()
        variant = ranged(meaning.attention)
        if variant is None:
            assert (first, last) == (0, 0), name
            continue
        assert variant.valid is not None and meaning.keeps_within_range(variant), name
        assert (len(variant.valid.first), len(variant.valid.last)) == (first, last), name


def test_a_range_that_is_too_narrow_is_seen() -> None:
    """The check above asks what it should: a bound that is one key short fails it."""
    (meaning,), _ = meanings(capture(attend(MASKS["position"][0]), (*qkv(2, 3, 5, 50), POSITION), "dynamo"))
    variant = ranged(meaning.attention)
    assert variant is not None and variant.valid is not None
    (bounded,) = variant.valid.conditions
    (limit,) = bounded.limits
    short = replace(bounded, limits=(replace(limit, offset=limit.offset - 1),))
    assert not meaning.keeps_within_range(replace(variant, valid=replace(variant.valid, conditions=(short,))))


def explained(fn: Callable[..., Any], *inputs: Tensor, **options: Any) -> attn_pass.SiteReport:
    with torch.no_grad():
        return attn_pass.explain(fn, *inputs, attn_pass_options=options).sites[0]


@pytest.mark.parametrize("name", MASKS)
def test_what_the_report_calls_it(name: str) -> None:
    keep, known, _, words = MASKS[name]
    assert explained(attend(keep), *qkv(2, 3, 5, 50), known).mask == words


def test_which_targets_accept_it() -> None:
    site = explained(attend(lambda p: keys(4096) <= p), *qkv(4, 8, 1, 4096, 64), POSITION)
    assert (site.target, site.poor_cases) == ("cpu_kernel", ("valid_range",))
    assert site.refusals["sdpa (valid_range)"] == valid_range.REFUSAL and "sdpa" not in site.refusals
    assert site.predicted_us["cpu_kernel (valid_range)"] < site.predicted_us["cpu_kernel"]


def test_not_where_it_is_not_allowed() -> None:
    site = explained(attend(lambda p: keys(4096) <= p), *qkv(4, 8, 1, 4096, 64), POSITION, poor_cases=())
    assert site.poor_cases == () and not any("valid_range" in name for name in (*site.refusals, *site.predicted_us))


def test_a_mask_without_one_has_no_such_form() -> None:
    site = explained(attend(MASKS["padding"][0]), *qkv(2, 3, 5, 50), MASKS["padding"][1])
    assert not any("valid_range" in name for name in (*site.refusals, *site.predicted_us))
