"""`enabled` and `install`: the pass inside Inductor's own hook, for plain torch.compile and AOTInductor.

The hook runs inside Inductor's compile. If Inductor fails on the rewritten graph, it can therefore neither try again
without a target nor compile the original graph, as `attn_pass.backend` and `attn_pass.aot_compile` do. Since torch 2.13
Inductor's configuration is per thread, so the hook applies to compilations in this thread. mode="lite" makes Inductor
skip all such passes, and options={"pre_grad_custom_pass": ...} of a single compile replaces the pass for that compile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.fx import Graph, GraphModule

from attn_pass.compat import has_pre_grad_timing, require_inductor
from attn_pass.entries.identity import identity
from attn_pass.entries.inductor import folds_constants
from attn_pass.entries.known import held_inputs, known_buffers, known_of_module
from attn_pass.entries.other_device import warn_other_device
from attn_pass.entries.transaction import DECIDED, decide
from attn_pass.graph.values import FOLDS_CONSTANTS, KNOWN_TENSORS
from attn_pass.options import Options
from attn_pass.planner.overrides import named_options
from attn_pass.report.history import publish

PRE_GRAD_SLOT, TIMING = "pre_grad_custom_pass", "pre_grad_pass_timing"


@contextmanager
def enabled(**options: Any) -> Iterator[None]:
    """Run the pass in every torch.compile and aoti_compile_and_package that compiles inside, in this thread.

    It can be nested; the innermost options apply. Passes that other packages registered are kept, and run before.

    Args:
        options: fields of `attn_pass.Options`.

    Raises:
        OptionError: an option is unknown or has a value that is not accepted.
        VersionError: torch is too old for this function.
    """
    require_inductor("enabled")
    from torch._inductor import config

    with config.patch(_patches(named_options(options))):
        yield


def install(**options: Any) -> None:
    """Enables the pass as `enabled` does, until `uninstall`; a second call only changes the options.

    Args:
        options: fields of `attn_pass.Options`.

    Raises:
        OptionError: an option is unknown or has a value that is not accepted.
        VersionError: torch is too old for this function.
    """
    require_inductor("install")
    from torch._inductor import config

    own_options = named_options(options)
    uninstall()
    for name, value in _patches(own_options).items():
        setattr(config, name, value)


def uninstall() -> None:
    """Undo `install`: the slots of Inductor's configuration keep only what others put there."""
    from torch._inductor import config

    installed = _installed()
    if installed is None:
        return
    for name, value in _cleared(installed).items():
        setattr(config, name, value)


class RewritePass:
    """The pass in Inductor's pre-grad slot. Inductor copies and pickles it, so it has no state.

    Attributes:
        options: the user's options.
        before: values of the slots before the pass was put there; not part of its identity.
    """

    def __init__(self, options: Options, before: dict[str, Any] | None = None) -> None:
        self.options = options
        self.before = before or {}

    def __call__(self, graph: Graph) -> None:
        """Rewrite a root graph, including bodies of higher-order operations; Inductor also calls it for each body."""
        gm = graph.owning_module
        if gm is None or gm.meta.get(DECIDED) or not is_root(gm):
            return
        program = "compile" if "dynamo_compile_id" in gm.meta else "aoti"
        folds = {FOLDS_CONSTANTS: folds_constants()}
        report = decide(gm, self.options, program, "hook", lambda: _known(gm, program, self.options) | folds).report
        warn_other_device(report, self.options)
        publish(report)

    def uuid(self) -> str:
        """Identity for Inductor's caches: attn_pass's sources, the options, the devices and torch's version."""
        return f"attn_pass:{identity(self.options)}"

    def __deepcopy__(self, memo: dict[int, Any]) -> RewritePass:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return RewritePass, (self.options,)


def _known(gm: GraphModule, program: str, options: Options) -> dict[str, Any]:
    """Tensors that keep their values, as for `attn_pass.backend` and `attn_pass.aot_compile`; no parameters."""
    if program == "aoti":
        return known_of_module(gm, options)
    return {KNOWN_TENSORS: known_buffers(gm, held_inputs(gm), options)[KNOWN_TENSORS]}


def is_root(gm: GraphModule) -> bool:
    """Whether this is a whole graph as Inductor gets it, rather than the body of a higher-order operation.

    Dynamo's graphs carry their compile id. What AOTInductor compiles comes from `ExportedProgram.module()`, which sets
    `_in_spec`; "inline_constraints" in the meta is lost by torch.export.save. Bodies have neither (torch 2.13).
    """
    return "dynamo_compile_id" in gm.meta or "inline_constraints" in gm.meta or "_in_spec" in vars(gm)


def _patches(options: Options) -> dict[str, Any]:
    """Values of the slots with the pass and the shield in them; earlier ones of attn_pass are replaced."""
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    from attn_pass.entries.shield import OWN, SAVED_SLOT, SLOTS, shield_patches, slot_of, without

    # A base class would make `import attn_pass` import Inductor, which takes seconds.
    CustomGraphPass.register(RewritePass)
    slots = {name: getattr(config, name) for name in (PRE_GRAD_SLOT, *SLOTS)}
    if has_pre_grad_timing():
        slots[TIMING] = config.pre_grad_pass_timing
    others = without(slots[PRE_GRAD_SLOT], (RewritePass,))
    patches = {PRE_GRAD_SLOT: slot_of([*others, RewritePass(options, before=slots)])}
    if has_pre_grad_timing():
        patches[TIMING] = "early"  # "late" passes do not run at all when the cache has the graph
    own = shield_patches(slots, options)
    if not options.shield:
        own = {name: slot_of(without(slots[name], OWN)) for name in SLOTS} | {SAVED_SLOT: own[SAVED_SLOT]}
    return patches | own


def _cleared(installed: RewritePass) -> dict[str, Any]:
    """Values of the slots without attn_pass: the earlier values, if no one else has changed them since."""
    from torch._inductor import config

    from attn_pass.entries.shield import OWN, SLOTS, passes_of, slot_of, without

    values: dict[str, Any] = {}
    for name in (PRE_GRAD_SLOT, *SLOTS):
        others = without(getattr(config, name), (RewritePass, *OWN))
        before = installed.before[name]
        values[name] = before if others == list(passes_of(before)) else slot_of(others)
    if has_pre_grad_timing() and config.pre_grad_pass_timing == "early":
        values[TIMING] = installed.before[TIMING]
    return values


def _installed() -> RewritePass | None:
    """The pass that is in the pre-grad slot of this thread's configuration."""
    from torch._inductor import config

    from attn_pass.entries.shield import passes_of

    return next((p for p in passes_of(config.pre_grad_custom_pass) if isinstance(p, RewritePass)), None)
