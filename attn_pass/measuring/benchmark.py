"""`benchmark`: how long a user's model takes eagerly, with stock torch.compile and with the pass, in one call."""

from __future__ import annotations

import datetime
import math
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from attn_pass.compat import require_inductor
from attn_pass.devices.registry import device_for, facts
from attn_pass.entries.aot_compile import aot_compile
from attn_pass.entries.dynamo import backend
from attn_pass.entries.environment import environment_fault, environment_reported, import_compiler, raise_if_environment
from attn_pass.entries.mistakes import check_keywords, check_seconds, check_training
from attn_pass.entries.uncompiled import own_compile_off
from attn_pass.errors import own_version
from attn_pass.measuring import machine
from attn_pass.measuring.judging import TOO_NOISY, noise_of, verdict
from attn_pass.measuring.result import PASS, STOCK, Benchmark, Row, Samples
from attn_pass.measuring.subject import NOT_REPEATABLE, Call, Subject, subject_of
from attn_pass.measuring.timing import compiled, in_turns, peak_bytes, percentile, private_caches, relative_error, why
from attn_pass.planner.overrides import named_options
from attn_pass.report.history import record
from attn_pass.report.progress import Tell, progress
from attn_pass.report.record import Report
from attn_pass.verify.compare import rounding

EAGER, AGAIN = "eager", "stock again"
PACKAGE_STOCK, PACKAGE_PASS = "package, stock", "package, attn_pass"
ROUNDS = 12
_TIMES_KNOWN = 3.0  # so many times the error of eager or of stock is the rounding of another order
_BASES = {PACKAGE_STOCK: PACKAGE_STOCK, PACKAGE_PASS: PACKAGE_STOCK}


