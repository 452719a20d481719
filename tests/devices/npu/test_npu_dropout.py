"""Dropout on Ascend's training operator, which draws random numbers without declaring it: what is accepted, what is
left.

AOTAutograd merges equal calls of operators it does not know to draw, and computes them again in a checkpoint's backward
with other numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import npu_stand_in
import pytest
import torch
import torch.nn.functional as F
from against_eager import qkv, randn
from by_hand import NONE_IN_ONE
from npu_programs import FUSION, LOWEST, Tensor, reason
from torch.utils.checkpoint import checkpoint

import attn_pass
from attn_pass.compat import recomputes_everything

ALIKE, RECOMPUTED = "another site may draw dropout", "in a checkpoint"


def dropped(q: Tensor, k: Tensor, v: Tensor, rate: float = 0.5) -> Tensor:
    return F.dropout((q @ k.mT * 0.3).softmax(-1), rate) @ v


def called(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)


def by_operator(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.ops.npu.npu_fusion_attention_v3(q, k, v, q.size(1), "BNSD", scale=0.25, keep_prob=0.5)[0]


def compiled(fn: Callable[..., Any], *inputs: Tensor, backend: str = "aot_eager") -> tuple[Any, list[tuple[str, str]]]:
    """What the compiled program gives, and what became of its sites."""
    torch._dynamo.reset()
    wrapped = attn_pass.wrap(backend, device="Ascend910B", choose="fused", on_error="raise")
    with attn_pass.record() as report:
        out = torch.compile(fn, backend=wrapped)(*inputs)
    return out, [(s.outcome, s.reason) for s in report.sites]


def outcomes(fn: Callable[..., Any], *inputs: Tensor, **options: Any) -> list[str]:
    """For each site "rewritten", or why not, in as many words as are looked for."""
    options = {"device": "Ascend910B", "choose": "fused", "on_error": "raise", **options}
    sites = attn_pass.explain(fn, *inputs, attn_pass_options=options).sites
    known = (ALIKE, RECOMPUTED)
    return [next((w for w in known if w in s.reason), s.reason) if s.outcome == "left" else "rewritten" for s in sites]


LEAVES = qkv(2, 2, 8, 8, 16, grad=True)


@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition"])
def test_two_sites_that_are_written_alike_draw_two_masks(backend: str) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dropped(q, k, v) - dropped(q, k, v)

    out, sites = compiled(program, *LEAVES, backend=backend)
    assert out.abs().max() > 0.1
    assert [outcome for outcome, _ in sites] == ["rewritten", "left"] and ALIKE in sites[1][1]


@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition"])
def test_a_checkpoint_s_backward_has_the_mask_of_its_forward(backend: str) -> None:
    """The result is linear in the values: what is drawn twice shows as a gradient of another function."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(dropped, q, k, v, use_reentrant=False)

    out, sites = compiled(program, *LEAVES, backend=backend)
    (gradient,) = torch.autograd.grad(out.sum(), LEAVES[2])
    torch.testing.assert_close((gradient * LEAVES[2]).sum(), out.sum(), rtol=1e-4, atol=1e-3)
    assert [outcome for outcome, _ in sites] == ["left"] and RECOMPUTED in sites[0][1]


def test_a_gradient_is_of_the_mask_that_was_drawn() -> None:
    out, sites = compiled(dropped, *LEAVES)
    (gradient,) = torch.autograd.grad(out.sum(), LEAVES[2])
    torch.testing.assert_close((gradient * LEAVES[2]).sum(), out.sum(), rtol=1e-4, atol=1e-3)
    assert [outcome for outcome, _ in sites] == ["rewritten"]


