"""The tables of `python -m bench census`; the measurements themselves need a census folder."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from padded_encoders import Encoder, ids, masks
from rich.console import Console
from torch import Tensor, nn

from attn_pass.devices.cpu.kernel import build
from bench.harness.document import Table
from bench.harness.process import Task, in_child
from bench.suites import compile_time
from bench.suites.census import command, export, padding, tables
from bench.suites.census.dataset import Census, FolderError, Subject, open_census
from bench.suites.census.padded_rows import seen, token_masks
from bench.suites.census.rows import read_rows
from bench.suites.census.workers import run_all

GOOD = {"ok": True, "rel_l2": 1e-7, "max_abs": 1e-6}
WRONG = {"ok": False, "rel_l2": 0.5, "max_abs": 2.0}
TANH = {"kind": "near miss", "form": "eager", "reason": "tanh | soft cap", "where": "a.py:1 in f"}


def exported(name: str, family: str = "hf text", stage: str = "export", **facts: Any) -> dict[str, Any]:
    row = {"bench": "export", "stage": stage, "name": name, "family": family, "control": False, "status": "ok"}
    return {**row, "sites": {"hand": 2}, "rewritten": 2, "calls_rewritten": 0, "left": [], "numerics": GOOD, **facts}


def compiled(model: str, way: str, seconds: float, pass_s: float = 0.0) -> dict[str, Any]:
    facts = {"model": model, "way": way, "status": "ok"}
    return {**facts, "compile_s": seconds, "pass_s": pass_s, "sites": 3, "rewritten": 3}


def test_a_line_a_family_with_both_stages() -> None:
    refused = {"bench": "export", "stage": "export", "name": "c", "family": "timm", "status": "not exportable"}
    rows = [
        exported("a"),
        exported("a", stage="decomposed", rewritten=1, left=[TANH]),
        exported("b", family="timm"),
        {**refused, "control": False, "error": "no"},
    ]
    table = tables.export_table(rows)
    assert "| hf text | 1 | 1 | 2 | 2 | 100.0 | 2 | 1 | 50.0 | 0 | 0 |" in table
    assert "| timm | 2 | 1 | 2 | 2 | 100.0 | 0 | 0 | - | 0 | 0 |" in table
    assert "| **all** | 3 | 2 | 4 | 4 | 100.0 | 2 | 1 | 50.0 | 0 | 0 |" in table


def test_controls_count_for_themselves() -> None:
    table = tables.export_table([exported("a"), exported("mixer", control=True, sites={}, rewritten=0)])
    assert "| **all** | 1 |" in table
    assert "| controls | 1 | 1 | 0 | 0 | - |" in table


def test_rotary_sites_are_read_where_every_operand_with_an_angle_is() -> None:
    def operand(site: int, name: str, angle: bool, read: str) -> dict[str, Any]:
        return {"graph": 0, "site": site, "operand": name, "angle": angle, "read": read}

    norm, rotary, miss = "RMS norm over the head dim", "rotary over all 8 elements", "not read: the table depends"
    operands = [operand(0, "query", True, f"{norm}, then {rotary}"), operand(0, "key", True, rotary)]
    operands += [operand(1, "query", True, rotary), operand(1, "key", True, miss)]
    operands += [operand(2, "query", False, norm), operand(2, "key", False, "")]
    facts = {"bench": "rotary", "name": "hf/a", "family": "hf text", "control": False, "status": "ok"}
    text = tables.markdown([{**facts, "operands": operands}])
    assert "| hf text | 1 | 3 | 1 | 2 | 1 | 50.0 | 2 | 0 |" in text
    assert f"| {miss} | 1 | 1 | hf/a |" in text


def test_reasons_are_counted_and_cells_stay_cells() -> None:
    table = tables.left_table([exported("a", left=[TANH, TANH]), exported("b", left=[TANH])])
    assert "| 3 | near miss | tanh / soft cap | export | a, b | a.py:1 in f |" in table


def test_equal_reasons_are_one_line() -> None:
    reported = [f"the weights (a.py:{line} in f) are also used by view_{line}" for line in (3, 41)]
    table = tables.left_table([exported("a", left=[{**TANH, "reason": reason} for reason in reported])])
    assert "| 2 | near miss | the weights are also used by view |" in table


def test_wrong_numbers_and_unseen_sites_are_named() -> None:
    reported = tables.troubles([exported("a", numerics=WRONG), exported("b", rewritten=1)])
    assert "Wrong numbers (1):\n\n- a (export) rel 5.0e-01" in reported
    assert "Sites the report has no row for (1):\n\n- b (export): 1" in reported


def test_masks_of_calls_only() -> None:
    row = {"bench": "sdpa", "name": "a", "masks": {"sdpa: causal": 3, "sdpa: none": 1, "eager: none": 5}}
    assert tables.call_masks(row) == {"causal": 3, "none": 1}
    assert "| causal | 3 | 75.0 | 1 | a |" in tables.mask_table([row])


def test_shares_of_a_compile() -> None:
    runs = [compiled("llama", "stock", 10.0), compiled("llama", "attn_pass", 8.0, 0.4), compiled("bert", "stock", 1.0)]
    (row,) = compile_time.summary(runs)
    table = Table("t", compile_time.COLUMNS, [row])
    assert table.cells()[1] == [["llama", "3", "3", "1", "10.0", "8.0", "0.80", "0.400", "5.00%"]]
    assert "3% of a cold compile: missed (most: 5.00%, llama)" in compile_time.target([row])
    assert "At most 1 s: met" in compile_time.target([row])


def test_the_later_row_about_the_same_counts(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [exported("a", rewritten=0), exported("a", stage="decomposed"), exported("a", rewritten=1)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [(row["stage"], row["rewritten"]) for row in read_rows([file])] == [("export", 1), ("decomposed", 2)]


def test_a_folder_that_is_no_census_is_named(tmp_path: Path) -> None:
    (tmp_path / "zoo.py").touch()
    with pytest.raises(FolderError, match=r"has no census\.py, models\.txt"):
        open_census(tmp_path)


def test_a_model_that_cannot_be_built_has_a_row_that_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    for module in ("census", "zoo"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    (tmp_path / "census.py").touch()
    (tmp_path / "models.txt").write_text("a")
    (tmp_path / "zoo.py").write_text(
        "family = is_control = lambda name: ''\ndef build(name, dropout): raise KeyError('no such model')\n"
    )
    (row,) = command.rows_of(export.__name__, tmp_path, "a")
    assert (row["name"], row["status"], row["stage"]) == ("a", "unbuildable", "export")
    assert row["error"] == "KeyError: 'no such model'"


# ---- processes ----


def rows_of(name: str) -> Iterator[dict[str, Any]]:
    yield exported(name)
    if name == "dies":
        os._exit(3)
    if name == "fails":
        raise ValueError("no good")


def task(name: str) -> Task:
    return Task({"bench": "export", "stage": "export", "name": name}, rows_of, (name,))


@pytest.mark.slow
def test_the_output_of_a_process_that_died_is_kept(tmp_path: Path) -> None:
    reported = [[(row["stage"], row["status"]) for row in in_child(task(name), 120)] for name in ("dies", "fails")]
    assert reported == [
        [("export", "ok"), ("after export", "died")],
        [("export", "ok"), ("after export", "bench failed")],
    ]
    out = tmp_path / "out.jsonl"
    for names in (["lives"], ["lives", "another"]):
        run_all([task(name) for name in names], out, jobs=1, limit_s=120, console=Console(quiet=True))
    assert [json.loads(line)["name"] for line in out.read_text().splitlines()] == ["lives", "another"]


def test_regions_are_counted_by_family_and_their_stops_listed() -> None:
    packed = {"outcome": "packed", "reason": "", "sites": 12, "packed": 12}
    left = {
        "outcome": "left",
        "reason": "mean may mix rows of padding with others (a.py:3 in f)",
        "sites": 2,
        "packed": 0,
    }
    common = {"bench": "padding", "stage": "as called", "family": "hf text", "control": False, "status": "ok"}
    rows = [
        {**common, "name": "a", "attentions": 12, "regions": [packed], "numerics": GOOD},
        {**common, "name": "b", "attentions": 2, "regions": [left], "numerics": GOOD},
        {**common, "name": "c", "attentions": 1, "regions": [], "numerics": WRONG},
    ]
    text = tables.markdown(rows)
    assert "As called:" in text and "| hf text | 3 | 3 | 3 | 2 | 1 | 14 | 12 | 3 | 0 | 1 | 0 |" in text
    assert "| mean may mix rows of padding with others | 1 | 1 | b |" in text
    assert "Wrong numbers (1):\n\n- c (as called)" in text


class FirstToken(nn.Module):
    """An encoder that returns its rows; ``turned``, it takes a mask for one that begins at the other end."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.encoder, self.turned = Encoder(lambda model, x, mask: (x, x[:, 0]), layers=1, eager=False), turned

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Any:
        return self.encoder(ids, attention_mask.flip(1) if self.turned else attention_mask)


