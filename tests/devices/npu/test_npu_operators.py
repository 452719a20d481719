"""Ascend's operators as targets: the emitted calls run on the CPU by implementations of the documented contract."""

from __future__ import annotations

from typing import Any

import npu_stand_in
import pytest
import torch
from against_eager import qkv, randn, same
from by_hand import NONE_IN_ONE, SOME, banded, infinite, negative, plain
from npu_programs import (
    BF16,
    FP16,
    FP32,
    FUSION,
    LOWEST,
    Program,
    Tensor,
    added,
    biased,
    filled,
    flat,
    heads_last,
    hidden,
    packed,
    reason,
    turned,
)
from npu_stand_in import FA1, FA3, FIA

import attn_pass

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
    """The inference operator knows neither modes nor zeros for fully masked rows there: the stand-in raises on both."""
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
    assert "no row is fully masked" in report.sites[0].assumptions


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
    program, report = exported(fn, q, k, v, lowest=3, targets=(target,))
    assert report == target
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
            program, report = exported(fn, q, k, v, lowest=lowest, targets=(target,))
            assert report == target
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
            result = torch.compile(model, backend=backend)(ids, attention_mask=kept, labels=ids)
            expected = model(ids, attention_mask=kept, labels=ids)
        assert [s.target for s in report.sites] == [target] * 2
        assert (result.logits - expected.logits).abs().max() < (0.02 if dtype == BF16 else 1e-5)
    weight = model.model.layers[0].self_attn.k_proj.weight
    gradients = [torch.autograd.grad(out.loss, weight)[0] for out in (result, expected)]
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
        result = torch.compile(model, backend=attn_pass.backend, options={"device": "Ascend910B", "choose": "fused"})(x)
        assert (result - model(x)).abs().max() < (1e-5 if dtype == FP32 else 0.03)
    assert [s.target for s in report.sites] == [FUSION if dtype == FP32 else FIA]
