"""``nn.MultiheadAttention`` and related modules: one call in a graph, expanded if its attention is rewritten."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import randn, same, same_each
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attn_pass
from attn_pass.compat import TORCH_VERSION
from attn_pass.devices.registry import of_type
from attn_pass.patterns import composite

Call = Callable[..., Any]

X, Y = randn(2, 6, 32, seed=1), randn(2, 5, 32, seed=2)
CAUSAL = nn.Transformer.generate_square_subsequent_mask(6)
ABOVE = torch.ones(6, 6).triu(1).bool()
BIAS = randn(6, 6, seed=3)
HEADS = randn(8, 6, 6, seed=4)
KEYS = randn(24, 5, 8, seed=9)
PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
ADDED = torch.zeros(2, 6).masked_fill(PADDING, float("-inf"))


class Called(nn.Module):
    def __init__(self, inner: nn.Module, call: Call) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, *inputs: Tensor) -> Any:
        return self.call(self.inner, *inputs)


def built(call: Call, **options: Any) -> Called:
    torch.manual_seed(0)
    return Called(nn.MultiheadAttention(32, 4, **{"batch_first": True, **options}), call)


def attending(**arguments: Any) -> Call:
    """Self-attention with these arguments, masks made to fit the type of the input; the weights are thrown away."""

    def call(m: nn.Module, x: Tensor) -> Any:
        fit = {k: v.to(x.dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in arguments.items()}
        return m(x, x, x, **fit)[0]

    return call


QUIET = {"need_weights": False}


def above() -> Tensor:
    return torch.ones(6, 6, dtype=torch.bool).triu(1)


def causal(m: nn.Module, x: Tensor) -> Any:
    return m(x, x, x, attn_mask=nn.Transformer.generate_square_subsequent_mask(6, dtype=x.dtype))[0]


def fixed_keys(m: nn.MultiheadAttention, x: Tensor) -> Any:
    """Keys and values given ready-made, arguments by position."""
    keys = KEYS.to(x.dtype)
    weights = (m.in_proj_weight, m.in_proj_bias, None, None, False, 0.0, m.out_proj.weight, m.out_proj.bias)
    return F.multi_head_attention_forward(x, x, x, 32, 4, *weights, static_k=keys, static_v=keys * 2)[0]


# What is called, how the module is built, and the mask that the report names.
ROWS: dict[str, tuple[Call, dict[str, Any], str]] = {
    "plain": (attending(), {}, "none"),
    "weights not asked for": (attending(**QUIET), {"dropout": 0.0}, "none"),
    "weights of each head thrown away": (attending(average_attn_weights=False), {}, "none"),
    "causal, made inside": (causal, {}, "causal"),
    "a matrix": (attending(attn_mask=CAUSAL), {}, "additive"),
    "a boolean matrix": (attending(attn_mask=ABOVE, **QUIET), {}, "dense"),
    "one of each head": (attending(attn_mask=HEADS, **QUIET), {}, "additive"),
    "padding": (attending(key_padding_mask=PADDING), {}, "padding"),
    "padding, weights not asked for": (attending(key_padding_mask=PADDING, **QUIET), {}, "padding"),
    "padding to add": (attending(key_padding_mask=ADDED, **QUIET), {}, "additive"),
    "causal and padding": (
        lambda m, x: m(x, x, x, attn_mask=above(), key_padding_mask=PADDING, **QUIET)[0],
        {},
        "causal and padding",
    ),
    "unbatched": (lambda m, x: m(x[0], x[1], x[1], key_padding_mask=PADDING[1])[0], {}, "padding"),
    "length first, no biases": (attending(**QUIET), {"batch_first": False, "bias": False}, "none"),
    "keys and values of other widths": (lambda m, x: m(x, x[..., :16], x[..., :8])[0], {"kdim": 16, "vdim": 8}, "none"),
    "a learned key": (attending(), {"add_bias_kv": True}, "none"),
    "a learned key, padding": (attending(key_padding_mask=PADDING), {"add_bias_kv": True}, "additive"),
    "a key of zeros": (attending(attn_mask=CAUSAL, **QUIET), {"add_zero_attn": True}, "additive"),
    "keys given": (fixed_keys, {"batch_first": False}, "none"),
}


def test_in_training() -> None:
    """Values, and gradients of every parameter; the record is that of the user's call."""
    programs = {n: (built(call, **options), [X.clone().requires_grad_()]) for n, (call, options, _) in ROWS.items()}
    report = same_each(programs, grad=True, twice=3.0)
    assert masks_of(report, ROWS) == {name: mask for name, (*_, mask) in ROWS.items()}
    for site in report.sites:
        assert (site.form, site.target) == ("nn.MultiheadAttention", "sdpa")
        assert site.where.startswith("test_composite.py:") and site.shapes["query"][-1] == 8