def benchmark(
    model: Any,
    *args: Any,
    attn_pass_options: Mapping[str, Any] | None = None,
    attn_pass_training: bool | None = None,
    attn_pass_package: bool = False,
    attn_pass_seconds: float = 20.0,
    attn_pass_progress: bool = True,
    **kwargs: Any,
) -> Benchmark:
    """Measures a model eagerly, with stock torch.compile and with the pass: times, errors, memory, compile time.

    All ways are compiled first, without caches, and then timed in turns: a block of calls of each, every round starting
    with another. Stock is measured twice, so that the noise of this run is known. On Linux a measurement on the CPU
    stays on the processors that are used least. The compiled state that torch keeps for the model does not change;
    gradients of its parameters do, if it trains.

    Args:
        model: a module or function; if it is compiled, what was compiled is measured.
        args: the model's inputs.
        attn_pass_options: fields of `attn_pass.Options`.
        attn_pass_training: measure a forward and a backward from all outputs. By default that is done if gradients are
            on, something needs them, and a module is in training mode.
        attn_pass_package: measure AOTInductor packages too, which takes a model that torch.export can export.
        attn_pass_seconds: approximate time to measure, in seconds, without compiling.
        attn_pass_progress: show progress on stderr if it takes longer.
        kwargs: all other keywords are the model's keyword inputs.

    Raises:
        CaptureError: the model fails on these inputs.
        EnvironmentFault: nothing compiles here: there is no compiler, or its folder cannot be written.
        OptionError: an option or a keyword ``attn_pass_...`` is unknown, or has a value that is not accepted.
        VersionError: torch is too old.
    """
    require_inductor("benchmark")
    import_compiler()
    check_keywords(benchmark, kwargs)
    check_training(attn_pass_training)
    check_seconds(attn_pass_seconds)
    named_options(attn_pass_options)  # before anything is measured
    options = dict(attn_pass_options or {})
    subject = subject_of(model, args, kwargs, attn_pass_training, "benchmark")
    with ExitStack() as around:
        around.enter_context(environment_reported())
        around.enter_context(own_compile_off(subject.model))
        tell = around.enter_context(progress(silent=not attn_pass_progress))
        if not subject.trains:
            around.enter_context(torch.no_grad())
        folder = Path(around.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        busy = around.enter_context(_on_free_processors(subject))
        around.enter_context(_without_caches(folder))
        ways = _Ways(subject, options, folder, tell)
        ways.build(attn_pass_package and not subject.trains)
        tell("timing")
        seconds = attn_pass_seconds / ROUNDS / max(1, len(ways.steps))
        samples = in_turns(ways.steps, subject.tensors, ROUNDS, seconds=seconds)
        for way, step in ways.steps.items():
            ways.samples[way].microseconds = samples[way]
            ways.samples[way].memory_bytes = peak_bytes(step, subject.tensors)
        tell("comparing with float64")
        reference, remarks = _compare(subject, ways)
        busy = busy or machine.why_busy(_others(subject), torch.get_num_threads())
    if attn_pass_package and subject.trains:
        remarks = (*remarks, "packages have no backward, so none was measured")
    return _result(subject, ways, busy, reference, remarks)


class _Ways:
    """The ways to run the model, as they are built."""

    def __init__(self, subject: Subject, options: Mapping[str, Any], folder: Path, tell: Tell) -> None:
        self.subject, self.options, self.folder, self.tell = subject, options, folder, tell
        self.functions: dict[str, Call] = {}
        self.samples: dict[str, Samples] = {}
        self.failures: dict[str, str] = {}
        self.report = Report()

    @property
    def steps(self) -> dict[str, Call]:
        return {way: self.subject.step(function) for way, function in self.functions.items()}

    def build(self, packages: bool) -> None:
        """Compiles every way, and calls each twice."""
        model = self.subject.model
        self.functions[EAGER], self.samples[EAGER] = model, Samples()
        self.tell("warming up the compiler")  # the first compile in a new cache builds precompiled headers
        _warm_up()
        for way in (STOCK, AGAIN):
            self._compile(way, lambda: compiled(model, dynamic=None))
        with record() as report:
            self._compile(PASS, lambda: compiled(model, dynamic=None, backend=backend, options=dict(self.options)))
        self.report = report
        if packages:
            self._package(PACKAGE_STOCK, self._stock_package)
            self._package(PACKAGE_PASS, self._own_package)

    def _compile(self, way: str, make: Callable[[], Call]) -> None:
        self.tell(f"compiling, {way}")
        try:
            function = make()
            step = self.subject.step(function)
            first, second = _seconds(step), _seconds(step)
        except Exception as error:
            raise_if_environment(error)
            self.failures[way] = why(error)
            return
        self.functions[way] = function
        # The second compile of stock finds its C++ compiled already.
        self.samples[way] = Samples(compile_s=None if way == AGAIN else max(0.0, first - second))

    def _package(self, way: str, make: Callable[[Path], object]) -> None:
        self.tell(f"making the {way}")
        path = self.folder / f"{'pass' if way == PACKAGE_PASS else 'stock'}.pt2"
        began = time.perf_counter()
        try:
            make(path)
            function = torch._inductor.aoti_load_package(str(path))
            self.subject.step(function)()
        except Exception as error:  # packages of a GPU's code need more than torch.compile does, which is measured
            self.failures[way] = environment_fault(error) or why(error)
            return
        self.functions[way] = function
        self.samples[way] = Samples(compile_s=time.perf_counter() - began, package_bytes=path.stat().st_size)

    def _module(self) -> torch.nn.Module:
        model = self.subject.model
        return model if isinstance(model, torch.nn.Module) else _Function(model)

    def _stock_package(self, path: Path) -> None:
        program = torch.export.export(self._module(), self.subject.args, dict(self.subject.kwargs))
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))

    def _own_package(self, path: Path) -> None:
        kwargs = dict(self.subject.kwargs)
        aot_compile(self._module(), self.subject.args, kwargs, package_path=path, options=dict(self.options))


def _warm_up() -> None:
    with suppress(Exception):  # what fails here fails again with the model, where it is told
        torch.compile(lambda x: x + 1)(torch.zeros(8))


class _Function(torch.nn.Module):
    """A function as the module that torch.export wants."""

    def __init__(self, function: Call) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _seconds(step: Call) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


