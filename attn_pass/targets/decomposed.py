"""Two products and a softmax: for sites where a fused call costs more, or only the math backend is allowed.

Becomes: ``softmax(query * scale @ key.mT + mask) @ value``. The softmax gives 0 for a fully masked row, as the call
does.

    F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    ->
    aten._safe_softmax(q * scale @ k.mT + mask, -1) @ v

Exact because: this is how torch documents its call, with its zeros for a fully masked row.

Offers on the CPU, in inference, in float32 and float64, as a replacement for a call only.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from attn_pass.devices import roofline
from attn_pass.graph.edit import Plan, Value, aten, fake_of
from attn_pass.model.attention import Attention
from attn_pass.model.expression import Const, Expr, apply, loads
from attn_pass.model.index import axes
from attn_pass.model.views import Permute
from attn_pass.targets.base import Offer, Refusal, Setting
from attn_pass.targets.constraints import AFFINE, EMPTY, STRICT_ROWS, Attended, Constraint, HasAttention, first_failed
from attn_pass.targets.kernel_rules import HALF
from attn_pass.targets.lower import Lowering
from attn_pass.targets.problem import moved_query_bytes, not_served, problem_of, serves


class Decomposed:
    """``matmul``, scale, mask, ``softmax``, ``matmul``, with grouped heads as a dimension that broadcasts."""

    name = "decomposed"

    def consider(self, attention: Attention, variant: str, setting: Setting) -> Offer[None] | Refusal:
        """Takes a call that is already attention; what was written by hand is decomposed already."""
        case = Attended(attention, setting)
        failed = first_failed(CONSTRAINTS, case)
        if failed is not None:
            return Refusal(self.name, failed.why(case), other_device=failed.name == "device")
        problem = problem_of(attention, setting.hint, moved_query_bytes(attention, setting.hint))
        microseconds = roofline.unfused(setting.device, problem)
        if not attention.mask.is_none:
            microseconds += roofline.safe_softmax(setting.device, problem)
        return Offer(self.name, variant, attention, microseconds, fused=False)

    def emit(self, plan: Plan, nodes: Sequence[Node], offer: Offer[None], setting: Setting) -> Value:
        """Plans the products; a fully masked row gives zero, as the call it replaces does."""
        a = offer.attention
        lower = Lowering(plan, nodes, a)
        dtype = a.compute_dtype
        query = lower.query(dtype)
        key = lower.key(dtype, expand=a.dim not in axes(*a.key.index))
        value = lower.value(dtype, expand=False)
        query = plan.call(aten.mul.Scalar, query, a.scale)
        scores: Value = plan.call(aten.matmul.default, query, plan.steps(key, [Permute((0, 1, 3, 2))]))
        mask = self._mask(lower)
        weights: Value
        if mask is None:
            weights = plan.call(aten.softmax.int, scores, -1)
        else:
            scores = plan.call(aten.add.Tensor, scores, mask)
            weights = plan.call(aten._safe_softmax.default, scores, -1)
        return lower.result(plan.call(aten.matmul.default, weights, value))

    def _mask(self, lower: Lowering) -> Value | None:
        a = lower.attention
        if a.mask.is_none:
            return None
        bias: Expr = a.mask.bias if a.mask.bias is not None else Const(0.0)
        if a.mask.keep is not None:
            bias = apply("where", a.mask.keep.condition, bias, Const(a.mask.keep.fill))
        mask = lower.expression(bias, lower.mask_groups())
        if fake_of(mask).dtype != a.compute_dtype:
            mask = lower.plan.call(aten.to.dtype, mask, a.compute_dtype)
        return mask


def _adds_a_tensor(c: HasAttention) -> bool:
    bias = c.attention.mask.bias
    return bias is not None and bool(loads(bias))


CONSTRAINTS: tuple[Constraint[HasAttention], ...] = (
    AFFINE,
    Constraint("form", "it is written as products and a softmax already", lambda c: not c.setting.eager_form),
    Constraint("device", lambda c: not_served(c.setting), lambda c: serves(Decomposed.name, c.setting)),
    Constraint("dropout", "it has dropout, which the call draws", lambda c: not c.attention.dropout),
    Constraint(
        "autocast",
        "autocast would treat products and softmax differently from the call",
        lambda c: c.setting.autocast is None,
    ),
    Constraint(
        "dtype and gradient",
        "half precision and training keep the call's own rounding and backward",
        lambda c: c.attention.compute_dtype not in HALF and not c.attention.needs_grad,
    ),
    Constraint("heads", "grouped heads are packed into rows instead", lambda c: c.attention.groups == 1),
    Constraint("sizes", EMPTY, lambda c: 0 not in (c.attention.kv_len, c.attention.head_dim)),
    Constraint(
        "numerics",
        STRICT_ROWS,
        lambda c: c.setting.numerics != "strict" or not _adds_a_tensor(c),
    ),
)
