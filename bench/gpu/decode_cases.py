"""Awkward calls of the decode operator, with their inputs and the float64 result.

Run under Triton's interpreter (`bench.gpu.interpreted`) and on a GPU (`bench.gpu.correctness`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

Tensor = torch.Tensor
Layout = Callable[[Tensor], Tensor]


def _dense(x: Tensor) -> Tensor:
    return x


def _heads_last(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _expanded(x: Tensor) -> Tensor:
    return x[:1].expand(x.size(0), -1, -1, -1)


def _sliced(x: Tensor) -> Tensor:
    return torch.cat([x] * 4, 2)[:, :, 3 : 3 + x.size(2)]


@dataclass(frozen=True)
class Case:
    """Sizes, dtype, mask kind and layouts of one call."""

    name: str
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    q_len: int = 1
    kv_len: int = 300
    dim: int = 64
    value_dim: int | None = None
    dtype: torch.dtype = torch.float16
    mask: str = ""
    causal: bool = False
    window: int = -1
    cores: int = 8
    shared_bytes: int = 227 << 10
    layout: Layout = field(default=_dense)
    scale: float = 0.125
    lengths: tuple[int, ...] = ()  # valid keys of each batch row
    starts: tuple[int, ...] = ()  # and the first of them
    mean: bool = False  # of all values, where a row is fully masked


CASES = (
    Case("plain"),
    Case("one split", cores=1),
    Case("many splits", kv_len=1500, cores=64),
    Case("splits past the last key", kv_len=257, cores=64),
    Case("one key", kv_len=1),
    Case("little shared memory", heads=32, kv_heads=2, q_len=4, dim=256, shared_bytes=99 << 10),
    Case("less shared memory", heads=32, kv_heads=2, q_len=4, dim=256, shared_bytes=48 << 10),
    Case("a prime number of keys", kv_len=97),
    Case("bfloat16", dtype=torch.bfloat16),
    Case("no groups", heads=3, kv_heads=3),
    Case("one KV head", heads=8, kv_heads=1),
    Case("two query rows", q_len=2),
    Case("64 query rows of 4 heads", q_len=64, heads=4, kv_heads=1, batch=1),
    Case("rows that fill no block", q_len=7, heads=6, kv_heads=2),
    Case("head dim 32", dim=32),
    Case("head dim 80", dim=80),
    Case("head dim 128", dim=128, kv_len=130),
    Case("head dim 256", dim=256, kv_len=130),
    Case("narrow values", dim=96, value_dim=40),
    Case("causal", q_len=5, causal=True),
    Case("causal, as many queries as keys", q_len=33, kv_len=33, causal=True),
    Case("causal, more queries than keys", q_len=9, kv_len=4, causal=True),
    Case("window", q_len=3, causal=True, window=70, kv_len=700, cores=32),
    Case("window of one key", q_len=4, causal=True, window=0),
    Case("added mask", mask="added", q_len=3),
    Case("added mask of a head", mask="head"),
    Case("key padding", mask="padding", q_len=2),
    Case("boolean mask", mask="boolean", q_len=5),
    Case("fully masked rows", mask="empty", q_len=3),
    Case("rows filled with the lowest number", mask="lowest", q_len=3, kv_len=1000, cores=64),
    Case("mask and causal", mask="padding", q_len=4, causal=True),
    Case("heads last", layout=_heads_last, q_len=2),
    Case("shared by the batch", layout=_expanded),
    Case("slices of a cache", layout=_sliced, q_len=2),
    Case("negative scale", scale=-0.3),
    Case("more splits than are joined at once", kv_len=8500, cores=1024, batch=1, heads=2, kv_heads=1, dim=16),
    Case("one row of a mask for all heads", mask="shared", q_len=1, kv_len=700, cores=64),
    Case("one head of a group, one row of its mask", mask="head rows", heads=2, kv_heads=2, kv_len=300),
    Case("a mask of each head, one query row", mask="head rows", heads=4, kv_heads=2, kv_len=300),
    Case("rows of a mask for all heads", mask="added", q_len=4, batch=1, heads=8, kv_heads=2),
    Case("lengths", lengths=(211, 64), kv_len=300, cores=64),
    Case("lengths that leave splits empty", lengths=(3, 1), kv_len=1500, cores=64, q_len=1),
    Case("no valid key, and every one", lengths=(0, 300), q_len=2),
    Case("lengths out of range", lengths=(-5, 9999), q_len=2),
    Case("lengths and causal", lengths=(130, 65), q_len=5, causal=True),
    Case("lengths below the number of queries", lengths=(3, 1), q_len=5, causal=True),
    Case("lengths and window", lengths=(600, 90), q_len=3, causal=True, window=70, kv_len=700, cores=32),
    Case("lengths and a mask", lengths=(211, 64), mask="boolean", q_len=5),
    Case("lengths and an added mask", lengths=(211, 64), mask="shared", dtype=torch.bfloat16),
    Case("one length for all rows", lengths=(77,), q_len=2, cores=64),
    Case("causal from behind the last key", lengths=(304, 299), q_len=6, causal=True),
    Case("causal from far behind it", lengths=(1 << 30, 320), q_len=6, causal=True, window=25),
    Case("starts", starts=(5, 211), q_len=2, cores=64),
    Case("a range", lengths=(211, 64), starts=(130, -3), cores=64),
    Case("a range of nothing", lengths=(64, 300), starts=(64, 400), q_len=3),
    Case("starts and causal", lengths=(130, 65), starts=(126, 7), q_len=6, causal=True),
    Case("starts and a window", lengths=(600, 90), starts=(545, 0), q_len=3, causal=True, window=70, kv_len=700),
    Case("starts and a mask", starts=(211, 64), mask="boolean", q_len=5, dtype=torch.bfloat16),
    Case("a range and a mask", lengths=(211, 64), starts=(130, 3), mask="boolean", q_len=5, cores=64),
    Case("nothing found in a mask", lengths=(0, 300), starts=(1 << 30, 0), mask="boolean", q_len=2),
    Case("the mean where nothing is valid", lengths=(64, 300), starts=(64, 40), q_len=3, mean=True, cores=64),
    Case("the mean of rows before the first key", lengths=(3, 65), q_len=5, causal=True, mean=True, cores=64),
    Case("the mean behind a window", lengths=(340, 90), q_len=3, causal=True, window=30, mean=True, cores=64),
    Case("the mean beside a range", lengths=(211, -1), starts=(40, 0), mean=True, dtype=torch.bfloat16),
    Case("the mean of no row", lengths=(211, 77), starts=(40, 0), q_len=2, mean=True, cores=64),
)


def mask_of(case: Case) -> Tensor | None:
    b, h, q, k = case.batch, case.heads, case.q_len, case.kv_len
    if case.mask == "padding":
        return (torch.arange(k) < torch.tensor([k, max(1, k // 3)])[:b, None])[:, None, None]
    if case.mask == "boolean":
        return torch.rand(b, 1, q, k) < 0.7
    if case.mask == "empty":
        return (torch.arange(q) != 1)[:, None] & (torch.rand(b, h, q, k) < 0.7)
    if case.mask == "lowest":
        return torch.where(torch.arange(q)[:, None] == 1, torch.finfo(torch.float32).min, torch.zeros(b, 1, q, k))
    if case.mask == "shared":
        return torch.randn(b, 1, 1, k).to(case.dtype)
    if case.mask == "head rows":
        return torch.randn(b, h, 1, k).to(case.dtype)
    if case.mask:
        return torch.randn((b, 1, q, k) if case.mask == "added" else (1, h, 1, 1)).to(case.dtype)
    return None


def inputs_of(case: Case, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Query, key, value and mask; the same numbers on every device. NaN lies where no valid key does."""
    torch.manual_seed(0)
    q = torch.randn(case.batch, case.heads, case.q_len, case.dim).to(case.dtype)
    k = torch.randn(case.batch, case.kv_heads, case.kv_len, case.dim).to(case.dtype)
    v = torch.randn(case.batch, case.kv_heads, case.kv_len, case.value_dim or case.dim).to(case.dtype)
    mask = mask_of(case)
    beyond = _beyond(case)
    if beyond is not None:
        k, v = (torch.where(beyond[..., None], torch.nan, x) for x in (k, v))
    q, k, v = (case.layout(x.to(device)) for x in (q, k, v))
    return q, k, v, None if mask is None else mask.to(device)


