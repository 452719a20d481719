"""CPU implementations of torch's CUDA attention operators that check the constraints of each kernel.

For machines without a GPU: graphs rewritten for a CUDA device then run here, under eager, torch.compile and export, and
compute the documented function in float64, forward and backward. Whatever a kernel would refuse, or read wrongly,
raises. The constraints are written down once more here, from the sources of torch 2.13 (sdp_utils.cpp, flash_api.cpp,
attention.cu, MHA.cpp), and not taken from `attn_pass.devices.cuda.rules`: each checks the
other.

This says that a call is one the kernel takes, and what it means; not that the kernel is right or fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
_ALIGNMENT = 16  # bytes


class Call(SimpleNamespace):
    """The arguments of one call of an operator, by the names of its schema."""


class Refused(RuntimeError):
    """The kernel would not take the call."""


def _ask(holds: bool, what: str) -> None:
    if not holds:
        raise Refused(what)


def _dense_last(*tensors: Tensor) -> None:
    for t in tensors:
        _ask(t.dim() == 4, f"rank {t.dim()}")
        _ask(t.stride(-1) == 1 or t.size(-1) == 1, f"strides {t.stride()}: the last dimension is not dense")


def _vectors(*tensors: Tensor) -> None:
    """Rows are read sixteen bytes at a time."""
    for t in tensors:
        multiple = _ALIGNMENT // t.element_size()
        _ask(t.storage_offset() % multiple == 0, f"storage offset {t.storage_offset()}")
        strides = [s for s, n in zip(t.stride()[:-1], t.shape) if n > 1]
        _ask(all(s % multiple == 0 for s in strides), f"strides {t.stride()} are not aligned")


def _common(query: Tensor, key: Tensor, value: Tensor, *, grouped: bool) -> None:
    """Operands (B, H, L, D)."""
    _dense_last(query, key, value)
    _ask(query.dtype == key.dtype == value.dtype, "dtypes differ")
    _ask(query.size(0) == key.size(0) == value.size(0), "batches differ")
    _ask(key.size(1) == value.size(1), "heads of keys and values differ")
    _ask(key.size(2) == value.size(2), "lengths of keys and values differ")
    _ask(query.size(3) == key.size(3), "head dims of query and key differ")
    _ask(0 not in (*query.shape, *key.shape, *value.shape), "a size is 0")
    _ask(query.size(1) % key.size(1) == 0 if grouped else query.size(1) == key.size(1), "heads do not fit")


# ---------------------------------------------------------------- the function


def _keep_window(rows: int, keys: int, left: int, right: int) -> Tensor:
    distance = torch.arange(keys)[None] - torch.arange(rows)[:, None] - (keys - rows)
    keep = torch.ones(rows, keys, dtype=torch.bool)
    if left >= 0:
        keep &= distance >= -left
    if right >= 0:
        keep &= distance <= right
    return keep


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None, drawn: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Result and logarithm of the sum of exponentials, (B, H, L, D) and (B, H, L), in float64."""
    groups = query.size(1) // key.size(1)
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * scale
    if mask is not None:
        scores = scores + mask
    weights = torch.ops.aten._safe_softmax.default(scores, -1)
    if drawn is not None:
        weights = weights * drawn
    return weights @ value, scores.logsumexp(-1)


def _drawn(shape: tuple[int, ...], dropout: float, seed: Tensor) -> Tensor | None:
    if not dropout:
        return None
    generator = torch.Generator().manual_seed(int(seed.view(torch.int64).flatten()[0]))
    return (torch.rand(shape, generator=generator) >= dropout).double() / (1 - dropout)


