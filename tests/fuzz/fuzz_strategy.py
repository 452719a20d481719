"""Which programs are drawn, and how they are run. The simplest choice comes first everywhere, for the shrinking."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from fuzz_graphs import DIALECTS
from fuzz_masks import BRANCHES, CACHES, LEAVES, Mask
from fuzz_parts import GROUPS, INF, LAYOUTS, Row, Table
from fuzz_program import LOWEST, SCORES, TABLES, Program, Step, text
from hypothesis import strategies as st

# What forces a choice: (choose, targets). The engine's own default comes last.
ENGINES: tuple[tuple[str, tuple[str, ...] | None], ...] = (
    ("fused", None), ("fused", ("sdpa",)), ("fused", ("flex",)),
    ("fused", ("sdpa", "single_key", "local", "recompute")),
    ("cheapest", None), ("first", ("local", "recompute", "decomposed", "single_key", "sdpa")),
)  # fmt: skip
_LAST = "last is no number"  # where a mask hides it alone: all else would be NaN
_AFTER = ("query after", "key after", "value after")  # the result
STRIDES = ("", "", "", "permuted", "gaps", "offset", "expanded")
_SAFE = (
    "causal",
    "input",
    "padding",
    "lengths",
    "everything",
    "prefix",
    "numbers",
    "first",
    "position",
)  # keep the first key


@dataclass(frozen=True)
class Case:
    """A program, the dialect it is written in, how it is run and what the pass is told."""

    program: Program
    dialect: str = "dynamo"
    grad: bool = False
    choose: str = "fused"
    targets: tuple[str, ...] | None = None
    numerics: str = "default"
    later: tuple[int, int, int] | None = None  # batch, q_len, kv_len of another run: these sizes are symbols
    strides: tuple[str, str, str] = ("", "", "")
    device: str | None = None  # that the pass decides for

    def __repr__(self) -> str:
        return text(self)

    @property
    def other(self) -> Program | None:
        """The program at the sizes of the other run."""
        if self.later is None:
            return None
        p = self.program
        lead = (self.later[0], *p.lead[1:]) if p.lead else ()
        return replace(p, lead=lead, q_len=self.later[1], kv_len=self.later[2])


@cache
def _one_of(options: tuple[Any, ...], types: tuple[type, ...]) -> st.SearchStrategy[Any]:
    """Made once, since hypothesis checks each that is new; by type as well, since 0 is False to a dictionary."""
    return st.sampled_from(options)


@st.composite
def cases(draw: Any) -> Case:
    """Any program of the tables: without a near miss, with one, or of rows drawn from everywhere."""
    pick = lambda *options: draw(_one_of(options, tuple(map(type, options))))
    program = draw(programs())
    later = None
    if pick(*[False] * 24, True) and program.q_len > 1 and program.kv_len > 1:
        program, later = _dynamic(program, pick)
    dialect = pick(*DIALECTS, "dynamo", "dynamo")
    if program.score and not program.call and pick(*[False] * 15, True):
        program = hidden(program)
    may_train = program.writes in ("", *_AFTER) and not any(row.writes for _, _, row in program.steps())
    grad = dialect == "dynamo" and may_train and pick(False, True)
    choose, targets = pick(*ENGINES[:1] * 4, *ENGINES)
    return Case(
        program,
        dialect,
        grad,
        choose,
        targets,
        pick("default", "default", "default", "default", "strict"),
        later,
        (pick(*STRIDES), pick(*STRIDES), pick(*STRIDES)) if later is None and pick(False, True) else ("", "", ""),
    )


def hidden(p: Program) -> Program:
    """The program with a last key that is no number, which a mask hides from every row where scores are replaced."""
    score = tuple(
        replace(s, mask=Mask("and", parts=(s.mask, Mask("not the last")))) if SCORES[s.row].hides and s.mask else s
        for s in p.score
    )
    return replace(p, score=score, key=(*p.key, Step(_LAST)))


def windowed(case: Case) -> Case:
    """The case with a mask that the target `local` takes, at a length that has blocks."""
    mask = Mask(("window", "chunk")[case.program.seed % 2], case.program.seed, 1 + case.program.q_len % 3)
    step = Step("mask: masked_fill", mask=mask)
    program = replace(
        case.program, q_len=67, kv_len=67, score=(step,), call=False, dropout=0.0, enable_gqa=False, causal=False
    )
    return replace(case, program=program, later=None, choose="first", targets=("local",))


def cached(case: Case) -> Case:
    """The case with masks over caches in the place of all others, and one where it has none."""
    p = case.program
    score = tuple(replace(s, mask=_over_a_cache(s.mask, p.seed)) if s.mask else s for s in p.score)
    if not any(s.mask for s in score):
        first = Mask(CACHES[(p.seed + 3 * p.q_len + p.kv_len) % len(CACHES)], p.kv_len, p.seed)
        score = (Step("mask: masked_fill", mask=first), *score[: 0 if p.call else None])
    product = replace(p.product, mask=_over_a_cache(p.product.mask, p.seed)) if p.product.mask else p.product
    return replace(case, program=replace(p, score=score, product=product, causal=False))


def _over_a_cache(mask: Mask, seed: int) -> Mask:
    if mask.parts:
        return replace(mask, parts=tuple(_over_a_cache(part, seed + n) for n, part in enumerate(mask.parts)))
    number = 5 * mask.way + 3 * mask.n + seed + len(mask.name)
    return mask if mask.name in ("first", *CACHES) else replace(mask, name=CACHES[number % len(CACHES)])


def called(case: Case) -> Case:
    """The case as a call in inference, for the target `decomposed`."""
    p = case.program
    score = tuple(s for s in p.score if _is_call_mask(s))[:1]
    program = replace(p, call=True, score=score, dtype=torch.float32, after=(), writes="", returns="", upcast=False)
    return replace(case, program=program, grad=False, choose="first", targets=("decomposed",), numerics="default")


def _dynamic(p: Program, pick: Callable[..., Any]) -> tuple[Program, tuple[int, int, int]]:
    """Sizes that are all different where they may change: torch takes sizes that are equal for one symbol."""
    kind = pick("query and keys", "both the same", "batch", "all", "keys")
    if kind == "both the same" or p.q_len == p.kv_len:
        p = replace(p, q_len=7, kv_len=7)
        return p, (p.lead[0] if p.lead else 1, 11, 11)
    p = replace(p, q_len=7, kv_len=11, lead=(3, *p.lead[1:]) if p.lead and len(p.lead) > 1 else p.lead)
    batch = p.lead[0] if p.lead else 1
    if kind in ("batch", "all") and len(p.lead) > 1:
        batch = 5
    q_len, kv_len = {"batch": (7, 11), "keys": (7, 14)}.get(kind, (9, 14))
    return p, (batch, q_len, kv_len)


@st.composite
def masks(draw: Any, depth: int = 2) -> Mask:
    """A tree; most keep the first key, so that no row is fully masked."""
    mask = draw(_trees(depth))
    return mask if _is_safe(mask) or not draw(st.booleans()) else _with_first(mask)


@st.composite
def _trees(draw: Any, depth: int) -> Mask:
    name = draw(st.sampled_from(_LEAVES if depth == 0 else (*_LEAVES * 2, *["and", "or"] * 6, "not")))
    way, n = draw(st.integers(0, 10)), draw(st.integers(0, 3))
    if name not in BRANCHES:
        return Mask(name, way % len(LEAVES[name].ways), n)
    count = {"not": 1, "where": 3}.get(name, 2)
    return Mask(name, way % len(BRANCHES[name]), 0, tuple(draw(_trees(depth - 1)) for _ in range(count)))


_LEAVES = (*LEAVES, "causal", "causal", "causal, moved", "causal, moved", "strictly causal")


def _with_first(mask: Mask) -> Mask:
    return Mask("or", parts=(mask, Mask("first")))


def _is_safe(mask: Mask) -> bool:
    """Whether every row keeps its first key, by the form of the mask."""
    if not mask.parts:
        return mask.name in _SAFE
    if mask.name == "not":
        return False
    return (any if mask.name == "or" else all)(_is_safe(part) for part in mask.parts)


_LENGTHS = (4, 5, 3, 1, 2, 7, 17)
_DIMS = (4, 2, 3, 1, 8)
_DTYPES = (torch.float32, torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _rows(table: Table, *, miss: bool) -> tuple[str, ...]:
    return tuple(name for name, row in table.items() if (miss or not row.miss) and name != _LAST)


_ROWS = {(place, miss): _rows(table, miss=miss) for place, table in TABLES.items() for miss in (False, True)}
_MISSES = {place: tuple(n for n, row in table.items() if row.miss) for place, table in TABLES.items()}
_KINDS = ("plain", "plain", "plain", "miss", "miss", "anything")
_WRITES = ("query", "key", "value", "value after", "query after", "key after")
_RETURNS = ("scores", "masked scores", "softmax", "weights", "log-sum-exp", "written query")
_MANY = {"query": (0, 0, 0, 1), "key": (0, 0, 0, 1), "value": (0, 0, 0, 0, 1), "score": (1, 2, 0, 3, 1),
         "after": (0, 0, 0, 1, 2), "result": (0, 0, 1)}  # fmt: skip


_MISSED = ("score", "score", "softmax", "after", "product", "times", "query", "key", "value", "result", "writes",
           "returns", "grouping")  # fmt: skip


class _Choices:
    """The choices of one program, each drawn where it is asked for: a kind, the part that misses, a dtype first."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self.draw = draw
        self.kind = self.pick(*_KINDS)
        self.missed = self.pick(*_MISSED) if self.kind == "miss" else ""
        self.dtype = self.pick(*_DTYPES)

    def pick(self, *options: Any) -> Any:
        """One of these; the same one several times is likelier."""
        return self.draw(_one_of(options, tuple(map(type, options))))

    def rarely(self, chance: int) -> bool:
        """Once in so many programs."""
        return bool(self.pick(*[False] * (chance - 1), True))

    def booleans(self, count: int) -> tuple[bool, ...]:
        """Each by itself."""
        return tuple(self.draw(st.booleans()) for _ in range(count))

    def step(self, place: str, miss: bool = False) -> Step:
        """A row of the place's table, with its numbers and its mask."""
        name = self.pick(*(_MISSES[place] if miss else _ROWS[place, self.kind == "anything"]))
        row: Row = TABLES[place][name]
        # In float64 -1e9 absorbs no score, and rounds it a hundred million times as much as anything else does.
        finite = {torch.float16: [-4e4], torch.float64: [-1e30]}.get(self.dtype, [-1e9, -1e30])
        fills = [-INF, torch.finfo(self.dtype).min, *finite]
        if row.wide and self.dtype != torch.float64:
            fills = [LOWEST, -1e9, -INF, -1e30, -1e12]
        takes_ones = row.takes in ("scores", "binary", "counts", "fills") or row.masks
        return Step(
            name,
            x=self.pick(*row.numbers) if row.numbers else 1.0,
            n=self.draw(st.integers(0, 2)) if name.endswith("tail written") else 0,
            fill=self.pick(*fills) if place == "score" else -INF,
            ones=self.booleans(5) if takes_ones else (False,) * 5,
            mask=self.draw(masks()) if row.masks else None,
        )

    def steps(self) -> dict[str, Any]:
        """The steps of every place."""
        steps: dict[str, Any] = {}
        for place, many in _MANY.items():
            made = [self.step(place) for _ in range(self.pick(*many))]
            if self.missed == place:
                made.insert(self.draw(st.integers(0, len(made))), self.step(place, miss=True))
            steps[place] = tuple(made)
        for place in ("product", "softmax", "times"):
            steps[place] = self.step(place, miss=self.missed == place)
        return steps

    def sizes(self, steps: dict[str, Any]) -> dict[str, Any]:
        """Those before (L, D), and the lengths; ``equal`` where one size hides which is which, or 0."""
        made = ((p, s) for p, of in steps.items() for s in (of if type(of) is tuple else (of,)))
        square = any(TABLES[p][s.row].square for p, s in made)
        rank = self.pick(2, 2, 2, 1, 3, 0)
        equal = self.pick(*[0] * 6, 4)
        lead = tuple(equal or self.pick(2, 3, 1) for _ in range(rank))
        q_len = equal or self.pick(*_LENGTHS)
        return {"equal": equal, "lead": lead, "q_len": q_len,
                "kv_len": q_len if square else equal or self.pick(*_LENGTHS)}  # fmt: skip

    def heads(self, lead: tuple[int, ...]) -> dict[str, Any]:
        """Groups of heads, or leading dimensions that keys and values have once."""
        missed = self.missed == "grouping"
        if (len(lead) >= 2 and self.rarely(4)) or (missed and len(lead) >= 2):
            groups = self.pick(2, 3)
            lead = (*lead[:-1], groups * self.pick(2, 1))
            return {
                "lead": lead,
                "groups": groups,
                "grouping": self.pick(*(n for n, (_, miss) in GROUPS.items() if bool(miss) == missed)),
            }
        return {"one_kv": self.booleans(4)} if lead and self.rarely(6) else {}

    def call(self, steps: dict[str, Any], groups: int) -> dict[str, Any]:
        """A call in place of product, softmax and product, with its arguments; ``steps`` keep what it can have."""
        if self.kind == "miss" or not self.rarely(6):
            return {"call": False}
        steps["score"] = tuple(s for s in steps["score"] if _is_call_mask(s))[:1]
        causal, scale = not steps["score"] and self.pick(False, True), self.pick(None, 1.0, 0.3)
        dropout = 0.5 if self.rarely(10) else 0.0
        steps["after"] = ()
        gqa = groups > 1 and self.pick(True, False)
        return {"call": True, "causal": bool(causal), "scale": scale, "dropout": dropout, "enable_gqa": gqa}

    def dims(self, steps: dict[str, Any], equal: int) -> dict[str, Any]:
        """Head dims, and a second layer where the result may be a query again."""
        dim = equal or self.pick(*_DIMS)
        times = steps["times"].row
        value_dim = self.pick(dim, *_DIMS) if times != "values as keys" else dim
        plain = not TABLES["times"][times].miss and times not in ("first rows", "einsum, heads last")
        twice = self.kind == "plain" and value_dim == dim and plain and self.rarely(10)
        return {"dim": dim, "value_dim": value_dim, "layers": 2 if twice else 1}


