"""Bounds on keys that are known only at run time: the valid part of a cache, as arguments of the CPU kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_eager import NEG_INF, Together, qkv, same, same_each
from torch import Tensor

import attn_pass

LOWEST = torch.finfo(torch.float32).min
Keep = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Row = tuple[Keep, Tensor, int, set[str]]
POSITION, LENGTHS = torch.tensor(11), torch.tensor([3, 20])
QUERIES = torch.tensor([11, 4, 30, 2, 7])


def keys(k: Tensor) -> Tensor:
    return torch.arange(k.shape[-2])


def rows(q: Tensor) -> Tensor:
    return torch.arange(q.shape[-2])[:, None]


def _age(k: Tensor, position: Tensor) -> Tensor:
    """How many steps ago each slot of a ring buffer was written, for each row of the batch."""
    return (position[:, None, None, None] - keys(k)) % k.shape[-2]


def _written(k: Tensor, position: Tensor) -> Tensor:
    """The position that a slot of a ring buffer holds; negative where none was written."""
    return position - (position - keys(k)) % k.shape[-2]


# What is kept, of (q, k, what the program knows), and the bounds that say all of it.
EXACT: dict[str, tuple[Keep, Tensor, int, set[str]]] = {
    "a position": (lambda q, k, p: keys(k) <= p, POSITION, 1, {"ends"}),
    "a position, the other way round": (lambda q, k, p: ~(p < keys(k)), POSITION, 1, {"ends"}),
    "below a position": (lambda q, k, p: keys(k) - p < 1, POSITION, 5, {"ends"}),
    "a position in int32": (lambda q, k, p: keys(k).int() <= p.int(), POSITION, 1, {"ends"}),
    "the query's position": (lambda q, k, p: keys(k) <= (torch.arange(1) + p)[:, None], POSITION, 1, {"ends"}),
    "lengths": (lambda q, k, n: keys(k) < n[:, None, None, None], LENGTHS, 3, {"ends"}),
    "left padding": (lambda q, k, n: keys(k) >= n[:, None, None, None], LENGTHS, 3, {"starts"}),
    "a window": (lambda q, k, p: (keys(k) <= p) & (keys(k) > p - 4), POSITION, 1, {"starts", "ends"}),
    "two bounds": (lambda q, k, p: (keys(k) <= p) & (keys(k) <= 2 * p - 15), POSITION, 1, {"ends"}),
    "causal from a position": (lambda q, k, p: keys(k) <= rows(q) + p, POSITION, 5, {"shift", "after"}),
    "of each row of the batch": (
        lambda q, k, n: keys(k) <= rows(q) + n[:, None, None, None],
        LENGTHS,
        5,
        {"shift", "after"},
    ),
    "a window from a position": (
        lambda q, k, p: (keys(k) <= rows(q) + p) & (keys(k) > rows(q) + p - 4),
        POSITION,
        5,
        {"shift", "after", "before"},
    ),
    "a ring by what its slots hold": (lambda q, k, p: _written(k, p) >= 0, POSITION, 1, {"ends"}),
    "a ring of each row of the batch": (
        lambda q, k, n: _age(k, n) <= n[:, None, None, None],
        LENGTHS,
        1,
        {"ends"},
    ),
    "chunks": (lambda q, k, p: keys(k) // 8 == rows(q) // 8, POSITION, 21, {"chunk"}),
    "chunks, few rows": (lambda q, k, p: keys(k) // 2 == rows(q) // 2, POSITION, 5, {"chunk"}),
    "chunks that begin elsewhere": (
        lambda q, k, p: (keys(k) + 3) // 8 == (rows(q) + 29) // 8,
        POSITION,
        21,
        {"chunk", "chunk_rows", "chunk_keys"},
    ),
    "causal chunks": (
        lambda q, k, p: (keys(k) <= rows(q)) & (keys(k) // 8 == rows(q) // 8),
        POSITION,
        21,
        {"chunk", "after"},
    ),
    "windows in chunks": (
        lambda q, k, p: ((keys(k) - rows(q)).abs() < 4) & (keys(k) // 8 == rows(q) // 8),
        POSITION,
        21,
        {"chunk", "after", "before"},
    ),
    "a prefix": (lambda q, k, p: (keys(k) < 13) | (keys(k) <= rows(q)), POSITION, 21, {"prefix", "after"}),
    "a prefix, few rows": (lambda q, k, p: (keys(k) < 3) | (keys(k) <= rows(q)), POSITION, 5, {"prefix", "after"}),
    "a prefix in a window": (
        lambda q, k, p: ((keys(k) < 13) | (keys(k) <= rows(q))) & (keys(k) > rows(q) - 4),
        POSITION,
        21,
        {"prefix", "after", "before"},
    ),
    "a prefix in chunks": (
        lambda q, k, p: ((keys(k) < 13) | (keys(k) <= rows(q))) & (keys(k) // 8 == rows(q) // 8),
        POSITION,
        21,
        {"prefix", "after", "chunk"},
    ),
    "a prefix and a position": (lambda q, k, p: (keys(k) >= 2) & (keys(k) <= p), POSITION, 1, {"start", "ends"}),
}
# What the bounds say in part: the rest stays a mask.
IN_PART: dict[str, tuple[Keep, Tensor, int, set[str]]] = {
    "chunks of two sizes": (
        lambda q, k, p: (keys(k) // 8 == rows(q) // 8) & (keys(k) // 6 == rows(q) // 6),
        POSITION,
        21,
        {"chunk", "keep"},
    ),
    "a prefix in a triangle": (
        lambda q, k, p: ((keys(k) < 13) | (keys(k) <= rows(q))) & (keys(k) <= rows(q) + 2),
        POSITION,
        21,
        {"after", "prefix", "keep"},
    ),
    "a prefix beside a window": (
        lambda q, k, p: (keys(k) < 3) | ((keys(k) <= rows(q)) & (keys(k) > rows(q) - 4)),
        POSITION,
        21,
        {"keep"},
    ),
    "chunks beside a position": (
        lambda q, k, p: (keys(k) <= rows(q) + p) & (keys(k) // 8 == rows(q) // 8),
        POSITION,
        21,
        {"shift", "after", "keep"},
    ),
    "positions of queries": (lambda q, k, p: keys(k) <= p[:, None], QUERIES, 5, {"ends", "keep"}),
    "windows of queries": (
        lambda q, k, p: (keys(k) <= p[:, None]) & (keys(k) > p[:, None] - 4),
        QUERIES,
        5,
        {"starts", "ends", "keep"},
    ),
    "a position and a hole": (lambda q, k, p: (keys(k) <= p) & (keys(k) != 5), POSITION, 1, {"ends", "keep"}),
    "two positions": (
        lambda q, k, p: (keys(k) <= rows(q) + p) & (keys(k) >= rows(q) - p),
        POSITION,
        5,
        {"shift", "after", "keep"},
    ),
    "a band beside a position": (
        lambda q, k, p: (keys(k) <= rows(q) + p) & (keys(k) >= rows(q) - 2),
        POSITION,
        5,
        {"shift", "after", "keep"},
    ),
}
# Several ranges: their hull is what is read, and the mask stays.
HULLS: dict[str, tuple[Keep, Tensor, int, set[str]]] = {
    "a sink beside a window": (
        lambda q, k, p: ((keys(k) <= p) & (keys(k) > p - 4)) | (keys(k) == 0),
        POSITION,
        1,
        {"ends", "keep"},
    ),
    "a sink beside windows of rows": (
        lambda q, k, n: (
            (keys(k) < 2)
            | ((keys(k) <= rows(q) + n[:, None, None, None]) & (keys(k) > rows(q) + n[:, None, None, None] - 4))
        ),
        LENGTHS,
        5,
        {"ends", "keep"},
    ),
    "a key behind it": (lambda q, k, p: (keys(k) <= p) | (keys(k) == 40), POSITION, 1, {"ends", "keep"}),
    "two windows": (
        lambda q, k, p: ((keys(k) <= p) & (keys(k) > p - 4)) | ((keys(k) <= p + 20) & (keys(k) > p + 16)),
        POSITION,
        1,
        {"starts", "ends", "keep"},
    ),
    "a prefix beside causal": (
        lambda q, k, p: (keys(k) <= rows(q) + p) | (keys(k) < 19),
        POSITION,
        5,
        {"ends", "keep"},
    ),
    "a ring buffer that fills up": (lambda q, k, p: (keys(k) <= p) | (p >= 49), POSITION, 1, {"ends", "keep"}),
    "a ring buffer": (lambda q, k, p: (keys(k) - p) % 50 >= 30, POSITION, 1, {"starts", "ends", "keep"}),
    "the newest of a ring": (lambda q, k, p: (p - keys(k)) % 50 < 20, POSITION, 1, {"starts", "ends", "keep"}),
    "a ring and a number of slots": (
        lambda q, k, n: _age(k, n) < n[:, None, None, None] - 1,
        LENGTHS,
        1,
        {"starts", "ends", "keep"},
    ),
    "a ring of queries": (lambda q, k, p: (p[:, None] - keys(k)) % 50 < 6, QUERIES, 5, {"starts", "ends", "keep"}),
    "a window of a ring": (
        lambda q, k, p: (_written(k, p) >= 0) & (_written(k, p) > p - 8),
        POSITION,
        1,
        {"starts", "ends", "keep"},
    ),
}
# What looks like a bound, and keeps keys outside of it.
NONE: dict[str, tuple[Keep, Tensor, int, set[str]]] = {
    "chunks that begin before the first key": (
        lambda q, k, p: keys(k) // 8 == (rows(q) - 9) // 8,
        POSITION,
        21,
        {"keep"},
    ),
    "every seventh behind it": (lambda q, k, p: (keys(k) <= p) | (keys(k) % 7 == 3), POSITION, 1, {"keep"}),
    "the last beside it": (lambda q, k, p: (keys(k) <= p) | (keys(k) == k.shape[-2] - 1), POSITION, 1, {"keep"}),
    "all but one beside it": (lambda q, k, p: (keys(k) <= p) | (keys(k) >= 2), POSITION, 1, {"keep"}),
    "not below": (lambda q, k, p: ~(keys(k) * keys(k) <= p), POSITION, 1, {"keep"}),
    "twice the key": (lambda q, k, p: keys(k) * 2 <= p, POSITION, 1, {"keep"}),
    "a number for each key": (lambda q, k, p: keys(k) <= p.repeat(10)[: k.shape[-2]], QUERIES, 1, {"keep"}),
    "a ring larger than the cache is not full": (lambda q, k, p: (p - keys(k)) % 49 <= p, POSITION, 1, {"keep"}),
    "the age of a scaled slot": (lambda q, k, p: (p - 2 * keys(k)) % 50 <= 20, POSITION, 1, {"keep"}),
    "an age in float": (lambda q, k, p: (p * 1.0 - keys(k)) % 50 <= 20, POSITION, 1, {"keep"}),
    "the least age": (lambda q, k, p: (p - keys(k)) % 50 >= p - 2, POSITION, 1, {"keep"}),
    "a float": (lambda q, k, p: keys(k) <= p * 0.9, POSITION, 1, {"keep"}),
    "a byte that wraps around": (lambda q, k, p: keys(k) <= p.to(torch.uint8) + 250, POSITION, 1, {"keep"}),
}
ALL = EXACT | IN_PART | HULLS | NONE


def attend(keep: Keep, fill: float = NEG_INF, added: bool = False) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, known: Tensor) -> Tensor:
        if k.shape[1] != q.shape[1]:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        kept = keep(q, k, known)
        scores = q @ k.mT * 0.3
        scores = scores + torch.where(kept, 0.0, fill) if added else scores.masked_fill(~kept, fill)
        return scores.softmax(-1) @ v

    return run


def reported(fn: Callable[..., Any], *inputs: Tensor, **options: Any) -> dict[str, Any]:
    """What the emitted operator is given by name."""
    (given,) = all_reported(fn, *inputs, **options)
    return given


def all_reported(fn: Callable[..., Any], *inputs: Tensor, **options: Any) -> list[dict[str, Any]]:
    """What each operator that is emitted is given by name."""
    calls: list[torch.fx.Node] = []

    def seen(gm: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        calls.extend(n for n in gm.graph.nodes if "attn_pass.attention" in str(n.target))
        return gm

    backend = attn_pass.wrap(seen, choose="fused", targets=("cpu_kernel",), on_error="raise", **options)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(fn, backend=backend)(*inputs)
    return [dict(call.kwargs) for call in calls]


def on_kernel(fn: Callable[..., Tensor], *inputs: Tensor, **more: Any) -> attn_pass.Report:
    with torch.no_grad():
        return same(fn, *inputs, rewritten=1, targets=("cpu_kernel",), **more)


FORMS = ((NEG_INF, False), (-1e9, False), (LOWEST, True), (-1e9, True))


@pytest.mark.parametrize("name", ALL)
def test_the_program_s_numbers(name: str) -> None:
    """Each form with keys of every head or of one for all, in turn from mask to mask."""
    keep, known, q_len, _ = ALL[name]
    programs, then = {}, [[], []]  # type: ignore[var-annotated]
    for number, form in enumerate(FORMS, list(ALL).index(name)):
        kv_heads = (1, 4)[number % 2]
        inputs = qkv(2, 4, q_len, 50, kv_heads=kv_heads)
        programs[f"{form}, {kv_heads} heads of keys"] = attend(keep, *form), (*inputs, known)
        for given, moved in zip(then, (-12, 45)):  # rows for which nothing is valid, and positions behind all keys
            given.append((*inputs, known + moved))
    with torch.no_grad():
        same_each(programs, then=then, targets=("cpu_kernel",))


@pytest.mark.parametrize(("rows", "form"), [(ALL, (NEG_INF, False)), (EXACT, (LOWEST, True))], ids=["filled", "added"])
def test_the_arguments_of_the_kernel(rows: dict[str, Row], form: tuple[float, bool]) -> None:
    """An added mask is bounds as well."""
    inputs = [(*qkv(2, 4, q_len, 50), known) for _, known, q_len, _ in rows.values()]
    whole = Together([(attend(keep, *form), 4) for keep, *_ in rows.values()])
    given = all_reported(whole, *(x for of_one in inputs for x in of_one))
    told = {name: set(arguments) - {"fully_masked", "heads_first"} for name, arguments in zip(rows, given, strict=True)}
    assert told == {name: wanted for name, (*_, wanted) in rows.items()}


def test_a_weak_number_that_is_added_stays() -> None:
    """Of a row of nothing but -1e9 something of large scores is left, which the kernel adds it to."""
    keep, known, q_len, _ = EXACT["a position"]
    given = reported(attend(keep, -1e9, True), *qkv(2, 4, q_len, 50), known)
    assert "bias" in given and "ends" not in given


def test_two_fills_that_are_added_stay() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, p: Tensor) -> Tensor:
        mask = torch.where(keys(k) <= p, 0.0, torch.where(keys(k) <= p + 4, -1e30, LOWEST))
        return (q @ k.mT + mask).softmax(-1) @ v

    assert "bias" in reported(run, *qkv(2, 4, 1, 50), POSITION)
    on_kernel(run, *qkv(2, 4, 1, 50), POSITION - 20, reference=False)


def test_invalid_keys_are_never_read() -> None:
    """A cache holds anything behind the last valid key."""
    q, k, v = qkv(2, 4, 1, 300)
    k[:, :, 13:], v[:, :, 13:] = torch.nan, torch.inf
    fn = torch.compile(
        attend(EXACT["a position"][0]), backend=attn_pass.wrap("eager", choose="fused", targets=("cpu_kernel",))
    )
    with torch.no_grad():
        torch.testing.assert_close(
            fn(q, k, v, torch.tensor(12)),
            attend(EXACT["a position"][0])(q, k[:, :, :13], v[:, :, :13], torch.tensor(12)),
        )


def counted_up(q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
    """As transformers' static cache does it: the mask is made, then the position is counted up in place."""
    keep = keys(k) <= (torch.arange(q.shape[-2]) + position)[:, None]
    position.add_(q.shape[-2])
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)


