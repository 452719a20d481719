"""All code that depends on torch's version."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import NoneType
from typing import Any
from unittest import mock

import torch

from attn_pass.errors import VersionError


def _parsed(version: str) -> tuple[int, int]:
    """(major, minor) of a torch version string such as "2.13.0+cpu" or "2.14.0a0+git123"."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise VersionError(f"torch reports version {version!r}, which is not of the form 2.13.0; reinstall torch")
    return int(match[1]), int(match[2])


TORCH_VERSION: tuple[int, int] = _parsed(str(torch.__version__))
"""(major, minor) of the torch that is installed."""

ADDS_A_BATCH: bool = TORCH_VERSION >= (2, 14)
"""Whether ``scaled_dot_product_attention`` makes a call of three dimensions one of four, which fused kernels take."""

PACKS_ANY_ROWS: bool = TORCH_VERSION >= (2, 13)
"""Whether ``freezing`` packs linear layers whose number of rows is known at run time only; 2.11 raises an error."""

VIEWS_BYTES_AS_TRUTH: bool = TORCH_VERSION >= (2, 13)
"""Whether Inductor lowers ``aten.view.dtype`` from bytes to truth values; 2.11 raises an error (2.12 was not read)."""

GRADIENT_AT_BOUND: tuple[float, float] = (0.0, 0.5) if TORCH_VERSION >= (2, 14) else (1.0, 1.0)
"""The share of the gradient that ``clamp`` passes on where a value equals its bound, a number or a tensor (seen in
2.13, 2.14.1 and 2.15)."""

INDUCTOR_MINIMUM: tuple[int, int] = (2, 11)
"""The oldest torch whose Inductor the entries `backend`, `install`, `enabled` and `aot_compile` are written for."""


def require_inductor(entry: str) -> None:
    """Return if this torch is new enough for an Inductor entry.

    Raises:
        VersionError: it is not; the message names the entry ("backend"), the version found and what works instead.
    """
    if TORCH_VERSION >= INDUCTOR_MINIMUM:
        return
    needed = ".".join(map(str, INDUCTOR_MINIMUM))
    raise VersionError(
        f"attn_pass.{entry} needs torch {needed} or newer; found {torch.__version__}. Upgrade torch (pip install "
        f"'torch>={needed}'), or use attn_pass.wrap(backend) or attn_pass.rewrite(program), which do without "
        "Inductor's hooks"
    )


def pre_grad_slot_takes_list() -> bool:
    """Whether Inductor's custom graph-pass slots take a list or tuple (2.13), or one callable only (2.11).

    Asked of the installed torch, because 2.12 was not read.
    """
    from torch._inductor import custom_graph_pass

    return hasattr(custom_graph_pass, "get_custom_graph_passes")


def inductor_vector_floats() -> int:
    """How many float32 numbers a vector has in the C++ that Inductor generates for this processor."""
    from torch._inductor import config

    bits = config.cpp.simdlen or (512 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 256)
    return bits // 32


def has_pre_grad_timing() -> bool:
    """Whether `torch._inductor.config.pre_grad_pass_timing` exists (2.13); before, pre-grad passes always run early."""
    from torch._inductor import config

    return hasattr(config, "pre_grad_pass_timing")


def children_of(spec: Any) -> list[Any]:
    """The parts of a nested structure's description (`torch.utils._pytree.TreeSpec`; a method in newer torch)."""
    children = getattr(spec, "children", None)
    return list(children() if callable(children) else spec.children_specs)


def active_flash() -> str:
    """The FlashAttention that runs behind torch's operators: "FA2", or what the user activated, "FA3" or "FA4"."""
    from torch.nn import attention

    current = getattr(attention, "current_flash_attention_impl", None)  # torch 2.11
    return (current() if current is not None else None) or "FA2"


@contextmanager
def traced_apart() -> Iterator[None]:
    """For a backend that traces Dynamo's graph again on real tensors: its fake tensors are not of Dynamo's fake mode.

    There their sizes become symbols that no input is the source of, and a guard on one, as a reshape to numbers has it,
    ends the compile with an IndexError (seen in torch 2.13.0 with OpenVINO 2026.4).
    """
    from torch._guards import TracingContext, tracing

    with tracing(TracingContext(None)):
        yield


@contextmanager
def without_saved_tensors_hooks() -> Iterator[None]:
    """Hooks for saved tensors, such as those of a checkpoint around a compiled function, are called for none in here.

    They are the program's, and what is saved while a rewrite is planned is not.
    """
    from torch._dynamo import utils

    dynamo: Any = utils
    with dynamo._disable_saved_tensors_hooks_during_tracing():
        yield


