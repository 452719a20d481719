"""`explain`: captures a model and decides what each attention would become, without compiling."""

from __future__ import annotations

import datetime
import functools
import inspect
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from attn_pass.entries.breaks import breaks_noted
from attn_pass.entries.environment import import_compiler
from attn_pass.entries.export import exported, known_values
from attn_pass.entries.inductor import folds_constants
from attn_pass.entries.known import known_buffers
from attn_pass.entries.mistakes import check_keywords, hint, warn_swallowed
from attn_pass.entries.snapshot import Snapshot
from attn_pass.entries.stock import StockAsker
from attn_pass.entries.transaction import decide
from attn_pass.entries.uncompiled import own_compile_off, uncompiled
from attn_pass.errors import AttnPassError, CaptureError, in_one_line, own_version
from attn_pass.graph.values import KNOWN_TENSORS
from attn_pass.options import Options
from attn_pass.planner.overrides import named_options
from attn_pass.report.history import publish
from attn_pass.report.pages import collect
from attn_pass.report.pages.times import time_now
from attn_pass.report.record import Report
from attn_pass.report.units import duration


def explain(
    model: Any,
    *args: Any,
    attn_pass_options: Mapping[str, Any] | None = None,
    attn_pass_dynamic: bool = False,
    attn_pass_aot: bool = False,
    **kwargs: Any,
) -> Report:
    """Reports what attn_pass would do with each attention of a model, and why, without compiling.

    The model is captured and runs once, in eager mode, in the current training and gradient mode. The state that
    torch.compile keeps for the model does not change.

    Args:
        model: a module or function, compiled or not; or an exported program, for which args are ignored.
        args: the model's inputs.
        attn_pass_options: fields of `attn_pass.Options`.
        attn_pass_dynamic: let every size of the inputs vary.
        attn_pass_aot: decide as `attn_pass.aot_compile` would: the module is exported, without gradients.
        kwargs: all other keywords are the model's keyword inputs.

    Raises:
        CaptureError: the model fails on these inputs, or torch.compile cannot capture any graph of it.
        EnvironmentFault: the compiler's folder cannot be written.
        OptionError: an option or a keyword ``attn_pass_...`` is unknown, or has a value that is not accepted.
    """
    import_compiler()
    check_keywords(explain, kwargs)
    options = named_options(attn_pass_options)
    if attn_pass_aot and not isinstance(model, ExportedProgram):
        model = exported(model, args, kwargs, _any_size(args, kwargs) if attn_pass_dynamic else None, "explain")
    if isinstance(model, ExportedProgram):
        with torch.no_grad():  # as packages are compiled
            known = functools.partial(known_values, model, options, folds_constants())
        copied = Snapshot(model.graph_module).module()
        report = decide(copied, options, "aoti", "inductor", known, ask_stock=StockAsker()).report
    else:
        report = _captured(model, args, kwargs, options, attn_pass_dynamic)
        warn_swallowed("explain", model, kwargs)
    report.about = _about(model, attn_pass_options or {}, "AOTInductor" if attn_pass_aot else "torch.compile")
    publish(report, compiled=False)
    return report


def _about(model: Any, options: Mapping[str, Any], program: str) -> dict[str, str]:
    """Of what a report is, for the head of its page."""
    exported_already = isinstance(model, ExportedProgram)
    return {
        "model": "an exported program" if exported_already else _name(model),
        "decided as": "AOTInductor" if exported_already else program,
        "options": ", ".join(f"{name}={value!r}" for name, value in options.items()) or "the defaults",
        "versions": f"attn_pass {own_version()}, torch {torch.__version__}, python {platform.python_version()}",
        "date": datetime.date.today().isoformat(),
    }


def _any_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShapesCollection:
    """Every size of the inputs is dynamic except those of 1, which torch.export cannot make dynamic by itself."""
    shapes: Any = ShapesCollection()
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor):
            shapes[leaf] = {number: Dim.AUTO for number, size in enumerate(leaf.shape) if size > 1}
    collection: ShapesCollection = shapes
    return collection


