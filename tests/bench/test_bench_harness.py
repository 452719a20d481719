"""The harness of the benches: variants of a program, floors, verdicts, tables, baselines, pictures."""

from __future__ import annotations

import math
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from typer.testing import CliRunner

from attn_pass.measuring import judging, timing
from bench import results_page
from bench.__main__ import app
from bench.harness import baseline, command, document, floors, measure, plots
from bench.harness import variants as w
from bench.harness.command import is_asked
from bench.harness.document import STANDARD, Document, Table
from bench.harness.programs import Program, Setting, program_of
from bench.suites import cases, commands, forms, masks, models, never_slower, padding, peers, runtimes, spellings
from bench.suites.seeds import s1, s2, s3, s4, s5, traffic
from bench.suites.seeds.command import chosen

QUICK = Setting(rounds=2, block_s=0.002, quick=True)
RATES = floors.Rates({"float32": 100.0, "bfloat16": 200.0}, 10.0)


def row(way: str, us: float, **more: Any) -> dict[str, Any]:
    times = {"median_us": us, "p10_us": us}
    return {"program": "p", "way": way, "status": "ok", **times, "error": 1e-7, "tolerance": 1e-5, **more}


# ---------------------------------------------------------------- one program, for real


@pytest.fixture(scope="module")
def measured() -> list[dict[str, Any]]:
    """A tiny form of S3 in a process of its own, without packages."""
    small = [program for program in s3.programs(QUICK) if "B1 " in program.name]
    ways = (w.EAGER, w.STOCK, w.STOCK_AGAIN, w.PASS)
    return measure.run(s3.__name__, small, ways, QUICK, RATES, lambda line: None)


@pytest.mark.slow
def test_a_program_is_measured_in_every_way(measured: list[dict[str, Any]]) -> None:
    assert [r["way"] for r in measured] == [w.EAGER, w.STOCK, w.STOCK_AGAIN, w.PASS]
    for row in measured:
        assert row["status"] == "ok" and row["error"] < 1e-6 and row["verdict"] != "WRONG"
        assert row["p10_us"] <= row["median_us"] <= row["p90_us"]
        assert row["noise"] >= judging.LEAST_NOISE
    by_way = {r["way"]: r for r in measured}
    assert by_way[w.STOCK]["over_stock"] == 1.0 and by_way[w.STOCK]["compile_s"] > 0
    assert by_way[w.PASS]["took"] and "took" not in by_way[w.STOCK]


@pytest.mark.slow
def test_a_program_that_fails_is_a_row() -> None:
    rows = measure.run(
        s1.__name__, [Program("no such program", s1.operands)], (w.EAGER,), QUICK, RATES, lambda line: None
    )  # type: ignore[arg-type]
    assert rows[-1]["status"] == "failed" and "StopIteration" in rows[-1]["error_text"]


def test_a_way_that_fails_leaves_the_others(tmp_path: Path) -> None:
    def fails(module: Any, inputs: Any, folder: Path) -> Any:
        raise RuntimeError("it cannot")

    program = Program("p", s3.programs(QUICK)[0].make, extra={"odd": fails})
    shop = w.Workshop(program, "cpu", tmp_path)
    candidates, failures = measure._built(shop, (w.EAGER, "odd", w.HAND))
    assert [c.name for c in candidates] == [w.EAGER] and failures == {"odd": "RuntimeError: it cannot"}


def test_two_compiles_of_a_program_share_nothing() -> None:
    seen = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(graph)
        return graph.forward

    runs = [timing.compiled(spellings.by_hand, backend=backend) for _ in range(2)]
    q = torch.randn(1, 1, 4, 8)
    for run in (*runs, *runs):
        torch.testing.assert_close(run(q, q, q), spellings.by_hand(q, q, q))
    assert len(seen) == 2


# ---------------------------------------------------------------- what is measured


