"""Torch's CUDA kernels as targets: the emitted calls run on the CPU by implementations that check every constraint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import NEG_INF, qkv, randn, same, same_each
from by_hand import NONE_IN_ONE, SOME, banded, infinite, negative, plain
from torch.utils._python_dispatch import TorchDispatchMode

import attn_pass
from attn_pass.devices import registry
from attn_pass.devices.cuda.facts import with_flash
from bench.gpu import stand_ins

stand_ins.install()

Tensor = torch.Tensor
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def from_the_first_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keep = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril()
    return (q @ k.mT * 0.3).masked_fill(~keep, NEG_INF).softmax(-1) @ v


def negative_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return from_the_first_key(-q, k, v)


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + bias).softmax(-1) @ v


def filled(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).masked_fill(~keep, torch.finfo(q.dtype).min).softmax(-1) @ v


def heads_last(dtype: torch.dtype = BF16) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(2, 4, 6, 9, 16, dtype=dtype))


def expanded_query() -> tuple[Tensor, ...]:
    return (randn(1, 2, 5, 16, dtype=BF16).expand(3, 2, 5, 16), *qkv(3, 2, 5, 9, 16, dtype=BF16)[1:])


def misaligned(dtype: torch.dtype = BF16) -> tuple[Tensor, ...]:
    return tuple(randn(2, 3, n, 40, dtype=dtype, seed=n)[..., 3:19] for n in (5, 7, 7))


def stepped(dtype: torch.dtype = BF16) -> tuple[Tensor, ...]:
    return tuple(randn(2, 3, n, 18, dtype=dtype, seed=n)[..., :16] for n in (5, 7, 7))


BIAS = randn(1, 4, 6, 9, dtype=BF16)
CASES: dict[str, tuple[str, Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "flash, plain": ("flash", plain, qkv(2, 4, 6, 9, 16, dtype=BF16)),
    "flash, float16": ("flash", plain, qkv(2, 4, 6, 9, 16, dtype=FP16)),
    "flash, grouped": ("flash", plain, qkv(2, 6, 5, 9, 16, kv_heads=2, dtype=BF16)),
    "flash, odd head dim": ("flash", plain, qkv(2, 4, 6, 9, 20, dtype=BF16)),
    "flash, narrow values": ("flash", plain, qkv(2, 4, 6, 9, 24, value_dim=10, dtype=BF16)),
    "flash, wide values": ("flash", plain, qkv(2, 4, 6, 9, 12, value_dim=33, dtype=BF16)),
    "flash, heads last": ("flash", plain, heads_last()),
    "flash, strided head dim": ("flash", plain, tuple(randn(2, 3, 16, n, dtype=BF16).mT for n in (5, 7, 7))),
    "flash, one row": ("flash", plain, qkv(2, 4, 1, 9, 16, dtype=BF16)),
    "flash, one key": ("flash", plain, qkv(2, 4, 5, 1, 16, dtype=BF16)),
    "flash, expanded query": ("flash", plain, expanded_query()),
    "flash, rank 3": ("flash", plain, tuple(randn(4, n, 16, dtype=BF16) for n in (3, 7, 7))),
    "flash, negative scale": ("flash", negative, qkv(2, 4, 6, 9, 16, dtype=BF16)),
    "flash, causal": ("flash", banded(None, 0), qkv(2, 4, 9, 9, 16, dtype=BF16)),
    "flash, causal to the last key": ("flash", banded(None, 0), qkv(2, 4, 5, 9, 16, dtype=BF16)),
    "flash, causal to the last key, rows without one": ("flash", banded(None, 0), qkv(2, 4, 9, 5, 16, dtype=BF16)),
    "flash, window": ("flash", banded(3, 0), qkv(2, 4, 5, 9, 16, dtype=BF16)),
    "flash, window, odd head dim": ("flash", banded(3, 0), qkv(2, 4, 5, 9, 18, dtype=BF16)),
    "flash, window of both sides": ("flash", banded(2, 3), qkv(2, 4, 9, 9, 16, dtype=BF16)),
    "flash, keys from there on": ("flash", banded(2, None), qkv(2, 4, 9, 9, 16, dtype=BF16)),
    "flash, window, filled": ("flash", banded(3, 0, -1e9), qkv(2, 4, 5, 9, 16, dtype=BF16)),
    "flash, window of one": ("flash", banded(0, 0), qkv(2, 4, 9, 9, 16, dtype=BF16)),
    "flash, misaligned operands": ("flash", plain, misaligned()),
    "flash, rows of another step": ("flash", plain, stepped()),
    "cudnn, misaligned operands": ("cudnn", plain, misaligned()),
    "efficient, misaligned operands": ("efficient", plain, misaligned(FP32)),
    "efficient, rows of another step": ("efficient", plain, stepped(FP32)),
    "cudnn, plain": ("cudnn", plain, qkv(2, 4, 6, 9, 16, dtype=BF16)),
    "cudnn, grouped": ("cudnn", plain, qkv(2, 6, 5, 9, 16, kv_heads=2, dtype=BF16)),
    "cudnn, narrow values": ("cudnn", plain, qkv(2, 4, 6, 9, 24, value_dim=10, dtype=BF16)),
    "cudnn, heads last": ("cudnn", plain, heads_last(FP16)),
    "cudnn, expanded query": ("cudnn", plain, expanded_query()),
    "cudnn, causal": ("cudnn", banded(None, 0), qkv(2, 4, 9, 9, 16, dtype=BF16)),
    "cudnn, window": ("cudnn", banded(3, 0), qkv(2, 4, 5, 9, 16, dtype=BF16)),
    "cudnn, filled window": ("cudnn", banded(3, 0, -1e9), qkv(2, 4, 5, 9, 16, dtype=BF16)),
    "cudnn, negative scale": ("cudnn", negative, qkv(2, 4, 6, 9, 16, dtype=BF16)),
    "efficient, plain": ("efficient", plain, qkv(2, 4, 6, 9, 16)),
    "efficient, odd head dim": ("efficient", plain, qkv(2, 4, 6, 9, 18)),
    "efficient, half, odd head dim": ("efficient", plain, qkv(2, 4, 6, 9, 18, dtype=BF16)),
    "efficient, narrow values": ("efficient", plain, qkv(2, 4, 6, 9, 24, value_dim=10)),
    "efficient, packed groups": ("efficient", plain, qkv(2, 6, 5, 9, 16, kv_heads=2)),
    "efficient, heads last": ("efficient", plain, heads_last(FP32)),
    "efficient, causal from the first key": ("efficient", from_the_first_key, qkv(2, 4, 5, 9, 16)),
    "efficient, causal": ("efficient", banded(None, 0), qkv(2, 4, 9, 9, 16)),
    "efficient, causal to the last key": ("efficient", banded(None, 0), qkv(2, 4, 5, 9, 16)),
    "efficient, negative scale, causal": ("efficient", negative_causal, qkv(2, 4, 5, 9, 16)),
    "efficient, bias": ("efficient", biased, (*qkv(2, 4, 6, 9, 16), randn(1, 4, 6, 9))),
    "efficient, aligned bias": ("efficient", biased, (*qkv(2, 4, 6, 16, 16), randn(1, 4, 6, 16))),
    "efficient, bias of rows": ("efficient", biased, (*qkv(2, 4, 6, 9, 16), randn(1, 4, 6, 1))),
    "efficient, bias of keys": ("efficient", biased, (*qkv(2, 4, 6, 9, 16), randn(2, 1, 1, 9))),
    "efficient, turned bias": ("efficient", biased, (*qkv(2, 4, 6, 9, 16), randn(4, 9, 6).mT)),
    "efficient, bfloat16 bias": ("efficient", biased, (*qkv(2, 4, 6, 9, 16, dtype=BF16), BIAS)),
    "efficient, padding": ("efficient", filled, (*qkv(2, 4, 6, 9, 16), SOME)),
    "efficient, padding, bfloat16": ("efficient", filled, (*qkv(2, 4, 6, 9, 16, dtype=BF16), SOME)),
    "efficient, padding, float16": ("efficient", filled, (*qkv(2, 4, 6, 9, 16, dtype=FP16), SOME)),
    "efficient, padding by -inf": ("efficient", infinite, (*qkv(2, 4, 6, 9, 16), SOME)),
    "efficient, a row of fills": ("efficient", filled, (*qkv(2, 4, 6, 9, 16), NONE_IN_ONE)),
    "efficient, a row of fills, bfloat16": ("efficient", filled, (*qkv(2, 4, 6, 9, 16, dtype=BF16), NONE_IN_ONE)),
    "efficient, a row of -inf": ("efficient", infinite, (*qkv(2, 4, 6, 9, 16), NONE_IN_ONE)),
}  # fmt: skip


@pytest.mark.parametrize("target", ["flash", "cudnn", "efficient"])
def test_it_equals_the_program(target: str) -> None:
    programs = {name: (fn, inputs) for name, (kind, fn, inputs) in CASES.items() if kind == target}
    report = same_each(programs, device="H200", targets=(target,))
    assert {site.target for site in report.sites} == {target}


LOOK_ALIKES: dict[str, tuple[Callable[..., Tensor], int, int]] = {
    "from the first key, fewer keys": (from_the_first_key, 10, 4),
    "a left bound, more queries": (banded(0, None), 8, 5),
    "another left bound, more queries": (banded(1, None), 6, 4),
    "both sides, more queries": (banded(5, 5), 9, 3),
}


@pytest.mark.parametrize("name", list(LOOK_ALIKES))
def test_windows_with_more_queries_than_keys_are_no_window_of_flash(name: str) -> None:
    """It takes a size of all keys for no bound, and no bound beside another for that size."""
    fn, q_len, kv_len = LOOK_ALIKES[name]
    inputs = qkv(1, 2, q_len, kv_len, 16, dtype=FP16)
    report = same(fn, *inputs, rewritten=0, device="H200", targets=("flash",))
    assert "the flash kernel takes no mask" in report.sites[0].reason or "unequal lengths" in report.sites[0].reason
    same(fn, *inputs, rewritten=1, device="H200", targets=("efficient",))


def test_rows_that_average_the_values_are_no_window() -> None:
    """Causal to the last key, filled with a number, more queries than keys: the first rows hold the fill alone."""
    inputs = qkv(1, 2, 9, 5, 16, dtype=BF16)
    same(banded(None, 0, -1e9), *inputs, rewritten=0, device="H200", targets=("flash",))
    for target in ("efficient", "decode"):
        same(banded(None, 0, -1e9), *inputs, rewritten=1, device="H200", targets=(target,))


def test_windows_of_unknown_lengths_are_left_to_kernels_with_masks() -> None:
    inputs = [x.to("meta") for x in qkv(1, 2, 9, 12, 16, dtype=FP16)]
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 2)

    def reported(program: Callable[..., Tensor]) -> attn_pass.SiteReport:
        options = {"device": "H200", "targets": ("flash",), "choose": "fused"}
        return attn_pass.explain(program, *inputs, attn_pass_options=options).sites[0]

    assert "takes no mask" in reported(banded(5, 5)).reason
    assert reported(banded(None, 0)).target == "flash"


WIDE: dict[str, Tensor] = {
    "a slope over positions": 0.5 * torch.arange(512.0),
    "far from zero": torch.randn(512, 512, generator=torch.Generator().manual_seed(0)) - 100,
    "no fill in float16": torch.where(torch.arange(512)[:, None] == 3, -1e5, 0.0),
    "too large for float16": torch.where(torch.arange(512) == 3, 7e4, 0.0),
}


@pytest.mark.parametrize("name", list(WIDE))
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_bias_wider_than_the_operands_is_not_rounded(name: str, dtype: torch.dtype) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return torch.softmax((q.float() @ k.float().mT) * 0.25 + bias, -1).to(v.dtype) @ v

    inputs = (*qkv(1, 2, 512, 512, 16, dtype=dtype), WIDE[name])
    report = same(program, *inputs, rewritten=0, device="H200", targets=("efficient", "cudnn", "sdpa"))
    assert "would be rounded" in report.sites[0].refusals["efficient"]
    same(program, *inputs, device="H200")


def test_a_mask_in_float32_of_zeros_and_fills_is_no_bias() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.where(torch.arange(40) < 30, 0.0, torch.finfo(torch.float32).min)
        return torch.softmax((q.float() @ k.float().mT) * 0.25 + mask, -1).to(v.dtype) @ v

    same(program, *qkv(1, 2, 8, 40, 16, dtype=BF16), rewritten=1, device="H200", targets=("efficient",))


def test_a_call_s_lowest_mask_is_rewritten_for_a_kernel_it_did_not_reach() -> None:
    keep = torch.rand(8, 16, generator=torch.Generator().manual_seed(0)) > 0.5
    keep[2] = False
    mask = torch.zeros(8, 16, dtype=BF16).masked_fill(~keep, torch.finfo(BF16).min)
    inputs = (*qkv(2, 4, 8, 16, 16, dtype=BF16), mask)
    same(F.scaled_dot_product_attention, *inputs, rewritten=1, device="H200", targets=("efficient",))


@pytest.mark.parametrize("target", ["flash", "cudnn", "efficient"])
def test_gradients(target: str) -> None:
    programs = {
        name: (fn, [x.detach().requires_grad_(x.is_floating_point()) for x in inputs])
        for name, (kind, fn, inputs) in CASES.items()
        if kind == target and "one" not in name
    }
    report = same_each(programs, grad=True, device="H200", targets=(target,))
    assert {site.target for site in report.sites} == {target}


def filled_row(fill: float, dtype: torch.dtype = FP32, *shape: int) -> Tensor:
    """A bias with one row of a fill alone, and one that mixes it with numbers."""
    bias = randn(*shape or (2, 1, 6, 9), dtype=dtype, seed=5)
    bias[-1, 0, 2] = fill
    bias[0, 0, 4, 3:] = fill
    return bias


LOWEST = torch.finfo(FP32).min
LEARNED: dict[str, tuple[tuple[Tensor, ...], Tensor]] = {
    "the lowest number": (qkv(2, 4, 6, 9, 16), filled_row(LOWEST)),
    "-1e30, a bias of each head": (qkv(2, 4, 6, 16, 16), filled_row(-1e30, FP32, 1, 4, 6, 16)),
    "-1e9, packed groups": (qkv(2, 4, 6, 9, 16, kv_heads=2), filled_row(-1e9)),
    "bfloat16": (qkv(2, 4, 6, 9, 16, dtype=BF16), filled_row(-1e30, BF16)),
    "float16": (qkv(2, 4, 6, 9, 16, dtype=FP16), filled_row(torch.finfo(FP16).min, FP16)),
}


def grouped_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    groups = q.size(1) // k.size(1)
    return biased(q, *(x.repeat_interleave(groups, 1) for x in (k, v)), bias)


@pytest.mark.parametrize("target", ["efficient", "sdpa"])
@pytest.mark.parametrize("name", list(LEARNED))
def test_a_row_of_fills_in_a_learned_bias_has_its_gradient(name: str, target: str) -> None:
    """The kernels' backward takes a weight of 1 there for 1 / kv_len, and the row is no constant of the bias."""
    operands, bias = LEARNED[name]
    leaves = [t.detach().clone().requires_grad_() for t in (*operands, bias)]
    same(grouped_bias, *leaves, rewritten=1, grad=True, device="H200", targets=(target,))


