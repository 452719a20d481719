"""What an element of an operand is made of, through pointwise operations, views, joins and complex numbers.

`Reader.element` reads masks: it ends where numbers are rounded or scattered, and registers what it ends at as a source
of the attention. This walk is for the report alone: it passes casts, and keeps its own list of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import gcd
from typing import Any

import torch
from torch.fx import Node

from attn_pass.graph.effects import Mutation
from attn_pass.graph.values import fake_value, tensor_value
from attn_pass.model.expression import Apply, Const, Expr, Load
from attn_pass.model.index import Axis, Index, Quotient, Remainder, atoms, divide, is_less, is_nonnegative, terms_of
from attn_pass.reading.partial_writes import written_part
from attn_pass.reading.prologue_calls import prologue_call
from attn_pass.reading.reader import Reader
from attn_pass.reading.unreadable import Unreadable
from attn_pass.reading.views import VIEWS, Position, broadcast_position, view_of
from attn_pass.reading.vocabulary import Call, one_or_many

_FUNCTIONS = ("cos", "sin", "sqrt", "rsqrt", "reciprocal")
_REDUCTIONS = ("mean", "sum", "vector_norm", "norm")
_COPIES = (torch.ops.aten.copy_.default, "copy_")
_MOST_STEPS, _DEEPEST = 3000, 120
_MOST_STACKED = 8
_ZERO = Const(0.0)
Parts = tuple[Expr, Expr]
Place = tuple[int, int, int]  # start, step and length along an axis


class Undecided(Exception):
    """The element is read in another way at each of these places of the axis along which it is asked for."""

    def __init__(self, places: tuple[Place, ...]) -> None:
        super().__init__()
        self.places = places


class Elements:
    """Reads elements of one operand along one axis, ``along``; ``nodes`` are the tensors they are made of.

    ``stop`` are nodes that are taken as they are. ``reductions`` are, by number, the tensors that are means or norms.
    """

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.nodes: list[Node] = []
        self.read_at: list[int] = []
        self.reductions: dict[int, tuple[Node, Call]] = {}
        self.stop: frozenset[Node] = frozenset()
        self.along: Axis | None = None
        self._numbers: dict[tuple[Node, int | None], int] = {}
        self._steps = self._deep = 0

    # ------------------------------------------------------------ real numbers

    def element(self, node: Node, position: Position, at: int) -> Expr:
        """The element of a tensor at a position; raises `Undecided`, and `Unreadable` for what is too long."""
        with self._step():
            return self._element(node, position, at)

    @contextmanager
    def _step(self) -> Iterator[None]:
        """One step further back. Raises `Unreadable` after too many."""
        self._steps, self._deep = self._steps + 1, self._deep + 1
        try:
            if self._steps > _MOST_STEPS or self._deep > _DEEPEST:
                raise Unreadable("what it is made of is too long to be read")
            yield
        finally:
            self._deep -= 1

    def _element(self, node: Node, position: Position, at: int) -> Expr:
        value = tensor_value(node)
        if value is None or value.is_complex():
            raise Unreadable("it is made of something that is no tensor of real numbers")
        if node in self.stop or not value.is_floating_point():
            return self.load(node, position, at)
        reader = self.reader
        defined, call, mutation = self._defined(node, at)
        if call is None:
            written = None if mutation is None else self._written(node, position, mutation)
            return self.load(node, position, at) if written is None else written
        time = reader.order[defined]
        if call.op in VIEWS:
            part = self._part_of_complex(call)
            if part is not None:
                return self.parts(call["input"], position, time)[part]
            source = view_of(defined, call, position, reader.sizes)
            if source is None:
                return self.load(node, position, at)
            return self.element(*source, at if reader.is_alias(defined, call) else time)
        rule = _RULES.get(call.op)
        read = None if rule is None else rule(self, defined, call, position, time)
        return self.load(node, position, at) if read is None else read

    def load(self, node: Node, position: Position, at: int) -> Load:
        """An element as it lies in a tensor, by the number the tensor has here."""
        for index in position:
            self._settle(index)
        mutation = self.reader.effects.last_mutation(node, at)
        key = (node, None if mutation is None else mutation.position)
        if key not in self._numbers:
            self._numbers[key] = len(self.nodes)
            self.nodes.append(node)
            self.read_at.append(at)
            call = self.reader.call(node) or prologue_call(node)
            if call is not None and call.op in _REDUCTIONS:
                self.reductions[self._numbers[key]] = (node, call)
        return Load(self._numbers[key], position)

    def _defined(self, node: Node, at: int) -> tuple[Node, Call | None, Mutation | None]:
        """What gave a node its elements, and the write that did where it is not known what it is."""
        mutation = self.reader.effects.last_mutation(node, at)
        defined, call = self.reader.definition(node, at)
        if call is None and mutation is None and not self.reader.is_reshaped_in_place(node):
            call = prologue_call(node)
        return defined, call, mutation if call is None else None

    def operand(self, value: Any, position: Position, at: int) -> Expr:
        """The element of an operand: a number, or a tensor, which may be broadcast."""
        if isinstance(value, (bool, int, float)):
            return Const(float(value))
        if isinstance(value, Node):
            fake = fake_value(value)
            if isinstance(fake, (bool, int, float)):
                return Const(float(fake))
            if isinstance(fake, torch.Tensor):
                return self.element(value, broadcast_position(position, self.reader.sizes.shape(fake)), at)
            if isinstance(fake, (torch.SymInt, torch.SymFloat)):
                return self.load(value, (), at)
        raise Unreadable("it is made of something that is no tensor of real numbers")

    def _written(self, node: Node, position: Position, mutation: Mutation) -> Expr | None:
        """Of what was written to a slice: the value where the position is in it, else what was there before."""
        part = written_part(self.reader, node, mutation, _COPIES)
        if part is None or part.masks or part.relations or part.is_result:
            return None
        within: dict[int, Index] = dict(enumerate(position))
        for dim, bounds in enumerate(part.bounds):
            if bounds is None:
                continue
            start, length = bounds
            inside = position[dim] - start
            if is_less(inside, 0) or is_nonnegative(inside - length):
                return self.element(node, position, mutation.position)
            if not (is_nonnegative(inside) and is_less(inside, length)):
                self._split(position[dim], (start, start + length))
                return None
            within[dim] = inside
        at_part = tuple(0 if dim < 0 else within[dim] for dim in part.dims)
        return self.operand(part.value, at_part, self.reader.order[mutation.node])

    # ------------------------------------------------------------ complex numbers

    def parts(self, node: Node, position: Position, at: int) -> Parts:
        """The real and the imaginary part of an element."""
        with self._step():
            return self._parts(node, position, at)

    def _parts(self, node: Node, position: Position, at: int) -> Parts:
        defined, call, _ = self._defined(node, at)
        value = tensor_value(node)
        if value is None or not value.is_complex():
            return self.operand(node, position, at), Const(0.0)
        if call is not None:
            time = self.reader.order[defined]
            if call.op in VIEWS and call.op not in ("mT", "getattr"):
                source = view_of(defined, call, position, self.reader.sizes, of_complex=True)
                if source is not None:
                    return self.parts(*source, at if self.reader.is_alias(defined, call) else time)
            rule = _COMPLEX_RULES.get(call.op)
            read = None if rule is None else rule(self, call, position, time)
            if read is not None:
                return read
        return self.load(node, (*position, 0), at), self.load(node, (*position, 1), at)

    def parts_of_operand(self, value: Any, position: Position, at: int) -> Parts:
        """The parts of an operand, which may be real, a number, or broadcast."""
        fake = tensor_value(value)
        if fake is None or not isinstance(value, Node) or not fake.is_complex():
            return self.operand(value, position, at), Const(0.0)
        return self.parts(value, broadcast_position(position, self.reader.sizes.shape(fake)), at)

    def _part_of_complex(self, call: Call) -> int | None:
        """Which part an attribute of a complex tensor is."""
        fake = tensor_value(call.args.get("input"))
        if call.op != "getattr" or fake is None or not fake.is_complex():
            return None
        return {"real": 0, "imag": 1}.get(call["name"])

    # ------------------------------------------------------------ along the axis

    def number(self, index: Index) -> int | None:
        """An index as a number; raises `Undecided` where it becomes one at parts of the axis."""
        if isinstance(index, int):
            return index
        self._settle(index)
        affine = self._affine(index)
        if affine is not None and self.along is not None and self.along.size <= _MOST_STACKED:  # type: ignore[operator]
            raise Undecided(tuple((n, 1, 1) for n in range(self.along.size)))  # type: ignore[arg-type]
        return None

    def _affine(self, index: Index) -> tuple[int, int] | None:
        """``(c, k)`` of an index ``c * along + k``; None for any other, and for what does not depend on the axis."""
        factor, rest = 0, 0
        for monomial, coefficient in terms_of(index):
            if monomial == ():
                rest = coefficient
            elif len(monomial) == 1 and monomial[0] == self.along:
                factor = coefficient
            else:
                return None
        return (factor, rest) if factor and self.along is not None and isinstance(self.along.size, int) else None

    def _settle(self, index: Index) -> None:
        """Raises `Undecided` where an index has a division of the axis that parts of it would not have."""
        for atom in atoms(index):
            if not isinstance(atom, (Quotient, Remainder)) or not isinstance(atom.divisor, int):
                continue
            affine = self._affine(atom.value)
            if affine is None:
                continue
            (factor, rest), size = affine, self.along.size  # type: ignore[union-attr]
            assert isinstance(size, int)
            period = atom.divisor // gcd(factor, atom.divisor)
            quotients = [(factor * n + rest) // atom.divisor for n in range(size)]
            if period <= len(set(quotients)):
                raise Undecided(tuple((n, period, (size - n + period - 1) // period) for n in range(min(period, size))))
            starts = [n for n in range(size) if n == 0 or quotients[n] != quotients[n - 1]]
            raise Undecided(tuple((a, 1, b - a) for a, b in zip(starts, (*starts[1:], size))))

    def _split(self, index: Index, bounds: tuple[Index, ...]) -> None:
        """Raises `Undecided` with the parts of the axis along which an index lies between the bounds."""
        self._settle(index)
        affine = self._affine(index)
        if affine is None or not all(isinstance(b, int) for b in bounds):
            return
        (factor, rest), size = affine, self.along.size  # type: ignore[union-attr]
        assert isinstance(size, int)
        sides = [tuple(factor * n + rest >= b for b in bounds) for n in range(size)]  # type: ignore[operator]
        starts = [n for n in range(size) if n == 0 or sides[n] != sides[n - 1]]
        if len(starts) > 1:
            raise Undecided(tuple((a, 1, b - a) for a, b in zip(starts, (*starts[1:], size))))

    def joined(self, call: Call, position: Position) -> tuple[Node, Position] | None:
        """Which of the tensors of a ``cat`` a position is in, and where; None where that is open for another axis."""
        pieces, dim = call["input"], call["dim"]
        if not isinstance(pieces, (list, tuple)) or not isinstance(dim, int):
            return None
        dim %= len(position)
        start: Index = 0
        bounds: list[Index] = []
        for piece in pieces:
            fake = tensor_value(piece)
            if fake is None:
                return None
            if fake.dim() != len(position):  # ``torch.tensor([])``, which may be joined with anything
                continue
            size = self.reader.shape(piece)[dim]
            inside = position[dim] - start
            if is_nonnegative(inside) and is_less(inside, size):
                return piece, (*position[:dim], inside, *position[dim + 1 :])
            start = start + size
            bounds.append(start)
        self._split(position[dim], tuple(bounds))
        return None


_Rule = Callable[[Elements, Node, Call, Position, int], Expr | None]
_ComplexRule = Callable[[Elements, Call, Position, int], Parts | None]


def _same(walk: Elements, _: Node, call: Call, position: Position, time: int) -> Expr | None:
    fake = tensor_value(call["input"])
    if fake is None or (call.op == "dropout" and not (call["training"] is False or call["p"] == 0)):
        return None
    return walk.element(call["input"], position, time) if fake.is_floating_point() else None


def _arithmetic(walk: Elements, _: Node, call: Call, position: Position, time: int) -> Expr | None:
    left, right = (walk.operand(call[name], position, time) for name in ("input", "other"))
    if call.op == "mul":
        return Apply("mul", (left, right))
    if call.op == "div":
        return None if call.get("rounding_mode") is not None else Apply("div", (left, right))
    if call.op == "rsub":
        left, right = right, left
    alpha = call.get("alpha", 1)
    if not isinstance(alpha, (int, float)):
        return None
    if alpha != 1:
        right = Apply("mul", (Const(float(alpha)), right))
    return Apply("add", (left, right if call.op == "add" else Apply("neg", (right,))))


def _function(walk: Elements, _: Node, call: Call, position: Position, time: int) -> Expr | None:
    return Apply(call.op, (walk.operand(call["input"], position, time),))


def _power(walk: Elements, _: Node, call: Call, position: Position, time: int) -> Expr | None:
    exponent = 2 if call.op == "square" else call["exponent"]
    if not isinstance(exponent, (int, float)):
        return None
    return Apply("pow", (walk.operand(call["input"], position, time), Const(float(exponent))))


def _at_least(walk: Elements, _: Node, call: Call, position: Position, time: int) -> Expr | None:
    least = call["other"] if call.op == "maximum" else call["min"]
    if call.get("max") is not None or least is None:
        return None
    return Apply("maximum", (walk.operand(call["input"], position, time), walk.operand(least, position, time)))


def _cat(walk: Elements, _: Node, call: Call, position: Position, time: int) -> Expr | None:
    piece = walk.joined(call, position)
    return None if piece is None else walk.element(*piece, time)


def _stack(walk: Elements, _: Node, call: Call, position: Position, time: int) -> Expr | None:
    pieces, dim = call["input"], call["dim"]
    if not isinstance(pieces, (list, tuple)) or not isinstance(dim, int):
        return None
    dim %= len(position)
    which = walk.number(position[dim])
    if which is None or not 0 <= which < len(pieces) or tensor_value(pieces[which]) is None:
        return None
    return walk.element(pieces[which], (*position[:dim], *position[dim + 1 :]), time)


def _rolled(walk: Elements, node: Node, call: Call, position: Position, time: int) -> Expr | None:
    """``roll`` and ``flip``, of any of the dimensions."""
    at, shape = list(position), walk.reader.shape(node)
    if call.op == "flip":
        for dim in one_or_many(call["dims"]):
            at[dim] = shape[dim] - 1 - at[dim]
        return walk.element(call["input"], tuple(at), time)
    shifts = call["shifts"] if isinstance(call["shifts"], (list, tuple)) else [call["shifts"]]
    dims = call["dims"] if isinstance(call["dims"], (list, tuple)) else [call["dims"]]
    if len(shifts) != len(dims) or not all(isinstance(n, int) for n in (*shifts, *dims)):
        return None
    for shift, dim in zip(shifts, dims):
        size = shape[dim]
        if not isinstance(size, int) or size == 0:
            return None
        at[dim] = divide(at[dim] + (-shift % size), size)[1]
    return walk.element(call["input"], tuple(at), time)


def _as_real(walk: Elements, _: Node, call: Call, position: Position, time: int) -> Expr | None:
    part = walk.number(position[-1])
    return None if part is None else walk.parts(call["input"], position[:-1], time)[part]


def _one_part(walk: Elements, _: Node, call: Call, position: Position, time: int) -> Expr | None:
    return walk.parts(call["input"], position, time)[0 if call.op == "real" else 1]


def _ones(_: Elements, __: Node, call: Call, ___: Position, ____: int) -> Expr | None:
    return Const(1.0 if call.op == "ones" else 0.0)


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(("copy", "detach", "dropout", "cast"), _same),
    **dict.fromkeys(("add", "sub", "rsub", "mul", "div"), _arithmetic),
    **dict.fromkeys((*_FUNCTIONS, "neg"), _function),
    **dict.fromkeys(("pow", "square"), _power),
    **dict.fromkeys(("maximum", "clamp"), _at_least),
    **dict.fromkeys(("roll", "flip"), _rolled),
    **dict.fromkeys(("real", "imag"), _one_part),
    **dict.fromkeys(("ones", "zeros"), _ones),
    "cat": _cat,
    "stack": _stack,
    "view_as_real": _as_real,
}


def _from_pairs(walk: Elements, call: Call, position: Position, time: int) -> Parts:
    return tuple(walk.element(call["input"], (*position, n), time) for n in (0, 1))  # type: ignore[return-value]


def _from_numbers(walk: Elements, call: Call, position: Position, time: int) -> Parts:
    if call.op == "complex":
        return walk.operand(call["real"], position, time), walk.operand(call["imag"], position, time)
    length, angle = walk.operand(call["abs"], position, time), walk.operand(call["angle"], position, time)
    return Apply("mul", (length, Apply("cos", (angle,)))), Apply("mul", (length, Apply("sin", (angle,))))


def _complex_product(walk: Elements, call: Call, position: Position, time: int) -> Parts:
    (a, b), (c, d) = (walk.parts_of_operand(call[name], position, time) for name in ("input", "other"))
    minus = _times(b, d)
    real = _plus(_times(a, c), minus if minus == _ZERO else Apply("neg", (minus,)))
    return real, _plus(_times(a, d), _times(b, c))


def _times(a: Expr, b: Expr) -> Expr:
    """A product; of a number without an imaginary part nothing is left of that."""
    return _ZERO if _ZERO in (a, b) else Apply("mul", (a, b))


def _plus(a: Expr, b: Expr) -> Expr:
    return b if a == _ZERO else a if b == _ZERO else Apply("add", (a, b))


def _conjugate(walk: Elements, call: Call, position: Position, time: int) -> Parts:
    real, imaginary = walk.parts(call["input"], position, time)
    return real, Apply("neg", (imaginary,))


def _same_parts(walk: Elements, call: Call, position: Position, time: int) -> Parts | None:
    fake = tensor_value(call["input"])
    return walk.parts(call["input"], position, time) if fake is not None and fake.is_complex() else None


_COMPLEX_RULES: dict[str, _ComplexRule] = {
    "view_as_complex": _from_pairs,
    "complex": _from_numbers,
    "polar": _from_numbers,
    "mul": _complex_product,
    "conj": _conjugate,
    **dict.fromkeys(("copy", "detach", "cast"), _same_parts),
}