class Model(torch.nn.Module):
    """Layers one after the other; ``shared``: of the same weights."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        first = torch.nn.Linear(32, 96)
        self.layers = torch.nn.ModuleList([first, first if shared else torch.nn.Linear(32, 96)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in layer(x).chunk(3, -1))
            x = x + dropped(q, k, v).transpose(1, 2).flatten(2)
        return x


def in_two(fn: Callable[..., Tensor], other: Callable[..., Tensor] | None = None) -> Callable[..., Tensor]:
    return lambda q, k, v: fn(q, k, v) - (other or fn)(q, k, v)


def written(q: Tensor, k: Tensor, v: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Two tensors that are made the same."""
    first.copy_(k)
    second.copy_(k)
    return dropped(q, first, v) - dropped(q, second, v)


def of_a_shape(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The second depends on the first's shape alone, which no compiler keeps."""
    first = dropped(q, k, v)
    return first - dropped(q + torch.zeros_like(first), k, v)


TAKEN = "rewritten"
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], list[str]]] = {
    "two layers": (Model(False), (randn(2, 8, 32),), [TAKEN, TAKEN]),
    "one layer twice": (Model(True), (randn(2, 8, 32),), [TAKEN, TAKEN]),
    "side by side": (lambda q, k, v, w: dropped(q, k, v) - dropped(w, k, v), (*LEAVES, randn(2, 2, 8, 16)),
                     [TAKEN, TAKEN]),
    "of the same": (in_two(dropped), LEAVES, [TAKEN, ALIKE]),
    "computed twice": (lambda q, k, v: dropped(q.sin(), k, v) - dropped(q.sin(), k, v), LEAVES, [TAKEN, ALIKE]),
    "through memory": (written, (*LEAVES, torch.zeros(2, 2, 8, 16), torch.zeros(2, 2, 8, 16)), [TAKEN, ALIKE]),
    "torch's own, one after the other": (lambda q, k, v: called(called(q, k, v), k, v), LEAVES, [TAKEN, TAKEN]),
    "of a shape": (of_a_shape, LEAVES, [TAKEN, ALIKE]),
    "one without": (in_two(dropped, lambda q, k, v: (q @ k.mT).softmax(-1) @ v), LEAVES, [TAKEN, TAKEN]),
    "torch's own twice": (in_two(called), LEAVES, [ALIKE, ALIKE]),
    "torch's own after": (in_two(dropped, called), LEAVES, [ALIKE, TAKEN]),
    "the operator's after": (in_two(dropped, by_operator), LEAVES, [ALIKE, TAKEN]),
    "in a checkpoint": (lambda q, k, v: checkpoint(dropped, q, k, v, use_reentrant=False), LEAVES, [RECOMPUTED]),
    "none in a checkpoint": (lambda q, k, v: checkpoint(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, q, k, v,
                                                        use_reentrant=False), LEAVES, [TAKEN]),
}  # fmt: skip


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_sites_that_draw(name: str) -> None:
    fn, inputs, expected = PROGRAMS[name]
    npu_stand_in.install()
    assert outcomes(fn, *inputs, targets=(FUSION,)) == expected


def test_a_backward_that_computes_everything_again() -> None:
    for setting in ({"activation_memory_budget": 0.5}, {"aggressive_recomputation": True}):
        assert not recomputes_everything()
        with torch._functorch.config.patch(**setting):
            assert recomputes_everything() and RECOMPUTED in reason(dropped, *LEAVES)
    assert not reason(dropped, *LEAVES)


def test_rows_without_a_key_draw_as_well() -> None:
    """A fill leaves a row its average, of which dropout takes a part: not a mean that is put there afterwards."""

    def program(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return F.dropout((q @ k.mT * 0.3).masked_fill(~keep, LOWEST).softmax(-1), 0.5) @ v

    inputs = (*qkv(2, 4, 6, 9, 16, grad=True), NONE_IN_ONE)
    assert "dropout would draw there as well" in reason(program, *inputs)
    assert not reason(program, *inputs, assume_nonempty_rows=True)
    causal = lambda q, k, v: program(q, k, v, torch.arange(9) <= torch.arange(6)[:, None])
    assert not reason(causal, *inputs[:3])
    out, _ = compiled(program, *inputs)
    again, _ = compiled(program, *inputs)
    assert (out - again).abs()[0].max() > 0.05
