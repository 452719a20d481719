"""The flex target for CUDA devices: the options of its templates, its cost, and the tiles that are measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from against_eager import qkv
from flex_graphs import call_of, case_of, rewritten, tensor_of
from flex_programs import BIG, CASES, ON_CUDA, causal, grouped, masked, softcap, window
from torch._subclasses import FakeTensorMode, fake_tensor

import attn_pass
from attn_pass.devices import registry
from attn_pass.devices.cuda import cost as cost_cuda
from attn_pass.devices.roofline import Problem
from attn_pass.targets.base import Offer
from attn_pass.targets.flex.flex import Flex
from attn_pass.targets.flex.lower import kernel_options

Tensor = torch.Tensor


def options_of(fn: Callable[..., Any], *inputs: Any) -> dict[str, Any]:
    graph, _ = rewritten(fn, *inputs)
    return dict(call_of(graph).args[6])


def test_the_options_are_ones_the_templates_know() -> None:
    from torch.nn.attention.flex_attention import FlexKernelOptions

    known = set(FlexKernelOptions.__annotations__)
    given = options_of(softcap, *qkv(**BIG))
    assert given.keys() <= known | {"OUTPUT_LOGSUMEXP", "OUTPUT_MAX"}
    assert {"BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "BACKEND", "ROWS_GUARANTEED_SAFE"} <= known
    assert not given["PRESCALE_QK"]  # the scores would come in powers of two, where a soft cap wants them as they are


@pytest.mark.parametrize(
    ("name", "safe"),
    [("soft cap", True), ("causal and soft cap", True), ("window and soft cap", False), ("documents", False)],
)
def test_rows_are_called_safe_where_no_tile_has_an_empty_one(name: str, safe: bool) -> None:
    fn, inputs = CASES[name]
    assert options_of(fn, *inputs)["ROWS_GUARANTEED_SAFE"] is safe


def test_rows_are_not_safe_where_keys_are_split() -> None:
    assert not options_of(softcap, *qkv(q_len=8, kv_len=300))["ROWS_GUARANTEED_SAFE"]


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"q_len": 1}, None),
        ({"q_len": 127}, None),
        ({"q_len": 128}, "few"),
        ({"q_len": 16, "heads": 8, "kv_heads": 1}, None),
        ({"q_len": 17, "heads": 8, "kv_heads": 1}, "tile"),
        ({"q_len": 4, "heads": 6, "kv_heads": 2}, "power of two"),
    ],
)
def test_decoding_is_asked_for_where_it_can(shape: dict[str, int], reason: str | None) -> None:
    heads, kv_heads = shape.get("heads", 2), shape.get("kv_heads", 2)

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return softcap(q, *(x.repeat_interleave(heads // kv_heads, 1) for x in (k, v)))

    inputs = qkv(1, heads, shape["q_len"], 700, kv_heads=kv_heads)
    graph, _ = rewritten(fn, *inputs, poor_cases=())
    assert call_of(graph).args[6]["BACKEND"] == ("AUTO" if reason is None else "TRITON")


def test_an_unknown_number_of_rows_or_batch_does_not_decode() -> None:
    for dim in (0, 2):
        inputs = qkv(3, 2, 5, 300)
        torch._dynamo.mark_dynamic(inputs[0], dim)
        graphs: list[torch.fx.GraphModule] = []

        def keep(gm: torch.fx.GraphModule, _: Any, graphs: list[Any] = graphs) -> Callable[..., Any]:
            graphs.append(gm)
            return gm.forward

        if dim == 0:
            for x in inputs:
                torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.reset()
        backend = attn_pass.wrap(keep, choose="fused", on_error="raise", **ON_CUDA)
        torch.compile(softcap, backend=backend)(*inputs)
        assert call_of(graphs[0]).args[6]["BACKEND"] == "TRITON"


def test_the_operators_of_a_backward_are_ones_inductor_inlines() -> None:
    """The derivative of the score function becomes part of the kernel, so each of its operators needs a lowering."""
    from torch._inductor.decomposition import decompositions
    from torch._inductor.lowering import lowerings

    for name in ("soft cap", "window and soft cap", "alibi", "clamp", "weak fill", "dense bias"):
        fn, inputs = CASES[name]
        graph, _ = rewritten(fn, *inputs)
        call = call_of(graph)
        captured = [
            torch.zeros(held.shape, dtype=held.dtype) for held in map(tensor_of, call.args[7]) if held is not None
        ]
        places = [torch.zeros((), dtype=torch.int32)] * 4

        module = getattr(graph, call.args[3].target)

        def backward(score: Tensor, *rest: Tensor, module: Any = module) -> Tensor:
            return torch.autograd.grad(module(score, *rest), score)[0]

        score = torch.zeros((), requires_grad=True)
        traced = torch.fx.experimental.proxy_tensor.make_fx(backward)(score, *places, *captured)
        used = {n.target for n in traced.graph.nodes if n.op == "call_function"}
        assert used and not [op for op in used if op not in lowerings and op not in decompositions], name


H200 = registry.by_name("H200")


def problem(**sizes: int) -> Problem:
    shape = {"batch": 1, "heads": 32, "kv_batch": 1, "kv_heads": 32, "q_len": 4096, "kv_len": 4096}
    return Problem(**{**shape, "head_dim": 128, "value_dim": 128, **sizes}, dtype=torch.bfloat16)  # type: ignore[arg-type]


def test_the_cost_is_near_what_is_reported() -> None:
    """275 GFLOP at about half of 790 TFLOP/s; half of it for a causal mask; longer on an older GPU."""
    full = cost_cuda.flex(H200, problem(), 1.0)
    assert full == pytest.approx(4 * 4096 * 4096 * 32 * 128 / 0.5 / 790e6, rel=0.1)
    assert cost_cuda.flex(H200, problem(), 0.5) == pytest.approx(full / 2, rel=0.1)
    a100 = registry.by_name("A100")
    assert cost_cuda.flex(a100, problem(), 1.0) > full


def test_splits_keep_the_device_busy() -> None:
    few = problem(heads=8, kv_heads=8, q_len=4, kv_len=65536)
    assert cost_cuda.flex(H200, few, 1.0) > 5 * cost_cuda.flex(H200, few, 1.0, splits_keys=True)
    grouped = problem(heads=32, kv_heads=8, q_len=4, kv_len=65536)
    assert cost_cuda.flex(H200, grouped, 1.0, splits_keys=True) < cost_cuda.flex(H200, grouped, 1.0)


def predictions(fn: Callable[..., Any], *inputs: Tensor, **options: Any) -> attn_pass.SiteReport:
    options = {"device": "H200", **options}
    torch._dynamo.reset()
    with torch.no_grad(), FakeTensorMode() as mode:  # explain runs the program, some of whose products take seconds
        return attn_pass.explain(fn, *map(mode.from_tensor, inputs), attn_pass_options=options).sites[0]


def test_a_long_window_is_chosen_by_cost() -> None:
    q, k, v = (torch.empty(1, 8, 4096, 64, dtype=torch.bfloat16) for _ in range(3))
    site = predictions(masked(window), q, k, v, targets=("flex", "efficient"))
    assert site.target == "flex" and site.predicted_us["flex"] < site.predicted_us["leave"]
    site = predictions(masked(causal), q, k, v)
    assert site.target != "flex" and "flex" not in site.predicted_us


# ---- the tuner


def measured_by(clock: Callable[[Sequence[str]], dict[str, float]], **shape: int) -> tuple[Any, list[str]]:
    """The call that is emitted where forms are timed like that, and the labels that were to be timed."""
    from attn_pass.entries import transaction
    from attn_pass.options import make_options

    asked: list[str] = []
    graphs: list[torch.fx.GraphModule] = []
    reports: list[attn_pass.Report] = []

    def measure(_: Any, labels: Sequence[str]) -> dict[str, float]:
        asked.extend(labels)
        return {"leave": 100.0, **clock(labels)}

    def compile_as(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        options = make_options(device="H200", on_error="raise")
        reports.append(transaction.decide(gm, options, "compile", "inductor", measure=measure).report)
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(grouped, backend=compile_as, dynamic=False)(*qkv(heads=4, kv_heads=2, **{**BIG, **shape}))
    return (graphs[0], reports[0].sites[0]), asked


def test_block_sizes_are_measured_and_taken_by_their_label() -> None:
    _, labels = measured_by(lambda labels: dict.fromkeys(labels, 50.0))
    assert len(labels) == len(set(labels)) == 4 and labels[0] == "flex"
    assert labels[1:] == [x for x in labels if x.startswith("flex (BLOCK_M=")]
    for label in labels[1:]:
        (graph, site), _ = measured_by(lambda _, label=label: {label: 1.0})
        options = call_of(graph).args[6]
        for word in label[len("flex (") : -1].split():
            name, value = word.split("=")
            assert options[name] == int(value)
        assert site.poor_cases == () and site.measured_us[label] == 1.0


def test_the_worker_gives_a_form_by_its_label() -> None:
    from attn_pass.planner.choose import only

    label = measured_by(lambda labels: dict.fromkeys(labels, 50.0))[1][-1]
    seen: list[Any] = []

    def compile_as(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        from attn_pass.entries import transaction
        from attn_pass.options import make_options

        seen.append(
            transaction.decide(gm, make_options(device="H200"), "compile", "inductor", measure=only(label)).report
        )
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(grouped, backend=compile_as, dynamic=False)(*qkv(heads=4, kv_heads=2, **BIG))
    assert seen[0].sites[0].outcome == "rewritten" and label in seen[0].sites[0].reason


def test_without_measuring_no_block_sizes_are_considered() -> None:
    site = predictions(grouped, *qkv(heads=4, kv_heads=2, **BIG))
    assert not [label for label in site.predicted_us if "BLOCK" in label]


def test_block_sizes_divide_the_masks_blocks_and_fit() -> None:
    from attn_pass.targets.flex.flex import _BLOCKS, _DECODING_TILES, _TILES, _WIDE_TILES

    assert all(_BLOCKS["triton"][0] % m == 0 and _BLOCKS["triton"][1] % n == 0 for m, n, *_ in (*_TILES, *_WIDE_TILES))
    assert all(_BLOCKS["triton"][1] % n == 0 for n, *_ in _DECODING_TILES)


@pytest.mark.parametrize(("device", "dim", "tiles"), [("H200", 128, 4), ("H200", 256, 2), ("L4", 128, 1)])
def test_block_sizes_that_do_not_fit_the_device_are_not_tried(
    device: str, dim: int, tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = [x.to(torch.bfloat16) for x in qkv(1, 2, 300, 300, dim)]
    case = case_of(masked(window), *inputs, monkeypatch=monkeypatch)
    setting = replace(case.setting, device=registry.by_name(device))
    offer = Flex().consider(case.attention, "", setting)
    assert (
        isinstance(offer, Offer) and offer.compiled_for_site and len(list(Flex().alternatives(offer, setting))) == tiles
    )


@pytest.mark.parametrize(("backward", "ambient"), [(True, False), (True, True), (False, False)])
def test_a_kernel_keeps_what_its_backward_reads_in_any_grad_mode(backward: bool, ambient: bool) -> None:
    """A graph may be planned under no_grad and run a site that trains: without its log-sum-exp gradients are noise."""
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(name) for name in "qkv"]
    without_driver = mock.patch.object(fake_tensor, "init_gpu_context", lambda *_: None, create=True)  # of torch 2.11
    with without_driver, FakeTensorMode(), torch.set_grad_enabled(ambient):
        for node in nodes:
            node.meta["example_value"] = torch.empty(1, 2, 8, 16, device="cuda")
        assert kernel_options(nodes, backward=backward)["OUTPUT_LOGSUMEXP"] is backward
        assert torch.is_grad_enabled() is ambient
