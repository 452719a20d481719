"""The entry `aot_compile`: from a model to an AOTInductor package that holds its report."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from attn_pass.compat import require_inductor
from attn_pass.entries.environment import environment_reported, import_compiler
from attn_pass.entries.export import exported, rewrite_exported
from attn_pass.entries.inductor import as_compiled, before_inductor, folds_constants, inductor_patches, patches_for
from attn_pass.entries.mistakes import refuse_inputs
from attn_pass.entries.other_device import warn_other_device
from attn_pass.entries.package import warn_of_types, with_report
from attn_pass.entries.retry import Failure, warn_failed
from attn_pass.entries.snapshot import Snapshot
from attn_pass.entries.transaction import Decision, failed, next_decision
from attn_pass.errors import OptionError, PackageError
from attn_pass.options import Options, split_options, tuned_by_mode, unknown_name
from attn_pass.planner.overrides import check_names
from attn_pass.report.history import publish
from attn_pass.report.progress import Tell, progress


def aot_compile(
    model: torch.nn.Module | ExportedProgram,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    package_path: str | os.PathLike[str] | None = None,
    inductor_configs: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    **unexpected: Any,
) -> str:
    """Export a model, rewrite its attention, compile it with AOTInductor, and return the path of the .pt2 package.

    The arguments are checked before the compile, which takes long. The package stores the report
    (`attn_pass.package_report`, ``attn-pass explain model.pt2``). If AOTInductor cannot lower the rewritten program, it
    is decided again: first without packed rows, joined projections and other calls for linear layers, if there are any,
    then without the target that failed. If that fails too, the original is compiled and every site is
    reported as left. One warning names the first site.

    The loaded package lists the same constants as a stock package (``get_constant_fqns()``) and accepts new values for
    them (``load_constants``), with one exception. A mask may be named by the values of the buffer or constant that
    holds it (`Options.assume_constant_buffers`; buffers that are not in a state dict are read without it). The compiled
    code then depends on these values: ``Report.fixed_constants`` lists the buffer, and the site's assumptions name it.
    If nothing reads the buffer any more, the package does not contain it, and ``load_constants`` refuses its name like
    an unknown one. If something still reads it, that use takes new values; it may be the attention itself, with the
    mask in memory. Compile again to change such a buffer.

    Args:
        model: a module, exported in its current mode (call .eval() first) without gradients; or an exported program,
            which is not changed; in that case omit args, kwargs and dynamic_shapes.
        args: example inputs, as for torch.export.export.
        kwargs: example keyword inputs.
        dynamic_shapes: as for torch.export.export.
        package_path: the file to write, ending in .pt2; None lets Inductor choose a file in its cache.
        inductor_configs: keys of torch._inductor.config.
        options: fields of `attn_pass.Options`; keys of torch._inductor.config and "mode" are accepted too.

    Raises:
        CaptureError: the model cannot be exported with these inputs and shapes.
        EnvironmentFault: nothing compiles here: there is no compiler, or its folder cannot be written.
        PackageError: package_path cannot be written to, or does not end in .pt2.
        OptionError: an option or a keyword is unknown, or has a value that is not accepted.
        VersionError: torch is too old for this function.
    """
    require_inductor("aot_compile")
    import_compiler()
    refuse_inputs(kwargs, unexpected)
    own_options, inductor, mode = split_options(options)
    own_options = tuned_by_mode(own_options, mode, options)
    check_names(own_options)  # before the export
    path = _checked_path(package_path)
    patches = inductor_patches(own_options, _merged(inductor, inductor_configs), mode)
    with progress() as tell:
        tell("exporting the model")
        original = exported(model, args, kwargs, dynamic_shapes)
        with environment_reported():
            return _compiled(original, path, patches, own_options, tell)


def _compiled(
    original: ExportedProgram, path: str | None, patches: dict[str, Any], options: Options, tell: Tell
) -> str:
    """The package of an exported program, rewritten; or of the program as it is, if that fails twice."""
    warn_of_types(original)
    if _writes_buffers(original):
        # Inductor folds what it can compute of a buffer's first value, even if the program writes to the buffer: a
        # position that is counted up would stay at 1 (seen in torch 2.13.0).
        patches = {"joint_graph_constant_folding": False, **patches}
    program, package = original, ""
    failures: list[Failure] = []
    with torch.no_grad(), as_compiled(patches):  # as packages are compiled
        folds = folds_constants()

    def again(without: Mapping[str, str] | None = None) -> Decision:
        nonlocal program
        program = original._update(Snapshot(original.graph_module).module(), copy.deepcopy(original.graph_signature))
        tell("rewriting attention")
        with as_compiled(patches):
            return rewrite_exported(program, options, "inductor", without, folds)

    decision = again()
    warn_other_device(decision.report, options, "program", stacklevel=4)
    while decision.changed and not package:
        report = decision.report
        tell(f"compiling the package: {report.summary().removeprefix('attn_pass: ')}")
        try:
            package = _package(program, path, with_report(patches | patches_for(report), report))
        except Exception as error:
            failures.append(failed(error, decision, options))
        if not package:
            decision = next_decision(decision, failures, again)
    report = decision.report
    if not package:
        tell("compiling the package as it is written")
        as_written = original if failures else program  # which says what Inductor's own patterns may have
        package = _package(as_written, path, with_report(patches, report))
    if failures:
        warn_failed(report, failures)
    publish(report)
    return package


def _writes_buffers(program: ExportedProgram) -> bool:
    """Whether calls keep state in buffers: in place, or, where the program is decomposed, by its signature."""
    signature = program.graph_signature
    nodes = (n for gm in program.graph_module.modules() if isinstance(gm, GraphModule) for n in gm.graph.nodes)
    in_place = any(isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable for n in nodes)
    return bool(signature.buffers_to_mutate) or (bool(signature.buffers) and in_place)


def _package(program: ExportedProgram, path: str | None, patches: Mapping[str, Any]) -> str:
    from torch._inductor import aoti_compile_and_package

    before_inductor()
    with torch.no_grad():
        return str(aoti_compile_and_package(program, package_path=path, inductor_configs=dict(patches)))


# ---- checks before the compile ----


def _checked_path(package_path: object) -> str | None:
    """The path as a string.

    Raises:
        PackageError: it does not end in .pt2, or cannot be written to.
    """
    if package_path is None:
        return None
    if not isinstance(package_path, str | os.PathLike):
        raise PackageError(
            f"package_path is {package_path!r} ({type(package_path).__name__}); give a path that ends in .pt2, or None"
        )
    path = Path(package_path)
    if path.suffix != ".pt2":
        raise PackageError(
            f"package_path {os.fspath(package_path)!r} does not end in .pt2, which torch needs to load it; "
            f"use {os.fspath(path.with_suffix('.pt2'))!r}"
        )
    problem = _problem_of(path)
    if problem:
        raise PackageError(f"package_path {os.fspath(package_path)!r} cannot be written: {problem}")
    return os.fspath(path)


def _problem_of(path: Path) -> str:
    folder = path.parent
    if path.is_dir():
        return "it is a folder; give the path of a file in it"
    if not folder.is_dir():
        return f"there is no folder {os.fspath(folder)!r}; create it first"
    if path.exists() and not os.access(path, os.W_OK):
        return "the file is there and is read-only; remove it or choose another path"
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"no file can be made in {os.fspath(folder)!r} ({error.strerror or error}); choose another folder"


def _merged(own_options: Mapping[str, Any], configs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Inductor's options from both places.

    Raises:
        OptionError: a key is unknown to Inductor, or has two values.
    """
    from torch._inductor import list_options

    merged = dict(own_options)
    known = {*list_options(), "extern_node_serializer"}
    for name, value in (configs or {}).items():
        if name not in known:
            raise unknown_name("key of inductor_configs", name, sorted(known))
        if name in merged and merged[name] != value:
            raise OptionError(f"{name!r} is {merged[name]!r} in options and {value!r} in inductor_configs; keep one")
        merged[name] = value
    return merged
