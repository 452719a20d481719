"""What other compilers get wrong is right with the pass; a wrong one, and one that fails, are told apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import attn_pass
from bench.suites import others
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
