"""Calls of flash-attn's functions: captured from the package itself, over a stand-in for its kernels, and read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import flash_attn_stand_in
import pytest
import torch
from against_eager import NEG_INF, randn, same

import attn_pass
from bench.gpu import stand_ins

stand_ins.install()
flash_attn = flash_attn_stand_in.import_or_skip()

Tensor = torch.Tensor
HALF = torch.float16
SLOPES, PER_BATCH = randn(4, seed=5).abs(), randn(2, 4, seed=6).abs()


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    with flash_attn_stand_in.present():
        yield


def operands(q_len: int = 5, kv_len: int = 12, kv_heads: int = 4, dim: int = 16, dtype: torch.dtype = HALF) -> Any:
    """Query, key and value (B, L, H, D)."""
    return (
        randn(2, q_len, 4, dim, dtype=dtype, seed=1),
        randn(2, kv_len, kv_heads, dim, dtype=dtype, seed=2),
        randn(2, kv_len, kv_heads, dim, dtype=dtype, seed=3),
    )


def documented(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """What the documentation of flash_attn_func says, (B, L, H, D), a fully masked row 0."""
    groups = q.size(2) // k.size(2)
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scores = torch.einsum("blhd,bshd->bhls", q, k) * (softmax_scale or q.size(3) ** -0.5)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    i = torch.arange(q.size(1))[:, None] + k.size(1) - q.size(1)
    j = torch.arange(k.size(1))
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.reshape(-1, q.size(2), 1, 1) * (i - j).abs()
    left, right = window_size
    keep = torch.ones(q.size(1), k.size(1), dtype=torch.bool)
    if causal:
        right = 0
    if left >= 0:
        keep = keep & (j >= i - left)
    if right >= 0:
        keep = keep & (j <= i + right)
    weights = scores.masked_fill(~keep, NEG_INF).softmax(-1).masked_fill(~keep.any(-1)[:, None], 0.0)
    return torch.einsum("bhls,bshd->blhd", weights, v)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"softmax_scale": 0.7},
    "causal": {"causal": True},
    "window": {"window_size": (3, 1)},
    "causal window": {"window_size": (3, 5), "causal": True},
    "window without a start": {"window_size": (-1, 2)},
    "window without an end": {"window_size": (2, -1)},
    "window of nothing but itself": {"window_size": (0, 0)},
    "wide window": {"window_size": (64, 64)},
    "soft cap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": SLOPES},
    "alibi of a batch": {"alibi_slopes": PER_BATCH},
    "alibi, causal": {"alibi_slopes": SLOPES, "causal": True},
    "all at once": {"alibi_slopes": PER_BATCH, "causal": True, "softcap": 2.0, "window_size": (4, -1)},
}
UNDOCUMENTED = ("more rows", "window without an end")  # the kernel's limit of kv_len keys behind the row's own shows
LENGTHS = {"square": (9, 9), "long": (5, 12), "one row": (1, 12), "more rows": (12, 9)}


def called(settings: dict[str, Any]) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """The call, and what it is to compute."""
    return (
        lambda q, k, v: flash_attn.flash_attn_func(q, k, v, **settings),
        lambda q, k, v: documented(q, k, v, **settings),
    )


@pytest.mark.parametrize("name", list(SETTINGS))
@pytest.mark.parametrize("lengths", list(LENGTHS))
def test_the_stand_in_computes_what_is_documented_and_its_gradients(name: str, lengths: str) -> None:
    if (lengths, name) == UNDOCUMENTED:
        pytest.skip("it is another function there")
    call, exact = called(SETTINGS[name])
    inputs = [x.requires_grad_() for x in operands(*LENGTHS[lengths], kv_heads=2)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    result, wanted = call(*inputs), exact(*wide)
    upstream = randn(*wanted.shape, seed=9)
    torch.testing.assert_close(result.double(), wanted, rtol=1e-3, atol=1e-3)
    gradients = torch.autograd.grad(result, inputs, upstream.to(HALF))
    for a, b in zip(gradients, torch.autograd.grad(wanted, wide, upstream.double())):
        torch.testing.assert_close(a.double(), b, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("name", list(SETTINGS))
@pytest.mark.parametrize(
    ("target", "lengths"),
    [
        ("flash_attn", "long"),
        ("flash_attn", "one row"),
        ("flash_attn", "more rows"),
        ("sdpa", "long"),
        ("sdpa", "more rows"),
    ],
)
def test_a_call_is_read_as_what_it_computes(name: str, lengths: str, target: str) -> None:
    call, exact = called(SETTINGS[name])
    capped = "softcap" in SETTINGS[name]
    windowed = lengths == "more rows" and "window_size" in SETTINGS[name] and name != "wide window"
    taken = not capped if target == "sdpa" else not windowed
    if target == "sdpa":
        call_options: dict[str, Any] = {"targets": ("sdpa",)}
    else:
        call_options = {"targets": ("flash_attn",), "device": "H200"}
    reference: Any = False if (lengths, name) == UNDOCUMENTED else exact
    report = same(call, *operands(*LENGTHS[lengths]), rewritten=int(taken), reference=reference, **call_options)
    (site,) = report.sites
    assert (site.form, site.kind) == ("flash_attn", "attention")
    assert (site.target == target) is taken, site


@pytest.mark.parametrize("settings", [{"window_size": (2, -1)}, {"window_size": (-1, 40)}, {"window_size": (1, 3)}])
def test_windows_of_many_more_rows_than_keys_are_as_the_kernel_has_them(settings: dict[str, Any]) -> None:
    call, _ = called(settings)
    same(call, *operands(40, 6), rewritten=1, reference=False, targets=("sdpa",))


def test_grouped_heads() -> None:
    call, exact = called({"causal": True})
    same(call, *operands(kv_heads=2), rewritten=1, reference=exact, targets=("sdpa",))


def test_a_head_dim_of_no_multiple_of_8_is_padded_by_the_package() -> None:
    call, exact = called({"causal": True})
    same(call, *operands(dim=13), rewritten=1, reference=exact, targets=("sdpa",))


@pytest.mark.parametrize("form", ["qkvpacked", "kvpacked"])
def test_packed_operands(form: str) -> None:
    q, k, v = operands(9, 9)
    exact = called({"causal": True})[1]
    if form == "qkvpacked":
        same(
            lambda x: flash_attn.flash_attn_qkvpacked_func(x, causal=True),
            torch.stack([q, k, v], 2),
            rewritten=1,
            reference=lambda x: exact(*x.unbind(2)),
            targets=("sdpa",),
        )
    else:
        same(
            lambda q, x: flash_attn.flash_attn_kvpacked_func(q, x, causal=True),
            *(q, torch.stack([k, v], 2)),
            rewritten=1,
            reference=lambda q, x: exact(q, *x.unbind(2)),
            targets=("sdpa",),
        )


def test_the_operator_itself() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        forward = torch.ops.flash_attn._flash_attn_forward
        return forward(q, k, v, 0.0, 0.25, True, -1, -1, 0.0, None, False)[0] * 2

    exact = called({"causal": True})[1]
    same(fn, *operands(), rewritten=1, reference=lambda q, k, v: exact(q, k, v) * 2, targets=("sdpa",))


def test_a_scaled_query_and_values_written_before() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        v = v.clone()
        v[:, 3:] = 0.5
        return flash_attn.flash_attn_func(q * 0.5, k, v, softmax_scale=0.5)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        v = v.clone()
        v[:, 3:] = 0.5
        return documented(q * 0.5, k, v, softmax_scale=0.5)

    same(fn, *operands(), rewritten=1, reference=exact, targets=("sdpa",))


@pytest.mark.parametrize("dynamic", [None, True])
def test_sizes_may_be_symbolic(dynamic: bool | None) -> None:
    call, exact = called({"causal": True, "softmax_scale": 0.25})
    torch._dynamo.reset()
    with attn_pass.record() as report:
        backend = attn_pass.wrap("aot_eager_default_partitioner", choose="fused", targets=("sdpa",), on_error="raise")
        compiled = torch.compile(call, backend=backend, dynamic=dynamic)
        for n, lengths in enumerate(((7, 11), (9, 30), (10, 31), (11, 32))):
            inputs = tuple(torch.cat([x] * (n + 1)) for x in operands(*lengths))
            wanted = exact(*(x.double() for x in inputs))
            torch.testing.assert_close(compiled(*inputs).double(), wanted, rtol=1e-3, atol=1e-3)
    assert {s.outcome for s in report.sites} == {"rewritten"}
    assert isinstance(report.sites[-1].shapes["key"][2], str)


def test_a_default_scale_of_a_symbolic_head_dim() -> None:
    call, exact = called({"causal": True})
    same(call, *operands(), rewritten=1, dynamic=True, reference=exact, targets=("sdpa",))


# ---------------------------------------------------------------- copies around the call


def around(settings: dict[str, Any]) -> Callable[..., Tensor]:
    """Heads first, as most models hold them, with copies into the layout that the documentation shows."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        out = flash_attn.flash_attn_func(q, k, v, **settings)
        return out.reshape(out.size(0), out.size(1), -1) @ torch.eye(out.size(2) * out.size(3), dtype=out.dtype)

    return fn


