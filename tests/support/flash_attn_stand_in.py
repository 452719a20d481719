"""flash-attn's own Python over a stand-in for its compiled module, which is as strict as the kernels, and exact.

``flash_attn_2_cuda`` is the one module of the package that needs a GPU and a CUDA compiler. Here it is float64 on the
CPU, rounded at the end, that refuses whatever csrc/flash_attn/flash_api.cpp (2.8.3) refuses. Everything above it (the
functions, their autograd, the registered operators and what they say of their results) is the package itself, found
where it is installed or in the folder ``make setup`` puts it in. Operators that it registers for CUDA alone get the
same Python for the CPU.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

Tensor = torch.Tensor
KERNELS = "flash_attn_2_cuda"
FOLDER = Path(sys.prefix) / "flash_attn_python"  # `make setup`; the Makefile says why it is not among the packages
_OPERATORS = (
    "_flash_attn_forward",
    "_flash_attn_backward",
    "_flash_attn_varlen_forward",
    "_flash_attn_varlen_backward",
)
_OURS = (KERNELS, "flash_attn", "flash_attn.flash_attn_interface")


def import_or_skip() -> ModuleType:
    """The package, over the stand-in; where it is not installed the tests of the calling module are skipped."""
    try:
        return _loaded()["flash_attn"]
    except ImportError:
        pytest.skip("flash-attn is not installed (make setup does it)", allow_module_level=True)


@contextmanager
def present() -> Iterator[ModuleType]:
    """Inside, flash_attn and its kernels can be imported, by attn_pass too; outside nothing has changed."""
    modules = _loaded()
    before = {name: sys.modules.get(name) for name in modules}
    interface = modules["flash_attn.flash_attn_interface"]
    compiled = interface.flash_attn_gpu
    interface.flash_attn_gpu = modules[KERNELS]
    sys.modules.update(modules)
    try:
        yield modules["flash_attn"]
    finally:
        interface.flash_attn_gpu = compiled
        _restore(before)


def _restore(modules: dict[str, ModuleType | None]) -> None:
    for name, module in modules.items():
        if module is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = module


@lru_cache(maxsize=1)
def _loaded() -> dict[str, ModuleType]:
    """The package's modules; importing it registers its operators, which cannot be undone and happens once."""
    before = {name: sys.modules.get(name) for name in _OURS}
    elsewhere = find_spec("flash_attn") is None
    if elsewhere:
        sys.path.insert(0, str(FOLDER))
    sys.modules[KERNELS] = _kernels()
    try:
        interface = importlib.import_module("flash_attn.flash_attn_interface")
        modules = {name: sys.modules[name] for name in _OURS}
    finally:
        _restore(before)
        if elsewhere:
            sys.path.remove(str(FOLDER))
    for name in _OPERATORS:
        operator = getattr(interface, name)
        operator.register_kernel("cpu")(operator._init_fn)
    return modules


def _kernels() -> ModuleType:
    module: Any = ModuleType(KERNELS)
    module.__spec__ = ModuleSpec(KERNELS, None)
    module.fwd, module.bwd, module.varlen_fwd = fwd, bwd, varlen_fwd
    return module


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise RuntimeError(message)