@contextmanager
def own_metrics() -> Iterator[None]:
    """For a compile inside a compile: what Dynamo notes down of the one under way is kept, and is not added to."""
    from torch._dynamo import utils

    holder: Any = getattr(utils, "_metrics_context_tls", utils)
    name = "metrics_context" if holder is not utils else "_METRICS_CONTEXT"
    utils.get_metrics_context()  # which makes it
    before = getattr(holder, name)
    setattr(holder, name, type(before)(on_exit=lambda *_: None))
    try:
        yield
    finally:
        setattr(holder, name, before)


@contextmanager
def no_new_guards(shape_env: Any) -> Iterator[list[str]]:
    """Inside, code that would add a guard on symbolic sizes fails and adds none; yields the requested guards.

    ``ShapeEnv.error_on_new_guards`` of later versions, by the check that every guard goes through in each of them, and
    with an error that neither ``evaluate_expr`` nor a fake tensor logs.
    """
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    class Refused(GuardOnDataDependentSymNode, NotImplementedError):
        pass

    new_guards: list[str] = []

    def refuse(expression: Any, value: Any) -> None:
        if not shape_env._suppress_guards_tls():
            new_guards.append(f"{expression} == {value}")
            raise Refused(expression, f"a guard on symbolic sizes would be added: {new_guards[-1]}")

    shape_env._check_frozen = refuse  # of this object, in front of its class's
    try:
        yield new_guards
    finally:
        del shape_env._check_frozen


def takes_guards(shape_env: Any) -> bool:
    """Whether a guard that is asked for now is kept: the environment is neither frozen nor told to drop guards."""
    return not (shape_env.frozen or shape_env._suppress_guards_tls())


def context_parallel_is_active() -> bool:
    """Whether a context-parallel region is open: calls of scaled_dot_product_attention are ring attention in it then.

    Asked of the table that both of torch's ways to open one (`context_parallel`, the module hooks) fill in.
    """
    tensor = sys.modules.get("torch.distributed.tensor")
    dispatcher = getattr(getattr(tensor, "DTensor", None), "_op_dispatcher", None)
    handlers = getattr(dispatcher, "_custom_op_handlers", {})
    return any(op in handlers for op in _RING)


_RING = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
)


def recomputes_everything() -> bool:
    """Whether AOTAutograd's backward may compute again whatever the forward computed, not cheap operators alone."""
    import torch._functorch.config as config

    budget = getattr(config, "activation_memory_budget", 1.0)
    return bool(budget < 1 or getattr(config, "aggressive_recomputation", False))


def held_now(node: torch.fx.Node) -> torch.Tensor | None:
    """The tensor that Dynamo has at hand for an input of its graph while a backend runs; None where it has none."""
    from torch._subclasses.fake_tensor import FakeTensor

    held = getattr(node.meta.get("grapharg"), "example", None)
    return held if isinstance(held, torch.Tensor) and not isinstance(held, FakeTensor) else None


@contextmanager
def guessed_sizes(sizevars: Any) -> Iterator[None]:
    """Around what Inductor generates for a template: before torch 2.13 it raises for a size known at run time only.

    The sizes are for its measurements, in which this template takes no part.
    """
    if not hasattr(sizevars, "size_hints"):
        yield
        return
    with mock.patch.object(sizevars, "size_hints", functools.partial(sizevars.size_hints, fallback=1)):
        yield


@contextmanager
def sizes_at_run_time(shape_env: Any) -> Iterator[None]:
    """Fake values may have sizes that are known at run time only, from here on; Dynamo's own do not by default.

    Inside, such sizes are nobody's to bind: what is traced again, by AOTAutograd, makes them anew.
    """
    if not shape_env.settings.allow_dynamic_output_shape_ops:
        shape_env.settings = dataclasses.replace(shape_env.settings, allow_dynamic_output_shape_ops=True)
    with shape_env.ignore_fresh_unbacked_symbols():
        yield


def changed_settings() -> dict[str, Any]:
    """Inductor's plain settings that are not its defaults in this thread.

    Without CUDA graphs: they take the same of every form, and hold memory.
    """
    from torch._inductor import config

    inductor: Any = config
    settings = plain_settings(inductor.get_config_copy())
    return {n: value for n, value in settings.items() if "cudagraph" not in n and not inductor._is_default(n)}


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those whose values JSON can hold; passes and other functions are left out."""
    return {name: value for name, value in settings.items() if isinstance(value, (bool, int, float, str, NoneType))}
