"""Whether a gradient comes back to a node: by way of results that want one, to what the graph returns.

A parameter that no gradient comes to has none, which is another thing than zeros: an optimizer leaves it alone, and
would otherwise let its weight decay.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from attn_pass.graph.values import fake_value, wants_gradient


def gets_gradient(node: Node) -> bool:
    """Whether what is returned depends on a node through results alone that want a gradient."""
    waiting, seen = [node], {node}
    while waiting:
        for user in waiting.pop().users:
            if user.op == "output":
                return True
            written = user.args[0] if user.target is operator.setitem else user
            if isinstance(written, Node) and written not in seen and _wants_gradient(written):
                seen.add(written)
                waiting.append(written)
    return False


def _wants_gradient(node: Node) -> bool:
    value = fake_value(node)
    if isinstance(value, (tuple, list)):
        return any(isinstance(each, torch.Tensor) and each.requires_grad for each in value)
    return wants_gradient(node)
