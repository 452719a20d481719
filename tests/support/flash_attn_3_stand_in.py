"""FlashAttention-3 without a GPU: its operators with upstream's schemas, as strict as its C++, computed in float64.

Schemas are the text of Dao-AILab/flash-attention at 0251105 (2026-08-15): those of ``fwd`` and ``bwd`` from
hopper/flash_api_stable.cpp, those of the Python operators as torch infers them from hopper/flash_attn_interface.py.
Whatever the C++ checks is checked here, and that rows begin at multiples of 16 bytes, which its TMA loads need and
nothing checks. What no test needs (paging, several lengths, FP8, rotary embeddings) is refused.

With the environment variable ATTN_PASS_FLASH_ATTN_3 set to upstream's ``hopper`` folder, upstream's own Python runs
over these kernels in the place of the few lines here, and the schemas are compared with its source.
"""

from __future__ import annotations

import importlib
import inspect
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

Tensor = torch.Tensor
UPSTREAM = os.environ.get("ATTN_PASS_FLASH_ATTN_3", "")
_PAGED = (
    "Tensor? cu_seqlens_q = None,Tensor? cu_seqlens_k = None,Tensor? cu_seqlens_k_new = None,"
    "Tensor? seqused_q = None,Tensor? seqused_k = None,int? max_seqlen_q = None,int? max_seqlen_k = None,"
    "Tensor? page_table = None,Tensor? kv_batch_idx = None,Tensor? leftpad_k = None,Tensor? rotary_cos = None,"
    "Tensor? rotary_sin = None,Tensor? seqlens_rotary = None,Tensor? q_descale = None,Tensor? k_descale = None,"
    "Tensor? v_descale = None,float? softmax_scale = None,"
)
SCHEMAS = {
    "fwd": "fwd(Tensor q,Tensor k,Tensor v,Tensor(k_new!)? k_new = None,Tensor(v_new!)? v_new = None,"
    "Tensor? q_v = None,Tensor(out!)? out = None,"
    + _PAGED
    + "bool is_causal = False,int window_size_left = -1,int window_size_right = -1,int attention_chunk = 0,"
    "float softcap = 0.0,bool is_rotary_interleaved = False,Tensor? scheduler_metadata = None,int num_splits = 0,"
    "bool? pack_gqa = None,int sm_margin = 0) -> (Tensor(out!), Tensor, Tensor, Tensor)",
    "bwd": "bwd(Tensor dout,Tensor q,Tensor k,Tensor v,Tensor out,Tensor softmax_lse,Tensor(dq!)? dq = None,"
    "Tensor(dk!)? dk = None,Tensor(dv!)? dv = None,Tensor? cu_seqlens_q = None,Tensor? cu_seqlens_k = None,"
    "Tensor? seqused_q = None,Tensor? seqused_k = None,int? max_seqlen_q = None,int? max_seqlen_k = None,"
    "float? softmax_scale = None,bool is_causal = False,int window_size_left = -1,int window_size_right = -1,"
    "float softcap = 0.0,bool deterministic = False,int sm_margin = 0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
}
PYTHON_SCHEMAS = {
    "_flash_attn_forward": "_flash_attn_forward(Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? v_new=None, "
    "Tensor? qv=None, Tensor? out_=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? seqused_k=None, SymInt? max_seqlen_q=None, "
    "SymInt? max_seqlen_k=None, Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, "
    "Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, "
    "Tensor? k_descale=None, Tensor? v_descale=None, float? softmax_scale=None, bool causal=False, "
    "SymInt window_size_left=-1, SymInt window_size_right=-1, SymInt attention_chunk=0, float softcap=0., "
    "bool rotary_interleaved=True, Tensor? scheduler_metadata=None, SymInt num_splits=1, bool? pack_gqa=None, "
    "SymInt sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor)",
    "_flash_attn_backward": "_flash_attn_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, "
    "Tensor softmax_lse, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? sequed_q=None, "
    "Tensor? sequed_k=None, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, Tensor(a12!)? dq=None, "
    "Tensor(a13!)? dk=None, Tensor(a14!)? dv=None, float? softmax_scale=None, bool is_causal=False, "
    "SymInt window_size_left=-1, SymInt window_size_right=-1, float softcap=0., bool deterministic=False, "
    "SymInt sm_margin=0) -> Tensor",
}
INTERFACE, PACKAGE = "flash_attn_interface", "flash_attn_3"


