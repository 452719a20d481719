"""The state each node runs under, compared with torch's real state there, in both dialects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_pass.graph.regions import Region, Regions, region_of_body
from attn_pass.graph.subgraphs import bodies


class Captured:
    """The graph of a function, its inputs, and the ambient region its backend saw."""

    def __init__(self, function: Callable[..., Any], *inputs: Any) -> None:
        self.ambient = Region()

        def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
            self.gm, self.inputs, self.ambient = gm, example_inputs, Region.ambient()
            return gm.forward

        torch._dynamo.reset()
        torch.compile(function, backend=backend, fullgraph=True)(*inputs)

    def named(self, name: str) -> Node:
        return next(n for n in self.gm.graph.nodes if n.name == name)

    def regions(self) -> Regions:
        return Regions(self.gm.graph, self.ambient)


class Witness(Interpreter):
    """Runs a graph for real and compares torch's own state after every node with the region of the node."""

    def __init__(self, captured: Captured) -> None:
        super().__init__(captured.gm)
        self.regions = captured.regions()
        self.states: set[Region] = set()

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function" or n.op == "call_method":
            region, real = self.regions.of(n), Region.ambient()
            for field in ("autocast", "grad_enabled", "inference_mode", "sdpa_backends", "deterministic"):
                assert getattr(region, field) == getattr(real, field), f"{field} at {n.format_node()}"
            self.states.add(region)
        return result


def witness(captured: Captured) -> int:
    """Checks the regions of a graph against its execution; how many different ones there are."""
    run = Witness(captured)
    run.run(*captured.inputs)
    return len(run.states)


# ---------------------------------------------------------------- against the real state


def nested_autocast(x: torch.Tensor) -> Any:
    before = x @ x
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ x
        with torch.autocast("cpu", enabled=False):
            z = y.float() @ x
        with torch.autocast("cpu", torch.float16):
            w = x @ x
        v = y @ y
    return before, v, z, w, x @ x


def nested_grad_modes(x: torch.Tensor) -> Any:
    y = x @ x
    with torch.no_grad():
        z = y @ x
        with torch.enable_grad():
            w = z @ x
        z = z @ x
    with torch.inference_mode():
        v = x @ x
    return y, z + w, v


def sdpa_backends(x: torch.Tensor) -> Any:
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
        y = F.scaled_dot_product_attention(x, x, x)
        with sdpa_kernel(SDPBackend.MATH):
            z = F.scaled_dot_product_attention(y, x, x)
        w = F.scaled_dot_product_attention(z, x, x)
    return F.scaled_dot_product_attention(w, x, x)


def deterministic(x: torch.Tensor) -> Any:
    torch.use_deterministic_algorithms(True)
    y = x @ x
    torch.use_deterministic_algorithms(False)
    return y @ x


@pytest.mark.parametrize("function", [nested_autocast, nested_grad_modes, sdpa_backends, deterministic])
@pytest.mark.parametrize("around", ["nothing", "no_grad", "autocast", "sdpa_kernel"])
def test_regions_are_the_states_torch_is_in(function: Callable[..., Any], around: str) -> None:
    contexts = {
        "nothing": torch.enable_grad(),
        "no_grad": torch.no_grad(),
        "autocast": torch.autocast("cpu", torch.float16),
        "sdpa_kernel": sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]),
    }
    with contexts[around]:
        captured = Captured(function, torch.randn(1, 2, 8, 8, requires_grad=function is nested_grad_modes))
        assert witness(captured) >= 2


# ---------------------------------------------------------------- what is one region and what is not


