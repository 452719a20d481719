"""The property: a rewritten program equals the original wherever eager has a value; near misses too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from io import StringIO
from typing import Any
from unittest import mock

import torch
from fuzz_compare import UNITS_OF_GRADIENTS, Ran, all_faults, fault_of
from fuzz_dropout import Calls, SameKeys, faults_of_call
from fuzz_graphs import graph_of, values
from fuzz_program import SCORES
from fuzz_strategy import Case
from torch._inductor.graph import GraphLowering
from torch.fx import Graph, GraphModule, Node

import attn_pass
from attn_pass.engine import rewrite_graph
from attn_pass.options import make_options
from attn_pass.report.record import Report
from attn_pass.targets.base import CLAMP, FINITE_KEYS

_ROUNDED = 4  # runs in float64 with inputs that are off by a rounding, where a result seems wrong


class Wrong(AssertionError):
    """A program the pass changed the meaning of, or failed on; the message has all that is needed to see it."""


class NoProgram(Exception):
    """What was drawn does not run in eager, or its graph cannot be made."""


@dataclass
class Tally:
    """What became of the programs that were run."""

    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    classes: Counter[str] = field(default_factory=Counter)

    def add(self, case: Case, report: Report) -> None:
        kind = "near misses" if case.program.is_miss else "plain"
        self.counts[kind] += 1
        rewritten = [s.target for s in report.sites if s.outcome in ("rewritten", "decomposed")]
        self.counts[f"{kind}, rewritten"] += bool(rewritten)
        for target in rewritten:
            self.counts[f"target {target}"] += 1
        for name in classes(case):
            self.classes[name] += 1
            self.classes[f"{name}, rewritten"] += bool(rewritten)
        for site in report.sites:
            if site.outcome == "left":
                self.reasons[f"{kind}: {site.reason.split(' (')[0][:90]}"] += 1


_CLASSES = {  # by words in their rows
    "something added far below 0": ("far down",),
    "operands multiplied in place": tuple(
        f"{operand}{n}: {row}"
        for operand in ("query", "key", "value")
        for n in range(3)
        for row in ("mul in place", "div in place", "imul", "a view multiplied")
    ),
    "masks of the scores' shape": ("scores' shape", "new_ones", "full_like"),
    "scores assigned by index": ("boolean index", "part added"),
    "a part of the scores added to": ("part added",),
    "products written to a tensor": ("into a ",),
    "pointwise operations and softmaxes by out=": ("by out=",),
    "functions kept whole": ("kept whole",),
    "scores of heads or sets of keys joined": ("joined over keys", "stacked heads", "in pieces"),
    "sinks and joined scores": ("sink", "joined with"),
    "other spellings of a softmax": (
        "softmin",
        "base 2",
        "by slices",
        "logsumexp",
        "log_softmax",
        "inverse sum",
        "normalised exp",
    ),
}


def classes(case: Case) -> list[str]:
    """The classes of programs that a case belongs to."""
    return [name for name, belongs in belonging(case).items() if belongs]


def belonging(case: Case) -> dict[str, bool]:
    """Every class, added one by one for what was found (docs/results/fuzz.md), and whether the case is in it."""
    p = case.program
    rows = [f"{place}: {step.row}" for place, step, _ in p.steps()]
    half = p.dtype in (torch.float16, torch.bfloat16)
    return {
        "float16": p.dtype == torch.float16,
        "a float32 or float64 mask on half-precision scores": half and any(r.wide for _, _, r in p.steps()),
        "two fills": len({step.fill for step in p.score if SCORES[step.row].masks}) > 1,
        "a masked key that is no number": any("last is no number" in row for row in rows),
        "weights used as well": p.returns in ("softmax", "weights"),
        "a log-sum-exp used as well": p.returns == "log-sum-exp",
        "dropout": p.is_random,
        "an operand written after the result, in training": p.writes.endswith("after") and case.grad,
        **{name: any(word in row for word in words for row in rows) for name, words in _CLASSES.items()},
    }


def check(case: Case, tally: Tally | None = None, through: str = "graph") -> None:
    """Raises `Wrong` with everything known, `NoProgram` where there is nothing to compare.

    ``through`` is "graph" (the dialect's graph, built directly), "compile" (torch.compile, of which the graphs are
    run), "inductor" (their code) or "export".
    """
    inputs = _inputs(case)
    expected = _eager(case, inputs)
    truth = expected if case.program.is_random else _exact(case, inputs)
    original = None
    if through == "graph":
        gm = _graph(case, inputs)
        original = _copy(gm) if case.other is not None or case.dialect == "decomposed" else None
        if case.program.is_random:  # other dialects draw other numbers
            expected = truth = _run(_runner(_copy(gm)), inputs, case.grad)
        report, run, code = _rewritten(case, inputs, gm)
    else:
        report, run, code = _through(case, inputs, through)
    if tally is not None:
        tally.add(case, report)
    targets = {site.target for site in report.sites}
    if case.program.is_random and "cpu_kernel" in targets:
        if targets <= {None, "cpu_kernel"}:
            _check_dropout(case, run, inputs, report, code)
        elif tally is not None:  # what another target draws, and where, is not known here
            tally.counts["not compared"] += 1
        return
    try:
        _compare(case, run, inputs, expected, truth, report, code)
    except Wrong:
        if original is not None:
            _must_run(case, inputs, original)
        raise
    if original is not None and case.other is not None:
        _at_other_sizes(case, original, run, report, code)


def _check_dropout(case: Case, run: Callable[..., Any], inputs: list[torch.Tensor], report: Report, code: str) -> None:
    """The CPU kernel draws other numbers than eager: see `fuzz_dropout`."""
    try:
        with Calls() as calls:
            _run(run, inputs, case.grad)
    except Exception as error:
        text = f"what was rewritten raised {type(error).__name__}: {error}"
        raise Wrong(_told(case, inputs, report, code, text)) from error

    def compare(ours: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> str:
        return fault_of(ours, eager, exact, case.program.dtype, (), 1.0, UNITS_OF_GRADIENTS)

    faults = [fault for given in calls.made for fault in faults_of_call(given, case.grad, compare)]
    if faults:
        raise Wrong(_told(case, inputs, report, code, "\n".join(faults)))
    axis = -2 if case.program.softmax.row == "queries" else -1  # of the keys, in weights that are transposed afterwards
    first = 0  # of the keys that the kernel is given, where a mask keeps a range of them
    while True:
        with SameKeys(first, axis) as same:
            try:
                _compare(case, run, inputs, _eager(case, inputs), _exact(case, inputs), report, code, repeatable=True)
                return
            except Wrong:
                if first >= same.most - same.fewest:
                    raise
        first += 1


def _must_run(case: Case, inputs: list[torch.Tensor], graph: GraphModule) -> None:
    """torch takes a `view` of what it indexes for possible by fake strides that are not the real ones (2.13.0)."""
    try:
        with redirect_stderr(StringIO()):
            _run(_runner(_copy(graph)), inputs, case.grad)
    except Exception as error:
        raise NoProgram(f"the graph does not run: {type(error).__name__}: {error}") from error


def _rewritten(case: Case, inputs: list[torch.Tensor], gm: GraphModule) -> tuple[Report, Callable[..., Any], str]:
    original, report = gm.code, Report()
    program = "compile" if case.dialect == "dynamo" else "export"
    try:
        with torch.set_grad_enabled(case.grad):
            rewrite_graph(gm, options=_options(case), report=report, program=program)
    except Exception as error:
        raise Wrong(
            _told(case, inputs, report, original, f"the pass raised {type(error).__name__}: {error}")
        ) from error
    return report, _runner(gm), f"{original}\nrewritten:\n{gm.code}"


def _runner(gm: GraphModule) -> Callable[..., Any]:
    return lambda *given: gm(*values(gm, given))


def _copy(gm: GraphModule) -> GraphModule:
    """The graph as it is now, to be run."""
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    copied = GraphModule(gm, graph)
    copied.meta.update(gm.meta)
    return copied


def _graph(case: Case, inputs: list[torch.Tensor]) -> GraphModule:
    p = case.program
    infinite = any(step.row == "other: no binary mask, lowest" for step in p.score)
    if infinite or any(step.row == "last is no number" for step in p.key):
        if p.softmax.row == "nan_to_num":
            raise NoProgram("infinite scores and a guard against NaN, of which the report says what it assumes")
    dims: list[Sequence[int]] = [()] * len(inputs)
    if case.other is not None:
        later = list(case.other.inputs.values())
        dims = [[d for d, (a, b) in enumerate(zip(x.shape, y.shape)) if a != b] for x, y in zip(inputs, later)]
    leaves = _copies(inputs, case.grad)
    try:
        gm = graph_of(p.function(), leaves, case.dialect, dims)
    except Exception as error:
        raise NoProgram(f"no graph: {type(error).__name__}: {error}") from error
    if p.writes and case.dialect == "decomposed":
        _check_writes(case, inputs, gm)
    return gm


def _check_writes(case: Case, inputs: list[torch.Tensor], gm: GraphModule) -> None:
    """Export adds up what a write into an expanded tensor leaves in each of its elements, or copies into it."""
    try:
        ran = _run(_runner(_copy(gm)), inputs, False)
    except Exception as error:
        raise NoProgram(f"the graph does not run: {type(error).__name__}: {error}") from error
    if not all(torch.equal(a, b) for a, b in zip(ran.inputs, _eager(case, inputs).inputs)):
        raise NoProgram("the graph writes something else than the program")


def _options(case: Case) -> Any:
    asked = {"choose": case.choose, "targets": case.targets, "numerics": case.numerics, "device": case.device}
    return make_options(**asked, on_error="raise")


def _through(case: Case, inputs: list[torch.Tensor], through: str) -> tuple[Report, Callable[..., Any], str]:
    """The same by torch.compile or torch.export, which write the graph themselves."""
    static = Case(case.program, grad=case.grad)
    function = _graph(static, inputs)  # plain Python by now: nothing of the generator is compiled
    options = {"choose": case.choose, "targets": case.targets, "numerics": case.numerics, "on_error": "raise"}
    torch._dynamo.reset()
    if through == "export":
        try:
            program = torch.export.export(function, tuple(_copies(inputs)))
        except Exception as error:
            raise NoProgram(f"no export: {type(error).__name__}: {error}") from error
        report = attn_pass.rewrite(program, **options)
        return report, program.module(), program.graph_module.code
    if through == "inductor":
        compiled = torch.compile(
            function.forward, backend=attn_pass.backend, dynamic=False, fullgraph=True, options=options
        )
    else:
        backend = attn_pass.wrap("aot_eager_default_partitioner", **options)
        compiled = torch.compile(function.forward, backend=backend, dynamic=False, fullgraph=True)
    try:
        with attn_pass.record() as report, _beside_convolutions():
            _run(compiled, inputs, case.grad)
    except torch._dynamo.exc.Unsupported as error:
        raise NoProgram(f"no graph: {error}") from error
    except Exception as error:
        text = f"compiling raised {type(error).__name__}: {error}"
        raise Wrong(_told(case, inputs, report, function.code, text)) from error
    return report, compiled, function.code


@contextmanager
def _beside_convolutions() -> Iterator[None]:
    """What has four dimensions and is saved for the backward lies in memory as Inductor has it beside convolutions."""

    def every_node(lowering: GraphLowering) -> set[Node]:
        return set(lowering.module.graph.nodes)

    preferred = mock.patch.object(GraphLowering, "find_nodes_prefer_channels_last", every_node)
    with mock.patch.object(GraphLowering, "decide_layout_opt", lambda *_, **__: True), preferred:
        yield


def _at_other_sizes(case: Case, original: GraphModule, run: Callable[..., Any], report: Report, code: str) -> None:
    """The rewritten graph at sizes it was not traced with, where the original graph holds for them."""
    other = Case(case.other, case.dialect, case.grad, case.choose, case.targets, case.numerics)
    inputs = _inputs(other)
    try:
        expected = _run(other.program.function(), inputs, case.grad)
        with redirect_stderr(StringIO()):  # a graph module prints where it fails
            as_traced = _run(lambda *given: original(*values(original, given)), inputs, case.grad)
    except Exception:
        return
    if [t.shape for t in as_traced.results] != [t.shape for t in expected.results] or not all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(as_traced.results, expected.results)
    ):
        return  # traced for one size only, and nothing checks that guard here
    truth = (
        expected if case.program.is_random else _run(other.program.function(wide=True), inputs, case.grad, wide=True)
    )
    _compare(case, run, inputs, expected, truth, report, code)


# ---------------------------------------------------------------- inputs and runs


def _inputs(case: Case) -> list[torch.Tensor]:
    given = dict(case.program.inputs)
    for name, kind in zip(("query", "key", "value"), case.strides):
        given[name] = _laid(given[name], kind)
    return list(given.values())


def _laid(x: torch.Tensor, kind: str) -> torch.Tensor:
    """The tensor as it lies in other memory; "expanded" has other values, all rows of the first dimension the same."""
    if kind == "permuted" and x.dim() > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if kind == "gaps":
        return x.repeat_interleave(2, -1)[..., ::2]
    if kind == "offset":
        return torch.cat([torch.full((3,), 7.0, dtype=x.dtype), x.flatten()])[3:].view(x.shape)
    if kind == "expanded" and x.dim() > 2:
        return x[:1].expand(x.shape)
    return x


def _copies(inputs: Sequence[torch.Tensor], grad: bool = False, wide: bool = False) -> list[torch.Tensor]:
    """New tensors that lie in memory as the inputs do, offset included."""
    copies = []
    for x in inputs:
        whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).clone()
        whole = whole.double() if wide and x.is_floating_point() else whole
        new = whole.as_strided(x.shape, x.stride(), x.storage_offset())
        copies.append(new.detach().requires_grad_(grad and new.is_floating_point()))
    return copies


def _eager(case: Case, inputs: list[torch.Tensor]) -> Ran:
    try:
        return _run(case.program.function(), inputs, case.grad)
    except Exception as error:
        raise NoProgram(f"{type(error).__name__}: {error}") from error


def _exact(case: Case, inputs: list[torch.Tensor]) -> Ran:
    try:
        return _run(case.program.function(wide=True), inputs, case.grad, wide=True)
    except Exception as error:  # a write into what an upcast copies, and float64 does not
        raise NoProgram(f"no float64: {type(error).__name__}: {error}") from error


def _run(
    function: Callable[..., Any],
    inputs: list[torch.Tensor],
    grad: bool,
    *,
    wide: bool = False,
    only: int | None = None,
) -> Ran:
    given = _copies(inputs, grad, wide)
    torch.default_generator.manual_seed(0)  # torch's own keeps a stack trace for each kind of device that is not there
    with torch.set_grad_enabled(grad):
        out = function(*given)
    results = list(out) if isinstance(out, (tuple, list)) else [out]
    gradients: list[torch.Tensor | None] = []
    leaves = [x for x in given if x.requires_grad]
    reached = [r for r in results if r.requires_grad]
    if grad and leaves and reached:
        make = torch.Generator().manual_seed(7)
        ones = [torch.randn(r.shape, generator=make).to(r.dtype) for r in reached]
        if only is not None:
            ones = [one if r is results[only] else torch.zeros_like(one) for r, one in zip(reached, ones)]
        gradients = list(torch.autograd.grad(reached, leaves, ones, allow_unused=True))
    return Ran([r.detach() for r in results], gradients, [x.detach() for x in given])


# ---------------------------------------------------------------- comparing


def _compare(
    case: Case,
    run: Callable[..., Any],
    inputs: list[torch.Tensor],
    expected: Ran,
    truth: Ran,
    report: Report,
    code: str,
    *,
    repeatable: bool = False,
) -> None:
    try:
        result = _run(run, inputs, case.grad)
    except Exception as error:
        text = f"what was rewritten raised {type(error).__name__}: {error}"
        raise Wrong(_told(case, inputs, report, code, text)) from error
    if not all_faults(case, result, expected, truth, ()):
        return
    assumed = any({CLAMP, FINITE_KEYS} & {*site.assumptions} for site in report.sites)
    if assumed and any(step.row == "last is no number" for step in case.program.key):
        return
    # Of few numbers eager's largest error may be luck: what do inputs that are off by one rounding give?
    draws = case.program.is_random and not repeatable
    rounded = [] if draws else _rounded(case, inputs)
    alone = [] if draws else _of_each_result(case, inputs, len(expected.results))
    faults = all_faults(case, result, expected, truth, rounded, alone)
    if faults:
        raise Wrong(_told(case, inputs, report, code, "\n".join(faults)))


_EXACT = ("binary", "fills", "float32 fills", "counts", "no number")


def _rounded(case: Case, inputs: list[torch.Tensor]) -> list[Ran]:
    """The program in float64 on inputs that are off by a unit in the last place; masks are what they are."""
    p = case.program
    kinds = {name: row.takes for name, _, row in p.steps()}
    exact = [kinds.get(name) in _EXACT or "_mask" in name for name in p.inputs]
    make = torch.Generator().manual_seed(1)
    given = [x if same or not x.is_floating_point() else x.double() for x, same in zip(inputs, exact)]
    off = torch.finfo(p.dtype).eps
    ran = []
    for _ in range(_ROUNDED):
        signs = [torch.randint(0, 2, x.shape, generator=make) * 2 - 1 for x in given]
        near = [x if x is y else x * (1 + off * s) for x, y, s in zip(given, inputs, signs)]
        ran.append(_run(p.function(wide=True), near, case.grad, wide=True))
    return ran


def _of_each_result(case: Case, inputs: list[torch.Tensor], count: int) -> list[tuple[Ran, Ran]]:
    """Eager's gradients, and those in float64, of one result alone, where there are several.

    Eager adds the gradients of what two results share, and rounds their sum; where one of them comes from a kernel
    each is rounded for itself.
    """
    if not case.grad or count < 2:
        return []
    narrow, wide = case.program.function(), case.program.function(wide=True)
    return [(_run(narrow, inputs, True, only=n), _run(wide, inputs, True, wide=True, only=n)) for n in range(count)]


def _told(case: Case, inputs: Sequence[torch.Tensor], report: Report, code: str, faults: str) -> str:
    """The failure as text: the case, its graph, inputs, what the pass did and what came out."""
    lines = [
        f"{name}: {str(x.dtype)[6:]} {tuple(x.shape)} strides {x.stride()} offset {x.storage_offset()}"
        for name, x in zip(case.program.inputs, inputs)
    ]
    sites = [
        f"{s.outcome}: {s.reason} [{s.target}; {s.mask or 'no mask'}; assumed {s.assumptions}]" for s in report.sites
    ]
    return "\n".join((faults, repr(case), *lines, *sites, code))
