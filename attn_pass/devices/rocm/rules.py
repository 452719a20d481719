"""The rules of AOTriton's kernels behind torch's call: those of aten's cuda/sdp_utils.cpp as they are built for ROCm.

Torch's call tries FlashAttention first, then the memory-efficient kernel; both are AOTriton's. Rules that torch does
not check are about what AOTriton's kernels are not known to get right.
"""

from __future__ import annotations

import torch

from attn_pass.devices.rocm import gates
from attn_pass.targets.kernel_rules import (
    CHECKS,
    CUDA_CHECKS,
    DROPOUT,
    HALF,
    KNOWN,
    NEVER,
    PADDABLE,
    SIZES,
    KernelCall,
    KernelRules,
    Rule,
    dtype_rule,
    equal_causal_lengths,
    fits_little_shared_memory,
    widest_rule,
    width,
)

FLASH_NAME, EFFICIENT_NAME = "aotriton flash", "aotriton efficient"


def _widest(call: KernelCall) -> int:
    """The widest head dim. Torch 2.13 builds AOTriton 0.12, versions before it 0.11."""
    if call.device.generation.startswith("gfx11") or call.device.flash == "CK":
        return 256
    return 512


def _widest_efficient(call: KernelCall) -> int:
    return _widest(call) if call.torch_version >= (2, 13) else 256


ARCHITECTURE = Rule(
    "architecture",
    lambda c: gates.why_closed(c.device.generation, c.device.flash),
    lambda c: gates.is_open(c.device.generation, c.device.flash),
    f"check_flash_attention_hardware_support, check_mem_efficient_hardware_support in {CUDA_CHECKS}",
)
CAUSAL = Rule(
    # The memory-efficient kernel's check has no such row; what it gives for unequal lengths is not known here.
    "causal lengths",
    "the mask is causal, and there are not as many keys as queries",
    equal_causal_lengths,
    f"check_flash_causal_non_square_seqlens in {CUDA_CHECKS}",
)
FLASH = KernelRules(
    "FLASH_ATTENTION",
    lambda dtype: 8,  # torch's own call pads for this kernel, and for no other
    (
        ARCHITECTURE,
        dtype_rule(*HALF),
        DROPOUT,
        PADDABLE,
        SIZES,
        widest_rule(_widest, f"check_head_dim_size_flash, aotriton_max_hdim in {CUDA_CHECKS}"),
        Rule(
            "mask",
            "the flash kernel takes no mask",
            lambda c: not c.has_mask_tensor,
            f"check_for_attn_mask in {CHECKS}",
        ),
        CAUSAL,
        Rule(
            "backward head dim",
            "its backward does not fit such a head dim on this GPU",
            # Torch takes the first number of gfx12 for that of NVIDIA's compute capability 12.
            lambda c: not (c.trains and c.device.generation.startswith("gfx12")) or fits_little_shared_memory(c),
            f"check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120 in {CUDA_CHECKS}",
        ),
    ),
)
EFFICIENT = KernelRules(
    "EFFICIENT_ATTENTION",
    lambda dtype: 4 if dtype == torch.float32 else 8,
    (
        ARCHITECTURE,
        dtype_rule(torch.float32, *HALF),
        Rule(
            "float32",
            "CK's kernels take half precision only",
            lambda c: c.device.flash != "CK" or c.dtype in HALF,
            f"ck_mem_efficient_dtypes in {CUDA_CHECKS}",
        ),
        DROPOUT,
        KNOWN,
        SIZES,
        Rule(
            "head dim",
            lambda c: f"the head dim is over {_widest_efficient(c)}",
            lambda c: (width(c) or 1 << 30) <= _widest_efficient(c),
            f"check_head_dim_size_mem_efficient in {CUDA_CHECKS}",
        ),
        Rule(
            "grouped heads",
            "AOTriton's memory-efficient kernel takes no grouped heads",
            lambda c: c.attention.groups == 1,
            f"can_use_mem_efficient_attention in {CUDA_CHECKS}: supports_gqa",
        ),
        Rule(
            # Online softmaxes compute exp(-inf - -inf) where the first tile has no key.
            "mask",
            "what AOTriton gives where a whole tile of keys is masked is not known (pytorch #147460)",
            lambda c: not c.has_mask_tensor or c.reached == EFFICIENT_NAME,
            f"can_use_mem_efficient_attention in {CUDA_CHECKS} takes it; not confirmed on a GPU",
            checked=NEVER,
        ),
        Rule(
            CAUSAL.name,
            CAUSAL.reason,
            CAUSAL.holds,
            f"can_use_mem_efficient_attention in {CUDA_CHECKS} takes it; not confirmed on a GPU",
            checked=NEVER,
        ),
    ),
)
