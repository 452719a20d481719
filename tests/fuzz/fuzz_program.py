"""A generated program: its parts as data, its inputs, and running it, in its own types or in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from fuzz_masks import LEAVES, Mask
from fuzz_parts import AFTER, GROUPS, LAYOUTS, OPERANDS, PRODUCTS, RESULTS, SOFTMAXES, VALUES, Row, Table, Tensor
from fuzz_scores import BIASES, MASKS, OTHERS, SCALES

INF = math.inf
LOWEST = torch.finfo(torch.float32).min
SCORES: Table = {
    f"{kind}: {name}": Row(row.do, row.takes, row.miss or kind == "other", row.numbers, row.writes, row.random,
                           row.masks, row.square, row.wide, row.hides)
    for kind, table in (("scale", SCALES), ("bias", BIASES), ("mask", MASKS), ("other", OTHERS))
    for name, row in table.items()
}  # fmt: skip
TABLES: dict[str, Table] = {
    "query": OPERANDS, "key": OPERANDS, "value": OPERANDS, "product": PRODUCTS, "score": SCORES,
    "softmax": SOFTMAXES, "after": AFTER, "times": VALUES, "result": RESULTS,
}  # fmt: skip


@dataclass(frozen=True)
class Step:
    """A row of a table with the numbers and the mask it was drawn with."""

    row: str
    x: float = 1.0
    n: int = 0
    fill: float = -INF
    ones: tuple[bool, ...] = (False,) * 5  # which dimensions of the row's input are 1
    mask: Mask | None = None


@dataclass(frozen=True)
class Program:
    """One attention program. ``lead`` are the sizes before (L, D)."""

    lead: tuple[int, ...] = (2, 3)
    q_len: int = 4
    kv_len: int = 5
    dim: int = 4
    value_dim: int = 4
    dtype: torch.dtype = torch.float32
    groups: int = 1  # heads of the query a head of keys and values has
    grouping: str = "repeat_interleave"
    one_kv: tuple[bool, ...] = (False,) * 4  # leading dimensions that keys and values have once
    layouts: tuple[str, str, str] = ("as is", "as is", "as is")
    upcast: bool = False  # query and key to float32, the weights back
    call: bool = False  # scaled_dot_product_attention in place of product, softmax and product
    causal: bool = False  # the call's arguments
    scale: float | None = None
    enable_gqa: bool = False
    dropout: float = 0.0
    query: tuple[Step, ...] = ()
    key: tuple[Step, ...] = ()
    value: tuple[Step, ...] = ()
    product: Step = Step("matmul")
    score: tuple[Step, ...] = ()
    softmax: Step = Step("F")
    after: tuple[Step, ...] = ()
    times: Step = Step("matmul")
    result: tuple[Step, ...] = ()
    writes: str = ""  # an operand written between the product and its use
    returns: str = ""  # what is returned beside the result
    layers: int = 1
    seed: int = 0

    def __repr__(self) -> str:
        return text(self)

    # ---------------------------------------------------------------- what it is

    def steps(self) -> Iterator[tuple[str, Step, Row]]:
        """Every step by the place it has, which is also the name of its input."""
        for place, table in TABLES.items():
            if self.call and place in ("product", "softmax", "after", "times"):
                continue
            steps = getattr(self, place)
            for number, step in enumerate(steps if isinstance(steps, tuple) else (steps,)):
                yield f"{place}{number}", step, table[step.row]

    @property
    def is_miss(self) -> bool:
        """Whether it may be no attention by what is written."""
        miss = any(row.miss for _, _, row in self.steps()) or (GROUPS[self.grouping][1] and self.groups > 1)
        return miss or bool(self.writes or self.returns or self.dropout)

    @property
    def is_random(self) -> bool:
        return self.dropout > 0 or any(row.random for _, _, row in self.steps())

    @property
    def kv_lead(self) -> tuple[int, ...]:
        lead = [1 if one else size for size, one in zip(self.lead, self.one_kv)]
        if lead and self.groups > 1:
            lead[-1] = self.lead[-1] // self.groups
        return tuple(lead)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of query, key and value as the product takes them, but for the grouping."""
        kv = self.kv_lead
        return {
            "query": (*self.lead, self.q_len, self.dim),
            "key": (*kv, self.kv_len, self.dim),
            "value": (*kv, self.kv_len, self.value_dim),
        }

    # ---------------------------------------------------------------- its inputs

    @cached_property
    def inputs(self) -> dict[str, torch.Tensor]:
        """Every input by its name, in the order the function takes them."""
        make = torch.Generator().manual_seed(self.seed)
        tensors: dict[str, torch.Tensor] = {}
        for (name, shape), layout in zip(self.shapes.items(), self.layouts):
            tensors[name] = torch.randn(LAYOUTS[layout].stored(shape), generator=make).to(self.dtype)
        for name, step, row in self.steps():
            if row.takes:
                tensors[name] = self._input(row.takes, step.ones, make, name)
            if row.masks and step.mask is not None:
                for path, leaf in step.mask.leaves():
                    if LEAVES[leaf.name].takes:
                        tensors[f"{name}_mask{path}"] = self._input(LEAVES[leaf.name].takes, step.ones, make, name)
        return tensors

    def _input(self, kind: str, ones: tuple[bool, ...], make: torch.Generator, place: str) -> torch.Tensor:
        lead, l, s = self.lead, self.q_len, self.kv_len
        scores = tuple(1 if one else size for size, one in zip((*lead, l, s), ones))
        scores = scores[min(sum(ones[2:4]), len(lead)) :]  # of fewer dimensions than the scores
        rand = lambda *shape: torch.rand(shape, generator=make)
        randn = lambda *shape: torch.randn(shape, generator=make)
        shape = self.shapes.get(place[:-1], (*lead, l, self.dim))
        keep = rand(*scores) > 0.4
        keep[..., 0] = True
        made: dict[str, Callable[[], torch.Tensor]] = {
            "scores": lambda: randn(*scores).to(self.dtype),
            "mask": lambda: keep,
            "binary": lambda: keep.to(self.dtype),
            "counts": lambda: (rand(*scores) * 3).long().index_fill(-1, torch.tensor([0]), 1),
            "fills": lambda: torch.zeros(scores, dtype=self.dtype).masked_fill(~keep, torch.finfo(self.dtype).min),
            "float32 fills": lambda: torch.zeros(scores).masked_fill(~keep, LOWEST if len(scores) % 2 else -1e9),
            "no number": lambda: torch.zeros(shape[-2], 1, dtype=self.dtype).index_fill(
                0, torch.tensor([shape[-2] - 1]), INF if shape[-2] % 2 else math.nan
            ),
            "number": lambda: torch.tensor(0.3, dtype=self.dtype),
            "heads": lambda: (rand(*lead[-1:], 1, 1) + 0.5).to(self.dtype),
            "rows": lambda: (rand(*lead, l, 1) + 0.5).to(self.dtype),
            "rows of it": lambda: (rand(shape[-2], 1) + 0.5).to(self.dtype),
            "dims": lambda: randn(shape[-1]).to(self.dtype),
            "keys": lambda: (rand(s) + 0.5).to(self.dtype),
            "rope": lambda: randn(shape[-2], shape[-1]).to(self.dtype),
            "table": lambda: randn(l + s).to(self.dtype),
            "padding": lambda: _with_first(rand(lead[0] if len(lead) > 1 else 1, s) > 0.4),
            "lengths": lambda: (rand(lead[0] if lead else 1) * s).long() + 1,
            "position": lambda: (rand() * s).long(),
            "positions": lambda: (rand(l) * s).long(),
            "row numbers": lambda: (rand(l) * s).long(),
            "documents": lambda: (rand(max(l, s)) * 2).long().cumsum(0),
        }
        return made[kind]()

    # ---------------------------------------------------------------- running it

    def function(self, *, wide: bool = False) -> Callable[..., Any]:
        """A function of the inputs, in their order; ``wide`` is in float64 whatever types the program names."""
        names = tuple(self.inputs)

        def attention(*given: Tensor) -> Any:
            return _Run(self, dict(zip(names, given)), wide).run()

        return attention


