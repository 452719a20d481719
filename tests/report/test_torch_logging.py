"""Torch's own observability: TORCH_LOGS, TORCH_TRACE, provenance, the compiler's bisector."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.logging import LogCaptureHandler
from against_eager import qkv
from by_hand import negative, plain
from torch import Tensor
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.fx import GraphModule

import attn_pass
from attn_pass.report import torch_logging

PROGRAM = """
    import torch, attn_pass

    def forward(q, k, v):
        return torch.softmax(q @ k.transpose(-2, -1), -1) @ v

    x = [torch.ones(1, 2, 8, 8)] * 3
    torch.compile(forward, backend=attn_pass.wrap("eager", choose="fused"))(*x)
    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend=attn_pass.wrap("eager"))(x[0])
"""


def ran(tmp_path: Path, **environment: str) -> str:
    """What a process of its own wrote to its error stream."""
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM))
    whole = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH_", "ATTN_PASS_"))}
    done = subprocess.run(
        [sys.executable, str(path)],
        env={**whole, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return done.stderr


def rewritten(fn: Any, *inputs: Tensor, **options: Any) -> GraphModule:
    """The graph that a wrapped backend gets."""
    graphs: list[GraphModule] = []

    def keep(gm: GraphModule, example_inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=attn_pass.wrap(keep, choose="fused", on_error="raise", **options))(*inputs)
    (gm,) = graphs
    return gm


def test_torch_logs_takes_our_name(tmp_path: Path) -> None:
    reported = ran(tmp_path, TORCH_LOGS="attn_pass")
    assert reported.count("attn_pass: 1 attention site: 1 rewritten") == 1
    assert "program.py:5 in forward: rewritten to sdpa: " in reported and ": predicted: " not in reported
    assert "no attention found" not in reported  # of the second graph
    more = ran(tmp_path, TORCH_LOGS="+attn_pass")
    assert "program.py:5 in forward: cudnn: there is no such kernel" in more and ": predicted: leave " in more


def test_structured_traces_have_the_report_and_the_graphs_and_nothing_is_logged_by_default(tmp_path: Path) -> None:
    assert "attn_pass" not in ran(tmp_path, TORCH_TRACE=str(tmp_path / "trace"))
    (log,) = (tmp_path / "trace").iterdir()
    artifacts = list(_artifacts(log.read_text()))
    assert [name for name, _ in artifacts] == [
        f"attn_pass_{x}" for x in ("before", "after", "report", "before", "report")
    ]
    called = [set(re.findall(r"(\w+)\(", code)) & {"softmax", "scaled_dot_product_attention"} for _, code in artifacts]
    assert called[:2] == [
        {"softmax"},
        {"softmax", "scaled_dot_product_attention"},
    ]  # the user's line is a comment there
    (site,) = json.loads(artifacts[2][1])["sites"]
    assert (site["target"], site["id"]) == ("sdpa", "0/0#1")


def _artifacts(log: str) -> Any:
    """(name, payload) of ours: a line of JSON, then the payload with a tab in front of each line."""
    lines = log.splitlines()
    for number, line in enumerate(lines):
        if '"name": "attn_pass_' in line:
            payload = []
            for following in lines[number + 1 :]:
                if not following.startswith("\t"):
                    break
                payload.append(following[1:])
            yield json.loads(line[line.index("{") :])["artifact"]["name"], "\n".join(payload)


def test_control_characters_do_not_reach_the_log(caplog: pytest.LogCaptureFixture) -> None:
    report = attn_pass.Report(graphs=1)
    report.append(attn_pass.SiteReport(outcome="left", reason="red \x1b[31m\nline", where="a\x07.py:1"))
    with caplog.at_level(logging.DEBUG, "attn_pass"):
        torch_logging.log_report(report)
    assert caplog.messages[-1] == "a.py:1: left: red [31m line"


def test_an_artifact_that_cannot_be_made_breaks_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any, **kwargs: Any) -> str:
        raise RuntimeError("no code for this graph")

    graph = torch.fx.symbolic_trace(torch.nn.Identity())
    monkeypatch.setattr(graph, "print_readable", broken, raising=False)
    trace = logging.getLogger("torch.__trace")
    assert not any(isinstance(h, LogCaptureHandler) for h in trace.handlers)  # nobody listens in tests (conftest.py)
    monkeypatch.setattr(trace, "handlers", [])
    torch_logging.trace_graph("before", graph)
    assert not caplog.messages
    monkeypatch.setattr(trace, "handlers", [logging.NullHandler()])
    torch_logging.trace_graph("before", graph)
    reported = "the artifact attn_pass_before could not be made: RuntimeError: no code for this graph"
    assert reported in caplog.messages


def left(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with attn_pass.leave():
        return torch.softmax(q @ k.mT, -1) @ v


def ranges(events: Any) -> list[tuple[str, float, float]]:
    """(name, start, end) of the sites' ranges, in order."""
    own = [e for e in events if e.get("ph") == "X" and e["name"].startswith("attn_pass ")]
    return sorted(((e["name"], e["ts"], e["ts"] + e["dur"]) for e in own), key=lambda e: e[1])


