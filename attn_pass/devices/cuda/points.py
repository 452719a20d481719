"""CUDA's attention kernels called directly: a call as numbers, as tensors to run, and as the cost model predicts it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_pass.devices.cuda.kernel import CudaKernel, Sweep
from attn_pass.devices.cuda.kernels import KERNELS
from attn_pass.devices.device import Device
from attn_pass.devices.roofline import Problem
from attn_pass.tuning.clock import Run


def swept(sweep: Sweep) -> tuple[str, ...]:
    """The kernels that are measured at these calls."""
    return tuple(kernel.name for kernel in KERNELS if sweep in kernel.sweeps)


PREFILL_KERNELS = swept("prefill")
BUILD_PLANS = tuple(kernel.name for kernel in KERNELS if kernel.shape is not None and kernel.shape.builds_plans)
_TOKENS = 1 << 14  # of all batch rows together, at every length
_WIDTH = 2048  # of all heads together


@dataclass(frozen=True)
class Point:
    """One call of one kernel: query (B, H, L, D), key and value (B, Hkv, S, D), no mask but the causal one."""

    kernel: str
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    dim: int
    causal: bool = False
    backward: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        """As in a table: "flash B4 H16 Hkv16 L4096 S4096 D128 causal backward"."""
        sizes = f"B{self.batch} H{self.heads} Hkv{self.kv_heads} L{self.q_len} S{self.kv_len} D{self.dim}"
        return " ".join([self.kernel, sizes, *(["causal"] * self.causal), *(["backward"] * self.backward)])

    @property
    def problem(self) -> Problem:
        """What the cost model takes; it knows the forward alone."""
        return Problem(
            batch=self.batch,
            heads=self.heads,
            kv_batch=self.batch,
            kv_heads=self.kv_heads,
            q_len=self.q_len,
            kv_len=self.kv_len,
            head_dim=self.dim,
            value_dim=self.dim,
            dtype=self.dtype,
            causal=self.causal,
        )

    @property
    def flops(self) -> float:
        """Of the products, what is masked not counted; a backward has five where the forward has two."""
        return self.problem.flops * (0.5 if self.causal else 1.0) * (2.5 if self.backward else 1.0)

    def predicted_us(self, device: Device) -> float:
        """By the cost model."""
        return _kernel(self.kernel).microseconds(device, self.problem)

    def run(self, device: torch.device) -> Run:
        """The call, on random tensors; of a backward the backward alone."""
        sizes = ((self.heads, self.q_len), (self.kv_heads, self.kv_len), (self.kv_heads, self.kv_len))
        q, k, v = (torch.randn(self.batch, *s, self.dim, device=device, dtype=self.dtype) for s in sizes)
        if not self.backward:
            return lambda: call(self.kernel, q, k, v, self.causal)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            out = call(self.kernel, leaves[0], leaves[1], leaves[2], self.causal)
        grad = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def call(kernel: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """A kernel by itself, with the usual scale."""
    return _kernel(kernel).bare(q, k, v, causal)


def _kernel(name: str) -> CudaKernel:
    return next(kernel for kernel in KERNELS if kernel.name == name)


def prefill(
    kernels: Sequence[str], lengths: Sequence[int], dims: Sequence[int], backward: Sequence[bool] = (False,)
) -> Iterator[Point]:
    """Every kernel at every length and head dim, full and causal; the number of tokens and the width stay the same."""
    for length in lengths:
        for dim in dims:
            for causal in (False, True):
                for back in backward:
                    for kernel in kernels:
                        heads = max(1, _WIDTH // dim)
                        yield Point(kernel, max(1, _TOKENS // length), heads, heads, length, length, dim, causal, back)


def decoding(
    kernels: Sequence[str], rows: Sequence[int], keys: Sequence[int], batches: Sequence[int]
) -> Iterator[Point]:
    """Few query rows over long keys: 32 heads on 8, head dim 128; 8 on 8 for the kernel that takes no groups."""
    for kv_len in keys:
        for batch in batches:
            for q_len in rows:
                for kernel in kernels:
                    heads = 32 if _kernel(kernel).takes_groups else 8
                    yield Point(kernel, batch, heads, 8, q_len, kv_len, 128)
