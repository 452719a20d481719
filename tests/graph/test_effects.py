"""Aliases and mutations, compared with the real effects of running the graph, in graphs of Dynamo and torch.export."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch.fx import Graph, GraphModule, Interpreter, Node

from attn_pass.graph.effects import Effects, Mutation, is_metadata_assertion, is_pure
from attn_pass.graph.regions import Region, Regions
from attn_pass.graph.subgraphs import bodies


def dynamo_graph(function: Callable[..., Any], *inputs: Any, **options: Any) -> tuple[GraphModule, list[Any]]:
    """The one graph Dynamo hands to a backend, and the inputs it would be called with."""
    captured: list[tuple[GraphModule, list[Any]]] = []

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        # Copied before the graph writes them, keeping what they share; symbolic sizes come with fake tensors.
        captured.append((gm, list(example_inputs) if options else copy.deepcopy(list(example_inputs))))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True, **options)(*inputs)
    ((gm, example_inputs),) = captured
    return gm, example_inputs


def exported(function: Callable[..., Any], *inputs: Any, decomposed: bool = False) -> torch.export.ExportedProgram:
    """The exported program of a function."""

    class Model(torch.nn.Module):
        def forward(self, *args: Any) -> Any:
            return function(*args)

    program = torch.export.export(Model(), inputs)
    return program.run_decompositions() if decomposed else program


def named(gm: GraphModule, name: str) -> Node:
    return next(n for n in gm.graph.nodes if n.name == name)


def names(mutations: Any) -> list[str]:
    return [m.node.name for m in mutations]


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for element in value:
            yield from tensors(element)


class Witness(Interpreter):
    """Runs a graph for real and checks at every node that the analysis saw each write and each shared storage."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.effects = Effects(gm.graph)
        self.writes_seen = 0
        self.has_metadata = any("example_value" in n.meta or "val" in n.meta for n in gm.graph.nodes)

    def run_node(self, n: Node) -> Any:
        before = {node: [t.clone() for t in tensors(value)] for node, value in self.env.items()}
        result = super().run_node(n)
        if n.op == "output":
            return result
        position = self.effects.position[n]
        for node, copies in before.items():
            now = list(tensors(self.env[node]))
            changed = any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(copies, now))
            if changed:
                self.writes_seen += 1
                at = [m for m in self.effects.mutations(node) if m.position == position]
                assert at, f"{n.format_node()} wrote {node} unnoticed"
                assert self.effects.last_mutation(node, position + 1) == at[-1]
                assert self.effects.mutation_between(node, position - 1, position + 1) == at[0]
                assert self.effects.mutation_between(node, position, position + 1) is None
        if not n.users and self.has_metadata and "example_value" not in n.meta and "val" not in n.meta:
            return result  # what it shares nobody sees
        mine = {t.untyped_storage()._cdata for t in tensors(result)}
        for node in before:
            if any(t.untyped_storage()._cdata in mine for t in tensors(self.env[node])):
                assert node in self.effects.aliases(n), f"{n.format_node()} shares memory with {node} unnoticed"
                assert n in self.effects.aliases(node)
        return result


def witness(gm: GraphModule, inputs: list[Any]) -> int:
    """Checks the analysis of a graph against its execution; the number of values that were seen to change."""
    run = Witness(gm)
    run.run(*inputs)
    return run.writes_seen


# ---------------------------------------------------------------- programs that write


