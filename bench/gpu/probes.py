"""Part 2: calls of cuDNN's kernel that the rule table depends on, and the versions that differ.

The pass emits none of these calls where its rules refuse them, so that an answer that is wrong is not a failure of the
run: it says which rule this GPU with this cuDNN needs. Each call is compared with float64, forward and backward.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from attn_pass.measuring.timing import why
from bench.gpu.correctness import compared, with_gradients
from bench.gpu.environment import Environment
from bench.gpu.parts import Case, Column, Part, Row, one_each
from bench.harness.programs import doubled

BF16 = torch.bfloat16
NEG_INF = float("-inf")
FILL = -2e38  # what the pass writes for a masked score
NEW_LENGTHS = 20
_EMPTY = 1  # the fully masked row


@dataclass(frozen=True)
class Probe:
    """One call of a kernel's operator; sizes (B, H, L, S, D)."""

    sizes: tuple[int, int, int, int, int]
    mask: str = ""  # "all", "prefix", "left padding", "window", "empty row"; which keys are kept
    fill: float = NEG_INF
    causal: bool = False
    stride0: str = ""  # "batch" or "heads": the dimension keys and values are expanded over
    train: bool = True
    kernel: str = "cudnn"
    asks: str = ""  # the report the question comes from

    def tiny(self) -> Probe:
        """Small enough for a dry run, of the same kind."""
        b, h, rows, keys, d = self.sizes
        rows, keys = (n if n == 1 else 8 + n // 64 for n in (rows, keys))
        return replace(self, sizes=(b, h, rows, keys, min(d, 256)))

    def inputs(self, env: Environment) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key, value; the leaves whose gradients are asked for."""
        b, h, rows, keys, d = self.sizes
        kv = (1 if self.stride0 == "batch" else b, 1 if self.stride0 == "heads" else h, keys, d)
        shapes = ((b, h, rows, d), kv, kv)
        q, k, v = (env.normal(*shape, grad=self.train) for shape in shapes)
        return q, k, v

    def keep(self, device: str) -> Tensor | None:
        """Which keys a row keeps, (B, 1, L, S) or broadcastable; None without a mask."""
        b, _, rows, keys, _ = self.sizes
        at = torch.arange(keys, device=device)
        row = torch.arange(rows, device=device)[:, None] + (keys - rows)
        if self.mask == "prefix":
            return ((at <= row) | (at < keys // 3))[None, None]
        if self.mask == "left padding":
            first = torch.tensor([keys * 5 // 8, 0] * b, device=device)[:b, None, None, None]
            return ((at >= first) | (at == row)) & (at <= row)  # padding sees itself: no row is fully masked
        if self.mask == "window":
            return ((at <= row) & (at > row - max(1, keys // 10)))[None, None]
        if self.mask == "empty row":
            return ((row != keys - rows + _EMPTY) & (at >= 0))[None, None]
        return torch.ones(1, 1, rows, keys, dtype=torch.bool, device=device) if self.mask else None


# A head dim over 128 each forward and backward; S % 128 == 64; one query; a first tile of keys that is masked whole.
PROBES: dict[str, Probe] = {
    "a fully masked row, -inf": Probe((2, 4, 256, 256, 64), "empty row", train=False, asks="zero, NaN, or the mean"),
    "a fully masked row, -2e38": Probe((2, 4, 256, 256, 64), "empty row", FILL, train=False, asks="the mean"),
    "a fully masked row, gradients": Probe((2, 4, 256, 256, 64), "empty row", asks="zero or NaN"),
    "mask, S = 704, gradients": Probe((2, 4, 704, 704, 64), "prefix", asks="pytorch#196678: NaN in dQ"),
    "mask, S = 768, gradients": Probe((2, 4, 768, 768, 64), "prefix", asks="pytorch#196678, a length that is right"),
    "one query, gradients": Probe((2, 4, 1, 512, 64), asks="cudnn-frontend#1072: NaN in dK and dV"),
    "causal, L < S": Probe((2, 4, 128, 320, 64), causal=True, asks="aligned to the first key or the last"),
    "causal, L > S": Probe((2, 4, 320, 128, 64), causal=True, asks="aligned to the first key or the last"),
    "keys expanded over the batch": Probe((3, 4, 256, 256, 64), stride0="batch", asks="refused, right, or wrong"),
    "keys expanded over the heads": Probe((2, 4, 256, 256, 64), stride0="heads", asks="refused, right, or wrong"),
    "left padding, S = 320, -inf": Probe((2, 4, 320, 320, 64), "left padding", asks="a whole first tile is masked"),
    "left padding, S = 320, -2e38": Probe((2, 4, 320, 320, 64), "left padding", FILL, asks="the same with numbers"),
    "window of a tenth, S = 640, -inf": Probe((2, 4, 640, 640, 64), "window", asks="tiles that are masked whole"),
    **{f"D {d}, {k}": Probe((1, 4, 256, 256, d), kernel=k) for d in (160, 192, 224, 256) for k in ("cudnn", "flash")},
}


def _operator(probe: Probe, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    aten = torch.ops.aten
    b, h = probe.sizes[:2]
    k, v = (x.expand(b, h, -1, -1) for x in (k, v))
    if probe.kernel == "flash":
        out = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, probe.causal, False)[0]
    else:
        out = aten._scaled_dot_product_cudnn_attention(q, k, v, bias, probe.train, 0.0, probe.causal, False)[0]
    assert isinstance(out, Tensor)
    return out


def _plain(probe: Probe, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, *, last: bool) -> Tensor:
    """The meaning, a fully masked row being 0; ``last``: causal masks end at the last key."""
    scores = q @ k.mT * q.size(-1) ** -0.5
    rows, keys = scores.shape[-2:]
    if probe.causal:
        ones = torch.ones(rows, keys, dtype=torch.bool, device=q.device)
        keep = ones.tril(keys - rows if last else 0)
    if keep is not None:
        scores = scores.masked_fill(~keep, NEG_INF)
    weights = torch.ops.aten._safe_softmax.default(scores, -1)
    assert isinstance(weights, Tensor)
    return weights @ v


def ask(env: Environment, probe: Probe) -> Row:
    """What the kernel makes of the call: refused, right, or how it is wrong, and in which results."""
    if env.dry:
        probe = probe.tiny()
    torch.manual_seed(0)
    leaves = probe.inputs(env)
    keep = probe.keep(env.device)
    bias = None
    if keep is not None:
        bias = torch.zeros(keep.shape, device=env.device).masked_fill(~keep, probe.fill).to(BF16)
    row: Row = {"asks": probe.asks}
    with torch.set_grad_enabled(probe.train):
        try:
            out = _operator(probe, *leaves, bias)
            grad = torch.randn_like(out)
            if probe.mask == "empty row":
                grad[:, :, _EMPTY] = 0  # what the row's own result is, is said apart
            gradients = with_gradients(out, leaves, grad)
            env.wait()
        except RuntimeError as error:
            return {**row, "answer": f"refused: {why(error)[:200]}"}
        empty = _empty_row(probe, gradients[0])
        if empty:
            gradients[0] = gradients[0].detach().index_fill(2, torch.tensor([_EMPTY], device=env.device), 0)
        answers = {}
        for last in (True, False) if probe.causal and probe.sizes[2] != probe.sizes[3] else (True,):
            results = [
                with_gradients(_plain(probe, *given, keep, last=last), given, grad)
                for given in (leaves, doubled(leaves))
            ]
            answers[last] = _judged(gradients, *results)
    best = min(answers, key=lambda last: answers[last]["of_limit"])
    aligned = f", aligned to the {'last' if best else 'first'} key" if len(answers) > 1 else ""
    return row | answers[best] | {"answer": answers[best]["answer"] + aligned + empty}


def _judged(results: list[Tensor], eager: list[Tensor], exact: list[Tensor]) -> Row:
    names = ("out", "dQ", "dK", "dV")
    parts = {n: compared([f], [e], [x]) for n, f, e, x in zip(names, results, eager, exact)}
    wrong = [n for n, part in parts.items() if not part["of_limit"] <= 1]
    not_numbers = [n for n, f in zip(names, results) if not bool(torch.isfinite(f).all())]
    said = f"wrong: {', '.join(wrong)}" if wrong else "right"
    said += f"; not finite: {', '.join(not_numbers)}" if not_numbers else ""
    worst = max(parts.values(), key=lambda part: part["of_limit"])
    return {**worst, "answer": said}


def _empty_row(probe: Probe, out: Tensor) -> str:
    if probe.mask != "empty row":
        return ""
    row = out[:, :, _EMPTY].detach().float()
    kind = "NaN" if bool(row.isnan().any()) else "0" if bool((row == 0).all()) else "a number"
    return f"; the row is {kind}"


def plans(env: Environment) -> Row:
    """What the first call at a new length costs the host, for lengths that cuDNN has not seen."""
    first, second = [], []
    lengths = [12 + n for n in range(3)] if env.dry else [2049 + 37 * n for n in range(NEW_LENGTHS)]
    for length in lengths:
        q, k, v = (env.normal(1, 4, rows, 64) for rows in (1, length, length))
        for taken in (first, second):
            env.wait()
            began = time.perf_counter()
            torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, False, 0.0, False, False)
            env.wait()
            taken.append((time.perf_counter() - began) * 1e3)
    low, middle, high = (round(f(first), 2) for f in (min, statistics.median, max))
    answer = (
        f"{len(lengths)} new lengths: {low} to {high} ms, median {middle} ms; again {statistics.median(second):.3f} ms"
    )
    return {"answer": answer, "first_ms": first, "again_ms": second, "asks": "23 to 37 ms reported"}


def cases(env: Environment) -> Iterator[Case]:
    """The questions, the reported bugs among them."""
    yield from one_each(PROBES, ask, quick=4)(env)
    yield Case("plans of new lengths", partial(plans, env))


PART = Part(
    "probes",
    "What cuDNN answers",
    0.05,
    (
        Column("question", "name"),
        Column("answer", "answer"),
        Column("error", "error_abs", ".1e"),
        Column("of what is allowed", "of_limit", ".2f"),
        Column("asked because", "asks"),
    ),
    cases,
    timed=False,
    usual=False,
)
