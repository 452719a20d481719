"""What other compilers get wrong is right with the pass; a wrong one, and one that fails, are told apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import attn_pass
from bench.harness.document import Table
from bench.suites import others, others_generated
from bench.suites.elsewhere import BACKENDS
from bench.suites.found_elsewhere import PROGRAMS


@pytest.fixture(autouse=True)
def verify_folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_PASS_VERIFY_DIR", str(tmp_path))


@pytest.mark.parametrize("name", PROGRAMS)
def test_with_the_pass_it_is_right(name: str) -> None:
    program = PROGRAMS[name]
    made = others.row(name, attn_pass.wrap("aot_eager", choose="fused"), program.function, *program.inputs())
    assert (made["whole"], made["wrong"]) == ("right", 0), made["why"]


def test_stock_takes_an_added_boolean_for_a_condition() -> None:
    program = PROGRAMS["a boolean mask that is added"]
    made = others.row("", BACKENDS["inductor"][1], program.function, *program.inputs())
    assert made["whole"] == "WRONG" and others.is_found(made)


def test_what_fails_and_what_is_wrong_are_counted_apart() -> None:
    def fails(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        raise NotImplementedError("no such kernel | here")

    program = PROGRAMS["grouped heads"]
    made = others.row("x", fails, program.function, *program.inputs())
    assert made["whole"] == "not run" and "no such kernel / here" in made["why"]
    wrong = {**made, "whole": "WRONG", "wrong": 0}
    alone = {**made, "whole": "right", "wrong": 1}
    assert others.notes([made, wrong, alone])[0] == (
        "3 programs: 1 wrong without a word, 1 that do not compile or were not run; "
        "1 more are wrong only in a site that is compiled alone"
    )
    assert others.is_found(alone) and not others.is_found({**made, "whole": "right", "wrong": 0})


# ---------------------------------------------------------------- generated programs


def programs(count: int) -> list[others_generated.Generated]:
    return list(others_generated.generated(count, seed=3))


def test_generated_programs_are_the_same_from_any_start() -> None:
    assert [p.name for p in others_generated.generated(6, 3, start=4)] == [p.name for p in programs(6)[4:]]
    narrow = [p for p in others_generated.generated(40, 3, in_float32=True)]
    assert all(x.dtype in (torch.float32, torch.bool, torch.int64) for p in narrow for x in p.inputs)


def test_one_compile_serves_many_and_tells_them_apart() -> None:
    compiles = []

    def wrong_for_softmax(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        compiles.append(len(inputs))
        last = gm.graph.find_nodes(op="output")[0]
        first = last.args[0][0]
        with gm.graph.inserting_before(last):
            doubled = gm.graph.call_function(torch.mul, (first, 2))
        first.replace_all_uses_with(doubled, delete_user_cb=lambda user: user is last)
        gm.recompile()
        return gm.forward

    drawn = programs(6)
    found = others_generated.outcomes(drawn, wrong_for_softmax)
    assert len(compiles) == 1 and [o.number for o in found] == list(range(6))
    assert found[0].verdict == "WRONG" and "error" in found[0].why
    assert {o.verdict for o in found[1:]} <= {"right", "not run"}


def test_a_compile_that_fails_is_halved_down_to_the_program_that_fails() -> None:
    drawn = programs(6)
    (bad,) = drawn[4].inputs[:1]
    given = [x.shape for x in drawn[4].inputs]

    def fails_for_one(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        shapes = [x.shape for x in inputs if isinstance(x, torch.Tensor)]
        if any(shapes[at : at + len(given)] == given for at in range(len(shapes))):
            raise NotImplementedError("no such kernel")
        return gm.forward

    found = others_generated.outcomes(drawn, fails_for_one)
    assert bad.numel() and found[4].verdict == "not run" and "the compiler fails" in found[4].why
    assert [o.number for o in found] == list(range(6)) and sum("compiler fails" in o.why for o in found) == 1


def test_a_run_goes_on_where_it_ended(tmp_path: Any) -> None:
    kept = tmp_path / "kept.jsonl"
    backend = BACKENDS["inductor"][1]
    others_generated.keep(kept, others_generated.outcomes(programs(2), backend))
    known = others_generated.read(kept)
    assert [o.number for o in known] == [0, 1]
    steps = list(others.checked(4, 3, "inductor", float("inf"), kept, together=1))
    assert [len(found) for found in steps] == [2, 3, 4] and steps[0] == known
    assert others_generated.read(kept) == steps[-1]
    table = Table("", others.FOUND)
    others.fill(table, steps[-1])
    assert table.notes[0].startswith("4 programs: ")
