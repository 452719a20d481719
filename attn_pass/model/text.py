"""Expressions as Python source, for people: the score function a report shows."""

from __future__ import annotations

from collections.abc import Mapping

from attn_pass.model.expression import INFIX, Apply, Const, Dot, Expr, IndexValue, Load
from attn_pass.model.index import Axis, Index, Quotient, Remainder, Symbol

_INFIX = {**INFIX, "floordiv": "//", "remainder": "%"}


def score_mod_source(expression: Expr, names: Mapping[Axis, str]) -> str:
    """A `score_mod` as FlexAttention takes it; ``names`` says what each axis is of b, h, q_idx and kv_idx."""
    return f"def score_mod(score, b, h, q_idx, kv_idx):\n    return {_source(expression, names, False)}"


def _source(expression: Expr, names: Mapping[Axis, str], inner: bool = True) -> str:
    if isinstance(expression, Dot):
        return "score"
    if isinstance(expression, Const):
        value = expression.value
        return f'float("{value}")' if value in (float("inf"), float("-inf")) else repr(value)
    if isinstance(expression, IndexValue):
        return _index(expression.index, names, inner)
    if isinstance(expression, Load):
        places = ", ".join(_index(i, names, False) for i in expression.index)
        return f"t{expression.source}[{places}]" if places else f"t{expression.source}"
    assert isinstance(expression, Apply)
    args = expression.args
    if expression.op == "cast":
        return f"{_source(args[0], names)}.to({expression.dtype})"
    if expression.op == "not":
        return f"~{_source(args[0], names)}"
    if expression.op == "lookup":
        table = args[0]
        assert isinstance(table, Load)
        rest = [_index(i, names, False) for i in table.index[1:]]
        return f"t{table.source}[{', '.join([_source(args[1], names, False), *rest])}]"
    if expression.op in _INFIX:
        left, right = (_source(a, names) for a in args)
        text = f"{left} {_INFIX[expression.op]} {right}"
        return f"({text})" if inner else text
    return f"{expression.op}({', '.join(_source(a, names, False) for a in args)})"


def _index(index: Index, names: Mapping[Axis, str], inner: bool) -> str:
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
        return f"({_index(atom.value, names, True)} {sign} {_index(atom.divisor, names, True)})"
    assert isinstance(atom, Symbol)
    return atom.key
