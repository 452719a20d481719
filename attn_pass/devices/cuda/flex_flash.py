"""FlexAttention with ``BACKEND="FLASH"``: the score function inside FlashAttention-4's kernel instead of Triton's.

Becomes: what ``flex`` makes of it, with one more kernel option, if the package flash-attn-4 (``flash_attn.cute``) is
installed. Published figures for its kernel are 1.2 to 3.2 times Triton's rate on Hopper and Blackwell; the cost model
uses the lowest.

    (torch.tanh(q @ k.mT * scale / cap) * cap).softmax(-1) @ v
    ->
    flex_attention(q, k, v, score_mod, block_mask, 1.0, {"BACKEND": "FLASH"})[0]

Exact because: the graph is that of ``flex``, which another kernel computes.

Offers under torch.compile, from torch 2.13 on, in float16 and bfloat16, if every size is known: on compute capability
9.0, and on 10.x without a mask. A mask must be known block by block (its structure describes all of it), for lengths
that are multiples of 128. A deterministic backward with a mask and captured numbers are not supported. The constraints
are those of torch/_inductor/kernel/flex/flex_flash_attention.py, whose own check is called as well, and of
flash_attn/cute/interface.py. It has not run on hardware.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch.fx import GraphModule

from attn_pass.compat import TORCH_VERSION
from attn_pass.devices.cuda.flash_attn import is_installed
from attn_pass.devices.cuda.kernel import CudaKernel
from attn_pass.devices.cuda.torch_kernel import in_vectors
from attn_pass.errors import RewriteError
from attn_pass.graph.edit import Plan, Value
from attn_pass.model.attention import Attention
from attn_pass.targets.base import Offer, Refusal, Setting
from attn_pass.targets.constraints import KNOWN_DEVICE, Constraint, refusal
from attn_pass.targets.flex.flex import Flex, FlexPlan
from attn_pass.targets.flex.rules import Case
from attn_pass.targets.flex.score import function_of
from attn_pass.targets.operands import dense_last, unbroadcast

_BLOCK = 128
_OF_TRITON = 1.2  # PyTorch's blog on FlexAttention with FlashAttention-4: 1.2 to 3.2
_PLACEHOLDERS = 5  # of a score function without captured tensors: score, b, h, q_idx, kv_idx


class FlexFlash(Flex, CudaKernel):
    """`torch.ops.higher_order.flex_attention` with ``BACKEND="FLASH"``."""

    name = "flex_flash"
    takes_valid_range = False
    looks_for_blocks = False
    backend = "FLASH"
    is_listed = False

    def consider(self, attention: Attention, variant: str, setting: Setting) -> Offer[FlexPlan] | Refusal:
        """Takes what `flex` takes on CUDA, within the limits of the kernel and of torch's code for it."""
        if setting.device.kind != "cuda":
            return Refusal(self.name, f"{self.name} does not run on {setting.device.kind} devices", other_device=True)
        case = Case(attention, setting, function_of(attention, setting))
        if (reason := refusal(CONSTRAINTS, case)) is not None:
            return Refusal(self.name, reason)
        shares = setting.device.shares
        triton = shares["flex"]
        flash = replace(
            triton,
            prefill=_OF_TRITON * triton.prefill,
            narrow=None if triton.narrow is None else _OF_TRITON * triton.narrow,
            wide=None if triton.wide is None else _OF_TRITON * triton.wide,
        )
        faster = replace(setting.device, shares={**shares, "flex": flash})
        return super().consider(attention, variant, replace(setting, device=faster))

    def alternatives(self, offer: Offer[FlexPlan], setting: Setting) -> Iterable[Offer[FlexPlan]]:
        """None: the kernel chooses its own tiles."""
        return ()

    def operand(self, plan: Plan, value: Value, *, in_triton: bool) -> Value:
        """As the kernel's loads of 16 bytes ask."""
        return in_vectors(plan, unbroadcast(plan, dense_last(plan, value)))

    def check(self, score: GraphModule, mask: GraphModule, setting: Setting) -> None:
        """Asks torch itself. Raises `RewriteError` with its reason."""
        if setting.runner == "other" or "torch._inductor" not in sys.modules:
            return
        from torch._inductor.kernel.flex import flex_flash_attention as flash

        scored: Any = SimpleNamespace(graph_module=score)
        masking: Any = SimpleNamespace(graph_module=mask)
        can_use, reason = flash._can_use_flex_flash_attention(scored, masking, _PLACEHOLDERS)
        if not can_use:
            raise RewriteError(f"flex_flash: {reason}")


def _is_masked(c: Case) -> bool:
    return c.function.mask is not None


def _has_blocks(c: Case) -> bool:
    """Whether the kernel goes by lists of blocks: those of a mask, and since torch 2.14 any that it is given."""
    return _is_masked(c) or TORCH_VERSION >= (2, 14)


