"""Part 2: the kernel that the rule table predicts for torch's own call, compared with torch's choice.

In a dry run torch is asked for the CPU, and the table's answers for the named GPUs stand beside it unchecked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_pass.devices import registry
from attn_pass.devices.cpu.facts import cpu
from attn_pass.devices.cuda import facts as cuda_facts
from attn_pass.devices.device import Device
from attn_pass.graph.effects import Effects
from attn_pass.graph.regions import Region, Regions
from attn_pass.graph.values import Sizes
from attn_pass.measuring.timing import compiled
from attn_pass.model.attention import AsWritten, Attention
from attn_pass.patterns import calls
from attn_pass.reading.reader import Reader
from attn_pass.targets.kernel_rules import KernelCall
from attn_pass.targets.torch_call import refusal
from bench.gpu.environment import Environment
from bench.gpu.parts import Column, Part, Row, one_each

NAMED = ("H200", "A100", "L4", "B200")
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
_NAMES = {-1: "error", 0: "none", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}


@dataclass(frozen=True)
class Call:
    """``F.scaled_dot_product_attention`` on (B, H, Hkv, L, S, D, Dv)."""

    sizes: tuple[int, int, int, int, int, int, int]
    dtype: torch.dtype = BF16
    mask: str = ""  # "bool 2", "bool 4", "add 2", "add 4", "learned", "rows" (one column)
    causal: bool = False
    dropout: float = 0.0
    grad: bool = False
    layout: str = ""  # "heads last", "rank 3", "shared" (batch 1), "expanded", "strided" (last dimension)

    def inputs(self, env: Environment) -> tuple[Tensor, ...]:
        """Query, key, value and the mask where there is one."""
        b, h, g, rows, keys, d, e = self.sizes
        kv_batch = 1 if self.layout == "shared" else b
        shapes = [(b, h, rows, d), (kv_batch, g, keys, d), (kv_batch, g, keys, e)]
        operands = [self._laid(env, s).requires_grad_(self.grad) for s in shapes]
        masks: dict[str, Callable[[], Tensor]] = {
            "bool 2": lambda: env.normal(rows, keys) < 2,
            "bool 4": lambda: env.normal(b, 1, rows, keys) < 2,
            "add 2": lambda: env.normal(rows, keys, dtype=self.dtype),
            "add 4": lambda: env.normal(1, h, rows, keys, dtype=self.dtype),
            "add 3": lambda: env.normal(h, rows, keys, dtype=self.dtype),
            "learned": lambda: env.normal(1, h, rows, keys, dtype=self.dtype, grad=True),
        }
        return (*operands, masks[self.mask]()) if self.mask else tuple(operands)

    def _laid(self, env: Environment, shape: Sequence[int]) -> Tensor:
        if self.layout == "rank 3":
            return env.normal(shape[0] * shape[1], *shape[2:], dtype=self.dtype)
        if self.layout == "heads last":
            return env.normal(shape[0], shape[2], shape[1], shape[3], dtype=self.dtype).transpose(1, 2).detach()
        if self.layout == "expanded":
            return env.normal(1, *shape[1:], dtype=self.dtype).expand(*shape).detach()
        if self.layout == "strided":
            return env.normal(*shape[:3], 2 * shape[3], dtype=self.dtype)[..., ::2].detach()
        return env.normal(*shape, dtype=self.dtype)

    @property
    def given(self) -> dict[str, Any]:
        """The call's keywords."""
        grouped = self.sizes[1] != self.sizes[2]
        return {"dropout_p": self.dropout, "is_causal": self.causal, "enable_gqa": grouped}