@contextmanager
def _without_caches(folder: Path) -> Iterator[None]:
    """Caches of this block's own, so that compile times are those of a first compile."""
    with private_caches(folder), torch._inductor.config.patch(force_disable_caches=True), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch's own code
        warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
        yield


def _others(subject: Subject) -> Mapping[int, float]:
    return {} if subject.tensors[0].is_cuda else machine.shares_in_use()


@contextmanager
def _on_free_processors(subject: Subject) -> Iterator[str]:
    """Yields why the machine is busy, "" if it is not; inside, this process stays on what is used least."""
    shares, threads = _others(subject), torch.get_num_threads()
    with machine.pinned(machine.freest(shares, threads)):
        yield machine.why_busy(shares, threads)


def _compare(subject: Subject, ways: _Ways) -> tuple[str, tuple[str, ...]]:
    """Fills in the errors; returns what they are against, and remarks."""
    first, again = subject.results(subject.model), subject.results(subject.model, seed=1)
    if any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, again)):
        return "eager", (f"results are not compared: the model {NOT_REPEATABLE}",)
    reference, against = subject.in_float64_results(), "float64"
    if reference is None or len(reference) != len(first):
        reference, against = first, "eager"
    for way, function in ways.functions.items():
        try:
            ways.samples[way].error = relative_error(subject.results(function), reference)
        except Exception as error:
            ways.failures[way] = why(error)
    remark = "the model does not run in float64: errors are against eager's own results"
    return against, () if against == "float64" else (remark,)


def _result(subject: Subject, ways: _Ways, busy: str, reference: str, remarks: tuple[str, ...]) -> Benchmark:
    samples = {way: s for way, s in ways.samples.items() if s.microseconds}
    noise = math.nan
    if STOCK in samples and AGAIN in samples:
        noise = noise_of(samples[STOCK].microseconds, samples[AGAIN].microseconds)
    if not busy and noise > TOO_NOISY:
        busy = f"two measurements of the same code differ by {noise:.0%}"
    known = max((samples[w].error or 0.0 for w in (EAGER, STOCK) if w in samples), default=0.0)
    roundings = 1.0 if reference == "float64" else _TIMES_KNOWN  # eager's own are in what it is compared with
    dtypes = {t.dtype for t in subject.results(subject.model)}
    allowed = max(_TIMES_KNOWN * known, *(roundings * rounding(dtype) for dtype in dtypes), 0.0)
    rows = tuple(_row(way, samples, noise, busy, allowed) for way in samples)
    return Benchmark(rows, ways.failures, noise, busy, reference, _conditions(subject), ways.report, remarks)


def _row(way: str, samples: Mapping[str, Samples], noise: float, busy: str, allowed: float) -> Row:
    own, base = samples[way], samples.get(_BASES.get(way, STOCK))
    own_us = own.microseconds
    median, p10 = statistics.median(own_us), percentile(own_us, 10)
    speedup, says = None, ""
    if base is not None:
        speedup = statistics.median(base.microseconds) / median
        if base is not own:
            says = "cannot tell" if busy else verdict(speedup, percentile(base.microseconds, 10) / p10, noise)
    if own.error is not None and math.isfinite(allowed) and not own.error <= allowed:
        says = "WRONG"
    return Row(
        way,
        median,
        p10,
        percentile(own_us, 90),
        speedup,
        says,
        own.error,
        own.memory_bytes,
        own.compile_s,
        own.package_bytes,
    )


def _conditions(subject: Subject) -> dict[str, str]:
    device = device_for(subject.tensors[0].device, None)
    return {
        "model": subject.name,
        "mode": "training" if subject.trains else "inference",
        "device": facts(device)["device"],
        "threads": str(torch.get_num_threads()),
        "versions": f"python {platform.python_version()}, torch {torch.__version__}, attn_pass {own_version()}",
        "date": datetime.date.today().isoformat(),
        "rounds": f"{ROUNDS} in turns",
    }