@contextmanager
def present() -> Iterator[ModuleType]:
    """Inside, FlashAttention-3 can be imported, by attn_pass too; outside nothing has changed."""
    modules = _loaded()
    capability = mock.patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0))  # upstream's fakes ask
    with _imported(modules), capability if UPSTREAM else nullcontext():
        yield modules[INTERFACE]


@contextmanager
def _imported(modules: dict[str, ModuleType]) -> Iterator[None]:
    """What else is imported meanwhile stays."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


@lru_cache(maxsize=1)
def _loaded() -> dict[str, ModuleType]:
    """The modules; operators are registered once, and stay."""
    library = torch.library.Library(PACKAGE, "FRAGMENT")
    for name, kernel in (("fwd", fwd), ("bwd", bwd)):
        library.define(SCHEMAS[name])
        library.impl(name, kernel, "CPU")
    _KEPT.append(library)
    package, kernels = _module(PACKAGE), _module(f"{PACKAGE}._C")
    modules = {PACKAGE: package, f"{PACKAGE}._C": kernels}
    modules[INTERFACE] = _upstreams(modules) if UPSTREAM else _own(library)
    return modules


_KEPT: list[torch.library.Library] = []


def _module(name: str) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    return module


def _upstreams(modules: dict[str, ModuleType]) -> ModuleType:
    config: Any = _module("flash_attn_config")
    widths = (64, 96, 128, 192, 256)
    config.CONFIG = {"build_flags": {f"FLASHATTENTION_DISABLE_HDIM{width}": False for width in widths}}
    modules["flash_attn_config"] = config
    with _imported(modules), mock.patch.object(sys, "path", [UPSTREAM, *sys.path]):
        interface = importlib.import_module(INTERFACE)
    for name in PYTHON_SCHEMAS:
        registered = getattr(interface, name)
        registered.register_kernel("cpu")(registered._init_fn)
    return interface


# ---------------------------------------------------------------- what flash_attn_interface.py makes of it


def _own(library: torch.library.Library) -> ModuleType:
    for name, function, fake in (
        ("_flash_attn_forward", _forward, _forward_fake),
        ("_flash_attn_backward", _backward, _backward_fake),
    ):
        library.define(PYTHON_SCHEMAS[name])
        library.impl(name, function, "CPU")
        torch.library.register_fake(f"{PACKAGE}::{name}", fake, lib=library)
    interface: Any = _module(INTERFACE)
    interface.flash_attn_func = flash_attn_func
    return interface  # type: ignore[no-any-return]


def _given(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SimpleNamespace:
    """The arguments by name, defaults of the schema for those that are not given."""
    schema = operator._schema.arguments
    given = {a.name: a.default_value for a in schema} | dict(zip((a.name for a in schema), args)) | kwargs
    return SimpleNamespace(**given)


def _forward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    g = _given(torch.ops.flash_attn_3._flash_attn_forward.default, args, kwargs)
    names = {"q_v": "qv", "out": "out_", "is_causal": "causal", "is_rotary_interleaved": "rotary_interleaved"}
    arguments = torch.ops.flash_attn_3.fwd.default._schema.arguments
    return tuple(torch.ops.flash_attn_3.fwd(*(getattr(g, names.get(a.name, a.name)) for a in arguments)))


def _forward_fake(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    g = _given(torch.ops.flash_attn_3._flash_attn_forward.default, args, kwargs)
    if g.num_splits <= 0:
        raise ValueError("tracing (torch.compile/torch.export) with num_splits <= 0 not supported")
    batch, rows, heads, _ = g.q.shape
    result = g.q.new_empty(batch, rows, heads, g.v.shape[-1])
    nothing = g.q.new_empty(0, dtype=torch.float32)
    return result, g.q.new_empty(batch, heads, rows, dtype=torch.float32), nothing, nothing.clone()


def _backward(*args: Any, **kwargs: Any) -> Tensor:
    g = _given(torch.ops.flash_attn_3._flash_attn_backward.default, args, kwargs)
    names = {"seqused_q": "sequed_q", "seqused_k": "sequed_k"}
    arguments = torch.ops.flash_attn_3.bwd.default._schema.arguments
    result: Tensor = torch.ops.flash_attn_3.bwd(*(getattr(g, names.get(a.name, a.name)) for a in arguments))[0]
    return result


def _backward_fake(*args: Any, **kwargs: Any) -> Tensor:
    q = args[1]
    return torch.empty(q.size(0), q.size(2), q.size(1), dtype=torch.float32, device=q.device)


class _Function(torch.autograd.Function):
    """``FlashAttnFunc``, which calls the two operators."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...], deterministic: bool) -> Tensor:
        scale, causal, window, softcap = options
        out, logarithms, *_ = torch.ops.flash_attn_3._flash_attn_forward(
            *(q, k, v),
            softmax_scale=scale,
            causal=causal,
            window_size_left=window[0],
            window_size_right=window[1],
            softcap=softcap,
        )
        ctx.save_for_backward(q, k, v, out, logarithms)
        ctx.options, ctx.deterministic = options, deterministic
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, logarithms = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        scale, causal, window, softcap = ctx.options
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        torch.ops.flash_attn_3._flash_attn_backward(
            *(dout, q, k, v, out, logarithms, *(None,) * 6, dq, dk, dv),
            *(scale, causal, *window, softcap, ctx.deterministic, 0),
        )
        return dq, dk, dv, None, None


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor:
    """With upstream's parameters; those that attn_pass gives are used."""
    result: Tensor = _Function.apply(q, k, v, (softmax_scale, causal, window_size, softcap), deterministic)
    return result