@st.composite
def programs(draw: Any) -> Program:
    of = _Choices(draw)
    steps = of.steps()
    sizes = of.sizes(steps)
    equal = sizes.pop("equal")
    rank = len(sizes["lead"])
    sizes |= of.heads(sizes["lead"])
    called = of.call(steps, sizes.get("groups", 1))
    sizes |= of.dims(steps, equal)
    is_plain, written_out = of.kind == "plain", not called["call"]
    after = of.pick(*_AFTER) if is_plain and written_out and of.rarely(8) else ""
    kept = of.pick(*[""] * 18, "softmax", "weights") if is_plain and written_out else ""
    layouts = tuple(of.pick(*(n for n, y in LAYOUTS.items() if y.rank <= rank + 2)) for _ in range(3))
    return Program(
        dtype=of.dtype,
        layouts=layouts,
        upcast=of.dtype in (torch.bfloat16, torch.float16) and written_out and of.pick(False, False, True),
        writes=of.pick(*_WRITES) if of.missed == "writes" and written_out else after,
        returns=of.pick(*_RETURNS) if of.missed == "returns" and written_out else kept,
        seed=draw(st.integers(0, 3)),
        **called,
        **sizes,
        **steps,
    )


def _is_call_mask(step: Step) -> bool:
    row = SCORES[step.row]
    return row.masks or row.takes in ("scores", "fills")
