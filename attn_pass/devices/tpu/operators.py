"""The operators `attn_pass_xla::attention` and `attention_backward`: what the targets for TPUs put into a graph.

Each is a custom operator with a fake implementation and a gradient, because JAX's functions have neither in a torch
graph. On an XLA device it runs the Pallas kernel through torch_xla, on a torch_tpu device through torch_tpu; on any
other it is the same function in plain operators, so that a graph rewritten for a TPU can be run, traced and exported
where there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attn_pass.devices.tpu.kernels import LOWEST, NEVER, Blocks, PallasCall

_MASKED = -0.7 * torch.finfo(torch.float32).max  # what the kernels add to a masked score


@torch.library.custom_op("attn_pass_xla::attention", mutates_args=())
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    kept: Tensor | None,
    kind: str,
    scale: float,
    lower: int | None,
    upper: int | None,
    blocks: Sequence[int],
) -> Tensor:
    """``softmax(scale * query @ key.T + bias where kept) @ value``.

    Args:
        query: (B, H, L, D), bfloat16 or float32.
        key: (B, Hkv, S, D); Hkv is H for "flash" and divides it for "splash".
        value: (B, Hkv, S, D).
        bias: added to the scores, broadcastable to (B, H, L, S); numbers below -1.2e24 count as that. "flash" only.
        kept: (B, S), boolean: the keys that are kept.
        kind: the kernel, "flash" or "splash".
        scale: of the scores, greater than 0.
        lower: keys are kept where ``lower <= key - row``; None is no bound.
        upper: and where ``key - row <= upper``; "flash" takes no lower bound, and 0 or None here.
        blocks: `attn_pass.devices.tpu.kernels.Blocks`.

    Returns:
        (B, H, L, D), contiguous. A fully masked row is an average of values.
    """
    call = PallasCall(kind, scale, Blocks(*blocks), lower, upper)
    result: Tensor = _run(call, False, (query, key, value), bias, kept)
    return result


@torch.library.custom_op("attn_pass_xla::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    kept: Tensor | None,
    kind: str,
    scale: float,
    lower: int | None,
    upper: int | None,
    blocks: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and bias, the last empty without one. ``grad`` is that of the result."""
    call = PallasCall(kind, scale, Blocks(*blocks), lower, upper)
    gradients = _run(call, True, (grad, query, key, value), bias, kept)
    return (*gradients, query.new_empty(0)) if bias is None else tuple(gradients)


@attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


@attention_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    gradients = tuple(x.new_empty(x.shape) for x in (query, key, value))
    return (*gradients, query.new_empty(0) if bias is None else bias.new_empty(bias.shape))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.rest = inputs[5:]


def _gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    query, key, value, bias, kept = ctx.saved_tensors
    *of_operands, of_bias = torch.ops.attn_pass_xla.attention_backward(grad, query, key, value, bias, kept, *ctx.rest)
    return (*of_operands, None if bias is None else of_bias, *([None] * 6))


attention.register_autograd(_gradient, setup_context=_keep)


def _run(call: PallasCall, back: bool, tensors: tuple[Tensor, ...], bias: Tensor | None, kept: Tensor | None) -> Any:
    """The kernel of the device the tensors are on."""
    place = tensors[0].device.type
    if place == "xla":
        from attn_pass.devices.tpu import torch_xla

        return torch_xla.run(call, back, tensors, bias, kept)
    if place == "tpu":
        from attn_pass.devices.tpu import torch_tpu

        return torch_tpu.run(call, back, tensors, bias, kept)
    return elsewhere(call, back, tensors, bias, kept)


# ---------------------------------------------------------------- the same function in plain operators


def elsewhere(
    call: PallasCall, back: bool, tensors: tuple[Tensor, ...], bias: Tensor | None, kept: Tensor | None
) -> Any:
    """What the operators are on devices without the kernels."""
    if back:
        return _plain_backward(call, *tensors, bias=bias, kept=kept)
    query, key, value = tensors
    weights = _weights(call, query, key, bias, kept)
    return (weights @ _spread(value, query)).to(query.dtype).contiguous()


def _spread(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values for every query head, in float32."""
    return x.float().repeat_interleave(query.size(1) // x.size(1), 1)


def _weights(call: PallasCall, query: Tensor, key: Tensor, bias: Tensor | None, kept: Tensor | None) -> Tensor:
    """(B, H, L, S)."""
    scores = call.scale * query.float() @ _spread(key, query).mT
    if bias is not None:
        wide = bias.float()
        scores = scores + wide.clamp(min=LOWEST).masked_fill(wide == float("-inf"), NEVER)
    rows, keys = (torch.arange(x.size(2), device=query.device) for x in (query, key))
    distance = keys - rows[:, None]
    masked = torch.zeros_like(distance, dtype=torch.bool)
    if call.lower is not None:
        masked = masked | (distance < call.lower)
    if call.upper is not None:
        masked = masked | (distance > call.upper)
    if kept is not None:
        masked = masked | ~kept[:, None, None, :]
    return scores.masked_fill(masked, _MASKED).softmax(-1)


def _plain_backward(
    call: PallasCall,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias: Tensor | None,
    kept: Tensor | None,
) -> tuple[Tensor, ...]:
    weights, grad = _weights(call, query, key, bias, kept), grad.float()
    of_weights = grad @ _spread(value, query).mT
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    of_query = call.scale * of_scores @ _spread(key, query)
    of_key = call.scale * of_scores.mT @ query.float()
    of_value = weights.mT @ grad
    joined = (x.unflatten(1, (key.size(1), -1)).sum(2) for x in (of_key, of_value))
    gradients = [g.to(query.dtype).contiguous() for g in (of_query, *joined)]
    if bias is not None:
        gradients.append(of_scores.sum_to_size(bias.shape).to(bias.dtype).contiguous())
    return tuple(gradients)
