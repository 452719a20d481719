"""The fused forward with a backward that recomputes the weights: training where a mask or bias needs a gradient.

The fused CPU kernel gives no gradient for its mask, and computes fully masked rows wrongly (``empty_rows``). This
target keeps its forward, which stores no score matrix, in an autograd function, and writes the backward out: scores,
softmax and five products on the saved operands. That is one product more than the backward of the program as written,
and no layer's weights are stored from the forward to the backward.

Becomes: the higher-order operator ``autograd_function_apply``, with the kernel and the mask as one additive matrix in
its forward, and these operations in its backward.

    (q @ k.mT * scale + bias).softmax(-1) @ v
    ->
    autograd_function_apply(forward, backward, q, k, v, bias, ...)

Exact because: the weights are a function of the operands, which are saved; the backward computes them again by the
operations of the program.

Offers on the CPU, in training under ``torch.compile``, if the mask needs a gradient (T5's and Swin's learned bias) or
two masks may fully mask a row. For one layer, forward and backward, it took 1.16 to 1.35 times as long as stock on two
cores, and no less memory at the peak, which is in the backward (a run from before the CPU kernel, since replaced);
the memory that a model of many layers keeps between the two was not measured. Therefore ``choose="cheapest"`` takes the
CPU kernel there, or leaves the site; this target is taken if an option names it, or if there is no compiler.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._functorch.autograd_function import autograd_function_apply
from torch.fx import Graph, GraphModule, Node

from attn_pass.devices import roofline
from attn_pass.devices.registry import family_of
from attn_pass.graph.edit import Plan, Value, aten, fake_of
from attn_pass.model.attention import Attention
from attn_pass.targets.base import EMPTY_ROWS, FINITE_KEYS, Offer, Refusal, Setting
from attn_pass.targets.constraints import Attended, Constraint, HasAttention, refusal, unless
from attn_pass.targets.empty_rows import replaces_scores
from attn_pass.targets.lower import Lowering
from attn_pass.targets.masks import ALL_KEYS_COUNT, additive_mask, condition_is_learned, hides_keys, leaks
from attn_pass.targets.operands import common_head_dim, operands, settled
from attn_pass.targets.problem import moved_query_bytes, problem_of, serves
from attn_pass.targets.sdpa import Sdpa


@dataclass(frozen=True)
class RecomputePlan:
    """The one head dim that operands are filled up to where they differ, and the kernel of the forward."""

    head_dim: int | None
    kernel: Any


class Recompute:
    """The kernel that torch's call takes inside an autograd function of our own."""

    name = "recompute"

    def consider(self, attention: Attention, variant: str, setting: Setting) -> Offer[RecomputePlan] | Refusal:
        """Accepts training on a CPU with a mask that needs a gradient, or that a plain call cannot take."""
        reason = refusal(CONSTRAINTS, Attended(attention, setting))
        if reason is not None:
            return Refusal(self.name, reason, other_device=not serves(self.name, setting))
        copied = moved_query_bytes(attention, setting.hint)
        problem = problem_of(attention, setting.hint, copied)
        width = max(problem.head_dim, problem.value_dim)
        forward = roofline.fused(setting.device, replace(problem, head_dim=width, value_dim=width))
        again = _SHARE_AGAIN * roofline.unfused(setting.device, problem)
        assumptions = (EMPTY_ROWS,) if attention.empty_row_is_nan and not attention.mask.never_empty else ()
        if hides_keys(attention, setting):
            assumptions = (*assumptions, FINITE_KEYS)
        decided = RecomputePlan(common_head_dim(attention), family_of(setting.device).kernel_with_logarithm)
        return Offer(self.name, variant, attention, forward + again, fused=True, plan=decided, assumptions=assumptions)

    def emit(self, plan: Plan, nodes: Sequence[Node], offer: Offer[RecomputePlan], setting: Setting) -> Value:
        """Plans the call; the mask is one matrix, and where scores were replaced its condition comes along."""
        a = offer.attention
        lower = Lowering(plan, nodes, a)
        query, key, value = (settled(plan, x) for x in operands(lower, offer.plan.head_dim))
        mask = settled(plan, additive_mask(lower, setting))
        inputs: list[Value] = [query, key, value, mask]
        if a.mask.condition is not None:
            inputs.append(lower.expression(a.mask.condition, lower.mask_groups()))
        shapes = [fake_of(x).shape for x in inputs]
        summed = [n for n in range(4) if _is_one(shapes[3][n]) and not _is_one(_scores(shapes)[n])]
        forward = plan.module("attn_pass_forward", _forward(offer.plan.kernel, len(inputs), a.scale))
        backward = plan.module("attn_pass_backward", _backward(len(inputs), a.scale, fake_of(query).dtype, summed))
        saved = list(range(len(inputs)))
        out: Value = plan.call(
            autograd_function_apply,
            forward,
            backward,
            *inputs,
            non_differentiable_idx=[],
            saved_for_backward_idx=saved,
        )
        if offer.plan.head_dim is not None:
            out = plan.call(aten.slice.Tensor, out, 3, 0, a.value_head_dim)
        return lower.result(out)


