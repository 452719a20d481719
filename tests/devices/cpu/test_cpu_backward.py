"""Gradients of the CPU kernel: random calls compared with float64, and beside eager's own error."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from against_eager import randn
from kernel_reference import of_score, reference
from test_cpu_attention import DTYPES, SCORE, draw
from torch import Tensor

from attn_pass.devices.cpu.kernel import operator, slopes
from attn_pass.devices.cpu.kernel.gradients import BACKWARD_OPERATOR, FORWARD

LOWEST = torch.finfo(torch.float32).min
ERRORS = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}  # or twice eager's; of the largest, or of 1


def leaves(operands: tuple[Tensor, Tensor, Tensor], given: dict[str, Any], wide: bool) -> dict[str, Tensor]:
    """All that has a gradient, as leaves of a graph."""
    named = dict(zip(("query", "key", "value"), operands, strict=True))
    named |= {name: given[name] for name in ("bias", "distances", "sink") if name in given}
    named |= {f"captured{n}": x for n, x in enumerate(given.get("captured", ())) if n == 0}  # 1 is a condition
    return {name: (x.double() if wide else x).detach().requires_grad_() for name, x in named.items()}


def by_distance(rng: random.Random, query: Tensor, key: Tensor, given: dict[str, Any]) -> dict[str, Any]:
    """The call, perhaps with a vector of distances in the place of its bias."""
    if "bias" not in given and rng.random() < 0.7:
        return given
    batch, heads, q_len, _ = query.shape
    shape = (rng.choice((1, batch)), rng.choice((1, heads)), 1, q_len + key.size(2) - 1)
    made = torch.randn(shape)
    if rng.random() < 0.3:
        made = made.masked_fill(torch.rand(shape) < 0.3, float("-inf"))
    return {name: x for name, x in given.items() if name != "bias"} | {
        "distances": made.to(rng.choice((torch.float32, query.dtype)))
    }


def dropped_or_filled(rng: random.Random, given: dict[str, Any]) -> dict[str, Any]:
    """The call with dropout, or with a fill in the place of bounds, or both; or as it is."""
    if rng.random() < 0.3:
        given = {name: x for name, x in given.items() if name not in (*operator.NUMBERS, *operator.BOUNDS)}
        given["fill"] = rng.choice((-1e9, -3.0, LOWEST))
        masks = any(x.isinf().any() for x in (given.get("bias"), given.get("distances")) if x is not None)
        given["fill_is_added"] = given["fill"] == LOWEST and not masks and rng.random() < 0.7
    if rng.random() < 0.4:
        given = given | {"dropout": rng.choice((0.1, 0.5, 1.0)), "seed": torch.randint(1 << 62, (1,))}
        given["fully_masked"] = "zero"
    return given


def gradients(
    call: Any, operands: Any, scale: float, given: dict[str, Any], upstream: list[Tensor], wide: bool
) -> dict[str, Tensor]:
    """Of the result and the log-sum-exp together, by name."""
    named = leaves(operands, given, wide)
    more = {**given, **{name: x for name, x in named.items() if name in given}}
    if "captured" in given:
        more["captured"] = [named["captured0"], given["captured"][1]]
    results = call(named["query"], named["key"], named["value"], scale, **more)[: len(upstream)]
    total = sum(
        (x.double().nan_to_num(0.0, 0.0, 0.0) * g.double()).sum() for x, g in zip(results, upstream, strict=True)
    )
    return dict(zip(named, torch.autograd.grad(total, list(named.values()), allow_unused=True), strict=True))


def far(got: Tensor, expected: Tensor) -> float:
    """The largest difference, in units of the largest number above 1."""
    if not expected.numel():
        return 0.0
    apart = (got.double() - expected).abs() / max(1.0, float(expected.abs().max()))
    return float(apart.nan_to_num(float("inf")).max())


def failures(dtype: torch.dtype, count: int, seed: int, scored: float = 0.0) -> list[str]:
    """Drawn calls with a gradient that comes out wrong, in words; a share of them with a score function."""
    rng, faults = random.Random(seed), []
    torch.manual_seed(seed)
    for n in range(count):
        (*operands, scale), given = draw(rng, dtype, scored)
        if n % 2:
            given = by_distance(rng, *operands[:2], given)
        given = dropped_or_filled(rng, given)
        query, value = operands[0], operands[2]
        upstream = [torch.randn(*query.shape[:3], value.size(3)).to(dtype)]
        if n % 3 == 0 and "sink" not in given:
            upstream.append(torch.randn(query.shape[:3]))
        expected = gradients(reference, operands, scale, given, upstream, wide=True)
        eager = gradients(partial(reference, to=dtype), operands, scale, given, upstream, wide=False)
        for name, got in gradients(FORWARD, operands, scale, given, upstream, wide=False).items():
            wrong = far(got, expected[name]) if expected[name] is not None else float(got.abs().max())
            allowed = 0.0 if expected[name] is None else 2 * far(eager[name], expected[name])
            if wrong > max(allowed, ERRORS[dtype]):
                shapes = [tuple(x.shape) for x in operands]
                faults.append(f"{dtype} {seed}.{n} {name}: {wrong:.1e} {shapes} scale {scale} {sorted(given)}")
    return faults


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_drawn_gradients_are_right(dtype: torch.dtype) -> None:
    assert failures(dtype, 40, seed=7) == []


@pytest.mark.parametrize("q_len", [1, 3, 40])
@pytest.mark.parametrize("kv_len", [2, 49, 130])
def test_scores_in_the_hundreds_with_few_rows_and_with_many(q_len: int, kv_len: int) -> None:
    """The backward's scores are the forward's bits: a weight of 1 is 1, and its score gets a gradient of nothing."""
    torch.manual_seed(0)
    operands = [torch.randn(2, 2, n, 64) * factor for n, factor in ((q_len, 20), (kv_len, 20), (kv_len, 1))]
    upstream = [torch.randn(2, 2, q_len, 64)]
    expected = gradients(reference, operands, 0.2, {}, upstream, wide=True)
    for name, got in gradients(FORWARD, operands, 0.2, {}, upstream, wide=False).items():
        assert far(got, expected[name]) < 2e-4, name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bias_of_all_keys_has_no_gradient(dtype: torch.dtype) -> None:
    """A softmax does not see it: what its rows add up to is as little as their own rounding."""
    torch.manual_seed(0)
    operands = [torch.randn(2, 4, n, 32).to(dtype) for n in (49, 49, 49)]
    bias = torch.randn(2, 1, 1, 1).to(dtype).requires_grad_()
    out = FORWARD(*operands, 0.2, bias=bias)[0]
    (got,) = torch.autograd.grad(out, bias, torch.randn(out.shape).to(dtype))
    assert got.abs().max() < 1e-4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kv_len", "given"), [(1, {}), (49, {"start": 7, "end": 8}), (130, {"start": 70, "end": 71})])
def test_the_score_of_a_row_s_only_key_has_no_gradient(kv_len: int, given: dict[str, int], dtype: torch.dtype) -> None:
    """As eager's, to the bit: its weight is 1, and the result is its value."""
    torch.manual_seed(0)
    operands = [torch.randn(2, 2, n, 40).to(dtype).requires_grad_() for n in (70, kv_len, kv_len)]
    bias = torch.randn(2, 1, kv_len).to(dtype).requires_grad_()
    out = FORWARD(*operands, 0.2, bias=bias, **given)[0]
    query, key, value, of_bias = torch.autograd.grad(out, [*operands, bias], torch.randn(out.shape).to(dtype))
    assert query.eq(0).all() and key.eq(0).all() and of_bias.eq(0).all() and value.ne(0).any()


