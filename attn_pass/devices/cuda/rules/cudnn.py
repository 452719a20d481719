"""The rules of cuDNN's attention: ``can_use_cudnn_attention`` in aten's cuda/sdp_utils.cpp, and known errors of cuDNN.

cuDNN's versions are numbered as in torch, 92000 for 9.20.0. Rules marked as known wrong refuse calls that torch takes,
or took.
"""

from __future__ import annotations

import torch

from attn_pass.model.index import divide
from attn_pass.targets.kernel_rules import (
    ALWAYS,
    CHECKS,
    CUDA_CHECKS,
    DROPOUT,
    HALF,
    KNOWN,
    NEVER,
    SIZES,
    KernelCall,
    KernelRules,
    Rule,
    capability_rule,
    dtype_rule,
    equal_causal_lengths,
    grid,
    known_or,
    padded,
)

_TILE = 128  # keys of a thread block on Hopper
_FIXED_DECODING = 92401  # a release between those that decode wrongly


def _dims(call: KernelCall) -> tuple[int, int]:
    first, second = (padded(d, 8) or 1 << 30 for d in call.head_dims)
    return first, second


def _limit_to_2_13(call: KernelCall) -> tuple[int, int]:
    """The widest head dims of query and key, and of the values, by torch 2.11 to 2.13."""
    if call.device.capability == (9, 0) and call.device.cudnn >= 91000:
        return 256, 256
    if call.device.capability[0] == 10 and call.device.cudnn >= 91100:
        return 192, 128
    return 128, 128


def _fits_to_2_13(call: KernelCall) -> bool:
    dims, most = _dims(call), _limit_to_2_13(call)
    return max(dims) <= 128 or (dims[0] <= most[0] and dims[1] <= most[1])


def _has_256(call: KernelCall) -> bool:
    """Whether torch 2.14 takes head dims up to 256."""
    capability, version = call.device.capability, call.device.cudnn
    right_gpu = capability == (9, 0) or (capability[0] == 10 and (capability != (10, 7) or version > 92500))
    return right_gpu and version > 92200


def _fits_from_2_14(call: KernelCall) -> bool:
    dims, capability = _dims(call), call.device.capability
    if max(dims) <= 128 or (_has_256(call) and max(dims) <= 256):
        return True
    return dims == (192, 128) and (capability == (9, 0) or capability[0] == 10) and call.device.cudnn >= 91100


def _backward_fits(call: KernelCall) -> bool:
    dims = _dims(call)
    return not call.trains or max(dims) <= 128 or dims in ((192, 128), (256, 256))


def _ends_in_half_a_tile(call: KernelCall) -> bool:
    """Whether the number of keys may be 64 more than a multiple of 128."""
    rest = divide(call.attention.kv_len, _TILE)[1]
    return not isinstance(rest, int) or rest == _TILE // 2


def _decodes_wrongly(call: KernelCall) -> bool:
    return call.attention.q_len == 1 and call.device.cudnn <= 92500 and call.device.cudnn != _FIXED_DECODING


