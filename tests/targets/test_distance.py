"""Masks of the distance between key and row as a vector: their results, and masks that depend on the position."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from against_eager import NEG_INF, qkv, randn, same

import attn_pass

Bias = Callable[..., torch.Tensor]
L, S = 150, 170
TARGETS = ("sdpa", "cpu_kernel")
SLOPES = torch.tensor([0.05, 0.02])


def buckets(i: torch.Tensor, j: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """T5's."""
    distance = j - i
    bucket = (distance > 0).long() * 16
    distance = distance.abs()
    large = 8 + (torch.log(distance.float().clamp(min=1) / 8) / torch.log(torch.tensor(16.0)) * 8).long()
    bucket = bucket + torch.where(distance < 8, distance, large.clamp(max=15))
    return F.embedding(bucket, table).permute(2, 0, 1)[None]


def as_in_transformers(i: torch.Tensor, j: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The smaller of two tensors by ``torch.min``, and the logarithm of a distance of 0, which is not taken."""
    distance = j - i
    bucket = (distance > 0).to(torch.long) * 16
    distance = torch.abs(distance)
    large = 8 + (torch.log(distance.float() / 8) / math.log(16) * 8).to(torch.long)
    large = torch.min(large, torch.full_like(large, 15))
    bucket += torch.where(distance < 8, distance, large)
    return F.embedding(bucket, table).permute([2, 0, 1]).unsqueeze(0)


def masked(keep: torch.Tensor) -> torch.Tensor:
    return torch.zeros(keep.shape).masked_fill(~keep, NEG_INF)


FORMS: dict[str, Bias] = {
    "slopes": lambda i, j, t: SLOPES[:, None, None] * (j - i),
    "slopes, causal": lambda i, j, t: SLOPES[:, None, None] * (j - i) + masked(j - i <= 20),
    "slopes of float positions": lambda i, j, t: -SLOPES[:, None, None] * (j.float() - i.float()).abs(),
    "buckets": buckets,
    "buckets, as transformers": as_in_transformers,
    "decay": lambda i, j, t: torch.exp(-(i - j).abs().float()),
    "dilated": lambda i, j, t: masked((i - j) % 3 == 0),
    "a table of distances": lambda i, j, t: t.T[:, j - i + L - 1],
    "a table of distances, one further": lambda i, j, t: t.T[:, j - i + L],
}
CHEAP = ("decay", "dilated")  # matrices
WRITTEN = ("buckets, as transformers",)  # in place, which stays in an exported program
OTHERS: dict[str, Bias] = {
    "of the place": lambda i, j, t: SLOPES[:, None, None] * (j - 2 * i),
    "of the place in the mask": lambda i, j, t: SLOPES[:, None, None] * (j - i) + masked(j <= i // 2 + 20),
    "of the product": lambda i, j, t: SLOPES[:, None, None] * (j * i) / 100,
    "buckets of places": lambda i, j, t: buckets(i, 2 * j, t),
    "buckets chosen by the row": lambda i, j, t: torch.where(i > 9, buckets(i, j, t), 0.0),
    "a table of places": lambda i, j, t: t.T[:, (j + i) % 32],
    "rounded positions": lambda i, j, t: SLOPES[:, None, None] * ((37 * j).bfloat16() - (37 * i).bfloat16()).float(),
}


def attention(bias: Bias) -> Callable[..., torch.Tensor]:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None]
        added = bias(i, j, table.float()).to(q.dtype)
        return torch.softmax(q @ k.transpose(-1, -2) * 0.3 + added, -1) @ v

    return run


def inputs(dtype: torch.dtype = torch.float32, **shape: int) -> tuple[torch.Tensor, ...]:
    return (*qkv(**{"q_len": L, "kv_len": S, **shape}, dtype=dtype), randn(330, 2, dtype=dtype))  # type: ignore[arg-type]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMS)
def test_of_the_distance(name: str, dtype: torch.dtype, target: str) -> None:
    report = same(attention(FORMS[name]), *inputs(dtype), rewritten=1, choose="fused", targets=(target,))
    assert report.sites[0].mask.endswith("by distance")


@pytest.mark.parametrize("name", OTHERS)
def test_of_something_else(name: str) -> None:
    report = same(attention(OTHERS[name]), *inputs(), choose="fused", targets=("sdpa",), reference=False)
    assert report.sites and not report.sites[0].mask.endswith("by distance")


@pytest.mark.parametrize("name", ["slopes, causal", "buckets", "dilated"])
@pytest.mark.parametrize("shape", [{"q_len": 1}, {"kv_len": 1}, {"q_len": 170, "kv_heads": 1}, {"value_dim": 8}])
@pytest.mark.parametrize("target", TARGETS)
def test_shapes(name: str, shape: dict[str, int], target: str) -> None:
    def run(q, k, v, table):  # type: ignore[no-untyped-def]
        k, v = (t.expand(-1, 2, -1, -1) for t in (k, v))
        return attention(FORMS[name])(q, k, v, table)

    same(run, *inputs(**shape), rewritten=1, choose="fused", targets=(target,), reference=False)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("table_heads", [1, 2])
def test_a_table_of_one_head(table_heads: int, target: str) -> None:
    """Its column is a number, and not an index that varies."""
    table = randn(330, table_heads)
    report = same(attention(buckets), *qkv(2, 2, L, S), table, rewritten=1, choose="fused", targets=(target,))
    assert report.sites[0].mask.endswith("by distance")


@pytest.mark.parametrize("name", ["slopes", "buckets", "decay", "dilated"])
@pytest.mark.parametrize("target", TARGETS)
def test_gradients(name: str, target: str) -> None:
    q, k, v, table = inputs()
    grads = (x.requires_grad_() for x in (q, k, v))
    given = {"rewritten": 1, "grad": True, "choose": "fused", "reference": False, "targets": (target,)}
    same(attention(FORMS[name]), *grads, table, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["dilated", "decay"])
def test_a_matrix_for_all_heads_that_is_large(name: str) -> None:
    same(attention(FORMS[name]), *inputs(q_len=300, kv_len=280), rewritten=1, choose="fused", targets=("sdpa",))


def test_distances_that_overflow_are_the_matrix_they_were() -> None:
    def bias(i: torch.Tensor, j: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return SLOPES[:, None, None] * ((j.int() - i.int()) * 2**25) * 1e-8

    same(
        attention(bias), *inputs(q_len=600, kv_len=600), rewritten=1, choose="fused", targets=("sdpa",), reference=False
    )


@pytest.mark.parametrize("fill", [-1e9, -1e30])
def test_float64_distances_are_the_matrix_they_were(fill: float) -> None:
    """A row of nothing but -1e9 keeps its scores in float64, and loses them in a vector of float32."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        distance = torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])
        mask = torch.where((distance >= 3) & (distance < 9), 0.0, torch.tensor(fill, dtype=torch.float64))
        return torch.softmax(q @ k.transpose(-1, -2) * 0.3 + mask, -1).to(v.dtype) @ v

    with torch.no_grad():
        same(run, *qkv(1, 2, 700, 700), rewritten=1, reference=False)


def test_a_table_that_wants_a_gradient_gets_it() -> None:
    wanted = [x.requires_grad_() for x in inputs()]
    report = same(attention(buckets), *wanted, grad=True, choose="fused", reference=False)
    assert not report.sites[0].mask.endswith("by distance")


@pytest.mark.parametrize("name", ["slopes, causal", "buckets", "dilated"])
@pytest.mark.parametrize("target", TARGETS)
def test_dynamic_lengths(name: str, target: str) -> None:
    given = {"rewritten": 1, "dynamic": True, "choose": "fused", "targets": (target,), "reference": False}
    same(attention(FORMS[name]), *inputs(), **given)  # type: ignore[arg-type]


def test_a_table_written_afterwards_is_not_read_again() -> None:
    def run(q, k, v, table):  # type: ignore[no-untyped-def]
        i, j = torch.arange(L)[:, None], torch.arange(S)[None]
        table = table.clone()
        bias = buckets(i, j, table)
        table.mul_(100.0)
        return torch.softmax(q @ k.transpose(-1, -2) + bias, -1) @ v + table.sum()

    report = same(run, *inputs(), rewritten=1, choose="fused", targets=("sdpa",), reference=False)
    assert not report.sites[0].mask.endswith("by distance")


@pytest.mark.parametrize("name", [n for n in FORMS if n not in CHEAP + WRITTEN])
def test_no_matrix_is_left_in_the_program(name: str) -> None:
    class Model(torch.nn.Module):
        def forward(self, q, k, v, table):  # type: ignore[no-untyped-def]
            return attention(FORMS[name])(q, k, v, table)

    given = inputs()
    with torch.no_grad():
        program = torch.export.export(Model(), given)
        attn_pass.rewrite(program, choose="fused", targets=("sdpa",), on_error="raise")
        torch.testing.assert_close(program.module()(*given), Model()(*given), atol=1e-5, rtol=1e-5)
    shapes = {n.target: n.meta["val"].shape for n in program.graph.nodes if hasattr(n.meta.get("val"), "shape")}
    large = [t for t, shape in shapes.items() if tuple(shape[-2:]) == (L, S)]
    assert large == [torch.ops.aten.as_strided.default]