def lengths_of(case: Case, device: str = "cpu") -> Tensor | None:
    """The valid keys of each batch row, as the operator takes them; None for all."""
    return _numbers(case.lengths, device)


def starts_of(case: Case, device: str = "cpu") -> Tensor | None:
    """The first valid key of each batch row, as the operator takes them; None for the first there is."""
    return _numbers(case.starts, device)


def _numbers(numbers: tuple[int, ...], device: str) -> Tensor | None:
    return torch.tensor(numbers, dtype=torch.int32, device=device) if numbers else None


def _beyond(case: Case) -> Tensor | None:
    """Which keys are not read, (B, 1, S)."""
    if not case.lengths and not case.starts:
        return None
    keys, each = torch.arange(case.kv_len), torch.zeros(case.batch, 1, 1, dtype=torch.int64)
    lengths, starts = lengths_of(case), starts_of(case)
    end = each + (case.kv_len if lengths is None else lengths[:, None, None])
    valid = (keys < end) & (keys >= each + (0 if starts is None else starts[:, None, None]))
    return None if case.mean and _keeps_none(case).any() else ~valid


def _keeps_none(case: Case) -> Tensor:
    """Which rows are fully masked by other means than a mask, (B, 1, L)."""
    lengths, starts = lengths_of(case), starts_of(case)
    each = torch.zeros(case.batch, 1, 1, dtype=torch.int64)
    end = each + (case.kv_len if lengths is None else lengths[:, None, None])
    newest, oldest = end - 1 + 0 * torch.arange(case.q_len), each + (0 if starts is None else starts[:, None, None])
    if case.causal:
        newest = end - case.q_len + torch.arange(case.q_len)
        if case.window >= 0:
            oldest = torch.maximum(oldest, newest - case.window)
    return newest.clamp(max=case.kv_len - 1) < oldest.clamp(min=0)


