"""The split-KV target: what it accepts on devices that need not be present, and its results on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from against_eager import NEG_INF, qkv, randn, same

import attn_pass
from attn_pass.devices import registry

pytest.importorskip("triton")

Tensor = torch.Tensor
HALF = torch.bfloat16


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    groups = q.size(1) // k.size(1)
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    return (q @ k.mT * 0.125).softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    i = torch.arange(q.size(-2))[:, None] + k.size(-2) - q.size(-2)
    j = torch.arange(k.size(-2))
    keep = j <= i if window is None else (j <= i) & (j >= i - window)
    return (q @ k.mT * 0.125).masked_fill(~keep, NEG_INF).softmax(-1) @ v


def filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(torch.arange(k.size(-2)) > 5 * q.size(-2), torch.finfo(q.dtype).min).softmax(-1) @ v


def added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * 0.125 + mask).softmax(-1) @ v


LOWEST = torch.where(torch.arange(40) > 30, torch.finfo(HALF).min, 0.0).to(HALF)
CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "one row": (by_hand, qkv(q_len=1, kv_len=40, dtype=HALF)),
    "grouped": (by_hand, qkv(2, 8, 3, 40, 32, kv_heads=2, dtype=HALF)),
    "float16": (by_hand, qkv(2, 4, 5, 41, 64, dtype=torch.float16)),
    "narrow values": (by_hand, qkv(2, 4, 5, 41, 64, value_dim=16, dtype=HALF)),
    "causal": (causal, qkv(2, 2, 4, 40, dtype=HALF)),
    "window": (lambda q, k, v: causal(q, k, v, 7), qkv(2, 2, 4, 40, dtype=HALF)),
    "filled": (filled, qkv(2, 2, 4, 40, dtype=HALF)),
    "added": (added, (*qkv(2, 2, 4, 40, dtype=HALF), randn(2, 1, 4, 40, dtype=HALF))),
    "padding": (added, (*qkv(2, 2, 4, 40, dtype=HALF), LOWEST)),
    "every key of a row filled": (added, (*qkv(2, 2, 4, 40, dtype=HALF), LOWEST.min().expand(4, 40))),
    "heads last": (
        by_hand,
        tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(2, 4, 3, 40, dtype=HALF)),
    ),
    "rank 3": (
        lambda q, k, v: torch.bmm(torch.bmm(q, k.mT).softmax(-1), v),
        tuple(randn(4, n, 16, dtype=HALF) for n in (2, 40, 40)),
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_it_equals_the_program(name: str) -> None:
    fn, inputs = CASES[name]
    report = same(fn, *inputs, rewritten=1, device="H200", targets=("decode",))
    assert report.sites[0].target == "decode"


def _taken(device: str, *shape: int, kv_heads: int | None = None, dtype: torch.dtype = HALF, **kwargs: Any) -> Any:
    batch, heads, q_len, kv_len, dim = shape
    options = {"device": device}
    with torch.device("meta"):
        q = torch.empty(batch, heads, q_len, dim, dtype=dtype, requires_grad=kwargs.get("grad", False))
        k, v = (torch.empty(batch, kv_heads or heads, kv_len, dim, dtype=dtype) for _ in range(2))
    fn = causal if kwargs.get("causal") else by_hand
    with torch.set_grad_enabled(kwargs.get("grad", False)):
        return attn_pass.explain(fn, q, k, v, attn_pass_options=options).sites[0]


@pytest.mark.parametrize(("q_len", "kv_len"), [(4, 12), (8, 4), (3, 1)])
def test_a_band_that_holds_nothing_is_not_causal(q_len: int, kv_len: int) -> None:
    i, j, last = torch.arange(q_len)[:, None], torch.arange(kv_len), kv_len - q_len

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keep = (j - i <= last) & (j - i >= last + 1)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, keep)

    same(fn, *qkv(2, 2, q_len, kv_len, 16, dtype=torch.float16), device="H200", targets=("decode",))


@pytest.mark.parametrize("device", ["H200", "A100", "L4", "B200"])
@pytest.mark.parametrize("q_len", [2, 8])
def test_few_rows_over_many_keys_are_split(device: str, q_len: int) -> None:
    """A whole block of 64 rows a head is a tie with flash, which goes to torch's order (test_cuda_decisions.py)."""
    assert _taken(device, 1, 32, q_len, 32768, 128, kv_heads=8).target == "decode"


