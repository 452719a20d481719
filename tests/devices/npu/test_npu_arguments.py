"""The arguments of Ascend's operators: every argument, operands with their layout, one mask per graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from against_eager import NEG_INF, qkv, randn, same
from by_hand import SOME, banded, plain
from npu_programs import (
    BF16,
    FP32,
    FUSION,
    LOWEST,
    Tensor,
    calls,
    flat,
    heads_last,
    hidden,
    positions_first,
    reported,
    turned,
)
from npu_stand_in import FA3, FIA, MAX

import attn_pass


def test_every_argument_with_a_treacherous_default_is_given() -> None:
    (call,) = calls(plain, *qkv(2, 6, 5, 9, 16, kv_heads=2, dtype=BF16))
    given = {"num_heads": 6, "num_key_value_heads": 2, "scale": 0.3, "input_layout": "BNSD"}
    assert {n: call[n] for n in given} == given
    assert (call["pre_tokens"], call["next_tokens"], call["inner_precise"]) == (MAX, MAX, 0)
    (call,) = calls(plain, *qkv(2, 6, 5, 9, 16, kv_heads=2))
    assert (call["op"], call["head_num"], call["scale"], call["keep_prob"]) == (FA3, 6, 0.3, 1.0)
    assert (call["pre_tockens"], call["next_tockens"], call["inner_precise"]) == (MAX, MAX, 0)


def test_grouped_keys_are_not_repeated() -> None:
    (call,) = calls(plain, *qkv(2, 6, 5, 9, 16, kv_heads=2, dtype=BF16))
    assert call["key"].meta["example_value"].shape == (2, 2, 9, 16)


def test_operands_are_taken_as_they_lie() -> None:
    """No transposes in the graph, and a result that the program's own transpose and reshape see as a view."""
    ops: list[str] = []

    def run(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        operators = [n for n in gm.graph.nodes if getattr(n.target, "namespace", "") == "npu"]
        (node,) = operators
        ops.extend(getattr(n.target, "__name__", str(n.target)) for n in node.all_input_nodes if n.op != "placeholder")
        return gm.forward

    backend = attn_pass.wrap(run, device="Ascend910B", choose="fused", on_error="raise")
    torch.compile(hidden, backend=backend)(*flat(6, 9))
    assert ops == ["contiguous.default"] * 3


def test_positions_in_front_of_the_batch() -> None:
    inputs = flat(6, 9, dtype=FP32, first=6)
    inputs = tuple(randn(n, 2, 64, seed=s) for s, n in enumerate((6, 9, 9)))
    assert [c["input_layout"] for c in calls(positions_first, *inputs)] == ["SBH"]
    same(positions_first, *inputs, rewritten=1, device="Ascend910B")
    half = tuple(x.bfloat16() for x in inputs)
    assert [c["input_layout"] for c in calls(positions_first, *half, targets=(FIA,))] == ["BNSD"]  # it has no SBH
    same(positions_first, *half, rewritten=1, device="Ascend910B", targets=(FIA,))


def test_a_result_with_positions_first_from_operands_without() -> None:
    inputs = qkv(2, 4, 6, 9, 16, dtype=BF16)
    (call,) = calls(turned, *inputs, targets=(FIA,))
    assert call["input_layout"] == "BNSD_BSND"
    for target in (FIA, FUSION):
        same(turned, *inputs, rewritten=1, device="Ascend910B", targets=(target,))
    one = qkv(2, 4, 1, 9, 16, dtype=BF16)
    assert [c["input_layout"] for c in calls(turned, *one, targets=(FIA,))] == ["BNSD"]
    same(turned, *one, rewritten=1, device="Ascend910B", targets=(FIA,))


def test_layouts_of_many_wide_heads_stay_heads_first_in_inference() -> None:
    inputs = [x.to("meta") for x in heads_last(1, 256, 2, 3, 256)]
    site = reported(plain, *inputs, targets=(FIA,))
    assert site.target == FIA
    layouts: list[str] = []

    def run(gm: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        layouts.extend(str(n.kwargs["input_layout"]) for n in gm.graph.nodes if "input_layout" in n.kwargs)
        return gm.forward

    backend = attn_pass.wrap(run, device="Ascend910B", choose="fused", on_error="raise", targets=(FIA,))
    torch.compile(plain, backend=backend)(*inputs)
    assert layouts == ["BNSD"]  # 256 * 256 is over 65535


# ---------------------------------------------------------------- one mask for a graph


def test_one_compressed_mask_for_all_sites() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for fn in (banded(None, 0), banded(2, 0), banded(None, 0, aligned="first"), banded(2, None)):
            q = fn(q, k, v)
        return q

    inputs = qkv(2, 2, 8, 8, 16, dtype=BF16)
    called = calls(program, *inputs)
    assert [c["sparse_mode"] for c in called] == [2, 4, 2, 4]
    assert len({c["atten_mask"] for c in called}) == 1
    mask = called[0]["atten_mask"].meta["example_value"]
    assert (tuple(mask.shape), mask.dtype) == ((2048, 2048), torch.bool)
    same(program, *inputs, rewritten=4, device="Ascend910B")


def test_one_boolean_mask_for_all_layers() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        mask = torch.where(keep & torch.ones(6, 6).tril().bool(), 0.0, LOWEST)
        for _ in range(3):
            q = (q @ k.mT * 0.3 + mask).softmax(-1) @ v
        return q

    inputs = (*qkv(2, 2, 6, 6, 16), torch.arange(6) < torch.tensor([3, 6])[:, None, None, None])
    called = calls(program, *inputs, assume_nonempty_rows=True)
    assert len(called) == 3 and len({c["atten_mask"] for c in called}) == 1
    same(program, *inputs, rewritten=3, device="Ascend910B")


def test_a_mask_written_between_two_sites_is_made_twice() -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return torch.where(keep, q @ k.mT * 0.3, NEG_INF).softmax(-1) @ v

    def program(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        q = layer(q, k, v, keep)
        keep.index_fill_(3, torch.tensor([0]), True)
        return layer(q, k, v, keep)

    inputs = (*qkv(2, 4, 6, 9, 16), SOME & (torch.arange(9) > 0))
    same(program, *inputs, rewritten=2, device="Ascend910B")


def test_dropout_is_passed_as_keep_prob() -> None:
    q, k, v = qkv(2, 2, 8, 8, 16, grad=True)

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout((q @ k.mT * 0.3).softmax(-1), 0.25) @ v

    (call,) = calls(program, q, k, v)
    assert call["keep_prob"] == 0.75
    torch._dynamo.reset()
    compiled = torch.compile(program, backend=attn_pass.wrap("aot_eager", device="Ascend910B", on_error="raise"))
    outs = torch.stack([compiled(q, k, v).detach() for _ in range(50)])
    assert outs.std(0).mean() > 0.05
    assert (outs.mean(0) - plain(q, k, v)).abs().max() < 0.6
    gradients = torch.stack([torch.autograd.grad(compiled(q, k, v).sum(), v)[0] for _ in range(50)])
    (expected,) = torch.autograd.grad(plain(q, k, v).sum(), v)
    assert (gradients.mean(0) - expected).abs().max() < 0.6
