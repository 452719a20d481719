"""Linear layers by another library: which are, which are not, and that the results are the program's."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import padded_encoders as padded
import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.nn import functional as F

import attn_pass
from attn_pass.devices.base import LinearLayer
from attn_pass.devices.cpu.facts import cpu
from attn_pass.devices.cpu.linear import rules
from attn_pass.entries.transaction import decide
from attn_pass.graph.values import FOLDS_CONSTANTS
from attn_pass.options import make_options
from attn_pass.projections.linear import linear_of

B, L, E = 2, 9, 512  # a weight of 2^18 elements
MANY = torch.randn(B, 210, E)
Layer = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def on_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule of the processors where oneDNN was measured; what it does not multiply has tests of its own."""
    monkeypatch.setattr(rules, "is_amd", lambda: True)
    monkeypatch.setattr(rules, "is_onednns", lambda dtype: True)


class Around(nn.Module):
    """One attention, and a layer in front of it."""

    def __init__(self, layer: Layer, dtype: torch.dtype = torch.float32, width: int = E) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = layer
        self.weight = nn.Parameter(torch.randn(E, E, dtype=dtype) / E**0.5)
        self.bias = nn.Parameter(torch.randn(E, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, E) to the same."""
        y = self.layer(x, self.weight, self.bias).to(x.dtype).reshape(B, -1, E)
        q = y.unflatten(-1, (8, -1)).transpose(1, 2)
        return ((q @ q.mT).softmax(-1) @ q).transpose(1, 2).flatten(2)


class Decided:
    """A backend that runs the rewritten graph eagerly; ``calls`` of `attn_pass`'s own operators for layers in it."""

    def __init__(self, frozen: bool = False, program: str = "compile", **options: Any) -> None:
        self.options, self.frozen, self.program = options, frozen, program
        self.calls, self.report = 0, attn_pass.Report()

    def __call__(self, gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        options = make_options(**{"choose": "fused", "on_error": "raise", **self.options})
        self.report = decide(gm, options, self.program, "inductor", lambda: {FOLDS_CONSTANTS: self.frozen}).report
        self.calls = sum(str(node.target).startswith("attn_pass.linear") for node in gm.graph.nodes)
        return gm.forward


def decided(
    layer: Layer, x: Tensor | None = None, dtype: torch.dtype = torch.float32, grad: bool = False, **more: Any
) -> Decided:
    """What became of the layer, once the results are compared with float64's."""
    dynamic = more.pop("dynamic", None)
    model, backend = Around(layer, dtype), Decided(**more)
    x = torch.randn(B, L, E) if x is None else x
    torch._dynamo.reset()
    with torch.set_grad_enabled(grad), torch._inductor.config.patch(freezing=backend.frozen):
        got = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)(x.to(dtype))
        plain = model(x.to(dtype))
        exact = model.double()(x.to(dtype).double())
    error, stock = ((y - exact).abs().max() for y in (got, plain))
    assert error <= 4 * stock + 1e-5, (error, stock)
    return backend


LAYERS: dict[str, Layer] = {
    "linear": F.linear,
    "linear without a bias": lambda x, w, b: F.linear(x, w),
    "a vector's worth of rows": lambda x, w, b: F.linear(x.flatten(0, 1), w, b),
    "four dimensions": lambda x, w, b: F.linear(x[:, None], w, b),
    "a product with a transposed weight": lambda x, w, b: x @ w.T,
    "matmul": lambda x, w, b: torch.matmul(x, w.transpose(0, 1)),
    "by columns": lambda x, w, b: x @ w,
    "addmm by columns": lambda x, w, b: torch.addmm(b, x.flatten(0, 1), w),
    "addmm": lambda x, w, b: torch.addmm(b, x.flatten(0, 1), w.t()),
    "rows that are transposed": lambda x, w, b: F.linear(x.transpose(0, 1).contiguous().transpose(0, 1), w, b),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_of_float32(name: str) -> None:
    backend = decided(LAYERS[name])
    (record,) = backend.report.linear_layers
    assert backend.calls == record.layers == 1
    assert (record.library, record.features, record.width, record.dtype) == ("oneDNN", E, E, "float32")
    assert "multiplied by oneDNN: 512 to 512 features, float32: oneDNN is faster than MKL" in backend.report.table()


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN asks for AVX-512")
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_of_bfloat16(name: str) -> None:
    """It is the same library; the copy of a bias into the result is all there is to be saved."""
    taken = ("linear", "a vector's worth of rows", "four dimensions", "rows that are transposed", "addmm")
    assert decided(LAYERS[name], dtype=torch.bfloat16).calls == (name in taken)


ACTIVATIONS: dict[str, tuple[Layer, str]] = {
    "gelu": (lambda x, w, b: F.gelu(F.linear(x, w, b)), "gelu"),
    "gelu by tanh": (lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"), "gelu, tanh"),
    "silu": (lambda x, w, b: F.silu(F.linear(x, w, b)), "silu"),
    "silu of a layer by columns": (lambda x, w, b: F.silu(torch.addmm(b, x.flatten(0, 1), w)), "silu"),
    "silu, and the layer's result": (lambda x, w, b: torch.add(*(f(F.linear(x, w, b)) for f in (F.silu, abs))), "silu"),
    "relu, in which NaN may get lost": (lambda x, w, b: F.relu(F.linear(x, w, b)), "none"),
    "silu in place": (lambda x, w, b: F.silu(F.linear(x, w, b), inplace=True), "none"),
    "silu of what is used again": (lambda x, w, b: (y := F.linear(x, w, b)) + F.silu(y), "none"),
    "silu under autocast, which leaves it": (lambda x, w, b: _silu_under_autocast(F.linear(x, w, b)), "none"),
}


def _silu_under_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.silu(x)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_applied_in_the_same_call(name: str) -> None:
    layer, activation = ACTIVATIONS[name]
    records = decided(layer).report.linear_layers
    assert activation in [record.activation for record in records]
    assert sum(record.layers for record in records) == (2 if "and the layer's result" in name else 1)


def test_an_activation_of_nothing_but_nan_is_nan() -> None:
    model, backend = Around(lambda x, w, b: F.gelu(F.linear(x, w, b))), Decided()
    with torch.no_grad():
        assert torch.compile(model, backend=backend)(torch.full((B, L, E), float("nan"))).isnan().all()
    assert [record.activation for record in backend.report.linear_layers] == ["gelu"]


def test_layers_that_are_alike_are_one_record() -> None:
    report = decided(lambda x, w, b: F.linear(F.linear(x, w, b), w, b)).report
    assert [record.layers for record in report.linear_layers] == [2]
    stored = attn_pass.Report.from_dict(report.to_dict())
    assert [record.to_dict() for record in stored.linear_layers] == [r.to_dict() for r in report.linear_layers]


def under_autocast(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x, w, b)


def detached_in_place(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Dynamo's one fake value of the result says afterwards that no gradient is asked for."""
    y = F.linear(x.flatten(0, 1), w, b)
    squares = (y * y).sum()
    y.detach_()
    return y + 0 * squares


def turned_in_place(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = x @ w.t_()
    w.t_()
    return y


def inside_no_grad(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        y = F.linear(x, w, b)
    return y * b.sum()


LEFT: dict[str, tuple[Layer, dict[str, Any]]] = {
    "in float64": (F.linear, {"dtype": torch.float64}),
    "in float16": (F.linear, {"dtype": torch.float16}),
    "with gradients": (F.linear, {"grad": True}),
    "with a gradient, and detached in place": (detached_in_place, {"grad": True}),
    "under autocast": (under_autocast, {}),
    "of a weight that is computed": (lambda x, w, b: F.linear(x, w * 1.0, b), {}),
    "small": (lambda x, w, b: F.linear(x, w[:64].clone(), b[:64]).repeat(1, 1, 8), {}),
    "under vmap": (lambda x, w, b: torch.vmap(lambda y: F.linear(y, w, b))(x), {}),
    "opted out of": (F.linear, {"linear_layers": "off"}),
    "with a bias of one number": (lambda x, w, b: F.linear(x, w, b[:1].clone()), {}),
    "in a frozen package": (F.linear, {"frozen": True, "program": "aoti"}),
    "frozen, with any number of rows": (F.linear, {"frozen": True, "dynamic": True, "x": MANY}),
    "few rows, and any number of them": (F.linear, {"dynamic": True}),
    "frozen, in bfloat16": (F.linear, {"frozen": True, "dtype": torch.bfloat16}),
}


@pytest.mark.parametrize("name", LEFT)
def test_left(name: str) -> None:
    layer, given = LEFT[name]
    backend = decided(layer, **given)
    assert backend.calls == 0 and backend.report.linear_layers == []
    assert len(backend.report.rewritten) == 1


def test_taken_without_their_neighbours() -> None:
    """What the table above leaves is taken where the one thing that refuses it is not there."""
    assert decided(F.linear, frozen=True).calls == 1
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert decided(F.linear, dtype=torch.bfloat16).calls == 1
    assert decided(F.linear, program="aoti").calls == 1
    assert decided(F.linear, MANY, dynamic=True).calls == 1
    assert decided(inside_no_grad, grad=True).calls == 1
    assert decided(lambda x, w, b: F.linear(F.linear(x, w, b).relu_(), w)).calls == 2


# ---------------------------------------------------------------- of a type without a fast product


@pytest.fixture
def without_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with AVX2 alone."""
    monkeypatch.setattr(rules, "instruction_set", lambda: "avx2")
    monkeypatch.setattr(rules, "is_onednns", lambda dtype: False)


def of_one_dtype(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Autocast has nothing to cast but the bias."""
    with torch.autocast("cpu", torch.bfloat16):
        low = torch.bfloat16 if x.dtype == torch.float32 else x.dtype
        return F.linear(x.to(low), w.to(low), b)


def in_two_blocks(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(x, w, b)
    return F.linear(y.to(w.dtype), w)  # of float32


def float64_under_autocast(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x.double(), w.double(), b.double())


def transposed_in_place(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """The matrix is another one by the time of the second product."""
    turned = w * 1.0
    y = x @ turned
    turned.t_()
    return y @ turned


def of_any_size(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return (x @ w[:, : x.shape[1] + 1]).sum(-1, keepdim=True) * b


HALF = {"dtype": torch.bfloat16}
WIDENED: dict[str, tuple[Layer, dict[str, Any], int]] = {
    "in bfloat16": (F.linear, HALF, 1),
    "in float16": (F.linear, {"dtype": torch.float16}, 1),
    "of any number of rows": (F.linear, {**HALF, "dynamic": True}, 1),
    "by columns": (lambda x, w, b: torch.addmm(b, x.flatten(0, 1), w), HALF, 1),
    "of a weight that is computed": (lambda x, w, b: F.linear(x, w * 1.0, b), HALF, 1),
    "by columns of a weight that is computed": (lambda x, w, b: x @ (w * 1.0), HALF, 1),
    "of a transposed weight that is computed": (lambda x, w, b: x @ (w * 1.0).t(), HALF, 1),
    "under autocast": (under_autocast, {}, 1),
    "under autocast, the bias alone": (of_one_dtype, {}, 1),
    "under autocast and after it": (in_two_blocks, {}, 1),
    "in a frozen package": (F.linear, {**HALF, "frozen": True, "program": "aoti"}, 1),
    "in float64 under autocast": (float64_under_autocast, {}, 0),
    "in float32": (lambda x, w, b: F.linear(x, w * 1.0, b), {}, 0),
    "with gradients": (F.linear, {**HALF, "grad": True}, 0),
    "of a weight that is such a layer": (lambda x, w, b: F.linear(F.linear(x, w @ (w + 1.0)), w, b), HALF, 3),
    "of a bias that is such a layer": (lambda x, w, b: F.linear(x, w, (b[None] @ w.clone())[0]), HALF, 2),
    "a weight that is transposed in place": (transposed_in_place, HALF, 0),
    "of a weight of any size": (of_any_size, {**HALF, "dynamic": True}, 0),
    "under autocast with gradients": (under_autocast, {"grad": True}, 0),
    "opted out of": (F.linear, {**HALF, "linear_layers": "off"}, 0),
}


@pytest.mark.usefixtures("without_half")
@pytest.mark.parametrize("name", WIDENED)
def test_a_layer_of_a_type_without_a_fast_product(name: str) -> None:
    layer, given, calls = WIDENED[name]
    backend = decided(layer, **given)
    assert (backend.calls, sum(record.layers for record in backend.report.linear_layers)) == (calls, calls)
    assert {record.library for record in backend.report.linear_layers} <= {"the CPU kernel"}


def test_other_processors_leave_what_is_cast_or_computed() -> None:
    assert decided(of_one_dtype).calls == decided(lambda x, w, b: F.linear(x, w * 1.0, b)).calls == 0


def test_decided_for_another_device() -> None:
    model, x = Around(F.linear).eval(), torch.randn(B, L, E)
    for device, layers in ((None, 1), ("cpu", 1), ("H200", 0), ("Graviton4", 0)):
        with torch.no_grad():
            report = attn_pass.explain(model, x, attn_pass_options={"choose": "fused", "device": device})
        assert sum(record.layers for record in report.linear_layers) == layers, device


def test_a_family_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([rules.faster_linear(LAYER)])  # and the second layer raises StopIteration
    monkeypatch.setattr("attn_pass.devices.cpu.family.faster_linear", lambda layer: next(answers))
    with pytest.warns(attn_pass.AttnPassWarning, match="linear layers stay torch's calls"):
        backend = decided(lambda x, w, b: F.linear(F.linear(x, w, b), w, b), on_error="warn")
    assert backend.calls == 0 and backend.report.linear_layers == [] and len(backend.report.rewritten) == 1


def test_a_weight_that_is_turned_in_place() -> None:
    graph = torch.fx.symbolic_trace(turned_in_place, {"b": None}).graph
    fake = FakeTensorMode().from_tensor(torch.randn(E, E))
    for node in graph.nodes:
        node.meta["example_value"] = fake
    assert [node for node in graph.nodes if linear_of(node) is not None] == []


def test_a_graph_whose_attention_is_left_is_left() -> None:
    assert decided(F.linear, rules=(("*", ("leave",)),)).calls == 0


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    with torch.backends.mkldnn.flags(enabled=False):
        yield


LAYER = LinearLayer(torch.float32, 64, E, E, True, True, False, False)


def test_where_the_processor_or_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rules.faster_linear(LAYER) is not None
    with without_onednn():
        assert rules.faster_linear(LAYER) is None
    for name in ("max_autotune", "max_autotune_gemm"):
        with torch._inductor.config.patch(name, True):
            assert rules.faster_linear(LAYER) is None
    precision = torch.backends.mkldnn.matmul.fp32_precision
    try:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        assert rules.faster_linear(LAYER) is None
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = precision
    with monkeypatch.context() as patch:
        patch.setattr(rules, "instruction_set", lambda: "avx2")
        assert rules.faster_linear(LAYER) is None
    monkeypatch.setattr(rules, "is_amd", lambda: False)
    assert rules.faster_linear(LAYER) is None


@pytest.mark.parametrize(
    ("rows", "features", "width", "is_static", "taken"),
    [
        (1, 512, 512, True, True),
        (1, 512, 511, True, False),
        (2000, 160, 160, True, True),
        (1000, 160, 160, True, False),
        (400, 512, 512, False, True),
        (300, 512, 512, False, False),
    ],
)
def test_the_sizes_that_were_measured(rows: int, features: int, width: int, is_static: bool, taken: bool) -> None:
    assert (
        rules.faster_linear(replace(LAYER, rows=rows, features=features, width=width, has_static_rows=is_static))
        is not None
    ) == taken


def test_one_row_by_columns_is_torchs() -> None:
    for rows, library in ((1, None), (2, "the CPU kernel"), (8, "the CPU kernel"), (9, "oneDNN")):
        layer = replace(LAYER, rows=rows, by_columns=True)
        assert getattr(rules.faster_linear(layer), "library", None) == library
        assert rules.faster_linear(replace(layer, by_columns=False)) is not None
    for rows in (1, 3, 4):
        assert rules.is_faster_on_amd(replace(LAYER, rows=rows, by_columns=True)) == (rows == 4)


# ---------------------------------------------------------------- compiled


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled(dtype: torch.dtype) -> None:
    """Dynamic sizes, weights as they are and by columns, with a bias and without; a second call with other sizes."""
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN asks for AVX-512")

    def layers(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        flat = torch.addmm(b, F.linear(x, w, b).flatten(0, 1), w)
        return F.linear(F.gelu(flat), w).unflatten(0, (B, -1))  # with the activation in the call

    model = Around(layers, dtype).eval()
    torch._dynamo.reset()
    with torch.no_grad(), attn_pass.record() as report:
        compiled = torch.compile(
            model, backend=attn_pass.backend, dynamic=True, options={"choose": "fused", "on_error": "raise"}
        )
        for rows in (210, 31):
            x = torch.randn(B, rows, E, dtype=dtype)
            exact = model.double()(x.double())
            model.to(dtype)
            error, stock = ((y - exact).abs().max() for y in (compiled(x), model(x)))
            assert error <= 4 * stock + 1e-5
    assert sum(record.layers for record in report.linear_layers) == report.graphs * (3 if dtype == torch.float32 else 1)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [None, "max-autotune-no-cudagraphs"])
def test_frozen(mode: str | None) -> None:
    """By Inductor's setting for all compiles; one that times products itself is left to do so."""
    model = Around(lambda x, w, b: F.linear(x, w, b).flatten(0, 1) @ w).eval()
    x = torch.randn(B, L, E)
    options: dict[str, Any] = {"choose": "fused", "tune": False, "on_error": "raise"}
    if mode is not None:
        options["max_autotune"] = True
    torch._dynamo.reset()
    frozen = torch._inductor.config.patch(freezing=True)
    with torch.no_grad(), frozen, attn_pass.record() as report:
        got, (code,) = run_and_get_code(torch.compile(model, backend=attn_pass.backend, options=options), x)
        torch.testing.assert_close(got, model(x), rtol=1e-4, atol=1e-4)
    assert sum(record.layers for record in report.linear_layers) == (2 if mode is None else 0)
    assert "_frozen_param" in code


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN asks for AVX-512")
def test_freezing_as_an_option_of_one_compile_freezes_nothing() -> None:
    """Dynamo does not see it, and passes weights as inputs all the same."""
    backend, model = Decided(frozen=True), Around(F.linear, torch.bfloat16)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(torch.randn(B, L, E, dtype=torch.bfloat16))
    assert backend.calls == 1


@pytest.mark.slow
def test_in_a_package(tmp_path: Path) -> None:
    """Its code calls oneDNN, and its weights are there under their own names."""
    from torch._inductor import aoti_load_package

    model = Around(lambda x, w, b: F.linear(x, w, b) @ w).eval()
    x = torch.randn(B, L, E)
    with torch.no_grad(), attn_pass.record() as report:
        path = attn_pass.aot_compile(
            model, (x,), package_path=tmp_path / "m.pt2", options={"choose": "fused", "on_error": "raise"}
        )
        loaded = aoti_load_package(str(path))
        torch.testing.assert_close(loaded(x), model(x), rtol=1e-4, atol=1e-4)
        loaded.load_constants({"weight": model.weight * 2, "bias": model.bias}, check_full_update=True)
        with torch.no_grad():
            model.weight.mul_(2)
        torch.testing.assert_close(loaded(x), model(x), rtol=1e-4, atol=1e-4)
    assert sum(record.layers for record in report.linear_layers) == 2


@pytest.mark.slow
def test_a_second_try_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that Inductor cannot lower is torch's again, and the attention stays rewritten."""
    from torch._inductor import lowering as lowerings

    from attn_pass.devices.cpu.linear import onednn_template

    def fails(*args: Any) -> Any:
        raise NotImplementedError("no such call here")

    monkeypatch.setitem(lowerings.lowerings, onednn_template.OPERATOR, fails)
    model = Around(F.linear).eval()
    x = torch.randn(B, L, E)
    torch._dynamo.reset()
    with torch.no_grad(), attn_pass.record() as report, pytest.warns(attn_pass.AttnPassWarning, match="linear layers"):
        got = torch.compile(model, backend=attn_pass.backend, options={"choose": "fused"})(x)
        torch.testing.assert_close(got, model(x), rtol=1e-4, atol=1e-4)
    (record,) = report.linear_layers
    assert record.library == "" and "could not lower" in record.reason and len(report.rewritten) == 1


def test_rows_of_padding_may_all_be_there() -> None:
    """The number of packed rows is known at run time only, and counts as that of all rows, not as a small one."""
    asked: list[LinearLayer] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rules, "is_faster_on_amd", lambda layer: asked.append(layer))
        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(padded.Encoder(padded.first, layers=1).eval(), backend=Decided(targets=("cpu_kernel",)))(
                padded.ids(), padded.masks()[0]
            )
    packed = {layer.rows for layer in asked if not layer.has_static_rows and layer.features == padded.E}
    assert packed == {padded.B * padded.L}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_code_for_a_new_number_of_rows_is_counted_where_onednn_multiplies(dtype: torch.dtype) -> None:
    layer = LinearLayer(dtype, 4096, E, E, True, False, False, is_constant=False)
    half = dtype != torch.float32
    us = functools.partial(rules.new_rows_us, cpu())
    assert (us(layer, chooses=True) > 0, us(layer, chooses=False) > 0) == (True, half)
    assert us(replace(layer, is_constant=True), chooses=False) > 0
    assert (us(replace(layer, rows=1), chooses=True) > 0) == half
