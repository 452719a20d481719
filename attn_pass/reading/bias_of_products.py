"""Whether the numbers of a tensor are those of a product over features: none of them masks, however it is looked up."""

from __future__ import annotations

from torch.fx import Node

from attn_pass.graph.effects import Effects
from attn_pass.graph.values import tensor_value
from attn_pass.reading.vocabulary import understand

_VIEWS = frozenset(
    {"reshape", "permute", "transpose", "mT", "t", "expand", "copy", "detach", "select", "slice", "narrow", "getitem"}
)
_MOST = 40  # operations on the way


def is_of_products(node: Node, effects: Effects) -> bool:
    """Whether a node takes elements, in any order, of a product of two floating-point tensors over features."""
    for _ in range(_MOST):
        if effects.mutations(node):
            return False
        if (source := _looked_up_in(node)) is not None:
            node = source
            continue
        call = understand(node)
        if call is None or call.in_place:
            return False
        if call.op == "matmul":
            return _sums(call["input"]) and _is_number(call["input"]) and _is_number(call["other"])
        source = call.args.get("input")
        if call.op not in _VIEWS or not isinstance(source, Node):
            return False
        node = source
    return False


def _looked_up_in(node: Node) -> Node | None:
    """The first operand of a gather."""
    name = getattr(node.target, "__name__", node.target)
    if name not in ("gather", "gather.default"):
        return None
    source = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))
    return source if isinstance(source, Node) else None


def _sums(left: object) -> bool:
    value = tensor_value(left)
    return value is not None and value.dim() > 1 and not (isinstance(value.shape[-1], int) and value.shape[-1] <= 1)


def _is_number(operand: object) -> bool:
    """Whether a factor is no mask: not made of truth values or integers."""
    for _ in range(_MOST):
        value = tensor_value(operand)
        if not isinstance(operand, Node) or value is None or not value.is_floating_point():
            return False
        call = understand(operand)
        if call is None or call.op not in {*_VIEWS, "cast"} or not isinstance(call.args.get("input"), Node):
            return True
        operand = call["input"]
    return False
