"""Names of masks, their spellings, and look-alikes that must not get the name; each compared with eager."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from against_eager import Together, qkv, same, same_each
from programs import DIALECTS, check, close
from torch import Tensor
from torch.nn import functional as F

import attn_pass
from attn_pass.model.expression import Apply, Const, Dot, apply
from attn_pass.model.mask import Mask
from attn_pass.model.reference import reference
from attn_pass.poor_cases import key_range

transformers = pytest.importorskip("transformers")
masking = pytest.importorskip("transformers.masking_utils")
INF = float("inf")
N = 12
Keep = Callable[[int, int], Tensor]


def attend(s: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(s, -1) @ v


def lowest() -> float:
    """As models write it. A number of the module Dynamo makes a symbol, and traces all once more where it cannot be."""
    return torch.finfo(torch.float32).min


def scores(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2)) * 0.25


def rows(n: int, first: int = 0) -> Tensor:
    return torch.arange(first, first + n)[:, None]


def columns(n: int) -> Tensor:
    return torch.arange(n)[None, :]


def grid(n: int, m: int, indexing: str) -> tuple[Tensor, ...]:
    return torch.meshgrid(torch.arange(n), torch.arange(m), indexing=indexing)


def lower(n: int, m: int, diagonal: int = 0) -> Tensor:
    return torch.ones(n, m, dtype=torch.bool).tril(diagonal)


def one_sequence(n: int, prepend: int = 1, dim: int = -1) -> Tensor:
    """Transformers' packed-sequence detection on positions the program makes itself."""
    position = torch.arange(n)[None, :].expand(2, -1)
    return (torch.diff(position, prepend=position[:, :1] - prepend, dim=-1) != 1).cumsum(dim)


def same_sequence(sequence: Tensor) -> Tensor:
    return sequence[:, None, :, None] == sequence[:, None, None, :]


HIDE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "masked_fill": lambda s, keep: s.masked_fill(~keep, -INF),
    "where": lambda s, keep: torch.where(keep, s, lowest()),
    "added": lambda s, keep: s + torch.zeros(keep.shape).masked_fill(~keep, lowest()),
    "added product": lambda s, keep: s + (1.0 - keep.float()) * -1e9,
    "added where": lambda s, keep: torch.where(keep, torch.zeros(()), -INF) + s,
}

