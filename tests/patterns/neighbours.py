"""`Pair`: a named form of attention and a look-alike, a similar program with another meaning."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pytest
import torch
from against_eager import FLEX_ON_CPU, same, same_each
from torch import Tensor

Program = Callable[..., Any]
INF = float("inf")
LOWEST = torch.finfo(torch.float32).min
NO_SITE = "no site"


class NotRewritten(AssertionError):
    """The numbers are right, and the form was left."""


@dataclass(frozen=True)
class Pair:
    """Two programs of the same inputs.

    ``told`` and ``near_told`` are what the report says of the last site: its fields, and ``kv_heads``. A neighbour that
    is no attention is ``left``: the words are in the reason that "sdpa" gave.
    """

    form: Program
    neighbour: Program
    inputs: tuple[Any, ...]
    reported: dict[str, Any] = field(default_factory=dict)
    near_reported: dict[str, Any] = field(default_factory=dict)
    left: str = ""
    grad: bool = False
    sites: int = 1
    missing: str = ""  # why the form is not rewritten, though it should be


def softmax(scores: Tensor) -> Tensor:
    return torch.softmax(scores, -1)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float = 0.25) -> Tensor:
    return softmax(q @ k.mT * scale) @ v


def pairs(table: dict[str, Pair]) -> pytest.MarkDecorator:
    """Two tests of each pair: the form, once if several pairs share it, and with ``near`` the neighbour."""
    rows: list[Any] = []
    seen: list[Program] = []
    for name, pair in table.items():
        marks = [pytest.mark.xfail(strict=True, reason=pair.missing, raises=NotRewritten)] if pair.missing else []
        if pair.form not in seen:
            rows.append(pytest.param(pair, False, id=name, marks=marks))
        rows.append(pytest.param(pair, True, id=f"near {name}"))
        seen.append(pair.form)
    return pytest.mark.parametrize("pair, near", rows)


def groups(table: dict[str, Pair]) -> pytest.MarkDecorator:
    """As `pairs`, for `check_each`: together what is rewritten, and alone each pair whose sites are not counted."""
    rows: list[Any] = []
    for near in (False, True):
        told = {name: pair.near_reported if near else pair.reported for name, pair in table.items()}
        alone = {n for n, p in table.items() if p.missing or (near and p.left) or told[n].get("target") == "flex"}
        for grad in (False, True):
            group = {n: p for n, p in table.items() if n not in alone and p.grad == grad}
            if not near:  # a form that several pairs share is compiled once
                group = {n: p for n, p in group.items() if n == next(m for m in group if group[m].form == p.form)}
            if group:
                rows.append(pytest.param(group, near, id=f"{'near ' * near}{'trained' if grad else 'all'}"))
        by_themselves = {n: p for n, p in table.items() if n in alone}  # in the table's order: a set has none
        rows += [row for row in pairs(by_themselves).args[1] if row.values[1] == near]
    return pytest.mark.parametrize("group, near", rows)


def check_each(group: Mapping[str, Pair] | Pair, near: bool, **options: Any) -> None:
    """`check` of pairs whose every site is rewritten, in one graph."""
    if isinstance(group, Pair):
        check(group, near, **options)
        return
    programs = {name: (pair.neighbour if near else pair.form, pair.inputs) for name, pair in group.items()}
    grad = any(pair.grad for pair in group.values())
    report = same_each(programs, rewritten=None, grad=grad, **options)
    count = sum(pair.sites for pair in group.values())
    assert [s.outcome for s in report.sites] == ["rewritten"] * count, [(s.outcome, s.reason) for s in report.sites]
    sites = iter(report.sites)
    for name, pair in group.items():
        _told(list(islice(sites, pair.sites))[-1], pair.near_reported if near else pair.reported, name)
        assert not near or tells_apart(pair), f"the inputs do not distinguish the look-alike from the form: {name}"


def check(pair: Pair, near: bool, **options: Any) -> None:
    """The program is eager's and float64's in every result, gradient and written input, and is told for what it is."""
    program, reported = (pair.neighbour, pair.near_reported) if near else (pair.form, pair.reported)
    if reported.get("target") == "flex" and not FLEX_ON_CPU:
        pytest.skip("this torch has no FlexAttention on the CPU that the pass takes")
    report = same(program, *pair.inputs, grad=pair.grad, **options)
    if near:
        assert tells_apart(pair), "the inputs do not distinguish the look-alike from the form"
    said = [(s.outcome, s.reason, s.mask, s.shapes) for s in report.sites]
    if near and pair.left == NO_SITE:
        assert not report.sites, said
        return
    if near and pair.left:
        assert report.sites and re.search(pair.left, _refusal(report.sites[-1])), said
        return
    if pair.missing and not near and not report.rewritten:
        raise NotRewritten(said)
    assert [s.outcome for s in report.sites] == ["rewritten"] * pair.sites, said
    _told(report.sites[-1], reported, said)


def _told(site: Any, reported: dict[str, Any], said: Any) -> None:
    facts = {**vars(site), "kv_heads": site.shapes["key"][1]}
    assert {name: facts[name] for name in reported} == reported, said


def _refusal(site: Any) -> str:
    """Why it is no attention; a function of the scores that "flex" takes is none for "sdpa"."""
    return site.refusals["sdpa"] if site.target == "flex" else site.reason if site.outcome == "left" else ""


def tells_apart(pair: Pair) -> bool:
    """Whether form and neighbour give different results for the inputs of the pair."""
    first, second = (_first(p(*(_clone(x) for x in pair.inputs))) for p in (pair.form, pair.neighbour))
    return first.shape != second.shape or not torch.allclose(first, second, atol=1e-3, equal_nan=True)


def _clone(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _first(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]