def _check_operands(q: Tensor, k: Tensor, v: Tensor, softcap: float, dropout: float) -> None:
    _check(q.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type")
    _check(k.dtype == q.dtype == v.dtype, "query, key and value must have the same dtype")
    _check(all(t.dim() == 4 for t in (q, k, v)), "operands are batch x seqlen x heads x head_size")
    _check(all(t.stride(-1) == 1 for t in (q, k, v)), "Input tensor must have contiguous last dimension")
    batch, _, heads, dim = q.shape
    _check(batch > 0, "batch size must be positive")
    _check(dim <= 256, "FlashAttention forward only supports head dimension at most 256")
    _check(dim % 8 == 0, "query, key, value, and out_ must have a head_size that is a multiple of 8")
    _check(heads % k.size(2) == 0, "Number of heads in key/value must divide number of heads in query")
    expected = (batch, k.size(1), k.size(2), dim)
    _check(k.shape == expected and v.shape == expected, f"key {k.shape} and value {v.shape} must be {expected}")
    _check(not (softcap > 0 and dropout > 0), "Softcapping does not support dropout for now")
    _check(dropout == 0, "the stand-in draws no dropout")


def _slopes(alibi: Tensor | None, batch: int, heads: int) -> Tensor | None:
    """(B or 1, H, 1, 1) in float64."""
    if alibi is None:
        return None
    _check(alibi.dtype == torch.float32, "ALiBi slopes must have dtype fp32")
    _check(alibi.stride(-1) == 1, "ALiBi slopes tensor must have contiguous last dimension")
    _check(alibi.shape in ((heads,), (batch, heads)), f"ALiBi slopes of shape {tuple(alibi.shape)}")
    return alibi.double().reshape(-1, heads)[:, :, None, None]


def _visible(q_len: int, kv_len: int, causal: bool, left: int, right: int, alibi: bool) -> Tensor:
    """(L, S): mha_fwd, set_params_fprop and mask.h, step by step."""
    left = -1 if left >= kv_len else left
    right = -1 if right >= kv_len else right
    if q_len == 1 and not alibi:
        causal = False
    if causal:
        right = 0
    row = torch.arange(q_len)[:, None] + kv_len - q_len
    key = torch.arange(kv_len)
    if left < 0 and right < 0:
        return torch.ones(q_len, kv_len, dtype=torch.bool)
    if left < 0 and right == 0:
        return key <= row
    left = kv_len if left < 0 else left
    right = kv_len if right < 0 else right
    return (key >= row - left) & (key <= row + right)


def _scores(
    q: Tensor, k: Tensor, scale: float, softcap: float, slopes: Tensor | None, visible: Tensor
) -> tuple[Tensor, Tensor]:
    """The scores (B, H, L, S), and the derivative of each by its product; operands in float64, heads repeated."""
    scores = torch.einsum("blhd,bshd->bhls", q, k) * scale
    slope = torch.full_like(scores, scale)
    if softcap > 0:
        scores = torch.tanh(scores / softcap)
        slope = slope * (1 - scores * scores)
        scores = scores * softcap
    if slopes is not None:
        distance = torch.arange(q.size(1))[:, None] + k.size(1) - q.size(1) - torch.arange(k.size(1))
        scores = scores - slopes * distance.abs()
    return scores.masked_fill(~visible, -math.inf), slope


def _wide(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    groups = q.size(2) // k.size(2)
    return q.double(), k.double().repeat_interleave(groups, 2), v.double().repeat_interleave(groups, 2)


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    alibi: Tensor | None,
    dropout: float,
    scale: float,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    return_softmax: bool,
    generator: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``mha_fwd``: operands (B, L, H, D); result, logarithms (B, H, L), no weights, a random state."""
    _check_operands(q, k, v, softcap, dropout)
    _check(not return_softmax, "return_softmax is only supported when p_dropout > 0.0")
    slopes = _slopes(alibi, q.size(0), q.size(2))
    visible = _visible(q.size(1), k.size(1), causal, left, right, alibi is not None)
    wide_q, wide_k, wide_v = _wide(q, k, v)
    scores, _ = _scores(wide_q, wide_k, scale, softcap, slopes, visible)
    weights = scores.softmax(-1).nan_to_num(0.0)
    logarithms = scores.logsumexp(-1)
    logarithms = logarithms.masked_fill(logarithms == -math.inf, math.inf).float()
    result = torch.empty_like(q).copy_(torch.einsum("bhls,bshd->blhd", weights, wide_v))
    return result, logarithms, q.new_empty(0), torch.zeros(2, dtype=torch.int64)


def bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logarithms: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    alibi: Tensor | None,
    dropout: float,
    scale: float,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    deterministic: bool,
    generator: Any,
    rng_state: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``mha_bwd``: writes the gradients of the operands."""
    _check_operands(q, k, v, softcap, dropout)
    _check(dout.shape == out.shape == q.shape and dout.dtype == q.dtype, "dout and out must be as the query")
    _check(all(t.stride(-1) == 1 for t in (dout, out, dq, dk, dv)), "must have contiguous last dimension")
    slopes = _slopes(alibi, q.size(0), q.size(2))
    visible = _visible(q.size(1), k.size(1), causal, left, right, alibi is not None)
    wide_q, wide_k, wide_v = _wide(q, k, v)
    scores, slope = _scores(wide_q, wide_k, scale, softcap, slopes, visible)
    weights = (scores - logarithms.double()[..., None]).exp()
    by_weight = torch.einsum("blhd,bshd->bhls", dout.double(), wide_v)
    inner = (dout.double() * out.double()).sum(-1).transpose(1, 2)[..., None]
    by_product = weights * (by_weight - inner) * slope
    dq.copy_(torch.einsum("bhls,bshd->blhd", by_product, wide_k))
    grouped = (k.size(2), q.size(2) // k.size(2))
    dk.copy_(torch.einsum("bhls,blhd->bshd", by_product, wide_q).unflatten(2, grouped).sum(3))
    dv.copy_(torch.einsum("bhls,blhd->bshd", weights, dout.double()).unflatten(2, grouped).sum(3))
    rounded = -(-q.size(1) // 128) * 128
    return dq, dk, dv, torch.zeros(q.size(0), q.size(2), rounded)


def varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    cu_q: Tensor,
    cu_k: Tensor,
    used_k: Tensor | None,
    leftpad_k: Tensor | None,
    block_table: Tensor | None,
    alibi: Tensor | None,
    max_q: int,
    max_k: int,
    dropout: float,
    scale: float,
    zero: bool,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    return_softmax: bool,
    generator: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``mha_varlen_fwd`` without paging: sequences one behind the other, (total, H, D)."""
    _check(used_k is leftpad_k is block_table is None, "the stand-in knows no paging")
    result, logarithms = torch.empty_like(q), torch.empty(q.size(1), q.size(0))
    for i, j, m, n in zip(*(c.tolist()[s] for c in (cu_q, cu_k) for s in (slice(None, -1), slice(1, None)))):
        parts = (q[None, i:j], k[None, m:n], v[None, m:n])
        one = fwd(*parts, None, alibi, dropout, scale, causal, left, right, softcap, return_softmax, generator)
        result[i:j], logarithms[:, i:j] = one[0][0], one[1][0]
    return result, logarithms, q.new_empty(0), torch.zeros(2, dtype=torch.int64)
