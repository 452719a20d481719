"""What Ascend's attention operators ask for, one row a rule, with its reason; and which of them torch's own call takes.

The numbers are in ``limits.py``. Nothing of torch_npu is imported.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attn_pass.devices.device import Device
from attn_pass.devices.npu.generations import GENERATIONS, INFERENCE, TRAINING, TRAINING_V1, UNKNOWN
from attn_pass.devices.npu.limits import (
    GROUP,
    HALF,
    HEADS,
    HIDDEN,
    KEYS_OF_ONE_ROW,
    LIMITS,
    WIDEST,
    Limits,
)
from attn_pass.model.attention import AsWritten, Attention
from attn_pass.model.dtype_name import dtype_name
from attn_pass.model.expression import loads
from attn_pass.model.index import Index, is_less, product
from attn_pass.targets import constraints
from attn_pass.targets.base import Setting
from attn_pass.targets.constraints import (
    AFFINE,
    AUTOCAST,
    NOT_EMPTY,
    RANDOM_NUMBERS,
    STRICT_ROWS,
    Constraint,
    backend,
    too_wide,
    trained_export,
)

FUSION = (TRAINING, TRAINING_V1)


@dataclass(frozen=True)
class Case:
    """What a rule looks at."""

    attention: Attention
    setting: Setting
    operator: str

    @property
    def limits(self) -> Limits:
        """What the operator takes."""
        return LIMITS[self.operator]


@dataclass(frozen=True)
class NpuRule(Constraint[Case]):
    """What these of the operators ask for."""

    of: tuple[str, ...] = (INFERENCE, *FUSION)


def multiple(operator: str, dtype: torch.dtype) -> int:
    """What a head dim has to be a multiple of: in inference 32 bytes, in float32 what torch_npu's dispatch asks."""
    return 16 if operator == INFERENCE else 4 if dtype == torch.float32 else 1


