"""Times on a GPU: replays of captured graphs, variants interleaved, inputs rotated so that the cache does not serve
them.

A sample is one replay of a graph of several calls, by CUDA events around it, so that what launching costs on the host
is left out; what cannot be captured, or takes over a millisecond and a half, is timed by events around the calls.
Where the case is bound by memory each call of a sample has inputs of its own, four times the L2 cache together.
In a dry run it is a clock around one call, and means nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from attn_pass.measuring.timing import interleaved, percentile_10, why
from bench.gpu.environment import Environment
from bench.gpu.shapes import Shape

Inputs = tuple[Any, ...]
Run = Callable[..., Any]
ROUNDS = 25
LEAST_ROUNDS = 5
_LONG_US = 1500.0  # a call this long needs no graph
_SAMPLE_US = 300.0  # of calls in a graph
_LONG_SAMPLE_US = 6000.0  # of calls that are launched one by one
_MOST_CALLS = 40
_HOST_ROUND_US = 10_000.0
_CACHE_BYTES = 4 * (60 << 20)


def _as_it_is(*inputs: Any) -> Inputs:
    return inputs


@dataclass(frozen=True)
class Variant:
    """A way to compute a case; what ``prepare`` does to its inputs is not timed.

    Without ``capture`` calls are timed as they are launched.
    """

    run: Run
    prepare: Callable[..., Inputs] = _as_it_is
    capture: bool = True


@dataclass(frozen=True)
class Time:
    """Microseconds a call."""

    median_us: float
    p10_us: float
    how: str  # "graph", "events" or "clock"
    rounds: int


@dataclass
class Times:
    """Of the variants that ran, and why the others did not."""

    found: dict[str, Time] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def us(self) -> dict[str, float]:
        """The medians of those that ran."""
        return {name: time.median_us for name, time in self.found.items()}

    @property
    def how(self) -> dict[str, str]:
        """How each was timed, and how often."""
        return {name: f"{time.how} x{time.rounds}" for name, time in self.found.items()}

    def best(self, names: Sequence[str]) -> str | None:
        """The fastest of these."""
        return min((n for n in names if n in self.found), key=self.us.__getitem__, default=None)


def sets_for(size: int, cold: bool, most_bytes: int = 24 << 30) -> int:
    """How many sets of inputs of ``size`` bytes a case is given."""
    return 1 if not cold else max(1, min(_MOST_CALLS, -(-_CACHE_BYTES // max(1, size)), most_bytes // max(1, size)))


def sets_of(env: Environment, shape: Shape, *, cold: bool) -> list[Inputs]:
    """The inputs of a case, the same numbers on every call: one set, or with ``cold`` on a GPU several."""
    torch.manual_seed(0)
    first = shape.inputs(env)
    size = sum(x.untyped_storage().nbytes() for x in first)  # an expanded one counted as it lies in memory
    count = sets_for(size, cold and not env.dry)
    return [first, *(shape.inputs(env) for _ in range(count - 1))]


def compare(
    env: Environment,
    variants: Mapping[str, Variant],
    sets: Sequence[Inputs],
    *,
    seconds: float = 2.0,
    rounds: int = ROUNDS,
) -> Times:
    """Times the variants in turns; one that fails is noted and left out. ``seconds`` of timing, about."""
    times = Times()
    samplers: dict[str, _Sampler] = {}
    for name, variant in variants.items():
        try:
            samplers[name] = _Sampler(env, variant, sets)
        except Exception as error:
            times.failed[name] = why(error)
    if not samplers:
        return times
    if env.dry:
        rounds = 1
    else:
        each = sum(s.sample_us for s in samplers.values()) / 1e6
        # Twenty make a median; fewer where twenty would take three times as long as they may.
        enough = min(rounds, max(20, int(seconds / max(each, 1e-6))))
        rounds = max(LEAST_ROUNDS, min(enough, int(3 * seconds / max(each, 1e-6))))
    samples = interleaved({name: sampler.sample for name, sampler in samplers.items()}, rounds, times.failed)
    for name, taken in samples.items():
        if name not in times.failed:
            times.found[name] = Time(statistics.median(taken), percentile_10(taken), samplers[name].how, len(taken))
    return times


class _Sampler:
    """One variant, warmed up, ready to be timed again and again."""

    def __init__(self, env: Environment, variant: Variant, sets: Sequence[Inputs]) -> None:
        self._env, self._run = env, variant.run
        self._args = [variant.prepare(*inputs) for inputs in sets]
        self._graph: torch.cuda.CUDAGraph | None = None
        self.how = "clock" if env.dry else "events"
        self._run(*self._args[0])
        if env.dry:
            self.sample_us, self._calls = 0.0, 1
            return
        self._run(*self._args[-1])
        self._calls = 2
        call_us = self.sample()
        self._calls = max(len(self._args), min(_MOST_CALLS, int(_LONG_SAMPLE_US / call_us)))
        if call_us <= _LONG_US:
            self._calls = max(len(self._args), min(_MOST_CALLS, 1 + int(_SAMPLE_US / call_us)))
            if variant.capture:
                self._capture()
        self.sample_us = self._calls * self.sample()

    def _calls_in_turn(self) -> None:
        for number in range(self._calls):
            self._run(*self._args[number % len(self._args)])

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph):
                self._calls_in_turn()
        except Exception:
            torch.cuda.synchronize()
            return
        graph.replay()
        torch.cuda.synchronize()
        self._graph, self.how = graph, "graph"

    def sample(self) -> float:
        """Microseconds a call."""
        if self._env.dry:
            began = time.perf_counter()
            self._calls_in_turn()
            return (time.perf_counter() - began) * 1e6 / self._calls
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        if self._graph is not None:
            self._graph.replay()
        else:
            self._calls_in_turn()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / self._calls


def host_us(env: Environment, run: Callable[[], Any], device_us: float = 0.0, rounds: int = 7) -> float:
    """Microseconds the host needs for a call when it does not wait: what small work costs in eager use.

    Fifty calls a round, fewer where the device takes ``device_us`` for each and would be waited for too long.
    """
    run()
    calls = 1 if env.dry else max(1, min(50, int(_HOST_ROUND_US / max(1.0, device_us))))
    taken = []
    for _ in range(1 if env.dry else rounds):
        env.wait()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        taken.append((time.perf_counter() - began) * 1e6 / calls)
        env.wait()
    return statistics.median(taken)


@dataclass(frozen=True)
class Rates:
    """What this device reaches: matrix products in TFLOP/s (bfloat16), a copy in TB/s, read and written bytes."""

    matmul_tflops: float
    copy_tbs: float


@lru_cache(maxsize=1)
def rates(env: Environment) -> Rates:
    """Measured once: a product of (8192, 8192) matrices of random numbers, a copy of 2 GB."""
    size, length = (64, 1 << 16) if env.dry else (8192, 1 << 30)
    a, b = env.normal(size, size), env.normal(size, size)
    source = torch.empty(length, device=env.device, dtype=torch.bfloat16).fill_(1.5)
    target = torch.empty_like(source)
    times = compare(env, {"product": Variant(torch.mm)}, [(a, b)])
    copies = compare(env, {"copy": Variant(lambda: target.copy_(source))}, [()])
    assert times.us and copies.us, (times.failed, copies.failed)
    return Rates(2 * size**3 / times.us["product"] / 1e6, 2 * source.nbytes / copies.us["copy"] / 1e6)