def test_leaving_a_block_restores_the_region_before_it() -> None:
    def f(x: torch.Tensor) -> Any:
        a = x + 1
        with torch.no_grad():
            b = a + 1
        with torch.autocast("cpu", torch.bfloat16):
            c = b + 1
        with sdpa_kernel(SDPBackend.MATH):
            d = c + 1
        return d + 1

    captured = Captured(f, torch.randn(4))
    for outer in (captured.ambient, Region()):  # known, and unknown: the switches come in pairs
        regions = Regions(captured.gm.graph, outer)
        a, b, c, d, e = (regions.of(captured.named(name)) for name in ("a", "b", "c", "d", "add_4"))
        assert a == e and len({a, b, c, d}) == 4
        assert b.grad_enabled is False
        assert c.autocast_dtype("cpu") is torch.bfloat16 and a.autocast_dtype("cpu") is None
        assert d.sdpa_backends == ("MATH",) and a.sdpa_backends is None


def test_unpaired_switches_prove_nothing_about_the_earlier_mode() -> None:
    def f(x: torch.Tensor) -> Any:
        y = x + 1
        torch._C._set_grad_enabled(False)
        z = y + 1
        torch._C._set_grad_enabled(True)
        w = z + 1
        torch._C._set_grad_enabled(True)
        return w + 1

    captured = Captured(f, torch.randn(4))
    regions = Regions(captured.gm.graph)
    y, z, w = (regions.of(captured.named(name)) for name in "yzw")
    assert (y.grad_enabled, z.grad_enabled, w.grad_enabled) == (None, False, True)
    assert captured.regions().of(captured.named("y")) == captured.regions().of(captured.named("w"))


def test_autocast_around_the_compiled_function_is_known_though_in_no_node() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        captured = Captured(lambda x: x @ x, torch.randn(4, 4))
    assert not any("autocast" in n.name for n in captured.gm.graph.nodes)
    assert captured.regions().of(captured.named("matmul")).autocast_dtype("cpu") is torch.bfloat16
    assert "autocast(cpu, bfloat16)" in captured.ambient.describe()


def test_switching_autocast_off_where_it_is_off_changes_nothing() -> None:
    def f(x: torch.Tensor) -> Any:
        y = x @ x
        with torch.autocast("cpu", enabled=False):  # as the rotary embeddings of transformers do
            return y @ x

    captured = Captured(f, torch.randn(4, 4))
    y, product = captured.named("y"), captured.named("matmul_1")
    assert captured.regions().of(y) == captured.regions().of(product)
    assert Regions(captured.gm.graph).of(y) != Regions(captured.gm.graph).of(product)  # unknown: perhaps not off


def test_the_order_of_sdpa_backends_is_a_state() -> None:
    def f(x: torch.Tensor) -> Any:
        a = x + 1
        with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
            b = a + 1
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
            c = b + 1
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            d = c + 1
        return d + 1

    captured = Captured(f, torch.randn(4))
    regions = captured.regions()
    a, b, c, d, e = (regions.of(captured.named(name)) for name in ("a", "b", "c", "d", "add_4"))
    assert b.sdpa_backends == c.sdpa_backends == d.sdpa_backends == ("FLASH_ATTENTION", "MATH")
    assert a == e and len({a, b, c, d}) == 4


def test_functorch_levels() -> None:
    def f(x: torch.Tensor) -> Any:
        y = x + 1
        a = torch.vmap(lambda row: torch.vmap(torch.sin)(row))(y)
        b = torch.vmap(torch.cos)(y)
        c = torch.func.grad(lambda t: t.tanh().sum())(y)
        _, d = torch.func.jvp(torch.exp, (y,), (y,))
        return a, b, c, d, y - 1

    captured = Captured(f, torch.randn(4, 4))
    regions = captured.regions()

    def levels(word: str) -> tuple[str, ...]:
        names = {n: (n.target, getattr(n.target, "__name__", None)) for n in captured.gm.graph.nodes}
        return regions.of(next(n for n in names if word in names[n])).functorch

    def kinds(word: str) -> list[str]:
        return [level.partition(" ")[0] for level in levels(word)]

    assert kinds("sin") == ["vmap", "vmap"] and kinds("cos") == ["vmap"]
    assert kinds("tanh") == ["grad"] and kinds("exp") == ["jvp", "dual"]
    assert levels("sin")[0] != levels("cos")[0]  # another vmap is another level
    first, last = captured.named("y"), next(n for n in captured.gm.graph.nodes if n.name.startswith("sub"))
    assert regions.of(first) == regions.of(last) and regions.of(first).functorch == ()


