"""The entries for torch.compile: `backend` (rewrite, then Inductor) and `wrap` (rewrite, then any Dynamo backend)."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

from torch.fx import GraphModule

from attn_pass.compat import require_inductor, traced_apart
from attn_pass.devices.registry import of_type, runtime_of
from attn_pass.entries.backends import backend_named
from attn_pass.entries.inductor import as_compiled, compile_under, inductor_patches
from attn_pass.entries.mistakes import refuse_no_backend, refuse_own_options
from attn_pass.entries.transaction import compile_rewritten
from attn_pass.errors import OptionError
from attn_pass.options import OPTION_NAMES, Options, split_options, tuned_by_mode, underscored
from attn_pass.planner.overrides import named_options
from attn_pass.report.record import Report

Backend = Callable[..., Callable[..., Any]]
_NOT_BY_DEFAULT = frozenset(("tune", "numerics"))  # a mode sets the first, and Inductor has one of the other's name


def backend(
    gm: GraphModule | None = None,
    example_inputs: Sequence[Any] = (),
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **unexpected: Any,
) -> Callable[..., Any]:
    """A torch.compile backend: rewrite the attention of the graph, then compile it with Inductor.

    torch.compile takes `mode` or `options`, not both, so options may hold "mode". If Inductor cannot lower the
    rewritten graph, the pass decides once more without the target that failed (`attn_pass.entries.retry`). If that
    fails too, the original is compiled and every site is reported as left. One warning names the first site.
    With mode="lite" Inductor runs no pattern passes, but attn_pass still rewrites the graph.

    Args:
        gm: Dynamo's graph, which Inductor may change.
        example_inputs: Dynamo's example inputs.
        mode: one of torch._inductor.list_mode_options().
        options: fields of `attn_pass.Options`, keys of torch._inductor.config, and "mode".

    Raises:
        OptionError: an option is unknown or has a value that is not accepted; or it was called by hand.
        VersionError: torch is too old for this function.
    """
    require_inductor("backend")
    if not isinstance(gm, GraphModule) or unexpected:
        raise OptionError(
            "attn_pass.backend is the backend itself, which torch.compile calls: write torch.compile(model, "
            "backend=attn_pass.backend, options={...}); with options of its own, or before another backend, "
            "backend=attn_pass.wrap('inductor', choose=...)"
        )
    own_options, inductor, own_mode = split_options(options)
    if mode and own_mode and mode != own_mode:
        raise OptionError(f"mode={mode!r} and options['mode']={own_mode!r} contradict; give one of them")
    mode = mode or own_mode
    own_options = tuned_by_mode(own_options, mode, options)
    patches = inductor_patches(own_options, inductor, mode)
    with as_compiled(patches):
        return compile_rewritten(gm, example_inputs, own_options, functools.partial(compile_under, patches), "inductor")


def _reset() -> None:
    """Called by torch._dynamo.reset(): drops CUDA graphs, as torch's own Inductor backend does."""
    if (trees := sys.modules.get("torch._inductor.cudagraph_trees")) is not None:
        trees.reset_cudagraph_trees()


setattr(backend, "reset", _reset)  # noqa: B010  a function has no such attribute to a type checker
backend.__name__ = "attn_pass"  # in Dynamo's errors and in its repro scripts, where a backend is looked up by name


class Wrapped:
    """The result of `wrap`: a Dynamo backend that rewrites the graph, then calls another backend.

    Two of them are equal if they wrap the same backend with the same options, so that Dynamo need not compile again.
    """

    def __init__(self, inner: str | Backend, options: Options, explicit_options: Iterable[str] = OPTION_NAMES) -> None:
        self.inner: Backend = inner if callable(inner) else backend if inner == "inductor" else backend_named(inner)
        self.options = options
        self.explicit_options = frozenset(
            explicit_options
        )  # names of options the user gave, which a mode does not change
        name = inner if isinstance(inner, str) else _callable_name(inner)
        self.__name__ = f"attn_pass_{name}"

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        """Rewrite the graph, then compile it with the wrapped backend; kwargs are that backend's."""

        if self.inner is backend:
            own_options = {
                name: value
                for name, value in asdict(self.options).items()
                if name not in _NOT_BY_DEFAULT or name in self.explicit_options
            }
            given = {underscored(name): value for name, value in (kwargs.pop("options", None) or {}).items()}
            merged = {**own_options, **given}
            return backend(gm, example_inputs, options=merged, **kwargs)

        refuse_own_options(kwargs.get("options"), self.__name__.removeprefix("attn_pass_"))

        def compile_inner(graph: GraphModule, inputs: Sequence[Any], report: Report | None) -> Callable[..., Any]:
            traces_again = self.options.runtime is not None and of_type(self.options.runtime).backend_traces_again
            with traced_apart() if traces_again else nullcontext():
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
        return self.inner, self.options, self.explicit_options & _NOT_BY_DEFAULT

    def __repr__(self) -> str:
        return f"attn_pass.wrap({self.__name__.removeprefix('attn_pass_')!r})"


def wrap(backend: str | Backend | None = None, *graph: Any, **options: Any) -> Wrapped:
    """A Dynamo backend that rewrites attention and then calls `backend`: a name ("aot_eager", "openxla") or callable.

    It does not use Inductor, unless `backend` is "inductor", which is `attn_pass.backend` with these options. If the
    wrapped backend fails on the rewritten graph, it gets a graph without the target that failed; if it fails again, it
    gets the original graph, and every site is reported as left.

    Args:
        backend: any backend that torch.compile accepts. The `mode` and `options` of torch.compile go to it.
        options: fields of `attn_pass.Options`. A backend that hands graphs to a runtime ("openvino") sets `runtime`.

    Raises:
        OptionError: an option is unknown, has a value that is not accepted, or `backend` is not a backend.
    """
    if backend is None or graph or isinstance(backend, GraphModule):
        raise OptionError(
            "attn_pass.wrap makes a backend, and has to be called with the one to wrap: write torch.compile(model, "
            "backend=attn_pass.wrap('aot_eager')); to compile with Inductor, backend=attn_pass.backend"
        )
    refuse_no_backend(backend, "attn_pass.wrap")
    if isinstance(options.get("options"), Mapping):
        raise OptionError("attn_pass.wrap takes options as keywords: wrap('inductor', **options)")
    if not isinstance(backend, str) and not callable(backend):
        raise OptionError(
            f"wrap takes a Dynamo backend by name ('aot_eager', 'openxla', ...) or a callable (graph, inputs) -> "
            f"callable, got {backend!r} ({type(backend).__name__}); torch._dynamo.list_backends() names the known ones"
        )
    if isinstance(backend, str) and (runtime := runtime_of(backend)) is not None:
        options = {"runtime": runtime, **options}
    return Wrapped(backend, named_options(options), options)


def _callable_name(function: Any) -> str:
    """A name that is the same in every process: a partial is named for the function it holds."""
    while hasattr(function, "func"):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))