def _seed(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, int(torch.randint(1 << 40, ())), dtype=torch.int64).to(dtype)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, mask: Tensor | None, dropout: float, seed: Tensor
) -> tuple[Tensor, Tensor]:
    given = query.size(-1) ** -0.5 if scale is None else scale
    shape = (*query.shape[:3], key.size(2))
    wide = (query.double(), key.double(), value.double())
    out, total = _attend(*wide, given, None if mask is None else mask.double(), _drawn(shape, dropout, seed))
    return out.to(query.dtype), total.float()


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    mask: Tensor | None,
    dropout: float,
    seed: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of the operands, and of ``bias``, which is a part of ``mask``, where there is one."""
    given = query.size(-1) ** -0.5 if scale is None else scale
    added = None if mask is None else mask.double()
    if bias is not None:
        added = bias.double() if added is None else added + bias.double()
    groups = query.size(1) // key.size(1)
    q, g = query.double(), grad.double()
    k, v = (x.double().repeat_interleave(groups, 1) for x in (key, value))
    scores = q @ k.transpose(-1, -2) * given
    weights = torch.ops.aten._safe_softmax.default(scores if added is None else scores + added, -1)
    drawn = _drawn(tuple(weights.shape), dropout, seed)
    of_weights = g @ v.transpose(-1, -2)
    kept = weights
    if drawn is not None:
        of_weights, kept = of_weights * drawn, weights * drawn
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    gradients = [
        of_scores @ k * given,
        _by_kv_head(of_scores.transpose(-1, -2) @ q * given, groups),
        _by_kv_head(kept.transpose(-1, -2) @ g, groups),
    ]
    tensors = [query, key, value]
    if bias is not None:
        gradients.append(of_scores)
        tensors.append(bias)
    return tuple(torch.empty_like(t).copy_(f) for f, t in zip(gradients, tensors))


def _by_kv_head(gradient: Tensor, groups: int) -> Tensor:
    return gradient.unflatten(1, (-1, groups)).sum(2)


def _masking(keep: Tensor) -> Tensor:
    return torch.zeros(keep.shape, dtype=torch.float64).masked_fill(~keep, float("-inf"))


def _mask(call: Call, bias: Tensor | None = None, *, equal_lengths: bool = True) -> Tensor | None:
    """What is added to the scores: the causal mask, from the first key on, and the bias."""
    rows, keys = call.query.size(2), call.key.size(2)
    _ask(
        not call.is_causal or rows == keys or not equal_lengths,
        "the mask is causal, and there are not as many keys as queries",
    )
    mask = _masking(torch.ones(rows, keys, dtype=torch.bool).tril()) if call.is_causal else None
    if bias is None or not bias.numel():
        return mask
    return bias.double() if mask is None else mask + bias.double()


def _like(query: Tensor, out: Tensor) -> Tensor:
    """The result in the memory order of the query, as the kernels allocate it."""
    return torch.empty_like(query).copy_(out) if out.shape == query.shape else _in_order_of(query, out)


def _in_order_of(query: Tensor, out: Tensor) -> Tensor:
    order = sorted(range(query.dim()), key=lambda d: -query.stride(d))
    inverse = [order.index(d) for d in range(query.dim())]
    return out.permute(order).contiguous().permute(inverse)


# ---------------------------------------------------------------- flash


def _flash_asks(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> None:
    """Operands (B, H, L, D)."""
    _common(query, key, value, grouped=True)
    _ask(query.dtype in HALF, f"{query.dtype}")
    _ask(query.size(3) == value.size(3), "head dims of keys and values differ")
    _ask(query.size(3) <= 256 and query.size(3) % 8 == 0, f"head dim {query.size(3)}")
    _vectors(query, key, value)
    _ask(0 <= dropout < 1, f"dropout {dropout}")


def _scale_asks(call: Call) -> None:
    positive = call.scale is None or call.scale > 0
    _ask(positive, "a scale that is not positive: the highest score is looked for before it")


def _flash(call: Call) -> tuple[Any, ...]:
    query, key = call.query, call.key
    _flash_asks(query, key, call.value, call.dropout_p)
    _scale_asks(call)
    seed = _seed((2,), torch.uint64)
    out, total = _forward(query, key, call.value, call.scale, _mask(call), call.dropout_p, seed)
    none, offset = torch.empty(0, dtype=query.dtype), torch.zeros((), dtype=torch.uint64)
    return _like(query, out), total, None, None, query.size(2), key.size(2), seed, offset, none


def _flash_backward(call: Call) -> tuple[Tensor, ...]:
    operands = call.query, call.key, call.value
    _flash_asks(*operands, call.dropout_p)
    return _backward(call.grad_out, *operands, call.scale, _mask(call), call.dropout_p, call.philox_seed)


def _flash_window_mask(query: Tensor, key: Tensor, causal: bool, left: int | None, right: int | None) -> Tensor | None:
    """As mha_fwd and set_params_fprop have it: a size of all keys is no bound, and no bound beside another is that."""
    rows, keys = query.size(2), key.size(2)
    left, right = -1 if left is None else left, -1 if right is None else right
    left, right = -1 if left >= keys else left, -1 if right >= keys else right
    if rows == 1:
        causal = False
    if causal:
        right = 0
    if left < 0 <= right:
        left = keys
    if right < 0 <= left:
        right = keys
    return None if left < 0 and right < 0 else _masking(_keep_window(rows, keys, left, right))


def _flash_forward(call: Call) -> tuple[Any, ...]:
    """Operands (B, L, H, D)."""
    lengths = (call.cum_seq_q, call.cum_seq_k, call.seqused_k)
    if call.seqused_k is not None:
        return _flash_of_lengths(call)
    _ask(all(x is None for x in lengths), "no variable lengths in this stand-in")
    others = (call.alibi_slopes, getattr(call, "block_table", None), getattr(call, "num_splits", None))
    _ask(all(x is None for x in others), "compiled out")
    _ask((call.max_q, call.max_k) == (call.query.size(1), call.key.size(1)), "lengths are not those of the operands")
    _scale_asks(call)
    turned = [x.transpose(1, 2) for x in (call.query, call.key, call.value)]
    _flash_asks(*turned, call.dropout_p)
    seed = _seed((2,), torch.uint64)
    mask = _flash_window_mask(turned[0], turned[1], call.is_causal, call.window_size_left, call.window_size_right)
    out, total = _forward(*turned, call.scale, mask, call.dropout_p, seed)
    none = torch.empty(0, dtype=call.query.dtype)
    return _like(call.query, out.transpose(1, 2)), total, seed, torch.zeros((), dtype=torch.uint64), none


def _flash_of_lengths(call: Call) -> tuple[Any, ...]:
    """Operands (tokens, H, D), as mha_varlen_fwd asks: of each sequence some keys, from a row of them on, are used."""
    query, starts = call.query, (call.cum_seq_q, call.cum_seq_k)
    batch, tokens = starts[0].numel() - 1, call.key.size(0)
    _ask(all(t.dim() == 3 and t.stride(-1) == 1 for t in (query, call.key, call.value)), "operands of another layout")
    for numbers, size in ((starts[0], batch + 1), (starts[1], batch + 1), (call.seqused_k, batch)):
        _ask(numbers.dtype == torch.int32 and numbers.is_contiguous() and numbers.shape == (size,), "numbers of rows")
    wanted = torch.arange(0, query.size(0) + 1, call.max_q, dtype=torch.int32)
    _ask(torch.equal(starts[0], wanted), "queries of other lengths")
    first, used = starts[1][:batch], call.seqused_k
    _ask(bool(((first >= 0) & (used >= 0) & (used <= call.max_k) & (first + used <= tokens)).all()), "other rows")
    _ask(call.key.shape == call.value.shape, "keys and values differ")
    _ask(not call.dropout_p, "dropout")
    _vectors(*(t[:, :, None] for t in (query, call.key, call.value)))
    _scale_asks(call)
    results = []
    for row, (begin, count) in enumerate(zip(first.tolist(), used.tolist())):
        q = query[row * call.max_q : (row + 1) * call.max_q].transpose(0, 1)[None]
        k, v = (t[begin : begin + count].transpose(0, 1)[None] for t in (call.key, call.value))
        mask = _flash_window_mask(q, k, call.is_causal, call.window_size_left, call.window_size_right)
        no_seed = torch.zeros(2, dtype=torch.uint64)
        results.append(_forward(q, k, v, call.scale, mask, 0.0, no_seed)[0] if count else torch.zeros_like(q))
    out = torch.cat(results).transpose(1, 2).flatten(0, 1)
    total = torch.zeros(query.size(1), query.size(0))
    seed, none = torch.zeros((2,), dtype=torch.uint64), torch.empty(0, dtype=query.dtype)
    return out.contiguous(), total, seed, torch.zeros((), dtype=torch.uint64), none


def _flash_forward_backward(call: Call) -> tuple[Tensor, ...]:
    operands = call.query, call.key, call.value
    grad, *turned = (x.transpose(1, 2) for x in (call.grad_out, *operands))
    _flash_asks(*turned, call.dropout_p)
    mask = _flash_window_mask(turned[0], turned[1], call.is_causal, call.window_size_left, call.window_size_right)
    gradients = _backward(grad, *turned, call.scale, mask, call.dropout_p, call.rng_state)
    return tuple(torch.empty_like(t).copy_(f.transpose(1, 2)) for f, t in zip(gradients, operands))


# ---------------------------------------------------------------- cuDNN


def _cudnn_asks(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout: float) -> None:
    _common(query, key, value, grouped=True)
    _ask(query.dtype in HALF, f"{query.dtype}")
    _ask(all(0 not in [s for s, n in zip(t.stride(), t.shape) if n > 1] for t in (query, key, value)), "stride 0")
    for dim in (query.size(3), value.size(3)):
        _ask(dim % 8 == 0 and dim <= 256, f"head dim {dim}")
    _vectors(query, key, value)
    _ask(key.size(2) > 1, "a single key")
    _ask(query.size(2) > 1 or not dropout, "one query with dropout")
    _ask(float(dropout * 16).is_integer(), f"dropout {dropout}")
    if bias is not None:
        _ask(bias.dim() in (2, 4) and bias.stride(-1) == 1, "the bias has another rank, or is not dense")
        _ask(bias.dtype == query.dtype, f"a bias of {bias.dtype}")
        full = (query.size(0), query.size(1), query.size(2), key.size(2))[-bias.dim() :]
        _ask(all(n in (1, f) for n, f in zip(bias.shape, full)), f"a bias of {tuple(bias.shape)}")


def _cudnn(call: Call) -> tuple[Any, ...]:
    query, key, value, bias = call.query, call.key, call.value, call.attn_bias
    _cudnn_asks(query, key, value, bias, call.dropout_p)
    seed = _seed((), torch.int64)
    out, total = _forward(query, key, value, call.scale, _mask(call, bias), call.dropout_p, seed)
    if bias is not None:
        _ask(bool(torch.isfinite(total).all()), "a fully masked row")
    kept = total[..., None] if call.compute_log_sumexp else torch.empty(total[..., None].shape)
    laid, offset = _in_order_of(query, out), torch.zeros((), dtype=torch.int64)
    return laid, kept, None, None, query.size(2), key.size(2), seed, offset, None


def _cudnn_backward(call: Call) -> tuple[Tensor, ...]:
    operands, mask = (call.query, call.key, call.value), _mask(call, call.attn_bias)
    return _backward(call.grad_out, *operands, call.scale, mask, call.dropout_p, call.philox_seed)


# ---------------------------------------------------------------- memory-efficient


def _efficient_asks(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout: float) -> None:
    _common(query, key, value, grouped=False)
    _ask(query.dtype in (torch.float32, *HALF), f"{query.dtype}")
    multiple = _ALIGNMENT // query.element_size()
    for tensor in (query, key, value):
        _ask(tensor.size(3) % multiple == 0, f"head dim {tensor.size(3)}")
    _vectors(query, key, value)
    _ask(0 <= dropout < 1, f"dropout {dropout}")
    if bias is not None:
        _ask(bias.dtype == query.dtype, f"a bias of {bias.dtype}")
        _ask(bias.shape == (*query.shape[:3], key.size(2)), f"a bias of {tuple(bias.shape)}")
        _ask(bias.stride(-1) == 1 or bias.size(-1) == 1, "the bias is not dense")
        strides = [s for s, n in zip(bias.stride()[:-1], bias.shape) if n > 1]
        _ask(not _aligned or all(s % multiple == 0 for s in strides), f"strides {bias.stride()} are not aligned")
        _ask(bias.storage_offset() % multiple == 0, f"storage offset {bias.storage_offset()} of the bias")


def _efficient(call: Call) -> tuple[Any, ...]:
    query, key, value, bias = call.query, call.key, call.value, call.attn_bias
    _efficient_asks(query, key, value, bias, call.dropout_p)
    if bias is not None:
        overflows = (bias.double() * 1.4426950408889634).float().isneginf() & ~bias.isneginf()
        _ask(not bool(overflows.any()), "a finite bias that is -inf once it is multiplied by the logarithm of e")
    seed = _seed((), torch.int64)
    mask = _mask(call, bias, equal_lengths=False)
    out, total = _forward(query, key, value, call.scale, mask, call.dropout_p, seed)
    kept = torch.zeros(*query.shape[:2], -(-query.size(2) // 32) * 32 if call.compute_log_sumexp else 0)
    if call.compute_log_sumexp:
        kept[..., : query.size(2)] = total
    laid = out.transpose(1, 2).contiguous().transpose(1, 2)
    return laid, kept, seed, torch.zeros((), dtype=torch.int64)


def _efficient_backward(call: Call) -> tuple[Tensor | None, ...]:
    _ask(call.logsumexp.numel() > 0, "the forward did not keep the sums of exponentials")
    operands, mask = (call.query, call.key, call.value), _mask(call, equal_lengths=False)
    bias = call.attn_bias if call.attn_bias is not None and call.attn_bias.numel() else None
    gradients = _backward(call.grad_out_, *operands, call.scale, mask, call.dropout_p, call.philox_seed, bias)
    laid = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in gradients[:3]]
    if bias is None or not call.grad_input_mask[3]:
        return (*laid, None)
    wide = torch.zeros(*bias.shape[:-1], -(-bias.size(-1) // 16) * 16, dtype=bias.dtype)[..., : bias.size(-1)]
    return (*laid, wide.copy_(gradients[3]))


_OPERATORS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_backward": _flash_forward_backward,
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
}
_library: torch.library.Library | None = None
_aligned = True


@contextmanager
def lowered_by_inductor() -> Iterator[None]:
    """Inside, biases need no aligned strides: Inductor sees to that itself, for tensors on CUDA alone."""
    global _aligned
    _aligned = False
    try:
        yield
    finally:
        _aligned = True


def install() -> None:
    """Gives the operators their CPU implementations, once a process."""
    global _library
    if _library is None:
        _library = torch.library.Library("aten", "IMPL")
        for name, function in _OPERATORS.items():
            _library.impl(name, _with_names(name, function), "CPU")


def _with_names(operator: str, function: Callable[[Call], Any]) -> Callable[..., Any]:
    """The function, given the operator's arguments by the names of its schema, defaults among them."""
    arguments = getattr(torch.ops.aten, operator).default._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments}

    def called(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip((argument.name for argument in arguments), args))
        return function(Call(**{**defaults, **given, **kwargs}))

    return called