_TORCH: tuple[Rule, ...] = (
    Rule(
        "version",
        "cuDNN is older than 9.0, or absent",
        lambda c: c.device.cudnn >= 90000,
        f"can_use_cudnn_attention in {CUDA_CHECKS}",
    ),
    dtype_rule(*HALF),
    capability_rule((8, 0)),
    DROPOUT,
    KNOWN.written_in(f"check_cudnn_tensor_shapes in {CUDA_CHECKS}"),
    SIZES,
    Rule(
        "head dim to torch 2.13",
        lambda c: "the head dim is over {}, or over {} of the values".format(*_limit_to_2_13(c)),
        lambda c: c.torch_version >= (2, 14) or _fits_to_2_13(c),
        f"check_cudnn_tensor_shapes in {CUDA_CHECKS}; pytorch#161210, #172621",
    ),
    Rule(
        "head dim",
        "head dims over 128 other than 192 and 128 are not taken before cuDNN 9.23, which mishandles some of them",
        lambda c: _fits_from_2_14(c) or (c.reached == "cudnn" and c.torch_version < (2, 14)),
        f"check_cudnn_tensor_shapes in {CUDA_CHECKS}; pytorch#161210, #185554, #190949",
        checked=((2, 14), ALWAYS[1]),
    ),
    Rule(
        "backward head dim",
        "its backward takes head dims up to 128, 192 and 128, or 256",
        lambda c: _backward_fits(c) or (c.reached == "cudnn" and c.torch_version < (2, 14)),
        f"check_cudnn_d256_bprop_head_dim in {CUDA_CHECKS}",
        checked=((2, 14), ALWAYS[1]),
    ),
    Rule(
        "mask",
        "cuDNN takes no mask that is a band",
        lambda c: c.mask != "band",
        "scaled_dot_product_attention in native_functions.yaml: no window",
        checked=NEVER,
    ),
    Rule(
        "mask gradient",
        "the bias needs a gradient, which cuDNN does not give",
        lambda c: not c.mask_needs_grad,
        f"check_attn_mask_shape in {CHECKS}",
    ),
    Rule(
        "one key",
        "cuDNN does not take a single key",
        lambda c: c.attention.kv_len != 1,
        f"check_cudnn_tensor_shapes in {CUDA_CHECKS}",
    ),
    Rule(
        "one query with dropout",
        "cuDNN has no dropout for a single query",
        lambda c: c.attention.q_len != 1 or not c.attention.dropout,
        f"check_cudnn_tensor_shapes in {CUDA_CHECKS}",
    ),
    Rule(
        "dropout steps",
        lambda c: f"dropout {c.attention.dropout:g} is not a multiple of 1/16, which cuDNN requires",
        lambda c: c.attention.dropout * 16 == int(c.attention.dropout * 16),
        f"check_cudnn_dropout in {CUDA_CHECKS}",
        checked=((2, 13), ALWAYS[1]),
    ),
    Rule(
        "dropout versions",
        "cuDNN 9.11 to 9.13 have no dropout",
        lambda c: not c.attention.dropout or not 91100 <= c.device.cudnn < 91400,
        f"can_use_cudnn_attention in {CUDA_CHECKS}; pytorch#163903",
    ),
    grid(f"check_cudnn_tensor_shapes in {CUDA_CHECKS}; pytorch#180718", ((2, 13), ALWAYS[1])),
    Rule(
        "deterministic",
        "deterministic algorithms are requested",
        lambda c: not c.deterministic,
        f"check_cudnn_deterministic in {CUDA_CHECKS}",
    ),
    Rule(
        "decoding on Blackwell",
        "cuDNN 9.19 to 9.25.0 are wrong for a single query on this GPU (pytorch #193893)",
        lambda c: not (_decodes_wrongly(c) and c.device.capability[0] in (10, 11) and c.device.cudnn >= 91900),
        f"is_cudnn_attention_decode_disabled in {CUDA_CHECKS}; pytorch#194927",
        checked=((2, 15), ALWAYS[1]),
        known_wrong="pytorch#193893",
    ),
)
_OURS: tuple[Rule, ...] = (
    Rule(
        # On Blackwell's other chips, and with older releases: not reported, and not known to be right.
        "one query on Blackwell",
        "cuDNN is not known to be right for a single query on this GPU (pytorch #193893)",
        lambda c: not (_decodes_wrongly(c) and c.device.capability[0] >= 10),
        "pytorch#193893",
        checked=NEVER,
        known_wrong="pytorch#193893",
    ),
    Rule(
        # Torch takes it off its list for lengths that are not multiples of 128, and no more than that.
        "older versions",
        "cuDNN up to 9.15.0 is wrong for lengths that are not multiples of 128 (pytorch #169849)",
        lambda c: c.device.cudnn > 91500 or c.reached == "cudnn",
        f"check_prefer_cudnn_attention in {CUDA_CHECKS}; pytorch#167101, #171627",
        checked=NEVER,
        known_wrong="pytorch#169849",
    ),
    Rule(
        # Reported with a mask tensor; torch 2.15 takes nothing without the causal flag, by its own message.
        "half a tile in training",
        "cuDNN before 9.26 may give NaN gradients on this GPU, where the keys are 64 more than a multiple of 128 "
        "(pytorch #196678)",
        lambda c: (
            not (
                (c.trains and c.mask != "causal" and c.device.capability[0] == 9)
                and (c.device.cudnn < 92600 and _ends_in_half_a_tile(c))
            )
        ),
        "pytorch#196861, NVIDIA/cudnn-frontend#628",
        checked=((2, 15), ALWAYS[1]),
        known_wrong="pytorch#196678",
    ),
    Rule(
        # On 9.25.1 and 9.26.0.51 of an H200; no release is known to be right.
        "one query in training",
        "cuDNN may give NaN gradients for a single query (NVIDIA/cudnn-frontend #1072)",
        lambda c: not (c.trains and c.attention.q_len == 1),
        "NVIDIA/cudnn-frontend#1072",
        checked=NEVER,
        known_wrong="NVIDIA/cudnn-frontend#1072",
    ),
    Rule(
        "fully masked rows",
        "a row may be fully masked, and what cuDNN gives there is not known",
        lambda c: not c.has_mask_tensor or c.attention.mask.never_empty,
        f"can_use_cudnn_attention in {CUDA_CHECKS} takes it; not confirmed on a GPU",
        checked=NEVER,
    ),
    Rule(
        # Bfloat16 holds a number that absorbs every score, which takes its place (`attn_pass.devices.cuda.cudnn`).
        "tile of masked keys",
        "the mask holds -inf, and what cuDNN computes where the first tile of keys is masked is not known",
        lambda c: (
            not c.has_mask_tensor
            or (c.finite_mask and c.dtype != torch.float16)
            or (known_or(c.attention.kv_len, _TILE + 1) <= _TILE or c.reached == "cudnn")
        ),
        f"can_use_cudnn_attention in {CUDA_CHECKS} takes it; not confirmed on a GPU",
        checked=NEVER,
    ),
    Rule(
        # By its sources it takes them, from the first key on; not confirmed on a GPU.
        "causal lengths",
        "the mask is causal, and there are not as many keys as queries",
        equal_causal_lengths,
        f"can_use_cudnn_attention in {CUDA_CHECKS} takes it; not confirmed on a GPU",
        checked=NEVER,
    ),
)
CUDNN = KernelRules("CUDNN_ATTENTION", lambda dtype: 8, (*_TORCH, *_OURS))
