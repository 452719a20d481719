"""Clean compiles, interleaved timing, peak memory, errors: how everything on a CPU is measured.

Nothing here needs more than torch: the GPU's benches (`bench.gpu`) run where there may be nothing else.
"""

from __future__ import annotations

import ctypes
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils import _pytree as pytree

from attn_pass.tuning.clock import order_of

Inputs = tuple[torch.Tensor, ...]
Runner = Callable[..., Any]


@contextmanager
def private_caches(folder: Path) -> Iterator[None]:
    """Keep Inductor's disk caches of this block in `folder`, so that compile times are those of a first compile."""
    with patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}):
        yield


def fresh(program: Runner) -> Runner:
    """The program as a function whose code Dynamo has not seen, so that no two compiles share anything."""

    def copy(*args: Any, **kwargs: Any) -> Any:
        return program(*args, **kwargs)

    copy.__code__ = copy.__code__.replace()
    return copy


def compiled(program: Runner, *, dynamic: bool | None = False, **settings: Any) -> Runner:
    """By ``torch.compile`` with these settings, and shared with no other compile of the program."""
    runner: Runner = torch.compile(fresh(program), dynamic=dynamic, **settings)
    return runner


@dataclass(frozen=True)
class Candidate:
    """A way that is ready to run, with what it took to get there."""

    name: str
    run: Runner
    compile_s: float
    package_bytes: int | None
    took: str | None = None  # what became of the attention, where the system itself says so


def tensors(outputs: Any) -> list[torch.Tensor]:
    """Every tensor of a nested output, in order."""
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def relative_error(got: Any, want: Any) -> float:
    """Largest absolute difference over the largest expected value, of all tensors; NaN for a NaN in `got` alone.

    Infinite where there are other tensors, or of another shape. Where NaN is expected, anything may be: what eager has
    for a fully masked row is no value.
    """
    pairs = list(zip(tensors(got), tensors(want)))
    if not pairs or len(tensors(got)) != len(tensors(want)) or any(a.shape != b.shape for a, b in pairs):
        return math.inf
    return worst(_relative_difference(a.double(), b.double()) for a, b in pairs)


def _relative_difference(got: torch.Tensor, want: torch.Tensor) -> float:
    known = ~want.isnan()
    got, want = got[known], want[known]
    if not want.numel():
        return 0.0
    finite = want[want.isfinite()].abs()
    largest = finite.max() if finite.numel() else torch.tensor(0.0)
    difference = torch.where(got == want, 0.0, (got - want).abs()).max()
    return float(difference / largest) if largest > 0 else float(difference)


def farthest(x: torch.Tensor, right: torch.Tensor, where: torch.Tensor) -> float:
    """The largest absolute difference there; infinite for a NaN."""
    apart = (x.detach().double() - right.detach().double()).abs()[where]
    return float(apart.nan_to_num(nan=math.inf).max()) if apart.numel() else 0.0


def worst(errors: Iterable[float]) -> float:
    """The largest; a NaN, which max() would drop, is larger than any."""
    values = list(errors)
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)


def interleaved(
    samplers: Mapping[str, Callable[[], float]], rounds: int, failed: dict[str, str] | None = None, seed: str = ""
) -> dict[str, list[float]]:
    """A sample of each a round, in another order every round.

    What raises is left out from then on, with its error in ``failed``, where that is given.
    """
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    for number in range(rounds):
        for name in order_of(number, samplers, seed):
            if failed is None:
                samples[name].append(samplers[name]())
            elif name not in failed:
                try:
                    samples[name].append(samplers[name]())
                except Exception as error:
                    failed[name] = why(error)
    return samples


def why(error: BaseException, most: int = 400) -> str:
    """Type and first lines of an exception, from under the compiler's wrappers."""
    inner = getattr(error, "inner_exception", None) or error
    return f"{type(inner).__name__}: {' '.join(str(inner).split())[:most]}"


def in_turns(
    runs: Mapping[str, Runner],
    inputs: Inputs,
    rounds: int,
    *,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
    rest_s: float = 0.0,
    seed: str = "",
) -> dict[str, list[float]]:
    """Microseconds a call, a block of each run a round: as many calls as take ``seconds``, one or more.

    Work of a GPU is waited for at the end of a block. With ``time.process_time`` as the clock, and one thread, what
    other processes take of the machine is not counted. Before a block nothing is done for ``rest_s``.
    """
    wait = torch.accelerator.synchronize if any(x.device.type != "cpu" for x in inputs) else _nothing

    def seconds_of(run: Runner, count: int) -> float:
        time.sleep(rest_s)
        wait()
        began = clock()
        for _ in range(count):
            run(*inputs)
        wait()
        return clock() - began

    def block(run: Runner) -> Callable[[], float]:
        run(*inputs)
        calls = max(1, int(seconds / max(seconds_of(run, 1), 1e-6)))
        return lambda: seconds_of(run, calls) / calls * 1e6

    return interleaved({name: block(run) for name, run in runs.items()}, rounds, seed=seed)


def _nothing() -> None:
    pass


def _status_kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise OSError(f"/proc/self/status has no {field}")


def peak_bytes(run: Runner, inputs: Inputs) -> int | None:
    """Memory that one call adds to the process (or to a CUDA GPU) at its highest; None where nothing says so."""
    if inputs[0].is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(*inputs)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    if inputs[0].device.type != "cpu":
        return None
    try:
        # What earlier calls freed is still resident and would be reused unseen: hand it back first (malloc_trim(3)).
        ctypes.CDLL(None).malloc_trim(0)
        # Linux: writing 5 resets the high-water mark of resident memory (proc(5), clear_refs).
        Path("/proc/self/clear_refs").write_text("5")
        before = _status_kib("VmRSS")
        run(*inputs)
        return max(0, _status_kib("VmHWM") - before) * 1024
    except (OSError, AttributeError, TypeError):
        return None


def percentile(samples: Sequence[float], which: int) -> float:
    """The 10th, 20th ... 90th percentile."""
    if len(samples) == 1:
        return samples[0]
    return statistics.quantiles(samples, n=10, method="inclusive")[which // 10 - 1]


def percentile_10(samples: Sequence[float]) -> float:
    return percentile(samples, 10)
