"""Plans: whose node a size is taken from, after another site has taken nodes away."""

from __future__ import annotations

import torch
from against_eager import randn
from torch import Tensor, nn
from torch.fx import Node

from attn_pass.graph.edit import Plan, SizeNodes
from attn_pass.graph.effects import Effects
from attn_pass.graph.regions import Region, Regions
from attn_pass.graph.values import Sizes, tensor_value


class Joined(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([a, b]).sin(), torch.cat([a, b]).cos()


def test_a_size_is_not_taken_from_a_node_that_is_gone() -> None:
    a, b = (torch.export.Dim(name, min=2, max=99) for name in "ab")
    program = torch.export.export(Joined(), (randn(3), randn(5)), dynamic_shapes=({0: a}, {0: b}))
    gm = program.graph_module
    first, second = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
    (sin,), (cos,) = first.users, second.users
    sizes = Sizes()
    held = SizeNodes(gm, sizes)
    value = tensor_value(cos)
    assert value is not None
    joined = sizes.index(value.shape[0])
    assert held.dimensions[joined][0] is first

    (output,) = gm.graph.find_nodes(op="output")
    effects, region = Effects(gm.graph), Regions(gm.graph, Region()).of(cos)
    output.args = ((cos,),)
    for node in (sin, first):
        gm.graph.erase_node(node)
    plan = Plan(gm, cos, region, held, effects)
    with plan.running():
        size = plan.size(joined)
        ones = plan.call(torch.ops.aten.full.default, [size], 1.0)
    plan.insert(ones)
    gm.graph.lint()
    inputs = {i for node in plan.inserted for i in node.all_input_nodes}
    assert inputs and all(isinstance(node, Node) and not node._erased for node in inputs)
