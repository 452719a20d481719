"""Turns an attention into the plain numbers that the cost model takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from attn_pass.devices.registry import family_of
from attn_pass.devices.roofline import Problem
from attn_pass.model.attention import Attention
from attn_pass.model.expression import Expr, Load, expression_axes, loads
from attn_pass.model.index import Axis, Index, axes, product
from attn_pass.targets.base import Setting
from attn_pass.targets.constraints import not_measured


def problem_of(attention: Attention, hint: Callable[[Index], int], copied_bytes: int = 0) -> Problem:
    """The sizes of an attention; symbolic ones at their hint."""
    shared = set(attention.shared_axes)
    own = [a for a in attention.batch if a not in shared]
    return Problem(
        batch=hint(attention.batch_size),
        heads=hint(attention.query_heads),
        kv_batch=hint(product(a.size for a in own)),
        kv_heads=hint(product(a.size for a in attention.kv_heads)),
        q_len=hint(attention.q_len),
        kv_len=hint(attention.kv_len),
        head_dim=hint(attention.head_dim),
        value_dim=hint(attention.value_head_dim),
        dtype=attention.compute_dtype,
        mask_elements=mask_elements(attention, hint),
        mask_bytes=attention.compute_dtype.itemsize,
        copied_bytes=copied_bytes,
    )


def cost_of(kernel: str, attention: Attention, problem: Problem, setting: Setting) -> float:
    """Microseconds one of torch's fused kernels, or a library's, takes on the setting's device."""
    return family_of(setting.device).kernel_cost(kernel, attention, problem, setting)


def mask_elements(attention: Attention, hint: Callable[[Index], int]) -> int:
    """Elements of the mask as it would lie in memory: broadcast axes count once."""
    parts = attention.mask.parts()
    used = {axis for part in parts for axis in _axes_of(part)}
    if used & set(attention.rows):
        used |= set(attention.rows)  # rows are merged, so a mask that varies along one is repeated along the others
    return hint(product(a.size for a in used)) if parts else 0


def mask_bytes_read(attention: Attention, hint: Callable[[Index], int]) -> int:
    """Bytes of the tensors that bias and mask read, each once; none where positions alone say what is kept."""
    return bytes_of(attention, (load for part in attention.mask.parts() for load in loads(part)), hint)


def bytes_of(attention: Attention, read: Iterable[Load], hint: Callable[[Index], int]) -> int:
    """Bytes of the tensors that are read, each once and whole."""
    sources = [attention.sources[n] for n in {load.source for load in read}]
    return sum(hint(product(s.shape)) * s.dtype.itemsize for s in sources)


def _axes_of(expression: Expr | None) -> set[Axis]:
    return set() if expression is None else expression_axes(expression)


def moved_query_bytes(attention: Attention, hint: Callable[[Index], int]) -> int:
    """Bytes of query and result to copy when several row axes do not lie next to each other in memory."""
    real = [a for a in attention.rows if a.size != 1]
    if len(real) < 2:
        return 0
    outer = [a for a in attention.batch + attention.heads if a.size != 1]
    if _lies_in_order(attention.query, [*outer, *real]):
        return 0
    rows = hint(product(a.size for a in (*outer, *real)))
    return rows * hint(attention.head_dim + attention.value_head_dim) * attention.compute_dtype.itemsize


def _lies_in_order(load: Load, order: list[Axis]) -> bool:
    """Whether the axes occur in the load's dimensions in the order given, slowest first."""
    in_order = [a for index in load.index for a in order if a in axes(index)]
    return in_order == order


def serves(form: str, setting: Setting) -> bool:
    """Whether a form of torch's call, or of products, is one for the setting's device."""
    return form in family_of(setting.device).forms


def not_served(setting: Setting) -> str:
    """Why a form that is none for the setting's device is refused there."""
    device = setting.device
    if family_of(device).is_runtime:
        return f"programs for {device.name} get one attention operator, and this form is another"
    return not_measured(device)