def test_of_any_size() -> None:
    """A module's dropout is a symbol then, too, until Dynamo traces all once more with the number: once is enough."""
    with torch.no_grad():
        (site,) = same(built(attending()), X, twice=3.0, rewritten=1, dynamic=True).sites
    assert site.mask == "none"
    rows = {name: row for name, row in ROWS.items() if "no biases" not in name}  # torch lies about the strides of that
    with torch.no_grad(), torch._dynamo.config.patch(specialize_float=True):
        programs = {name: (built(call, **options), [X]) for name, (call, options, _) in rows.items()}
        report = same_each(programs, twice=3.0, dynamic=True)
    assert masks_of(report, rows) == {name: mask for name, (*_, mask) in rows.items()}


def masks_of(report: attn_pass.Report, names: Iterable[str]) -> dict[str, str]:
    return {name: site.mask for name, site in zip(names, report.sites, strict=True)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_of_any_type(dtype: torch.dtype) -> None:
    module = built(lambda m, x: m(x, x, x, attn_mask=above(), key_padding_mask=PADDING)[0]).to(dtype)
    same(module, X.to(dtype).requires_grad_(), grad=True, twice=4.0, rewritten=1)


def test_under_autocast() -> None:
    def call(m: nn.Module, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return m(x, x, x, key_padding_mask=PADDING, **QUIET)[0]

    same(built(call), X.clone().requires_grad_(), grad=True, rewritten=1, reference=False)


def test_in_a_checkpoint_with_its_mask_made_outside() -> None:
    def call(m: nn.Module, x: Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(6, dtype=x.dtype)
        return checkpoint(lambda x, mask: m(x, x, x, attn_mask=mask)[0], x, mask, use_reentrant=False)

    report = same(built(call), X.clone().requires_grad_(), grad=True, twice=3.0, rewritten=1)
    assert report.sites[0].mask == "causal"


def test_another_attention_made_of_its_result() -> None:
    """It was read while the call was still there."""

    def call(m: nn.Module, x: Tensor) -> Any:
        o = m(x, x, x)[0]
        return torch.softmax(o @ o.mT, -1) @ o

    same(built(call), X.clone().requires_grad_(), grad=True, twice=3.0, rewritten=2)


# ---------------------------------------------------------------- is_causal is a hint

HINTS: dict[str, tuple[dict[str, Any], str]] = {
    # Weights are asked for: the hint counts for nothing, the mask for all; so it must when they are thrown away.
    "weights": ({}, "additive"),
    # Torch takes the hint's word and never looks at the mask: what is computed is causal, whatever the mask says.
    "no weights": (QUIET, "causal"),
    # Beside padding the mask counts again.
    "no weights, padding": ({"key_padding_mask": ADDED, **QUIET}, "additive"),
    "weights, padding": ({"key_padding_mask": ADDED}, "additive"),
}


@pytest.mark.parametrize("mask", [BIAS, CAUSAL], ids=["a mask that is not causal", "one that is"])
def test_a_mask_and_a_hint(mask: Tensor) -> None:
    programs = {
        name: (built(attending(attn_mask=mask, is_causal=True, **more)), [X.clone().requires_grad_()])
        for name, (more, _) in HINTS.items()
    }
    report = same_each(programs, grad=True, twice=3.0)
    assert masks_of(report, HINTS) == {name: named for name, (_, named) in HINTS.items()}


# ---------------------------------------------------------------- the call stays


def graphs(module: nn.Module, *inputs: Tensor, **options: Any) -> tuple[list[str], attn_pass.Report]:
    """The graph that a backend gets, without the pass and with it."""
    codes: list[str] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        gm.graph.lint()
        codes.append(str(gm.graph))
        return gm.forward

    for chosen in (backend, attn_pass.wrap(backend, **options)):
        torch._dynamo.reset()
        with torch.no_grad(), attn_pass.record() as report:
            torch.compile(module, backend=chosen)(*inputs)
    return codes, report


STAYS: dict[str, tuple[Call, dict[str, Any], str]] = {
    "weights are used": (lambda m, x: m(x, x, x), {}, "the attention weights are requested"),
    "weights are used in another product": (lambda m, x: m(x, x, x)[1] @ x, {}, "the attention weights are requested"),
    "nothing is cheaper": (attending(), {}, "already the cheapest form"),
    "no target is allowed": (attending(), {"targets": ("flex",)}, "need no score function"),
    "the user's rule": (attending(), {"rules": {"*": "leave"}}, "left as requested"),
    "strict": (attending(key_padding_mask=PADDING), {"numerics": "strict"}, "numerics='strict'"),
}


@pytest.mark.parametrize("name", STAYS)
def test_a_call_that_stays_is_unchanged(name: str) -> None:
    call, options, reason = STAYS[name]
    (before, after), report = graphs(built(call).eval(), X, **options)
    assert before == after and "multi_head_attention_forward" in after
    (site,) = report.sites
    assert site.outcome == "left" and reason in site.reason, site.reason


def test_one_that_stays_beside_one_that_goes() -> None:
    """Nothing of the trial is left behind, also where sizes are symbols."""

    def call(m: nn.Module, x: Tensor) -> Any:
        y = m(x, x, x, key_padding_mask=x[..., 0] > 100)[0]
        return m(y, x, x, attn_mask=torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1))[0]

    x = randn(2, 7, 32)
    torch._dynamo.mark_dynamic(x, 1)
    (before, after), report = graphs(built(call).eval(), x, choose="fused", numerics="strict")
    assert [s.outcome for s in report.sites] == ["left", "rewritten"]
    assert before.count("multi_head_attention_forward](") == 2 and after.count("multi_head_attention_forward](") == 1
    assert after.count("nn.linear](") == 3  # of queries, of keys and values, and the last one


def test_no_guard_is_added() -> None:
    counts: list[int] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        counts.append(max(len(i.node.shape_env.guards) for i in inputs if isinstance(i, torch.SymInt)))
        return gm.forward

    for chosen in (backend, attn_pass.wrap(backend, choose="fused")):
        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(built(causal_of_its_length), backend=chosen, dynamic=True)(X)
    assert counts[0] == counts[1]


def causal_of_its_length(m: nn.Module, x: Tensor) -> Any:
    return m(x, x, x, attn_mask=torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), **QUIET)[0]


def test_a_call_that_cannot_be_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("put in on purpose")

    (_, expected), _ = graphs(built(attending()).eval(), X)
    forms = {k: replace(f, function=fails) for k, f in composite.CALLS.items()}
    monkeypatch.setattr(composite, "CALLS", forms)
    with pytest.warns(attn_pass.AttnPassWarning, match="put in on purpose"):
        (_, after), report = graphs(built(attending()).eval(), X, choose="fused")
    assert after == expected and [s.outcome for s in report.sites] == ["left"]


def test_dropout_is_drawn_as_often_as_before() -> None:
    """No fused CPU kernel draws it, so the call stays."""
    module = built(attending(**QUIET), dropout=0.5).train()
    (before, after), report = graphs(module, X, choose="fused")
    assert before == after and "dropout 0.5" in report.sites[0].reason


# ---------------------------------------------------------------- fast paths of inference


def layer(call: Call, **options: Any) -> Called:
    torch.manual_seed(0)
    return Called(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, **options), call).eval()


