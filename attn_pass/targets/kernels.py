"""Which of torch's fused attention kernels takes a call, device by device: one row a rule, with its reason.

CPU: ``use_flash_attention_cpp`` in aten/src/ATen/native/transformers/sdp_utils_cpp.cpp. CUDA: cuda/sdp_utils.cpp beside
it. torch 2.11 to 2.13. Head dims are what they are after padding (`width`); `PADDED` says to what multiple.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from attn_pass.hardware.device import Device
from attn_pass.model.attention import AsWritten, Attention
from attn_pass.model.index import Index
from attn_pass.targets.npu_rules import stock_operator

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Call:
    """An attention as a kernel gets it.

    The mask's kind is "none", "causal" (from the first key on), "band" (bounds on ``key - row``, aligned to the last
    key), "boolean" or "additive".
    """

    attention: Attention
    mask: str
    device: Device
    mask_needs_grad: bool = False
    deterministic: bool = False  # torch.use_deterministic_algorithms
    together: bool = False  # the narrower of both head dims is padded to the other

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


@dataclass(frozen=True)
class Rule:
    """What a kernel asks for; ``reason`` says in words why a call that fails is refused.

    Torch does not check those that are ``ours``: it would take the call.
    """

    name: str
    reason: Callable[[Call], str] | str
    holds: Callable[[Call], bool]
    ours: bool = False


# Torch's own call pads for the flash kernel, no other; the targets pad for all of them.
PADDED: Mapping[str, Callable[[torch.dtype], int]] = {
    "cpu flash": lambda dtype: 1,
    "flash": lambda dtype: 8,
    "cudnn": lambda dtype: 8,
    "efficient": lambda dtype: 4 if dtype == torch.float32 else 8,
}


def padded(size: Index, multiple: int) -> int | None:
    """The size rounded up; None where it is not known."""
    return -(-size // multiple) * multiple if isinstance(size, int) else None


def is_padded(kernel: str, call: Call) -> bool:
    """Whether the kernel takes the head dims as they are."""
    multiple = PADDED[kernel](call.dtype)
    return multiple == 1 or all(isinstance(d, int) and d % multiple == 0 for d in call.head_dims)


def width(call: Call) -> int | None:
    """The wider of the head dims, as a multiple of 8; None where one is not known."""
    sizes = [padded(d, 8) for d in call.head_dims]
    return None if None in sizes else max(s for s in sizes if s is not None)


def _words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(*taken: torch.dtype) -> Rule:
    return Rule("dtype", lambda c: f"{_words(c.dtype)} has no fused kernel", lambda c: c.dtype in taken)


def _capability(lowest: tuple[int, int]) -> Rule:
    return Rule(
        "compute capability",
        lambda c: f"compute capability {c.device.capability[0]}.{c.device.capability[1]} has no such kernel",
        lambda c: lowest <= c.device.capability <= (12, 1),
    )


def _known_or(size: Index, default: int) -> int:
    return size if isinstance(size, int) else default


_SIZES = Rule(
    "sizes",
    "a size is 0",
    lambda c: (
        0
        not in (
            *(c.attention.q_len, c.attention.kv_len, c.attention.head_dim),
            *(c.attention.value_head_dim, c.attention.batch_size, c.attention.query_heads),
        )
    ),
)
_PADDABLE = Rule(
    "known head dims",
    "head dims of keys and values differ and are not known",
    lambda c: c.head_dims[0] == c.head_dims[1] or all(isinstance(d, int) for d in c.head_dims),
)
_KNOWN = Rule("known head dims", "the head dim is not known", lambda c: all(isinstance(d, int) for d in c.head_dims))
_DROPOUT = Rule(
    "dropout", lambda c: f"dropout {c.attention.dropout:g} keeps nothing", lambda c: 0 <= c.attention.dropout < 1
)


_FLASH_MAJORS = {"FA3": (9,), "FA4": (9, 10)}  # torch/nn/attention/_fa3.py and _fa4.py
# The C++ name is check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120.
_SMALL_SHARED_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))


def _fits_backward(call: Call) -> bool:
    wide = width(call) or 0
    return not (call.attention.needs_grad and call.device.capability in _SMALL_SHARED_MEMORY) or not (
        192 < wide <= 224 or (wide > 224 and call.attention.dropout > 0)
    )


def _cudnn_width(call: Call) -> tuple[int, int]:
    """The widest head dims of query and key, and of the values."""
    if call.device.capability == (9, 0) and call.device.cudnn >= 91000:
        return 256, 256
    if call.device.capability[0] == 10 and call.device.cudnn >= 91100:
        return 192, 128
    return 128, 128


def _cudnn_holds_width(call: Call) -> bool:
    dims = [padded(d, 8) or 1 << 30 for d in call.head_dims]
    most = _cudnn_width(call)
    return max(dims) <= 128 or (dims[0] <= most[0] and dims[1] <= most[1])


_FUSED_CPU: tuple[Rule, ...] = (
    _dtype(torch.float32, torch.float64, *_HALF),
    Rule(
        "dropout",
        lambda c: f"dropout {c.attention.dropout:g}: no fused CPU kernel draws dropout",
        lambda c: not c.attention.dropout,
    ),
    _PADDABLE,
    _SIZES,
    Rule(
        "mask gradient",
        "the bias needs a gradient, which the fused kernel does not give",
        lambda c: not c.mask_needs_grad,
    ),
)
_FLASH: tuple[Rule, ...] = (
    _dtype(*_HALF),
    _capability((8, 0)),
    _DROPOUT,
    _PADDABLE,
    _SIZES,
    Rule(
        "version",
        lambda c: f"{c.device.flash} has no kernel for this GPU",
        lambda c: c.device.capability[0] in _FLASH_MAJORS.get(c.device.flash, range(99)),
    ),
    Rule(
        "dropout of newer versions",
        lambda c: f"{c.device.flash} draws no dropout",
        lambda c: c.device.flash == "FA2" or not c.attention.dropout,
    ),
    Rule("head dim", "the head dim is over 256, or not known", lambda c: (width(c) or 1 << 30) <= 256),
    Rule("mask", "the flash kernel takes no mask", lambda c: c.mask in ("none", "causal", "band")),
    Rule(
        "causal lengths",
        "causal from the first key on, with unequal lengths",
        lambda c: c.mask != "causal" or c.attention.q_len == c.attention.kv_len,
    ),
    Rule(
        "backward head dim",
        "its backward has no room for such a head dim on this GPU",
        _fits_backward,
    ),
)
_CUDNN: tuple[Rule, ...] = (
    Rule("version", "cuDNN is older than 9.0, or absent", lambda c: c.device.cudnn >= 90000),
    _dtype(*_HALF),
    _capability((8, 0)),
    _DROPOUT,
    _KNOWN,
    _SIZES,
    Rule(
        "head dim",
        lambda c: "the head dim is over {}, or over {} of the values".format(*_cudnn_width(c)),
        _cudnn_holds_width,
    ),
    Rule("mask", "a band is no mask cuDNN takes", lambda c: c.mask != "band"),
    Rule("mask gradient", "the bias needs a gradient, which cuDNN does not give", lambda c: not c.mask_needs_grad),
    Rule(
        "empty rows",
        "a row may be masked out entirely, and what cuDNN gives there is not known",
        lambda c: c.mask in ("none", "causal") or c.attention.rows_never_empty,
        ours=True,
    ),
    Rule(
        # It takes them, from the first key on by all that was read; no GPU has shown it here.
        "causal lengths",
        "causal with unequal lengths",
        lambda c: c.mask != "causal" or c.attention.q_len == c.attention.kv_len,
        ours=True,
    ),
    Rule("one key", "cuDNN takes no single key", lambda c: c.attention.kv_len != 1),
    Rule(
        "one query with dropout",
        "cuDNN draws no dropout for a single query",
        lambda c: c.attention.q_len != 1 or not c.attention.dropout,
    ),
    Rule(
        # Wrong results in decoding on B200 (pytorch #193893); the guard of #194927 names 10.x and 11.x.
        "one query on Blackwell",
        "cuDNN is wrong for a single query on this GPU (pytorch #193893)",
        lambda c: c.attention.q_len != 1 or c.device.capability[0] < 10,
        ours=True,
    ),
    Rule(
        "dropout steps",
        lambda c: f"dropout {c.attention.dropout:g} is no multiple of 1/16, which cuDNN asks for",
        lambda c: c.attention.dropout * 16 == int(c.attention.dropout * 16),
    ),
    Rule(
        "dropout versions",
        "cuDNN 9.11 to 9.13 draw no dropout",
        lambda c: not c.attention.dropout or not 91100 <= c.device.cudnn < 91400,
    ),
    Rule(
        "grid",
        "more than 65535 batches or heads",
        lambda c: all(_known_or(n, 1) <= 65535 for n in (c.attention.batch_size, c.attention.query_heads)),
    ),
    Rule("deterministic", "deterministic algorithms are asked for", lambda c: not c.deterministic),
)
_EFFICIENT: tuple[Rule, ...] = (
    _dtype(torch.float32, *_HALF),
    _capability((5, 0)),
    Rule(
        "bfloat16",
        "bfloat16 needs compute capability 8.0",
        lambda c: c.dtype != torch.bfloat16 or c.device.capability >= (8, 0),
    ),
    _DROPOUT,
    _KNOWN,
    _SIZES,
    Rule("grouped heads", "the efficient kernel has no grouped heads", lambda c: c.attention.groups == 1),
    Rule("mask", "a band is handed to the efficient kernel as a mask", lambda c: c.mask != "band"),
)
KERNELS: Mapping[str, tuple[Rule, ...]] = {
    "cpu flash": _FUSED_CPU,
    "flash": _FLASH,
    "cudnn": _CUDNN,
    "efficient": _EFFICIENT,
}

LIBRARY = "flash_attn"  # the package's kernel, which a program calls itself
# As `torch.nn.attention.SDPBackend` names them.
BACKENDS = {
    "cpu flash": "FLASH_ATTENTION",
    "flash": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
}


def refusal(kernel: str, call: Call, *, by_torch: bool = False) -> str | None:
    """The first reason why a kernel does not take a call; None if it does. ``by_torch``: torch's own rules alone."""
    for rule in KERNELS[kernel]:
        if not (by_torch and rule.ours) and not rule.holds(call):
            return rule.reason if isinstance(rule.reason, str) else rule.reason(call)
    return None


