"""Decides on a graph and keeps the original: for a second try without the target that failed, or as the fallback."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import GraphModule

from attn_pass import engine
from attn_pass.compat import without_saved_tensors_hooks
from attn_pass.entries.breaks import break_after
from attn_pass.entries.environment import raise_if_environment
from attn_pass.entries.inductor import compiled_site, folds_constants
from attn_pass.entries.known import Known, known_buffers
from attn_pass.entries.laid_out import LaidOut
from attn_pass.entries.other_device import warn_other_device
from attn_pass.entries.retry import (
    Failure,
    could_not_lower,
    failure_of,
    is_last,
    leave_all,
    mark_retried,
    warn_failed,
    without_all,
)
from attn_pass.entries.snapshot import Snapshot, tracing_state
from attn_pass.entries.stock import StockAsker
from attn_pass.errors import OptionError, RewriteError, cause_of
from attn_pass.graph.provenance import Emission
from attn_pass.options import Options, Runner
from attn_pass.report import torch_logging
from attn_pass.report.history import publish
from attn_pass.report.pages import collect
from attn_pass.report.progress import progress
from attn_pass.report.record import Report

CompileGraph = Callable[[GraphModule, Sequence[Any], Report | None], Callable[..., Any]]


DECIDED = "attn_pass_decided"
"""Key in a root graph's meta: it was rewritten once, so a hook or an inner backend leaves it alone."""


@dataclass(frozen=True)
class Decision:
    """What became of a root graph: the sites' report, whether it is another one now, what it was, what was put in."""

    report: Report
    changed: bool
    original: Snapshot
    emissions: Sequence[Emission] = ()


def decide(
    gm: GraphModule,
    options: Options,
    program: str,
    runner: Runner = "other",
    known: Known | None = None,
    measure: Callable[..., Any] | None = None,
    without: Mapping[str, str] | None = None,
    ask_stock: StockAsker | None = None,
) -> Decision:
    """Rewrite a root graph in place. If attn_pass has a defect, the graph stays unchanged, with one warning.

    Args:
        gm: the root graph.
        options: the user's options.
        program: "compile", "export" or "aoti", where the graph comes from.
        runner: who runs it, see `attn_pass.options.Runner`.
        known: gives the literals and tensors whose values are known, by the names of `attn_pass.graph.values`.
        measure: times the forms of a site, see `attn_pass.engine.rewrite_graph`.
        without: targets that are not to be taken, and why.
        ask_stock: tells what stock makes of every site, see `attn_pass.entries.stock`, where nothing is compiled.

    Raises:
        OptionError: an option names something that does not exist.
        Exception: the failure, if options.on_error is "raise". The graph is unchanged then, too.
    """
    torch_logging.trace_graph("before", gm)
    began, report, aside = time.perf_counter(), Report(), 0.0
    asked_before = 0.0 if ask_stock is None else ask_stock.seconds
    original = Snapshot(gm)
    emissions: list[Emission] = []
    values, meta = dict[str, Any](), gm.meta  # which several graphs may have
    try:
        if known is not None:
            values.update(known())
        meta.update(values)
        measures = options.tune or options.verify != "off"
        shown = progress() if measures else nullcontext()
        with without_saved_tensors_hooks(), collect.root_graph(gm, report, program) as collected, shown:
            changed = engine.rewrite_graph(
                gm,
                options=options,
                report=report,
                program=program,
                runner=runner,
                measure=measure,
                compile_site=functools.partial(compiled_site, options),
                emissions=emissions,
                without=without,
                ask_stock=ask_stock or StockAsker(),
                explains=ask_stock is not None,
            )
        aside = collected.seconds + (0.0 if ask_stock is None else ask_stock.seconds - asked_before)
    except Exception as error:
        is_raised = isinstance(error, OptionError) or options.on_error == "raise"
        if report.rewritten or not is_raised:  # the nodes of a graph that is as it was stay themselves
            original.restore()
        if is_raised:
            raise
        changed = False
        leave_all(report, f"attn_pass failed on this graph ({cause_of(error)})")
    finally:
        for name in values:
            meta.pop(name, None)
            gm.meta.pop(name, None)
    report.seconds, report.graphs = time.perf_counter() - began - aside, 1
    report.graph_breaks = break_after(gm)
    _mark_decided(gm)
    if changed:
        torch_logging.trace_graph("after", gm)
    return Decision(report, changed, original, emissions)