def test_programs_are_asked_for_by_parts_of_their_names_or_by_a_whole_name() -> None:
    names = ("Llama, 1 x 2048", "Llama, 1 x 2048, SDPA", "Swin")
    asked = {only: [n for n in names if is_asked(only, n)] for only in ("Llama", "=Llama, 1 x 2048", "SDPA|=Swin")}
    assert list(asked.values()) == [[names[0], names[1]], [names[0]], [names[1], names[2]]]


def test_ways_that_need_too_much_memory_beside_the_others_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: dict[str, tuple[str, ...]] = {}

    def keep(module: str, programs: Any, ways: tuple[str, ...], *_: Any) -> list[Any]:
        measured[programs[0].name] = ways
        return [row(way, 1.0, program=programs[0].name) for way in ways]

    monkeypatch.setattr(commands, "run", keep)
    (large,), only = peers.TOO_LARGE[:1], "=" + "|=".join((*peers.TOO_LARGE[:1], "GPT-2 small, 1 x 1024"))
    tables = list(commands.tables_of(peers, peers.WAYS, only, Setting(), RATES, lambda line: None))
    program = program_of(peers.__name__, large, Setting())
    assert program.without and set(measured["GPT-2 small, 1 x 1024"]) >= set(peers.WAYS)
    assert measured[large] == tuple(way for way in (*peers.WAYS, *program.extra) if way not in program.without)
    told = [note for note in document.joined(None, tables[-1]).notes if "for their memory" in note]
    assert len(told) == 1 and large in told[0] and w.PACKAGE_FROZEN in told[0]


@pytest.mark.parametrize("module", [s1, s2, s3, s4, s5, forms, masks, peers, runtimes])
@pytest.mark.parametrize("quick", [False, True])
def test_programs_have_names_of_their_own(module: Any, quick: bool) -> None:
    setting = Setting(quick=quick)
    programs = module.programs(setting)
    assert programs and len({program.name for program in programs}) == len(programs)
    assert program_of(module.__name__, programs[-1].name, setting).name == programs[-1].name


@pytest.mark.parametrize("variant", masks.VARIANTS, ids=lambda v: v.name)
def test_a_specialist_s_form_is_the_same_function(variant: masks.Variant) -> None:
    length = 640  # longer than every window, prefix and document
    inputs = variant.inputs(length)
    makers = [variant.by_hand] if variant.by_hand is not None else []
    makers += [partial(masks._call_with, variant.dense)] if variant.dense is not None else []
    assert makers
    with torch.no_grad():
        want = variant.run(*(x.double() if x.is_floating_point() else x for x in inputs))
        for make in makers:
            got = make(length, "cpu")(*inputs)
            torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("module", [s1, s2, s3, s4, s5])
def test_the_seeds_specialist_s_form_is_the_same_function(module: Any) -> None:
    program = module.programs(QUICK)[0]
    _, inputs = program.make("cpu")
    with torch.no_grad():
        got = program.by_hand("cpu")(*inputs)
        want = program.exact("cpu", inputs)
    assert (got.double() - want).abs().max() <= program.tolerance * want.abs().max()


