"""`attn_pass::take_rows` and `attn_pass::put_rows`: rows out of a tensor and back into it, each the other's gradient.

Autograd's own gradient of rows that are taken adds them up in zeros, number by number, since a row may be taken twice,
and that of rows that are put back is the same. Rows of a region are there once each: both gradients are gathers, which
Inductor makes a part of the loops around them. Neither operator is left when a program is traced below autograd.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("attn_pass", "FRAGMENT")
_ROWS = "Tensor x, Tensor index, Tensor place, Tensor there, int dim"
for _name in ("take_rows", "put_rows"):
    LIBRARY.define(f"{_name}({_ROWS}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))

TAKE = torch.ops.attn_pass.take_rows.default
"""Of (.., N, ..) the n rows that ``index`` (n,) names, (.., n, ..).

The other arguments are for the gradient: of all N rows whether they are ``there``, and their ``place`` among the n.
"""
PUT = torch.ops.attn_pass.put_rows.default
"""Of (.., n, ..) all N rows, (.., N, ..): each at its ``place`` (N,) where it is ``there``, and zeros elsewhere."""


def _take(x: Tensor, index: Tensor, place: Tensor, there: Tensor, dim: int) -> Tensor:
    return x.index_select(dim, index)


def _put(x: Tensor, index: Tensor, place: Tensor, there: Tensor, dim: int) -> Tensor:
    shape = [-1 if d == dim else 1 for d in range(x.dim())]
    return torch.where(there.reshape(shape), x.index_select(dim, place), 0)


class _Gather(torch.autograd.Function):
    """One of the two, whose gradient is the other."""

    generate_vmap_rule = True

    @staticmethod
    def forward(puts: bool, x: Tensor, *rows: Any) -> Tensor:
        return (_put if puts else _take)(x, *rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.puts, _, *rows, ctx.dim = inputs
        ctx.save_for_backward(*rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (grad,) = grads
        return None, (TAKE if ctx.puts else PUT)(grad, *ctx.saved_tensors, ctx.dim), None, None, None, None


def _with_gradient(puts: bool, *given: Any) -> Tensor:
    result: Tensor = _Gather.apply(puts, *given)  # type: ignore[no-untyped-call]
    return result


for _name, _puts, _rows_of in (("take_rows", False, _take), ("put_rows", True, _put)):
    LIBRARY.impl(_name, _rows_of, "CompositeImplicitAutograd")
    # By its own key: torch prefers what is composite to `Autograd`, which stands for all such keys.
    LIBRARY.impl(_name, partial(_with_gradient, _puts), "AutogradCPU")
