"""Generated programs equal eager, near misses too; with a fixed seed here, and with any seed by `make fuzz`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from fuzz_faults import FAULTS, PACKAGE, Fault
from fuzz_found import FOUND
from fuzz_program import Program
from fuzz_property import Tally, belonging, check, classes
from fuzz_run import batch
from fuzz_strategy import Case, called, cases, windowed
from hypothesis import Phase, given, seed, settings


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # sizes are tiny, and the workers of a test run share the cores


@pytest.mark.parametrize("part", range(4))
def test_generated_programs(part: int) -> None:
    tally = Tally()
    batch(part, 450, tally)
    counts = tally.counts
    # A fuzzer that rewrites nothing proves nothing.
    assert counts["plain, rewritten"] > 0.5 * counts["plain"], counts
    assert counts["near misses"] > 100, counts
    assert counts["near misses, rewritten"] > 20, counts
    assert counts["no program"] < 60, (counts, tally.reasons)
    assert counts["not compared"] < 10, counts


def test_every_class_of_programs_is_drawn() -> None:
    drawn: Counter[str] = Counter()

    for number in range(32):  # programs of one seed come in clumps
        if all(drawn[name] for name in belonging(Case(Program()))):
            return

        @settings(max_examples=50, deadline=None, database=None, phases=[Phase.generate])
        @seed(number)
        @given(cases())
        def draw(case: Case) -> None:
            drawn.update(classes(case))

        draw()
    pytest.fail(f"of 1,600 programs: {drawn}")


@pytest.mark.parametrize(("target", "change"), [("local", windowed), ("decomposed", called)])
def test_targets_that_few_programs_reach(target: str, change: Callable[[Case], Case]) -> None:
    tally = Tally()
    batch(200, 60, tally, change=change)
    assert tally.counts[f"target {target}"] > 15, (tally.counts, tally.reasons)


# A program that Dynamo or export writes costs as much as five that are written directly, Inductor's code as 200.
@pytest.mark.parametrize(
    ("through", "count"), [("compile", 100), ("export", 100), pytest.param("inductor", 4, marks=pytest.mark.slow)]
)
def test_generated_programs_through_dynamo_inductor_and_export(through: str, count: int) -> None:
    tally = Tally()
    batch(
        100,
        count,
        tally,
        through,
        accepts=lambda case: (
            case.later is None and not case.program.is_random and (through != "export" or not case.grad)
        ),
    )
    assert tally.counts["plain, rewritten"] > count // 10, tally.counts


@pytest.mark.parametrize("case", FOUND, ids=[name for name, _ in FOUND])
def test_what_was_found(case: tuple[str, Case]) -> None:
    check(case[1])


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_to_put_in_still_has_its_place(fault: Fault) -> None:
    """`fuzz_faults.py` takes minutes a fault, and is run by hand: a line that moved would end it."""
    assert (PACKAGE / fault.file).read_text().count(fault.right) == 1
