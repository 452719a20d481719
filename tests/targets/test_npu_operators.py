"""Ascend's operators as targets: what is emitted, run on the CPU by implementations of the documented contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import npu_stand_in
import pytest
import torch
import torch.nn.functional as F
from against_eager import NEG_INF, qkv, randn, same
from by_hand import NONE_IN_ONE, SOME, banded, infinite, negative, plain
from npu_stand_in import FA1, FA3, FIA, MAX

import attn_pass
from attn_pass.hardware import catalog

npu_stand_in.install()

Tensor = torch.Tensor
Program = Callable[..., Any]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FUSION = "npu_fusion_attention"
LOWEST = torch.finfo(FP32).min


def calls(fn: Program, *inputs: Any, dynamic: bool | None = None, **options: Any) -> list[dict[str, Any]]:
    """The arguments, by name, of every call of an Ascend operator in the rewritten graph; "op" is its name."""
    found: list[dict[str, Any]] = []

    def run(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        for node in gm.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "npu":
                name = node.target._schema.name.partition("::")[2]
                found.append({"op": name, **npu_stand_in.bound(name, node.args, node.kwargs)})
        return gm.forward

    options = {"device": "Ascend910B", "choose": "fused", "on_error": "raise", **options}
    torch._dynamo.reset()
    torch.compile(fn, backend=attn_pass.wrap(run, **options), dynamic=dynamic)(*inputs)
    return found


def told(fn: Program, *inputs: Any, **options: Any) -> attn_pass.SiteReport:
    """The report of the one site."""
    options = {"device": "Ascend910B", "choose": "fused", "on_error": "raise", "poor_cases": (), **options}
    (site,) = attn_pass.explain(fn, *inputs, attn_pass_options=options).sites
    return site


def reason(fn: Program, *inputs: Any, target: str = FUSION, **options: Any) -> str:
    """Why a target refuses; empty where it does not."""
    return told(fn, *inputs, **options).refusals.get(target, "")


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


BY_ROW = torch.arange(9) <= torch.arange(6)[:, None] + torch.tensor([0, 2])[:, None, None, None]
BY_HEAD = torch.arange(9) <= torch.arange(6)[:, None] + torch.arange(4)[:, None, None]
MADE: dict[str, tuple[Program, tuple[Tensor, ...], dict[str, Any]]] = {
    "plain": (plain, qkv(2, 4, 6, 9, 16, dtype=BF16), {"sparse_mode": 0, "atten_mask": None}),
    "float16": (plain, qkv(2, 4, 6, 9, 16, dtype=FP16), {}),
    "grouped": (plain, qkv(2, 6, 5, 9, 16, kv_heads=2, dtype=BF16), {}),
    "one KV head": (plain, qkv(2, 6, 5, 9, 16, kv_heads=1, dtype=BF16), {}),
    "a prime head dim": (plain, qkv(2, 4, 6, 9, 17, dtype=BF16), {}),
    "narrow values": (plain, qkv(2, 4, 6, 9, 24, value_dim=10, dtype=BF16), {}),
    "wide values": (plain, qkv(2, 4, 6, 9, 12, value_dim=33, dtype=BF16), {}),
    "one key": (plain, qkv(2, 4, 5, 1, 16, dtype=BF16), {}),
    "rank 3": (plain, tuple(randn(4, n, 16, dtype=BF16) for n in (3, 7, 7)), {}),
    "negative scale": (negative, qkv(2, 4, 6, 9, 16, dtype=BF16), {"scale": 0.3}),
    "expanded query": (plain, (randn(1, 2, 5, 16).bfloat16().expand(3, 2, 5, 16), *qkv(3, 2, 5, 9, 16, dtype=BF16)[1:]),
                       {}),
    "strided head dim": (plain, tuple(randn(2, 3, 16, n, dtype=BF16).mT for n in (5, 7, 7)), {}),
    "heads last": (plain, heads_last(2, 4, 6, 9, 16), {"input_layout": "BSND"}),
    "hidden": (hidden, flat(6, 9), {"input_layout": "BSH"}),
    "packed": (packed, (randn(2, 7, 3 * 64, dtype=BF16),), {"input_layout": "BNSD"}),
    "causal": (banded(None, 0), qkv(2, 4, 9, 9, 16, dtype=BF16), {"sparse_mode": 2}),
    "causal from the first key": (
        banded(None, 0, aligned="first"), qkv(2, 4, 5, 9, 16, dtype=BF16), {"sparse_mode": 2, "inner_precise": 0}),
    "causal from the first key, more queries": (
        banded(None, 0, aligned="first"), qkv(2, 4, 9, 5, 16, dtype=BF16), {"sparse_mode": 2, "inner_precise": 0}),
    "causal to the last key": (
        banded(None, 0), qkv(2, 4, 5, 9, 16, dtype=BF16), {"sparse_mode": 3, "inner_precise": 0}),
    "causal to the last key, rows without one": (
        banded(None, 0), qkv(2, 4, 9, 5, 16, dtype=BF16), {"sparse_mode": 3, "inner_precise": 2}),
    "window": (banded(3, 0), qkv(2, 4, 5, 9, 16, dtype=BF16), {"sparse_mode": 4}),
    "window of both sides": (banded(2, 3), qkv(2, 4, 9, 9, 16, dtype=BF16), {"sparse_mode": 4}),
    "window of one": (banded(0, 0), qkv(2, 4, 9, 9, 16, dtype=BF16), {"sparse_mode": 4}),
    "window from the first key": (
        banded(5, 1, aligned="first"), qkv(2, 4, 6, 9, 16, dtype=BF16), {"sparse_mode": 0, "inner_precise": 2}),
    "window from the first key, in bounds": (
        banded(5, 4, aligned="first"), qkv(2, 4, 6, 9, 16, dtype=BF16), {"sparse_mode": 4}),
    "keys from there on": (banded(2, None), qkv(2, 4, 9, 9, 16, dtype=BF16), {"sparse_mode": 4}),
    "keys from there on, more queries": (
        banded(2, None), qkv(2, 4, 9, 5, 16, dtype=BF16), {"sparse_mode": 4, "inner_precise": 0}),
    "window, filled": (banded(3, 0, -1e9), qkv(2, 4, 5, 9, 16, dtype=BF16), {"sparse_mode": 4}),
    "rows that average": (banded(None, 0, -1e9), qkv(2, 4, 9, 5, 16, dtype=BF16), {"sparse_mode": 0}),
    "before itself alone": (banded(None, -1), qkv(2, 4, 6, 9, 16, dtype=BF16), {"sparse_mode": 0, "inner_precise": 2}),
    "padding by -inf": (infinite, (*qkv(2, 4, 6, 9, 16, dtype=BF16), SOME), {"sparse_mode": 0, "inner_precise": 2}),
    "a row of -inf": (infinite, (*qkv(2, 4, 6, 9, 16, dtype=BF16), NONE_IN_ONE), {"inner_precise": 2}),
    "padding": (filled, (*qkv(2, 4, 6, 9, 16, dtype=BF16), SOME), {"sparse_mode": 0}),
    "padding, float16": (filled, (*qkv(2, 4, 6, 9, 16, dtype=FP16), SOME), {"sparse_mode": 0}),
    "a row of fills": (filled, (*qkv(2, 4, 6, 9, 16, dtype=BF16), NONE_IN_ONE), {}),
    "a row of fills, grouped": (filled, (*qkv(2, 4, 6, 9, 16, kv_heads=2, dtype=BF16), NONE_IN_ONE), {}),
    "by row and batch": (filled, (*qkv(2, 4, 6, 9, 16, dtype=BF16), BY_ROW), {"sparse_mode": 0}),
    "added": (added, (*qkv(2, 4, 6, 9, 16, dtype=BF16), SOME), {"sparse_mode": 0}),
    "added, by row and batch": (added, (*qkv(2, 4, 6, 9, 16, dtype=BF16), BY_ROW), {}),
    "added, a row of fills": (added, (*qkv(2, 4, 6, 9, 16, dtype=BF16), NONE_IN_ONE), {}),
    "turned mask": (infinite, (*qkv(2, 4, 6, 9, 16, dtype=BF16), BY_ROW.mT.contiguous().mT), {}),
}  # fmt: skip
ONE_ROW: dict[str, tuple[Program, tuple[Tensor, ...]]] = {
    "plain": (plain, qkv(2, 4, 1, 9, 16, dtype=BF16)),
    "grouped": (plain, qkv(2, 8, 1, 9, 16, kv_heads=2, dtype=FP16)),
    "a batch of one": (plain, qkv(1, 4, 1, 9, 16, dtype=BF16)),
    "causal to the last key": (banded(None, 0), qkv(2, 4, 1, 9, 16, dtype=BF16)),
    "causal from the first key": (banded(None, 0, aligned="first"), qkv(2, 4, 1, 9, 16, dtype=BF16)),
    "window": (banded(3, 0), qkv(2, 4, 1, 9, 16, dtype=BF16)),
    "padding": (filled, (*qkv(2, 4, 1, 9, 16, dtype=BF16), SOME)),
    "a row of fills": (filled, (*qkv(2, 4, 1, 9, 16, dtype=BF16), NONE_IN_ONE)),
    "a row of -inf": (infinite, (*qkv(2, 4, 1, 9, 16, dtype=BF16), NONE_IN_ONE)),
    "added": (added, (*qkv(2, 4, 1, 9, 16, dtype=BF16), NONE_IN_ONE)),
    "one mask for the batch": (infinite, (*qkv(2, 4, 1, 9, 16, dtype=BF16), SOME[:1])),
}


def checked(operator: str, arguments: dict[str, Any]) -> None:
    """The calls that ran were of this operator, with these arguments."""
    for name, given in npu_stand_in.SEEN:
        assert name == operator and {n: given[n] for n in arguments} == arguments


@pytest.mark.parametrize("name", list(MADE))
def test_inference(name: str) -> None:
    fn, inputs, arguments = MADE[name]
    npu_stand_in.SEEN.clear()
    report = same(fn, *inputs, rewritten=1, device="Ascend910B", targets=(FIA,))
    assert report.sites[0].target == FIA
    checked(FIA, arguments)


@pytest.mark.parametrize("name", list(ONE_ROW))
def test_one_query_row(name: str) -> None:
    """The inference operator knows neither modes nor zeros for empty rows there: the stand-in raises on both."""
    fn, inputs = ONE_ROW[name]
    for poor_cases in (None, ()) if "causal" in name or name == "window" else ((),):
        same(fn, *inputs, rewritten=1, device="Ascend910B", targets=(FIA,), poor_cases=poor_cases)
    if name in ("plain", "padding"):
        same(fn, *inputs, rewritten=1, device="Ascend910B", targets=(FUSION,))


def test_masks_that_differ_by_head_are_the_training_operator_s() -> None:
    for keep in (BY_HEAD, SOME.expand(2, 4, 6, 9)):
        inputs = (*qkv(2, 4, 6, 9, 16, dtype=BF16), keep)
        same(infinite, *inputs, rewritten=1, device="Ascend910B", targets=(FUSION,))
        same(infinite, *inputs, rewritten=0, device="Ascend910B", targets=(FIA,))
        assert "head to head" in reason(infinite, *inputs, target=FIA)


def with_gradients(inputs: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    return [t.detach().to(dtype).requires_grad_() if t.is_floating_point() else t for t in inputs]


IN_TRAINING = (
    *("plain", "grouped", "a prime head dim", "narrow values", "rank 3", "negative scale", "heads last", "hidden"),
    *("packed", "causal", "causal to the last key, rows without one", "window", "window from the first key"),
    *("rows that average", "a row of -inf", "a row of fills, grouped", "by row and batch", "added", "turned mask"),
)


@pytest.mark.parametrize("name", IN_TRAINING)
def test_training(name: str) -> None:
    fn, inputs, arguments = MADE[name]
    npu_stand_in.SEEN.clear()
    leaves = with_gradients(inputs, inputs[0].dtype)
    report = same(fn, *leaves, rewritten=1, grad=True, device="Ascend910B", targets=(FIA, FUSION))
    assert report.sites[0].target == FUSION
    checked(FA3, arguments)


@pytest.mark.parametrize("name", ["grouped", "a prime head dim", "window", "a row of fills", "hidden"])
def test_training_in_float32_by_the_first_version(name: str) -> None:
    fn, inputs, _ = MADE[name]
    npu_stand_in.SEEN.clear()
    same(fn, *with_gradients(inputs, FP32), rewritten=1, grad=True, device="Ascend 950", targets=(FUSION,))
    checked(FA1, {})


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_gradients_of_rows_masked_by_what_is_added(kv_heads: int) -> None:
    """What is added hides a score and passes its gradient on, which is the program's."""
    program = lambda q, k, v, keep: added(q, *(x.repeat_interleave(4 // kv_heads, 1) for x in (k, v)), keep)
    leaves = with_gradients((*qkv(2, 4, 6, 9, 16, kv_heads=kv_heads), NONE_IN_ONE), FP32)
    same(program, *leaves, rewritten=1, grad=True, device="Ascend910B")


def test_gradients_of_rows_masked_in_two_ways_are_not_guessed() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        mask = torch.where(keep, 0.0, LOWEST)
        return (q @ k.mT * 0.3 + mask).masked_fill(~BY_HEAD[0], LOWEST).softmax(-1) @ v

    leaves = with_gradients((*qkv(2, 4, 6, 9, 16), NONE_IN_ONE), FP32)
    same(program, *leaves, rewritten=0, grad=True, device="Ascend910B")
    assert "assume_nonempty_rows" in reason(program, *leaves)
    kept = with_gradients((*qkv(2, 4, 6, 9, 16), SOME), FP32)
    report = same(added, *kept, rewritten=1, grad=True, device="Ascend910B", assume_nonempty_rows=True)
    assert "no row is masked out entirely" in report.sites[0].assumptions


def test_float32_stays_float32_and_goes_to_the_training_operator() -> None:
    for shape in ((2, 4, 6, 9, 16), (2, 4, 6, 9, 17), (1, 1, 1, 1, 4)):
        report = same(plain, *qkv(*shape), rewritten=1, device="Ascend910B", targets=(FIA, FUSION))
        assert report.sites[0].target == FUSION
    assert "half precision" in reason(plain, *qkv(), target=FIA)
    assert "float64" in reason(plain, *qkv(dtype=torch.float64))


def test_families() -> None:
    inputs = qkv(2, 4, 6, 9, 16, dtype=BF16)
    for device, operator in {"Ascend 910B": FIA, "Ascend 910C": FIA, "Ascend910_9391": FIA, "Ascend 950": FA1}.items():
        assert [c["op"] for c in calls(plain, *inputs, device=device)] == [operator]
    assert "310P" in told(plain, *inputs, device="Ascend310P3").reason
    assert "first generation" in told(plain, *inputs, device="Ascend910A").reason
    assert "not documented for Ascend 950" in told(plain, *inputs, device="Ascend 950").refusals[FIA]


def test_without_torch_npu_the_report_says_what_would_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_pass.targets.npu._overload", lambda name: None)
    inputs = qkv(2, 4, 6, 9, 16, dtype=BF16)
    site = told(plain, *inputs)
    assert site.outcome == "left" and "pip install 'torch-npu==" in site.reason
    assert site.reason.startswith(f"{FIA} would be taken (")
    assert told(plain, *qkv(grad=True)).reason.startswith(f"{FA3} would be taken (")
    same(plain, *inputs, rewritten=0, device="Ascend910B")


def test_an_npu_of_no_known_family_is_planned_for_as_a2(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = catalog.npu_here()
    monkeypatch.setattr("attn_pass.engine.device_for", lambda *_: unknown)
    site = told(plain, *qkv(2, 4, 6, 9, 16, dtype=BF16), device=None)
    assert site.target == FIA and any("planned for A2" in a for a in site.assumptions)


# ---------------------------------------------------------------- arguments


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
    site = told(plain, *inputs, targets=(FIA,))
    assert site.target == FIA
    found: list[str] = []

    def run(gm: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        found.extend(str(n.kwargs["input_layout"]) for n in gm.graph.nodes if "input_layout" in n.kwargs)
        return gm.forward

    backend = attn_pass.wrap(run, device="Ascend910B", choose="fused", on_error="raise", targets=(FIA,))
    torch.compile(plain, backend=backend)(*inputs)
    assert found == ["BNSD"]  # 256 * 256 is over 65535


# ---------------------------------------------------------------- one mask for a graph


def test_one_compressed_mask_for_all_sites() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for fn in (banded(None, 0), banded(2, 0), banded(None, 0, aligned="first"), banded(2, None)):
            q = fn(q, k, v)
        return q

    inputs = qkv(2, 2, 8, 8, 16, dtype=BF16)
    found = calls(program, *inputs)
    assert [c["sparse_mode"] for c in found] == [2, 4, 2, 4]
    assert len({c["atten_mask"] for c in found}) == 1
    mask = found[0]["atten_mask"].meta["example_value"]
    assert (tuple(mask.shape), mask.dtype) == ((2048, 2048), torch.bool)
    same(program, *inputs, rewritten=4, device="Ascend910B")


def test_one_boolean_mask_for_all_layers() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        mask = torch.where(keep & torch.ones(6, 6).tril().bool(), 0.0, LOWEST)
        for _ in range(3):
            q = (q @ k.mT * 0.3 + mask).softmax(-1) @ v
        return q

    inputs = (*qkv(2, 2, 6, 6, 16), torch.arange(6) < torch.tensor([3, 6])[:, None, None, None])
    found = calls(program, *inputs, assume_nonempty_rows=True)
    assert len(found) == 3 and len({c["atten_mask"] for c in found}) == 1
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


# ---------------------------------------------------------------- the five masks another pass gets wrong


FIVE: dict[str, tuple[Program, tuple[Tensor, ...], bool]] = {
    "causal, 0 and the lowest number": (
        lambda q, k, v: biased(q, k, v, torch.full((64, 64), LOWEST).triu(1)), qkv(2, 4, 64, 64, 32), True),
    "padding that is not causal": (
        added, (*qkv(2, 4, 64, 64, 32), torch.arange(64) < torch.tensor([20, 64])[:, None, None, None]), True),
    "all zero": (lambda q, k, v: biased(q, k, v, torch.zeros(64, 64)), qkv(2, 4, 64, 64, 32), True),
    "causal plus a finite bias": (
        lambda q, k, v, bias: biased(q, k, v, bias + torch.full((64, 64), LOWEST).triu(1)),
        (*qkv(2, 4, 64, 64, 32), randn(1, 4, 64, 64)), False),
    "causal, longer than heads times head dim": (
        lambda q, k, v: biased(q, k, v, torch.full((64, 64), LOWEST).triu(1)), qkv(2, 2, 64, 64, 8), True),
}  # fmt: skip


@pytest.mark.parametrize("name", list(FIVE))
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_masks_that_the_vendor_s_graph_pass_replaces_by_its_own(name: str, dtype: torch.dtype) -> None:
    """That pass makes any matrix boolean, counts ``pre_tockens`` by heads times head dim, and cuts off what follows."""
    fn, inputs, taken = FIVE[name]
    inputs = tuple(x.to(dtype) if x.is_floating_point() and x.dim() == 4 and x.size(1) != 1 else x for x in inputs)
    report = same(fn, *inputs, rewritten=int(taken), device="Ascend910B")
    if not taken:
        assert "not proved" in report.sites[0].refusals[FUSION]


# ---------------------------------------------------------------- what must not match


def by_a_weak_fill(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + torch.where(keep, 0.0, -100.0)).softmax(-1) @ v


def by_a_float(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """A float matrix that may hold anything."""
    return (q @ k.mT * 0.3 + (1.0 - keep) * LOWEST).softmax(-1) @ v


def shifted(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """What is kept is not 0."""
    return (q @ k.mT * 0.3 + torch.where(keep, 2.0, LOWEST) * torch.arange(9)).softmax(-1) @ v


NEVER: dict[str, tuple[Program, tuple[Tensor, ...], str]] = {
    "a bias": (biased, (*qkv(2, 4, 6, 9, 16), randn(1, 4, 6, 9)), "pse"),
    "a weak fill": (by_a_weak_fill, (*qkv(2, 4, 6, 9, 16), SOME), "not proved"),
    "a float mask": (by_a_float, (*qkv(2, 4, 6, 9, 16), SOME.float()), "not proved"),
    "what is kept is not 0": (shifted, (*qkv(2, 4, 6, 9, 16), SOME), "not proved"),
    "a soft cap": (lambda q, k, v: ((q @ k.mT).tanh() * 5).softmax(-1) @ v, qkv(), "tanh"),
    "float64": (plain, qkv(dtype=torch.float64), "float64"),
    "300 heads": (plain, qkv(2, 300, 2, 2, 16), "300 heads"),
    "a head dim of 520": (plain, qkv(1, 2, 2, 2, 520), "512"),
    "no keys": (plain, qkv(1, 2, 2, 0, 16), "size is 0"),
}


@pytest.mark.parametrize("name", list(NEVER))
def test_what_is_left_and_why(name: str) -> None:
    fn, inputs, why = NEVER[name]
    assert why in reason(fn, *inputs)
    same(fn, *inputs, rewritten=0, device="Ascend910B", targets=(FIA, FUSION))


def test_more_rules_on_both_sides() -> None:
    inputs = qkv(2, 4, 6, 9, 16, dtype=BF16)
    leaves = qkv(2, 4, 6, 9, 16, dtype=BF16, grad=True)
    dropping = lambda p: lambda q, k, v: F.dropout((q @ k.mT).softmax(-1), p) @ v
    assert "no dropout" in reason(dropping(0.5), *inputs, target=FIA) and not reason(dropping(0.5), *inputs)
    assert "keeps nothing" in reason(dropping(1.0), *inputs)
    assert "a compiled graph would keep" in reason(dropping(0.5), *inputs, device="Ascend 950")
    assert "no gradient" in reason(plain, *leaves, target=FIA) and not reason(plain, *leaves)
    many = qkv(1, 130, 2, 3, 16, kv_heads=1, dtype=BF16)
    assert "130 heads share" in reason(plain, *many, target=FIA) and not reason(plain, *many)
    sink = lambda q, k, v, s: torch.cat([q @ k.mT, s.expand(2, 4, 6, 1)], -1).softmax(-1)[..., :-1] @ v
    assert "sink" in reason(sink, *inputs, randn(1, 4, 1, 1, dtype=BF16))
    learned = (*leaves, randn(1, 1, 6, 9, dtype=BF16, grad=True))
    assert reason(biased, *learned)
    mask = (*inputs, NONE_IN_ONE)
    assert "strict" in reason(infinite, *mask, numerics="strict") and not reason(infinite, *mask)


def test_deterministic_algorithms_in_training() -> None:
    leaves = qkv(2, 4, 6, 9, 16, dtype=BF16, grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        assert "deterministic" in reason(plain, *leaves)
        assert not reason(plain, *qkv(2, 4, 6, 9, 16, dtype=BF16))
    finally:
        torch.use_deterministic_algorithms(False)


def test_sdpa_kernel_is_honoured() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([SDPBackend.MATH]):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros(8, 8))

    assert "sdpa_kernel allows only MATH" in told(program, *qkv(dtype=BF16)).reason


def test_dropout_is_handed_over_as_what_is_kept() -> None:
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


# ---------------------------------------------------------------- torch's own call


def test_a_call_that_reaches_the_same_operator_is_left() -> None:
    """Nothing is gained: torch's own call ends in v3 with the same operands."""
    with torch.device("meta"):
        q, k, v = (torch.empty(4, 8, 2048, 128, dtype=BF16, requires_grad=True) for _ in range(3))
    for fn in (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1),
    ):
        site = told(fn, q, k, v, choose="cheapest")
        assert site.outcome == "left" and "already the cheapest form" in site.reason


@pytest.mark.parametrize("grad", [False, True])
def test_calls_that_torch_sends_elsewhere_are_taken(grad: bool) -> None:
    call = F.scaled_dot_product_attention
    dtype = FP32 if grad else BF16
    inputs = qkv(2, 4, 8, 8, 16, dtype=dtype, grad=grad)
    float_mask = torch.full((8, 8), torch.finfo(dtype).min, dtype=dtype).triu(1)
    causal = lambda q, k, v: call(q, k, v, attn_mask=torch.full((8, 8), -1e9, dtype=q.dtype).triu(1))
    report = same(causal, *inputs, rewritten=1, grad=grad, device="Ascend910B", choose="cheapest")
    assert report.sites[0].mask == "causal"
    grouped = qkv(2, 8, 8, 8, 16, kv_heads=2, dtype=dtype, grad=grad)
    program = lambda q, k, v: call(q, *(x.repeat_interleave(4, 1) for x in (k, v)), is_causal=True)
    same(program, *grouped, rewritten=1, grad=grad, device="Ascend910B", choose="cheapest")
    assert "not proved" in reason(call, *inputs, float_mask)


def test_decoding_goes_to_the_inference_operator() -> None:
    with torch.device("meta"):
        q = torch.empty(1, 32, 1, 128, dtype=BF16)
        k, v = (torch.empty(1, 2, 8192, 128, dtype=BF16) for _ in range(2))
    program = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert told(program, q[:, :8], k, v, choose="cheapest").target == FIA
    assert told(program, q, k, v, choose="cheapest").outcome == "left"  # every core has a head already


def test_shared_keys_are_folded_into_rows() -> None:
    """Seed S4: torch_npu hands its operator a batch of 1000 queries and one of keys."""
    with torch.device("meta"):
        q = torch.empty(1000, 4, 1, 32, dtype=BF16)
        k, v = (torch.empty(1, 4, 2000, 32, dtype=BF16) for _ in range(2))
    options: dict[str, Any] = {"choose": "cheapest", "poor_cases": None}
    site = told(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), q, k, v, **options)
    assert site.target == FIA and site.poor_cases == ("shared K/V over the batch",)
    small = (randn(10, 4, 1, 32, dtype=BF16), *qkv(1, 4, 1, 20, 32, dtype=BF16)[1:])
    same(plain, *small, rewritten=1, device="Ascend910B", targets=(FIA,))


# ---------------------------------------------------------------- dynamic sizes, export, Inductor


@pytest.mark.parametrize("fn", [banded(None, 0), banded(3, 0)])
@pytest.mark.parametrize("target", [FIA, FUSION])
def test_sizes_that_are_not_known(fn: Program, target: str) -> None:
    inputs = qkv(2, 4, 6, 6, 16, dtype=BF16)
    backend = attn_pass.wrap("aot_eager", device="Ascend910B", targets=(target,), choose="fused", on_error="raise")
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=backend, dynamic=True)
    for length in (6, 11, 7):
        inputs = qkv(3, 4, length, length, 16, dtype=BF16)
        with attn_pass.record() as report:
            assert (compiled(*inputs) - fn(*inputs)).abs().max() < 0.05
    assert not report.sites  # compiled once


class Of(torch.nn.Module):
    def __init__(self, fn: Program) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *inputs: Tensor) -> Any:
        return self.fn(*inputs)


def exported(fn: Program, *inputs: Tensor, lowest: int, **options: Any) -> tuple[torch.export.ExportedProgram, str]:
    """The rewritten program, with any number of query rows from ``lowest`` on, and what its site became."""
    rows = torch.export.Dim("rows", min=lowest, max=64)
    sizes = (({2: rows}, *[None] * (len(inputs) - 1)),)
    with torch.no_grad():
        program = torch.export.export(Of(fn), inputs, dynamic_shapes=sizes)
        options = {"device": "Ascend910B", "choose": "fused", "on_error": "raise", **options}
        (site,) = attn_pass.rewrite(program, **options).sites
    return program, site.target or site.reason


@pytest.mark.parametrize("target", [FIA, FUSION])
@pytest.mark.parametrize("fn", [banded(None, 0), turned])
def test_exported_programs(fn: Program, target: str) -> None:
    q, k, v = qkv(2, 4, 6, 9, 16, dtype=BF16)
    program, found = exported(fn, q, k, v, lowest=3, targets=(target,))
    assert found == target
    for rows in (3, 6, 9):
        q = randn(2, 4, rows, 16, dtype=BF16)
        with torch.no_grad():
            assert (program.module()(q, k, v) - fn(q, k, v)).abs().max() < 0.05
    assert len(program.run_decompositions({}).graph_module.graph.nodes) > 3


def test_an_exported_program_may_be_run_with_one_row_whatever_it_says() -> None:
    """torch.export asks for two rows and checks for none: no mode of the inference operator holds for one."""
    q, k, v = qkv(2, 4, 6, 9, 16, dtype=BF16)
    for lowest in (1, 2):
        for fn in (banded(None, 0, aligned="first"), banded(2, None)):
            assert "one query row or more" in exported(fn, q, k, v, lowest=lowest, targets=(FIA,))[1]
        for fn, target in ((banded(None, 0, aligned="first"), FUSION), (plain, FIA), (turned, FIA)):
            program, found = exported(fn, q, k, v, lowest=lowest, targets=(target,))
            assert found == target
            with torch.no_grad():
                assert (program.module()(q[:, :, :1], k, v) - fn(q[:, :, :1], k, v)).abs().max() < 0.05


def test_a_model_as_it_is_with_padding_on_the_left() -> None:
    """Rows of the padding see nothing but fills, which are added: eager averages the values there."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "eager"}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()
    ids, kept = torch.randint(0, 50, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    kept[1, :4] = 0
    backend = attn_pass.wrap("aot_eager", device="Ascend910B", choose="fused", on_error="raise")
    for dtype, target in ((BF16, FIA), (FP32, FUSION)):
        model = model.to(dtype)
        torch._dynamo.reset()
        with torch.set_grad_enabled(dtype == FP32), attn_pass.record() as report:
            found = torch.compile(model, backend=backend)(ids, attention_mask=kept, labels=ids)
            expected = model(ids, attention_mask=kept, labels=ids)
        assert [s.target for s in report.sites] == [target] * 2
        assert (found.logits - expected.logits).abs().max() < (0.02 if dtype == BF16 else 1e-5)
    weight = model.model.layers[0].self_attn.k_proj.weight
    gradients = [torch.autograd.grad(out.loss, weight)[0] for out in (found, expected)]
    assert (gradients[0] - gradients[1]).abs().max() < 1e-5 * gradients[1].abs().max()


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(64, 192)
        self.out = torch.nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mask = torch.full((x.size(1), x.size(1)), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)
        weights = (q @ k.mT / 4 + mask).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_inductor_compiles_it(dtype: torch.dtype) -> None:
    model, x = Layer().to(dtype).eval(), randn(2, 9, 64, dtype=dtype)
    with torch.no_grad(), attn_pass.record() as report:
        found = torch.compile(model, backend=attn_pass.backend, options={"device": "Ascend910B", "choose": "fused"})(x)
        assert (found - model(x)).abs().max() < (1e-5 if dtype == FP32 else 0.03)
    assert [s.target for s in report.sites] == [FUSION if dtype == FP32 else FIA]
