"""What tensors are made of: whether they hold data, or tables that are the same for all data."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import Node

from attn_pass.graph.values import tensor_value
from attn_pass.reading.reader import Reader
from attn_pass.reading.vocabulary import Call

_MOST_ANCESTORS = 400
_SUMS = ("matmul", "baddbmm", "linear", "inner", "tensordot", "softmax")


def is_parameter(node: Node) -> bool:
    """Whether a tensor is a parameter of the model."""
    return isinstance(tensor_value(node), torch.nn.Parameter)


def comes_from_sums(reader: Reader, node: Node, others: Collection[Node]) -> bool:
    """Whether a node is made of a sum over features, as a layer's result is, or of others, through numbers alone."""
    waiting, seen = [node], {node}
    while waiting and len(seen) < _MOST_ANCESTORS:
        current = waiting.pop()
        call = reader.call(current)
        if current in others or (call is not None and sums(call)) or "conv" in str(current.target):
            return True
        for made_of in current.all_input_nodes:
            fake = tensor_value(made_of)
            if made_of not in seen and (fake is None or fake.is_floating_point() or fake.is_complex()):
                seen.add(made_of)
                waiting.append(made_of)
    return bool(waiting)


def sums(call: Call) -> bool:
    """Whether a call sums over more than one feature: the angles of a table are products of one number each."""
    if call.op == "einsum":
        equation = str(call["equation"]).replace(" ", "")
        made_of, _, result = equation.partition("->")
        return not result or bool(set(made_of.replace(",", "").replace(".", "")) - set(result))
    if call.op not in _SUMS:
        return False
    fake = tensor_value(call.args.get("batch1", call.args.get("input")))
    return fake is None or fake.dim() == 0 or fake.shape[-1] != 1