def compiled_graph(fn: Callable[..., Tensor], inputs: tuple[Tensor, ...], **options: Any) -> torch.fx.Graph:
    """Not run: what is decided for a GPU's sizes takes the stand-ins seconds to compute."""
    graphs = []

    def keep(gm: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(gm.graph)
        return lambda *_: (None,)

    torch._dynamo.reset()
    torch.compile(fn, backend=attn_pass.wrap(keep, on_error="raise", **options), fullgraph=True)(*inputs)
    return graphs[0]


@pytest.mark.parametrize(
    ("settings", "target"),
    [({"causal": True}, "cudnn"), ({"softcap": 30.0, "causal": True}, "flash_attn"), ({"window_size": (64, 0)}, "")],
)
def test_copies_around_a_call_go(settings: dict[str, Any], target: str) -> None:
    def inputs(heads: int, length: int) -> tuple[Tensor, ...]:
        return tuple(randn(2, heads, length, 64, dtype=HALF, seed=n) for n in range(3))

    with attn_pass.record() as report:
        graph = compiled_graph(around(settings), inputs(16, 512), device="H200")
    (site,) = report.sites
    assert site.outcome == "rewritten" and target in site.target, site
    names = [f"{n.target}" for n in graph.nodes if n.op in ("call_function", "call_method")]
    assert not [n for n in names if "contiguous" in n or "clone" in n], names
    same(around(settings), *inputs(2, 72), rewritten=1, reference=False, device="H200", targets=(site.target,))


def test_a_call_without_copies_that_torch_cannot_do_is_left_as_it_is() -> None:
    call, _ = called({"softcap": 30.0})
    with attn_pass.record() as report:
        compiled_graph(call, operands(2048, 2048), device="H200")
    (site,) = report.sites
    assert site.outcome == "left" and "already the cheapest form" in site.reason


# ---------------------------------------------------------------- exported programs


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("target", ["sdpa", "flash_attn"])
def test_an_exported_program(strict: bool, target: str) -> None:
    class Net(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flash_attn.flash_attn_func(q, k, v, causal=True)

    inputs = operands()
    program = torch.export.export(Net(), inputs, strict=strict)
    options = {"choose": "fused", "targets": (target,), "on_error": "raise"}
    with attn_pass.record() as report:
        attn_pass.rewrite(program, **options, device="H200" if target == "flash_attn" else None)
    assert [s.target for s in report.sites] == [target]
    wanted = documented(*(x.double() for x in inputs), causal=True)
    torch.testing.assert_close(program.module()(*inputs).double(), wanted, rtol=1e-3, atol=1e-3)


# ---------------------------------------------------------------- what is left


def left(fn: Callable[..., Any], *inputs: Tensor, **options: Any) -> str:
    """The reason; that the program computes what it did is checked."""
    report = same(fn, *inputs, rewritten=0, reference=False, **options)
    (site,) = report.sites
    assert (site.form, site.outcome, site.kind) == ("flash_attn", "left", "attention")
    return site.reason


def test_logarithms_that_are_used() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)[:2]

    assert "logarithm" in left(fn, *operands())


def test_logarithms_that_nobody_takes() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)[0]

    same(fn, *operands(), rewritten=1, reference=documented, targets=("sdpa",))


