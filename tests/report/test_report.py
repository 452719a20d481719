"""Reports: the record of a site, the table, JSON, recordings, and the source line of a node."""

from __future__ import annotations

import copy
import json
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

import attn_pass
from attn_pass.report import history
from attn_pass.report.history import publish, record, reports
from attn_pass.report.linear_layers import LinearLayersReport
from attn_pass.report.places import module_path, source_line
from attn_pass.report.record import Report
from attn_pass.report.region import RegionReport
from attn_pass.report.site import SiteReport


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_HISTORY", deque(maxlen=history._HISTORY_SIZE))


def site(layer: int = 0, **changes: Any) -> SiteReport:
    values: dict[str, Any] = {
        "outcome": "rewritten",
        "target": "sdpa",
        "reason": "fused is cheaper",
        "where": "model.py:12 in forward",
        "shapes": {"query": (1, 8, "s77", 64), "key": (1, 8, "s77", 64), "value": (1, 8, "s77", 64)},
        "dtype": "float32",
        "device": "cpu",
        "mask": "causal",
        "predicted_us": {"leave": 40.0, "sdpa": 10.0},
        "poor_cases": ("fold_batch",),
        "assumptions": ("no empty rows",),
        "fixed": ("mask",),
        "module": f"model.layers.{layer}.self_attn",
        "node": f"matmul_{layer}",
    }
    values |= changes
    return SiteReport(**{"taken": values["target"] or "", **values})


def left(reason: str = "the attention weights are returned", **changes: Any) -> SiteReport:
    return SiteReport(outcome="left", reason=reason, **changes)


# ---- records ----


def test_rewritten_counts_decomposed_and_left_the_rest() -> None:
    report = Report([site(), site(outcome="decomposed"), left(), left(kind="near miss")])
    assert [s.outcome for s in report.rewritten] == ["rewritten", "decomposed"]
    assert [s.kind for s in report.left] == ["attention", "near miss"]


def test_a_failed_compile_flips_what_had_changed_only() -> None:
    kept = left("why it was left")
    report = Report([site(verified_error=0.1), kept])
    report.mark_left("Inductor could not lower it")
    flipped = report.sites[0]
    assert report.rewritten == [] and kept.reason == "why it was left"
    assert (flipped.outcome, flipped.target, flipped.reason) == ("left", None, "Inductor could not lower it")
    assert flipped.refusals == {"sdpa": "Inductor could not lower it"}
    assert flipped.assumptions == () == flipped.fixed and flipped.poor_cases == () and flipped.verified_error is None


def test_extend_shares_records_and_adds_each_once() -> None:
    one, two = Report([site()], seconds=0.5, graphs=1), Report([site(1)], seconds=0.25, graphs=1)
    one.extend(two)
    one.extend(Report(two.sites))
    one.extend(one)
    assert one.sites == [one.sites[0], two.sites[0]] and (one.seconds, one.graphs) == (0.75, 2)


def test_append_from_many_threads_loses_nothing() -> None:
    report = Report()

    def add() -> None:
        for layer in range(200):
            report.append(site(layer))
            report.extend(Report([left()], seconds=1.0))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(report.sites) == 1600 and report.seconds == 800.0


def test_a_report_can_be_copied() -> None:
    assert copy.deepcopy(Report([site()])).to_dict() == Report([site()]).to_dict()


# ---- JSON ----


