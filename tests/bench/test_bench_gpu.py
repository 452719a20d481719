"""`python -m bench.gpu`: a dry run from end to end, the lower bounds, and recovery after a crash."""

from __future__ import annotations

import io
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from dying_cases import dies, exits
from host_events import Event

pytest.importorskip("triton")

from attn_pass.devices.cuda import decode_operator
from bench.gpu import (
    console,
    correctness,
    counters,
    decode_grid,
    floors,
    goals,
    probes,
    smoke,
    stand_ins,
    supervisor,
    toolchain,
)
from bench.gpu.__main__ import PARTS, arguments, main
from bench.gpu.environment import Environment
from bench.gpu.journal import Journal
from bench.gpu.parts import Case, Lost, Part, Shard, run_parts
from bench.gpu.shapes import Shape, by_hand, call
from bench.gpu.supervisor import Limits, supervise
from bench.gpu.timing import Variant, compare, sets_for
from bench.harness.document import Column, Document, Table
from bench.harness.process import Task

ROOT = Path(__file__).parents[2]


# ---------------------------------------------------------------- a dry run


def _parts(run: dict[str, Any]) -> dict[str, Any]:
    """The tables of a document by their part's name."""
    return {table["name"]: table for table in run["tables"] if table["name"]}


def status_of(*given: str) -> int:
    """Of a run whose first process is this one, which keeps its own way to end."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(signal, "signal", lambda *_: None)
        return main(given)


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON of a quick dry run of all parts, with what it printed."""
    file = tmp_path_factory.mktemp("gpu") / "run.json"
    with redirect_stdout(io.StringIO()) as printed:
        status = status_of("--device", "cpu", "--dry", "--quick", "--json", str(file))
    assert status == 0, printed.getvalue()[-2000:]
    document: dict[str, Any] = json.loads(file.read_text())
    table = file.with_suffix(".md").read_text()
    return {**document, "parts": _parts(document), "printed": printed.getvalue(), "table": table}


def test_every_part_has_rows_and_none_failed(dry: dict[str, Any]) -> None:
    assert list(dry["parts"]) == [part.name for part in PARTS if part.usual]
    assert list(dry["parts"]) == ["correctness", "decode", "floors", "rules", "seeds", "tuned"]
    for name, part in dry["parts"].items():
        assert part["rows"], name
        assert not [row for row in part["rows"] if "error_text" in row], name
        assert not [note for note in part["notes"] if "skipped" in note], name


def test_every_target_is_right_in_the_dry_run(dry: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in dry["parts"]["correctness"]["rows"]}
    assert {row["verdict"].split(":")[0] for row in rows.values()} == {"right", "refused"}
    for target in ("cudnn", "flash", "efficient"):
        assert rows[f"{target}: grouped heads, causal, backward"]["verdict"] == "right"
        assert rows[f"{target}: plain, backward, Inductor"]["took"] == target
    assert rows["decode: window, direct"]["verdict"] == "right"
    assert rows["decode: compiled for any number of keys"]["took"] == "decode"


def test_standard_cases_name_every_variant_and_their_plan_at_full_size(dry: dict[str, Any]) -> None:
    rows = {row["name"].split()[0]: row for row in dry["parts"]["floors"]["rows"]}
    vit = rows["ViT"]
    assert {"stock, by hand", "pass, by hand", "stock, call", "pass, call", "stock again"} <= set(vit["us"])
    assert {"cudnn", "flash", "efficient", "flex"} <= set(vit["us"])
    assert vit["floor_us"] == pytest.approx(18.0, rel=0.01)
    assert vit["took, by hand"] in ("cudnn", "flash") and vit["predicted, by hand"] > 18
    assert rows["multi-token"]["predicted, call"] > 124  # the floor at full size, which is not what was run
    assert not any(row["wrong"] for row in rows.values())
    assert set(rows["T5"]["failed"]) >= {"flash", "flash packed"}


def test_the_rules_are_compared_with_torch(dry: dict[str, Any]) -> None:
    rows = dry["parts"]["rules"]["rows"]
    assert {row["verdict"] for row in rows} == {"same"}
    assert {row["H200"] for row in rows} >= {"cudnn", "none"}


