"""The name of one of torch's operations, however it is spelled."""

from __future__ import annotations

import torch
from torch.fx import Node

_NAMESPACES = ("aten", "prims")
_OWNERS = ("torch", "_operator", "builtins", "math")


def torch_name(node: Node) -> str:
    """The operation's name without namespace and overload; "" for what is not torch's, and may do anything.

    "" as well for modules, attributes, higher-order operators and the graph's output.
    """
    target = node.target
    if node.op == "call_method":
        return str(target)
    if node.op != "call_function" or isinstance(target, torch._ops.HigherOrderOperator):
        return ""
    if isinstance(target, torch._ops.OpOverload):
        namespace, name = target._schema.name.split("::")
        return name if namespace in _NAMESPACES else ""
    if isinstance(target, torch._ops.OpOverloadPacket):  # Dynamo keeps ``torch.ops.library.name`` as it is called
        namespace, name = target._qualified_op_name.split("::")
        return name if namespace in _NAMESPACES else ""
    owner = str(getattr(target, "__module__", None) or "torch")  # torch's functions in C name no module
    return str(getattr(target, "__name__", "")) if owner.partition(".")[0] in _OWNERS else ""


def operation_name(node: Node) -> str:
    """What a reason calls an operation: the same for all layers of a model, unlike the name of the node.

    That of the node where the operation is not torch's.
    """
    return torch_name(node) or node.name
