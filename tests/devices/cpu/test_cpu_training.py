"""The target `cpu_kernel` in training: gradients of every form against eager and float64, refusals, and the choice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import NEG_INF, qkv, randn, same
from test_cpu_kernel import HALF, KEEPS, masked, soft_cap, weak_fill
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import attn_pass
from attn_pass.compat import GRADIENT_AT_BOUND
from attn_pass.targets.base import NONEMPTY_ROWS

LOWEST = torch.finfo(torch.float32).min
Program = Callable[..., Tensor]


def trained(fn: Program, *inputs: Tensor, rewritten: int = 1, **more: object) -> attn_pass.Report:
    return same(fn, *inputs, rewritten=rewritten, grad=True, choose="fused", targets=("cpu_kernel",), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("fill", [NEG_INF, -1e30])
@pytest.mark.parametrize("name", KEEPS)
def test_masks_of_positions(name: str, fill: float) -> None:
    for kv_heads, q_len, kv_len in ((2, 40, 40), (4, 33, 70), (1, 2, 50)):
        if name == "empty rows" and fill == NEG_INF:
            continue  # eager's gradients are NaN
        trained(masked(KEEPS[name], fill), *qkv(2, 4, q_len, kv_len, kv_heads=kv_heads, grad=True))


@pytest.mark.parametrize("name", ["causal", "window"])
def test_lengths_that_are_not_known(name: str) -> None:
    trained(masked(KEEPS[name]), *qkv(2, 4, 33, 70, kv_heads=2, grad=True), dynamic=True)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", ["causal", "window"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    trained(masked(KEEPS[name]), *qkv(2, 4, 33, 70, kv_heads=2, value_dim=24, dtype=dtype, grad=True))


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT * 0.2 + bias).softmax(-1) @ v


SHAPES = (
    *((2, 4, 17, 70), (1, 4, 17, 70), (4, 17, 70), (2, 1, 17, 70), (17, 70)),
    *((2, 4, 1, 70), (70,), (4, 17, 1), (2, 1, 1, 70)),
)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_learned_bias_of_any_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    trained(biased, *qkv(2, 4, 17, 70, dtype=dtype, grad=True), randn(*shape, dtype=dtype, grad=True))


def test_a_learned_bias_of_lengths_that_are_not_known() -> None:
    trained(biased, *qkv(2, 4, 17, 70, grad=True), randn(1, 4, 17, 70, grad=True), dynamic=True)


@pytest.mark.parametrize("fill", [LOWEST, -1e9])
def test_rows_that_an_added_mask_leaves_nothing_of(fill: float) -> None:
    mask = torch.zeros(2, 1, 17, 70)
    mask[:, :, 3:9] = fill
    mask[1, :, :, 40:] = fill
    trained(biased, *qkv(2, 4, 17, 70, grad=True), mask)
    trained(biased, *qkv(2, 4, 17, 70, grad=True), mask.requires_grad_())


@pytest.mark.skipif(GRADIENT_AT_BOUND[0] != 1, reason="a clamp passes no gradient on at its bound (numerics.md)")
def test_scores_that_are_clamped_in_rows_that_a_mask_leaves_nothing_of() -> None:
    """A clamp passes the whole gradient on at its bound, and the larger of two tensors half of it to each."""

    def clamped(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT * 0.2 + bias + mask).clamp(min=LOWEST).softmax(-1) @ v

    def larger(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        return torch.max(q @ k.mT * 0.2 + bias + mask, torch.tensor(LOWEST)).softmax(-1) @ v

    mask, bias = torch.zeros(2, 1, 17, 70), randn(1, 4, 17, 70, grad=True)
    mask[:, :, 3:9] = LOWEST
    trained(clamped, *qkv(2, 4, 17, 70, grad=True), bias, mask)
    trained(larger, *qkv(2, 4, 17, 70), bias, mask)


@pytest.mark.parametrize("promised", [False, True])
def test_the_promise_that_gradients_rely_on_is_told(promised: bool) -> None:
    mask = torch.zeros(2, 1, 17, 70)
    mask[1, :, :, 40:] = LOWEST

    def told(grad: bool) -> tuple[str, ...]:
        inputs = (*qkv(2, 4, 17, 70, grad=grad), mask)
        more: dict[str, Any] = {"choose": "fused", "targets": ("cpu_kernel",), "assume_nonempty_rows": promised}
        return same(biased, *inputs, rewritten=1, grad=grad, **more).sites[0].assumptions

    assert (NONEMPTY_ROWS in told(True)) == promised and NONEMPTY_ROWS not in told(False)


def test_a_learned_bias_under_a_causal_mask() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None]
        return (q @ k.mT * 0.2 + bias).masked_fill(j > i, LOWEST).softmax(-1) @ v

    trained(run, *qkv(2, 4, 33, 33, grad=True), randn(1, 4, 33, 33, grad=True), assume_nonempty_rows=True)


def test_a_table_of_distances() -> None:
    """T5: the bias is looked up, and the table gets the gradient."""

    def run(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        distance = (torch.arange(k.shape[-2])[None] - torch.arange(q.shape[-2])[:, None]).clamp(-8, 8) + 8
        return (q @ k.mT + F.embedding(distance, table).permute(2, 0, 1)).softmax(-1) @ v

    trained(run, *qkv(2, 4, 33, 40, grad=True), randn(17, 4, grad=True))


@pytest.mark.parametrize("fn", [soft_cap, weak_fill])
def test_functions_of_the_scores(fn: Program) -> None:
    trained(fn, *qkv(2, 4, 33, 70, grad=True))


def test_a_soft_cap_that_is_learned() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, cap: Tensor) -> Tensor:
        return (cap[:, None, None] * torch.tanh(q @ k.mT / cap[:, None, None])).softmax(-1) @ v

    trained(run, *qkv(2, 4, 33, 70, grad=True), (randn(4).abs() + 2).requires_grad_())


def test_slopes_and_temperatures_that_are_learned() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, slope: Tensor, temperature: Tensor) -> Tensor:
        distance = torch.arange(k.shape[-2])[None] - torch.arange(q.shape[-2])[:, None]
        return (q @ k.mT * temperature + slope[:, None, None] * distance).softmax(-1) @ v

    trained(run, *qkv(2, 4, 33, 70, grad=True), randn(4, grad=True), randn(1, grad=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sinks(dtype: torch.dtype) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        scores = q @ k.mT * 0.2
        i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None]
        scores = scores.masked_fill(j > i, NEG_INF)
        both = torch.cat((scores, sink[None, :, None, None].expand(*scores.shape[:-1], 1)), -1)
        return both.softmax(-1)[..., :-1] @ v

    trained(run, *qkv(2, 4, 33, 70, dtype=dtype, grad=True), randn(4, dtype=dtype, grad=True))


def test_the_log_sum_exp_has_a_gradient_too() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        s = q @ k.mT * 0.3
        return s.softmax(-1) @ v, s.logsumexp(-1)

    trained(run, *qkv(2, 4, 33, 70, grad=True))  # type: ignore[arg-type]


def test_operands_that_want_no_gradient_get_none() -> None:
    q, k, v = qkv(2, 4, 17, 70)
    trained(biased, q, k, v, randn(1, 4, 17, 70, grad=True))
    trained(biased, q.requires_grad_(), k, v, randn(1, 4, 17, 70))
    trained(biased, q.detach(), k, v.requires_grad_(), randn(1, 4, 17, 70))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_in_the_hundreds(dtype: torch.dtype) -> None:
    """Weights come from a row's largest score and its sum, not from a logarithm that rounds both away."""
    q, k, v = (30 * x if n < 2 else x for n, x in enumerate(qkv(2, 4, 65, 70, dtype=dtype)))
    trained(biased, *(x.detach().requires_grad_() for x in (q, k, v)), randn(1, 4, 65, 70, dtype=dtype, grad=True))


