"""Predicts the time of `attn_pass::attention` from its work: packing, two products, weights, and masks.

All work is counted like products, in FLOPs at the rate of the device's fused kernel for the dtype, so that a
calibration of the device (`attn-pass calibrate`) scales both alike. Keys that a strip of rows does not attend to cost
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from attn_pass.devices import roofline
from attn_pass.devices.device import Device
from attn_pass.devices.roofline import Problem
from attn_pass.model.attention import Attention
from attn_pass.model.expression import Apply, Expr, walk
from attn_pass.model.index import Index
from attn_pass.model.structure import Band, Chunk, Either, Keys, Part, row_index
from attn_pass.targets.flex.blocks import INTEGERS, conjunctions, span
from attn_pass.targets.masks import wants_mask_gradient

FEW_ROWS = 16  # of a KV head: `few.hpp`
_ROWS, _STRIP, _PANEL, _HALF_PANEL = 96, 6, 64, 32
_SAMPLES = 64  # strips at which what they see is counted

_GAINS: Mapping[str, Mapping[torch.dtype, float]] = {
    "avx512": {torch.float32: 1.08, torch.bfloat16: 1.8, torch.float16: 1.25},
    "avx512_fp16": {torch.float32: 1.03, torch.bfloat16: 1.8, torch.float16: 1.25},
    "avx512_bf16": {torch.float32: 1.25, torch.bfloat16: 2.1, torch.float16: 2.1},
    "avx2": {torch.float32: 1.15, torch.bfloat16: 1.35, torch.float16: 1.85},
    "amx": {torch.float32: 1.08, torch.bfloat16: 1.7, torch.float16: 1.2},
}
"""By instruction set: how many times the rate of torch's fused kernel large problems get (docs/kernel.md).