def test_json_holds_every_field_and_no_invalid_number() -> None:
    reported = json.loads(Report([site(predicted_us={"leave": float("inf"), "sdpa": 1.5})], 0.5, 1).to_json())
    assert (reported["graphs"], reported["seconds"], reported["rewritten"], reported["left"]) == (1, 0.5, 1, 0)
    assert reported["sites"][0] == {
        "outcome": "rewritten",
        "reason": "fused is cheaper",
        "kind": "attention",
        "target": "sdpa",
        "taken": "sdpa",
        "form": "eager",
        "where": "model.py:12 in forward",
        "count": 1,
        "shapes": {"query": [1, 8, "s77", 64], "key": [1, 8, "s77", 64], "value": [1, 8, "s77", 64]},
        "dtype": "float32",
        "device": "cpu",
        "decided_for": "",
        "mask": "causal",
        "poor_cases": ["fold_batch"],
        "refusals": {},
        "other_devices": [],
        "assumptions": ["no empty rows"],
        "fixed": ["mask"],
        "score_mod": "",
        "predicted_us": {"leave": None, "sdpa": 1.5},
        "stock": "",
        "stock_us": None,
        "measured_us": {},
        "measured_spread": {},
        "verified_error": None,
        "not_verified": "",
        "formula": {},
        "prologue": {},
        "rates": {},
        "roofline": {},
        "hint": "",
        "module": "model.layers.0.self_attn",
        "node": "matmul_0",
        "id": "",
    }


def test_values_that_are_not_numbers_become_text() -> None:
    reported = site(shapes={"query": (torch.Size([2]),)}, dtype=torch.float32, device=torch.device("cpu")).to_dict()
    assert reported["shapes"] == {"query": [[2]]} and (reported["dtype"], reported["device"]) == (
        "torch.float32",
        "cpu",
    )


# ---- the table ----


def test_an_empty_report_says_so() -> None:
    assert str(Report(graphs=1, seconds=0.01)) == "attn_pass: no attention found (1 graph, 0.010 s in attn_pass)"


def test_equal_layers_are_one_row_and_stay_separate_sites() -> None:
    report = Report([site(layer) for layer in range(12)] + [site(12, mask="none")], graphs=1)
    table = report.table(200)
    assert len(report.sites) == 13
    rows = [line for line in table.splitlines() if "rewritten to sdpa" in line]
    assert [row.split()[0] for row in rows] == ["x12", "1"]
    assert "model.layers.*.self_attn" in table and "model.layers.12.self_attn" in table


@pytest.mark.parametrize(
    "changes", [{"where": "other.py:1 in f"}, {"reason": "another"}, {"count": 3}, {"module": "head.attn"}]
)
def test_rows_that_differ_in_more_than_the_layer_are_separate(changes: dict[str, Any]) -> None:
    assert "x2" not in str(Report([site(), site(1, **changes)]))


def test_the_table_has_reasons_costs_and_assumptions() -> None:
    table = Report([site(verified_error=1e-6), left("weights returned", refusals={"flex": "no [GPU]"})]).table(200)
    for reported in (
        "2 attention sites: 1 rewritten, 1 left",
        "fused is cheaper",
        "poor cases: fold_batch",
        "assumed: no empty rows",
        "predicted: sdpa 10 us, leave 40 us",
        "verified: error 1e-06",
        "(1, 8, s77, 64)",
        "float32 cpu",
        "model.py:12 in forward",
        "flex: no [GPU]",
    ):
        assert reported in table, reported


def test_shapes_that_differ_name_their_operands() -> None:
    table = Report([site(shapes={"query": (1, 8, 1, 64), "key": (1, 8, 77, 64), "value": (1, 8, 77, 64)})]).table(250)
    assert "query (1, 8, 1, 64)" in table and "key, value (1, 8, 77, 64)" in table


def test_near_misses_are_counted_apart() -> None:
    assert "1 attention site and 1 near miss: 1 rewritten, 1 left" in str(Report([site(), left(kind="near miss")]))
    assert "attn_pass: 2 near misses: 2 left" in str(Report([left(kind="near miss"), left(kind="near miss")]))


def test_the_table_is_plain_ascii_of_the_width_asked_for() -> None:
    report = Report([site(), left("a reason " * 30), left("[bold]brackets[/bold]", count=4)])
    for width in (100, 160):
        lines = report.table(width).splitlines()
        assert all(line.isascii() and len(line) <= width for line in lines[1:])
    assert len(max(str(report).splitlines(), key=len)) <= 160
    assert "[bold]brackets[/bold]" in report.table(200) and "1 (4 calls)" in report.table(200)


