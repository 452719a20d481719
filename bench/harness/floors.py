"""The least time a program can take: its products at the rate of a large product, its tensors at the rate of a copy.

Both rates are measured in the same run, by the fastest library for products, before and after each program. FLOPs are
counted by `torch.utils.flop_counter` on the eager program, and cut to the share of the scores its masks keep where the
program says that share; bytes are those of inputs, results and weights, once, as they lie in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from attn_pass.measuring.timing import in_turns, percentile_10
from attn_pass.model.dtype_name import dtype_name

aten = torch.ops.aten
_linear = torch.ops.mkldnn._linear_pointwise
_ONEDNN = ", oneDNN"


@dataclass(frozen=True)
class Rates:
    """Of one device: GFLOP/s of a large product by dtype ("float32"), GB/s of a copy, reads and writes counted."""

    gflops: Mapping[str, float]
    gbs: float

    def floor_us(self, flops: float, size: int, dtype: str) -> float:
        """The longer of computing and moving."""
        return max(self._computing(flops, dtype), size / self.gbs) / 1e3

    def bound(self, flops: float, size: int, dtype: str) -> str:
        return "products" if self._computing(flops, dtype) >= size / self.gbs else "memory"

    def _computing(self, flops: float, dtype: str) -> float:
        return flops / self.gflops.get(dtype, self.gflops["float32"])

    def fastest(self, other: Rates) -> Rates:
        """Of each rate the higher one."""
        return Rates(
            {n: max(rate, other.gflops.get(n, 0.0)) for n, rate in self.gflops.items()}, max(self.gbs, other.gbs)
        )


# float16 has no fast product on CPUs.
DTYPES = {True: (torch.float32, torch.bfloat16), False: (torch.float32, torch.bfloat16, torch.float16)}


def rates(device: str, rounds: int = 7) -> Rates:
    """Measured now, with as many threads as torch uses.

    On CPUs by whichever library is faster: in float32 torch multiplies with MKL, and oneDNN does better on AMD's. Where
    the processor does not multiply bfloat16, float32's rate bounds it.
    """
    on_cpu = not device.startswith("cuda")
    side, elements = (2048, 1 << 25) if on_cpu else (8192, 1 << 29)
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    runs: dict[str, Callable[..., Any]] = {"copy": lambda _: target.copy_(source)}
    widens = on_cpu and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    for dtype in DTYPES[on_cpu]:
        a = torch.randn(side, side, device=device, dtype=torch.float32 if widens else dtype)
        runs[dtype_name(dtype)] = lambda _, a=a: a @ a
        if on_cpu and torch.backends.mkldnn.is_available():
            runs[f"{dtype_name(dtype)}{_ONEDNN}"] = lambda _, a=a: _linear(a, a, None, "none", [], "")
    readings = in_turns(runs, (source,), rounds, seconds=0.05)
    taken = {name: percentile_10(samples) for name, samples in readings.items()}
    copied = taken.pop("copy")
    products = {n: min(us, taken.get(f"{n}{_ONEDNN}", us)) for n, us in taken.items() if not n.endswith(_ONEDNN)}
    return Rates({n: 2 * side**3 / us / 1e3 for n, us in products.items()}, 2 * source.nbytes / copied / 1e3)


def _cpu_attention(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def count_flops(run: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> float:
    """Of one call: what the operators that run multiply and add."""
    # The counter knows the fused operators of GPUs alone.
    known = {aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention}
    with FlopCounterMode(display=False, custom_mapping=known) as counter:
        run(*inputs)
    return float(counter.get_total_flops())


def extent(tensor: torch.Tensor) -> int:
    """Bytes a tensor takes in memory; an expanded axis is there once, and so are windows that overlap."""
    elements = math.prod(size for size, stride in zip(tensor.shape, tensor.stride()) if stride != 0)
    spanned = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()) if size > 0)
    return min(elements, spanned) * tensor.element_size()


def moved_bytes(inputs: Any, outputs: Any) -> int:
    """Of the tensors that go in and come out, one that is given twice once."""
    tensors = {id(x): x for x in pytree.tree_leaves((inputs, outputs)) if isinstance(x, torch.Tensor)}
    return sum(map(extent, tensors.values()))