def exact_with_lse(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, case: Case) -> tuple[Tensor, Tensor]:
    """The result and the logarithm of the sum of exponentials in float64, 0 and -inf in a fully masked row."""
    groups = case.heads // case.kv_heads
    q, k, v = (x.double() for x in (q, k, v))
    beyond, lengths, starts = _beyond(case), lengths_of(case), starts_of(case)
    if beyond is not None:
        k, v = (torch.where(beyond.to(q.device)[..., None], 0.0, x) for x in (k, v))
    scores = torch.einsum("bhgqd,bhkd->bhgqk", q.unflatten(1, (case.kv_heads, groups)), k).flatten(1, 2) * case.scale
    if mask is not None:
        scores = torch.where(mask, scores, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    rows, keys = (torch.arange(n, device=q.device) for n in (case.q_len, case.kv_len))
    end = torch.full((1, 1, 1, 1), case.kv_len) if lengths is None else lengths[:, None, None, None].long()
    start = torch.zeros_like(end) if starts is None else starts[:, None, None, None].long()
    end, start = end.to(q.device), start.to(q.device)
    scores = torch.where((keys < end) & (keys >= start), scores, -torch.inf)
    if case.causal:
        ago = rows[:, None] + end - case.q_len - keys
        scores = torch.where((ago >= 0) & ((ago <= case.window) | (case.window < 0)), scores, -torch.inf)
    if case.mean:
        scores = torch.where(_keeps_none(case).to(q.device)[..., None], 0.0, scores)
    weights = scores.softmax(-1).nan_to_num(0.0)
    out = torch.einsum("bhgqk,bhkd->bhgqd", weights.unflatten(1, (case.kv_heads, groups)), v).flatten(1, 2)
    return out, scores.logsumexp(-1)


def error(x: Tensor, right: Tensor) -> float:
    """The largest difference, a NaN counting as a large one; none between equal infinities."""
    apart = torch.where(x.double() == right, 0.0, (x.double() - right).abs())
    return float(apart.nan_to_num(nan=1e9).max())


def error_of_lse(x: Tensor, right: Tensor) -> float:
    """The largest difference of logarithms, relative where they are large; all below the kernel's lowest alike."""
    x, right = (torch.where(v.isinf(), v, v.double().clamp(min=-2.0e38)) for v in (x, right))
    size = torch.where(right.isinf(), 1.0, right.abs().clamp(min=1.0))
    return error(x / size, right / size)
