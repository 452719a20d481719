"""The names of torch's operations, and operators of others that have the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from against_eager import randn
from torch import Tensor, nn

import attn_pass
from attn_pass.graph.names import torch_name
from attn_pass.reading.vocabulary import understand


@torch.library.custom_op("attn_pass_names::flat", mutates_args=())
def flat(x: Tensor) -> Tensor:
    """Walks memory from the first element on, as operators in C++ may."""
    return torch.as_strided(x, (x.numel(),), (1,)).clone().view(x.shape) * 2.0


@torch.library.custom_op("attn_pass_names::copy", mutates_args=())
def copy(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.custom_op("attn_pass_names::exp_", mutates_args={"x"})
def exp_(x: Tensor) -> None:
    x.add_(1)


for made in (flat, copy):
    made.register_fake(lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device))
OURS = torch.ops.attn_pass_names


def double(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (torch.matmul, "matmul"),
        (torch.nn.functional.softmax, "softmax"),
        (torch.add, "add"),
        (torch.ops.aten.mul.Tensor, "mul"),
        (torch.ops.aten.mul, "mul"),
        ("view", "view"),
        (OURS.copy, ""),
        (OURS.copy.default, ""),
        (double, ""),
    ],
)
def test_the_name_of_an_operation(target: object, name: str) -> None:
    graph = torch.fx.Graph()
    node = graph.call_method(target, ()) if isinstance(target, str) else graph.call_function(target, ())  # type: ignore[arg-type]
    assert torch_name(node) == name


def test_what_is_no_call_has_no_name() -> None:
    graph = torch.fx.Graph()
    module = graph.create_node("call_module", "norm", ())
    assert torch_name(module) == torch_name(graph.output(module)) == ""


def test_an_operator_in_place_of_another_library_is_not_torchs() -> None:
    graph = torch.fx.Graph()
    assert understand(graph.call_function(OURS.exp_.default, (graph.placeholder("x"),))) is None


@pytest.mark.parametrize("operator", [OURS.flat, OURS.flat.default])
def test_a_custom_operator_gets_its_operand_in_the_programs_layout(operator: Callable[..., Tensor]) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return operator((q @ k.mT * 0.125).softmax(-1) @ v)

    inputs = [randn(2, 16, 4, 8) for _ in range(3)]
    expected = run(*inputs)
    for target in ("sdpa", "cpu_kernel"):
        torch._dynamo.reset()
        with torch.no_grad():
            compiled = torch.compile(run, backend=attn_pass.wrap("eager", choose="fused", targets=(target,)))
            assert (compiled(*inputs) - expected).abs().max() < 1e-5


def test_a_custom_operator_named_like_a_question_of_shape_gets_the_scores() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores = q @ k.mT * 0.125
        return scores.softmax(-1) @ v, OURS.copy(scores).amax(-1)

    inputs = [randn(2, 4, 16, 8) for _ in range(3)]
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(run, backend=attn_pass.wrap("eager", choose="fused", targets=("sdpa",)))
        for got, expected in zip(compiled(*inputs), run(*inputs), strict=True):
            assert (got - expected).abs().max() < 1e-5


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Dropout(0.5)  # of that name is a method, too

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.norm((q @ k.transpose(-2, -1) * 0.25).softmax(-1) @ v)


def test_a_module_that_reads_the_result_is_left_alone() -> None:
    inputs = [randn(2, 4, 16, 8) for _ in range(3)]
    traced = torch.fx.symbolic_trace(Dropped().eval())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        report = attn_pass.rewrite(traced, inputs, choose="fused", targets=("sdpa",))
        assert report.sites[0].outcome == "rewritten"
        assert (traced(*inputs) - Dropped().eval()(*inputs)).abs().max() < 1e-5