def test_gradients_of_score_functions_and_what_they_capture() -> None:
    assert failures(torch.float32, 30, seed=9, scored=1.0) == []


def test_gradients_do_not_depend_on_the_number_of_threads() -> None:
    """Whether parts of the batch, of the heads or of the keys are summed up apart."""
    torch.manual_seed(0)
    before = torch.get_num_threads()
    for batch, heads, length, shape in ((1, 2, 600, (2, 600, 600)), (9, 2, 70, (70, 70)), (9, 4, 70, (4, 1, 70))):
        inputs = [torch.randn(batch, heads, length, 32, requires_grad=True) for _ in range(3)]
        inputs.append(torch.randn(shape, requires_grad=True))
        found = []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            out = FORWARD(*inputs[:3], 0.2, bias=inputs[3], after=40)[0]
            found.append(torch.autograd.grad(out.sin().sum(), inputs))
        torch.set_num_threads(before)
        assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("sizes", [(0, 2, 3, 4, 8), (2, 2, 0, 4, 8), (2, 2, 3, 0, 8), (2, 2, 3, 4, 0)])
def test_sizes_of_nothing(sizes: tuple[int, ...]) -> None:
    batch, heads, q_len, kv_len, dim = sizes
    inputs = [torch.randn(batch, heads, n, dim, requires_grad=True) for n in (q_len, kv_len, kv_len)]
    out = FORWARD(*inputs, 1.0)[0]
    for got, x in zip(torch.autograd.grad(out.sum(), inputs), inputs, strict=True):
        assert got.shape == x.shape and got.eq(0).all()


def test_the_operators_pass_torch_s_own_checks() -> None:
    query, key = torch.randn(2, 4, 3, 16, requires_grad=True), torch.randn(2, 2, 9, 16, requires_grad=True)
    bias = torch.randn(4, 3, 9, requires_grad=True)
    torch.library.opcheck(FORWARD, (query, key, key, 0.3), {"after": 6, "bias": bias})
    captured = [torch.randn(3, 9, requires_grad=True), torch.ones(3, 1)]
    torch.library.opcheck(FORWARD, (query, key, key, 0.3), {"score": SCORE, "captured": captured})


