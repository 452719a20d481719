"""One attention as numbers, its lower bound, and the two ways users write it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.environment import Environment

# Measured on an H200: a large bfloat16 product, a device-to-device copy counted both ways; exponentials by the data
# sheet, 132 multiprocessors with 16 a clock.
MATMUL_TFLOPS, COPY_TBS, TERA_EXP = 790.0, 4.3, 3.9


@dataclass(frozen=True)
class Shape:
    """Sizes of one attention: query (B, H, L, D), key (B, Hkv, S, D), value (B, Hkv, S, D).

    Masks: "none", "causal" (equal lengths), "window" (the last ``window`` keys, causal), "bias" (1, H, L, S),
    "alibi" (causal, slopes a head) and "softcap" (causal, ``50 * tanh(score / 50)``). ``shared`` keys and values have
    batch 1 and serve all of the batch.
    """

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    dim: int
    mask: str = "none"
    window: int = 0
    shared: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def pairs(self) -> int:
        """Query rows times the keys each keeps."""
        length = self.q_len
        if self.mask in ("none", "bias"):
            return self.q_len * self.kv_len
        if self.mask == "window":
            return self.window * (self.window + 1) // 2 + (length - self.window) * self.window
        return length * (length + 1) // 2

    @property
    def flops(self) -> float:
        """Of the two products, what is masked not counted."""
        return 4.0 * self.batch * self.heads * self.pairs * self.dim

    @property
    def exponentials(self) -> float:
        """One a kept score, and a tanh for a soft cap."""
        return float(self.batch * self.heads * self.pairs * (2 if self.mask == "softcap" else 1))

    @property
    def bytes(self) -> int:
        """Query, key, value, result and bias once."""
        kv_batch = 1 if self.shared else self.batch
        elements = 2 * self.dim * (self.batch * self.heads * self.q_len + kv_batch * self.kv_heads * self.kv_len)
        bias = self.heads * self.q_len * self.kv_len if self.mask == "bias" else 0
        return (elements + bias) * self.dtype.itemsize

    def floor_us(
        self, matmul_tflops: float = MATMUL_TFLOPS, copy_tbs: float = COPY_TBS, tera_exp: float = TERA_EXP
    ) -> float:
        """The longest of products, exponentials and memory, each at the device's rate."""
        return max(self.flops / matmul_tflops, self.exponentials / tera_exp, self.bytes / copy_tbs) / 1e6

    @property
    def memory_bound(self) -> bool:
        """Whether moving the operands is what takes longest."""
        return self.bytes / COPY_TBS / 1e6 >= self.floor_us()

    @property
    def groups(self) -> int:
        """Query heads a KV head serves."""
        return self.heads // self.kv_heads

    @property
    def scale(self) -> float:
        """The usual one."""
        return float(self.dim**-0.5)

    def tiny(self) -> Shape:
        """The same kind of attention, small enough for a dry run."""
        most = 2 if self.mask == "none" else 1
        causal = self.mask not in ("none", "bias")
        rows = min(self.q_len, 24)
        return replace(
            self,
            batch=min(self.batch, 3 if self.shared else 2),
            heads=most * self.groups if self.groups > 1 else min(self.heads, 2),
            kv_heads=most if self.groups > 1 else min(self.kv_heads, 2),
            q_len=rows,
            kv_len=rows if causal else min(self.kv_len, 40),
            dim=min(self.dim, 16),
            window=min(self.window, 8),
        )

    def inputs(self, env: Environment) -> tuple[Tensor, ...]:
        """Query, key, value, then the bias or the slopes where there are some; random."""
        kv_batch = 1 if self.shared else self.batch
        q = env.normal(self.batch, self.heads, self.q_len, self.dim, dtype=self.dtype)
        k, v = (env.normal(kv_batch, self.kv_heads, self.kv_len, self.dim, dtype=self.dtype) for _ in range(2))
        if self.mask == "bias":
            return q, k, v, env.normal(1, self.heads, self.q_len, self.kv_len, dtype=self.dtype)
        if self.mask == "alibi":
            exponents = torch.arange(1, self.heads + 1, device=env.device) * (-8.0 / self.heads)
            return q, k, v, torch.exp2(exponents)
        return q, k, v


def by_hand(shape: Shape) -> Callable[..., Tensor]:
    """Matrix product, softmax, matrix product, as model code has it; grouped heads repeated."""
    groups, scale, mask, window = shape.groups, shape.scale, shape.mask, shape.window

    def program(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
        if groups > 1:
            k, v = (x[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for x in (k, v))
        scores = q @ k.transpose(-1, -2) * scale
        if mask == "bias":
            scores = scores + more[0]
        elif mask != "none":
            distance = torch.arange(q.size(-2), device=q.device)[:, None] - torch.arange(k.size(-2), device=q.device)
            if mask == "alibi":
                scores = scores - more[0].to(scores.dtype)[:, None, None] * distance
            if mask == "softcap":
                scores = 50.0 * torch.tanh(scores / 50.0)
            keep = distance >= 0
            if mask == "window":
                keep = keep & (distance < window)
            scores = scores.masked_fill(~keep, float("-inf"))
        return torch.softmax(scores, -1) @ v

    return program


def call(shape: Shape) -> Callable[..., Tensor] | None:
    """``F.scaled_dot_product_attention``; None where it has no such attention."""
    gqa, mask, window = shape.groups > 1, shape.mask, shape.window
    if mask == "softcap":
        return None

    def program(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
        given: dict[str, Any] = {"enable_gqa": True} if gqa else {}
        if mask == "causal":
            given["is_causal"] = True
        elif mask == "bias":
            given["attn_mask"] = more[0]
        elif mask != "none":
            distance = torch.arange(q.size(-2), device=q.device)[:, None] - torch.arange(k.size(-2), device=q.device)
            if mask == "window":
                given["attn_mask"] = (distance >= 0) & (distance < window)
            else:
                bias = -more[0][:, None, None] * distance
                given["attn_mask"] = bias.masked_fill(distance < 0, float("-inf")).to(q.dtype)[None]
        return F.scaled_dot_product_attention(q, k, v, **given)

    return program
