"""Keys that a mask rules out, found at run time: it is an input of the graph, and has no known structure.

Where scores are replaced, a row keeps the keys that its condition does; all of them where it keeps none, if the row is
then the mean of all values. A matrix that is made once for all layers and passed in adds 0 to some scores and a very
low number to all others. A key has no weight if its element is lower than the highest of its row by more than scores
differ. The other keys are kept: all of them where all elements are as low, in a fully masked row.
"""

from __future__ import annotations

import torch

from attn_pass.graph.edit import Value, aten
from attn_pass.model.attention import Attention
from attn_pass.model.expression import Apply, Expr, Load
from attn_pass.model.index import is_at_most
from attn_pass.targets.lower import Lowering

BELOW_ALL = 1e8  # scores do not differ by as much; -1e9 is the weakest of the usual numbers that do
_WIDE = (torch.float32, torch.bfloat16)  # which hold such numbers


def added(a: Attention) -> Load | None:
    """The tensor that is added to the scores as it is, if its numbers can tell which keys count; nothing else masks."""
    load = None if a.mask.bias is None or a.mask.keep is not None or a.not_affine else _loaded(a.mask.bias)
    if not is_at_most(1, a.kv_len):  # of nothing there is no highest element
        return None
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
    numbers = lower.expression(bias, lower.mask_groups())
    lowest = call(aten.sub.Scalar, call(aten.amax.default, numbers, [-1], True), BELOW_ALL)
    # Not lower, which -inf is not than itself, nor NaN than anything: its row stays NaN.
    return call(aten.logical_not.default, call(aten.lt.Tensor, numbers, lowest))


def keep_of_condition(lower: Lowering, condition: Expr, *, averages: bool) -> Value:
    """The keys that a condition keeps, the same way; with ``averages`` a row that keeps none keeps all of them."""
    call, keeps = lower.plan.call, lower.condition(condition, lower.mask_groups())
    if not averages:
        return keeps
    nothing = call(aten.logical_not.default, call(aten.any.dim, keeps, -1, True))
    return call(aten.logical_or.default, keeps, nothing)
