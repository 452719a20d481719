"""Evaluating the description in float64 equals the subgraph it was read from, however attention is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from programs import DIALECTS, Captured, capture, check, meanings
from spellings import INF, forms
from variations import Call, Grouped, einsums, grouped, sdpa_calls

from attn_pass.compat import TORCH_VERSION
from attn_pass.poor_cases import variants

Tensor = torch.Tensor
EXAMPLES = int(os.environ.get("ATTN_PASS_EXAMPLES", "24"))  # of each property; a night of fuzzing takes thousands
SHARE = {"dynamo": 1.0, "export": 0.7, "decomposed": 0.35}  # what an example costs differs
B, H, L, S, D = 2, 3, 4, 5, 4


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def attend(s: Tensor, v: Tensor) -> Tensor:
    return s.softmax(-1) @ v


# ---------------------------------------------------------------- properties


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("strategy", [forms, einsums, grouped, sdpa_calls], ids=lambda s: s.__name__)
def test_any_spelling(strategy: Callable[[], st.SearchStrategy[Any]], dialect: str) -> None:
    """Whatever is drawn is read, and description, normalised parts and every variant equal what the graph computes."""

    @settings(
        max_examples=max(1, int(EXAMPLES * SHARE[dialect])),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy())
    def run(form: Any) -> None:
        if dialect == "decomposed":
            assume(not getattr(form, "has_einsum_over_one", False))
        check(form, form.inputs(), dialect)

    run()


# ---------------------------------------------------------------- programs from the field

Q, K, V = numbers(B, H, L, D, seed=1), numbers(B, H, S, D, seed=2), numbers(B, H, S, D, seed=3)
QKV = numbers(B, L, 3 * H * D, seed=4)
PADDING = torch.tensor([[True] * 3 + [False] * 2, [True] * 5])
KEEP = numbers(B, 1, L, S, seed=5) > -0.3
KEEP[..., 0] = True

Program = tuple[Callable[..., Any], Sequence[Tensor]]
PROGRAMS: dict[str, Program] = {}


def program(*inputs: Tensor) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[function.__name__] = (function, inputs)
        return function

    return add


@program(QKV)
def fused_projection(x: Tensor) -> Tensor:
    q, k, v = x.view(B, L, 3, H, D).permute(2, 0, 3, 1, 4)
    return attend(q @ k.mT * 0.3, v).transpose(1, 2).reshape(B, L, H * D)


@program(QKV)
def split_projection(x: Tensor) -> Tensor:
    q, k, v = (t.view(B, L, H, D).transpose(1, 2) for t in x.split(H * D, dim=-1))
    return attend(q @ k.mT / D**0.5, v).transpose(1, 2).flatten(2)


@program(numbers(B, H * D * 3, 4, 2))
def convolutional(x: Tensor) -> Tensor:
    """Channels first, as in a UNet: keys and values have the position last."""
    q, k, v = (t.reshape(B, H, D, -1) for t in x.chunk(3, 1))
    return v @ (q.mT @ k * 0.5).softmax(-1).mT


@program(numbers(4, 6, 8, D))
def windows(x: Tensor) -> Tensor:
    """Swin: a window is a batch row."""
    x = x.view(4, 3, 2, 4, 2, D).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, D)
    return attend(x @ x.mT, x)


@program(Q, K, V, PADDING)
def padding_of_bert(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    extended = (1.0 - mask[:, None, None, :].to(q.dtype)) * torch.finfo(q.dtype).min
    return attend(q @ k.mT / 2 + extended, v)


@program(Q, K, V, PADDING)
def truth_made_a_number(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return attend(q @ k.mT + (1.0 - (mask * 1.0)[:, None, None, :]) * -1e9, v)


@program(Q, K, V, numbers(17, H))
def relative_position_bias(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    index = torch.arange(L)[:, None] - torch.arange(S)[None] + 8
    return attend(q @ k.mT + table[index].permute(2, 0, 1), v)


@program(Q, K, V, numbers(H, 1, 1))
def cosine_with_learned_temperature(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    s = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
    return attend(s * t.clamp(max=4.6).exp(), v)


@program(Q, K, V)
def softmax_over_the_second_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (k @ q.mT).softmax(-2).mT @ v


@program(Q, K, V)
def weights_on_the_right(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (v.mT @ F.softmax(k @ q.mT, dim=2)).mT


@program(Q, K, V)
def part_of_the_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1)[:, 1, 1:3] @ v[:, 1]


@program(Q, K, V)
def weights_shared_by_the_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q[:1] @ k[:1].mT).softmax(-1) @ v


@program(Q, K, V)
def keys_for_all_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q @ k[:, :1].mT, v)


@program(Q, K, V)
def values_for_all_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q @ k.mT, v[:, :1])


@program(Q, K, V, KEEP)
def empty_rows_are_zero(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    keep = keep & (torch.arange(L) != 2)[:, None]
    s = (q @ k.mT).masked_fill(~keep, -INF)
    return torch.where((s == -INF).all(-1, keepdim=True), 0.0, s.softmax(-1)) @ v


@program(Q, K, V, KEEP)
def empty_rows_are_nan(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return attend((q @ k.mT).masked_fill(~keep | (torch.arange(L) == 2)[:, None], -INF), v)


@program(Q, K, V, KEEP)
def empty_rows_are_the_mean(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return attend((q @ k.mT).masked_fill(~keep | (torch.arange(L) == 2)[:, None], -1e9), v)


@program(Q, K, V)
def a_window_longer_than_the_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``x[-16:]`` of five elements is all of them."""
    return attend(q @ k[:, :, -16:].mT, v[:, :, -16:])


