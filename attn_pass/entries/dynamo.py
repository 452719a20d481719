"""The entries for torch.compile: `backend` (rewrite, then Inductor) and `wrap` (rewrite, then any Dynamo backend)."""

from __future__ import annotations

import functools
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from attn_pass.compat import require_inductor
from attn_pass.entries.retry import (
    Failure,
    could_not_lower,
    failure_of,
    first_where,
    leave_all,
    mark_retried,
    warn_failed,
)
from attn_pass.entries.snapshot import Snapshot, tracing_state
from attn_pass.errors import AttnPassWarning, OptionError, RewriteError
from attn_pass.graph.provenance import Emission
from attn_pass.graph.values import KNOWN_TENSORS
from attn_pass.options import OPTION_NAMES, Options, Runner, make_options, split_options
from attn_pass.report import torch_logging
from attn_pass.report.history import publish
from attn_pass.report.pages import collect
from attn_pass.report.record import Report

Backend = Callable[..., Callable[..., Any]]
CompileGraph = Callable[[GraphModule, Sequence[Any], Report | None], Callable[..., Any]]

DECIDED = "attn_pass_decided"
"""Key in a root graph's meta: it was rewritten once, so a hook or an inner backend leaves it alone."""


def backend(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """A torch.compile backend: rewrite the attention of the graph, then compile it with Inductor.

    torch.compile takes `mode` or `options`, not both; so options may hold "mode". If Inductor cannot lower the
    rewritten graph, the pass decides once more without the target it failed on (`attn_pass.entries.retry`); if that
    fails too the original is compiled and every site is reported left. One warning names the first site.
    With mode="lite" Inductor runs no pattern passes at all; the rewriting is done all the same.

    Args:
        gm: Dynamo's graph; Inductor takes it over.
        example_inputs: Dynamo's example inputs.
        mode: one of torch._inductor.list_mode_options().
        options: fields of `attn_pass.Options`, keys of torch._inductor.config, and "mode".

    Raises:
        OptionError: an option is unknown or has a value that is not accepted.
        VersionError: torch is too old for this entry.
    """
    require_inductor("backend")
    ours, inductor, own_mode = split_options(options)
    if mode and own_mode and mode != own_mode:
        raise OptionError(f"mode={mode!r} and options['mode']={own_mode!r} contradict; give one of them")
    mode = mode or own_mode
    if (mode or "").startswith("max-autotune") and "tune" not in (options or {}):
        ours = replace(ours, tune=True)
    patches = inductor_patches(ours, inductor, mode)
    return compile_rewritten(gm, example_inputs, ours, functools.partial(_inductor, patches), "inductor")


def _reset() -> None:
    """What torch._dynamo.reset() asks of a backend: forget CUDA graphs, as torch's own Inductor backend does."""
    if (trees := sys.modules.get("torch._inductor.cudagraph_trees")) is not None:
        trees.reset_cudagraph_trees()


backend.__name__ = "attn_pass"  # in Dynamo's errors and in its repro scripts, where a backend is looked up by name
setattr(backend, "reset", _reset)  # noqa: B010  a function has no such attribute to a type checker


class Wrapped:
    """What `wrap` returns: a Dynamo backend that rewrites, then calls another one.

    Two of them are equal when they wrap the same backend with the same options, so that Dynamo need not compile again.
    """

    def __init__(self, inner: str | Backend, options: Options, given: Iterable[str] = OPTION_NAMES) -> None:
        from torch._dynamo.backends.registry import lookup_backend

        self.inner: Backend = backend if inner == "inductor" else cast(Backend, lookup_backend(cast(Any, inner)))
        self.options = options
        self.given = frozenset(given)  # names of options the user gave, which a mode does not change
        name = inner if isinstance(inner, str) else _callable_name(inner)
        self.__name__ = f"attn_pass_{name}"

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        """Rewrite the graph, then compile it with the wrapped backend; kwargs are that backend's."""

        if self.inner is backend:
            ours = {name: value for name, value in asdict(self.options).items() if name != "tune" or name in self.given}
            merged = {**ours, **(kwargs.pop("options", None) or {})}
            return backend(gm, example_inputs, options=merged, **kwargs)

        def compile_inner(graph: GraphModule, inputs: Sequence[Any], report: Report | None) -> Callable[..., Any]:
            return self.inner(graph, inputs, **kwargs)

        return compile_rewritten(gm, example_inputs, self.options, compile_inner)

    def reset(self) -> None:
        """Pass torch._dynamo.reset() on to the wrapped backend."""
        if hasattr(self.inner, "reset"):
            self.inner.reset()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Wrapped) and self._facts() == other._facts()

    def __hash__(self) -> int:
        return hash((self.__name__, self.options))

    def _facts(self) -> tuple[Any, ...]:
        return self.inner, self.options, "tune" in self.given

    def __repr__(self) -> str:
        return f"attn_pass.wrap({self.__name__.removeprefix('attn_pass_')!r})"


