"""The tables of reasons that targets refuse by, one row each: an attention on both sides of every row."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator
from typing import Any

import cpu_sides
import flex_sides
import gpu_sides
import pytest
from described import case
from sides import Given, Table

import attn_pass.devices
import attn_pass.targets
from attn_pass.devices import registry
from attn_pass.devices.npu import contract
from attn_pass.devices.npu import rules as npu_rules
from attn_pass.devices.registry import families
from attn_pass.targets.base import Offer, Refusal
from attn_pass.targets.constraints import Attended, Constraint, first_failed
from attn_pass.targets.flex import rules as flex_rules
from attn_pass.targets.kernel_rules import KernelRules

TABLES: dict[str, Table] = {**cpu_sides.TABLES, **flex_sides.TABLES, **gpu_sides.TABLES}
PAIRS = [(table, row, *pair) for table, of in TABLES.items() for row, pairs in of.sides.items() for pair in pairs]


def asked(table: Table, changes: Given, patch: pytest.MonkeyPatch) -> tuple[Attended, Constraint[Any] | None]:
    """A case, and the first row that refuses it."""
    case, environment = table.case(changes)
    for name, value in environment.items():
        patch.setattr(name, value)
    return case, first_failed(table.rows, table.made(case))


@pytest.mark.parametrize(
    ("name", "row", "taken", "refused"), PAIRS, ids=[f"{name}, {row}, {n}" for n, (name, row, *_) in enumerate(PAIRS)]
)
def test_both_sides(name: str, row: str, taken: Given, refused: Given) -> None:
    table = TABLES[name]
    for changes in (taken, refused):
        with pytest.MonkeyPatch.context() as patch:
            case, failed = asked(table, changes, patch)
            answer = table.target.consider(case.attention, "as written", case.setting)
            if changes is taken:
                assert failed is None and isinstance(answer, Offer), failed or answer
            else:
                assert failed is not None and failed.name == row, failed
                assert isinstance(answer, Refusal) and answer.reason == failed.why(table.made(case)) != ""


@pytest.mark.parametrize("name", TABLES)
def test_every_row_refuses_something(name: str) -> None:
    """Rows of one name are told apart."""
    table = TABLES[name]
    refusing = []
    for pairs in table.sides.values():
        for _, refused in pairs:
            with pytest.MonkeyPatch.context() as patch:
                refusing.append(asked(table, refused, patch)[1])
    assert {row.name for row in table.rows} == set(table.sides)
    assert [row.name for row in table.rows if not any(row is other for other in refusing)] == []


def test_flex_elsewhere_takes_nothing() -> None:
    """Its nearest neighbours are on other devices."""
    target, rows = flex_sides.CPP.target, flex_rules.ELSEWHERE
    for capped, name in ((flex_sides.CAPPED, "device"), ({}, "scores")):
        elsewhere, there = (case(registry.by_name(device), **capped) for device in ("Ascend 910B", "H200"))
        failed = first_failed(rows, flex_sides.made(elsewhere))
        assert failed is not None and failed.name == name
        answer = target.consider(elsewhere.attention, "as written", elsewhere.setting)
        assert isinstance(answer, Refusal) and answer.reason == failed.why(flex_sides.made(elsewhere))
        assert not capped or isinstance(target.consider(there.attention, "as written", there.setting), Offer)


# ---------------------------------------------------------------- no table is without


def rows_in(value: Any) -> Iterator[Constraint[Any]]:
    """The rows in a module's variable: a row, or a sequence or mapping that has some."""
    if isinstance(value, Constraint):
        yield value
    elif isinstance(value, KernelRules):
        yield from value.rules
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from rows_in(each)
    elif isinstance(value, dict):
        yield from rows_in(list(value.values()))


def every_row() -> Iterator[tuple[str, Constraint[Any]]]:
    """Every row of a table in the targets and devices, with the module that has it."""
    for package in (attn_pass.targets, attn_pass.devices):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            for value in vars(importlib.import_module(module.name)).values():
                if isinstance(value, (tuple, list, dict, KernelRules)):
                    yield from ((module.name, row) for row in rows_in(value))


def covered() -> Iterable[Constraint[Any]]:
    """The rows with both sides here; in test_kernel_rules.py; of runtimes; and of Ascend's operators."""
    yield from (row for table in TABLES.values() for row in table.rows)
    for family in families():
        yield from (rule for of in family.kernel_rules.values() for rule in of.rules)
        yield from family.rules() if family.is_runtime else ()
    yield from flex_rules.ELSEWHERE
    yield from npu_rules.RULES
    yield from contract.RULES


def test_every_row_of_every_table_has_both_sides() -> None:
    known = {id(row) for row in covered()}
    assert {(module, row.name) for module, row in every_row() if id(row) not in known} == set()
