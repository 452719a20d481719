"""Derivatives of a score function: C++ over the same functions, from the text that `scores.written` writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

_TOKEN = re.compile(r"[a-z_]+|[-+]?(?:INFINITY|NAN|[0-9.]+(?:e[-+]?[0-9]+)?f?)|[(),]")


@dataclass(frozen=True)
class Term:
    """A function of the kernel and its arguments; ``x``, a number or the number of a captured tensor without any."""

    name: str
    args: tuple[Term, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.args))})" if self.args else self.name


def _number(text: str) -> Term:
    return Term("number", (Term(text),))


PRODUCT = Term("x")
ZERO, ONE, HALF = (_number(text) for text in ("0.0f", "1.0f", "0.5f"))


@cache
def parsed(text: str) -> Term:
    """The score function as a term.

    Raises:
        ValueError: the text is none.
    """
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != text.replace(" ", ""):
        raise ValueError(f"{text!r} is not a score function")
    term, rest = _term(tokens)
    if rest:
        raise ValueError(f"{text!r} is not a score function: {''.join(rest)} follows it")
    return term


def _term(tokens: list[str]) -> tuple[Term, list[str]]:
    if not tokens:
        raise ValueError("a score function ends too early")
    name, rest, args = tokens[0], tokens[1:], []
    if rest[:1] != ["("]:
        return Term(name), rest
    while rest and rest[0] in "(,":
        arg, rest = _term(rest[1:])
        args.append(arg)
    if rest[:1] != [")"]:
        raise ValueError(f"the arguments of {name} do not end")
    return Term(name, tuple(args)), rest[1:]


def captured_in(text: str) -> tuple[int, ...]:
    """The numbers of the captured tensors that a score function reads."""
    return tuple(sorted({int(n) for n in re.findall(r"captured\((\d+)\)", text)}))


def slope(score: Term, of: Term) -> Term:
    """The derivative of a score function with respect to `PRODUCT` or a captured tensor, as autograd has it.

    At a corner it is what torch gives: 0 for ``abs``, a half for each of two equal numbers.
    """
    if score == of:
        return ONE
    if score.name in ("x", "number", "captured"):
        return ZERO
    if score.name == "where":
        condition, yes, no = score.args
        inner = slope(yes, of), slope(no, of)
        return inner[0] if inner[0] == inner[1] else Term("where", (condition, *inner))
    total = ZERO
    for n, arg in enumerate(score.args):
        inside = slope(arg, of)
        if inside != ZERO:
            total = _add(total, _mul(inside, _PARTIAL[score.name](score, n)))
    return total


def macros(text: str) -> Mapping[str, str]:
    """What `backward_tile.hpp` asks of a score function: its derivatives."""
    score = parsed(text)
    of_captured = ((n, slope(score, Term("captured", (Term(str(n)),)))) for n in captured_in(text))
    each = " ".join(f"CALL({n}, {derivative})" for n, derivative in of_captured if derivative != ZERO)
    return {"ATTN_SLOPE": str(slope(score, PRODUCT)), "ATTN_SLOPES(CALL)": each}


def _add(one: Term, other: Term) -> Term:
    return other if one == ZERO else one if other == ZERO else Term("add", (one, other))


def _mul(one: Term, other: Term) -> Term:
    return other if one == ONE else one if other == ONE else Term("mul", (one, other))


def _neg(one: Term) -> Term:
    return Term("neg", (one,))


def _larger(score: Term, n: int) -> Term:
    """1 where argument ``n`` of a maximum is the larger one, a half where both are equal."""
    mine, other = score.args[n], score.args[1 - n]
    ahead, behind = Term("sub", (mine, other)), Term("sub", (other, mine))
    return Term("where", (ahead, ONE, Term("where", (behind, ZERO, HALF))))


def _smaller(score: Term, n: int) -> Term:
    return _larger(Term("maximum", tuple(_neg(a) for a in score.args)), n)


def _of_quotient(score: Term, n: int) -> Term:
    divisor = score.args[1]
    return Term("div", (ONE, divisor)) if n == 0 else _neg(Term("div", (score, divisor)))


def _of_abs(score: Term, n: int) -> Term:
    (arg,) = score.args
    return Term("where", (arg, ONE, Term("where", (_neg(arg), _neg(ONE), ZERO))))


def _less_than_one(score: Term) -> Term:
    return Term("sub", (ONE, score))


_PARTIAL: Mapping[str, Callable[[Term, int], Term]] = {
    "add": lambda score, n: ONE,
    "sub": lambda score, n: ONE if n == 0 else _neg(ONE),
    "mul": lambda score, n: score.args[1 - n],
    "div": _of_quotient,
    "neg": lambda score, n: _neg(ONE),
    "abs": _of_abs,
    "exp": lambda score, n: score,
    "tanh": lambda score, n: _less_than_one(Term("mul", (score, score))),
    "sigmoid": lambda score, n: Term("mul", (score, _less_than_one(score))),
    "maximum": _larger,
    "minimum": _smaller,
}
"""By the function's name: its derivative with respect to argument ``n``."""
