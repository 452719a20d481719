"""Exported programs: how a model becomes one, which of its values are known, and its rewrite in place."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.traceback import preserve_node_meta
from torch.utils import _pytree as pytree

from attn_pass.entries.known import LITERAL
from attn_pass.entries.mistakes import hint
from attn_pass.entries.retry import leave_all
from attn_pass.entries.transaction import Decision, decide
from attn_pass.errors import CaptureError, RewriteError, cause_of, in_one_line
from attn_pass.graph.values import CONSTANTS, FOLDS_CONSTANTS, KNOWN_TENSORS, MAY_BE_ZERO, PARAMETERS
from attn_pass.options import Options, Runner


def exported(
    model: torch.nn.Module | ExportedProgram,
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    dynamic_shapes: Any,
    entry: str = "aot_compile",
) -> ExportedProgram:
    """The program to compile; ``entry`` names the function that the user called.

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
        request = f"inputs {shapes_text(inputs, kwargs)}"
        if dynamic_shapes is not None:
            request += f" and dynamic_shapes={dynamic_shapes!r}"
        raise CaptureError(
            f"torch.export cannot capture {type(model).__name__} with {request}: {in_one_line(error)}"
            f"{hint(entry, inputs, kwargs or {}, error)}\nCheck that the model runs with these inputs, and that "
            "every size declared dynamic may really differ from the example's; torch.export.export(model, args, "
            "kwargs, dynamic_shapes=...) shows the whole error"
        ) from error


def rewrite_exported(
    program: ExportedProgram,
    options: Options,
    runner: Runner = "other",
    without: Mapping[str, str] | None = None,
    folds: bool = False,
) -> Decision:
    """Rewrite an exported program in place, and check that it still is one; if not, it is put back as it was.

    ``folds`` says that what runs it makes constants of its parameters.
    """
    gm = program.graph_module
    outputs = _output_names(gm)
    kind = "aoti" if runner == "inductor" else "export"
    known = functools.partial(known_values, program, options, folds)
    decision = decide(gm, options, kind, runner, known, without=without)
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


def known_values(program: ExportedProgram, options: Options, folds: bool = False) -> dict[str, Any]:
    """The values of an exported program's literals, constants and buffers that the engine may rely on.

    ``folds`` says that what runs it makes constants of its parameters.
    """
    ranges = program.range_constraints.items()  # which are the user's; in its graph every size is at least 2
    return {
        CONSTANTS: _written_constants(program),
        FOLDS_CONSTANTS: folds,
        KNOWN_TENSORS: _known_tensors(program, options),
        MAY_BE_ZERO: {str(symbol) for symbol, bounds in ranges if bounds.lower < 1},
        PARAMETERS: {
            node: program.state_dict[name]
            for node, name in program.graph_signature.inputs_to_parameters.items()
            if name in program.state_dict
        },
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
    literals = {name: target for name, target in lifted.items() if LITERAL.fullmatch(target.rpartition(".")[2])}
    values = {name: program.constants.get(target) for name, target in literals.items()}
    return {n: v for n, v in values.items() if isinstance(v, torch.Tensor) and v.numel() == 1 and not v.is_meta}


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


def shapes_text(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> str:
    """The inputs as "(2, 8, 16), mask=(2, 16)" for a message."""
    shapes = [_shape(arg) for arg in args] + [f"{name}={_shape(arg)}" for name, arg in (kwargs or {}).items()]
    return f"of shapes {', '.join(shapes)}" if shapes else "(none)"


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__
