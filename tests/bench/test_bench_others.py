"""What other compilers get wrong is right with the pass; a wrong one, and one that fails, are told apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import attn_pass
from attn_pass.measuring.timing import tensors
from bench.harness.document import Table
from bench.suites import others, others_exported, others_generated
from bench.suites.elsewhere import BACKENDS
from bench.suites.found_elsewhere import PROGRAMS
from bench.suites.others_exported import Exported, Inputs, Part


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
    assert (made["whole"], made["fail"], made["wrong"]) == ("FAILS", 1, 0) and "no such kernel / here" in made["why"]
    wrong = {**made, "whole": "WRONG", "fail": 0}
    alone = {**made, "whole": "right", "fail": 0, "wrong": 1}
    assert others.notes([made, wrong, alone])[0] == (
        "3 programs: 1 wrong without a word, 1 that do not compile or run; "
        "1 more are wrong only in a site that is compiled alone"
    )
    assert others.is_found(alone) and others.is_found({**made, "whole": "right"})
    assert not others.is_found({**made, "whole": "right", "fail": 0})


# ---------------------------------------------------------------- generated programs


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q @ k.mT * 0.25).softmax(-1) @ v


def programs(count: int) -> list[others_generated.Generated]:
    """Attention of as many lengths."""
    inputs = [tuple(torch.randn(1, 2, 3 + n, 4) for _ in range(3)) for n in range(count)]
    return [others_generated.Generated(n, f"p{n}", by_hand, by_hand, given) for n, given in enumerate(inputs)]


def by_parts(backend: Callable[..., Any]) -> others_generated.Together:
    return others_generated.exported(others_exported.by_dynamo(backend))


def test_drawn_programs_are_the_same_from_any_start() -> None:
    drawn = [p.name for p in others_generated.generated(6, 3)]
    assert [p.name for p in others_generated.generated(6, 3, start=4)] == drawn[4:] and len(set(drawn)) > 1
    narrow = others_generated.generated(6, 3, in_float32=True)
    assert not any(x.dtype in (torch.bfloat16, torch.float16) for p in narrow for x in p.inputs)


def test_programs_near_to_plain_attention_match_patterns_of_inductor() -> None:
    counters.clear()
    drawn = list(others_generated.generated(12, 3, near=True))
    found = others_generated.outcomes(drawn, others_generated.together("inductor"))
    assert counters["inductor"]["fuse_attention"] > 3
    assert len(found) == 12 and len({o.name for o in found}) > 6


def test_one_compile_serves_many_and_tells_them_apart() -> None:
    compiles = []

    def wrong_for_the_first(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        compiles.append(gm)
        softmax = next(n for n in gm.graph.nodes if n.target is torch.ops.aten.softmax.int)
        softmax.args = (softmax.args[0], -2)
        gm.recompile()
        return gm.forward

    found = others_generated.outcomes(programs(3), by_parts(wrong_for_the_first))
    assert len(compiles) == 1 and [o.verdict for o in found] == ["WRONG", "right", "right"]
    assert "is allowed" in found[0].why and [o.number for o in found] == [0, 1, 2]


def test_a_compile_that_fails_is_halved_down_to_the_program_that_fails() -> None:
    def fails_for_one(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        if any(x.shape[2] == 5 for x in inputs):
            raise NotImplementedError("no such kernel")
        return gm.forward

    found = others_generated.outcomes(programs(4), by_parts(fails_for_one))
    assert [o.verdict for o in found] == ["right", "right", "FAILS", "right"]
    assert "the compiler fails" in found[2].why and "no such kernel" in found[2].why


def test_one_export_serves_many_and_what_a_runtime_does_not_take_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    exports = []

    def runtime(exported: Exported) -> list[Part]:
        exports.append(exported)
        results = tensors(exported.program.module()(list(exported.examples)))

        def part(number: int, given: Inputs) -> list[torch.Tensor]:
            if number == 1:
                raise NotImplementedError("no such kernel")
            return [results[n] + (number == 2) for n in exported.results[number]]

        return [partial(part, number) for number in range(len(exported.inputs))]

    monkeypatch.setitem(others_exported.PARTS, "onnxruntime", runtime)
    found = others_generated.outcomes(programs(4), others_generated.together("onnxruntime"))
    assert len(exports) == 1 and [o.verdict for o in found] == ["right", "FAILS", "WRONG", "right"]
    assert "the compiler fails: NotImplementedError: no such kernel" in found[1].why


def test_what_torch_export_does_not_trace_is_nobodys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_value(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return by_hand(q, k, v) if q.sum() > 1e9 else v

    monkeypatch.setitem(others_exported.PARTS, "openvino", lambda exported: [])
    (one,) = programs(1)
    (found,) = others_generated.outcomes([replace(one, function=by_value)], others_generated.together("openvino"))
    assert found.verdict == "not run" and "torch.export does not trace it" in found.why
    table = Table("", others.FOUND)
    others.fill(table, [found])
    assert table.rows == [] and "0 that do not compile, 1 that were not compared" in table.notes[0]


def test_what_does_not_run_eagerly_is_nobodys_fault() -> None:
    (one,) = programs(1)
    unequal = replace(one, inputs=(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 5), torch.randn(1, 2, 3, 4)))
    (found,) = others_generated.outcomes([unequal], by_parts(lambda gm, inputs: gm.forward))
    assert found.verdict == "not run" and "eagerly it does not run either" in found.why
    table = Table("", others.FOUND)
    others.fill(table, [found])
    assert table.rows == [] and "0 that do not compile, 1 that were not compared" in table.notes[0]


def test_a_run_goes_on_where_it_ended(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(count: int, seed: int, *, start: int, **_: bool) -> list[others_generated.Generated]:
        return programs(count)[start:]

    monkeypatch.setattr(others, "generated", drawn)
    monkeypatch.setitem(others.BACKENDS, "inductor", ("", lambda gm, inputs: gm.forward))
    kept = tmp_path / "kept.jsonl"
    assert [len(f) for f in others.checked(2, 3, "inductor", float("inf"), kept, together=2)] == [0, 2]
    known = others_generated.read(kept)
    steps = list(others.checked(4, 3, "inductor", float("inf"), kept, together=1))
    assert [len(found) for found in steps] == [2, 3, 4] and steps[0] == known
    assert others_generated.read(kept) == steps[-1]
    assert [len(f) for f in others.checked(9, 3, "inductor", 0.0, kept, together=1)] == [4]
