"""Derivatives of a score function: C++ over the same functions, from the text that `scores.written` writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from attn_pass.compat import GRADIENT_AT_BOUND

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


def slope(score: Term, of: Term, gradient: Term = ONE) -> Term:
    """The gradient of a score function's product or captured tensor, given that of the score, as autograd has it.

    At a corner it is what torch gives: 0 for ``abs``, a half for each of two equal numbers. A number that a condition
    leaves out, or the smaller of two, gets 0 where the score's gradient is NaN, too. With a gradient of 1 it is the
    derivative.
    """
    if score == of:
        return gradient
    if score.name in ("x", "number", "captured"):
        return ZERO
    if score.name == "where":
        condition, yes, no = score.args
        inner = slope(yes, of, gradient), slope(no, of, gradient)
        return inner[0] if inner[0] == inner[1] else Term("where", (condition, *inner))
    total = ZERO
    for n, arg in enumerate(score.args):
        if _depends(arg, of):
            total = _add(total, slope(arg, of, _PASSED[score.name](score, n, gradient)))
    return total


def _depends(score: Term, of: Term) -> bool:
    inside = score.args[1:] if score.name == "where" else () if score.name == "captured" else score.args
    return score == of or any(_depends(arg, of) for arg in inside)


def macros(text: str) -> Mapping[str, str]:
    """What `backward_tile.hpp` asks of a score function: gradients, from the score's, which it calls ``gradient``."""
    score, score_gradient = parsed(text), Term("gradient")
    of_captured = ((n, slope(score, Term("captured", (Term(str(n)),)), score_gradient)) for n in captured_in(text))
    each = " ".join(f"CALL({n}, {gradient})" for n, gradient in of_captured)
    return {"ATTN_SLOPE": str(slope(score, PRODUCT, score_gradient)), "ATTN_SLOPES(CALL)": each}


def _add(one: Term, other: Term) -> Term:
    return other if one == ZERO else one if other == ZERO else Term("add", (one, other))


def _mul(one: Term, other: Term) -> Term:
    return other if one == ONE else one if other == ONE else Term("mul", (one, other))


def _neg(one: Term) -> Term:
    return Term("neg", (one,))


def _of_maximum(score: Term, n: int, gradient: Term) -> Term:
    """All of it to the larger argument; where both are equal half to each, or what a clamp to the second one passes."""
    mine, other = score.args[n], score.args[1 - n]
    ahead, behind = Term("sub", (mine, other)), Term("sub", (other, mine))
    bound = score.args[1].args[0] if score.args[1].name == "neg" else score.args[1]
    at_number, at_tensor = GRADIENT_AT_BOUND
    share = {"number": at_number, "captured": at_tensor}.get(bound.name, 0.5)
    where_equal = {0.0: ZERO, 0.5: _mul(gradient, HALF), 1.0: gradient}[1.0 - share if n else share]
    return Term("where", (ahead, gradient, Term("where", (behind, ZERO, where_equal))))


def _of_minimum(score: Term, n: int, gradient: Term) -> Term:
    return _of_maximum(Term("maximum", tuple(_neg(a) for a in score.args)), n, gradient)


def _of_quotient(score: Term, n: int, gradient: Term) -> Term:
    divisor = score.args[1]
    if n == 0:
        return _mul(gradient, Term("div", (ONE, divisor)))
    return _neg(_mul(gradient, Term("div", (score, divisor))))


def _of_abs(score: Term, n: int, gradient: Term) -> Term:
    (arg,) = score.args
    return _mul(gradient, Term("where", (arg, ONE, Term("where", (_neg(arg), _neg(ONE), ZERO)))))


def _less_than_one(score: Term) -> Term:
    return Term("sub", (ONE, score))


_PASSED: Mapping[str, Callable[[Term, int, Term], Term]] = {
    "add": lambda score, n, gradient: gradient,
    "sub": lambda score, n, gradient: gradient if n == 0 else _neg(gradient),
    "mul": lambda score, n, gradient: _mul(gradient, score.args[1 - n]),
    "div": _of_quotient,
    "neg": lambda score, n, gradient: _neg(gradient),
    "abs": _of_abs,
    "exp": lambda score, n, gradient: _mul(gradient, score),
    "tanh": lambda score, n, gradient: _mul(gradient, _less_than_one(Term("mul", (score, score)))),
    "sigmoid": lambda score, n, gradient: _mul(gradient, Term("mul", (score, _less_than_one(score)))),
    "maximum": _of_maximum,
    "minimum": _of_minimum,
}
"""By the function's name: the gradient that argument ``n`` gets of its result's."""
