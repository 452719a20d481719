"""This package's own CPU kernel, ``attn_pass::attention``: masks are bounds of its loops; float32 and half precision.

Becomes: one call of ``attn_pass::attention`` on the operands as they lie in memory; with gradients or dropout of
``attn_pass::attention_forward``, which has the backward, and if only the log-sum-exp is needed as well of
``attn_pass::attention_with_lse``.

    (torch.tanh(q @ k.mT * scale / cap) * cap).masked_fill(row < key, -inf).softmax(-1) @ v
    ->
    attn_pass.attention(q, k, v, scale, after=0, score="...")

Exact because: a masked key has weight zero, bounds are proved to be the mask, and whatever no bound says stays a
tensor; a function of the scores is the expression that was read, as C++. Sums are in another order than eager's.

The kernel reads only the keys that a row keeps: causal masks with any offset, sliding windows, prefixes, chunks and
ranges of keys are bounds of its loops, for known and for unknown lengths. Other parts of a mask are a boolean or an
additive tensor, with as many dimensions as the mask varies over. A mask beside a bias that masks nothing itself (T5,
ALiBi) is a boolean or bounds, and the bias stays as small as it is; one that depends on ``key - row`` alone is a vector
of distances. Grouped heads share the keys that are packed for them.

A masked key has no influence, whatever it holds, and a fully masked row gives what the program gives: the mean of the
values if the fill is a number, zero or NaN if it is -inf. Soft caps and other functions of the scores are compiled into
the kernel; their other inputs, such as tables or conditions, are passed as tensors. A sink is one more score of the
row. If the scores' log-sum-exp is needed as well, it is the kernel's second result.

In training the backward recomputes the weights from statistics that the forward stores for each row. It computes the
gradients of query, key and value, of an added matrix (summed over the axes along which it is broadcast) or of a vector
of distances (summed along diagonals), of a sink, and of all tensors that a score function reads. The order of summation
depends only on the sizes, so gradients are the same for any number of threads. A row that is fully masked by a finite
number has eager's gradients. Dropout is drawn inside the kernel from a seed of torch's generator: the random numbers
differ from eager's, but are the same in forward and backward.

Offers in inference, and in training and with dropout under ``torch.compile``, in float32, bfloat16 and float16. Where
Inductor does not compile the graph, a call goes through Python, and the target makes an offer only if ``targets`` names
it; in a program that is exported to run elsewhere it makes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import getitem

import torch
from torch.fx import Node

from attn_pass.devices.cpu import added, cost, masked_out, training
from attn_pass.devices.cpu.kernel import build
from attn_pass.devices.cpu.kernel.scores import MOST_CAPTURED, written
from attn_pass.devices.roofline import Problem
from attn_pass.graph.edit import Plan, Value, aten, fake_of
from attn_pass.graph.truth import through_bytes
from attn_pass.model.added_masks import kept_beside_learned, kept_beside_products, over_fewest_axes
from attn_pass.model.attention import Attention, Blocks
from attn_pass.model.distance import ByDistance
from attn_pass.model.dtype_name import dtype_name
from attn_pass.model.expression import TRUE, Apply, Expr
from attn_pass.model.index import Axis, product
from attn_pass.model.structure import row_index
from attn_pass.model.text import score_mod_source
from attn_pass.poor_cases import half_precision
from attn_pass.targets.base import FINITE_KEYS, LEARNED_BIAS, NONEMPTY_ROWS, STRICT_KEYS, Offer, Refusal, Setting
from attn_pass.targets.constraints import (
    ANY_BACKEND,
    AUTOCAST,
    Attended,
    Constraint,
    HasAttention,
    refusal,
    unless,
)
from attn_pass.targets.flex.blocks import UNKNOWN_SHARE
from attn_pass.targets.flex.score import amplifies, multiplied_once, names_of, outgrows_float32
from attn_pass.targets.key_bounds import VALID_SHARE, Bounds, with_keep
from attn_pass.targets.key_ranges import end_of_keys, first_key, for_batch
from attn_pass.targets.lower import Lowering
from attn_pass.targets.masks import ALL_KEYS_COUNT, hides_keys
from attn_pass.targets.operands import dense_last
from attn_pass.targets.problem import problem_of

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SEEDS = (1 << 63) - 1


@dataclass(frozen=True)
class CpuPlan:
    """The operator's arguments: a row's keys, the score function and its inputs, the result of fully masked rows."""

    bounds: Bounds
    score: str
    captured: tuple[Expr, ...]
    fully_masked: str
    with_logarithm: bool
    inspects: bool = False  # it is told which keys an added mask rules out, which is found at run time
    distances: ByDistance | None = None  # what is added, where the kernel gets it as a vector
    fill: float | None = None  # what a score becomes that is not kept, where that counts


class CpuKernel:
    """`torch.ops.attn_pass.attention`."""

    name = "cpu_kernel"
    takes_any_score = True
    takes_valid_range = True

    def must_be_named(self, setting: Setting) -> bool:
        """Where Inductor does not compile the graph: called through Python the operator takes 50 us more."""
        return setting.runner == "other"

    def consider(self, attention: Attention, variant: str, setting: Setting) -> Offer[CpuPlan] | Refusal:
        """Takes any function of the product with a bias and a mask."""
        reason = refusal(CONSTRAINTS, Attended(attention, setting))
        if reason is not None:
            return Refusal(self.name, reason, other_device=setting.device.type != "cpu")
        if not training.adds_to_empty_rows(attention, setting):
            attention = with_keep(attention)
        if setting.numerics != "strict":
            attention = _kept_beside(attention, setting)
        gives_logarithm = _gives_logarithm(attention)
        score, captured = _score(attention)
        fill = training.fill_that_counts(attention, setting)
        decided = CpuPlan(
            training.bounds_beside(attention, setting, fill),
            score,
            captured,
            _fully_masked(attention, fill),
            with_logarithm=setting.wants_logarithm and gives_logarithm,
            inspects=masked_out.is_inspected(attention, setting),
            fill=fill,
            distances=added.distances_of(attention),
        )
        return Offer(
            self.name,
            variant,
            attention,
            _microseconds(attention, decided, setting),
            fused=True,
            plan=decided,
            assumptions=_assumed(attention, setting),
            score_mod=score_mod_source(attention.modified, names_of(attention)) if score else "",
            moved=problem_of(attention, setting.hint).moved_bytes,
            handles=(half_precision.NAME,) if cost.falls_short(setting.device, attention.compute_dtype) else (),
            gives_logarithm=gives_logarithm,
        )

    def emit(self, plan: Plan, nodes: Sequence[Node], offer: Offer[CpuPlan], setting: Setting) -> Value:
        """Plans the operator's call; operands are taken as they lie."""
        from attn_pass.devices.cpu.kernel import gradients, operator

        if setting.runner == "hook":  # Inductor is compiling the graph already
            from attn_pass.devices.cpu.kernel import gradient_template

            del gradient_template  # importing it registers the lowerings
        a, decided = offer.attention, offer.plan
        lower = Lowering(plan, nodes, a)
        query = lower.query(a.compute_dtype)
        key = lower.key(a.compute_dtype)
        value = lower.value(a.compute_dtype)
        optional: dict[str, object] = {"fully_masked": decided.fully_masked}
        optional |= _bounded(lower, decided.bounds)
        if decided.bounds.rest != TRUE:
            optional["keep"] = _keep_tensor(lower, decided.bounds.rest)
        if a.mask.bias is not None:
            optional |= added.arguments(lower, decided.distances, setting)
        if decided.fill is not None:
            optional |= {"fill": decided.fill, "fill_is_added": a.mask.keep is not None and a.mask.keep.is_added}
        if a.dropout:
            optional |= {"seed": _drawn_seed(plan, query), "dropout": a.dropout}
        if decided.inspects:
            optional["keep"] = masked_out.keep_of_mask(lower)
        if decided.score:
            read = [dense_last(plan, _in_float32(lower, e, lower.mask_groups())) for e in decided.captured]
            optional |= {"score": decided.score, "captured": read}
        if a.sink is not None:
            optional["sink"] = _in_float32(lower, a.sink, (a.batch, a.heads, a.rows, ()))
        differs = a.needs_grad or a.dropout > 0
        if not decided.with_logarithm and not differs:
            call = partial(plan.call, operator.OPERATOR, query, key, value, a.scale, **optional)
            return lower.result(call(), otherwise=partial(call, heads_first=True))
        function = gradients.FORWARD if differs else operator.WITH_LSE
        both = plan.call(function, query, key, value, a.scale, **optional)
        if not decided.with_logarithm:
            return lower.result(plan.call(getitem, both, 0))
        plan.logarithm = lower.logarithm(plan.call(getitem, both, 1))
        return lower.result(plan.call(getitem, both, 0))


