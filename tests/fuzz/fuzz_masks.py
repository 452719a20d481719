"""Masks as trees: which keys a row keeps, in several spellings, combined by and, or and not."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

Tensor = Any


@dataclass(frozen=True)
class Mask:
    """A leaf of `LEAVES` in its ``way``-th spelling with a number, or an operator of `BRANCHES` on other masks."""

    name: str = "causal"
    way: int = 0
    n: int = 0
    parts: tuple[Mask, ...] = ()

    def leaves(self, path: str = "") -> Iterator[tuple[str, Mask]]:
        """Every leaf, by where it is in the tree."""
        if not self.parts:
            yield path, self
        for number, part in enumerate(self.parts):
            yield from part.leaves(f"{path}{number}")

    def made(self, c: Any, inputs: dict[str, Tensor], path: str = "") -> Tensor:
        """A boolean tensor that broadcasts to the scores; ``inputs`` are the leaves' own, by their path."""
        if not self.parts:
            ways = LEAVES[self.name].ways
            return ways[self.way % len(ways)](c, inputs.get(path), self.n)
        made = [part.made(c, inputs, f"{path}{number}") for number, part in enumerate(self.parts)]
        ways = BRANCHES[self.name]
        return ways[self.way % len(ways)](*made)


@dataclass(frozen=True)
class Leaf:
    """``takes`` is a kind of input; ``ways`` are spellings of the same."""

    ways: tuple[Callable[[Any, Tensor, int], Tensor], ...]
    takes: str = ""


def _rows(c: Any) -> Tensor:
    return torch.arange(c.l)[:, None]


def _keys(c: Any) -> Tensor:
    return torch.arange(c.s)


def _ones(c: Any) -> Tensor:
    return torch.ones(c.l, c.s, dtype=torch.bool)


def _of_batch(c: Any, t: Tensor) -> Tensor:
    return t.view(-1, *[1] * (len(c.lead) + 1))


