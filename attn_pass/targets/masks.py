"""A mask in the form a kernel takes: its kind, the tensor, assumptions about fully masked rows, or why it has none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from attn_pass.devices.registry import family_of
from attn_pass.graph.edit import Plan, Value, aten, fake_of
from attn_pass.model.attention import Attention
from attn_pass.model.distance import ByDistance
from attn_pass.model.expression import Apply, Const, Expr, Load, apply, loads, walk
from attn_pass.model.mask import ABSORBING
from attn_pass.targets.base import EMPTY_ROWS, FINITE_KEYS, NONEMPTY_ROWS, STRICT_KEYS, Setting
from attn_pass.targets.constraints import STRICT_ROWS, Constraint, HasAttention
from attn_pass.targets.empty_rows import ABSORBING_FLOAT64, MASKING, EmptyRows, replaces_scores, why_indistinguishable
from attn_pass.targets.lower import Lowering, zero_with_gradient

_LOWEST = torch.finfo(torch.float32).min
HALF_ABSORBS = 1e30  # times -32752 absorbs any score
OVERFLOWS_HALF = -65520.0  # is -inf in float16, as two of its lowest numbers are that were added to a score
_TIMES_IN_BFLOAT16 = 1e8  # times -1e9 absorbs scores of billions
_ABSORBS_ANY = -3e30  # times that is beyond float32, and needs no more
LOWEST_CUDA = -2.0e38  # absorbs every score, and stays finite in base 2


MaskKind = Literal["none", "causal", "boolean", "additive"]


@dataclass(frozen=True)
class MaskForm:
    """The form in which a kernel gets the mask, and whether fully masked rows are computed beside it (`EmptyRows`)."""

    kind: MaskKind
    repairs: bool = False

    @property
    def is_tensor(self) -> bool:
        """Whether there is a tensor of it."""
        return self.kind in ("boolean", "additive")


def mask_form(a: Attention, setting: Setting) -> MaskForm:
    """The form of a mask for torch's fused kernels."""
    return MaskForm(mask_kind(a, setting), repairs_empty_rows(a, setting))


def mask_kind(a: Attention, setting: Setting) -> MaskKind:
    """The form in which the kernel gets the mask."""
    if a.mask.is_none:
        return "none"
    if a.is_causal:
        return "causal"
    if a.mask.bias is not None:
        return "additive"
    nonempty = a.mask.never_empty or setting.assume_nonempty_rows
    return "additive" if a.mask.replaces_with_number and not nonempty else "boolean"


def wants_mask_gradient(a: Attention) -> bool:
    """Whether anything a bias or mask is computed from needs a gradient."""
    return a.needs_grad and any(a.sources[load.source].needs_grad for e in a.mask.parts() for load in loads(e))


def assumed(a: Attention, setting: Setting) -> tuple[str, ...]:
    """What a fused kernel's result rests on, for the report."""
    keys = (FINITE_KEYS,) if hides_keys(a, setting) and mask_kind(a, setting) != "causal" else ()
    if setting.assume_nonempty_rows and not a.mask.never_empty:
        return (NONEMPTY_ROWS, *keys)
    possible = may_hold_infinity(a) and a.empty_row_is_nan and not a.mask.never_empty
    return (EMPTY_ROWS, *keys) if possible else keys


def hides_keys(a: Attention, setting: Setting) -> bool:
    """Whether the program replaces scores, which hides a key that is NaN; what is added to one leaves it NaN.

    Kernels add their masks. With their own causal flag they replace scores too, and leave most of them out.
    """
    filled = a.mask.keep is not None or (a.mask.bias is not None and replaces_scores(a.mask.bias))
    return filled and setting.eager_form


ALL_KEYS_COUNT = Constraint[HasAttention](
    "numerics",
    STRICT_KEYS,
    lambda c: c.setting.numerics != "strict" or not hides_keys(c.attention, c.setting),
)


def mask_refusal(a: Attention, setting: Setting) -> str | None:
    """Why the rows its mask may leave fully masked would not be the program's; None where they would."""
    strict = setting.numerics == "strict" and not a.mask.never_empty
    if strict and not a.mask.is_none and a.empty_row_is_nan:
        return STRICT_ROWS
    if setting.numerics == "strict" and hides_keys(a, setting) and mask_kind(a, setting) != "causal":
        return STRICT_KEYS
    if repairs_empty_rows(a, setting) and _needs_exact_rows(a, setting):
        if (reason := why_indistinguishable(a)) is not None:
            return reason
    if mask_kind(a, setting) == "additive" and setting.autocast == torch.float16 and not setting.fused_as_written:
        return "autocast to float16 would change an additive mask"
    if _narrows(setting) and a.score_dtype != a.compute_dtype and not _survives(a.mask.bias, a):
        return (
            f"a bias that the program adds in {str(a.score_dtype)[6:]} would be rounded to {str(a.compute_dtype)[6:]}"
        )
    return None


