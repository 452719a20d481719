"""Generated programs for other compilers: many in one compile, kept in a file, so that a run goes on where it ended."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from attn_pass.measuring.checking import Verdict, judged
from attn_pass.measuring.subject import tensors_of
from attn_pass.measuring.timing import why
from bench.suites.elsewhere import BACKENDS
from bench.suites.others_exported import PARTS, NotExported, Parts, by_dynamo, run_each

FUZZ = Path(__file__).parents[2] / "tests" / "fuzz"
_DRAWN = 200  # programs of one seed

Together = Callable[[Sequence["Generated"]], "list[list[torch.Tensor] | Exception]"]
"""Runs programs that are compiled at once: the results of each, or what it alone raises."""


@dataclass(frozen=True)
class Generated:
    """A program that `make fuzz` draws: its number, text that makes it again, and its function in two precisions."""

    number: int
    name: str
    function: Callable[..., Any]
    wide: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]

    def runs(self) -> bool:
        """Whether it runs eagerly."""
        try:
            self.function(*self.inputs)
        except Exception:
            return False
        return True

    def references(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Results run eagerly, and in float64 whatever types the program names."""
        given = (x.double() if x.is_floating_point() else x for x in self.inputs)
        return tensors_of(self.function(*self.inputs)), tensors_of(self.wide(*given))


@dataclass(frozen=True)
class Outcome:
    """What a compiler made of a program: a verdict, the relative error, and what differs or why it was not run."""

    number: int
    name: str
    verdict: Verdict
    error: float | None
    why: str


def generated(
    count: int, seed: int, *, start: int = 0, in_float32: bool = False, near: bool = False
) -> Iterator[Generated]:
    """Programs by number from ``start``, without those that draw random numbers or write to their inputs.

    ``in_float32`` changes the type of each: a compiler may have no kernels for others. ``near`` makes each plain but
    for one part, so that patterns which look past that part match.
    """
    drawn: list[Any] = []
    for number in range(start, count):
        while len(drawn) <= number:
            drawn += _drawn(seed + len(drawn))
        program = _plain_but_for_one_part(drawn[number], number) if near else drawn[number]
        if in_float32:
            program = replace(program, dtype=torch.float32, upcast=False)
        yield Generated(
            number, repr(program), program.function(), program.function(wide=True), tuple(program.inputs.values())
        )


_PARTS = (("score",), ("key",), ("layouts",), ("softmax",), ("after", "product"), ("query", "value", "times"))


def _plain_but_for_one_part(program: Any, number: int) -> Any:
    """Heads from a projection, two products, a scale, a softmax; and one part of the program that was drawn."""
    from fuzz_program import Program, Step

    scale = Step(("scale: div", "scale: mul")[number // len(_PARTS) % 2], x=2.0)
    plain = Program(
        lead=(1 + number % 2, 3),
        q_len=program.q_len,
        kv_len=program.kv_len,
        dim=program.dim,
        value_dim=program.value_dim,
        dtype=program.dtype,
        layouts=("heads last",) * 3,
        score=(scale,),
        seed=program.seed,
    )
    if program.call:
        return replace(plain, score=(scale, *program.score[:1]))
    given = {name: getattr(program, name) for name in _PARTS[number % len(_PARTS)]}
    if "score" in given:
        given["score"] = (scale, *program.score[:1])
    return replace(plain, **given)


def _drawn(seed: int) -> list[Any]:
    sys.path[:0] = [str(FUZZ)]
    from fuzz_run import same_draws
    from fuzz_strategy import programs
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded

    drawn: list[Any] = []

    @settings(
        max_examples=_DRAWN,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @seeded(seed)
    @given(programs())
    def keep(program: Any) -> None:
        if not program.is_random and not program.writes and not any(r.writes for _, _, r in program.steps()):
            drawn.append(program)

    with same_draws():
        keep()
    return drawn


def together(backend: str) -> Together:
    """What a compiler of `bench.suites.elsewhere.BACKENDS` makes of several programs at once, which are exported."""
    return exported(PARTS[backend] if backend in PARTS else by_dynamo(BACKENDS[backend][1]))


def exported(parts: Parts) -> Together:
    """The same for a runtime's parts. Dynamo would break the graph in the code that runs a generated program."""

    def run(programs: Sequence[Generated]) -> list[list[torch.Tensor] | Exception]:
        return run_each(parts, [p.function for p in programs], [p.inputs for p in programs])

    return run


def outcomes(programs: Sequence[Generated], run: Together) -> list[Outcome]:
    """All programs in one compile; in halves where that fails, down to the one that fails."""
    torch._dynamo.reset()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        if failed := [program for program in programs if not program.runs()]:
            rest = [program for program in programs if program not in failed]
            found = [_failed(program, NotImplementedError()) for program in failed]
            return sorted([*found, *(outcomes(rest, run) if rest else [])], key=lambda outcome: outcome.number)
        try:
            results = run(programs)
        except Exception as failure:
            if len(programs) > 1:
                middle = len(programs) // 2
                halves = (programs[:middle], programs[middle:])
                return [outcome for half in halves for outcome in outcomes(half, run)]
            results = [failure]
        return [
            _failed(program, result) if isinstance(result, Exception) else _outcome(program, result)
            for program, result in zip(programs, results, strict=True)
        ]


def _outcome(program: Generated, results: list[torch.Tensor]) -> Outcome:
    eager, wide = program.references()
    if all(x.dtype == torch.float64 or not x.is_floating_point() for x in wide):
        verdict, error, words = judged(results, eager, wide, "float64")
    else:
        verdict, error, words = judged(results, eager, eager, "eager")
    return Outcome(program.number, program.name, verdict, error, words)


def _failed(program: Generated, failure: Exception) -> Outcome:
    not_exported = isinstance(failure, NotExported)
    while isinstance(failure.__cause__, Exception):  # what went wrong, from under advice on what to do
        failure = failure.__cause__

    def because(verdict: Verdict, words: str, error: Exception) -> Outcome:
        return Outcome(program.number, program.name, verdict, None, f"{words}: {why(error)}")

    try:
        program.references()
    except Exception as error:
        return because("not run", "eagerly it does not run either", error)
    if not_exported:
        return because("not run", "torch.export does not trace it", failure)
    return because("FAILS", "the compiler fails", failure)


# ------------------------------------------------------------ in pieces


def read(kept: Path) -> list[Outcome]:
    """What earlier runs have found, by number."""
    lines = kept.read_text().splitlines() if kept.exists() else []
    return [Outcome(**json.loads(line)) for line in lines]


def keep(kept: Path, found: Sequence[Outcome]) -> None:
    """Adds to what earlier runs have found."""
    with kept.open("a") as file:
        file.writelines(json.dumps(vars(outcome)) + "\n" for outcome in found)
