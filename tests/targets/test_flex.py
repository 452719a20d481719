"""The flex target: score functions other than a scale, bias or mask, by their results; its refusals and reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from against_eager import FLEX_ON_CPU, NEG_INF, qkv, randn, same, same_each
from flex_programs import capped, positions, softcap
from torch import nn

import attn_pass
from attn_pass.targets.flex import rules

pytestmark = pytest.mark.skipif(not FLEX_ON_CPU, reason="FlexAttention on the CPU needs torch 2.13")

Tensor = torch.Tensor


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = positions(q, k)
    return capped(q, k).masked_fill(j > i, NEG_INF).softmax(-1) @ v


def causal_added(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = positions(q, k)
    return (capped(q, k) + torch.where(j > i, torch.finfo(torch.float32).min, 0.0)).softmax(-1) @ v


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = positions(q, k)
    return capped(q, k).masked_fill((j > i) | (j <= i - 3), NEG_INF).softmax(-1) @ v


def added(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    return (capped(q, k) + m).softmax(-1) @ v


def multiplied(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = positions(q, k)
    b = (j <= i).to(q.dtype)
    return (q @ k.mT * 0.25 * b + -1e4 * (1 - b)).softmax(-1) @ v


def weakly_filled(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    return (q @ k.mT * 0.25).masked_fill(m, -2.0).softmax(-1) @ v


def clamped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).clamp(-1.5, 1.5).softmax(-1) @ v


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softcap(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))


def by_temperature(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return torch.tanh((q * t) @ (k / 4).mT).softmax(-1) @ v


def heads_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softcap(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2).flatten(2)


def fused_projection(x: Tensor) -> Tensor:
    q, k, v = x.view(2, -1, 3, 2, 16).permute(2, 0, 3, 1, 4).unbind(0)
    return softcap(q * 2, k, v)


def folded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return torch.bmm(torch.tanh(torch.bmm(q, k.mT)).softmax(-1), v)


LOWEST = torch.finfo(torch.float32).min
EMPTY = torch.ones(2, 1, 8, 8).tril().masked_fill(torch.arange(8)[:, None] == 2, 0.0)  # row 2 is fully masked
CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "soft cap": (softcap, qkv()),
    "causal": (causal, qkv(q_len=9, kv_len=9)),
    "causal, added": (causal_added, qkv()),
    "sliding window": (window, qkv(q_len=70, kv_len=70)),
    "causal over several blocks": (causal, qkv(heads=1, q_len=1100, kv_len=1100)),
    "sliding window over several blocks": (window, qkv(heads=1, q_len=1100, kv_len=1100)),
    "dense bias": (added, (*qkv(), randn(2, 1, 8, 8))),
    "bias of a head": (added, (*qkv(), randn(2, 1, 1))),
    "fully masked rows, finite fill": (added, (*qkv(), (1 - EMPTY) * LOWEST)),
    "mask that multiplies": (multiplied, qkv()),
    "weak fill": (weakly_filled, (*qkv(), randn(8, 8) > 0)),
    "clamp": (clamped, qkv()),
    "grouped heads": (grouped, qkv(heads=4, kv_heads=2)),
    "a factor of the query's rows": (by_temperature, (*qkv(), randn(2, 2, 8, 1))),
    "odd sizes": (softcap, qkv(batch=3, heads=5, q_len=7, kv_len=13, dim=24)),
    "one query": (softcap, qkv(q_len=1, kv_len=33)),
    "one key": (softcap, qkv(q_len=5, kv_len=1)),
    "narrow values": (softcap, qkv(value_dim=8)),
    "bfloat16": (causal, qkv(dtype=torch.bfloat16)),
    "float16": (causal, qkv(dtype=torch.float16)),
    "heads last": (heads_last, tuple(x.transpose(1, 2).contiguous() for x in qkv())),
    "fused projection": (fused_projection, (randn(2, 8, 96),)),
    "folded heads": (folded, qkv()),
}


def test_it_equals_the_program() -> None:
    report = same_each(CASES, targets=("flex",))
    assert {site.target for site in report.sites} == {"flex"}


def test_both_forms_of_grouped_heads() -> None:
    for cases in ((), None):
        same(grouped, *qkv(heads=4, kv_heads=2), rewritten=1, poor_cases=cases)


def test_no_other_target_takes_it() -> None:
    report = same_each(CASES, rewritten=0, targets=("sdpa", "decomposed"))
    for name, site in zip(CASES, report.sites, strict=True):
        assert "scores" in site.reason and site.refusals.keys() >= {"sdpa", "decomposed"}, name


def test_lengths_may_be_symbolic() -> None:
    inputs = qkv(q_len=9, kv_len=9)
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 2)
    torch._dynamo.reset()
    backend = attn_pass.wrap("aot_eager_default_partitioner", choose="fused", on_error="raise")
    with torch.no_grad(), attn_pass.record() as report:
        compiled = torch.compile(causal, backend=backend)
        for given in (inputs, qkv(q_len=5, kv_len=5), qkv(q_len=700, kv_len=700)):
            torch.testing.assert_close(compiled(*given), causal(*given), atol=1e-5, rtol=1e-5)
    assert [s.target for s in report.sites] == ["flex"]


def test_a_row_of_minus_infinity_is_an_assumption_and_left_when_strict() -> None:
    mask = torch.where(EMPTY.bool(), 0.0, NEG_INF)
    report = same(added, *qkv(), mask, rewritten=1)
    assert "gives 0" in report.sites[0].assumptions[0]
    report = same(added, *qkv(), mask, rewritten=0, numerics="strict")
    assert "strict" in report.sites[0].reason


def test_training_is_left_with_both_reasons() -> None:
    report = same(softcap, *qkv(grad=True), rewritten=0, grad=True)
    assert "tanh (a soft cap)" in report.sites[0].reason and "no backward" in report.sites[0].reason


def test_float64_is_left() -> None:
    assert "float64" in same(softcap, *qkv(dtype=torch.float64), rewritten=0).sites[0].reason


def padded(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return capped(q, k).masked_fill(~keep[:, None, None, :], NEG_INF).softmax(-1) @ v


KEEP = torch.arange(9) < torch.tensor([3, 9, 7])[:, None]
OF_UNKNOWN_SIZE: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "dense bias": (added, (*qkv(batch=3), randn(3, 2, 8, 8))),
    "a permuted bias": (added, (*qkv(batch=3, q_len=7, kv_len=9), randn(9, 2, 3, 7).permute(2, 1, 3, 0))),
    "an expanded bias": (added, (*qkv(batch=3, q_len=7, kv_len=9), randn(3, 1, 7, 1).expand(3, 2, 7, 9))),
    "a bias of a part of a tensor": (added, (*qkv(batch=3, q_len=7, kv_len=9), randn(4, 2, 8, 11)[1:, :, 1:, 2:])),
    "padding": (padded, (*qkv(batch=3, q_len=7, kv_len=9), KEEP)),
}


def of_unknown_length(fn: Callable[..., Tensor], *inputs: Tensor, **options: Any) -> attn_pass.Report:
    """Compiled for any batch and lengths, compared with eager."""
    torch._dynamo.reset()
    for x in inputs:
        torch._dynamo.mark_dynamic(x, [n for n, size in enumerate(x.shape) if size not in (1, 2, 16)])  # not heads
    backend = attn_pass.wrap("aot_eager_default_partitioner", choose="fused", on_error="raise", **options)
    with torch.no_grad(), attn_pass.record() as report:
        torch.testing.assert_close(torch.compile(fn, backend=backend)(*inputs), fn(*inputs), atol=1e-5, rtol=1e-5)
    return report


@pytest.mark.parametrize("name", list(OF_UNKNOWN_SIZE))
def test_a_mask_of_unknown_size(name: str) -> None:
    fn, inputs = OF_UNKNOWN_SIZE[name]
    assert [s.target for s in of_unknown_length(fn, *inputs).sites] == ["flex"]


def test_an_exported_mask_of_unknown_size() -> None:
    class Padded(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
            return padded(q, k, v, keep)

    def given(length: int) -> tuple[Tensor, ...]:
        keep = randn(3, length) > 0
        keep[:, 0] = True
        return (*qkv(batch=3, q_len=length, kv_len=length), keep)

    model, length = Padded().eval(), torch.export.Dim("length", min=2, max=2048)
    program = torch.export.export(model, given(9), dynamic_shapes=({2: length},) * 3 + ({1: length},))
    report = attn_pass.rewrite(program, choose="fused", on_error="raise")
    assert [s.target for s in report.sites] == ["flex"]
    for inputs in (given(9), given(2), given(300)):
        torch.testing.assert_close(program.module()(*inputs), model(*inputs), atol=1e-5, rtol=1e-5)


def test_it_is_not_chosen_by_cost_where_it_is_not_compiled() -> None:
    assert same(causal, *qkv(q_len=512, kv_len=512), rewritten=0, choose="cheapest").sites[0].predicted_us["flex"]


LOOK_ALIKES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "tanh after the softmax": lambda q, k, v: torch.tanh((q @ k.mT).softmax(-1)) @ v,
    "tanh of the product": lambda q, k, v: torch.tanh((q @ k.mT).softmax(-1) @ v),
    "tanh over the scores' rows, summed": lambda q, k, v: torch.tanh((q @ k.mT).cumsum(-1)).softmax(-1) @ v,
    "a threshold of the scores": lambda q, k, v: (lambda s: s.masked_fill(s < 0, NEG_INF).softmax(-1) @ v)(q @ k.mT),
    "divided by the scores": lambda q, k, v: (1 / (q @ k.mT)).softmax(-1) @ v,
    "tanh of a part": lambda q, k, v: (lambda s: torch.cat([s[..., :4].tanh(), s[..., 4:]], -1).softmax(-1) @ v)(
        q @ k.mT
    ),
    "no softmax": lambda q, k, v: torch.tanh(q @ k.mT) @ v,
}


@pytest.mark.parametrize("name", list(LOOK_ALIKES))
def test_look_alikes_are_never_flex(name: str) -> None:
    report = same(LOOK_ALIKES[name], *qkv())
    assert all(s.target != "flex" for s in report.sites)


def test_scores_used_elsewhere_are_left() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        s = capped(q, k)
        return s.softmax(-1) @ v, s

    same(fn, *qkv(), rewritten=0)


# ---- compiled for real


class Layer(nn.Module):
    """Fused projection, soft cap, causal mask held as a buffer, and something pointwise behind."""

    def __init__(self, buffer: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.buffer = buffer
        self.register_buffer("keep", torch.ones(64, 64).tril()[None, None])

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, 32).permute(2, 0, 3, 1, 4).unbind(0)
        q = q + torch.cat([-q[..., 16:], q[..., :16]], -1)
        if not self.buffer:
            return self.out((causal(q, k, v) * 1.5).transpose(1, 2).flatten(2))
        b = self.keep[:, :, :length, :length]
        weights = (capped(q, k) * b + -1e4 * (1 - b)).softmax(-1)
        return self.out((weights @ v + 1).transpose(1, 2).flatten(2))


@pytest.fixture
def inductor() -> Iterator[dict[str, Any]]:
    torch._dynamo.reset()
    yield {"choose": "fused", "on_error": "raise", "targets": ("flex",)}
    torch._dynamo.reset()


@pytest.mark.slow
def test_inductor_compiles_what_is_emitted(inductor: dict[str, Any]) -> None:
    model, x = Layer().eval(), randn(2, 40, 64)
    with torch.no_grad(), attn_pass.record() as report:
        out = torch.compile(model, backend=attn_pass.backend, options=inductor)(x)
        torch.testing.assert_close(out, model(x), atol=1e-5, rtol=1e-5)
    assert [s.target for s in report.sites] == ["flex"]


@pytest.mark.slow
def test_inductor_keeps_storage_offsets(inductor: dict[str, Any]) -> None:
    def fn(q: Tensor, cache: Tensor, v: Tensor) -> Tensor:
        return causal(q, cache[1], v) * 2

    q, k, v = qkv(q_len=40, kv_len=40, dim=32)
    cache = torch.stack([v, k, q])
    with torch.no_grad():
        out = torch.compile(fn, backend=attn_pass.backend, options=inductor)(q, cache, v)
    torch.testing.assert_close(out, fn(q, cache, v), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_inductor_compiles_symbolic_lengths_once(inductor: dict[str, Any]) -> None:
    model, x = Layer(buffer=False).eval(), randn(2, 40, 64)
    torch._dynamo.mark_dynamic(x, 1)
    with torch.no_grad(), attn_pass.record() as report:
        compiled = torch.compile(model, backend=attn_pass.backend, options=inductor)
        for given in (x, randn(2, 9, 64), randn(2, 700, 64)):
            torch.testing.assert_close(compiled(given), model(given), atol=1e-5, rtol=1e-5)
    assert [s.target for s in report.sites] == ["flex"]


@pytest.mark.slow
def test_inductor_compiles_a_mask_of_unknown_size_once(inductor: dict[str, Any]) -> None:
    def given(batch: int, length: int) -> tuple[Tensor, ...]:
        keep = randn(batch, length) > 0
        keep[:, 0] = True
        inputs = (*qkv(batch=batch, q_len=length, kv_len=length, dim=32), keep)
        for x in inputs:
            torch._dynamo.mark_dynamic(x, (0, x.dim() - 2 if x.dim() == 4 else 1))
        return inputs

    with torch.no_grad(), attn_pass.record() as report:
        compiled = torch.compile(padded, backend=attn_pass.backend, options=inductor)
        for inputs in (given(3, 40), given(2, 9), given(5, 300)):
            torch.testing.assert_close(compiled(*inputs), padded(*inputs), atol=1e-5, rtol=1e-5)
    assert [s.target for s in report.sites] == ["flex"]


@pytest.mark.parametrize(
    ("vector", "dim", "keys", "written"),
    [
        (8, 16, 40, True),
        (8, 8, 8, True),
        (8, 16, 48, False),
        (8, 16, 41, False),
        (8, 20, 40, False),
        (8, 24, 40, False),
        (16, 16, 40, False),
    ],
)
def test_where_inductors_kernel_writes_past_its_scores_it_is_refused(
    vector: int, dim: int, keys: int, written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "inductor_vector_floats", lambda: vector)
    torch._dynamo.reset()
    inputs = qkv(q_len=4, kv_len=keys, dim=dim)
    with torch.no_grad():
        (site,) = attn_pass.explain(softcap, *inputs, attn_pass_options={"targets": ("flex",), "choose": "fused"}).sites
    assert (site.target == "flex") != written, site.reason
    assert ("writes past its scores" in site.reason) == written
    if written:  # executed by another compiler the call is right
        same(softcap, *inputs, rewritten=1, choose="fused", targets=("flex",))


@pytest.mark.slow
def test_with_vectors_of_eight_a_small_head_dim_is_right(inductor: dict[str, Any]) -> None:
    """Stock's own kernel for FlexAttention is wrong here, by what lies in memory (torch 2.13.0)."""
    inputs = qkv(q_len=40, kv_len=40)
    with torch.no_grad(), attn_pass.record() as report, torch._inductor.config.patch({"cpp.simdlen": 256}):
        out = torch.compile(softcap, backend=attn_pass.backend, options={**inductor, "targets": ("flex", "cpu_kernel")})
        torch.testing.assert_close(out(*inputs), softcap(*inputs), atol=1e-5, rtol=1e-5)
    assert [s.target for s in report.sites] == ["cpu_kernel"]