FINITE = (torch.arange(36).view(6, 6) % 5 == 4) * 0.5
FAST: dict[str, tuple[Call, dict[str, Any], str]] = {
    "plain": (lambda m, x: m(x), {}, "none"),
    "norm first, GELU": (lambda m, x: m(x), {"norm_first": True, "activation": "gelu"}, "none"),
    "padding": (lambda m, x: m(x, src_key_padding_mask=PADDING), {}, "padding"),
    "causal": (lambda m, x: m(x, src_mask=above(), is_causal=True), {}, "causal"),
    "causal and padding": (
        lambda m, x: m(x, src_mask=above(), src_key_padding_mask=PADDING),
        {"norm_first": True},
        "causal and padding",
    ),
    "one of each head": (lambda m, x: m(x, src_mask=HEADS > 1.5), {}, "dense"),
    # The kernel takes every number but 0 for "masked".
    "a finite bias": (lambda m, x: m(x, src_mask=FINITE.to(x.dtype)), {}, "dense"),
}


def test_encoder_layers() -> None:
    with torch.no_grad():
        programs = {name: (layer(call, **options), [X]) for name, (call, options, _) in FAST.items()}
        report = same_each(programs, twice=3.0)
    assert masks_of(report, FAST) == {name: mask for name, (*_, mask) in FAST.items()}
    assert {site.form for site in report.sites} == {"nn.TransformerEncoderLayer"}


@pytest.mark.skipif(TORCH_VERSION < (2, 13), reason="Dynamo of 2.11 breaks the graph before such a layer")
def test_an_encoder_layer_of_any_length() -> None:
    module = layer(lambda m, x: m(x, src_key_padding_mask=x[..., 0] > 1.0))
    x = randn(2, 7, 32)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(x, 1)
    torch._dynamo.reset()
    with torch.no_grad(), attn_pass.record() as report:
        compiled = torch.compile(
            module, backend=attn_pass.wrap("aot_eager_default_partitioner", choose="fused", on_error="raise")
        )
        for inputs in (x, randn(3, 11, 32)):
            torch.testing.assert_close(compiled(inputs), module(inputs))
    assert [(s.outcome, s.mask) for s in report.sites] == [("rewritten", "padding")]


