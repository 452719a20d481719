"""Expressions as readable Python source: the score function and the formulas that a report shows."""

from __future__ import annotations

from collections.abc import Mapping

from attn_pass.model.expression import Apply, Const, Dot, Expr, IndexValue, Load
from attn_pass.model.index import Axis, Index, Quotient, Remainder, Symbol
from attn_pass.model.operations import OPERATIONS


def score_mod_source(expression: Expr, names: Mapping[Axis, str]) -> str:
    """A `score_mod` as FlexAttention takes it; ``names`` says what each axis is of b, h, q_idx and kv_idx."""
    return f"def score_mod(score, b, h, q_idx, kv_idx):\n    return {source(expression, names, 'score')}"


def source(expression: Expr, names: Mapping[Axis, str], dot: str, *, inner: bool = False) -> str:
    """An expression; ``dot`` is what its dot product is called, and ``inner`` puts sums in brackets."""
    if isinstance(expression, Dot):
        return dot
    if isinstance(expression, Const):
        value = expression.value
        return f'float("{value}")' if value in (float("inf"), float("-inf")) else repr(value)
    if isinstance(expression, IndexValue):
        return index_source(expression.index, names, inner)
    if isinstance(expression, Load):
        places = ", ".join(index_source(i, names, False) for i in expression.index)
        return f"t{expression.source}[{places}]" if places else f"t{expression.source}"
    assert isinstance(expression, Apply)
    args = expression.args
    if expression.op == "cast":
        return f"{source(args[0], names, dot, inner=True)}.to({expression.dtype})"
    if expression.op == "not":
        return f"~{source(args[0], names, dot, inner=True)}"
    if expression.op == "lookup":
        table = args[0]
        assert isinstance(table, Load)
        rest = [index_source(i, names, False) for i in table.index[1:]]
        return f"t{table.source}[{', '.join([source(args[1], names, dot), *rest])}]"
    if infix := OPERATIONS[expression.op].infix:
        left, right = (source(a, names, dot, inner=True) for a in args)
        text = f"{left} {infix} {right}"
        return f"({text})" if inner else text
    return f"{expression.op}({', '.join(source(a, names, dot) for a in args)})"


def index_source(index: Index, names: Mapping[Axis, str], inner: bool) -> str:
    """An index; ``inner`` puts sums in brackets."""
    if isinstance(index, int):
        return str(index)
    text = ""
    for monomial, coefficient in sorted(index.terms.items(), key=lambda item: item[1] < 0):
        factors = [_atom(a, names) for a in monomial]
        if abs(coefficient) != 1 or not factors:
            factors.insert(0, str(abs(coefficient)))
        sign = "-" if coefficient < 0 else "+" if text else ""
        text += (f" {sign} " if text else sign) + " * ".join(factors)
    return f"({text})" if inner and " " in text else text


def _atom(atom: object, names: Mapping[Axis, str]) -> str:
    if isinstance(atom, Axis):
        return names.get(atom, atom.key)
    if isinstance(atom, (Quotient, Remainder)):
        sign = "//" if isinstance(atom, Quotient) else "%"
        return f"({index_source(atom.value, names, True)} {sign} {index_source(atom.divisor, names, True)})"
    assert isinstance(atom, Symbol)
    return atom.key
