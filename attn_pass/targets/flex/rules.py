"""The constraints of FlexAttention, device by device: one rule per row, with its reason; and when it splits the keys.

CPU: torch/_inductor/kernel/flex/flex_cpu.py and faults seen in torch 2.13.0. CUDA: flex_attention.py, flex_decoding.py
beside it and torch/_higher_order_ops/flex_attention.py, torch 2.11 to 2.13, read and not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from attn_pass.compat import TORCH_VERSION, inductor_vector_floats
from attn_pass.model.attention import Attention
from attn_pass.model.dtype_name import dtype_name
from attn_pass.model.expression import Apply, Const, Expr, Load, loads, walk
from attn_pass.model.index import Axis, Index, axes, is_less, is_nonnegative, product
from attn_pass.targets import constraints
from attn_pass.targets.base import Setting
from attn_pass.targets.constraints import ANY_BACKEND, AUTOCAST, MAY_BE_EMPTY, STRICT_ROWS, Constraint, sizes_of
from attn_pass.targets.empty_rows import MASKING
from attn_pass.targets.flex.score import Function, amplifies, outgrows_float32, template_name
from attn_pass.targets.masks import mask_kind
from attn_pass.targets.problem import not_served
from attn_pass.targets.sdpa import Sdpa

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MINIMUM = {"cpp": (2, 13), "triton": (2, 11)}  # earlier templates were not tried
_SMALLEST_DIM, _LARGEST_DIM = 16, 256  # of a product in Triton; of what Inductor has block sizes for
_GRID = 65535  # of batch entries or heads: the second and third dimension of a CUDA grid


@dataclass(frozen=True)
class Case:
    """An attention as the template would get it."""

    attention: Attention
    setting: Setting
    function: Function


FlexRule = Constraint[Case]


def refusal(case: Case) -> str | None:
    """The first reason why FlexAttention does not take a case; None if it does."""
    return constraints.refusal(RULES.get(template_name(case.setting), ELSEWHERE), case)


# ---------------------------------------------------------------- rules of every device

_ANY_SCORE = FlexRule(
    "scores",
    lambda c: "the scores are a scale, a bias and a mask, which need no score function",
    lambda c: bool(c.attention.not_affine),
)
_UNKNOWN_DEVICE = FlexRule("device", lambda c: not_served(c.setting), lambda c: False)
_VERSION = FlexRule(
    "torch",
    lambda c: f"FlexAttention on {_on(c)} needs torch {'.'.join(map(str, _minimum(c)))} or newer",
    lambda c: _minimum(c) <= TORCH_VERSION,
)
_DTYPE = FlexRule(
    "dtype",
    lambda c: f"FlexAttention takes no {dtype_name(c.attention.compute_dtype)} on {_on(c)}",
    lambda c: c.attention.compute_dtype in _DTYPES,
)
_SINK = FlexRule("sink", lambda c: "no target computes a sink beside such scores", lambda c: c.attention.sink is None)
_DROPOUT = FlexRule(
    "dropout",
    lambda c: f"dropout {c.attention.dropout:g}: FlexAttention has no dropout",
    lambda c: not c.attention.dropout,
)
_STATIC_HEADS = FlexRule(
    "known heads",
    # C++ errors in torch 2.13.0; tiles and splits of the Triton templates are numbers
    lambda c: "the number of heads or a head dim is not known",
    lambda c: all(isinstance(n, int) for n in _heads_and_dims(c.attention)),
)
_SIZES = FlexRule(
    "sizes",
    lambda c: MAY_BE_EMPTY,
    lambda c: not any(map(c.setting.can_be_zero, sizes_of(c.attention))),
)
_IN_BOUNDS = FlexRule(
    "bounds",
    lambda c: "the score function would read before the start of a tensor, or beyond its end",
    lambda c: all(
        all(map(is_nonnegative, e.index)) and all(map(is_less, e.index, c.attention.sources[e.source].shape))
        for e in c.function.loads()
    ),
)
_STRICT = FlexRule(
    "numerics",
    lambda c: STRICT_ROWS,
    lambda c: not _may_be_nan(c),
)
_CONTINUOUS = FlexRule(
    "rounding", lambda c: amplifies(c.function.score) or "", lambda c: amplifies(c.function.score) is None
)

_FLOAT32 = FlexRule(
    "float64 scores",
    lambda c: outgrows_float32(c.attention) or "",
    lambda c: outgrows_float32(c.attention) is None,
)


def _minimum(case: Case) -> tuple[int, int]:
    return _MINIMUM[template_name(case.setting)]


def _on(case: Case) -> str:
    return "the CPU" if template_name(case.setting) == "cpp" else "CUDA devices"


def _heads_and_dims(a: Attention) -> tuple[Index, ...]:
    return (a.query_heads, product(x.size for x in a.kv_heads), a.head_dim, a.value_head_dim)


def _may_be_nan(c: Case) -> bool:
    a = c.attention
    return c.setting.numerics == "strict" and not a.mask.never_empty and a.empty_row_is_nan


# ---------------------------------------------------------------- the CPU's

_NO_HOOK = FlexRule(
    "hook",
    # NotImplementedError in CppFlexAttentionTemplate.render if what follows is fused into it (torch 2.13.0).
    lambda c: "inside Inductor's hook, Inductor may try to fuse later operations into the kernel, and fail",
    lambda c: c.setting.runner != "hook",
)
_HAS_VECTORS = FlexRule(
    "processor",
    # check_cpu_supported in flex_cpu.py; pytorch#185816 for ARM's.
    lambda c: "Inductor's FlexAttention for CPUs needs AVX2",
    lambda c: c.setting.device.instruction_set not in ("plain", "neon"),
)
_WITHIN_ITS_SCORES = FlexRule(
    "head dim and keys",
    # The ntail kernel of CppMicroGemmFP32Vec (codegen/cpp_micro_gemm.py) with a transposed operand: its outer product
    # writes 16 columns where fewer are left. The last row's are the largest scores of the first rows.
    lambda c: "Inductor's FlexAttention for CPUs writes past its scores with this head dim and number of keys",
    lambda c: c.setting.runner == "other" or not _may_write_past(c.attention),
)
_NO_BACKWARD = FlexRule(
    "gradient", lambda c: "FlexAttention has no backward on the CPU", lambda c: not c.attention.needs_grad
)
_STATIC_TABLES = FlexRule(
    "known tables",
    # "ks2 was not declared": the checks of its index ask for the size (torch 2.13.0).
    lambda c: "the score function looks rows up in a table whose size is not known",
    lambda c: all(
        isinstance(n, int)
        for e in walk(c.function.score)
        if isinstance(e, Apply) and e.op == "lookup"
        for table in loads(e.args[0])
        for n in c.attention.sources[table.source].shape
    ),
)

_COLUMNS, _INNER_PRODUCT = 16, 24  # keys of a step; head dims from which a product is another one, which is right


def _may_write_past(a: Attention) -> bool:
    """Whether the last step's keys may be whole vectors and yet fewer than a step's (seen with AVX2, torch 2.13.0)."""
    vector = inductor_vector_floats()
    dim = a.head_dim
    if not isinstance(dim, int) or dim % vector or dim >= _INNER_PRODUCT:  # those that are not known are refused before
        return False
    rest = a.kv_len % _COLUMNS if isinstance(a.kv_len, int) else vector
    return 0 < rest < _COLUMNS and rest % vector == 0


# ---------------------------------------------------------------- CUDA's

_ASKED_FOR = FlexRule(
    "device",
    lambda c: not_served(c.setting),
    lambda c: bool(c.setting.device.kernels),
)
_NEEDED = FlexRule(
    "mask",
    lambda c: "torch's own kernels take it without a mask in memory",
    lambda c: bool(c.attention.not_affine) or not _is_maskless(c),
)
_CAPABILITY = FlexRule(
    "compute capability",
    lambda c: "FlexAttention's kernels are for compute capability 8.0 and newer",
    lambda c: c.setting.device.capability >= (8, 0),
)
_NO_CAPTURED_GRADIENT = FlexRule(
    "gradient of a captured tensor",
    # The template adds it up by atomics, and only for tensors read through its own indexing, once each.
    lambda c: "a tensor that the score function reads needs a gradient",
    lambda c: (
        not (c.attention.needs_grad and any(c.attention.sources[e.source].needs_grad for e in c.function.loads()))
    ),
)
_DIMS = FlexRule(
    "head dim",
    lambda c: f"the head dim is below {_SMALLEST_DIM} or over {_LARGEST_DIM}",
    lambda c: all(
        isinstance(d, int) and _SMALLEST_DIM <= d <= _LARGEST_DIM
        for d in (c.attention.head_dim, c.attention.value_head_dim)
    ),
)
_GRID_FITS = FlexRule(
    "grid",
    lambda c: f"more than {_GRID} batch entries or heads",
    lambda c: all(c.setting.hint(n) <= _GRID for n in (c.attention.batch_size, c.attention.query_heads)),
)
_AFFINE_SINK = FlexRule(
    "sink",
    lambda c: "a sink needs the logarithm of the sum of exponentials, which is not taken from the kernel",
    lambda c: c.attention.sink is None,
)


_NO_EMPTY_ROW_GRADIENT = FlexRule(
    "gradient of fully masked rows",
    # The backward recomputes exp(score - logsumexp), in which the logarithm of the row's length is lost beside a fill.
    lambda c: "a row may be fully masked by a number, and the kernel gets its gradients wrong",
    lambda c: not (c.attention.needs_grad and _may_be_filled(c)),
)


def _may_be_filled(c: Case) -> bool:
    """Whether every key of some row may be masked by a number: one that replaces scores, or one among what is added."""
    a = c.attention
    if a.mask.is_none or a.mask.never_empty or c.setting.assume_nonempty_rows:
        return False
    if a.mask.replaces_with_number:
        return True
    bias = a.mask.deep_bias
    return bias is not None and not _is_slope(bias, a.keys)


def _is_slope(bias: Expr, keys: Axis) -> bool:
    """Whether a bias is index arithmetic with numbers that no key has one of its own of, as ALiBi is."""
    for part in walk(bias):
        if isinstance(part, Load) and keys in axes(*part.index):
            return False
        if isinstance(part, Apply) and part.op == "where":
            return False
        if isinstance(part, Const) and part.value <= MASKING:
            return False
    return True


def _is_maskless(c: Case) -> bool:
    """Whether a call of torch's takes it with no mask, or the flag in place of one."""
    return mask_kind(c.attention, c.setting) in ("none", "causal") and Sdpa().unfit(c.attention, c.setting) is None


