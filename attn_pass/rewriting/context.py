"""`GraphContext`: a graph and all that is known of it, with the graphs around it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.fx import GraphModule, Node

from attn_pass.compat import context_parallel_is_active
from attn_pass.devices.registry import of_type
from attn_pass.graph import allowed, vmapped
from attn_pass.graph.cut import Around, Level
from attn_pass.graph.detached import restore_gradients
from attn_pass.graph.edit import SizeNodes
from attn_pass.graph.effects import Effects
from attn_pass.graph.expand import Expansion
from attn_pass.graph.regions import Region, Regions
from attn_pass.graph.subgraphs import Body, placeholders
from attn_pass.graph.values import CONSTANTS, KNOWN_TENSORS, tensor_value
from attn_pass.model.index import Index, product
from attn_pass.patterns import by_slices, composite, cosine, flex_calls, joined_scores, separated_weights, summed_pieces
from attn_pass.patterns.opaque import Opaque
from attn_pass.patterns.softmax_forms import is_softmax
from attn_pass.reading.parts import Described
from attn_pass.reading.reader import Caller, Reader
from attn_pass.report.torch_logging import observed
from attn_pass.rewriting.run import Run


@dataclass(frozen=True)
class Surroundings:
    """Where a graph stands: the region it runs under, how often it runs, and the graphs around it."""

    region: Region
    count: int = 1
    is_body: bool = False
    is_checkpoint: bool = False
    caller: Caller | None = None  # of a body that is called once
    levels: tuple[Level, ...] = ()  # the graphs around it
    bound: Mapping[Node, Node] = field(default_factory=dict)  # what is passed to its placeholders, and to theirs


class _OnTrial:
    """Calls that are one node, torch's own and the user's, in pieces until it is known which of them stay so."""

    def __init__(self, run: Run, gm: GraphModule, around: Surroundings) -> None:
        self.opaque: list[Opaque] = []
        self.pieces: list[allowed.Settles] = []
        of_graph = (gm, run.sizes, around.region, around.is_body)
        try:
            with _observed(run, gm, around):
                self.pieces += allowed.put_in_pieces(*of_graph)
                self.pieces += by_slices.put_together(*of_graph)
                self.pieces += vmapped.without_vmap(*of_graph)
                self.pieces += cosine.take_apart(*of_graph, knows_gradients=run.program == "compile")
                self.opaque = composite.take_apart(*of_graph, _encoder_kernel_calls_sdpa)
                self.opaque += flex_calls.take_apart(*of_graph)
        except Exception as error:
            run.complain(None, "calls of torch's modules could not be taken apart", error)

    def take_back(self) -> None:
        """Restores the calls whose pieces were not used."""
        for opaque in self.opaque:
            opaque.take_back()
        allowed.settle(self.pieces)


class GraphContext:
    """One graph: its calls expanded on trial, effects, regions, the reader, and which node replaced which."""

    def __init__(self, run: Run, gm: GraphModule, around: Surroundings) -> None:
        self.run, self.gm, self.around, self.sizes = run, gm, around, run.sizes
        self._on_trial = _OnTrial(run, gm, around)
        try:
            self.effects = Effects(gm.graph)
            self.regions = Regions(gm.graph, around.region)
            self.detached = restore_gradients(gm.graph, self.regions)
            self.reader = self._reader()
            self.joined = joined_scores.join_scores(gm.graph, self.reader)
            self.summed = summed_pieces.join_sums(gm.graph, self.reader)
            self._on_trial.pieces += [*self.summed, *separated_weights.separate(gm.graph, self.reader)]
            self.context_parallel = context_parallel_is_active()
        except BaseException:
            self._on_trial.take_back()
            raise
        self.replaced: dict[Node, Node] = {}
        self.masks: Counter[frozenset[Node]] = Counter()

    def _reader(self) -> Reader:
        expansions = [o.expansion for o in self.opaque if o.expansion is not None]
        return Reader(
            self.gm.graph,
            self.sizes,
            self.effects,
            self.regions,
            is_softmax=is_softmax,
            knows_gradients=self.run.program == "compile",
            constants=_by_name(self.gm, CONSTANTS),
            known=_by_name(self.gm, KNOWN_TENSORS),
            needed=frozenset(new for e in expansions for _, new in e.results),
            caller=self.around.caller,
        )

    @property
    def opaque(self) -> list[Opaque]:
        """The calls of torch's modules, in pieces."""
        return self._on_trial.opaque

    @property
    def pieces(self) -> list[allowed.Settles]:
        """What else stands in the place of something, on trial."""
        return self._on_trial.pieces

    def take_back(self) -> None:
        """Restores the calls whose pieces were not used."""
        self._on_trial.take_back()

    def observed(self) -> AbstractContextManager[None]:
        """Around changes of the graph."""
        return _observed(self.run, self.gm, self.around)

    @cached_property
    def size_nodes(self) -> SizeNodes:
        """The nodes that hold sizes, looked for when the first site is emitted."""
        passing = {n for o in self.opaque for n in o.nodes} | {n for p in self.pieces for n in p.idle}
        return SizeNodes(self.gm, self.sizes, passing)

    @property
    def tensors(self) -> dict[Node, torch.Tensor]:
        """Those that keep the values they have."""
        return {node: tensor for node, (_, tensor) in self.reader.known.items()}

    @property
    def values(self) -> dict[Node, torch.Tensor]:
        """Every tensor whose values are known."""
        return {**self.reader.constants, **self.tensors}

    def level(self, node: Node) -> tuple[Level, ...]:
        """This graph at the time of a node, and the graphs around it."""
        here = Level(self.gm.graph, self.effects, self.effects.position[node], self.regions)
        return (here, *self.around.levels)

    def around_node(self, node: Node) -> Around:
        """What there is to cut a part of the program from, at the time of a node."""
        return Around(self.level(node), self.around.bound)

    def of_body(self, body: Body, region: Region) -> Surroundings:
        """Where a body of this graph stands, which runs under that region wherever it is called."""
        around = self.around
        # Called where gradients are off, a checkpoint marks nothing for recomputing.
        is_checkpoint = around.is_checkpoint or (body.kind == "checkpoint" and region.grad_enabled is not False)
        inner = Surroundings(region, around.count * len(body.calls), True, is_checkpoint)
        if len(body.calls) != 1:
            return inner
        (call,) = body.calls
        passed = {p: a for p, a in zip(placeholders(body.module), call.operands) if isinstance(a, Node)}
        return Surroundings(
            region,
            inner.count,
            True,
            is_checkpoint,
            Caller(self.reader, passed, self.effects.position[call.node]),
            self.level(call.node),
            {**around.bound, **passed},
        )

    def now(self, node: Node) -> Node:
        """What stands in the place of a node by now."""
        return self.replaced.get(node, node)

    def note_masks(self, every: Iterable[Described]) -> None:
        """Counts the attentions of the graph by the tensors that their masks read."""
        self.masks.update(described.read_by_mask() for described in every)

    def put_in_place(self, new: Node, old: Node, region: Region) -> None:
        """Records that a node replaced another."""
        self.replaced[old] = new
        self.effects.put_in_place_of(new, old)
        self.regions.add(new, region)

    def keep(self, expansion: Expansion) -> None:
        """Has a call stay in pieces."""
        self.replaced.update(expansion.keep(self.replaced))

    def bytes_of(self, node: Node, hint: Callable[[Index], int]) -> int:
        """The bytes of a node's tensor, 0 for anything else."""
        value = tensor_value(node)
        return 0 if value is None else hint(product(self.sizes.shape(value))) * value.element_size()


def _encoder_kernel_calls_sdpa(device: torch.device) -> bool:
    return of_type(device.type).encoder_kernel_calls_sdpa


def _observed(run: Run, gm: GraphModule, around: Surroundings) -> AbstractContextManager[None]:
    """Around changes of a graph. In Inductor's hook a root graph is observed already."""
    return observed(gm) if around.is_body or run.runner != "hook" else nullcontext()


def _by_name(gm: GraphModule, key: str) -> dict[Node, Any]:
    """The graph's own metadata about its nodes, by name."""
    named = gm.meta.get(key, {})
    return {n: named[n.name] for n in gm.graph.nodes if n.name in named}
