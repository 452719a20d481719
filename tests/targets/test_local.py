"""The target local: windows and chunks as the fused kernel over blocks; sites that must not be split into blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import NEG_INF, qkv, randn, same, same_each

import attn_pass
from attn_pass.model.index import divide
from attn_pass.targets.local import Blocks

Keep = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

WINDOWS: dict[str, Keep] = {
    "causal window": lambda i, j: (j <= i) & (i - j < 9),
    "both sides": lambda i, j: (i - j).abs() <= 5,
    "to the right": lambda i, j: (j >= i) & (j - i < 7),
    "not itself": lambda i, j: (j <= i) & (j > i - 4),
    "one key": lambda i, j: i == j,
    "chunks": lambda i, j: i // 16 == j // 16,
    "causal chunks": lambda i, j: (i // 16 == j // 16) & (j <= i),
    "window in chunks": lambda i, j: (i // 13 == j // 13) & (j <= i) & (i - j < 9),
}
OTHERS: dict[str, Keep] = {
    "causal": lambda i, j: j <= i,
    "wider than the keys": lambda i, j: (j <= i) & (i - j < 500),
    "dilated": lambda i, j: (j <= i) & (i - j < 9) & ((i - j) % 2 == 0),
    "window and a global key": lambda i, j: ((j <= i) & (i - j < 9)) | (j == 0),
    "not the window": lambda i, j: ~((j <= i) & (i - j < 9)),
    "window that grows": lambda i, j: (j <= i) & (j > i // 2),
    "empty rows": lambda i, j: (j > i + 2) & (j < i + 9),
}


def attention(keep: Keep) -> Callable[..., torch.Tensor]:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if k.shape[1] != q.shape[1]:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) * 0.3
        i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None]
        return torch.softmax(scores.masked_fill(~keep(i, j), NEG_INF), -1) @ v

    return run


def local(programs: Mapping[str, tuple[Callable[..., torch.Tensor], Sequence[torch.Tensor]]], **more: Any) -> None:
    same_each(programs, choose="fused", targets=("local",), **more)


@pytest.mark.parametrize("grad", [False, True])
def test_windows_and_chunks(grad: bool) -> None:
    programs = {
        f"{name}, {length} positions": (attention(keep), qkv(2, 3, length, length, grad=grad))
        for name, keep in WINDOWS.items()
        for length in (17, 64, 131)
    }
    local(programs, grad=grad)


SHAPES: tuple[dict[str, int], ...] = (
    {"kv_heads": 1},
    {"kv_heads": 2, "value_dim": 8},
    {"value_dim": 24},
    {"kv_len": 97},
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_grouped_heads_head_dims_and_unequal_lengths(dtype: torch.dtype) -> None:
    sizes = {"batch": 2, "heads": 4, "q_len": 70, "kv_len": 70}
    fn = attention(WINDOWS["both sides"])
    local({str(shape): (fn, qkv(**{**sizes, **shape}, dtype=dtype)) for shape in SHAPES})  # type: ignore[arg-type]


def test_more_keys_than_rows_see_them() -> None:
    inputs = qkv(1, 2, 33, 200)
    same(attention(WINDOWS["causal window"]), *inputs, rewritten=1, choose="fused", targets=("local",))


def test_dynamic_length() -> None:
    names = ("causal window", "both sides", "causal chunks")
    local({name: (attention(WINDOWS[name]), qkv(2, 2, 50, 50)) for name in names}, dynamic=True)


def test_no_window() -> None:
    local({name: (attention(keep), qkv(1, 2, 40, 40)) for name, keep in OTHERS.items()}, rewritten=0)


def test_a_window_beside_padding_is_not_cut() -> None:
    def run(q, k, v, padding):  # type: ignore[no-untyped-def]
        i, j = torch.arange(40)[:, None], torch.arange(40)[None]
        keep = (j <= i) & (i - j < 9) & padding[:, None, None, :]
        return torch.softmax((q @ k.transpose(-1, -2)).masked_fill(~keep, -1e9), -1) @ v

    padding = torch.arange(40)[None] < torch.tensor([[40], [23]])
    report = same(run, *qkv(2, 2, 40, 40), padding, rewritten=0, choose="fused", targets=("local",))
    assert "run-time" in report.sites[0].reason


def test_a_call_with_a_dense_window_is_cut_too() -> None:
    def run(q, k, v):  # type: ignore[no-untyped-def]
        distance = torch.arange(96)[:, None] - torch.arange(96)[None]
        mask = torch.where((distance >= 0) & (distance < 16), 0.0, torch.finfo(torch.float32).min)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    same(run, *qkv(2, 2, 96, 96), rewritten=1, choose="fused", targets=("local",), reference=False)


def test_operands_with_strides_of_their_own() -> None:
    def run(qkv):  # type: ignore[no-untyped-def]
        q, k, v = qkv.unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return attention(WINDOWS["causal window"])(q, k, v).transpose(1, 2)

    same(run, randn(2, 75, 96), rewritten=1, choose="fused", targets=("local",))


def test_a_form_for_some_lengths_only_is_not_emitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding by nothing, as it happens to be for the length of the example, must not be built in."""

    class Model(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attention(WINDOWS["causal window"])(q, k, v)

    def rewritten() -> attn_pass.Report:
        length = torch.export.Dim("length", min=2, max=512)
        with torch.no_grad():
            program = torch.export.export(Model(), qkv(1, 2, 96, 96), dynamic_shapes=({2: length},) * 3)
            report = attn_pass.rewrite(program, choose="fused", targets=("local",))
            for n in (2, 33, 200):
                torch.testing.assert_close(program.module()(*qkv(1, 2, n, n)), Model()(*qkv(1, 2, n, n)))
        return report

    assert [s.target for s in rewritten().sites] == ["local"]
    monkeypatch.setattr(Blocks, "count", lambda self, a: divide(a.q_len + self.rows - 1, self.rows)[0])
    (site,) = rewritten().left
    assert "would hold for some sizes only" in site.reason


def test_chunks_that_fill_their_blocks_need_no_mask() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        inputs = qkv(1, 2, 96, 96, dtype=dtype)

        def chunked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            i, j = torch.arange(96)[:, None] // 32, torch.arange(96)[None] // 32
            return (q @ k.mT * 0.25).masked_fill(i != j, float("-inf")).softmax(-1) @ v

        same(chunked, *inputs, rewritten=1, choose="fused", targets=("local",))


def test_training_with_inductor_holds_for_every_length() -> None:
    def window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ago = torch.arange(q.size(-2))[:, None] - torch.arange(k.size(-2))[None]
        return (q @ k.mT * 0.25).masked_fill((ago < 0) | (ago > 40), float("-inf")).softmax(-1) @ v

    torch._dynamo.reset()
    options = {"choose": "fused", "targets": ("local",), "on_error": "raise"}
    compiled = torch.compile(window, backend=attn_pass.backend, options=options, dynamic=True)
    for length in (300, 129, 500):
        inputs = qkv(1, 2, length, length, grad=True)
        out, want = compiled(*inputs), window(*inputs)
        torch.testing.assert_close(out, want, atol=2e-5, rtol=2e-5)
        for gradient, exact in zip(
            torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(want.sum(), inputs), strict=True
        ):
            torch.testing.assert_close(gradient, exact, atol=1e-4, rtol=1e-4)
