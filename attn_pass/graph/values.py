"""Fake values of nodes, and their sizes as indices. Asks nothing that would add a guard."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from attn_pass.model.index import (
    Index,
    Poly,
    Quotient,
    Remainder,
    Symbol,
    atoms,
    divide,
    is_at_most,
    is_less,
    is_nonnegative,
    product,
)

# In a graph module's meta: one-element tensors that are literals of the program, by the name of their node.
CONSTANTS = "attn_pass_constants"
# And tensors that are taken to keep the values they have: by the name of their node, what they are called and they.
KNOWN_TENSORS = "attn_pass_known_tensors"
# And the names of symbols that may be 0 at run time, whatever the range says that they were traced in.
MAY_BE_ZERO = "attn_pass_may_be_zero"
# And the parameters among a graph's inputs, by the name of their node; and whether the compiler makes them constants.
PARAMETERS = "attn_pass_parameters"
FOLDS_CONSTANTS = "attn_pass_folds_constants"
# In a node's meta: the operands of attentions that a linear layer makes.
PROJECTION = "attn_pass_projection"
# And that what it joins are parameters that can be laid into one buffer.
LAID_OUT = "attn_pass_laid_out"
PLAIN_TENSORS = (FakeTensor, torch.nn.Parameter)  # any other fake value is that of a subclass


def nodes_in(argument: Any) -> Iterator[Node]:
    """The nodes that an argument is, or holds in tuples and lists."""
    if isinstance(argument, Node):
        yield argument
    elif isinstance(argument, (tuple, list)):
        for element in argument:
            yield from nodes_in(element)


def fake_value(node: Node) -> Any:
    """The fake value of a node in either dialect (``example_value`` or ``val``); None when it has none."""
    value = node.meta.get("example_value")
    return node.meta.get("val") if value is None else value


def tensor_value(node: object) -> torch.Tensor | None:
    """The fake tensor of a node, or None for anything else."""
    value = fake_value(node) if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def settled_number(value: Any) -> Any:
    """The number a symbolic one stands for where the program holds for that number alone; anything else as it is.

    With ``dynamic=True`` Dynamo makes floats of modules symbols, a dropout's rate among them; what takes no symbol, as
    torch's dropout does not, settles it while it is traced, and torch guards on the number.
    """
    number = fake_value(value) if isinstance(value, Node) else value
    if not isinstance(number, (torch.SymFloat, torch.SymInt)) or not number.node.expr.is_number:
        return value
    return float(number.node.expr)


def wants_gradient(node: Node) -> bool:
    """Whether a node's fake tensor says that a gradient flows into it."""
    value = tensor_value(node)
    return value is not None and value.requires_grad


def value_key(node: Node) -> str:
    """The name under which a node of this dialect keeps its fake value."""
    return "example_value" if "example_value" in node.meta else "val"


# Of a comparison: whether its left side is the smaller one, and by how much at least.
_LESS = {
    "StrictLessThan": (True, 1),
    "LessThan": (True, 0),
    "StrictGreaterThan": (False, 1),
    "GreaterThan": (False, 0),
}


