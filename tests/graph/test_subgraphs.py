"""Bodies of higher-order operators and what callers feed them, in graphs of Dynamo and torch.export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch.fx import Graph, GraphModule, Node
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attn_pass.graph.subgraphs import Body, bodies, called_bodies, placeholders


def dynamo_graph(function: Callable[..., Any], *inputs: Any, **options: Any) -> GraphModule:
    captured: list[GraphModule] = []

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        captured.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True, **options)(*inputs)
    (gm,) = captured
    return gm


def exported(function: Callable[..., Any], *inputs: Any) -> torch.export.ExportedProgram:
    class Model(torch.nn.Module):
        def forward(self, *args: Any) -> Any:
            return function(*args)

    return torch.export.export(Model(), inputs)


def value(node: Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def check_alignment(body: Body) -> None:
    """Every operand that is known looks like the placeholder it is said to be fed to."""
    for call in body.calls:
        inputs = placeholders(body.module)
        assert len(call.operands) == len(inputs)
        for placeholder, operand in zip(inputs, call.operands):
            if isinstance(operand, Node):
                inner, outer = value(placeholder), value(operand)
                assert (inner.shape, inner.dtype) == (outer.shape, outer.dtype)
                assert operand in call.node.all_input_nodes


def kinds(gm: GraphModule) -> list[str]:
    inner = bodies(gm)
    for body in inner:
        check_alignment(body)
    return [body.kind for body in inner]


# ---------------------------------------------------------------- Dynamo graphs


def test_a_checkpointed_block_sees_its_mask_through_its_caller() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(8, 8).tril()

        def block(y: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
            return (y @ y.mT).masked_fill(m == 0, -1e9).softmax(-1) @ y

        y = torch.utils.checkpoint.checkpoint(block, x, mask, use_reentrant=False)
        return torch.utils.checkpoint.checkpoint(block, y, mask, use_reentrant=False)

    gm = dynamo_graph(f, torch.randn(4, 8, 8, requires_grad=True))
    assert kinds(gm) == ["checkpoint", "checkpoint"]
    first, second = bodies(gm)
    assert first.rewritable and len(first.calls) == 1 and first.name == "wrap_body_0"
    for body in (first, second):
        masks = [o for o in body.calls[0].operands if isinstance(o, Node) and o.target == "tril"]
        assert len(masks) == 1


def test_both_branches_of_cond_get_the_same_operands() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        return torch.cond(x.sum() > 0, lambda a, b: a + b.sin(), lambda a, b: a * b, (x, y))

    gm = dynamo_graph(f, torch.randn(4, 8))
    assert kinds(gm) == ["cond", "cond"]
    true, false = bodies(gm)
    assert true.calls == false.calls and true.module is not false.module
    assert {o.name for o in true.calls[0].operands if isinstance(o, Node)} == {"l_x_", "y"}


def test_a_repeated_region_is_one_body_with_every_call() -> None:
    @torch.compiler.nested_compile_region
    def region(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x @ y).softmax(-1)

    gm = dynamo_graph(lambda x: region(region(x + 1, x), x), torch.randn(4, 4))
    (body,) = bodies(gm)
    check_alignment(body)
    assert body.kind == "invoke_subgraph" and len(body.calls) == 2
    assert [c.node.name for c in body.calls] == ["invoke_subgraph", "invoke_subgraph_1"]
    assert body.calls[0].operands != body.calls[1].operands
    common = set(body.calls[0].operands) & set(body.calls[1].operands)
    assert [o.name for o in common if isinstance(o, Node)] == ["l_x_"]


def test_loop_variables_are_unknown_and_what_a_loop_captures_is_known() -> None:
    def loop(x: torch.Tensor) -> Any:
        from torch._higher_order_ops.while_loop import while_loop

        return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y + x), (torch.tensor(0), x + 0))

    gm = dynamo_graph(loop, torch.randn(4))
    assert kinds(gm) == ["loop_condition", "loop"]
    condition, body = bodies(gm)
    assert not condition.rewritable and body.rewritable
    x = gm.graph.find_nodes(op="placeholder")[0]
    assert body.calls[0].operands == (None, None, x)

    def scanned(x: torch.Tensor) -> Any:
        from torch._higher_order_ops.scan import scan

        return scan(lambda c, y: (c + y, c + y + x[0].sum()), x[0] + 0, x, dim=0)

    gm = dynamo_graph(scanned, torch.randn(4, 8))
    assert kinds(gm) == ["scan"]
    assert bodies(gm)[0].calls[0].operands == (None, None, gm.graph.find_nodes(op="placeholder")[0])

    def mapped(x: torch.Tensor) -> Any:
        from torch._higher_order_ops.map import map as map_each

        return map_each(lambda a, b: a * 2 + b, x, x[0] + 1)

    gm = dynamo_graph(mapped, torch.randn(4, 8))
    assert kinds(gm) == ["map"]
    row, captured = bodies(gm)[0].calls[0].operands
    assert row is None and isinstance(captured, Node)


def test_custom_functions_have_a_forward_to_rewrite_and_a_backward_to_leave() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, y)
            return x @ y

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            x, y = ctx.saved_tensors
            return grad @ y.mT, x.mT @ grad

    x = torch.randn(4, 4, requires_grad=True)
    gm = dynamo_graph(Product.apply, x, x.detach() + 1)
    assert kinds(gm) == ["autograd_forward", "autograd_backward"]
    forward, backward = bodies(gm)
    assert forward.rewritable and not backward.rewritable
    assert None not in forward.calls[0].operands and set(backward.calls[0].operands) == {None}


def test_score_functions_are_never_rewritten() -> None:
    bias = torch.randn(2)
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")

    def f(q: torch.Tensor) -> torch.Tensor:
        return flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + bias[h], block_mask=block_mask)

    gm = dynamo_graph(f, torch.randn(1, 2, 128, 16))
    assert kinds(gm) == ["score", "score"]
    score, mask = bodies(gm)
    assert not score.rewritable and not mask.rewritable
    assert score.calls[0].operands[:5] == (None,) * 5
    assert isinstance(score.calls[0].operands[5], Node)  # the captured bias
    assert mask.calls[0].operands == (None,) * 4


# ---------------------------------------------------------------- exported graphs


def test_exported_autocast_and_no_grad_are_bodies_and_nest() -> None:
    def f(x: torch.Tensor) -> Any:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            y = x @ x
        with torch.autocast("cpu", torch.bfloat16):
            z = (y @ x).softmax(-1)
            with torch.autocast("cpu", enabled=False):
                w = z.float() @ x
        return y, w

    program = exported(f, torch.randn(4, 4, requires_grad=True))
    for gm in (program.graph_module, program.module()):
        assert isinstance(gm, GraphModule)
        assert sorted(kinds(gm)) == ["autocast", "grad_mode"]
        for body in bodies(gm):
            assert body.rewritable
            assert kinds(body.module) == ["autocast"]  # only direct bodies are listed: callers go down themselves
    # Names repeat from level to level: only the module that holds a body tells it from another.
    names = [b.name for b in bodies(program.graph_module)]
    assert len(set(names)) == len(names)


def test_exported_branches_take_parameters_as_operands() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda a: a * self.weight, lambda a: a + 1, (x,))

    program = torch.export.export(Model(), (torch.randn(4, 8),))
    gm = program.module()
    assert isinstance(gm, GraphModule)
    assert kinds(gm) == ["cond", "cond"]
    weights = [o for o in bodies(gm)[0].calls[0].operands if isinstance(o, Node) and o.op == "get_attr"]
    assert [w.target for w in weights] == ["weight"]
    decomposed = program.run_decompositions().graph_module
    assert kinds(decomposed) == ["cond", "cond"]


def test_a_graph_without_higher_order_operators_has_no_bodies() -> None:
    gm = exported(lambda x: x + 1, torch.randn(4)).module()
    assert isinstance(gm, GraphModule) and bodies(gm) == []
    assert all(called_bodies(n) == () for n in gm.graph.nodes)


# ---------------------------------------------------------------- operators by hand


def _call(operator: str, *arguments: Any, count: int = 1, **keywords: Any) -> list[Body]:
    """Bodies of one call, where "body" among the arguments stands for a body of ``count`` inputs."""
    inner = Graph()
    inputs = [inner.placeholder(f"a{i}") for i in range(count)]
    inner.output(tuple(inputs))
    root = torch.nn.Module()
    root.holder = torch.nn.Module()
    root.holder.body = GraphModule(torch.nn.Module(), inner)
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    known = {"body": graph.get_attr("holder.body"), "x": x, "y": y}

    def resolve(argument: Any) -> Any:
        if isinstance(argument, (list, tuple)):
            return type(argument)(map(resolve, argument))
        return known.get(argument, argument) if isinstance(argument, str) else argument

    target = getattr(torch.ops.higher_order, operator)
    arguments = tuple(map(resolve, arguments))
    graph.output(graph.call_function(target, arguments, {k: resolve(v) for k, v in keywords.items()}))
    return bodies(GraphModule(root, graph))


@pytest.mark.parametrize(
    ("operator", "arguments", "operands", "kind", "rewritable"),
    [
        ("associative_scan", ("body", ["x"], ("y",)), [None, None, "y"], "scan", False),
        ("hints_wrapper", ("body", ("x", "y"), {}, {}), ["x", "y"], "wrap", True),
        ("wrap", ("body", "x", "y"), ["x", "y"], "wrap", True),
        ("invoke_subgraph", ("body", "identifier", "x", "y"), ["x", "y"], "invoke_subgraph", True),
        ("while_loop", ("body", "body", ("x",), ("y",)), [None, "y"], "loop_condition", False),
        ("invoke_quant_packed", ("body", "x", "y"), ["x", "y"], "other", False),
        ("run_const_graph", ("body", ("x", "y")), [None, None], "other", False),
        ("wrap", ("body", "x", 3), ["x", 3], "wrap", True),
    ],
)
def test_signatures(
    operator: str, arguments: tuple[Any, ...], operands: list[Any], kind: str, rewritable: bool
) -> None:
    (body,) = _call(operator, *arguments, count=len(operands))
    assert (body.kind, body.rewritable, body.name) == (kind, rewritable, "holder.body")
    assert [o.name if isinstance(o, Node) else o for o in body.calls[0].operands] == operands


def test_an_alignment_that_does_not_add_up_proves_nothing() -> None:
    (body,) = _call("wrap", "body", "x", count=2)
    assert body.calls[0].operands == (None, None)