def test_the_masks_keep_the_share_that_the_floor_counts() -> None:
    for variant in masks.VARIANTS:
        if variant.kept == 1.0 or variant.name.startswith("causal to the last"):
            continue
        n = masks.LENGTH
        i, j = torch.arange(n)[:, None], torch.arange(n)
        keep = {
            "sliding window 256": (j <= i) & (i - j < 256),
            "prefix of 512": (j <= i) | (j < 512),
            "documents of 300, causal": (i // 300 == j // 300) & (j <= i),
        }.get(variant.name, j <= i)
        assert keep.float().mean().item() == pytest.approx(variant.kept, rel=0.02), variant.name


def test_collected_cases_are_those_that_must_be_fast(tmp_path: Path) -> None:
    text = """
import torch, torch.nn as nn
META = dict(issue="i", kind="{kind}", note="n"{more})
class M(nn.Module):
    def forward(s, x): return x + ONE
ONE = 1
def make(device="cpu"): return M(), (torch.randn(3),), {{}}
def ds(): return {{"x": {{0: torch.export.Dim("n", min=2, max=9)}}}}
"""
    (tmp_path / "000001_fast.py").write_text(text.format(kind="must_be_fast", more=", dynamic_shapes='ds'"))
    (tmp_path / "000002_other.py").write_text(text.format(kind="must_fuse", more=""))
    (tmp_path / "run.py").write_text("raise SystemExit")
    (program,) = cases.programs(Setting(folder=str(tmp_path)))
    assert program.name == "000001_fast" and cases.is_packaged(program) and program.by_hand is None
    module, inputs = program.make("cpu")
    result = torch.compile(module, backend="eager")(*inputs)  # Dynamo finds the case's globals
    torch.testing.assert_close(result, inputs[0] + 1)
    with pytest.raises(FileNotFoundError, match="--cases"):
        cases.paths(tmp_path / "nowhere")


def test_a_run_of_seeds_has_the_tables_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "rates", lambda device: RATES)
    tables = {name: Table(name, STANDARD, [row(w.STOCK, 1.0)]) for name in ("S2", "S4")}
    for name, module in (("S2", s2), ("S4", s4)):
        monkeypatch.setattr(module, "tables", lambda *_, name=name: [tables[name]])
    done = CliRunner().invoke(app, ["seeds", "--only", "s4,S2", "--json", str(tmp_path / "run.json")])
    assert done.exit_code == 0, done.output
    assert [table.title for table in document.read(tmp_path / "run.json").tables] == ["S4", "S2"]


def test_seeds_are_chosen_by_name() -> None:
    assert chosen("") == ["S1", "S2", "S3", "S4", "S5"] and chosen("s4, S1") == ["S4", "S1"]
    with pytest.raises(typer.BadParameter, match="S9"):
        chosen("S9")


# ---------------------------------------------------------------- floors and traffic


def test_flops_are_those_of_the_two_products() -> None:
    q, k = torch.randn(2, 4, 16, 8), torch.randn(2, 4, 24, 8)
    flops = 4 * 2 * 4 * 16 * 24 * 8
    for run in (lambda: (q @ k.mT).softmax(-1) @ k, lambda: F.scaled_dot_product_attention(q, k, k)):
        assert floors.count_flops(run, ()) == flops


def test_an_expanded_tensor_is_in_memory_once() -> None:
    assert floors.extent(torch.randn(1, 4).expand(1000, 4)) == 16
    assert floors.moved_bytes((torch.randn(8), 3), [torch.randn(2)]) == 40
    x = torch.randn(1024)
    assert floors.moved_bytes((x, x), ()) == 4096 and floors.extent(x.unfold(0, 512, 1)) == 4096


def test_the_floor_is_the_longer_of_computing_and_moving() -> None:
    assert RATES.floor_us(1e9, 10, "float32") == pytest.approx(1e4)
    assert RATES.floor_us(1e9, 10, "bfloat16") == pytest.approx(5e3) and RATES.bound(1e9, 10, "float16") == "products"
    assert RATES.floor_us(1.0, 10**6, "float32") == pytest.approx(100.0)
    assert RATES.bound(1.0, 10**6, "float32") == "memory"


def test_views_move_nothing_and_operators_what_they_read_and_write() -> None:
    x = torch.randn(4, 8)
    with traffic.Traffic() as counted:
        y = x.t().unsqueeze(0)
        assert counted.read == counted.written == 0
        y + 1
    assert counted.read == counted.written == 128


def test_traffic_nearly_disappears_when_fused() -> None:
    shape = (1, 2, 256, 64)
    unfused, fused = sum(traffic.unfused_model(*shape)), sum(traffic.fused_model(*shape))
    assert fused == 4 * 2 * 256 * 64 * 2
    assert 1 - sum(traffic.fused_model(4, 32, 2048, 64)) / sum(traffic.unfused_model(4, 32, 2048, 64)) > 0.98
    q, k, v = (torch.randn(shape, dtype=torch.float16) for _ in range(3))
    with traffic.Traffic() as counted:
        s5.causal(q, k, v)
    # The mask is made in two operators, and bmm copies nothing here.
    assert counted.read + counted.written == pytest.approx(unfused, rel=0.1)


