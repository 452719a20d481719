"""Rows that are fully masked by a finite fill, in training: computed beside the kernel, which gets them wrong.

The fused CPU backward recomputes ``exp(score + mask - logsumexp)``. In a row that holds only, say, float32's lowest
number, the logarithm of the row's length is lost in the logsumexp, and every weight becomes 1 instead of ``1 / kv_len``
(seen in torch 2.13.0). The program's own result is known, though: the fill absorbed every score, so the row is the mean
of the values. Such rows are unmasked for the kernel and replaced in its result.

If the mask itself needs a gradient, the kernel has to compute it, with weights of ``1 / kv_len``: such rows are given a
query and a mask of 0 that pass their gradients on, and the missing gradient of the keys is added.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attn_pass.graph.edit import Plan, Value, aten, fake_of
from attn_pass.model.attention import Attention
from attn_pass.model.expression import Apply, Const, Expr, loads, walk
from attn_pass.model.index import product
from attn_pass.targets.lower import zero_with_gradient

MASKING = -0.99e9  # -1e9 is -998244352 in bfloat16
_NO_FILL = 1e3  # numbers that are smaller mask in no type, not even multiplied by a scale
ABSORBING_FLOAT64 = -1e17  # weaker fills keep the scores' differences in float64, and the logarithm of a row's length


def why_indistinguishable(a: Attention) -> str | None:
    """Why the gradient of such rows would not be known, or None.

    A fill that replaces a score cuts its gradient off, one that is added does not; where both may empty a row,
    the gradient differs from key to key.
    """
    reason = replaced_and_added(a)
    if reason is not None or a.mask.bias is None:
        return reason
    if len(set(loads(a.mask.bias))) > 1:
        return "a row may be fully masked by several matrices that are added"
    return None


def replaced_and_added(a: Attention) -> str | None:
    """Why it would not be known which scores of such rows pass their gradient on, or None."""
    if a.mask.bias is not None and (a.mask.keep is not None or replaces_scores(a.mask.bias)):
        return "a row may be fully masked by scores that are replaced and by a matrix that is added"
    return None


def replaces_scores(bias: Expr) -> bool:
    """Whether a fill of scores was made part of what is added; else a ``where`` in it chooses between two summands."""
    choices = [e for e in walk(bias) if isinstance(e, Apply) and e.op == "where"]
    return any(isinstance(x, Const) and not abs(x.value) < _NO_FILL for e in choices for x in e.args[1:])


@dataclass
class EmptyRows:
    """The fully masked rows of one call; ``mask`` is the additive (B, H, L, S) matrix, broadcast where it can be.

    ``learned`` is whether that matrix needs a gradient.
    """

    plan: Plan
    attention: Attention
    mask: Value
    learned: bool = False

    def __post_init__(self) -> None:
        call = self.plan.call
        top = call(aten.amax.default, self.mask, [-1], True)
        wide = self.attention.compute_dtype == torch.float64
        filled = call(aten.le.Scalar, top, ABSORBING_FLOAT64 if wide else MASKING)
        # A row of -inf is NaN in the program and none of our business; a row of several fills is not uniform.
        one = call(aten.eq.Tensor, top, call(aten.amin.default, self.mask, [-1], True))
        finite = call(aten.gt.Scalar, top, float("-inf"))
        self.rows = call(aten.logical_and.default, filled, call(aten.logical_and.default, one, finite))

    def unmasked(self) -> Value:
        """The mask for the kernel, 0 in those rows."""
        if self.learned:
            return self._zero(self.mask)
        return self.plan.call(aten.masked_fill.Scalar, self.mask, self.rows, 0.0)

    def queried(self, query: Value) -> Value:
        """The (B, H, L, D) query for the kernel."""
        return self._zero(query) if self.learned else query

    def _zero(self, value: Value) -> Value:
        """0 in those rows, whose gradient is passed on nevertheless."""
        return self.plan.call(aten.where.self, self.rows, zero_with_gradient(self.plan, value), value)

    def replaced(self, out: Value, query: Value, key: Value, value: Value, scale: float) -> Value:
        """The kernel's (B, H, L, Dv) result with those rows replaced; ``query`` is the program's."""
        call = self.plan.call
        wide = torch.promote_types(fake_of(value).dtype, torch.float32)
        query, key, value = (call(aten.to.dtype, x, wide) for x in (query, key, value))
        if self.learned:
            linear = self._scores_to_first_order(call(aten.detach.default, query), key, value, scale)
            nothing = zero_with_gradient(self.plan, linear)
            rows = call(aten.where.ScalarOther, self.rows, nothing, 0.0)
            return call(aten.add.Tensor, out, call(aten.to.dtype, rows, fake_of(out).dtype))
        mean = self.mean_of(value)
        if self.attention.mask.keep is None:
            linear = self._scores_to_first_order(query, key, value, scale)
            mean = call(aten.add.Tensor, mean, zero_with_gradient(self.plan, linear))
        return self.put(mean, out)

    def _scores_to_first_order(self, query: Value, key: Value, value: Value, scale: float) -> Value:
        """``sum_j (s_j - mean(s)) v_j / n``: the contribution of the scores to the mean of the values near equal
        weights.

        An additive fill hides a score's value and passes its gradient on, so only the gradient of this is needed.
        It needs no score matrix, since the sum over keys can be done first.
        """
        call, a = self.plan.call, self.attention
        centred = call(aten.sub.Tensor, key, call(aten.mean.dim, key, [-2], True))
        state = call(aten.matmul.default, call(aten.transpose.int, centred, -2, -1), call(aten.detach.default, value))
        count = self.plan.size(a.kv_len)
        state = call(aten.div.Tensor, call(aten.mul.Tensor, state, scale), count)
        sizes = [self.plan.size(s) for s in (a.batch_size, product(x.size for x in a.kv_heads))]
        rows = [*sizes, self.plan.size(a.groups * a.q_len), fake_of(query).shape[-1]]
        if a.groups == 1:
            return call(aten.matmul.default, query, state)
        grouped = call(aten.matmul.default, call(aten.reshape.default, query, rows), state)
        width = fake_of(grouped).shape[-1]
        shape = [sizes[0], self.plan.size(a.query_heads), self.plan.size(a.q_len), width]
        return call(aten.reshape.default, grouped, shape)

    def mean_of(self, value: Value) -> Value:
        """Over the keys of (B, Hkv, S, Dv), for every query head: (B, H, 1, Dv)."""
        a, call = self.attention, self.plan.call
        mean: Value = call(aten.mean.dim, value, [-2], True)
        if a.groups == 1:
            return mean
        width = fake_of(mean).shape[-1]
        groups = self.plan.size(a.groups)
        spread = call(aten.expand.default, call(aten.unsqueeze.default, mean, 2), [-1, -1, groups, -1, -1])
        return call(aten.reshape.default, spread, [-1, self.plan.size(a.query_heads), 1, width])

    def put(self, rows: Value, out: Value) -> Value:
        """(B, H, 1, Dv) in the place of those rows of the (B, H, L, Dv) result."""
        return self.plan.call(aten.where.self, self.rows, self.plan.call(aten.to.dtype, rows, fake_of(out).dtype), out)
