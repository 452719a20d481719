"""Faults of the environment: no working compiler, a folder that cannot be written. They are no fault of a rewrite."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from attn_pass.errors import AttnPassError, EnvironmentFault, chain_of

_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR)  # a model opens files of its own, too: these count in the compiler's folder
_COMPILERS = ("g++", "gcc", "clang++", "clang", "c++", "cl")
_CACHE = "TORCHINDUCTOR_CACHE_DIR"  # Inductor sets it to the folder that it takes, if nobody has
_PARTS = {
    "Python.h": "the headers of this Python (python3-dev or python3-devel)",
    "omp.h": "OpenMP for this compiler (libomp-dev, or libomp)",
    "cc1plus": "the whole compiler (g++)",
}
_MISSING = re.compile(rf"\b({'|'.join(map(re.escape, _PARTS))})\b.*(?:No such file|not found)")


def environment_fault(error: BaseException) -> str:
    """What is wrong with the environment and what to do about it, as a sentence; "" if the error is about the graph."""
    for each in chain_of(error):
        kind = type(each).__name__
        if kind == "InvalidCxxCompiler" or (isinstance(each, OSError) and _names_a_compiler(each)):
            compiler = f" (CXX is {os.environ['CXX']!r})" if os.environ.get("CXX") else ""
            return (
                f"no C++ compiler works here{compiler}, which Inductor needs for CPUs and for packages: install g++ or "
                "clang, or set the environment variable CXX to one"
            )
        if kind == "CppCompileError" and (part := _MISSING.search(str(each))):
            return f"the C++ compiler found no {part[1]}, which Inductor's code needs: install {_PARTS[part[1]]}"
        if kind == "TritonMissing":
            return "no working Triton was found, which Inductor needs for GPUs: pip install triton"
        if isinstance(each, OSError) and _is_of_the_folder(each):
            at = f" {each.filename}" if each.filename else ""
            return (
                f"the compiler's folder{at} cannot be written ({each.strerror}): set the environment variable "
                f"{_CACHE} (or TMPDIR) to a folder that can"
            )
    return ""


def raise_if_environment(error: BaseException) -> None:
    """Returns if the error is about the graph.

    Raises:
        EnvironmentFault: the environment is at fault.
    """
    if sentence := environment_fault(error):
        raise EnvironmentFault(
            f"{sentence}. Stock torch.compile fails here in the same way: no rewrite is at fault"
        ) from error


@contextmanager
def environment_reported() -> Iterator[None]:
    """Around what compiles: a fault of the environment is raised as `EnvironmentFault`, any other error as it is."""
    try:
        yield
    except AttnPassError:
        raise
    except Exception as error:
        raise_if_environment(error)
        raise


def import_compiler() -> None:
    """Imports Dynamo, which makes the compiler's folder while it is imported.

    Raises:
        EnvironmentFault: the folder cannot be written.
    """
    with environment_reported():
        import_module("torch._dynamo")


def _names_a_compiler(error: OSError) -> bool:
    name = str(error.filename or "")
    is_compiler = name.rpartition("/")[2].removesuffix(".exe") in _COMPILERS
    return bool(name) and (is_compiler or name == os.environ.get("CXX"))


def _is_of_the_folder(error: OSError) -> bool:
    if error.errno in _NOT_WRITABLE:
        return True
    if error.errno not in _NOT_THERE:
        return False
    if not error.filename:  # of `tempfile`, which found no folder
        return True
    folder, path = (os.path.abspath(p) for p in (os.environ.get(_CACHE, ""), str(error.filename)))
    return bool(os.environ.get(_CACHE)) and os.path.commonpath([folder, path]) in (folder, path)
