"""FlashAttention-3 (Dao-AILab, the repository's ``hopper`` folder): the fastest published kernel on Hopper.

Becomes: in inference the operator that its Python registers, ``flash_attn_3::_flash_attn_forward``, on (B, L, H, D)
views without copies, in training its function ``flash_attn_func``. The kernel supports grouped heads, windows
and causal masks aligned to the last key, and soft caps (with the device's own tanh), but no ALiBi, mask tensor, dropout
or sinks. Head dims are padded with zeros to a multiple of 8, and to each other unless the kernel supports that pair.
The cost model adds 20 us per call for the Python wrapper.

    F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    ->
    flash_attn_3._flash_attn_forward(q, k, v, softmax_scale=scale, causal=True)[0]     # positions before heads

Exact because: the transposes are views, and a flag or a window stands for a mask only if the mask was proved to be
that one.

The operators below it, ``flash_attn_3::fwd`` and ``bwd``, are C++ with a stable ABI, but no graph can hold ``fwd``: its
schema says that the result aliases an argument, which torch's functionalization refuses for operators that are not its
own ("Found a custom (non-ATen) operator whose output has alias annotations", torch 2.13).

Offers if the package is installed, on CUDA devices of compute capability 9.0, in float16 and bfloat16. In training it
needs torch.compile. It is not offered for ``aot_compile``, whose packages run without Python. The tests run it over a
stand-in with the schemas and checks of hopper/flash_api_stable.cpp; it has not run on hardware.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from attn_pass.devices.cuda.cost import PYTHON_US, Shape
from attn_pass.devices.cuda.flash_attn import assumed_of_rows, imported, is_installed, refusal_of_rows
from attn_pass.devices.cuda.flash_attn_arguments import Arguments, NoForm, arguments_of
from attn_pass.devices.cuda.kernel import CudaKernel
from attn_pass.devices.cuda.libraries import LIBRARY_3
from attn_pass.devices.cuda.torch_kernel import in_vectors
from attn_pass.devices.device import Device, Shares
from attn_pass.devices.roofline import Problem
from attn_pass.graph.edit import Plan, Value, aten, fake_of
from attn_pass.model.attention import Attention
from attn_pass.targets import constraints
from attn_pass.targets.base import Offer, Refusal, Setting
from attn_pass.targets.constraints import (
    ANY_BACKEND,
    AUTOCAST,
    KNOWN_DEVICE,
    NOT_EMPTY,
    Attended,
    Constraint,
    HasAttention,
)
from attn_pass.targets.kernel_rules import padded
from attn_pass.targets.lower import Lowering
from attn_pass.targets.operands import dense_last, unbroadcast, widened
from attn_pass.targets.problem import cost_of, moved_query_bytes, problem_of

_PACKAGE = ("flash_attn_interface", "flash_attn_3")  # of its functions, and of its operators
_MODULES = ("flash_attn_interface", "flash_attn_3")  # its Python, and the package with the kernels
_WIDEST, _WIDEST_VALUE = 256, 512
_WIDEST_DETERMINISTIC = 192


@dataclass(frozen=True)
class FlashAttn3Plan:
    """What the operator is given beside its operands, and its head dims: of query and key, and of the values."""

    arguments: Arguments
    widths: tuple[int, int]


class FlashAttn3(CudaKernel):
    """`torch.ops.flash_attn_3._flash_attn_forward`."""

    name = LIBRARY_3
    takes_any_score = True
    is_listed = False
    # hopper/flash_api_stable.cpp: round_up_headdim, get_pack_gqa. It splits keys too, but under torch.compile only by a
    # number that is given with the call (hopper/flash_attn_interface.py refuses to trace its own choice).
    shape = Shape(128, (64, 96, 128, 192, 256), packs_one_row=True)
    # 1.03 times cuDNN's at head dim 128, 1.16 at 64 and 1.19 at 256 (FlashAttention-3's paper, 2k tokens).
    shares = {"hopper": Shares(0.98, narrow=0.78, wide=0.93)}

    def microseconds(self, device: Device, problem: Problem, *, growing: bool = False) -> float:
        """The kernel and the library's Python."""
        return super().microseconds(device, problem, growing=growing) + PYTHON_US

    def consider(self, attention: Attention, variant: str, setting: Setting) -> Offer[FlashAttn3Plan] | Refusal:
        """Takes what FlashAttention-3 computes, in half precision on Hopper."""
        if setting.device.kind != "cuda":
            return Refusal(self.name, f"{self.name} does not run on {setting.device.kind} devices", other_device=True)
        reason = refusal(attention, setting)
        if reason is not None:
            return Refusal(self.name, reason)
        try:
            arguments, dims = arguments_of(attention), widths(attention)
        except NoForm as no_form:
            return Refusal(self.name, str(no_form))
        reason = _refusal_of_arguments(attention, arguments, setting)
        if reason is not None:
            return Refusal(self.name, reason)
        problem = problem_of(attention, setting.hint, moved_query_bytes(attention, setting.hint))
        if dims != (attention.head_dim, attention.value_head_dim):
            problem = replace(problem, copied_bytes=problem.copied_bytes + problem.operand_bytes)
        problem = replace(problem, causal=arguments.causal, mask_elements=0, head_dim=dims[0], value_dim=dims[1])
        return Offer(
            self.name,
            variant,
            attention,
            cost_of(self.name, attention, problem, setting),
            fused=True,
            plan=FlashAttn3Plan(arguments, dims),
            assumptions=assumed_of_rows(attention, arguments, setting),
            moved=problem.moved_bytes,
        )

    def emit(self, plan: Plan, nodes: Sequence[Node], offer: Offer[FlashAttn3Plan], setting: Setting) -> Value:
        """Plans the call."""
        a, call = offer.attention, plan.call
        arguments, lower = offer.plan.arguments, Lowering(plan, nodes, a)
        query, key, value = _operands(lower, offer.plan.widths)
        if arguments.negated:  # the kernel takes the largest product before it scales
            query = call(aten.neg.default, query)
        same: dict[str, Any] = {
            "softmax_scale": arguments.scale,
            "causal": arguments.causal,
            "softcap": arguments.softcap,
        }
        out: Value
        if a.needs_grad:
            window = (arguments.left, arguments.right)
            function = imported(*_PACKAGE).flash_attn_func
            out = call(function, query, key, value, **same, window_size=window, deterministic=setting.deterministic)
        else:
            imported(*_PACKAGE)
            forward = torch.ops.flash_attn_3._flash_attn_forward.default
            sides = {"window_size_left": arguments.left, "window_size_right": arguments.right}
            out = call(operator.getitem, call(forward, query, key, value, **same, **sides), 0)
        out = call(aten.transpose.int, out, 1, 2)
        if fake_of(out).shape[-1] != a.value_head_dim:
            out = call(aten.slice.Tensor, out, 3, 0, a.value_head_dim)
        return lower.result(out)


