"""FlashAttention over a cache of which a part is valid, by an implementation on the CPU that checks each constraint."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_eager import NEG_INF, qkv, same
from torch._inductor.utils import get_code

import attn_pass
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


def cache(
    batch: int, q_len: int, *, heads_last: tuple[str, ...] = (), dim: int = 16, size: int = 50
) -> tuple[Tensor, ...]:
    q, *made = qkv(batch, 4, q_len, size, dim, kv_heads=2, dtype=HALF)
    laid = [t.transpose(1, 2).contiguous().transpose(1, 2) if n in heads_last else t for n, t in zip("kv", made)]
    return q, *(t[:, :, :50] for t in laid)


BOTH = ("k", "v")
PADDING = torch.tensor([7, 0, 12])


# What is kept; what the program knows; the operands; how far the known numbers are moved.
TAKEN: dict[str, tuple[Callable[[Tensor], Tensor], Tensor, tuple[Tensor, ...], tuple[int, ...]]] = {
    "a position": (lambda p: at() <= p, POSITION, cache(1, 1), (0, -12, 45)),
    "a position, several rows": (lambda p: at() <= p, POSITION, cache(1, 5), (0, -12, 45)),
    "lengths": (lambda n: at() < of_batch(n), LENGTHS, cache(2, 1, heads_last=BOTH), (0, -3, 45)),
    "causal": (lambda p: at() <= row() + p, POSITION, cache(1, 5), (0, -11, 34, -14)),
    "causal, of each row of the batch": (
        lambda n: at() <= row() + of_batch(n),
        LENGTHS,
        cache(2, 5, heads_last=BOTH),
        (0, 25),
    ),
    "lengths, heads first": (lambda n: at() < of_batch(n), LENGTHS, cache(2, 1), (0, -3, 45)),
    "causal, of each row of the batch, heads first": (
        lambda n: at() <= row() + of_batch(n),
        LENGTHS,
        cache(2, 5),
        (0, 25),
    ),
    "left padding": (lambda n: at() >= of_batch(n), PADDING, cache(3, 5), (0, -9, 45)),
    "left padding, heads last": (lambda n: at() >= of_batch(n), PADDING, cache(3, 5, heads_last=BOTH), (0, 45)),
    "left padding of a chunk": (
        lambda n: (at() >= of_batch(n)) & (at() <= row() + 30),
        PADDING,
        cache(3, 5),
        (0, 20, -20),
    ),
    "left padding of a chunk at a position": (
        lambda n: (at() >= of_batch(n[:3])) & (at() <= row() + n[3]),
        torch.tensor([7, 0, 12, 21]),
        cache(3, 5),
        (0, 24, -8),
    ),
    "a window behind left padding": (
        lambda n: (at() >= of_batch(n[:3])) & (at() <= row() + n[3]) & (at() > row() + n[3] - 9),
        torch.tensor([7, 0, 12, 21]),
        cache(3, 5),
        (0, 24, -8),
    ),
    "a range in one row": (lambda n: (at() >= n[0]) & (at() < n[1]), torch.tensor([7, 31]), cache(1, 5), (0, 30, -20)),
    "windows": (lambda p: (at() <= row() + p) & (at() > row() + p - 4), POSITION, cache(1, 5), (0, -11, 34)),
}
REFUSED: dict[str, tuple[str, Callable[[Tensor], Tensor], Tensor, tuple[Tensor, ...], float]] = {
    "a part of a larger cache": (
        "would be copied",
        lambda n: at() < of_batch(n),
        LENGTHS,
        cache(2, 1, size=60),
        NEG_INF,
    ),
    "keys otherwise than values": (
        "would be copied",
        lambda n: at() < of_batch(n),
        LENGTHS,
        cache(2, 1, heads_last=("k",)),
        NEG_INF,
    ),
    "positions": ("this one masks more", lambda p: at() <= p + row() * row(), POSITION, cache(1, 5), NEG_INF),
    "a sink beside a window": (
        "this one masks more",
        lambda p: ((at() <= p) & (at() > p - 4)) | (at() == 0),
        POSITION,
        cache(1, 5),
        NEG_INF,
    ),
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
    first, *more = ((*operands, known + moved) for moved in moves)
    with torch.no_grad():
        report = same(fn, *first, then=more, rewritten=1, device="H200", targets=("flash",), reference=False)
    of_rows = "causal" in name or "window" in name or "chunk at" in name  # a chunk from key 30 on is in the cache
    assert (IN_CACHE in report.sites[0].assumptions) == of_rows
    (call,) = emitted(fn, *operands, known)
    assert call.kwargs["seqused_k"] is not None


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_refuses(name: str) -> None:
    """With the reason in the report, beside the one why it does not take the mask as a tensor."""
    why, keep, known, operands, fill = REFUSED[name]
    asked = {"device": "H200", "targets": ("flash",)}
    with torch.no_grad():
        site = attn_pass.explain(attend(keep, fill), *operands, known, attn_pass_options=asked).sites[0]
    assert site.outcome == "left" and site.refusals["flash"] != site.refusals["flash (valid_range)"]
    assert why in site.refusals["flash (valid_range)"]


class OverCache(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = torch.nn.Linear(16, 16, dtype=HALF)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, known: Tensor) -> Tensor:
        return attend(lambda p: at() <= p)(self.query(q), k, v, known)


@pytest.mark.parametrize("target", ["flash", "decode"])
@pytest.mark.parametrize("trained", [True, False])
def test_an_exported_program_may_be_trained(target: str, trained: bool) -> None:
    """Its values do not show it, and the gradient of the one kernel would be wrong, that of the other an error."""
    module = OverCache().requires_grad_(trained)
    program = torch.export.export(module, (*cache(1, 1), POSITION))
    asked = {"device": "H200", "targets": (target,), "choose": "fused", "assume_nonempty_rows": True}
    (site,) = attn_pass.rewrite(program, **asked).sites  # type: ignore[arg-type]
    assert site.target == (None if trained else target)
    assert any("requires_grad_(False)" in why for why in site.refusals.values()) == trained


def test_strict_numbers_assume_no_position() -> None:
    keep, known, operands, _ = TAKEN["causal"]
    asked = {"device": "H200", "targets": ("flash",), "numerics": "strict"}
    with torch.no_grad():
        site = attn_pass.explain(attend(keep), *operands, known, attn_pass_options=asked).sites[0]
    assert site.outcome == "left"


def test_nothing_copies_the_cache() -> None:
    """Compiled: the update is in place, and the kernel is given the cache itself, in another view."""

    def fn(q: Tensor, k: Tensor, v: Tensor, new: Tensor, p: Tensor, padding: Tensor) -> Tensor:
        k.index_copy_(2, p + torch.arange(5), new)
        v.index_copy_(2, p + torch.arange(5), new)
        keep = (at() <= row() + p) & (at() >= of_batch(padding))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep, enable_gqa=True)

    q, k, v = cache(3, 5)
    operands = (q, k, v, k[:, :, :5].clone(), torch.tensor(11), PADDING)
    backend = attn_pass.wrap("inductor", device="H200", targets=("flash",), choose="fused", on_error="raise")
    torch._dynamo.reset()
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        code = get_code(torch.compile(fn, backend=backend, fullgraph=True), *operands)[0]
    made = [[int(n) for n in re.findall(r"\d+", s)] for s in re.findall(r"= empty_strided_cpu\(\((.*?)\)", code)]
    assert made and max(math.prod(sizes) for sizes in made) < k.numel()
    (call,) = re.findall(r"aten\._flash_attention_forward\.default\((.*)\)", code)
    assert len(re.findall(r"reinterpret_tensor\(arg\d+_1, \(250, 2, 16\), \(16, 800, 1\), 0\)", call)) == 2


def test_heads_first_needs_sizes_that_are_known() -> None:
    q, k, v = cache(2, 1)
    for x in (k, v):
        torch._dynamo.mark_dynamic(x, 2)

    def fn(q: Tensor, k: Tensor, v: Tensor, known: Tensor) -> Tensor:
        kept = torch.arange(k.shape[2]) < of_batch(known)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=kept, enable_gqa=True)

    asked = {"device": "H200", "targets": ("flash",)}
    with torch.no_grad():
        site = attn_pass.explain(fn, q, k, v, LENGTHS, attn_pass_options=asked).sites[0]
    assert "sizes that are known" in site.refusals["flash (valid_range)"]


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