def _with_first(keep: torch.Tensor) -> torch.Tensor:
    keep[..., 0] = True
    return keep


def text(value: Any) -> str:
    """Python that makes the value again, without what is the default."""
    if is_dataclass(value):
        given = ((f, getattr(value, f.name)) for f in fields(value))
        parts = [f"{f.name}={text(v)}" for f, v in given if f.default is MISSING or v != f.default]
        return f"{type(value).__name__}({', '.join(parts)})"
    if isinstance(value, tuple):
        return f"({', '.join(map(text, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, float) and math.isinf(value):
        return f'float("{value}")'
    return repr(value)


@dataclass
class _Run:
    """One run of a program: what its rows see as ``c``."""

    p: Program
    given: dict[str, Tensor]
    wide: bool
    q: Tensor = None
    k: Tensor = None
    v: Tensor = None
    extra: list[Tensor] = field(default_factory=list)
    narrow: torch.dtype = torch.float32  # what the scores are in the program's own types, at this point

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.wide else self.p.dtype

    @property
    def f32(self) -> torch.dtype:
        """The type that the program calls float32; a program in float64 is not narrowed."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def half(self) -> torch.dtype:
        """The type that the program calls bfloat16: a cast between floating types is rounding, and no meaning."""
        return torch.float64 if self.wide else torch.bfloat16

    @property
    def lead(self) -> Sequence[int]:
        lead = [*self.q.shape[:-2]]
        return lead

    @property
    def n(self) -> int:
        total = 1
        for size in self.lead:
            total = total * size
        return total

    @property
    def l(self) -> int:  # noqa: E743
        return self.q.shape[-2]

    @property
    def s(self) -> int:
        return self.k.shape[-2]

    def run(self) -> Any:
        p = self.p
        self._operands()
        x = self._call() if p.call else self._by_hand()
        for _ in range(p.layers - 1):
            self.q = x
            x = self._call() if p.call else self._by_hand()
        x = self._all("result", x)
        return (x, *self.extra) if self.extra else x

    def _operands(self) -> None:
        p = self.p
        for name, layout in zip(("query", "key", "value"), p.layouts):
            x = LAYOUTS[layout].shown(self.given[name], p.shapes[name])
            if name == "query":
                self.q = x
            if p.writes.endswith("after"):
                x = x * 1.0
            x = self._all(name, x)
            if name != "query" and p.groups > 1 and not (p.call and p.enable_gqa):
                x = GROUPS[p.grouping][0](self, x, p.groups)
            if p.upcast and not p.call:
                x = x.to(self.f32) if name != "value" else x
            setattr(self, name[0], x)

    def _by_hand(self) -> Tensor:
        p = self.p
        q = self.q
        self.narrow = torch.float32 if p.upcast else p.dtype
        s = self._step("product", 0, p.product, q)
        if p.writes == "query":
            q.mul_(2)
        if p.writes == "key":
            self.k.zero_()
        self.s_ = s
        if p.returns == "scores":
            self.extra.append(s)
        s = self._all("score", s)
        if p.returns == "masked scores":
            self.extra.append(s)
        if p.returns == "log-sum-exp":
            self.extra.append(s.logsumexp(-1))
        w = self._step("softmax", 0, p.softmax, s)
        if w.dtype != self.v.dtype:
            w = w.to(self.dtype)
        if p.returns == "softmax":
            self.extra.append(w)
        w = self._all("after", w)
        if p.writes == "value":
            self.v.mul_(2)
        if p.returns == "weights":
            self.extra.append(w.mean(-2))
        x = self._step("times", 0, p.times, w)
        if p.writes in ("query after", "key after", "value after"):
            getattr(self, p.writes[0]).mul_(2)
        if p.returns == "written query":
            self.extra.append(q * 2)
        return x

    def _call(self) -> Tensor:
        p = self.p
        mask = None
        if p.score:
            step = p.score[0]
            row = SCORES[step.row]
            e = self._own("score0", step, row)
            mask = e.keep if row.masks else e.t
        options: dict[str, Any] = {}
        if mask is not None:
            options["attn_mask"] = mask
        if p.causal:
            options["is_causal"] = True
        if p.scale is not None:
            options["scale"] = p.scale
        if p.dropout:
            options["dropout_p"] = p.dropout
        if p.enable_gqa:
            options["enable_gqa"] = True
        return F.scaled_dot_product_attention(self.q, self.k, self.v, **options)

    def _all(self, place: str, x: Tensor) -> Tensor:
        for number, step in enumerate(getattr(self.p, place)):
            x = self._step(place, number, step, x)
        return x

    def _step(self, place: str, number: int, step: Step, x: Tensor) -> Tensor:
        row = TABLES[place][step.row]
        if row.wide:
            self.narrow = torch.promote_types(self.narrow, torch.float32)
        return row.do(self, x, self._own(f"{place}{number}", step, row))

    def _own(self, name: str, step: Step, row: Row) -> SimpleNamespace:
        keep = None
        if row.masks and step.mask is not None:
            own = {n.removeprefix(f"{name}_mask"): t for n, t in self.given.items() if n.startswith(f"{name}_mask")}
            keep = step.mask.made(self, own)
        lowest = LOWEST if row.wide else torch.finfo(self.p.dtype).min
        t, fill = self.given.get(name), step.fill
        if self.wide and name.startswith("score") and not row.miss:
            fill, lowest = (self._absorbing(number) for number in (fill, lowest))
            if row.takes in ("fills", "float32 fills"):
                least = float(t.min())
                t = t + (t * (self._absorbing(least) / least - 1.0 if least < 0 else 0.0)).detach()
        return SimpleNamespace(t=t, x=step.x, n=step.n, fill=fill, keep=keep, lowest=lowest)

    def _absorbing(self, number: float) -> float:
        """A number that masks in the program's type, in float64: -1e9 would leave the scores what they are there.

        Numbers keep their order, and float32 holds them.
        """
        weakest = 32752.0 if self.narrow == torch.float16 else 0.99e9
        if self.narrow == torch.float64 or not -INF < number <= -weakest:
            return number
        share = math.log(-number / weakest) / math.log(-LOWEST / weakest)
        return max(LOWEST, -(10 ** (25 + share * (math.log10(-LOWEST) - 25))))
