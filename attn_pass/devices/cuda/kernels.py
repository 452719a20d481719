"""The kernels of the family: one file per kernel, one line per file. All other lists of kernels are derived from here.

A kernel's file determines its place among the targets, torch's rules and the order of torch's call, its share in every
data sheet, its cost, its calibration points, and the tables of the documentation.
"""

from __future__ import annotations

from importlib import import_module

from attn_pass.devices.cuda.kernel import CudaKernel

# In the order torch's own call tries its kernels; of equally cheap offers the first is taken.
_FILES = (
    "cudnn",
    "flash",
    "efficient",
    "decode",
    "flash_attn",
    "flash_attn_3",
    "flex_flash",
)
KERNELS: tuple[CudaKernel, ...] = tuple(import_module(f"attn_pass.devices.cuda.{name}").KERNEL for name in _FILES)


def named(name: str) -> CudaKernel | None:
    """The kernel of this name; None where the family has none."""
    return next((kernel for kernel in KERNELS if kernel.name == name), None)