def slice_assignment(x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(8, 8)
    mask[:, 5:] = -1.0
    mask[...] = mask + 1
    return x + mask


def out_arguments(x: torch.Tensor) -> Any:
    s = torch.empty(4, 8, 8)
    torch.matmul(x, x, out=s)
    y = s + 1
    torch.add(x, x, out=s)
    values, indices = torch.zeros(4, 8), torch.zeros(4, 8, dtype=torch.int64)
    best = torch.max(x, dim=1, out=(values, indices))[0]
    return y + s, best, values, indices


def fill_through_alias(x: torch.Tensor) -> Any:
    s = x @ x
    flat = s.view(32, 8)
    flat.masked_fill_(flat > 0, 1.0)
    return s.softmax(-1) @ x


def augmented_operators(x: torch.Tensor) -> Any:
    s = x @ x
    t = s.mT
    s += 1
    s *= x
    s -= 1
    s /= 2
    b = s > 0
    b ^= b[:1].expand(4, 8, 8)
    b |= x > 0
    b &= x > 0.1
    before = s
    s @= x
    return s, before, b, t


def key_cache(cache: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    seen = cache[:, :4]
    cache[:, 3:4] = key
    cache.select(1, 0).zero_()
    return seen @ cache.mT


def pieces(x: torch.Tensor) -> Any:
    a, b = x.split(4, -1)
    c, _ = x.chunk(2, 1)
    rows = x.unbind(0)
    largest, _ = torch.max(x, dim=0)
    a.mul_(2)
    largest.add_(1)
    return a + b, c, rows[0], largest


def inplace_flags(x: torch.Tensor) -> Any:
    a = F.relu(x, True)
    b = F.leaky_relu(x - 1, 0.1, inplace=True)
    c = F.dropout(x + 1, 0.5, True, True)
    y = x * 2
    d = torch.relu_(y - 1)
    torch.Tensor.mul_(y, 3)
    torch._foreach_add_([y, d], 1.0)
    torch.ops.aten.mul_(y, 2)
    torch.ops.aten.add_.Tensor(y, x)
    y.index_fill_(0, torch.tensor([0]), 1.0)
    y.__iadd__(x)
    return a, b, c, d, y


def dropout_that_returns_its_input(x: torch.Tensor) -> Any:
    y = x + 1
    z = F.dropout(y, 0.5, False)
    w = z.view(-1)
    y.mul_(2)
    return z, w


def writes_in_a_checkpoint(x: torch.Tensor) -> Any:
    def block(y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        y.view(-1).add_(1)
        fresh = y * 2
        fresh.mul_(3)
        return fresh @ z

    y, z = x + 1, x + 2
    out = torch.utils.checkpoint.checkpoint(block, y, z, use_reentrant=False)
    return out + y + z


WRITERS = [
    slice_assignment,
    out_arguments,
    fill_through_alias,
    augmented_operators,
    key_cache,
    pieces,
    inplace_flags,
    dropout_that_returns_its_input,
    writes_in_a_checkpoint,
]


def inputs_of(function: Callable[..., Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, 8, 8), torch.randn(4, 1, 8)] if function is key_cache else [torch.randn(4, 8, 8)]


@pytest.mark.parametrize("function", WRITERS)
@pytest.mark.parametrize("metadata", ["with metadata", "without metadata"])
def test_dynamo_graphs_do_what_the_analysis_says(function: Callable[..., Any], metadata: str) -> None:
    gm, inputs = dynamo_graph(function, *inputs_of(function))
    if metadata == "without metadata":
        for node in gm.graph.nodes:
            node.meta.pop("example_value", None)
    torch.manual_seed(0)
    assert witness(gm, inputs) > 0


@pytest.mark.parametrize("function", [f for f in WRITERS if f is not writes_in_a_checkpoint])
@pytest.mark.parametrize("metadata", ["with metadata", "without metadata"])
def test_exported_graphs_do_what_the_analysis_says(function: Callable[..., Any], metadata: str) -> None:
    gm = exported(function, *inputs_of(function)).module()
    assert isinstance(gm, GraphModule)
    if metadata == "without metadata":
        for node in gm.graph.nodes:
            node.meta.pop("val", None)
    assert witness(gm, inputs_of(function)) > 0


@pytest.mark.parametrize("function", [slice_assignment, fill_through_alias, pieces])
def test_decomposed_graphs_are_functional(function: Callable[..., Any]) -> None:
    program = exported(function, *inputs_of(function), decomposed=True)
    effects = Effects(program.graph)
    assert not any(effects.mutations(node) for node in program.graph.nodes)


# ---------------------------------------------------------------- T1: when, whole or in part


def test_a_mask_filled_by_slices_is_not_a_mask_of_zeros() -> None:
    gm, _ = dynamo_graph(slice_assignment, torch.randn(4, 8, 8))
    effects = Effects(gm.graph)
    mask, reader = named(gm, "mask"), named(gm, "add_1")
    partial, whole = effects.mutations(mask)
    assert (partial.node.name, partial.target, partial.whole) == ("setitem", mask, False)
    assert (whole.node.name, whole.target, whole.whole) == ("setitem_1", mask, True)
    assert effects.last_mutation(mask, effects.position[reader]) == whole
    assert effects.last_mutation(mask, whole.position) == partial
    assert effects.last_mutation(mask, partial.position) is None


def test_out_is_a_whole_write_of_the_empty_tensor() -> None:
    gm, _ = dynamo_graph(out_arguments, torch.randn(4, 8, 8))
    effects = Effects(gm.graph)
    s, product = named(gm, "s"), named(gm, "matmul")
    first = effects.last_mutation(s, effects.position[named(gm, "y")])
    assert first == Mutation(product, s, effects.position[product], True)
    assert effects.same_geometry(s, product)


def test_a_fill_of_a_flat_view_reaches_the_scores_it_views() -> None:
    gm, _ = dynamo_graph(fill_through_alias, torch.randn(4, 8, 8))
    effects = Effects(gm.graph)
    (fill,) = effects.mutations(named(gm, "s"))
    assert (fill.target.name, fill.whole) == ("flat", True)
    assert effects.same_geometry(fill.target, fill.node)
    assert not effects.same_geometry(fill.target, named(gm, "s"))


def test_whole_writes_of_exported_graphs() -> None:
    gm = exported(fill_through_alias, torch.randn(4, 8, 8)).graph_module
    (fill,) = Effects(gm.graph).mutations(named(gm, "matmul"))
    assert (str(fill.node.target), fill.target.name, fill.whole) == ("aten.masked_fill_.Scalar", "view", True)
    gm = exported(slice_assignment, torch.randn(4, 8, 8)).graph_module
    effects = Effects(gm.graph)
    first, second = effects.mutations(named(gm, "zeros"))
    assert first.whole and not effects.same_geometry(first.target, named(gm, "zeros"))  # the whole of a slice
    assert second.whole and effects.same_geometry(second.target, named(gm, "zeros"))
    gm = exported(lambda x: x.clone().index_fill_(0, torch.tensor([0]), 1.0), torch.randn(4)).graph_module
    (fill,) = Effects(gm.graph).mutations(named(gm, "clone"))
    assert not fill.whole


def test_augmented_matmul_makes_a_new_tensor() -> None:
    gm, _ = dynamo_graph(augmented_operators, torch.randn(4, 8, 8))
    effects = Effects(gm.graph)
    product = next(n for n in gm.graph.nodes if "imatmul" in str(n.target))
    assert effects.aliases(product) == (product,) and is_pure(product)


def test_augmented_operators_on_sizes_write_nothing() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        n += 1
        return x.new_zeros(n)

    gm, _ = dynamo_graph(f, torch.randn(4, 8), dynamic=True)
    effects = Effects(gm.graph)
    assert not any(effects.mutations(node) for node in gm.graph.nodes)


def test_pieces_of_a_split_are_one_memory_and_results_of_max_are_two() -> None:
    gm, _ = dynamo_graph(pieces, torch.randn(4, 8, 8))
    effects = Effects(gm.graph)
    a, b, x = named(gm, "a"), named(gm, "b"), named(gm, "l_x_")
    assert {a, b, x} <= set(effects.aliases(named(gm, "c")))
    assert names(effects.mutations(b)) == ["mul_"]
    assert not effects.same_geometry(a, b)
    largest = named(gm, "largest")
    assert names(effects.mutations(largest)) == ["add_"] and x not in effects.aliases(largest)


def test_a_window_excludes_both_ends() -> None:
    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, v = q + 0, v + 0
        w = (q @ k.mT).softmax(-1)
        q.mul_(2)
        return w @ v + q

    gm, _ = dynamo_graph(f, *torch.randn(3, 2, 4, 8))
    effects = Effects(gm.graph)
    q, v = named(gm, "q"), named(gm, "v")
    scores, write = named(gm, "matmul"), named(gm, "mul_")
    begin, end = effects.position[scores], effects.position[named(gm, "matmul_1")]
    assert effects.mutation_between(q, begin, end) == effects.mutations(q)[0]
    assert effects.mutation_between(q, begin, effects.position[write]) is None
    assert effects.mutation_between(q, effects.position[write], end) is None
    assert effects.mutation_between(v, begin, end) is None


# ---------------------------------------------------------------- memory of the caller


def test_a_write_to_one_input_may_reach_any_other_but_parameters_and_other_dtypes() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8))
            self.register_buffer("cache", torch.zeros(4, 8))

        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            self.cache[1:2] = x[:1]
            return self.cache * self.weight + x[ids]

    gm, inputs = dynamo_graph(Model(), torch.randn(4, 8), torch.arange(4))
    effects = Effects(gm.graph)
    by_name = {n.name: n for n in gm.graph.nodes if n.op == "placeholder"}
    cache = next(n for name, n in by_name.items() if "cache" in name)
    weight = next(n for name, n in by_name.items() if "weight" in name)
    assert names(effects.mutations(cache)) == ["setitem"]
    assert names(effects.mutations(by_name["l_x_"])) == ["setitem"]
    assert effects.mutations(by_name["l_ids_"]) == () and effects.mutations(weight) == ()
    assert named(gm, "setitem") not in effects.aliases(by_name["l_x_"])
    witness(gm, inputs)

    program = torch.export.export(Model(), (torch.randn(4, 8), torch.arange(4)))
    module = program.module()
    assert Effects(module.graph).mutations(named(module, "weight")) == ()
    weight = named(program.graph_module, "p_weight")
    assert len(Effects(program.graph).mutations(weight)) == 1
    assert Effects(program.graph, parameters=[weight]).mutations(weight) == ()


def test_a_whole_write_of_another_input_is_not_whole_for_this_one() -> None:
    gm, _ = dynamo_graph(lambda x, y: x.mul_(2) + y, torch.randn(4), torch.randn(4))
    x, y = gm.graph.find_nodes(op="placeholder")
    effects = Effects(gm.graph)
    assert [m.whole for m in effects.mutations(x)] == [True]
    assert [m.whole for m in effects.mutations(y)] == [False]


def test_inputs_that_overlap_when_traced_share_memory() -> None:
    x = torch.randn(4, 8)
    gm, inputs = dynamo_graph(lambda a, b: (a.mul_(2), b + 1)[1], x, x.view(-1))
    a, b = gm.graph.find_nodes(op="placeholder")
    assert b in Effects(gm.graph).aliases(a)
    assert witness(gm, inputs) > 0


# ---------------------------------------------------------------- writes no schema tells


def test_training_batch_norm_writes_its_statistics() -> None:
    norm = torch.nn.BatchNorm1d(8)
    gm, inputs = dynamo_graph(norm, torch.randn(4, 8))
    assert witness(gm, inputs) > 0
    gm, inputs = dynamo_graph(norm.eval(), torch.randn(4, 8))
    assert witness(gm, inputs) == 0
    assert not any(Effects(gm.graph).mutations(n) for n in gm.graph.nodes)


def test_embedding_with_a_maximal_norm_writes_its_weight() -> None:
    gm, inputs = dynamo_graph(torch.nn.Embedding(8, 8, max_norm=0.1), torch.arange(4))
    assert witness(gm, inputs) > 0
    gm, _ = dynamo_graph(torch.nn.Embedding(8, 8), torch.arange(4))
    assert not any(Effects(gm.graph).mutations(n) for n in gm.graph.nodes)


def test_functions_that_write_several_arguments() -> None:
    graph = Graph()
    x, out, scale = (graph.placeholder(name) for name in ("x", "found", "scale"))
    graph.call_function(torch._amp_foreach_non_finite_check_and_unscale_, ([x], out, scale))
    graph.output((x, out))
    gm = GraphModule(torch.nn.Module(), graph)
    assert witness(gm, [torch.tensor([1.0, float("inf")]), torch.zeros(1), torch.full((1,), 0.5)]) == 2
    assert {m.target for n in gm.graph.nodes for m in Effects(gm.graph).mutations(n)} == set(gm.graph.nodes) - {
        *(n for n in gm.graph.nodes if n.op in ("call_function", "output") or n.name == "scale")
    }


def test_custom_operators_write_what_their_schema_says() -> None:
    with torch.library._scoped_library("attn_pass_test", "FRAGMENT") as library:
        library.define("scale_first(Tensor(a!) a, Tensor b) -> Tensor")
        library.impl("scale_first", lambda a, b: a.mul_(2) + b, "CompositeExplicitAutograd")
        library.impl("scale_first", lambda a, b: torch.empty_like(b), "Meta")
        packet = torch.ops.attn_pass_test.scale_first

        def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x, y = x + 1, y + 1
            return packet(x, y) + packet.default(x, y)

        gm, inputs = dynamo_graph(f, torch.randn(4), torch.randn(4))
        assert witness(gm, inputs) == 2
        effects = Effects(gm.graph)
        assert len(effects.mutations(named(gm, "x"))) == 2 and not effects.mutations(named(gm, "y"))


@torch.compiler.allow_in_graph
def _from_nowhere(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_a_function_from_nowhere_may_write_all_it_is_given() -> None:
    gm, _ = dynamo_graph(lambda x: _from_nowhere(x * 2), torch.randn(4))
    effects = Effects(gm.graph)
    assert len(effects.mutations(named(gm, "mul"))) == 1
    assert not is_pure(next(n for n in gm.graph.nodes if n.target is _from_nowhere))


# ---------------------------------------------------------------- bodies of higher-order operators


def test_a_write_in_a_checkpointed_body_is_a_write_of_the_operand() -> None:
    gm, _ = dynamo_graph(writes_in_a_checkpoint, torch.randn(4, 8, 8))
    effects = Effects(gm.graph)
    call = next(n for n in gm.graph.nodes if "checkpoint" in n.name)
    (mutation,) = effects.mutations(named(gm, "y"))
    assert (mutation.node, mutation.target.name, mutation.whole) == (call, "y", False)
    assert effects.mutations(named(gm, "z")) == ()
    assert not is_pure(call)


def test_a_write_in_a_repeated_region_is_a_write_at_each_call() -> None:
    @torch.compiler.nested_compile_region
    def region(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x @ y

    def f(x: torch.Tensor) -> torch.Tensor:
        z = x + 1
        return region(z, x) + region(z, x)

    gm, _ = dynamo_graph(f, torch.randn(4, 4))
    (body,) = bodies(gm)
    effects = Effects(gm.graph)
    assert [m.node for m in effects.mutations(named(gm, "z"))] == [call.node for call in body.calls]


def test_a_write_in_an_exported_autocast_body_is_a_write_of_the_operand() -> None:
    def f(x: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ x
            x.mul_(2)
            flat = x.view(-1)
        return y, flat + 1

    program = exported(f, torch.randn(4, 8, 8))
    gm = program.graph_module
    (call,) = (n for n in gm.graph.nodes if str(n.target) == "wrap_with_autocast")
    effects = Effects(gm.graph)
    x = gm.graph.find_nodes(op="placeholder")[0]
    assert [m.node for m in effects.mutations(x)] == [call]
    view = next(n for n in call.users if n in effects.aliases(x))  # the body returns a view of what it wrote
    assert view.meta["val"].dim() == 1


def test_two_levels_of_bodies() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            y.add_(1)
            z = y @ x
        return z + y

    gm = exported(f, torch.randn(4, 4)).graph_module
    (outer,) = (b for b in bodies(gm) if b.kind == "grad_mode")
    assert [b.kind for b in bodies(outer.module)] == ["autocast"]
    assert [m.node for m in Effects(gm.graph).mutations(named(gm, "add"))] == [outer.calls[0].node]


def _call_of_an_operator(name: str, body: GraphModule | None) -> tuple[Graph, Node]:
    graph = Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.neg, (x,))
    root = torch.nn.Module()
    arguments: tuple[Any, ...] = (y,)
    if body is not None:
        root.body = body
        arguments = (graph.get_attr("body"), y)
    result = graph.call_function(getattr(torch.ops.higher_order, name), arguments)
    graph.output(result)
    GraphModule(root, graph)
    return graph, result


def test_unknown_operators_write_all_operands_unless_their_bodies_write_nothing() -> None:
    reading, writing = torch.fx.symbolic_trace(lambda a: a * 2), torch.fx.symbolic_trace(lambda a: a.mul_(2))
    for name, body, expected in (
        ("run_const_graph", reading, 0),
        ("run_const_graph", writing, 1),
        ("triton_kernel_wrapper_mutation", None, 1),
        ("triton_kernel_wrapper_functional", None, 0),
    ):
        graph, _ = _call_of_an_operator(name, body)
        gm = graph.owning_module
        assert gm is not None
        mutations = Effects(gm.graph).mutations(named(gm, "neg"))
        assert len(mutations) == expected, name


# ---------------------------------------------------------------- storage that changes hands


def test_set_is_a_write_and_merges_what_it_touches() -> None:
    def f(x: torch.Tensor) -> Any:
        y = x + 1
        view = y[0]
        y.set_(x)
        y.mul_(2)
        view.add_(1)
        return y, view

    gm, inputs = dynamo_graph(f, torch.randn(4, 8))
    assert witness(gm, inputs) > 0
    effects = Effects(gm.graph)
    y = named(gm, "y")
    assert effects.geometry_changes_after(y, effects.position[y])


def test_data_assignment_of_an_input() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.data = y
        return x + 1

    gm, inputs = dynamo_graph(f, torch.randn(4), torch.randn(4))
    assert witness(gm, inputs) > 0


def test_in_place_views_leave_metadata_of_another_time() -> None:
    def f(x: torch.Tensor) -> Any:
        y = x + 1
        z = y * 2
        y.unsqueeze_(0)
        return y * 2, z

    gm, _ = dynamo_graph(f, torch.randn(4, 8))
    effects = Effects(gm.graph)
    y, view, z = named(gm, "y"), named(gm, "unsqueeze_"), named(gm, "z")
    assert y.meta["example_value"].shape == (1, 4, 8)  # although y is (4, 8) where it is made
    assert effects.geometry_changes_after(y, effects.position[z])
    assert not effects.geometry_changes_after(y, effects.position[view] + 1)
    assert not effects.geometry_changes_after(z, 0)
    assert not effects.same_geometry(y, view)


# ---------------------------------------------------------------- dialect of functorch


def test_writes_through_vmap_reach_the_tensor_outside() -> None:
    gm, _ = dynamo_graph(lambda x: torch.vmap(lambda row: row.mul_(2))(x), torch.randn(4, 8))
    x = gm.graph.find_nodes(op="placeholder")[0]
    assert names(Effects(gm.graph).mutations(x)) == [n.name for n in gm.graph.nodes if n.target == "mul_"]
    gm, _ = dynamo_graph(lambda x: torch.vmap(lambda row: row.mT.contiguous().mul_(2))(x), torch.randn(4, 8, 3))
    x = gm.graph.find_nodes(op="placeholder")[0]
    assert Effects(gm.graph).mutations(x) == ()


# ---------------------------------------------------------------- is_internal, same_geometry


def test_scores_written_in_place_are_internal_until_someone_else_holds_them() -> None:
    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        s = q @ k.mT
        s.mul_(0.5)
        s.masked_fill_(s > 1, -1.0)
        return s.softmax(-1) @ v

    gm, _ = dynamo_graph(f, *torch.randn(3, 2, 4, 8))
    effects = Effects(gm.graph)
    s = named(gm, "s")
    site = set(effects.aliases(s))
    assert {n.name for n in site} == {"s", "mul_", "masked_fill_"}
    assert effects.is_internal(s, site)
    assert not effects.is_internal(s, site - {named(gm, "mul_")})
    q = gm.graph.find_nodes(op="placeholder")[0]
    assert not effects.is_internal(q, set(gm.graph.nodes))
    output = gm.graph.find_nodes(op="output")[0]
    result = named(gm, "matmul_1")
    assert not effects.is_internal(result, {result}) and effects.is_internal(result, {result, output})


def test_geometry_with_symbolic_sizes_adds_no_guard() -> None:
    def f(x: torch.Tensor) -> Any:
        a, b, c, g = x.mT, x.transpose(1, 2), x.transpose(1, 2)[1:], x.mT[:1]
        d, e = x.view(x.shape[0] * x.shape[1], -1), x.flatten(0, 1)
        x.mul_(2)
        return a, b, c, d, e, g, torch.view_as_real(torch.view_as_complex(x)), x.conj(), x.view(torch.int32)

    gm, _ = dynamo_graph(f, torch.randn(4, 6, 2), dynamic=True)
    size = next(s for n in gm.graph.nodes for s in _sizes(n) if isinstance(s, torch.SymInt))
    guards = len(size.node.shape_env.guards)
    effects = Effects(gm.graph)
    a, b, c, d, e, g = (named(gm, name) for name in "abcdeg")
    assert effects.same_geometry(a, b) and effects.same_geometry(d, e)
    assert not any(effects.same_geometry(a, other) for other in (c, d, g))
    integers = next(n for n in gm.graph.nodes if n.target == "view" and n.args[-1] is torch.int32)
    assert not effects.same_geometry(integers, named(gm, "l_x_"))
    for node in gm.graph.nodes:
        effects.mutations(node), effects.aliases(node), effects.is_internal(node, set())
        effects.same_geometry(node, named(gm, "l_x_"))
    assert len(size.node.shape_env.guards) == guards


def _sizes(node: Node) -> list[Any]:
    value = node.meta.get("example_value")
    return list(value.shape) if isinstance(value, torch.Tensor) else [value]


def test_a_conjugate_view_does_not_see_the_same_elements() -> None:
    def f(x: torch.Tensor) -> Any:
        return x.view(4), x.conj()

    gm, _ = dynamo_graph(f, torch.randn(4, dtype=torch.complex64))
    view, conjugate = named(gm, "view"), named(gm, "conj")
    effects = Effects(gm.graph)
    assert conjugate in effects.aliases(view) and not effects.same_geometry(view, conjugate)


# ---------------------------------------------------------------- T3, T4: what may be erased


def test_erasing_what_is_pure_and_unused_changes_nothing() -> None:
    """Unlike ``Graph.eliminate_dead_code``, which deletes ``mul_`` and ``add(out=)`` from such a graph."""

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        y.mul_(2)
        s = torch.empty_like(x)
        torch.add(x, y, out=s)
        x.sin()
        F.dropout(x, 0.1)
        torch._assert_async((x > -100).all())
        torch.rand(3)
        return y + s

    gm, inputs = dynamo_graph(f, torch.randn(4))
    # Dynamo drops unused calls itself, so they are put in here.
    output = gm.graph.find_nodes(op="output")[0]
    with gm.graph.inserting_before(output):
        x = gm.graph.find_nodes(op="placeholder")[0]
        gm.graph.call_function(torch.sin, (x,))
        gm.graph.call_function(F.dropout, (x, 0.1))
        gm.graph.call_method("view", (x, -1))
        gm.graph.call_function(torch.rand, (3,))
        gm.graph.call_function(F.relu, (named(gm, "y"), True))
    gm.recompile()
    expected = gm(*inputs)[0]
    kept = []
    for node in reversed(gm.graph.nodes):
        if not node.users and is_pure(node):
            gm.graph.erase_node(node)
        elif not node.users:
            kept.append(node.name)
    gm.recompile()
    assert torch.equal(gm(*inputs)[0], expected)
    assert {"mul_", "add_1", "_assert_async", "relu"} <= set(kept) and any(name.startswith("rand") for name in kept)
    assert not {"sin", "dropout", "view"} & set(kept)


def test_states_checks_and_bodies_that_check_are_not_pure() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        torch._check(x.sum().item() > -1e9)
        with torch.no_grad():
            y = torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (x,))
        with torch.autocast("cpu", torch.bfloat16):
            return y @ y

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        gm, _ = dynamo_graph(f, torch.randn(4, 4))
    impure = {n.name for n in gm.graph.nodes if n.op == "call_function" and not is_pure(n)}
    assert {"_set_grad_enabled", "_enter_autocast", "_exit_autocast"} <= impure
    assert any("assert" in name for name in impure)
    assert is_pure(named(gm, "matmul"))

    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(lambda y: y.softmax(-1) @ y, x, use_reentrant=False)

    gm, _ = dynamo_graph(checkpointed, torch.randn(4, 4, requires_grad=True))
    call = named(gm, "tag_activation_checkpoint")
    assert is_pure(call)
    (body,) = bodies(gm)
    with body.module.graph.inserting_before(body.module.graph.find_nodes(op="output")[0]):
        body.module.graph.call_function(torch._assert_async, (body.module.graph.find_nodes(op="placeholder")[0],))
    assert not is_pure(call)


def test_assertions_on_metadata_are_recognised_in_every_dialect() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x @ x).softmax(-1, dtype=torch.float32).to(torch.bfloat16) @ x

    for decomposed in (False, True):
        graph = exported(f, torch.randn(4, 8, 8, dtype=torch.bfloat16), decomposed=decomposed).graph
        softmax = next(n for n in graph.nodes if "softmax" in n.name)
        assertions = [n for n in softmax.users if is_metadata_assertion(n)]
        assert assertions and not any(is_pure(n) for n in assertions)
        assert not any(is_metadata_assertion(n) for n in graph.nodes if n not in assertions)
    gm, _ = dynamo_graph(lambda x: (torch._assert_tensor_metadata(x, dtype=torch.float32), x + 1)[1], torch.randn(4))
    assert sum(map(is_metadata_assertion, gm.graph.nodes)) == 1


def test_guards_of_an_exported_module_read_only() -> None:
    gm = exported(lambda x: x.mul_(2) + 1, torch.randn(4)).module()
    guards = next(n for n in gm.graph.nodes if n.op == "call_module")
    effects = Effects(gm.graph)
    assert names(effects.mutations(gm.graph.find_nodes(op="placeholder")[0])) == ["mul_"]
    assert not is_pure(guards)


# ---------------------------------------------------------------- cost


def test_five_thousand_nodes_take_milliseconds() -> None:
    def layer(x: torch.Tensor, w: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        q, k, v = (F.linear(x, w).view(2, 8, 4, 4).transpose(1, 2) for _ in range(3))
        cache[0] = k
        with torch.no_grad():
            scale = q.abs()
        s = F.dropout((q @ k.mT * 0.5).softmax(-1), 0.0, training=False)
        y = (s @ v * scale).transpose(1, 2).reshape(2, 8, 16)
        y += 1
        return F.gelu(F.linear(y, w)) + x

    def f(x: torch.Tensor, w: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        for _ in range(30):
            x = layer(x, w, cache)
        return x

    gm, _ = dynamo_graph(f, torch.randn(2, 8, 16), torch.randn(16, 16), torch.zeros(2, 2, 4, 8, 4))
    count = len(gm.graph.nodes)
    assert count > 750

    def once() -> float:
        begin = time.process_time()
        Effects(gm.graph)
        Regions(gm.graph, Region.ambient())
        return time.process_time() - begin

    # 10 to 20 ms of processor time for 5,000 nodes; the bound leaves room for a slower machine.
    assert min(once() for _ in range(10)) * 5000 / count < 0.06
