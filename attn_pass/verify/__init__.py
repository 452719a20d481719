"""Translation validation: a site before and after the rewrite runs on random data, and the results are compared.

Both are cut out of the graph (`attn_pass.graph.cut`), run forward and, where there are gradients, backward on inputs
with the site's shapes, strides, offsets and dtypes. They are compared with each other and, in float64, with the
description that was read of the site. The tolerances are in `attn_pass.verify.compare`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch.fx import GraphModule, Node

from attn_pass.errors import RewriteError, cause_of
from attn_pass.graph.cut import SYMBOLIC, Around, CannotExtract, Cut, cut, numbers
from attn_pass.graph.edit import Value
from attn_pass.graph.regions import Region
from attn_pass.graph.values import Sizes, fake_value
from attn_pass.model.attention import Attention
from attn_pass.model.dtype_name import dtype_name
from attn_pass.model.expression import Const, Expr, Load, walk
from attn_pass.model.index import Poly, Symbol, atoms, product
from attn_pass.model.reference import Evaluation, reference
from attn_pass.reading.describe import Described
from attn_pass.reading.scores import weakest_fill
from attn_pass.verify import compare, reproduce
from attn_pass.verify.inputs import DRAWS, Draw, Spec, closer, random_tensor, specs
from attn_pass.verify.running import Outcome, in_float64, outside_tracing, run
from attn_pass.verify.shrink import shrunk

MOST_SCORES = 1 << 22
"""Scores of a site that is run as it is: about a second in all on two cores. More are made fewer."""
MOST_MEMORY = 1 << 25
"""Elements of memory of all inputs of a site that is run; of what is only read in part they are many more than used."""
FAILS = "it fails where the original does not"
"""How a `Mismatch` begins after the target's name if the code raises an error, and does not compute something else."""
_FEW_SCORES = 1 << 18  # so few that harsh inputs are run backward too, and other sizes are tried

CompileSite = Callable[[GraphModule, list[torch.Tensor], str], Callable[..., Any]]
"""Compiles a part, rewritten as the target of this name, for inputs, as the backend would."""


class Mismatch(RewriteError):
    """A rewritten site does not compute what it did."""


@dataclass(frozen=True)
class Subject:
    """A site that is about to be rewritten."""

    result: Node
    described: Described
    around: Around
    sizes: Sizes
    region: Region
    known: Mapping[Node, torch.Tensor]
    needs_grad: Callable[[Node], bool]
    new: Value | None  # None where the site as it is written is compiled by another backend, and that is looked at
    target: str
    where: str
    key: str  # in a node's meta: where fake values are
    smaller: Callable[[GraphModule], float]  # rewrites and verifies a smaller form of the site
    compile_site: CompileSite | None = None


@dataclass(frozen=True)
class Verified:
    """The largest difference seen; None, with the reason, where nothing could be run."""

    error: float | None
    reason: str = ""


def verify(subject: Subject) -> Verified:
    """Runs the site as it was and as it is to be.

    Raises:
        Mismatch: they differ, or the site is not what was read; the message names the file that shows it.
    """
    attention = subject.described.attention
    if attention.dropout:
        return Verified(None, "it draws random numbers")
    if any(isinstance(e, Const) and e.value != e.value for e in walk(attention.score)):
        return Verified(None, "its scores are not numbers")
    worst, why = None, ""
    with outside_tracing():
        for chosen in _choices(subject):
            try:
                difference = _verify_at(subject, chosen)
            except CannotExtract as error:
                why = why or str(error)
                continue
            worst = difference if worst is None else max(worst, difference)
    return Verified(worst, "" if worst is not None else why)


