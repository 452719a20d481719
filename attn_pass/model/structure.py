"""What a mask keeps: named parts over key and row that hold together, exact for symbolic sizes, and what has no name.

What depends on a run-time value, or fits no form, is an `Opaque` part: its name is for people, and nothing may be
concluded from it. `conditions.py` takes a keep-condition apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from attn_pass.model.expression import (
    FALSE,
    TRUE,
    Expr,
    apply,
    index_value,
    rewrite_indices,
)
from attn_pass.model.index import (
    Axis,
    Index,
    axis_index,
    is_less,
    is_nonnegative,
)


@dataclass(frozen=True)
class Band:
    """``lower <= key - row <= upper``; None means no bound. Causal, with or without an offset, and sliding windows."""

    lower: Index | None = None
    upper: Index | None = None

    def condition(self, key: Index, row: Index) -> Expr:
        """The part as an expression."""
        return Keys(
            None if self.lower is None else row + self.lower, None if self.upper is None else row + self.upper
        ).condition(key, row)

    def __str__(self) -> str:
        if self.lower is None:
            return "causal" if self.upper == 0 else f"causal with offset {self.upper}"
        if self.upper is None:
            return f"sliding window ({-1 * self.lower}, all)"
        return f"sliding window ({-1 * self.lower}, {self.upper})"


@dataclass(frozen=True)
class Keys:
    """``lower <= key <= upper``, the same for every row; None means no bound."""

    lower: Index | None = None
    upper: Index | None = None

    def condition(self, key: Index, row: Index) -> Expr:
        """The part as an expression."""
        out: Expr = TRUE
        if self.upper is not None:
            out = apply("le", index_value(key), index_value(self.upper))
        if self.lower is not None:
            out = apply("and", out, apply("ge", index_value(key), index_value(self.lower)))
        return out

    def __str__(self) -> str:
        if self.lower is None:
            return f"prefix ({1 if self.upper is None else self.upper + 1})"
        return f"keys from {self.lower}" + ("" if self.upper is None else f" to {self.upper}")


@dataclass(frozen=True)
class Chunk:
    """``(key + key_shift) // size == (row + row_shift) // size``: a query attends to the keys of its own chunk."""

    size: Index
    key_shift: Index = 0
    row_shift: Index = 0

    def condition(self, key: Index, row: Index) -> Expr:
        """The part as an expression."""
        size = index_value(self.size)
        left, right = index_value(key + self.key_shift), index_value(row + self.row_shift)
        return apply("eq", apply("floordiv", left, size), apply("floordiv", right, size))

    def __str__(self) -> str:
        shifted = "" if self.key_shift == self.row_shift == 0 else f" shifted by ({self.key_shift}, {self.row_shift})"
        return f"chunked ({self.size}){shifted}"


@dataclass(frozen=True)
class Either:
    """At least one of several conjunctions holds: a prefix that all queries attend to, or a causal mask."""

    options: tuple[tuple[Part, ...], ...]

    def condition(self, key: Index, row: Index) -> Expr:
        """The part as an expression."""
        out: Expr = FALSE
        for option in self.options:
            out = apply("or", out, Structure(key, row, option).condition())
        return out

    def __str__(self) -> str:
        texts = [" and ".join(str(part) for part in option) for option in self.options]
        return " or ".join(f"({w})" if " and " in w else w for w in texts)


@dataclass(frozen=True)
class Opaque:
    """A part that depends on run-time values, or has no name. ``text`` is for reports; no decision may rely on it."""

    text: str

    def __str__(self) -> str:
        return self.text


Part = Band | Keys | Chunk | Either | Opaque
ORDER = (Band, Chunk, Keys, Either, Opaque)


@dataclass(frozen=True)
class Structure:
    """A conjunction of parts over the indices ``key`` and ``row``; none of them keeps every key.

    Axes are named, so the structure goes on holding when they are moved into other groups.
    """

    key: Index = 0
    row: Index = 0
    parts: tuple[Part, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether the parts are the whole mask: nothing depends on run-time values."""
        return not any(isinstance(part, Opaque) for part in self.parts)

    @property
    def is_causal(self) -> bool:
        """Whether the whole mask is ``key <= row``."""
        return self.parts == (Band(None, 0),)

    def condition(self) -> Expr:
        """The keep-condition of an exact structure."""
        assert self.is_exact
        out: Expr = TRUE
        for part in self.parts:
            assert not isinstance(part, Opaque)
            out = apply("and", out, part.condition(self.key, self.row))
        return out

    def and_opaque(self, text: str) -> Structure:
        """The structure with one more part that has no name."""
        part = Opaque(text)
        return self if part in self.parts else replace(self, parts=(*self.parts, part))

    def __str__(self) -> str:
        texts = [f"({p})" if isinstance(p, Either) and len(self.parts) > 1 else str(p) for p in self.parts]
        return " and ".join(texts) or "none"


EVERYTHING = Structure()


def row_index(rows: tuple[Axis, ...]) -> Index:
    """The position that axes of one dimension, slowest first, amount to: those of rows in the query's length."""
    total: Index = 0
    for axis in rows:
        total = total * axis.size + axis_index(axis)
    return total


# ---------------------------------------------------------------- rows


def keeps_a_key(structure: Structure, keys: Axis) -> bool:
    """Proves that every row keeps at least one key: a key is named for each row, and shown to exist and to be kept.

    A softmax over no keys has no row to lose, so at least one key is assumed.
    """
    if not structure.is_exact:
        return False
    condition = structure.condition()
    candidates: list[Index] = [0, structure.row, keys.size - 1]
    for part in _all_parts(structure.parts):
        if isinstance(part, Band):
            candidates += [structure.row + b for b in (part.upper, part.lower) if b is not None]
        elif isinstance(part, Keys):
            candidates += [b for b in (part.lower, part.upper) if b is not None]
        elif isinstance(part, Chunk):
            candidates.append(structure.row + part.row_shift - part.key_shift)
    return any(_is_kept(condition, witness, keys) for witness in candidates)


def _all_parts(parts: tuple[Part, ...]) -> list[Part]:
    every: list[Part] = []
    for part in parts:
        every += [q for o in part.options for q in _all_parts(o)] if isinstance(part, Either) else [part]
    return every


def _is_kept(condition: Expr, witness: Index, keys: Axis) -> bool:
    exists = witness == 0 or (is_nonnegative(witness) and is_less(witness, keys.size))
    return exists and rewrite_indices(condition, {keys: witness}) == TRUE
