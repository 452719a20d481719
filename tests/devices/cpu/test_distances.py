"""``distances``: what the kernel adds by ``key - row`` is one vector; and biases that stay small beside a mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_eager import NEG_INF, qkv, randn, same
from test_cpu_attention import DTYPES
from test_cpu_kernel import kernel_calls, on_kernel
from torch import Tensor

import attn_pass
from attn_pass.devices.cpu.kernel import build
from attn_pass.devices.cpu.kernel.gradients import FORWARD
from attn_pass.devices.cpu.kernel.operator import OPERATOR
from attn_pass.graph.values import tensor_value
from attn_pass.targets.base import LEARNED_BIAS
from bench.suites import masks

pytestmark = pytest.mark.skipif(bool(build.missing()), reason="no compiler for the CPU kernel")
LOWEST = torch.finfo(torch.float32).min


# ---------------------------------------------------------------- the operator


def as_matrix(distances: Tensor, rows: int, keys: int) -> Tensor:
    """(B, H, L, S) of (B, H, 1, L + S - 1)."""
    at = torch.arange(keys) - torch.arange(rows)[:, None] + rows - 1
    return distances[:, :, 0][:, :, at]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "keys"), [(1, 1), (1, 70), (3, 200), (16, 33), (37, 101), (130, 70), (200, 200), (70, 1)]
)
def test_it_is_the_matrix(rows: int, keys: int, dtype: torch.dtype) -> None:
    """To the last bit: the same numbers are added."""
    for number, (batch, heads, of) in enumerate(((1, 1, torch.float32), (2, 4, dtype), (2, 1, dtype), (1, 4, dtype))):
        q, k, v = qkv(2, 4, rows, keys, 24, kv_heads=2, dtype=dtype)
        distances = randn(batch, heads, 1, rows + keys - 1, seed=number).to(of)
        distances[..., ::7] = NEG_INF
        bounds: dict[str, Any] = {"after": keys - rows} if number % 2 else {}
        out = OPERATOR(q, k, v, 0.3, distances=distances, **bounds)
        expected = OPERATOR(q, k, v, 0.3, bias=as_matrix(distances, rows, keys), **bounds)
        assert torch.equal(torch.nan_to_num(out), torch.nan_to_num(expected))


def test_with_steps_in_memory_and_a_score_function() -> None:
    q, k, v = qkv(2, 4, 37, 101)
    distances = randn(137, 4, 2).permute(2, 1, 0)[:, :, None]
    assert distances.stride(-1) != 1
    score = {"score": "mul(number(3.0f), tanh(x))"}
    out = OPERATOR(q, k, v, 0.3, distances=distances, **score)
    torch.testing.assert_close(out, OPERATOR(q, k, v, 0.3, bias=as_matrix(distances, 37, 101), **score))


def test_segments_of_packed_rows_have_the_middle_in_common() -> None:
    offsets = torch.tensor([0, 9, 39, 41])
    q, k, v = qkv(1, 4, 41, 41)
    distances = randn(1, 4, 1, 2 * 32 - 1)
    out = OPERATOR(q, k, v, 0.3, offsets=offsets, distances=distances)
    matrix = as_matrix(distances, 32, 32)
    torch.testing.assert_close(out, OPERATOR(q, k, v, 0.3, offsets=offsets, bias=matrix))


def test_gradients_are_those_beside_the_matrix() -> None:
    results = []
    distances = randn(1, 4, 1, 50 + 70 - 1)
    for name, added in (("distances", distances), ("bias", as_matrix(distances, 50, 70))):
        operands = qkv(2, 4, 50, 70, grad=True)
        FORWARD(*operands, 0.3, **{name: added})[0].sum().backward()
        results.append([x.grad for x in operands])
    for one, other in zip(*results):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "keys"), [(1, 1), (1, 70), (70, 1), (3, 200), (37, 101), (130, 70), (100, 600), (600, 100)]
)
def test_their_gradient_is_the_matrix_s_summed_over_diagonals(rows: int, keys: int, dtype: torch.dtype) -> None:
    """Of a head each, of all heads, and of each sequence; with keys that a bound and -inf mask."""
    for number, (batch, heads, of) in enumerate(((1, 1, torch.float32), (2, 4, dtype), (2, 1, dtype), (1, 4, dtype))):
        vector = randn(batch, heads, 1, rows + keys - 1, seed=number)
        vector[..., 1::7] = NEG_INF
        vector = vector.to(of)
        optional: dict[str, Any] = {"after": keys - rows, "fully_masked": "zero"} if number % 2 else {}
        if number == 2:
            optional["score"] = "mul(number(3.0f), tanh(x))"
        results = []
        for name in ("distances", "bias"):
            added = vector.clone().requires_grad_()
            operands = qkv(2, 4, rows, keys, 24, kv_heads=2, dtype=dtype, grad=True)
            given = {name: added if name == "distances" else as_matrix(added.double(), rows, keys).float()}
            out = FORWARD(*operands, 0.3, **given, **optional)[0]
            (out.float() * randn(*out.shape, seed=9)).sum().backward()
            results.append([x.grad for x in (*operands, added)])
        for one, other in zip(*results):
            torch.testing.assert_close(one, other)


def test_their_gradient_is_the_same_with_any_number_of_threads() -> None:
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        distances = randn(1, 1, 1, 130 + 700 - 1, grad=True)
        FORWARD(*qkv(2, 4, 130, 700, grad=True), 0.3, distances=distances)[0].sum().backward()
        results.append(distances.grad)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_beside_packed_rows_they_have_no_gradient() -> None:
    offsets = torch.tensor([0, 2, 5])
    out = FORWARD(*qkv(1, 4, 5, 5), 0.3, offsets=offsets, distances=randn(1, 4, 1, 5, grad=True))[0]
    with pytest.raises(NotImplementedError, match="beside packed rows a bias"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"distances": (1, 4, 1, 11), "bias": (1, 4, 5, 7)}, "and not both"),
        ({"distances": (1, 4, 5, 11)}, "distances are"),
        ({"distances": (4, 1, 11)}, "distances are"),
        ({"distances": (1, 4, 1, 12)}, "distances of 5 rows and 7 keys are not 12"),
    ],
)
def test_what_is_no_vector_of_distances(given: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OPERATOR(*qkv(2, 4, 5, 7), 0.3, **{name: randn(*shape) for name, shape in given.items()})


def test_packed_rows_take_an_odd_number() -> None:
    with pytest.raises(ValueError, match="are not 8"):
        OPERATOR(*qkv(1, 4, 5, 5), 0.3, offsets=torch.tensor([0, 5]), distances=randn(1, 4, 1, 8))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("distances", (1, 1, 1, 3)),
        ("distances", (1, 2, 1, 59)),
        ("distances", (2, 4, 1, 59)),
        ("bias", (1, 4, 29, 30)),
        ("bias", (1, 2, 30, 30)),
    ],
)
def test_segments_that_reach_further(name: str, shape: tuple[int, ...]) -> None:
    offsets = torch.tensor([0, 9, 39, 41])
    with pytest.raises(ValueError, match="3 segments of up to 30 rows and 4 heads"):
        OPERATOR(*qkv(1, 4, 41, 41), 0.3, offsets=offsets, **{name: randn(*shape)})


def test_the_operator_is_well_formed() -> None:
    torch.library.opcheck(OPERATOR, (*qkv(2, 4, 5, 7), 0.3), {"distances": randn(1, 4, 1, 11)})


# ---------------------------------------------------------------- what programs give it

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
Added = Callable[[Tensor, Tensor, Tensor], Tensor]  # of rows, keys and the padding (B, 1, 1, S), true where kept


def slopes(i: Tensor, j: Tensor, pad: Tensor) -> Tensor:
    return SLOPES[:, None, None] * (j - i)


def absolute(i: Tensor, j: Tensor, pad: Tensor) -> Tensor:
    return -SLOPES[:, None, None] * (i - j).abs().float() / 2


def of_keys(i: Tensor, j: Tensor, pad: Tensor) -> Tensor:
    """BLOOM's: every valid key has a number."""
    count = (pad.long().cumsum(-1) - 1) * pad
    return SLOPES[:, None, None] * count