# ---- recording ----


def test_nested_recordings_both_fill_and_end() -> None:
    with record() as outer:
        publish(Report([site()], seconds=0.5, graphs=1))
        with record() as inner:
            publish(Report([left()], seconds=0.25, graphs=1))
        publish(Report([left()], graphs=1))
    publish(Report([site()]))
    assert [s.outcome for s in outer.sites] == ["rewritten", "left", "left"]
    assert [s.outcome for s in inner.sites] == ["left"]
    assert (outer.graphs, outer.seconds, inner.graphs) == (3, 0.75, 1)


def test_a_later_mark_left_is_seen_in_the_recording_and_the_history() -> None:
    decided = Report([site()])
    with record() as recorded:
        publish(decided)
    decided.mark_left("could not be lowered")
    assert len(recorded.left) == 1 and len(reports()[0].left) == 1


def test_an_exception_inside_ends_the_recording() -> None:
    with pytest.raises(KeyError), record() as recorded:
        raise KeyError
    publish(Report([site()]))
    assert recorded.sites == []


def test_what_is_only_explained_is_recorded_but_not_among_compiled() -> None:
    with record() as recorded:
        publish(Report([site()]), compiled=False)
    assert len(recorded.sites) == 1 and reports() == []


def test_the_history_is_bounded_and_holds_each_report_once() -> None:
    first = Report([site()])
    publish(first)
    publish(first)
    assert reports() == [first]
    for _ in range(history._HISTORY_SIZE):
        publish(Report())
    assert len(reports()) == history._HISTORY_SIZE and first not in reports()


def test_a_recording_fills_when_torch_compiles_lazily_inside_it() -> None:
    torch._dynamo.reset()

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        softmax = next(n for n in graph.graph.nodes if "softmax" in n.name)
        publish(Report([site(where=source_line(softmax.meta), module=module_path(softmax.meta))], graphs=1))
        return graph.forward

    compiled = torch.compile(Outer(), backend=backend)
    with record() as recorded:
        compiled(torch.randn(2, 4, 4))
    assert len(recorded.sites) == 1
    assert recorded.sites[0].where.startswith(f"{Path(__file__).name}:")
    assert recorded.sites[0].where.endswith(" in forward")
    assert recorded.sites[0].module == "layers.0"


# ---- where ----


class Inner(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.mT, -1) @ x


class Outer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Inner()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


LINE = Inner.forward.__code__.co_firstlineno + 1


def exported_softmax(model: torch.nn.Module, *args: torch.Tensor) -> dict[str, Any]:
    graph = torch.export.export(model, args).graph
    return dict(next(n for n in graph.nodes if "softmax" in n.name).meta)


def test_where_in_an_exported_program() -> None:
    meta = exported_softmax(Outer(), torch.randn(2, 4, 4))
    assert source_line(meta) == f"{Path(__file__).name}:{LINE} in forward"
    assert module_path(meta) == "layers.0"


