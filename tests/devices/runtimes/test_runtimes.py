"""Runtimes as families: what is decided for them, on both sides of every row, and that the result is the attention.

What the runtimes make of it is tested where they are installed (tests_on/runtimes).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import qkv, randn, same
from exported_programs import PROGRAMS, Exported
from kernel_calls import UNKNOWN, call
from torch import Tensor

import attn_pass
from attn_pass.devices import registry
from attn_pass.errors import OptionError

CALL = torch.ops.aten.scaled_dot_product_attention.default
RUNTIMES = ("onnx", "openvino", "tensorrt")  # whose operator is torch's call


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.25).softmax(-1) @ v


def rewritten(case: Exported, runtime: str, **options: Any) -> tuple[torch.export.ExportedProgram, attn_pass.Report]:
    program = case.program()
    return program, attn_pass.rewrite(program, runtime=runtime, on_error="raise", **options)


def call_of(program: torch.export.ExportedProgram) -> torch.fx.Node:
    (call,) = program.graph_module.graph.find_nodes(op="call_function", target=CALL)
    return call


def shape(node: object) -> tuple[int, ...]:
    assert isinstance(node, torch.fx.Node)
    return tuple(node.meta["val"].shape)


def test_they_are_families() -> None:
    assert set(registry.runtimes()) == {*RUNTIMES, "executorch"}
    assert registry.runtime_of("openvino") == "openvino" and registry.runtime_of("inductor") is None


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_it_becomes_is_the_attention(name: str, runtime: str) -> None:
    case = PROGRAMS[name]
    program, report = rewritten(case, runtime)
    assert len(report.sites) == 1
    torch.testing.assert_close(program.module()(*case.inputs), case.function(*case.inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_every_dtype(dtype: torch.dtype) -> None:
    with torch.no_grad():
        for case in ("causal", "a bias for every head", "torch's call with padding"):
            inputs = [x.to(dtype) if x.is_floating_point() else x for x in PROGRAMS[case].inputs]
            same(PROGRAMS[case].function, *inputs, rewritten=1, runtime="onnx")


@pytest.mark.parametrize("runtime", ["onnx", "openvino"])
def test_a_bias_in_float64_keeps_its_digits(runtime: str) -> None:
    """Around one large number, of which a softmax sees the small differences alone."""
    case = PROGRAMS["a bias for every head"]
    *operands, bias = (x.double() for x in case.inputs)
    inputs = (*operands, bias + 1e4)
    program, _ = rewritten(Exported(case.function, inputs), runtime, choose="fused")
    torch.testing.assert_close(program.module()(*inputs), case.function(*inputs), rtol=0, atol=1e-11)


def test_a_scale_is_given_where_it_is_another_than_torch_s() -> None:
    """Torch-TensorRT rounds one that is given to the query's dtype."""

    def scaled(scale: float | None) -> Callable[..., Tensor]:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (x.repeat_interleave(2, 1) for x in (k, v))
            return F.scaled_dot_product_attention(q, k, v, scale=scale)

        return call

    for scale, given in ((None, False), (72**-0.5, False), (0.3, True)):
        case = Exported(scaled(scale), tuple(qkv(2, 4, 7, 9, 72, kv_heads=2)))
        program, report = rewritten(case, "tensorrt", choose="fused")
        assert report.sites[0].outcome == "rewritten" and ("scale" in call_of(program).kwargs) == given
        torch.testing.assert_close(program.module()(*case.inputs), case.function(*case.inputs))


def test_a_mask_has_every_row_and_key_for_onnx() -> None:
    for name in ("a bias for every key", "padding", "torch's call with padding"):
        program, report = rewritten(PROGRAMS[name], "onnx")
        assert len(report.rewritten) == 1, name
        assert shape(call_of(program).args[3])[2:] == (7, 7), name


