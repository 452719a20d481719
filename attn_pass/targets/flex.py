"""FlexAttention, for scores that are no scaled product with a mask: soft caps, clamps, masks that multiply, weak fills.

Inductor compiles the kernel around the score function, which is the expression as it was read, and a block mask skips
what a causal mask or a window hides. Operands are copied into memory of their own, and captured tensors are computed
first, since the CPU template gets views and unfinished tensors wrong in torch 2.13.

Offers on the CPU, in inference, in float32 and half precision, from torch 2.13 on, with `backend` and `aot_compile`.
Elsewhere (`wrap`, `rewrite`) the operator runs as products and a softmax: right, and no gain, so that it is then taken
with ``choose="fused"`` alone; inside the hook the site is left, and `torch.export.save` cannot write it. Not with a
gradient, dropout, an unknown number of heads or head dim, or a captured tensor of unknown size. Compiling takes about
4 s a layer, which counts as 0.4 ms a call.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.fx import Node

from attn_pass.compat import TORCH_VERSION
from attn_pass.graph.edit import Plan, Value
from attn_pass.hardware import cost
from attn_pass.model.attention import Attention
from attn_pass.model.expression import Apply, Const, Expr, apply, contains_dot, loads
from attn_pass.model.index import Axis, is_nonnegative, product
from attn_pass.model.mask import Band, row_index
from attn_pass.model.text import score_mod_source
from attn_pass.targets.base import EMPTY_ROWS, Offer, Refusal, Setting
from attn_pass.targets.flex_lower import KV_BLOCK, Q_BLOCK, ScoreMod, amplifies, block_mask, kernel_options, own_memory
from attn_pass.targets.lower import Lowering
from attn_pass.targets.problem import problem_of

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MINIMUM = (2, 13)  # earlier CPU templates were not tried
_LOWEST = torch.finfo(torch.float32).min


class Flex:
    """`torch.ops.higher_order.flex_attention` on the CPU, in inference."""

    name = "flex"
    takes_any_score = True

    def consider(self, attention: Attention, variant: str, setting: Setting) -> Offer | Refusal:
        """Takes what no other target can: scores that are not affine in the product of queries and keys."""
        reason = self._refusal(attention, setting)
        if reason is not None:
            return Refusal(self.name, reason)
        band = visible(attention)
        problem = problem_of(attention, setting.hint)
        if not loads(score_of(attention)):
            problem = replace(problem, mask_elements=0)
        seen = _share(band, problem.q_len, problem.kv_len)
        if setting.runner == "inductor":
            predicted = cost.flex(setting.device, problem, seen)
        else:  # without Inductor the operator runs as products and a softmax over scores it calls the function for
            predicted = 2 * cost.unfused(setting.device, problem)
        assumptions: tuple[str, ...] = ()
        if attention.empty_row_is_nan and not attention.rows_never_empty:
            assumptions = (EMPTY_ROWS,)
        source = score_mod_source(score_of(attention), _names(attention))
        return Offer(self.name, variant, attention, predicted, fused=True, assumptions=assumptions, score_mod=source)

    def _refusal(self, a: Attention, setting: Setting) -> str | None:
        if not a.not_affine:
            return "the scores are a scale, a bias and a mask, which need no score function"
        if setting.device.type != "cpu":
            return f"no measured rule for {setting.device.type} devices yet"
        if TORCH_VERSION < _MINIMUM:
            return f"FlexAttention on the CPU is known from torch {_MINIMUM[0]}.{_MINIMUM[1]} on"
        if setting.runner == "hook":
            # NotImplementedError in CppFlexAttentionTemplate.render if what follows is fused into it (torch 2.13.0).
            return "inside Inductor's hook nothing keeps Inductor from fusing what follows into the kernel, and failing"
        if a.needs_grad:
            return "FlexAttention has no backward on the CPU"
        if a.compute_dtype not in _DTYPES:
            return f"FlexAttention takes no {str(a.compute_dtype)[6:]} on the CPU"
        if a.sink is not None:
            return "a sink beside scores of such a form is computed by no target"
        if a.dropout:
            return f"dropout {a.dropout:g}: FlexAttention draws none"
        kv_heads = product(x.size for x in a.kv_heads)
        if not all(isinstance(n, int) for n in (a.query_heads, kv_heads, a.head_dim, a.value_head_dim)):
            return "the number of heads or a head dim is not known"  # C++ errors in torch 2.13.0
        if 0 in (a.q_len, a.kv_len, a.head_dim, a.value_head_dim, a.batch_size, a.query_heads):
            return "a size is 0"
        if not all(isinstance(n, int) for e in loads(score_of(a)) for n in a.sources[e.source].shape):
            # "ks2 was not declared": the checks of its index ask for the size (torch 2.13.0).
            return "the score function reads a tensor whose size is not known"
        if not all(is_nonnegative(i) for e in loads(score_of(a)) for i in e.index):
            return "the score function would read in front of a tensor"
        if setting.allowed_backends is not None:
            return f"sdpa_kernel allows only {', '.join(setting.allowed_backends) or 'nothing'}"
        if setting.autocast is not None and setting.autocast != a.compute_dtype:
            return f"autocast to {str(setting.autocast)[6:]} would narrow it from {str(a.compute_dtype)[6:]}"
        if setting.numerics == "strict" and not a.rows_never_empty and a.empty_row_is_nan:
            return "numerics='strict': a row may be masked out entirely, and eager may give NaN there"
        return amplifies(score_of(a))

    def emit(self, plan: Plan, nodes: Sequence[Node], offer: Offer, setting: Setting) -> Value:
        """Plans the operator with its score function and block mask."""
        a = offer.attention
        lower = Lowering(plan, nodes, a)
        dtype = a.compute_dtype
        query = lower.operand(a.query, (a.batch, a.heads, a.rows, (a.dim,)), dtype, expand=True)
        key = lower.operand(a.key, (a.batch, a.kv_heads, (a.keys,), (a.dim,)), dtype, expand=True)
        value = lower.operand(a.value, (a.batch, a.kv_heads, (a.keys,), a.value_dim), dtype, expand=True)
        operands = [own_memory(plan, x) for x in (query, key, value)]
        score = ScoreMod(lower, score_of(a))
        mask = block_mask(lower, visible(a), a.q_len, a.kv_len, is_whole_mask(a))
        results = plan.call(
            torch.ops.higher_order.flex_attention,
            *operands,
            plan.module("flex_score_mod", score.module()),
            mask,
            1.0,
            kernel_options(operands),
            tuple(score.captured),
            (),
        )
        return lower.result(plan.call(operator.getitem, results, 0))


def _names(a: Attention) -> dict[Axis, str]:
    """What each axis is in a score function: the index of its group, or the digit of it that it is."""
    names: dict[Axis, str] = {}
    for group, name in zip((a.batch, a.heads, a.rows, (a.keys,)), ("b", "h", "q_idx", "kv_idx")):
        real = [x for x in group if x.size != 1]
        for number, axis in enumerate(real):
            faster = product(x.size for x in real[number + 1 :])
            digit = name if faster == 1 else f"{name} // {faster}"
            names[axis] = digit if number == 0 else f"({digit}) % {axis.size}"
            if len(real) > 1:
                names[axis] = f"({names[axis]})"
    return names


def visible(a: Attention) -> Band:
    """A band that holds every key any row attends to; without bounds where a row may have none."""
    bands = [p for p in a.structure.parts if isinstance(p, Band)]
    known = a.rows_never_empty and a.structure.row == row_index(a.rows)
    return bands[0] if known and len(bands) == 1 else Band()


def is_whole_mask(a: Attention) -> bool:
    """Whether the band `visible` gives, with bounds that are known, is all there is to the mask."""
    band = visible(a)
    known = all(b is None or isinstance(b, int) for b in (band.lower, band.upper))
    return known and band != Band() and a.structure.parts == (band,)


def multiplied_once(expression: Expr) -> Expr:
    """Factors and divisors that are numbers as one factor: the kernel's divisions are slow, and it has many scores."""
    if not isinstance(expression, Apply):
        return expression
    factor = 1.0
    inner: Expr = expression
    while isinstance(inner, Apply) and inner.op in ("mul", "div"):
        number, rest = inner.args[1], inner.args[0]
        if inner.op == "mul" and isinstance(rest, Const):
            number, rest = rest, number
        if not isinstance(number, Const) or isinstance(number.value, bool) or not contains_dot(rest):
            break
        value = float(number.value)
        factor = factor * value if inner.op == "mul" else factor / value if value else math.inf
        inner = rest
    if inner is expression or not 1e-30 < abs(factor) < 1e30:
        return apply(expression.op, *(multiplied_once(x) for x in expression.args), dtype=expression.dtype)
    return apply("mul", multiplied_once(inner), Const(factor))


