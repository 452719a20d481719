"""The target flex_flash: what it accepts and refuses; torch's own checks; its results as products and a softmax."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flash_attn_4_signatures as published
import pytest
import torch
from against_eager import NEG_INF, qkv, same

import attn_pass
from attn_pass.compat import TORCH_VERSION
from attn_pass.devices import registry
from attn_pass.devices.cuda import flash_attn, flex_flash
from attn_pass.targets.base import Setting

pytestmark = pytest.mark.skipif(TORCH_VERSION < (2, 13), reason="the target is for torch 2.13 and newer")
Tensor = torch.Tensor
HALF = torch.bfloat16
BIG: dict[str, Any] = {"q_len": 256, "kv_len": 256, "dim": 64, "dtype": HALF}
ONLY: dict[str, Any] = {"targets": ("flex_flash",), "choose": "fused"}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if flash_attn.cute were there: for attn_pass, and for torch's own check."""
    flash = pytest.importorskip("torch._inductor.kernel.flex.flex_flash_attention")
    monkeypatch.setattr(flash_attn, "find_spec", lambda name: object() if name == "flash_attn.cute" else None)
    monkeypatch.setattr(flash, "ensure_flash_available", lambda: True)


def positions(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(q.size(-2))[:, None], torch.arange(k.size(-2))[None]


def masked(keep: Callable[[Tensor, Tensor], Tensor], cap: bool = False) -> Callable[..., Tensor]:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * 0.25
        scores = torch.tanh(scores / 5.0) * 5.0 if cap else scores
        return scores.masked_fill(~keep(*positions(q, k)), NEG_INF).softmax(-1) @ v

    return fn


def softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (torch.tanh(q @ k.mT * 0.25 / 5.0) * 5.0).softmax(-1) @ v


window = masked(lambda i, j: (j <= i) & (i - j < 40))
prefix = masked(lambda i, j: (j <= i) | (j < 20), cap=True)
dilated = masked(lambda i, j: (j <= i) & ((i - j) % 4 == 0))


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return window(q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1))


BY_BLOCKS = TORCH_VERSION >= (2, 14)  # without a mask, too
CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "soft cap": (softcap, qkv(**BIG)),
    "window": (window, qkv(**BIG)),
    "prefix and soft cap": (prefix, qkv(**BIG)),
    "grouped heads": (grouped, qkv(heads=4, kv_heads=1, **BIG)),
    "float16": (window, qkv(**{**BIG, "dtype": torch.float16})),
    **({} if BY_BLOCKS else {"soft cap, any length": (softcap, qkv(q_len=70, kv_len=33, dim=64, dtype=HALF))}),
}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", list(CASES))
def test_it_equals_the_program(name: str, grad: bool) -> None:
    fn, inputs = CASES[name]
    leaves = [x.detach().requires_grad_(grad) for x in inputs]
    report = same(fn, *leaves, rewritten=1, grad=grad, device="H100", targets=("flex_flash",))
    assert report.sites[0].target == "flex_flash"


def call_of(fn: Callable[..., Tensor], *inputs: Tensor, **options: Any) -> torch.fx.Node:
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    backend = attn_pass.wrap(keep, **{"device": "H100", "on_error": "raise", **ONLY, **options})
    with torch.no_grad():
        torch.compile(fn, backend=backend, dynamic=False)(*inputs)
    flex = torch.ops.higher_order.flex_attention
    return next(n for n in graphs[0].graph.nodes if n.target is flex)


@pytest.mark.parametrize("name", list(CASES))
def test_torchs_own_functions_accept_the_emitted_calls(name: str) -> None:
    """By torch's reading of the score and mask functions the kernel gets full blocks wherever it gets a mask."""
    from torch._inductor.kernel.flex import flex_flash_attention as flash

    fn, inputs = CASES[name]
    call = call_of(fn, *inputs)
    module = call.graph.owning_module
    assert module is not None
    options: Any = call.args[6]
    assert options["BACKEND"] == "FLASH"
    score = module.get_submodule(call.args[3].target)  # type: ignore[union-attr]
    blocks: Any = call.args[4]
    mask = module.get_submodule(blocks[-1].target)
    assert isinstance(score, torch.fx.GraphModule) and isinstance(mask, torch.fx.GraphModule)
    full = blocks[4]
    assert flash.is_trivial_mask_graph(mask) or full is not None
    assert flash.is_trivial_mask_graph(mask) == name.startswith("soft cap")
    assert not flash.input_buffers_require_grads(score, 5)
    assert tuple(blocks[-3:-1]) == (128, 128)


def test_torchs_refusal_goes_to_the_next_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.kernel.flex import flex_flash_attention as flash

    monkeypatch.setattr(flash, "ensure_flash_available", lambda: False)
    unused: Any = None
    torch_says = flash._can_use_flex_flash_attention(unused, unused, 5)[1]
    target = flex_flash.FlexFlash()
    setting = Setting(registry.by_name("H100"), "compile", runner="inductor")
    identity = torch.fx.symbolic_trace(torch.nn.Identity())
    with pytest.raises(attn_pass.AttnPassError, match="flex_flash: ") as caught:
        target.check(identity, identity, setting)
    assert torch_says in str(caught.value)


# ---------------------------------------------------------------- what it refuses


def site_of(fn: Callable[..., Tensor], inputs: tuple[Tensor, ...], **options: Any) -> Any:
    given = {"device": "H100", **ONLY, **options}
    return attn_pass.explain(fn, *inputs, attn_pass_options=given).sites[0]


