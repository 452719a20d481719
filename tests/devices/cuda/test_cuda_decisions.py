"""Which kernel an attention gets on GPUs that need not be present: by name, from shapes of tensors without memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import attn_pass
from attn_pass.report.site import SiteReport

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NEG_INF = float("-inf")
ALL = ("H200", "A100", "L4", "B200")
BEST = {"H200": "cudnn", "A100": "flash", "L4": "flash", "B200": "cudnn"}


def by_hand(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    groups = q.size(1) // k.size(1)
    if groups > 1:
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    return F.dropout((q @ k.mT * 0.125).softmax(-1), dropout) @ v


def call(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, enable_gqa=q.size(1) != k.size(1))


def added_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A causal mask as a float matrix, as older models make it."""
    mask = torch.full((q.size(-2), k.size(-2)), torch.finfo(q.dtype).min, dtype=q.dtype, device=q.device).triu(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = torch.arange(q.size(-2), device=q.device)[:, None], torch.arange(k.size(-2), device=q.device)
    keep = (j <= i) & (j >= i - 512)
    return (q @ k.mT * 0.125).masked_fill(~keep, NEG_INF).softmax(-1) @ v


def to_the_last_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = torch.arange(q.size(-2), device=q.device)[:, None], torch.arange(k.size(-2), device=q.device)
    keep = j <= i + (k.size(-2) - q.size(-2))
    return (q @ k.mT * 0.125).masked_fill(~keep, NEG_INF).softmax(-1) @ v


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT * 0.125 + bias).softmax(-1) @ v


def operands(
    batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int, dim: int, dtype: torch.dtype, grad: bool
) -> list[Tensor]:
    with torch.device("meta"):
        q = torch.empty(batch, heads, q_len, dim, dtype=dtype, requires_grad=grad)
        k, v = (torch.empty(batch, kv_heads, kv_len, dim, dtype=dtype, requires_grad=grad) for _ in range(2))
    return [q, k, v]


def decided(
    program: Callable[..., Tensor],
    device: str,
    *shape: int,
    dtype: torch.dtype = BF16,
    grad: bool = False,
    extra: tuple[Tensor, ...] = (),
    growing: bool = False,
    **kwargs: Any,
) -> SiteReport:
    """The report of the one site; ``shape`` is B, H, Hkv, L, S, D."""
    tensors = operands(*shape, dtype=dtype, grad=grad)
    if growing:
        for tensor in tensors[1:]:
            torch._dynamo.mark_dynamic(tensor, 2)
    with torch.set_grad_enabled(grad):
        report = attn_pass.explain(
            lambda *inputs: program(*inputs, **kwargs), *tensors, *extra, attn_pass_options={"device": device}
        )
    (site,) = report.sites
    return site


def kernel(site: SiteReport) -> str | None:
    """What runs: the target, or what the call reaches as it is."""
    return site.target if site.outcome == "rewritten" else site.reason


PREFILL = (4, 32, 32, 2048, 2048, 128)


@pytest.mark.parametrize("device", ALL)
@pytest.mark.parametrize("grad", [False, True], ids=["prefill", "training"])
@pytest.mark.parametrize("dim", [64, 128])
def test_prefill_and_training(device: str, grad: bool, dim: int) -> None:
    assert decided(by_hand, device, 4, 32, 32, 2048, 2048, dim, grad=grad).target == BEST[device]


def test_sites_that_cudnn_refuses_go_to_flash() -> None:
    site = decided(by_hand, "H200", *PREFILL, grad=True, dropout=0.1)
    assert site.target == "flash" and "1/16" in site.refusals["cudnn"]


def test_wide_heads_are_not_cudnn_s_before_it_is_known_to_be_good_at_them() -> None:
    """Torch 2.14 asks for cuDNN 9.23; what 2.11 to 2.13 pick by themselves on Hopper is left as it is."""
    shape = (2, 16, 16, 2048, 2048, 256)
    site = decided(by_hand, "H200", *shape)
    assert site.target == "flash" and "before cuDNN 9.23" in site.refusals["cudnn"]
    assert "head dim" in decided(by_hand, "B200", *shape).refusals["cudnn"]
    assert decided(call, "H200", *shape).outcome == "left"


def test_a_mask_in_training_is_cudnn_s_but_where_its_backward_is_wrong() -> None:
    """Attention to a prefix, on Hopper: NaN gradients with 64 keys more than a multiple of 128 (pytorch #196678)."""

    def to_a_prefix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = torch.arange(q.size(-2), device=q.device)[:, None], torch.arange(k.size(-2), device=q.device)
        return (q @ k.mT * 0.125).masked_fill((j > i) & (j >= 64), NEG_INF).softmax(-1) @ v

    for length, wrong in ((640, False), (704, True), (768, False)):
        shape = (8, 16, 16, length, length, 64)
        site = decided(to_a_prefix, "H200", *shape, grad=True)
        assert ("196678" in site.refusals.get("cudnn", "")) == wrong
        assert ("cudnn" in site.predicted_us) == (not wrong)
        assert "196678" not in decided(to_a_prefix, "H200", *shape).refusals.get("cudnn", "")
        assert "196678" not in decided(to_a_prefix, "B200", *shape, grad=True).refusals.get("cudnn", "")


