"""What the flex target makes of a program for CUDA devices: the graph, its call, the reason; run block by block."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from against_eager import NEG_INF
from flex_programs import ON_CUDA

import attn_pass
from attn_pass.targets.flex.flex import Flex
from attn_pass.targets.flex.rules import Case
from attn_pass.targets.flex.score import function_of

Tensor = torch.Tensor


def tensor_of(node: torch.fx.Node) -> Tensor | None:
    held = node.meta.get("example_value")
    return held if isinstance(held, Tensor) else None


def rewritten(fn: Callable[..., Any], *inputs: Any, **options: Any) -> tuple[torch.fx.GraphModule, attn_pass.Report]:
    """The graph the pass made."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    backend = attn_pass.wrap(keep, **{"choose": "fused", "on_error": "raise", **ON_CUDA, **options})
    with attn_pass.record() as report:
        torch.compile(fn, backend=backend, dynamic=False)(*inputs)
    return graphs[0], report


def call_of(graph: torch.fx.GraphModule) -> torch.fx.Node:
    flex = torch.ops.higher_order.flex_attention
    return next(n for n in graph.graph.nodes if n.target is flex)


class Blockwise(torch.fx.Interpreter):
    """Runs FlexAttention by the lists of its block mask, with the mask function on partial blocks alone.

    ``visited`` counts the blocks in them: once, where all batch entries or heads share a list.
    """

    visited = 0

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not torch.ops.higher_order.flex_attention:
            return super().call_function(target, args, kwargs)
        query, key, value, score_mod, mask, scale, _, captured, masked_by = args
        *lists, rows_in_block, keys_in_block, mask_mod = mask
        key, value = (x.repeat_interleave(query.size(1) // x.size(1), 1) for x in (key, value))
        scores = torch.full((*query.shape[:3], key.size(2)), NEG_INF)
        full, partial = (blocks_of(*lists[n : n + 2], lists[0], rows_in_block, query) for n in (4, 2))
        assert not full & partial
        if lists[6] is not None:  # a backward asks for the same blocks by their keys
            turned = [blocks_of(*lists[n : n + 2], lists[1], keys_in_block, query) for n in (8, 6)]
            assert [{(b, h, r, k) for b, h, k, r in blocks} for blocks in turned] == [full, partial]
        for blocks, is_full in ((full, True), (partial, False)):
            for batch, head, row, col in blocks:
                i = torch.arange(row * rows_in_block, min((row + 1) * rows_in_block, query.size(2)))
                j = torch.arange(col * keys_in_block, min((col + 1) * keys_in_block, key.size(2)))
                Blockwise.visited += 1
                b, h = (
                    torch.arange(n) if x is None else torch.tensor([x]) for x, n in zip((batch, head), query.shape[:2])
                )
                index = [x.to(torch.int32) for x in torch.meshgrid(b, h, i, j, indexing="ij")]
                at = b[:, None], h[None]
                part = (query[at][:, :, i] @ key[at][:, :, j].mT) * scale
                part = elementwise(score_mod, captured, part, *index)
                if not is_full:
                    part = part.masked_fill(~elementwise(mask_mod, masked_by, *index), NEG_INF)
                scores[b[0] : b[-1] + 1, h[0] : h[-1] + 1, i[0] : i[-1] + 1, j[0] : j[-1] + 1] = part
        return torch._safe_softmax(scores, -1) @ value, None, None


def elementwise(mod: Any, captured: Sequence[Tensor], *tensors: Tensor) -> Tensor:
    """A score or mask function of every element."""
    flat = [t.flatten() for t in tensors]
    of_one = torch.vmap(mod, in_dims=(0,) * len(flat) + (None,) * len(captured))
    return of_one(*flat, *captured).view(tensors[0].shape).clone()


Listed = set[tuple[int | None, int | None, int, int]]


def blocks_of(counts: Tensor | None, indices: Tensor | None, length: int, size: int, query: Tensor) -> Listed:
    """Blocks of the one side and of the other that it visits, each once, in front of them batch entry and head.

    These are None where all share a list. As in the templates, a list that holds every block is in order: the last one
    may end behind the last position.
    """
    if counts is None or indices is None:
        return set()
    assert counts.dtype == indices.dtype == torch.int32 and counts.is_contiguous() and indices.is_contiguous()
    assert counts.shape == indices.shape[:3] and counts.size(2) >= -(-length // size)
    assert all(n in (1, all_) for n, all_ in zip(counts.shape[:2], query.shape[:2]))
    blocks = []
    for batch, head in itertools.product(*map(range, counts.shape[:2])):
        own = (None if counts.size(0) == 1 else batch, None if counts.size(1) == 1 else head)
        for row in range(-(-length // size)):
            listed = indices[batch, head, row, : int(counts[batch, head, row])].tolist()
            assert listed == sorted(listed)
            blocks += [(*own, row, n) for n in listed]
    assert len(set(blocks)) == len(blocks)
    return set(blocks)


def blockwise(gm: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    return Blockwise(gm).run


def reason(fn: Callable[..., Any], *inputs: Any, **options: Any) -> str:
    """Why flex does not take it; empty where it does."""
    _, report = rewritten(fn, *inputs, **options)
    (site,) = report.sites
    return "" if site.target == "flex" else site.reason


def case_of(fn: Callable[..., Any], *inputs: Any, monkeypatch: pytest.MonkeyPatch) -> Case:
    """What the rules are asked about."""
    cases: list[Case] = []
    consider = Flex.consider

    def note(self: Flex, attention: Any, variant: str, setting: Any) -> Any:
        cases.append(Case(attention, setting, function_of(attention, setting)))
        return consider(self, attention, variant, setting)

    monkeypatch.setattr(Flex, "consider", note)
    rewritten(fn, *inputs, poor_cases=())
    return cases[0]
