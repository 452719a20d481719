"""An `Attention` as readable formulas over b, h, i and j: the score, the keep-condition, and the tensors they read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

from attn_pass.model.attention import Attention
from attn_pass.model.dtype_name import dtype_name
from attn_pass.model.expression import Apply, Expr, Load, children
from attn_pass.model.index import Axis
from attn_pass.model.structure import Structure
from attn_pass.model.text import index_source, source

_LONGEST = 600  # characters of one formula: a report is stored in packages
_MOST_TERMS = 300  # of an expression that is written out; what occurs twice counts twice


def formula_of(a: Attention) -> dict[str, str]:
    """The parts of the formula by name, each as Python-like source over the names of `axis_names`.

    "score": what the softmax is taken of where a key is kept; "keep": the condition, absent where every key is kept,
    or where the mask is a matrix that is added;
    "else": the score where it is not; "result": what becomes of the weights; and each tensor that score and condition
    read, "t3", with its shape, dtype and kind.
    """
    names = axis_names(a)
    read: list[Expr | None] = [f.value for f in (*a.factors, *a.result_factors)]
    condition = condition_of(a)
    read += [a.mask.bias, a.sink, a.modified if a.not_affine else None, condition]
    known: dict[int, int] = {}
    if sum(_terms(e, known) for e in read if e is not None) > _MOST_TERMS:
        return {"score": "too long to be written out", "result": "softmax(score) @ v"}
    formula = {"score": _cut(_score(a, names))}
    if a.mask.keep is not None and condition is not None:
        formula["keep"] = _cut(source(condition, names, ""))
        formula["else"] = f"{a.mask.keep.fill:.6g}"
    formula["result"] = _cut(_result(a, names))
    for number in sorted({n for e in read if e is not None for n in _sources(e)}):
        tensor = a.sources[number]
        sizes = ", ".join(index_source(n, names, False) for n in tensor.shape)
        formula[f"t{number}"] = f"({sizes}) {dtype_name(tensor.dtype)}, {tensor.kind}"
    return formula


def condition_of(a: Attention) -> Expr | None:
    """The keep-condition, by indices where it can be: not as a look into the tensor that holds the mask."""
    if a.mask.keep is None:
        return None
    if a.mask.fills is None and a.mask.structure.is_exact and a.mask.structure.parts:
        return _condition(a.mask.structure)
    return a.mask.deep_condition


@lru_cache(maxsize=256)
def _condition(structure: Structure) -> Expr:
    """Its condition; layers share one, and the proofs in it are what a formula costs."""
    return structure.condition()


def axis_names(a: Attention) -> dict[Axis, str]:
    """What each axis is called: b, h, i, j, d; numbered where a group has several that are longer than 1."""
    names = {a.keys: "j", a.dim: "d"}
    for letter, group in (("b", a.batch), ("h", a.heads), ("i", a.rows), ("e", a.value_dim)):
        long = [axis for axis in group if axis.size != 1]
        for number, axis in enumerate(long):
            names.setdefault(axis, letter if len(long) == 1 else f"{letter}{number}")
        for axis in group:
            names.setdefault(axis, letter)
    return names


def _score(a: Attention, names: Mapping[Axis, str]) -> str:
    if a.not_affine:
        text = source(a.modified, names, "dot(q, k)")
    else:
        text = "dot(q, k)" if a.scale == 1 else f"{a.scale:.6g} * dot(q, k)"
        for factor in a.factors:
            text += f" {'/' if factor.inverse else '*'} {source(factor.value, names, '', inner=True)}"
    return text if a.mask.bias is None else f"{text} + {source(a.mask.bias, names, '', inner=True)}"


def _result(a: Attention, names: Mapping[Axis, str]) -> str:
    text = "softmax(score)"
    if a.sink is not None:
        text = f"softmax(score, with one more logit {source(a.sink, names, '')} of value 0)"
    if a.dropout:
        text = f"dropout({text}, {a.dropout:.6g})"
    for factor in a.result_factors:
        text += f" {'/' if factor.inverse else '*'} {source(factor.value, names, '', inner=True)}"
    return f"{text} @ v"


def _terms(expression: Expr, known: dict[int, int]) -> int:
    """How many terms the written-out expression has; shared parts are counted as often as they occur, walked once."""
    if id(expression) not in known:
        known[id(expression)] = 1 + sum(_terms(e, known) for e in children(expression))
    return known[id(expression)]


def _sources(expression: Expr) -> Iterator[int]:
    if isinstance(expression, Load):
        yield expression.source
    elif isinstance(expression, Apply):
        for part in expression.args:
            yield from _sources(part)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