# name -> spellings over (query length, key length)
NAMED: dict[str, dict[str, Keep]] = {
    "causal": {
        "tril": lower,
        "not triu": lambda n, m: ~torch.ones(n, m, dtype=torch.bool).triu(1),
        "tril of numbers": lambda n, m: torch.tril(torch.ones(n, m)) == 1,
        "arange <=": lambda n, m: columns(m) <= rows(n),
        "arange >": lambda n, m: rows(n) + 1 > columns(m),
        "difference": lambda n, m: (rows(n) - columns(m)) >= 0,
        "of cumsum": lambda n, m: torch.ones(m, dtype=torch.int64).cumsum(0) <= rows(n) + 1,
        "and true": lambda n, m: lower(n, m) & torch.ones((), dtype=torch.bool) & (rows(n) >= 0),
        "or false": lambda n, m: lower(n, m) | torch.zeros(n, m, dtype=torch.bool),
        "product": lambda n, m: lower(n, m).float() * torch.ones(n, m) != 0,
        "product of truth": lambda n, m: lower(n, m) * lower(n, m, 2),
        "de morgan": lambda n, m: ~((columns(m) > rows(n)) | (rows(n) < 0)),
        "chosen": lambda n, m: torch.where(columns(m) > rows(n), False, True),
        "filled": lambda n, m: torch.ones(n, m, dtype=torch.bool).masked_fill(columns(m) > rows(n), False),
        "indexed": lambda n, m: lower(n, m)[rows(n), columns(m)],
        "grid": lambda n, m: (lambda i, j: i >= j)(*grid(n, m, "ij")),
        "grid of x and y": lambda n, m: (lambda j, i: i >= j)(*grid(m, n, "xy")),
        "rows below each other": lambda n, m: torch.vstack([lower(n, m)[: n // 2], lower(n, m)[n // 2 :]]),
        "rows that go on": lambda n, m: torch.cat([lower(5, m), torch.cat([lower(1, m, 5), lower(n - 6, m, 6)])]),
        "indexed positions": lambda n, m: torch.arange(m)[columns(m)] <= torch.arange(n)[rows(n)],
        "one packed sequence": lambda n, m: same_sequence(one_sequence(n)) & (columns(m) <= rows(n)),
    },
    "sliding window (2, 0)": {
        "tril and triu": lambda n, m: lower(n, m) & torch.ones(n, m, dtype=torch.bool).triu(-2),
        "tril of triu": lambda n, m: torch.ones(n, m).triu(-2).tril().bool(),
        "transformers": lambda n, m: (columns(m) > rows(n) - 3) & (columns(m) <= rows(n)),
        "distance": lambda n, m: ((rows(n) - columns(m)) < 3) & ((rows(n) - columns(m)) >= 0),
        "not far": lambda n, m: ~((rows(n) - columns(m) > 2) | (rows(n) - columns(m) < 0)),
    },
    "sliding window (2, 2)": {
        "abs": lambda n, m: (rows(n) - columns(m)).abs() <= 2,
        "abs of the other": lambda n, m: torch.abs(columns(m) - rows(n)).lt(3),
        "two sides": lambda n, m: (columns(m) - rows(n) <= 2) & (columns(m) - rows(n) >= -2),
    },
    "chunked (4)": {
        "//": lambda n, m: columns(m) // 4 == rows(n) // 4,
        "div": lambda n, m: torch.div(columns(m), 4, rounding_mode="floor") == torch.floor_divide(rows(n), 4),
    },
    "causal and chunked (4)": {
        "both": lambda n, m: lower(n, m) & (columns(m) // 4 == rows(n) // 4),
        "shifted by a chunk": lambda n, m: lower(n, m) & ((columns(m) + 4) // 4 == rows(n) // 4 + 1),
    },
    "causal or prefix (3)": {
        "or": lambda n, m: (columns(m) <= rows(n)) | (columns(m) < 3),
        "filled": lambda n, m: lower(n, m).masked_fill(columns(m) <= 2, True),
    },
    "causal or chunked (4)": {
        "chunks up to the own": lambda n, m: rows(n) // 4 >= columns(m) // 4,
        "up to the end of the own": lambda n, m: columns(m) < (rows(n) // 4 + 1) * 4,
        "toward zero": lambda n, m: (
            torch.div(rows(n), 4, rounding_mode="trunc") >= columns(m).div(4, rounding_mode="trunc")
        ),
        "not of a later chunk": lambda n, m: ~(columns(m) // 4 > rows(n) // 4),
        "before a later chunk": lambda n, m: columns(m) // 4 < rows(n) // 4 + 1,
        "or": lambda n, m: (columns(m) // 4 == rows(n) // 4) | (columns(m) <= rows(n)),
    },
    "prefix (5)": {
        "arange": lambda n, m: (columns(m) < 5).expand(n, m),
        "of a chunk": lambda n, m: (columns(m) // 5 <= 0).expand(n, m),
        "cat": lambda n, m: torch.cat([torch.ones(5, dtype=torch.bool), torch.zeros(m - 5, dtype=torch.bool)])[None],
    },
    "none": {
        "ones": lambda n, m: torch.ones(n, m, dtype=torch.bool),
        "bidirectional": lambda n, m: rows(n) >= 0,
        "one packed sequence": lambda n, m: same_sequence(one_sequence(n)),
    },
}
OPERANDS = qkv(q_len=N, kv_len=N)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", NAMED)
def test_named(name: str, dynamic: bool) -> None:
    """Each spelling, hidden in a way of its own, is named; compiled for one size and for any it is what eager is."""

    def program(make: Keep, hide: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
        return lambda q, k, v: attend(hide(scores(q, k), make(q.shape[2], k.shape[2])), v)

    ways = itertools.cycle(HIDE.values())
    programs = {spelling: (program(make, next(ways)), OPERANDS) for spelling, make in NAMED[name].items()}
    report = same_each(programs, dynamic=dynamic, targets=("sdpa",))
    assert {spelling: site.mask for spelling, site in zip(programs, report.sites)} == dict.fromkeys(programs, name)


@pytest.mark.parametrize("hide", HIDE)
@pytest.mark.parametrize("name", ["causal", "sliding window (2, 2)", "none"])
def test_however_it_is_hidden(name: str, hide: str) -> None:
    make = next(iter(NAMED[name].values()))
    q, k, v = qkv(q_len=N, kv_len=N)
    mask = check(lambda q, k, v: attend(HIDE[hide](scores(q, k), make(N, N)), v), (q, k, v), "export")[0].attention
    assert (str(mask.mask), mask.mask.never_empty) == (name, True)


def test_a_lowest_number_that_is_a_symbol_becomes_one_constant() -> None:
    """A number of the module: for any length Dynamo makes a symbol of it, and what cannot be one is traced again."""
    number = lowest()
    hide: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "masked_fill": lambda s, keep: s.masked_fill(~keep, number),
        "where": lambda s, keep: torch.where(keep, s, number),
        "added": lambda s, keep: s + torch.zeros(keep.shape).masked_fill(~keep, number),
    }

    def program(way: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
        return lambda q, k, v: attend(way(scores(q, k), lower(q.shape[2], k.shape[2])), v)

    report = same_each({way: (program(f), OPERANDS) for way, f in hide.items()}, dynamic=True, targets=("sdpa",))
    assert [site.mask for site in report.sites] == ["causal"] * len(hide)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_structure_is_the_whole_mask(dialect: str) -> None:
    """With the structure's condition in place of whatever mask the program made, the attention is the same."""

    def program(make: Keep) -> Callable[..., Tensor]:
        return lambda q, k, v: attend(scores(q, k) + torch.zeros(()).masked_fill(~make(N, N), lowest()), v)

    whole = Together([(program(list(spellings.values())[-1]), 3) for spellings in NAMED.values()])
    read = check(whole, OPERANDS * len(NAMED), dialect, sites=len(NAMED))
    for name, meaning in zip(NAMED, read, strict=True):
        a = meaning.attention
        assert str(a.mask) == name and a.mask.structure.is_exact and a.mask.never_empty
        score = Apply("where", (a.mask.structure.condition(), apply("mul", Dot(), Const(a.scale)), Const(-INF)))
        structure = reference(replace(a, score=score), meaning.sources, meaning.sizes)
        close(structure, meaning.computed, f"the structure {name}")


# ---------------------------------------------------------------- what must not be named so

ALIKE: dict[str, tuple[str, Keep]] = {
    "one further": ("causal with offset 1", lambda n, m: lower(n, m, 1)),
    "< for <=": ("causal with offset -1", lambda n, m: columns(m) < rows(n)),
    "reversed": ("sliding window (0, all)", lambda n, m: columns(m) >= rows(n)),
    "transposed": ("sliding window (0, all)", lambda n, m: lower(m, n).mT),
    "grid of x and y": ("sliding window (0, all)", lambda n, m: (lambda i, j: i >= j)(*grid(n, m, "xy"))),
    "rows that begin again": ("dense", lambda n, m: torch.vstack([lower(5, m), lower(n - 5, m)])),
    "rows of the other triangle": ("dense", lambda n, m: torch.cat([lower(n, m)[:5], ~lower(n, m)[5:]])),
    "window on the other side": (
        "sliding window (0, 2)",
        lambda n, m: (columns(m) < rows(n) + 3) & (columns(m) >= rows(n)),
    ),
    "window wider by one": ("sliding window (3, 0)", lambda n, m: lower(n, m) & (columns(m) >= rows(n) - 3)),
    "or for and": ("none", lambda n, m: lower(n, m) | (columns(m) > rows(n) - 3)),
    "or, of what leaves a gap": (
        "causal with offset -3 or sliding window (1, all)",
        lambda n, m: lower(n, m, -3) | (columns(m) >= rows(n) - 1),
    ),
    "every second": ("dense", lambda n, m: columns(m) <= 2 * rows(n)),
    "flipped": ("dense", lambda n, m: torch.arange(m - 1, -1, -1)[None] <= rows(n)),
    "every second key": ("causal and dense", lambda n, m: (columns(m) % 2 == 0) & lower(n, m)),
    "not equal": ("dense, by distance", lambda n, m: columns(m) != rows(n)),
    "chunks from the own on": ("sliding window (0, all) or chunked (4)", lambda n, m: columns(m) // 4 >= rows(n) // 4),
    "chunks before the own": (
        "causal with offset -4 or chunked (4) shifted by (0, -4)",
        lambda n, m: columns(m) // 4 < rows(n) // 4,
    ),
    "chunks from the start of the own on": (
        "sliding window (0, all) or chunked (4)",
        lambda n, m: columns(m) >= rows(n) // 4 * 4,
    ),
    "chunks up to before the end of the own": (
        "causal with offset -1 or chunked (4) shifted by (1, 0)",
        lambda n, m: columns(m) < rows(n) // 4 * 4 + 3,
    ),
    "chunks of another length than their steps": ("dense", lambda n, m: columns(m) < (rows(n) // 4 + 1) * 3),
    "chunks of other lengths": ("dense", lambda n, m: columns(m) // 4 <= rows(n) // 3),
    "chunks up to the own, moved on": (
        "causal with offset -1 or chunked (4) shifted by (1, 0)",
        lambda n, m: (columns(m) + 1) // 4 <= rows(n) // 4,
    ),
    "shifted chunks": (
        "causal and chunked (4) shifted by (1, 0)",
        lambda n, m: lower(n, m) & ((columns(m) + 1) // 4 == rows(n) // 4),
    ),
    "each its own sequence": (
        "sliding window (0, 0)",
        lambda n, m: lower(n, m) & same_sequence(torch.diff(torch.arange(0, 2 * n + 2, 2)[None]).cumsum(-1)),
    ),
    "a sequence that starts elsewhere": (
        "causal and document",
        lambda n, m: lower(n, m) & same_sequence(one_sequence(n, prepend=5)),
    ),
    "cumsum over the batch": (
        "causal and document",
        lambda n, m: lower(n, m) & same_sequence(one_sequence(n, prepend=5, dim=0)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
def test_look_alikes(dynamic: bool) -> None:
    """What differs by one, by a direction or by a dimension is named for what it is, or not at all."""

    def program(make: Keep) -> Callable[..., Tensor]:
        return lambda q, k, v: attend(scores(q, k).masked_fill(~make(q.shape[2], k.shape[2]), lowest()), v)

    programs = {alike: (program(make), OPERANDS) for alike, (_, make) in ALIKE.items()}
    report = same_each(programs, dynamic=dynamic, targets=("sdpa",))
    assert {a: site.mask for a, site in zip(ALIKE, report.sites)} == {a: name for a, (name, _) in ALIKE.items()}


# ---------------------------------------------------------------- positions as floats


def floats(first: int, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(first, first + n, dtype=dtype)


def ordered(i: Tensor, j: Tensor) -> Tensor:
    return i[:, None] >= j[None]


F16, BF16 = torch.float16, torch.bfloat16
# name -> its mask, lengths of queries and keys, positions compared
OF_FLOATS: dict[str, tuple[str, int, int, Keep]] = {
    "float32": ("causal", 12, 12, lambda n, m: ordered(floats(0, n), floats(0, m))),
    "float64 and float32": ("causal", 7, 7, lambda n, m: ordered(floats(0, n, torch.float64), floats(0, m))),
    "float32 and integers": ("causal", 7, 7, lambda n, m: ordered(floats(0, n), torch.arange(m))),
    "bfloat16 and float16": ("causal", 5, 5, lambda n, m: ordered(floats(0, n, BF16), floats(0, m, F16))),
    "differences": (
        "causal",
        12,
        12,
        lambda n, m: (floats(0, n)[:, None] - floats(0, m)[None]) >= 0.0,
    ),
    "a window": (
        "sliding window (2, 2)",
        12,
        12,
        lambda n, m: (floats(0, n)[:, None] - floats(0, m)[None]).abs() <= 2.0,
    ),
    "differences cast to float": (
        "sliding window (2, all)",
        12,
        12,
        lambda n, m: (torch.arange(n)[:, None] - torch.arange(m)[None]).float() < 3,
    ),
    "cast back": ("causal", 12, 12, lambda n, m: ordered(floats(0, n).long(), floats(0, m, torch.float64).long())),
    "behind a cache": ("causal with offset 8", 5, 13, lambda n, m: ordered(floats(0, n) + (m - n), floats(0, m))),
    "one query": ("none", 1, 13, lambda n, m: ordered(floats(m - n, n), floats(0, m))),
    "one key": ("none", 7, 1, lambda n, m: ordered(floats(0, n), floats(0, m))),
    "float16 as far as it counts": (
        "causal with offset 2046", 3, 2049, lambda n, m: ordered(floats(m - n, n, F16), floats(0, m, F16))
    ),
    "bfloat16 as far as it counts": (
        "causal with offset 254", 3, 257, lambda n, m: ordered(floats(m - n, n, BF16), floats(0, m, BF16))
    ),
}  # fmt: skip
# Beyond what their type holds two positions are one.
ROUNDED_POSITIONS: dict[str, tuple[int, int, Keep]] = {
    "float16": (3, 2050, lambda n, m: ordered(floats(m - n, n, F16), floats(0, m, F16))),
    "float16 at 4096": (3, 4099, lambda n, m: ordered(floats(m - n, n, F16), floats(0, m, F16))),
    "bfloat16": (3, 258, lambda n, m: ordered(floats(m - n, n, BF16), floats(0, m, BF16))),
    "bfloat16 and float32": (5, 300, lambda n, m: ordered(floats(m - n, n), floats(0, m, BF16))),
    "integers cast to bfloat16": (5, 300, lambda n, m: ordered(torch.arange(m - n, m).bfloat16(), torch.arange(m))),
    "float32": (5, 5, lambda n, m: ordered(floats(2**24 - 2, n), floats(2**24 - 2, m))),
    "a sum in bfloat16": (5, 5, lambda n, m: ordered(floats(0, n, BF16) + 254, floats(0, m, BF16) + 254)),
    "a difference in bfloat16": (
        5, 5, lambda n, m: (floats(0, n, BF16) + 200 + floats(0, m, BF16)[:, None] + 60) >= 263
    ),
}  # fmt: skip


def of_positions(make: Keep) -> Callable[..., Tensor]:
    return lambda q, k, v: attend(scores(q, k).masked_fill(~make(q.shape[2], k.shape[2]), lowest()), v)


def test_positions_as_floats() -> None:
    programs = {name: (of_positions(f), qkv(q_len=n, kv_len=m)) for name, (_, n, m, f) in OF_FLOATS.items()}
    report = same_each(programs, targets=("sdpa",))
    assert {n: site.mask for n, site in zip(OF_FLOATS, report.sites)} == {n: x for n, (x, *_) in OF_FLOATS.items()}


def test_positions_that_their_type_rounds() -> None:
    programs = {name: (of_positions(f), qkv(q_len=n, kv_len=m)) for name, (n, m, f) in ROUNDED_POSITIONS.items()}
    report = same_each(programs, targets=("sdpa",))
    named = {name: site.mask.split(",")[0] for name, site in zip(programs, report.sites)}
    assert named == dict.fromkeys(programs, "dense")


def test_positions_as_floats_at_any_length() -> None:
    """How far a type has to count is not known then."""
    report = same_each({"any": (of_positions(OF_FLOATS["float32"][-1]), OPERANDS)}, dynamic=True, targets=("sdpa",))
    assert report.sites[0].mask.startswith("dense")


# ---------------------------------------------------------------- matrices that are filled by a test on themselves

Matrix = Callable[[Tensor], Tensor]  # what is added to scores, made for them


def ones(s: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.ones(s.shape[-2:], dtype=dtype or s.dtype)


def filled(m: Tensor, at: Tensor, fill: float = -INF) -> Tensor:
    return m.masked_fill(at, fill)


def until_torch_1_12(s: Tensor, late: float = 0.0) -> Tensor:
    """``generate_square_subsequent_mask`` of torch."""
    mask = (torch.triu(ones(s)) == 1).transpose(0, 1)
    return mask.to(s.dtype).masked_fill(mask == 0, -INF).masked_fill(mask == 1, late)


def inverted(m: Tensor) -> Tensor:
    """As transformers wrote it for years, of ones where a key is kept."""
    left = 1.0 - m
    return left.masked_fill(left.bool(), torch.finfo(m.dtype).min)


def changed_after_its_test(s: Tensor) -> Tensor:
    m = ones(s).triu(1)
    test = m == 1
    m.mul_(3)
    return m.masked_fill(test, -INF)


def changed_before_it_is_tested(s: Tensor) -> Tensor:
    m = ones(s).triu(1)
    m.mul_(3)
    return m.masked_fill(m == 1, -INF)


def written_afterwards(s: Tensor) -> Tensor:
    m = filled(ones(s).triu(1), ones(s).triu(1) == 1)
    m[:, 5:7] = 0
    return m


def partly_written(s: Tensor) -> Tensor:
    m = filled(ones(s).triu(1), ones(s).triu(1) == 1)
    m[:, ::2] = 0
    return m


def in_place(m: Tensor, value: float = 1, fill: float = -INF) -> Tensor:
    m[m == value] = fill
    return m


BY_ITSELF: dict[str, tuple[str, Matrix]] = {
    "in place": ("causal", lambda s: in_place(ones(s).triu(1))),
    "in place, twice": ("causal", lambda s: in_place(in_place(ones(s).tril(), 0), 1, 0.0)),
    "torch until 1.12": ("causal", until_torch_1_12),
    "a triangle": ("causal", lambda s: filled(ones(s).triu(1), ones(s).triu(1) == 1)),
    "of whole numbers": ("causal", lambda s: filled(ones(s).triu(1), ones(s, torch.int64).triu(1) > 0)),
    "of minus ones": ("causal", lambda s: filled(-ones(s).triu(1), -ones(s).triu(1) == -1)),
    "both values": (
        "causal",
        lambda s: filled(filled(ones(s).tril(), ones(s).tril() == 0), ones(s).tril() == 1, 0.0),
    ),
    "a narrower triangle": ("causal", lambda s: filled(ones(s).triu(3), ones(s).triu(1) == 1)),
    "inverted": ("causal", lambda s: inverted(ones(s).tril())),
    "inverted window": ("sliding window (2, 0)", lambda s: inverted(ones(s).tril().triu(-2))),
    "inverted chunks": ("chunked (4)", lambda s: inverted((rows(N) // 4 == columns(N) // 4).to(s.dtype))),
    "difference of triangles": ("sliding window (2, 0)", lambda s: inverted(ones(s).tril() - ones(s).tril(-3))),
    "tested before it changes": ("causal", changed_after_its_test),
}
# Where one value is left that neither masks nor is 0, and what is a triangle no more.
NOT_BY_ITSELF: dict[str, tuple[str, Matrix]] = {
    "a wider triangle": ("additive, by distance", lambda s: filled(ones(s).triu(1), ones(s).triu(3) == 1)),
    "three values": (
        "additive, by distance",
        lambda s: filled(ones(s).triu(1) + ones(s).triu(3), ones(s).triu(1) + ones(s).triu(3) == 2),
    ),
    "a test on a matrix transposed": (
        "additive, by distance",
        lambda s: filled(ones(s).triu(1).mT, ones(s).triu(1) == 1),
    ),
    "kept ones": ("additive, by distance", partial(until_torch_1_12, late=0.5)),
    "in place by a number that masks nothing": (
        "additive, by distance",
        lambda s: in_place(ones(s).triu(1), fill=-2.0),
    ),
    "in place, another value": ("additive, by distance", lambda s: in_place(ones(s).triu(1), 3)),
    "no such value": ("additive, by distance", lambda s: filled(ones(s).triu(1), ones(s).triu(1) == 2)),
    "the other side": ("sliding window (0, all)", lambda s: filled(ones(s).tril(-1), ones(s).tril(-1) == 1)),
    "changed before it is tested": ("additive, by distance", changed_before_it_is_tested),
    "written afterwards": ("causal or keys from 5 to 6", written_afterwards),
    "every second column written": ("additive", partly_written),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matrices_filled_by_a_test_on_themselves(dtype: torch.dtype) -> None:
    """The test decides which value is left at each place: a value that is left nowhere does not count."""

    def program(make: Matrix) -> Callable[..., Tensor]:
        return lambda q, k, v: attend(scores(q, k) + make(scores(q, k)), v)

    named = BY_ITSELF | NOT_BY_ITSELF
    programs = {name: (program(make), qkv(q_len=N, kv_len=N, dtype=dtype)) for name, (_, make) in named.items()}
    report = same_each(programs, targets=("sdpa",), reference=False)
    got = {name: site.mask for name, site in zip(named, report.sites, strict=True)}
    assert got == {name: mask for name, (mask, _) in named.items()}
    if dtype == torch.float32:
        same_each({name: programs[name] for name in BY_ITSELF}, targets=("sdpa",), dynamic=False)


@pytest.mark.parametrize("dynamic", [False, True])
def test_in_training_a_matrix_filled_by_a_test_on_itself(dynamic: bool) -> None:
    for make in (until_torch_1_12, lambda s: inverted(ones(s).tril())):
        operands = qkv(q_len=N, kv_len=N, grad=True)
        report = same(
            lambda q, k, v, make=make: attend(scores(q, k) + make(scores(q, k)), v),
            *operands,
            rewritten=1,
            grad=True,
            dynamic=dynamic,
            targets=("sdpa",),
        )
        assert report.sites[0].mask == "causal"


def test_a_matrix_that_is_given_is_filled_by_its_values() -> None:
    """Nothing is known of what a placeholder holds, nor of what a fill of NaN leaves of a row."""

    def given(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return attend(scores(q, k) + m.masked_fill(m == 1, -INF), v)

    def of_another(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return attend(scores(q, k) + ones(m).triu(1).masked_fill(m == 1, -INF), v)

    def not_a_number(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return attend(scores(q, k) + ones(m).triu(1).masked_fill(ones(m).triu(1) == 1, m.new_tensor(INF) - INF), v)

    for program in (given, of_another, not_a_number):
        report = same(program, *OPERANDS, torch.ones(N, N).triu(1), rewritten=None, targets=("sdpa",))
        assert "causal" not in report.sites[0].mask, program


# In half precision, what a number is compared with is rounded: -3.4e38 is -inf, and 1e-9 is 0.
ROUNDED: dict[str, tuple[torch.dtype, str, Matrix]] = {
    "a lowest number": (
        torch.bfloat16,
        "causal",
        lambda s: torch.full((N, N), lowest()).triu(1).to(s.dtype) == lowest(),
    ),
    "below the lowest number": (
        torch.bfloat16,
        "none",
        lambda s: torch.full((N, N), -INF).triu(1).to(s.dtype) < lowest(),
    ),
    "infinity": (torch.float16, "causal", lambda s: torch.full((N, N), INF, dtype=s.dtype).triu(1) == 1e6),
    "almost 0": (torch.float16, "causal", lambda s: ones(s).triu(1) != 1e-9),
    "above almost 0": (torch.bfloat16, "causal", lambda s: ones(s).triu(1) > 1e-50),
    "in float32": (torch.float32, "causal", lambda s: torch.full((N, N), lowest()).triu(1) == lowest()),
    "twice the lowest number": (
        torch.float32,
        "dense",
        lambda s: torch.full((N, N), lowest()).triu(1) + torch.full((N, N), lowest()).triu(1) == -INF,
    ),
    "almost 0 in float32": (torch.float32, "none", lambda s: (ones(s) * 0).triu(1) >= 1e-9),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_a_number_is_compared_as_the_type_holds_it(name: str) -> None:
    dtype, mask, test = ROUNDED[name]
    report = same(
        lambda q, k, v: attend(scores(q, k).masked_fill(test(scores(q, k)), -INF), v),
        *qkv(q_len=N, kv_len=N, dtype=dtype),
        rewritten=1,
        reference=False,
        targets=("sdpa",),
    )
    assert report.sites[0].mask == mask


# ---------------------------------------------------------------- lengths that differ


def by_slices(n: int, m: int) -> Tensor:
    """As nanochat does, with a cache before the queries."""
    keep, past = torch.zeros((n, m), dtype=torch.bool), m - n
    if past > 0:
        keep[:, :past] = True
    keep[:, past:] = lower(n, n)
    return keep


OFFSET: dict[str, Keep] = {
    "by slices": by_slices,
    "arange from": lambda n, m: columns(m) <= torch.arange(m - n, m)[:, None],
    "added": lambda n, m: columns(m) <= rows(n) + (m - n),
    "tril": lambda n, m: lower(n, m, m - n),
    "transformers": lambda n, m: masking.sdpa_mask(2, n, m, q_offset=m - n, allow_is_causal_skip=False),
}


@pytest.mark.parametrize("n, name", [(5, "causal with offset"), (1, "none")])
def test_aligned_to_the_last_key(n: int, name: str) -> None:
    """A cache's mask: no row is fully masked, and a single query sees every key."""

    def program(make: Keep) -> Callable[..., Tensor]:
        return lambda q, k, v: attend(scores(q, k).masked_fill(~make(q.shape[2], k.shape[2]), lowest()), v)

    programs = {spelling: (program(make), qkv(q_len=n, kv_len=N)) for spelling, make in OFFSET.items()}
    for dynamic in (False, True):
        report = same_each(programs, dynamic=dynamic, targets=("sdpa",))
        assert all(site.mask.startswith(name) for site in report.sites), (dynamic, str(report))
    whole, operands = Together([(fn, 3) for fn, _ in programs.values()]), qkv(q_len=n, kv_len=N)
    read = check(whole, operands * len(programs), "dynamo", sites=len(programs))
    assert {s: m.attention.mask.never_empty for s, m in zip(programs, read)} == dict.fromkeys(programs, True)


def written(*parts: Callable[[Tensor, int], object], by: Callable[[int, int], Tensor] = by_slices) -> Keep:
    """A mask that is written to once more, in front of a cache of that length or in it."""

    def make(n: int, m: int) -> Tensor:
        keep = by(n, m)
        for part in parts:
            part(keep, m - n)
        return keep

    return make


def put(x: Tensor, rows: slice, columns: slice, value: bool | Tensor) -> None:
    x[rows, columns] = value


def none(n: int, m: int) -> Tensor:
    return torch.zeros((n, m), dtype=torch.bool)


ALL = slice(None)
# Five queries and seven keys before them.
SLICES: dict[str, tuple[str, Keep]] = {
    "nanochat": ("causal with offset 7", by_slices),
    "all hidden in front": (
        "causal with offset 7 and keys from 7",
        written(lambda x, past: put(x, ALL, slice(past, None), lower(5, 5)), by=none),
    ),
    "the other triangle": (
        "sliding window (-7, all) or prefix (7)",
        written(lambda x, past: put(x, ALL, slice(past, None), lower(5, 5).mT)),
    ),
    "one key is left out": (
        "causal with offset 7 and (keys from 7 or prefix (6))",
        written(lambda x, past: put(x, ALL, slice(past - 1, past), False)),
    ),
    "a key more, which the first row keeps": (
        "causal with offset 7",
        written(lambda x, past: put(x, ALL, slice(past + 1), True)),
    ),
    "two keys more": (
        "causal with offset 7 or prefix (9)",
        written(lambda x, past: put(x, ALL, slice(past + 2), True)),
    ),
    "written over by nothing": ("causal with offset 7", written(lambda x, past: put(x, ALL, slice(3, 3), False))),
    "keys hidden afterwards": (
        "keys from 5 or prefix (3)",
        written(lambda x, past: put(x, ALL, ALL, True), lambda x, past: put(x, ALL, slice(3, 5), False)),
    ),
    "a row shown afterwards": ("dense", written(lambda x, past: put(x, slice(2, 3), ALL, True))),
    "shown afterwards": ("none", written(lambda x, past: put(x, ALL, ALL, True))),
    "every second key": ("dense", written(lambda x, past: put(x, ALL, slice(0, None, 2), False))),
    "the cache behind": (
        "causal or keys from 5",
        written(
            lambda x, past: put(x, ALL, slice(5), lower(5, 5)),
            lambda x, past: put(x, ALL, slice(5, None), True),
            by=none,
        ),
    ),
    "a triangle that begins later": (
        "causal with offset 6",
        written(lambda x, past: put(x, ALL, slice(past, None), lower(5, 5, -1))),
    ),
    "given by an operation out of place": (
        "causal with offset 7",
        lambda n, m: torch.slice_scatter(torch.ones(n, m, dtype=torch.bool), lower(n, n), 1, m - n),
    ),
    "filled in place": (
        "prefix (7)",
        written(lambda x, past: x[:, :past].fill_(True), by=none),
    ),
}  # fmt: skip


def test_masks_written_by_slices() -> None:
    """Each is named for what it keeps in the end; what is written over, or by another slice, counts for nothing."""

    def program(make: Keep) -> Callable[..., Tensor]:
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=make(q.shape[2], k.shape[2]))

    programs = {name: (program(make), qkv(q_len=5, kv_len=12)) for name, (_, make) in SLICES.items()}
    report = same_each(programs, targets=("sdpa",))
    assert {n: site.mask for n, site in zip(SLICES, report.sites)} == {n: name for n, (name, _) in SLICES.items()}


@pytest.mark.parametrize("lengths", [(5, 12), (7, 13), (2, 3)])
def test_a_mask_written_by_slices_at_any_length(lengths: tuple[int, int]) -> None:
    """The program asks whether there is a cache; that there is one holds wherever it runs as compiled."""
    torch._dynamo.reset()
    backend = attn_pass.wrap("aot_eager", targets=("sdpa",), choose="fused", on_error="raise")

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = by_slices(q.shape[2], k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.25)

    compiled = torch.compile(program, backend=backend, dynamic=True)
    with attn_pass.record() as report:
        for n, m in (lengths, (3, 17), (11, 12), (9, 9), (6, 6), (1, 4), (1, 1)):
            given = qkv(q_len=n, kv_len=m)
            torch.testing.assert_close(compiled(*given), program(*(x.double() for x in given)).float())
    assert {str(site.mask).partition(" offset")[0] for site in report.sites} <= {"causal with", "causal", "none"}, (
        report
    )


# ---------------------------------------------------------------- matrices in the spellings of well-known programs


def hidden(n: int, diagonal: int = 1) -> Tensor:
    return torch.full((n, n), -INF).triu(diagonal)


def filled_in_place(n: int, m: int, part: slice = slice(None)) -> Tensor:
    """As CLIP does."""
    mask = torch.empty(n, m)
    mask.fill_(-INF)
    mask[part].fill_(-INF)
    mask.triu_(1)
    return mask


def of_fairseq(n: int, m: int, fill: float = -INF) -> Tensor:
    return torch.triu(torch.zeros([n, m]).float().fill_(fill).type_as(torch.ones(1)), 1)


def filled_late(n: int, m: int) -> Tensor:
    mask = hidden(n)
    mask.fill_(0.25)
    return mask


MATRICES: dict[str, tuple[str, Keep]] = {
    "CLIP": ("causal", lambda n, m: filled_in_place(n, n)),
    "fairseq": ("causal", lambda n, m: of_fairseq(n, n)),
    "Llama 3, at the start": ("causal", lambda n, m: torch.hstack([torch.zeros((n, 0)), hidden(n)])),
    "rows below": ("causal", lambda n, m: torch.vstack([hidden(n), torch.zeros((0, n))])),
    "keys that are not there yet": ("causal", lambda n, m: F.pad(hidden(n), (0, m - n), value=-INF)),
    "a part filled again": ("causal", lambda n, m: filled_in_place(n, n, slice(2))),
    "every second row filled again": ("additive", lambda n, m: filled_in_place(n, n, slice(0, None, 2))),
    "filled with a number that hides nothing": ("additive, by distance", lambda n, m: of_fairseq(n, n, -2.0)),
    "filled late": ("none", lambda n, m: filled_late(n, n)),
    "more than one cache": ("additive", lambda n, m: torch.hstack([torch.ones((n, m - n)), hidden(n)])),
    "padded by half": ("additive", lambda n, m: F.pad(hidden(n), (m - n, 0), value=0.5)),
    "padded by what is there": (
        "additive",
        lambda n, m: F.pad(hidden(n)[None], (m - n, 0), mode="replicate")[0],
    ),
}  # fmt: skip
BEFORE: dict[str, tuple[str, Keep]] = {  # a cache in front
    "Llama 3": ("causal with offset 4", lambda n, m: torch.hstack([torch.zeros((n, m - n)), hidden(n)])),
    "padded": ("causal with offset 4", lambda n, m: F.pad(hidden(n), (m - n, 0))),
    "padded truth values": (
        "causal with offset 4",
        lambda n, m: torch.zeros(()).masked_fill(~F.pad(lower(n, n), (m - n, 0), value=True), -INF),
    ),
    "truth values padded by false": (
        "causal with offset 4 and keys from 4",
        lambda n, m: torch.zeros(()).masked_fill(~F.pad(lower(n, n), (m - n, 0), value=False), -INF),
    ),
    "the other triangle padded by true": (
        "sliding window (-4, all) or prefix (4)",
        lambda n, m: torch.zeros(()).masked_fill(~F.pad(lower(n, n).mT, (m - n, 0), value=True), -INF),
    ),
    "one further": ("causal with offset 5", lambda n, m: F.pad(hidden(n, 2), (m - n, 0))),
    "a hidden cache": ("causal with offset 4 and keys from 4", lambda n, m: F.pad(hidden(n), (m - n, 0), value=-INF)),
    "the cache behind": (
        "causal or keys from 12",
        lambda n, m: torch.hstack([hidden(n), torch.zeros((n, m - n))]),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_of_programs(dtype: torch.dtype) -> None:
    def program(make: Keep) -> Callable[..., Tensor]:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            s = scores(q, k)
            return attend(s + make(q.shape[2], q.shape[2] + 4)[:, : k.shape[2]].to(s.dtype), v)

        return run

    named = {name: (mask, make, 12 if case is MATRICES else 16) for case in (MATRICES, BEFORE)
             for name, (mask, make) in case.items()}  # fmt: skip
    programs = {name: (program(make), qkv(q_len=12, kv_len=m, dtype=dtype)) for name, (_, make, m) in named.items()}
    report = same_each(programs, targets=("sdpa",), reference=dtype == torch.float32)
    got = {name: site.mask for name, site in zip(named, report.sites, strict=True)}
    assert got == {name: mask for name, (mask, *_) in named.items()}


def test_a_cache_in_front_for_any_length() -> None:
    def program(make: Keep) -> Callable[..., Tensor]:
        return lambda q, k, v: attend(scores(q, k) + make(q.shape[2], k.shape[2]), v)

    programs = {name: (program(BEFORE[name][1]), qkv(q_len=12, kv_len=18)) for name in ("Llama 3", "padded")}
    report = same_each(programs, dynamic=True, targets=("sdpa",), then=[[qkv(q_len=5, kv_len=9)] * 2])
    assert all(site.mask.startswith("causal with offset") and " or " not in site.mask for site in report.sites)


def test_an_offset_that_grows_keeps_its_rows() -> None:
    """With a past of unknown length, prepended to keys as long as the queries, the diagonal is a key of its own row."""

    def program(q: Tensor, k: Tensor, v: Tensor, past: Tensor, past_v: Tensor) -> Tensor:
        keep = columns(past.shape[2] + k.shape[2]) <= rows(q.shape[2], past.shape[2])
        k, v = torch.cat([past, k], 2), torch.cat([past_v, v], 2)
        return attend(scores(q, k) + torch.where(keep, 0.0, -INF), v)

    inputs = (*qkv(q_len=5, kv_len=5), *qkv(q_len=7, kv_len=7)[:2])
    (meaning,) = check(program, inputs, "dynamo", dynamic=True)
    assert str(meaning.attention.mask).startswith("causal with offset s") and meaning.attention.mask.never_empty
    same(program, *inputs, rewritten=1, dynamic=True, targets=("sdpa",))


EMPTY: dict[str, Keep] = {
    "rows above the diagonal": lambda n, m: columns(m) < rows(n),
    "more queries than keys": lambda n, m: lower(n, m) & (columns(m) > rows(n) - 3),
    "a window before the first key": lambda n, m: (columns(m) <= rows(n) - 2) & (columns(m) >= rows(n) - 4),
    "aligned to the last key, with fewer keys": lambda n, m: columns(m) <= rows(n) + (m - n),
}


@pytest.mark.parametrize("case", EMPTY)
def test_rows_that_may_be_empty(case: str) -> None:
    """Of these nobody says that each row keeps a key; eager's mean over the values is what comes out."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(scores(q, k) + torch.where(EMPTY[case](q.shape[2], k.shape[2]), 0.0, lowest()), v)

    operands = qkv(q_len=N, kv_len=N - 4)
    (meaning,) = check(program, operands, "dynamo")
    assert meaning.attention.mask.structure.is_exact and not meaning.attention.mask.never_empty
    same(program, *operands, rewritten=1, targets=("sdpa",))
    same(program, *qkv(q_len=N, kv_len=N - 4, grad=True), rewritten=1, grad=True, targets=("sdpa",))


@pytest.mark.parametrize("hide", HIDE)
def test_a_run_of_keys_takes_nothing_of_the_mask_with_it(hide: str) -> None:
    """The form over the keys that one query sees: nothing of its mask, computed or proved, is over the keys before."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        m = k.shape[2]
        return attend(HIDE[hide](scores(q, k), (columns(m) > m - 5) & (columns(m) < m)), v)

    (meaning,) = check(program, qkv(q_len=1, kv_len=N), "dynamo")
    assert meaning.attention.mask.computed is not None
    (cut,) = key_range.variants(meaning.attention)
    assert cut.mask == Mask.none() and cut.kv_len == 4


def test_a_window_as_long_as_the_sequence_is_causal() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n, m = q.shape[2], k.shape[2]
        return attend(scores(q, k).masked_fill(~(lower(n, m) & (columns(m) > rows(n) - N)), -INF), v)

    for n, name in ((N, "causal"), (N + 1, f"sliding window ({N - 1}, 0)")):
        report = same(program, *qkv(q_len=n, kv_len=n), rewritten=1, dynamic=False)
        assert report.sites[0].mask == name


def test_training_with_a_window_needs_no_repair() -> None:
    """Every row keeps the diagonal, so the added matrix is handed over as it is, gradients included."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keep = lower(N, N) & (columns(N) > rows(N) - 3)
        return attend(scores(q, k) + torch.where(keep, 0.0, lowest()), v)

    same(program, *qkv(q_len=N, kv_len=N, grad=True), rewritten=1, grad=True, numerics="strict")


# ---------------------------------------------------------------- run-time masks

MASK = torch.ones(2, N, dtype=torch.int64)
MASK[1, 8:] = 0
IDS = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
POSITION = torch.cat([torch.arange(5), torch.arange(7)])[None].expand(2, -1).contiguous()


def padded(mask: Tensor) -> Tensor:
    return mask[:, None, None, :] != 0


def written_after_its_test(x: Tensor) -> Tensor:
    m = x.float().clone()
    test = m == 1
    m[..., 3:] = 1
    m[test] = -INF
    return m


RUN_TIME: dict[str, tuple[str, Tensor, Callable[[Tensor, Tensor], Tensor]]] = {
    "padding": ("padding", MASK, lambda s, x: s.masked_fill(~padded(x), lowest())),
    "bool padding": ("padding", MASK.bool(), lambda s, x: torch.where(x[:, None, None], s, -INF)),
    "mask == 0": ("padding", MASK, lambda s, x: s.masked_fill((x == 0)[:, None, None].expand(-1, 1, N, -1), -1e9)),
    "added padding": ("padding", MASK, lambda s, x: s + (1.0 - x[:, None, None].float()) * lowest()),
    "padding filled by a test on itself": (
        "padding",
        MASK.bool(),
        lambda s, x: s + filled(filled(x[:, None, None].float(), ~x[:, None, None]), x[:, None, None], 0.0),
    ),
    "indexed padding": (
        "padding",
        MASK.bool(),
        lambda s, x: s.masked_fill(~x[torch.arange(2)[:, None, None, None], torch.arange(N)], lowest()),
    ),
    "causal": ("causal and padding", MASK, lambda s, x: s.masked_fill(~(padded(x) & lower(N, N)), lowest())),
    "causal, twice": (
        "causal and padding",
        MASK,
        lambda s, x: s.masked_fill(~lower(N, N), lowest()).masked_fill(~padded(x), lowest()),
    ),
    "causal, added": (
        "causal and padding",
        MASK,
        lambda s, x: s + torch.where(lower(N, N), 0.0, lowest()).masked_fill(~padded(x), lowest()),
    ),
    "window": (
        "sliding window (2, 0) and padding",
        MASK,
        lambda s, x: s.masked_fill(~(padded(x) & lower(N, N) & ~lower(N, N, -3)), lowest()),
    ),
    "document": ("document", IDS, lambda s, x: s.masked_fill(~same_sequence(x), lowest())),
    "packed positions": (
        "causal and document",
        POSITION,
        lambda s, x: s.masked_fill(
            ~(lower(N, N) & same_sequence((torch.diff(x, prepend=x[:, :1] - 1) != 1).cumsum(-1))), lowest()
        ),
    ),
    "positions given": (
        "dense",
        POSITION,
        lambda s, x: s.masked_fill(x[:, None, None] > x[:, None, :, None], lowest()),
    ),
    "queries": ("query padding", MASK, lambda s, x: s.masked_fill((x == 0)[:, None, :, None], lowest())),
    "a run-time offset": (
        "causal with a run-time offset",
        torch.tensor(3),
        lambda s, x: s.masked_fill(~(columns(N) <= rows(N) + x), lowest()),
    ),
    "a lower triangle given": ("dense", lower(N, N), lambda s, x: s.masked_fill(~x, lowest())),
    "a matrix given": ("additive", torch.where(lower(N, N), 0.0, lowest()), lambda s, x: s + x),
    "causal and a matrix": (
        "causal and additive",
        torch.arange(N * N).view(N, N) / 50.0,
        lambda s, x: (s + x).masked_fill(~lower(N, N), -INF),
    ),
    "or": (
        "dense",
        MASK,
        lambda s, x: s.masked_fill(~(padded(x) | lower(N, N)), lowest()),
    ),
}


def test_what_depends_on_values_is_never_assumed() -> None:
    def program(hide: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
        return lambda q, k, v, mask: attend(hide(scores(q, k), mask), v)

    programs = {case: (program(hide), (*OPERANDS, mask)) for case, (_, mask, hide) in RUN_TIME.items()}
    report = same_each(programs, targets=("sdpa",))
    assert {c: site.mask for c, site in zip(RUN_TIME, report.sites)} == {c: name for c, (name, *_) in RUN_TIME.items()}
    whole = Together([(fn, 4) for fn, _ in programs.values()])
    inputs = [x for _, given in programs.values() for x in given]
    for dialect in DIALECTS:
        read = check(whole, inputs, dialect, sites=len(programs))
        for (case, (name, *_)), meaning in zip(RUN_TIME.items(), read, strict=True):
            a, where = meaning.attention, (case, dialect)
            assert str(a.mask) == name and not a.mask.structure.is_exact, where
            assert not a.mask.never_empty and not a.is_causal, where


# What is added of padding that is given, and what it is proved to be where it is not 0.
FILLS: dict[str, tuple[tuple[float, ...] | None, Callable[[Tensor], Tensor]]] = {
    "by a test on itself": ((-INF,), lambda x: in_place(x.float())),
    "by the padding": ((-INF,), lambda x: x.float().masked_fill(x, -INF)),
    "by both values": ((-1e9,), lambda x: filled(filled(x.float(), ~x, -1e9), x, 0.0)),
    "by another value": (None, lambda x: in_place(x.float(), 2)),
    "by no mask": (None, lambda x: in_place(x.float(), fill=-2.0)),
    "written to after its test": (None, written_after_its_test),
    "changed before": (None, lambda x: in_place(x.float().add_(1))),
    "written to in between": (None, lambda x: x.float().masked_fill(x.logical_or_(columns(N) == 0), -INF)),
}


@pytest.mark.parametrize("name", FILLS)
def test_what_a_matrix_of_padding_holds(name: str) -> None:
    """A test on a value that is given tells its branches apart, as long as nothing writes to it between."""
    fills, make = FILLS[name]
    operands = (*OPERANDS, (MASK == 0)[:, None, None])
    (meaning,) = check(lambda q, k, v, x: attend(scores(q, k) + make(x), v), operands, "dynamo")
    assert meaning.attention.mask.fills == fills


def test_a_buffers_values_are_not_relied_on() -> None:
    """A registered triangle may be filled with anything before the next call."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("triangle", lower(N, N))

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(scores(q, k).masked_fill(~self.triangle, lowest()), v)

    report = same(Model(), *qkv(q_len=N, kv_len=N), rewritten=1, targets=("sdpa",))
    assert report.sites[0].mask == "dense"


# ---------------------------------------------------------------- transformers

FACTORIES: dict[str, tuple[str, Callable[..., Tensor | None]]] = {
    "causal": ("causal", masking.create_causal_mask),
    "sliding": ("sliding window (3, 0)", masking.create_sliding_window_causal_mask),
    "chunked": ("causal and chunked (4)", masking.create_chunked_causal_mask),
    "bidirectional": ("none", masking.create_bidirectional_mask),
    "bidirectional sliding": ("sliding window (4, 4)", masking.create_bidirectional_sliding_window_mask),
}
GIVEN: dict[str, Callable[[int], dict[str, Tensor]]] = {
    "nothing": lambda n: {},
    "positions": lambda n: {"position_ids": torch.arange(n)[None]},
    "padding": lambda n: {},
}


PADDED = {"none": "padding", "causal and chunked (4)": "causal and chunked (4) from a run-time start and padding"}


def config(implementation: str) -> transformers.PreTrainedConfig:
    settings = transformers.MistralConfig(sliding_window=4)
    settings.attention_chunk_size = 4
    settings._attn_implementation = implementation
    return settings


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("given", GIVEN)
def test_transformers_masks(given: str, implementation: str) -> None:
    """The library's own mask factories, called inside the program, in every dialect and for any length."""
    of = config(implementation)

    def program(factory: str, make: Callable[..., Tensor | None]) -> Callable[..., Tensor]:
        def run(q: Tensor, k: Tensor, v: Tensor, x: Tensor, padding: Tensor) -> Tensor:
            more = {"past_key_values": None, **GIVEN[given](x.shape[1])}
            mask = make(of, inputs_embeds=x, attention_mask=padding if given == "padding" else None, **more)
            s = scores(q, k)
            if mask is None:
                return attend(s.masked_fill(~lower(x.shape[1], x.shape[1]), -INF) if factory == "causal" else s, v)
            return attend(s.masked_fill(~mask, lowest()) if mask.dtype == torch.bool else s + mask, v)

        return run

    inputs = (*qkv(q_len=N, kv_len=N), torch.zeros(2, N, 4), MASK)
    # Those that are bidirectional take no positions.
    named = {f: name for f, (name, _) in FACTORIES.items() if given != "positions" or not f.startswith("bidirectional")}
    programs = {factory: (program(factory, FACTORIES[factory][1]), inputs) for factory in named}
    if given == "padding":
        named = {factory: PADDED.get(name, f"{name} and padding") for factory, name in named.items()}
    for dynamic in (False, True):
        report = same_each(programs, dynamic=dynamic, targets=("sdpa",))
        # Dynamo makes sizes of the configuration symbols, too.
        masks = [re.sub(r"s\d+", "4", re.sub(r"-1\+s\d+", "3", site.mask)) for site in report.sites]
        assert dict(zip(named, masks, strict=True)) == named, dynamic
    # Each exported dialect of this length and of any: half of that for each implementation, as an export takes long.
    whole = Together([(fn, len(inputs)) for fn, _ in programs.values()])
    length = {2: torch.export.Dim("length", min=5, max=99)}
    shapes = (length, length, length, {1: length[2]}, {1: length[2]})
    fixed, any_length = DIALECTS[1:] if implementation == "sdpa" else DIALECTS[:0:-1]
    for dialect, dims in ((fixed, None), (any_length, shapes * len(programs))):
        read = check(whole, inputs * len(programs), dialect, dims, sites=len(programs))
        assert dict(zip(named, (str(m.attention.mask) for m in read), strict=True)) == named, (dialect, dims)
        assert [m.attention.mask.never_empty for m in read] == [given != "padding"] * len(read)


@pytest.mark.parametrize("in_place", [True, False])
def test_lowest_numbers_times_a_comparison(in_place: bool) -> None:
    """As transformers wrote it for years; one off is another mask."""

    def run(q: Tensor, k: Tensor, v: Tensor, further: int = 0) -> Tensor:
        mask = torch.full((8, 8), lowest())
        hidden = torch.arange(8) > torch.arange(8).reshape(-1, 1) + further
        if in_place:
            mask *= hidden
        else:
            mask = mask * hidden
        return torch.softmax(q @ k.mT + mask[None, None], -1) @ v

    assert same(run, *qkv(2, 2, 8, 8), rewritten=1, choose="fused").sites[0].mask == "causal"
    report = same(partial(run, further=1), *qkv(2, 2, 8, 8), rewritten=1, choose="fused")
    assert report.sites[0].mask == "causal with offset 1"


def _of_ones(n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tril(torch.ones(n, n, dtype=dtype))[None, None]


# A triangle of ones times padding of integers, which the caller gives, by what becomes of their product.
TIMES_PADDING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a float triangle": lambda s, p: s.masked_fill(_of_ones(8) * p == 0, -INF),
    "an integer triangle": lambda s, p: s.masked_fill(p * _of_ones(8, torch.int64) == 0, -1e9),
    "padding as floats": lambda s, p: s.masked_fill(~(_of_ones(8) * p.float()).bool(), -INF),
    "a comparison": lambda s, p: torch.where(lower(8, 8) * p > 0, s, -1e9),
    "as truth values": lambda s, p: torch.where((_of_ones(8, torch.int32) * p).to(torch.bool), s, -INF),
}
# The product is no choice between padding and 0: infinity times 0 is NaN, and other numbers are not 1.
NOT_TIMES_PADDING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "floats": lambda s, p: s.masked_fill(_of_ones(8) * p.float().exp() == 0, -INF),
    "padding in half precision": lambda s, p: s.masked_fill(_of_ones(8, torch.float16) * p.half() == 0, -INF),
    "a triangle in half precision": lambda s, p: s.masked_fill(_of_ones(8, torch.float16) * p == 0, -INF),
    "a triangle of twos": lambda s, p: s.masked_fill((2 * _of_ones(8)) * p == 0, -INF),
}


@pytest.mark.parametrize("largest", [1, 3])
def test_a_triangle_times_padding_of_integers(largest: int) -> None:
    padding = torch.randint(0, largest + 1, (2, 1, 1, 8))
    padding[..., 0] = 1

    def run(q: Tensor, k: Tensor, v: Tensor, p: Tensor, of: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return attend(of(scores(q, k), p), v)

    for name, of in TIMES_PADDING.items():
        report = same(partial(run, of=of), *qkv(2, 2, 8, 8), padding, rewritten=1, choose="fused")
        assert report.sites[0].mask == "causal and padding", name
    for name, of in NOT_TIMES_PADDING.items():
        report = same(partial(run, of=of), *qkv(2, 2, 8, 8), padding, rewritten=1, choose="fused")
        assert "causal" not in report.sites[0].mask, name
