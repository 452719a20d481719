"""The example that runs packages without Python, built once for all tests: the compiler takes 15 seconds of a core."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import torch
from once import VARIABLE, once
from torch.utils.cpp_extension import include_paths, library_paths

SOURCE = Path(__file__).parents[2] / "examples" / "cpp" / "run_package.cpp"


def _build() -> str:
    built = Path(os.environ[VARIABLE]) / "built_run_package"
    (libraries,) = library_paths()[:1]
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    command = ["g++", "-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", str(SOURCE), "-o", str(built)]
    command += [f"-I{path}" for path in include_paths()]
    command += [f"-L{libraries}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{libraries}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return str(built)


def run_package() -> Path:
    """The program, built against the torch that is installed."""
    return Path(once("run_package", _build))
