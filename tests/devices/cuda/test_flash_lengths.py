"""FlashAttention over a cache of which a part is valid, by an implementation on the CPU that checks each constraint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_eager import NEG_INF, qkv, same

import attn_pass
from attn_pass.devices.cuda import flash_lengths
from attn_pass.devices.cuda.flash_lengths import IN_CACHE
from bench.gpu import stand_ins

stand_ins.install()

Tensor = torch.Tensor
HALF = torch.bfloat16
POSITION, LENGTHS = torch.tensor(11), torch.tensor([3, 20])


def at() -> Tensor:
    return torch.arange(50)


def row() -> Tensor:
    return torch.arange(5)[:, None]


def of_batch(n: Tensor) -> Tensor:
    return n[:, None, None, None]


def attend(keep: Callable[[Tensor], Tensor], fill: float = NEG_INF) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, known: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        return (q @ k.mT * 0.3).masked_fill(~keep(known), fill).softmax(-1) @ v

    return run


def cache(batch: int, q_len: int, *, heads_last: bool = False, dim: int = 16) -> tuple[Tensor, ...]:
    q, k, v = qkv(batch, 4, q_len, 50, dim, kv_heads=2, dtype=HALF)
    if heads_last:
        k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v))
    return q, k, v


# What is kept; what the program knows; the operands; how far the known numbers are moved.
TAKEN: dict[str, tuple[Callable[[Tensor], Tensor], Tensor, tuple[Tensor, ...], tuple[int, ...]]] = {
    "a position": (lambda p: at() <= p, POSITION, cache(1, 1), (0, -12, 45)),
    "a position, several rows": (lambda p: at() <= p, POSITION, cache(1, 5), (0, -12, 45)),
    "lengths": (lambda n: at() < of_batch(n), LENGTHS, cache(2, 1, heads_last=True), (0, -3, 45)),
    "causal": (lambda p: at() <= row() + p, POSITION, cache(1, 5), (0, -11, 34, -14)),
    "causal, of each row of the batch": (
        lambda n: at() <= row() + of_batch(n),
        LENGTHS,
        cache(2, 5, heads_last=True),
        (0, 25),
    ),
    "windows": (lambda p: (at() <= row() + p) & (at() > row() + p - 4), POSITION, cache(1, 5), (0, -11, 34)),
}
REFUSED: dict[str, tuple[str, Callable[[Tensor], Tensor], Tensor, tuple[Tensor, ...], float]] = {
    "heads first": ("would be copied", lambda n: at() < of_batch(n), LENGTHS, cache(2, 1), NEG_INF),
    "left padding": ("all the flash kernel", lambda p: at() >= p, POSITION, cache(1, 5), NEG_INF),
    "positions": ("all the flash kernel", lambda p: at() <= p + row() * row(), POSITION, cache(1, 5), NEG_INF),
    "a number": ("the mean of all values", lambda p: at() <= p, POSITION, cache(1, 1), -1e30),
    "an odd head dim": ("would be copied", lambda p: at() <= p, POSITION, cache(1, 1, dim=20), NEG_INF),
}


def emitted(fn: Callable[..., Tensor], *inputs: Tensor) -> list[Any]:
    calls: list[torch.fx.Node] = []

    def seen(gm: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        calls.extend(n for n in gm.graph.nodes if "_flash_attention_forward" in str(n.target))
        return gm

    torch._dynamo.reset()
    asked = {"device": "H200", "targets": ("flash",), "choose": "fused", "on_error": "raise"}
    with torch.no_grad():
        torch.compile(fn, backend=attn_pass.wrap(seen, **asked))(*inputs)  # type: ignore[arg-type]
    return calls


@pytest.mark.parametrize("name", TAKEN)
def test_it_equals_the_program(name: str) -> None:
    keep, known, operands, moves = TAKEN[name]
    fn = attend(keep)
    with torch.no_grad():
        for moved in moves:
            report = same(fn, *operands, known + moved, rewritten=1, device="H200", targets=("flash",), reference=False)
    assert (IN_CACHE in report.sites[0].assumptions) == (
        name not in ("a position", "a position, several rows", "lengths")
    )
    (call,) = emitted(fn, *operands, known)
    assert call.kwargs["seqused_k"] is not None


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_refuses(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    why, keep, known, operands, fill = REFUSED[name]
    asked, answers, plan_of = {"device": "H200", "targets": ("flash",)}, [], flash_lengths.plan_of

    def noted(*given: Any) -> object:
        answers.append(plan_of(*given))
        return answers[-1]

    monkeypatch.setattr(flash_lengths, "plan_of", noted)
    with torch.no_grad():
        site = attn_pass.explain(attend(keep, fill), *operands, known, attn_pass_options=asked).sites[0]
    assert site.outcome == "left" and why in answers[0].reason, answers


def test_strict_numbers_assume_no_position() -> None:
    keep, known, operands, _ = TAKEN["causal"]
    asked = {"device": "H200", "targets": ("flash",), "numerics": "strict"}
    with torch.no_grad():
        site = attn_pass.explain(attend(keep), *operands, known, attn_pass_options=asked).sites[0]
    assert site.outcome == "left"


def test_a_chunk_of_a_prompt_is_predicted_cheaper_than_under_a_mask() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, p: Tensor) -> Tensor:
        keys, rows = (torch.arange(x.shape[2], device=q.device) for x in (k, q))
        keep = keys <= rows[:, None] + p
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, keep[None, None], enable_gqa=True)

    with torch.device("meta"):
        q = torch.empty(1, 32, 512, 128, dtype=HALF)
        k, v = (torch.empty(1, 8, 16384, 128, dtype=HALF) for _ in range(2))
        position = torch.empty((), dtype=torch.int64)
    with torch.no_grad():
        site = attn_pass.explain(fn, q, k, v, position, attn_pass_options={"device": "H200"}).sites[0]
    assert (site.target, site.poor_cases) == ("flash", ("valid_range",)), (site.predicted_us, site.refusals)
