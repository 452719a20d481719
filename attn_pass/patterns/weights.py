"""What programs put around a softmax without changing it: row maxima, guards of fully masked rows, a mask, factors.

Row maxima are subtracted before it. The guards, the mask once more, and factors that differ from head to head follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, reduce

import torch
from torch.fx import Node

from attn_pass.graph.values import tensor_value
from attn_pass.model.attention import Factor
from attn_pass.model.conditions import conjuncts
from attn_pass.model.expression import (
    Apply,
    Const,
    Dot,
    Expr,
    Load,
    apply,
    contains_dot,
    expression_axes,
    loads,
    transform,
    walk,
    with_loads,
)
from attn_pass.model.index import Axis
from attn_pass.model.piecewise import where_it_is_one
from attn_pass.patterns.renormalised import renormalised_by
from attn_pass.reading.reader import Reader
from attn_pass.reading.scores import NEGATIVE_INFINITY, is_masking
from attn_pass.reading.unreadable import Unreadable
from attn_pass.reading.use_def import UseDefWalk
from attn_pass.reading.vocabulary import tensor_dims


@dataclass
class Weights:
    """The attention weights: the softmax itself, but for this."""

    guarded: bool = False  # rows whose every score is -inf are given weights of zero
    nan_guard: bool = False  # by a test for NaN, which a score that is NaN for another reason passes too
    zeroed: Expr | None = None  # where the weights are set to zero afterwards
    factors: tuple[Factor, ...] = ()  # of all weights of a row, in the order they were applied

    def zero(self, where: Expr) -> None:
        """Notes that weights are set to zero there as well."""
        self.zeroed = where if self.zeroed is None else apply("or", self.zeroed, where)


def read_weights(
    reader: Reader, use_def: UseDefWalk, expression: Expr, softmax: tuple[Node, int], keys: Axis
) -> tuple[Weights, tuple[Node, ...]]:
    """The operations on the weights and their nodes beside the walk; ``softmax`` is its input and dimension.

    Raises `Unreadable` for weights that are no longer a softmax.
    """
    weights = Weights()
    nodes: list[Node] = []
    while not isinstance(expression, Dot):
        inner = None
        if isinstance(expression, Apply) and expression.op == "where":
            inner = _guard_or_mask(reader, use_def, expression, softmax, weights, nodes, keys)
        elif isinstance(expression, Apply) and expression.op in ("mul", "div"):
            inner = _factor(reader, use_def, expression, weights, nodes, keys)
        if inner is None:
            name = expression.op if isinstance(expression, Apply) else "a mask"
            raise Unreadable(f"the attention weights are changed after the softmax ({name})", use_def.leaf)
        expression = inner
    return weights, tuple(nodes)


def _guard_or_mask(
    reader: Reader,
    use_def: UseDefWalk,
    expression: Apply,
    softmax: tuple[Node, int],
    weights: Weights,
    nodes: list[Node],
    keys: Axis,
) -> Expr | None:
    condition, yes, no = expression.args
    if isinstance(condition, Apply) and condition.op == "not":
        condition, yes, no = condition.args[0], no, yes
    for zeroes, zero, inner in ((True, yes, no), (False, no, yes)):
        if not isinstance(zero, Const) or zero.value != 0 or isinstance(inner, Const):
            continue
        if isinstance(inner, Dot) and _is_nan(reader, use_def, condition, nodes) and zeroes:
            weights.guarded = weights.nan_guard = True
            return inner
        if isinstance(condition, Load) and isinstance(inner, Dot):
            guard = _row_is_empty(reader, reader.source_nodes[condition.source], softmax, zeroes)
            if guard is not None and _is_of_its_row(reader, use_def, condition, softmax[1]):
                nodes += guard
                weights.guarded = True
                return inner
        if isinstance(inner, Dot) and keys not in expression_axes(condition) and not _holds_dot(condition):
            # Of the softmax itself: a factor of zero makes NaN of what was divided by zero.
            kept_row = apply("not", condition) if zeroes else condition
            weights.factors = (Factor(kept_row, chooses=True), *weights.factors)
            return inner
        if not _holds_dot(condition):
            where = deep(reader, use_def, condition)
            weights.zero(where if zeroes else apply("not", where))
            return inner
    return None


def _is_nan(reader: Reader, use_def: UseDefWalk, condition: Expr, nodes: list[Node]) -> bool:
    """Whether the condition is that the weight at the same place is NaN; adds the node that asks."""
    if isinstance(condition, Apply) and condition.op == "ne" and all(isinstance(a, Dot) for a in condition.args):
        return True
    if not isinstance(condition, Load) or condition not in use_def.loads:
        return False
    side = use_def.loads[condition]
    call = reader.call(side.node)
    if call is None or call.op != "isnan" or not isinstance(call["input"], Node):
        return False
    weights = UseDefWalk(reader, use_def.leaf, use_def.reach, use_def.region, of_weights=True)
    try:
        same = isinstance(weights.read(call["input"], condition.index, reader.order[side.node]), Dot)
    except Unreadable:
        return False
    if not same or weights.leaf_position != use_def.leaf_position:
        return False
    nodes += [side.node, *weights.internal]
    return True


def _factor(
    reader: Reader, use_def: UseDefWalk, expression: Apply, weights: Weights, nodes: list[Node], keys: Axis
) -> Expr | None:
    """A factor of whole rows, as a head mask or their own sum is; or the mask as ones and zeros."""
    left, right = expression.args
    inner, factor = (left, right) if _holds_dot(left) else (right, left)
    if _holds_dot(factor) or (expression.op == "div" and inner is not left):
        return None
    if keys not in expression_axes(factor):
        side = use_def.loads.get(factor) if isinstance(factor, Load) and expression.op == "div" else None
        own = None if side is None else renormalised_by(reader, use_def, side, keys)
        if own is not None:
            number, summing = own
            nodes += summing
            factor = Const(number)
        if factor != Const(1.0):
            weights.factors = (Factor(factor, expression.op == "div"), *weights.factors)
        return inner
    ones = where_it_is_one(_lifted(reader, use_def, factor))
    if expression.op == "mul" and ones is not None:
        weights.zero(_without_bool_casts(reader, apply("not", ones)))
        return inner
    return None


def _holds_dot(expression: Expr) -> bool:
    if isinstance(expression, Apply):
        return any(_holds_dot(a) for a in expression.args)
    return isinstance(expression, Dot)


def deep(reader: Reader, use_def: UseDefWalk, expression: Expr) -> Expr:
    """The expression with the loads of a walk lifted as far down as they can be."""
    return _without_bool_casts(reader, _lifted(reader, use_def, expression))


def _lifted(reader: Reader, use_def: UseDefWalk, expression: Expr) -> Expr:
    """The same, with what is loaded of a boolean tensor cast to a truth value."""
    values: dict[Load, Expr] = {}
    for load in loads(expression):
        side = use_def.loads.get(load)
        if side is not None:
            values[load] = reader.element(side.node, load.index, side.at)
    return with_loads(expression, values)


def _without_bool_casts(reader: Reader, expression: Expr) -> Expr:
    """The same, with what is a truth value already not converted to one."""

    def uncast(e: Expr) -> Expr | None:
        inner = e.args[0] if isinstance(e, Apply) and e.op == "cast" and e.dtype == torch.bool else None
        return inner if isinstance(inner, Load) and reader.sources[inner.source].dtype == torch.bool else None

    return transform(expression, uncast)


_WEAK_FILL = -1e4  # from here on a number is meant to mask where the weights of what it replaced are set to zero


def masked_once(reader: Reader, score: Expr, scores: UseDefWalk, zeroed: Expr, dtype: torch.dtype) -> tuple[Expr, bool]:
    """The score whose masks, set to zero again after the softmax, leave fully masked rows at zero.

    Also whether one of the fills is no masking number, which other scores of a row are assumed to be far above.
    Raises `Unreadable` unless both are the same masks: then every weight set to zero is zero already, but in fully
    masked rows, and a fill of -inf says what those become. A number beside another mask is no such fill: where the two
    mask all keys of a row, the weights that stay are shares of more keys than those.
    """
    zeroed = _without_bool_casts(reader, zeroed)  # twice negated, a truth value is converted to one
    wanted, masks, inner = set(conjuncts(zeroed, negated=True)), list[Expr](), score
    any_finite = is_weak = False
    while (outermost := _outermost_mask(inner)) is not None:
        masked, fill, inner = outermost
        masks.append(masked)
        any_finite |= fill != NEGATIVE_INFINITY
        is_weak |= not is_masking(fill, dtype)
        same = deep(reader, scores, reduce(partial(apply, "or"), masks))
        if any_finite and _may_mask(reader, scores, inner):
            continue
        settled = all(_is_settled(reader, reader.source_nodes[x.source]) for x in loads(same))
        if settled and set(conjuncts(same, negated=True)) == wanted:
            for mask in reversed(masks):
                inner = apply("where", mask, Const(NEGATIVE_INFINITY), inner)
            return inner, is_weak
    raise Unreadable("the attention weights are masked, but not by the mask of the scores", scores.leaf)


def _is_settled(reader: Reader, node: Node) -> bool:
    """Whether a tensor is no longer written once anything reads it, so that all who do read the same."""
    writes, aliases = reader.effects.mutations(node), set(reader.effects.aliases(node))
    passed = aliases.union(write.node for write in writes)
    reads = [reader.order[user] for alias in aliases for user in alias.users if user not in passed]
    return all(write.position < min(reads, default=0) for write in writes)


def _outermost_mask(score: Expr) -> tuple[Expr, float, Expr] | None:
    """``(what is masked, the number filled in, the score elsewhere)`` of the last mask of a score; None without one."""
    if isinstance(score, Apply) and score.op == "where":
        condition, yes, no = score.args
        for masked, fill, inner in ((condition, yes, no), (apply("not", condition), no, yes)):
            if isinstance(fill, Const) and float(fill.value) <= _WEAK_FILL:
                return masked, float(fill.value), inner
    return None


def _may_mask(reader: Reader, scores: UseDefWalk, score: Expr) -> bool:
    """Whether a score may hold a finite number that masks: one that is written, or in a tensor that is given."""

    def masks(part: Expr) -> bool:
        if isinstance(part, Const):
            return NEGATIVE_INFINITY < float(part.value) <= _WEAK_FILL
        if not isinstance(part, Load) or not reader.sources[part.source].dtype.is_floating_point:
            return False
        return reader.source_nodes[part.source].op in ("placeholder", "get_attr")

    return any(map(masks, walk(deep(reader, scores, score))))


# ---------------------------------------------------------------- before the softmax

_MAXIMA = ("amax", "max")


def without_row_reductions(
    reader: Reader, score: Expr, scores: UseDefWalk, keys: Axis
) -> tuple[Expr, tuple[Node, ...]]:
    """The score without maxima of its own rows taken off it, and the nodes that computed them.

    Whatever is the same for all keys of a row changes neither the softmax nor its gradient, as long as it is finite.
    """
    values: dict[Load, Expr] = {}
    nodes: list[Node] = []
    # In float16 what is added before and after it may have no sum: -40000 twice is -inf there.
    narrow = any((v := tensor_value(n)) is not None and v.dtype == torch.float16 for n in scores.internal)
    for load, side in scores.loads.items():
        if keys in expression_axes(load):
            continue
        chain = maximum_of(reader, side.written, scores)
        if chain is not None and _only_added(score, load) and not (narrow and _added_twice(score, load)):
            values[load] = Const(0.0)
            nodes += chain
    return (with_loads(score, values) if values else score), tuple(nodes)


def maximum_of(reader: Reader, node: Node, scores: UseDefWalk) -> tuple[Node, ...] | None:
    """The nodes from a maximum of the scores to ``node``; None if it is anything else."""
    nodes: list[Node] = []
    current: object = node
    while isinstance(current, Node) and len(nodes) < 8:
        call = reader.call(current)
        if call is None or call.in_place:
            return None
        nodes.append(current)
        source = call.args.get("input")
        if call.op in _MAXIMA and (call.op != "max" or not isinstance(call.get("other"), Node)):
            return tuple(nodes) if source in scores.internal else None
        if tensor_value(current) is not None and call.op not in (
            "detach",
            "expand",
            "getattr",
            "getitem",
            "reshape",
            "unsqueeze",
        ):
            return None
        current = source
    return None


def _only_added(score: Expr, load: Load) -> bool:
    """Whether the load is a term of sums and differences around which there are only scales by numbers and masks.

    A weak fill would be moved against the scores.
    """
    if isinstance(score, Apply) and load in loads(score):
        if score.op in ("add", "sub"):
            return all(a == load or load not in loads(a) or _only_added(a, load) for a in score.args)
        if score.op in ("mul", "div"):
            inner = [a for a in score.args if load in loads(a)]
            other = [a for a in score.args if load not in loads(a)]
            return len(inner) == 1 and isinstance(other[0], Const) and _only_added(inner[0], load)
        if score.op == "where" and load not in loads(score.args[0]):
            fills = [a for a in score.args[1:] if load not in loads(a)]
            masking = all(isinstance(f, Const) and is_masking(float(f.value), torch.float32) for f in fills)
            return masking and all(_only_added(a, load) for a in score.args[1:] if load in loads(a))
        return score.op == "cast" and _only_added(score.args[0], load)
    return False


def _added_twice(score: Expr, load: Load) -> bool:
    """Whether something joins the scores before the load is taken off them, and something after it."""
    if not isinstance(score, Apply) or load not in loads(score):
        return False
    inner = [a for a in score.args if a != load and load in loads(a)]
    others = [a for a in score.args if load not in loads(a)]
    after = score.op in ("add", "sub") and bool(inner) and not any(map(contains_dot, others))
    return (after and any(_is_joined(a, load) for a in inner)) or any(_added_twice(a, load) for a in inner)


def _is_joined(score: Expr, load: Load) -> bool:
    """Whether anything else than the load is added to the product."""
    sums = (e for e in walk(score) if isinstance(e, Apply) and e.op in ("add", "sub") and contains_dot(e))
    return any(a != load and not contains_dot(a) for e in sums for a in e.args)


# ---------------------------------------------------------------- fully masked rows


def _is_of_its_row(reader: Reader, use_def: UseDefWalk, condition: Load, dim: int) -> bool:
    """Whether a test of rows, with the dimension of the softmax kept, is read at the row that the weight is of."""
    at, shape = use_def.leaf_position, reader.shape(use_def.leaf)
    if at is None or len(at) != len(condition.index):
        return False
    rows = zip(at, condition.index, shape)
    return all(n == dim or size == 1 or mine == its for n, (mine, its, size) in enumerate(rows))


def _row_is_empty(reader: Reader, node: Node, softmax: tuple[Node, int], all_masked: bool) -> tuple[Node, ...] | None:
    """The nodes of a test that all scores of a row are -inf (``all_masked``), or that one is not; None otherwise."""
    scores, dim = softmax
    nodes: list[Node] = []
    current: object = node
    quantified = False
    while isinstance(current, Node):
        call = reader.call(current)
        if call is None:
            return None
        if current is not node or call.op in ("not", "all", "any", "copy"):
            nodes.append(current)
        if call.op in ("not", "copy"):
            all_masked ^= call.op == "not"
            current = call["input"]
            continue
        if call.op in ("all", "any") and not quantified:
            value = tensor_value(call["input"])
            dims = tensor_dims(call, "dim", value.dim()) if value is not None and call["dim"] is not None else None
            # all(x == -inf) says "empty"; any(x != -inf) says "not empty"
            if dims != (dim,) or not call["keepdim"] or (call.op == "all") != all_masked:
                return None
            quantified = True
            current = call["input"]
            continue
        if call.op in ("eq", "ne") and quantified:
            infinite = reader.scalar(call["other"], reader.order[current])
            is_scores = call["input"] is scores
            if (
                isinstance(infinite, Const)
                and infinite.value == NEGATIVE_INFINITY
                and is_scores
                and (call.op == "eq") == all_masked
            ):
                return tuple(nodes)
        return None
    return None
