"""The entry `rewrite`: a GraphModule or an exported program in place, without compiling it."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from attn_pass.entries.export import rewrite_exported, shapes_text
from attn_pass.entries.other_device import warn_other_device
from attn_pass.entries.transaction import decide
from attn_pass.errors import RewriteError, cause_of
from attn_pass.planner.overrides import named_options
from attn_pass.report.history import publish
from attn_pass.report.record import Report


def rewrite(
    program: GraphModule | ExportedProgram,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Report:
    """Rewrite the attention of a GraphModule or an exported program in place; compiles nothing.

    An exported program stays valid: its signature fits its graph, `module()` runs, torch.export.save works. One warning
    tells if `device` names a device that the program's tensors are not on: move the program there before it runs.

    Args:
        program: a graph whose nodes have fake values in their metadata (Dynamo's, torch.export's), or any GraphModule
            together with example inputs.
        args: example inputs of a GraphModule, used when its nodes have no metadata. They tell whether the program will
            be trained: for training, call it with gradients enabled and inputs or parameters that require them.
        kwargs: example keyword inputs.
        options: fields of `attn_pass.Options`.

    Raises:
        RewriteError: `program` is neither, has no metadata and came without args, or does not run with them.
        OptionError: an option is unknown or has a value that is not accepted.
    """
    own_options = named_options(options)
    if isinstance(program, ExportedProgram):
        if (missing := _without_value(program.graph_module)) is not None:
            raise RewriteError(
                f"the exported program has no fake value at node {missing.name!r} (meta['val']), so shapes and dtypes "
                "are unknown there; a pass that ran before dropped it: export the model again"
            )
        report = rewrite_exported(program, own_options).report
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
    warn_other_device(report, own_options, "program")
    publish(report, compiled=False)
    return report


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
            f"the graph does not run with inputs {shapes_text(args, kwargs)}: {cause_of(error)}; give the inputs "
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
    fakes = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    with mode:
        in_one_mode = [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device, requires_grad=v.requires_grad)
            if isinstance(v, FakeTensor)
            else v
            for v in fakes
        ]
    _propagate(gm, tuple(in_one_mode), {})


def _is_aten(gm: GraphModule) -> bool:
    """Whether the graph is in the dialect of torch.export: calls of operator overloads only."""
    targets = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    if any(node.op in ("call_method", "call_module") for node in gm.graph.nodes):
        return False
    overloads = (torch._ops.OpOverload, torch._ops.HigherOrderOperator)
    return all(isinstance(t, overloads) or getattr(t, "__module__", "") == operator.__name__ for t in targets)
