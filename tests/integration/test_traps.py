"""Programs that look like attention, or change under it: rewritten or left, their results stay the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import NEG_INF, qkv, randn, same
from small_programs import attend, softmax, table, tril
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import attn_pass

Program = Callable[..., Any]


# ---- T1: masks and scores written in place ----


def slice_written_before(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    mask = torch.zeros(8, 8)
    mask[:, 5:] = NEG_INF
    return softmax(q @ k.mT + mask) @ v


def slice_written_after(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
    mask = bias.clone()
    out = softmax(q @ k.mT + mask) @ v
    mask[:, 5:] = NEG_INF
    return out, mask


def slice_written_between_two_sites(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
    mask = torch.zeros(8, 8)
    first = softmax(q @ k.mT + mask) @ v
    mask[:, 5:] = NEG_INF
    return first, softmax(q @ k.mT + mask) @ v


def written_through_a_view(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    mask = bias.clone()
    mask.view(-1)[3:9] = NEG_INF
    return softmax(q @ k.mT + mask) @ v


def causal_then_zeroed(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    mask = torch.full((8, 8), NEG_INF)
    alias = mask.triu_(1)
    mask.zero_()
    return softmax(q @ k.mT + alias) @ v


def causal_copied_then_zeroed(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    mask = torch.full((8, 8), NEG_INF)
    causal = torch.triu(mask, 1)
    mask.zero_()
    return softmax(q @ k.mT + causal) @ v


def scores_filled_in_place(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = q @ k.mT
    scores.view(4, 8, 8).masked_fill_(bias > 0, NEG_INF)
    return softmax(scores) @ v


def scores_divided_in_place(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = q @ k.mT
    scores.div_(4)
    return softmax(scores) @ v


def scores_through_out(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = torch.empty(2, 2, 8, 8, dtype=q.dtype)
    torch.matmul(q, k.mT, out=scores)
    torch.add(scores, bias, out=scores)
    return softmax(scores) @ v


def first_key_overwritten(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = q @ k.mT
    scores[..., 0] = NEG_INF
    return softmax(scores) @ v


def weights_scaled_in_place(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    weights = softmax(q @ k.mT)
    weights.mul_(2)
    return weights @ v


def weights_zeroed_after(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    weights = softmax(q @ k.mT)
    out = weights @ v
    weights.zero_()
    return out


# ---- T2: operands written between being read and the result ----


def query_written_between(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    q = q * 1
    scores = q @ k.mT
    q.mul_(2)
    return softmax(scores) @ v + q


def values_written_between(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    v = v * 1
    weights = softmax(q @ k.mT)
    v.mul_(2)
    return weights @ v


def a_key_zeroed_between(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    k = k * 1
    weights = softmax(q @ k.mT)
    k[:, :, 0] = 0
    return weights @ v


def copy_of_keys_then_written(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    k = k * 1
    kept = k.clone()
    k.zero_()
    return softmax(q @ kept.mT) @ v + k


def keys_turned_in_place(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    k = k * 1
    k.transpose_(-1, -2)
    scores = q @ k
    k.transpose_(-1, -2)
    return softmax(scores) @ v + k


def cache_written_before_and_after(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
    cache = torch.zeros(2, 2, 8, 16, dtype=q.dtype)
    cache[:, :, :8] = k
    out = softmax(q @ cache.mT) @ v
    cache[:, :, 2] = 1.0
    return out, softmax(q @ cache.mT) @ v


WRITES: tuple[Program, ...] = (
    slice_written_before,
    slice_written_after,
    slice_written_between_two_sites,
    written_through_a_view,
    causal_then_zeroed,
    causal_copied_then_zeroed,
    scores_filled_in_place,
    scores_divided_in_place,
    scores_through_out,
    first_key_overwritten,
    weights_scaled_in_place,
    weights_zeroed_after,
    query_written_between,
    values_written_between,
    a_key_zeroed_between,
    copy_of_keys_then_written,
    keys_turned_in_place,
    cache_written_before_and_after,
)


@pytest.mark.parametrize("program", WRITES)
def test_a_value_is_read_as_it_is_when_it_is_read(program: Program) -> None:
    same(program, *qkv(), randn(8, 8))


RESULT_WRITES: dict[str, Program] = {
    "whole": lambda q, k, v: attend(q, k, v).mul_(2),
    "imul": lambda q, k, v: _imul(attend(q, k, v)),
    "through a view": lambda q, k, v: _both(attend(q, k, v), lambda o: o.transpose(1, 2).add_(1)),
    "a copy of it": lambda q, k, v: _both(attend(q, k, v), lambda o: o.transpose(1, 2).contiguous().add_(1)),
    "contiguous is itself": lambda q, k, v: _both(attend(q, k, v), lambda o: o.contiguous().add_(1)),
    "reshape is a view": lambda q, k, v: _both(attend(q, k, v), lambda o: o.reshape(4, 8, 16).add_(1)),
    "heads merged": lambda q, k, v: _merged(attend(q, k, v)).mul_(2),
    "heads merged, and it": lambda q, k, v: _merged_and_summed(attend(q, k, v)),
    "heads merged in a checkpoint": lambda q, k, v: _in_checkpoint(q, k, v).mul_(2),
}


def _merged(out: Tensor) -> Tensor:
    return out.transpose(1, 2).flatten(2)


def _merged_and_summed(out: Tensor) -> tuple[Tensor, Tensor]:
    return _merged(out).mul_(2), out.sum()


def _in_checkpoint(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    made: Tensor = checkpoint(lambda *x: _merged(attend(*x)), q, k, v, use_reentrant=False)
    return made


def _imul(out: Tensor) -> Tensor:
    out *= 2
    return out


def _both(out: Tensor, write: Callable[[Tensor], Tensor]) -> Any:
    return out, write(out)


@pytest.mark.parametrize("grad", [False, True])
@table(RESULT_WRITES)
def test_a_result_may_be_written(row: Program, grad: bool) -> None:
    same(row, *qkv(grad=grad), grad=grad)


# ---- look-alikes ----

CONDITIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "j <= i": lambda i, j: j <= i,
    "j < i": lambda i, j: j < i,
    "j <= i + 1": lambda i, j: j <= i + 1,
    "j < i + 1": lambda i, j: j < i + 1,
    "i <= j": lambda i, j: i <= j,
    "i - j > 0": lambda i, j: i - j > 0,
    "i - j >= 0": lambda i, j: i - j >= 0,
    "not j <= i": lambda i, j: ~(j <= i),
    "2j <= i": lambda i, j: 2 * j <= i,
    "j <= 7 - i": lambda i, j: j <= 7 - i,
    "j == i": lambda i, j: j == i,
    "prefix": lambda i, j: (j <= i) | (j < 3),
    "window": lambda i, j: (j <= i) & (i - j < 3),
}


@pytest.mark.parametrize(("q_len", "kv_len"), [(8, 8), (5, 8), (8, 5)])
@table(CONDITIONS)
def test_nearly_causal_is_not_causal(row: Callable[[Tensor, Tensor], Tensor], q_len: int, kv_len: int) -> None:
    def keep() -> Tensor:
        return row(torch.arange(q_len)[:, None], torch.arange(kv_len))

    def program(q: Tensor, k: Tensor, v: Tensor) -> Any:
        scores = q @ k.mT * 0.25
        return (
            softmax(scores.masked_fill(~keep(), NEG_INF)) @ v,
            softmax(torch.where(keep(), scores, -1e9)) @ v,
            softmax(scores + torch.where(keep(), 0.0, NEG_INF)) @ v,
            F.scaled_dot_product_attention(q, k, v, keep()),
        )

    same(program, *qkv(q_len=q_len, kv_len=kv_len))


TRIANGLES: dict[str, Callable[[int, int], Tensor]] = {
    "bottom right": lambda rows, columns: tril(rows, columns, columns - rows),
    "below the diagonal": lambda rows, columns: tril(rows, columns, -1),
    "transposed": lambda rows, columns: tril(columns, rows).T,
    "upper, transposed": lambda rows, columns: torch.ones(columns, rows).triu().T.bool(),
    "buffer, one row on": lambda rows, columns: tril(16, 16)[1 : rows + 1, :columns],
    "buffer, its end": lambda rows, columns: tril(16, 16)[-rows:, -columns:],
    "buffer, every second row": lambda rows, columns: tril(16, 16)[: 2 * rows : 2, :columns],
    "flipped": lambda rows, columns: tril(rows, columns).flip(0),
}


@pytest.mark.parametrize(("q_len", "kv_len"), [(8, 8), (5, 8), (8, 5)])
@table(TRIANGLES)
def test_a_triangle_is_read_where_it_stands(row: Callable[[int, int], Tensor], q_len: int, kv_len: int) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Any:
        keep = row(q_len, kv_len)
        return (
            softmax(torch.where(keep, q @ k.mT, -1e9)) @ v,
            F.scaled_dot_product_attention(q, k, v, keep),
        )

    same(program, *qkv(q_len=q_len, kv_len=kv_len))


@pytest.mark.parametrize(("q_len", "kv_len"), [(8, 8), (1, 8), (5, 8), (8, 5), (8, 1)])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_is_causal_survives_no_regrouping_of_rows(q_len: int, kv_len: int, kv_heads: int) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    same(program, *qkv(heads=4, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len, grad=True), grad=True)


@pytest.mark.parametrize("q_len", [1, 5])
def test_is_causal_with_keys_shared_over_the_batch(q_len: int) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k.expand(3, -1, -1, -1), v.expand(3, -1, -1, -1), is_causal=True)

    q, (_, k, v) = qkv(batch=3, q_len=q_len)[0], qkv(batch=1)
    same(program, q, k, v)


LOOK_ALIKES: dict[str, Program] = {
    "values flipped": lambda q, k, v: softmax(q @ k.mT) @ v.flip(2),
    "values rolled": lambda q, k, v: softmax(q @ k.mT) @ v.roll(1, 2),
    "weights plus one": lambda q, k, v: (softmax(q @ k.mT) + 1) @ v,
    "weights masked": lambda q, k, v: (softmax(q @ k.mT) * tril(8, 8)) @ v,
    "weights sliced": lambda q, k, v: softmax(q @ k.mT)[..., :5] @ v[:, :, :5],
    "weights of another head": lambda q, k, v: softmax(q @ k.mT).roll(1, 1) @ v,
    "weights mixed": lambda q, k, v: torch.einsum("gh,bhij->bgij", v[0, 0, :2, :2], softmax(q @ k.mT)) @ v,
    "weights reordered": lambda q, k, v: softmax(q @ k.mT).reshape(2, 2, 8, 4, 2).mT.reshape(2, 2, 8, 8) @ v,
    "extra key": lambda q, k, v: softmax(torch.cat([q @ k.mT, torch.zeros(2, 2, 8, 1)], -1))[..., :-1] @ v,
    "two products": lambda q, k, v: softmax(q @ k.mT + q @ v.mT) @ v,
    "mask of the scores": lambda q, k, v: softmax((q @ k.mT).masked_fill(q @ k.mT < 0, -1e9)) @ v,
    "soft cap": lambda q, k, v: softmax(torch.tanh(q @ k.mT / 5) * 5) @ v,
    "clamped": lambda q, k, v: softmax((q @ k.mT).clamp(-1, 1)) @ v,
    "two softmaxes": lambda q, k, v: softmax(softmax(q @ k.mT)) @ v,
    "softmax of the query": lambda q, k, v: softmax(q) @ k.mT @ v,
    "linear attention": lambda q, k, v: softmax(q) @ (torch.softmax(k, -2).mT @ v),
    "scale zero": lambda q, k, v: softmax(q @ k.mT * 0.0) @ v,
    "temperature of a key": lambda q, k, v: softmax(q @ k.mT * torch.linspace(0.2, 2, 8)) @ v,
    "the key is not transposed": lambda q, k, v: softmax(q @ k.reshape(2, 2, 16, 8)) @ v,
    "sum over the wrong axis": lambda q, k, v: _by_hand(q @ k.mT, -2) @ v,
    "with an epsilon": lambda q, k, v: (lambda e: e / (e.sum(-1, keepdim=True) + 1e-2))(torch.exp(q @ k.mT)) @ v,
    "alpha": lambda q, k, v: softmax(torch.add(v[..., :8], q @ k.mT, alpha=0.3)) @ v,
    "sub, turned round": lambda q, k, v: softmax(v[..., :8] - q @ k.mT) @ v,
    "beta": lambda q, k, v: torch.bmm(
        softmax(torch.baddbmm(v[0, :, :, :8].repeat(2, 1, 1), _fold(q), _fold(k).mT, beta=2, alpha=-0.25)), _fold(v)
    ),
    "added to the product": lambda q, k, v: torch.baddbmm(_fold(v), softmax(_fold(q) @ _fold(k).mT), _fold(v)),
    "a weak fill": lambda q, k, v: softmax((q @ k.mT).masked_fill(~tril(8, 8, -1), -3.0)) @ v,
    "weight of a shifted mask": lambda q, k, v: softmax((q @ k.mT).masked_fill(~tril(8, 8), -1e9) * 1e-9) @ v,
    "heads tiled, not interleaved": lambda q, k, v: attend(q, k[:, :1].repeat(1, 2, 1, 1), v[:, 1:].repeat(1, 2, 1, 1)),
    "attention as mask": lambda q, k, v: softmax(q @ k.mT + attend(k, q, v)[..., :8]) @ v,
    "attention as temperature": lambda q, k, v: softmax(q @ k.mT * attend(k, q, v)[..., :1]) @ v,
    "attention as values": lambda q, k, v: attend(q, k, attend(k, q, v)),
    "attention as keys": lambda q, k, v: attend(q, attend(k, q, v), v),
    "one tensor": lambda q, k, v: attend(q, q, q),
}


def _fold(tensor: Tensor) -> Tensor:
    return tensor.reshape(4, 8, 16)


def _by_hand(scores: Tensor, dim: int) -> Tensor:
    exp = torch.exp(scores)
    return exp / exp.sum(dim, keepdim=True)


@table(LOOK_ALIKES)
def test_what_looks_like_attention_is_read_for_what_it_is(row: Program) -> None:
    same(row, *qkv(grad=True), grad=True)


@pytest.mark.parametrize("dim", range(4))
def test_softmax_runs_over_the_dimension_it_is_given(dim: int) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Any:
        weights = torch.softmax(q @ k.mT, dim)
        return weights @ v, weights.mT @ v, weights.transpose(0, 1) @ v

    same(program, *qkv(2, 2, 2, 2))


# ---- sizes are part of what is proved ----


def test_two_sites_of_other_sizes_in_one_graph() -> None:
    def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        return attend(q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))

    def program(*t: Tensor) -> Any:
        return grouped(*t[:3]), grouped(*t[3:])

    same(program, *qkv(heads=2, kv_heads=1), *qkv(heads=8, kv_heads=4), rewritten=2)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 1), (8, 4), (4, 2), (8, 2), (4, 1)])
def test_nothing_is_remembered_of_other_sizes(heads: int, kv_heads: int) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def repeated(t: Tensor) -> Tensor:
            return t[:, :, None].expand(2, kv_heads, heads // kv_heads, 8, 16).reshape(2, heads, 8, 16)

        return attend(q, repeated(k), repeated(v))

    same(program, *qkv(heads=heads, kv_heads=kv_heads), rewritten=1)


def test_a_mask_of_part_of_the_keys_and_of_all() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Any:
        keys = torch.arange(8)
        tail = torch.where(keys < 6, 0.0, NEG_INF)
        band = torch.where(keys[None] <= keys[:, None] + 3, 0.0, NEG_INF)
        return (
            softmax(q @ k[:, :, :4].mT + tail[:4]) @ v[:, :, :4],
            softmax(q @ k.mT + tail) @ v,
            softmax(q[:, :, :4] @ k[:, :, :4].mT + band[:4, :4]) @ v[:, :, :4],
            softmax(q @ k.mT + band) @ v,
        )

    same(program, *qkv())


@pytest.mark.parametrize("keys", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("window", [3, 64])
def test_the_last_keys_of_fewer(keys: int, window: int) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Any:
        last = softmax(q @ k[:, :, -window:].mT) @ v[:, :, -window:]
        return last, softmax(q[:, :, -window:] @ k.mT) @ v, softmax(q @ k[..., -window:, :].mT) @ v[:, :, -window:100]

    same(program, *qkv(q_len=keys, kv_len=keys))


PIECES: dict[str, Callable[[Tensor], Any]] = {
    "chunk": lambda x: x.chunk(3, 1),
    "split": lambda x: x.split([2, 4, 4], 1),
    "tensor_split": lambda x: x.tensor_split((2, 6), 1),
    "overlapping": lambda x: (x.tensor_split((5, 2), 1)[0], *[x.tensor_split((5, 2), 1)[2]] * 2),
    "negative": lambda x: (x[:, -9:-6], x[:, -6:-2], x[:, -4:]),
    "narrow": lambda x: (x.narrow(1, 3, 2), x.narrow(1, -4, 4), x.narrow(1, 0, 4)),
    "steps": lambda x: (x[:, ::3], x[:, 1::2], x[:, ::2]),
    "past the end": lambda x: (x[:, :20], x[:, 5:99], x[:, -99:5]),
    "unbind": lambda x: (*x.view(2, 5, 2, 4).unbind(2), x[:, :5]),
    "select": lambda x: (x, x.view(2, 5, 2, 4).select(2, -1), x[:, :5]),
}


@table(PIECES)
def test_pieces_of_one_tensor(row: Callable[[Tensor], Any]) -> None:
    def program(x: Tensor) -> Tensor:
        q, k, v = row(x)
        return softmax(q @ k.mT) @ (v if v.shape[1] == k.shape[1] else k)

    same(program, randn(2, 10, 4))


# ---- layouts ----

LAYOUTS: dict[str, Callable[[], tuple[Tensor, Tensor, Tensor]]] = {
    "shared keys": lambda: (
        randn(2, 2, 8, 16),
        randn(1, 2, 8, 16).expand(2, 2, 8, 16),
        randn(1, 2, 8, 16).expand(2, 2, 8, 16),
    ),
    "one key repeated": lambda: (randn(2, 2, 8, 16), randn(2, 2, 1, 16).expand(2, 2, 8, 16), randn(2, 2, 8, 16)),
    "one column repeated": lambda: (randn(2, 2, 8, 16), randn(2, 2, 8, 1).expand(2, 2, 8, 16), randn(2, 2, 8, 16)),
    "last dim not dense": lambda: _three(lambda: randn(2, 2, 16, 8).mT),
    "offset": lambda: _three(lambda: randn(3, 3, 9, 40)[1:, 1:, 1:, 3:19]),
    "every second": lambda: _three(lambda: randn(2, 2, 16, 32)[:, :, ::2, ::2]),
    "heads last": lambda: _three(lambda: randn(2, 8, 2, 16).transpose(1, 2)),
    "reversed": lambda: _three(lambda: randn(16, 8, 2, 2).permute(3, 2, 1, 0)),
}


def _three(make: Callable[[], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return make(), make() * 0.5, make() + 1


@table(LAYOUTS)
def test_any_layout_of_the_inputs(row: Callable[[], tuple[Tensor, Tensor, Tensor]]) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return (
            attend(q, k, v),
            F.scaled_dot_product_attention(q, k, v, is_causal=True),
            F.scaled_dot_product_attention(q, k, v, tril(8, 8)[None, None]),
        )

    same(program, *row())


EINSUMS = (
    "bhid,bhjd->bhij bhij,bhjd->bhid",
    "bihd,bjhd->bhij bhij,bjhd->bihd",
    "bhjd,bhid->bhij bhjd,bhij->bdhi",
    "hbdi,dbjh->jihb jbhd,jihb->dihb",
    "ibhd,jbhd->ijbh ijbh,jbhd->ibhd",
    "dbhi,bdjh->bjhi hbjd,bjhi->hibd",
)


@pytest.mark.parametrize("equations", EINSUMS)
def test_any_order_of_letters(equations: str) -> None:
    sizes = {"b": 2, "h": 3, "i": 5, "j": 7, "d": 4}
    first, second = equations.split()
    (left, right), scores = first.split("->")[0].split(","), first.split("->")[1]
    others = [o for o in second.split("->")[0].split(",") if o != scores]

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.softmax(torch.einsum(first, q, k), scores.index("j"))
        operands = (weights, v) if second.startswith(scores) else (v, weights)
        return torch.einsum(second, *operands)

    shapes = [[sizes[letter] for letter in letters] for letters in (left, right, others[0])]
    same(program, *(randn(*shape, seed=n) for n, shape in enumerate(shapes)), rewritten=1)


VIEWED: dict[str, Program] = {
    "einsum": lambda q, k, v: torch.einsum("bhij,bhjd->bdhi", softmax(q @ k.mT), v).permute(0, 2, 3, 1).view(4, 8, 16),
    "einsum, heads last": lambda q, k, v: (
        torch.einsum("bhij,bhjd->bihd", softmax(q @ k.mT), v).transpose(1, 2).view(4, 8, 16)
    ),
    "matmul": lambda q, k, v: attend(q, k, v).view(4, 8, 16),
    "stride asked": lambda q, k, v: attend(q, k, v) * torch.einsum("bhij,bhjd->bihd", softmax(q @ k.mT), v).stride(1),
    "contiguity asked": lambda q, k, v: _if_dense(torch.einsum("bhij,bhjd->bihd", softmax(q @ k.mT), v)),
    "transposed call": lambda q, k, v: (
        F.scaled_dot_product_attention(_hl(q), _hl(k), _hl(v)).transpose(1, 2).view(2, 8, 32)
    ),
    "grouped call": lambda q, k, v: (
        F.scaled_dot_product_attention(_hl(q), _hl(k)[:, :1], _hl(v)[:, :1], enable_gqa=True)
        .transpose(1, 2)
        .view(2, 8, 32)
    ),
}


def _hl(tensor: Tensor) -> Tensor:
    return tensor.reshape(2, 8, 2, 16).transpose(1, 2)


def _if_dense(out: Tensor) -> Tensor:
    return out * 2 if out.is_contiguous() else out * 3


@table(VIEWED)
def test_the_result_can_be_viewed_as_before(row: Program) -> None:
    same(row, *qkv())


# ---- numbers ----

MASK_SHAPES = ((8,), (8, 8), (2, 1, 1, 8), (2, 2, 8, 8), (2, 1, 1), (1,), (8, 1), (2, 8, 8), (2, 1, 8, 8), (1, 1, 1, 1))


@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_masks_of_every_shape(shape: tuple[int, ...]) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, keep: Tensor) -> Any:
        scores = q @ k.mT
        return (
            softmax(scores + bias) @ v,
            softmax(torch.add(bias, scores, alpha=0.25)) @ v,
            softmax(scores - bias) @ v,
            softmax(scores.masked_fill(~keep, NEG_INF)) @ v,
            softmax(torch.where(keep, scores, -1e9)) @ v,
            softmax(scores + keep) @ v,
            softmax(scores + (1 - keep.long()) * -10000) @ v,
        )

    keep = randn(*shape) > -0.5
    keep[..., 0] = True
    same(program, *qkv(), randn(*shape, seed=5), keep)


TEMPERATURES = {
    "0-d": torch.tensor(0.3),
    "integer": torch.tensor(2),
    "(1,)": torch.tensor([0.3]),
    "rank 4": torch.full((1, 1, 1, 1), 0.3),
    "negative": torch.tensor(-0.3),
    "double": torch.tensor(0.3, dtype=torch.float64),
    "head": torch.tensor([0.3, 1.7]).view(2, 1, 1),
    "row": torch.linspace(0.2, 2, 8).view(8, 1),
    "batch": torch.tensor([0.3, 1.7]).view(2, 1, 1, 1),
    "key": torch.linspace(0.2, 2, 8),
}


@table(TEMPERATURES)
def test_temperatures_of_every_shape(row: Tensor) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Any:
        masked = (q @ k.mT).masked_fill(~tril(8, 8), NEG_INF)
        return (
            softmax(q @ k.mT * t) @ v,
            softmax(q @ k.mT / t) @ v,
            softmax((q @ k.mT + torch.arange(8.0)) * t) @ v,
            softmax(masked / t.abs()) @ v,
        )

    same(program, *qkv(), row)


@pytest.mark.parametrize("scale", [-0.5, 1e-6, 100.0, math.inf, math.nan, 0.0])
def test_unusual_scales(scale: float) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Any:
        causal = torch.zeros(8, 8).masked_fill(~tril(8, 8), NEG_INF)
        return (
            softmax(q @ k.mT * scale) @ v,
            softmax((q * scale) @ k.mT + causal) @ v,
            softmax((q * scale) @ k.mT + causal * 0.5) @ v,
            F.scaled_dot_product_attention(q, k, v, scale=scale),
        )

    same(program, *qkv())


HALVES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("padded", [False, True])
def test_a_row_without_a_key_is_the_mean_of_the_values(dtype: torch.dtype, padded: bool) -> None:
    lowest = torch.finfo(dtype).min
    keep = randn(2, 1, 8, 8, seed=5) > -0.3
    keep[0, 0, 3] = False
    if padded:
        keep = torch.tensor([True, False]).view(2, 1, 1, 1).expand(2, 1, 1, 8).clone()
    bias = randn(2, 8, 8, dtype=dtype, seed=6)

    def program(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, bias: Tensor) -> Any:
        scores, added = q @ k.mT * 0.25, torch.zeros(keep.shape, dtype=q.dtype).masked_fill(~keep, lowest)
        return (
            softmax(scores.masked_fill(~keep, lowest)) @ v,
            softmax(torch.where(keep, scores, lowest)) @ v,
            softmax(scores + added) @ v,
            softmax(scores + (1 - keep.to(q.dtype)) * lowest) @ v,
            F.softmax(scores.masked_fill(~keep, lowest), -1, dtype=torch.float32).to(q.dtype) @ v,
            softmax(scores.masked_fill(~keep, lowest) + bias) @ v,
            softmax((scores + bias).masked_fill(~keep, lowest)) @ v,
        )

    def reference(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, bias: Tensor) -> Any:
        def mean_where_empty(scores: Tensor) -> Tensor:
            weights = softmax(scores.masked_fill(~keep, NEG_INF))
            return torch.where(keep.any(-1, keepdim=True), weights, 1 / 8) @ v

        plain, biased = mean_where_empty(q @ k.mT * 0.25), mean_where_empty(q @ k.mT * 0.25 + bias)
        return [plain] * 5 + [biased] * 2

    same(program, *qkv(dtype=dtype), keep, bias, reference=reference)


MIXED: dict[str, Program] = {
    "values in half": lambda q, k, v: softmax(q @ k.mT).bfloat16() @ v.bfloat16(),
    "scores in float32": lambda q, k, v: softmax(q.half().float() @ k.half().float().mT).half() @ v.half(),
    "float mask, half query": lambda q, k, v: softmax(q.half() @ k.half().mT + v[..., :8]).half() @ v.half(),
    "double mask": lambda q, k, v: softmax(q @ k.mT + v[..., :8].double()).float() @ v,
    "double": lambda q, k, v: softmax(q.double() @ k.double().mT) @ v.double(),
    "half mask": lambda q, k, v: softmax(q @ k.mT + v[..., :8].half()) @ v,
}


@table(MIXED)
def test_mixed_precision_is_kept(row: Program) -> None:
    same(row, *qkv(), reference=False)


# ---- regions ----


def autocast(enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)


def autocast_of_the_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with autocast():
        scores = q @ k.mT
    return softmax(scores.float()) @ v


def autocast_of_the_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    with autocast():
        return softmax(scores) @ v


def autocast_disabled_inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with autocast(), autocast(False):
        return softmax(q @ k.mT) @ v


def autocast_of_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with autocast():
        return softmax(q @ k.mT + torch.full((8, 8), torch.finfo(torch.float32).min).triu(1)) @ v


def only_math_allowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return attend(q, k, v)


def vectorised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.func.vmap(attend)(q, k, v)


def differentiated(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return torch.func.grad(lambda t: attend(t, k, v).sum())(q)


@pytest.mark.parametrize(
    ("program", "rewritten"),
    [
        (autocast_of_the_scores, 0),
        (autocast_of_the_weights, 0),
        (autocast_disabled_inside, 1),
        (autocast_of_all, 1),
        (only_math_allowed, 0),
        (vectorised, 1),
        (differentiated, 0),
    ],
)
def test_a_site_is_one_region(program: Program, rewritten: int) -> None:
    same(program, *qkv(), rewritten=rewritten, reference=False)


# ---- bodies ----


def test_a_mask_of_the_caller_is_read_when_the_body_is_called() -> None:
    def masked(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return softmax((q @ k.mT).masked_fill(~keep, NEG_INF)) @ v

    def program(q: Tensor, k: Tensor, v: Tensor) -> Any:
        keep = tril(8, 8).clone()
        first = checkpoint(masked, q, k, v, keep, use_reentrant=False)
        keep[0, :] = True
        return first, checkpoint(masked, q, k, v, keep, use_reentrant=False)

    same(program, *qkv(grad=True))


def warm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax(q @ k.transpose(-1, -2) * 0.1) @ v


def cold(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax(q @ k.transpose(-1, -2)) @ v


def test_branches_are_their_own() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return torch.cond(q.sum() > 0, warm, cold, (q, k, v))

    q, k, v = qkv()
    same(program, q.abs(), k, v)
    same(program, -q.abs(), k, v)


# ---- dynamic sizes ----

DYNAMIC: dict[str, Program] = {
    "plain": attend,
    "causal": lambda q, k, v: softmax((q @ k.mT).masked_fill(~tril(q.shape[2], k.shape[2]), NEG_INF)) @ v,
    "bottom right": lambda q, k, v: (
        softmax((q @ k.mT).masked_fill(~tril(q.shape[2], k.shape[2], k.shape[2] - q.shape[2]), NEG_INF)) @ v
    ),
    "call": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "scale of a size": lambda q, k, v: softmax(q @ k.mT * k.shape[2] ** -0.5) @ v,
    "shared": lambda q, k, v: softmax(q @ k[:1].expand(q.shape[0], -1, -1, -1).mT) @ v[:1],
    "folded": lambda q, k, v: torch.bmm(softmax(torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT)), v.flatten(0, 1)).view(
        q.shape
    ),
    "two, merged heads": lambda q, k, v: (
        attend(attend(q, k, v), k, v).transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)
    ),
}


@table(DYNAMIC)
def test_one_compilation_serves_all_sizes_and_no_guard_is_added(row: Program) -> None:
    """But for torch's own call, which alone does not say that keys and values are as many (patterns/one_length.py)."""
    guards: list[tuple[int, int]] = []

    def counted(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        env = torch._guards.TracingContext.get().fake_mode.shape_env
        before = len(env.guards)
        out = attn_pass.wrap(lambda graph, _: graph.forward, choose="fused", on_error="raise")(gm, inputs)
        guards.append((before, len(env.guards)))
        return out

    torch._dynamo.reset()
    compiled = torch.compile(row, backend=counted)
    for batch, q_len, kv_len in ((2, 8, 11), (3, 7, 13), (5, 2, 64), (7, 13, 29)):
        q, k, v = qkv(batch, 2, q_len, kv_len)
        for tensor in (q, k, v):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
            torch._dynamo.maybe_mark_dynamic(tensor, 2)
        torch.testing.assert_close(compiled(q, k, v), row(q, k, v), atol=2e-5, rtol=1e-4)
    assert len(guards) == 1
    assert guards[0][1] - guards[0][0] == (row is DYNAMIC["call"])
