"""Calls of torch_npu's operators in programs: how they are read, and which are left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import npu_stand_in
import pytest
import torch
from against_eager import qkv, randn, same
from npu_stand_in import FIA

import attn_pass

npu_stand_in.install()

Tensor = torch.Tensor
BF16 = torch.bfloat16
npu = torch.ops.npu
TRIANGLE = {"atten_mask": ()}  # made in the program


def triangle() -> Tensor:
    return torch.triu(torch.ones(2048, 2048, dtype=torch.bool), 1)


def fusion(name: str = "npu_fusion_attention_v3", **given: Any) -> Callable[..., Tensor]:
    """A program that calls a training operator; an ``atten_mask`` of ``()`` is the compressed one."""
    layout, heads = given.pop("input_layout", "BNSD"), given.pop("head_num", 4)

    def program(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        more = dict(given)
        if "atten_mask" in more:
            more["atten_mask"] = triangle()
        elif mask is not None:
            more["atten_mask"] = mask
        return getattr(npu, name)(q, k, v, heads, layout, scale=0.3, **more)[0]

    return program


def infer(**given: Any) -> Callable[..., Tensor]:
    """A program that calls the inference operator."""

    def program(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        more = {"num_heads": 4, "num_key_value_heads": 4, "input_layout": "BNSD", **given}
        if "atten_mask" in more:
            more["atten_mask"] = triangle()
        elif mask is not None:
            more["atten_mask"] = mask
        return npu.npu_fused_infer_attention_score(q, k, v, scale=0.3, **more)[0]

    return program


def attention(mode: int = 0, before: int = 1 << 31, after: int = 1 << 31) -> Callable[..., Tensor]:
    """The documented function of (B, N, S, D) operands, in plain products."""

    def program(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        groups = q.size(1) // k.size(1)
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        own = torch.arange(q.size(2))[:, None] + (k.size(2) - q.size(2) if mode in (3, 4) else 0)
        distance = torch.arange(k.size(2)) - own
        hidden = (distance > (0 if mode in (2, 3) else after)) | (distance < -before)
        hidden = hidden | mask.bool() if mask is not None else hidden
        weights = (q @ k.mT * 0.3).masked_fill(hidden, float("-inf")).softmax(-1)
        return weights.masked_fill(hidden.all(-1, keepdim=True), 0.0) @ v

    return program


def into(layout: str, x: Tensor) -> Tensor:
    """A (B, N, S, D) tensor in a layout."""
    turned = {"BNSD": x, "BSND": x.transpose(1, 2), "BSH": x.transpose(1, 2).flatten(2)}
    return turned[layout].contiguous() if layout != "SBH" else x.permute(2, 0, 1, 3).flatten(2).contiguous()


def out_of(layout: str, x: Tensor) -> Tensor:
    """Back from a layout, 4 heads."""
    if layout in ("BSH", "SBH"):
        x = x.unflatten(2, (4, -1))
    return {"BNSD": x, "SBH": x.permute(1, 2, 0, 3)}.get(layout, x.transpose(1, 2)) if x.dim() == 4 else x


def checked(fn: Callable[..., Tensor], want: Callable[..., Tensor], *inputs: Tensor, grad: bool = False) -> Any:
    """Rewritten by force to something else, and still the same."""
    options: dict[str, Any] = {"device": "Ascend910B", "grad": grad, "rewritten": 1}
    return same(fn, *inputs, reference=want, **options)


HIDDEN = torch.rand(2, 1, 6, 9, generator=torch.Generator().manual_seed(1)) > 0.5
HIDDEN[..., 4] = False
MODES: dict[str, tuple[dict[str, Any], Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "plain": ({}, attention(), ()),
    "a mask": ({}, attention(), (HIDDEN,)),
    "bytes": ({}, attention(), (HIDDEN.to(torch.uint8),)),
    "a mask of rows and keys": ({}, attention(), (HIDDEN[0, 0],)),
    "mode 1": ({"sparse_mode": 1}, attention(), (HIDDEN,)),
    "mode 2": ({"sparse_mode": 2, **TRIANGLE}, attention(2), ()),
    "mode 3": ({"sparse_mode": 3, **TRIANGLE}, attention(3), ()),
}


@pytest.mark.parametrize("name", list(MODES))
def test_training_operators(name: str) -> None:
    given, want, more = MODES[name]
    report = checked(fusion(**given), want, *qkv(2, 4, 6, 9, 16, grad=True), *more, grad=True)
    assert report.sites[0].form == "npu"
    assert {"mode 2": "causal", "mode 3": "causal with offset 3"}.get(name, "") in report.sites[0].mask


@pytest.mark.parametrize("name", list(MODES))
def test_the_inference_operator(name: str) -> None:
    given, want, more = MODES[name]
    checked(infer(**given), want, *qkv(2, 4, 6, 9, 16, dtype=BF16), *more)


def test_bands() -> None:
    for before, after in ((3, 0), (2, 2), (2147483647, 3)):
        given = {"sparse_mode": 4, **TRIANGLE}
        want = attention(4, before, after)
        mine = fusion(pre_tockens=before, next_tockens=after, **given)
        report = checked(mine, want, *qkv(2, 4, 6, 9, 16))
        assert "window" in report.sites[0].mask or "offset" in report.sites[0].mask
        checked(infer(pre_tokens=before, next_tokens=after, **given), want, *qkv(2, 4, 6, 9, 16, dtype=BF16))


def test_bounds_beside_a_full_mask_count_from_the_first_key() -> None:
    checked(fusion(pre_tockens=4, next_tockens=1), attention(0, 4, 1), *qkv(2, 4, 6, 9, 16), HIDDEN)


def test_one_query_row_of_the_inference_operator_knows_no_modes() -> None:
    """Nothing but (B, S) is masked there, whatever the bounds say."""
    mask = HIDDEN[:, 0, 0].contiguous()
    want = lambda q, k, v, mask: attention()(q, k, v, mask[:, None, None])
    checked(infer(pre_tokens=1, next_tokens=0), want, *qkv(2, 4, 1, 9, 16, dtype=BF16), mask)


@pytest.mark.parametrize("layout", ["BSND", "BSH", "SBH"])
def test_layouts(layout: str) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return npu.npu_fusion_attention_v3(q, k, v, 4, layout, scale=0.3)[0]

    def want(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (_heads_first(layout, x, n) for x, n in ((q, 4), (k, 2), (v, 2)))
        return into(layout, attention()(q, k, v))

    inputs = [into(layout, x) for x in qkv(2, 4, 6, 9, 16, kv_heads=2)]
    checked(program, want, *inputs)


def _heads_first(layout: str, x: Tensor, heads: int) -> Tensor:
    if layout in ("BSH", "SBH"):
        x = x.unflatten(2, (heads, -1))
    return x.permute(1, 2, 0, 3) if layout == "SBH" else x.transpose(1, 2)


def test_layouts_of_the_inference_operator() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return infer(input_layout="BNSD_BSND")(q, k, v)

    want = lambda q, k, v: attention()(q, k, v).transpose(1, 2).contiguous()
    checked(program, want, *qkv(2, 4, 6, 9, 16, dtype=BF16))


def test_repeated_keys_around_a_call_become_grouped_heads() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fusion()(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))

    q, k, v = qkv(2, 4, 64, 512, 64, kv_heads=2)
    npu_stand_in.SEEN.clear()
    report = same(program, q, k, v, reference=attention(), rewritten=1, device="Ascend910B", choose="cheapest")
    assert "us as written" in report.sites[0].reason
    assert npu_stand_in.SEEN[-1][1]["key"].shape == k.shape


def test_a_call_with_nothing_poor_around_it_is_left() -> None:
    report = same(fusion(), *qkv(2, 4, 6, 9, 16), reference=attention(), device="Ascend910B", choose="cheapest")
    assert report.sites[0].outcome == "left" and "already the cheapest form" in report.sites[0].reason


def reason(fn: Callable[..., Any], *inputs: Tensor) -> str:
    (site,) = attn_pass.explain(fn, *inputs, attn_pass_options={"device": "Ascend910B", "choose": "fused"}).sites
    return site.reason if site.outcome == "left" else ""


def test_what_is_left() -> None:
    inputs = qkv(2, 4, 6, 9, 16)
    half = qkv(2, 4, 6, 9, 16, dtype=BF16)
    meta = [x.to("meta") for x in inputs]  # the stand-in would raise on some of these
    few = [x.to("meta") for x in half]
    assert "do nothing without atten_mask" in reason(fusion(sparse_mode=2), *meta)
    assert "do nothing without atten_mask" in reason(infer(sparse_mode=3), *few)
    assert "do nothing without atten_mask" in reason(fusion(next_tockens=0), *meta)
    assert "no float mask" in reason(fusion(), *meta, HIDDEN.float().to("meta"))
    assert "2048 x 2048, got" in reason(fusion(sparse_mode=2), *meta, HIDDEN.to("meta"))
    assert "sparse_mode 5 is not read" in reason(fusion(sparse_mode=5), *meta, HIDDEN.to("meta"))
    assert "its pse is not read" in reason(fusion(pse=randn(1, 4, 6, 9).to("meta")), *meta)
    assert "not read: it stays" in reason(lambda q, k, v: npu.npu_prompt_flash_attention(q, k, v, num_heads=4), *few)
    assert "keep_prob" in reason(fusion(keep_prob=0.0), *meta)


def test_the_triangle_is_checked_where_it_is_made() -> None:
    def inverted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(2048, 2048, dtype=torch.bool).tril()
        return npu.npu_fusion_attention_v3(q, k, v, 4, "BNSD", scale=0.3, sparse_mode=2, atten_mask=mask)[0]

    assert "True is masked out" in reason(inverted, *[x.to("meta") for x in qkv(2, 4, 6, 9, 16)])
    given = fusion(sparse_mode=2)
    report = same(given, *qkv(2, 4, 6, 9, 16), triangle(), reference=False, rewritten=1, device="Ascend910B")
    assert any("triangle" in a for a in report.sites[0].assumptions)


def test_results_beside_the_attention_keep_the_call() -> None:
    def sums(q: Tensor, k: Tensor, v: Tensor) -> Any:
        out = npu.npu_fusion_attention_v3(q, k, v, 4, "BNSD", scale=0.3)
        return out[0], out[2]

    assert "sums of the softmax" in reason(sums, *qkv(2, 4, 6, 9, 16))


def test_a_missing_scale_is_one() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return npu.npu_fusion_attention_v3(q, k, v, 4, "BNSD")[0]

    want = lambda q, k, v: (q @ k.mT).softmax(-1) @ v
    checked(program, want, *qkv(2, 4, 6, 9, 16))


def test_dropout_is_what_is_not_kept() -> None:
    report = attn_pass.explain(
        fusion(keep_prob=0.9),
        *qkv(2, 4, 6, 9, 16, dtype=BF16),
        attn_pass_options={"device": "Ascend910B", "choose": "fused"},
    )
    assert report.sites[0].target == "npu_fusion_attention" and "no dropout" in report.sites[0].refusals[FIA]