def test_torch_s_own_call_gets_its_mask_in_the_operands_dtype() -> None:
    masks: list[torch.dtype] = []

    def run(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        for node in gm.graph.nodes:
            if node.target is F.scaled_dot_product_attention:
                masks.append(node.args[3].meta["example_value"].dtype)
        return gm.forward

    backend = attn_pass.wrap(run, device="A100", targets=("sdpa",), choose="fused", on_error="raise")
    torch.compile(filled, backend=backend)(*qkv(2, 4, 6, 9, 16, dtype=BF16), SOME)
    assert masks == [BF16]


class Masks(TorchDispatchMode):
    """The masks that cuDNN's operator is given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._scaled_dot_product_cudnn_attention.default:
            self.given.append(args[3])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("grad", [False, True])
def test_a_tile_of_masked_keys_reaches_cudnn_as_numbers(grad: bool) -> None:
    """A window over 320 keys: the last rows see nothing of the first tile of 128, where -inf alone would stand."""
    inputs = tuple(x.requires_grad_(grad) for x in qkv(1, 2, 320, 320, 16, dtype=BF16))
    same(banded(40, 0), *inputs, rewritten=0 if grad else 1, grad=grad, device="H200", targets=("cudnn",))
    if grad:  # 320 is 64 more than a multiple of 128
        inputs = tuple(x.requires_grad_() for x in qkv(1, 2, 336, 336, 16, dtype=BF16))
        same(banded(40, 0), *inputs, rewritten=1, grad=True, device="H200", targets=("cudnn",))
    torch._dynamo.reset()
    masks = Masks()

    def run(gm: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        def watched(*operands: Tensor) -> object:
            with masks:
                return gm.forward(*operands)

        return watched

    backend = attn_pass.wrap(run, device="H200", targets=("cudnn",), choose="fused", on_error="raise")
    with torch.no_grad():
        torch.compile(banded(40, 0), backend=backend)(*(x.detach() for x in inputs))
    (mask,) = masks.given
    assert mask.dtype == BF16 and torch.isfinite(mask).all() and mask.min() < -1e38
    assert (mask[..., -1, :128] < -1e38).all() and mask[..., -1, -1] == 0


def test_a_mask_of_minus_infinity_does_not_reach_cudnn() -> None:
    """Float16 has no number that absorbs every score, and torch's own call writes -inf itself."""
    inputs = qkv(1, 2, 320, 320, 16, dtype=FP16)
    report = same(banded(40, 0), *inputs, rewritten=0, device="H200", targets=("cudnn",))
    assert "-inf" in report.sites[0].reason
    report = same(banded(40, 0), *qkv(1, 2, 320, 320, 16, dtype=BF16), rewritten=0, device="H200", targets=("sdpa",))
    assert "-inf" in report.sites[0].reason


@pytest.mark.parametrize("target", ["flash", "cudnn", "efficient"])
def test_dropout_in_training_keeps_the_mean(target: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(2, 2, 8, 8, 16, dtype=BF16))

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout((q @ k.mT * 0.25).softmax(-1), 0.25) @ v

    torch._dynamo.reset()
    backend = attn_pass.wrap(
        "aot_eager_default_partitioner", device="H200", targets=(target,), choose="fused", on_error="raise"
    )
    compiled = torch.compile(program, backend=backend)
    with attn_pass.record() as report:
        compiled(q, k, v)
    assert report.sites[0].target == target
    outs = torch.stack([compiled(q, k, v).detach().float() for _ in range(200)])
    want = plain(q.detach().float() * 0.25 / 0.3, k.detach().float(), v.detach().float())
    assert outs.std(0).mean() > 0.05
    assert (outs.mean(0) - want).abs().max() < 0.35


@pytest.mark.parametrize("flash", ["FA2", "FA3", "FA4"])
@pytest.mark.parametrize("left, right", [(3, None), (None, 2), (3, 2)])
def test_a_window_lies_and_is_bounded_as_each_version_has_it(
    flash: str, left: int | None, right: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FA3 and FA4 allocate a dense result, which torch takes to lie like the query; FA4 took -1 for a bound."""
    device = with_flash(registry.by_name("H200"), flash)
    monkeypatch.setattr("attn_pass.rewriting.run.device_for", lambda *_: device)
    calls: list[torch.fx.Node] = []

    def seen(gm: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        calls.extend(n for n in gm.graph.nodes if "_flash_attention_forward" in str(n.target))
        return gm

    torch._dynamo.reset()
    with torch.no_grad():
        run = torch.compile(banded(left, right), backend=attn_pass.wrap(seen, targets=("flash",), choose="fused"))
        run(*qkv(1, 2, 9, 12, 16, dtype=FP16))
    (call,) = calls
    query = call.args[0]
    assert isinstance(query, torch.fx.Node)
    assert ("clone" in str(query.target)) == (flash != "FA2")
    bounds = {name: bound for name, bound in call.kwargs.items() if name.startswith("window_size")}
    assert len(bounds) == 2 - (left is None) - (right is None) and all(int(n) >= 0 for n in bounds.values())  # type: ignore[call-overload]