class Both(nn.Module):
    """A layer whose mask is a buffer, and one for any length."""

    def __init__(self) -> None:
        super().__init__()
        self.of_one_size, self.of_any = Layer(), Layer(buffer=False)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.of_one_size(x), self.of_any(y)


@pytest.mark.slow
def test_aot_inductor_compiles_it(inductor: dict[str, Any]) -> None:
    model, x = Both().eval(), randn(2, 40, 64)
    shapes = (None, {1: torch.export.Dim("length", min=2, max=2048)})
    with attn_pass.record() as report:
        package = attn_pass.aot_compile(model, (x, x.clone()), dynamic_shapes=shapes, options=inductor)
    assert [s.target for s in report.sites] == ["flex", "flex"]
    run = torch._inductor.aoti_load_package(package)
    for y in (x, randn(2, 700, 64)):
        torch.testing.assert_close(run(x, y), model(x, y), atol=1e-5, rtol=1e-5)


def test_inside_the_hook_it_is_left() -> None:
    torch._dynamo.reset()
    with torch.no_grad(), attn_pass.record() as report, attn_pass.enabled(choose="fused", targets=("flex",)):
        torch.compile(softcap)(*qkv(q_len=4, kv_len=4))
    assert [s.outcome for s in report.sites] == ["left"] and "hook" in report.sites[0].reason


def test_an_exported_program_stays_valid() -> None:
    model, x = Layer().eval(), randn(2, 40, 64)
    with torch.no_grad():
        program = torch.export.export(model, (x,))
        report = attn_pass.rewrite(program, choose="fused", on_error="raise")
        assert [s.target for s in report.sites] == ["flex"]
        torch.testing.assert_close(program.module()(x), model(x), atol=1e-5, rtol=1e-5)