def order(device: Device) -> tuple[str, ...]:
    """The kernels torch's own call tries on this device, first to last.

    cuDNN stands behind the unfused form, which takes everything, unless ``check_prefer_cudnn_attention`` moves it to
    the front: above cuDNN 9.15, on compute capability 9 and 10.
    """
    kernels = [k for k in device.kernels if k in BACKENDS and k != "cudnn"]
    if "cudnn" in device.kernels and device.cudnn > 91500 and device.capability[0] in (9, 10):
        kernels.insert(0, "cudnn")
    return tuple(kernels)


def picked_by_torch(call: Call, allowed: tuple[str, ...] | None = None) -> str | None:
    """The kernel torch's own call picks among the backends that are allowed; None where it falls to the unfused form.

    It pads head dims for the flash kernel, to a multiple of 8, and does not make them equal.
    """
    for kernel in order(call.device):
        equal = call.head_dims[0] == call.head_dims[1]
        ready = equal if kernel == "flash" else kernel == "cpu flash" or is_padded(kernel, call)
        if (allowed is None or BACKENDS[kernel] in allowed) and ready and not refusal(kernel, call, by_torch=True):
            return kernel
    return None


def as_written(attention: Attention, written: AsWritten, device: Device, *, deterministic: bool) -> str | None:
    """The fused kernel that runs if nothing is done; None where none does."""
    if written.from_library:
        return written.library
    if device.type == "npu":
        return stock_operator(attention, written, device)
    if device.type == "cpu":
        return "cpu flash" if written.fused else None
    if not written.plain:
        return None
    mask = "causal" if written.causal else written.mask
    return picked_by_torch(Call(attention, mask, device, written.mask_needs_grad, deterministic))
