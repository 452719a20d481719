"""The flex target for CUDA devices over a cache: blocks without a valid key are in no list."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from against_eager import NEG_INF, qkv
from flex_graphs import Blockwise, blockwise
from flex_programs import ON_CUDA

import attn_pass
from attn_pass.entries.transaction import compile_rewritten
from attn_pass.options import make_options

Tensor = torch.Tensor
POSITION, LENGTHS = torch.tensor(140), torch.tensor([100, 260])
S = 600


def at() -> Tensor:
    return torch.arange(S)


def row() -> Tensor:
    return torch.arange(200)[:, None]


def of_batch(n: Tensor) -> Tensor:
    return n[:, None, None, None]


# What is kept, of what the program knows; and of 2 x 5 blocks those that are visited.
MASKS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor, int]] = {
    "a position": (lambda p: at() <= p, POSITION, 2 * 2),
    "lengths": (lambda n: at() < of_batch(n), LENGTHS, 2 * 3),
    "causal from a position": (lambda p: at() <= row() + p, POSITION, 2 * 3),
    "a window from a position": (lambda p: (at() <= row() + p + 200) & (at() > row() + p), POSITION, 2 * 4),
    "left padding": (lambda n: at() >= of_batch(n) + 70, LENGTHS, 2 * 4),
    "a sink beside a window": (lambda p: ((at() <= p) & (at() > p - 40)) | (at() == 0), POSITION, 2 * 2),
    "nothing": (lambda p: at() < p - 140, POSITION, 0),
    "behind the last key": (lambda p: at() >= p + 900, POSITION, 0),
}


def attend(keep: Callable[[Tensor], Tensor], fill: float = NEG_INF) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, known: Tensor) -> Tensor:
        scores = torch.tanh(q @ k.mT * 0.05) * 5
        return scores.masked_fill(~keep(known), fill).softmax(-1).nan_to_num(0.0) @ v

    return run


def compiled(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """With the costs of Inductor, and blocks computed one by one as its templates would."""
    torch._dynamo.reset()
    Blockwise.visited = 0
    options = make_options(choose="fused", on_error="raise", **ON_CUDA)

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        return compile_rewritten(gm, inputs, options, lambda g, given, _: blockwise(g, list(given)), "inductor")

    return torch.compile(fn, backend=backend, dynamic=False)


@pytest.mark.parametrize("name", MASKS)
def test_only_blocks_with_a_valid_key_are_visited(name: str) -> None:
    keep, known, blocks = MASKS[name]
    fn, inputs = attend(keep), (*qkv(2, 1, 200, S, 16), known)
    with torch.no_grad(), attn_pass.record() as report:
        result = compiled(fn)(*inputs)
    assert [s.target for s in report.sites] == ["flex"] and Blockwise.visited == blocks
    torch.testing.assert_close(result, fn(*inputs), atol=1e-5, rtol=1e-5)


def test_one_graph_serves_every_position() -> None:
    keep, _, _ = MASKS["causal from a position"]
    fn, operands = attend(keep), qkv(1, 1, 200, S, 16)
    run, visited = compiled(fn), []
    with torch.no_grad():
        for position in (-300, -10, 0, 127, 399, 800):
            before = Blockwise.visited
            given = (*operands, torch.tensor(position))
            torch.testing.assert_close(run(*given), fn(*given), atol=1e-5, rtol=1e-5)
            visited.append(Blockwise.visited - before)
    assert visited == sorted(visited) and visited[0] == 0 and visited[-1] == 10


def test_every_block_counts_where_a_fully_masked_row_is_a_mean() -> None:
    keep, known, _ = MASKS["a position"]
    fn, inputs = attend(keep, -1e30), (*qkv(2, 1, 200, S, 16), known)
    with torch.no_grad():
        torch.testing.assert_close(compiled(fn)(*inputs), fn(*inputs), atol=1e-5, rtol=1e-5)
    assert Blockwise.visited == 10