def compile_rewritten(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    compile_graph: CompileGraph,
    runner: Runner = "other",
) -> Callable[..., Any]:
    """Rewrite a Dynamo graph and compile it. Publishes the report once compiled.

    On failure it is decided once more without the target that failed, and then the original is compiled.

    Args:
        gm: Dynamo's graph.
        example_inputs: Dynamo's example inputs.
        options: the user's options.
        compile_graph: compiles (graph, inputs, the report if the graph was rewritten and None if it is the user's).
        runner: what compiles it, see `attn_pass.options.Runner`.

    Raises:
        EnvironmentFault: nothing compiles here: there is no compiler, or its folder cannot be written.
        RewriteError: the rewritten graph failed to compile and options.on_error is "raise".
        Exception: what compile_graph raises on the original graph.
    """
    if gm.meta.get(DECIDED):
        return compile_graph(gm, example_inputs, None)
    folds = runner == "inductor" and folds_constants()
    known = functools.cache(functools.partial(known_buffers, gm, example_inputs, options, folds))
    decision = decide(gm, options, "compile", runner, known)
    warn_other_device(decision.report, options)
    restore_tracing = tracing_state()
    failures: list[Failure] = []
    compiled: Callable[..., Any] | None = None
    while decision.changed and compiled is None:
        try:
            laid_out = LaidOut(gm, example_inputs)
            compiled = laid_out.around(compile_graph(gm, laid_out.inputs, decision.report))
        except _control_flow():
            raise
        except Exception as error:
            failures.append(failed(error, decision, options))
        if compiled is None:
            restore_tracing()
            gm = decision.original.module()
            again = functools.partial(decide, gm, options, "compile", runner, known)
            decision = next_decision(decision, failures, again)
    if compiled is None:
        _mark_decided(gm)
        compiled = compile_graph(gm, example_inputs, None)
    if failures:
        warn_failed(decision.report, failures)
    publish(decision.report)
    return compiled


def _mark_decided(gm: GraphModule) -> None:
    """Not in place: with DistributedDataParallel all parts of a split graph have one dict."""
    gm.meta = {**gm.meta, DECIDED: True}


def failed(error: Exception, decision: Decision, options: Options) -> Failure:
    """The facts about a failure to compile.

    Raises:
        EnvironmentFault: nothing compiles here, whatever the graph.
        RewriteError: the user requested that with ``on_error="raise"``.
    """
    raise_if_environment(error)
    cause = cause_of(error)
    if options.on_error == "raise":
        raise RewriteError(
            f"the rewritten graph does not compile: {cause}; use on_error='warn' to compile the original instead"
        ) from error
    return failure_of(error, cause, decision.report, decision.emissions)


def next_decision(decision: Decision, failures: Sequence[Failure], again: Callable[..., Decision]) -> Decision:
    """What to compile after a failure: what is decided without regions, then without targets, or the original.

    Args:
        decision: what failed to compile.
        failures: all failures so far.
        again: decides on the original anew; called with ``without``.
    """
    if is_last(failures):
        decision.report.mark_left(could_not_lower(failures))
        return replace(decision, changed=False)
    collect.forget(decision.report)
    retried = again(without=without_all(failures))
    mark_retried(retried.report, decision.report, failures[-1])
    return retried


def _control_flow() -> tuple[type[Exception], ...]:
    """Exceptions by which a backend talks to Dynamo: trace again, or run this frame eagerly."""
    from torch._dynamo import exc

    return (exc.RestartAnalysis, exc.SkipFrame)