def test_where_is_the_users_line_above_torchs_own() -> None:
    class Uses(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mha = torch.nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> Any:
            return self.mha(x, x, x)

    meta = exported_softmax(Uses(), torch.randn(2, 4, 4))
    assert source_line(meta).startswith(f"{Path(__file__).name}:") and source_line(meta).endswith(" in forward")
    assert module_path(meta) == "mha"


def test_where_of_a_module_of_torch_alone_is_that_module() -> None:
    x = torch.randn(2, 4, 4)
    (site,) = attn_pass.explain(torch.nn.MultiheadAttention(4, 2, batch_first=True), x, x, x).sites
    assert site.where == "in MultiheadAttention"  # and not the line of attn_pass that calls it
    meta = exported_softmax(torch.nn.MultiheadAttention(4, 2, batch_first=True), x, x, x)
    assert source_line(meta) == "in MultiheadAttention" and module_path(meta) == ""


@pytest.mark.parametrize(
    ("meta", "where"),
    [
        ({}, "unknown source line"),
        ({"stack_trace": None, "nn_module_stack": {}}, "unknown source line"),
        ({"stack_trace": '  File "/a b/model.py", line 7, in <module>\n    x'}, "model.py:7 in <module>"),
        ({"stack_trace": 'File "C:\\src\\model.py", line 7, in f\n    x'}, "model.py:7 in f"),
        (
            {
                "stack_trace": 'File "/h/m.py", line 3, in forward\n  x\n'
                'File "/venv/lib/python3/site-packages/torch/nn/functional.py", line 9, in softmax\n  y'
            },
            "m.py:3 in forward",
        ),
        ({"stack_trace": 'File "/x/site-packages/torch_geometric/a.py", line 3, in f'}, "a.py:3 in f"),
        (
            {"stack_trace": f'File "{torch.__path__[0]}/nn/functional.py", line 9, in softmax'},
            "functional.py:9 in softmax",
        ),
        ({"nn_module_stack": {"1": ("L['self'].layers.0", Inner)}}, "in Inner (layers.0)"),
        ({"nn_module_stack": {"a": ("", "m.Outer"), "b": ("layers.0.attn", "m.Attn")}}, "in Attn (layers.0.attn)"),
        ({"nn_module_stack": {"1": ("L['fn']._modules['layers']._modules['0']", "Attn")}}, "in Attn (layers.0)"),
        (
            {
                "nn_module_stack": {
                    "1": ("L['self'].__dict__['_modules']['layers']._modules['0'].__dict__['_modules']['a']", "A")
                }
            },
            "in A (layers.0.a)",
        ),
    ],
)
def test_where_from_what_the_node_knows(meta: dict[str, Any], where: str) -> None:
    assert source_line(meta) == where


def test_targets_that_say_the_same_share_a_line() -> None:
    refusals = {"sdpa": "no rule", "flex": "too old", "local": "no rule"}
    reported = Report([SiteReport(outcome="left", reason="none takes it", refusals=refusals)], graphs=1).table(300)
    assert "sdpa, local: no rule" in reported and "flex: too old" in reported


@pytest.mark.parametrize("shape", [(1, 3, 8, 4), (3, 1, 8, 4), (2, 3, 8, 4), (1, 1, 8, 4)])
@pytest.mark.parametrize("form", ["by hand", "call"])
def test_shapes_are_those_of_the_program(shape: tuple[int, ...], form: str) -> None:
    """Heads of one sequence are heads, though a batch of 1 is no axis."""

    def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT / 2).softmax(-1) @ v

    program = by_hand if form == "by hand" else torch.nn.functional.scaled_dot_product_attention
    q, k = torch.randn(shape), torch.randn(*shape[:2], 5, 4)
    (site,) = attn_pass.explain(program, q, k, k).sites
    assert site.shapes == {"query": shape, "key": (*shape[:2], 5, 4), "value": (*shape[:2], 5, 4)}


def test_control_characters_reach_no_terminal() -> None:
    """A stored report may come from anywhere."""
    bell = "a\x1b]0;owned\x07"
    region = RegionReport(outcome="left", reason=bell)
    layers = LinearLayersReport(library=bell, reason=bell, features=1, width=1, dtype=bell)
    site = SiteReport(outcome="left", reason="x", fixed=(bell,))
    report = attn_pass.Report(sites=[site], regions=[region], linear_layers=[layers], graph_breaks=(bell,))
    shown = str(attn_pass.Report.from_dict(report.to_dict()))
    assert "owned" in shown and not [c for c in shown if not c.isprintable() and c != "\n"]


@pytest.mark.parametrize("has_stream", [True, False])
def test_a_report_is_written_where_nobody_says_what_a_stream_is(
    has_stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tee that only writes, and the output of a daemon, which is none."""

    class Tee:
        def write(self, text: str) -> int:
            return len(text)

    monkeypatch.setattr(sys, "stdout", Tee() if has_stream else None)
    site = SiteReport(outcome="left", reason="x")
    assert "left" in str(attn_pass.Report(sites=[site]))
