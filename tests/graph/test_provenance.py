"""Which targets an error of the compiler is about: by graph node, by operator, by source line."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.exc import InductorError, LoweringException
from torch.fx import Graph, GraphModule, Interpreter

from attn_pass.graph.provenance import Emission, culprits, operator_name

FLEX = torch.ops.higher_order.flex_attention
HERE, THERE = '  File "model.py", line 10, in forward\n', '  File "model.py", line 20, in forward\n'
SITES = (
    Emission("flex", frozenset({"flex_attention", "aten.clone.default"}), HERE),
    Emission("blocks", frozenset({"row_blocks.attention.default", "aten.clone.default"}), THERE),
)


def lowering_error(target: object, stack: str = "") -> Exception:
    return LoweringException(ValueError("no"), target, [], {}, stack_trace=stack or None)


@pytest.mark.parametrize(
    ("error", "targets"),
    [
        (lowering_error("flex_attention"), {"flex"}),
        (lowering_error("row_blocks.attention.default"), {"blocks"}),
        (lowering_error("row_blocks.attention.default", HERE), {"blocks"}),
        (InductorError(lowering_error("flex_attention"), None), {"flex"}),
        (lowering_error("aten.clone.default"), set()),
        (lowering_error("aten.clone.default", THERE), {"blocks"}),
        (lowering_error("aten.mm.default", HERE), {"flex"}),
        (lowering_error("aten.mm.default", '  File "model.py", line 1, in forward\n'), set()),
        (RuntimeError("row_blocks::attention has no kernel for CUDA"), {"blocks"}),
        (RuntimeError("row_blocks::attention_2 has no kernel for CUDA"), set()),
        (RuntimeError("at 61:12: Loop-carried variable top has initial type fp32"), set()),
    ],
)
def test_what_a_message_tells(error: Exception, targets: set[str]) -> None:
    assert culprits(error, SITES) == targets


def test_what_an_error_was_raised_for_counts() -> None:
    try:
        try:
            raise lowering_error("flex_attention")
        except LoweringException as inner:
            raise RuntimeError("backend failed") from inner
    except RuntimeError as outer:
        assert culprits(outer, SITES) == {"flex"}


def test_two_targets_on_one_line_are_both_named() -> None:
    sites = (SITES[0], Emission("blocks", SITES[1].operators, HERE))
    assert culprits(lowering_error("aten.mm.default", HERE), sites) == {"flex", "blocks"}


def test_the_node_that_was_run_is_known_from_the_traceback() -> None:
    """A message that tells nothing, raised while a graph is interpreted."""

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("bad alignment")

    graph = Graph()
    node = graph.call_function(fails, (graph.placeholder("x"),))
    graph.output(node)
    sites = (*SITES, Emission("own", frozenset({"fails"}), ""))
    with pytest.raises(RuntimeError) as caught:
        Interpreter(GraphModule(torch.nn.Module(), graph)).run(torch.ones(1))
    assert culprits(caught.value, sites) == {"own"}


def test_operators_have_the_names_of_inductors_messages() -> None:
    names = [operator_name(t) for t in (torch.ops.aten.mm.default, FLEX, torch.nn.functional.softmax, "view")]
    assert names == ["aten.mm.default", "flex_attention", "softmax", "view"]
