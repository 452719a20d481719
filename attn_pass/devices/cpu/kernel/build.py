"""The kernel as a shared library for eager calls: built once by the machine's compiler, and cached on disk.

`torch.compile` and packages do not need it: there the source is part of the generated code.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

import torch
from filelock import FileLock

from attn_pass.devices.cpu.kernel.scores import checked
from attn_pass.devices.cpu.kernel.source import (
    ELEMENTS,
    arguments_of,
    call_of,
    in_tiles,
    kernel_source,
    namespace_of,
    of_this_machine,
)
from attn_pass.errors import AttnPassError
from attn_pass.tuning import disk_cache

# Products and sums are not contracted, as in Inductor's code: the backward computes the forward's scores again.
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-ffp-contract=off", "-w")
_THREADS = ("-fopenmp",) if sys.platform == "linux" else ()  # elsewhere OpenMP is not the compiler's own
_SECONDS = 600  # a compiler that takes longer hangs


class NoCompilerError(AttnPassError):
    """The kernel cannot be built here; the message says why."""


@cache
def compiler() -> str:
    """The C++ compiler Inductor uses.

    Raises:
        NoCompilerError: there is none.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return str(get_cpp_compiler())
    except Exception as error:  # Inductor raises what its search ends with
        raise NoCompilerError(f"no C++ compiler was found: {error}") from error


def missing() -> str:
    """Why the kernel cannot be built here; "" if it can, as far as this check shows.

    The check does not import Inductor, which would take seconds even if nothing is compiled.
    """
    if sys.platform == "win32":
        return "the CPU kernel needs GCC or Clang"
    if shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")):
        return ""
    try:
        compiler()
    except NoCompilerError as error:
        return str(error)
    return ""


def fault() -> str:
    """What is wrong with the compiler, tried on a few lines that need what Inductor's code needs; "" if it works."""
    try:
        command = [compiler(), "-std=c++17", "-fPIC", "-shared", f"-I{sysconfig.get_path('include')}"]
        if sys.platform == "win32":  # other flags; Inductor has tried it
            return ""
        parts = ["Python.h"]
        command += _THREADS
        if _THREADS:
            parts.append("omp.h")
        text = "".join(f"#include <{part}>\n" for part in parts) + "int trial() { return 0; }\n"
        with tempfile.TemporaryDirectory() as work:
            _compiled(text, tuple(command), Path(work), f"a few lines with {' and '.join(parts)}")
    except (NoCompilerError, OSError) as error:
        return str(error)
    return ""


@cache
def entry(dtype: torch.dtype, score: str = "", kernel: str = "attend_type", trains: bool = False) -> ctypes._CFuncPtr:  # type: ignore[name-defined]
    """The library's function for operands of this dtype and a score function.

    It takes ``Args`` (`common.hpp`), and with the ``kernel`` `source.BACKWARD` ``BackwardArgs``. ``trains`` says that a
    backward will read what it leaves.

    Raises:
        NoCompilerError: there is no compiler, or it fails.
    """
    # One file for each type: the compiler takes seconds, and most programs have one.
    sets = of_this_machine(in_tiles(dtype, kernel, trains=trains))
    body = call_of(dtype, sets, kernel, score)
    cast_line = (
        f"const auto& args = *static_cast<const {namespace_of(sets, score, kernel)}::{arguments_of(kernel)}*>(given);"
    )
    function = f'extern "C" void attend(const void* given) {{\n  {cast_line}\n{body}\n}}\n'
    text = f"{kernel_source(sets, checked(score) if score else score, kernel)}\n{function}"
    command = (compiler(), *_FLAGS, *_THREADS)
    name = hashlib.sha256("\0".join((text, *command)).encode()).hexdigest()[:24]
    file = f"attention_{ELEMENTS[dtype].lower()}_{name}.so"
    try:
        library = _built(text, command, disk_cache.folder() / "kernels" / file)
    except (OSError, RuntimeError):  # it cannot be written, is full, or the home folder is not known
        library = _built(text, command, Path(tempfile.mkdtemp(prefix="attn_pass")) / file)
    attend = ctypes.CDLL(str(library)).attend
    attend.restype = None
    return attend


def _built(text: str, command: tuple[str, ...], library: Path) -> Path:
    """The library, built if it is not there."""
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(library.with_suffix(".so.lock")):
            if not library.exists():
                _build(text, command, library)
    return library


def _build(text: str, command: tuple[str, ...], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as work:
        built = _compiled(text, command, Path(work), "the CPU kernel")
        os.replace(built, library)


def _compiled(text: str, command: tuple[str, ...], work: Path, name: str) -> Path:
    """The library that the compiler makes of the text in a folder.

    Raises:
        NoCompilerError: it fails, or leaves nothing.
    """
    source, library = work / "attention.cpp", work / "attention.so"
    source.write_text(text)
    try:
        done = subprocess.run(
            [*command, str(source), "-o", str(library)], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompilerError(f"{command[0]} could not build {name}: {error}") from error
    if done.returncode or not library.exists():
        printed = done.stderr.strip().splitlines()
        ended = printed[0] if printed else f"status {done.returncode}"
        why = next((line for line in printed if "error" in line), ended)
        raise NoCompilerError(f"{command[0]} could not build {name}: {why}")
    return library
