"""Other forms of the same attention: one file a poor case, description in, variants out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attn_pass.model.attention import Attention
from attn_pass.poor_cases import grouped_heads, shared_kv

PoorCase = Callable[[Attention], Iterator[Attention]]

CASES: dict[str, PoorCase] = {
    shared_kv.NAME: shared_kv.variants,
    grouped_heads.NAME: grouped_heads.variants,
}


def variants(attention: Attention, allowed: tuple[str, ...] | None) -> Iterator[tuple[tuple[str, ...], Attention]]:
    """The attention itself and every form the allowed cases give it, with the names of the cases applied."""
    waiting: list[tuple[tuple[str, ...], Attention]] = [((), attention)]
    while waiting:
        names, current = waiting.pop(0)
        yield names, current
        for name, case in CASES.items():
            if name in names or (allowed is not None and name not in allowed):
                continue
            waiting += [((*names, name), v) for v in case(current) if (*names, name) == tuple(sorted((*names, name), key=list(CASES).index))]