def test_the_table_and_the_end_of_the_output_say_it_all(dry: dict[str, Any]) -> None:
    for part in (p for p in PARTS if p.usual):
        assert f"## {part.title}" in dry["table"]
    assert "times mean nothing" in dry["table"]
    assert dry["run"]["dry"] is True and dry["run"]["torch"] == torch.__version__
    assert "/" not in dry["run"]["command"].replace("--json run.json", "")
    assert [a["verdict"] for a in dry["tables"][0]["rows"]] == ["met", *["not measured"] * 5]
    assert "correctness:" in dry["printed"][-1500:]


def test_the_command_line_refuses_what_it_cannot_do() -> None:
    wrong = (["--device", "cpu"], ["--dry"], ["--only", "floor"], ["--shard", "3/2", "--json", "x"], ["--shard", "1/2"])
    for given in (*wrong, ["--resume"], ["--collect"]):
        with pytest.raises(SystemExit):
            arguments(given)


# ---------------------------------------------------------------- floors

# GFLOP, MB, and the microseconds of products, exponentials and memory at 790 TFLOP/s, 3.9 Texp/s and 4.3 TB/s.
FLOORS = {
    "prefill B4 H32 S512 D64 causal": (4.3, 33.55, 5.45, 4.31, 7.8),
    "prefill B4 H32 S1024 D64 full": (34.4, 67.11, 43.5, 34.4, 15.6),
    "prefill B4 H32 S4096 D128 causal": (550, 536.9, 696, 275, 125),
    "prefill B4 H32 S16384 D128 full": (1.76e4, 2147, 2.23e4, 8.81e3, 499),
    "decode q1 B1 Hq32 Hkv8 KV2048 D128": (0.0336, 8.405, 0.0425, 0.0168, 1.95),
    "decode q1 B64 Hq32 Hkv8 KV8192 D128": (8.59, 2149, 10.9, 4.3, 500),
    "multi-token decode q16 B1 Hq32 Hkv8 KV131072 D128": (34.4, 537.1, 43.5, 17.2, 125),
    "#151287 folded (1,4,1000,32)x(1,4,2048,32) fp16": (1.05, 1.561, 1.33, 2.1, 0.363),
    "#151287 folded fp32": (1.05, 3.121, 1.33, 2.1, 0.726),
    "ViT B64 H12 S197 D64": (7.63, 77.46, 9.66, 7.64, 18),
    "diffusion cross B2 H8 Sq4096 Skv77 D40": (0.807, 10.68, 1.02, 1.29, 2.48),
    "diffusion self B2 H8 S4096 D40 (padded 64 in kernel)": (42.9, 20.97, 54.4, 68.8, 4.88),
    "T5 bias B8 H12 S512 D64 bias(1,12,512,512)": (6.44, 31.46, 8.16, 6.45, 7.32),
    "sliding window 4k of 32k causal B1 H32 Hkv8 D128": (2.06e3, 671.1, 2.61e3, 1.03e3, 156),
    "ALiBi causal B4 H32 S4096 D128": (550, 536.9, 696, 275, 125),
    "softcap causal B4 H32 S4096 D128 (tanh+exp)": (550, 536.9, 696, 551, 125),
    "softcap Gemma-like causal B1 Hq16 Hkv8 S8192 D256": (550, 201.3, 696, 275, 46.8),
}


@pytest.mark.parametrize("name", list(FLOORS))
def test_floors(name: str) -> None:
    shape, (gflop, megabytes, products, exponentials, memory) = floors.CASES[name], FLOORS[name]
    assert shape.flops / 1e9 == pytest.approx(gflop, rel=6e-3)
    assert shape.bytes / 1e6 == pytest.approx(megabytes, rel=1e-3)
    assert shape.exponentials / 3.9e6 == pytest.approx(exponentials, rel=6e-3)
    assert shape.floor_us() == pytest.approx(max(products, exponentials, memory), rel=6e-3)
    assert shape.floor_us(copy_tbs=4.3e-9) == pytest.approx(memory * 1e9, rel=6e-3)