def test_unknown_switches_are_regions_of_their_own() -> None:
    def f(x: torch.Tensor) -> Any:
        a = x @ x
        torch.set_float32_matmul_precision("high")
        b = a @ x
        torch.backends.cuda.enable_flash_sdp(False)
        return b @ x

    precision = torch.get_float32_matmul_precision()
    try:
        captured = Captured(f, torch.randn(4, 4))
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cuda.enable_flash_sdp(True)
    regions = captured.regions()
    states = {regions.of(captured.named(name)) for name in ("a", "b", "matmul_2")}
    assert len(states) == 3
    assert "set_float32_matmul_precision('high',)" in regions.of(captured.named("b")).describe()


def test_saved_tensor_hooks_are_counted() -> None:
    def f(x: torch.Tensor) -> Any:
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            y = x.sin()
        return y.cos()

    captured = Captured(f, torch.randn(4, requires_grad=True))
    regions = captured.regions()
    assert regions.of(captured.named("y")).saved_tensors_hooks == 1
    assert regions.of(captured.named("cos")) == captured.ambient


def test_enter_and_exit_of_functions_unknown_today() -> None:
    """By name, as a later torch might emit them."""

    def switch(name: str) -> Callable[..., Any]:
        def function(*args: Any) -> None: ...

        function.__name__, function.__module__ = name, "torch._C._future"
        return function

    graph = Graph()
    x = graph.placeholder("x")
    a = graph.call_function(torch.neg, (x,))
    entered = graph.call_function(switch("_enter_mode"), (3,))
    b = graph.call_function(torch.neg, (a,))
    graph.call_function(switch("_exit_mode"), (entered,))
    c = graph.call_function(torch.neg, (b,))
    graph.call_function(switch("_func_increment_nesting"), ())
    d = graph.call_function(torch.neg, (c,))
    graph.call_function(switch("_func_decrement_nesting"), ())
    e = graph.call_function(torch.neg, (d,))
    graph.output(e)
    regions = Regions(graph)
    assert regions.of(a) == regions.of(c) == regions.of(e) == Region()
    assert regions.of(b).other and regions.of(d).functorch
    assert "mode" in regions.of(b).describe() and "torch.func.func" in regions.of(d).describe()


def test_a_stream_is_a_state_though_it_is_only_an_annotation() -> None:
    def f(x: torch.Tensor) -> Any:
        stream = torch.Stream(device="cpu")
        with stream:
            y = x + 1
        return y * 2

    captured = Captured(f, torch.randn(4))
    regions = captured.regions()
    assert "stream" in regions.of(captured.named("y")).describe()
    assert regions.of(captured.named("mul")) == regions.of(captured.named("l_x_")) == captured.ambient


# ---------------------------------------------------------------- exported graphs


def _exported(function: Callable[[torch.Tensor], Any], x: torch.Tensor) -> GraphModule:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return function(x)

    return torch.export.export(Model(), (x,)).graph_module