@pytest.mark.parametrize("name", ["overlap", "tiles"])
def test_parts_that_cannot_be_measured_here_show_the_committed_run(name: str) -> None:
    table = s1.of_jax(name)
    assert table.title.startswith("S1, XLA: ") and table.cells()[1]
    if find_spec("libtpu") is None and find_spec("torch_xla") is None:
        assert table.notes[0].startswith("of the committed run")


def test_the_npu_s_rows_are_predicted_at_the_report_s_sizes() -> None:
    made = list(s5.npu())
    assert [table.title.split(",")[0] for table in made] == ["S5.1", "S5.2", "S5.3", "S5.4"]
    assert all("predicted" in table.title and "nothing ran" in table.notes[0] for table in made)
    assert [row["fits"] for row in made[2].rows] == ["yes", "yes", "yes", "no"]
    assert len(made[1].rows) == len(s5.SPEEDUPS)
    assert all(table.cells()[1] for table in made)


# ---------------------------------------------------------------- verdicts


def test_what_lies_within_the_noise_is_the_same() -> None:
    rows = [row(w.STOCK, 100.0), row(w.STOCK_AGAIN, 108.0), row(w.PASS, 95.0), row(w.HAND, 50.0), row(w.EAGER, 300.0)]
    verdicts = {r["way"]: r["verdict"] for r in measure.judged(rows)}
    assert verdicts[w.PASS] == "same" and verdicts[w.HAND] == "faster" and verdicts[w.EAGER] == "slower"


def test_code_of_two_speeds_is_no_faster_by_the_median_alone() -> None:
    rows = [row(w.STOCK, 30.0, p10_us=17.0), row(w.STOCK_AGAIN, 30.0, p10_us=17.0), row(w.HAND, 23.0, p10_us=16.7)]
    assert measure.judged(rows)[-1]["verdict"] == "same"


def test_packages_are_compared_with_the_stock_package() -> None:
    rows = [row(w.STOCK, 10.0), row(w.STOCK_AGAIN, 10.0), row(w.PACKAGE, 100.0), row(w.PACKAGE_AGAIN, 100.0)]
    by_way = {r["way"]: r for r in measure.judged([*rows, row(w.PACKAGE_PASS, 50.0)])}
    assert by_way[w.PACKAGE_PASS]["over_stock"] == 2.0


def test_the_frozen_pass_is_compared_with_frozen_stock_and_its_noise() -> None:
    rows = [row(w.STOCK, 100.0), row(w.STOCK_AGAIN, 100.0), row(w.STOCK_FROZEN, 50.0), row(w.STOCK_FROZEN_AGAIN, 60.0)]
    by_way = {r["way"]: r for r in measure.judged([*rows, row(w.PASS_FROZEN, 48.0), row(w.PASS, 80.0)])}
    assert by_way[w.PASS_FROZEN]["over_stock"] == pytest.approx(50 / 48)
    assert by_way[w.PASS_FROZEN]["verdict"] == "same" and by_way[w.PASS_FROZEN]["noise"] > 0.1
    assert by_way[w.STOCK_FROZEN]["over_stock"] == 2.0 and by_way[w.PASS]["over_stock"] == 1.25
    assert all(set(w.FROZEN) <= set(suite.WAYS) for suite in (models, padding, peers))


def test_frozen_packages_are_compared_with_the_frozen_stock_package() -> None:
    rows = [row(w.STOCK, 100.0), row(w.STOCK_AGAIN, 100.0), row(w.STOCK_FROZEN, 70.0), row(w.PACKAGE_FROZEN, 50.0)]
    rows += [row(w.PACKAGE_FROZEN_AGAIN, 60.0), row(w.PACKAGE_PASS_FROZEN, 40.0)]
    by_way = {r["way"]: r for r in measure.judged(rows)}
    assert by_way[w.PACKAGE_FROZEN]["over_stock"] == 2.0
    assert by_way[w.PACKAGE_PASS_FROZEN]["over_stock"] == 1.25 and by_way[w.PACKAGE_PASS_FROZEN]["noise"] > 0.1


