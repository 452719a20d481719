"""A rule of a kernel, one row: its condition, its reason, which versions of torch check it, and its source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attn_pass.compat import TORCH_VERSION
from attn_pass.devices.device import Device
from attn_pass.model.attention import Attention
from attn_pass.model.dtype_name import dtype_name
from attn_pass.model.index import Index
from attn_pass.targets.constraints import EMPTY, Constraint, sizes_of, too_wide

HALF = (torch.float16, torch.bfloat16)
Version = tuple[int, int]
ALWAYS: tuple[Version, Version] = ((0, 0), (99, 0))
NEVER: tuple[Version, Version] = ((0, 0), (0, 0))


@dataclass(frozen=True)
class KernelCall:
    """An attention as a kernel gets it.

    The mask's kind is "none", "causal" (from the first key on), "band" (bounds on ``key - row``, aligned to the last
    key), "boolean" or "additive". ``hint`` gives sizes that are not known as they were traced.
    """

    attention: Attention
    mask: str
    device: Device
    mask_needs_grad: bool = False
    deterministic: bool = False  # torch.use_deterministic_algorithms
    together: bool = False  # the narrower of both head dims is padded to the other
    may_train: bool = False  # gradients may be needed: an exported program
    reached: str | None = None  # the fused kernel the program's own call reaches
    empty_rows_are_zero: bool = False  # a row may be fully masked with -inf, where the program gives 0
    eager_form: bool = True  # hand-written; False for a call that already is attention
    finite_mask: bool = False  # -inf in a mask is written as a number that absorbs every score
    hint: Callable[[Index], int] | None = None
    torch_version: Version = TORCH_VERSION

    @property
    def dtype(self) -> torch.dtype:
        """Of the operands."""
        return self.attention.compute_dtype

    @property
    def head_dims(self) -> tuple[Index, Index]:
        """Of query and key, and of the values."""
        dims = (self.attention.head_dim, self.attention.value_head_dim)
        known = [d for d in dims if isinstance(d, int)]
        return (max(known), max(known)) if self.together and len(known) == 2 else dims

    @property
    def trains(self) -> bool:
        """Whether a backward may run."""
        return self.may_train or self.attention.needs_grad

    @property
    def has_mask_tensor(self) -> bool:
        """Whether the kernel gets a mask as a tensor."""
        return self.mask in ("boolean", "additive")


@dataclass(frozen=True)
class Rule(Constraint[KernelCall]):
    """A constraint of one of torch's kernels.

    Torch's own call checks it in the versions from the first to before the second of ``checked``; in others, and with
    `NEVER`, it would take the call. ``known_wrong`` names the report of wrong results where that is why.
    """

    checked: tuple[Version, Version] = ALWAYS
    known_wrong: str = ""

    def checked_by(self, version: Version) -> bool:
        """Whether torch's own call checks it in this version."""
        return self.checked[0] <= version < self.checked[1]


@dataclass(frozen=True)
class KernelRules:
    """A fused kernel of torch: the name `torch.nn.attention.SDPBackend` has for it, its head dims, and its rules."""

    backend: str
    multiple: Callable[[torch.dtype], int]  # of which a head dim must be one
    rules: tuple[Rule, ...]
    takes_any_mask_rank: bool = False  # torch's call runs it under a mask of rank 3, too (seen on an H200)


def padded(size: Index, multiple: int) -> int | None:
    """The size rounded up; None where it is not known."""
    return -(-size // multiple) * multiple if isinstance(size, int) else None


def width(call: KernelCall) -> int | None:
    """The wider of the head dims, as a multiple of 8; None where one is not known."""
    sizes = [padded(d, 8) for d in call.head_dims]
    return None if None in sizes else max(s for s in sizes if s is not None)


def known_or(size: Index, default: int) -> int:
    """The size, or a default where it is not known."""
    return size if isinstance(size, int) else default


# ---- rows several kernels have ----

CHECKS = "transformers/sdp_utils_cpp.h"
"""The checks that torch's choices on all devices share."""
CUDA_CHECKS = "transformers/cuda/sdp_utils.cpp"
"""Those of GPUs that torch calls cuda: NVIDIA's, and with other conditions of the preprocessor AMD's."""


def dtype_rule(*accepted: torch.dtype, source: str = f"check_tensor_dtype in {CHECKS}") -> Rule:
    """One of these dtypes."""
    return Rule(
        "dtype",
        lambda c: f"{dtype_name(c.dtype)} has no fused kernel",
        lambda c: c.dtype in accepted,
        source,
    )


def capability_rule(lowest: Version) -> Rule:
    """CUDA's compute capability, from this one on."""
    return Rule(
        "compute capability",
        lambda c: f"compute capability {c.device.capability[0]}.{c.device.capability[1]} has no such kernel",
        lambda c: lowest <= c.device.capability <= (12, 1),
        f"check_sm_version in {CUDA_CHECKS}",
    )


def widest_rule(most: Callable[[KernelCall], int], source: str) -> Rule:
    """Both head dims known, and up to this one."""
    return Rule("head dim", lambda c: too_wide(most(c)), lambda c: (width(c) or 1 << 30) <= most(c), source)


SIZES = Rule(
    "sizes",
    EMPTY,
    lambda c: 0 not in sizes_of(c.attention),
    f"check_nonzero_sequence_lengths_dense in {CHECKS}",
)
PADDABLE = Rule(  # to pad one head dim to the other, both must be known
    "known head dims",
    "head dims of keys and values differ and are not known",
    lambda c: c.head_dims[0] == c.head_dims[1] or all(isinstance(d, int) for d in c.head_dims),
    f"check_head_dim_size_flash in {CUDA_CHECKS}",
)
KNOWN = Rule(
    "known head dims",
    "the head dim is not known",
    lambda c: all(isinstance(d, int) for d in c.head_dims),
    f"check_head_dim_size_mem_efficient in {CUDA_CHECKS}",
)
DROPOUT = Rule(
    "dropout",
    lambda c: f"dropout {c.attention.dropout:g} keeps nothing",
    lambda c: 0 <= c.attention.dropout < 1,
    "of this project: kept weights are divided by 1 - dropout",
    checked=NEVER,
)


def fits_little_shared_memory(call: KernelCall) -> bool:
    """Whether FlashAttention's backward has a head dim on GPUs with 100 KiB of shared memory for a block."""
    wide = width(call) or 0
    return not (192 < wide <= 224 or (wide > 224 and call.attention.dropout > 0))


_GRID = 65535  # blocks along the second and third axis of a launch (CUDA C++ programming guide)


def grid(source: str, checked: tuple[Version, Version] = NEVER) -> Rule:
    """Batches and heads within what one launch takes; beyond it is "invalid configuration argument", or worse."""
    return Rule(
        "grid",
        "more than 65535 batches or heads (pytorch #146704)",
        lambda c: all(known_or(n, 1) <= _GRID for n in (c.attention.batch_size, c.attention.query_heads)),
        source,
        checked=checked,
        known_wrong="pytorch#146704",
    )


def equal_causal_lengths(call: KernelCall) -> bool:
    """Whether a causal mask from the first key on is also one to the last key."""
    return call.mask != "causal" or call.attention.q_len == call.attention.kv_len