def test_bodies_of_exported_blocks_start_in_the_state_of_the_block() -> None:
    def f(x: torch.Tensor) -> Any:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            y = x @ x
        with torch.autocast("cpu", torch.bfloat16):
            z = (x @ x).softmax(-1)
            with torch.autocast("cpu", enabled=False):
                w = x @ x
        return y, z, w

    gm = _exported(f, torch.randn(4, 4, requires_grad=True))
    by_call: dict[str, Region] = {}

    def visit(module: GraphModule, outer: Region) -> None:
        regions = Regions(module.graph, outer)
        for node in module.graph.nodes:
            if node.op == "call_function" and "aten" in str(node.target):
                by_call[node.name] = regions.of(node)
        for body in bodies(module):
            (call,) = body.calls
            visit(body.module, region_of_body(call.node, regions.of(call.node)))

    visit(gm, Region())
    first, second, third = by_call["matmul"], by_call["matmul_1"], by_call["matmul_2"]
    assert (first.autocast_dtype("cpu"), first.grad_enabled) == (torch.bfloat16, False)
    assert (second.autocast_dtype("cpu"), second.grad_enabled) == (torch.bfloat16, None)
    assert (third.autocast_dtype("cpu"), third.grad_enabled) == (None, None)
    assert by_call["softmax"] == second
    assert third.describe() == "autocast off"
    assert first.describe() == "autocast(cpu, bfloat16), gradients off"


def test_the_forward_of_a_custom_function_records_nothing() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    captured = Captured(lambda x: Double.apply(x) + 1, torch.randn(4, requires_grad=True))
    forward = next(b for b in bodies(captured.gm) if b.kind == "autograd_forward")
    (call,) = forward.calls
    outer = captured.regions().of(call.node)
    assert outer.grad_enabled is True
    assert region_of_body(call.node, outer).grad_enabled is False
    inner = Regions(forward.module.graph, region_of_body(call.node, outer))
    assert {inner.of(n).grad_enabled for n in forward.module.graph.nodes if n.name == "outs"} == {False}


def test_other_bodies_run_in_the_state_of_their_call() -> None:
    captured = Captured(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), torch.randn(4))
    region = Region(grad_enabled=False, autocast=(("cpu", torch.bfloat16, True, True),))
    for body in bodies(captured.gm):
        assert region_of_body(body.calls[0].node, region) == region


# ---------------------------------------------------------------- restore


@pytest.mark.parametrize("around", [torch.enable_grad, torch.no_grad, lambda: torch.autocast("cpu", torch.float16)])
def test_restore_puts_torch_into_the_state_and_back(around: Callable[[], Any]) -> None:
    off = ("cpu", None, False, None)
    wanted = [
        Region(grad_enabled=False, autocast=(("cpu", torch.bfloat16, True, True),)),
        Region(grad_enabled=True, autocast=(off,), sdpa_backends=("FLASH_ATTENTION", "MATH")),
        Region(inference_mode=True, grad_enabled=False),
    ]
    with around():
        before = Region.ambient()
        for region in wanted:
            with region.restore():
                now = Region.ambient()
                assert (now.grad_enabled, now.sdpa_backends) == (region.grad_enabled, region.sdpa_backends)
                assert bool(now.inference_mode) == bool(region.inference_mode)
                if region.autocast:
                    assert now.autocast_dtype("cpu") is region.autocast_dtype("cpu")
                product = torch.ones(2, 2) @ torch.ones(2, 2)
                assert product.dtype is (now.autocast_dtype("cpu") or torch.float32)
            assert Region.ambient() == before
        with Region().restore():
            assert Region.ambient() == before
        with pytest.raises(ValueError, match="inside"), wanted[0].restore():
            raise ValueError("inside")
        assert Region.ambient() == before


def test_restore_of_a_device_that_is_not_here_says_nothing(recwarn: pytest.WarningsRecorder) -> None:
    with Region(autocast=(("cuda", torch.float16, True, True),)).restore():
        pass
    assert not [w for w in recwarn if "autocast" in str(w.message).lower()]


def test_regions_are_hashable_and_described_in_words() -> None:
    assert Region().describe() == "no special state"
    levels = ("vmap node", "dual node")
    region = Region(sdpa_backends=("MATH",), functorch=levels, saved_tensors_hooks=1, deterministic=True)
    assert len({region, Region(), Region.ambient()}) == 3
    assert region.describe() == (
        "deterministic algorithms on, sdpa_kernel(MATH), inside torch.func.vmap, inside forward-mode AD, "
        "saved-tensor hooks changed"
    )
