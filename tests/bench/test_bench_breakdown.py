"""The breakdown of a model's time: what a profiler's events belong to, and one model measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from bench.harness import variants as w
from bench.harness.programs import Setting
from bench.suites import breakdown
from bench.suites.breakdown import ATTENTION, PRODUCTS, part_of, part_of_layer, part_of_node


@pytest.mark.parametrize(
    ("event", "part"),
    [
        ("aten::addmm", PRODUCTS),
        ("aten::convolution", PRODUCTS),
        ("mkl::_mkl_linear", PRODUCTS),
        ("mkldnn::_linear_pointwise", PRODUCTS),
        ("aten::bmm", ATTENTION),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", ATTENTION),
        ("graph_0_cpp_fused_attention_permute_slice_view_0", ATTENTION),
        ("graph_0_cpp_fused__softmax_add_mul_2", ATTENTION),
        ("graph_0_cpp_fused_addmm_gelu_view_3", ""),
        ("graph_0_cpp_fused_convolution_view_1", ""),
        ("aten::empty_strided", ""),
        ("Torch-Compiled Region: 0/0", ""),
    ],
)
def test_what_an_event_belongs_to(event: str, part: str) -> None:
    assert part_of(event) == part


def test_products_of_a_runtime_have_weights_and_those_of_attention_have_none() -> None:
    def node(name: str, *shapes: list[int]) -> dict[str, object]:
        return {"op_name": name, "input_type_shape": [{"float": shape} for shape in shapes]}

    assert part_of_node(node("MatMul", [1, 9, 64])) == PRODUCTS  # weights that are packed are not listed
    assert part_of_node(node("MatMul", [1, 9, 64], [64, 192])) == PRODUCTS
    assert part_of_node(node("FusedGemm", [9, 64], [64, 192], [192])) == PRODUCTS
    assert part_of_node(node("FusedMatMul", [1, 4, 9, 16], [1, 4, 16, 9])) == ATTENTION
    assert part_of_node(node("Softmax", [1, 4, 9, 9])) == ATTENTION
    assert part_of_node(node("LayerNormalization", [1, 9, 64], [64], [64])) == ""
    assert part_of_layer("FullyConnected", "node_MatMul_1,node_gelu") == PRODUCTS
    assert part_of_layer("Subgraph", "node_mul,node_softmax,node_matmul_1") == ATTENTION
    assert part_of_layer("Subgraph", "node_add_1") == ""


def test_flops_are_those_of_products_and_of_attention() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.last = nn.Linear(16, 48), nn.Linear(16, 7, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.project(x).view(2, 5, 3, 2, 8).permute(2, 0, 3, 1, 4)
            called = scaled_dot_product_attention(q, k, v)
            by_hand = (q @ k.mT).softmax(-1) @ v
            return self.last(x[:1, -1:]).sum() + (called + by_hand).sum()

    with torch.no_grad(), breakdown.Flops() as flops:
        Layer()(torch.randn(2, 5, 16))
    assert flops.counted == {PRODUCTS: 2 * 10 * 16 * 48 + 2 * 16 * 7, ATTENTION: 2 * 2 * 2 * (2 * 2 * 5 * 5 * 8)}


def test_a_row_has_times_and_rates() -> None:
    parts = {"all": 0.1, PRODUCTS: 0.05, ATTENTION: 0.02, "": 0.01}
    row = breakdown.row_of(parts, {PRODUCTS: 1e9, ATTENTION: 1e8})
    assert row["all"] == 0.1 and row["rest"] == pytest.approx(0.03)
    assert row["products_rate"] == pytest.approx(20) and row["attention_rate"] == pytest.approx(5)


@pytest.mark.slow
def test_a_model_is_broken_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breakdown, "ways_of", lambda program: [w.STOCK, w.PASS])
    threads = torch.get_num_threads()
    with torch.no_grad():
        rows = list(breakdown.measured("GPT-2, 2 layers, 1 x 128", Setting(rounds=2, quick=True)))
    torch.set_num_threads(threads)
    assert [row["way"] for row in rows] == [w.STOCK, w.PASS]
    for row in rows:
        assert row["status"] == "ok" and row[PRODUCTS] > 0 and row[ATTENTION] > 0
        assert row[PRODUCTS] + row[ATTENTION] < row["all"]