With AMX both multiply bfloat16 in tiles; this one not with few rows, in training, or with dropout, which
has the forward of training.
"""
_WITHOUT_TILES = 0.42  # of torch's rate with them
_VECTORS = 4.0  # what work on vectors counts beside products in tiles
_PLAIN = 0.25  # the compiler's own vectors, beside torch's kernel with AVX2: it is taken only for what masks save

_SHORT = 0.8
_CALL_US = 5.0  # a generated function, which fills its arguments in and may wake threads

# FLOPs that take as long, fitted to 320 bare calls beside torch's kernel on one and two threads, with AVX-512.
_TASK = 50_000.0
_PACKED = 25.0  # an element of keys or values that is packed
_ROW = 20.0  # an element of a row of the query or the result
_WIDE = 0.85  # of the gain with head dims over 128
# Of the gain where a panel is not half full. On processors with products of bfloat16 (Zen 4) float32 keeps more, by
# bare calls on one and two threads, and in bfloat16 torch's kernel is as slow.
_FEW_KEYS = 0.6
_FEW_KEYS_ON: Mapping[str, Mapping[torch.dtype, float]] = {
    "avx512_bf16": {torch.float32: 0.85, torch.bfloat16: 1.0, torch.float16: 1.0}
}
_LANES = 16  # of a vector
_LOOKED_AT = 30.0  # a score where the mask is a tensor
_ADDED = 35.0  # a score that something is added to
_OPERATION, _TRANSCENDENTAL = 4.0, 50.0  # one of a score function, on a score
_DROPPED = 30.0  # a score whose weight is dropped or left, by 32 bits that are drawn
# Where a bias gets a gradient, which is written, too: below so many keys training counts so many times, and from there
# on. In bfloat16, in which products are fast, products and a softmax gain more from few keys than the kernel does.
_LEARNED: Mapping[torch.dtype, tuple[int, float, float]] = {
    torch.float32: (0, 1.4, 1.4),
    torch.bfloat16: (1024, 4.5, 2.3),
    torch.float16: (0, 1.4, 1.4),
}
_FEW_TRAFFIC = 0.55  # keys and values are read ahead: at more than the rate at which other kernels read them


@dataclass(frozen=True)
class _Few:
    """What few rows take, in FLOPs that take as long.

    Attributes:
        byte: of keys or values.
        product: one number of a key or value times one of a row.
        score: one, beside its products.
        row: whatever the keys.
        tail: so many times as much where head dims end within a vector.
        gains: how many times the rate of many rows is had, beside float32's.
    """

    byte: float
    product: float
    score: float
    row: float
    tail: float
    gains: Mapping[torch.dtype, float]


# Zen 4 by 120 bare calls on one and two threads; the other sets by a kernel that took a fifth longer.
_FEW_ON: Mapping[str, _Few] = {
    "avx512_bf16": _Few(1.6, 1.45, 63.0, 3400.0, 1.15, {torch.bfloat16: 1.3, torch.float16: 1.15}),
}
_FEW_ELSEWHERE = _Few(2.8, 1.4, 60.0, 6500.0, 1.8, {})


def microseconds(a: Attention, problem: Problem, device: Device, share: float) -> float:
    """The whole call, in which this share of the scores is computed."""
    rows = problem.q_len * problem.heads // max(1, problem.kv_heads)
    heads = problem.batch * problem.kv_heads
    few = rows <= FEW_ROWS and not (a.needs_grad or a.dropout)
    in_tiles = _has_tiles(device, problem.dtype) and not (few or a.needs_grad or a.dropout)
    gain = _WITHOUT_TILES if _has_tiles(device, problem.dtype) and not in_tiles else _gain(device, problem.dtype)
    costs = _FEW_ON.get(device.instruction_set, _FEW_ELSEWHERE)
    if few:
        gain *= costs.gains.get(problem.dtype, 1.0) / _GAINS["avx512"][problem.dtype]
    elif max(problem.head_dim, problem.value_dim) > 128:
        gain *= _WIDE
    elif problem.kv_len <= _HALF_PANEL:
        gain *= _FEW_KEYS_ON.get(device.instruction_set, {}).get(problem.dtype, _FEW_KEYS)
    beside = _VECTORS if in_tiles else 1.0
    work = _few(problem, rows, heads, share, costs) if few else _many(problem, rows, heads, share, beside)
    work += beside * share * problem.scores * _each_score(a, problem)
    tasks = heads * -(-problem.kv_len // 256) if few else heads * -(-rows // _ROWS)
    cores = min(device.cores, max(1, tasks))
    arithmetic = work / (gain * device.fused(problem.dtype) * cores / device.cores) / 1e3
    slower = _FEW_TRAFFIC if few else 1.0
    memory = slower * roofline.traffic(device, share * problem.operand_bytes)
    mask = roofline.traffic(device, problem.mask_elements * problem.mask_bytes)
    return _CALL_US + device.template_us + max(arithmetic, memory) + mask


def in_training(forward: float, a: Attention, problem: Problem, *, by_distance: bool) -> float:
    """The forward's time, times how much more the backward adds to it than to the other forms.

    Of those, too, only the forward is predicted: forward and backward together take about 3.5 times as long with each.
    """
    if by_distance or not wants_mask_gradient(a):  # the gradient of a vector is no traffic; other forms have a matrix
        return forward
    few, of_few, of_many = _LEARNED[problem.dtype]
    return forward * (of_few if problem.kv_len < few else of_many)


def _has_tiles(device: Device, dtype: torch.dtype) -> bool:
    return device.instruction_set == "amx" and dtype == torch.bfloat16


def _gain(device: Device, dtype: torch.dtype) -> float:
    return _GAINS.get(device.instruction_set, {}).get(dtype, _PLAIN)


def falls_short(device: Device, dtype: torch.dtype) -> bool:
    """Whether torch's fused kernel in this dtype is far below the rate of products (`poor_cases/half_precision.py`)."""
    if dtype.itemsize != 2 or (dtype == torch.bfloat16 and device.instruction_set == "amx"):
        return False
    return device.fused(dtype) < _SHORT * max(device.matmul(dtype), device.fused(torch.float32))


