"""Torch's own check of a kernel for a call, if the GPU is present: it can only refuse.

The check takes tensors. It is given tensors without memory, with the traced sizes, so that no size of the program is
guarded; for other sizes only the rules of the tables apply.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from attn_pass.devices.cuda.kernels import KERNELS
from attn_pass.model.index import product
from attn_pass.targets.kernel_rules import KernelCall, padded

_CHECKS = {kernel.name: kernel.torch_check for kernel in KERNELS if kernel.torch_check}


@dataclass(frozen=True)
class Shown:
    """A call in plain numbers: the shapes (B, H, L, D) of the operands, and what else torch's check looks at."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: torch.dtype
    mask: bool
    mask_needs_grad: bool
    causal: bool
    dropout: float
    needs_grad: bool
    deterministic: bool  # which the check asks torch for: part of what an answer holds for
    device: str = "cuda"

    def parameters(self) -> torch.backends.cuda.SDPAParams:
        """The argument of torch's checks."""
        with FakeTensorMode(), torch.enable_grad():
            query, key, value = (
                torch.empty(shape, dtype=self.dtype, device=self.device, requires_grad=self.needs_grad)
                for shape in (self.query, self.key, self.value)
            )
            mask: Tensor | None = None
            if self.mask:
                shape = (1, 1, self.query[2], self.key[2])
                mask = torch.empty(shape, dtype=self.dtype, device=self.device, requires_grad=self.mask_needs_grad)
            grouped = self.query[1] != self.key[1]
            return torch.backends.cuda.SDPAParams(query, key, value, mask, self.dropout, self.causal, grouped)


def shown(call: KernelCall, multiple: int) -> Shown | None:
    """The call as torch's check is to see it, head dims padded; None where a size has no hint."""
    a, hint = call.attention, call.hint
    sizes = (a.batch_size, a.query_heads, product(x.size for x in a.kv_heads), a.q_len, a.kv_len, *call.head_dims)
    known = [size if isinstance(size, int) else None if hint is None else hint(size) for size in sizes]
    if None in known:
        return None
    batch, heads, kv_heads, q_len, kv_len, dim, value_dim = (size for size in known if size is not None)
    wide, wide_values = (padded(d, multiple) or d for d in (dim, value_dim))
    return Shown(
        (batch, heads, q_len, wide),
        (batch, kv_heads, kv_len, wide),
        (batch, kv_heads, kv_len, wide_values),
        call.dtype,
        call.has_mask_tensor,
        call.mask_needs_grad,
        call.mask == "causal",
        a.dropout,
        a.needs_grad,
        call.deterministic,
    )


def refuses(kernel: str, call: KernelCall, multiple: int) -> bool:
    """Whether torch's own check refuses the call; False also where it cannot be asked."""
    of_here = call.device.is_here and call.device.type == "cuda" and kernel in _CHECKS
    if not of_here or not torch.backends.cuda.is_built():
        return False
    call_shown = shown(call, multiple)
    return call_shown is not None and _refuses(kernel, call_shown, call.device.kernels)


@lru_cache(maxsize=512)
def _refuses(kernel: str, call_shown: Shown, switched_on: tuple[str, ...]) -> bool:
    del switched_on  # which the check asks torch for: part of what an answer holds for
    check = getattr(torch.backends.cuda, _CHECKS[kernel], None)
    if check is None:
        return False
    try:
        with torch.enable_grad():
            return not check(call_shown.parameters())
    except (RuntimeError, TypeError):  # no driver after all, or a torch that asks otherwise
        return False
