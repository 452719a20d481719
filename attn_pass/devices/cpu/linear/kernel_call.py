"""`attn_pass::linear_by_kernel`: a linear layer by the CPU kernel, which takes every weight as it lies."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from attn_pass.devices.cpu.kernel.build import entry
from attn_pass.devices.cpu.kernel.source import LINEAR

LIBRARY = torch.library.Library("attn_pass", "FRAGMENT")
LIBRARY.define(
    "linear_by_kernel(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


class LinearArgs(ctypes.Structure):
    """``LinearArgs`` of `common.hpp`, member by member."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input", "weight", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "features", "width")),
        *((name, ctypes.c_int32) for name in ("threads", "by_columns")),
    )


def linear_by_kernel(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``input @ weight.T + bias``, sums in float32: (..., K) and (N, K), which may be transposed in
    memory, to (..., N), contiguous.

    Up to 16 rows every weight is read once; for more, weights are packed, widened to float32 where the processor does
    not multiply them. Results are the same for any number of threads.

    Raises:
        NoCompilerError: the kernel cannot be built on this machine.
    """
    result = _shape(input, weight, bias)
    if result.numel() == 0:
        return result
    by_columns = lies_by_columns(weight)
    input, weight = input.contiguous(), weight if by_columns else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    width, features = weight.shape
    args = LinearArgs(
        input.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        result.data_ptr(),
        rows=result.numel() // width,
        features=features,
        width=width,
        threads=torch.get_num_threads(),
        by_columns=by_columns,
    )
    entry(input.dtype, kernel=LINEAR)(ctypes.byref(args))
    return result


def lies_by_columns(weight: Tensor) -> bool:
    """Whether a weight is transposed in memory."""
    return weight.t().is_contiguous() and not weight.is_contiguous()


def _shape(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


LIBRARY.impl("linear_by_kernel", linear_by_kernel, "CPU")
torch.library.register_fake("attn_pass::linear_by_kernel", _shape, lib=LIBRARY)
OPERATOR = torch.ops.attn_pass.linear_by_kernel.default