def score_of(a: Attention) -> Expr:
    """The score function: the modified product, the bias added, the fill where it is not kept."""
    score = multiplied_once(a.modified)
    if a.has_mask and is_whole_mask(a):
        return score
    if a.has_mask and a.structure.is_exact and a.rows_never_empty:
        # The mask is index arithmetic, and what is masked weighs nothing: no tensor to read, and none to make.
        return apply("where", a.structure.condition(), score, Const(float("-inf")))
    if a.bias is not None:
        bias = a.bias
        if a.score_dtype == torch.float16:
            # A masking fill absorbs any score in float16, not in the float32 the kernel adds it in.
            low = apply("and", apply("le", bias, Const(_HALF)), apply("gt", bias, Const(float("-inf"))))
            bias = apply("where", low, Const(_LOWEST), apply("cast", bias, dtype=torch.float32))
        score = apply("add", score, bias)
    if a.keep is not None:
        score = apply("where", a.keep.condition, score, Const(float(a.keep.fill)))
    return score


_HALF = torch.finfo(torch.float16).min / 2


def _share(band: Band, q_len: int, kv_len: int) -> float:
    """The share of the blocks that is computed."""
    blocks = max(1, -(-kv_len // KV_BLOCK))
    total = 0
    for first in range(0, q_len, Q_BLOCK):
        end, start = blocks, 0
        if isinstance(band.upper, int):
            end = min(blocks, (first + Q_BLOCK - 1 + band.upper) // KV_BLOCK + 1)
        if isinstance(band.lower, int):
            start = min(max(0, (first + band.lower) // KV_BLOCK), blocks)
        total += max(0, end - start)
    return total / (blocks * max(1, -(-q_len // Q_BLOCK)))
