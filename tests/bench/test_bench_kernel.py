"""The benchmark of the CPU kernel: its cases are right in every peer, and a wrong result fails it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from attn_pass.measuring.timing import relative_error
from bench.__main__ import app
from bench.harness import document
from bench.suites.kernel import cases, mask_cost, peers
from bench.suites.kernel import command as bench
from bench.suites.kernel.read import reader

SMALL = {"LENGTH": 300, "CACHE": 150, "VALID": 70, "DOCUMENT": 40}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short sequences, with as many masked keys as the real ones have."""
    for module in (cases, peers):
        for name, size in SMALL.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, size)
    threads = torch.get_num_threads()
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("case", [*cases.MANY, *cases.FEW], ids=lambda c: c.name)
def test_every_case_is_right_in_the_kernel_and_in_sdpa(case: cases.Case | cases.Few) -> None:
    inputs = case.inputs(torch.float32)
    exact = case.exact(inputs)
    for build in (peers.ours, peers.sdpa):
        run = build(case, inputs)
        if run is not None:
            assert relative_error(run(), exact) <= cases.TOLERANCE[torch.float32]
    assert (peers.sdpa(case, inputs) is None) == (case.name == "soft cap, causal")


def test_flex_is_built_once_for_all_numbers_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled here: it is the function that is checked."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    for case in (c for c in cases.MANY if c.flex):
        inputs = case.inputs(torch.float32)
        built = peers.Peers(case, inputs)
        first, second = (built.runs()[peers.FLEX] for _ in range(2))
        assert first is second and not built.failures
        assert relative_error(first(), case.exact(inputs)) <= cases.TOLERANCE[torch.float32]


def test_flops_are_those_of_the_pairs_that_are_kept() -> None:
    full, causal = cases.MANY[0], cases.MANY[1]
    inputs, grouped = full.inputs(torch.float32), cases.FEW[2]
    assert cases.flops(full, inputs) == 4 * 4 * 300 * 300 * 64
    assert cases.flops(causal, inputs) == pytest.approx(4 * 4 * (300 * 301 / 2) * 64)
    assert cases.flops(grouped, grouped.inputs(torch.float32)) == 4 * (4 * 8 * 4) * 150 * 64


def test_a_read_sees_every_byte() -> None:
    numbers = torch.arange(100_003, dtype=torch.int64)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert reader()(numbers) == int(numbers.sum())


@pytest.mark.slow
def test_rows_of_both_tables_have_shares_and_ratios(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(peers._BUILDERS, peers.FLEX, lambda case, inputs: None)  # seconds of compiling each
    options = ["--quick", "--threads", "1,2", "--rounds", "1", "--json", str(tmp_path / "k.json")]
    reported = CliRunner().invoke(app, ["kernel", *options])
    assert reported.exit_code == 0, reported.output
    made = document.read(tmp_path / "k.json")
    assert [len(table.rows) for table in made.tables] == [12, 12]
    for row in (row for table in made.tables for row in table.rows):
        assert row["share"] > 0 and row["noise"] >= 0 and row["SDPA"] > 0 and row["verdict"] == ""
        assert row["share"] <= row["of_roofline"]
        assert (row["scaling"] is not None) == (row["threads"] == 2)
    assert "**bfloat16, 2 threads**" in (tmp_path / "k.md").read_text()


def test_a_kernel_that_is_wrong_fails_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = bench.ours
    monkeypatch.setattr(bench, "ours", lambda case, inputs: lambda: right(case, inputs)() + 1)
    options = ["--quick", "--threads", "1", "--only", "full", "--json", str(tmp_path / "k.json")]
    assert CliRunner().invoke(app, ["kernel", *options]).exit_code == 1
    rows = json.loads((tmp_path / "k.json").read_text())["tables"][0]["rows"]
    assert {row["verdict"] for row in rows} == {"WRONG"}


def test_a_peer_that_fails_is_told_and_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(case: object, inputs: object) -> None:
        raise RuntimeError("no such node")

    monkeypatch.setitem(peers._BUILDERS, peers.OPENVINO, broken)
    built = peers.Peers(cases.MANY[0], cases.MANY[0].inputs(torch.float32))
    assert peers.SDPA in built.runs() and built.failures == {peers.OPENVINO: "RuntimeError: no such node"}


@pytest.mark.parametrize("text", ["", "0", "1,x"])
def test_threads_that_are_no_numbers_are_refused(text: str) -> None:
    assert CliRunner().invoke(app, ["kernel", "--threads", text]).exit_code == 2


def test_what_a_mask_costs_is_measured_for_every_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mask_cost, "SIZES", (mask_cost.Size(2, 2, 70, 90), mask_cost.Size(1, 2, 1, 200)))
    options = ["--rounds", "1", "--json", str(tmp_path / "m.json")]
    reported = CliRunner().invoke(app, ["mask-cost", *options])
    assert reported.exit_code == 0, reported.output
    (table,) = document.read(tmp_path / "m.json").tables
    assert [row["program"] for row in table.rows] == ["float32"] * 2 + ["bfloat16"] * 2
    for row in table.rows:
        assert row["ms"] > 0 and row["error"] == 0 and min(row["of_keys"], row["of_pairs"]) > -1


def test_a_mask_that_changes_the_result_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = torch.ones(1, 1, 1, 90, dtype=torch.bool)
    hidden[..., 0] = False
    monkeypatch.setattr(mask_cost.Size, "masks", lambda size: {"of_keys": hidden, "of_pairs": hidden})
    monkeypatch.setattr(mask_cost, "SIZES", (mask_cost.Size(1, 2, 70, 90),))
    assert CliRunner().invoke(app, ["mask-cost", "--rounds", "1"]).exit_code == 1
