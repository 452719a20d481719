"""The input and the result of a description: `Parts` as a finder read them, and `Described`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from attn_pass.graph.values import tensor_value
from attn_pass.model.attention import Attention, Factor
from attn_pass.model.expression import Expr, Load, loads
from attn_pass.model.index import Axis, Index
from attn_pass.reading.operands import OperandForm
from attn_pass.reading.reader import Reader
from attn_pass.reading.use_def import SideLoad
from attn_pass.reading.views import Position


@dataclass(frozen=True)
class Parts:
    """What a finder lifted of one site, before it is sorted out."""

    reader: Reader
    result: Node
    output: tuple[Axis, ...]  # an axis a dimension of the result
    rows_at: tuple[Position, Index]  # the softmax's position without its key dimension: outer dimensions, row
    keys: Axis
    dim: Axis
    query: list[OperandForm]
    key: list[OperandForm]
    value: list[OperandForm]
    score: Expr
    side: dict[Load, SideLoad]
    score_dtype: torch.dtype  # in which masks and biases join the scores
    product_dtypes: tuple[torch.dtype, torch.dtype]  # of the two products
    dropout: float = 0.0
    empty_row_is_nan: bool = True
    nan_guard: bool = False  # weights that are NaN are set to zero
    fill_is_weak: bool = False  # weights are set to zero of scores that were filled with what is no mask's number
    result_factors: tuple[Factor, ...] = ()  # of the weights, the same for all keys of a row
    sink: Expr | None = None  # one more logit of every row, without a value
    by_logarithm: bool = False  # the softmax takes the logarithm of its sum off the scores
    plain_scores: bool = False  # the softmax is of ``score`` itself: nothing that it does not feel was left out
    factor_dtype: torch.dtype | None = None  # in which they are multiplied, where that is narrower

    @property
    def forms(self) -> dict[str, list[OperandForm]]:
        """Every way to see each operand."""
        return {"query": self.query, "key": self.key, "value": self.value}

    @property
    def needs_grad(self) -> bool:
        """Whether a gradient of the result may be needed."""
        value = tensor_value(self.result)
        return value is None or value.requires_grad


@dataclass(frozen=True)
class Described:
    """An attention, the node behind each of its sources, and the time from which each must hold its value."""

    attention: Attention
    nodes: tuple[Node, ...]
    read_at: dict[int, int]
    assumptions: tuple[str, ...] = ()  # what was concluded from values that a tensor has now
    fixed: tuple[str, ...] = ()  # those tensors, by name
    copies: tuple[Node, ...] = ()  # operands as written, where they are copies of the source that is now read
    written: Mapping[str, OperandForm] = field(
        default_factory=dict
    )  # each operand as written, over axes before ``split``
    split: Mapping[Axis, Index] = field(default_factory=dict)  # of those axes, into the attention's

    def read_by_mask(self) -> frozenset[Node]:
        """The nodes of whose tensors the mask is made."""
        mask = self.attention.mask
        parts = (e for e in (mask.deep_bias, mask.deep_condition) if e is not None)
        return frozenset(self.nodes[load.source] for part in parts for load in loads(part))


class Shallower(Exception):
    """What an operand was followed back to does not fit: it is taken one step less far back."""

    def __init__(self, operand: str, why: str) -> None:
        super().__init__(operand)
        self.operand, self.why = operand, why
