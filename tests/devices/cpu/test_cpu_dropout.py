"""Dropout in the CPU kernel: what is drawn, gradients with the mask that was drawn, and what draws the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import philox
import pytest
import torch
import torch.nn.functional as F
from against_eager import NEG_INF, qkv, randn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import attn_pass
from attn_pass.devices.cpu.kernel.gradients import FORWARD
from attn_pass.devices.cpu.kernel.operator import attention

SEEDS = (1 << 63) - 1
LOWEST = torch.finfo(torch.float32).min
Program = Callable[..., Tensor]


def test_the_generator_is_philox() -> None:
    """The known answers of Random123's own test."""
    zero, ones = [np.zeros(1, int)] * 4, [np.full(1, 0xFFFFFFFF)] * 4
    of_zero, of_ones = philox.philox(zero, 0), philox.philox(ones, 0xFFFFFFFFFFFFFFFF)
    assert [int(x[0]) for x in of_zero] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert [int(x[0]) for x in of_ones] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def dropped_weights(seed: int, dropout: float, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    """The weights of equal scores, times their number, as the kernel drops them: the values are unit vectors."""
    batch, heads, q_len, kv_len = shape
    query, key = torch.zeros(batch, heads, q_len, 8, dtype=dtype), torch.zeros(batch, heads, kv_len, 8, dtype=dtype)
    value = kv_len * torch.eye(kv_len, dtype=dtype).expand(batch, heads, kv_len, kv_len)
    out: Tensor = FORWARD(query, key, value, 1.0, seed=torch.tensor([seed]), dropout=dropout)[0]
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 5, 64), (1, 2, 1, 200), (2, 2, 100, 130)], ids=str)
def test_a_weight_is_dropped_by_its_place_and_the_seed(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    for seed, dropout in ((0, 0.5), (SEEDS - 1, 0.1), (3, 0.9)):
        left = philox.left(torch.tensor(seed), dropout, shape)
        got = dropped_weights(seed, dropout, shape, dtype)
        assert torch.equal(got != 0, left)
        rounding = 1e-5 if dtype == torch.float32 else 1e-2
        assert torch.allclose(got[left].float(), torch.tensor(1 / (1 - dropout)), rtol=rounding)


@pytest.mark.parametrize("dropout", [0.02, 0.1, 0.5])
def test_expectation_and_variance(dropout: float) -> None:
    """Of 64 seeds: how many weights are left in all and in each place, and that neighbours are independent."""
    shape = (2, 2, 16, 128)
    left = torch.stack([dropped_weights(seed, dropout, shape, torch.float32) != 0 for seed in range(64)]).double()
    deviation = (dropout * (1 - dropout)) ** 0.5
    assert abs(left.mean() - (1 - dropout)) < 5 * deviation / left.numel() ** 0.5
    spread = ((left.mean(0) - (1 - dropout)) / (deviation / 8)).flatten()  # standardised: its variance is 1
    assert abs(spread.square().mean() - 1) < 5 * (2 / spread.numel()) ** 0.5 + 0.02
    centred = (left - (1 - dropout)) / deviation
    for dim in range(left.dim()):  # seeds, the batch, heads, rows, keys
        together = (centred * centred.roll(1, dim)).mean()
        assert abs(together) < 5 / left.numel() ** 0.5, dim


def test_the_mean_of_many_steps_is_the_result_without_dropout() -> None:
    query, key, value = qkv(2, 2, 20, 70)
    expected = (query @ key.mT * 0.3).softmax(-1) @ value
    seeds = torch.arange(400)
    outs = torch.stack([FORWARD(query, key, value, 0.3, seed=seed[None], dropout=0.2)[0] for seed in seeds])
    apart = (outs.mean(0) - expected) / (outs.std(0) / len(seeds) ** 0.5)
    assert apart.abs().max() < 6 and abs(apart.square().mean() - 1) < 0.2


def dropped(q: Tensor, k: Tensor, v: Tensor, p: float = 0.3) -> Tensor:
    return F.dropout((q @ k.mT * 0.2).softmax(-1), p) @ v


def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return dropped(dropped(q, k, v), k, v)


def in_a_checkpoint(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = checkpoint(twice, q, k, v, use_reentrant=False)
    return out.sin()


def called(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, scale=0.2)


def to_kernel(fn: Program, sites: int = 1, **more: Any) -> Callable[..., Any]:
    """Compiled without Inductor, with every site in the kernel."""
    torch._dynamo.reset()
    run = torch.compile(fn, backend=attn_pass.wrap("aot_eager", choose="fused", targets=("cpu_kernel",), **more))
    compiled: list[str | None] = []

    def asked(*inputs: Tensor) -> Any:
        with attn_pass.record() as report:
            out = run(*inputs)
        compiled.extend(s.target for s in report.sites)
        assert compiled and compiled == ["cpu_kernel"] * (len(compiled) // sites * sites), report
        return out

    return asked


def step(run: Callable[..., Any], seed: int, inputs: list[Tensor]) -> list[Tensor]:
    """The result and the gradients."""
    torch.manual_seed(seed)
    out = run(*inputs)
    return [out, *torch.autograd.grad(out.square().sum(), inputs)]


def same_tensors(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("fn", "sites"), [(twice, 2), (in_a_checkpoint, 2), (called, 1)])
def test_a_seed_gives_a_step_again_and_another_gives_another(fn: Program, sites: int) -> None:
    run, inputs = to_kernel(fn, sites), qkv(2, 2, 33, 33, grad=True)
    first = step(run, 3, inputs)
    assert same_tensors(first, step(run, 3, inputs))
    assert not any(torch.equal(a, b) for a, b in zip(first, step(run, 4, inputs), strict=True))
    if fn is in_a_checkpoint:  # which draws the same in its second forward
        direct = step(to_kernel(lambda q, k, v: twice(q, k, v).sin(), 2), 3, inputs)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(first, direct, strict=True))


def test_under_inductor_too() -> None:
    """Its own generator makes the seed, from torch's."""
    torch._dynamo.reset()
    run = torch.compile(in_a_checkpoint, backend=attn_pass.backend, options={"choose": "fused"})
    inputs = qkv(2, 2, 33, 33, grad=True)
    with attn_pass.record() as report:
        first = step(run, 3, inputs)
    assert [s.target for s in report.sites] == ["cpu_kernel"] * 2
    assert same_tensors(first, step(run, 3, inputs))
    assert not torch.equal(first[0], step(run, 4, inputs)[0])
    # Gradients are those of the mask that the forward drew: a difference of the same step, along one direction.
    along = [1e-3 * randn(*x.shape, seed=5 + n) for n, x in enumerate(inputs)]
    sides = []
    for sign in (1, -1):
        torch.manual_seed(3)
        moved = [(x + sign * d).detach().requires_grad_() for x, d in zip(inputs, along, strict=True)]
        sides.append(float(run(*moved).detach().double().square().sum()))
    expected = sum(float((g.double() * d).sum()) for g, d in zip(first[1:], along, strict=True))
    assert abs((sides[0] - sides[1]) / 2 - expected) < 2e-3 * abs(expected)


def exact(run: Program, left: Tensor, p: float, *inputs: Tensor) -> list[Tensor]:
    """A program's step in float64 with the mask that was drawn."""
    wide = [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs]
    with torch.no_grad():
        factor = left.double() / (1 - p)
    out = run(*wide, drop=lambda w: w * factor)
    wanted = [x for x in wide if x.requires_grad]
    return [out, *torch.autograd.grad(out.square().sum(), wanted)]


def masked(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, fill: float, drop: Any) -> Tensor:
    out: Tensor = drop((q @ k.mT * 0.2).masked_fill(~keep, fill).softmax(-1)) @ v
    return out


def biased(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, bias: Tensor, fill: float, drop: Any) -> Tensor:
    out: Tensor = drop((q @ k.mT * 0.2 + bias).masked_fill(~keep, fill).softmax(-1)) @ v
    return out


@pytest.mark.slow
@pytest.mark.usefixtures("quiet_torch")
def test_inductor_hands_the_probability_over_in_double_precision() -> None:
    """Of equal weights and values of 1 a row's result is a number of keys times the factor of those that stay."""
    probability, keys = 1 - 1e-6, 1 << 14

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.dropout((q @ k.mT).softmax(-1), probability, True) @ v

    query = torch.zeros(1, 1, 256, 16, requires_grad=True)
    options = {"targets": ("cpu_kernel",), "choose": "fused"}
    with attn_pass.record() as report:
        compiled = torch.compile(program, backend=attn_pass.backend, options=options)
        out = compiled(query, torch.zeros(1, 1, keys, 16), torch.ones(1, 1, keys, 16))
    assert [s.target for s in report.sites] == ["cpu_kernel"]
    counts = out.detach().double() * keys * (1 - probability)
    assert counts.max() > 0.5 and (counts - counts.round()).abs().max() < 1e-5


@pytest.mark.parametrize("fill", [-1e9, LOWEST])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("q_len", [3, 40])
def test_fully_masked_rows_keep_some_of_all_values(fill: float, with_bias: bool, q_len: int) -> None:
    """As a number that masks makes their weights equal, and dropout takes some of them."""
    q, k, v = qkv(2, 2, q_len, 70, grad=True)
    keep = randn(2, 1, q_len, 70) > 0
    keep[:, :, 1:3] = False
    inputs = [q, k, v, keep, *([randn(2, q_len, 70, grad=True)] if with_bias else [])]
    fn = biased if with_bias else masked
    run = to_kernel(lambda *x: fn(*x, fill=fill, drop=lambda w: F.dropout(w, 0.4)))
    torch.manual_seed(11)
    seed = torch.randint(0, SEEDS, (1,))
    torch.manual_seed(11)
    out = run(*inputs)
    got = [out, *torch.autograd.grad(out.square().sum(), [x for x in inputs if x.requires_grad])]
    left = philox.left(seed, 0.4, (2, 2, q_len, 70))
    expected = exact(lambda *x, drop: fn(*x, fill=fill, drop=drop), left, 0.4, *inputs)
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a.double(), b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_with_the_mask_that_was_drawn(dtype: torch.dtype) -> None:
    inputs = list(qkv(2, 4, 70, 130, kv_heads=2, dtype=dtype, grad=True))
    torch.manual_seed(11)
    seed = torch.randint(0, SEEDS, (1,))

    def causal(q: Tensor, k: Tensor, v: Tensor, drop: Any) -> Tensor:
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None]
        out: Tensor = drop((q @ k.mT * 0.2).masked_fill(j > i + 60, NEG_INF).softmax(-1)) @ v
        return out

    got = step(to_kernel(lambda *x: causal(*x, drop=lambda w: F.dropout(w, 0.1))), 11, inputs)
    expected = exact(causal, philox.left(seed, 0.1, (2, 4, 70, 130)), 0.1, *inputs)
    allowed = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    for a, b in zip(got, expected, strict=True):
        assert (a.detach().double() - b).abs().max() < allowed * max(1.0, float(b.abs().max()))


def test_the_number_of_threads_changes_nothing() -> None:
    before, outs = torch.get_num_threads(), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        inputs = qkv(3, 2, 130, 300, grad=True)
        out = FORWARD(*inputs, 0.2, seed=torch.tensor([9]), dropout=0.5)[0]
        outs.append([out, *torch.autograd.grad(out.sin().sum(), inputs)])
    torch.set_num_threads(before)
    assert same_tensors(outs[0], outs[1]) and same_tensors(outs[0], outs[2])


def test_no_dropout_draws_nothing_and_all_of_it_gives_zeros() -> None:
    inputs = qkv(2, 2, 33, 33, grad=True)
    run = to_kernel(lambda q, k, v: dropped(q, k, v, 0.0))
    assert same_tensors(step(run, 3, inputs), step(run, 4, inputs))
    for x in step(to_kernel(lambda q, k, v: dropped(q, k, v, 1.0)), 3, inputs):
        assert x.eq(0).all()


def test_without_gradients() -> None:
    run, inputs = to_kernel(dropped), qkv(2, 2, 33, 33)
    torch.manual_seed(11)
    left = philox.left(torch.randint(0, SEEDS, (1,)), 0.3, (2, 2, 33, 33))
    torch.manual_seed(11)
    with torch.no_grad():
        out = run(*inputs)
    assert torch.allclose(out, ((inputs[0] @ inputs[1].mT * 0.2).softmax(-1) * left / 0.7) @ inputs[2], atol=1e-5)


def test_each_site_draws_for_itself_and_eager_s_dropout_is_gone() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def kept(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm

    def same_twice(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return dropped(q, k, v), dropped(q, k, v)

    torch._dynamo.reset()
    run = torch.compile(same_twice, backend=attn_pass.wrap(kept, choose="fused", targets=("cpu_kernel",)))
    one, other = run(*qkv(2, 2, 33, 33))
    assert not torch.equal(one, other)
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert called.count("aten.randint.low") == 2 and not any("dropout" in name or "softmax" in name for name in called)


def test_eager_s_numbers_are_left_to_eager() -> None:
    torch._dynamo.reset()
    inputs = qkv(2, 2, 33, 33, grad=True)
    with torch._inductor.config.patch(fallback_random=True):
        (site,) = attn_pass.explain(dropped, *inputs).sites
    assert site.target is None and "fallback_random" in site.refusals["cpu_kernel"]


def test_an_exported_program_is_left() -> None:
    class Dropped(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return dropped(q, k, v)

    with torch.no_grad(), attn_pass.record() as report:
        attn_pass.rewrite(torch.export.export(Dropped(), qkv(2, 2, 33, 33)), choose="fused", targets=("cpu_kernel",))
    assert "torch.compile only" in report.sites[0].refusals["cpu_kernel"]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"dropout": 1.5, "seed": torch.tensor([1])}, "probability"),
        ({"dropout": 0.5}, "drawn from a seed"),
        ({"dropout": 0.5, "seed": torch.tensor([1]), "fully_masked": "mean"}, "give a fill"),
        ({"fill": -1e9, "after": 0}, "there is no after"),
    ],
)
def test_arguments_that_do_not_go_together(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        FORWARD(*qkv(2, 2, 3, 4), 1.0, **given)


def test_few_rows_of_a_segment_draw_what_many_do() -> None:
    """A segment's heads have numbers of their own, whichever path its rows take."""
    torch.manual_seed(0)
    query, key = (torch.randn(1, 1, 12, 16) for _ in range(2))
    given = {"offsets": torch.tensor([0, 6, 12]), "seed": torch.tensor([5]), "dropout": 0.5}
    few = attention(query, key, torch.eye(12)[None, None], 0.25, **given)
    many = attention(query, key, torch.eye(12)[None, None], 0.25, **given, statistics=torch.empty(1, 1, 12, 2))
    assert torch.equal(few == 0, many == 0)