@pytest.mark.parametrize("mask", ["none", "causal", "window", "bias", "alibi"])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_both_spellings_are_the_same_attention(mask: str, kv_heads: int) -> None:
    shape = Shape(2, 4, kv_heads, 12, 12, 8, mask, window=3, dtype=torch.float64)
    program = call(shape)
    assert program is not None
    inputs = [x.double() for x in shape.inputs(Environment("cpu"))]
    torch.testing.assert_close(program(*inputs), by_hand(shape)(*inputs))


# ---------------------------------------------------------------- what is left of a run that dies


def _part(*cases: Case, name: str = "part", share: float = 1.0) -> Part:
    return Part(name, "A part", share, (Column("case", "name"), Column("value", "value", ".1f")), lambda _: cases)


def _run(journal: Journal, *parts: Part, seconds: float = 60.0) -> list[str]:
    reported: list[str] = []
    for line in run_parts(Environment("cpu"), parts, time.time() + seconds, journal, reported.append):
        journal.add(**line)
    return reported


def _fails() -> dict[str, Any]:
    raise ValueError("this shape is no shape")


def test_a_failure_stays_with_its_case(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    part = _part(Case("bad", _fails), Case("good", lambda: {"value": 2}))
    reported = _run(journal, part)
    bad, good = journal.rows()["part"]
    assert bad["error_text"] == "ValueError: this shape is no shape" and "_fails" in bad["trace"]
    assert good["value"] == 2
    assert any("FAILED ValueError" in line for line in reported)
    table = console.document(journal, [part]).markdown()
    assert "| good | 2.0 |" in table and "- bad: ValueError" in table


def test_what_the_time_does_not_reach_is_named(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    slow = Case("slow", lambda: time.sleep(0.3) or {})  # type: ignore[func-returns-value]
    _run(journal, _part(slow, Case("late", dict)), _part(Case("other", dict), name="second"), seconds=0.4)
    assert [row["name"] for row in journal.rows()["part"]] == ["slow"]
    assert "1 of 2 cases skipped: late" in journal.notes()["part"][0]
    assert [row["name"] for row in journal.rows()["second"]] == ["other"]  # a part keeps its share


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    _run(journal, _part(Case("one", lambda: {"value": 1})))
    _run(journal, _part(Case("one", _fails), Case("two", _fails)), _part(Case("three", dict), name="second"))
    assert [row["name"] for row in journal.rows()["part"]] == ["one"]
    assert [row["name"] for row in journal.rows()["second"]] == ["three"]


def test_a_lost_device_ends_the_process(tmp_path: Path) -> None:
    with pytest.raises(Lost):
        _run(Journal(tmp_path / "journal"), _part(Case("fault", lambda: {"lost": True})))


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_case_that_takes_the_process_down_is_written_down_and_passed_over(tmp_path: Path, how: str) -> None:
    journal = Journal(tmp_path / "journal")
    reported: list[str] = []
    supervise(
        Task({}, dies, (journal.path, how), forked=False),
        journal,
        Limits(time.time() + 100, stall_s=4.0),
        reported.append,
    )
    rows = journal.rows()["p"]
    assert [row["name"] for row in rows] == ["one", "two", "three"]
    assert ("exit code 11" if how == "dies" else "stopped") in rows[1]["error_text"]
    assert len(reported) == 1


def test_a_process_that_cannot_begin_is_not_started_for_ever(tmp_path: Path) -> None:
    reported: list[str] = []
    supervise(Task({}, exits, (), forked=False), Journal(tmp_path / "j"), Limits(time.time() + 100), reported.append)
    assert reported == ["the run: the process ended: exit code 3"]


# ---------------------------------------------------------------- shards, the journal, the exit status


def test_shards_take_every_case_once() -> None:
    cases = [Case(str(n), dict) for n in range(7)]
    taken = [case.name for number in (1, 2, 3) for case in Shard(number, 3).of(cases)]
    assert sorted(taken) == [case.name for case in cases] and Shard.parse("2/6") == Shard(2, 6)
    for text in ("0/2", "3/2", "1", "a/b", "1/0", "-1/2"):
        with pytest.raises(ValueError, match="i/n"):
            Shard.parse(text)


def test_shards_share_a_journal(tmp_path: Path) -> None:
    cases = [Case(str(n), lambda n=n: {"value": n}) for n in range(5)]
    journals = [Journal(tmp_path / "journal", f"part {n}/2") for n in (1, 2)]
    for number, journal in enumerate(journals, 1):
        end, shard = time.time() + 60, Shard(number, 2)
        for line in run_parts(Environment("cpu"), [_part(*cases)], end, journal, lambda _: None, shard):
            journal.add(**line)
    assert {row["name"]: row["value"] for row in journals[0].rows()["part"]} == {str(n): n for n in range(5)}
    journals[0].start_anew()  # which drops the rows of its own shard alone
    assert [row["name"] for row in journals[1].rows()["part"]] == ["1", "3"]


def test_half_a_line_is_no_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.add(part="p", row={"name": "one"})
    with journal.path.open("a") as file:
        file.write('{"part": "p", "row": {"na')
    assert [row["name"] for row in journal.rows()["p"]] == ["one"]


def test_a_case_that_was_begun_counts_as_lost_once_the_run_is_over(tmp_path: Path) -> None:
    journals = [Journal(tmp_path / "run.jsonl", f"rules {n}/2") for n in (1, 2)]
    for number, journal in enumerate(journals):
        journal.add(part="rules", begin=f"case {number}")
    journals[0].add(part="rules", row={"name": "case 0", "verdict": "same"})
    part = _part(name="rules")
    assert console.status(console.document(journals[0], [part])) == 0  # while it runs
    document = console.document(journals[0], [part], over=True)
    assert [(row["name"], row.get("lost")) for row in document.tables[1].rows] == [
        *(("case 0", None), ("case 1", True))
    ]
    assert main(["--collect", "--json", str(tmp_path / "run.json")]) == 2
    assert list(_parts(json.loads((tmp_path / "run.json").read_text()))) == ["rules"]
    journals[1].add(part="rules", begin="case 1")
    journals[1].add(part="rules", row={"name": "case 1", "verdict": "same"})
    assert main(["--collect", "--json", str(tmp_path / "run.json")]) == 0


@pytest.mark.parametrize(
    "row, status",
    [
        ({"verdict": "right"}, 0),
        ({"verdict": "refused: no such mask"}, 0),
        ({"verdict": "DIFFERS"}, 0),
        ({"verdict": "WRONG"}, 2),
        ({"wrong": "cudnn"}, 2),
        ({"wrong": None}, 0),
        ({"status": "failed", "error_text": "the process died", "lost": True}, 2),
        ({"answer": "wrong: dQ"}, 0),  # a probe's answer is what it was asked for
    ],
)
def test_the_exit_status_says_whether_anything_is_wrong_or_lost(row: dict[str, Any], status: int) -> None:
    good = {"name": "good", "verdict": "right"}
    tables = [Table("goals", ()), Table("A", (), [good], name="a"), Table("B", (), [{"name": "x", **row}], name="b")]
    assert console.status(Document("t", {}, tables)) == status


def test_the_exit_status_of_a_run_without_a_row() -> None:
    assert console.status(Document("t", {}, [Table("A", (), name="a")])) == 1


def _complete(file: Path) -> dict[str, Any]:
    """The JSON as it lies there: whole, and with a table beside it."""
    document: dict[str, Any] = json.loads(file.read_text())
    assert set(document) == {"title", "run", "tables"} and file.with_suffix(".md").read_text().startswith("# One run")
    return {**document, "parts": _parts(document)}


RULES = ["--device", "cpu", "--dry", "--quick", "--only", "rules"]


def test_a_run_killed_at_a_random_time_leaves_a_whole_json_and_goes_on_from_there(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    line = [sys.executable, "-m", "bench.gpu", *RULES, "--json", str(file)]
    process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.DEVNULL)
    journal = Journal(file.with_suffix(".jsonl"), "rules")
    while not journal.rows() and process.poll() is None:
        time.sleep(0.02)
    time.sleep(random.uniform(0.0, 0.5))
    process.send_signal(signal.SIGKILL)
    process.wait()
    begun = {row["name"] for row in journal.rows()["rules"]}
    assert begun
    if file.exists():
        _complete(file)
    lost = list(journal.unfinished().values())
    assert main(["--collect", "--json", str(file)]) == (2 if lost else 0)
    kept = _complete(file)["parts"]["rules"]["rows"]
    assert {row["name"] for row in kept} == begun | {name for _, name in lost}
    assert [("rules", row["name"]) for row in kept if row.get("lost")] == lost
    orphan = len(journal.lines())
    time.sleep(1.0)
    assert len(journal.lines()) == orphan  # the process that measures ended with the one that was killed
    before = {row["name"]: row["seconds"] for row in journal.rows()["rules"]}
    assert status_of(*RULES, "--json", str(file), "--resume") == 0
    after = {row["name"]: row["seconds"] for row in _complete(file)["parts"]["rules"]["rows"]}
    assert len(after) == 9 and before.items() <= after.items()


def test_a_run_that_is_terminated_writes_what_it_has_and_needs_no_package_but_torch_and_triton(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    blocked = "import sys; sys.modules.update(dict.fromkeys(('rich', 'typer', 'numpy', 'transformers'))); "
    run = f"from bench.gpu.__main__ import main; sys.exit(main({[*RULES, '--json', str(file)]!r}))"
    line = [sys.executable, "-W", "ignore", "-c", blocked + run]
    process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    journal = Journal(file.with_suffix(".jsonl"), "rules")
    while not journal.rows() and process.poll() is None:
        time.sleep(0.02)
    process.terminate()
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (143, "")
    assert _complete(file)["parts"]["rules"]["rows"] and "seconds" in _complete(file)["run"]


def test_the_json_is_written_while_the_run_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_WRITE_S", 0.1)
    monkeypatch.setattr(supervisor, "_BEAT_S", 0.5)
    journal = Journal(tmp_path / "journal")
    written: list[int] = []
    limits = Limits(time.time() + 100, stall_s=4.0, write=lambda: written.append(len(journal.rows().get("p", ()))))
    supervise(Task({}, dies, (journal.path, "hangs"), forked=False), journal, limits, lambda _: None)
    assert 1 in written  # the first case, while the second one hung
    assert [line for line in journal.lines() if "beat" in line]  # and the journal said that it still ran


# ---------------------------------------------------------------- the stages


def test_the_stages_ask_for_parts_there_are() -> None:
    text = (ROOT / "bench" / "gpu" / "stages.sh").read_text()
    asked = re.findall(r"^ +(?:step|sharded|background) \d+ ([a-z,]+)", text, re.M)
    names = {name for parts in asked for name in parts.split(",")}
    assert names == {part.name for part in PARTS}
    for number, most in (("1", 600), ("2", 600), ("3", 600)):
        block = text[text.index(f"    {number})\n") :].split(";;")[0]
        steps = [int(s) for s in re.findall(r"^ +(?:step|sharded) (\d+)", block, re.M)]
        assert sum(steps) + (45 if "calibrate" in block else 0) + 15 < most


def test_an_unknown_stage_is_refused() -> None:
    done = subprocess.run(["bash", "bench/gpu/stages.sh", "4"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 64 and "1|2|3" in done.stderr


def test_a_toolchain_without_its_parts_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "loads", lambda _: "")
    tools = toolchain.Toolchain("/usr/bin/g++", "", "")
    assert "cuda.h" in tools.missing and "libcuda" in tools.missing and "g++" not in tools.missing
    assert toolchain.links_libcuda(tools).startswith("not tried")
    (tmp_path / "libcuda.so.1").touch()
    monkeypatch.setenv("LIBRARY_PATH", str(tmp_path))
    monkeypatch.setattr(toolchain, "_LIBRARY_FOLDERS", ())
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    driver = toolchain.find().libcuda
    wanted = toolchain.exports(toolchain.Toolchain("g++", "", driver), tmp_path / "links")
    assert driver == str(tmp_path / "libcuda.so.1")
    assert wanted["LIBRARY_PATH"] == f"{tmp_path / 'links'}:{tmp_path}"
    assert (tmp_path / "links" / "libcuda.so").resolve() == tmp_path / "libcuda.so.1"


def test_the_smoke_stage_fails_where_a_package_would_not_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "find", lambda: toolchain.Toolchain("/usr/bin/g++", "", ""))
    with pytest.raises(RuntimeError, match="will not link here: not tried: CUDA's headers"):
        smoke.tools(Environment("cuda"))
    assert smoke.tools(Environment("cpu"))["linking"].startswith("not tried")


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="needs g++ and Linux's loader")
def test_a_compiler_with_a_libstdcxx_of_its_own_is_noticed_and_put_right(tmp_path: Path) -> None:
    """A package that such a compiler links takes the process down that loads it."""
    own = tmp_path / "g++"
    own.write_text('#!/bin/sh\nexec g++ "$@" -static-libstdc++ -static-libgcc\n')
    own.chmod(0o755)
    problem = toolchain.loads(str(own))
    if not problem:
        pytest.skip("this build of torch bears a library with a libstdc++ of its own")
    assert problem.startswith("a C++ library loaded beside torch ended with"), problem
    wanted = toolchain.exports(toolchain.Toolchain(str(own), "", ""), tmp_path / "links")
    assert wanted == {"CXX": str(tmp_path / "links" / "g++")}


def test_a_package_that_would_not_load_is_an_error_and_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "find", lambda: toolchain.Toolchain("/opt/gcc/bin/g++", "/usr", "/usr"))
    monkeypatch.setattr(toolchain, "links_libcuda", lambda _: "")
    monkeypatch.setattr(toolchain, "loads", lambda _: "ended with signal 11")
    for case in (smoke.tools, smoke.packaged_shared_keys, correctness.decode_packaged):
        with pytest.raises(RuntimeError, match=r"load here.*signal 11"):
            case(Environment("cuda"))


def test_counters_are_read_from_behind_the_notices_of_the_tool() -> None:
    table = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
    table += '"0","attend","gpu__time_duration.sum","ns","46,112"\n"0","attend","other","","1"\n'
    assert counters.counted("==PROF== Connected\n" + table) == {"ns": "46,112"}
    assert counters.counted("==ERROR== no permission") == {}


# ---------------------------------------------------------------- the probes


@pytest.mark.parametrize("name", list(probes.PROBES))
def test_a_probe_has_an_answer_in_a_dry_run(name: str) -> None:
    stand_ins.install()
    answer = probes.ask(Environment("cpu", quick=True), probes.PROBES[name])["answer"]
    assert answer.split(":")[0].split(";")[0].split(",")[0] in ("right", "refused"), answer
    if name.startswith(("mask, S", "left padding", "window")):
        assert answer == "right"


def test_a_probe_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins.install()
    real = probes._operator
    monkeypatch.setattr(probes, "_operator", lambda *given: real(*given) * 1.1)
    answer = probes.ask(Environment("cpu"), probes.PROBES["mask, S = 704, gradients"])["answer"]
    assert answer == "wrong: out, dQ, dK, dV"
    monkeypatch.setattr(probes, "_operator", lambda *given: real(*given) * float("nan"))
    answer = probes.ask(Environment("cpu"), probes.PROBES["mask, S = 704, gradients"])["answer"]
    assert answer.endswith("; not finite: out, dQ, dK, dV")


# ---------------------------------------------------------------- the decode kernel's parts


def test_the_decode_kernels_parts_are_launched_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []

    class Kernel:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda **given: launched.append(self._name)

    for name in ("attend", "join"):
        monkeypatch.setattr(decode_operator, name, Kernel(name))
    shape = decode_grid.shape_of(1, 1, 512)
    tiles, parts = decode_grid.numbers(Environment("cpu"), shape)
    assert parts == 2 and tiles.rows == 16
    inputs = [torch.zeros(1, heads, n, 128, dtype=torch.bfloat16) for heads, n in ((32, 1), (8, 512), (8, 512))]
    for only, names in (
        (None, ["attend", "join"]),
        (decode_operator.attend, ["attend"]),
        (decode_operator.join, ["join"]),
    ):
        launched.clear()
        decode_grid.launched(shape, parts, tiles, only)(*inputs)
        assert launched == names


# ---------------------------------------------------------------- timing


class _Graph:
    replays = 0

    def replay(self) -> None:
        _Graph.replays += 1
        time.sleep(2e-3)


class _Capture:
    def __init__(self, graph: _Graph) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Environment:
    """An environment that takes itself for a GPU, whose graphs take two milliseconds."""
    for name, stand_in in (
        ("Event", Event),
        ("CUDAGraph", _Graph),
        ("graph", _Capture),
        ("synchronize", lambda: None),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return Environment("cuda")


def test_inputs_are_rotated_and_variants_take_turns(gpu: Environment) -> None:
    seen: list[tuple[str, int]] = []
    variants = {name: Variant(lambda n, name=name: seen.append((name, n))) for name in ("a", "b")}
    times = compare(gpu, variants, [(n,) for n in range(3)], rounds=20, seconds=1.0)
    assert {n for name, n in seen if name == "a"} == {0, 1, 2}
    assert times.found["a"].how == "graph" and times.found["a"].rounds == 20
    assert 1900 / 40 < times.found["a"].median_us < 2000 / 4  # forty calls a graph, on a machine however busy
    assert _Graph.replays >= 2 * 20


def test_what_cannot_be_captured_is_timed_by_events_and_what_fails_is_named(
    gpu: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Capture, "__enter__", lambda _: _fails())
    variants = {
        "good": Variant(lambda: time.sleep(2e-4)),
        "bad": Variant(_fails),
        "long": Variant(lambda: time.sleep(2e-3)),
    }
    times = compare(gpu, variants, [()], seconds=0.1)
    assert times.found["good"].how == times.found["long"].how == "events"
    assert times.found["long"].median_us > 2000
    assert times.failed == {"bad": "ValueError: this shape is no shape"}
    assert times.best(["good", "long", "bad"]) == "good"


def test_sets_of_inputs_are_larger_than_the_cache() -> None:
    assert sets_for(8 << 20, cold=True) * (8 << 20) >= 4 * (60 << 20) > 0
    assert sets_for(1 << 40, cold=True) == 1
    assert sets_for(8, cold=False) == 1


# ---------------------------------------------------------------- goals


def test_aims_name_the_worst_case() -> None:
    rows = {
        "floors": [
            {"name": "prefill B4 H32 S4096 D128 full", "pass_of_best": 1.0, "of_matmul": 0.8, "a_a": 1.0},
            {"name": "prefill B4 H32 S8192 D128 causal", "pass_of_best": 1.25, "of_matmul": 0.7},
            {"name": "ViT", "pass_of_stock": {"by hand": 0.3, "call": 1.5}, "a_a": 1.2},
        ],
        "decode": [
            {"name": "q4 B1 KV32768", "copy, decode": 0.8, "copy, cudnn": 0.1},
            {"name": "q64 B1 KV32768", "copy, decode": 0.1},
            {"name": "q4 B1 KV2048", "copy, decode": 0.1},
        ],
        "seeds": [
            {"name": "S4 q, AOTInductor", "stock_over_pass": 60.0},
            {"name": "S2 B2, AOTInductor", "stock_over_pass": 1.5},  # the goal is S4's
        ],
    }
    by_goal = {a["goal"].split(":")[0].split(",")[0]: a for a in goals.measured(rows, dry=False)}
    assert by_goal["S4"]["verdict"] == "met"
    assert by_goal["prefill D128"]["verdict"] == "not met" and "S8192" in by_goal["prefill D128"]["measured"]
    assert by_goal["decode q1 to 16 from 32k keys on"]["verdict"] == "met"
    assert by_goal["nothing slower than stock"]["measured"].startswith("0.80 of stock's speed")
    assert by_goal["every target right"]["verdict"] == "not measured"
