"""Keys that a mask rules out, found at run time: it is an input of the graph, and has no known structure.

Where scores are replaced, a row keeps the keys that its condition does; all of them where it keeps none, if the row is
then the mean of all values. A matrix that is made once for all layers and passed in adds 0 to some scores and the
dtype's lowest number to all others. A score with such a number added counts for nothing beside any other. So the keys
that a row keeps are those whose element does not absorb a score, or all keys where every element does.
"""

from __future__ import annotations

import torch

from attn_pass.graph.edit import Value, aten
from attn_pass.model.attention import Attention
from attn_pass.model.expression import Apply, Expr, Load
from attn_pass.model.mask import ABSORBING
from attn_pass.targets.lower import Lowering

_WIDE = (torch.float32, torch.bfloat16)  # their lowest numbers absorb a score in float32


def added(a: Attention) -> Load | None:
    """The tensor that is added to the scores as it is, if its numbers can tell which keys count; nothing else masks."""
    load = None if a.mask.bias is None or a.mask.keep is not None or a.not_affine else _loaded(a.mask.bias)
    if load is None or a.sources[load.source].dtype not in _WIDE or a.score_dtype not in _WIDE:
        return None
    return load


def _loaded(bias: Expr) -> Load | None:
    """The tensor, but for a cast that keeps its numbers."""
    if isinstance(bias, Apply) and bias.op == "cast" and bias.dtype in _WIDE:
        return _loaded(bias.args[0])
    return bias if isinstance(bias, Load) else None


def keep_of_added(lower: Lowering) -> Value:
    """The keys that may count under what is `added`, as a boolean tensor that broadcasts to (B, H, L, S)."""
    call, bias = lower.plan.call, lower.attention.mask.bias
    assert bias is not None
    absorbs = call(aten.le.Scalar, lower.expression(bias, lower.mask_groups()), ABSORBING)
    nothing = call(aten.all.dim, absorbs, -1, True)
    return call(aten.logical_or.default, call(aten.logical_not.default, absorbs), nothing)


def keep_of_condition(lower: Lowering, condition: Expr, *, averages: bool) -> Value:
    """The keys that a condition keeps, the same way; with ``averages`` a row that keeps none keeps all of them."""
    call, keeps = lower.plan.call, lower.condition(condition, lower.mask_groups())
    if not averages:
        return keeps
    nothing = call(aten.logical_not.default, call(aten.any.dim, keeps, -1, True))
    return call(aten.logical_or.default, keeps, nothing)
