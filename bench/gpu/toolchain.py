"""The parts that AOTInductor needs besides torch: a C++ compiler, CUDA's headers, and libcuda for the linker.

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
    return wanted


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