def test_dropout() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.flash_attn._flash_attn_forward(q, k, v, 0.1, 0.25, False, -1, -1, 0.0, None, False)[0]

    with torch.device("meta"):
        inputs = tuple(torch.empty(2, 8, 4, 16, dtype=HALF) for _ in range(3))
    for device in ("cpu", "H200"):
        site = attn_pass.explain(fn, *inputs, attn_pass_options={"device": device}).sites[0]
        assert "dropout" in site.refusals["flash_attn" if device == "H200" else "sdpa"]


@pytest.mark.parametrize("name", ["plain", "all at once"])
def test_in_training_the_call_stays(name: str) -> None:
    call, exact = called(SETTINGS[name])
    inputs = [x.requires_grad_() for x in operands()]
    report = same(call, *inputs, rewritten=0, grad=True, reference=exact, twice=8.0, device="H200")
    (site,) = report.sites
    assert site.form == "flash_attn" and "in training" in site.reason


def test_sequences_of_several_lengths() -> None:
    q, k, v = (randn(11, 4, 16, dtype=HALF, seed=n) for n in range(3))
    ends = torch.tensor([0, 4, 11], dtype=torch.int32)

    def fn(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
        return flash_attn.flash_attn_varlen_func(q, k, v, ends, ends, 7, 7, causal=True)

    assert "several lengths" in left(fn, q, k, v, ends)


ENDS = torch.tensor([0, 4, 11], dtype=torch.int32)


def several(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = flash_attn.flash_attn_varlen_func(q, k, v, ENDS, ENDS, 7, 7, causal=True)
    return out.view(11, -1)  # which only a result in the layout of the copied query allows


def copies_in(graph: torch.fx.Graph) -> int:
    (call,) = [n for n in graph.nodes if "varlen_forward" in str(n.target)]
    return sum("contiguous" in str(n.target) for n in call.args[:3])  # type: ignore[union-attr]


def test_sequences_of_several_lengths_lose_the_copies_around_them() -> None:
    def packed(qkv: Tensor) -> Tensor:
        return several(*(x.contiguous() for x in qkv.unbind(1)))

    qkv = randn(11, 3, 4, 16, dtype=HALF)
    with attn_pass.record() as report:
        graph = compiled_graph(packed, (qkv,), device="H200")
    assert copies_in(graph) == 0
    assert (report.sites[0].outcome, report.sites[0].target) == ("rewritten", "flash_attn")
    same(packed, qkv, rewritten=1, reference=False, device="H200")


def test_copies_that_a_kernel_needs_stay() -> None:
    def heads_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return several(*(x.transpose(0, 1).contiguous() for x in (q, k, v)))

    def last_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return several(*(x.transpose(1, 2).contiguous() for x in (q, k, v)))

    def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        copies = [x.clone() for x in (q, k, v)]
        k.mul_(2)
        return several(*copies)

    for fn, shape, left_over in (
        (heads_first, (4, 11, 16), 1),
        (last_first, (11, 16, 4), 3),
        (several, (11, 4, 16), 0),
    ):
        inputs = tuple(randn(*shape, dtype=HALF, seed=n) for n in range(3))
        assert copies_in(compiled_graph(fn, inputs, device="H200")) == left_over, fn
        same(fn, *inputs, reference=False, device="H200")
    same(written, *(randn(11, 4, 16, dtype=HALF, seed=n) for n in range(3)), reference=False, device="H200")


def test_a_query_written_before_the_result_is_taken() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.ops.flash_attn._flash_attn_forward(q, k, v, 0.0, 0.25, False, -1, -1, 0.0, None, False)
        q.zero_()
        return out[0]

    same(fn, *operands(), reference=False, targets=("sdpa",))


def test_a_tuple_that_goes_elsewhere() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return torch.ops.flash_attn._flash_attn_forward(q, k, v, 0.0, 0.25, False, -1, -1, 0.0, None, False)

    assert left(fn, *operands()) != ""


def test_under_autocast_to_another_dtype_the_library_is_not_called_anew() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return flash_attn.flash_attn_func(q, k, v)

    report = same(fn, *operands(), rewritten=0, reference=documented, device="H200", targets=("flash_attn", "sdpa"))
    assert "autocast" in report.sites[0].refusals["flash_attn"]