ONE = torch.tensor(1.0)
SLOPES = {
    "tanh(mul(x, number(0.5f)))": lambda x: torch.tanh(x * 0.5),
    "div(exp(neg(x)), add(number(2.0f), captured(0)))": lambda x: torch.exp(-x) / 2.5,
    "minimum(maximum(x, number(-1.0f)), sigmoid(x))": lambda x: torch.minimum(x.clamp(min=-1.0), torch.sigmoid(x)),
    "minimum(maximum(number(-1.0f), x), sigmoid(x))": lambda x: torch.minimum(torch.maximum(x, -ONE), torch.sigmoid(x)),
    "sub(abs(x), mul(x, x))": lambda x: x.abs() - x * x,
    "where(captured(0), div(x, add(x, number(3.5f))), x)": lambda x: x / (x + 3.5),
    "add(captured(0), number(1e-05f))": lambda x: 0 * x,
}


@pytest.mark.parametrize("text", SLOPES)
def test_slopes_are_autograds(text: str) -> None:
    """The text of a derivative, computed with torch's functions."""
    derivative = slopes.slope(slopes.parsed(text), slopes.PRODUCT)
    for at in (-2.0, -1.0, 0.0, 0.25, 1.5):
        x = torch.tensor(at, requires_grad=True)
        (expected,) = torch.autograd.grad(SLOPES[text](x), x)
        got = of_score(derivative, x.detach(), [torch.tensor(0.5)])
        assert torch.allclose(got.double(), expected.double(), atol=1e-6), at


CHOOSING = {  # what is captured where the product is taken, and where it is not
    "mul(where(captured(0), x, number(-1000.0f)), number(0.5f))": (1.0, 0.0),
    "add(maximum(x, captured(0)), number(1.0f))": (-1000.0, 1000.0),
    "minimum(captured(0), mul(x, number(2.0f)))": (1000.0, -1000.0),
}


@pytest.mark.parametrize("text", CHOOSING)
def test_what_is_not_taken_gets_a_gradient_of_nothing_in_a_row_that_is_nan(text: str) -> None:
    """As eager's: not nothing times NaN. A key that is NaN makes a row of it."""
    taken, other = CHOOSING[text]
    query, key, value = (randn(1, 1, n, 8, seed=n) for n in (3, 70, 71))
    key[..., 7, :] = float("nan")
    captured = torch.where(torch.arange(70) < 40, taken, other)
    out = FORWARD(query, key.requires_grad_(), value[..., :70, :], 1.0, score=text, captured=[captured])[0]
    (got,) = torch.autograd.grad(out.sum(), key)
    assert got[..., :40, :].isnan().all() and got[..., 40:, :].eq(0).all()


@pytest.mark.parametrize("text", ["tanh(x", "tanh(x))", "x; y", ""])
def test_what_is_no_score_function_has_no_slope(text: str) -> None:
    with pytest.raises(ValueError, match=r"score function|do not end"):
        slopes.parsed(text)


def test_derivatives_that_there_are_not() -> None:
    """As of torch's own kernel: none is silently left out."""
    inputs = [torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3)]
    (first,) = torch.autograd.grad(FORWARD(*inputs, 0.3)[0].square().sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match=r"derivative for .*attention.* is not implemented"):
        torch.autograd.grad(first.sum(), inputs[:1])
    query, key, value = (x.detach() for x in inputs)
    with pytest.raises(RuntimeError, match="functorch transforms"):  # nor has torch.compile a site inside of them
        torch.func.vjp(lambda x: FORWARD(x, key, value, 0.3)[0], query)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(query, torch.ones_like(query))
        for call in (FORWARD, operator.OPERATOR):
            with pytest.raises(NotImplementedError, match="forward-mode derivative"):
                call(dual, key, value, 0.3)
            with pytest.raises(NotImplementedError, match="forward-mode derivative"):
                call(query, key, value, 0.3, bias=torch.autograd.forward_ad.make_dual(key[..., 0], key[..., 0]))
            call(query, key, value, 0.3)


@pytest.mark.parametrize("call", [FORWARD, operator.OPERATOR, operator.WITH_LSE], ids=str)
def test_a_tangent_of_torch_func_is_not_dropped(call: Any) -> None:
    """It is taken off before the operator sees it."""
    query, key, value = (torch.randn(1, 2, 5, 8) for _ in range(3))
    for derivative in (
        lambda: torch.func.jvp(lambda x: call(x, key, value, 0.3), (query,), (query,)),
        lambda: torch.func.jvp(lambda x: call(query, key, value, 0.3, bias=x), (query[..., :5],), (query[..., :5],)),
        lambda: torch.func.jacfwd(lambda x: call(x, key, value, 0.3))(query),
        lambda: torch.func.linearize(lambda x: call(x, key, value, 0.3), query),
    ):
        with pytest.raises(NotImplementedError, match="use reverse mode"):
            derivative()
    call(query, key, value, 0.3)


