"""The second step of a description: the scores as scale, factors, bias and mask, or as a function of the product."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from attn_pass.model.added_masks import bias_beside_mask
from attn_pass.model.attention import Factor
from attn_pass.model.distance import ByDistance
from attn_pass.model.expression import Const, Dot, Expr, Load, apply, expression_axes, loads, with_dot
from attn_pass.model.mask import Apart, Computed, Mask
from attn_pass.model.rematerializable import is_repeatable
from attn_pass.model.views import Group, NoView, view_steps
from attn_pass.reading import half
from attn_pass.reading.arrangement import Arrangement, Roles
from attn_pass.reading.masks import name_mask
from attn_pass.reading.parts import Shallower
from attn_pass.reading.reader import Reader
from attn_pass.reading.scores import Modified, NotAffine, Scores, modified, normalise, takes_a_mask_back
from attn_pass.reading.unreadable import Unreadable

# A fused backward takes exp(score - logsumexp), and beside 1e38 the logarithm of how many keys there are is lost.
_TURNED = "what was added to the scores, perhaps a mask, is multiplied by a negative number, in training"
# Minus -inf is inf, its row NaN, and the guard makes it zero.
_TURNED_UNDER_A_GUARD = (
    "a guard against NaN weights, beside something that was added to the scores and multiplied by a negative number"
)


@dataclass(frozen=True)
class MaskedScores:
    """The scores of a site around its mask."""

    scores: Scores
    modified: Modified | None  # if they are not a scaled product
    has_factors: bool  # whether tensors were multiplied with them
    mask: Mask
    function: Expr  # of the product, before bias and mask; the product itself where it is scaled at most


def read_scores(arrangement: Arrangement, roles: Roles) -> MaskedScores:
    """Takes the scores apart. Raises `Shallower` or `Unreadable`."""
    scores, function, has_factors = _normalised(arrangement)
    mask = _mask(arrangement, roles, scores)
    score_function = Dot() if function is None else whole_score(arrangement, function.function)
    return MaskedScores(scores, function, has_factors, mask, score_function)


def _normalised(arrangement: Arrangement) -> tuple[Scores, Modified | None, bool]:
    parts = arrangement.parts
    try:
        scores = normalise(arrangement.score, parts.keys, parts.score_dtype)
        if scores.sign_flipped and parts.nan_guard:
            raise Unreadable(_TURNED_UNDER_A_GUARD, parts.result)
        if scores.sign_flipped and parts.needs_grad:
            raise NotAffine(_TURNED)
    except NotAffine as error:
        return _modified(arrangement, str(error))
    scale = scores.scale
    for name in ("query", "key"):
        scale *= arrangement.forms[name].scale
    extra = []
    for number, (factor, inverse) in enumerate(arrangement.factors):
        if expression_axes(factor) & {parts.keys, parts.dim}:
            name = arrangement.operand_of_factor(number)
            raise Shallower(name, "a factor differs from key to key or along the head dim")
        extra.append(Factor(factor, inverse))
    return replace(scores, scale=scale, factors=(*scores.factors, *extra)), None, bool(scores.factors)


def _modified(arrangement: Arrangement, reason: str) -> tuple[Scores, Modified, bool]:
    """The bias and the mask around scores that are not a scaled product; folded terms are part of the function."""
    parts = arrangement.parts
    try:
        function = modified(arrangement.score, parts.keys, parts.score_dtype, reason)
    except NotAffine as error:
        raise Unreadable(str(error), parts.result) from None
    if parts.score_dtype == torch.float16:
        inside = half.refusal_of_function(arrangement.deep(function.function))
        if inside is not None:
            raise Unreadable(inside, parts.result)
    for number, (factor, _) in enumerate(arrangement.factors):
        if parts.dim in expression_axes(factor):
            raise Shallower(arrangement.operand_of_factor(number), "a factor differs along the head dim")
    return function.around, function, any(expression_axes(f) for f, _ in arrangement.factors)


def whole_score(arrangement: Arrangement, score: Expr) -> Expr:
    """A function of the product as written, with what was folded out of the operands multiplied back in."""
    dot: Expr = Dot()
    number = arrangement.forms["query"].scale * arrangement.forms["key"].scale
    if number != 1.0:
        dot = apply("mul", dot, Const(number))
    for factor, inverse in arrangement.factors:
        dot = apply("div" if inverse else "mul", dot, factor)
    return score if isinstance(dot, Dot) else with_dot(score, dot)


# ---------------------------------------------------------------- the mask


def _mask(arrangement: Arrangement, roles: Roles, scores: Scores) -> Mask:
    """The mask by its name, and said again over distances and element by element where it can be."""
    parts = arrangement.parts
    bias = None if scores.bias is None else arrangement.deep(scores.bias)
    keep = None if scores.keep is None else arrangement.deep(scores.keep.condition)
    if bias is not None and takes_a_mask_back(bias):
        raise Unreadable("what was added to the scores, and absorbed them, is taken away again", parts.result)
    named = name_mask(scores.bias, scores.keep, bias, keep, parts.keys, roles.rows, parts.score_dtype)
    if parts.score_dtype == torch.float16:
        reason = half.refusal(scores, arrangement.deep, nan_guard=parts.nan_guard)
        if reason is not None:
            raise Unreadable(reason, parts.result)
    bias, keep = (None if named.bias is None else bias), (None if named.keep is None else keep)
    computed = _restated(arrangement, named, bias, keep)
    beside = None if bias is None or keep is not None else bias_beside_mask(bias)
    differentiable = computed
    passes_gradients = parts.needs_grad and _computes_gradients(arrangement)
    if beside is not None and computed is None and passes_gradients:
        differentiable = _restated(arrangement, named, bias, keep, gradients=True)
    apart = None if beside is None or differentiable is None else _apart(differentiable.bias, learned=computed is None)
    alone = bias if beside is None else None if apart is None else beside[0]
    return replace(
        named,
        by_distance=None if named.structure.is_causal else _by_distance(arrangement, roles, bias, keep),
        bias_by_distance=_by_distance(arrangement, roles, alone, None, gradients=passes_gradients),
        computed=computed,
        apart=apart,
    )


def _apart(bias: Expr | None, *, learned: bool) -> Apart | None:
    """Bias and mask of a sum; a fill in the place of a bias that is not ``learned`` is as good as one that is added."""
    beside = None if bias is None else bias_beside_mask(bias)
    return None if beside is None else Apart(beside[0], replace(beside[1], is_added=beside[1].is_added or not learned))


def _computes_gradients(arrangement: Arrangement) -> bool:
    """Whether all of the program does, so that what is computed of its tensors once more has their gradients."""
    regions, graph = arrangement.parts.reader.regions, arrangement.parts.result.graph
    return all(regions.of(node).grad_enabled is not False for node in graph.nodes)


def _by_distance(
    arrangement: Arrangement, roles: Roles, bias: Expr | None, condition: Expr | None, *, gradients: bool = False
) -> ByDistance | None:
    """A mask over distances alone, where it is that and what it is made of stays what it is.

    What needs a gradient is none unless there may be ``gradients``: kernels other than the CPU's have none of a vector.
    """
    parts, reader = arrangement.parts, arrangement.parts.reader
    real = [a for a in roles.rows if a.size != 1]
    needed = [e for e in (bias, condition) if e is not None]
    if len(real) != 1 or parts.keys.size == 1 or not needed:
        return None
    if not {parts.keys, *real} <= set().union(*(expression_axes(e) for e in needed)):
        return None
    if not all(_stays(arrangement, load, gradients=gradients) for e in needed for load in loads(e)):
        return None
    distance = ByDistance.of(bias, condition, parts.keys, real[0], tuple(s.shape for s in reader.sources))
    if distance is None:
        return None
    groups = (roles.batch, roles.heads, (), (distance.axis,))
    functions = [e for e in (distance.bias, distance.condition) if e is not None]
    return distance if all(is_view(reader, load, groups) for e in functions for load in loads(e)) else None


def _restated(
    arrangement: Arrangement, named: Mask, bias: Expr | None, condition: Expr | None, *, gradients: bool = False
) -> Computed | None:
    """The mask once more, of what needs no gradient unless there may be ``gradients``."""
    whole = _computed(arrangement, named, bias, condition, gradients=gradients)
    return whole or _lasting(arrangement, named, gradients=gradients)


def _computed(
    arrangement: Arrangement, named: Mask, bias: Expr | None, condition: Expr | None, *, gradients: bool
) -> Computed | None:
    """The mask computed element by element, where that gives what the program's own tensors hold.

    ``bias`` and ``condition`` are lifted as far as they go. What they load must still be what it was.
    """
    reader, result = arrangement.parts.reader, arrangement.parts.result
    needed = [e for e in (bias, condition) if e is not None]
    if not needed or named.structure.is_causal:
        return None
    if not all(is_repeatable(e, [s.dtype for s in reader.sources]) for e in needed):
        return None
    for load in (x for e in needed for x in loads(e)):
        node = reader.source_nodes[load.source]
        if node.graph is not result.graph or reader.order[node] >= reader.order[result]:
            return None
        if not _stays(arrangement, load, gradients=gradients):
            return None
    return Computed(bias, condition)


def _lasting(arrangement: Arrangement, named: Mask, *, gradients: bool) -> Computed | None:
    """The same from what is not written before the result is computed, where the mask is made of something that is.

    A row of a table that a rounded number decides is not looked up again, either: it is read where the program put it.
    """
    reader = arrangement.parts.reader
    with reader.lasting(reader.order[arrangement.parts.result]):
        bias = None if named.bias is None else arrangement.deep(named.bias)
        condition = None if named.keep is None else arrangement.deep(named.keep.condition)
    return _computed(arrangement, named, bias, condition, gradients=gradients)


def _stays(arrangement: Arrangement, load: Load, *, gradients: bool) -> bool:
    """Whether a loaded tensor keeps its values until the result is computed, and needs none of the ``gradients``."""
    parts, reader = arrangement.parts, arrangement.parts.reader
    gradient = reader.sources[load.source].needs_grad and parts.needs_grad
    return reader.stays(load, reader.order[parts.result]) and (gradients or not gradient)


def is_view(reader: Reader, load: Load, groups: tuple[Group, ...]) -> bool:
    """Whether a load is a view of its source with a dimension a group."""
    try:
        view_steps(reader.sources[load.source].shape, load.index, groups)
    except NoView:
        return False
    return True