@pytest.mark.slow
def test_sites_are_ranges_in_the_profilers_timeline(tmp_path: Path) -> None:
    """Forward and backward, of what was rewritten and of what was left; and none where they are not asked for."""

    def two(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plain(q, k, v) + left(q, k, v)

    inputs = qkv(2, 2, 32, 32, 16, grad=True)
    for asked in (True, False):
        torch._dynamo.reset()
        options = {"choose": "fused", "targets": ("sdpa",), "timeline": asked}
        with attn_pass.record() as report:
            compiled = torch.compile(two, backend=attn_pass.backend, options=options)
            compiled(*inputs).sum().backward()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            compiled(*inputs).sum().backward()
        profile.export_chrome_trace(str(tmp_path / "trace.json"))
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        found = ranges(events)
        if not asked:
            assert not found
            continue
        names = [site.in_timeline(site.target or "left") for site in report.sites]
        assert [site.id for site in report.sites] == ["0/0#1", "0/0#2"]
        assert list(dict.fromkeys(name for name, *_ in found)) == names
        calls = [e for e in events if "scaled_dot_product" in e.get("name", "") and e.get("ph") == "X"]
        assert len(calls) == 2  # forward and backward
        for call in calls:
            around = [name for name, start, end in found if start <= call["ts"] and call["ts"] + call["dur"] <= end]
            assert around == names[:1], call["name"]
        assert sum(name == names[1] for name, *_ in found) >= 4  # its products, forward and backward


def test_the_timeline_changes_no_result_and_keeps_what_is_in_the_slot() -> None:
    from attn_pass.entries.timeline import Ranges, ranges

    kept: list[Any] = []
    chained = ranges(lambda nodes: kept.append(nodes) or nodes)
    assert chained([]) == [] and kept == [[]]
    assert ranges(chained) is chained and isinstance(ranges(None), Ranges)


def left_too(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with attn_pass.leave():
        return torch.softmax(q @ k.mT, -1) @ v


def test_a_cached_graph_of_another_line_lends_its_ranges_to_nobody(tmp_path: Path) -> None:
    """The names are no part of the graph that Inductor's caches are asked for."""
    with config.patch(fx_graph_cache=True):
        for fn in (left, left_too):
            torch._dynamo.reset()
            with attn_pass.record() as report, torch.no_grad():
                code = run_and_get_code(
                    torch.compile(fn, backend=attn_pass.backend, options={"timeline": True}), *qkv(1, 1, 21, 19, 16)
                )[1]
            assert f"'{report.sites[0].in_timeline('left')}'" in "".join(code)


def test_a_site_has_an_id_in_the_table_and_the_log(caplog: pytest.LogCaptureFixture) -> None:
    report = attn_pass.explain(plain, *qkv(), attn_pass_options={"choose": "fused"})
    (site,) = report.sites
    assert re.fullmatch(r"\d+/\d+#1", site.id) and f"id: {site.id}" in report.table(verbose=True)
    assert "id: " not in report.table()
    with caplog.at_level(logging.INFO, "attn_pass"):
        torch_logging.log_report(report)
    assert caplog.messages[-1].startswith(f"{site.id} by_hand.py:")


def test_provenance_knows_what_the_pass_made() -> None:
    with config.patch("trace.provenance_tracking_level", 1):
        gm = rewritten(plain, *qkv())
    (made,) = (n for n in gm.graph.nodes if "scaled_dot_product_attention" in str(n.target))
    sources = made.meta["from_node"]
    assert [(s.pass_name, s.name) for s in sources] == [("attn_pass", "matmul_1")]
    assert "plain" in made.meta["stack_trace"]


def test_provenance_costs_nothing_unasked() -> None:
    gm = rewritten(plain, *qkv())
    (made,) = (n for n in gm.graph.nodes if "scaled_dot_product_attention" in str(n.target))
    assert not made.meta.get("from_node")
    for hooks in ("_create_node_hooks", "_erase_node_hooks", "_replace_hooks"):
        assert not getattr(gm, hooks)


def test_list_backends_shows_it() -> None:
    assert "attn_pass" in torch.compiler.list_backends()


def test_the_bisector_finds_the_site(quiet_torch: None) -> None:
    from torch._inductor.compiler_bisector import CompilerBisector

    inputs = qkv()

    def two(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plain(q, k, v) + negative(q, k, v)

    def is_right() -> bool:
        """The second rewrite is what is taken to be wrong."""
        torch._dynamo.reset()
        with attn_pass.record() as report, attn_pass.enabled(choose="fused"):
            torch.compile(two)(*inputs)
        bisected = [site for site in report.sites if "in negative" in site.where]
        return not any(site.outcome == "rewritten" for site in bisected)

    result = CompilerBisector.do_bisect(is_right)
    assert (result.backend, result.subsystem) == ("inductor", "pre_grad_passes")
    assert "by_hand.py" in result.debug_info and "in negative" in result.debug_info
