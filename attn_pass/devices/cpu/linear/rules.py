"""Where another kernel than torch's multiplies a linear layer faster: by measurements on Zen 4, and on Zen 3 for few
rows and for types of which torch has no fast product.

Such are float16 where the processor does not multiply it, and bfloat16 with AVX2 alone: oneDNN takes neither there, and
torch's own loops reach a tenth of float32's rate, less where the weight lies by columns. The CPU kernel widens the
operands while it packs them, and multiplies them in float32.

Of few rows the weights are all there is to read, and torch's calls do not reach the memory's rate, which the CPU kernel
does. A frozen program's weights, which Inductor packs, oneDNN reads faster: there the kernel is taken for fewer rows.

In float32 torch calls MKL, which does not reach on AMD's processors what they can: oneDNN takes 0.5 to 1.1 times its
time where the weight has 2^18 elements or the product 1e8 operations; smaller calls lose more on the way to oneDNN than
they gain. In bfloat16 both are oneDNN, but torch first copies the bias into the result, in which it then adds: a layer
with a bias takes 0.7 to 1.2 times the time without that copy (docs/linear_layers.md).
"""

from __future__ import annotations

import torch

from attn_pass.devices.base import FasterLinear, LinearLayer
from attn_pass.devices.cpu.facts import instruction_set, is_amd
from attn_pass.devices.cpu.kernel import build
from attn_pass.devices.device import Device
from attn_pass.model.dtype_name import dtype_name

_FEWEST_WEIGHTS = 1 << 18
_LEAST_WORK = 1e8
_LEAST_WORK_OF_ANY_ROWS = 2e8  # oneDNN makes code for each number of rows that it meets first, 0.6 ms each time
_FEWEST_ROWS_BY_COLUMNS = 4
_MOST_ROWS = {torch.float32: 8, torch.bfloat16: 16, torch.float16: 16}
_MOST_ROWS_PACKED = {torch.float32: 2, torch.bfloat16: 8, torch.float16: 16}
_WITHOUT = {torch.bfloat16: ("avx2",), torch.float16: ("avx2", "avx512", "avx512_bf16")}
_NARROWEST_WIDENED = 16
_FEWEST_WEIGHTS_WIDENED = 1 << 16
_LEAST_WORK_WIDENED = 2e6
_FEWEST_WEIGHTS_OF_ONE_ROW = {torch.bfloat16: 1 << 21, torch.float16: 1 << 22}
_FEWEST_WEIGHTS_OF_THREE_ROWS = 1 << 18
_OF_FLOAT32 = 0.8  # of the rate of float32, what is left when operands are widened
_CODE_US, _CODE_US_HALF = 600.0, 1000.0  # measured: 0.6 ms in float32, 0.7 to 2.2 ms in bfloat16
_NO_MKL = "oneDNN is faster than MKL on this processor"
_NO_COPY = "oneDNN adds the bias without a copy of it"
_NO_PRODUCT = "torch has no fast product of {} on this processor"
_READ_ONCE = "few rows take as long as their weights take to be read, which the kernel reads at the memory's rate"


def faster_linear(layer: LinearLayer) -> FasterLinear | None:
    """The call that is faster for a layer, and why; None where it is not, or was not measured."""
    if _is_tuned_by_inductor():
        return None
    if lacks_product(layer.dtype):
        is_taken = is_worth_widening(layer) and not build.missing()
        return _by_kernel(_NO_PRODUCT.format(dtype_name(layer.dtype))) if is_taken else None
    if not layer.is_plain or not is_amd() or not instruction_set().startswith("avx"):
        return None
    if has_few_rows(layer) and not build.missing():
        return _by_kernel(_READ_ONCE)
    if instruction_set() == "avx2":
        return None  # oneDNN takes 1.0 to 1.2 times as long as MKL there
    if not _is_onednn_on() or not is_faster_on_amd(layer):
        return None
    return _by_onednn(_NO_MKL if layer.dtype == torch.float32 else _NO_COPY)


def lacks_product(dtype: torch.dtype) -> bool:
    """Whether torch multiplies this type in loops of its own here, where the CPU kernel has vectors."""
    return instruction_set() in _WITHOUT.get(dtype, ()) and not is_onednns(dtype)


