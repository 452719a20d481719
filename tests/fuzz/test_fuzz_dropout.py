"""Dropout of the CPU kernel, as the fuzzer compares it: what is dropped elsewhere is found, in a call and a program."""

from __future__ import annotations

from typing import Any

import fuzz_property
import kernel_reference
import philox
import pytest
import torch
from fuzz_dropout import Calls, SameKeys
from fuzz_program import Program, Step
from fuzz_property import Wrong, check
from fuzz_run import on_target, with_dropout
from fuzz_strategy import Case
from torch import Tensor

ROWS = Program(lead=(2, 2), q_len=5, kv_len=7, seed=3)
CALL = Program(lead=(2, 2), q_len=5, kv_len=7, call=True, dropout=0.5)
TRANSPOSED = Program(
    lead=(2, 2), q_len=5, kv_len=5, seed=3, softmax=Step(row="queries"), times=Step(row="weights transposed")
)


@pytest.mark.parametrize("program", [ROWS, CALL, TRANSPOSED], ids=["by hand", "a call", "weights transposed"])
@pytest.mark.parametrize("training", [False, True])
def test_calls_with_dropout_are_made_and_compared(
    program: Program, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Calls] = []

    class Kept(Calls):
        def __enter__(self) -> Calls:
            made.append(self)
            return super().__enter__()

    monkeypatch.setattr(fuzz_property, "Calls", Kept)
    case = on_target("cpu_kernel", training=training)(Case(program))
    check(case if training else with_dropout(case))
    assert [len(calls.made) for calls in made] == [1]


def test_a_call_that_drops_other_weights_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(seed: Tensor, *rest: Any) -> Tensor:
        return philox.left(seed + 1, *rest)

    monkeypatch.setattr(kernel_reference, "left", other)
    with pytest.raises(Wrong, match="of a call"):
        check(on_target("cpu_kernel", training=True)(Case(CALL)))


@pytest.mark.parametrize("program", [ROWS, CALL, TRANSPOSED], ids=["by hand", "a call", "weights transposed"])
def test_a_program_that_drops_other_weights_is_wrong(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_property, "SameKeys", lambda first, axis: SameKeys(first + 1, axis))
    with pytest.raises(Wrong, match="gradients"):
        check(on_target("cpu_kernel", training=True)(Case(program)))


def test_dropout_of_keys_is_dropout() -> None:
    """Of a key's weights all or none are left, and what is left is divided by what is left of 1."""
    with SameKeys():
        weights = torch.nn.functional.dropout(torch.ones(3, 10), 0.5)
        kept = torch.nn.functional.dropout(torch.ones(3, 10), 0.5, training=False)
    assert kept.eq(1).all() and weights.eq(weights[0]).all() and sorted(set(weights[0].tolist())) == [0.0, 2.0]
