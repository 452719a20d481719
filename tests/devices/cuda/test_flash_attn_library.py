"""The target flash_attn: the package itself, over a strict stand-in for its kernels, compared with the program."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flash_attn_stand_in
import pytest
import torch
from against_eager import NEG_INF, qkv, randn, same, same_each
from flash_attn_programs import (
    HALF,
    LONG,
    SQUARE,
    TAKEN,
    causal,
    keys,
    lowest,
    own,
    plain,
    site_of,
    top_left,
    weighted,
    window,
)

import attn_pass
from attn_pass.devices.cuda import flash_attn as target
from bench.gpu import stand_ins

stand_ins.install()
flash_attn_stand_in.import_or_skip()

Tensor = torch.Tensor
LOWEST = torch.finfo(torch.float32).min
OPERATOR = "flash_attn._flash_attn_forward.default"


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    with flash_attn_stand_in.present():
        yield


def capped(cap: Callable[[Tensor], Tensor], masked: bool = False) -> Callable[..., Tensor]:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if masked:
            return weighted(q, k, v, lambda s: cap(s).masked_fill(keys(k) > own(q, k), NEG_INF))
        return weighted(q, k, v, cap)

    return fn


def alibi(bias: Callable[[Tensor, Tensor], Tensor], masked: bool = False) -> Callable[..., Tensor]:
    """A bias made of a row's own place (L, 1) and the keys' (S)."""

    def fn(q: Tensor, k: Tensor, v: Tensor, *slopes: Tensor) -> Tensor:
        i, j = own(q, k), keys(k)

        def score(s: Tensor) -> Tensor:
            s = s + (bias(i, j) if not slopes else bias(i, j) * slopes[0])
            return s.masked_fill(j > i, NEG_INF) if masked else s

        return weighted(q, k, v, score)

    return fn


SLOPES = randn(4, seed=5).abs()
PER_HEAD = SLOPES[:, None, None]
PER_BATCH = randn(2, 4, 1, 1, seed=6)
CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    **TAKEN,
    "one row": (plain, qkv(2, 4, 1, 12, 16, kv_heads=2, dtype=HALF)),
    "one row, causal": (causal, qkv(2, 4, 1, 12, 16, dtype=HALF)),
    "one row, a window": (window(3, 0), qkv(2, 4, 1, 12, 16, dtype=HALF)),
    "window with a low fill": (window(2, 0, -6e4), LONG),
    "scores in float32": (lambda q, k, v: weighted(q, k, v, lambda s: s.float() * 0.5), LONG),
    "temperature": (
        lambda q, k, v, t: weighted(q, k, v, lambda s: s / t),
        (*LONG, randn(4, 1, 1, dtype=HALF).abs() + 0.5),
    ),
    "head dim of no multiple of 8": (causal, qkv(2, 4, 5, 12, 13, dtype=HALF)),
    "narrow values": (plain, qkv(2, 4, 5, 12, 24, value_dim=10, dtype=HALF)),
    "wide values": (plain, qkv(2, 4, 5, 12, 10, value_dim=24, dtype=HALF)),
    "rank 3": (
        lambda q, k, v: torch.bmm(torch.bmm(q, k.mT).softmax(-1), v),
        tuple(randn(4, n, 16, dtype=HALF) for n in (7, 12, 12)),
    ),
    "rank 5": (
        lambda q, k, v: (q @ k.mT).softmax(-1) @ v,
        tuple(randn(2, 3, 2, n, 16, dtype=HALF) for n in (7, 12, 12)),
    ),
    "heads last": (
        lambda q, k, v: causal(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2).reshape(2, 9, -1),
        tuple(x.transpose(1, 2).contiguous() for x in SQUARE),
    ),
    "shared keys": (
        lambda q, k, v: (q @ k.mT).softmax(-1) @ v,
        (randn(3, 4, 5, 16, dtype=HALF), *(randn(1, 4, 12, 16, dtype=HALF, seed=n) for n in (1, 2))),
    ),
    "keys by columns": (
        lambda q, k, v: (q @ k).softmax(-1) @ v,
        (LONG[0], LONG[1].mT.contiguous(), LONG[2]),
    ),
    "soft cap": (capped(lambda s: torch.tanh(s / 5.0) * 5.0), LONG),
    "soft cap, the number first": (capped(lambda s: 5.0 * torch.tanh(0.2 * s)), LONG),
    "soft cap in float32, causal": (capped(lambda s: 2.5 * torch.tanh(s.float() / 2.5), masked=True), LONG),
    "soft cap of the other sign": (capped(lambda s: -3.0 * torch.tanh(s / 3.0), masked=True), LONG),
    "soft cap, negated": (capped(lambda s: -(torch.tanh(s / 3.0) * 3.0), masked=True), LONG),
    "soft cap of negated scores": (capped(lambda s: torch.tanh(-s / 3.0) * 3.0, masked=True), LONG),
    "negative factor": (
        lambda q, k, v: weighted(q, k, v, lambda s: (s * -1.5).masked_fill(keys(k) > own(q, k), NEG_INF)),
        LONG,
    ),
    "soft cap twice of the other sign": (capped(lambda s: -3.0 * torch.tanh(s / -3.0), masked=True), LONG),
    "soft cap that is not the divisor": (capped(lambda s: torch.tanh(s) * 4.0, masked=True), LONG),
    "soft cap, scaled query": (
        lambda q, k, v: ((q * 0.25) @ k.mT / 3.0).tanh().mul(3.0).softmax(-1) @ v,
        LONG,
    ),
    "alibi": (alibi(lambda i, j: -(i - j).abs() * PER_HEAD), LONG),
    "alibi, another order": (alibi(lambda i, j: PER_HEAD * (j - i).abs().neg()), LONG),
    "alibi by float positions": (alibi(lambda i, j: (i.float() - j.float()).abs() * -PER_HEAD), LONG),
    "alibi of given slopes": (alibi(lambda i, j: -(i - j).abs()), (*LONG, PER_HEAD)),
    "alibi of slopes of a batch": (alibi(lambda i, j: -(i - j).abs()), (*LONG, PER_BATCH)),
    "alibi of one slope": (alibi(lambda i, j: -0.25 * (i - j).abs()), LONG),
    "alibi, causal": (alibi(lambda i, j: (j - i) * PER_HEAD, masked=True), LONG),
    "alibi, causal, another origin": (alibi(lambda i, j: (j - i - 3) * PER_HEAD, masked=True), LONG),
    "alibi, causal, both sides": (alibi(lambda i, j: -(i - j).abs() * PER_HEAD, masked=True), SQUARE),
    "alibi, causal, far origin": (alibi(lambda i, j: (j - i - 3).abs() * PER_HEAD, masked=True), LONG),
}


def test_it_equals_the_program() -> None:
    report = same_each(CASES, device="H200", targets=("flash_attn",))
    assert {site.target for site in report.sites} == {"flash_attn"}


def test_soft_cap_alibi_and_window_at_once() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        i, j = own(q, k), keys(k)
        keep = (j <= i) & (j >= i - 4)
        return weighted(
            q, k, v, lambda s: (4.0 * torch.tanh(s / 4.0) - slopes * (i - j).abs()).masked_fill(~keep, NEG_INF)
        )

    inputs = (*qkv(2, 4, 5, 12, 16, kv_heads=2, dtype=HALF), PER_HEAD)
    report = same(fn, *inputs, rewritten=1, device="H200", targets=("flash_attn",))
    assert report.sites[0].target == "flash_attn"


@pytest.mark.parametrize(
    "added",
    [
        lambda mask, distance: mask + distance * PER_HEAD,
        lambda mask, distance: mask - distance * -PER_HEAD,
        lambda mask, distance: mask - distance.abs() * PER_HEAD,
        lambda mask, distance: distance * PER_HEAD + mask,
    ],
)
def test_a_mask_that_is_added_with_the_bias(added: Callable[[Tensor, Tensor], Tensor]) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = own(q, k), keys(k)
        return weighted(q, k, v, lambda s: s.float() + added(torch.where(j > i, LOWEST, 0.0), j - i))

    assert same(fn, *LONG, rewritten=1, device="H200", targets=("flash_attn",)).sites[0].assumptions == ()


@pytest.mark.parametrize("name", ["plain", "causal from the last key", "soft cap in float32, causal"])
def test_sizes_may_be_symbolic(name: str) -> None:
    fn, inputs = CASES[name]
    marked = [x.clone() for x in inputs]
    for x in marked:
        torch._dynamo.mark_dynamic(x, 2)
    with attn_pass.record() as report:
        compiled = torch.compile(
            fn,
            backend=attn_pass.wrap(
                "aot_eager_default_partitioner", choose="fused", device="H200", targets=("flash_attn",)
            ),
        )
        for n in (0, 1):
            if n:
                marked = [torch.cat([x, x], 2) for x in marked]
            torch.testing.assert_close(compiled(*marked), fn(*marked), rtol=1e-2, atol=2e-3)
    assert [s.target for s in report.sites] == ["flash_attn"]


def emitted(fn: Callable[..., Tensor], *inputs: Tensor) -> torch.fx.Graph:
    """The graph the compiler is given."""
    graphs = []

    def keep(gm: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(gm.graph)
        return gm

    torch._dynamo.reset()
    options = {"choose": "fused", "device": "H200", "targets": ("flash_attn",), "on_error": "raise"}
    torch.compile(fn, backend=attn_pass.wrap(keep, **options))(*inputs)
    return graphs[0]


def test_operands_are_views_in_the_layout_of_the_kernel() -> None:
    graph = emitted(*(CASES["heads last"][0], *CASES["heads last"][1]))
    names = [str(n.target) for n in graph.nodes if n.op == "call_function"]
    assert names.count(OPERATOR) == 1
    assert not [n for n in names if "clone" in n or "contiguous" in n or "pad" in n or "copy" in n], names


def test_grouped_heads_go_to_the_kernel_as_they_are() -> None:
    fn, inputs = CASES["grouped"]
    (node,) = [n for n in emitted(fn, *inputs).nodes if str(n.target) == OPERATOR]
    values = [a.meta.get("example_value", a.meta.get("val")) for a in node.args[:3]]
    assert [tuple(v.shape) for v in values] == [(2, 5, 8, 16), (2, 12, 2, 16), (2, 12, 2, 16)]


# ---------------------------------------------------------------- training


def learned(inputs: tuple[Tensor, ...]) -> list[Tensor]:
    return [x.clone().requires_grad_(n < 3) for n, x in enumerate(inputs)]


@pytest.mark.parametrize(
    "name",
    [
        *("plain", "grouped", "causal from the last key", "window from the last key", "negative scale", "temperature"),
        *("soft cap in float32, causal", "soft cap of the other sign", "alibi of given slopes", "alibi, causal"),
        *("head dim of no multiple of 8", "narrow values"),
    ],
)
def test_in_training_its_own_backward_gives_the_gradients(name: str) -> None:
    fn, inputs = CASES[name]
    report = same(fn, *learned(inputs), rewritten=1, grad=True, device="H200", targets=("flash_attn",))
    assert report.sites[0].target == "flash_attn"


def test_in_a_checkpoint() -> None:
    from torch.utils.checkpoint import checkpoint

    fn, inputs = CASES["soft cap in float32, causal"]
    again = lambda q, k, v: checkpoint(fn, q, k, v, use_reentrant=False)
    same(again, *learned(inputs), rewritten=1, grad=True, device="H200", targets=("flash_attn",))


def test_a_gradient_of_the_slopes_is_not_lost() -> None:
    fn, inputs = CASES["alibi of given slopes"]
    wanted = [x.clone().requires_grad_() for x in inputs]
    same(fn, *wanted, rewritten=0, grad=True, device="H200", targets=("flash_attn",))


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["backend", "hook"])
def test_inductor_compiles_the_forward_and_the_backward(entry: str) -> None:
    fn, inputs = CASES["soft cap in float32, causal"]
    ours, eager = learned(inputs), learned(inputs)
    options = {"device": "H200", "choose": "fused", "targets": ("flash_attn",)}
    torch._dynamo.reset()
    with attn_pass.record() as report:
        if entry == "backend":
            result = torch.compile(fn, backend="attn_pass", options=options)(*ours)
        else:
            with attn_pass.enabled(**options):
                result = torch.compile(fn)(*ours)
        result.float().sum().backward()
    wanted = fn(*eager)
    wanted.float().sum().backward()
    assert [s.target for s in report.sites] == ["flash_attn"]
    torch.testing.assert_close(result, wanted, rtol=1e-2, atol=4e-3)
    for a, b in zip(ours, eager):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-2, atol=4e-3)


# ---------------------------------------------------------------- what it leaves


def tilted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weighted(q, k, v, lambda s: s + PER_HEAD * (keys(k) - own(q, k)))


def off_centre(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weighted(q, k, v, lambda s: s - PER_HEAD * (keys(k) - own(q, k) + 1).abs())


def too_near(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = own(q, k), keys(k)
    return weighted(q, k, v, lambda s: (s - PER_HEAD * (j - i + 2).abs()).masked_fill(j > i, NEG_INF))


def squared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weighted(q, k, v, lambda s: s - PER_HEAD * (keys(k) - own(q, k)) ** 2)


def two_slopes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    d = (keys(k) - own(q, k)).abs()
    return weighted(q, k, v, lambda s: s - PER_HEAD * d + 0.5 * torch.where(d > 3, -2.0, 0.0))


def chunked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weighted(q, k, v, lambda s: s.masked_fill(keys(k) // 4 != own(q, k) // 4, NEG_INF))


def below(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weighted(q, k, v, lambda s: s.masked_fill(keys(k) >= own(q, k) - 1, NEG_INF))


def padded(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return weighted(q, k, v, lambda s: s.masked_fill(~keep[:, None, None, :], NEG_INF))


REFUSED: dict[str, tuple[str, Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "float32": ("half precision", plain, qkv(2, 4, 5, 12, 16)),
    "wide heads": ("over 256", plain, qkv(2, 4, 5, 12, 264, dtype=HALF)),
    "causal from the first key": ("not aligned", top_left, LONG),
    "keys before the own": ("not aligned", below, SQUARE),
    "chunks": ("not a window of keys", chunked, SQUARE),
    "padding": ("not a window of keys", padded, (*LONG, torch.ones(2, 12, dtype=torch.bool))),
    "a bias": (
        "nor a multiple of the distance",
        lambda q, k, v, b: weighted(q, k, v, lambda s: s + b),
        (*LONG, PER_BATCH),
    ),
    "a window with more rows than keys": ("more rows than keys", window(2, 0), qkv(2, 4, 12, 5, 16, dtype=HALF)),
    "a fully masked row of numbers": (
        "the mean of the values",
        lowest,
        qkv(2, 4, 12, 5, 16, dtype=HALF),
    ),
    "a tilt without a mask": ("not aligned to the last key", tilted, LONG),
    "another centre": ("not aligned to the last key", off_centre, LONG),
    "a centre among the kept keys": ("not aligned to the last key", too_near, LONG),
    "distances rounded to half precision": (
        "nor a multiple of the distance",
        alibi(lambda i, j: (-(i - j).abs() * PER_HEAD).half()),
        LONG,
    ),
    "squared distances": ("nor a multiple of the distance", squared, LONG),
    "two biases": ("nor a multiple of the distance", two_slopes, LONG),
    "sigmoid": ("not a scale, bias or mask", capped(lambda s: 5.0 * torch.sigmoid(s)), LONG),
    "a clamp": ("clamp", capped(lambda s: s.clamp(-1.0, 1.0)), LONG),
    "tanh of a sum": ("not a scale, bias or mask", capped(lambda s: 5.0 * torch.tanh(s + 1.0)), LONG),
    "tanh and the score": ("", capped(lambda s: s + torch.tanh(s)), LONG),
    "tanh of tanh": ("not a scale, bias or mask", capped(lambda s: torch.tanh(torch.tanh(s))), LONG),
}
REFUSED["a bias"] = (REFUSED["a bias"][0], REFUSED["a bias"][1], (*LONG, randn(2, 4, 5, 12, dtype=HALF)))


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_it_refuses(name: str) -> None:
    why, fn, inputs = REFUSED[name]
    grad = any(x.requires_grad for x in inputs)
    report = same(fn, *inputs, rewritten=0, grad=grad, device="H200", targets=("flash_attn",))
    (site,) = report.sites
    assert why in site.refusals.get("flash_attn", site.reason), site


def test_only_where_it_is_installed_with_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "flash_attn" in site_of().predicted_us
    monkeypatch.setattr(target, "find_spec", lambda name: None if name == "flash_attn_2_cuda" else object())
    assert "not installed" in site_of().refusals["flash_attn"]


@pytest.mark.parametrize("device", ["cpu", "Ascend 910B", "TPU v4"])
def test_only_cuda_devices(device: str) -> None:
    assert "does not run on" in site_of(device=device).refusals["flash_attn"]


def test_an_empty_row_is_an_assumption() -> None:
    many = qkv(2, 4, 12, 5, 16, dtype=HALF)
    with attn_pass.record() as report:
        torch.compile(
            causal,
            backend=attn_pass.wrap(
                "aot_eager_default_partitioner", device="H200", choose="fused", targets=("flash_attn",)
            ),
        )(*many)
    assert report.sites[0].assumptions == ("a row fully masked with -inf gives 0, where the program gives NaN",)
    strict = site_of(causal, many, numerics="strict")
    assert "strict" in strict.refusals["flash_attn"]


def test_a_restriction_to_kernels_is_kept() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
            return plain(q, k, v)

    assert "sdpa_kernel allows only MATH" in site_of(fn).refusals["flash_attn"]


def test_a_package_cannot_hold_it(tmp_path: Path) -> None:
    class Step(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return plain(q, k, v)

    options = {"device": "H200", "targets": ["flash_attn"], "choose": "fused"}
    path = attn_pass.aot_compile(
        Step(), qkv(1, 2, 4, 4, 16, dtype=HALF), package_path=tmp_path / "s.pt2", options=options
    )
    (site,) = attn_pass.package_report(path).sites
    assert site.outcome == "left" and "runs without" in site.refusals["flash_attn"]


def test_an_installation_that_cannot_be_used_leaves_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", None)  # makes its import fail
    with pytest.warns(attn_pass.AttnPassWarning, match="cannot be used"), attn_pass.record() as report:
        backend = attn_pass.wrap(
            "aot_eager_default_partitioner", device="H200", choose="fused", targets=("flash_attn",)
        )
        fn = torch.compile(plain, backend=backend)
        torch.testing.assert_close(fn(*LONG), plain(*LONG))
    assert report.sites[0].outcome == "left"


# ---------------------------------------------------------------- when it is taken


@pytest.mark.parametrize("device", ["H200", "A100", "L4", "B200"])
@pytest.mark.parametrize("fn", [plain, causal], ids=["plain", "causal"])
@pytest.mark.parametrize("length", [64, 2048])
def test_torchs_own_kernel_is_the_cheaper_offer_where_it_can_do_the_same(
    device: str, fn: Callable[..., Tensor], length: int
) -> None:
    with torch.device("meta"):
        inputs = tuple(torch.empty(2, 16, length, 64, dtype=HALF) for _ in range(3))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=fn is causal)

    site = site_of(call, inputs, device=device)
    assert site.target != "flash_attn"
    assert site.predicted_us["flash_attn"] > site.predicted_us["sdpa"]


def test_a_soft_cap_of_a_long_sequence_is_taken() -> None:
    def capped_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (torch.tanh(q @ k.mT * 0.125 / 50.0) * 50.0).softmax(-1) @ v

    with torch.device("meta"):
        inputs = tuple(torch.empty(2, 16, 4096, 64, dtype=HALF) for _ in range(3))
    assert site_of(capped_alone, inputs, device="A100").target == "flash_attn"