def test_a_fully_masked_row_of_an_encoder_layer() -> None:
    """The kernel gives NaN: so says the report, and strict mode leaves it."""
    everything = PADDING | torch.tensor([[False], [True]])
    module = layer(lambda m, x: m(x, src_key_padding_mask=everything))
    with torch.no_grad():
        (site,) = same(module, X, rewritten=1).sites
        assert any("NaN" in a for a in site.assumptions)
        (site,) = same(module, X, rewritten=0, numerics="strict").sites
    assert "numerics='strict'" in site.reason


def test_an_encoder_layer_under_autocast_is_left() -> None:
    """Its kernel computes in float32 there; products of its own would not."""

    def call(m: nn.TransformerEncoderLayer, x: Tensor) -> Tensor:
        a = m.self_attn
        weights = (a.in_proj_weight, a.in_proj_bias, a.out_proj.weight, a.out_proj.bias)
        with torch.autocast("cpu", torch.bfloat16):
            return torch._native_multi_head_attention(x, x, x, 32, 4, *weights)[0]

    with torch.no_grad():
        (site,) = same(layer(call), X, rewritten=0, reference=False).sites
    assert "autocast" in site.reason


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("calls_sdpa", [False, True])
def test_the_kernel_calls_torchs_own_attention_where_its_family_says_so(
    calls_sdpa: bool, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    real = composite.take_apart

    def watched(*given: Any) -> Any:
        opaque = real(*given)
        seen.extend(node.target for call in opaque if call.expansion for node in call.expansion.nodes)
        return opaque

    monkeypatch.setattr(composite, "take_apart", watched)
    monkeypatch.setattr(of_type("cpu"), "encoder_kernel_calls_sdpa", calls_sdpa)
    mask = {"src_key_padding_mask": PADDING} if masked else {}
    with torch.no_grad():
        (site,) = same(layer(lambda m, x: m(x, **mask)), X, rewritten=1, twice=3.0).sites
    own = torch.ops.aten.scaled_dot_product_attention.default
    assert (own in seen) == (calls_sdpa and not masked) and site.form == "nn.TransformerEncoderLayer"


@pytest.mark.parametrize("name", ["self", "crossed", "padded", "weights"])
def test_the_kernel_itself(name: str) -> None:
    def call(m: nn.MultiheadAttention, x: Tensor) -> Any:
        weights = (m.in_proj_weight, m.in_proj_bias, m.out_proj.weight, m.out_proj.bias)
        others = (x * 2, x * 3) if name == "crossed" else (x, x)
        mask = (PADDING, False, True, 1) if name == "padded" else ()
        result = torch._native_multi_head_attention(x, *others, 32, 4, *weights, *mask)
        return result if name == "weights" else result[0]

    with torch.no_grad():
        (site,) = same(built(call).eval(), X, rewritten=1, twice=3.0).sites
    assert site.form == "nn.MultiheadAttention"
    assert ("the attention weights are requested, and stay" in site.reason) == (name == "weights")


def test_an_exported_encoder_layer() -> None:
    module = layer(lambda m, x: m(x, src_key_padding_mask=PADDING)).requires_grad_(False)
    program = torch.export.export(module, (X,), strict=True)
    assert "_transformer_encoder_layer_fwd" in str(program.graph)
    report = attn_pass.rewrite(program, choose="fused", on_error="raise")
    assert [(s.outcome, s.mask) for s in report.sites] == [("rewritten", "padding")]
    torch.testing.assert_close(program.module()(X), module(X))
    torch.testing.assert_close(program.run_decompositions().module()(X), module(X))


# ---------------------------------------------------------------- whole models


def test_a_decoder_and_its_encoder() -> None:
    torch.manual_seed(0)
    inner = nn.Transformer(32, 4, 1, 1, 64, dropout=0.0, batch_first=True)

    def call(m: nn.Transformer, x: Tensor, y: Tensor) -> Any:
        mask = m.generate_square_subsequent_mask(6, dtype=x.dtype)
        return m(y, x, tgt_mask=mask, tgt_is_causal=True)

    report = same(Called(inner, call), X.clone().requires_grad_(), Y, grad=True, twice=3.0, rewritten=3)
    assert [s.mask for s in report.sites] == ["none", "causal", "none"]


@pytest.mark.slow
def test_compiled_for_real() -> None:
    module = layer(lambda m, x: m(x, src_mask=above(), src_key_padding_mask=PADDING))
    torch._dynamo.reset()
    with torch.no_grad(), attn_pass.record() as report:
        out = torch.compile(module, backend="attn_pass", options={"choose": "fused", "on_error": "raise"})(X)
        torch.testing.assert_close(out, module(X))
    assert len(report.rewritten) == 1
