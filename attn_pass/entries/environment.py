"""Faults of the environment: no working compiler, a folder that cannot be written. They are no fault of a rewrite."""

from __future__ import annotations

import errno

from attn_pass.errors import chain_of

_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
_COMPILERS = ("g++", "gcc", "clang++", "clang", "c++", "cl")


def environment_fault(error: BaseException) -> str:
    """What is wrong with the environment and what to do about it, as a sentence; "" if the error is about the graph."""
    for each in chain_of(error):
        kind = type(each).__name__
        if kind == "InvalidCxxCompiler" or (isinstance(each, FileNotFoundError) and _names_a_compiler(each)):
            return (
                "no C++ compiler works here, which Inductor needs for CPUs and for packages: install g++ or clang, or "
                "set the environment variable CXX to one"
            )
        if kind == "TritonMissing":
            return "no working Triton was found, which Inductor needs for GPUs: pip install triton"
        if isinstance(each, OSError) and each.errno in _NOT_WRITABLE:
            at = f" {each.filename}" if each.filename else ""
            return (
                f"the compiler's folder{at} cannot be written ({each.strerror}): set the environment variable "
                "TORCHINDUCTOR_CACHE_DIR (or TMPDIR) to a folder that can"
            )
    return ""


def _names_a_compiler(error: FileNotFoundError) -> bool:
    return str(error.filename or "").rpartition("/")[2].removesuffix(".exe") in _COMPILERS