def filled(added: Added, fill: float, causal: bool = True) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
        i, j = torch.arange(q.size(-2))[:, None], torch.arange(k.size(-2))
        keep = pad & (j <= i) if causal else pad
        number = fill if fill == NEG_INF else torch.finfo(q.dtype).min
        return (q @ k.mT * 0.3 + added(i, j, pad).to(q.dtype)).masked_fill(~keep, number).softmax(-1) @ v

    return run


def summed(added: Added, fill: float) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
        i, j = torch.arange(q.size(-2))[:, None], torch.arange(k.size(-2))
        mask = torch.where(pad & (j <= i), 0.0, fill).to(q.dtype)
        return (q @ k.mT * 0.3 + added(i, j, pad).to(q.dtype) + mask).softmax(-1) @ v

    return run


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """With a sequence that is padded on the left: its first rows keep no key."""
    pad = torch.ones(3, 1, 1, 40, dtype=torch.bool)
    pad[1, ..., :13] = False
    pad[2, ..., 30:] = False
    return [*qkv(3, 4, 40, 40, dtype=dtype), pad]


def shapes(fn: Callable[..., Tensor], *operands: Tensor) -> dict[str, Any]:
    (call,) = kernel_calls(fn, *operands)
    values = {name: tensor_value(value) for name, value in call.kwargs.items()}
    return {name: tuple(x.shape) if x is not None else call.kwargs[name] for name, x in values.items()}