def _narrows(setting: Setting) -> bool:
    return family_of(setting.device).masks_in_compute_dtype


def _survives(bias: Expr | None, a: Attention) -> bool:
    """Whether a bias is the same in the compute dtype, in which kernels read it, but for how low a fill is."""
    if bias is None:
        return True
    if isinstance(bias, Const):
        value = float(bias.value)
        return value <= MASKING or float(torch.tensor(value, dtype=a.compute_dtype)) == value
    if isinstance(bias, Load):
        return torch.promote_types(a.sources[bias.source].dtype, a.compute_dtype) == a.compute_dtype
    if isinstance(bias, Apply) and bias.op == "cast":
        return bias.dtype is not None and bias.dtype.is_floating_point and _survives(bias.args[0], a)
    return isinstance(bias, Apply) and bias.op == "where" and all(_survives(x, a) for x in bias.args[1:])


def mask_tensor(lower: Lowering, kind: MaskKind, setting: Setting) -> Value | None:
    """The mask (B, H, L, S) as a tensor of its kind; None where it is none or a flag."""
    condition = lower.attention.mask.condition
    if kind == "boolean" and condition is not None:
        return lower.condition(condition, lower.mask_groups())
    return None if kind in ("none", "causal") else additive_mask(lower, setting)


def additive_mask(lower: Lowering, setting: Setting, over: ByDistance | None = None) -> Value:
    """Bias and keep-condition as one matrix added to the scores, or as (B, H, 1, distances).

    A masking fill is written as float32's lowest number, which absorbs any score, so that a row without a kept
    key averages the values as the program does. In float16 -65504 would not absorb inside the kernel. Beside a bias
    the fill keeps its own value: the bias may mask too, and in a fully masked row the higher of the two counts.
    """
    a, plan = lower.attention, lower.plan
    groups = lower.mask_groups() if over is None else (a.batch, a.heads, (), (over.axis,))
    added = a.mask.bias if over is None else over.bias
    condition = a.mask.condition if over is None else over.condition
    rescaled = is_rescaled_in_bfloat16(a, setting)
    if rescaled and added is not None:
        added = _absorbing_in_bfloat16(a, added)
    bias: Expr = added if added is not None else Const(0.0)
    if condition is not None and a.mask.keep is not None:
        if added is not None:
            bias = apply("cast", bias, dtype=torch.promote_types(a.compute_dtype, torch.float32))
        fill = _LOWEST if added is None and a.mask.keep.fill != float("-inf") else a.mask.keep.fill
        fill = absorbing_fill(a, fill) if rescaled else fill
        bias = apply("where", condition, bias, Const(fill))
    mask = lower.expression(bias, groups)
    if not fake_of(mask).dtype.is_floating_point:
        wide = torch.float64 if a.score_dtype == torch.float64 else torch.float32
        mask = plan.call(aten.to.dtype, mask, wide)
    if a.score_dtype == torch.float16 and added is not None and not setting.fused_as_written:
        mask = _as_in_half(lower, mask)
    else:
        mask = _in_kernel_dtype(lower, mask)
    if setting.autocast is not None and not setting.fused_as_written and fake_of(mask).dtype != setting.autocast:
        # Autocast would round float32's lowest number to -inf, which means something else.
        clamped = plan.call(aten.clamp.default, mask, torch.finfo(setting.autocast).min)
        infinite = plan.call(aten.eq.Scalar, mask, float("-inf")) if may_hold_infinity(a) else None
        mask = clamped if infinite is None else plan.call(aten.masked_fill.Scalar, clamped, infinite, float("-inf"))
    return mask


def is_rescaled_in_bfloat16(a: Attention, setting: Setting) -> bool:
    """Whether a mask of -1e9 in what is added is made to absorb any score in float32, as it does in bfloat16.

    Learned tables and products are taken to hold no such number.
    """
    bias = a.mask.bias
    if bias is None or a.score_dtype != torch.bfloat16 or setting.fused_as_written or wants_mask_gradient(a):
        return False
    sources = [a.sources[load.source] for load in loads(bias)]
    return bool(sources) and not (
        a.mask.bias_is_learned or all(source.kind == "table" or source.of_products for source in sources)
    )


def condition_is_learned(a: Attention) -> bool:
    """Whether what a mask compares needs a gradient, which no kernel gives."""
    condition = a.mask.condition
    return condition is not None and any(a.sources[load.source].needs_grad for load in loads(condition))


def absorbing_fill(a: Attention, fill: float) -> float:
    """The fill beside what is rescaled, rescaled as well: in bfloat16 the two may be one number."""
    if not _ABSORBS_ANY < fill <= _masking(a):
        return fill
    return float(torch.tensor(fill, dtype=torch.bfloat16) * _TIMES_IN_BFLOAT16)


