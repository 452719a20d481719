"""Expands `F.cosine_similarity` as torch computes it: the sum of a product of two tensors divided by their lengths.

Of queries and keys it is a product of normalised ones, which is read as any other. The parts stand in the place of the
call while a graph is read, and it is one call again where nothing was made of them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from attn_pass.graph.allowed import InPieces
from attn_pass.graph.edit import Plan, SizeNodes
from attn_pass.graph.effects import Effects
from attn_pass.graph.expand import CannotExpand, expand
from attn_pass.graph.regions import Region, Regions
from attn_pass.graph.values import PLAIN_TENSORS, Sizes, tensor_value
from attn_pass.reading.vocabulary import Call, operation_of, understand

aten = torch.ops.aten


def take_apart(
    gm: GraphModule, sizes: Sizes, outer: Region, in_body: bool, *, knows_gradients: bool = True
) -> list[InPieces]:
    """Expands every such call of a graph that runs under ``outer``, if its parts compute the same.

    ``knows_gradients``: whether the fake values show what needs a gradient.
    """
    calls = [node for node in gm.graph.nodes if operation_of(node) == "cosine_similarity"]
    if not calls:
        return []
    effects, regions, size_nodes = Effects(gm.graph), Regions(gm.graph, outer), SizeNodes(gm, sizes)
    expanded = []
    for node in calls:
        region = regions.of(node)
        size_nodes.made.clear()
        try:
            trained = _check(node, understand(node), region, sizes) or not knows_gradients
            plan = Plan(gm, node, region, size_nodes, effects, in_body)
            expanded.append(InPieces(node, expand(plan, partial(_similarity, trained=trained))))
        except CannotExpand:
            continue
    return expanded


def _check(node: Node, call: Call | None, region: Region, sizes: Sizes) -> bool:
    """Whether a gradient is computed of it. Raises `CannotExpand` where its parts would be something else."""
    if call is None or region.functorch:
        raise CannotExpand("its arguments or its surroundings are unknown")
    values = [tensor_value(call[name]) for name in ("x1", "x2")]
    one, other = values
    if one is None or other is None or not all(isinstance(v, PLAIN_TENSORS) for v in values):
        raise CannotExpand("it is not of two plain tensors")
    if one.dtype != other.dtype or not one.is_floating_point():
        raise CannotExpand("its tensors are cast before it")
    if region.autocast_dtype(one.device.type) is not None:
        raise CannotExpand("autocast may cast the call, and not its parts")
    rank, dim = max(one.dim(), other.dim()), call["dim"]
    if type(dim) is not int or not -rank <= dim < rank:
        raise CannotExpand("its dimension is not known")
    lengths = {((1,) * (rank - v.dim()) + sizes.shape(v))[dim] for v in (one, other)}
    if len(lengths) != 1:
        raise CannotExpand("a tensor is expanded along the dimension it is normalised over")
    return region.grad_enabled is not False and (one.requires_grad or other.requires_grad)


def _similarity(x1: torch.Tensor, x2: torch.Tensor, dim: int = 1, eps: float = 1e-8, *, trained: bool) -> Any:
    """``cosine_similarity`` of ``aten/src/ATen/native/Distance.cpp``, without expanding its tensors first."""
    one, other = (_unit(_with_rank(x, max(x1.dim(), x2.dim())), dim, eps, trained) for x in (x1, x2))
    return aten.sum.dim_IntList(aten.mul.Tensor(one, other), [dim])


def _with_rank(x: torch.Tensor, rank: int) -> Any:
    return x if x.dim() == rank else _with_rank(aten.unsqueeze.default(x, 0), rank)


def _unit(x: torch.Tensor, dim: int, eps: float, trained: bool) -> Any:
    """The tensor divided by its length, or by ``eps`` where that is longer.

    In training torch passes the gradient of the length on there, too, where ``clamp`` would stop it.
    """
    length = aten.linalg_vector_norm.default(x, 2, [dim], True)
    if not trained:
        return aten.div.Tensor(x, aten.clamp_min.default(length, eps))
    nothing = aten.sub.Tensor(length, aten.detach.default(length))
    return aten.div.Tensor(x, aten.where.self(aten.lt.Scalar(length, eps), aten.add.Tensor(nothing, eps), length))
