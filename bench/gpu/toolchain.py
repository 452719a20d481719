"""The parts that AOTInductor needs besides torch: a C++ compiler, CUDA's headers, and libcuda for the linker.

The compiler has to link the libstdc++ that torch runs with. With one of its own in the package (``-static-libstdc++``,
by a flag or because the compiler has no other) the numbers of the facets of a locale differ, and the regular expression
that every package reads its device with ends the process: ``std::bad_cast`` up to GCC 12, and a segmentation fault from
13 on, which no longer asks whether it has the right facet.

``python -m bench.gpu.toolchain`` prints the lines for a shell that put right what can be put right from here.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_LIBRARY_FOLDERS = (
    "/usr/local/cuda/compat",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/local/nvidia/lib64",
    "/usr/local/cuda/lib64/stubs",
)
_HEADERS = ("cuda.h", "cuda_runtime_api.h")
_PROGRAM = (
    "#include <cuda.h>\n#include <cuda_runtime_api.h>\nint main() { return cuInit(0) == CUDA_SUCCESS ? 0 : 0; }\n"
)
# What a package does when it is loaded: torch/csrc/inductor/aoti_runtime/model_base.h, parse_device_str.
_LIBRARY = """#include <regex>
#include <string>
extern "C" int is_device(const char* text) {
    const std::regex expression("(cpu|cuda)(:([0-9]+))?");
    std::smatch found;
    const std::string name(text);
    return std::regex_match(name, found, expression) ? 1 : 0;
}
"""
_CALL = "import ctypes, sys, torch; sys.exit(ctypes.CDLL(sys.argv[1]).is_device(b'cuda:0') != 1)"
_LIBSTDCXX = "import torch; print(*(x.split()[-1] for x in open('/proc/self/maps') if 'libstdc++.so' in x), sep='\\n')"
_OTHERS = ("/usr/bin/g++", "/usr/bin/c++")


@dataclass(frozen=True)
class Toolchain:
    """``compiler``, the CUDA installation that has its headers, the libcuda found; empty where there is none."""

    compiler: str
    cuda_home: str
    libcuda: str

    @property
    def missing(self) -> str:
        """What is not there, in words; empty if nothing is missing."""
        parts = {
            "a C++ compiler (g++)": self.compiler,
            "CUDA's headers (cuda.h)": self.cuda_home,
            "libcuda": self.libcuda,
        }
        return ", ".join(what for what, value in parts.items() if not value)


def find() -> Toolchain:
    """What is on this machine; nothing is changed."""
    compiler = next((path for name in (os.environ.get("CXX", ""), "g++", "c++") if (path := shutil.which(name))), "")
    return Toolchain(compiler, _cuda_home(), _libcuda())


def _cuda_home() -> str:
    """The first CUDA installation that has its headers: the one that is set, the usual one, the one of the wheels."""
    candidates = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda", *_wheels()]
    return next((c for c in candidates if c and all((Path(c) / "include" / h).is_file() for h in _HEADERS)), "")


def _wheels() -> list[str]:
    """The folders of CUDA that torch's own wheels bring."""
    spec = importlib.util.find_spec("nvidia")
    bases = list(spec.submodule_search_locations or ()) if spec is not None else []
    return [str(Path(base) / part) for base in bases for part in ("cu13", "cu12", "cuda_runtime")]


def _libcuda() -> str:
    """The driver's library, the name the linker takes first."""
    searched = [*os.environ.get("LIBRARY_PATH", "").split(":"), *os.environ.get("LD_LIBRARY_PATH", "").split(":")]
    searched += [*_LIBRARY_FOLDERS, *(f"{home}/lib64/stubs" for home in [os.environ.get("CUDA_HOME", "")] if home)]
    for name in ("libcuda.so", "libcuda.so.1"):
        for folder in filter(None, searched):
            if (Path(folder) / name).exists():
                return str(Path(folder) / name)
    return ""


def exports(tools: Toolchain, links: Path) -> dict[str, str]:
    """Environment variables under which AOTInductor finds all; a ``libcuda.so.1`` alone gets a link in ``links``."""
    wanted: dict[str, str] = {}
    if tools.cuda_home and not os.environ.get("CUDA_HOME"):
        wanted["CUDA_HOME"] = tools.cuda_home
    if tools.libcuda:
        folder = Path(tools.libcuda).parent
        if tools.libcuda.endswith(".so.1"):
            links.mkdir(parents=True, exist_ok=True)
            link = links / "libcuda.so"
            if not link.is_symlink():
                link.symlink_to(tools.libcuda)
            folder = links
        before = os.environ.get("LIBRARY_PATH", "")
        wanted["LIBRARY_PATH"] = f"{folder}:{before}" if before else str(folder)
    if tools.compiler and loads(tools.compiler):
        fitting = next((c for c in (_with_libstdcxx(tools.compiler, links), *_OTHERS) if c and not loads(c)), "")
        if fitting:
            wanted["CXX"] = fitting  # which Inductor takes
    return wanted


def _with_libstdcxx(compiler: str, folder: Path) -> str:
    """The compiler as a script that links the libstdc++ that torch runs with ahead of its own; empty without one."""
    said = subprocess.run([sys.executable, "-c", _LIBSTDCXX], capture_output=True, text=True, check=False).stdout
    if not said.split():
        return ""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "g++"  # by this name Inductor knows what it is
    if Path(compiler) == script:
        return ""  # it has been tried
    linking = f'case " $* " in *" -shared "*) exec "{compiler}" "$@" "{said.split()[0]}" ;; esac'
    script.write_text(f'#!/bin/sh\n{linking}\nexec "{compiler}" "$@"\n')
    script.chmod(0o755)
    return str(script)


@cache
def loads(compiler: str) -> str:
    """Compiles a library that does what a package does first, for a process with torch; what went wrong, or empty."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "probe.cpp", Path(folder) / "probe.so"
        source.write_text(_LIBRARY)
        line = [compiler, str(source), "-std=c++17", "-fPIC", "-shared", "-o", str(library)]
        for what in (line, [sys.executable, "-c", _CALL, str(library)]):
            try:
                done = subprocess.run(what, capture_output=True, text=True, check=False)
            except OSError as error:
                return str(error)
            if done.returncode != 0:
                ended = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
                way = "compiling" if what is line else "a C++ library loaded beside torch"
                return f"{way} ended with {ended}: {' '.join(done.stderr.split())[-200:]}"
    return ""


def require() -> None:
    """Raises RuntimeError where a package would take the process down that loads it."""
    tools = find()
    problem = loads(tools.compiler) if tools.compiler else "there is no C++ compiler"
    if problem:
        raise RuntimeError(f"a package of AOTInductor would not load here: {tools.compiler}: {problem}")


def links_libcuda(tools: Toolchain) -> str:
    """Compiles and links three lines against the driver as AOTInductor does; why that failed, empty if it worked."""
    if tools.missing:
        return f"not tried: {tools.missing} missing"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text(_PROGRAM)
        line = [tools.compiler, str(source), f"-I{tools.cuda_home}/include", "-lcuda", "-o", f"{folder}/probe"]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        return "" if done.returncode == 0 else " ".join(done.stderr.split())[-400:]


if __name__ == "__main__":
    for variable, value in exports(find(), Path(tempfile.gettempdir()) / "bench-gpu-libcuda").items():
        sys.stdout.write(f'export {variable}="{value}"\n')