def _sizes(a: Attention) -> tuple[object, ...]:
    return (a.batch_size, a.query_heads, a.q_len, a.kv_len, a.head_dim, a.value_head_dim)


def _are_multiples(by: int, *sizes: object) -> bool:
    return all(isinstance(n, int) and n % by == 0 for n in sizes)


def _are_at_most(most: int, *sizes: object) -> bool:
    return all(isinstance(n, int) and n <= most for n in sizes)


_TORCH = "torch/_inductor/kernel/flex/flex_flash_attention.py"
_CUTE = "flash_attn/cute/interface.py"
CONSTRAINTS: tuple[Constraint[Case], ...] = (
    KNOWN_DEVICE.written_in("AMD's"),
    Constraint(
        "package",
        "flash-attn-4 (flash_attn.cute) is not installed",
        lambda c: is_installed("flash_attn.cute"),
        f"{_TORCH}: ensure_flash_available",
    ),
    Constraint(
        "torch",
        "FlexAttention's FLASH backend needs torch 2.13 or newer",
        lambda c: TORCH_VERSION >= (2, 13),
        f"{_TORCH} of 2.11 does not put captured tensors into memory",
    ),
    Constraint(
        "program",
        "FlexAttention's FLASH backend is compiled by Python when it runs, which exported programs and packages lack",
        lambda c: c.setting.program == "compile",
        "CuteDSLTemplate",
    ),
    Constraint(
        "compute capability",
        "FlexAttention's FLASH backend is for compute capability 9.0 and 10.x",
        lambda c: c.setting.device.capability == (9, 0) or c.setting.device.capability[0] == 10,
        f"{_CUTE}: 8.x takes no score function, 12.x no block mask",
    ),
    Constraint(
        "dtype",
        "FlexAttention's FLASH backend takes half precision only",
        lambda c: c.attention.compute_dtype in (torch.float16, torch.bfloat16),
        f"{_CUTE}: inputs must be float16, bfloat16",
    ),
    Constraint(
        "known sizes",
        "a size is not known, and FlexAttention's FLASH backend needs known sizes",
        lambda c: all(isinstance(n, int) for n in _sizes(c.attention)),
        f"{_TORCH}: TODO(dynamic shapes); has_unsupported_captured_scalars",
    ),
    Constraint(
        "head dim",
        "the head dims are not multiples of 8, or are over 256 (128 on compute capability 10.x and in training)",
        lambda c: (
            _are_multiples(8, c.attention.head_dim, c.attention.value_head_dim)
            and _are_at_most(
                256 if c.setting.device.capability[0] == 9 and not c.attention.needs_grad else 128,
                *(c.attention.head_dim, c.attention.value_head_dim),
            )
        ),
        f"{_CUTE}: _validate_head_dims",
    ),
    Constraint(
        "captured numbers",
        "the score function reads a number that is a tensor, which FlexAttention's FLASH backend cannot inline",
        lambda c: all(load.index for load in c.function.loads()),
        f"{_TORCH}: has_unsupported_captured_scalars",
    ),
    Constraint(
        "blocks",
        "the mask is not known block by block, and FlexAttention's FLASH backend needs full blocks",
        lambda c: not _is_masked(c) or c.function.parts_are_exact,
        f"{_TORCH}: block mask but without full blocks is not supported yet",
    ),
    Constraint(
        "blocks of 128 rows",
        "blocks of 128 rows are for compute capability 9.0 and head dims up to 128",
        lambda c: (
            not _has_blocks(c)
            or (
                c.setting.device.capability == (9, 0)
                and _are_at_most(_BLOCK, c.attention.head_dim, c.attention.value_head_dim)
            )
        ),
        "flash_attn/cute/block_sparsity.py: sparse_block_size[1] to match tile_n; two tiles of 128 rows on 10.x",
    ),
    Constraint(
        "lengths",
        "the lengths are not multiples of 128, the block of the mask",
        lambda c: not _has_blocks(c) or _are_multiples(_BLOCK, c.attention.q_len, c.attention.kv_len),
        "create_block_mask makes no full block that ends behind the last key",
    ),
    Constraint(
        "fully masked rows",
        "a row may be fully masked, and what FlexAttention's FLASH backend gives there is not known",
        lambda c: c.attention.mask.never_empty or c.attention.mask.is_none or c.setting.assume_nonempty_rows,
        "",
    ),
    Constraint(
        "deterministic",
        "deterministic algorithms are requested, and the backward with a mask is not deterministic on this GPU",
        lambda c: not (c.attention.needs_grad and c.setting.deterministic and _is_masked(c)),
        f"{_TORCH}: Deterministic backward for flex_attention with block_mask requires SM100+ and write orders",
    ),
)


KERNEL = FlexFlash()
