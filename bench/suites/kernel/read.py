"""The time of reading memory, and nothing else: the lower bound of an attention with few rows."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from attn_pass.devices.cpu.kernel.build import compiler

# Four sums, so that additions do not wait for each other; pieces of 64 KiB by turns, as the kernel's tasks are.
_SOURCE = """
#include <cstdint>
extern "C" int64_t read_all(const int64_t* p, int64_t n, int threads) {
  int64_t sum = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : sum) schedule(static)
  for (int64_t at = 0; at < n; at += 8192) {
    int64_t part[32] = {};
    const int64_t end = at + 8192 < n ? at + 8192 : n;
    int64_t i = at;
    for (; i + 32 <= end; i += 32)
      for (int j = 0; j < 32; ++j) part[j] += p[i + j];
    for (; i < end; ++i) part[0] += p[i];
    for (int j = 0; j < 32; ++j) sum += part[j];
  }
  return sum;
}
"""


def reader() -> Callable[[Tensor], int]:
    """A function that reads a tensor's memory once, with torch's number of threads, and returns a sum of it."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "read.cpp", Path(folder) / "read.so"
        source.write_text(_SOURCE)
        flags = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")
        subprocess.run([compiler(), *flags, str(source), "-o", str(library)], check=True)
        read_all = ctypes.CDLL(str(library)).read_all
    read_all.restype = ctypes.c_int64
    read_all.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)

    def read(tensor: Tensor) -> int:
        """``tensor`` is contiguous; bytes behind the last eighth are left out."""
        return int(read_all(tensor.data_ptr(), tensor.nbytes // 8, torch.get_num_threads()))

    return read
