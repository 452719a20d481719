"""``distances`` in training: tables of distances and slopes beside masks, whose gradient is a vector, too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import qkv, randn, same
from test_cpu_attention import DTYPES
from test_cpu_kernel import kernel_calls
from test_cpu_training import trained
from test_distances import LOWEST, as_matrix, of_keys, slopes
from torch import Tensor, nn

import attn_pass
from attn_pass.devices.cpu.kernel import build
from attn_pass.devices.cpu.kernel.gradients import FORWARD
from attn_pass.entries.transaction import compile_rewritten
from attn_pass.graph.values import tensor_value
from attn_pass.targets.base import LEARNED_BIAS

pytestmark = pytest.mark.skipif(bool(build.missing()), reason="no compiler for the CPU kernel")
Attend = Callable[..., Tensor]


class WithTable(nn.Module):
    """A program with a learned table of distances: 17 rows, as many columns as there are heads."""

    def __init__(self, attend: Attend, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(randn(17, 4, dtype=dtype), freeze=False)
        self.attend = attend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        distance = torch.arange(k.size(-2))[None] - torch.arange(q.size(-2))[:, None]
        near = distance.abs() < 4
        far = 4 + torch.log(distance.abs().clamp(min=4).float() / 4).long()
        bucket = torch.where(near, distance.abs(), far.clamp(max=7)) + 8 * (distance > 0)
        return self.attend(q, k, v, self.table(bucket).permute(2, 0, 1)[None], *rest)


def lowest(x: Tensor) -> float:
    """What masks: the lowest number of the dtype, in float64 that of float32."""
    return max(torch.finfo(x.dtype).min, LOWEST)


def alone(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + bias).softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """As T5's decoder has it: bias and mask are added first."""
    i, j = torch.arange(q.size(-2))[:, None], torch.arange(k.size(-2))
    return (q @ k.mT * 0.3 + (bias + torch.where(j <= i, 0.0, lowest(q)).to(q.dtype))).softmax(-1) @ v


def padded(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, pad: Tensor) -> Tensor:
    """As its encoder has it."""
    return (q @ k.mT * 0.3 + (bias + torch.where(pad, 0.0, lowest(q)).to(q.dtype))).softmax(-1) @ v


def filled(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, pad: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + bias).masked_fill(~pad, lowest(q)).softmax(-1) @ v