def _kept_beside(a: Attention, setting: Setting) -> Attention:
    """The same with bias and mask each for itself, where the program adds or replaces by both, and that may be so."""
    if not a.needs_grad and not a.dropout:
        return kept_beside_learned(a) or kept_beside_products(a) or a
    apart = kept_beside_learned(a)
    if apart is None or apart.mask.keep is None or refusal(training.CONSTRAINTS, Attended(apart, setting)) is not None:
        return over_fewest_axes(a)
    passes = apart.mask.keep.is_added or not training.adds_to_empty_rows(apart, setting)
    return apart if passes else over_fewest_axes(a)


def _has_heads(c: HasAttention) -> bool:
    a = c.attention
    return not any(c.setting.can_be_zero(n) for n in (a.query_heads, product(x.size for x in a.kv_heads)))


CONSTRAINTS: tuple[Constraint[HasAttention], ...] = (
    Constraint("device", "the CPU kernel runs on CPUs only", lambda c: c.setting.device.type == "cpu"),
    Constraint(
        "dtype",
        lambda c: f"the CPU kernel computes in float32, and this attention in {dtype_name(c.attention.compute_dtype)}",
        lambda c: c.attention.compute_dtype in _DTYPES,
    ),
    *training.CONSTRAINTS,
    AUTOCAST,
    ANY_BACKEND,
    Constraint(
        "program",
        "an exported program with the CPU kernel would need attn_pass at run time",
        lambda c: c.setting.program != "export",
    ),
    Constraint("heads", "the number of heads may be 0", _has_heads),
    Constraint("numerics", STRICT_KEYS, lambda c: c.attention.mask.bias is None or ALL_KEYS_COUNT.holds(c)),
    unless("scores", lambda c: _refusal_of_score(c.attention)),
    unless("compiler", lambda c: build.missing()),
)