@pytest.mark.slow
def test_a_frozen_package_holds_its_weights_and_says_what_it_took(tmp_path: Path) -> None:
    make = partial(models.made, models.QUICK["GPT-2, 2 layers, 1 x 128"], torch.float32)
    shop = w.Workshop(Program("p", make), "cpu", tmp_path)
    with torch.no_grad():
        built = [shop.build(way) for way in (w.PACKAGE_PASS_FROZEN, w.PACKAGE_PASS)]
        want = shop.module(*shop.inputs)
        assert all(timing.relative_error(candidate.run(*shop.inputs), want) < 1e-4 for candidate in built)
    frozen, plain = (set(candidate.run.get_constant_fqns()) for candidate in built)
    assert frozen != plain
    assert shop.reports[w.PACKAGE_PASS_FROZEN].sites


def test_without_frozen_stock_the_frozen_pass_is_compared_with_stock() -> None:
    rows = [row(w.STOCK, 100.0), row(w.STOCK_AGAIN, 100.0), row(w.PASS_FROZEN, 50.0)]
    assert measure.judged(rows)[-1]["over_stock"] == 2.0


def test_a_runtime_is_compared_with_itself_where_its_stock_way_ran_and_with_stock_inductor_elsewhere() -> None:
    rows = [row(w.STOCK, 10.0), row(w.STOCK_AGAIN, 10.0), row(w.IN_ORT, 30.0), row(w.IN_ORT_AGAIN, 30.0)]
    fused = "OpenVINO, by another way"
    by_way = {r["way"]: r for r in measure.judged([*rows, row(w.IN_ORT_PASS, 20.0), row(fused, 5.0)])}
    assert by_way[w.IN_ORT_PASS]["over_stock"] == 1.5
    assert by_way[fused]["over_stock"] == 2.0


def test_without_a_second_stock_row_nothing_is_judged() -> None:
    rows = measure.judged([row(w.STOCK, 100.0), row(w.PASS, 10.0)])
    assert rows[1]["verdict"] == "no A/A row" and math.isnan(rows[1]["noise"])


@pytest.mark.parametrize(("error", "is_wrong"), [(0.11, False), (0.13, True)])
def test_without_a_tolerance_three_times_the_error_of_eager_is_allowed(error: float, is_wrong: bool) -> None:
    rows = [row(way, 1.0) | {"error": 0.04, "tolerance": None} for way in (w.EAGER, w.STOCK, w.STOCK_AGAIN)]
    rows = measure.judged([*rows, row(w.PASS, 1.0) | {"error": error, "tolerance": None}])
    assert (rows[-1]["verdict"] == "WRONG") == is_wrong


def test_where_eager_is_wrong_itself_nothing_is_called_right() -> None:
    """Three times such an error would let zeros pass."""
    rows = [row(way, 1.0) | {"error": 0.4, "tolerance": None} for way in (w.EAGER, w.STOCK, w.STOCK_AGAIN)]
    judged = measure.judged([*rows, row(w.PASS, 1.0) | {"error": 1.0, "tolerance": None, "took": "sdpa"}])[-1]
    assert judged["verdict"] == "same" and judged["took"] == "sdpa (not judged: eager is off by 40%)"


def test_rows_of_an_earlier_run_are_kept_and_told_apart() -> None:
    def of(program: str, run: str, **more: Any) -> dict[str, Any]:
        return {"program": program, "way": w.PASS, "of": run, **more}

    before = document.Table("T", document.STANDARD, [of("a", "one"), of("b", "one"), of("b", "one"), of("c", "one")])
    now = document.Table("T", document.STANDARD, [of("b", "two", busy="others were busy"), of("d", "two")], ["legend"])
    joined = document.joined(before, now)
    assert [(row["program"], row["of"]) for row in joined.rows] == [
        ("a", "one"),
        ("b", "two"),
        ("c", "one"),
        ("d", "two"),
    ]
    assert joined.notes == [
        "legend",
        "Of several runs, by commit. one: a, c; two: b, d.",
        "b: others were busy (before or after its rounds).",
    ]
    assert document.joined(None, now).notes == ["legend", "b: others were busy (before or after its rounds)."]