RULES: Mapping[str, tuple[FlexRule, ...]] = {
    "cpp": (
        _ANY_SCORE,
        _VERSION,
        _HAS_VECTORS,
        _NO_HOOK,
        _NO_BACKWARD,
        _DTYPE,
        _SINK,
        _DROPOUT,
        _STATIC_HEADS,
        _SIZES,
        _WITHIN_ITS_SCORES,
        _STATIC_TABLES,
        _IN_BOUNDS,
        ANY_BACKEND,
        AUTOCAST,
        _STRICT,
        _CONTINUOUS,
        _FLOAT32,
    ),
    "triton": (
        _ASKED_FOR,
        _VERSION,
        _CAPABILITY,
        _DTYPE,
        _AFFINE_SINK,
        _DROPOUT,
        _STATIC_HEADS,
        _DIMS,
        _SIZES,
        _GRID_FITS,
        _NO_CAPTURED_GRADIENT,
        _NO_EMPTY_ROW_GRADIENT,
        _IN_BOUNDS,
        ANY_BACKEND,
        AUTOCAST,
        _STRICT,
        _CONTINUOUS,
        _FLOAT32,
        _NEEDED,
    ),
}
ELSEWHERE = (_ANY_SCORE, _UNKNOWN_DEVICE)

# ---------------------------------------------------------------- decoding

