"""Descriptions of small programs: the role of each axis, folded factors, the tensors that are read, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_eager import NEG_INF, qkv, randn
from read_graphs import captured, reader_of
from torch import Tensor
from torch.fx import GraphModule

from attn_pass.model.attention import Attention
from attn_pass.model.expression import Const, Dot, apply, loads
from attn_pass.model.index import axis_index
from attn_pass.patterns import calls, softmax
from attn_pass.patterns.base import Site
from attn_pass.reading.describe import Described
from attn_pass.reading.reader import Reader

Program = Callable[..., Any]


def read(program: Program, *inputs: Tensor) -> tuple[Site, Reader, GraphModule]:
    """The one site of a program."""
    gm = captured(program, *inputs)
    reader = reader_of(gm)
    (site,) = [*calls.find(reader), *softmax.find(reader)]
    return site, reader, gm


def described(program: Program, *inputs: Tensor) -> tuple[Described, Reader]:
    """Its description."""
    site, reader, _ = read(program, *inputs)
    assert site.described is not None and not site.refusal, site.refusal
    return site.described, reader


def description(program: Program, *inputs: Tensor) -> Attention:
    return described(program, *inputs)[0].attention


def source_names(description: Described) -> dict[str, str]:
    """The node behind each operand."""
    a = description.attention
    return {n: description.nodes[getattr(a, n).source].name for n in ("query", "key", "value")}


def sizes(a: Attention) -> dict[str, list[int]]:
    axes = {"batch": a.batch, "heads": a.heads, "rows": a.rows, "value_dim": a.value_dim}
    return {name: [int(x.size) for x in ordered] for name, ordered in axes.items()}  # type: ignore[call-overload]


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


# ---------------------------------------------------------------- axes


def test_what_each_axis_is_for() -> None:
    a = description(plain, *qkv(2, 3, 4, 5, 6, value_dim=7))
    assert sizes(a) == {"batch": [2], "heads": [3], "rows": [4], "value_dim": [7]}
    assert (a.keys.size, a.dim.size) == (5, 6) and a.scale == 1.0 and a.modified == Dot()


def test_heads_folded_into_the_batch_are_separated_by_a_view() -> None:
    def folded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.reshape(6, *x.shape[2:]) for x in (q, k, v))
        return (torch.bmm(q, k.mT).softmax(-1) @ v).view(2, 3, 4, 6)

    a = description(folded, *qkv(2, 3, 4, 4, 6))
    assert sizes(a)["batch"] + sizes(a)["heads"] == [2, 3]


def test_heads_that_share_keys_come_after_those_that_have_their_own() -> None:
    inputs = (randn(2, 6, 4, 8), randn(2, 2, 5, 8), randn(2, 2, 5, 8))
    a = description(lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True), *inputs)
    assert sizes(a)["heads"] == [2, 3]
    expanded = description(
        lambda q, k, v: plain(q, *(x[:, :, None].expand(2, 2, 3, 5, 8).reshape(2, 6, 5, 8) for x in (k, v))), *inputs
    )
    assert sizes(expanded)["heads"] == [2, 3]
    tiled = description(
        lambda q, k, v: plain(q, *(x[:, None].expand(2, 3, 2, 5, 8).reshape(2, 6, 5, 8) for x in (k, v))), *inputs
    )
    assert sizes(tiled)["heads"] == [2, 3], "also where they come before them in the program"


def test_rows_of_several_dimensions() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (torch.einsum("bhwd,bkd->bhwk", q, k)).softmax(-1) @ v[:, None]

    a = description(program, randn(2, 3, 4, 8), randn(2, 5, 8), randn(2, 5, 8))
    assert sizes(a)["batch"] + sizes(a)["heads"] + sizes(a)["rows"] == [2, 3, 4]


# ---------------------------------------------------------------- operands


def test_operands_are_followed_back_to_what_the_program_was_given() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.view(2, 8, 3, 6).transpose(1, 2) for x in (q, k, v))
        return plain(q, k.contiguous(), v)

    inputs = [randn(2, 8, 18, seed=n) for n in range(3)]
    description, _ = described(program, *inputs)
    assert source_names(description) == {"query": "l_q_", "key": "l_k_", "value": "l_v_"}
    (copy,) = description.copies  # as written: a transposed view of the copy, which is no longer read
    assert [n.name for n in copy.all_input_nodes] == ["contiguous"]


def test_an_operand_that_is_not_a_view_of_its_source_is_traced_back_less_far() -> None:
    description, _ = described(lambda q, k, v: plain(q, k * k.sum(-1, keepdim=True), v), *qkv())
    assert source_names(description)["key"] == "mul", "a factor that differs from key to key"
    description, _ = described(lambda q, k, v: plain(q * q.sum(-1, keepdim=True), k, v), *qkv())
    assert source_names(description)["query"] == "l_q_" and len(description.attention.factors) == 1
    description, _ = described(lambda q, k, v: plain(q * q[:, :, :1], k, v), *qkv())
    assert source_names(description)["query"] == "mul", "a factor that differs along the head dim"

    def cropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plain(q, k.reshape(2, 2, -1)[..., 1:-7].reshape(2, 2, 15, 8), v)

    description, _ = described(cropped, *qkv(2, 2, 8, 16, 8)[:2], randn(2, 2, 15, 8))
    assert source_names(description)["key"] != "l_k_", "its rows begin in the middle of rows"


def test_numbers_on_operands_are_part_of_the_scale() -> None:
    a = description(lambda q, k, v: ((q * 0.5) @ (k / 4).mT * 3).softmax(-1) @ v, *qkv())
    assert a.scale == 0.375 and not a.factors
    assert a.score == apply("mul", apply("mul", Dot(), Const(0.125)), Const(3))


def test_the_type_that_operands_are_multiplied_in() -> None:
    half = qkv(dtype=torch.bfloat16)
    assert description(plain, *half).compute_dtype == torch.bfloat16
    wide = description(lambda q, k, v: plain(q.float(), k.float(), v.float()), *half)
    assert wide.compute_dtype == torch.float32 and {s.dtype for s in wide.sources} == {torch.bfloat16}
    assert wide.output_dtype == torch.float32
    upcast = description(lambda q, k, v: (q.float() @ k.float().mT).softmax(-1).bfloat16() @ v, *half)
    assert upcast.compute_dtype == torch.bfloat16, "the products of bfloat16 numbers are exact in float32"
    scores = description(lambda q, k, v: (q @ k.mT).float().softmax(-1).bfloat16() @ v, *half)
    assert (scores.compute_dtype, scores.score_dtype) == (torch.bfloat16, torch.float32)


def test_the_time_from_which_a_source_holds_what_is_read() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own = k.clone()
        own.mul_(2)
        return plain(q, own, v)

    site, reader, gm = read(program, *qkv())
    assert site.described is not None
    (written,) = (n for n in gm.graph.nodes if n.target == "mul_")
    key = site.described.attention.key.source
    assert site.described.nodes[key].name in ("own", written.name)
    assert site.described.read_at[key] > reader.order[written] - 1
    assert set(site.described.read_at) == {0, 1, 2}


# ---------------------------------------------------------------- scores and masks


def test_a_mask_is_read_where_it_lies() -> None:
    mask = randn(5, 4) > 0
    program = lambda q, k, v, m: (q @ k.mT).masked_fill(m.t(), NEG_INF).softmax(-1) @ v
    a = description(program, *qkv(2, 2, 4, 5, 8), mask)
    assert a.mask.keep is not None and a.mask.keep.fill == NEG_INF and a.mask.bias is None
    (load,) = loads(a.mask.keep.condition)
    assert load.index == tuple(axis_index(x) for x in (a.keys, a.rows[0])), "keys first, as it lies in memory"


def test_a_mask_that_is_not_a_view_of_its_source_is_loaded_as_written() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        folded = m.reshape(-1)[2:22].reshape(4, 5)
        return ((q @ k.mT) + folded).softmax(-1) @ v

    description, _ = described(program, *qkv(2, 2, 4, 5, 8), randn(5, 5))
    assert description.attention.mask.bias is not None
    (load,) = loads(description.attention.mask.bias)
    assert description.nodes[load.source].name.startswith("folded"), "two rows of the matrix are no dimension of it"
    whole, _ = described(lambda q, k, v, m: ((q @ k.mT) + m.reshape(-1).reshape(4, 5)).softmax(-1) @ v,
                         *qkv(2, 2, 4, 5, 8), randn(4, 5))  # fmt: skip
    assert whole.attention.mask.bias is not None
    (load,) = loads(whole.attention.mask.bias)
    assert whole.nodes[load.source].name == "l_m_"


def test_scores_that_are_not_a_scaled_product_are_a_function_of_it() -> None:
    a = description(lambda q, k, v: (20 * torch.tanh(q @ k.mT / 20)).softmax(-1) @ v, *qkv())
    assert "soft cap" in a.not_affine and a.scale == 1.0
    assert a.modified == apply("mul", Const(20), apply("tanh", apply("div", Dot(), Const(20))))
    assert not description(plain, *qkv()).not_affine


def test_what_was_folded_out_of_operands_is_part_of_a_function_of_the_scores() -> None:
    a = description(lambda q, k, v: ((q * 0.5) @ k.mT).tanh().softmax(-1) @ v, *qkv())
    assert a.modified == apply("tanh", apply("mul", Dot(), Const(0.5))) and a.scale == 1.0


def test_what_training_may_not_be_read_as() -> None:
    program = lambda q, k, v, m: (-((q @ k.mT) + m)).softmax(-1) @ v
    assert not description(program, *qkv(), randn(8, 8)).not_affine
    trained = description(program, *qkv(grad=True), randn(8, 8))
    assert trained.not_affine.endswith("in training") and trained.needs_grad


# ---------------------------------------------------------------- what is refused


def masked(score: Callable[[Tensor], Tensor], softmax: Callable[[Tensor], Tensor]) -> Program:
    """Attention with something done to the scores, and a softmax of its own."""
    return lambda q, k, v, m: softmax(score((q @ k.mT).masked_fill(m > 0, -1e9))) @ v


def to_double(beside: Callable[[Tensor, Tensor], Tensor]) -> Program:
    """Float32 operands whose scores are float64, where a matrix is added to them."""
    return lambda q, k, v, m: beside((q @ k.mT).double() + m, m).softmax(-1).float() @ v


MATRIX = randn(8, 8, dtype=torch.float64)
REFUSED: dict[str, tuple[Program, tuple[Tensor, ...]]] = {
    "the key is the same for every key": (
        lambda q, k, v: ((q @ k[:, :, :1].mT).expand(2, 2, 8, 8) + torch.arange(8.0)).softmax(-1) @ v,
        qkv(),
    ),
    "the value is the same for every key": (
        lambda q, k, v: (q @ k.mT).softmax(-1) @ v[:, :, :1].expand(2, 2, 8, 16),
        qkv(),
    ),
    "both sides of the score product depend on the key": (
        lambda q, k, v: torch.einsum("bhij,bhijd->bhid", torch.einsum("bhijd,bhjd->bhij", q, k).softmax(-1), v),
        (randn(2, 2, 4, 5, 8), randn(2, 2, 5, 8), randn(2, 2, 4, 5, 8)),
    ),
    "a logarithm is subtracted from scores of a row that a number may mask fully": (
        masked(lambda s: s, lambda s: (s - s.logsumexp(-1, keepdim=True)).exp()),
        (*qkv(), randn(8, 8)),
    ),
    "a matrix is added to float64 scores of narrower operands, beside another mask": (
        to_double(lambda s, m: s.masked_fill(m > 1, -1e9)),
        (*qkv(), MATRIX),
    ),
}
ALIKE: dict[str, tuple[Program, tuple[Tensor, ...]]] = {
    "a key of its own for every key": (
        lambda q, k, v: ((q @ k.mT).expand(2, 2, 8, 8) + torch.arange(8.0)).softmax(-1) @ v,
        qkv(),
    ),
    "a logarithm where nothing is masked": (
        lambda q, k, v: (lambda s: (s - s.logsumexp(-1, keepdim=True)).exp())(q @ k.mT) @ v,
        qkv(),
    ),
    "the logarithm of what is masked inside the softmax": (
        masked(lambda s: s, lambda s: s.softmax(-1)),
        (*qkv(), randn(8, 8)),
    ),
    "a matrix that is added alone": (to_double(lambda s, m: s), (*qkv(), MATRIX)),
    "float64 throughout": (
        to_double(lambda s, m: s.masked_fill(m > 1, -1e9)),
        (*qkv(dtype=torch.float64)[:2], qkv()[2], MATRIX),
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_refused(reason: str) -> None:
    program, inputs = REFUSED[reason]
    site, _, _ = read(program, *inputs)
    assert site.described is None and site.refusal.startswith(reason), site.refusal


@pytest.mark.parametrize("name", ALIKE)
def test_what_looks_alike_and_is_read(name: str) -> None:
    program, inputs = ALIKE[name]
    site, _, _ = read(program, *inputs)
    assert site.described is not None, site.refusal