def width(a: Attention, operator: str) -> int | None:
    """The head dim of a call, one for all operands; None where one is not known."""
    step = multiple(operator, a.compute_dtype)
    dims = (a.head_dim, a.value_head_dim)
    return -(-max(d for d in dims if isinstance(d, int)) // step) * step if _known(*dims) else None


def merged_fits(a: Attention, operator: str) -> bool:
    """Whether positions may lie before heads."""
    heads, dim = a.query_heads, width(a, operator)
    return operator != INFERENCE or (isinstance(heads, int) and dim is not None and heads * dim < HIDDEN)


def has_many_rows(a: Attention, setting: Setting) -> bool:
    """Whether there are certainly two query rows or more.

    torch.export assumes that an unknown length is at least 2, but its programs also run with 1.
    """
    if isinstance(a.q_len, int):
        return a.q_len > 1
    return is_less(1 if setting.program == "compile" else 2, a.q_len)


def _known(*sizes: Index) -> bool:
    return all(isinstance(n, int) for n in sizes)


def _kv_heads(a: Attention) -> Index:
    return product(axis.size for axis in a.kv_heads)


def _mask_needs_grad(a: Attention) -> bool:
    parts = a.mask.parts()
    return a.needs_grad and any(a.sources[load.source].needs_grad for e in parts for load in loads(e))


RULES: tuple[Constraint[Case], ...] = (
    AFFINE,
    NpuRule("sink", "sinks are not used before they have been tested on hardware", lambda c: c.attention.sink is None),
    NpuRule(
        "gradient",
        "the inference operator has no gradient",
        lambda c: not c.attention.needs_grad,
        of=(INFERENCE,),
    ),
    NpuRule(
        "gradient in an export",
        trained_export("the inference operator"),
        lambda c: not c.setting.may_need_grad,
        of=(INFERENCE,),
    ),
    NpuRule(
        "dtype",
        lambda c: f"{dtype_name(c.attention.compute_dtype)}: the inference operator takes half precision",
        lambda c: c.attention.compute_dtype in HALF,
        of=(INFERENCE,),
    ),
    NpuRule(
        "dtype",
        lambda c: f"{dtype_name(c.attention.compute_dtype)} has no fused operator",
        lambda c: c.attention.compute_dtype in (torch.float32, *HALF),
    ),
    AUTOCAST,
    backend("FLASH_ATTENTION"),
    NpuRule("dropout", "the inference operator has no dropout", lambda c: not c.attention.dropout, of=(INFERENCE,)),
    NpuRule(
        "dropout",
        lambda c: f"dropout {c.attention.dropout:g} keeps nothing, which keep_prob cannot express",
        lambda c: 0 <= c.attention.dropout < 1,
    ),
    RANDOM_NUMBERS,
    NpuRule(
        "seed",
        "the seed of this family's operator is a number, which a compiled graph would keep",
        lambda c: not c.attention.dropout,
        of=(TRAINING_V1,),
    ),
    NpuRule(
        "compiler",
        "torch_npu's Inductor puts npu_fusion_attention_v3 in its place, which raises on this device",
        lambda c: c.setting.runner not in ("inductor", "hook"),
        of=(TRAINING_V1,),
    ),
    NpuRule(
        "checkpoint",
        "its dropout in a checkpoint: no compiler knows that the operator draws random numbers, so the backward "
        "would draw others",
        lambda c: not (c.attention.dropout and c.setting.is_recomputed),
        of=FUSION,
    ),
    NpuRule(
        "equal calls",
        "another site may draw dropout over the same tensors: no compiler knows that the operator draws random "
        "numbers, so it would draw once for both",
        lambda c: not c.setting.may_be_merged_by_cse,
        of=FUSION,
    ),
    NpuRule(
        "deterministic",
        "deterministic algorithms are requested, and whether its gradient is deterministic is not known",
        lambda c: not (c.attention.needs_grad and c.setting.deterministic and not c.setting.fused_as_written),
        of=FUSION,
    ),
    NOT_EMPTY,
    NpuRule(
        "heads",
        "the number of heads is not known",
        lambda c: _known(c.attention.query_heads, _kv_heads(c.attention)),
    ),
    NpuRule(
        "heads",
        lambda c: f"{c.attention.query_heads} heads are over {HEADS}",
        lambda c: c.setting.hint(c.attention.query_heads) <= HEADS,
    ),
    NpuRule(
        "heads of a group",
        lambda c: f"{c.attention.groups} heads share a KV head, over {GROUP}",
        lambda c: c.setting.hint(c.attention.groups) <= GROUP,
        of=(INFERENCE,),
    ),
    NpuRule(
        "head dim",
        too_wide(WIDEST),
        lambda c: (width(c.attention, c.operator) or WIDEST + 1) <= WIDEST,
    ),
    NpuRule(
        "batch",
        lambda c: f"a batch of {c.attention.batch_size} is over {c.limits.batch}",
        lambda c: c.setting.hint(c.attention.batch_size) <= c.limits.batch,
    ),
    NpuRule(
        "length",
        lambda c: f"a length is over {c.limits.length}",
        lambda c: max(map(c.setting.hint, (c.attention.q_len, c.attention.kv_len))) <= c.limits.length,
    ),
    NpuRule(
        "rows",
        "whether there is one query row or more is not known, and for one row the mask means something else",
        lambda c: c.attention.mask.is_none or c.attention.q_len == 1 or has_many_rows(c.attention, c.setting),
        of=(INFERENCE,),
    ),
    NpuRule(
        "keys of one row",
        lambda c: f"{c.attention.kv_len} keys of one query row are over {KEYS_OF_ONE_ROW}",
        lambda c: c.attention.q_len != 1 or c.setting.hint(c.attention.kv_len) <= KEYS_OF_ONE_ROW,
        of=(INFERENCE,),
    ),
    NpuRule(
        "gradient of the mask",
        "the mask needs a gradient, which the operator does not give",
        lambda c: not _mask_needs_grad(c.attention),
    ),
    NpuRule(
        "scale", "the scale is 0, and there is a mask", lambda c: c.attention.scale != 0 or c.attention.mask.is_none
    ),
    NpuRule(
        "numerics",
        STRICT_ROWS,
        lambda c: (
            c.setting.numerics != "strict"
            or c.attention.mask.never_empty
            or c.attention.mask.is_none
            or not c.attention.empty_row_is_nan
        ),
    ),
)


def refusal(case: Case) -> str | None:
    """The first reason why an operator does not take an attention, its mask aside; None if it does."""
    applicable = (rule for rule in RULES if not isinstance(rule, NpuRule) or case.operator in rule.of)
    return constraints.refusal(applicable, case)


# ---------------------------------------------------------------- torch's own call


@dataclass(frozen=True)
class DispatchedCall:
    """A call of ``scaled_dot_product_attention``, as torch_npu's dispatch looks at it; ``mask`` as `AsWritten` has."""

    dtype: torch.dtype
    rank: int
    heads: int
    kv_heads: int
    dims: tuple[int, int, int]  # of query, key and value
    mask: str = "none"


def dispatched(call: DispatchedCall, family: str) -> str:
    """The operator torch_npu's ``scaled_dot_product_attention`` ends in on a family; empty for the unfused form."""
    stock = next((known.stock for known in GENERATIONS if known.name == (family or UNKNOWN)), "")
    accepted = (
        call.dtype in (torch.float32, *HALF)
        and not (call.dtype == torch.float32 and any(d % 4 for d in call.dims))
        and call.mask in ("none", "boolean")
        and call.rank == 4
        and max(call.heads, call.kv_heads) <= 2048
        and call.dims[0] <= WIDEST
        and call.heads % call.kv_heads == 0
    )
    return stock if accepted else ""


def stock_operator(a: Attention, written: AsWritten, device: Device) -> str | None:
    """The operator that runs if nothing is done to a call of torch's; None where none does."""
    sizes = (a.query_heads, _kv_heads(a), a.head_dim, a.value_head_dim)
    if not written.plain or not _known(*sizes):
        return None
    heads, kv_heads, dim, value_dim = (n for n in sizes if isinstance(n, int))
    call = DispatchedCall(a.compute_dtype, 4, heads, kv_heads, (dim, dim, value_dim), written.mask)
    return dispatched(call, device.generation) or None
