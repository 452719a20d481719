"""Calls whose keys and values have lengths of two names: the program is guarded on one length for both.

A cache that grows is one input for the keys and one for the values, and `torch.compile` gives each a symbol for its
length. `scaled_dot_product_attention` does not compare them: torch's CPU kernel runs with any two lengths. So nothing
in the graph says that they are equal, although they were when it was traced. A guard says it. A later call with two
lengths that differ does not satisfy it, is traced on its own, and left as written.
"""

from __future__ import annotations

import torch
from torch.fx import Graph

from attn_pass.compat import takes_guards
from attn_pass.graph.values import tensor_value
from attn_pass.patterns.calls import Kernels, arguments


def settle(graph: Graph, kernels: Kernels) -> None:
    """Adds the guards to the shape environment of a graph that Dynamo is compiling; only where both are symbols."""
    for node in graph.nodes:
        call_args = arguments(node, kernels)
        if call_args is None:
            continue
        key, value = (tensor_value(call_args[name]) for name in ("key", "value"))
        if key is None or value is None or min(key.dim(), value.dim()) < 2:
            continue
        one, other = key.size(-2), value.size(-2)
        if isinstance(one, torch.SymInt) and isinstance(other, torch.SymInt) and _were_equal(one, other):
            bool(one == other)  # which adds the guard


def _were_equal(one: torch.SymInt, other: torch.SymInt) -> bool:
    """Whether two sizes were the same number when the program was traced, and a guard on that would be kept."""
    first, second = one.node, other.node
    traced = getattr(first, "hint", None), getattr(second, "hint", None)
    return (
        first.shape_env is second.shape_env
        and all(isinstance(n, int) for n in traced)
        and traced[0] == traced[1]
        and takes_guards(first.shape_env)
    )