@pytest.mark.parametrize(
    ("fill", "factor", "rewritten"), [(NEG_INF, -0.5, 0), (torch.finfo(torch.float32).min, -3.0, 0), (NEG_INF, 0.5, 1)]
)
def test_masked_scores_times_a_negative_number(fill: float, factor: float, rewritten: int) -> None:
    """Minus -inf: rows are NaN, and their gradients, but for the 0 that eager has where a score was replaced."""

    def turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keep = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril()
        return ((q @ k.mT).masked_fill(~keep, fill) * factor).softmax(-1) @ v

    if rewritten:
        trained(turned, *qkv(2, 2, 4, 4, grad=True))
        return
    options = {"choose": "fused", "targets": ("cpu_kernel",)}
    site = attn_pass.explain(turned, *qkv(2, 2, 4, 4, grad=True), attn_pass_options=options).sites[0]
    assert site.target is None and "may be infinite" in site.refusals["cpu_kernel"]
    with torch.no_grad():
        assert attn_pass.explain(turned, *qkv(2, 2, 4, 4), attn_pass_options=options).sites[0].target == "cpu_kernel"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_kept_key_that_is_no_number(dtype: torch.dtype) -> None:
    """Its row is NaN, and the gradients of what it keeps; those of scores that were replaced are 0 there, too."""

    def run(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        return ((q @ k.mT).masked_fill(hidden, -1e9) / 2).softmax(-1) @ v

    q, k, v = (x.detach() for x in qkv(2, 2, 5, 9, dtype=dtype))
    k[..., 3, :] = float("nan")
    hidden = torch.arange(9) > 5
    trained(run, *(x.requires_grad_() for x in (q, k, v)), hidden)


def merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = (q @ k.mT * 0.2).softmax(-1) @ v
    return out.transpose(1, 2).flatten(2)


def merged_and_summed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = (q @ k.mT * 0.2).softmax(-1) @ v
    return out.transpose(1, 2).flatten(2).mul_(2), out.sum()


WRITTEN: dict[str, Callable[..., object]] = {
    "alone": lambda q, k, v: merged(q, k, v).mul_(2),
    "beside the result": merged_and_summed,
    "out of a checkpoint": lambda q, k, v: checkpoint(merged, q, k, v, use_reentrant=False).mul_(2),
}


@pytest.mark.parametrize(("name", "grad"), [*((name, True) for name in WRITTEN), ("beside the result", False)])
def test_merged_heads_that_are_written_in_place(name: str, grad: bool) -> None:
    """A copy in the program, and a view of what the kernel writes, which has heads behind positions."""
    inputs = qkv(2, 2, 5, 9, grad=grad)
    same(WRITTEN[name], *inputs, rewritten=1, grad=grad, choose="fused", targets=("cpu_kernel",))


@pytest.mark.parametrize("part", [slice(None), slice(0, 3)], ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_a_sum_of_products_that_is_written(part: slice, grad: bool) -> None:
    """Weights in pieces: the one product that stands for the sum is what is written."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        w = (q @ k.mT / 2).softmax(-1)
        out = w[..., :4] @ v[..., :4, :] + w[..., 4:] @ v[..., 4:, :]
        out[..., part] = 0
        return out

    same(run, *qkv(2, 2, 5, 9, grad=grad), rewritten=1, grad=grad, choose="fused", targets=("cpu_kernel",))


def test_inside_a_checkpoint() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        out: Tensor = checkpoint(biased, q, k, v, bias, use_reentrant=False)
        return out

    trained(run, *qkv(2, 4, 17, 70, grad=True), randn(1, 4, 17, 70, grad=True))


def filled(fill: float, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, hidden: Tensor) -> Tensor:
    return (q @ k.mT * 0.2 + bias).masked_fill(hidden, fill).softmax(-1) @ v


HIDDEN = {
    "some rows fully": lambda: (randn(2, 1, 17, 70) > 0).index_fill(2, torch.tensor([3, 7]), True),
    "padding, and a sequence of nothing": lambda: torch.arange(70) >= torch.tensor([40, 0])[:, None, None, None],
    "by heads": lambda: randn(2, 4, 17, 70) > 1,
}


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize(("name", "shape"), list(zip(HIDDEN, ((1, 4, 17, 70), (70,), (2, 4, 17, 70)))), ids=str)
def test_a_learned_bias_beside_scores_that_are_replaced_by_a_number(
    name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """DeBERTa: a score that is replaced passes nothing on, in fully masked rows either."""
    fill = torch.finfo(dtype).min if name == "by heads" or dtype == torch.float16 else -1e9
    operands = qkv(2, 4, 17, 70, dtype=dtype, grad=True)
    trained(partial(filled, fill), *operands, randn(*shape, dtype=dtype, grad=True), HIDDEN[name]())


def test_a_learned_bias_that_masks_with_the_number_that_replaces() -> None:
    """Rows that both mask fully together have weights at all keys."""
    bias = randn(4, 17, 70).masked_fill(randn(17, 70, seed=1) > 0, -1e9)
    bias[:, 5:9] = -1e9
    operands = qkv(2, 4, 17, 70, grad=True)
    trained(partial(filled, -1e9), *operands, bias.requires_grad_(), HIDDEN["some rows fully"]())


def test_a_learned_bias_beside_scores_that_are_replaced_by_minus_infinity() -> None:
    hidden = HIDDEN["by heads"]()
    trained(partial(filled, NEG_INF), *qkv(2, 4, 17, 70, grad=True), randn(4, 17, 70, grad=True), hidden)


def test_a_learned_bias_beside_two_numbers_that_replace() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, hidden: Tensor, more: Tensor) -> Tensor:
        return (q @ k.mT * 0.2 + bias).masked_fill(hidden, -1e9).masked_fill(more, -2e9).softmax(-1) @ v

    given = (*qkv(2, 4, 17, 70, grad=True), randn(1, 4, 17, 70, grad=True))
    trained(run, *given, HIDDEN["some rows fully"](), randn(2, 1, 17, 70, seed=1) > 0)


def test_a_learned_bias_that_is_replaced_before_it_is_added() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, hidden: Tensor) -> Tensor:
        return (q @ k.mT * 0.2 + torch.where(hidden, -1e9, bias)).softmax(-1) @ v

    given = (*qkv(2, 4, 17, 70, grad=True), randn(1, 4, 17, 70, grad=True), HIDDEN["some rows fully"]())
    trained(run, *given)


def test_outside_of_torch_compile_it_has_no_gradients() -> None:
    module = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    x = randn(2, 9, 16)
    program = torch.export.export(module, (x, x, x))
    with attn_pass.record() as report:
        attn_pass.rewrite(program, choose="fused", targets=("cpu_kernel",))
    (site,) = report.sites
    assert site.outcome == "left" and "under torch.compile only" in site.refusals["cpu_kernel"]


def rate_dropped(rate: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout((q @ k.mT * 0.2).softmax(-1), rate) @ v


def chosen(fn: Program, *inputs: Tensor) -> attn_pass.SiteReport:
    torch._dynamo.reset()
    (site,) = attn_pass.explain(fn, *inputs).sites
    return site


def test_it_is_taken_in_training_where_it_is_predicted_to_be_the_fastest() -> None:
    long = qkv(1, 8, 1024, 1024, dim=64, grad=True)
    bias = randn(1, 8, 1024, 1024, grad=True)
    assert chosen(biased, *long, bias).target == "cpu_kernel"
    assert chosen(masked(KEEPS["causal"]), *long).target == "cpu_kernel"


def test_dropout_has_a_cost() -> None:
    operands = qkv(4, 8, 512, 512, dim=64, grad=True)
    with_it, without = (
        chosen(partial(rate_dropped, rate), *operands).predicted_us["cpu_kernel"] for rate in (0.1, 0.0)
    )
    assert 1.02 * without < with_it < 1.4 * without


def test_in_bfloat16_a_learned_bias_is_left_but_for_many_keys() -> None:
    for length, target in ((512, None), (2048, "cpu_kernel")):
        operands = qkv(1, 8, length, length, dim=64, dtype=torch.bfloat16, grad=True)
        bias = randn(1, 8, length, length, dtype=torch.bfloat16, grad=True)
        assert chosen(biased, *operands, bias).target == target


@pytest.mark.parametrize(("dtype", "after"), [(torch.float16, 0.5), (torch.bfloat16, 40**-0.5)])
def test_a_fill_and_a_bias_that_mask_a_row_together_keep_their_order(dtype: torch.dtype, after: float) -> None:
    """Where scores are multiplied after both, either masks as much as the other, as in eager."""
    torch.manual_seed(0)
    lowest = torch.finfo(dtype).min
    q, k, v = (torch.randn(1, 2, 70, 16, dtype=dtype) for _ in range(3))
    bias, hidden = torch.zeros(70, 70, dtype=dtype), torch.zeros(70, 70, dtype=torch.bool)
    bias[3, ::2], hidden[3, 1::2] = lowest, True

    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return ((q @ k.mT + bias).masked_fill(hidden, lowest) * after).softmax(-1) @ v

    torch._dynamo.reset()
    backend = attn_pass.wrap("eager", choose="fused", targets=("cpu_kernel",), on_error="raise")
    with attn_pass.record() as report:
        got = torch.compile(program, backend=backend)(q.requires_grad_(), k, v, bias)
    assert [site.target for site in report.sites] == ["cpu_kernel"]
    want = v.double().mean(2)  # all keys are masked alike
    assert (got[:, :, 3].double() - want).abs().max() < 5e-3


CLAMPED: dict[str, Callable[..., Tensor]] = {
    "at least 0": lambda q, k, v: (q @ k.mT).clamp(min=0.0).softmax(-1) @ v,
    "between two numbers": lambda q, k, v: (q @ k.mT).clamp(-2.0, 2.0).softmax(-1) @ v,
    "at most a number, negated": lambda q, k, v: (-(q @ k.mT)).clamp(max=0.0).softmax(-1) @ v,
    "the larger of it and a number that is a tensor": lambda q, k, v: (
        torch.maximum(q @ k.mT, torch.tensor(0.0)).softmax(-1) @ v
    ),
}


@pytest.mark.parametrize("name", list(CLAMPED))
def test_scores_that_equal_what_they_are_clamped_to(name: str) -> None:
    """A clamp passes the whole gradient on, and a maximum of two tensors half of it."""
    signs = [x.sign().requires_grad_() for x in qkv(dim=4)]
    same(CLAMPED[name], *signs, grad=True, targets=("cpu_kernel",), rewritten=1)


@pytest.mark.parametrize("grad", [False, True])
def test_an_added_mask_and_a_filled_one_mask_a_row_together_in_bfloat16(grad: bool) -> None:
    """By the same number: such a row is the mean of all values, and not of those that one of the two masks."""

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        later = torch.arange(40) > torch.arange(40)[:, None]
        return (q @ k.mT * 0.25 + mask).masked_fill(later, -1e9).softmax(-1) @ v

    mask = torch.zeros(1, 1, 1, 40).masked_fill(torch.arange(40) < 30, -1e9).bfloat16()
    inputs = qkv(1, 2, 40, 40, 16, dtype=torch.bfloat16, grad=grad)
    report = same(run, *inputs, mask, grad=grad, targets=("cpu_kernel",), rewritten=1)
    assert report.sites[0].target == "cpu_kernel"
