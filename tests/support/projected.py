"""Attention with projections for tests, and what became of them: decided as Inductor's graphs are, run eagerly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F

import attn_pass
from attn_pass.entries.known import known_buffers
from attn_pass.entries.transaction import decide
from attn_pass.graph.values import FOLDS_CONSTANTS
from attn_pass.options import make_options
from attn_pass.report.projection import ProjectionReport

B, L, E, H = 2, 10, 32, 4


class Projected(nn.Module):
    """One attention with three linear layers; ``kv_heads`` keys and values for ``H`` queries."""

    def __init__(self, bias: tuple[bool, bool, bool] = (True, True, True), kv_heads: int = H) -> None:
        super().__init__()
        self.kv_heads = kv_heads
        widths = (E, kv_heads * E // H, kv_heads * E // H)
        self.q, self.k, self.v = (nn.Linear(E, n, bias=b) for n, b in zip(widths, bias))
        self.out = nn.Linear(E, E)

    def inputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What queries, keys and values are made of."""
        return x, x, x

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The attention of projected (B, L, heads * D)."""
        q, k, v = (t.unflatten(-1, (-1, E // H)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv_heads != H)
        return y.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Any:
        """(B, L, E) to the same."""
        a, b, c = self.inputs(x)
        return self.out(self.attend(self.q(a), self.k(b), self.v(c)))


class Traced:
    """What became of a model: its graph, rewritten, its records, and the model compiled with that graph."""

    def __init__(self, model: nn.Module, frozen: bool = True, grad: bool = False, **options: Any) -> None:
        self.records: list[ProjectionReport] = []
        self.graphs: list[GraphModule] = []
        self.options = make_options(**{"choose": "fused", "on_error": "raise", **options})
        torch._dynamo.reset()
        self.frozen, self.grad = frozen, grad
        self.model = torch.compile(model.eval(), backend=self._backend, fullgraph=True)

    def _backend(self, gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        known = known_buffers(gm, inputs, self.options) | {FOLDS_CONSTANTS: self.frozen and not self.grad}
        self.records += decide(gm, self.options, "compile", "inductor", lambda: known).report.projections
        self.graphs.append(gm)
        return gm.forward

    def __call__(self, *args: Any) -> Any:
        with torch.set_grad_enabled(self.grad), torch._inductor.config.patch(freezing=self.frozen):
            return self.model(*args)

    @property
    def products(self) -> int:
        """How many linear layers the graph has."""
        nodes = [n for gm in self.graphs for n in gm.graph.nodes]
        return sum("linear" in str(n.target) for n in nodes)


def compared(model: nn.Module, *args: Any, **options: Any) -> Traced:
    """A frozen model whose results are those of float64."""
    args = args or (torch.randn(B, L, E),)
    traced = Traced(model, **options)
    exact = copy.deepcopy(model).double()
    got = traced(*args)
    with torch.no_grad():
        wanted = exact(*(a.double() for a in args))
    torch.testing.assert_close(got, wanted.to(torch.float32), rtol=1e-5, atol=1e-5)
    return traced


def joined(model: nn.Module, *args: Any, **options: Any) -> ProjectionReport:
    """The one record of a model whose projections are one product, after its results were compared."""
    traced = compared(model, *args, **options)
    (record,) = (r for r in traced.records if r.outcome == "joined")
    return record


def left(model: nn.Module, *args: Any, **options: Any) -> list[str]:
    """The reasons of a model none of whose projections are joined, after its results were compared."""
    traced = compared(model, *args, **options)
    assert all(r.outcome == "left" for r in traced.records)
    return [r.reason for r in traced.records]


def compiled(model: nn.Module, monkeypatch: pytest.MonkeyPatch, fullgraph: bool = True, **options: Any) -> Any:
    """The model as `attn_pass.backend` compiles it, with AOTAutograd and without code, and its report."""
    from torch._dynamo.backends.debugging import aot_eager

    from attn_pass.entries import dynamo

    monkeypatch.setattr(dynamo, "compile_under", lambda patches, gm, inputs, report: aot_eager(gm, inputs))
    torch._dynamo.reset()
    own = {"choose": "fused", "join_projections": "parameters", "on_error": "raise", **options}
    return torch.compile(model, backend=attn_pass.backend, options=own, fullgraph=fullgraph)