def test_a_sink_is_a_key_of_zeros() -> None:
    for runtime in RUNTIMES:
        program, report = rewritten(PROGRAMS["a sink"], runtime, choose="fused")
        assert report.sites[0].target == "sdpa", runtime
        query, key, value, mask = call_of(program).args[:4]
        assert shape(query) == (2, 4, 5, 16) and shape(key) == shape(value) == (2, 4, 12, 16)
        assert shape(mask) == (1, 4, 5, 12), "the sink differs from head to head, and nothing from batch to batch"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_sink_in_half_precision(dtype: torch.dtype) -> None:
    case = PROGRAMS["a sink, padding, grouped heads"]
    inputs = [x.to(dtype) if x.is_floating_point() else x for x in case.inputs]
    with torch.no_grad():
        same(case.function, *inputs, rewritten=1, runtime="onnx", choose="fused")


def test_a_sink_that_stays() -> None:
    _, report = rewritten(PROGRAMS["a sink"], "onnx", choose="fused", numerics="strict")
    assert "an infinite query" in report.sites[0].refusals["sdpa"]


def test_a_mask_that_has_them_stays() -> None:
    def full(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, bias, scale=0.3)

    case = Exported(full, (*qkv(2, 4, 7, 7), randn(1, 4, 7, 7, seed=5)))
    program, report = rewritten(case, "onnx")
    assert report.sites[0].outcome == "left" and shape(call_of(program).args[3]) == (1, 4, 7, 7)


def test_a_mask_is_broadcast_where_the_runtime_does_it() -> None:
    program, _ = rewritten(PROGRAMS["a bias for every key"], "openvino")
    assert shape(call_of(program).args[3])[2:] == (1, 7)


def test_values_of_another_size_are_padded_for_tensorrt_alone() -> None:
    for runtime, size in (("onnx", 5), ("openvino", 5), ("tensorrt", 16)):
        program, _ = rewritten(PROGRAMS["value heads of another size"], runtime, choose="fused")
        assert [shape(x)[-1] for x in call_of(program).args[:3]] == [16, 16, size], runtime


def test_grouped_heads() -> None:
    """ONNX has them; for OpenVINO the queries of a group become rows, and keys are not repeated either way."""
    onnx, _ = rewritten(PROGRAMS["grouped heads"], "onnx")
    assert call_of(onnx).kwargs["enable_gqa"] is True and shape(call_of(onnx).args[1])[1] == 2
    openvino, report = rewritten(PROGRAMS["grouped heads"], "openvino")
    assert report.sites[0].poor_cases == ("grouped_heads",) and "sdpa" not in report.sites[0].predicted_us
    assert "enable_gqa" not in call_of(openvino).kwargs
    assert [shape(x)[1:3] for x in call_of(openvino).args[:2]] == [(2, 14), (2, 7)]


def test_a_call_that_the_runtime_takes_stays() -> None:
    for runtime in RUNTIMES:
        assert rewritten(PROGRAMS["torch's call"], runtime)[1].sites[0].outcome == "left", runtime
    assert rewritten(PROGRAMS["torch's call with grouped heads"], "onnx")[1].sites[0].outcome == "left"
    assert rewritten(PROGRAMS["torch's call with grouped heads"], "openvino")[1].sites[0].outcome == "rewritten"


def test_a_call_of_rank_3_gets_the_rank_that_the_exporter_asks_for() -> None:
    program, report = rewritten(PROGRAMS["torch's call of rank 3"], "onnx")
    assert len(report.rewritten) == 1 and len(shape(call_of(program).args[0])) == 4


def test_one_row_is_left_where_products_were_faster() -> None:
    assert rewritten(PROGRAMS["one row, grouped heads"], "onnx")[1].sites[0].outcome == "rewritten"
    assert rewritten(PROGRAMS["one row, grouped heads"], "openvino")[1].sites[0].outcome == "left"


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout((q @ k.mT * 0.25).softmax(-1), 0.5, training=True) @ v


def without_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k.repeat(1, 2, 1, 1)[:, :2], v, scale=0.0)


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (2.0 * torch.tanh(q @ k.mT / 2.0)).softmax(-1) @ v