def test_one_query_in_training_is_not_cudnn_s() -> None:
    site = decided(by_hand, "H200", 8, 32, 32, 1, 4096, 128, grad=True)
    assert "1072" in site.refusals["cudnn"] and site.target != "cudnn"
    assert "cudnn" in decided(by_hand, "H200", 8, 32, 32, 1, 4096, 128).predicted_us


@pytest.mark.parametrize("device", ALL)
def test_a_plain_call_that_reaches_the_best_kernel_is_left(device: str) -> None:
    site = decided(call, device, *PREFILL)
    assert site.outcome == "left" and "already the cheapest form" in site.reason


@pytest.mark.parametrize("device", ALL)
def test_a_float_mask_that_is_causal_goes_to_a_kernel_without_masks(device: str) -> None:
    site = decided(added_causal, device, *PREFILL)
    assert (site.mask, site.target) == ("causal", BEST[device])


@pytest.mark.parametrize("device", ["A100", "L4"])
def test_windows_and_causal_masks_to_the_last_key_go_to_flash_without_a_mask(device: str) -> None:
    assert decided(window, device, 2, 16, 16, 4096, 4096, 128).target == "flash"
    assert decided(to_the_last_key, device, 2, 16, 16, 512, 4096, 128).target == "flash"


@pytest.mark.parametrize("program", [window, to_the_last_key])
def test_on_hopper_they_go_to_flash_or_to_flex(program: Callable[..., Tensor]) -> None:
    """FlexAttention is a quarter faster than FlashAttention-2 there, and takes as little memory."""
    site = decided(program, "H200", 2, 16, 16, 512 if program is to_the_last_key else 4096, 4096, 128)
    assert site.target in ("flash", "flex") and site.predicted_us["flash"] < site.predicted_us["cudnn"]


@pytest.mark.parametrize("device", ALL)
@pytest.mark.parametrize("grad", [False, True])
def test_float32_stays_float32(device: str, grad: bool) -> None:
    site = decided(by_hand, device, *PREFILL, dtype=FP32, grad=grad)
    assert site.target == "efficient"
    assert "float32" in site.refusals["flash"] and "float32" in site.refusals["cudnn"]


@pytest.mark.parametrize("device", ALL)
@pytest.mark.parametrize("q_len", [2, 8, 16, 64])
@pytest.mark.parametrize("program", [by_hand, call, to_the_last_key])
def test_few_rows_over_many_keys_are_split(device: str, q_len: int, program: Callable[..., Tensor]) -> None:
    """But where FlashAttention's own splits are predicted to be as good: a block of 64 rows, heads without groups."""
    kv_heads = 32 if program is to_the_last_key else 8
    site = decided(program, device, 1, 32, kv_heads, q_len, 32768, 128)
    if site.target != "decode" and (q_len > 8 or kv_heads == 32):
        times = site.predicted_us
        assert site.target == "flash" or (site.outcome == "left" and times["leave"] == times["flash"])
        assert min(times[name] for name in times if name.startswith("flash")) < 1.05 * min(times.values())
    else:
        assert site.target == "decode"


def test_one_row_is_cudnn_s_on_hopper_and_never_on_blackwell() -> None:
    shape = (8, 32, 8, 1, 32768, 128)
    assert decided(by_hand, "H200", *shape).target == "cudnn"
    site = decided(by_hand, "A100", *shape)
    assert site.target == "decode" and site.predicted_us["flash"] < 1.1 * site.predicted_us["decode"]
    site = decided(by_hand, "B200", *shape)
    assert site.target == "decode" and "cudnn" not in site.predicted_us


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("program", [by_hand, call])
def test_a_growing_number_of_keys_goes_away_from_cudnn(q_len: int, program: Callable[..., Tensor]) -> None:
    site = decided(program, "H200", 1, 32, 8, q_len, 4096, 128, growing=True)
    assert site.target == "decode", site.reason
    assert site.predicted_us["cudnn"] > 1000


@pytest.mark.parametrize("device", ["H200", "H100", "A100", "L4"])
def test_a_learned_bias_in_training_goes_to_the_efficient_kernel(device: str) -> None:
    bias = torch.empty(1, 12, 512, 512, dtype=BF16, device="meta", requires_grad=True)
    site = decided(biased, device, 8, 12, 12, 512, 512, 64, grad=True, extra=(bias,))
    assert site.target == "efficient"
    assert "gradient" in site.refusals["cudnn"]


def test_deterministic_algorithms_keep_cudnn_away() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        site = decided(by_hand, "H200", *PREFILL, grad=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert site.target == "flash" and "deterministic" in site.refusals["cudnn"]


def test_a_kernel_the_program_does_not_allow_is_not_taken() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            return call(q, k, v)

    site = decided(program, "H200", *PREFILL)
    assert kernel(site) != "cudnn" and "sdpa_kernel allows only FLASH_ATTENTION" in site.refusals["cudnn"]


@pytest.mark.parametrize("device", ALL)
def test_shared_keys_are_folded_into_rows(device: str) -> None:
    """Seed S4 (pytorch #151287): one query row for each of a thousand batch rows over the same keys."""
    with torch.device("meta"):
        q = torch.empty(1000, 4, 1, 32, dtype=FP16)
        k, v = (torch.empty(1, 4, 2048, 32, dtype=FP16) for _ in range(2))
    with torch.no_grad():
        report = attn_pass.explain(F.scaled_dot_product_attention, q, k, v, attn_pass_options={"device": device})
    (site,) = report.sites
    assert site.target in ("cudnn", "flash") and site.poor_cases == ("shared_kv",)
