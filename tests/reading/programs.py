"""Capturing a program in three dialects, reading it, and comparing with what the graph computes in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from attn_pass.devices.registry import decomposed_calls, settled_kernels
from attn_pass.graph.effects import Effects, is_metadata_assertion
from attn_pass.graph.regions import Region, Regions
from attn_pass.graph.values import Sizes, fake_value
from attn_pass.model.attention import Attention
from attn_pass.model.expression import Apply, Const, Dot, Expr, apply, expression_axes, index_value
from attn_pass.model.index import Poly, Symbol, axes
from attn_pass.model.reference import Evaluation, reference
from attn_pass.model.structure import row_index
from attn_pass.patterns import calls, softmax
from attn_pass.patterns.base import Site
from attn_pass.patterns.softmax_forms import is_softmax
from attn_pass.poor_cases import variants
from attn_pass.reading.reader import Reader

Function = Callable[..., Any]
DIALECTS = ("dynamo", "export", "decomposed")


# ---------------------------------------------------------------- capturing


@dataclass
class Captured:
    """A graph, and what its placeholders are fed."""

    gm: GraphModule
    values: list[Any]
    program: str  # as `engine.rewrite_graph` calls it


def capture(
    function: Function, inputs: Sequence[Any], dialect: str, dynamic: Any = None, run: Sequence[Any] | None = None
) -> Captured:
    """The graph of a function of tensors.

    ``dynamic`` is True for Dynamo, and ``dynamic_shapes`` for export: the inputs' sizes are symbols then, and the graph
    may be ``run`` with others than it was captured with.
    """
    if dialect == "dynamo":
        return _dynamo(function, inputs, bool(dynamic), run or inputs)

    class Model(torch.nn.Module):
        def forward(self, *given: Any) -> Any:
            return function(*given)

    shapes = None if dynamic is None else (tuple(dynamic),)
    program = torch.export.export(Model(), tuple(inputs), dynamic_shapes=shapes)
    if dialect == "decomposed":
        program = program.run_decompositions()
    values = program._graph_module_flat_inputs(tuple(run or inputs), {})
    return Captured(program.graph_module, list(values), "export")


def _dynamo(function: Function, inputs: Sequence[Any], dynamic: bool, again: Sequence[Any]) -> Captured:
    captured: list[Captured] = []

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Function:
        def run(*values: Any) -> Any:
            copies = [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in values]
            captured.append(Captured(gm, copies, "compile"))
            return gm(*values)

        return run

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    compiled(*inputs)
    if again is not inputs:
        compiled(*again)
        assert captured[0].gm is captured[1].gm, "compiled again for other sizes"
    return captured[-1]


# ---------------------------------------------------------------- reading


def read(captured: Captured) -> tuple[Reader, list[Site]]:
    """The sites of a graph, found as `attn_pass.engine` finds them; reading asks nothing that adds a guard (T25)."""
    graph = captured.gm.graph
    guards = _guards(captured.gm)
    effects = Effects(graph)
    outer = Region.ambient() if captured.program == "compile" else Region()
    reader = Reader(graph, Sizes(), effects, Regions(graph, outer), is_softmax=is_softmax)
    sites = [*calls.find(reader, decomposed_calls(), settled_kernels()), *softmax.find(reader)]
    assert _guards(captured.gm) == guards, "reading added guards"
    return reader, sorted(sites, key=lambda s: effects.position[s.node])


def _guards(gm: GraphModule) -> int:
    """The number of guards on symbolic sizes."""
    for node in gm.graph.nodes:
        value = fake_value(node)
        for size in value.shape if isinstance(value, torch.Tensor) else ():
            if isinstance(size, torch.SymInt):
                return len(size.node.shape_env.guards)
    return 0


class Wide(Interpreter):
    """Runs a graph in float64, whatever floating types it names, and keeps each site's sources as they are then."""

    def __init__(self, gm: GraphModule, sites: Sequence[Site]) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.sites = {s.node: s for s in sites if s.described is not None}
        self.sources: dict[Node, list[torch.Tensor]] = {}
        self.results: dict[Node, torch.Tensor] = {}

    def run_node(self, n: Node) -> Any:
        site = self.sites.get(n)
        if site is not None:
            assert site.described is not None
            self.sources[n] = [_tensor(self.env[s]) for s in site.described.nodes]
        if is_metadata_assertion(n):
            return None
        result = _wide(super().run_node(n))
        if site is not None:
            self.results[n] = result.clone()
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten._softmax.default:
            args = (args[0], args[1], False)
        return super().call_function(target, _wide(args), _wide(kwargs))

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        name = "double" if target in ("float", "half", "bfloat16") else target
        return super().call_method(name, _wide(args), _wide(kwargs))


def _tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def _wide(value: Any) -> Any:
    """The value with every floating type in it made float64."""
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    if type(value) in (tuple, list):
        return type(value)(_wide(v) for v in value)
    if isinstance(value, dict):
        return {k: _wide(v) for k, v in value.items()}
    return value


def symbol_values(captured: Captured, sizes: Sizes) -> dict[str, int]:
    """The value of every symbolic size that a placeholder shows."""
    values: dict[str, int] = {}
    nodes = [n for n in captured.gm.graph.nodes if n.op == "placeholder"]
    for node, value in zip(nodes, captured.values):
        fake = fake_value(node)
        pairs = zip(fake.shape, value.shape) if isinstance(fake, torch.Tensor) else ((fake, value),)
        for size, number in pairs:
            if not isinstance(size, (int, torch.SymInt)):
                continue
            index = sizes.index(size)
            if isinstance(index, Poly) and len(index.terms) == 1:
                ((monomial, coefficient),) = index.terms.items()
                if coefficient == 1 and len(monomial) == 1 and isinstance(monomial[0], Symbol):
                    values[monomial[0].key] = int(number)
    return values