@pytest.mark.parametrize(
    ("function", "inputs", "reason"),
    [
        (dropped, {}, "dropout 0.5: the operator has none"),
        (without_scale, {}, "the scores are multiplied by 0.0"),
        (capped, {}, "tanh (a soft cap)"),
        (by_hand, {"kv_len": 0, "q_len": 3}, "a size is 0"),
    ],
)
def test_it_says_why_not(function: Callable[..., Tensor], inputs: dict[str, int], reason: str) -> None:
    for runtime in RUNTIMES:
        program = Exported(function, qkv(**inputs)).program()
        (site,) = attn_pass.rewrite(program, runtime=runtime, choose="fused").sites
        assert site.outcome == "left" and reason in site.refusals["sdpa"], site.refusals


class Biased(torch.nn.Module):
    """A block with a learned bias, which torch's call takes in another kernel where gradients are on."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(randn(4, 7, 7))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = x.unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        return ((q @ k.mT * 0.25 + self.bias).softmax(-1) @ v).transpose(1, 2).reshape(2, 7, 64)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_program_that_is_traced_again_with_other_kernels(runtime: str) -> None:
    """Exporters decompose without gradients, where a reshape becomes a view, and run what they get with them."""
    block, x = Biased().eval(), randn(2, 7, 192)
    program = torch.export.export(block, (x,))
    (site,) = attn_pass.rewrite(program, runtime=runtime, on_error="raise").rewritten
    assert site.target == "sdpa"
    with torch.no_grad():
        decomposed = program.run_decompositions(
            {op: f for op, f in torch.export.default_decompositions().items() if op != CALL}
        )
    torch.testing.assert_close(decomposed.module()(x), block(x))


def test_tensorrt_is_not_asked_for_a_row_that_is_fully_masked() -> None:
    """What it gives there is not documented: a program that gives 0 is left, one that gives NaN or the mean is not."""

    def padded_call(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), keep)

    inputs = (*qkv(2, 4, 7, 7, kv_heads=2), randn(2, 1, 7, 7, seed=5) > 0)
    _, report = rewritten(Exported(padded_call, inputs), "tensorrt", choose="fused")
    assert "what TensorRT gives is not documented" in report.sites[0].refusals["sdpa"]
    assert rewritten(PROGRAMS["padding, a fully masked row"], "tensorrt")[1].sites[0].outcome == "rewritten"


@pytest.mark.parametrize("runtime", ["openvino", "tensorrt"])
def test_zeros_for_a_fully_masked_row(runtime: str) -> None:
    """Products and a softmax in between are another program there than the operator, which gives NaN for it."""
    name = "padding by -inf, zeros for a fully masked row"
    (site,) = rewritten(PROGRAMS[name], runtime, choose="fused")[1].sites
    assert site.outcome == "left" and "a row may be fully masked" in site.refusals["sdpa"], site.refusals
    (site,) = rewritten(PROGRAMS[name], runtime, choose="fused", assume_nonempty_rows=True)[1].sites
    assert site.target == "sdpa"
    assert rewritten(PROGRAMS[name], "onnx", choose="fused")[1].sites[0].target == "sdpa"


@pytest.mark.parametrize("runtime", ["openvino", "tensorrt"])
def test_zeros_for_a_row_that_a_tensor_masks(runtime: str) -> None:
    """What is added may hold -inf."""

    def added(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return (q @ k.mT * 0.25 + bias).softmax(-1).nan_to_num(0.0) @ v

    case = Exported(added, (*qkv(2, 4, 6, 6), randn(2, 1, 6, 6, seed=5)))
    (site,) = rewritten(case, runtime, choose="fused")[1].sites
    assert "a row may be fully masked" in site.refusals["sdpa"]


@pytest.mark.parametrize("runtime", ["openvino", "tensorrt"])
def test_a_sink_is_a_key_that_no_row_masks(runtime: str) -> None:
    """A row without other keys gives 0 because its weight is the sink's, and the operator has that key."""
    for name in ("a sink, a fully masked row", "a sink, padding, grouped heads"):
        (site,) = rewritten(PROGRAMS[name], runtime, choose="fused")[1].sites
        assert site.target == "sdpa", site.refusals


def test_torchs_call_is_as_it_is_written_for_openvino() -> None:
    """It is NaN there for a fully masked row as well, and grouped heads do not run as they are."""

    def grouped_with_padding(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, keep, enable_gqa=True)

    inputs = (*qkv(2, 4, 7, 7, kv_heads=2), randn(2, 1, 7, 7, seed=5) > 0)
    (site,) = rewritten(Exported(grouped_with_padding, inputs), "openvino")[1].sites
    assert site.target == "sdpa" and site.poor_cases == ("grouped_heads",)