def _masking(a: Attention) -> float:
    """The highest number that masks in what is added: the scores may have been made smaller together with it."""
    factor, bias = 1.0, a.mask.bias
    while isinstance(bias, Apply) and bias.op in ("cast", "mul"):
        numbers = [abs(float(e.value)) for e in bias.args if isinstance(e, Const)]
        factor *= numbers[0] if numbers else 1.0
        bias = next((e for e in bias.args if not isinstance(e, Const)), None)
    return MASKING * min(1.0, factor or 1.0)


def _absorbing_in_bfloat16(a: Attention, bias: Expr) -> Expr:
    """What is added, with numbers that mask in bfloat16 times as much as makes them absorb any score."""
    masks = apply("and", apply("le", bias, Const(_masking(a))), apply("gt", bias, Const(_ABSORBS_ANY)))
    low = apply("mul", apply("cast", bias, dtype=torch.bfloat16), Const(_TIMES_IN_BFLOAT16))
    return apply("where", masks, low, bias)


def _as_in_half(lower: Lowering, mask: Value) -> Value:
    """What is added to float16 scores, in float32: a number that absorbs scores there does so here.

    Below -32752 two numbers of float16 are the same, or so far apart that the higher takes all of a row; so they are
    multiplied by as much as makes them absorb any score. What float16 cannot hold is -inf, as the program's sum is.
    Where the scores were multiplied after that, what counts is what was added, before it was multiplied.
    """
    a, plan = lower.attention, lower.plan
    wide = plan.call(aten.to.dtype, mask, torch.float32)
    joined = wide if a.rescaled == 1 else plan.call(aten.div.Tensor, wide, a.rescaled)
    rounded = plan.call(aten.to.dtype, mask if joined is wide else joined, torch.float16)
    if a.mask.bias is not None and Const(_LOWEST) in walk(a.mask.bias):
        # What the reader made of a finite fill before one of -inf (`reading.scores`): no number of the program's.
        low = plan.call(aten.le.Scalar, wide, 0.99 * _LOWEST * min(a.rescaled, 1.0))
        lowest = plan.call(aten.logical_and.default, low, plan.call(aten.gt.Scalar, wide, float("-inf")))
        rounded = plan.call(aten.masked_fill.Scalar, rounded, lowest, torch.finfo(torch.float16).min)
    masked = plan.call(aten.le.Scalar, rounded, torch.finfo(torch.float16).min / 2)
    learned = a.mask.bias is not None and wants_mask_gradient(a)
    low = plan.call(aten.to.dtype, plan.call(aten.detach.default, rounded) if learned else rounded, torch.float32)
    low = plan.call(aten.mul.Scalar, low, HALF_ABSORBS)
    if not learned:
        return plan.call(aten.where.self, masked, low, wide)
    infinite = plan.call(aten.eq.Scalar, low, float("-inf"))
    low = plan.call(aten.add.Tensor, zero_with_gradient(plan, wide), low)
    mask = plan.call(aten.where.self, masked, low, wide)
    return plan.call(aten.masked_fill.Scalar, mask, infinite, float("-inf"))


def _in_kernel_dtype(lower: Lowering, mask: Value) -> Value:
    """The mask in the compute dtype, or in float32 beside half precision.

    Of float64 scores a fill down to -1e17 absorbs nothing, and in float32 it would. Shifting all of a row is nothing to
    a softmax, so the row's largest element is taken off first. One beyond 1e17 absorbs its scores and what is below
    it in the row: it stays, as near as float32 comes to it, and what is below it is masked out.
    """
    a, plan = lower.attention, lower.plan
    dtype = fake_of(mask).dtype
    wide = torch.promote_types(a.compute_dtype, torch.float32)
    if shifts_rows(a):
        mask = plan.call(aten.to.dtype, mask, torch.float64)
        top = plan.call(aten.amax.default, plan.call(aten.detach.default, mask), [-1], True)
        absorbs = plan.call(aten.gt.Scalar, plan.call(aten.abs.default, top), -ABSORBING_FLOAT64)
        below = plan.call(aten.logical_and.default, absorbs, plan.call(aten.lt.Tensor, mask, top))
        mask = plan.call(aten.sub.Tensor, mask, plan.call(aten.masked_fill.Scalar, top, absorbs, 0.0))
        mask = plan.call(aten.masked_fill.Scalar, mask, below, float("-inf"))
        dtype = torch.float64
    if dtype == torch.float64 != wide:
        mask = _finite_in_float32(plan, mask)
    return mask if dtype in (a.compute_dtype, wide) else plan.call(aten.to.dtype, mask, wide)