def test_the_faster_library_is_the_roof() -> None:
    measured = floors.rates("cpu", 1)
    assert measured.gflops.keys() == {"float32", "bfloat16"} and min(measured.gflops.values()) > 0
    higher = floors.Rates({"float32": 1.0, "bfloat16": 1e9}, 5.0).fastest(floors.Rates({"float32": 2.0}, 4.0))
    assert higher == floors.Rates({"float32": 2.0, "bfloat16": 1e9}, 5.0)


def test_weights_are_read_and_embeddings_are_not() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(100, 8), torch.nn.Linear(8, 4))
    assert [tuple(x.shape) for x in measure.read_whole(model)] == [(4, 8), (4,)]


def test_float32_may_round_where_eager_happens_to_be_exact() -> None:
    facts = {"tolerance": None, "dtype": "float32"}
    rows = [row(way, 1.0) | facts | {"error": 1e-7} for way in (w.EAGER, w.STOCK)]
    judged = [measure.judged([*rows, row(w.PASS, 1.0) | facts | {"error": error}]) for error in (2e-6, 2e-5)]
    found = [rows[-1]["verdict"] for rows in judged]
    assert found == ["no A/A row", "WRONG"]


def test_a_wrong_answer_is_one_without_stock_too() -> None:
    failed = {"program": "p", "way": w.STOCK, "status": "failed", "error_text": "x"}
    assert measure.judged([row(w.PASS, 1.0) | {"error": 1.0}, failed])[0]["verdict"] == "WRONG"


@pytest.mark.parametrize("error", [1e-3, math.nan, math.inf])
def test_a_wrong_answer_is_not_fast(error: float) -> None:
    rows = measure.judged([row(w.STOCK, 100.0), row(w.STOCK_AGAIN, 100.0), row(w.PASS, 1.0) | {"error": error}])
    assert rows[-1]["verdict"] == "WRONG"


# ---------------------------------------------------------------- documents


def made(passed: float = 50.0, again: float = 101.0) -> Document:
    rows = measure.judged([row(w.STOCK, 100.0), row(w.STOCK_AGAIN, again), row(w.PASS, passed, took="sdpa | x")])
    failed = {"program": "p", "way": w.HAND, "status": "failed", "error_text": "it did not"}
    return Document("T", {"device": "d", "versions": {"torch": "2"}}, [Table("t", STANDARD, [*rows, failed], ["n"])])


def test_a_document_survives_its_file(tmp_path: Path) -> None:
    table = made().write(tmp_path / "run.json")
    again = document.read(tmp_path / "run.json")
    assert again.markdown() == made().markdown() == table.read_text()
    text = table.read_text()
    assert "| **p** |" in text and "sdpa / x" in text and "p, compile, by hand: it did not" in text
    assert "package KiB" not in text  # no row has one


def test_what_is_no_document_says_so(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for text in ("[1, 2]", "{}", "{"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"x\.json is no result"):
            document.read(path)


def test_a_regression_shows() -> None:
    then = made(passed=50.0)
    assert not baseline.regressed(baseline.compare(made(passed=52.0), then))
    worse = baseline.compare(made(passed=90.0), then)
    assert baseline.regressed(worse) and [r["way"] for r in worse.rows] == [w.PASS]
    assert [r["verdict"] for r in baseline.compare(made(passed=20.0), then).rows] == ["better"]
    noisy = made(passed=52.0, again=190.0)  # a run so noisy says nothing
    assert not baseline.regressed(baseline.compare(made(passed=90.0), noisy))


def test_what_is_not_measured_any_more_is_named() -> None:
    now = made()
    now.tables[0].rows = now.tables[0].rows[:2]
    assert f"not measured now: p, {w.PASS}" in baseline.compare(now, made()).notes


def test_what_fails_now_is_a_regression() -> None:
    now = made()
    now.tables[0].rows[2] = {"program": "p", "way": w.PASS, "status": "failed", "error_text": "x"}
    compared = baseline.compare(now, made())
    assert [r["verdict"] for r in compared.rows] == [baseline.FAILED] and baseline.regressed(compared)


def test_another_machine_is_told() -> None:
    now = made()
    now.run = {**now.run, "device": "another"}
    assert "another device: d then, another now" in baseline.compare(now, made()).notes


def test_the_run_to_compare_with_is_read_before_it_may_be_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "rates", lambda device: RATES)
    path = tmp_path / "run.json"
    made(passed=50.0).write(path)

    def tables(*_: Any) -> list[Table]:
        return made(passed=90.0).tables

    with pytest.raises(typer.Exit):
        command.measured_tables("T", tables, QUICK, path, path)
    (tmp_path / "old.json").write_text("[]")
    with pytest.raises(typer.BadParameter, match="no result"):
        command.measured_tables("T", tables, QUICK, path, tmp_path / "old.json")