def test_a_runtime_that_leaves_out_inputs_gets_all_of_them() -> None:
    """With one key the queries are not read: OpenVINO's model would have two inputs, and callers give it three."""
    case = Exported(by_hand, qkv(kv_len=1))
    assert rewritten(case, "onnx")[1].sites[0].target == "single_key"
    (site,) = rewritten(case, "openvino", choose="fused")[1].sites
    assert site.target == "sdpa" and "leaves out inputs" in site.refusals["single_key"]


# By rule: changes to a plain call that it takes, and that it refuses.
SIDES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gradient": ({"grad": True, "may_train": True}, {"grad": True}),
    "dropout": ({}, {"dropout": 0.5}),
    "known head dims": ({"dim": UNKNOWN}, {"dim": UNKNOWN, "value_dim": 64}),
    "sizes": ({"q_len": 1}, {"q_len": 0}),
    "dtype": ({"dtype": torch.float16}, {"dtype": torch.int8}),
    "grouped heads": ({}, {"heads": 8, "groups": 2}),
    "fully masked rows": ({"empty_rows_are_zero": False}, {"empty_rows_are_zero": True}),
}


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_each_rule_on_both_sides(runtime: str) -> None:
    rules = registry.of_type(runtime).rules()
    for rule in rules:
        taken, refused = SIDES[rule.name]
        assert rule.holds(call(**taken)), rule.name
        assert not rule.holds(call(**refused)), rule.name
    assert len({rule.name for rule in rules}) == len(rules)


def test_float64_is_not_for_tensorrt() -> None:
    taken = {"onnx": True, "openvino": True, "tensorrt": False}
    for runtime, takes in taken.items():
        (rule,) = (r for r in registry.of_type(runtime).rules() if r.name == "dtype")
        assert rule.holds(call(dtype=torch.float64)) == takes, runtime


def test_gradients_are_not_for_a_runtime() -> None:
    (site,) = attn_pass.explain(by_hand, *qkv(grad=True), attn_pass_options={"runtime": "onnx"}).sites
    assert site.outcome == "left" and "runs without gradients" in site.refusals["sdpa"]


def test_wrap_knows_the_runtime_of_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.backends import registry as backends

    for table in (backends._BACKENDS, backends._COMPILER_FNS):
        monkeypatch.setitem(table, "openvino", lambda graph, inputs: graph)
    assert attn_pass.wrap("openvino").options.runtime == "openvino"
    assert attn_pass.wrap("openvino", runtime="onnx").options.runtime == "onnx"
    assert attn_pass.wrap("aot_eager").options.runtime is None


def test_a_backend_that_traces_again_leaves_dynamos_symbols_alone() -> None:
    """As OpenVINO's does: the sizes of a reshape in the graph it gets would be guards on symbols without a source."""
    from torch._dynamo.backends.common import fake_tensor_unsupported
    from torch.fx.experimental.proxy_tensor import make_fx

    def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return by_hand(q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1))

    @fake_tensor_unsupported  # type: ignore[untyped-decorator]
    def again(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        return make_fx(graph, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs).forward

    torch._dynamo.reset()
    inputs = qkv(2, 8, 7, 7, kv_heads=2)
    with torch.no_grad(), attn_pass.record() as report:
        got = torch.compile(grouped, backend=attn_pass.wrap(again, runtime="openvino", on_error="raise"))(*inputs)
    assert report.sites[0].poor_cases == ("grouped_heads",)
    torch.testing.assert_close(got, grouped(*inputs))


def test_a_runtime_that_nobody_knows() -> None:
    with pytest.raises(OptionError, match="unknown runtime 'onx'; did you mean 'onnx'"):
        attn_pass.explain(by_hand, *qkv(), attn_pass_options={"runtime": "onx"})
    with pytest.raises(OptionError, match='a runtime such as "onnx"'):
        attn_pass.explain(by_hand, *qkv(), attn_pass_options={"runtime": 3})