def _bounded(lower: Lowering, bounds: Bounds) -> dict[str, object]:
    """The bounds as the operator's arguments."""
    sizes = {
        "before": None if bounds.lower is None else -1 * bounds.lower,
        "after": bounds.upper,
        "start": bounds.first,
        "end": None if bounds.last is None else bounds.last + 1,
        "prefix": bounds.prefix,
    }
    if bounds.chunk is not None:
        shifts = {"chunk_rows": bounds.chunk.row_shift, "chunk_keys": bounds.chunk.key_shift}
        sizes |= {"chunk": bounds.chunk.size, **{name: shift for name, shift in shifts.items() if shift != 0}}
    optional: dict[str, object] = {n: lower.plan.size(size) for n, size in sizes.items() if size is not None}
    if bounds.shift is not None:
        optional["shift"] = for_batch(lower, bounds.shift, aten.amax.default)
    first, end = first_key(lower, bounds.starts), end_of_keys(lower, bounds.ends)
    return optional | {name: value for name, value in (("starts", first), ("ends", end)) if value is not None}


def _keep_tensor(lower: Lowering, condition: Expr) -> Value:
    """A condition as a boolean tensor: one of the program's, or computed once for all sites that have the same."""
    with lower.plan.sharing():
        keeps = lower.condition(condition, lower.mask_groups())
        if not isinstance(condition, Apply) or condition.op == "cast":
            return keeps
        return through_bytes(lower.plan.call, keeps)


def _in_float32(lower: Lowering, expression: Expr, groups: Sequence[tuple[Axis, ...]]) -> Value:
    value = lower.expression(expression, groups)
    return value if fake_of(value).dtype == torch.float32 else lower.plan.call(aten.to.dtype, value, torch.float32)


def _drawn_seed(plan: Plan, query: Value) -> Value:
    """Of dropout, from torch's generator: the same for the forward, the backward, and a checkpoint's second forward."""
    device = fake_of(query).device
    return plan.call(aten.randint.low, 0, _SEEDS, [1], dtype=torch.int64, device=device)