@program(Q, K, V, numbers(L, 16))
def the_end_of_a_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return attend(q @ k[:, :, -3:].mT + mask[-9:, -3:], v[:, :, -3:])


@program(Q[0], K[0], V[0])
def reversed_by_capital_t(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``.T`` of three dimensions reverses them all."""
    return attend(q @ k.T.permute(2, 0, 1), v.T.permute(2, 1, 0))


@program(Q, K, V)
def ranges_with_start_and_step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keep = torch.arange(2, end=2 + 2 * S, step=2) <= torch.arange(start=2, end=2 + L)[:, None]
    return attend((q @ k.mT).masked_fill(~keep, -INF), v)


@program(Q, K, V, numbers(L, S))
def scores_changed_in_place(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    s = q @ k.mT
    s += bias
    s *= 0.5
    return attend(s, v)


@program(Q, K, V, KEEP)
def scores_masked_in_place(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """Nothing is bound to the result of the call."""
    s = q @ k.mT
    s.div_(2.0)
    s.masked_fill_(~keep, -INF)
    return attend(s, v)


@program(Q, K, V)
def mask_filled_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.zeros(L, S)
    mask[:, 3:] = -INF
    mask[0] = 0
    return attend(q @ k.mT + mask, v)


@program(Q, numbers(B, H, 8, D), numbers(B, H, 8, D, seed=9), K[:, :, :2])
def cache_written_in_place(q: Tensor, keys: Tensor, values: Tensor, new: Tensor) -> Tensor:
    keys, values = keys.clone(), values.clone()
    keys[:, :, 4:6] = new
    values[:, :, 4:6] = new * 2
    return attend(q @ keys[:, :, :6].mT, values[:, :, :6])


@program(Q, K, V)
def three_layers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    for _ in range(3):
        q = attend(q @ k.mT * 0.4, v) + q
    return q


@program(Q, K, V, numbers(L, S, D))
def keys_of_each_query(q: Tensor, k: Tensor, v: Tensor, p: Tensor) -> Tensor:
    """Relative keys: the second product is a bias."""
    return attend(q @ k.mT + torch.einsum("bhid,ijd->bhij", q, p), v)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str, dialect: str) -> None:
    function, inputs = PROGRAMS[name]
    check(function, inputs, dialect, sites=3 if name == "three_layers" else 1)


# ---------------------------------------------------------------- symbolic sizes


def operands(batch: int, queries: int, keys: int, kv_heads: int = 4) -> list[Tensor]:
    return [numbers(batch, h, n, 6, seed=n + h) for h, n in ((4, queries), (kv_heads, keys), (kv_heads, keys))]


def folded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, h, l, d = q.shape
    q, k, v = (x.reshape(b * h, -1, d) for x in (q, k, v))
    return torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v).view(b, h, l, d)


def projected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2).flatten(2).view(x.shape[0], -1, 4, 6).transpose(1, 2) for x in (q, k, v))
    return attend(q @ k.mT / (q.size(-1) ** 0.5), v).transpose(1, 2).reshape(q.shape[0], -1, 24)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keep = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    return attend((q @ k.mT).masked_fill(~keep, -INF), v)


def bottom_right(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keep = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    return attend((q @ k.mT).masked_fill(~keep, -INF), v)


def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(x.shape[0], 4, -1, 6) for x in (k, v))
    return attend(q @ k.mT, v)


def shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q @ k[:1].expand(q.shape[0], -1, -1, -1).mT, v[:1].expand(q.shape[0], -1, -1, -1))


def last_three(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q @ k[:, :, -3:].mT, v[:, :, -3:])


def called(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, k + v, is_causal=True, scale=0.3, enable_gqa=True)


SYMBOLIC = (folded, projected, causal, bottom_right, repeated, shared, last_three, called)


@pytest.mark.parametrize("dialect", ["dynamo", "export"])
@pytest.mark.parametrize("function", SYMBOLIC, ids=lambda f: f.__name__)
def test_symbolic_sizes(function: Callable[..., Any], dialect: str) -> None:
    if dialect == "export" and function in (folded, repeated) and TORCH_VERSION < (2, 12):
        pytest.skip("torch.export before 2.12 takes min(6 * n, 24 * n) for a restriction on n")
    """Read at one size, the description holds at another."""
    kv_heads = 2 if function in (repeated, called) else 4
    first, second = operands(4, 5, 7, kv_heads), operands(5, 8, 12, kv_heads)
    if dialect == "dynamo":
        for x in (*first, *second):
            for dim in (0, 2):
                torch._dynamo.maybe_mark_dynamic(x, dim)
        check(function, first, dialect, run=second)
        return
    batch, queries, keys = (torch.export.Dim(n, min=4, max=64) for n in ("batch", "queries", "keys"))
    shapes = [{0: batch, 2: queries}, {0: batch, 2: keys}, {0: batch, 2: keys}]
    check(function, first, dialect, dynamic=shapes, run=second)


# ---------------------------------------------------------------- what the reading made of it


def square(n: int = 6) -> list[Tensor]:
    return [numbers(2, 3, n, 4, seed=s) for s in range(3)]


LOWER = {
    "tril": lambda n: torch.ones(n, n, dtype=torch.bool).tril(),
    "tril of numbers": lambda n: torch.tril(torch.ones(n, n)).bool(),
    "tril == 1": lambda n: torch.tril(torch.ones(n, n)).view(1, 1, n, n) == 1,
    "not tril == 0": lambda n: ~(torch.ones(n, n).tril()[None, None, :n, :n] == 0),
    "not triu": lambda n: ~torch.ones(n, n, dtype=torch.bool).triu(1),
    "arange <=": lambda n: torch.arange(n)[None, :] <= torch.arange(n)[:, None],
    "arange >=": lambda n: torch.arange(n).view(-1, 1) >= torch.arange(n),
    "arange <": lambda n: torch.arange(n) < torch.arange(1, n + 1)[:, None],
    "difference": lambda n: (torch.arange(n)[:, None] - torch.arange(n)) >= 0,
    "shifted both": lambda n: torch.arange(3, n + 3) <= torch.arange(3, n + 3)[:, None],
}
NOT_LOWER = {
    "tril(1)": lambda n: torch.ones(n, n, dtype=torch.bool).tril(1),
    "tril(-1)": lambda n: torch.ones(n, n, dtype=torch.bool).tril(-1) | (torch.arange(n) == 0),
    "transposed": lambda n: torch.ones(n, n, dtype=torch.bool).tril().mT,
    "arange from 2": lambda n: (torch.arange(2, end=n + 2) <= torch.arange(n)[:, None]) | (torch.arange(n) == 0),
    "every second": lambda n: torch.arange(0, 2 * n, 2) <= torch.arange(n)[:, None],
    "window": lambda n: torch.ones(n, n, dtype=torch.bool).tril() & torch.ones(n, n, dtype=torch.bool).triu(-2),
    "flipped": lambda n: torch.arange(n - 1, -1, -1) <= torch.arange(n)[:, None],
}
HIDING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "masked_fill": lambda s, keep: s.masked_fill(~keep, -INF),
    "where": lambda s, keep: torch.where(keep, s, torch.finfo(s.dtype).min),
    "added": lambda s, keep: s + torch.zeros(6, 6).masked_fill(~keep, -INF),
}


@pytest.mark.parametrize("hide", HIDING)
@pytest.mark.parametrize("mask", [*LOWER, *NOT_LOWER])
def test_causal_is_proved_or_not_said(mask: str, hide: str) -> None:
    """Every spelling of key <= query is named; what differs by one, or in the axis, is not."""
    make = (LOWER | NOT_LOWER)[mask]
    (meaning,) = check(lambda q, k, v: attend(HIDING[hide](q @ k.mT, make(6)), v), square(), "dynamo")
    assert meaning.attention.is_causal == (mask in LOWER), meaning.attention.mask.structure


@pytest.mark.parametrize("q_len, kv_len", [(1, 5), (3, 5), (5, 3), (5, 5)])
def test_causal_calls_are_aligned_top_left(q_len: int, kv_len: int) -> None:
    """With one query too, whatever axes are then moved into its rows."""
    call = Call(lead=(2, 4), kv_heads=2, q_len=q_len, kv_len=kv_len, is_causal=True)
    (meaning,) = check(call, call.inputs(), "dynamo")
    assert meaning.attention.is_causal and meaning.attention.mask.never_empty


@pytest.mark.parametrize("bias", ["constant", "row"])
def test_a_term_that_is_the_same_for_every_key_is_not_a_mask(bias: str) -> None:
    """A softmax does not see what is added to a whole row."""
    rows = torch.arange(6)[:, None] * 2 if bias == "row" else 1.5
    (meaning,) = check(lambda q, k, v: attend(q @ k.mT + rows, v), square(), "export")
    assert bias == "row" or meaning.attention.mask.is_none


def test_everything_that_scales_ends_in_scale_and_factors() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
        return attend((2 * q) @ (k / 4).mT * t / 0.5 * 3, v)

    (meaning,) = check(function, [*square(), numbers(3, 1, 1).exp()], "dynamo")
    assert meaning.attention.scale == pytest.approx(3.0) and len(meaning.attention.factors) == 1
    assert meaning.attention.mask.is_none


def test_operands_are_followed_to_where_they_lie() -> None:
    """Through chunk, view, transpose, upcast and scale: one source for all three."""

    def function(x: Tensor) -> Tensor:
        q, k, v = (t.view(2, 6, 3, 4).transpose(1, 2) for t in x.chunk(3, -1))
        return attend((q.float() * 0.5) @ k.float().mT, v.float())

    (meaning,) = check(function, [numbers(2, 6, 36).bfloat16()], "dynamo")
    a = meaning.attention
    assert a.query.source == a.key.source == a.value.source and a.sources[a.query.source].kind == "input"
    assert a.compute_dtype == torch.float32 and a.scale == 0.5


@pytest.mark.parametrize("repeat", ["expand reshape", "repeat_interleave", "tile", "query in groups"])
def test_shared_heads_are_found_whatever_repeats_them(repeat: str) -> None:
    """(B, 6, L, D) on (B, 2, S, D): three query heads a KV head, and the form that packs them."""
    form = Grouped(repeat=repeat)
    (meaning,) = check(form, form.inputs(), "dynamo")
    a = meaning.attention
    assert (a.query_heads, a.groups) == (6, 3)
    packed = dict(variants(a, None))["grouped_heads",]
    assert (packed.query_heads, packed.groups, packed.q_len) == (2, 1, 3 * 4)


def test_keys_shared_by_the_batch_are_found() -> None:
    """The batch moves into the query rows, and the mask moves along."""

    def function(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return attend((q @ k.mT).masked_fill(~keep, -INF), v)

    (meaning,) = check(function, [Q, K[:1], V[:1], KEEP], "export")
    packed = dict(variants(meaning.attention, None))["shared_kv",]
    assert (packed.batch_size, packed.q_len) == (1, B * L) and not packed.batch_is_shared


def test_a_mask_is_read_behind_the_move_to_another_device() -> None:
    """Its elements are not what a kernel on the other device could load (the meta device stands for one)."""

    def function(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return attend(q @ k.mT + torch.where(keep, 0.0, -INF).to(q.device), v)

    x = torch.empty(2, 3, 6, 4, device="meta")
    captured = capture(function, [x, x, x, torch.ones(6, 6, dtype=torch.bool)], "dynamo")
    ((meaning,), missed) = meanings(Captured(captured.gm, captured.values, "compile"))
    assert not missed
    assert {s.device.type for s in meaning.attention.sources} == {"meta"}


@pytest.mark.parametrize("packet", ["mT", "mH", "adjoint"])
def test_a_packet_that_takes_a_tensor_alone_is_its_overload(packet: str) -> None:
    """Dynamo writes attributes of tensors so since torch 2.15."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q @ getattr(torch.ops.aten, packet)(k.repeat_interleave(3, 1)), v.repeat_interleave(3, 1))

    (meaning,) = check(program, [Q, K[:, :1], V[:, :1]], "dynamo")
    assert meaning.attention.groups == 3