# ---------------------------------------------------------------- the kernels


class Refused(RuntimeError):
    """The C++ would raise."""


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise Refused(message)


def _check_operands(q: Tensor, k: Tensor, v: Tensor) -> None:
    _check(q.dtype in (torch.float16, torch.bfloat16), "FlashAttention only supports fp16, bf16, and fp8_e4m3")
    _check(k.dtype == q.dtype, "query and key must have the same dtype")
    _check(v.dtype == q.dtype, "query and value must have the same dtype")
    for t in (q, k, v):
        _check(t.dim() == 4, "operands are batch x seqlen x heads x head_size")
        _check(t.stride(-1) == 1, "Input tensor must have contiguous last dimension")
        strides = [s for s, n in zip(t.stride()[:-1], t.shape) if n > 1]
        _check(all(s % 8 == 0 and s > 0 for s in strides), f"TMA: strides {t.stride()} are no multiples of 16 bytes")
        _check(t.storage_offset() % 8 == 0, f"TMA: storage offset {t.storage_offset()}")
    _check(q.size(0) == k.size(0), "batch_size must be equal to batch_size_k")
    _check(q.size(2) % k.size(2) == 0, "Number of heads in key/value must divide number of heads in query")
    _check(k.shape == (q.size(0), k.size(1), k.size(2), q.size(3)), f"CHECK_SHAPE(k): {k.shape}")
    _check(v.shape == (*k.shape[:3], v.size(3)), f"CHECK_SHAPE(v): {v.shape}")
    _check(q.size(3) % 8 == 0, "head_size should be a multiple of 8")
    _check(v.size(3) % 8 == 0, "head_size_v should be a multiple of 8")
    _check(0 not in (*q.shape, *k.shape), "a size of 0 leaves the result unwritten")


def _visible(q_len: int, kv_len: int, causal: bool, left: int, right: int) -> Tensor:
    """(L, S): mha_fwd, set_params_fprop and mask.h, step by step."""
    left = -1 if left >= kv_len - 1 else left
    right = -1 if right >= q_len - 1 else right
    if q_len == 1 and left == -1 and right == -1:
        causal = False
    right = 0 if causal else right
    row, key = torch.arange(q_len)[:, None] + kv_len - q_len, torch.arange(kv_len)
    if left < 0 and right == 0:
        return key <= row
    if left < 0 and right < 0:
        return torch.ones(q_len, kv_len, dtype=torch.bool)
    left = kv_len - 1 if left < 0 else left
    right = q_len - 1 if right < 0 else right
    return (key >= row - left) & (key <= row + right)


def _scores(q: Tensor, k: Tensor, scale: float, softcap: float, visible: Tensor) -> tuple[Tensor, Tensor]:
    """The scores (B, H, L, S) in float64, and the derivative of each by its product."""
    scores = torch.einsum("blhd,bshd->bhls", q, k) * scale
    slope = torch.full_like(scores, scale)
    if softcap > 0:
        scores = torch.tanh(scores / softcap)
        slope = slope * (1 - scores * scores)
        scores = scores * softcap
    return scores.masked_fill(~visible, -math.inf), slope