# ---------------------------------------------------------------- what it takes


def refusal(a: Attention, setting: Setting) -> str | None:
    """The first reason why it does not take a case; None if it does."""
    return constraints.refusal(CONSTRAINTS, Attended(a, setting))


def widths(a: Attention) -> tuple[int, int]:
    """The head dims of the call, of query and key and of the values. Raises `NoForm`: the kernel has none for them."""
    own, value = padded(a.head_dim, 8), padded(a.value_head_dim, 8)
    none = NoForm(f"flash_attn_3 has no kernel for head dims {a.head_dim} and {a.value_head_dim}")
    if not own or not value:
        raise none
    if not a.needs_grad and ((128 < own <= 192 and 96 < value <= 128) or (own <= 64 and value <= _WIDEST_VALUE)):
        return own, value
    widest = max(own, value)
    if widest > _WIDEST:
        raise none
    return widest, widest


def _has_widths(a: Attention) -> bool:
    try:
        widths(a)
    except NoForm:
        return False
    return True


def _refusal_of_arguments(a: Attention, arguments: Arguments, setting: Setting) -> str | None:
    if arguments.slopes is not None:
        return "flash_attn_3 takes no ALiBi slopes"  # flash_api_stable.cpp: the schema of fwd has none
    return refusal_of_rows(a, arguments, setting, LIBRARY_3)


