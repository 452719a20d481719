"""The GraphModules that higher-order operators call: what each is, and what its callers feed to its placeholders.

Why it matters: torch.export puts autocast and no_grad regions into bodies of their own, and activation
checkpointing hands a body its mask as a bare placeholder, so a reader must both enter bodies and look back out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch.utils._pytree as pytree
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from attn_pass.graph.values import nodes_in

Kind = Literal[
    "autocast",
    "grad_mode",
    "checkpoint",
    "wrap",
    "cond",
    "invoke_subgraph",
    "loop_condition",
    "loop",
    "scan",
    "map",
    "autograd_forward",
    "autograd_backward",
    "score",
    "other",
]


class BodyCall(NamedTuple):
    """One call of a body: the higher-order node, and for each placeholder of the body what the caller passes.

    None stands for a value that is not an argument of the caller: a loop variable, a slice of a scanned tensor, an
    index of a score function, an incoming gradient. What is known of an operand holds for the placeholder at *this*
    call.
    """

    node: Node
    operands: tuple[Argument | None, ...]


@dataclass(frozen=True)
class Body:
    """A GraphModule that higher-order operators of one graph call, with all its calls in graph order.

    A fact about a placeholder must hold at every call; a body's signature is never changed.
    """

    module: GraphModule
    name: str
    calls: tuple[BodyCall, ...]
    kind: Kind
    rewritable: bool


class BodyOperand(NamedTuple):
    """A body as one higher-order node sees it."""

    module: GraphModule
    name: str
    kind: Kind
    operands: tuple[Argument | None, ...]
    rewritable: bool


class _Slot(NamedTuple):
    """Where an operator takes a body, and what the body's placeholders are fed, in order.

    A feed is the name of a parameter that is spliced in, "~name" for as many unknown values as that parameter has
    elements, or a number of unknown values; None when nothing is known.
    """

    parameter: str
    kind: Kind
    feed: tuple[str | int, ...] | None
    rewritable: bool = True


class _Form(NamedTuple):
    """The parameters of an operator, "*name" taking the rest, and where the bodies are."""

    parameters: tuple[str, ...]
    slots: tuple[_Slot, ...]


def _wrapper(kind: Kind, *before: str, after: tuple[str, ...] = (), rewritable: bool = True) -> _Form:
    """An operator that runs one body on all its remaining arguments."""
    return _Form((*before, "body", *after, "*operands"), (_Slot("body", kind, ("operands",), rewritable),))


_WHILE = _Form(
    ("cond_fn", "body_fn", "carried_inputs", "additional_inputs"),
    (
        _Slot("cond_fn", "loop_condition", ("~carried_inputs", "additional_inputs"), False),
        _Slot("body_fn", "loop", ("~carried_inputs", "additional_inputs")),
    ),
)

# Signatures read in torch 2.13.0, torch/_higher_order_ops and torch/_functorch/autograd_function.py.
_FORMS: dict[str, _Form] = {
    "wrap_with_autocast": _wrapper("autocast", "device_type", "dtype", "enabled", "cache_enabled"),
    "wrap_with_set_grad_enabled": _wrapper("grad_mode", "enable_grad"),
    "tag_activation_checkpoint": _wrapper("checkpoint"),
    "wrap_activation_checkpoint": _wrapper("checkpoint"),
    "wrap": _wrapper("wrap"),
    "invoke_subgraph": _wrapper("invoke_subgraph", after=("identifier",)),
    # These change how the body runs (dispatch modes, placements, quantisation patterns): read, not rewritten.
    "dynamo_bypassing_wrapper": _wrapper("other", "wrapper_fn_or_key", rewritable=False),
    "local_map_hop": _wrapper("other", rewritable=False),
    "invoke_quant": _wrapper("other", rewritable=False),
    "invoke_quant_packed": _wrapper("other", rewritable=False),
    "hints_wrapper": _Form(("body", "args", "kwargs", "hints"), (_Slot("body", "wrap", ("args",)),)),
    "strict_mode": _Form(("body", "operands"), (_Slot("body", "wrap", ("operands",)),)),
    "cond": _Form(
        ("pred", "true_fn", "false_fn", "operands"),
        (_Slot("true_fn", "cond", ("operands",)), _Slot("false_fn", "cond", ("operands",))),
    ),
    "while_loop": _WHILE,
    "while_loop_stack_output": _WHILE,
    "scan": _Form(
        ("body", "init", "xs", "additional_inputs"), (_Slot("body", "scan", ("~init", "~xs", "additional_inputs")),)
    ),
    "associative_scan": _Form(
        ("body", "xs", "additional_inputs"), (_Slot("body", "scan", ("~xs", "~xs", "additional_inputs"), False),)
    ),
    "map_impl": _Form(("body", "xs", "pos_args"), (_Slot("body", "map", ("~xs", "pos_args")),)),
    "autograd_function_apply": _Form(
        ("fwd", "bwd", "*operands"),
        (_Slot("fwd", "autograd_forward", ("operands",)), _Slot("bwd", "autograd_backward", None, False)),
    ),
    # score_mod(score, b, h, q, kv, *buffers) and mask_mod(b, h, q, kv, *buffers); mask_mod is the last of block_mask.
    "flex_attention": _Form(
        (
            *("query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options"),
            *("score_mod_other_buffers", "mask_mod_other_buffers"),
        ),
        (
            _Slot("score_mod", "score", (5, "score_mod_other_buffers"), False),
            _Slot("block_mask", "score", (4, "mask_mod_other_buffers"), False),
        ),
    ),
    "flex_attention_backward": _Form(
        (
            *("query", "key", "value", "out", "logsumexp", "grad_out", "grad_logsumexp", "fw_graph", "joint_graph"),
            *("block_mask", "scale", "kernel_options", "score_mod_other_buffers", "mask_mod_other_buffers"),
        ),
        (
            _Slot("fw_graph", "score", (5, "score_mod_other_buffers"), False),
            _Slot("joint_graph", "score", None, False),
            _Slot("block_mask", "score", (4, "mask_mod_other_buffers"), False),
        ),
    ),
}


def bodies(gm: GraphModule) -> list[Body]:
    """Every GraphModule that a higher-order operator in ``gm``'s graph calls, in graph order; not the bodies in bodies.

    One GraphModule called several times (``invoke_subgraph`` of a repeated region) is one Body with several calls. A
    body of an operator that is not in the table has kind "other", unknown operands, and is not rewritable.
    """
    by_module: dict[int, list[tuple[Node, BodyOperand]]] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, HigherOrderOperator):
            for operand in called_bodies(node):
                by_module.setdefault(id(operand.module), []).append((node, operand))
    result = []
    for uses in by_module.values():
        first = uses[0][1]
        calls = tuple(BodyCall(node, operand.operands) for node, operand in uses)
        rewritable = all(operand.rewritable for _, operand in uses)
        result.append(Body(first.module, first.name, calls, first.kind, rewritable))
    return result


def called_bodies(node: Node) -> tuple[BodyOperand, ...]:
    """The bodies one higher-order node calls; empty when it has none or its graph belongs to no module."""
    modules = {n: m for n in node.all_input_nodes if (m := attribute_module(n)) is not None}
    if not modules:
        return ()
    form = _FORMS.get(operator_name(node))
    arguments = _bind(form.parameters, node) if form is not None else {}
    result = []
    for slot in form.slots if form is not None else ():
        for holder in nodes_in(arguments.get(slot.parameter)):
            module = modules.pop(holder, None)
            if module is not None:
                operands = _operands(slot.feed, arguments, module)
                result.append(BodyOperand(module, str(holder.target), slot.kind, operands, slot.rewritable))
    for holder, module in modules.items():
        unknown = (None,) * len(placeholders(module))
        result.append(BodyOperand(module, str(holder.target), "other", unknown, False))
    return tuple(result)


def operator_name(node: Node) -> str:
    """The name of a higher-order operator (``"cond"``); empty for any other node."""
    return str(node.target.name()) if isinstance(node.target, HigherOrderOperator) else ""


def indexed_by_export(node: Node) -> tuple[Node, tuple[Any, ...]] | None:
    """The tensor and the indices of ``table[head, q - kv]`` as torch.export writes it; None for anything else.

    In functions that run under `torch.vmap`, of FlexAttention among them, an index is an autograd function
    (torch/_dynamo/_trace_wrapped_higher_order_op.py, ``ModIndex``), which an exported graph calls through
    ``flat_apply``.
    """
    if operator_name(node) != "flat_apply" or len(node.args) < 5 or not isinstance(node.args[1], Node):
        return None
    spec, (name, *flat) = attribute(node.args[1]), node.args[2:]
    if not isinstance(spec, pytree.TreeSpec) or name != _INDEX:
        return None
    positional, named = pytree.tree_unflatten([name, *flat], spec)
    is_index = (
        len(positional) == 3
        and not named
        and isinstance(positional[1], Node)
        and isinstance(positional[2], (list, tuple))
    )
    return (positional[1], tuple(positional[2])) if is_index else None


_INDEX = "torch._dynamo._trace_wrapped_higher_order_op.ModIndex"


def attribute(node: Node) -> Any:
    """What a get_attr node reads from the module that owns its graph; None when there is none."""
    if node.op != "get_attr":
        return None
    value: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
        if value is None:
            return None
    return value


def attribute_module(node: Node) -> GraphModule | None:
    """The GraphModule a get_attr node reads, if it reads one."""
    value = attribute(node)
    return value if isinstance(value, GraphModule) else None


def placeholders(module: GraphModule) -> list[Node]:
    """The placeholders of a GraphModule, in order."""
    return list(module.graph.find_nodes(op="placeholder"))


def _bind(parameters: tuple[str, ...], node: Node) -> dict[str, Any]:
    arguments: dict[str, Any] = dict(node.kwargs)
    for index, parameter in enumerate(parameters):
        if parameter.startswith("*"):
            arguments[parameter[1:]] = node.args[index:]
        elif index < len(node.args):
            arguments[parameter] = node.args[index]
    return arguments


def _operands(
    feed: tuple[str | int, ...] | None, arguments: dict[str, Any], module: GraphModule
) -> tuple[Argument | None, ...]:
    count = len(placeholders(module))
    unknown: tuple[Argument | None, ...] = (None,) * count
    if feed is None:
        return unknown
    operands: list[Argument | None] = []
    for part in feed:
        if isinstance(part, int):
            operands += [None] * part
        else:
            values = arguments.get(part.removeprefix("~"), ())
            values = list(values) if isinstance(values, (tuple, list)) else [values]
            operands += [None] * len(values) if part.startswith("~") else values
    # An alignment that does not add up proves nothing.
    return tuple(operands) if len(operands) == count else unknown


__all__ = [
    "Body",
    "BodyCall",
    "BodyOperand",
    "Kind",
    "attribute",
    "attribute_module",
    "bodies",
    "called_bodies",
    "operator_name",
    "placeholders",
]
