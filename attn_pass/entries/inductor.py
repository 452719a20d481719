"""Inductor: the settings a compile gets, a site compiled alone, and a backward that runs without it where it fails."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, cast

import torch
from torch.fx import GraphModule

from attn_pass.compat import plain_settings
from attn_pass.devices.registry import families, of_type
from attn_pass.entries.retry import first_where
from attn_pass.entries.snapshot import Snapshot
from attn_pass.errors import AttnPassWarning, cause_of
from attn_pass.options import Options
from attn_pass.report.record import Report


def inductor_patches(options: Options, inductor: Mapping[str, Any], mode: str | None) -> dict[str, Any]:
    """Inductor config patches for one compile: those of the mode, the user's over them, and the shield."""
    from torch._inductor import config

    from attn_pass.entries.shield import SLOTS, shield_patches

    # torch's own wrapper also sets what CUDA graphs need in the environment.
    patches: dict[str, Any] = {**torch._TorchCompileInductorWrapper(mode, None, None).config, **inductor}
    slots = {name: patches.get(name, getattr(config, name)) for name in SLOTS}
    patches.update(shield_patches(slots, options))
    if options.timeline:
        from attn_pass.entries.timeline import SLOT, ranges

        patches[SLOT] = ranges(patches.get(SLOT, getattr(config, SLOT)))
        patches["fx_graph_cache"] = False  # as from torch 2.13 on: the code holds names of files and lines
    return patches


def patches_for(report: Report) -> dict[str, Any]:
    """Inductor config patches that what was emitted needs, by the families of the devices it runs on."""
    needed = (of_type(site.device).inductor_patches(site.target or "") for site in report.rewritten)
    return {name: value for patches in needed for name, value in patches.items()}


def folds_constants() -> bool:
    """Whether Inductor makes constants of a program's parameters, by its settings: ``freezing``."""
    from torch._inductor import config

    return bool(config.freezing) and not torch.is_grad_enabled()


@contextmanager
def as_compiled(patches: Mapping[str, Any]) -> Iterator[None]:
    """Lets decisions see the settings that a graph will be compiled with; sites are compiled with them, too."""
    from torch._inductor import config

    with config.patch(plain_settings(patches)):
        yield


def compile_with_inductor(
    gm: GraphModule, example_inputs: Sequence[Any], options: Options, report: Report
) -> Callable[..., Any]:
    """Compile a graph that was decided already, with what its report says was emitted."""
    report_of_rewritten = report if report.rewritten else None
    return compile_under(inductor_patches(options, {}, None), gm, example_inputs, report_of_rewritten)


def compiled_site(
    options: Options, module: GraphModule, inputs: Sequence[torch.Tensor], target: str
) -> Callable[..., Any]:
    """A site alone, rewritten as this target, compiled as its graph will be; to verify what is generated for it."""
    from torch._inductor import config

    patches = inductor_patches(options, {}, None)
    for kind in {x.device.type for x in inputs}:
        patches.update(of_type(kind).inductor_patches(target))
    with config.patch(fx_graph_cache=False):
        return compile_under(patches, module, inputs, Report())


def compile_under(
    patches: dict[str, Any], gm: GraphModule, example_inputs: Sequence[Any], report: Report | None
) -> Callable[..., Any]:
    """Compile with Inductor under these patches, which then hold for the backward that is compiled later, too."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    with nullcontext() if report is not None else suppress(Exception):  # a graph as it was needs none of ours
        before_inductor()
    inner = compile_fx_inner if report is None else _with_eager_backward(compile_fx_inner, report)
    if report is not None:
        patches = patches | patches_for(report)
    compiled: Any = compile_fx(gm, example_inputs, inner_compile=inner, config_patches=patches)
    return cast(Callable[..., Any], compiled)


def before_inductor() -> None:
    """Inductor learns of the operators that a rewritten graph may call."""
    for family in families():
        family.before_inductor()


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