@pytest.mark.parametrize("fill", [NEG_INF, LOWEST])
@pytest.mark.parametrize("how", [filled, summed])
@pytest.mark.parametrize(
    ("added", "name", "shape"),
    [
        (slopes, "distances", (1, 4, 1, 79)),
        (absolute, "distances", (1, 4, 1, 79)),
        (of_keys, "bias", (3, 4, 1, 40)),
    ],
)
def test_a_slope_beside_a_mask_stays_small(
    added: Added, name: str, shape: tuple[int, ...], how: Callable[..., Any], fill: float
) -> None:
    program = how(added, fill)
    given = shapes(program, *inputs())
    assert given[name] == shape and given["keep"] == (3, 1, 1, 40) and given["after"] == 0
    for dtype in (torch.float32, torch.bfloat16):
        report = on_kernel(program, *inputs(dtype), reference=dtype == torch.float32)
        assumes = LEARNED_BIAS in report.sites[0].assumptions
        assert assumes or (fill == NEG_INF and how is filled)


def by_products(i: Tensor, j: Tensor, pad: Tensor) -> Tensor:
    return SLOPES[:, None, None] * i * (pad * -1e30)


def of_an_input(i: Tensor, j: Tensor, pad: Tensor) -> Tensor:
    """A number of each head where a key is padding: the mask of another, and no place."""
    return torch.full((4,), LOWEST)[:, None, None] * ~pad


def of_integers(i: Tensor, j: Tensor, pad: Tensor) -> Tensor:
    return SLOPES[:, None, None] * ((1 - pad.long()) * -1e4 * 1e4 * 1e4 * 1e4 * 1e4 * 1e4)


def far(i: Tensor, j: Tensor, pad: Tensor) -> Tensor:
    """Places, times constants that are each small."""
    return SLOPES[:, None, None] * ((j - i) * 1000 * 1000) * 1000.0


def of_floats(i: Tensor, j: Tensor, pad: Tensor) -> Tensor:
    """A mask of another kind: what says so is no whole number, but a number of each key."""
    return SLOPES[:, None, None] * torch.where(pad, 0.0, -1e30).sin()


def a_mask(i: Tensor, j: Tensor, pad: Tensor) -> Tensor:
    return ((j - i).abs() > 4) * -1e30


def exponential(i: Tensor, j: Tensor, pad: Tensor) -> Tensor:
    return -torch.exp(SLOPES[:, None, None] * 50 * (i - j).abs())


@pytest.mark.parametrize("added", [by_products, of_an_input, of_integers, far, of_floats, a_mask, exponential])
def test_what_may_mask_by_itself_is_one_matrix_with_a_number_that_masks(added: Added) -> None:
    """A row that a finite number masks fully is the mean of those masked the least."""
    program = filled(added, LOWEST)
    given = shapes(program, *inputs())
    assert given["bias"][-2:] == (40, 40) and "distances" not in given and given["fully_masked"] == "nan"
    report = on_kernel(program, *inputs(), reference=False)
    assert LEARNED_BIAS not in report.sites[0].assumptions


def test_a_scale_that_is_known_at_run_time_only() -> None:
    """BLOOM's ``beta``, a number of its module, is one with ``dynamic=True``."""

    def run(q: Tensor, k: Tensor, v: Tensor, pad: Tensor, beta: float) -> Tensor:
        added = of_keys(q, k, pad) * beta
        return (q @ k.mT * 0.3 + added).masked_fill(~pad, LOWEST).softmax(-1) @ v

    calls = kernel_calls(lambda *given: run(*given, 1.25), *inputs())
    assert [tuple(tensor_value(c.kwargs["bias"]).shape) for c in calls] == [(3, 4, 1, 40)]  # type: ignore[union-attr]
    report = on_kernel(run, *inputs(), 1.25, dynamic=True, reference=False)
    assert LEARNED_BIAS in report.sites[0].assumptions