def _score(a: Attention) -> tuple[str, tuple[Expr, ...]]:
    """The score function's text and what it captures; nothing where the scores are a scaled product.

    Raises:
        NotImplementedError: the kernel has no such function.
    """
    if not a.not_affine:
        return "", ()
    operands: list[Expr] = []

    def number_of(e: Expr) -> int:
        if e not in operands:
            operands.append(e)
        return operands.index(e)

    return written(multiplied_once(a.modified), number_of), tuple(operands)


def _refusal_of_score(a: Attention) -> str | None:
    if not a.not_affine:
        return None
    if (reason := amplifies(a.modified) or outgrows_float32(a)) is not None:
        return reason
    try:
        captured = _score(a)[1]
    except NotImplementedError as error:
        return str(error)
    return (
        f"the scores read {len(captured)} tensors, more than {MOST_CAPTURED}" if len(captured) > MOST_CAPTURED else None
    )


def _assumed(a: Attention, setting: Setting) -> tuple[str, ...]:
    promised = (NONEMPTY_ROWS,) if training.relies_on_nonempty_rows(a, setting) else ()
    if a.mask.bias_is_learned:
        return (*promised, LEARNED_BIAS)
    adds_mask = a.mask.bias is not None and not added.is_alone(a)
    return (*promised, FINITE_KEYS) if adds_mask and hides_keys(a, setting) else promised


def _fully_masked(a: Attention, fill: float | None) -> str:
    if fill is not None or (a.dropout and a.mask.replaces_with_number):  # there is no such row then
        return "nan"
    if a.mask.replaces_with_number and (a.mask.bias is None or a.mask.bias_is_learned):
        return "mean"
    return "nan" if a.empty_row_is_nan else "zero"


def _gives_logarithm(a: Attention) -> bool:
    """Whether the kernel's log-sum-exp is the program's: of the scores as they are, for every row of the softmax.

    The kernel gives -inf for a fully masked row, where a number that masks would be in the sum.
    """
    rows = [x for group in (a.batch, a.heads, a.rows) for x in group if x.size != 1]
    row_axes = [x for dims in a.score_rows for x in dims if x.size != 1]
    masks = not a.mask.replaces_with_number or a.mask.never_empty
    of_sink = a.needs_grad and a.sink is not None  # the backward's weights have the sink in their sum
    in_order = set(rows) == set(row_axes) and len(rows) == len(row_axes)
    return bool(a.score_rows) and in_order and masks and not of_sink


def _microseconds(a: Attention, decided: CpuPlan, setting: Setting) -> float:
    bounds = decided.bounds
    problem = problem_of(a, setting.hint)
    if a.mask.bias is None:
        problem = replace(problem, mask_bytes=1, mask_elements=0 if bounds.rest == TRUE else problem.mask_elements)
    elif decided.distances is not None:
        problem = replace(problem, mask_elements=setting.hint(decided.distances.axis.size))
    # Where fully masked rows average all keys beside a bias or with dropout nothing is skipped.
    skips = decided.fill is None and (a.mask.bias is None or a.mask.never_empty or added.is_alone(a))
    share = cost.computed_share(a, problem, setting.hint) if skips else 1.0
    share *= VALID_SHARE if bounds.at_run_time else 1.0
    if skips and setting.blocks is not None:
        share = min(share, _share_of(setting.blocks, a, problem, setting))
    forward = cost.microseconds(a, problem, setting.device, share)
    by_distance = decided.distances is not None
    return cost.in_training(forward, a, problem, by_distance=by_distance) if a.needs_grad else forward


def _share_of(blocks: Blocks, a: Attention, problem: Problem, setting: Setting) -> float:
    """The share of the scores in what a call's block mask keeps: the kernel looks at its mask, and skips the same."""
    if sum(axis.size != 1 for axis in a.rows) > 1:  # packed rows, whose positions are not those of the queries
        return 1.0
    structure = replace(a.mask.structure, row=row_index(a.rows), parts=blocks.parts)
    known = replace(a, mask=replace(a.mask, structure=structure))
    share = cost.computed_share(known, problem, setting.hint)
    return share * (UNKNOWN_SHARE if blocks.hides_more else 1.0)