def shifts_rows(a: Attention) -> bool:
    """Whether what is added is taken off each row's largest element: float64 scores of narrower operands."""
    wide = torch.promote_types(a.compute_dtype, torch.float32)
    return a.mask.bias is not None and a.score_dtype == torch.float64 != wide


def _finite_in_float32(plan: Plan, mask: Value) -> Value:
    """A float64 matrix whose finite numbers stay finite in float32: the nearest number it has."""
    infinite = plan.call(aten.eq.Scalar, plan.call(aten.abs.default, mask), float("inf"))
    clamped = plan.call(aten.clamp.default, mask, _LOWEST, -_LOWEST)
    return plan.call(aten.where.self, infinite, mask, clamped)


def dense_keys(plan: Plan, mask: Value) -> Value:
    """The mask with a step of 1 from key to key, as torch asks of masks on all devices but the CPU, for one key too.

    ``check_last_dim_stride_equals_1_dense`` in aten's transformers/sdp_utils_cpp.h.
    """
    if plan.sizes.index(fake_of(mask).stride(-1)) == 1:
        return mask
    return plan.call(aten.clone.default, mask, memory_format=torch.contiguous_format)


def repaired(
    lower: Lowering, mask: Value, form: MaskForm, setting: Setting, kernel: str
) -> tuple[Value, EmptyRows | None]:
    """The mask for the kernel, in the dtype it takes, and what replaces fully masked rows where they are repaired.

    A call keeps the mask it was given where it reaches the kernel it reached before.
    """
    empty = None
    if form.repairs:
        learned = lower.attention.mask.bias is not None and wants_mask_gradient(lower.attention)
        empty = EmptyRows(lower.plan, lower.attention, mask, learned)
        mask = empty.unmasked()
    if _narrows(setting) and fake_of(mask).dtype != torch.bool:
        unchanged = setting.kernel_as_written == kernel and fake_of(mask).dtype == lower.attention.compute_dtype
        mask = mask if unchanged else _narrowed(lower, mask)
    return mask, empty


def _narrowed(lower: Lowering, mask: Value) -> Value:
    """An additive mask in the compute dtype, as kernels with `Family.masks_in_compute_dtype` ask for it: CUDA's.

    They multiply it by the logarithm of e once it is added, which takes float32's lowest number to -inf; a number that
    stays finite absorbs any score as well. In float16 a masking fill becomes -inf: rows of nothing else are repaired.
    """
    plan, dtype = lower.plan, lower.attention.compute_dtype
    if dtype == torch.float64:
        return plan.call(aten.to.dtype, mask, dtype)
    wide = plan.call(aten.to.dtype, mask, torch.float32)
    infinite = plan.call(aten.eq.Scalar, wide, float("-inf"))
    clamped = plan.call(aten.to.dtype, plan.call(aten.clamp.default, wide, LOWEST_CUDA), dtype)
    return plan.call(aten.masked_fill.Scalar, clamped, infinite, float("-inf"))


def repairs_empty_rows(a: Attention, setting: Setting) -> bool:
    """Whether fully masked rows are computed beside the kernel: see `EmptyRows`. A fused call keeps those it has.

    In training, on CUDA in float16, which has no number that absorbs a score, and where a fill that does not absorb
    one keeps its own value.
    """
    possible = not (a.mask.never_empty or setting.assume_nonempty_rows or setting.fused_as_written)
    return possible and (_needs_exact_rows(a, setting) or leaks(a)) and mask_kind(a, setting) == "additive"


def _needs_exact_rows(a: Attention, setting: Setting) -> bool:
    narrow = _narrows(setting) and a.compute_dtype == torch.float16 and may_hold_finite_fill(a)
    return a.needs_grad or narrow


def leaks(a: Attention) -> bool:
    """Whether a fill is added beside a bias that leaves something of scores of a few tens: -1e9 in float32."""
    return a.mask.bias is not None and a.mask.keep is not None and ABSORBING < a.mask.keep.fill < 0


def may_hold_finite_fill(a: Attention) -> bool:
    """Whether the mask may mask with a number: all but one that fills with -inf, and adds nothing."""
    return a.mask.bias is not None or a.mask.replaces_with_number


def gives_zero_for_empty_rows(a: Attention, setting: Setting) -> bool:
    """Whether a row may be fully masked with -inf, where the program gives 0 and products and a softmax NaN."""
    has_a_key = a.mask.never_empty or setting.assume_nonempty_rows or a.sink is not None
    return may_hold_infinity(a) and not (has_a_key or a.empty_row_is_nan)


def may_hold_infinity(a: Attention) -> bool:
    """Whether the mask may mask with -inf: all but one that fills with a number, and adds nothing."""
    return a.mask.bias is not None or a.mask.only_hides