@pytest.mark.skipif(bool(build.missing()), reason="no compiler for the CPU kernel")
def test_the_graph_without_padding_runs_and_its_other_rows_are_judged() -> None:
    """One whose tokens became zeros, since it took other rows for padding than its caller, is found to be wrong."""
    counting = SimpleNamespace(tensors=list, compare=compared)
    for turned, correct in ((False, True), (True, False)):
        model, mask = FirstToken(turned).eval(), masks()[0]
        given = {"ids": ids(), "attention_mask": mask}
        with torch.no_grad():
            expected = list(model(**given))
        subject = Subject(Census(Path(), counting, None), model, (), given, expected, deterministic=True)
        row = padding.compiled(subject, padding.UNUSED)
        assert row["status"] == "ok" and [r["outcome"] for r in row["regions"]] == ["packed"]
        assert row["numerics"]["ok"] is correct
        assert row["zeros"] == (int((mask == 0).sum()) if correct else int((mask + mask.flip(1) == 0).sum()))
        assert padding.compiled(subject, padding.AS_CALLED)["numerics"]["ok"]


def compared(expected: list[Tensor], got: list[Tensor]) -> dict[str, Any]:
    same = [torch.allclose(one, other, rtol=1e-4, atol=1e-5) for one, other in zip(expected, got, strict=True)]
    return {"ok": all(same)}