LEAVES: dict[str, Leaf] = {
    "causal": Leaf((
        lambda c, t, n: torch.ones(c.l, c.s, dtype=torch.bool).tril(),
        lambda c, t, n: torch.tril(torch.ones(c.l, c.s)) == 1,
        lambda c, t, n: ~_ones(c).triu(diagonal=1),
        lambda c, t, n: torch.arange(c.s)[None, :] <= torch.arange(c.l)[:, None],
        lambda c, t, n: torch.arange(c.l).view(-1, 1) >= torch.arange(c.s).view(1, -1),
        lambda c, t, n: torch.full((c.l, c.s), -1.0).triu(1) == 0,
        lambda c, t, n: _keys(c) - _rows(c) <= 0,
        lambda c, t, n: torch.ge(_rows(c), _keys(c)),
        lambda c, t, n: _keys(c) < _rows(c) + 1,
        lambda c, t, n: torch.tril(torch.ones((c.l, c.s), dtype=torch.long)).bool(),
        lambda c, t, n: torch.ones(c.l, c.s).tril().view(1, 1, c.l, c.s)[0, 0] != 0,
    )),
    "causal, moved": Leaf((  # from one key less to two more
        lambda c, t, n: torch.ones(c.l, c.s, dtype=torch.bool).tril(n - 1),
        lambda c, t, n: _keys(c) <= _rows(c) + (n - 1),
        lambda c, t, n: ~_ones(c).triu(n),
        lambda c, t, n: _keys(c) - n < _rows(c),
        lambda c, t, n: torch.full((c.l, c.s), 1.0).triu(diagonal=n) == 0,
    )),
    "causal, to the last": Leaf((
        lambda c, t, n: torch.ones(c.l, c.s, dtype=torch.bool).tril(c.s - c.l),
        lambda c, t, n: _keys(c) <= _rows(c) + (c.s - c.l),
        lambda c, t, n: torch.arange(c.s) <= torch.arange(c.s - c.l, c.s)[:, None],
    )),
    "anticausal": Leaf((
        lambda c, t, n: torch.ones(c.l, c.s, dtype=torch.bool).triu(),
        lambda c, t, n: _keys(c) >= _rows(c),
    )),
    "strictly causal": Leaf((
        lambda c, t, n: _keys(c) < _rows(c),
        lambda c, t, n: torch.ones(c.l, c.s, dtype=torch.bool).tril(-1),
    )),
    "window": Leaf((
        lambda c, t, n: (_rows(c) - _keys(c)).abs() <= n + 1,
        lambda c, t, n: (_keys(c) <= _rows(c)) & (_keys(c) > _rows(c) - n - 2),
        lambda c, t, n: _ones(c).tril(n) & _ones(c).triu(-n),
    )),
    "chunk": Leaf((
        lambda c, t, n: _rows(c) // (n + 2) == _keys(c) // (n + 2),
        lambda c, t, n: torch.div(_rows(c), n + 2, rounding_mode="floor") == torch.div(
            _keys(c), n + 2, rounding_mode="floor"
        ),
    )),
    "remainder": Leaf((lambda c, t, n: (_keys(c) - _rows(c)) % (n + 2) == 0,)),
    "prefix": Leaf((
        lambda c, t, n: _keys(c) < n + 1,
        lambda c, t, n: torch.arange(c.s) <= n,
    )),
    "not the last": Leaf((lambda c, t, n: _keys(c) < c.s - 1,)),
    "first": Leaf((lambda c, t, n: _keys(c) == 0,)),
    "diagonal": Leaf((lambda c, t, n: _keys(c) == _rows(c), lambda c, t, n: torch.eye(c.l, c.s, dtype=torch.bool))),
    "everything": Leaf((lambda c, t, n: _ones(c), lambda c, t, n: _keys(c) >= 0)),
    "input": Leaf((lambda c, t, n: t, lambda c, t, n: t != 0, lambda c, t, n: t.clone()), "mask"),
    "numbers": Leaf((lambda c, t, n: t != 0, lambda c, t, n: t > 0, lambda c, t, n: t.bool(), lambda c, t, n: t == 1),
                    "counts"),
    "padding": Leaf((
        lambda c, t, n: t[:, None, None, :] if len(c.lead) == 2 else t[:1],
        lambda c, t, n: t.view(t.shape[0], 1, 1, t.shape[1]) if len(c.lead) == 2 else t[0],
        lambda c, t, n: t.unsqueeze(1).unsqueeze(1) if len(c.lead) == 2 else t[:1],
    ), "padding"),
    "lengths": Leaf((
        lambda c, t, n: torch.arange(c.s) < t.view(-1, *[1] * (len(c.lead) + 1)),
    ), "lengths"),
    "position": Leaf((  # of a cache: what is valid is known when the program runs
        lambda c, t, n: _keys(c) <= t,
        lambda c, t, n: ~(_keys(c) > t),
        lambda c, t, n: _keys(c) < t + 1,
        lambda c, t, n: _keys(c).unsqueeze(0) <= torch.arange(1)[:, None] + t,
        lambda c, t, n: (_keys(c) <= t) | (_keys(c) == 0),
    ), "position"),
    "window of a cache": Leaf((
        lambda c, t, n: (_keys(c) <= t) & (_keys(c) > t - n - 2),
        lambda c, t, n: (_keys(c) <= _rows(c) + t) & (_keys(c) >= _rows(c) + t - n),
    ), "position"),
    "causal from a position": Leaf((
        lambda c, t, n: _keys(c) <= _rows(c) + t,
        lambda c, t, n: _keys(c) - t <= _rows(c),
        lambda c, t, n: _keys(c) < (torch.arange(c.l) + t + 1)[:, None],
    ), "position"),
    "positions of queries": Leaf((
        lambda c, t, n: _keys(c) <= t[: c.l, None],
        lambda c, t, n: _keys(c)[None] < t[: c.l].view(-1, 1) + 1,
        lambda c, t, n: (_keys(c) <= t[: c.l, None]) & (_keys(c) > t[: c.l, None] - n - 2),
    ), "positions"),
    "left padding beside a cache": Leaf((
        lambda c, t, n: _keys(c) >= _of_batch(c, t) - 1,
        lambda c, t, n: (_keys(c) + n >= _of_batch(c, t)) & (_keys(c) <= _of_batch(c, t) + n),
        lambda c, t, n: (_keys(c) >= _of_batch(c, t) - n) & (_keys(c) <= _rows(c) + _of_batch(c, t)),
    ), "lengths"),
    "nothing valid": Leaf((  # in some rows of the batch, or of the query
        lambda c, t, n: _keys(c) < _of_batch(c, t) - n - 1,
        lambda c, t, n: _keys(c) <= _rows(c) + _of_batch(c, t) - n - 3,
    ), "lengths"),
    "ring buffer": Leaf((
        lambda c, t, n: (t - _keys(c)) % c.s < n + 1,
        lambda c, t, n: (_keys(c) <= t) | (t >= n + 1),
        lambda c, t, n: (_keys(c) <= t) | ((_keys(c) > t) & (t >= n)),
        lambda c, t, n: t - (t - _keys(c)) % c.s >= 0,
        lambda c, t, n: (t - (t - _keys(c)) % c.s >= 0) & (t - (t - _keys(c)) % c.s > t - n - 1),
        lambda c, t, n: (_keys(c) - t) % c.s >= c.s - n - 1,
        lambda c, t, n: (_rows(c) + t - _keys(c)) % (c.s + n) <= _rows(c) + t,
    ), "position"),
    "several ranges": Leaf((
        lambda c, t, n: ((_keys(c) <= t) & (_keys(c) > t - n - 1)) | (_keys(c) == 0),
        lambda c, t, n: (_keys(c) <= _rows(c) + t - 2) | (_keys(c) < n + 1),
        lambda c, t, n: ((_keys(c) - t).abs() <= n) | (_keys(c) <= t - 3),
        lambda c, t, n: ((_keys(c) >= t) & (_keys(c) < t + 2)) | ((_keys(c) > t - 4) & (_keys(c) < t - 1)),
        lambda c, t, n: (_keys(c) <= t) | (_keys(c) == c.s - 1 - n),
    ), "position"),
    "rows of a triangle": Leaf((  # of a cache of masks, at the positions of the queries
        lambda c, t, n: torch.ones(c.s, c.s, dtype=torch.bool).tril()[t[: c.l]],
        lambda c, t, n: torch.index_select(torch.ones(c.s, c.s, dtype=torch.bool).tril(n), 0, t[: c.l]),
        lambda c, t, n: torch.ones(c.s, c.s, dtype=torch.bool).triu(1).logical_not()[(t - c.s)[: c.l]],
        lambda c, t, n: (torch.arange(c.s) <= torch.arange(c.s)[:, None])[t[: c.l], :],
    ), "row numbers"),
    "documents": Leaf((
        lambda c, t, n: t[: c.l, None] == t[None, : c.s],
    ), "documents"),
}  # fmt: skip

CACHES = (
    "position", "lengths", "causal from a position", "window of a cache", "positions of queries", "several ranges",
    "left padding beside a cache", "ring buffer", "nothing valid", "rows of a triangle", "padding",
)  # fmt: skip

BRANCHES: dict[str, tuple[Callable[..., Tensor], ...]] = {
    "and": (operator.and_, torch.logical_and, lambda a, b: a * b, lambda a, b: ~(~a | ~b)),
    "or": (operator.or_, torch.logical_or, lambda a, b: a.bitwise_or(b)),
    "not": (operator.invert, torch.logical_not, lambda a: a == 0),
    "where": (torch.where,),
}
