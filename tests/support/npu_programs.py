"""Ascend's operators in rewritten programs: code shared by the tests of the NPU's targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import npu_stand_in
import torch
from against_eager import qkv, randn
from by_hand import plain

import attn_pass

npu_stand_in.install()

Tensor = torch.Tensor
Program = Callable[..., Any]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FUSION = "npu_fusion_attention"
LOWEST = torch.finfo(FP32).min


def calls(fn: Program, *inputs: Any, dynamic: bool | None = None, **options: Any) -> list[dict[str, Any]]:
    """The arguments, by name, of every call of an Ascend operator in the rewritten graph; "op" is its name."""
    calls: list[dict[str, Any]] = []

    def run(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        for node in gm.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "npu":
                name = node.target._schema.name.partition("::")[2]
                calls.append({"op": name, **npu_stand_in.bound(name, node.args, node.kwargs)})
        return gm.forward

    options = {"device": "Ascend910B", "choose": "fused", "on_error": "raise", **options}
    torch._dynamo.reset()
    torch.compile(fn, backend=attn_pass.wrap(run, **options), dynamic=dynamic)(*inputs)
    return calls


def reported(fn: Program, *inputs: Any, **options: Any) -> attn_pass.SiteReport:
    """The report of the one site."""
    options = {"device": "Ascend910B", "choose": "fused", "on_error": "raise", "poor_cases": (), **options}
    (site,) = attn_pass.explain(fn, *inputs, attn_pass_options=options).sites
    return site


def reason(fn: Program, *inputs: Any, target: str = FUSION, **options: Any) -> str:
    """Why a target refuses; empty where it does not."""
    return reported(fn, *inputs, **options).refusals.get(target, "")


# ---------------------------------------------------------------- programs


def filled(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    groups = q.size(1) // k.size(1)
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    return (q @ k.mT * 0.3).masked_fill(~keep, torch.finfo(q.dtype).min).softmax(-1) @ v


def added(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """A matrix of 0 and the lowest number, as transformers makes it."""
    lowest = torch.finfo(q.dtype).min
    mask = torch.where(keep, torch.zeros((), dtype=q.dtype), torch.full((), lowest, dtype=q.dtype))
    return (q @ k.mT * 0.3 + mask).softmax(-1) @ v


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + bias).softmax(-1).to(v.dtype) @ v


def packed(x: Tensor, heads: int = 4) -> Tensor:
    """Of one (B, S, 3 * H * D) product."""
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in x.chunk(3, -1))
    return plain(q, k, v).transpose(1, 2).flatten(2)


def hidden(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of (B, S, H * D) tensors, as linear layers give them."""
    q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in (q, k, v))
    return plain(q, k, v).transpose(1, 2).flatten(2)


def positions_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of (L, B, H * D) tensors, as nn.MultiheadAttention has them."""
    q, k, v = (t.unflatten(-1, (4, -1)).permute(1, 2, 0, 3) for t in (q, k, v))
    return plain(q, k, v).permute(2, 0, 1, 3).flatten(2)


def turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads first, the result positions first."""
    weights = torch.einsum("bhid,bhjd->bhij", q * 0.3, k).softmax(-1)
    return torch.einsum("bhij,bhjd->bihd", weights, v)


def heads_last(*shape: int, dtype: torch.dtype = BF16) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(*shape, dtype=dtype))


def flat(rows: int, keys: int, *, dtype: torch.dtype = BF16, first: int = 2, dim: int = 64) -> tuple[Tensor, ...]:
    return tuple(randn(first, n, dim, dtype=dtype, seed=s) for s, n in enumerate((rows, keys, keys)))
