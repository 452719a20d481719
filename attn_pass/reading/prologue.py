"""Reads what makes the queries and keys of a site: rotary embeddings and norms, by algebra, for the report.

An element of an operand is followed back through views, joins and pointwise operations, along one axis, the head dim,
which is cut where elements are read in different ways. What is found is a sum of products with elements of one tensor,
in one row, and with tables. Nothing here decides what is rewritten.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from torch.fx import Node

from attn_pass.graph.numbering import Numbers
from attn_pass.model.attention import Attention
from attn_pass.model.expression import Apply, Expr, Load, expression_axes, loads
from attn_pass.model.expression import walk as walk_through
from attn_pass.model.index import Axis, Index, axes, axis_index, substitute
from attn_pass.model.prologue import Norm, NotRead, Piece, Prologue, Rotation, Stage, Term
from attn_pass.reading.elements import Elements, Undecided
from attn_pass.reading.linear_forms import LinearForm, Product, linear_form, sources
from attn_pass.reading.made_of import comes_from_sums, is_parameter
from attn_pass.reading.new_rows import Operand, new_rows
from attn_pass.reading.norms import NormFactor, is_over_heads, norm_call, norm_factor, normalised
from attn_pass.reading.parts import Described
from attn_pass.reading.reader import Reader
from attn_pass.reading.rotation import ReadPiece, Surroundings, rotation_of
from attn_pass.reading.rows import Rows, rows_of
from attn_pass.reading.unreadable import Unreadable
from attn_pass.reading.views import Position

_MOST_PIECES = 64
_MOST_STAGES = 4


@dataclass(frozen=True)
class _Cut:
    """One piece of the head dim, before it is known what it is made of: elements ``start + step * n``."""

    start: int
    step: int
    axis: Axis
    at: Index
    element: Expr


@dataclass(frozen=True)
class ReadPrologue:
    """A prologue with what it makes, and the nodes of its tensors, by number, and when each is read."""

    prologue: Prologue
    operand: Operand
    nodes: tuple[Node, ...]
    read_at: tuple[int, ...]

    def __str__(self) -> str:
        return str(self.prologue)


def prologues(reader: Reader, described: Described) -> dict[str, ReadPrologue | NotRead]:
    """What makes the "query" and the "key"; without those that are plain, of which there is nothing to tell."""
    by_operand: dict[str, ReadPrologue | NotRead] = {}
    if not isinstance(described.attention.dim.size, int):
        return by_operand
    operands = operands_of(reader, described)
    walks = {name: Elements(reader) for name in operands}
    first = {name: _first_cuts(walks[name], operand) for name, operand in operands.items()}
    for name, operand in operands.items():
        cuts, walk, other = first[name], walks[name], walks["key" if name == "query" else "query"]
        if isinstance(cuts, NotRead):
            by_operand[name] = cuts
            continue
        read = _Prologue(walk, operand, frozenset(other.nodes))
        stages, why = read.stages(cuts)
        prologue = Prologue(tuple(stages), operand.cached, why)
        if why and not prologue.steps:
            by_operand[name] = NotRead(why)
        elif prologue.steps:
            by_operand[name] = ReadPrologue(prologue, operand, tuple(walk.nodes), tuple(walk.read_at))
    return by_operand


def operands_of(reader: Reader, described: Described) -> dict[str, Operand]:
    """The query, and the key: of keys that join a cache, the new ones."""
    a = described.attention
    heads, batch = _heads_and_batch(a)
    query, key = (
        Operand(form.node, tuple(substitute(i, described.split) for i in form.position), form.at, a.dim, heads, batch)
        for form in (described.written["query"], described.written["key"])
    )
    return {"query": query, "key": new_rows(reader, key) or key}


def _heads_and_batch(a: Attention) -> tuple[frozenset[Axis], frozenset[Axis]]:
    """The axes of heads and batch. A batch of 1 is no axis: its heads look like a batch."""
    one_sequence = not a.heads and len(a.output) == 4 and not a.output[0] and a.output[1] == a.batch
    heads, batch = (a.batch, ()) if one_sequence else (a.heads, a.batch)
    return frozenset(heads), frozenset(batch)


def _first_cuts(walk: Elements, operand: Operand) -> list[_Cut] | NotRead:
    try:
        return _cut(walk, operand.node, operand.position, operand.at, operand.dim)
    except Unreadable as error:
        return NotRead(error.reason)


def _cut(walk: Elements, node: Node, position: Position, at: int, dim: Axis) -> list[_Cut]:
    """The elements along ``dim``, in pieces that are read alike."""
    waiting, cuts = [(0, 1, _length(dim))], list[_Cut]()
    while waiting:
        start, step, length = waiting.pop(0)
        walk.along = axis = Axis(f"d.{start}.{step}", length)
        index = axis_index(axis) * step + start
        try:
            element = walk.element(node, tuple(substitute(i, {dim: index}) for i in position), at)
        except Undecided as undecided:
            waiting = [(start + step * s, step * t, n) for s, t, n in undecided.places] + waiting
            if len(waiting) + len(cuts) > _MOST_PIECES:
                raise Unreadable("its head dim is in too many pieces") from None
            continue
        cuts.append(_Cut(start, step, axis, index, element))
    return cuts


class _Prologue:
    """Reads the stages of one operand."""

    def __init__(self, walk: Elements, operand: Operand, of_the_other: Collection[Node]) -> None:
        self.walk, self.operand, self.of_the_other = walk, operand, of_the_other

    def _look_like_one(self, cuts: Iterable[_Cut]) -> bool:
        """Whether elements that were not read have a table of positions, an angle, or the length of a row in them."""
        positions, needed = self._positions(), axes(*self.operand.position) - {self.operand.dim}
        for part in (e for cut in cuts for e in walk_through(cut.element)):
            if isinstance(part, Apply) and part.op in ("cos", "sin"):
                return True
            if isinstance(part, Load):
                used = axes(*part.index)
                if part.source in self.walk.reductions or (used & positions and not needed <= used):
                    return True
        return False

    def stages(self, cuts: list[_Cut]) -> tuple[list[Stage], str]:
        """All stages that are read, the last first, and why the one before them is not, if it looks like one."""
        stages: list[Stage] = []
        node, position, at, dim = self.operand.node, self.operand.position, self.operand.at, self.operand.dim
        while len(stages) < _MOST_STAGES:
            try:
                stage, following = self._stage(cuts, node, position, at, dim)
                if stage is not None:
                    stages.append(stage)
                if following is None:
                    return stages, ""
                node, position, at, dim = following
                cuts = _cut(self.walk, node, position, at, dim)
            except Unreadable as error:
                return stages, error.reason if self._look_like_one(cuts) else ""
        return stages, ""

    def _stage(
        self, cuts: list[_Cut], node: Node, position: Position, at: int, dim: Axis
    ) -> tuple[Stage | None, tuple[Node, Position, int, Axis] | None]:
        walk = self.walk
        reductions = {s for cut in cuts for s in sources(cut.element) if s in walk.reductions}
        over: tuple[int, ...] = ()
        if reductions:
            bases = [normalised(walk, r) for r in sorted(reductions)]
            walk.stop, over = bases[0]
            try:
                cuts = _cut(walk, node, position, at, dim)
            finally:
                walk.stop, stopped = frozenset(), walk.stop
            if not any(walk.nodes[s] in stopped for cut in cuts for s in sources(cut.element)):
                raise Unreadable("a factor that depends on the data is no norm of it")
        read = self._read(cuts, stopped if reductions else frozenset())
        pieces, norm = self._without_norm(read, over) if reductions else (read, None)
        rotation = rotation_of(pieces, _length(dim), self._surroundings(pieces))
        return self._finished(pieces, norm, rotation, dim)

    def _finished(
        self, pieces: list[ReadPiece], norm: Norm | None, rotation: Rotation | None, dim: Axis
    ) -> tuple[Stage | None, tuple[Node, Position, int, Axis] | None]:
        """The stage, and where the next one starts: at what a norm is of."""
        walk, rows = self.walk, pieces[0].rows
        along = Axis(f"{dim.key}'", dim.size)
        stage = Stage(_terms(pieces), norm, rotation, rows.source, rows.at(along), along)
        places = _places(pieces)
        is_whole = len({p.rows.source for p in pieces}) == 1 and places == set(range(_length(dim)))
        source = walk.nodes[rows.source]
        call = norm_call(walk.reader, source)
        if not is_whole or (norm is None and call is None):
            plain = norm is None and rotation is None
            return (None if plain else stage), None
        if norm is not None or call is None:
            return stage, (source, stage.position, walk.read_at[rows.source], along)
        shape = walk.reader.shape(source)
        try:
            heads = is_over_heads(rows, call.dim, shape[call.dim], len(places))
        except Unreadable:
            return (None if rotation is None else stage), None
        time = walk.reader.order[source]
        weight, bias = (None if n is None else walk.load(n, (0,), time).source for n in (call.weight, call.bias))
        read_from = walk.load(call.input, stage.position, time)
        of_call = Norm(call.kind, call.eps, heads, weight, bias, weighted=weight is not None)
        stage = replace(stage, norm=of_call, source=read_from.source)
        return stage, (call.input, stage.position, time, along)

    # ------------------------------------------------------------ what the pieces are made of

    def _read(self, cuts: list[_Cut], stopped: frozenset[Node]) -> list[ReadPiece]:
        """The pieces as sums of products with elements of one tensor each."""
        forms: list[tuple[int, LinearForm]] = []
        for cut in cuts:
            source = self._data_of(cut, stopped)
            forms.append((source, linear_form(cut.element, source)))
        rows: dict[int, Rows] = {}
        for source in dict.fromkeys(s for s, _ in forms):
            places = [(n, cuts[n].axis, x) for n, (s, form) in enumerate(forms) if s == source for x in form]
            if not places:
                raise Unreadable("its elements are zero")
            rows[source] = rows_of(places, self.walk.reader.shape(self.walk.nodes[source]))
        return [ReadPiece(c.start, c.step, c.axis, c.at, rows[s], form) for c, (s, form) in zip(cuts, forms)]

    def _data_of(self, cut: _Cut, stopped: frozenset[Node]) -> int:
        """The tensor that the elements of a piece are of: the others are tables, weights, and what normalises."""
        walk, used = self.walk, {load for load in loads(cut.element)}
        held = sorted({load.source for load in used if walk.nodes[load.source] in stopped})
        if held:
            return held[0]
        needed = (axes(*self.operand.position) - {self.operand.dim}) | {cut.axis}
        cover: dict[int, int] = {}
        for load in used:
            cover[load.source] = max(cover.get(load.source, 0), len(axes(*load.index) & needed))
        most = [s for s, n in cover.items() if n == max(cover.values())]
        if len(most) > 1:
            most = [s for s in most if comes_from_sums(walk.reader, walk.nodes[s], ())] or most
        if len(most) > 1:
            most = [s for s in most if walk.nodes[s] not in self.of_the_other]
        if len(most) != 1:
            raise Unreadable("what is rotated cannot be told from its tables")
        return most[0]

    def _without_norm(self, pieces: list[ReadPiece], over: tuple[int, ...]) -> tuple[list[ReadPiece], Norm]:
        """The pieces without the factor that normalises their rows, and the norm."""
        walk, factors = self.walk, set[NormFactor]()
        without: list[ReadPiece] = []
        for piece in pieces:
            form: dict[Load, Product] = {}
            for load, product in piece.form.items():
                norms = {f: norm_factor(f, walk) for f in product.factors if sources(f) & walk.reductions.keys()}
                if len(norms) != 1 or None in norms.values():
                    raise Unreadable("a factor that depends on the data is no norm of it")
                factors |= {n for n in norms.values() if n is not None}
                form[load] = replace(product, factors=tuple(f for f in product.factors if f not in norms))
            without.append(replace(piece, form=form))
        rows = pieces[0].rows
        if len(factors) != 1 or len(over) != 1 or len({p.rows.source for p in pieces}) != 1:
            raise Unreadable("it is normalised over another dimension than the head dim")
        (norm,), (dim,) = factors, over
        shape = walk.reader.shape(walk.nodes[rows.source])
        heads = is_over_heads(rows, dim, shape[dim], len(_places(pieces)))
        row, of = list(rows.position), list(norm.reduction.index)
        del row[dim]
        if len(of) > len(row):
            del of[dim]
        if row != of:
            raise Unreadable("it is normalised by another row")
        weighted = any(product.factors and self._has_weight(product) for p in without for product in p.form.values())
        return without, Norm(norm.kind, norm.eps, heads, root=norm.root and norm.kind == "l2", weighted=weighted)

    def _has_weight(self, product: Product) -> bool:
        positions = self._positions()
        return any(not expression_axes(f) & positions and sources(f) for f in product.factors)

    # ------------------------------------------------------------ what surrounds them

    def _positions(self) -> frozenset[Axis]:
        return frozenset(axes(*self.operand.position)) - {self.operand.dim} - self.operand.heads - self.operand.batch

    def _surroundings(self, pieces: list[ReadPiece]) -> Surroundings:
        used, nodes = axes(*self.operand.position), self.walk.nodes
        of = frozenset(nodes[p.rows.source] for p in pieces)
        return Surroundings(
            self.operand.heads & used,
            self.operand.batch & used,
            self._positions(),
            {n: node in of or comes_from_sums(self.walk.reader, node, of) for n, node in enumerate(nodes)},
            {n: is_parameter(node) for n, node in enumerate(nodes)},
            self._same(),
        )

    def _same(self) -> dict[int, int]:
        """Of each tensor the first that is computed in the same way: tables are often made once for each use."""
        walk, numbers = self.walk, Numbers(self.walk.reader.effects, self.walk.reader.regions)
        first: dict[object, int] = {}
        same: dict[int, int] = {}
        for n, (node, at) in enumerate(zip(walk.nodes, walk.read_at)):
            written = walk.reader.effects.last_mutation(node, at)
            same[n] = first.setdefault((numbers.of(node), None if written is None else written.position), n)
        return same


def _length(axis: Axis) -> int:
    assert isinstance(axis.size, int)
    return axis.size


def _places(pieces: list[ReadPiece]) -> set[int]:
    """The places in a row of all elements that the pieces are made of."""
    return {n for k, p in enumerate(pieces) for load in p.form for n in p.rows.numbers(k, load, p.axis)}


def _terms(pieces: list[ReadPiece]) -> tuple[Piece, ...]:
    combined = []
    for number, piece in enumerate(pieces):
        terms = (
            Term(product.expression(), load, piece.rows.index(number, load, piece.axis))
            for load, product in piece.form.items()
        )
        combined.append(Piece(piece.axis, piece.at, tuple(terms)))
    return tuple(combined)
