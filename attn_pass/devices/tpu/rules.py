"""What the Pallas kernels for TPUs take, one row a rule with its reason, and their tiles by generation and shape.

Read from JAX 0.10.2, and tried with the TPU's own compiler (libtpu 0.0.51) for each generation; nothing was measured.
Tests in tests_on/tpu_aot compile these tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec

import torch

from attn_pass.devices.tpu.kernels import SMALLEST_SCALE, Blocks
from attn_pass.model.attention import Attention
from attn_pass.model.dtype_name import dtype_name
from attn_pass.targets import constraints
from attn_pass.targets.base import Setting
from attn_pass.targets.constraints import (
    AFFINE,
    ANY_BACKEND,
    AUTOCAST,
    NOT_EMPTY,
    Attended,
    Constraint,
    HasAttention,
    sizes_of,
    unless,
)
from attn_pass.targets.kernel_rules import known_or

FLASH, SPLASH = "pallas_flash", "pallas_splash"
_LANES = 128
_MIB = 1 << 20

# ---------------------------------------------------------------- tiles


@dataclass(frozen=True)
class Generation:
    """The on-chip memory that the compiler gives a kernel by default, and the largest tiles of (rows, keys) that are
    tried.

    Larger tiles mean fewer steps; which are fastest is not known here.
    """

    vmem_bytes: int
    flash: tuple[int, int]
    splash: tuple[int, int]
    back: tuple[int, int]


GENERATIONS: Mapping[str, Generation] = {
    "TPU v5e": Generation(16 * _MIB, (1024, 1024), (1024, 512), (512, 512)),
    "TPU v5p": Generation(16 * _MIB, (1024, 1024), (1024, 512), (512, 512)),
    "TPU v6e": Generation(32 * _MIB, (2048, 1024), (1024, 1024), (512, 512)),
    "TPU7x": Generation(32 * _MIB, (2048, 1024), (1024, 1024), (512, 512)),
}
_ONE_STEP = 1024  # so many keys or fewer that no tile divides are taken whole, in one step
_SPARE = 1.15  # the compiler's own use, over what is counted below


@dataclass(frozen=True)
class Sizes:
    """An attention as the kernels' memory depends on it; ``head_dim`` is the padded one."""

    rows: int
    keys: int
    head_dim: int
    itemsize: int
    biased: bool = False
    masked: bool = False  # some keys are masked by a tensor of them
    training: bool = False
    window: int | None = None  # keys a row sees, for splash


