"""The target `cpu_kernel`: masks as bounds of its loops, masks that stay tensors, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from against_eager import NEG_INF, qkv, randn, same
from torch import Tensor
from torch._inductor.inductor_prims import force_stride_order

import attn_pass
from attn_pass.devices.cpu.kernel import build
from attn_pass.entries.transaction import compile_rewritten
from attn_pass.options import Runner

Keep = Callable[[Tensor, Tensor], Tensor]
HALF = (torch.bfloat16, torch.float16)

KEEPS: dict[str, Keep] = {
    "causal": lambda i, j: j <= i,
    "causal to the last key": lambda i, j: j <= i + 37,
    "window": lambda i, j: (j <= i) & (i - j < 9),
    "both sides": lambda i, j: (i - j).abs() <= 5,
    "some keys": lambda i, j: (j >= 3) & (j < 11),
    "chunks": lambda i, j: i // 16 == j // 16,
    "a prefix": lambda i, j: (j <= i) | (j < 20),
    "empty rows": lambda i, j: (j > i + 2) & (j < i + 9),
}


def masked(keep: Keep, fill: float = NEG_INF) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if k.shape[1] != q.shape[1]:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        scores = q @ k.mT * 0.3
        i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None]
        return torch.softmax(scores.masked_fill(~keep(i, j), fill), -1) @ v

    return run


def on_kernel(fn: Callable[..., Tensor], *inputs: Tensor, rewritten: int = 1, **more: object) -> attn_pass.Report:
    return same(fn, *inputs, rewritten=rewritten, choose="fused", targets=("cpu_kernel",), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("fill", [NEG_INF, -1e30])
@pytest.mark.parametrize("name", KEEPS)
def test_masks_of_positions(name: str, fill: float) -> None:
    for kv_heads, q_len, kv_len in ((2, 40, 40), (4, 33, 70), (1, 2, 50)):
        on_kernel(masked(KEEPS[name], fill), *qkv(2, 4, q_len, kv_len, kv_heads=kv_heads))


@pytest.mark.parametrize("name", KEEPS)
def test_lengths_that_are_not_known(name: str) -> None:
    on_kernel(masked(KEEPS[name]), *qkv(2, 4, 33, 70, kv_heads=2), dynamic=True)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", ["causal", "window", "empty rows"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    on_kernel(masked(KEEPS[name]), *qkv(2, 4, 33, 70, kv_heads=2, value_dim=24, dtype=dtype))


@pytest.mark.parametrize("name", KEEPS)
def test_bounds_take_no_tensor_of_scores(name: str) -> None:
    """A mask of positions alone is handed over as numbers: an interval of keys for each row."""
    graphs: list[str] = []

    def seen(gm: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(gm.code)
        return gm

    torch._dynamo.reset()
    fn = torch.compile(masked(KEEPS[name]), backend=attn_pass.wrap(seen, choose="fused", targets=("cpu_kernel",)))
    with torch.no_grad():
        fn(*qkv(1, 2, 33, 70))
    assert "keep = " not in graphs[-1]


def kernel_calls(fn: Callable[..., Tensor], *inputs: Tensor, runner: Runner = "inductor") -> list[torch.fx.Node]:
    calls: list[torch.fx.Node] = []

    def seen(gm: torch.fx.GraphModule, *_: object) -> torch.fx.GraphModule:
        calls.extend(n for n in gm.graph.nodes if n.target is torch.ops.attn_pass.attention.default)
        return gm

    options = attn_pass.Options(choose="fused", targets=("cpu_kernel",))
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(fn, backend=lambda gm, given: compile_rewritten(gm, given, options, seen, runner))(*inputs)
    return calls


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def in_one_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return torch.bmm(torch.bmm(q, k.mT).softmax(-1), v)


def merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return by_hand(q, k, v).transpose(1, 2).flatten(2)


def rows_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhls,bhsd->lbhd", (q @ k.mT).softmax(-1), v)


RESULTS: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "of the graph": (by_hand, True),
    "read as it lies": (lambda q, k, v: by_hand(q, k, v).as_strided((2, 4), (4, 1)), True),
    "in one batch": (in_one_batch, True),
    "of both": (lambda q, k, v: by_hand(q, k, v) + merged(q, k, v).unflatten(2, (4, -1)).transpose(1, 2), True),
    "merged": (merged, False),
    "of a call": (partial(F.scaled_dot_product_attention, scale=0.25), True),  # of the query's layout
    "of a call, queries with heads last": (
        lambda q, k, v: F.scaled_dot_product_attention(
            q.transpose(1, 2).contiguous().transpose(1, 2), k, v, scale=0.25
        ),
        False,
    ),
    "of one row": (lambda q, k, v: by_hand(q[:, :, :1], k, v), False),
    "rows first": (rows_first, True),
}


@pytest.mark.parametrize("name", RESULTS)
def test_the_result_lies_as_it_is_read(name: str) -> None:
    """By hand a result is contiguous: where that matters the kernel writes it so, and nothing is copied."""
    fn, heads_first = RESULTS[name]
    operands = qkv(2, 4, 33, 70)
    calls = kernel_calls(fn, *operands)
    assert {bool(call.kwargs.get("heads_first")) for call in calls} == (
        {True, False} if name == "of both" else {heads_first}
    )
    if heads_first:
        assert not any(n.target is torch.ops.aten.clone.default for n in calls[0].graph.nodes)
    on_kernel(fn, *operands, rewritten=len(calls))
    on_kernel(fn, *operands, rewritten=len(calls), dynamic=True)


@pytest.mark.parametrize("runner", ["inductor", "other"])
def test_a_table_with_heads_last_is_turned_once_for_all_layers(runner: Runner) -> None:
    """T5 looks its bias up by (row, key) and permutes (L, S, H): an element of it would be read at a time.

    Inductor computes it in its own order first.
    """

    def layers(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        place = 2 * torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])  # no distance, which is a vector
        bias = F.embedding(place.clamp(-8, 8) + 8, table).permute(2, 0, 1)[None]
        for _ in range(2):
            q = (q @ k.mT + bias).softmax(-1) @ v
        return q

    inputs = (*qkv(1, 4, 40, 70), randn(17, 4))
    first, second = (n.kwargs["bias"] for n in kernel_calls(layers, *inputs, runner=runner))
    assert first is second
    assert first.target is torch.ops.aten.clone.default
    assert first.kwargs == {"memory_format": torch.contiguous_format}
    assert (first.args[0].target is force_stride_order) == (runner == "inductor")
    on_kernel(layers, *inputs, rewritten=2)


def test_a_table_that_lies_with_gaps_is_copied_alone() -> None:
    """Its strides are none that a buffer of its size could have."""

    def run(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        return (q @ k.mT + table[:40, :70].permute(2, 0, 1)[None]).softmax(-1) @ v

    (node,) = kernel_calls(run, *qkv(1, 4, 40, 70), randn(50, 90, 4))
    assert node.kwargs["bias"].target is torch.ops.aten.clone.default
    assert not any(n.target is force_stride_order for n in node.graph.nodes)


def test_a_bias_of_rows_alone_is_not_copied() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return (q @ k.mT + bias.mT).tanh().softmax(-1) @ v

    (node,) = kernel_calls(run, *qkv(1, 4, 40, 70), randn(4, 2, 40)[:, :1])
    assert not any(n.target is torch.ops.aten.clone.default for n in node.graph.nodes)


def padded(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    causal = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    keep = causal & kept[:, None, None].bool()
    return (q @ k.mT * 0.2).masked_fill(~keep, -1e9).softmax(-1) @ v


def test_padding_stays_a_tensor_and_the_causal_mask_beside_it_does_not() -> None:
    kept = torch.ones(2, 50, dtype=torch.long)
    kept[0, :20] = 0
    report = on_kernel(padded, *qkv(2, 4, 50, 50), kept)
    assert report.sites[0].mask == "causal and padding"


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_what_is_added(dtype: torch.dtype) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return (q @ k.mT * 0.2 + bias).softmax(-1) @ v

    holes = randn(2, 1, 17, 70) < 0
    for bias in (
        randn(2, 1, 1, 70),
        randn(4, 17, 70),
        torch.zeros(2, 1, 17, 70).masked_fill(holes, NEG_INF),
        torch.zeros(2, 1, 17, 70).masked_fill(holes, torch.finfo(dtype).min),
        torch.full((2, 1, 17, 70), torch.finfo(dtype).min),
    ):
        on_kernel(run, *qkv(2, 4, 17, 70, dtype=dtype), bias.to(dtype))


def test_a_key_the_fill_hides_may_hold_anything() -> None:
    """As `masked_fill` does it: nothing is assumed of masked keys, also under numerics='strict'."""

    def run(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        return (q @ k.mT * 0.2).masked_fill(hidden, NEG_INF).softmax(-1) @ v.masked_fill(hidden.mT, 0.0)

    q, k, v = qkv(1, 2, 33, 70)
    hidden = torch.zeros(1, 1, 1, 70, dtype=torch.bool)
    hidden[..., 40:] = True
    k[:, :, 45] = float("nan")
    report = on_kernel(run, q, k, v, hidden, numerics="strict")
    assert report.sites[0].assumptions == ()


def test_calls_are_taken_too() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    on_kernel(run, *qkv(2, 4, 33, 70, kv_heads=2))


def soft_cap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = 30.0 * torch.tanh(q @ k.mT * 0.2 / 30.0)
    i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None]
    return scores.masked_fill(j > i, NEG_INF).softmax(-1) @ v


def weak_fill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None]
    return torch.where(j <= i, q @ k.mT * 0.2, -4.5).softmax(-1) @ v


@pytest.mark.parametrize("fn", [soft_cap, weak_fill])
def test_functions_of_the_scores(fn: Callable[..., Tensor]) -> None:
    for q_len in (33, 3):
        on_kernel(fn, *qkv(2, 4, q_len, 70))
    on_kernel(fn, *qkv(2, 4, 33, 70), dynamic=True)


CAP, SLOPE = 5.0, 0.3  # numbers of Python, which Dynamo makes symbolic where sizes are dynamic


def global_cap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (torch.tanh(q @ k.mT * SLOPE / CAP) * CAP).softmax(-1) @ v


def global_fill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None]
    return (q @ k.mT * SLOPE).masked_fill(j > i, -CAP).softmax(-1) @ v


def global_clamp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * SLOPE + CAP * SLOPE).clamp(max=CAP).softmax(-1) @ v


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fn", [global_cap, global_fill, global_clamp])
def test_symbolic_numbers_in_functions_of_the_scores(fn: Callable[..., Tensor], dtype: torch.dtype) -> None:
    on_kernel(fn, *qkv(2, 4, 33, 70, dtype=dtype), dynamic=True)


def test_a_function_that_makes_jumps_is_refused() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.floor(q @ k.mT).softmax(-1) @ v

    report = on_kernel(run, *qkv(), rewritten=0)
    assert report.sites[0].outcome == "left"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sinks(dtype: torch.dtype) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        scores = q @ k.mT * 0.2
        i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None]
        scores = scores.masked_fill(j > i, NEG_INF)
        both = torch.cat((scores, sink[None, :, None, None].expand(*scores.shape[:-1], 1)), -1)
        return both.softmax(-1)[..., :-1] @ v

    for q_len in (33, 3):
        on_kernel(run, *qkv(2, 4, q_len, 70, dtype=dtype), randn(4, dtype=dtype))


def test_float64_is_refused() -> None:
    report = on_kernel(masked(KEEPS["causal"]), *qkv(1, 2, 9, 9, dtype=torch.float64), rewritten=0)
    why = "the CPU kernel computes in float32, and this attention in float64"
    assert why in report.sites[0].refusals["cpu_kernel"]


WINDOW: Keep = lambda i, j: (j <= i) & (i - j < 64)


def explained(fn: Callable[..., Tensor], *inputs: Tensor, **options: object) -> attn_pass.SiteReport:
    torch._dynamo.reset()
    with torch.no_grad():
        (site,) = attn_pass.explain(fn, *inputs, attn_pass_options=options or None).sites  # type: ignore[arg-type]
    return site


def test_it_is_taken_where_inductor_compiles_the_graph_and_it_is_the_fastest() -> None:
    operands = qkv(2, 4, 600, 600, dim=64)
    assert explained(masked(WINDOW), *operands).target == "cpu_kernel"
    assert explained(masked(WINDOW), *operands, targets=("sdpa", "local")).target == "local"
    one_key = explained(masked(WINDOW), *qkv(1, 1, 1, 1))
    assert one_key.target == "single_key"
    assert one_key.predicted_us["cpu_kernel"] > one_key.predicted_us["single_key"]


def test_without_inductor_it_makes_an_offer_only_if_it_is_named() -> None:
    operands = qkv(2, 2, 300, 300)
    report = same(masked(WINDOW), *operands, choose="fused")
    assert "cpu_kernel" not in report.sites[0].refusals
    assert report.sites[0].target != "cpu_kernel"
    assert on_kernel(masked(WINDOW), *operands).sites[0].target == "cpu_kernel"


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No program is found any more; Inductor remembers what it found before."""
    from torch._inductor import cpp_builder

    kind = type(build.compiler)
    remembered = [build.compiler, *(f for f in vars(cpp_builder).values() if isinstance(f, kind))]
    monkeypatch.setenv("PATH", str(tmp_path))
    for f in remembered:
        f.cache_clear()
    yield
    for f in remembered:
        f.cache_clear()


def test_without_a_compiler_the_report_says_so_and_another_is_taken(without_compiler: None) -> None:
    site = explained(masked(WINDOW), *qkv(2, 4, 600, 600, dim=64))
    assert site.refusals["cpu_kernel"].startswith("no C++ compiler was found")
    assert site.target == "local"


def test_on_windows_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "sys", SimpleNamespace(platform="win32"))
    site = explained(masked(WINDOW), *qkv(2, 4, 600, 600, dim=64))
    assert site.refusals["cpu_kernel"] == "the CPU kernel needs GCC or Clang"
