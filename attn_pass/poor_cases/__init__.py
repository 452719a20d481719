"""Equivalent forms of an attention: one file per poor case, description in, variants out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attn_pass.model.attention import Attention
from attn_pass.poor_cases import grouped_heads, half_precision, key_range, shared_kv, valid_range

PoorCase = Callable[[Attention], Iterator[Attention]]

CASES: dict[str, PoorCase] = {
    key_range.NAME: key_range.variants,
    shared_kv.NAME: shared_kv.variants,
    grouped_heads.NAME: grouped_heads.variants,
    valid_range.NAME: valid_range.variants,
    half_precision.NAME: half_precision.variants,
}


def variants(attention: Attention, allowed: tuple[str, ...] | None) -> Iterator[tuple[tuple[str, ...], Attention]]:
    """The attention itself and every form the allowed cases give it, with the names of the cases applied.

    Cases combine, each once, in the order of `CASES`.
    """
    names = [name for name in CASES if allowed is None or name in allowed]
    waiting: list[tuple[int, tuple[str, ...], Attention]] = [(0, (), attention)]
    while waiting:
        first, applied, current = waiting.pop(0)
        yield applied, current
        for position in range(first, len(names)):
            name = names[position]
            waiting += [(position + 1, (*applied, name), form) for form in CASES[name](current)]
