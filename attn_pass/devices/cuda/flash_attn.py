"""The library flash-attn (Dao-AILab, 2.7 and newer): FlashAttention-2 with soft caps, ALiBi, windows.

This is the kernel that torch's own flash attention is built from, with features that torch leaves out: soft caps (with
the device's own tanh, right to 2^-11), ALiBi slopes, sliding windows, and causal masks aligned to the last key.

Becomes: in inference the operator that the library registers, ``flash_attn::_flash_attn_forward``, on (B, L, H, D)
views, in training its function ``flash_attn_func``. Head dims that differ or are not multiples of 8 are padded with
zeros. The cost model adds 20 us per call for the Python wrapper, so torch's own kernels win where they can do the same.

    (torch.tanh(q @ k.mT * scale / cap) * cap).softmax(-1) @ v
    ->
    flash_attn._flash_attn_forward(q, k, v, 0.0, scale, causal=False, softcap=cap)[0]  # positions before heads

Exact because: an argument is given only if the expression that was read is the one that the kernel computes with it:
the cap of a tanh, a slope times the distance from the key to the row, the bounds of a window. The tanh is an
approximation, which the report lists.

Offers if the package is installed with its kernels, on CUDA devices of compute capability 8.0 and newer, in float16 and
bfloat16. In training it needs torch.compile, and slopes that are not learned. It is not offered for ``aot_compile``,
whose packages run without Python. The tests run the package over a stand-in for its kernels; nothing was measured.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch.fx import Node

from attn_pass.devices.cuda import flash
from attn_pass.devices.cuda.cost import PYTHON_US
from attn_pass.devices.cuda.flash_attn_arguments import Arguments, NoForm, arguments_of
from attn_pass.devices.cuda.kernel import CudaKernel
from attn_pass.devices.cuda.libraries import LIBRARY
from attn_pass.devices.cuda.torch_kernel import in_vectors
from attn_pass.devices.device import Device
from attn_pass.devices.roofline import Problem
from attn_pass.errors import RewriteError
from attn_pass.graph.edit import Plan, Value, aten, fake_of
from attn_pass.model.attention import Attention
from attn_pass.model.expression import Expr, expression_axes, loads
from attn_pass.targets.base import EMPTY_ROWS, NONEMPTY_ROWS, Offer, Refusal, Setting
from attn_pass.targets.constraints import (
    ANY_BACKEND,
    AUTOCAST,
    KNOWN_DEVICE,
    NOT_EMPTY,
    PYTHON,
    STRICT_ROWS,
    Attended,
    Constraint,
    HasAttention,
    refusal,
    too_wide,
)
from attn_pass.targets.kernel_rules import HALF, known_or, padded
from attn_pass.targets.lower import Lowering
from attn_pass.targets.operands import dense_last, widened
from attn_pass.targets.problem import cost_of, moved_query_bytes, problem_of

_PACKAGE = ("flash_attn.flash_attn_interface", "flash_attn")  # of its functions, and of its operators
_MODULES = ("flash_attn", "flash_attn_2_cuda")  # the package, and the kernels it was built with
_WIDEST = 256


@dataclass(frozen=True)
class FlashAttnPlan:
    """What the operator is given beside its operands, and the one head dim of all of them."""

    arguments: Arguments
    width: int


class FlashAttn(CudaKernel):
    """`torch.ops.flash_attn._flash_attn_forward`."""

    name = LIBRARY
    takes_any_score = True
    is_listed = False
    package = ("flash-attn", "the target flash_attn, and its calls", "pip install flash-attn --no-build-isolation")

    def microseconds(self, device: Device, problem: Problem, *, growing: bool = False) -> float:
        """That of torch's flash kernel, which is the same, and the library's Python."""
        return flash.KERNEL.microseconds(device, problem, growing=growing) + PYTHON_US

    def consider(self, attention: Attention, variant: str, setting: Setting) -> Offer[FlashAttnPlan] | Refusal:
        """Takes what FlashAttention-2 can compute, in half precision, without gradients."""
        reason = refusal(CONSTRAINTS, Attended(attention, setting))
        if reason is not None:
            return Refusal(self.name, reason, other_device=setting.device.kind != "cuda")
        try:
            arguments = arguments_of(attention)
        except NoForm as no_form:
            return Refusal(self.name, str(no_form))
        reason = refusal_of_rows(attention, arguments, setting) or _refusal_of_slopes(attention, arguments)
        if reason is not None:
            return Refusal(self.name, reason)
        assumptions = assumed_of_rows(attention, arguments, setting)
        decided = FlashAttnPlan(arguments, _width(attention))
        problem = _problem(attention, decided, setting)
        return Offer(
            self.name,
            variant,
            attention,
            cost_of(self.name, attention, problem, setting),
            fused=True,
            plan=decided,
            assumptions=assumptions,
            moved=problem.moved_bytes,
        )

    def emit(self, plan: Plan, nodes: Sequence[Node], offer: Offer[FlashAttnPlan], setting: Setting) -> Value:
        """Plans the call."""
        a, call = offer.attention, plan.call
        arguments, width = offer.plan.arguments, offer.plan.width
        lower = Lowering(plan, nodes, a)
        query, key, value = _operands(lower, width)
        if arguments.negated:  # the kernel takes the largest product before it scales
            query = call(aten.neg.default, query)
        slopes = None if arguments.slopes is None else _slopes(lower, arguments.slopes)
        out: Value
        if a.needs_grad:
            out = call(
                _function(),
                *(query, key, value),
                softmax_scale=arguments.scale,
                causal=arguments.causal,
                window_size=(arguments.left, arguments.right),
                softcap=arguments.softcap,
                alibi_slopes=slopes,
                deterministic=setting.deterministic,
            )
        else:
            results = call(
                _operator(),
                *(query, key, value),
                0.0,
                arguments.scale,
                causal=arguments.causal,
                window_size_left=arguments.left,
                window_size_right=arguments.right,
                softcap=arguments.softcap,
                alibi_slopes=slopes,
                return_softmax=False,
            )
            out = call(operator.getitem, results, 0)
        out = call(aten.transpose.int, out, 1, 2)
        if width != a.value_head_dim:
            out = call(aten.slice.Tensor, out, 3, 0, a.value_head_dim)
        return lower.result(out)


def _problem(a: Attention, decided: FlashAttnPlan, setting: Setting) -> Problem:
    copied = moved_query_bytes(a, setting.hint)
    problem = problem_of(a, setting.hint, copied)
    width = decided.width
    if (a.head_dim, a.value_head_dim) != (width, width):
        copied += problem.operand_bytes
    problem = replace(problem, copied_bytes=copied, head_dim=width, value_dim=width)
    return replace(problem, causal=decided.arguments.causal, mask_elements=0)


CONSTRAINTS: tuple[Constraint[HasAttention], ...] = (
    Constraint(
        "device",
        lambda c: f"flash_attn does not run on {c.setting.device.kind} devices",
        lambda c: c.setting.device.kind == "cuda",
    ),
    KNOWN_DEVICE,
    Constraint(
        "compute capability",
        "flash_attn needs compute capability 8.0",
        lambda c: c.setting.device.capability >= (8, 0),
    ),
    Constraint(
        "package",
        "flash_attn is not installed with its kernels",
        lambda c: all(is_installed(name) for name in _MODULES),
    ),
    PYTHON,
    Constraint(
        "gradient",
        "flash_attn's gradient is in its autograd function, which an exported program cannot hold",
        lambda c: not c.setting.may_be_trained(c.attention) or c.setting.program == "compile",
    ),
    Constraint(
        "dropout and sinks",
        "attn_pass passes flash_attn no dropout, and it takes no sink",
        lambda c: not c.attention.dropout and c.attention.sink is None,
    ),
    Constraint("dtype", "flash_attn takes half precision only", lambda c: c.attention.compute_dtype in HALF),
    AUTOCAST,
    ANY_BACKEND,
    Constraint(
        "head dim",
        too_wide(_WIDEST),
        lambda c: all(0 < known_or(d, 0) <= _WIDEST for d in (c.attention.head_dim, c.attention.value_head_dim)),
    ),
    NOT_EMPTY,
)


def assumed_of_rows(a: Attention, arguments: Arguments, setting: Setting) -> tuple[str, ...]:
    """What is assumed of rows that may be fully masked, for which the kernels give 0."""
    if arguments.rows_never_empty:
        return ()
    if setting.assume_nonempty_rows:
        return (NONEMPTY_ROWS,)
    return (EMPTY_ROWS,) if a.empty_row_is_nan else ()


def refusal_of_rows(a: Attention, arguments: Arguments, setting: Setting, kernel: str = LIBRARY) -> str | None:
    """Why such rows keep the site from a kernel that gives 0 for them."""
    if arguments.rows_never_empty or setting.assume_nonempty_rows:
        return None
    if setting.numerics == "strict" and (a.empty_row_is_nan or arguments.finite_fill):
        return STRICT_ROWS
    if arguments.finite_fill:
        return f"a row may be fully masked by a finite number, which gives the mean of the values, and 0 in {kernel}"
    return None


def _refusal_of_slopes(a: Attention, arguments: Arguments) -> str | None:
    learned = () if arguments.slopes is None else loads(arguments.slopes)
    if a.needs_grad and any(a.sources[load.source].needs_grad for load in learned):
        return "the slopes need a gradient, which flash_attn does not give"
    return None


def is_installed(name: str) -> bool:
    """Whether a module can be found; of one in a package, the package is imported."""
    try:
        return find_spec(name) is not None
    except ImportError:  # there is no such package, or it fails
        return False
    except ValueError:  # imported, by something that is not an importer
        return True


def _operator() -> Any:
    """The operator, registered by importing the package."""
    imported(*_PACKAGE)
    return torch.ops.flash_attn._flash_attn_forward.default


def _function() -> Any:
    """``flash_attn_func``: AOTAutograd traces the autograd function in it as it does a program's own."""
    return imported(*_PACKAGE).flash_attn_func