def vmem(rows: int, keys: int, size: Sizes, *, kind: str = FLASH, back: bool = False) -> int:
    """Bytes of on-chip memory a tile needs, about: operands twice, for the copy ahead of the computation.

    Checked against the compiler's figures for bfloat16 and a head dim of 128: 20.3 MiB for tiles of 4096 x 512, 23.8
    for 2048 x 2048, 29.2 for 4096 x 1024.
    """
    lanes = -(-size.head_dim // _LANES) * _LANES
    scores = 4 * rows * keys
    wide = 4 * rows * (2 * _LANES + lanes)  # running maximum, sum and result
    moved = 2 * size.itemsize * lanes * (2 * rows + 2 * keys)
    ids = 2 * 4 * (rows * _LANES + 8 * keys) if size.masked else 0
    bias = 2 * 4 * rows * keys if size.biased else 0
    parts = 0
    if size.itemsize == 4:  # products of full precision take their operands apart, in three of bfloat16
        parts = 6 * (rows * keys + lanes * (rows + 2 * keys))
    if back:
        # Scores, their gradient, and what both are cast to; gradients of keys and values, or of the query.
        return 3 * scores + moved + 2 * 4 * lanes * (keys + rows) + 6 * 4 * rows * _LANES + ids + 2 * bias + 2 * parts
    if kind == SPLASH:
        return 2 * scores + 4 * keys * lanes + 2 * wide + moved + 2 * 4 * (rows * _LANES + 8 * keys) + parts
    residuals = 2 * 2 * 4 * rows * _LANES if size.training else 0
    return scores + wide + moved + ids + bias + residuals + parts


@lru_cache(maxsize=4096)
def blocks_for(kind: str, generation: str, size: Sizes) -> Blocks | None:
    """The tiles for a shape; None where not even the smallest fit."""
    g = GENERATIONS[generation]
    most = g.flash if kind == FLASH else g.splash
    if size.window is not None:  # blocks without a kept key are left out, and smaller ones follow a window better
        narrow = max(2 * _LANES, _power_below(size.window))
        most = (min(most[0], narrow), min(most[1], narrow))
    budget = int(g.vmem_bytes / _SPARE)
    aligned = kind == SPLASH or size.training or size.masked or size.keys > _ONE_STEP
    if not aligned and size.keys % _LANES and vmem(min(size.rows, most[0]), size.keys, size) <= budget:
        return Blocks(min(size.rows, most[0]), size.keys)
    best: tuple[float, Blocks] | None = None
    for keys in {_up(size.keys, n) for n in (_LANES, 2 * _LANES, 4 * _LANES)}:
        tiles = tuple(k for k in _divisors(keys) if _up(size.keys, k) == keys)
        blocks = _tiles_of(kind, g, size, tiles, most, budget)
        if blocks is not None and (best is None or keys * _overhead(blocks) < best[0]):
            best = (keys * _overhead(blocks), blocks)
    return None if best is None else best[1]


def _tiles_of(
    kind: str, g: Generation, size: Sizes, keys: tuple[int, ...], most: tuple[int, int], budget: int
) -> Blocks | None:
    """The best tiles among these of keys, which divide the padded length; query rows are padded too in training."""
    if size.training:
        rows = _divisors(_up(size.rows, _LANES))
    elif kind == SPLASH:
        rows = _divisors(_up(size.rows, _LANES if size.rows > _LANES else 8))
    else:
        rows = (size.rows, *(n for n in (2048, 1024, 512, 256, 128) if n < size.rows))
    forward = [
        Blocks(r, k)
        for r in (r for r in rows if r <= most[0])
        for k in keys
        if k <= most[1] and vmem(r, k, size, kind=kind) <= budget
    ]
    best = min(forward, key=_overhead, default=None)
    if best is None or not size.training:
        return best
    back = [
        Blocks(r, k)
        for r in (r for r in rows if r <= g.back[0])
        for k in keys
        if k <= g.back[1] and vmem(r, k, size, kind=kind, back=True) <= budget
    ]
    behind = min(back, key=_overhead, default=None)
    return None if behind is None else Blocks(best.rows, best.keys, behind.rows, behind.keys)


def _overhead(b: Blocks) -> float:
    """How much longer than with the largest tiles, about: operands are read again for each tile. A guess."""
    return (1 + _LANES / b.rows) * (1 + _LANES / b.keys)


def _divisors(length: int) -> tuple[int, ...]:
    """Multiples of 128 that divide a length, or the length where it is shorter."""
    divisors = tuple(n for n in range(_LANES, length + 1, _LANES) if length % n == 0)
    return divisors or (length,)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _power_below(number: int) -> int:
    return 1 << max(0, number.bit_length() - 1)


def width(head_dim: int, value_dim: int) -> int:
    """The head dim the flash kernel gets: one for all operands, above 128 a multiple of it; zeros fill the rest."""
    wider = max(head_dim, value_dim)
    return wider if wider <= _LANES else _up(wider, _LANES)


# ---------------------------------------------------------------- rules


TpuRule = Constraint[HasAttention]
_WIDEST = 512


def _missing(setting: Setting) -> str | None:
    missing = [name for name in ("jax", "flax") if setting.device.is_here and find_spec(name) is None]
    return (
        f"the Pallas kernels need {' and '.join(missing)}, not installed here (docs/xla.md has the versions)"
        if missing
        else None
    )


RULES: tuple[TpuRule, ...] = (
    AFFINE,
    unless("packages", lambda c: _missing(c.setting)),
    TpuRule(
        "program",
        "AOTInductor compiles for no TPU: export to StableHLO, after attn_pass.rewrite on the exported program",
        lambda c: c.setting.program != "aoti",
    ),
    AUTOCAST,
    ANY_BACKEND,
    TpuRule(
        "float16",
        "the TPU's compiler has no float16 in these kernels: convert the model to bfloat16",
        lambda c: c.attention.compute_dtype != torch.float16,
    ),
    TpuRule(
        "dtype",
        lambda c: f"the Pallas kernels take bfloat16 and float32, not {dtype_name(c.attention.compute_dtype)}",
        lambda c: c.attention.compute_dtype in (torch.bfloat16, torch.float32),
    ),
    TpuRule("dropout", "the Pallas kernels have no dropout", lambda c: not c.attention.dropout),
    TpuRule("sink", "attn_pass does not pass sinks to the Pallas kernels", lambda c: c.attention.sink is None),
    TpuRule(
        "static sizes",
        "a size is not known when the graph is compiled, and the kernel's tiles follow from all of them",
        lambda c: all(isinstance(n, int) for n in (*sizes_of(c.attention), c.attention.groups)),
    ),
    NOT_EMPTY,
    TpuRule(
        "head dim",
        f"the head dim is over {_WIDEST}",
        lambda c: max(known_or(c.attention.head_dim, 0), known_or(c.attention.value_head_dim, 0)) <= _WIDEST,
    ),
    TpuRule(
        "scale",
        lambda c: f"a scale of {c.attention.scale:g} is too small for a mask that is divided by it",
        lambda c: c.attention.mask.is_none or abs(c.attention.scale) >= SMALLEST_SCALE,
    ),
)


def refusal(attention: Attention, setting: Setting) -> str | None:
    """The first reason why no Pallas kernel takes an attention, whatever its mask; None if one may."""
    return constraints.refusal(RULES, Attended(attention, setting))
