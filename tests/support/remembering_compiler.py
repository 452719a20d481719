"""A C++ compiler that remembers what it made: a package of a test is compiled anew each time, and is mostly the same.

Code of Inductor's that holds the CPU kernel is optimised less, which takes half the time: eager mode has the same
kernel, optimised as for users. Where Inductor's is what a test is of, the variable `AS_USERS` is set.

    python -IS remembering_compiler.py FOLDER COMPILER ARGUMENT ...

What was made is found by the compiler, its arguments and the contents of the files among these. Headers are part of
what is installed: the folder is one for each version of torch. An error is never remembered.
"""

import hashlib
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

AS_USERS = "ATTN_PASS_TESTS_OPTIMISE"
_KERNEL, _OF_INDUCTOR = b"namespace attn_pass_cpu", "TORCH_INDUCTOR_CPP_WRAPPER"
LARGE = 1 << 26  # bytes: libraries and headers that are already compiled, which torch finds again by itself
# What torch says in a source: where the wrapper lies, and behind it the commands of each compile that there was.
_SAID = re.compile(
    rb"\A// Triton kernels are embedded as comments in [^\n]*\n"
    rb"|\n// Compile cmd\n//[^\n]*\n// Link cmd\n//[^\n]*(?=\n|\Z)"
)


def contents(file: Path) -> bytes:
    """Of a source without what is said there of earlier compiles."""
    read = file.read_bytes()
    return _SAID.sub(b"", read).strip() if file.suffix == ".cpp" else read


def key_of(compiler: str, arguments: list[str], at: int) -> str:
    """Of a call that writes to ``arguments[at]``, wherever that is."""
    real = Path(compiler).resolve()
    parts = [str(real), str(real.stat().st_mtime_ns)]
    for number, argument in enumerate(arguments):
        file = Path(argument)
        if number == at:
            parts.append(file.suffix)
        elif argument.startswith("-") or not file.is_file() or file.stat().st_size > LARGE:
            parts.append(argument)
        else:
            parts.append(hashlib.sha256(contents(file)).hexdigest())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def holds_the_kernel(argument: str) -> bool:
    """Whether it is a source of the CPU kernel."""
    return argument.endswith(".cpp") and Path(argument).is_file() and _KERNEL in Path(argument).read_bytes()


def main(folder: str, compiler: str, *arguments: str) -> int:
    """The compiler's exit status."""
    if _OF_INDUCTOR in arguments and AS_USERS not in os.environ and any(map(holds_the_kernel, arguments)):
        arguments = tuple("-O1" if argument == "-O3" else argument for argument in arguments)
    at = arguments.index("-o") + 1 if "-o" in arguments[:-1] else None
    if at is None or arguments[at].endswith((".gch", ".pch")):
        os.execv(compiler, [compiler, *arguments])
    made, written = Path(folder) / key_of(compiler, list(arguments), at), Path(arguments[at])
    if made.exists():
        shutil.copy(made, written)
        return 0
    status = os.spawnv(os.P_WAIT, compiler, [compiler, *arguments])
    if status == 0 and written.is_file():
        half = made.with_name(f"{made.name}.{os.getpid()}")
        shutil.copy(written, half)
        half.replace(made)  # as a whole: another process may look for it
    return status


def install(place: Path) -> None:
    """Puts it where this process and its children find ``g++``; what it made stays for the next run of the tests."""
    import torch

    compiler = shutil.which("g++")
    if compiler is None or os.name != "posix":
        return
    folder = Path(tempfile.gettempdir()) / f"attn_pass_compiled_{os.getuid()}" / torch.__version__
    folder.mkdir(parents=True, exist_ok=True)
    script = place / "bin" / "g++"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{__file__}" "{folder}" "{compiler}" "$@"\n')
    script.chmod(0o755)
    os.environ["PATH"] = os.pathsep.join((str(script.parent), os.environ["PATH"]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
