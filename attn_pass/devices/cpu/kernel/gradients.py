"""`attn_pass::attention_forward` and `attn_pass::attention_backward`: attention on CPUs with gradients.

The forward gives the result, the log-sum-exp of every row, and what the backward needs of a row: its largest score and
its sum of exponentials, from which the weights come out as the forward had them. The backward computes the weights
again, tile by tile; it sums in an order that follows from sizes alone, so that gradients are the same for any number of
threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attn_pass.devices.cpu.kernel.build import entry
from attn_pass.devices.cpu.kernel.operator import (
    GIVEN,
    LIBRARY,
    OPERANDS,
    Args,
    Operand,
    arguments,
    attention,
    check,
    check_eagerly,
    lse_like,
    operand,
    result_like,
)
from attn_pass.devices.cpu.kernel.scores import MOST_CAPTURED
from attn_pass.devices.cpu.kernel.source import BACKWARD

# Autograd takes no tensors that are keywords.
_FILL = "float? fill=None, bool fill_is_added=False"
_GIVEN = f"{OPERANDS}, {GIVEN}, {_FILL}, Tensor? seed=None, float dropout=0.0, Tensor? offsets=None"
NAMES = tuple(part.split("=")[0].split()[-1] for part in _GIVEN.split(", "))
"""The forward's arguments, in order."""
_OPERANDS = NAMES[:3]
_NUMBER_OF_CAPTURED = NAMES.index("captured")
LIBRARY.define(
    f"attention_forward({_GIVEN}) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_OF_FORWARD = "Tensor grad, Tensor? lse_grad, Tensor result, Tensor statistics, Tensor rest, str[] wanted"
_LEFT = len(_OF_FORWARD.split(", "))
LIBRARY.define(
    f"attention_backward({_OF_FORWARD}, {_GIVEN}) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


class _BackwardArgs(ctypes.Structure):
    """``BackwardArgs`` of `common.hpp`, member by member."""

    _fields_ = (
        ("a", Args),
        *((name, Operand) for name in ("grad", "result", "rest", "lse_grad")),
        ("statistics", ctypes.c_void_p),
        *((name, Operand) for name in ("dq", "dk", "dv")),
        ("sink_rows", ctypes.c_void_p),
        ("summed", Operand * (1 + MOST_CAPTURED)),
    )


def statistics_like(query: Tensor) -> Tensor:
    """The memory of what the backward needs of a row: (B, H, L, 2)."""
    statistics: Tensor = query.new_empty((*query.shape[:3], 2), dtype=torch.float32)
    return statistics


def rest_like(query: Tensor, value: Tensor) -> Tensor:
    """The memory of what rounding takes from a result in half precision; nothing in float32."""
    return query.new_empty(0) if query.dtype == torch.float32 else result_like(query, value)


def gradient_like(name: str, by_name: dict[str, Any]) -> Tensor:
    """The memory of a gradient: of an operand heads after positions, of all else dense.

    ``name`` is an argument's; of captured tensor 2 it is "captured2". A sink's has a number for each row, which is
    still to be summed up where it is one for several.
    """
    query: Tensor = by_name["query"]
    if name == "sink":
        return torch.empty((*query.shape[:3], 1), dtype=torch.float32, device=query.device)
    if name in _OPERANDS:
        batch, heads, length, dim = by_name[name].shape
        return torch.empty((batch, length, heads, dim), dtype=query.dtype, device=query.device).transpose(1, 2)
    of = by_name["captured"][int(name[8:])] if name.startswith("captured") else by_name[name]
    return torch.empty(of.shape, dtype=of.dtype, device=of.device)


def _call(*values: Any) -> dict[str, Any]:
    return dict(zip(NAMES, values, strict=False))


def _forward(*values: Any, **more: Any) -> tuple[Tensor, ...]:
    by_name = _call(*values) | more
    query, key, value, scale = (by_name.pop(name) for name in NAMES[:4])
    check_eagerly(query, key, value, by_name)
    lse, statistics = lse_like(query), statistics_like(query)
    rest = rest_like(query, value)
    if value.numel() == 0 or key.numel() == 0:
        statistics.zero_()
    by_name["rest"] = rest if rest.numel() else None
    return attention(query, key, value, scale, lse=lse, statistics=statistics, **by_name), lse, statistics, rest


def _forward_fake(*values: Any, **more: Any) -> tuple[Tensor, ...]:
    by_name = _call(*values) | more
    query, key, value = (by_name.pop(name) for name in _OPERANDS)
    check(query, key, value, by_name)
    return result_like(query, value), lse_like(query), statistics_like(query), rest_like(query, value)


def _backward(
    grad: Tensor,
    lse_grad: Tensor | None,
    result: Tensor,
    statistics: Tensor,
    rest: Tensor,
    wanted: Sequence[str],
    *values: Any,
    **more: Any,
) -> list[Tensor]:
    by_name = _call(*values) | more
    outputs = {name: gradient_like(name, by_name) for name in wanted}
    query, key = (by_name[name] for name in _OPERANDS[:2])
    if 0 in (*query.shape[:3], *key.shape[:3]):
        return [x.zero_() for x in outputs.values()]
    grad, statistics = grad.to(query.dtype), statistics.contiguous()  # by names: the arguments hold addresses
    args = _BackwardArgs(
        a=arguments(**by_name),
        grad=operand(grad, result.shape),
        result=operand(result, result.shape),
        rest=operand(rest if rest.numel() else None, result.shape),
        lse_grad=operand(None if lse_grad is None else lse_grad.unsqueeze(-1), (*result.shape[:3], 1)),
        statistics=statistics.data_ptr(),
        dq=_output(outputs.get("query")),
        dk=_output(outputs.get("key")),
        dv=_output(outputs.get("value")),
        sink_rows=outputs["sink"].data_ptr() if "sink" in outputs else None,
        summed=(Operand * (1 + MOST_CAPTURED))(
            _summed_over_rows(outputs["distances"]) if "distances" in outputs else _summed(outputs.get("bias")),
            *(_summed(outputs.get(f"captured{n}")) for n in range(MOST_CAPTURED)),
        ),
    )
    entry(query.dtype, by_name.get("score", ""), BACKWARD)(ctypes.byref(args))
    return list(outputs.values())


def _backward_fake(*left: Any, **more: Any) -> list[Tensor]:
    *_, wanted = left[:_LEFT]
    by_name = _call(*left[_LEFT:]) | more
    return [gradient_like(name, by_name) for name in wanted]


def _output(tensor: Tensor | None) -> Operand:
    return operand(tensor, () if tensor is None else tensor.shape)


def _summed(tensor: Tensor | None) -> Operand:
    """With strides of 0 where it is broadcast."""
    if tensor is None:
        return operand(None, ())
    strides = [0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride())]
    return Operand(tensor.data_ptr(), (ctypes.c_int64 * 4)(*[0] * (4 - len(strides)), *strides))


def _summed_over_rows(distances: Tensor) -> Operand:
    """With the strides of the matrix that was added, in which every row begins one element before the row above it."""
    summed = _summed(distances)
    summed.stride[2:] = (-1, 1)
    return summed


LIBRARY.impl("attention_forward", _forward, "CPU")
LIBRARY.impl("attention_forward", _forward_fake, "Meta")
LIBRARY.impl("attention_backward", _backward, "CPU")
LIBRARY.impl("attention_backward", _backward_fake, "Meta")
FORWARD = torch.ops.attn_pass.attention_forward.default
"""The result (B, H, L, Dv), the log-sum-exp (B, H, L); for the backward what it needs of a row (B, H, L, 2), and what
rounding took from the result: nothing in float32."""
BACKWARD_OPERATOR = torch.ops.attn_pass.attention_backward.default
"""The gradients that ``wanted`` names, in its order."""


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    by_name = _call(*inputs)
    captured = by_name.pop("captured")
    tensors = {name: value for name, value in by_name.items() if isinstance(value, Tensor)}
    ctx.names = tuple(tensors)
    ctx.rest = {name: value for name, value in by_name.items() if name not in tensors}
    ctx.save_for_backward(output[0], *output[2:], *tensors.values(), *(captured or ()))
    ctx.gives_captured = captured is not None
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, grad: Tensor | None, lse_grad: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    result, statistics, rest, *tensors = ctx.saved_tensors
    by_name = dict(zip(ctx.names, tensors, strict=False)) | ctx.rest
    by_name["captured"] = tensors[len(ctx.names) :] if ctx.gives_captured else None
    needs = dict(zip(NAMES, ctx.needs_input_grad, strict=False))
    wanted = [name for name in (*_OPERANDS, "bias", "distances", "sink") if needs.get(name)]
    of_captured = needs.get("captured") or ()
    wanted += [f"captured{n}" for n, is_needed in enumerate(of_captured) if is_needed]
    if by_name["offsets"] is not None and any(name not in (*_OPERANDS, "sink") for name in wanted):
        raise NotImplementedError("beside packed rows a bias, and what a score function reads, have no gradient")
    if lse_grad is not None and by_name["sink"] is not None:
        raise NotImplementedError("beside a sink, which it does not count, the log-sum-exp has no gradient")
    if grad is None:
        grad = torch.zeros_like(result)
    values = [by_name[name] for name in NAMES]
    returned = BACKWARD_OPERATOR(grad, lse_grad, result, statistics, rest, wanted, *values)
    by_argument = dict(zip(wanted, returned, strict=True))
    if "sink" in by_argument:
        by_argument["sink"] = by_argument["sink"].sum_to_size(by_name["sink"].shape)
    gradients: list[Any] = [by_argument.get(name) for name in NAMES]
    if ctx.gives_captured:
        gradients[_NUMBER_OF_CAPTURED] = [by_argument.get(f"captured{n}") for n in range(len(by_name["captured"]))]
    return tuple(gradients[: len(needs)])  # the dispatcher drops arguments at the end that are their defaults


def _no_second_gradient(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError("derivative for attn_pass::attention_backward is not implemented: it is one itself")


torch.library.register_autograd("attn_pass::attention_forward", _gradient, setup_context=_keep, lib=LIBRARY)
torch.library.register_autograd("attn_pass::attention_backward", _no_second_gradient, lib=LIBRARY)