REFUSED: dict[str, tuple[str, Callable[..., Tensor], dict[str, Any]]] = {
    "float32": ("half precision", softcap, {"dtype": torch.float32}),
    "wide heads": ("over 256", softcap, {"dim": 264}),
    "odd heads": ("not multiples of 8", softcap, {"dim": 20}),
    "a mask with wide heads": ("head dims up to 128", window, {"dim": 192}),
    "a mask with a rest": ("not multiples of 128", window, {"q_len": 200, "kv_len": 200}),
    "a mask that is not known by blocks": ("not known block by block", dilated, {}),
    **({"a rest, by blocks": ("not multiples of 128", softcap, {"q_len": 200, "kv_len": 200})} if BY_BLOCKS else {}),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_it_refuses(name: str) -> None:
    why, fn, sizes = REFUSED[name]
    site = site_of(fn, qkv(**{**BIG, **sizes}))
    assert site.outcome == "left" and why in site.refusals.get("flex_flash", site.reason), site


def test_wide_heads_are_for_inference() -> None:
    wide = qkv(**{**BIG, "dim": 192})
    site = site_of(softcap, wide)
    assert "head dims up to 128" in site.refusals["flex_flash"] if BY_BLOCKS else site.target == "flex_flash"
    assert "in training" in site_of(softcap, tuple(x.requires_grad_() for x in wide)).refusals["flex_flash"]


def test_sizes_that_are_not_known_are_refused() -> None:
    inputs = qkv(**BIG)
    for dim in (0, 2):
        report = attn_pass.explain(
            softcap, *inputs, attn_pass_options={"device": "H100", **ONLY}, attn_pass_dynamic=True
        )
        assert "a size is not known" in report.sites[0].refusals["flex_flash"], dim


@pytest.mark.parametrize(
    ("device", "fn", "why"),
    [
        ("A100", softcap, "for compute capability 9.0 and 10.x"),
        ("L4", softcap, "for compute capability 9.0 and 10.x"),
        ("B200", softcap, "are for compute capability 9.0 and head dims" if BY_BLOCKS else None),
        ("B200", window, "are for compute capability 9.0 and head dims"),
        ("cpu", softcap, "does not run on cpu devices"),
    ],
)
def test_the_gpus_it_is_for(device: str, fn: Callable[..., Tensor], why: str | None) -> None:
    site = site_of(fn, qkv(**BIG), device=device)
    assert site.target == "flex_flash" if why is None else why in site.refusals["flex_flash"]


def test_a_package_cannot_hold_it() -> None:
    class Step(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return softcap(q, k, v)

    report = attn_pass.explain(Step(), *qkv(**BIG), attn_pass_options={"device": "H100", **ONLY}, attn_pass_aot=True)
    assert "compiled by Python when it runs" in report.sites[0].refusals["flex_flash"]


def test_a_deterministic_backward_with_a_mask_is_refused() -> None:
    inputs = tuple(x.requires_grad_() for x in qkv(**BIG))
    torch.use_deterministic_algorithms(True)
    try:
        assert "deterministic algorithms" in site_of(window, inputs).refusals["flex_flash"]
        assert site_of(window, tuple(x.detach() for x in inputs)).target == "flex_flash"
    finally:
        torch.use_deterministic_algorithms(False)


def test_both_say_why_not_where_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attn, "find_spec", importlib.util.find_spec)
    for name in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(sys, "path", [])
    site = attn_pass.explain(window, *qkv(**BIG), attn_pass_options={"device": "H100"}).sites[0]
    assert "flash_attn.cute) is not installed" in site.refusals["flex_flash"]
    assert "(flash_attn_interface) is not installed" in site.refusals["flash_attn_3"]


def test_it_is_predicted_faster_than_tritons_kernel() -> None:
    with torch.device("meta"):
        inputs = tuple(torch.empty(2, 16, 4096, 128, dtype=HALF) for _ in range(3))
    predicted = attn_pass.explain(softcap, *inputs, attn_pass_options={"device": "H100"}).sites[0].predicted_us
    assert predicted["flex_flash"] < predicted["flex"]


@pytest.mark.parametrize(
    ("template", "function", "takes", "operands"),
    [
        ("flash_attention", "_flash_attn_fwd", published.FORWARD, ["q", "k", "v"]),
        ("flash_attention", "BlockSparseTensorsTorch", published.BLOCKS, published.BLOCKS[:4]),
        ("flash_attention_backward", "_flash_attn_bwd", published.BACKWARD, published.BACKWARD[:6]),
        ("flash_attention_backward", "BlockSparseTensorsTorch", published.BLOCKS, published.BLOCKS[:4]),
    ],
)
def test_what_torch_calls_is_what_the_package_takes(
    template: str, function: str, takes: list[str], operands: list[str]
) -> None:
    """The calls in the templates of the torch that is here, against the signatures that flash-attn-4 has published."""
    flex = sys.modules["torch._inductor.kernel.flex.flex_flash_attention"]
    text = (Path(str(flex.__file__)).parent / "templates" / f"{template}.py.jinja").read_text()
    plain = re.sub(r"\{\{.*?\}\}", "0", re.sub(r"\{%.*?%\}", "", text))
    calls = re.findall(rf"(?<!import ){function}\((?:[^()]|\([^()]*\))*\)", plain)
    assert calls
    for seen in calls:
        call = ast.parse(seen, mode="eval").body
        assert isinstance(call, ast.Call)
        assert takes[: len(call.args)] == operands[: len(call.args)] and len(call.args) == len(operands)
        assert {k.arg for k in call.keywords if k.arg} <= set(takes[len(call.args) :])