def _many(p: Problem, rows: int, heads: int, share: float, beside: float) -> float:
    padded = rows // _ROWS * _ROWS + -(-(rows % _ROWS) // _STRIP) * _STRIP
    keys = -(-p.kv_len // _HALF_PANEL) * _HALF_PANEL
    products = 2.0 * padded * (keys * p.head_dim + p.kv_len * p.value_dim)
    packing = _PACKED * p.kv_len * (p.head_dim + p.value_dim)
    own = _ROW * rows * (p.head_dim + p.value_dim)
    return heads * (share * products + beside * (packing + own + -(-rows // _ROWS) * _TASK))


def _few(p: Problem, rows: int, heads: int, share: float, costs: _Few) -> float:
    keys = -(-p.kv_len // _HALF_PANEL) * _HALF_PANEL
    elements = p.head_dim + p.value_dim
    each = elements * (costs.byte * p.dtype.itemsize + costs.product * rows) + costs.score * rows
    tail = costs.tail if p.head_dim % _LANES or p.value_dim % _LANES else 1.0
    return heads * (share * keys * each * tail + costs.row * rows)


def _each_score(a: Attention, p: Problem) -> float:
    """What is done to a score beside its product and its weight."""
    each = _DROPPED if a.dropout else 0.0
    each += _ADDED if a.mask.bias is not None else _LOOKED_AT if p.mask_elements else 0.0
    if a.not_affine:
        operations = [e for e in walk(a.modified) if isinstance(e, Apply)]
        each += sum(_TRANSCENDENTAL if _is_transcendental(e) else _OPERATION for e in operations)
    return each


def _is_transcendental(e: Expr) -> bool:
    return isinstance(e, Apply) and e.op in ("tanh", "exp", "sigmoid", "log", "div")


# ---------------------------------------------------------------- what a mask leaves to compute


def computed_share(a: Attention, problem: Problem, hint: Callable[[Index], int]) -> float:
    """The share of the scores that is computed: panels of keys that any row of a strip sees, by the mask's parts."""
    structure = a.mask.structure
    in_order = structure.row == row_index(a.rows)  # where rows are packed a band's row is not the query's
    named = [part for part in structure.parts if in_order or isinstance(part, Keys)]
    parts = [known for part in named if (known := _at_hint(part, hint)) is not None]
    if not parts or not problem.q_len or not problem.kv_len:
        return 1.0
    panels, strips = -(-problem.kv_len // _HALF_PANEL), -(-problem.q_len // _STRIP)
    options = conjunctions(parts)
    computed = 0
    sampled = [strips * n // min(strips, _SAMPLES) for n in range(min(strips, _SAMPLES))]
    for strip in sampled:
        reached = 0
        sides = (span(o, strip * _STRIP, _STRIP, _HALF_PANEL, panels, INTEGERS, of_keys=False)[:2] for o in options)
        for start, end in sorted(sides):
            start = max(start // 2 * 2, reached)  # panels begin at multiples of a whole one
            computed += max(0, end - start)
            reached = max(reached, end)
    return min(1.0, computed / (len(sampled) * panels))


def _at_hint(part: Part, hint: Callable[[Index], int]) -> Part | None:
    """The part with numbers for what is known at run time only; None for one that nothing is known of."""

    def number(bound: Index | None) -> int | None:
        return None if bound is None else hint(bound)

    if isinstance(part, (Band, Keys)):
        return replace(part, lower=number(part.lower), upper=number(part.upper))
    if isinstance(part, Chunk):
        return Chunk(max(1, hint(part.size)), hint(part.key_shift), hint(part.row_shift))
    if isinstance(part, Either):
        options = tuple(tuple(_at_hint(p, hint) for p in option) for option in part.options)
        known = tuple(tuple(p for p in option if p is not None) for option in options)
        return Either(known) if all(known) else None
    return None
