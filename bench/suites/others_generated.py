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
from attn_pass.measuring.timing import compiled, why
from bench.suites.elsewhere import Backend

FUZZ = Path(__file__).parents[2] / "tests" / "fuzz"
_DRAWN = 200  # programs of one seed


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


def generated(count: int, seed: int, *, start: int = 0, in_float32: bool = False) -> Iterator[Generated]:
    """Programs by number from ``start``, without those that draw random numbers or write to their inputs.

    ``in_float32`` changes the type of each: a compiler may have no kernels for others.
    """
    drawn: list[Any] = []
    for number in range(start, count):
        while len(drawn) <= number:
            drawn += _drawn(seed + len(drawn))
        program = replace(drawn[number], dtype=torch.float32, upcast=False) if in_float32 else drawn[number]
        yield Generated(
            number, repr(program), program.function(), program.function(wide=True), tuple(program.inputs.values())
        )


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


def outcomes(programs: Sequence[Generated], backend: Backend) -> list[Outcome]:
    """All programs in one compile; in halves where that fails, down to the one that fails."""
    torch._dynamo.reset()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        if failed := [program for program in programs if not program.runs()]:
            rest = [program for program in programs if program not in failed]
            found = [_failed(program, NotImplementedError()) for program in failed]
            return sorted([*found, *(outcomes(rest, backend) if rest else [])], key=lambda outcome: outcome.number)
        try:
            results = _together(programs, backend)
        except Exception as failure:
            if len(programs) > 1:
                middle = len(programs) // 2
                return [*outcomes(programs[:middle], backend), *outcomes(programs[middle:], backend)]
            return [_failed(programs[0], failure)]
        return [_outcome(program, result) for program, result in zip(programs, results, strict=True)]


def _together(programs: Sequence[Generated], backend: Backend) -> list[list[torch.Tensor]]:
    functions = [program.function for program in programs]

    def together(groups: list[tuple[torch.Tensor, ...]]) -> list[Any]:
        return [function(*inputs) for function, inputs in zip(functions, groups)]

    # Where a program breaks the graph the functions are compiled one by one, which are one function to Dynamo: beyond
    # its limit it would run them eagerly, and tell nobody.
    with torch._dynamo.config.patch(recompile_limit=10_000, accumulated_recompile_limit=10_000):
        made = compiled(together, dynamic=False, backend=backend)([program.inputs for program in programs])
    return [tensors_of(result) for result in made]


def _outcome(program: Generated, results: list[torch.Tensor]) -> Outcome:
    eager, wide = program.references()
    if all(x.dtype == torch.float64 or not x.is_floating_point() for x in wide):
        verdict, error, words = judged(results, eager, wide, "float64")
    else:
        verdict, error, words = judged(results, eager, eager, "eager")
    return Outcome(program.number, program.name, verdict, error, words)


def _failed(program: Generated, failure: Exception) -> Outcome:
    try:
        program.references()
    except Exception as error:
        return Outcome(program.number, program.name, "not run", None, f"eagerly it does not run either: {why(error)}")
    try:
        compiled(program.function, backend="eager")(*program.inputs)
    except Exception as error:
        return Outcome(program.number, program.name, "not run", None, f"Dynamo does not trace it: {why(error)}")
    return Outcome(program.number, program.name, "not run", None, f"the compiler fails: {why(failure)}")


# ------------------------------------------------------------ in pieces


def read(kept: Path) -> list[Outcome]:
    """What earlier runs have found, by number."""
    lines = kept.read_text().splitlines() if kept.exists() else []
    return [Outcome(**json.loads(line)) for line in lines]


def keep(kept: Path, found: Sequence[Outcome]) -> None:
    """Adds to what earlier runs have found."""
    with kept.open("a") as file:
        file.writelines(json.dumps(vars(outcome)) + "\n" for outcome in found)
