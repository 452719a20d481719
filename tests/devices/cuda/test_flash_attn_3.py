"""The target flash_attn_3, over a strict stand-in for its kernels, compared with the program and float64."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flash_attn_3_stand_in as stand_in
import pytest
import torch
from against_eager import NEG_INF, qkv, randn, same, same_each
from flash_attn_programs import (
    BFLOAT,
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
from attn_pass.devices.cuda import flash_attn
from bench.gpu import stand_ins

stand_ins.install()

Tensor = torch.Tensor
OPERATOR = "flash_attn_3._flash_attn_forward.default"


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    with stand_in.present():
        yield


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weighted(q, k, v, lambda s: 5.0 * torch.tanh(s / 5.0))


def capped_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weighted(q, k, v, lambda s: (5.0 * torch.tanh(s / 5.0)).masked_fill(keys(k) > own(q, k), NEG_INF))


def one_row(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Without the dimension of size 1, whose stride means nothing and is another one."""
    return lambda q, k, v: fn(q, k, v).squeeze(2)


def heads_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def fused_projection(x: Tensor) -> Tensor:
    return causal(*x.view(2, 9, 3, 4, 16).permute(2, 0, 3, 1, 4).unbind(0))


def sliced(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rows that begin at odd places."""
    return causal(*(x[..., 1:17] for x in (q, k, v)))


def shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(q, k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1))


CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    **TAKEN,
    "one row, causal": (one_row(causal), qkv(2, 4, 1, 12, 16, dtype=HALF)),
    "one row, a window": (one_row(window(3, 0)), qkv(2, 4, 1, 12, 16, dtype=HALF)),
    "one key": (plain, qkv(2, 4, 5, 1, 16, dtype=HALF)),
    "soft cap": (capped, LONG),
    "soft cap, causal": (capped_causal, SQUARE),
    "a head dim of 20": (causal, qkv(2, 4, 9, 9, 20, dtype=HALF)),
    "narrow values": (causal, qkv(2, 4, 9, 9, 40, value_dim=24, dtype=HALF)),
    "wide values": (plain, qkv(1, 2, 5, 7, 24, value_dim=300, dtype=HALF)),
    "192 and 128": (causal, qkv(1, 2, 5, 5, 192, value_dim=128, dtype=HALF)),
    "no such pair": (causal, qkv(1, 2, 5, 5, 96, value_dim=64, dtype=HALF)),
    "heads last": (heads_last, tuple(x.transpose(1, 2).contiguous() for x in SQUARE)),
    "fused projection": (fused_projection, (randn(2, 9, 192, dtype=HALF),)),
    "rows at odd places": (sliced, qkv(2, 4, 9, 9, 19, dtype=HALF)),
    "keys shared over the batch": (shared, (LONG[0], LONG[1][:1], LONG[2][:1])),
}
NO_GRADIENT = ("wide values",)  # more than 256 have no backward


ASKED: dict[str, Any] = {"device": "H200", "targets": ("flash_attn_3",), "poor_cases": ()}


def test_it_equals_the_program() -> None:
    report = same_each(CASES, **ASKED)
    assert {site.target for site in report.sites} == {"flash_attn_3"}


def test_its_gradients_equal_the_programs() -> None:
    trained = {
        name: (fn, [x.detach().requires_grad_() for x in inputs])
        for name, (fn, inputs) in CASES.items()
        if name not in NO_GRADIENT
    }
    report = same_each(trained, grad=True, **ASKED)
    assert {site.target for site in report.sites} == {"flash_attn_3"}


def graph_of(fn: Callable[..., Tensor], *inputs: Tensor) -> torch.fx.Graph:
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    options: dict[str, Any] = {"device": "H100", "targets": ("flash_attn_3",), "choose": "fused", "on_error": "raise"}
    with torch.no_grad():
        torch.compile(fn, backend=attn_pass.wrap(keep, **options))(*inputs)
    return graphs[0].graph


@pytest.mark.parametrize("name", ["plain", "causal", "grouped", "192 and 128", "heads last", "fused projection"])
def test_operands_are_passed_with_their_strides(name: str) -> None:
    fn, inputs = CASES[name]
    graph = graph_of(fn, *inputs)
    (call,) = [n for n in graph.nodes if str(n.target) == OPERATOR]
    above: list[torch.fx.Node] = list(call.all_input_nodes)
    for node in above:
        above += node.all_input_nodes
    assert {n.op for n in above} == {"call_function", "placeholder"} or {n.op for n in above} == {"placeholder"}
    copying = ("clone", "contiguous", "constant_pad_nd", "copy", "cat", "to.dtype")
    assert not [n for n in above if any(word in str(n.target) for word in copying)]


@pytest.mark.parametrize("name", ["plain", "causal", "window from the last key", "soft cap"])
def test_lengths_may_be_symbolic(name: str) -> None:
    fn, inputs = CASES[name][0], tuple(x.clone() for x in CASES[name][1])
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(inputs[1], 2)
    torch._dynamo.mark_dynamic(inputs[2], 2)
    torch._dynamo.reset()
    options: dict[str, Any] = {"device": "H100", "targets": ("flash_attn_3",), "choose": "fused", "on_error": "raise"}
    compiled = torch.compile(fn, backend=attn_pass.wrap("aot_eager_default_partitioner", **options), fullgraph=True)
    with attn_pass.record() as report, torch.no_grad():
        rows = inputs[0].size(2)
        for batch, length in ((2, inputs[1].size(2)), (3, max(rows, 17)), (5, 30)):
            given = qkv(batch, 4, rows, length, 16, dtype=HALF)
            torch.testing.assert_close(compiled(*given), fn(*given), atol=4e-3, rtol=4e-3)
    assert {s.target for s in report.sites} <= {"flash_attn_3", None}


# ---------------------------------------------------------------- what it refuses


def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])[:, None, None]
    return weighted(q, k, v, lambda s: s - slopes * (keys(k) - own(q, k)).abs())


def padding(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keep = (torch.arange(12) < torch.tensor([[12], [7]]))[:, None, None]
    return weighted(q, k, v, lambda s: s.masked_fill(~keep, NEG_INF))


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5)


def sinking(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.cat([q @ k.mT * 0.3, q.new_ones(4, 1, 1).expand(2, -1, 5, -1)], -1)
    return scores.softmax(-1)[..., :-1] @ v


REFUSED: dict[str, tuple[str, Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "float32": ("half precision", plain, qkv(2, 4, 5, 12, 16)),
    "wide heads": ("no kernel for head dims 264", plain, qkv(2, 4, 5, 12, 264, dtype=HALF)),
    "wide values in training": (
        "no kernel for head dims 24 and 300",
        plain,
        qkv(1, 2, 5, 7, 24, value_dim=300, dtype=HALF, grad=True),
    ),
    "wide values beside 72": (
        "no kernel for head dims 72 and 300",
        plain,
        qkv(1, 2, 5, 7, 72, value_dim=300, dtype=HALF),
    ),
    "ALiBi": ("takes no ALiBi slopes", alibi, LONG),
    "causal from the first key": ("not aligned", top_left, LONG),
    "padding": ("not a window of keys", padding, LONG),
    "dropout": ("has no dropout", dropped, LONG),
    "a sink": ("takes no sink", sinking, LONG),
    "a window with more rows than keys": ("more rows than keys", window(2, 0), qkv(2, 4, 12, 5, 16, dtype=HALF)),
    "a fully masked row of numbers": ("and 0 in flash_attn_3", lowest, qkv(2, 4, 12, 5, 16, dtype=HALF)),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_it_refuses(name: str) -> None:
    why, fn, inputs = REFUSED[name]
    site = site_of(fn, inputs, targets=("flash_attn_3",), choose="fused")
    assert site.outcome == "left" and why in site.refusals.get("flash_attn_3", site.reason), site


@pytest.mark.parametrize(
    ("device", "why"),
    [
        ("A100", "this device has 8.0"),
        ("L4", "this device has 8.9"),
        ("B200", "this device has 10.0"),
        ("cpu", "does not run on cpu"),
    ],
)
def test_only_hopper(device: str, why: str) -> None:
    assert why in site_of(device=device).refusals["flash_attn_3"]


def test_only_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "flash_attn_3" in site_of().predicted_us
    monkeypatch.setattr(flash_attn, "find_spec", lambda name: None if name == "flash_attn_interface" else object())
    assert "(flash_attn_interface) is not installed" in site_of().refusals["flash_attn_3"]


def test_wide_heads_have_no_deterministic_backward() -> None:
    wide = qkv(1, 2, 5, 5, 200, dtype=HALF, grad=True)
    only: dict[str, Any] = {"targets": ("flash_attn_3",), "choose": "fused"}
    assert site_of(plain, wide, **only).target == "flash_attn_3"
    torch.use_deterministic_algorithms(True)
    try:
        assert "up to 192" in site_of(plain, wide, **only).refusals["flash_attn_3"]
        assert site_of(plain, qkv(1, 2, 5, 5, 192, dtype=HALF, grad=True), **only).target == "flash_attn_3"
        assert site_of(plain, tuple(x.detach() for x in wide), **only).target == "flash_attn_3"
    finally:
        torch.use_deterministic_algorithms(False)


def test_deterministic_algorithms_that_only_warn_refuse_nothing() -> None:
    """Neither the target nor the kernel, which is told by what was decided."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        wide = qkv(1, 2, 5, 5, 200, dtype=HALF, grad=True)
        same(plain, *wide, grad=True, rewritten=1, device="H100", targets=("flash_attn_3",))
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_package_cannot_hold_it(tmp_path: Path) -> None:
    class Step(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return plain(q, k, v)

    options = {"device": "H100", "targets": ("flash_attn_3",), "choose": "fused"}
    report = attn_pass.explain(Step(), *LONG, attn_pass_options=options, attn_pass_aot=True)
    assert "schema that no graph can hold" in report.sites[0].refusals["flash_attn_3"]


def test_no_graph_can_hold_the_operator_beneath() -> None:
    """The reason why packages do without: it is torch's, of the schema that upstream has."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.flash_attn_3.fwd(q, k, v, num_splits=1)[0]  # type: ignore[no-any-return]

    library = torch.library.Library("flash_attn_3", "FRAGMENT")
    torch.library.register_fake("flash_attn_3::fwd", lambda q, *_, **__: (torch.empty_like(q),) * 4, lib=library)
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match="output has alias annotations"):
        torch.compile(fn, backend="aot_eager")(*(x.transpose(1, 2).contiguous() for x in SQUARE))


def test_an_empty_row_is_an_assumption() -> None:
    many = qkv(2, 4, 12, 5, 16, dtype=HALF)
    site = site_of(causal, many, targets=("flash_attn_3",), choose="fused")
    assert site.assumptions == ("a row fully masked with -inf gives 0, where the program gives NaN",)
    assert "strict" in site_of(causal, many, numerics="strict").refusals["flash_attn_3"]


# ---------------------------------------------------------------- when it is taken


def meta(*shape: int) -> tuple[Tensor, ...]:
    with torch.device("meta"):
        return tuple(torch.empty(*shape, dtype=BFLOAT) for _ in range(3))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_it_is_predicted_faster_than_cudnn_and_that_than_flash(dim: int) -> None:
    predicted = site_of(plain, meta(4, 16, 8192, dim)).predicted_us
    if dim <= 128:  # what cuDNN is known to be right for
        assert predicted["flash_attn_3"] < predicted["cudnn"] < predicted["flash"]
    assert predicted["flash_attn_3"] < predicted["flash"]


def test_a_short_sequence_is_not_worth_its_python() -> None:
    predicted = site_of(plain, meta(1, 4, 128, 64)).predicted_us
    assert predicted["flash_attn_3"] > predicted["cudnn"]


# ---------------------------------------------------------------- the stand-in itself


@pytest.mark.skipif(not stand_in.UPSTREAM, reason="ATTN_PASS_FLASH_ATTN_3 names no checkout")
def test_the_schemas_are_upstreams() -> None:
    source = stand_in.upstream_source("flash_api_stable.cpp")
    for name, schema in stand_in.SCHEMAS.items():
        match = re.search(rf'm\.def\("{name}\((.*?)\);', source, re.DOTALL)
        assert match is not None
        assert "".join(re.findall(r'"([^"]*)"', f'"{name}({match[1]}')) == schema
    for name, schema in stand_in.PYTHON_SCHEMAS.items():
        assert str(getattr(torch.ops.flash_attn_3, name).default._schema) == f"flash_attn_3::{schema}"
    with stand_in.present() as interface:
        assert stand_in.parameters(interface.flash_attn_func) == stand_in.parameters(stand_in.flash_attn_func)


def test_it_raises_where_the_kernel_does() -> None:
    q, k, v = (x.transpose(1, 2).contiguous() for x in LONG)
    call = torch.ops.flash_attn_3._flash_attn_forward
    for wrong in (
        (q.float(), k.float(), v.float()),
        (q, k.bfloat16(), v),
        (q[..., :12], k[..., :12], v),
        (q[..., :15], k[..., :15], v),
        (q, k[:1], v[:1]),
        (q, k[:, :, :3], v[:, :, :3]),
        (q.transpose(1, 3), k, v),
        (q.repeat(1, 1, 1, 17), k.repeat(1, 1, 1, 17), v),
        (q.repeat(1, 1, 1, 5), k.repeat(1, 1, 1, 5), v),
        (q, k[:, :1].expand(-1, 12, -1, -1), v),
    ):
        with pytest.raises(stand_in.Refused):
            call(*wrong, softmax_scale=0.3)