@pytest.mark.parametrize(
    ("why", "shape", "settings"),
    [
        ("are too many", (1, 32, 65, 32768, 128), {}),
        ("takes half precision", (1, 32, 8, 32768, 128), {"dtype": torch.float32}),
        ("no backward", (1, 32, 8, 32768, 128), {"grad": True}),
        ("multiple of 16", (1, 32, 8, 32768, 72), {}),
        ("multiple of 16", (1, 32, 8, 32768, 272), {}),
    ],
)
def test_what_it_refuses(why: str, shape: tuple[int, ...], settings: dict[str, Any]) -> None:
    site = _taken("H200", *shape, **settings)
    assert why in site.refusals["decode"]


def test_a_gpu_before_ampere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, refused in (((7, 5), True), ((8, 0), False)):
        device = replace(registry.by_name("A100"), capability=capability)
        with monkeypatch.context() as patch:
            patch.setattr(registry, "named", lambda name, device=device: device)
            site = _taken("A100", 1, 32, 8, 32768, 128, kv_heads=8)
        assert ("compute capability 8.0" in site.refusals.get("decode", "")) == refused


def _steps(k: Tensor, v: Tensor) -> dict[str, str]:
    """What decode says to a query of four rows over these keys and values."""
    with torch.device("meta"):
        q = torch.empty(*k.shape[:2], 4, k.size(3), dtype=HALF)
    torch._dynamo.reset()
    with torch.no_grad():
        return attn_pass.explain(by_hand, q, k, v, attn_pass_options={"device": "H200"}).sites[0].refusals


@pytest.mark.parametrize("which", [0, 1])
def test_rows_that_begin_at_no_multiple_of_16_elements_are_refused(which: int) -> None:
    """Rows at steps of 64, 80 or 256 elements are taken; at steps of 72, or from 8 elements further, they are not."""
    with torch.device("meta"):
        plain = [torch.empty(1, 4, 4096, 64, dtype=HALF) for _ in range(2)]
        heads_last = torch.empty(1, 4096, 4, 64, dtype=HALF).transpose(1, 2)
        of_cache = torch.empty(1, 4, 8192, 64, dtype=HALF)[:, :, 16:4112]
        of_wide = torch.empty(1, 4, 4096, 80, dtype=HALF)[..., 16:]
        at_8 = torch.empty(1, 4, 4096, 72, dtype=HALF)[..., :64]
        from_8 = torch.empty(1, 4, 4096, 80, dtype=HALF)[..., 8:72]
    for given, refused in ((heads_last, 0), (of_cache, 0), (of_wide, 0), (at_8, 1), (from_8, 1)):
        operands = [given if n == which else x for n, x in enumerate(plain)]
        why = _steps(*operands).get("decode", "")
        assert bool(why) == bool(refused) and (not refused or ("keys", "values")[which] in why), (given.stride(), why)


def sink(q: Tensor, k: Tensor, v: Tensor, s: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = q @ k.mT * 0.125
    scores = scores if mask is None else scores + mask
    joined = torch.cat([scores, s[None, :, None, None].expand(q.size(0), -1, q.size(2), 1)], -1)
    return joined.softmax(-1)[..., :-1] @ v


EMPTY = torch.where(torch.arange(4)[:, None] == 1, NEG_INF, torch.zeros(4, 40)).to(HALF)
SINKS: dict[str, tuple[Tensor, ...]] = {
    "no mask": (*qkv(2, 4, 3, 40, 32, dtype=HALF), randn(4, dtype=HALF)),
    "far above the scores": (*qkv(2, 4, 1, 40, 32, dtype=HALF), torch.full((4,), 30.0, dtype=HALF)),
    "far below the scores": (*qkv(2, 4, 1, 40, 32, dtype=HALF), torch.full((4,), -30.0, dtype=HALF)),
    "a fully masked row": (*qkv(2, 2, 4, 40, 32, dtype=HALF), randn(2, dtype=HALF), EMPTY),
    "a row filled with a number": (*qkv(2, 2, 4, 40, 32, dtype=HALF), randn(2, dtype=HALF), EMPTY.clamp(min=-1e30)),
}


@pytest.mark.parametrize("name", list(SINKS))
def test_a_sink_takes_its_share(name: str) -> None:
    report = same(sink, *SINKS[name], rewritten=1, device="H200", targets=("decode",))
    assert report.sites[0].target == "decode"


def test_prefill_is_not_split() -> None:
    assert _taken("H200", 1, 32, 2048, 2048, 128).target == "cudnn"


def test_no_other_device_takes_it() -> None:
    assert "does not run on cpu devices" in _taken("cpu", 1, 32, 8, 4096, 128).refusals["decode"]
