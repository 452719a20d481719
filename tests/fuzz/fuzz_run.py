"""Runs any number of generated programs: ``python tests/fuzz/fuzz_run.py 100000 [SEED]``, or ``make fuzz N=100000``.

Programs come in batches, one hypothesis seed each; a batch that fails is shrunk, printed and counted, and the run goes
on. ``fuzz_run.py 500 SEED`` with the seed that was printed for a batch draws the same programs again.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from fuzz_property import NoProgram, Tally, Wrong, check
from fuzz_strategy import Case, cases
from hypothesis import HealthCheck, Phase, given, reject, seed, settings
from hypothesis.internal.conjecture import providers
from torch._subclasses.fake_tensor import FakeTensorMode

BATCH = 500


def batch(
    number: int,
    count: int,
    tally: Tally,
    through: str = "graph",
    accepts: Callable[[Case], bool] | None = None,
    shrink: bool = True,
    change: Callable[[Case], Case] = lambda case: case,
) -> None:
    """Draws ``count`` programs with the seed ``number`` and checks them; raises `Wrong` for the smallest that fails."""

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, *([Phase.shrink] if shrink else [])),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @seed(number)
    @given(cases().map(change))
    def run(case: Case) -> None:
        if accepts is not None and not accepts(case):
            reject()
        try:
            check(case, tally, through)
        except NoProgram as error:
            tally.counts["no program"] += 1
            tally.reasons[f"no program: {str(error)[:90]}"] += 1
            reject()

    with same_draws():
        run()


@contextmanager
def same_draws() -> Iterator[None]:
    """A seed draws the same programs whatever is imported.

    Hypothesis mixes numbers in that it finds in the code of modules that are loaded and are no libraries.
    """
    none = providers.Constants()
    providers.CONSTANTS_CACHE.cache.clear()
    with mock.patch.object(providers, "_get_local_constants", lambda: none):
        yield
    providers.CONSTANTS_CACHE.cache.clear()


def main(count: int, first: int) -> int:
    """Runs ``count`` programs; returns how many batches failed."""
    print(f"seed {first}, {count} programs in batches of {BATCH}", flush=True)
    tally, failed, started = Tally(), 0, time.perf_counter()
    for done in range(0, count, BATCH):
        number = first + done // BATCH
        try:
            batch(number, min(BATCH, count - done), tally)
        except Wrong as error:
            failed += 1
            print(f"\n==== seed {number}: {error}\n", flush=True)
        FakeTensorMode.cache_clear()  # of shapes that hardly come again, and for good
        if done == 0:  # what is imported by now stays, and need not be looked through for garbage
            gc.collect()
            gc.freeze()
            gc.set_threshold(20_000, 20, 50)
        if (done // BATCH) % 4 == 3:
            seconds = time.perf_counter() - started
            print(f"{done + BATCH} programs, {seconds:.0f} s, {failed} batches failed", flush=True)
    print(f"{count} programs in {time.perf_counter() - started:.0f} s, seed {first}: {failed} batches failed")
    for table in (tally.counts, tally.classes, tally.reasons):
        for name, number in table.most_common(40):
            print(f"{number:8d}  {name}")
    return failed


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    given_seed = int(sys.argv[2]) if len(sys.argv) > 2 and sys.argv[2] else random.SystemRandom().randrange(10**8)
    sys.exit(min(1, main(int(sys.argv[1]), given_seed)))