def wrap(backend: str | Backend, **options: Any) -> Wrapped:
    """A Dynamo backend that rewrites attention and then calls `backend`: a name ("aot_eager", "openxla") or callable.

    Needs nothing of Inductor, unless `backend` is "inductor", which is `attn_pass.backend` with these options. If the
    wrapped backend fails on the rewritten graph it gets one without the target it failed on, and if it fails again the
    original one, with every site reported left.

    Args:
        backend: what torch.compile takes as backend. What torch.compile adds (mode, options) goes to it.
        options: fields of `attn_pass.Options`.

    Raises:
        OptionError: an option is unknown, has a value that is not accepted, or `backend` is not a backend.
    """
    if not isinstance(backend, str) and not callable(backend):
        raise OptionError(
            f"wrap takes a Dynamo backend by name ('aot_eager', 'openxla', ...) or a callable (graph, inputs) -> "
            f"callable, got {backend!r} ({type(backend).__name__}); torch._dynamo.list_backends() names the known ones"
        )
    return Wrapped(backend, make_options(**options), options)


def _callable_name(function: Any) -> str:
    """A name that is the same in every process: a partial is named for the function it holds."""
    while hasattr(function, "func"):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


# ---- deciding, with the original kept ----


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
    known: Mapping[str, Any] | None = None,
    measure: Callable[..., Any] | None = None,
    without: Mapping[str, str] | None = None,
) -> Decision:
    """Rewrite a root graph in place. A defect of attn_pass leaves it as it was, with one warning.

    Args:
        gm: the root graph.
        options: what the user asked for.
        program: "compile", "export" or "aoti", where the graph comes from.
        runner: what becomes of it, see `attn_pass.options.Runner`.
        known: literals and tensors whose values are known, by the names of `attn_pass.graph.values`.
        measure: times the forms of a site, see `attn_pass.engine.rewrite_graph`.
        without: targets that are not to be taken, and why.

    Raises:
        OptionError: an option names something that does not exist.
        Exception: what went wrong, if options.on_error is "raise". The graph is as it was then, too.
    """
    from attn_pass import engine

    torch_logging.trace_graph("before", gm)
    began, report, aside = time.perf_counter(), Report(), 0.0
    original = Snapshot(gm)
    emissions: list[Emission] = []
    gm.meta |= known or {}
    try:
        with collect.root_graph(gm, report, program) as collected:
            changed = engine.rewrite_graph(
                gm,
                options=options,
                report=report,
                program=program,
                runner=runner,
                measure=measure,
                compile_site=functools.partial(_compiled_site, options),
                emissions=emissions,
                without=without,
            )
        aside = collected.seconds
    except Exception as error:
        told = isinstance(error, OptionError) or options.on_error == "raise"
        if report.rewritten or not told:  # the nodes of a graph that is as it was stay themselves
            original.restore()
        if told:
            raise
        changed = False
        leave_all(report, f"attn_pass failed on this graph ({cause_of(error)})")
    finally:
        for name in known or {}:
            gm.meta.pop(name, None)
    report.seconds, report.graphs = time.perf_counter() - began - aside, 1
    gm.meta[DECIDED] = True
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
        options: what the user asked for.
        compile_graph: compiles (graph, inputs, the report if the graph was rewritten and None if it is the user's).
        runner: what compiles it, see `attn_pass.options.Runner`.

    Raises:
        RewriteError: the rewritten graph failed to compile and options.on_error is "raise".
        Exception: what compile_graph raises on the original graph.
    """
    if gm.meta.get(DECIDED):
        return compile_graph(gm, example_inputs, None)
    known = known_buffers(gm, example_inputs, options)
    decision = decide(gm, options, "compile", runner, known)
    restore_tracing = tracing_state()
    failures: list[Failure] = []
    compiled: Callable[..., Any] | None = None
    while decision.changed and compiled is None:
        try:
            compiled = compile_graph(gm, list(example_inputs), decision.report)
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
        gm.meta[DECIDED] = True
        compiled = compile_graph(gm, example_inputs, None)
    if failures:
        warn_failed(decision.report, failures)
    publish(decision.report)
    return compiled


def failed(error: Exception, decision: Decision, options: Options) -> Failure:
    """What is to be known of a failure to compile. Raises `RewriteError` where the user asked for that."""
    cause = cause_of(error)
    if options.on_error == "raise":
        raise RewriteError(
            f"the rewritten graph does not compile: {cause}; use on_error='warn' to compile the original instead"
        ) from error
    return failure_of(error, cause, decision.report, decision.emissions)


def next_decision(decision: Decision, failures: Sequence[Failure], again: Callable[..., Decision]) -> Decision:
    """What to compile after a failure: what is decided without the target that failed, once, or the original.

    Args:
        decision: what failed to compile.
        failures: all failures so far.
        again: decides on the original anew; called with ``without``.
    """
    first = failures[0]
    if len(failures) > 1 or not first.without:
        decision.report.mark_left(could_not_lower(failures))
        return replace(decision, changed=False)
    collect.forget(decision.report)
    retried = again(without=first.without)
    mark_retried(retried.report, decision.report, first)
    return retried


def known_buffers(gm: GraphModule, example_inputs: Sequence[Any], options: Options) -> dict[str, Any]:
    """With ``assume_constant_buffers``: what the engine is told of the buffers among a Dynamo graph's inputs."""
    found: dict[str, tuple[str, torch.Tensor]] = {}
    inputs = (node for node in gm.graph.nodes if node.op == "placeholder")
    for node, value in zip(inputs, example_inputs if options.assume_constant_buffers else ()):
        of_module = "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})
        if of_module and type(value) in (torch.Tensor, torch.nn.Buffer) and not value.requires_grad:
            found[node.name] = (_attribute_path(node), value)
    return {KNOWN_TENSORS: found}


def _attribute_path(node: Node) -> str:
    """``buffer layers.0.mask`` for a placeholder that Dynamo made of it, ``attribute layers.0.mask`` of a plain one."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", "")
    text = name() if callable(name) else name
    words = re.findall(r"\['?(\w+)'?\]|\.(\w+)", text)[1:]
    path = ".".join(w for pair in words for w in pair if w not in ("", "_modules", "_buffers"))
    return f"{'buffer' if '_buffers' in text else 'attribute'} {path or node.name}"


def cause_of(error: BaseException) -> str:
    """Type and first line of what went wrong, from under the wrappers the compiler puts around an exception."""
    inner = getattr(error, "inner_exception", None) or error
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    return f"{type(inner).__name__}: {lines[0]}" if lines else type(inner).__name__


def told(error: BaseException) -> str:
    """What a capture error says, on one line: without torch's hints on how to log more, and nothing said twice."""
    text = _LOGGING_HINTS.sub("", re.split(_AFTERTHOUGHTS, str(error))[0])
    lines = dict.fromkeys(line.strip() for line in text.splitlines())
    words = " ".join(line for line in lines if line)
    return f"{type(error).__name__}: {words if len(words) <= 800 else words[:797] + '...'}"


_AFTERTHOUGHTS = "The error above occurred when calling|\n *from user code:"
_LOGGING_HINTS = re.compile(
    r"^\s*(Developer debug context|For more |For extended logs|If you suspect|Set TORCH).*$"
    r"|For more information, run with \S+|\(Size-like symbols: none\)",
    re.MULTILINE,
)


def _control_flow() -> tuple[type[Exception], ...]:
    """Exceptions by which a backend talks to Dynamo: trace again, or run this frame eagerly."""
    from torch._dynamo import exc

    return (exc.RestartAnalysis, exc.SkipFrame)


# ---- Inductor ----


def inductor_patches(options: Options, inductor: Mapping[str, Any], mode: str | None) -> dict[str, Any]:
    """Inductor config patches for one compile: those of the mode, the user's over them, and the shield."""
    from torch._inductor import config

    # torch's own wrapper also sets what CUDA graphs need in the environment.
    patches: dict[str, Any] = {**torch._TorchCompileInductorWrapper(mode, None, None).config, **inductor}
    if options.shield:
        from attn_pass.entries.shield import POST_SLOT, PRE_SLOT, shield_patches

        slots = {name: patches.get(name, getattr(config, name)) for name in (PRE_SLOT, POST_SLOT)}
        patches.update(shield_patches(slots))
    return patches


def patches_for(report: Report) -> dict[str, Any]:
    """Inductor config patches that what was emitted needs.

    With max-autotune or without, the C++ template of FlexAttention lets Inductor fuse what follows into it and then
    raises NotImplementedError (torch 2.13.0).
    """
    on_cpu = any(site.target == "flex" and site.device == "cpu" for site in report.rewritten)
    return {"epilogue_fusion": False} if on_cpu else {}


def compile_with_inductor(
    gm: GraphModule, example_inputs: Sequence[Any], options: Options, report: Report
) -> Callable[..., Any]:
    """Compile a graph that was decided already, with what its report says was emitted."""
    given = report if report.rewritten else None
    return _inductor(inductor_patches(options, {}, None), gm, example_inputs, given)


def _compiled_site(options: Options, module: GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """A rewritten site alone, compiled as the graph it is part of will be; to verify what is generated for it."""
    from torch._inductor import config

    with config.patch(fx_graph_cache=False):
        return compile_with_inductor(module, inputs, options, Report())


def _inductor(
    patches: dict[str, Any], gm: GraphModule, example_inputs: Sequence[Any], report: Report | None
) -> Callable[..., Any]:
    """Compile with Inductor under these patches, which then hold for the backward that is compiled later, too."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    inner = compile_fx_inner if report is None else _with_eager_backward(compile_fx_inner, report)
    if report is not None:
        patches = patches | patches_for(report)
    compiled: Any = compile_fx(gm, example_inputs, inner_compile=inner, config_patches=patches)
    return cast(Callable[..., Any], compiled)


def _with_eager_backward(compile_inner: Callable[..., Any], report: Report) -> Callable[..., Any]:
    """Inductor's inner compile, for which a backward graph it cannot lower runs as the plain ops it consists of.

    The backward is compiled at the first call of backward(), when it is too late to go back to the original graph.
    """

    @functools.wraps(compile_inner)
    def compile_forgiving(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        if not kwargs.get("is_backward"):
            return compile_inner(gm, example_inputs, **kwargs)
        plain = Snapshot(gm)
        try:
            return compile_inner(gm, example_inputs, **kwargs)
        except Exception as error:
            from torch._functorch.aot_autograd import make_boxed_func

            warnings.warn(
                f"attn_pass: the backward of the graph with the attention at {first_where(report)} runs without "
                f"Inductor, which could not lower it ({cause_of(error)})",
                AttnPassWarning,
                stacklevel=2,
            )
            return make_boxed_func(plain.module())

    return compile_forgiving