CALLS: dict[str, Call] = {
    "plain": Call((2, 8, 8, 512, 512, 64, 64)),
    "float16": Call((2, 8, 8, 512, 512, 64, 64), FP16),
    "float32": Call((2, 8, 8, 512, 512, 64, 64), FP32),
    "float64": Call((2, 8, 8, 512, 512, 64, 64), FP64),
    "causal": Call((2, 8, 8, 512, 512, 128, 128), causal=True),
    "causal, more keys": Call((2, 8, 8, 100, 512, 64, 64), causal=True),
    "causal, one query": Call((2, 8, 8, 1, 512, 64, 64), causal=True),
    "training": Call((2, 8, 8, 512, 512, 64, 64), grad=True),
    "training, float32": Call((2, 8, 8, 512, 512, 64, 64), FP32, grad=True),
    "training, D 256": Call((2, 8, 8, 128, 128, 256, 256), grad=True),
    "D 40": Call((2, 8, 8, 512, 77, 40, 40)),
    "D 80": Call((2, 8, 8, 512, 77, 80, 80)),
    "D 20": Call((2, 8, 8, 128, 128, 20, 20)),
    "D 20, float32": Call((2, 8, 8, 128, 128, 20, 20), FP32),
    "D 18, float32": Call((2, 8, 8, 128, 128, 18, 18), FP32),
    "D 160": Call((2, 8, 8, 128, 128, 160, 160)),
    "D 256": Call((2, 8, 8, 128, 128, 256, 256)),
    "D 264": Call((2, 8, 8, 128, 128, 264, 264)),
    "D 512": Call((2, 4, 4, 128, 128, 512, 512)),
    "D 192/128": Call((2, 8, 8, 128, 128, 192, 128), causal=True),
    "D 64, Dv 128": Call((2, 8, 8, 128, 128, 64, 128)),
    "grouped heads": Call((2, 32, 8, 256, 256, 128, 128)),
    "grouped heads, float32": Call((2, 32, 8, 256, 256, 128, 128), FP32),
    "grouped heads, mask": Call((2, 32, 8, 256, 256, 128, 128), mask="bool 4"),
    "decode": Call((2, 8, 8, 1, 2048, 128, 128)),
    "decode, grouped heads": Call((2, 32, 8, 1, 2048, 128, 128)),
    "one key": Call((2, 8, 8, 64, 1, 64, 64)),
    "mask of rank 2": Call((2, 8, 8, 256, 256, 64, 64), mask="bool 2"),
    "mask of rank 4": Call((2, 8, 8, 256, 256, 64, 64), mask="bool 4"),
    "bias of rank 2": Call((2, 8, 8, 256, 256, 64, 64), mask="add 2"),
    "bias of rank 3": Call((2, 8, 8, 256, 256, 64, 64), mask="add 3"),
    "bias of rank 4": Call((2, 8, 8, 256, 256, 64, 64), mask="add 4"),
    "bias, odd number of keys": Call((2, 8, 8, 256, 255, 64, 64), mask="add 4"),
    "learned bias": Call((2, 8, 8, 256, 256, 64, 64), mask="learned", grad=True),
    "dropout 0.1": Call((2, 8, 8, 256, 256, 64, 64), dropout=0.1),
    "dropout 0.25": Call((2, 8, 8, 256, 256, 64, 64), dropout=0.25, grad=True),
    "heads last": Call((2, 8, 8, 256, 256, 64, 64), layout="heads last"),
    "rank 3": Call((2, 8, 8, 256, 256, 64, 64), layout="rank 3"),
    "shared keys": Call((64, 4, 4, 1, 2048, 32, 32), layout="shared"),
    "expanded keys": Call((8, 4, 4, 64, 256, 32, 32), layout="expanded"),
    "strided last dimension": Call((2, 8, 8, 256, 256, 64, 64), layout="strided"),
    "many batches": Call((66000, 1, 1, 8, 8, 16, 16)),
}


def read(program: Callable[..., Tensor], *inputs: Tensor) -> tuple[Attention, AsWritten]:
    """The one attention call of a program, as the pass reads it."""
    pairs: list[tuple[Attention, AsWritten]] = []

    def look(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graph = gm.graph
        reader = Reader(graph, Sizes(), Effects(graph), Regions(graph, Region.ambient()), knows_gradients=True)
        for site in calls.find(reader):
            if site.described is None:
                raise AssertionError(site.refusal)
            pairs.append((site.described.attention, site.written))
        return lambda *args: (args[0],)  # nothing is to be computed

    compiled(program, backend=look)(*inputs)
    (only,) = pairs
    return only


def by_torch(call: Call, inputs: Sequence[Tensor]) -> str:
    """Torch's own answer."""
    mask = inputs[3] if call.mask else None
    given = call.given
    picked = torch._fused_sdp_choice(
        *inputs[:3], mask, given["dropout_p"], given["is_causal"], enable_gqa=given["enable_gqa"]
    )
    return _NAMES[int(picked)]


def by_table(attention: Attention, written: AsWritten, device: Device) -> str:
    """The kernel of the call as it is written; the CPU's must also be one that the table's rules take."""
    kernel = registry.family_of(device).stock_kernel(attention, written, device, deterministic=False)
    if device.type == "cpu" and kernel is not None:
        mask = "causal" if written.causal else written.mask
        refused = refusal(kernel, KernelCall(attention, mask, device, written.mask_needs_grad), by_torch=True)
        return "flash" if refused is None else f"none ({refused})"
    return kernel or "none"


def compare(env: Environment, call: Call) -> Row:
    """One call asked of both."""
    inputs = call.inputs(env)

    def program(*args: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*args, **call.given)

    attention, written = read(program, *inputs)
    here = cpu() if env.dry else cuda_facts.cuda_here()
    row: Row = {"torch": by_torch(call, inputs), "table": by_table(attention, written, here)}
    row["verdict"] = "same" if row["torch"] == row["table"] else "DIFFERS"
    for name in NAMED:
        row[name] = by_table(attention, written, registry.by_name(name))
    return row


PART = Part(
    "rules",
    "The rule table against torch's own choice",
    0.05,
    (
        Column("call", "name"),
        Column("torch", "torch"),
        Column("table", "table"),
        Column("verdict", "verdict"),
        *(Column(f"table, {name}", name) for name in NAMED),
    ),
    one_each(CALLS, compare, quick=5),
    timed=False,
)
