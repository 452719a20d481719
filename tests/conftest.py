"""Fixtures shared by several folders, and pytest's settings for torch."""

from __future__ import annotations

import functools
import gc
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import once
import pytest
import remembering_compiler

# Before torch reads it: Inductor would build six libraries in every process that compiles, ten seconds of a core, to
# learn that the compiler knows this CPU's vector instructions.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# What calls the kernels of a package, and runs once: kernels themselves are optimised as always.
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")
# A process of workers takes longer to start than the few kernels of a test take to compile.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch

from attn_pass.devices.cpu import facts
from attn_pass.devices.cpu.kernel import build
from attn_pass.tuning import disk_cache

# pytest listens to every logger that does not propagate. To torch's structured trace a listener is somebody who wants
# the code of each graph at each stage, which takes as long as many tests do.
logging.getLogger("torch.__trace").propagate = True

# Decisions that tests expect are those of the constants in the repository, and not of a calibration of this machine,
# nor of one that a test of another process has just made.
_RECORDS = tempfile.TemporaryDirectory(prefix="attn_pass_tests_")
os.environ[disk_cache.VARIABLE] = _RECORDS.name
# Neither are they another processor's than the one those constants are of.
facts.instruction_set = lambda: "avx512"
facts.is_amd = lambda: False
# But the CPU kernel, which takes the compiler seconds and is found by its source, is built once for all processes.
_KERNELS = Path(tempfile.gettempdir()) / f"attn_pass_kernels_{os.getuid()}"
_KERNELS.mkdir(exist_ok=True)
(Path(_RECORDS.name) / "kernels").symlink_to(_KERNELS)

# Of the process that starts the workers, who inherit it.
_SHARED = tempfile.TemporaryDirectory(prefix="attn_pass_tests_")
if once.VARIABLE not in os.environ:
    os.environ[once.VARIABLE] = _SHARED.name
    remembering_compiler.install(Path(_SHARED.name))


def pytest_configure() -> None:
    """What torch does at every call and changes no result is done once, or not at all: half of what small calls cost.

    Dynamo measures how long the guards of each graph take, and flushes the processor's caches before it does. And
    ``run_decompositions`` asks for all operators that C++ has decompositions of (this makes no new ones), and overrides
    each in Python for 21 dispatch keys, which takes half of its time.
    """
    from torch import _ops
    from torch._dynamo import guards
    from torch._export import utils

    assert callable(guards.profile_guard_manager) and callable(utils._materialize_cpp_cia_ops)
    guards.profile_guard_manager = lambda *_: 0.0
    utils._materialize_cpp_cia_ops = functools.cache(utils._materialize_cpp_cia_ops)
    general = _ops.OperatorBase.py_impl

    def py_impl(operator: _ops.OperatorBase, key: Any) -> Callable[[Any], Any]:
        if type(key) is not torch._C.DispatchKey or key == torch._C.DispatchKey.Python or key in operator.py_kernels:
            return general(operator, key)

        def register(function: Any) -> Any:
            operator.py_kernels[key] = function
            operator._dispatch_cache.clear()
            return function

        return register

    _ops.OperatorBase.py_impl = py_impl
    _compute_symbolic_shapes_directly()
    _leave_methods_of_modules()
    _keep_no_records_of_compiles()
    _optimise_score_functions_less()
    _compile_packages_for_this_machine()


def _compile_packages_for_this_machine() -> None:
    """A package holds the CPU kernel for five instruction sets: for one it takes the compiler a quarter of the time.

    Tests of the others have the fixture `for_any_processor`.
    """
    from attn_pass.devices.cpu.kernel import template

    _SETS_OF_USERS.append(template._sets)
    template._sets = lambda dtype, tiles: template.of_this_machine(tiles)


_SETS_OF_USERS: list[Callable[[torch.dtype, bool], Any]] = []


def _optimise_score_functions_less() -> None:
    """Tests call the CPU kernel with dozens of score functions: each is built once more, in half the time.

    The kernel without one is built as always, and so is every kernel in what Inductor compiles.
    """
    built = build._built

    def quickly(text: str, command: tuple[str, ...], library: Path) -> Path:
        if "#define ATTN_SCORE" in text:
            command = tuple("-O1" if flag == "-O3" else flag for flag in command)
        return built(text, command, library)

    build._built = quickly


def _compute_symbolic_shapes_directly() -> None:
    """Torch remembers results of fake tensors. Among symbolic sizes it takes longer to compare than to compute again.

    Tracing a small program with dynamic sizes takes half the time without that memory.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    remembered = FakeTensorMode._cached_dispatch_impl

    def dispatch(mode: FakeTensorMode, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if mode.shape_env is not None and mode.shape_env.var_to_range:
            return mode._dispatch_impl(func, types, args, kwargs)
        return remembered(mode, func, types, args, kwargs)

    FakeTensorMode._cached_dispatch_impl = dispatch


def _leave_methods_of_modules() -> None:
    """Each trace replaces two methods of all modules, by such as do the same where the tracer is that of operators.

    Each time Python forgets what it knows of thousands of classes.
    """
    from torch.fx import _symbolic_trace
    from torch.fx.experimental.proxy_tensor import PythonKeyTracer

    general = _symbolic_trace._Patcher.patch_method

    def patch_method(self: Any, owner: type, name: str, method: Any, deduplicate: bool = True) -> Any:
        variables = dict(zip(method.__code__.co_freevars, method.__closure__ or ()))
        if owner is torch.nn.Module and type(variables["self"].cell_contents) is PythonKeyTracer:
            return None
        return general(self, owner, name, method, deduplicate)

    _symbolic_trace._Patcher.patch_method = patch_method


def _keep_no_records_of_compiles() -> None:
    """A compile writes all options of torch as JSON for a log nobody reads, and makes six tensors of random states."""
    from torch._decomp import decompositions_for_rng
    from torch._dynamo import utils

    for name in ("dynamo", "compiler", "functorch"):
        for function in (f"_get_{name}_config_for_logging", f"_{name}_config_for_logging"):
            if hasattr(utils, function):
                setattr(utils, function, lambda: None)
    torch._dynamo.config.run_gc_after_compile = False
    # What has been compiled too often runs as it is written, and the test would see nothing of the pass.
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    assert callable(utils._scrubbed_inductor_config_for_logging)
    utils._scrubbed_inductor_config_for_logging = lambda: None
    nothing = torch.tensor(())

    def reset(state: decompositions_for_rng.PhiloxState) -> None:
        state.seed = state.base_offset = nothing
        state.relative_offset = 0
        state.offset_advanced_at_least_once = False

    decompositions_for_rng.PhiloxState.reset = reset


def pytest_collection_finish() -> None:
    """What is imported by now stays: the collector need not look through it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.fixture(autouse=True)
def _threads_stay() -> Iterator[None]:
    """What is predicted depends on the threads torch has, and a bench that runs in this process sets them."""
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture
def quiet_torch() -> Iterator[None]:
    """No caches of graphs (tests of them turn them on), little parallelism, nothing compiled before, a seed.

    A C++ kernel is compiled once: its library is found by its source and its compiler's command.
    """
    from torch._dynamo.utils import counters
    from torch._inductor import config

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    with config.patch(fx_graph_cache=False, compile_threads=1):
        yield
    torch._dynamo.reset()
    torch.set_num_threads(threads)


@pytest.fixture
def for_any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages hold the CPU kernel for every instruction set, as they do for users."""
    from attn_pass.devices.cpu.kernel import template

    monkeypatch.setattr(template, "_sets", _SETS_OF_USERS[0])