class Sizes:
    """Turns Python and symbolic integers into indices; one instance a root graph, since symbols belong to one."""

    def __init__(self, may_be_zero: Collection[str] = ()) -> None:
        self._may_be_zero = frozenset(may_be_zero)
        self._known: dict[Any, Index] = {}
        self.hints: dict[str, int] = {}

    def index(self, size: Any) -> Index:
        """A size as an index; an expression that is not a polynomial becomes one opaque symbol."""
        if type(size) is int:
            return size
        if isinstance(size, int) and not isinstance(size, torch.SymInt):
            return int(size)
        node = size.node
        expression = node.expr
        known = self._known.get(expression)
        if known is None:
            known = self._known[expression] = self._convert(expression, node.shape_env)
            hint = getattr(node, "hint", None)
            if isinstance(hint, int) and isinstance(known, Poly) and len(known.terms) == 1:
                ((monomial, coefficient),) = known.terms.items()
                if coefficient == 1 and len(monomial) == 1 and isinstance(monomial[0], Symbol):
                    self.hints.setdefault(monomial[0].key, hint)
        return known

    def hint(self, index: Index) -> int:
        """The size the program was traced with, as a plain number; an unknown size counts as 64."""
        if isinstance(index, int):
            return index
        total = 0
        for monomial, coefficient in index.terms.items():
            term = coefficient
            for atom in monomial:
                if isinstance(atom, Symbol):
                    term *= self.hints.get(atom.key, 64)
                elif isinstance(atom, Quotient):
                    term *= self.hint(atom.value) // max(1, self.hint(atom.divisor))
                elif isinstance(atom, Remainder):
                    term *= self.hint(atom.value) % max(1, self.hint(atom.divisor))
            total += term
        return total

    def is_nonnegative(self, size: Any) -> bool:
        """Proves that a size is not negative: by its form, its range, or a guard of the program (``if p > 0``)."""
        index = self.index(size)
        if is_nonnegative(index):
            return True
        if not isinstance(size, torch.SymInt):
            return False
        return statically_known_true(size >= 0) or any(is_nonnegative(index - m) for m in self._guarded(size.node))

    def _guarded(self, node: Any) -> Iterator[Index]:
        """What guards on the symbols of a size alone say is not negative, in the symbols that stand for these now."""
        known = node.expr.free_symbols
        for guard in node.shape_env.guards:
            now = node.shape_env.replace(guard.expr)
            less, sides = _LESS.get(type(now).__name__), getattr(now, "args", ())
            if less is not None and len(sides) == 2 and set().union(*(s.free_symbols for s in sides)) <= known:
                left, right = (self._convert(side, node.shape_env) for side in sides)
                small, large = (left, right) if less[0] else (right, left)
                yield large - small - less[1]

    def can_be_zero(self, index: Index) -> bool:
        """Whether nothing says that the size is at least 1."""
        return not is_less(0, index) or any(isinstance(a, Symbol) and a.key in self._may_be_zero for a in atoms(index))

    def shape(self, tensor: torch.Tensor) -> tuple[Index, ...]:
        """The shape of a fake tensor."""
        return tuple([size if type(size) is int else self.index(size) for size in tensor.shape])

    def _convert(self, expression: Any, shape_env: Any) -> Index:
        import sympy

        if expression.is_Integer:
            return int(expression)
        if expression.is_Symbol:
            return Poly.of(self._symbol(expression, shape_env))
        parts = [self._convert(a, shape_env) for a in expression.args]
        if isinstance(expression, sympy.Add):
            total: Index = 0
            for part in parts:
                total = total + part
            return total
        if isinstance(expression, sympy.Mul):
            return product(parts)
        if isinstance(expression, sympy.Pow) and expression.args[1].is_Integer and 0 < int(expression.args[1]) < 8:
            return product([parts[0]] * int(expression.args[1]))
        if type(expression).__name__ == "FloorDiv" and is_nonnegative(parts[0]) and is_less(0, parts[1]):
            return divide(parts[0], parts[1])[0]
        if type(expression).__name__ == "Max" and len(parts) == 2:  # of strides: torch takes no size as less than 1
            for small, large in (parts, parts[::-1]):
                if is_at_most(small, large):
                    return large
        bounds = None if shape_env is None else shape_env.bound_sympy(expression)
        return Poly.of(Symbol(str(expression), _lowest(bounds)))

    def _symbol(self, expression: Any, shape_env: Any) -> Symbol:
        values = getattr(shape_env, "backed_var_to_val", None)
        values = getattr(shape_env, "var_to_val", {}) if values is None else values
        hint = values.get(expression)
        if hint is not None and hint.is_Integer:
            self.hints[str(expression)] = int(hint)
        bounds = shape_env.var_to_range.get(expression) if shape_env is not None else None
        upper = None
        if bounds is not None:
            upper = int(bounds.upper) if bounds.upper.is_Integer and bounds.upper < 2**31 else None
        return Symbol(str(expression), _lowest(bounds), upper)


def _lowest(bounds: Any) -> int:
    """What a number known at run time only is at least: a size is not negative, an integer argument may be anything."""
    return int(bounds.lower) if bounds is not None and bounds.lower.is_Integer else _ANYTHING


_ANYTHING = -(2**62)


def memory_order(tensor: torch.Tensor, sizes: Sizes) -> tuple[int, ...] | None:
    """The dimensions of a tensor that lies in memory without gaps, slowest first; None for any other.

    Dimensions of size 1 come first.
    """
    if tensor.layout != torch.strided:
        return None
    shape = sizes.shape(tensor)
    strides = [sizes.index(s) for s in tensor.stride()]
    order = sorted(range(len(shape)), key=lambda d: (shape[d] != 1, -sizes.hint(strides[d])))
    expected: Index = 1
    for dim in reversed(order):
        if shape[dim] != 1 and strides[dim] != expected:
            return None
        expected = expected * shape[dim]
    return tuple(order)
