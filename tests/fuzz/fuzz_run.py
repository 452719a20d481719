"""Runs any number of generated programs: ``python tests/fuzz/fuzz_run.py 100000 [SEED]``, or ``make fuzz N=100000``.

Programs come in batches, one hypothesis seed each; a batch that fails is shrunk, printed and counted, and the run goes
on. ``fuzz_run.py 500 SEED`` with the seed that was printed for a batch draws the same programs again.

With ``--target cpu_kernel`` the programs are compiled by Dynamo without gradients, or with ``--training`` all with
gradients, and every site that the target takes goes to it. With ``--inductor`` the programs without dropout are
compiled by Inductor, laid out as beside convolutions, in 2 to 10 seconds each. With ``--caches`` all masks are those of
caches: positions, lengths, windows, ring buffers, left padding. ``--device H200`` decides for a GPU, in half precision
and with head dims of 16: its operators are what they are on a CPU, and the stand-ins of the bench; the ranges of masks
are looked up whatever that costs.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch
from fuzz_program import Step
from fuzz_property import NoProgram, Tally, Wrong, check
from fuzz_strategy import Case, cached, cases
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


def on_gpu(case: Case, device: str) -> Case:
    """A program in inference that the kernels of a GPU take."""
    p = case.program
    half = torch.float16 if p.seed % 4 == 0 else torch.bfloat16
    program = replace(p, dim=16, value_dim=16, dtype=half, upcast=False)
    return replace(case, program=program, dialect="dynamo", grad=False, numerics="default", device=device)


def on_target(name: str, *, training: bool = False) -> Callable[[Case], Case]:
    """Changes a program so that one target is asked alone; none where there is no name."""
    if not name:
        return lambda case: case

    def change(case: Case) -> Case:
        case = replace(case, dialect="dynamo", grad=training, choose="fused", targets=(name,))
        return with_dropout(case) if training and case.program.seed == 3 else case

    return change


def is_compiled(case: Case) -> bool:
    """Whether a program is one for Inductor: of one size, and not random, which is checked by calls of operators."""
    return case.later is None and not case.program.is_random


def with_dropout(case: Case) -> Case:
    """The program with dropout of its weights."""
    p = case.program
    program = replace(p, dropout=0.5) if p.call else replace(p, after=(*p.after, Step(row="dropout")))
    return replace(case, program=program)


def main(
    count: int,
    first: int,
    target: str = "",
    *,
    caches: bool = False,
    training: bool = False,
    device: str = "",
    inductor: bool = False,
) -> int:
    """Runs ``count`` programs; returns how many batches failed."""
    alone = f", all for {target}" if target else ""
    alone += ", all over caches" if caches else ""
    alone += f", for {device}" if device else ""
    to_target = on_target(target, training=training)

    def change(case: Case) -> Case:
        case = to_target(cached(case) if caches else case)
        return on_gpu(case, device) if device else case

    print(f"seed {first}, {count} programs in batches of {BATCH}{alone}", flush=True)
    tally, failed, started = Tally(), 0, time.perf_counter()
    for done in range(0, count, BATCH):
        number = first + done // BATCH
        try:
            through, accepts = ("inductor", is_compiled) if inductor else ("graph", None)
            batch(number, min(BATCH, count - done), tally, through, accepts, shrink=not inductor, change=change)
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, help="programs")
    parser.add_argument("seed", type=int, nargs="?", help="of the first batch; drawn where it is not given")
    parser.add_argument("--target", default="", help="the one target that is asked")
    parser.add_argument("--training", action="store_true", help="with a target: all programs have gradients")
    parser.add_argument("--caches", action="store_true", help="masks over caches alone")
    parser.add_argument("--inductor", action="store_true", help="compiled by Inductor, as beside convolutions")
    parser.add_argument("--device", default="", help="the GPU that is decided for, by name")
    asked = parser.parse_args()
    if asked.device:
        from attn_pass.targets import looking
        from bench.gpu import stand_ins

        stand_ins.install()
        looking.pays = lambda *_: True
    torch.set_num_threads(1)
    first = random.SystemRandom().randrange(10**8) if asked.seed is None else asked.seed
    more = {"caches": asked.caches, "training": asked.training, "device": asked.device}
    more["inductor"] = asked.inductor
    sys.exit(min(1, main(asked.count, first, asked.target, **more)))
