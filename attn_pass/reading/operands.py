"""The operands of a product: every way to load one, from the tensor itself to the earliest tensor it is a view of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from attn_pass.graph.regions import Region
from attn_pass.graph.values import tensor_value
from attn_pass.model.expression import Const, Expr
from attn_pass.reading.reader import Reader
from attn_pass.reading.views import Position, broadcast_position


@dataclass(frozen=True)
class OperandForm:
    """One way to see an operand: ``scale * product(factors) * node[position]``."""

    node: Node
    position: Position
    at: int
    dtype: torch.dtype
    scale: float = 1.0
    factors: tuple[tuple[Expr, bool], ...] = ()


def operand(
    reader: Reader, node: Node, position: Position, at: int, region: Region, factors: bool
) -> list[OperandForm]:
    """Every way to see an operand, from the tensor itself to the furthest it can be followed back."""
    value = tensor_value(node)
    assert value is not None
    form = OperandForm(node, position, at, value.dtype)
    forms = [form]
    while True:
        if reader.regions.of(form.node) != region and reader.matters(form.node):
            return forms
        source = reader.back(form.node, form.position, form.at) or reader.through_copy(
            form.node, form.position, form.at
        )
        if source is not None:
            form = replace(form, node=source[0], position=source[1], at=source[2])
        else:
            deeper = _through_upcast(reader, form) or (_through_factor(reader, form, region) if factors else None)
            if deeper is None:
                return forms
            form = deeper
        if tensor_value(form.node) is not None:
            forms.append(form)


def _through_upcast(reader: Reader, form: OperandForm) -> OperandForm | None:
    """Through a cast that loses nothing (bfloat16 to float32); not behind a factor, applied in the wider type."""
    if form.factors:
        return None
    defined, call = reader.definition(form.node, form.at)
    if call is None or defined is not form.node or call.op != "cast" or call.in_place:
        return None
    before, after = tensor_value(call["input"]), tensor_value(form.node)
    if before is None or after is None or before.device != after.device or not before.is_floating_point():
        return None
    if torch.promote_types(before.dtype, after.dtype) != after.dtype or after.dtype == before.dtype:
        return None
    return replace(form, node=call["input"], at=reader.order[form.node], dtype=before.dtype)


def _through_factor(reader: Reader, form: OperandForm, region: Region) -> OperandForm | None:
    """Through a multiplication or division by a number, or by a tensor that is not as large as the operand.

    Not one in place (``q *= d ** -0.5``): what it was applied to is overwritten by the time the site is computed.
    """
    defined, call = reader.definition(form.node, form.at)
    if call is None or call.in_place or call.op not in ("mul", "div") or call.get("rounding_mode") is not None:
        return None
    time = reader.order[defined]
    left, right = call["input"], call["other"]
    tensor, factor = (left, right) if _rank(left) >= _rank(right) else (right, left)
    value = tensor_value(tensor)
    if not isinstance(tensor, Node) or value is None or (call.op == "div" and tensor is not left):
        return None
    after = tensor_value(form.node)
    if after is None or value.dtype != after.dtype or reader.shape(tensor) != reader.shape(form.node):
        return None
    inverse = call.op == "div"
    expression = reader.scalar(factor, time)
    form = replace(form, node=tensor, at=time)
    if isinstance(expression, Const):
        number = float(expression.value)
        if number == 0 or number != number or abs(number) == float("inf"):
            return None
        return replace(form, scale=form.scale / number if inverse else form.scale * number)
    if expression is None:
        if not isinstance(factor, Node) or tensor_value(factor) is None:
            return None
        where = broadcast_position(form.position, reader.shape(factor))
        source, where, read_at = reader.through_views(factor, where, time, region)
        expression = reader.load(source, where, read_at)
    return replace(form, factors=(*form.factors, (expression, inverse)))


def _rank(value: Any) -> int:
    fake = tensor_value(value)
    return -1 if fake is None else fake.dim()