def test_a_run_in_which_nothing_ran_fails() -> None:
    failed = {"program": "p", "way": w.STOCK, "status": "failed", "error_text": "x"}
    with pytest.raises(typer.Exit):
        command.Recorder(Document("T", {}, [Table("t", STANDARD, [failed])]), None, Console(quiet=True)).finish()


def test_programs_are_placed_by_name() -> None:
    def at(way: str, name: str, us: float) -> dict[str, Any]:
        return row(way, us) | {"program": name, "flops": 1e6, "bytes": 1e3, "dtype": "float32"}

    rows = [at(w.PASS, "b", 1.0), at(w.STOCK, "c", 10.0), at(w.PASS, "c", 2.0)]
    dots = plots.placed([Document("T", {}, [Table("t", STANDARD, rows)])])
    assert dots["t", "c"] == {w.STOCK: (1e3, 100.0), w.PASS: (1e3, 500.0)} and set(dots["t", "b"]) == {w.PASS}


# ---------------------------------------------------------------- pictures and the page


def scaling() -> list[dict[str, Any]]:
    rows = []
    for length, speedup in s5.SPEEDUPS.items():
        for way in (w.EAGER, w.STOCK, w.PASS, w.HAND):
            more = {"reported_speedup": speedup} if way == w.PASS else {}
            made = row(
                way,
                100.0,
                length=length,
                over_eager=2.0,
                peak_bytes=1 << 20,
                flops=1e6,
                bytes=1e4,
                dtype="float32",
                **more,
            )
            rows.append({**made, "over_stock": 1.5, "verdict": "faster", "noise": 0.03})
    return rows


def test_the_page_shows_every_picture_that_the_runs_allow(tmp_path: Path) -> None:
    run = {"rates": {"gflops": {"float32": 100.0}, "gbs": 10.0}, "versions": {}}
    Document("seeds", run, [Table(results_page.SCALING, s5.SCALING, scaling())]).write(tmp_path / "seeds-cpu.json")
    curve = [
        {"name": str(n), "status": "ok", "median_us": {"stock": 2.0, "stock again": 2.1, "pass": 1.0 + n}}
        for n in range(3)
    ]
    Document("grid", {}, [Table("t", never_slower.COLUMNS, [*curve, {"status": "failed"}])]).write(
        tmp_path / "never-slower.json"
    )
    results_page.main(tmp_path)
    text = (tmp_path / "README.md").read_text()
    for name in ("speed-up", "memory", "roofline", "never-slower"):
        assert f"pictures/{name}.png" in text
        for kind in plots.FORMATS:
            assert (tmp_path / "pictures" / f"{name}.{kind}").stat().st_size > 5000
    assert "| [the five field reports](seeds-cpu.md) | 5 | 1.50 |" in text


def test_a_folder_without_runs_makes_an_empty_page(tmp_path: Path) -> None:
    results_page.main(tmp_path)
    assert "Results" in (tmp_path / "README.md").read_text() and not (tmp_path / "pictures").exists()


def test_pictures_do_not_change_when_nothing_did(tmp_path: Path) -> None:
    for name in ("a", "b"):
        plots.save(plots.speed_up(scaling()), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
