"""Sums of products: matmul, bmm, baddbmm and einsum as one thing, letters over operands."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from attn_pass.graph.values import Sizes, tensor_value
from attn_pass.model.index import Axis, Index
from attn_pass.reading.views import Position
from attn_pass.reading.vocabulary import Call

PRODUCTS = frozenset({"matmul", "baddbmm", "einsum"})


@dataclass(frozen=True)
class Product:
    """``result[out] = alpha * sum_summed left[...] * right[...] + beta * addend``, one letter a dimension."""

    node: Node
    left: Node
    right: Node
    out_letters: str
    left_letters: str
    right_letters: str
    summed: str
    summed_size: Index
    left_shape: Position
    right_shape: Position
    addend: Node | None = None
    alpha: Any = 1
    beta: Any = 1

    def positions(self, position: Position, summed: Axis) -> tuple[Position, Position]:
        """Where the operands are read for the element at ``position``, ``summed`` being the index summed over."""
        from attn_pass.model.index import axis_index

        at: dict[str, Index] = dict(zip(self.out_letters, position))
        at[self.summed] = axis_index(summed)
        return (
            tuple(0 if size == 1 else at[c] for c, size in zip(self.left_letters, self.left_shape)),
            tuple(0 if size == 1 else at[c] for c, size in zip(self.right_letters, self.right_shape)),
        )


def product_of(node: Node, call: Call, sizes: Sizes) -> Product | None:
    """The product a call computes, or None when it is none, or sums over several indices at once."""
    addend, alpha, beta = None, 1, 1
    if call.op == "einsum":
        return _einsum(node, call, sizes)
    if call.op == "matmul":
        left, right = call["input"], call["other"]
    elif call.op == "baddbmm":
        left, right, addend = call["batch1"], call["batch2"], call["input"]
        alpha, beta = call["alpha"], call["beta"]
    else:
        return None
    a, b = tensor_value(left), tensor_value(right)
    if a is None or b is None or a.dim() == 0 or b.dim() == 0:
        return None
    batch = string.ascii_lowercase[: max(a.dim(), b.dim(), 2) - 2]
    left_letters = "K" if a.dim() == 1 else batch[len(batch) - (a.dim() - 2) :] + "IK"
    right_letters = "K" if b.dim() == 1 else batch[len(batch) - (b.dim() - 2) :] + "KJ"
    out_letters = batch + ("I" if a.dim() > 1 else "") + ("J" if b.dim() > 1 else "")
    return _make(node, left, right, (left_letters, right_letters, out_letters), sizes, addend, alpha, beta)


def _make(
    node: Node,
    left: Node,
    right: Node,
    letters: tuple[str, str, str],
    sizes: Sizes,
    addend: Node | None = None,
    alpha: Any = 1,
    beta: Any = 1,
) -> Product | None:
    a, b = tensor_value(left), tensor_value(right)
    if a is None or b is None:
        return None
    left_letters, right_letters, out_letters = letters
    summed = (set(left_letters) | set(right_letters)) - set(out_letters)
    if len(summed) != 1 or not summed <= set(left_letters) & set(right_letters):
        return None
    if any(len(set(text)) != len(text) for text in letters):
        return None
    (letter,) = summed
    left_shape, right_shape = sizes.shape(a), sizes.shape(b)
    size = left_shape[left_letters.index(letter)]
    if size != right_shape[right_letters.index(letter)]:
        return None
    return Product(
        node,
        left,
        right,
        out_letters,
        left_letters,
        right_letters,
        letter,
        size,
        left_shape,
        right_shape,
        addend,
        alpha,
        beta,
    )


def _einsum(node: Node, call: Call, sizes: Sizes) -> Product | None:
    operands = call.get("operands", ())
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = tuple(operands[0])
    equation = call["equation"]
    if not isinstance(equation, str) or "->" not in equation or len(operands) != 2:
        return None
    inputs, out = equation.replace(" ", "").split("->")
    parts = inputs.split(",")
    if len(parts) != 2:
        return None
    values = [tensor_value(o) for o in operands]
    if values[0] is None or values[1] is None:
        return None
    unused = [c for c in string.ascii_uppercase if c not in equation]
    hidden = [v.dim() - len(p.replace("...", "")) if "..." in p else 0 for v, p in zip(values, parts) if v is not None]
    most = max(hidden)
    if most > len(unused):
        return None
    names = "".join(unused[:most])
    letters = [p.replace("...", names[most - h :]) for p, h in zip(parts, hidden)]
    if any(len(text) != v.dim() for text, v in zip(letters, values) if v is not None):
        return None
    return _make(node, operands[0], operands[1], (letters[0], letters[1], out.replace("...", names)), sizes)