def dropped(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, pad: Tensor) -> Tensor:
    mask = torch.where(pad, 0.0, lowest(q)).to(q.dtype)
    return F.dropout((q @ k.mT * 0.3 + (bias + mask)).softmax(-1), 0.25) @ v


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The first sequence keeps all keys, the second some, and the third none."""
    pad = torch.ones(3, 1, 1, 40, dtype=torch.bool)
    pad[1, ..., 30:] = False
    pad[2] = False
    return [*qkv(3, 4, 40, 40, dtype=dtype, grad=True), pad]


def given(fn: Callable[..., Tensor], *operands: Tensor) -> dict[str, Any]:
    """What the one call of the rewritten graph is given; of tensors the shapes."""
    calls: list[torch.fx.Node] = []

    def seen(gm: torch.fx.GraphModule, *_: object) -> torch.fx.GraphModule:
        calls.extend(n for n in gm.graph.nodes if n.target is FORWARD)
        return gm

    options = attn_pass.Options(choose="fused", targets=("cpu_kernel",))
    torch._dynamo.reset()
    torch.compile(fn, backend=lambda gm, inputs: compile_rewritten(gm, inputs, options, seen, "inductor"))(*operands)
    (call,) = calls
    values = {name: tensor_value(value) for name, value in call.kwargs.items()}
    return {name: tuple(x.shape) if x is not None else call.kwargs[name] for name, x in values.items()}


@pytest.mark.parametrize(
    ("attend", "beside"),
    [
        (alone, {}),
        (causal, {"after": 0}),
        (padded, {"keep": (3, 1, 1, 40), "fill": LOWEST, "fill_is_added": True}),
        (filled, {"keep": (3, 1, 1, 40), "fill": LOWEST, "fill_is_added": False}),
    ],
)
def test_a_learned_table_is_a_vector(attend: Attend, beside: dict[str, object]) -> None:
    operands = inputs() if attend in (padded, filled) else inputs()[:3]
    shapes = given(WithTable(attend), *operands)
    assert shapes.pop("distances") == (1, 4, 1, 79)
    shapes.pop("fully_masked")
    assert shapes == beside


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("attend", [alone, causal, padded, filled])
def test_its_gradients_are_the_program_s(attend: Attend, dtype: torch.dtype) -> None:
    operands = inputs(dtype) if attend in (padded, filled) else inputs(dtype)[:3]
    report = trained(WithTable(attend, dtype), *operands)  # type: ignore[arg-type]
    assert (LEARNED_BIAS in report.sites[0].assumptions) == (attend in (causal, padded))


@pytest.mark.parametrize("attend", [alone, causal, padded])
def test_lengths_that_are_not_known(attend: Attend) -> None:
    operands = inputs() if attend is padded else inputs()[:3]
    trained(WithTable(attend), *operands, dynamic=True)  # type: ignore[arg-type]


def test_beside_dropout() -> None:
    shapes = given(WithTable(dropped), *inputs())
    assert shapes["distances"] == (1, 4, 1, 79) and shapes["fill_is_added"] and shapes["dropout"] == 0.25


@pytest.mark.parametrize(("added", "name"), [(slopes, "distances"), (of_keys, "bias")])
def test_slopes_beside_a_mask_stay_small(added: Callable[..., Tensor], name: str) -> None:
    """ALiBi, and BLOOM's number of each valid key: operands are trained, slopes are not."""

    def run(q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
        i, j = torch.arange(q.size(-2))[:, None], torch.arange(k.size(-2))
        mask = torch.where(pad & (j <= i), 0.0, LOWEST)
        return (q @ k.mT * 0.3 + (added(i, j, pad) + mask)).softmax(-1) @ v

    assert given(run, *inputs())[name] == {"distances": (1, 4, 1, 79), "bias": (3, 4, 1, 40)}[name]
    assert LEARNED_BIAS in trained(run, *inputs()).sites[0].assumptions


class WithClamped(WithTable):
    """Looked up by a whole number alone, without T5's logarithm."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        distance = torch.arange(k.size(-2))[None] - torch.arange(q.size(-2))[:, None]
        return self.attend(q, k, v, self.table(distance.clamp(-8, 8) + 8).permute(2, 0, 1)[None], *rest)


@pytest.mark.parametrize("grad", [False, True])
def test_a_table_of_clamped_distances(grad: bool) -> None:
    operands = [x.detach().requires_grad_(grad and x.is_floating_point()) for x in inputs()]
    if grad:
        assert given(WithClamped(padded), *operands)["distances"] == (1, 4, 1, 79)
    else:
        assert no_matrix(WithClamped(padded).requires_grad_(False), *operands)
    more = {"rewritten": 1, "grad": grad, "targets": ("cpu_kernel",)}
    report = same(WithClamped(padded).requires_grad_(grad), *operands, **more)  # type: ignore[arg-type]
    assert LEARNED_BIAS in report.sites[0].assumptions


def no_matrix(fn: Callable[..., Tensor], *operands: Tensor) -> bool:
    (call,) = kernel_calls(fn, *operands)
    return "bias" not in call.kwargs and "distances" in call.kwargs


# ---------------------------------------------------------------- look-alikes


def weak(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, pad: Tensor) -> Tensor:
    """A number that leaves something of what it is added to."""
    return (q @ k.mT * 0.3 + (bias + torch.where(pad, 0.0, -1e4))).softmax(-1) @ v


def by_two_rows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Of pairs of rows: the second has the distances of the first."""
    return (q @ k.mT * 0.3 + bias[:, :, torch.arange(40) // 2 * 2]).softmax(-1) @ v


def times_a_row(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + bias * torch.arange(40)[:, None] / 40).softmax(-1) @ v


def in_its_place(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, pad: Tensor) -> Tensor:
    """The fill is added to the scores and stands in the place of the bias, which gets no gradient there."""
    return (q @ k.mT * 0.3 + torch.where(pad, bias, LOWEST)).softmax(-1) @ v


def filled_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, pad: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, bias.masked_fill(~pad, LOWEST))


def taken_off_again(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    with torch.no_grad():
        less = -0.5 * bias
    return (q @ k.mT * 0.3 + (bias + less)).softmax(-1) @ v


def masked_without_gradients(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, pad: Tensor) -> Tensor:
    with torch.no_grad():
        added = bias + torch.where(pad, 0.0, LOWEST)
    return (q @ k.mT * 0.3 + added).softmax(-1) @ v


OF_PADDING = (weak, in_its_place, filled_bias, masked_without_gradients)


@pytest.mark.parametrize("attend", [*OF_PADDING, by_two_rows, times_a_row, taken_off_again])
def test_what_is_no_vector_in_training(attend: Attend) -> None:
    operands = inputs() if attend in OF_PADDING else inputs()[:3]
    shapes = given(WithTable(attend), *operands)
    assert "distances" not in shapes and "fill" not in shapes and shapes["bias"][-2:] == (40, 40)
    trained(WithTable(attend), *operands)  # type: ignore[arg-type]


def test_a_bias_that_is_computed_without_gradients_has_none() -> None:
    class Frozen(WithTable):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
            with torch.no_grad():
                bias = self.table((torch.arange(40)[None] - torch.arange(40)[:, None]).clamp(-8, 8) + 8)
            return self.attend(q, k, v, bias.permute(2, 0, 1)[None], *rest)

    trained(Frozen(alone), *inputs()[:3])  # type: ignore[arg-type]
    trained(Frozen(padded), *inputs())  # type: ignore[arg-type]


@pytest.mark.parametrize("added", [slopes, of_keys])
def test_a_fill_in_the_place_of_slopes_is_as_good_as_one_that_is_added(added: Callable[..., Tensor]) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
        i, j = torch.arange(q.size(-2))[:, None], torch.arange(k.size(-2))
        return (q @ k.mT * 0.3 + torch.where(pad, added(i, j, pad), LOWEST)).softmax(-1) @ v

    assert given(run, *inputs())["fill_is_added"]
    trained(run, *inputs())


def test_a_table_that_is_an_input_is_not_taken_apart() -> None:
    """It may hold numbers that mask."""

    def run(q: Tensor, k: Tensor, v: Tensor, table: Tensor, pad: Tensor) -> Tensor:
        distance = torch.arange(40)[None] - torch.arange(40)[:, None]
        return padded(q, k, v, table[distance + 39].permute(2, 0, 1)[None], pad)

    *operands, pad = inputs()
    table = randn(79, 4).index_fill(0, torch.arange(79)[::3], LOWEST).requires_grad_()
    assert given(run, *operands, table, pad)["bias"] == (3, 4, 40, 40)
    trained(run, *operands, table, pad)


def test_strict_numerics_take_nothing_apart() -> None:
    with_table = WithTable(padded)
    report = same(with_table, *inputs(), rewritten=None, grad=True, targets=("cpu_kernel",), numerics="strict")
    assert all(LEARNED_BIAS not in site.assumptions for site in report.sites)


# ---------------------------------------------------------------- the operator


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fill_that_is_added_passes_gradients_on(dtype: torch.dtype) -> None:
    """In a row of nothing else; where a key is kept, what is masked has a weight of 0."""
    distances = randn(1, 4, 1, 79, grad=True)
    *operands, pad = inputs(dtype)
    bias = as_matrix(distances, 40, 40) + torch.where(pad, 0.0, LOWEST)
    wanted = (*operands, distances)
    for out_grad in (randn(3, 4, 40, 16, dtype=dtype), randn(3, 4, 40, 16, dtype=dtype, seed=1)):
        results = []
        for optional in ({"distances": distances, "keep": pad, "fill": LOWEST, "fill_is_added": True}, {"bias": bias}):
            out = FORWARD(*operands, 0.3, **optional)[0]
            results.append(torch.autograd.grad(out, wanted, out_grad, retain_graph=True))
        for one, other in zip(*results):
            torch.testing.assert_close(one, other)


def test_with_dropout_it_is_the_matrix() -> None:
    distances, seed = randn(1, 4, 1, 79, grad=True), torch.tensor([7])
    *operands, pad = inputs()
    results = []
    for optional in ({"distances": distances}, {"bias": as_matrix(distances, 40, 40)}):
        out = FORWARD(*operands, 0.3, keep=pad, fill=LOWEST, fill_is_added=True, seed=seed, dropout=0.25, **optional)[0]
        results.append((out, *torch.autograd.grad(out.sum(), (*operands, distances))))
    for one, other in zip(*results):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("attend", [padded, causal])
def test_compiled(attend: Attend) -> None:
    module = WithTable(attend)
    compiled = torch.compile(module, backend=attn_pass.backend, options={"targets": ("cpu_kernel",)}, dynamic=True)
    for length in (40, 33):
        operands = [x[..., :length] if x.dtype == torch.bool else x[:, :, :length] for x in inputs()]
        operands = operands if attend is padded else operands[:3]
        leaves = (*(x.detach().requires_grad_() for x in operands[:3]), *operands[3:])
        results = []
        for run in (compiled, module):
            out = run(*leaves)
            results.append((out, *torch.autograd.grad((out * out).sum(), (*leaves[:3], module.table.weight))))
        for one, other in zip(*results):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_zeros_of_all_heads_beside_a_mask_add_no_axes() -> None:
    """T5's attention to the encoder has a bias of zeros."""

    def run(q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
        return padded(q, k, v, torch.zeros(1, 4, 40, 40), pad)

    assert given(run, *inputs())["bias"] == (3, 1, 1, 40)
    trained(run, *inputs(), reference=False)


def test_in_half_precision_the_gradient_of_a_table_is_summed_in_float32() -> None:
    """What is looked up at 1,999 distances: in bfloat16 sums of so many would be 5 % off."""
    module = WithTable(alone, torch.bfloat16)
    operands, upstream = qkv(1, 4, 1000, 1000, 16, dtype=torch.bfloat16), randn(1, 4, 1000, 16)
    compiled = torch.compile(module, backend=attn_pass.wrap("eager", choose="fused", targets=("cpu_kernel",)))
    (got,) = torch.autograd.grad(compiled(*operands), module.table.weight, upstream.bfloat16())
    exact = copy.deepcopy(module).double()
    (wanted,) = torch.autograd.grad(exact(*(x.double() for x in operands)), exact.table.weight, upstream.double())
    assert (got - wanted).abs().max() < 0.02 * wanted.abs().max()