def _is_served(setting: Setting) -> bool:
    return serves(Recompute.name, setting) and family_of(setting.device).kernel_with_logarithm is not None


def _may_be_filled_by_both(c: HasAttention) -> bool:
    mask = c.attention.mask
    nonempty = mask.never_empty or c.setting.assume_nonempty_rows
    return mask.bias is not None and replaces_scores(mask.bias) and not nonempty


CONSTRAINTS: tuple[Constraint[HasAttention], ...] = (
    Constraint(
        "program",
        "it is for training under torch.compile",
        lambda c: c.attention.needs_grad and c.setting.program == "compile",
    ),
    Constraint(
        "device",
        "the kernels of other devices compute such gradients themselves",
        lambda c: _is_served(c.setting),
    ),
    Constraint(
        "autocast",
        "autocast would treat its backward differently from the program's",
        lambda c: c.setting.autocast is None,
    ),
    Constraint("sink", "its backward does not support sinks", lambda c: c.attention.sink is None),
    Constraint("heads", "grouped heads are packed into rows instead", lambda c: c.attention.groups == 1),
    unless("torch's call", lambda c: Sdpa().unfit(c.attention, c.setting)),
    Constraint(
        "mask",
        "torch's call takes the mask as it is",
        lambda c: not (c.attention.mask.is_none or c.attention.is_causal or c.setting.fused_as_written),
    ),
    Constraint(
        "fully masked rows",
        "a row may be fully masked by scores that are replaced before a matrix is added",
        lambda c: not _may_be_filled_by_both(c),
    ),
    Constraint(
        "fill",
        "-1e9 beside a bias does not absorb scores above 32, so a fully masked row would not be the mean",
        lambda c: c.attention.mask.never_empty or c.setting.assume_nonempty_rows or not leaks(c.attention),
    ),
    ALL_KEYS_COUNT,
    Constraint("condition", "the mask's condition needs a gradient", lambda c: not condition_is_learned(c.attention)),
)


# Of an unfused forward, what the backward adds to the program's own: one product, a softmax and its traffic.
_SHARE_AGAIN = 0.6


def _is_one(size: int | torch.SymInt) -> bool:
    return isinstance(size, int) and size == 1


def _scores(shapes: Sequence[torch.Size]) -> tuple[int | torch.SymInt, ...]:
    """The shape (B, H, L, S) of the scores."""
    query, key = shapes[0], shapes[1]
    return (query[0], query[1], query[2], key[2])


def _forward(kernel: Any, count: int, scale: float) -> GraphModule:
    """``(query, key, value, mask[, keep]) -> result, saved``."""
    graph = Graph()
    inputs = [graph.placeholder(f"x{n}") for n in range(count)]
    both = graph.call_function(kernel, (*inputs[:3], 0.0, False), {"attn_mask": inputs[3], "scale": scale})
    graph.output((graph.call_function(operator.getitem, (both, 0)), tuple(inputs)))
    return GraphModule({}, graph)


def _backward(count: int, scale: float, dtype: torch.dtype, summed: Sequence[int]) -> GraphModule:
    """``(gradient, query, key, value, mask[, keep]) -> their gradients``; ``summed`` are the dims the mask broadcasts.

    As autograd writes it for the program: the scores in float32 at least, a row of one fill is uniform, and where
    scores were replaced they get no gradient. A row of -inf has weights of zero.
    """
    graph = Graph()
    gradient, *inputs = [graph.placeholder(f"x{n}") for n in range(count + 1)]
    wide = torch.promote_types(dtype, torch.float32)

    def call(target: Callable[..., Any], *args: Any) -> Node:
        return graph.call_function(target, args)

    def transposed(node: Node) -> Node:
        return call(aten.transpose.int, node, -2, -1)

    grad, query, key, value, mask = (call(aten.to.dtype, x, wide) for x in (gradient, *inputs[:4]))
    scores = call(aten.mul.Tensor, call(aten.matmul.default, query, transposed(key)), scale)
    weights = call(aten._safe_softmax.default, call(aten.add.Tensor, scores, mask), -1)
    value_grad = call(aten.matmul.default, transposed(weights), grad)
    product = call(aten.mul.Tensor, weights, call(aten.matmul.default, grad, transposed(value)))
    total = call(aten.sum.dim_IntList, product, [-1], True)
    score_grad = call(aten.sub.Tensor, product, call(aten.mul.Tensor, weights, total))
    mask_grad = call(aten.sum.dim_IntList, score_grad, list(summed), True) if summed else score_grad
    if count > 4:
        score_grad = call(aten.where.ScalarOther, inputs[4], score_grad, 0.0)
    score_grad = call(aten.mul.Tensor, score_grad, scale)
    query_grad = call(aten.matmul.default, score_grad, key)
    key_grad = call(aten.matmul.default, transposed(score_grad), query)
    grads = (query_grad, key_grad, value_grad, mask_grad)
    typed = [call(aten.type_as.default, x, to) for x, to in zip(grads, inputs)]
    graph.output((*typed, *[None] * (count - 4)))
    return GraphModule({}, graph)
