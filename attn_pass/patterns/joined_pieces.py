"""One piece of joined scores: a product, scaled by a number, with its own bias and mask."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from attn_pass.graph.values import tensor_value
from attn_pass.reading.products import Product
from attn_pass.reading.reader import Reader
from attn_pass.reading.vocabulary import Call


@dataclass(frozen=True)
class Piece:
    """``masked_fill(scale * product + bias, mask, fill)``; ``keeps`` where the mask is True for what is kept."""

    product: Product
    nodes: tuple[Node, ...]
    scale: float | int | None = None
    divides: bool = False
    bias: Node | None = None
    mask: Node | None = None
    keeps: bool = False
    fill: float | None = None


def piece_of(reader: Reader, value: object, user: Node) -> Piece | None:
    """The piece if only ``user`` uses it and it is never written; None otherwise."""
    if not isinstance(value, Node) or set(value.users) != {user} or reader.effects.mutations(value):
        return None
    product, call = reader.product(value), reader.call(value)
    if product is not None:
        plain = product.alpha == 1 and (product.addend is None or product.beta == 0) and not product.factors
        return Piece(product, (value,)) if plain else None
    if call is None or call.in_place or tensor_value(value) is None:
        return None
    piece = None
    if call.op in ("mul", "div"):
        piece = _scaled(reader, value, call)
    elif call.op == "add" and call["alpha"] == 1:
        piece = _with_bias(reader, value, call)
    elif call.op in ("masked_fill", "where", "method_where"):
        piece = _masked(reader, value, call)
    return None if piece is None else replace(piece, nodes=(*piece.nodes, value))


def _scaled(reader: Reader, value: Node, call: Call) -> Piece | None:
    inner, scale = call["input"], call["other"]
    if call.op == "mul" and not isinstance(inner, Node):
        inner, scale = scale, inner
    if not isinstance(scale, (int, float)) or isinstance(scale, bool) or call.get("rounding_mode") is not None:
        return None
    piece = piece_of(reader, inner, value)
    bare = piece is not None and piece.nodes == (piece.product.node,)
    return replace(piece, scale=scale, divides=call.op == "div") if piece is not None and bare else None


def _with_bias(reader: Reader, value: Node, call: Call) -> Piece | None:
    for inner, bias in ((call["input"], call["other"]), (call["other"], call["input"])):
        fake = tensor_value(bias)
        if not isinstance(bias, Node) or fake is None:
            continue
        piece = piece_of(reader, inner, value)
        if piece is None or piece.bias is not None or piece.mask is not None:
            continue
        product = tensor_value(piece.product.node)
        if product is not None and fake.dtype == product.dtype and fake.device == product.device:
            return replace(piece, bias=bias)
    return None


def _masked(reader: Reader, value: Node, call: Call) -> Piece | None:
    if call.op == "masked_fill":
        inner, mask, fill, keeps = call["input"], call["mask"], call["value"], False
    else:
        mask, inner, fill, keeps = call["condition"], call["input"], call["other"], True
        if not isinstance(inner, Node) or isinstance(inner, (int, float)):
            inner, fill, keeps = fill, inner, False
    fake = tensor_value(mask)
    if not isinstance(mask, Node) or fake is None or fake.dtype != torch.bool or not isinstance(fill, (int, float)):
        return None
    piece = piece_of(reader, inner, value)
    product = None if piece is None else tensor_value(piece.product.node)
    if piece is None or piece.mask is not None or product is None or fake.device != product.device:
        return None
    return replace(piece, mask=mask, keeps=keeps, fill=float(fill))