def overwritten(q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
    """Nothing that the mask was made of holds its value."""
    keep = keys(k) <= position
    position.add_(1)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep[None])


def test_a_position_that_is_counted_up_before_the_attention() -> None:
    assert "ends" in reported(counted_up, *qkv(2, 4, 1, 50), POSITION.clone())
    assert "ends" not in reported(overwritten, *qkv(2, 4, 1, 50), POSITION.clone())
    for fn in (counted_up, overwritten):
        on_kernel(fn, *qkv(2, 4, 1, 50), POSITION.clone())


@pytest.mark.parametrize("name", ["lengths", "causal from a position", "windows of queries"])
def test_dynamic_sizes(name: str) -> None:
    keep, known, q_len, _ = ALL[name]
    on_kernel(attend(keep), *qkv(2, 4, q_len, 50), known, dynamic=True)


def test_inductor_compiles_it_and_one_graph_serves_every_position() -> None:
    keep, _, q_len, _ = ALL["a window from a position"]
    q, k, v = qkv(2, 4, q_len, 50, kv_heads=2)
    torch._dynamo.reset()
    compiled = torch.compile(
        attend(keep), backend=attn_pass.backend, options={"targets": ("cpu_kernel",), "choose": "fused"}, fullgraph=True
    )
    with torch.no_grad(), attn_pass.record() as report:
        for position in (0, 7, 44, 60):
            inputs = (q, k, v, torch.tensor(position))
            got, wanted = compiled(*inputs), attend(keep)(*inputs)
            torch.testing.assert_close(got, wanted, equal_nan=True)
    assert len(report.sites) == 1 and report.sites[0].target == "cpu_kernel"


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.bfloat16, torch.float32)])
def test_a_comparison_of_two_types_is_not_computed_again(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """With a tensor without dimensions torch compares in the other's type, in which 0.3 equals 0.3."""
    distance, radius = torch.full((8, 8), 0.3, dtype=dtypes[0]), torch.tensor(0.3, dtype=dtypes[1])

    def run(q: Tensor, k: Tensor, v: Tensor, distance: Tensor, radius: Tensor) -> Tensor:
        keep = torch.ones(8, 8, dtype=torch.bool).tril() & (distance <= radius)
        return (q @ k.mT * 0.25).masked_fill(~keep, NEG_INF).softmax(-1) @ v

    same(run, *qkv(), distance, radius, reference=False, targets=("cpu_kernel",), rewritten=1)