def is_onednns(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies half precision on this processor, as torch asks it."""
    has = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }[dtype]
    return torch.backends.mkldnn.is_available() and bool(has())


def is_worth_widening(layer: LinearLayer) -> bool:
    """Whether a layer of a type that `lacks_product` takes less time in the CPU kernel, and enough to be compiled."""
    weights = layer.features * layer.width
    if min(layer.features, layer.width) < _NARROWEST_WIDENED:
        return False  # most of a panel of weights would be empty
    if layer.has_static_rows and layer.rows <= _MOST_ROWS[layer.dtype] and instruction_set() != "avx2":
        return is_amd() and has_few_rows(layer)  # torch's loops with AVX-512 were measured on Zen 4 alone
    if layer.rows <= 3 and layer.has_static_rows and not layer.by_columns:  # torch's loops read these well
        of_one, of_more = _FEWEST_WEIGHTS_OF_ONE_ROW[layer.dtype], _FEWEST_WEIGHTS_OF_THREE_ROWS
        return weights >= (of_one if layer.rows == 1 else of_more)
    least = _FEWEST_WEIGHTS_WIDENED if layer.has_static_rows or layer.by_columns else _FEWEST_WEIGHTS_OF_THREE_ROWS
    return weights >= least or 2.0 * weights * layer.rows >= _LEAST_WORK_WIDENED


def has_few_rows(layer: LinearLayer) -> bool:
    """Whether the CPU kernel takes less time for a layer than torch's call, oneDNN and packed weights do."""
    if not layer.has_static_rows or layer.dtype not in _MOST_ROWS_PACKED:
        return False
    if layer.rows == 1 and layer.dtype == (torch.float32 if layer.by_columns else torch.float16):
        return False  # torch's call is as fast
    most = (_MOST_ROWS_PACKED if layer.is_constant else _MOST_ROWS)[layer.dtype]
    return layer.rows <= most and layer.features * layer.width >= _FEWEST_WEIGHTS


def new_rows_us(device: Device, layer: LinearLayer, *, chooses: bool) -> float:
    """What oneDNN's code for a number of rows takes, made for each size of weights; 0 where it does not multiply.

    In half precision oneDNN multiplies wherever it can; in float32 where `faster_linear` decides so, and in a frozen
    program.
    """
    if layer.dtype.itemsize == 2:
        return 0.0 if device.is_here and lacks_product(layer.dtype) else _CODE_US_HALF
    given = layer.is_constant or (chooses and faster_linear(layer) is not None)
    return _CODE_US if layer.dtype == torch.float32 and given else 0.0


def linear_gflops(device: Device, layer: LinearLayer, *, chooses: bool) -> float:
    """GFLOP/s of many rows, by `faster_linear` where it ``chooses``."""
    widened = chooses and device.is_here and lacks_product(layer.dtype) and faster_linear(layer) is not None
    return _OF_FLOAT32 * device.matmul(torch.float32) if widened else device.matmul(layer.dtype)


def is_faster_on_amd(layer: LinearLayer) -> bool:
    """Whether oneDNN takes less time for a layer there than torch's call does."""
    if layer.is_packaged:
        return False  # it is oneDNN's already, packed and fused with what follows
    if layer.by_columns and layer.rows < _FEWEST_ROWS_BY_COLUMNS:
        return False  # it reads the weight at 0.6 to 1.1 times MKL's rate then
    if layer.dtype == torch.float32:
        return _is_mkl_slower(layer)
    # A frozen program's layers are oneDNN's already, packed and fused with what follows.
    return layer.dtype == torch.bfloat16 and layer.has_bias and not (layer.is_constant or layer.by_columns)


def _is_mkl_slower(layer: LinearLayer) -> bool:
    if not torch.backends.mkl.is_available() or (layer.is_constant and not layer.has_static_rows):
        return False  # with dynamic sizes a frozen program calls oneDNN itself
    weights = layer.features * layer.width
    work = 2.0 * weights * layer.rows
    if not layer.has_static_rows:
        return work >= _LEAST_WORK_OF_ANY_ROWS
    return weights >= _FEWEST_WEIGHTS or work >= _LEAST_WORK


def _is_onednn_on() -> bool:
    """Whether torch calls oneDNN, in full precision."""
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    return (
        torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
        and matmul.fp32_precision in ("none", "ieee")
    )


def _is_tuned_by_inductor() -> bool:
    """Whether Inductor times templates of its own for products, and takes the best."""
    from torch._inductor import config

    return bool(config.max_autotune or config.max_autotune_gemm)


def _by_onednn(reason: str) -> FasterLinear:
    from attn_pass.devices.cpu.linear.onednn_call import ONEDNNS, OPERATOR

    return FasterLinear(OPERATOR, "oneDNN", reason, tuple(ONEDNNS))


def _by_kernel(reason: str) -> FasterLinear:
    from attn_pass.devices.cpu.linear.kernel_call import OPERATOR

    return FasterLinear(OPERATOR, "the CPU kernel", reason)