def test_rows_of_padding_are_taken_out_where_they_are_zeros_and_a_mask_says_so() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    rows, pooled = torch.ones(2, 4, 3), torch.ones(2, 5)
    zeroed = rows * mask[..., None]
    assert seen([rows, pooled], [zeroed, pooled], [mask]).zeros == 4
    assert seen([rows, pooled], [zeroed, pooled], [mask, mask.flip(1)]).got[0].shape == (4, 3)
    assert seen([zeroed], [zeroed], [mask]).zeros == 0
    tokens = seen([rows], [rows * 0], [mask])
    assert tokens.zeros == 4 and not tokens.got[0].any() and tokens.expected[0].all()
    frames = torch.ones(2, 2, 3)
    assert seen([frames], [frames * 0], [mask]).zeros == 3, "the second frame of the first has one token of two"
    joined = torch.ones(2, 7, 3)
    for patches in ((0, 3), (3, 0)):
        kept = torch.nn.functional.pad(mask, patches, value=1)[..., None]
        assert seen([joined], [joined * kept], [mask]).got[0].shape == (10, 3), "tokens beside patches"
    assert len(seen([rows], [rows, rows], [mask]).got) == 2


def test_a_mask_of_padding_is_true_where_there_is_no_token() -> None:
    told = {"src_key_padding_mask": torch.tensor([[False, True]]), "src": torch.zeros(1, 2), "mask": torch.ones(2)}
    assert [mask.tolist() for mask in token_masks(told)] == [[[True, False]]]


def test_projections_are_counted_by_family_and_reasons_listed() -> None:
    joined = {"outcome": "joined", "reason": "", "operands": 6}
    alone = {"outcome": "left", "reason": "no other projection has the same input", "operands": 2}
    already = {"outcome": "left", "reason": "it is one product already", "operands": 3}
    common = {"bench": "projections", "family": "hf text decoder", "control": False, "status": "ok", "numerics": GOOD}
    rows = [
        {**common, "name": "a", "operands": 9, "read": 8, "joined": 6, "projections": [joined, alone]},
        {**common, "name": "b", "operands": 3, "read": 3, "joined": 0, "projections": [already]},
    ]
    text = tables.markdown(rows)
    assert "| hf text decoder | 2 | 2 | 12 | 11 | 91.7 | 3 | 6 | 0 | 0 |" in text
    assert "| no other projection has the same input | 2 | 1 | a |" in text
