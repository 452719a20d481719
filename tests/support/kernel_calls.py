"""Calls as the rules of kernels see them, with a test's changes to a plain call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attn_pass.devices import registry
from attn_pass.devices.device import Device
from attn_pass.devices.registry import families
from attn_pass.model.attention import Attention, Source
from attn_pass.model.expression import DOT, Load
from attn_pass.model.index import Axis, Index, Poly, Symbol, axis_index
from attn_pass.model.mask import Mask
from attn_pass.targets.kernel_rules import KernelCall

KERNELS = {
    kernel: rules for family in families() if not family.is_runtime for kernel, rules in family.kernel_rules.items()
}

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
H200 = registry.by_name("H200")
UNKNOWN = Poly.of(Symbol("s0"))


def gpu(major: int, minor: int, cudnn: int = 91900, **changes: Any) -> Device:
    return replace(H200, capability=(major, minor), cudnn=cudnn, **changes)


def call(
    *,
    batch: Index = 2,
    heads: int = 4,
    groups: int = 1,
    q_len: Index = 8,
    kv_len: Index = 8,
    dim: Index = 64,
    value_dim: Index | None = None,
    dtype: torch.dtype = BF16,
    dropout: float = 0.0,
    grad: bool = False,
    never_empty: bool = True,
    mask: str = "none",
    by_head: bool = False,
    device: Device = H200,
    torch_version: tuple[int, int] = (2, 13),
    **of_call: Any,
) -> KernelCall:
    """A call; ``by_head``: its mask differs from head to head."""
    b, h, g, i, j, d = (Axis(n, s) for n, s in zip("bhgijd", (batch, heads // groups, groups, q_len, kv_len, dim)))
    e = Axis("e", dim if value_dim is None else value_dim)
    at = {a: axis_index(a) for a in (b, h, g, i, j, d, e)}
    bias = Load(3, (at[h], at[g], at[i], at[j])) if by_head else None
    attention = Attention(
        batch=(b,),
        heads=(h, g),
        rows=(i,),
        keys=j,
        dim=d,
        value_dim=(e,),
        query=Load(0, (at[b], at[h], at[g], at[i], at[d])),
        key=Load(1, (at[b], at[h], at[j], at[d])),
        value=Load(2, (at[b], at[h], at[j], at[e])),
        score=DOT,
        scale=1.0,
        sources=tuple(Source(n, (), dtype, torch.device("cpu")) for n in range(3 + by_head)),
        output=((b,), (h, g), (i,), (e,)),
        compute_dtype=dtype,
        output_dtype=dtype,
        dropout=dropout,
        needs_grad=grad,
        mask=Mask(bias, never_empty=never_empty),
    )
    return KernelCall(attention, mask, device, torch_version=torch_version, **of_call)