def _wide(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    groups = q.size(2) // k.size(2)
    return q.double(), k.double().repeat_interleave(groups, 2), v.double().repeat_interleave(groups, 2)


_PLAIN = ("softmax_scale", "is_causal", "window_size_left", "window_size_right", "softcap", "num_splits", "pack_gqa")


def fwd(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``mha_fwd`` for operands (B, L, H, D) on Hopper: the result, logarithms (B, H, L), and nothing for no splits."""
    g = _given(torch.ops.flash_attn_3.fwd.default, (q, k, v, *args), kwargs)
    for argument in torch.ops.flash_attn_3.fwd.default._schema.arguments[3:]:
        if argument.name not in (*_PLAIN, "is_rotary_interleaved"):
            _check(getattr(g, argument.name) in (None, 0), f"the stand-in knows no {argument.name}")
    _check_operands(q, k, v)
    dim, value_dim = q.size(3), v.size(3)
    _check(dim <= 256, "FlashAttention forward only supports head dimension at most 256")
    if value_dim != dim:
        pair = (128 < dim <= 192 and 96 < value_dim <= 128) or (dim <= 64 and value_dim <= 512)
        _check(pair, "If V headdim is different from Q/K dim, we only support (128, 192], (96, 128] or <= 64, <= 512")
    _check(g.num_splits == 1, "the stand-in does not split")
    visible = _visible(q.size(1), k.size(1), g.is_causal, g.window_size_left, g.window_size_right)
    wide_q, wide_k, wide_v = _wide(q, k, v)
    scale = dim**-0.5 if g.softmax_scale is None else g.softmax_scale
    scores, _ = _scores(wide_q, wide_k, scale, g.softcap, visible)
    weights = scores.softmax(-1).nan_to_num(0.0)
    result = torch.einsum("bhls,bshd->blhd", weights, wide_v).to(q.dtype).contiguous()
    return result, scores.logsumexp(-1).float(), q.new_empty(0), q.new_empty(0)


def bwd(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """``mha_bwd``: writes the gradients of the operands."""
    g = _given(torch.ops.flash_attn_3.bwd.default, args, kwargs)
    q, k, v, out, dout = g.q, g.k, g.v, g.out, g.dout
    _check_operands(q, k, v)
    _check(max(q.size(3), v.size(3)) <= 256, "FlashAttention only supports head dimension at most 256")
    _check(
        not g.deterministic or max(q.size(3), v.size(3)) <= 192, "Deterministic backward not supported for hdim 256."
    )
    for t in (out, dout):
        _check(t.dtype == q.dtype and t.shape == (*q.shape[:3], v.size(3)), "CHECK_SHAPE(out), CHECK_SHAPE(dout)")
        _check(t.stride(-1) == 1, "must have contiguous last dimension")
    _check(g.cu_seqlens_q is g.cu_seqlens_k is g.seqused_q is g.seqused_k is None, "the stand-in knows one length")
    visible = _visible(q.size(1), k.size(1), g.is_causal, g.window_size_left, g.window_size_right)
    wide_q, wide_k, wide_v = _wide(q, k, v)
    scores, slope = _scores(wide_q, wide_k, g.softmax_scale, g.softcap, visible)
    logarithms = g.softmax_lse.double()[..., None]
    weights = (scores - logarithms.masked_fill(logarithms == -math.inf, 0.0)).exp()
    by_weight = torch.einsum("blhd,bshd->bhls", dout.double(), wide_v)
    inner = (dout.double() * out.double()).sum(-1).transpose(1, 2)[..., None]
    by_product = weights * (by_weight - inner) * slope
    grouped = (k.size(2), q.size(2) // k.size(2))
    gradients = (
        torch.einsum("bhls,bshd->blhd", by_product, wide_k),
        torch.einsum("bhls,blhd->bshd", by_product, wide_q).unflatten(2, grouped).sum(3),
        torch.einsum("bhls,blhd->bshd", weights, dout.double()).unflatten(2, grouped).sum(3),
    )
    for into, operand, gradient in zip((g.dq, g.dk, g.dv), (q, k, v), gradients):
        _check(into.dtype == q.dtype and into.shape == operand.shape, "dq, dk and dv must be as their operands")
        _check(into.stride(-1) == 1, "must have contiguous last dimension")
        into.copy_(gradient)
    return tuple(q.new_empty(0, dtype=torch.float32) for _ in range(5))


def upstream_source(name: str) -> str:
    """A file of upstream's folder."""
    return (Path(UPSTREAM) / name).read_text(encoding="utf-8")


def parameters(function: Any) -> list[str]:
    """The names and defaults of a function's parameters."""
    return [str(p.replace(annotation=inspect.Parameter.empty)) for p in inspect.signature(function).parameters.values()]
