"""Elementwise expressions: what a tensor's element is, as a function of index variables.

Leaves are the dot product of a query row with a key row (`Dot`), constants, integer index values and
loads from source tensors; everything else is `Apply`. Expressions are immutable values: two programs
that compute the same element in the same way have equal expressions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from attn_pass.model import exact_floats
from attn_pass.model.dtype_name import dtype_name
from attn_pass.model.index import Axis, Index, axes, divide, is_at_most, is_less, is_nonnegative, substitute, terms_of
from attn_pass.model.operations import COMPARISONS, OPERATIONS

Scalar = bool | int | float


@dataclass(frozen=True, slots=True)
class Dot:
    """``sum_d query[.., i, d] * key[.., j, d]``, before any scale."""

    def __str__(self) -> str:
        return "dot"


@dataclass(frozen=True, slots=True)
class Const:
    """A Python number; ``kind`` keeps ``True``, ``1`` and ``1.0`` apart, which compare equal."""

    value: Scalar
    kind: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", type(self.value).__name__)

    def __str__(self) -> str:
        return f"{self.value:.6g}" if isinstance(self.value, float) else str(self.value)


@dataclass(frozen=True, slots=True)
class IndexValue:
    """The integer value of an index, as an element (``arange``)."""

    index: Index

    def __str__(self) -> str:
        return str(self.index)


@dataclass(frozen=True, slots=True)
class Load:
    """One element of source tensor number ``source``."""

    source: int
    index: tuple[Index, ...]

    def __str__(self) -> str:
        return f"t{self.source}[{', '.join(str(i) for i in self.index)}]"


@dataclass(frozen=True, slots=True)
class Apply:
    """A pointwise operation of `OPERATIONS`; ``dtype`` is set for ``cast`` alone.

    ``lookup`` of a load and an integer is the load with that integer for its first index: a row of a table.
    """

    op: str
    args: tuple[Expr, ...]
    dtype: torch.dtype | None = None

    def __str__(self) -> str:
        known = OPERATIONS.get(self.op)
        if known is not None and known.infix:
            return f"({self.args[0]} {known.infix} {self.args[1]})"
        name = f"{self.op}<{dtype_name(self.dtype)}>" if self.dtype else self.op
        return f"{name}({', '.join(str(a) for a in self.args)})"


Expr = Dot | Const | IndexValue | Load | Apply

_INTEGRAL = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
TRUE, FALSE, ZERO = Const(True), Const(False), Const(0.0)
DOT = Dot()


def apply(op: str, *args: Expr, dtype: torch.dtype | None = None) -> Expr:
    """The expression ``op(*args)``, with what is already known folded in.

    Each fold says ``a -> b`` of itself: ``i`` and ``j`` are indices, ``n`` and ``m`` numbers, ``c`` and ``d`` truth
    values, ``x`` and ``y`` anything.
    """
    folded = _fold(op, args, dtype)
    return Apply(op, args, dtype) if folded is None else folded


def _fold(op: str, args: tuple[Expr, ...], dtype: torch.dtype | None) -> Expr | None:
    if op == "where":
        condition, yes, no = args
        if isinstance(condition, Const):  # where(true, x, y) -> x, where(false, x, y) -> y
            chosen, other = (yes, no) if condition.value else (no, yes)
            return chosen if not may_be_boolean(chosen) or is_boolean(other) else None
        return _fold_where(condition, yes, no)
    if op == "cast":
        return _fold_cast(args[0], dtype)
    if op in ("and", "or"):
        return _fold_logic(op, args)
    if op == "not":
        return _fold_not(args[0])
    if op in COMPARISONS:
        return _fold_comparison(op, args[0], args[1])
    if op in ("add", "sub", "mul"):
        return _fold_arithmetic(op, args[0], args[1]) or _fold_floats(op, args[0], args[1])
    if op == "neg" and isinstance(args[0], Const):  # -(n) -> the number -n
        return Const(-args[0].value)
    if op in ("neg", "abs", "floordiv", "remainder"):
        return _fold_index(op, args)
    return None


def _fold_index(op: str, args: tuple[Expr, ...]) -> Expr | None:
    """Index arithmetic that stays an index."""
    index = as_index(args[0])
    if index is None:
        whole = _exact_float(args[0]) if op == "abs" else None
        # abs(cast<float>(i)) -> cast<float>(abs(i)), where the type holds i
        return None if whole is None else apply("cast", apply("abs", whole[0]), dtype=whole[1])
    if op == "neg":  # -i -> the index -i
        return index_value(-1 * index)
    if op == "abs":  # abs(i) -> i, where i >= 0
        return index_value(index) if is_nonnegative(index) else None
    divisor = as_index(args[1])
    if divisor is None or not is_nonnegative(index) or not is_less(0, divisor):
        return None
    # i // j and i % j -> the index, where i >= 0 and j > 0
    return index_value(divide(index, divisor)[0 if op == "floordiv" else 1])


def _fold_where(condition: Expr, yes: Expr, no: Expr) -> Expr | None:
    # where(c, true, false) -> c, where(c, false, true) -> not c
    if isinstance(yes, Const) and isinstance(no, Const) and is_boolean(yes) and is_boolean(no):
        return as_boolean(_truth(condition), yes, no)
    for chosen, other, when in ((yes, no, condition), (no, yes, apply("not", condition))):
        if isinstance(chosen, Const) and is_boolean(chosen) and is_boolean(other):
            if chosen.value:  # where(c, true, d) -> c or d
                return apply("or", when, other)
            # where(c, false, d) -> not c and d
            return apply("and", apply("not", when), other)
    known = _pinned(condition)
    if known and not isinstance(yes, Const) and not reads_something(yes):
        narrowed = rewrite_indices(yes, known)
        if narrowed != yes:  # where(i == 3, x(i), y) -> where(i == 3, x(3), y)
            return apply("where", condition, narrowed, no)
        if not reads_something(no) and rewrite_indices(no, known) == yes:  # where(i == 3, x(3), x(i)) -> x(i)
            return no
    # where(c, x, x) -> x, but not of loads in it: they may be of different times
    return yes if yes == no and not (isinstance(yes, Apply) and reads_something(yes)) else None


def _pinned(condition: Expr) -> dict[Axis, Index]:
    """The axis that has one value only where the condition holds: ``axis <= 0``, ``axis == 3``."""
    if not isinstance(condition, Apply) or len(condition.args) != 2:
        return {}
    left, right = (as_index(a) for a in condition.args)
    if left is None or right is None:
        return {}
    zero = {"le": left - right, "lt": left - right + 1, "ge": right - left, "gt": right - left + 1, "eq": left - right}
    index = zero.get(condition.op)
    if index is None:
        return {}
    terms = dict(terms_of(index))
    only = [(m[0], c) for m, c in terms.items() if len(m) == 1 and isinstance(m[0], Axis)]
    if len(only) != 1 or any(m and not (len(m) == 1 and isinstance(m[0], Axis)) for m in terms):
        return {}
    (axis, coefficient), offset = only[0], terms.get((), 0)
    if condition.op == "eq":
        return {axis: -offset * coefficient} if abs(coefficient) == 1 else {}
    return {axis: 0} if coefficient >= 1 and offset == 0 else {}


def _fold_cast(value: Expr, dtype: torch.dtype | None) -> Expr | None:
    assert dtype is not None
    if isinstance(value, Const):  # cast(n) -> the number as that type holds it
        if dtype == torch.bool:
            return Const(bool(value.value))
        if dtype.is_floating_point:
            return Const(_rounded(float(value.value), dtype))
        return _truncated(value.value, dtype)
    if isinstance(value, IndexValue) and dtype in _INTEGRAL[:2]:  # cast<int64>(i) -> i
        return value
    if dtype == torch.bool and isinstance(value, Apply) and value.op == "where":
        condition, yes, no = value.args
        # cast<bool>(where(c, n, m)) -> c, not c, true or false: tril(ones).bool()
        if isinstance(yes, Const) and isinstance(no, Const):
            return as_boolean(_truth(condition), Const(bool(yes.value)), Const(bool(no.value)))
    if isinstance(value, Apply) and value.op == "cast":
        exact = _exact_float(value) if dtype.is_floating_point or dtype == torch.int64 else None
        if exact is not None:  # cast<int64>(cast<float>(i)) -> i
            return value if dtype == value.dtype else apply("cast", exact[0], dtype=dtype)
        if value.dtype == dtype:  # cast(cast(x)) -> cast(x), of one type
            return value
        if dtype == torch.bool and is_boolean(value.args[0]):  # cast<bool>(cast(c)) -> c
            return value.args[0]
    if dtype == torch.bool and is_boolean(value):  # cast<bool>(c) -> c
        return value
    return None


def _exact_float(value: Expr) -> tuple[Expr, torch.dtype] | None:
    """The index, or its absolute value, that a float was cast from, and its type, which holds it; None for another."""
    if not isinstance(value, Apply) or value.op != "cast" or value.dtype is None:
        return None
    (inner,) = value.args
    index = as_index(inner.args[0] if isinstance(inner, Apply) and inner.op == "abs" else inner)
    return (inner, value.dtype) if index is not None and exact_floats.holds(value.dtype, index) else None


def _whole_in(value: Expr, dtype: torch.dtype) -> Expr | None:
    """A whole number as the integer it is, where a floating type holds it."""
    if isinstance(value, Const) and isinstance(value.value, float) and value.value.is_integer():
        if value.value or math.copysign(1.0, value.value) > 0:  # -0.0 is no integer
            value = Const(int(value.value))
    index = as_index(value)
    if index is not None:
        return value if exact_floats.holds(dtype, index) else None
    exact = _exact_float(value)
    return None if exact is None or _exact_float(Apply("cast", (exact[0],), dtype)) is None else exact[0]


def _wholes(left: Expr, right: Expr) -> tuple[Expr, Expr, torch.dtype] | None:
    """Both operands as integers, where one is a float that is one, and the narrower of the types: it holds both."""
    types = [exact[1] for exact in map(_exact_float, (left, right)) if exact is not None]
    if not types:
        return None
    narrow = min(types, key=exact_floats.LARGEST.__getitem__)
    a, b = _whole_in(left, narrow), _whole_in(right, narrow)
    return None if a is None or b is None else (a, b, narrow)


def _fold_floats(op: str, left: Expr, right: Expr) -> Expr | None:
    """Sums of positions as floats of one type, which stay positions where that holds them; a product may be -0.0."""
    exact = [_exact_float(e) for e in (left, right)]
    types = {e[1] for e in exact if e is not None}
    wholes = _wholes(left, right) if op in ("add", "sub") and len(types) == 1 else None
    if wholes is None or not all(isinstance(v, Const) or e is not None for v, e in zip((left, right), exact)):
        return None
    left, right, dtype = wholes
    index = as_index(apply(op, left, right))
    if index is None or not exact_floats.holds(dtype, index):
        return None
    return apply("cast", index_value(index), dtype=dtype)  # cast<float>(i) + cast<float>(j) -> cast<float>(i + j)


def _truncated(value: Scalar, dtype: torch.dtype) -> Const | None:
    """The number as an integer type holds it; None where it does not fit or is none."""
    if dtype not in _INTEGRAL or value != value or abs(value) >= 2**63:
        return None
    limits = torch.iinfo(dtype)
    return Const(int(value)) if limits.min <= int(value) <= limits.max else None


def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=torch.float64).to(dtype))


def _fold_logic(op: str, args: tuple[Expr, ...]) -> Expr | None:
    absorbing = op == "or"
    left, right = args
    for one, other in ((left, right), (right, left)):
        if isinstance(one, Const):  # true or x -> true, false or x -> x; false and x -> false, true and x -> x
            return Const(absorbing) if bool(one.value) == absorbing else _truth(other)
    # x and x -> x, x or x -> x
    return _truth(left) if left == right else None


def _truth(value: Expr) -> Expr:
    """The value as the logic sees it: numbers are true unless 0."""
    return value if is_boolean(value) else apply("cast", value, dtype=torch.bool)


_OPPOSITE = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}


def _fold_not(value: Expr) -> Expr | None:
    if isinstance(value, Const):  # not n -> n == 0
        return Const(not value.value)
    if isinstance(value, Apply):
        if value.op == "not":  # not not x -> x
            return _truth(value.args[0])
        if value.op in _OPPOSITE and all(isinstance(a, (IndexValue, Const)) for a in value.args):
            # not i < j -> i >= j. Only of integers: for floats NaN is neither below nor at least.
            if all(isinstance(a, IndexValue) or isinstance(a.value, int) for a in value.args):  # type: ignore[union-attr]
                return apply(_OPPOSITE[value.op], *value.args)
    return None


def index_value(index: Index) -> Expr:
    """An index as an element."""
    return Const(index) if isinstance(index, int) else IndexValue(index)


def as_index(value: Expr) -> Index | None:
    """The integer index an expression stands for, or None."""
    if isinstance(value, IndexValue):
        return value.index
    if isinstance(value, Const) and isinstance(value.value, int) and not isinstance(value.value, bool):
        return value.value
    return None


def _differ(a: Index, b: Index) -> bool:
    return is_less(a, b) or is_less(b, a)


def _equal(a: Index, b: Index) -> bool:
    return a == b


_PROOFS: dict[str, tuple[Callable[[Index, Index], bool], ...]] = {  # that it holds for every value, and for none
    "lt": (is_less, lambda a, b: is_at_most(b, a)),
    "le": (is_at_most, lambda a, b: is_less(b, a)),
    "gt": (lambda a, b: is_less(b, a), is_at_most),
    "ge": (lambda a, b: is_at_most(b, a), is_less),
    "eq": (_equal, _differ),
    "ne": (_differ, _equal),
}


def _fold_comparison(op: str, left: Expr, right: Expr) -> Expr | None:
    if isinstance(left, Const) and isinstance(right, Const):  # n < m -> true or false
        return _compared(op, left.value, right.value)
    if isinstance(left, Apply) and left.op == "where" and isinstance(right, Const):
        condition, yes, no = left.args
        if isinstance(yes, Const) and isinstance(no, Const):  # where(c, n, m) < k -> where(c, n < k, m < k)
            if_yes, if_no = _compared(op, yes.value, right.value), _compared(op, no.value, right.value)
            return None if if_yes is None or if_no is None else apply("where", condition, if_yes, if_no)
    if isinstance(left, Apply) and left.op == "cast" and isinstance(right, Const) and is_boolean(left.args[0]):
        inner = left.args[0]  # cast(c) < n -> c, not c, true or false
        yes_no = Const(_holds(op, 1, right.value)), Const(_holds(op, 0, right.value))
        return as_boolean(inner, *yes_no)
    a, b = as_index(left), as_index(right)
    if a is None or b is None:
        wholes = _wholes(left, right)
        if wholes is not None:  # cast<float>(i) < cast<float>(j) -> i < j, where their types hold i and j
            return apply(op, *wholes[:2])
        return _distributed(op, left, right) or _of_truth(op, left, right)
    holds, fails = _PROOFS[op]
    # i < j -> true where that is proven for every value, false where the opposite is
    return TRUE if holds(a, b) else FALSE if fails(a, b) else None


def _of_truth(op: str, left: Expr, right: Expr) -> Expr | None:
    """A truth value against a number: ``mask == 0``."""
    # c == 0 -> not c, c < 2 -> true
    if isinstance(right, Const) and is_boolean(left):
        return as_boolean(left, Const(_holds(op, 1, right.value)), Const(_holds(op, 0, right.value)))
    return None


def _distributed(op: str, left: Expr, right: Expr) -> Expr | None:
    """An operation on an index that is chosen by a condition and a plain one, done in both branches."""
    for number, (piecewise, other) in enumerate(((left, right), (right, left))):
        if not isinstance(piecewise, Apply) or piecewise.op != "where" or as_index(other) is None:
            continue
        condition, *branches = piecewise.args
        if all(as_index(b) is not None or (isinstance(b, Apply) and b.op == "where") for b in branches):
            # where(c, i, j) + n -> where(c, i + n, j + n)
            pairs = [(b, other) if number == 0 else (other, b) for b in branches]
            return apply("where", condition, *(apply(op, *pair) for pair in pairs))
    return None


def _holds(op: str, left: Scalar, right: Scalar) -> bool:
    """A comparison of two numbers."""
    on_numbers = OPERATIONS[op].on_numbers
    assert on_numbers is not None
    return bool(on_numbers(left, right))


def _compared(op: str, left: Scalar, right: Scalar) -> Const | None:
    """A comparison of numbers; None for floats so close that the type they are compared in may make them equal."""
    close = left != right and abs(left - right) <= 0.01 * max(abs(left), abs(right)) < float("inf")
    if close and (isinstance(left, float) or isinstance(right, float)):
        return None
    return Const(_holds(op, left, right))


def as_boolean(condition: Expr, yes: Const, no: Const) -> Expr:
    """``where(condition, yes, no)`` of two booleans, as plain logic."""
    if yes.value == no.value:  # where(c, true, true) -> true
        return yes
    # where(c, true, false) -> c, where(c, false, true) -> not c
    return condition if yes.value else apply("not", condition)


def is_boolean(value: Expr) -> bool:
    """Whether an expression is a truth value by its form (a comparison, logic, a boolean constant)."""
    if isinstance(value, Const):
        return isinstance(value.value, bool)
    return isinstance(value, Apply) and (
        value.op in COMPARISONS
        or value.op in ("and", "or", "not")
        or (value.op == "cast" and value.dtype == torch.bool)
        or (value.op == "where" and all(is_boolean(a) for a in value.args[1:]))
    )


def may_be_boolean(value: Expr) -> bool:
    """Whether the elements could be truth values, for all its form says: a load may hold anything."""
    if isinstance(value, Apply):
        if value.op in ("where", "maximum", "minimum", "add", "mul"):
            return all(may_be_boolean(a) for a in value.args[-2:])
        return is_boolean(value)
    return isinstance(value, Load) or is_boolean(value)


def _fold_arithmetic(op: str, left: Expr, right: Expr) -> Expr | None:
    a, b, on_numbers = as_index(left), as_index(right), OPERATIONS[op].on_numbers
    assert on_numbers is not None
    if a is not None and b is not None:  # i + j -> the index i + j
        return index_value(on_numbers(a, b))
    chosen = _distributed(op, left, right)
    if chosen is not None:
        return chosen
    if op == "mul" and is_boolean(left) and is_boolean(right):  # c * d -> c and d
        return apply("and", left, right)
    if may_be_boolean(left) or may_be_boolean(right):  # arithmetic makes numbers of truth values, or a logic of its own
        return None
    if isinstance(left, Const) and isinstance(right, Const):  # n + m -> the number n + m
        return Const(on_numbers(left.value, right.value))
    if op == "mul":
        for one, other in ((left, right), (right, left)):
            if isinstance(one, Const) and one.value == 1:  # x * 1 -> x, 1 * x -> x
                return other
    if op in ("add", "sub") and isinstance(right, Const) and right.value == 0:  # x + 0 -> x, x - 0 -> x
        return left
    if op == "add" and isinstance(left, Const) and left.value == 0:  # 0 + x -> x
        return right
    return None


def children(expression: Expr) -> tuple[Expr, ...]:
    """The direct operands of an expression."""
    return expression.args if isinstance(expression, Apply) else ()


def walk(expression: Expr) -> Iterator[Expr]:
    """The expression and everything inside it."""
    yield expression
    for child in children(expression):
        yield from walk(child)


@lru_cache(maxsize=4096)
def contains_dot(expression: Expr) -> bool:
    """Whether the dot product occurs in the expression."""
    return any(isinstance(e, Dot) for e in walk(expression))


def reads_something(expression: Expr) -> bool:
    """Whether the expression depends on more than indices and constants."""
    return any(isinstance(e, Load | Dot) for e in walk(expression))


def loads(expression: Expr) -> tuple[Load, ...]:
    """Every load of the expression, in order of occurrence."""
    return tuple(e for e in walk(expression) if isinstance(e, Load))


def expression_axes(expression: Expr) -> set[Axis]:
    """The axes the expression depends on by itself (the dot product's own are not counted)."""
    used: set[Axis] = set()
    for part in walk(expression):
        if isinstance(part, Load):
            used |= axes(*part.index)
        elif isinstance(part, IndexValue):
            used |= axes(part.index)
    return used


def transform(expression: Expr, replaced: Callable[[Expr], Expr | None]) -> Expr:
    """The expression with every part, from the outside in, for which ``replaced`` gives another one."""
    other = replaced(expression)
    if other is not None:
        return other
    if isinstance(expression, Apply):
        return apply(expression.op, *(transform(a, replaced) for a in expression.args), dtype=expression.dtype)
    return expression


def with_loads(expression: Expr, values: Mapping[Load, Expr]) -> Expr:
    """The expression with loads replaced."""
    return transform(expression, lambda e: values.get(e) if isinstance(e, Load) else None)


def with_dot(expression: Expr, dot: Expr) -> Expr:
    """The expression with something else in the place of the dot product."""
    return transform(expression, lambda e: dot if isinstance(e, Dot) else None)


def rewrite_indices(expression: Expr, values: Mapping[Axis, Index]) -> Expr:
    """The expression with axes replaced by indices."""

    def replaced(part: Expr) -> Expr | None:
        if isinstance(part, Load):
            return Load(part.source, tuple(substitute(i, values) for i in part.index))
        return index_value(substitute(part.index, values)) if isinstance(part, IndexValue) else None

    return transform(expression, replaced)


_OVERFLOWS = 1e30  # twice a mask's fill may be infinite in float32


def may_be_infinite(score: Expr) -> bool:
    """Whether a score that is kept may come out as anything but a number or -inf, because of a number it is made of."""
    if isinstance(score, Apply) and score.op in ("where", "cast"):
        return any(may_be_infinite(e) for e in (score.args[1:] if score.op == "where" else score.args))
    if isinstance(score, Const):
        return score.value == math.inf
    return any(isinstance(e, Const) and abs(e.value) >= _OVERFLOWS for e in walk(score))
