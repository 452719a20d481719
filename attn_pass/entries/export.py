"""The entries for exported programs: `rewrite` in place, and `aot_compile` from a model to an AOTInductor package."""

from __future__ import annotations

import copy
import inspect
import operator
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.traceback import preserve_node_meta
from torch.utils import _pytree as pytree

from attn_pass.compat import require_inductor
from attn_pass.entries.inductor import before_inductor, inductor_patches, patches_for
from attn_pass.entries.package import with_report
from attn_pass.entries.retry import Failure, leave_all, warn_failed
from attn_pass.entries.snapshot import Snapshot
from attn_pass.entries.transaction import Decision, decide, failed, next_decision
from attn_pass.errors import CaptureError, OptionError, PackageError, RewriteError, cause_of, in_one_line
from attn_pass.graph.values import CONSTANTS, KNOWN_TENSORS, MAY_BE_ZERO
from attn_pass.options import Options, Runner, make_options, split_options, unknown_name
from attn_pass.report.history import publish
from attn_pass.report.record import Report


def aot_compile(
    model: torch.nn.Module | ExportedProgram,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    package_path: str | os.PathLike[str] | None = None,
    inductor_configs: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Export a model, rewrite its attention, compile it with AOTInductor, and return the path of the .pt2 package.

    The arguments are checked before the compile, which takes long. The package stores the report
    (`attn_pass.package_report`, ``attn-pass explain model.pt2``). If AOTInductor cannot lower the rewritten program, it
    is decided once more without the target that failed. If that fails too, the original is compiled and every site is
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
        PackageError: package_path cannot be written to, or does not end in .pt2.
        OptionError: an option is unknown or has a value that is not accepted.
        VersionError: torch is too old for this function.
    """
    require_inductor("aot_compile")
    own_options, inductor, mode = split_options(options)
    path = _checked_path(package_path)
    patches = inductor_patches(own_options, _merged(inductor, inductor_configs), mode)
    original = exported(model, args, kwargs, dynamic_shapes)
    if _writes_buffers(original):
        # Inductor folds what it can compute of a buffer's first value, even if the program writes to the buffer: a
        # position that is counted up would stay at 1 (seen in torch 2.13.0).
        patches = {"joint_graph_constant_folding": False, **patches}
    program, package = original, ""
    failures: list[Failure] = []

    def again(without: Mapping[str, str] | None = None) -> Decision:
        nonlocal program
        program = original._update(Snapshot(original.graph_module).module(), copy.deepcopy(original.graph_signature))
        return _rewritten(program, own_options, "inductor", without)

    decision = again()
    while decision.changed and not package:
        report = decision.report
        try:
            package = _package(program, path, with_report(patches | patches_for(report), report))
        except Exception as error:
            failures.append(failed(error, decision, own_options))
        if not package:
            decision = next_decision(decision, failures, again)
    report = decision.report
    if not package:
        package = _package(original, path, with_report(patches, report))
    if failures:
        warn_failed(report, failures)
    publish(report)
    return package


def rewrite(
    program: GraphModule | ExportedProgram,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Report:
    """Rewrite the attention of a GraphModule or an exported program in place; compiles nothing.

    An exported program stays valid: its signature fits its graph, `module()` runs, torch.export.save works.

    Args:
        program: a graph whose nodes have fake values in their metadata (Dynamo's, torch.export's), or any GraphModule
            together with example inputs.
        args: example inputs of a GraphModule, used when its nodes have no metadata.
        kwargs: example keyword inputs.
        options: fields of `attn_pass.Options`.

    Raises:
        RewriteError: `program` is neither, has no metadata and came without args, or does not run with them.
        OptionError: an option is unknown or has a value that is not accepted.
    """
    own_options = make_options(**options)
    if isinstance(program, ExportedProgram):
        if (missing := _without_value(program.graph_module)) is not None:
            raise RewriteError(
                f"the exported program has no fake value at node {missing.name!r} (meta['val']), so shapes and dtypes "
                "are unknown there; a pass that ran before dropped it: export the model again"
            )
        report = _rewritten(program, own_options).report
    elif isinstance(program, GraphModule):
        if (missing := _without_value(program)) is not None:
            if args is None and kwargs is None:
                raise RewriteError(
                    f"the graph has no metadata: node {missing.name!r} has neither meta['val'] nor "
                    "meta['example_value'], so shapes and dtypes are unknown; give example inputs, "
                    "attn_pass.rewrite(program, args)"
                )
            _propagate(program, tuple(args or ()), dict(kwargs or {}))
        _in_one_fake_mode(program)
        report = decide(program, own_options, "export" if _is_aten(program) else "compile").report
        program.recompile()
    else:
        raise RewriteError(
            f"rewrite takes a torch.fx.GraphModule or a torch.export.ExportedProgram, got {type(program).__name__}; "
            "for a model use torch.compile(model, backend=attn_pass.backend) or attn_pass.aot_compile"
        )
    publish(report, compiled=False)
    return report


# ---- exported programs ----


def exported(
    model: torch.nn.Module | ExportedProgram,
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    dynamic_shapes: Any,
) -> ExportedProgram:
    """The program to compile.

    Raises:
        CaptureError: it cannot be exported, or an exported program was given together with dynamic_shapes.
    """
    if isinstance(model, ExportedProgram):
        if dynamic_shapes is not None:
            raise CaptureError(
                f"dynamic_shapes={dynamic_shapes!r} was given with a program that is already exported, whose shapes "
                "are fixed; give the model instead, or pass dynamic_shapes to torch.export.export"
            )
        if model.example_inputs is None:
            raise CaptureError(
                "the exported program has no example inputs, which AOTInductor needs; export the model again, or "
                "give the model and its args"
            )
        return model
    if not isinstance(model, torch.nn.Module):
        raise CaptureError(
            f"aot_compile takes a torch.nn.Module or an ExportedProgram, got {type(model).__name__}; put a function in "
            "the forward of a module"
        )
    if args is None and kwargs is None:
        raise CaptureError("no example inputs were given; call aot_compile(model, args) with a tuple of them")
    inputs = tuple(args) if isinstance(args, list | tuple) else () if args is None else (args,)
    try:
        with torch.no_grad(), preserve_node_meta():  # which keeps a program's annotations
            return torch.export.export(model, inputs, dict(kwargs or {}), dynamic_shapes=dynamic_shapes)
    except Exception as error:
        given = f"inputs {_shapes(inputs, kwargs)}"
        if dynamic_shapes is not None:
            given += f" and dynamic_shapes={dynamic_shapes!r}"
        raise CaptureError(
            f"torch.export cannot capture {type(model).__name__} with {given}: {in_one_line(error)}\nCheck that "
            "the model runs with these inputs, and that every size declared dynamic may really differ from the "
            "example's; torch.export.export(model, args, kwargs, dynamic_shapes=...) shows the whole error"
        ) from error


def _rewritten(
    program: ExportedProgram, options: Options, runner: Runner = "other", without: Mapping[str, str] | None = None
) -> Decision:
    """Rewrite an exported program in place, and check that it still is one; if not, it is put back as it was."""
    gm = program.graph_module
    outputs = _output_names(gm)
    kind = "aoti" if runner == "inductor" else "export"
    decision = decide(gm, options, kind, runner, known_values(program, options), without=without)
    if not decision.changed:
        return decision
    try:
        gm.recompile()
        _rename_outputs(program, dict(zip(outputs, _output_names(gm), strict=True)))
        program.validate()
    except Exception as error:
        failure = cause_of(error)
        if options.on_error == "raise":
            raise RewriteError(f"the rewritten program is not a valid exported program: {failure}") from error
        _rename_outputs(program, dict(zip(_output_names(gm), outputs, strict=False)))
        decision.original.restore()
        leave_all(decision.report, f"the rewritten program is not a valid exported program ({failure})")
        return replace(decision, changed=False)
    return decision


def known_values(program: ExportedProgram, options: Options) -> dict[str, Any]:
    """The values of an exported program's literals, constants and buffers that the engine may rely on."""
    ranges = program.range_constraints.items()  # which are the user's; in its graph every size is at least 2
    return {
        CONSTANTS: _written_constants(program),
        KNOWN_TENSORS: _known_tensors(program, options),
        MAY_BE_ZERO: {str(symbol) for symbol, bounds in ranges if bounds.lower < 1},
    }


def _known_tensors(program: ExportedProgram, options: Options) -> dict[str, tuple[str, torch.Tensor]]:
    """Constants, buffers that no state dict holds, and with ``assume_constant_buffers`` all others nothing writes."""
    signature = program.graph_signature
    names = signature.inputs_to_lifted_tensor_constants | signature.inputs_to_buffers
    kept = set(names.values()) - set(signature.buffers_to_mutate.values())
    if not options.assume_constant_buffers:
        kept -= set(signature.inputs_to_buffers.values()) - set(signature.non_persistent_buffers)
    values = {**program.state_dict, **program.constants}
    tensors: dict[str, tuple[str, torch.Tensor]] = {}
    for node, name in names.items():
        value = values.get(name)
        plain = type(value) in (torch.Tensor, torch.nn.Buffer)
        if name in kept and isinstance(value, torch.Tensor) and plain and not value.requires_grad:
            tensors[node] = (f"{'buffer' if node in signature.inputs_to_buffers else 'constant'} {name}", value)
    return tensors


def _written_constants(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """One-element tensors that are literals of the program, as ``torch.tensor(False)`` is, by name of placeholder.

    Not the attributes of modules, which have names of their own: someone may want to load other values for those.
    """
    lifted = program.graph_signature.inputs_to_lifted_tensor_constants
    literals = {name: target for name, target in lifted.items() if _LITERAL.fullmatch(target.rpartition(".")[2])}
    values = {name: program.constants.get(target) for name, target in literals.items()}
    return {n: v for n, v in values.items() if isinstance(v, torch.Tensor) and v.numel() == 1 and not v.is_meta}


_LITERAL = re.compile(
    r"lifted_tensor_\d+"
)  # torch.export's name for what has none (torch/_export/passes/lift_constants_pass.py)


def _output_names(gm: GraphModule) -> list[str]:
    """Names of the nodes that are returned, in order; "" for a constant."""
    return [arg.name if isinstance(arg, Node) else "" for arg in pytree.tree_leaves(gm.graph.output_node().args)]


def _rename_outputs(program: ExportedProgram, new_names: Mapping[str, str]) -> None:
    """Let the signature name the nodes that are returned now."""
    renamed = {old: new for old, new in new_names.items() if old != new}
    if not renamed:
        return
    specs: list[Any] = [spec.arg for spec in program.graph_signature.output_specs]
    for entry in program.module_call_graph:
        if entry.signature is not None:
            specs += entry.signature.outputs
    for argument in specs:
        if getattr(argument, "name", None) in renamed:
            argument.name = renamed[argument.name]


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


def _checked_path(given: object) -> str | None:
    """The path as a string.

    Raises:
        PackageError: it does not end in .pt2, or cannot be written to.
    """
    if given is None:
        return None
    if not isinstance(given, str | os.PathLike):
        raise PackageError(
            f"package_path is {given!r} ({type(given).__name__}); give a path that ends in .pt2, or None"
        )
    path = Path(given)
    if path.suffix != ".pt2":
        raise PackageError(
            f"package_path {os.fspath(given)!r} does not end in .pt2, which torch needs to load it; "
            f"use {os.fspath(path.with_suffix('.pt2'))!r}"
        )
    problem = _problem_of(path)
    if problem:
        raise PackageError(f"package_path {os.fspath(given)!r} cannot be written: {problem}")
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


def _shapes(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> str:
    """The inputs as "(2, 8, 16), mask=(2, 16)" for a message."""
    shapes = [_shape(arg) for arg in args] + [f"{name}={_shape(arg)}" for name, arg in (kwargs or {}).items()]
    return f"of shapes {', '.join(shapes)}" if shapes else "(none)"


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__


# ---- metadata of a bare GraphModule ----


def _without_value(gm: GraphModule) -> Node | None:
    """The first node whose value is used and whose metadata holds no (fake) value."""
    for node in gm.graph.nodes:
        if node.op in ("get_attr", "output") or not ({"val", "example_value"}.isdisjoint(node.meta)):
            continue
        if node.op == "placeholder" or node.users:
            missing: Node = node
            return missing
    return None


def _propagate(gm: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run the graph on fake tensors, which stay in meta["val"].

    Raises:
        RewriteError: the inputs do not fit the graph, or the graph fails on them.
    """
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    try:
        flat: Sequence[Any]
        if isinstance(gm.graph._codegen, torch.fx.graph._PyTreeCodeGen):
            flat = pytree.arg_tree_leaves(*args, **kwargs)
        else:
            flat = inspect.signature(gm.forward).bind(*args, **kwargs).args
        mode: Any = detect_fake_mode(flat) or FakeTensorMode(allow_non_fake_inputs=True)
        FakeTensorProp(gm, mode).propagate(*flat)
    except Exception as error:
        raise RewriteError(
            f"the graph does not run with inputs {_shapes(args, kwargs)}: {cause_of(error)}; give the inputs "
            "the graph takes, in its order"
        ) from error
    for node in gm.graph.find_nodes(op="get_attr"):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            node.meta["val"] = mode.from_tensor(value, static_shapes=True)


def _in_one_fake_mode(gm: GraphModule) -> None:
    """Runs a graph of `make_fx` once more on fake tensors: it notes each value in a mode and a memory of its own.

    Which nodes share memory is unknown there, and a write to a view would be none to what it is a view of.
    """
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    values = [node.meta.get("val") for node in gm.graph.nodes]
    modes = {v.fake_mode for v in values if isinstance(v, FakeTensor)}
    if len(modes) < 2:
        return
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    given = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    with mode:
        made = [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device, requires_grad=v.requires_grad)
            if isinstance(v, FakeTensor)
            else v
            for v in given
        ]
    _propagate(gm, tuple(made), {})


def _is_aten(gm: GraphModule) -> bool:
    """Whether the graph is in the dialect of torch.export: calls of operator overloads only."""
    targets = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    if any(node.op in ("call_method", "call_module") for node in gm.graph.nodes):
        return False
    overloads = (torch._ops.OpOverload, torch._ops.HigherOrderOperator)
    return all(isinstance(t, overloads) or getattr(t, "__module__", "") == operator.__name__ for t in targets)