class _Reader:
    """A Dynamo backend that decides on a copy of each graph, runs the graph as it is, and counts its calls."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.report = Report()
        self.ask_stock = StockAsker()
        self.error: AttnPassError | None = None
        self.calls: list[tuple[Report, list[None]]] = []  # of each graph, one entry a call

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            copied = Snapshot(gm).module()
            known = functools.partial(known_buffers, gm, example_inputs, self.options, folds_constants())
            decision = decide(copied, self.options, "compile", "inductor", known, ask_stock=self.ask_stock)
            self._give_hints(decision.report, gm, example_inputs)
            self.report.extend(decision.report)
            return self._counted(gm.forward, decision.report)
        except AttnPassError as error:  # raised here it would reach the user as an error of Dynamo's
            self.error = self.error or error
        return gm.forward

    def _counted(self, forward: Callable[..., Any], report: Report) -> Callable[..., Any]:
        calls: list[None] = []
        self.calls.append((report, calls))

        def counted_forward(*inputs: Any) -> Any:
            calls.append(None)
            return forward(*inputs)

        return counted_forward

    def count_calls(self) -> None:
        """After the run: beside a graph break Dynamo runs one graph for all layers that are alike."""
        for report, calls in self.calls:
            for site in report.sites:
                site.count *= max(1, len(calls))

    def _give_hints(self, report: Report, gm: GraphModule, example_inputs: Sequence[Any]) -> None:
        """Where the values of buffers would say what is kept: decides once more with them, and tells the outcome."""
        if self.options.assume_constant_buffers or all(site.mask == "none" for site in report.sites):
            return
        options = replace(self.options, assume_constant_buffers=True)
        known = known_buffers(gm, example_inputs, options)
        if not known[KNOWN_TENSORS]:
            return
        assumed = decide(Snapshot(gm).module(), options, "compile", "inductor", lambda: known).report
        collect.forget(assumed)  # no graph of the program
        for site, other in zip(report.sites, assumed.sites):
            if other.mask != site.mask and other.node == site.node:
                now, then = time_now(site), time_now(other)
                gain = f", predicted {duration(then)} instead of {duration(now)}" if now and then else ""
                fixed = f"{', '.join(other.fixed)} is" if len(other.fixed) == 1 else "buffers are"
                site.hint = f"if {fixed} constant, assume_constant_buffers=True makes the mask {other.mask}{gain}"


def _captured(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options, dynamic: bool) -> Report:
    from torch._dynamo import config

    if not callable(model):
        raise CaptureError(
            f"explain takes a module, a function or an ExportedProgram, got {type(model).__name__}; "
            "call explain(model, *inputs)"
        )
    name = _name(model)
    reader = _Reader(options)
    settings: dict[str, Any] = {"dynamic": True} if dynamic else {}
    compiled = torch.compile(_fresh(uncompiled(model)), backend=reader, **settings, **_isolation())
    try:
        # Earlier calls had other shapes: no reason to be dynamic here.
        with breaks_noted() as noted, config.patch(automatic_dynamic_shapes=False), own_compile_off(model):
            compiled(*args, **kwargs)
        reader.report.graph_breaks = tuple(noted)
        reader.count_calls()
    except Exception as error:
        raise CaptureError(
            f"{name} could not be captured: {in_one_line(error)}{hint('explain', args, kwargs)}\nCheck that it runs "
            "eagerly with these inputs (explain takes them as the model does: explain(model, *args, **kwargs)); if it "
            "does, see what torch.compile(model, backend='eager') says"
        ) from error
    if reader.error is not None:
        raise reader.error
    if not reader.report.graphs:
        why = "; ".join(reader.report.graph_breaks) or (
            "it computes nothing on tensors, or torch.compile is disabled for it (torch.compiler.disable, "
            "torch.compiler.set_stance, TORCHDYNAMO_DISABLE)"
        )
        raise CaptureError(
            f"torch.compile captured no graph of {name}: {why}. Explain the part of the model that computes, or "
            "export it and explain the exported program"
        )
    return reader.report


def _fresh(model: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls the model, whose code Dynamo has not seen: it counts what it compiled by code object."""

    def explained(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    explained.__code__ = explained.__code__.replace()
    return explained


def _isolation() -> dict[str, Any]:
    """For torch.compile: keep the frames captured here out of the model's own recompile limit (torch 2.13)."""
    return {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}


def _name(model: Any) -> str:
    return type(model).__name__ if isinstance(model, torch.nn.Module) else getattr(model, "__name__", repr(model))