@dataclass
class Meaning:
    """A site that was read: what the graph computes there, and what is needed to compute it from the description."""

    site: Site
    computed: torch.Tensor
    sources: list[torch.Tensor]
    sizes: dict[str, int]

    @property
    def attention(self) -> Attention:
        assert self.site.described is not None
        return self.site.described.attention

    def of(self, attention: Attention) -> torch.Tensor:
        """What a description over the same sources computes."""
        return reference(attention, self.sources, self.sizes)

    def check(self) -> None:
        """The description, its normalised parts and every variant compute what the graph computes, in float64."""
        attention = self.attention
        close(self.of(attention), self.computed, "the description")
        close(self.of(from_parts(attention)), self.computed, "scale, factors, bias and keep-condition")
        for names, variant in variants(attention, None):
            assert is_over_own_axes(variant), f"the mask of variant {names} is over axes of another form"
            close(self.of(variant), self.computed, f"variant {names}")
            close(self.of(from_parts(variant)), self.computed, f"the parts of variant {names}")
            close(self.of(from_parts(restated(variant))), self.computed, f"the mask said again in variant {names}")
            assert self.keeps_within_range(variant), f"a key that is kept lies outside of the range of variant {names}"

    def keeps_within_range(self, a: Attention) -> bool:
        """Whether every key that a row keeps lies in the range of valid keys, where there is one."""
        if a.valid is None:
            return True
        condition = a.mask.deep_condition
        assert condition is not None
        of = Evaluation([*a.batch, *a.heads, *a.rows, a.keys], self.sources, self.sizes)
        kept, key = of.expression(condition), of.grid[a.keys]
        outside = [key < of.expression(e) for e in a.valid.first] + [key > of.expression(e) for e in a.valid.last]
        assert outside, "a range without a bound"
        return not any((kept & beyond).any() for beyond in outside)


def close(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)}, the graph has {tuple(expected.shape)}"
    assert got.dtype == torch.float64
    torch.testing.assert_close(
        got, expected, rtol=1e-9, atol=1e-9, equal_nan=True, msg=lambda text: f"{what} is not the graph's: {text}"
    )


def from_parts(a: Attention) -> Attention:
    """The attention with the score put together from what the reading made of it, the mask's name included."""
    score: Expr = apply("mul", Dot(), Const(a.scale))
    for factor in a.factors:
        score = apply("div" if factor.inverse else "mul", score, factor.value)
    if a.mask.bias is not None:
        score = apply("add", score, a.mask.bias)
    if a.mask.keep is not None:
        condition = a.mask.keep.condition
        if a.is_causal:  # what the kernel's flag means for the rows as they are grouped now
            condition = apply("le", index_value(a.mask.structure.key), index_value(row_index(a.rows)))
        elif a.mask.structure.is_exact and a.mask.bias is None:
            condition = a.mask.structure.condition()
        score = Apply("where", (condition, score, Const(a.mask.keep.fill)))
    return replace(a, score=score)


def is_over_own_axes(a: Attention) -> bool:
    """Whether all that its mask says is over the axes the attention has now."""
    mask, own = a.mask, {*a.batch, *a.heads, *a.rows, a.keys}
    said = axes(mask.structure.key, mask.structure.row).union(*(expression_axes(e) for e in mask.parts()))
    if mask.computed is not None:
        said |= {x for e in (mask.computed.bias, mask.computed.condition) if e is not None for x in expression_axes(e)}
    if mask.by_distance is not None:
        said.add(mask.by_distance.row)
    return said <= own


def restated(a: Attention) -> Attention:
    """The attention whose mask is what is computed element by element in the place of the program's tensors."""
    keep, condition = a.mask.keep, a.mask.deep_condition
    again = None if keep is None or condition is None else replace(keep, condition=condition)
    return replace(a, mask=replace(a.mask, bias=a.mask.deep_bias, keep=again))


def meanings(captured: Captured) -> tuple[list[Meaning], list[Site]]:
    """Every site that was read with its values, and every site that was not."""
    reader, sites = read(captured)
    good = [s for s in sites if s.described is not None and not s.refusal]
    wide = Wide(captured.gm, good)
    with torch.no_grad():
        wide.run(*(_wide(v.clone()) if isinstance(v, torch.Tensor) else v for v in captured.values))
    sizes = symbol_values(captured, reader.sizes)
    made = [Meaning(s, wide.results[s.node], wide.sources[s.node], sizes) for s in good]
    return made, [s for s in sites if s.described is None or s.refusal]


def check(
    function: Function, inputs: Sequence[Any], dialect: str, dynamic: Any = None, run: Sequence[Any] | None = None,
    sites: int = 1,
) -> list[Meaning]:  # fmt: skip
    """Captures, reads, and checks that each of ``sites`` attentions was read as what the graph computes."""
    captured = capture(function, inputs, dialect, dynamic, run)
    good, missed = meanings(captured)
    assert not missed, f"not read: {[(s.node.name, s.refusal) for s in missed]}\n{captured.gm.graph}"
    assert len(good) == sites, f"{len(good)} sites instead of {sites}\n{captured.gm.graph}"
    for meaning in good:
        meaning.check()
    return good