_MOST_QUERIES = 128
_MOST_ROWS = 128  # of a tile: with more than a block of the mask has, the template finds no choice


def no_decoding(a: Attention) -> str | None:
    """Why the template for few query rows, which splits the keys, refuses it; None if it does not.

    Its conditions are ``_use_flex_decoding``'s; it fails on the last one, unless another template is requested:
    the rows of a KV head's whole group are one tile.
    """
    if not isinstance(a.q_len, int) or not 0 < a.q_len < _MOST_QUERIES:
        return "the query rows are too many for a split-KV kernel, or not known"
    if not isinstance(a.batch_size, int) or not isinstance(a.query_heads, int):
        return "the batch or the number of heads is not known"
    if not isinstance(a.groups, int) or a.groups & (a.groups - 1):
        return "the heads of a group are not a power of two"
    if power_of_two(a.q_len * a.groups) > _MOST_ROWS:
        return "the rows of a group of heads are more than a tile"
    return None


def power_of_two(number: int) -> int:
    """The smallest that is not less."""
    return 1 << max(0, number - 1).bit_length()


def rows_are_safe(a: Attention) -> bool:
    """Whether no tile of scores has a fully masked row, which ``ROWS_GUARANTEED_SAFE`` requires.

    More than no fully masked row: one whose keys are all in a later tile gives ``exp(-inf + inf)`` in the first.
    Proven if nothing is masked, and for a causal mask, if the first tile of a row block begins with a key that
    all of its rows see. With splits the last ones may have no key at all.
    """
    everything = a.mask.is_none or a.is_causal
    return a.mask.never_empty and everything and no_decoding(a) is not None
