"""Undocumented calls of torch_npu's operators: each is left with its reason, and a similar documented call is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import npu_stand_in
import pytest
import torch
from against_eager import qkv, randn
from npu_stand_in import FA1, FA3, FIA

import attn_pass
from attn_pass.devices.npu.contract import RULES, CallFacts, refusal
from attn_pass.targets import constraints
from attn_pass.targets.constraints import first_failed

npu_stand_in.install()

Tensor = torch.Tensor
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
npu = torch.ops.npu
Made = Callable[[], Tensor]


def triangle() -> Tensor:
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def bits(*shape: int, dtype: torch.dtype = torch.bool) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="meta")


def calling(name: str, mask: Made | None = None, layout: str = "BNSD", **given: Any) -> Callable[..., Tensor]:
    """A program that calls an operator, 4 heads unless it says otherwise; ``mask`` is made in it."""
    heads = {"num_heads": 4} if name == FIA else {"head_num": 4}

    def program(q: Tensor, k: Tensor, v: Tensor, outside: Tensor | None = None) -> Tensor:
        more = {"scale": 0.3, "input_layout": layout, **heads, **given}
        if mask is not None:
            more["atten_mask"] = mask()
        elif outside is not None:
            more["atten_mask"] = outside
        return getattr(npu, name)(q, k, v, **more)[0]

    return program


def site(fn: Callable[..., Any], *inputs: Tensor, **options: Any) -> attn_pass.SiteReport:
    """The report of the one call; on meta tensors, where the stand-in would raise on what is not documented."""
    options = {"device": "Ascend910B", "choose": "fused", "on_error": "raise", **options}
    meta = [x if x.dim() == 2 and x.size(-1) == 2048 else x.to("meta") for x in inputs]
    (decided,) = attn_pass.explain(fn, *meta, attn_pass_options=options).sites
    return decided


def left(fn: Callable[..., Any], *inputs: Tensor, **options: Any) -> str:
    """Why the call is left; empty where it is read and rewritten by force."""
    decided = site(fn, *inputs, **options)
    return decided.reason if decided.outcome == "left" else ""


MANY, ONE = qkv(2, 4, 6, 9, 16, dtype=BF16), qkv(2, 4, 1, 9, 16, dtype=BF16)
SINGLE, WIDE = qkv(2, 4, 6, 9, 16), [torch.empty(2, 6, 64 * 1024, dtype=BF16, device="meta")] * 3
GROUPED = qkv(2, 4, 6, 9, 16, kv_heads=2, dtype=BF16)
Inputs = tuple[Tensor, ...] | list[Tensor]


def shaped(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...] | None = None, dtype: torch.dtype = BF16
) -> Inputs:
    return [torch.empty(s, dtype=dtype, device="meta") for s in (q, k, v or k)]


NOT_SHAPED = "of no shape that is documented"
# The operator, its arguments, operands, a mask, and why it is left; empty where it is read.
CALLS: dict[str, tuple[str, dict[str, Any], Inputs, Tensor | None, str]] = {
    # ---- masks of one query row, where no mode means anything
    "one row, (B, S)": (FIA, {}, ONE, bits(2, 9), ""),
    "one row, (B, S), int8": (FIA, {}, ONE, bits(2, 9, dtype=torch.int8), ""),
    "one row, a mode beside (B, S)": (FIA, {"sparse_mode": 3}, ONE, bits(2, 9), ""),
    "one row, the triangle": (FIA, {"sparse_mode": 3}, ONE, triangle(), NOT_SHAPED),
    "one row, the triangle of rank 4": (FIA, {"sparse_mode": 3}, ONE, bits(1, 1, 2048, 2048), NOT_SHAPED),
    "one row, longer": (FIA, {}, ONE, bits(2, 20), NOT_SHAPED),
    "one row, broadcast": (FIA, {}, ONE, bits(1, 9), NOT_SHAPED),
    "one row, rank 4": (FIA, {}, ONE, bits(2, 1, 1, 9), NOT_SHAPED),
    "one row, by head": (FIA, {}, ONE, bits(2, 4, 1, 9), NOT_SHAPED),
    "one row of the training operator": (FA3, {}, ONE, bits(2, 1, 1, 9), ""),
    "one row of the training operator, (B, S)": (FA3, {}, ONE, bits(2, 9), NOT_SHAPED),
    # ---- masks of several
    "rows and keys": (FIA, {}, MANY, bits(6, 9), ""),
    "one for the batch, rank 3": (FIA, {}, MANY, bits(1, 6, 9), ""),
    "one for the batch, rank 4": (FIA, {}, MANY, bits(1, 1, 6, 9), ""),
    "by batch": (FIA, {}, MANY, bits(2, 1, 6, 9), ""),
    "by batch, rank 3": (FIA, {}, MANY, bits(2, 6, 9), NOT_SHAPED),
    "by head in inference": (FIA, {}, MANY, bits(2, 4, 6, 9), NOT_SHAPED),
    "without rows": (FIA, {}, MANY, bits(2, 1, 1, 9), NOT_SHAPED),
    "too small": (FIA, {}, MANY, bits(3, 4), NOT_SHAPED),
    "the triangle in mode 0": (FIA, {}, MANY, triangle(), NOT_SHAPED),
    "the triangle in mode 1": (FIA, {"sparse_mode": 1}, MANY, triangle(), NOT_SHAPED),
    "a mask in steps": (FIA, {}, MANY, bits(9, 6).mT, "its mask is not contiguous"),
    "by head": (FA3, {}, MANY, bits(2, 4, 6, 9), ""),
    "by head, one batch": (FA3, {}, MANY, bits(1, 4, 6, 9), NOT_SHAPED),
    "training, rank 3": (FA3, {}, MANY, bits(1, 6, 9), NOT_SHAPED),
    "training, without rows": (FA3, {}, MANY, bits(2, 1, 1, 9), NOT_SHAPED),
    "training, the triangle in mode 0": (FA3, {}, MANY, triangle(), NOT_SHAPED),
    "training, bytes": (FA3, {}, MANY, bits(6, 9, dtype=torch.uint8), ""),
    "training, int8": (FA3, {}, MANY, bits(6, 9, dtype=torch.int8), "of int8"),
    "inference, int8": (FIA, {}, MANY, bits(6, 9, dtype=torch.int8), ""),
    "floats": (FIA, {}, MANY, bits(6, 9, dtype=BF16), "no float mask"),
    # ---- sizes and dtypes
    "inference in float32": (FIA, {}, SINGLE, None, "operands of float32"),
    "training in float64": (FA3, {}, qkv(2, 4, 6, 9, 16, dtype=FP64), None, "operands of float64"),
    "two dtypes": (FA3, {}, (MANY[0], *SINGLE[1:]), None, "operands of bfloat16, float32"),
    "a prime head dim": (FIA, {}, qkv(2, 4, 6, 9, 17, dtype=BF16), None, "head dims of 17 and 17"),
    "a prime head dim in training": (FA3, {}, qkv(2, 4, 6, 9, 17, dtype=BF16), None, ""),
    "a head dim of 24": (FIA, {}, qkv(2, 4, 6, 9, 24, dtype=BF16), None, ""),
    "narrow values": (FA3, {}, qkv(2, 4, 6, 9, 16, value_dim=8, dtype=BF16), None, ""),
    "narrow values, inference": (FIA, {}, qkv(2, 4, 6, 9, 16, value_dim=8, dtype=BF16), None, "head dims of 16 and 8"),
    "wide values": (FA3, {}, qkv(2, 4, 6, 9, 16, value_dim=32, dtype=BF16), None, "head dims of 16 and 32"),
    "in steps": (FIA, {}, [x.transpose(1, 2).contiguous().transpose(1, 2) for x in MANY], None, "not contiguous"),
    "in steps, training": (FA3, {}, [x.transpose(1, 2).contiguous().transpose(1, 2) for x in MANY], None, ""),
    "no keys": (FA3, {}, shaped((2, 4, 6, 16), (2, 4, 0, 16)), None, "a size is 0"),
    "257 heads": (FA3, {"head_num": 257}, shaped((1, 257, 2, 16), (1, 257, 2, 16)), None, "257 heads"),
    "256 heads": (FA3, {"head_num": 256}, shaped((1, 256, 2, 16), (1, 256, 2, 16)), None, ""),
    "a length of 1048577": (FA3, {}, shaped((1, 4, 2, 16), (1, 4, (1 << 20) + 1, 16)), None, "a length is over"),
    "a length of 1048576": (FA3, {}, shaped((1, 4, 2, 16), (1, 4, 1 << 20, 16)), None, ""),
    "a batch of 65537": (FIA, {}, shaped((65537, 4, 2, 16), (65537, 4, 2, 16)), None, "a batch of 65537"),
    "a batch of 129, 24 wide": (FIA, {}, shaped((129, 4, 2, 24), (129, 4, 2, 24)), None, "a batch of 129"),
    "a batch of 129, 32 wide": (FIA, {}, shaped((129, 4, 2, 32), (129, 4, 2, 32)), None, ""),
    "one row over 262145 keys": (FIA, {}, shaped((1, 4, 1, 16), (1, 4, 262145, 16)), None, "keys of one query row"),
    "one row over 262144 keys": (FIA, {}, shaped((1, 4, 1, 16), (1, 4, 262144, 16)), None, ""),
    "heads times head dim": (FIA, {"num_heads": 128, "layout": "BSH"}, WIDE, None, "heads times head dim"),
    "less heads times head dim": (FIA, {"num_heads": 127, "layout": "BSH"}, shaped(*[(2, 6, 127 * 512)] * 2), None, ""),
    "64 heads a KV head": (FIA, {"num_heads": 64, "num_key_value_heads": 1},
                           shaped((1, 64, 2, 16), (1, 1, 2, 16)), None, ""),
    "65 heads a KV head": (FIA, {"num_heads": 65, "num_key_value_heads": 1},
                           shaped((1, 65, 2, 16), (1, 1, 2, 16)), None, "more than 64 share"),
    "three KV heads of four": (FA3, {}, shaped((2, 4, 6, 16), (2, 3, 9, 16)), None, "a multiple of the number of KV"),
    "other values' heads": (FA3, {}, shaped((2, 4, 6, 16), (2, 2, 9, 16), (2, 4, 9, 16)), None, "do not provably fit"),
    "other values' length": (FA3, {}, shaped((2, 4, 6, 16), (2, 4, 9, 16), (2, 4, 8, 16)), None, "do not provably fit"),
    "other values' batch": (FA3, {}, shaped((2, 4, 6, 16), (2, 4, 9, 16), (1, 4, 9, 16)), None, "do not provably fit"),
    "another batch": (FA3, {}, shaped((2, 4, 6, 16), (1, 4, 9, 16)), None, "do not provably fit"),
    "another head dim": (FA3, {}, shaped((2, 4, 6, 16), (2, 4, 9, 32)), None, "do not provably fit"),
    "another number of heads": (FA3, {"head_num": 2}, MANY, None, "do not provably fit"),
    "grouped": (FIA, {"num_key_value_heads": 2}, GROUPED, None, ""),
    "grouped without a word": (FIA, {}, GROUPED, None, "4 KV heads are given, and the keys have 2"),
    "two KV heads of four": (FIA, {"num_key_value_heads": 2}, MANY, None, "2 KV heads are given, and the keys have 4"),
    "a hidden size": (FA3, {"layout": "BSH", "head_num": 5}, shaped((2, 6, 64), (2, 9, 64)), None, "no multiple"),
    "another rank": (FA3, {"layout": "BSH"}, MANY, None, "another rank"),
    # ---- layouts and modes
    "turned": (FIA, {"layout": "BNSD_BSND"}, MANY, None, ""),
    "turned, one row": (FIA, {"layout": "BNSD_BSND"}, ONE, None, "more than one query row"),
    "turned, training": (FA3, {"layout": "BNSD_BSND"}, MANY, None, "layout BNSD_BSND"),
    "turned the other way": (FIA, {"layout": "BSND_BNSD"}, MANY, None, "layout BSND_BNSD"),
    "turned to a merged one": (FIA, {"layout": "BNSD_BSH"}, MANY, None, "layout BNSD_BSH"),
    "many lengths": (FA3, {"layout": "TND"}, shaped((6, 4, 16), (9, 4, 16)), None, "layout TND"),
    "inner_precise 1 in training": (FA3, {"inner_precise": 1}, MANY, bits(6, 9), "inner_precise 1"),
    "inner_precise 2 in training": (FA3, {"inner_precise": 2}, MANY, bits(6, 9), ""),
    "inner_precise 3": (FIA, {"inner_precise": 3}, MANY, bits(6, 9), ""),
    "inner_precise 4": (FIA, {"inner_precise": 4}, MANY, bits(6, 9), "inner_precise 4"),
    "inner_precise 1 of one row": (FIA, {"inner_precise": 1}, ONE, bits(2, 9), ""),
    "inner_precise 2 of one row": (FIA, {"inner_precise": 2}, ONE, bits(2, 9), "for one query row"),
    "a band": (FA3, {"sparse_mode": 4, "pre_tockens": -2, "next_tockens": 5}, MANY, triangle(), ""),
    "an empty band": (FA3, {"sparse_mode": 4, "pre_tockens": -3, "next_tockens": 1}, MANY, triangle(), "an empty band"),
    "mode 6": (FIA, {"sparse_mode": 6}, MANY, bits(3072, 2048), "sparse_mode 6"),
    "mode 1 without a mask": (FA3, {"sparse_mode": 1}, MANY, None, "do nothing without atten_mask"),
    # ---- arguments that change what it computes
    "more kept than there is": (FA3, {"keep_prob": 1.5}, MANY, None, "keep_prob 1.5"),
    "nothing kept": (FA3, {"keep_prob": 0.0}, MANY, None, "keep_prob 0.0"),
    "a seed": (FA1, {"keep_prob": 0.5, "seed": 7}, MANY, None, "its seed is not read"),
    "an offset": (FA1, {"keep_prob": 0.5, "offset": 7}, MANY, None, "its offset is not read"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CALLS))
def test_only_documented_calls_are_read(name: str) -> None:
    operator, given, inputs, mask, why = CALLS[name]
    reason = left(calling(operator, **given), *inputs, *(() if mask is None else (mask,)))
    assert why in reason and bool(why) == bool(reason)


# By row of the contract a call that is read, and one that is left by that row.
SIDES = {
    "dtype": ("rows and keys", "inference in float32"),
    "contiguous": ("in steps, training", "in steps"),
    "sizes": ("narrow values", "no keys"),
    "head dim": ("a head dim of 24", "a prime head dim"),
    "heads": ("256 heads", "257 heads"),
    "heads of a group": ("64 heads a KV head", "65 heads a KV head"),
    "batch": ("a batch of 129, 32 wide", "a batch of 129, 24 wide"),
    "length": ("a length of 1048576", "a length of 1048577"),
    "keys of one row": ("one row over 262144 keys", "one row over 262145 keys"),
    "hidden size": ("less heads times head dim", "heads times head dim"),
    "result layout": ("turned", "turned, one row"),
    "inner_precise": ("inner_precise 3", "inner_precise 4"),
    "band": ("a band", "an empty band"),
}


def test_every_row_has_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(SIDES) == [row.name for row in RULES]
    failed: list[str] = []

    def noting(rows: Any, call: Any) -> Any:
        row = first_failed(rows, call)
        failed.extend([row.name] if row is not None and rows is RULES else [])
        return row

    monkeypatch.setattr(constraints, "first_failed", noting)
    for row, names in SIDES.items():
        for name, expected in zip(names, ([], [row])):
            operator, given, inputs, mask, _ = CALLS[name]
            failed.clear()
            left(calling(operator, **given), *inputs, *(() if mask is None else (mask,)))
            assert failed == expected, name


SIZES = torch.ones(4)
UNREAD: dict[str, tuple[str, Any]] = {
    "pse": (FA3, SIZES),
    "padding_mask": (FA3, SIZES),
    "prefix": (FA3, [3, 3]),
    "actual_seq_qlen": (FA3, SIZES),
    "actual_seq_kvlen": (FA3, SIZES),
    "sink": (FA3, SIZES),
    "dropout_mask": (FA1, SIZES),
    "pse_shift": (FIA, SIZES),
    "actual_seq_lengths": (FIA, [5, 6]),
    "actual_seq_lengths_kv": (FIA, [5, 9]),
    "dequant_scale1": (FIA, SIZES),
    "antiquant_scale": (FIA, SIZES),
    "key_antiquant_scale": (FIA, SIZES),
    "block_table": (FIA, SIZES),
    "query_padding_size": (FIA, SIZES),
    "key_shared_prefix": (FIA, SIZES),
    "query_rope": (FIA, SIZES),
    "key_rope": (FIA, SIZES),
    "block_size": (FIA, 128),
    "antiquant_mode": (FIA, 1),
    "softmax_lse_flag": (FIA, True),
}


def test_arguments_that_are_not_read_leave_a_call() -> None:
    for name, (operator, value) in UNREAD.items():
        given = value.to("meta") if isinstance(value, Tensor) else value
        assert f"its {name} is not read" in left(calling(operator, **{name: given}), *MANY)


def test_numbers_that_say_the_same_as_none_are_read() -> None:
    for operator, given in ((FA1, {"seed": 0, "offset": 0}), (FIA, {"block_size": 0}), (FA3, {"prefix": None})):
        assert not left(calling(operator, **given), *MANY)
    for given in ({"sync": True}, {"gen_mask_parallel": False}):  # how it is computed, not what
        assert not left(calling(FA3, **given), *MANY)


# ---------------------------------------------------------------- the triangle


def made(kind: torch.dtype, shape: Callable[[Tensor], Tensor]) -> Made:
    return lambda: shape(torch.ones(2048, 2048, dtype=kind))


TRIANGLES: dict[str, tuple[Made, str]] = {
    "bool": (triangle, ""),
    "bytes": (made(torch.uint8, lambda x: x.triu(1)), ""),
    "floats made bytes": (made(FP32, lambda x: torch.triu(x, diagonal=1).to(torch.uint8)), ""),
    "floats made bool": (made(FP32, lambda x: torch.triu(x, diagonal=1).bool()), ""),
    "not the lower one": (made(torch.bool, lambda x: ~x.tril()), ""),
    "of zeros": (made(torch.uint8, lambda x: torch.zeros_like(x).triu(1)), "is not torch.ones"),
    "positions": (lambda: torch.arange(2048) > torch.arange(2048)[:, None], ""),
    "floats": (made(FP32, lambda x: x.triu(1)), "no float mask"),
    "with the diagonal": (made(torch.bool, lambda x: x.triu()), "is not torch.ones"),
    "inverted": (made(torch.bool, lambda x: x.tril()), "is not torch.ones"),
    "inverted bytes": (made(torch.uint8, lambda x: x.tril()), "is not torch.ones"),
    "inverted, floats made bytes": (made(FP32, lambda x: x.tril().to(torch.uint8)), "is not torch.ones"),
    "and a column": (lambda: triangle() | (torch.arange(2048) == 5), "is not torch.ones"),
    "but for one element": (lambda: triangle() & (torch.arange(2048) != 2047)[:, None] & (torch.arange(2048) != 2047),
                            "is not torch.ones"),
    "nothing": (lambda: torch.zeros(2048, 2048, dtype=torch.bool), "is not torch.ones"),
    "int8": (made(torch.int8, lambda x: x.triu(1)), "of int8"),
    "rank 4 in training": (lambda: triangle()[None, None], "needs one of 2048 x 2048, got (1, 1, 2048, 2048)"),
    "written": (lambda: torch.zeros(2048, 2048, dtype=torch.bool).fill_(True), "torch.ones"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(TRIANGLES))
def test_the_triangle_is_checked_where_it_is_created(name: str) -> None:
    mask, why = TRIANGLES[name]
    decided = site(calling(FA3, mask, sparse_mode=2), *MANY)
    assert why in decided.reason and (decided.outcome == "left") == bool(why)
    if not why:
        assert decided.mask == "causal" and not decided.assumptions


def test_the_inference_operator_takes_it_in_more_ranks_and_bytes_of_a_sign() -> None:
    for mask in (lambda: triangle()[None, None], lambda: triangle()[None], lambda: triangle().to(torch.int8)):
        assert not left(calling(FIA, mask, sparse_mode=3), *MANY)


class Kept(torch.nn.Module):
    def __init__(self, mask: Tensor, seen: Callable[[Tensor], Tensor] = lambda mask: mask) -> None:
        super().__init__()
        self.register_buffer("mask", mask)
        self.seen = seen

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return calling(FA3, sparse_mode=2)(q, k, v, self.seen(self.mask))


def test_a_triangle_from_outside() -> None:
    """One that is used as it is, is looked at where its values are there, and else taken for the right one."""
    assert any("triangle" in a for a in site(Kept(triangle()), *MANY).assumptions)
    assert any("triangle" in a for a in site(calling(FA3, sparse_mode=2), *MANY, triangle()).assumptions)
    assert any("triangle" in a for a in site(calling(FA3, sparse_mode=2), *MANY, bits(2048, 2048)).assumptions)
    assert "is not torch.ones" in left(Kept(~triangle()), *MANY)
    assert "is not torch.ones" in left(Kept(~triangle()), *MANY, assume_constant_buffers=True)
    assert "is not torch.ones" in left(calling(FA3, sparse_mode=2), *MANY, triangle().mT)
    larger = torch.ones(2060, 2060, dtype=torch.bool).triu(1)
    assert "may not be torch.ones" in left(Kept(larger, lambda mask: mask[:2048, :2048]), *MANY)
    for seen in (lambda mask: ~mask, lambda mask: mask.mT, lambda mask: mask | mask.mT, lambda mask: mask.roll(1)):
        assert "may not be torch.ones" in left(Kept(triangle(), seen), *MANY)
        assert "may not be torch.ones" in left(Kept(bits(2048, 2048), seen), *MANY)


def test_a_triangle_that_a_checkpoint_is_given() -> None:
    from torch.utils.checkpoint import checkpoint

    def program(made: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
        def run(q: Tensor, k: Tensor, v: Tensor, outside: Tensor) -> Tensor:
            return checkpoint(calling(FA3, sparse_mode=2), q, k, v, made(outside), use_reentrant=False)

        return run

    leaves = [x.to("meta").requires_grad_() for x in MANY]
    assert not left(program(lambda outside: outside), *leaves, bits(2048, 2048))
    assert "may not be" in left(program(lambda outside: ~outside), *leaves, bits(2048, 2048))
    assert not left(program(lambda outside: torch.ones_like(outside).triu(1)), *leaves, bits(2048, 2048))


# ---------------------------------------------------------------- the rules by themselves


def met(**changed: Any) -> CallFacts:
    sizes = {"b": 2, "h": 4, "s": 6, "d": 16}
    plain = {"inference": True, "dtypes": (BF16,) * 3, "is_contiguous": True, "positions_first": False}
    plain |= {"transposed": False, "inner_precise": 0, "mode": 0, "before": 1, "after": 1}
    return CallFacts(**{**plain, "query": sizes, "key": sizes, "value": sizes, **changed})


def test_lengths_and_batches_on_both_sides() -> None:
    for inference, letter, most in (
        *((True, "s", 20971520), (False, "s", 1 << 20), (True, "b", 65536), (False, "b", 2 << 20)),
        *((True, "d", 512), (False, "d", 768), (True, "h", 256), (False, "h", 256)),
    ):
        for size, fine in ((most, True), (most + 16, False)):
            sizes = {**met().query, letter: size}
            assert (refusal(met(inference=inference, query=sizes, key=sizes, value=sizes)) is None) == fine


# ---------------------------------------------------------------- state and time


def test_rows_that_are_not_known_have_no_mask_in_inference() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return calling(FIA, triangle, sparse_mode=3)(q, k, v)

    q, k, v = (x.to("meta") for x in MANY)
    torch._dynamo.maybe_mark_dynamic(q, 2)
    assert "one query row is not known" in left(program, q, k, v)
    torch._dynamo.maybe_mark_dynamic(q, 2)
    assert not left(calling(FIA), q, k, v)


def test_calls_under_functorch_are_left() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.func.grad(lambda x: x.sum() * calling(FA3)(q, k, v).sum())(torch.ones(3, device=q.device))

    assert "runs under" in left(program, *SINGLE)


def test_what_is_written_before_the_call_is_not_read_too_late() -> None:
    from against_eager import same

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        before = k.clone()
        k.mul_(-2.0)
        return calling(FA3)(q, before, v)

    want = lambda q, k, v: ((q @ k.mT * 0.3).softmax(-1) @ v, k.mul_(-2.0))[0]
    same(program, *SINGLE, reference=want, device="Ascend910B")


def test_a_row_without_a_key_is_zero_and_nothing_is_assumed() -> None:
    mask = torch.zeros(6, 9, dtype=torch.bool)
    mask[2] = True
    for options in ({}, {"numerics": "strict"}):
        decided = site(calling(FA3, inner_precise=2), *MANY, mask, **options)
        assert decided.outcome == "rewritten" and not decided.assumptions


def test_a_causal_call_is_predicted_at_what_it_costs() -> None:
    inputs = shaped((2, 8, 4096, 128), (2, 8, 4096, 128))
    times = []
    for given in ({}, {"mask": triangle, "sparse_mode": 2}):
        decided = site(calling(FA3, head_num=8, **given), *inputs, choose="cheapest")
        times.append(decided.predicted_us["leave"])
    assert 0 < times[1] < 0.7 * times[0]


def test_values_of_masks_by_their_documented_shapes() -> None:
    from against_eager import same

    hidden = torch.rand(2, 1, 6, 9, generator=torch.Generator().manual_seed(1)) > 0.5
    hidden[..., 4] = False

    def want(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        mask = mask.bool()
        mask = mask[:, None, None] if q.size(2) == 1 else mask if mask.dim() != 3 else mask[:, None]
        return (q @ k.mT * 0.3).masked_fill(mask, float("-inf")).softmax(-1) @ v

    options: dict[str, Any] = {"reference": want, "rewritten": 1, "device": "Ascend910B"}
    for mask in (hidden[:1, 0], hidden[:1], hidden.to(torch.int8)):
        same(calling(FIA), *MANY, mask.contiguous(), **options)
    same(calling(FIA), *ONE, hidden[:, 0, 0].to(torch.int8).contiguous(), **options)
    by_head = randn(2, 4, 6, 9) > 0
    by_head[..., 4] = False
    same(calling(FA3), *SINGLE, by_head, **options)