@pytest.mark.parametrize("added", [by_products, a_mask, exponential])
def test_beside_minus_infinity_nothing_is_assumed(added: Added) -> None:
    program = filled(added, NEG_INF)
    assert shapes(program, *inputs())["keep"] == (3, 1, 1, 40)
    report = on_kernel(program, *inputs(), reference=False)
    assert report.sites[0].assumptions == ()


def test_strict_numerics_assume_nothing() -> None:
    report = same(
        summed(slopes, LOWEST), *inputs(), rewritten=None, targets=("cpu_kernel",), numerics="strict", reference=False
    )
    assert all(LEARNED_BIAS not in site.assumptions for site in report.sites)


def test_a_slope_that_is_trained_has_its_gradient() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, slope: Tensor) -> Tensor:
        i, j = torch.arange(q.size(-2))[:, None], torch.arange(k.size(-2))
        return (q @ k.mT * 0.3 + slope[:, None, None] * (j - i)).softmax(-1) @ v

    trained = randn(4, grad=True)
    same(run, *qkv(2, 4, 40, 50, grad=True), trained, rewritten=1, grad=True, targets=("cpu_kernel",), reference=False)


@pytest.mark.slow
def test_compiled_for_any_length() -> None:
    program = filled(slopes, NEG_INF)
    compiled = torch.compile(program, backend=attn_pass.backend, fullgraph=True, dynamic=True)
    with torch.no_grad(), attn_pass.record() as report:
        for length in (40, 64, 7):
            operands = [*qkv(3, 4, length, length), torch.rand(3, 1, 1, length) < 0.8]
            operands[-1][..., 0] = True
            torch.testing.assert_close(compiled(*operands), program(*operands), atol=1e-5, rtol=1e-5)
    assert {site.target for site in report.sites} == {"cpu_kernel"}


# ---------------------------------------------------------------- models

SIZES = {
    "T5Encoder": {"d_model": 32, "d_ff": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8},
    "Bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "Mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "expansion_ratio": 1, "use_cache": False},
}


@pytest.mark.parametrize(
    ("name", "added", "shape"),
    [("T5Encoder", "distances", (1, 4, 1, 95)), ("Bloom", "bias", (3, 4, 1, 48)), ("Mpt", "bias", (1, 4, 1, 48))],
)
def test_models_of_transformers(name: str, added: str, shape: tuple[int, ...]) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name.removesuffix('Encoder')}Config")(vocab_size=50, **SIZES[name])
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(config).eval()
    ids, mask = torch.randint(0, 50, (3, 48)), torch.ones(3, 48, dtype=torch.int64)
    mask[1, 31:], mask[2, 40:] = 0, 0

    def run(ids: Tensor, mask: Tensor) -> Tensor:
        hidden: Tensor = model(ids, attention_mask=mask)[0]
        return hidden

    calls = kernel_calls(run, ids, mask)
    assert len(calls) == 2
    for call in calls:
        value = tensor_value(call.kwargs[added])
        assert value is not None and tuple(value.shape) == shape and call.kwargs["keep"] is not None
        assert call.kwargs.get("after") == (None if name == "T5Encoder" else 0)
    assert calls[0].kwargs[added] is calls[1].kwargs[added]  # computed once
    on_kernel(run, ids, mask, rewritten=2, reference=False)


GIVEN = ("bias a head", "Evoformer, rank 5")  # a matrix is what they are given


@pytest.mark.parametrize("variant", [v for v in masks.VARIANTS if v.name not in GIVEN], ids=lambda v: v.name)
def test_no_form_of_the_bench_makes_a_matrix_of_all_heads(variant: masks.Variant) -> None:
    """Made beside the kernel, it takes longer than the attention does."""
    operands = variant.inputs(300)
    calls = kernel_calls(variant.run, *operands)
    assert calls
    for call in calls:
        query, key = (tensor_value(n) for n in call.args[:2])
        assert query is not None and key is not None
        scores = query.numel() // query.size(-1) * key.size(2)
        made = [tensor_value(n) for n in call.graph.nodes if n.op == "call_function" and n.users]
        large = [x.shape for x in made if x is not None and x.numel() >= scores and x.size(-1) != query.size(-1)]
        assert not large, large