def _needs_no_wide_gradient(a: Attention, setting: Setting) -> bool:
    if not (a.needs_grad and setting.deterministic) or not _has_widths(a):
        return True
    return max(widths(a)) <= _WIDEST_DETERMINISTIC


_API = "hopper/flash_api_stable.cpp"
_PYTHON = "hopper/flash_attn_interface.py"
CONSTRAINTS: tuple[Constraint[HasAttention], ...] = (
    KNOWN_DEVICE.written_in("AMD's"),
    Constraint(
        "compute capability",
        lambda c: "flash_attn_3 is for compute capability 9.0 (Hopper), and this device has {}.{}".format(
            *c.setting.device.capability
        ),
        lambda c: c.setting.device.capability == (9, 0),
        "hopper/setup.py builds for 8.0 and 9.0a; on 8.0 the kernel is FlashAttention-2's",
    ),
    Constraint(
        "package",
        "FlashAttention-3 (flash_attn_interface) is not installed with its kernels",
        lambda c: all(is_installed(name) for name in _MODULES),
        f"{_PYTHON}: import flash_attn_3._C",
    ),
    Constraint(
        "program",
        "flash_attn_3's operator is written in Python, and a compiled package runs without; the one in C++ has a "
        "schema that no graph can hold",
        lambda c: c.setting.program != "aoti",
        f"{_API}: fwd -> (Tensor(out!), ...)",
    ),
    Constraint(
        "gradient",
        "flash_attn_3's gradient is in its autograd function, which an exported program cannot hold",
        lambda c: not c.setting.may_be_trained(c.attention) or c.setting.program == "compile",
        f"{_PYTHON}: FlashAttnFunc",
    ),
    Constraint(
        "dropout and sinks",
        "flash_attn_3 has no dropout and takes no sink",
        lambda c: not c.attention.dropout and c.attention.sink is None,
        f"{_API}: p_dropout = 0",
    ),
    Constraint(
        "dtype",
        "flash_attn_3 takes half precision only",
        lambda c: c.attention.compute_dtype in (torch.float16, torch.bfloat16),
        f"{_API}: only supports fp16, bf16, and fp8_e4m3 data type",
    ),
    AUTOCAST,
    ANY_BACKEND,
    Constraint(
        "head dim",
        lambda c: f"flash_attn_3 has no kernel for head dims {c.attention.head_dim} and {c.attention.value_head_dim}",
        lambda c: _has_widths(c.attention),
        f"{_API}: get_max_headdim; If V headdim is different from Q/K dim, we only support ...",
    ),
    Constraint(
        "deterministic",
        f"flash_attn_3's deterministic backward is for head dims up to {_WIDEST_DETERMINISTIC}",
        lambda c: _needs_no_wide_gradient(c.attention, c.setting),
        f"{_API}: Deterministic backward not supported for hdim 256",
    ),
    replace(NOT_EMPTY, source=f"{_API}: total_q > 0 && total_k > 0"),
)


# ---------------------------------------------------------------- emission


def _operands(lower: Lowering, dims: tuple[int, int]) -> tuple[Value, Value, Value]:
    """Query, key and value (B, L or S, H, D), as views where they lie as the kernel's loads of 16 bytes ask."""
    plan, dtype = lower.plan, lower.attention.compute_dtype
    heads_first = []
    for operand, dim in zip((lower.query(dtype), lower.key(dtype), lower.value(dtype)), (dims[0], dims[0], dims[1])):
        laid_out = in_vectors(plan, unbroadcast(plan, dense_last(plan, widened(plan, operand, dim))))
        heads_first.append(plan.call(aten.transpose.int, laid_out, 1, 2))
    query, key, value = heads_first
    return query, key, value


KERNEL = FlashAttn3()