@pytest.mark.slow
def test_an_empty_batch_has_a_compiled_backward() -> None:
    import attn_pass.devices.cpu.kernel.gradient_template  # noqa: F401  which lowers it

    q, k, v = (torch.randn(0, 2, 20, 16, requires_grad=True) for _ in range(3))
    bias = torch.randn(2, 20, 20, requires_grad=True)
    run = torch.compile(lambda q, k, v, bias: FORWARD(q, k, v, 0.3, bias=bias)[0], dynamic=False)
    out = run(q, k, v, bias)
    freed = [torch.full((2, 20, 20), 7.0) for _ in range(200)]  # memory that comes next is not zero
    del freed
    grads = torch.autograd.grad(out.sum(), [q, k, v, bias])
    assert [tuple(g.shape) for g in grads[:3]] == [(0, 2, 20, 16)] * 3
    assert torch.equal(grads[3], torch.zeros(2, 20, 20))


def test_values_have_gradients_where_queries_have_no_dimensions() -> None:
    q, k = (torch.randn(1, 2, 5, 0, requires_grad=True) for _ in range(2))
    v = torch.randn(1, 2, 5, 8, requires_grad=True)
    (got,) = torch.autograd.grad(FORWARD(q, k, v, 0.3)[0].sum(), [v])
    torch.testing.assert_close(got, torch.ones(1, 2, 5, 8))


def test_roundings_of_many_equal_rows_do_not_add_up() -> None:
    query, key = torch.full((1, 1, 16384, 8), 0.7), torch.zeros(1, 1, 4, 8)
    value = torch.randn(1, 1, 4, 8, requires_grad=True)
    FORWARD(query, key, value, 1.0)[0].backward(torch.full((1, 1, 16384, 8), 0.7))
    expected = torch.full((), 0.7).double() * 16384 / 4
    assert value.grad is not None
    assert (value.grad.double() / expected - 1).abs().max() < 2e-6
    value.grad = None
    masked = {"keep": torch.zeros(1, 1, 1, 4).bool(), "fully_masked": "mean"}
    FORWARD(query, key, value, 1.0, **masked)[0].backward(torch.full((1, 1, 16384, 8), 0.7))
    assert (value.grad.double() / expected - 1).abs().max() < 2e-6


@pytest.mark.parametrize("learned", [False, True])
def test_the_log_sum_exp_beside_a_sink_has_no_gradient(learned: bool) -> None:
    query, key, value = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
    sink = torch.full((1, 2, 1, 1), 2.0, requires_grad=learned)
    out, lse, *_ = FORWARD(query, key, value, 0.3, sink=sink)
    torch.autograd.grad(out.sum(), [query], retain_graph=True)
    with pytest.raises(NotImplementedError, match="beside a sink"):
        torch.autograd.grad(lse.sum(), [query])


def test_a_gradient_of_another_dtype_is_kept_while_it_is_read() -> None:
    query, key, value = (torch.randn(1, 2, 40, 16) for _ in range(3))
    result, _, statistics, rest = FORWARD(query, key, value, 0.3)
    grad = torch.randn(1, 2, 40, 16)
    wanted = ["query", "key", "value"]
    call = (None, result, statistics, rest, wanted, query, key, value, 0.3)
    for got, expected in zip(BACKWARD_OPERATOR(grad.double(), *call), BACKWARD_OPERATOR(grad, *call), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_saved_may_lie_in_another_order(dtype: torch.dtype) -> None:
    """As Inductor lays out beside convolutions what has four dimensions: the second one last in memory."""

    def heads_last(x: Tensor) -> Tensor:
        return x.to(memory_format=torch.channels_last) if x.dim() == 4 else x

    query, key, value = (torch.randn(2, 3, 40, 16).to(dtype) for _ in range(3))
    result, _, statistics, rest = FORWARD(query, key, value, 0.3)
    grad = torch.randn(2, 3, 40, 16).to(dtype)
    saved = (grad, result, statistics, rest)
    assert not any(heads_last(x).is_contiguous() for x in saved if x.dim() == 4)

    def of(grad: Tensor, *left: Tensor) -> list[Tensor]:
        gradients: list[Tensor] = BACKWARD_OPERATOR(
            grad, None, *left, ["query", "key", "value"], query, key, value, 0.3
        )
        return gradients

    for got, expected in zip(of(*map(heads_last, saved)), of(*saved), strict=True):
        assert torch.equal(got, expected)
