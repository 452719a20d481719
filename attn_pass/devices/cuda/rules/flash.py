"""The rules of FlashAttention as torch builds it in: ``can_use_flash_attention`` in aten's cuda/sdp_utils.cpp."""

from __future__ import annotations

from attn_pass.targets.kernel_rules import (
    ALWAYS,
    CHECKS,
    CUDA_CHECKS,
    DROPOUT,
    HALF,
    NEVER,
    PADDABLE,
    SIZES,
    KernelCall,
    KernelRules,
    Rule,
    capability_rule,
    dtype_rule,
    equal_causal_lengths,
    fits_little_shared_memory,
    grid,
    known_or,
    widest_rule,
    width,
)

_MAJORS = {"FA3": (9,), "FA4": (9, 10)}  # torch/nn/attention/_fa3.py and _fa4.py


def _fits_backward(call: KernelCall) -> bool:
    capability = call.device.capability
    little_shared_memory = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    return not (call.attention.needs_grad and little_shared_memory) or fits_little_shared_memory(call)


_INDEX = 1 << 31  # what an index of 32 bits reaches
_ROWS = 128  # to which the backward rounds the queries up


def _backward_indices_fit(call: KernelCall) -> bool:
    a = call.attention
    sizes = (a.batch_size, a.query_heads, a.q_len)
    if not call.trains or not all(isinstance(n, int) for n in sizes):
        return True
    batch, heads, rows = (known_or(n, 1) for n in sizes)
    return batch * heads * -(-rows // _ROWS) * _ROWS * max(width(call) or 0, 32) <= _INDEX


CUTE = "flash_attn/cute/interface.py of flash-attention"


def _is_of_blackwell(call: KernelCall) -> bool:
    return (width(call) or 0) <= 128 or call.head_dims in ((192, 128), (256, 256))


def _has_deterministic_backward(call: KernelCall) -> bool:
    if call.device.flash == "FA4":
        return call.device.capability[0] == 10
    return call.device.flash != "FA3" or (width(call) or 0) <= 192


FLASH = KernelRules(
    "FLASH_ATTENTION",
    lambda dtype: 8,  # torch's own call pads for this kernel, and for no other
    (
        dtype_rule(*HALF),
        capability_rule((8, 0)),
        DROPOUT.written_in("set_params_fprop in transformers/cuda/flash_attn/flash_api.cpp, which ends in an error"),
        PADDABLE,
        SIZES,
        Rule(
            "version",
            lambda c: f"{c.device.flash} has no kernel for this GPU",
            lambda c: c.device.capability[0] in _MAJORS.get(c.device.flash, range(99)),
            "_fa3_common_support_error in torch/nn/attention/_fa3.py; _fa4_common_support_error in "
            "torch/nn/attention/_fa4.py",
        ),
        Rule(
            "dropout of newer versions",
            lambda c: f"{c.device.flash} has no dropout",
            lambda c: c.device.flash == "FA2" or not c.attention.dropout,
            "_fa3_common_support_error in torch/nn/attention/_fa3.py; _fa4_forward_support_error in "
            "torch/nn/attention/_fa4.py",
        ),
        widest_rule(lambda c: 256, f"check_head_dim_size_flash in {CUDA_CHECKS}"),
        Rule(
            "mask",
            "the flash kernel takes no mask",
            lambda c: c.mask in ("none", "causal", "band"),
            f"check_for_attn_mask in {CHECKS}",
        ),
        Rule(
            "causal lengths",
            "causal from the first key on, with unequal lengths",
            equal_causal_lengths,
            f"check_flash_causal_non_square_seqlens in {CUDA_CHECKS}",
        ),
        Rule(
            "backward head dim",
            "its backward does not fit such a head dim on this GPU",
            _fits_backward,
            f"check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120 in {CUDA_CHECKS}",
        ),
        Rule(
            "head dim of newer versions",
            "FA4's head dims on compute capability 10.x are up to 128, 192 with values of 128, and 256",
            lambda c: c.device.flash != "FA4" or c.device.capability[0] != 10 or _is_of_blackwell(c),
            f"_validate_head_dims in {CUTE}",
            checked=NEVER,
        ),
        Rule(
            "window backward",
            "FA4 has no backward of a window before torch 2.13",
            lambda c: not (c.device.flash == "FA4" and c.mask == "band" and c.trains) or c.torch_version >= (2, 13),
            "_fa4_backward_support_error in torch/nn/attention/_fa4.py of torch 2.11",
            checked=NEVER,
        ),
        Rule(
            "deterministic backward",
            lambda c: f"deterministic algorithms are requested, and {c.device.flash} has no such backward here",
            lambda c: not (c.deterministic and c.trains) or _has_deterministic_backward(c),
            f"_flash_attn_bwd in {CUTE}; mha_bwd in hopper/flash_api.cpp of flash-attention",
            checked=NEVER,
        ),
        grid("pytorch#146704; the message of torch 2.15", ((2, 15), ALWAYS[1])),
        Rule(
            "backward indices",
            "its backward reads memory that is not its own beyond 2**31 elements (PriorLabs/TabPFN #1184)",
            _backward_indices_fit,
            "PriorLabs/TabPFN#1184",
            checked=NEVER,
            known_wrong="PriorLabs/TabPFN#1184",
        ),
    ),
)