def imported(module: str, library: str) -> Any:
    """A package's functions, importing which registers its operators in ``torch.ops.<library>``.

    Raises `RewriteError` where it is another version than the one its operator is from, or cannot be imported.
    """
    try:
        package = importlib.import_module(module)
        assert getattr(torch.ops, library)._flash_attn_forward.default is not None
    except (ImportError, AttributeError, RuntimeError) as error:
        raise RewriteError(f"{module} is installed and cannot be used: {error}") from error
    return package


def _width(a: Attention) -> int:
    """The head dim of the call: one for all operands, a multiple of 8."""
    return max(padded(dim, 8) or 0 for dim in (a.head_dim, a.value_head_dim))


def _operands(lower: Lowering, width: int) -> tuple[Value, Value, Value]:
    """Query, key and value (B, L or S, H, D), as views where no head dim is padded."""
    plan, dtype = lower.plan, lower.attention.compute_dtype
    heads_first = (lower.query(dtype), lower.key(dtype), lower.value(dtype))
    query, key, value = (
        plan.call(aten.transpose.int, in_vectors(plan, dense_last(plan, widened(plan, x, width))), 1, 2)
        for x in heads_first
    )
    return query, key, value


def _slopes(lower: Lowering, expression: Expr) -> Value:
    """The slopes in float32, dense: (H,), or (B, H) where they differ along the batch."""
    plan, a = lower.plan, lower.attention
    groups = [a.heads]
    if expression_axes(expression) & set(a.batch):
        groups = [a.batch, a.heads]
    slopes = lower.expression(expression, groups)
    if fake_of(slopes).dtype != torch.float32:
        slopes = plan.call(aten.to.dtype, slopes, torch.float32)
    sizes = [plan.size(n) for n in ((a.batch_size, a.query_heads)[2 - len(groups) :])]
    return plan.call(aten.contiguous.default, plan.call(aten.expand.default, slopes, sizes))


KERNEL = FlashAttn()
