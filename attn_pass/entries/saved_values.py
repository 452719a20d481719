"""What a forward saves for its backward lies in memory as it was traced, also where a size is known at run time only.

AOTAutograd traces both together, and compiles the backward for the strides that Inductor chose for what the forward
saves: but where a stride depends on the number of packed rows (an unbacked size) Inductor does not say which it chose
(`compile_fx.py`, ``output_strides``), and the backward is compiled for those of the trace. Then they have to be these.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from operator import getitem
from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

log = logging.getLogger(__name__)
LIBRARY = torch.library.Library("attn_pass", "FRAGMENT")
LIBRARY.define("laid_out(Tensor input, int[] order) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
torch.library.register_fake(
    "attn_pass::laid_out", lambda x, order: x.new_empty_strided(x.size(), x.stride()), lib=LIBRARY
)
OPERATOR = torch.ops.attn_pass.laid_out.default
"""The same tensor, computed in an order of dimensions in memory, as Inductor writes it; for its graphs alone."""
_ANY_ROWS = 8191
"""In the place of an unbacked size: larger than what it is multiplied with is not needed, more than 1 is."""


class SavedValues(CustomGraphPass):
    """A `post_grad_custom_post_pass`: gives what is saved the order in memory that it was traced with; never raises."""

    def __call__(self, graph: Graph) -> None:
        """Changes a forward; other graphs save nothing."""
        try:
            for node, strides in list(_saved(graph)):
                _lay_out(graph, node, strides)
        except Exception:
            log.debug("what is saved for the backward lies as Inductor chooses", exc_info=True)

    def uuid(self) -> str:
        """Identity for Inductor's caches: a hash of this file."""
        return f"attn_pass.saved:{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}"


def _saved(graph: Graph) -> Iterator[tuple[Node, list[int]]]:
    """What a graph computes and saves, or saves a view of, with its strides as numbers.

    Once each, and only where a stride depends on an unbacked size.
    """
    (output,) = graph.find_nodes(op="output")
    results = output.args[0] if isinstance(output.args[0], (tuple, list)) else ()
    seen = set(output.meta.get("user_visible_output_idxs", range(len(results))))
    for node in dict.fromkeys(_seen_in(r) for n, r in enumerate(results) if n not in seen and isinstance(r, Node)):
        value = node.meta.get("val")
        if node.op == "placeholder" or not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            continue
        if node.meta.get("unbacked_bindings"):  # nonzero: its call lays it out, and a size that it makes has one maker
            continue
        if free_unbacked_symbols(value.stride()):
            yield node, [_as_number(stride) for stride in value.stride()]


def _seen_in(node: Node) -> Node:
    """What a view is one of; the node itself where it is none."""
    while node.op == "call_function" and node.args and isinstance(source := node.args[0], Node):
        of = source if node.target is getitem else node  # a piece, of a call that cuts
        target = of.target
        arguments = target._schema.arguments if isinstance(target, torch._ops.OpOverload) else ()
        if not arguments or arguments[0].alias_info is None or not isinstance(of.args[0], Node):
            break
        node = of.args[0]
    return node


def _as_number(size: Any) -> int:
    if not isinstance(size, torch.SymInt):
        return int(size)
    known = size.node.shape_env.backed_var_to_val
    expression = size.node.expr
    return int(expression.xreplace({s: known.get(s, _ANY_ROWS) for s in expression.free_symbols}))


def _lay_out(graph: Graph, node: Node, strides: list[int]) -> None:
    from torch._inductor import ir, lowering

    if OPERATOR not in lowering.lowerings:
        lowering.register_lowering(OPERATOR, type_promotion_kind=None)(ir.ExternKernel.require_stride_order)
    with graph.inserting_after(node):
        laid_out = graph.call_function(OPERATOR, (node, ir.get_stride_order(strides)))
    laid_out.meta = dict(node.meta)
    node.replace_all_uses_with(laid_out, delete_user_cb=lambda user: user is not laid_out)