def _choices(subject: Subject) -> list[dict[str, int]]:
    """Numbers for symbolic sizes: those the program was traced with, smaller where there are many; and odd ones."""
    attention = subject.described.attention
    symbols = sorted(
        {a for s in attention.sources for i in s.shape for a in atoms(i) if isinstance(a, Symbol)}, key=str
    )
    traced = {s.key: subject.sizes.hint(Poly.of(s)) for s in symbols}
    choices = [traced]
    while _scores(attention, choices[0]) > MOST_SCORES:
        longest = max(choices[0], key=choices[0].__getitem__, default="")
        if not longest or choices[0][longest] <= 16:
            break
        choices[0] = {**choices[0], longest: choices[0][longest] // 2}
    if symbols:
        odd = {s.key: max(s.lower, min(traced[s.key], 5 + 2 * n)) for n, s in enumerate(symbols)}
        choices.append(odd)
    return choices


def _scores(attention: Attention, sizes: Mapping[str, int]) -> int:
    """How many scores there are; or operands, four elements for a score, where there are more of these."""
    a, number = attention, Evaluation((), (), sizes)
    heads, rows, keys = (number.size(n) for n in (product([a.batch_size, a.query_heads]), a.q_len, a.kv_len))
    return heads * max(rows * keys, (rows + keys) * number.size(a.head_dim) // 4)


def _verify_at(subject: Subject, chosen: Mapping[str, int]) -> float:
    part = _cut(subject, chosen)
    part = replace(part, inputs=tuple(map(closer, part.inputs)))
    attention = subject.described.attention
    count = _scores(attention, chosen)
    if count > MOST_SCORES:
        sizes = Evaluation((), (), chosen)
        lengths = sizes.size(attention.q_len), sizes.size(attention.kv_len)
        factor = count / MOST_SCORES
        return subject.smaller(shrunk(part, lengths, 2 * factor, subject.region, subject.key))
    if (memory := sum(i.memory for i in part.inputs)) > MOST_MEMORY:
        raise CannotExtract(f"it reads a part of inputs of {memory} elements, too many to generate")
    kinds = _kinds(subject, part, chosen)
    differences = []
    for draw in DRAWS if count <= _FEW_SCORES else DRAWS[:2]:
        backward = draw == "normal" or count <= _FEW_SCORES
        differences.append(_Trial(subject, part, chosen, kinds, draw=draw, backward=backward).difference())
    if differences[0] is None:
        raise CannotExtract("its result has no finite number on random inputs")
    return max(f for f in differences if f is not None)


def _cut(subject: Subject, chosen: Mapping[str, int]) -> Cut:
    """The site from its operands on: masks are computed as the program does, unless that takes much of the program."""
    d, until = subject.described, subject.around.levels[0].until
    tensors = [n for n in _meant_by(d.attention) if isinstance(fake_value(d.nodes[n]), torch.Tensor)]
    a = d.attention
    operands = {a.query.source, a.key.source, a.value.source}
    made_of = set() if a.mask.computed is None else _sources(a.mask.computed.bias, a.mask.computed.condition)
    problem: CannotExtract | None = None
    for begin in (operands, operands | made_of, operands | set(tensors)):
        try:
            return cut(
                subject.result,
                {d.nodes[n]: d.read_at.get(n, until) for n in sorted(begin)},
                subject.around,
                numbers(subject.sizes, chosen),
                known=subject.known,
                needs_grad=subject.needs_grad,
                new=subject.new,
                also=[d.nodes[n] for n in tensors],
                repeatable=True,  # it is run as it was, as it is to be, and in float64
            )
        except CannotExtract as error:
            problem = error
    assert problem is not None
    raise problem


def _meant_by(attention: Attention) -> list[int]:
    """The sources that say what the attention is; others are names for what they are made of."""
    factors = [f.value for f in (*attention.factors, *attention.result_factors)]
    a = attention
    return sorted(_sources(a.query, a.key, a.value, a.score, a.sink, *factors))


def _sources(*expressions: Expr | None) -> set[int]:
    return {e.source for part in expressions if part is not None for e in walk(part) if isinstance(e, Load)}


def _kinds(subject: Subject, part: Cut, chosen: Mapping[str, int]) -> tuple[Spec, ...]:
    d = subject.described
    by_node = dict(zip(d.nodes, specs(d.attention, chosen)))
    return tuple(by_node.get(node, Spec()) for node in part.nodes)


class _Trial:
    """One draw of inputs."""

    def __init__(
        self,
        subject: Subject,
        part: Cut,
        chosen: Mapping[str, int],
        kinds: tuple[Spec, ...],
        *,
        draw: Draw,
        backward: bool,
    ) -> None:
        self.subject, self.part, self.chosen = subject, part, chosen
        seed = zlib.crc32(f"{subject.where} {subject.target} {draw}".encode())
        generator = torch.Generator().manual_seed(seed)
        self.memory = [random_tensor(i, kind, generator, draw).to(i.device) for i, kind in zip(part.inputs, kinds)]
        gradients = backward and any(i.requires_grad for i in part.inputs)
        noise = torch.randn(part.shape, generator=generator, dtype=torch.float64)
        self.cotangent = noise if gradients else None

    def difference(self) -> float | None:
        """The largest difference of the rewritten result, None if there is nothing to compare.

        Raises:
            Mismatch: it is wrong.
        """
        original = self._run(self.part.original)
        described = self._described_result(original)
        changed = self.part.original if self.part.rewritten is None else self.part.rewritten
        try:
            outcome = self._run(self._compiled(changed))
        except CannotExtract as error:
            self._raise_mismatch(f"{FAILS} ({error})")
        if wrong := compare.wrong_result(outcome, original, described):
            self._raise_mismatch(wrong)
        return compare.difference(outcome, original) if compare.is_conclusive(original) else None

    def _run(self, program: Callable[..., Any]) -> Outcome:
        try:
            return run(program, self.part.inputs, self.memory, self.subject.region, self._cotangent())
        except Exception as error:
            raise CannotExtract(cause_of(error)[:200]) from error

    def _described_result(self, original: Outcome) -> Outcome:
        """The result of the description, after checking that it equals the program's.

        In fully masked rows it rounds the scores to the program's own dtype, in which a fill absorbs them; float64
        would not.
        """
        wide = [m.double() if m.is_floating_point() else m for m in self.memory]
        described = run(partial(self._description, rounds=True), self.part.inputs, wide, None, self._cotangent())
        if not compare.wrong_reading(original, None, described):
            return described
        described = run(self._description, self.part.inputs, wide, None, self._cotangent())
        if wrong := compare.wrong_reading(original, self._in_float64(wide), described):
            self._raise_mismatch(f"the program differs from its description: {wrong}")
        return described

    def _description(self, *inputs: torch.Tensor, rounds: bool = False) -> torch.Tensor:
        """The description in float64, of what its sources are on these inputs."""
        d = self.subject.described
        values = iter(in_float64(self.part.also)(*inputs))
        tensors = [torch.zeros(())] * len(d.nodes)
        for n in _meant_by(d.attention):
            fake = fake_value(d.nodes[n])
            tensors[n] = next(values).cpu() if isinstance(fake, torch.Tensor) else torch.tensor(self._number(fake))
        masked_from = weakest_fill(d.attention.score_dtype) if rounds else None
        return reference(d.attention, tensors, self.chosen, masked_from=masked_from).to(inputs[0].device)

    def _number(self, value: Any) -> Any:
        return numbers(self.subject.sizes, self.chosen)(value) if isinstance(value, SYMBOLIC) else value

    def _cotangent(self) -> torch.Tensor | None:
        return None if self.cotangent is None else self.cotangent.to(self.memory[0].device)

    def _in_float64(self, wide: list[torch.Tensor]) -> Outcome | None:
        """The original in float64; None where it does not run so."""
        region = replace(self.subject.region, autocast=())
        try:
            return run(in_float64(self.part.original), self.part.inputs, wide, region, self._cotangent())
        except Exception:
            return None

    def _compiled(self, module: GraphModule) -> Callable[..., Any]:
        """The rewritten part, or the code that the backend compiles for it when it is called."""
        compile_site = self.subject.compile_site
        if compile_site is None:
            return module

        def program(*inputs: torch.Tensor) -> Any:
            return compile_site(module, list(inputs), self.subject.target)(*inputs)

        return program

    def _raise_mismatch(self, why: str) -> NoReturn:
        s = self.subject
        device = self.memory[0].device.type
        dtype = s.region.autocast_dtype(device)
        autocast = None if dtype is None else (device, dtype_name(dtype))
        try:
            path = reproduce.write(self.part, self.memory, why=why, where=s.where, target=s.target, autocast=autocast)
            shown = f"reproduce it with {path}"
        except Exception as error:
            shown = f"no file to reproduce it could be written ({type(error).__name__}: {error})"
        raise Mismatch(f"verification failed: as {s.target}, {why}; {shown}")
