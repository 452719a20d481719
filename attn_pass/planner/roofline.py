"""A site on its device's roofline: FLOPs, bytes moved and predicted time, as it is written and as chosen."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from attn_pass.devices.device import Device
from attn_pass.model.attention import AsWritten, Attention
from attn_pass.model.structure import Part
from attn_pass.report.text import digits
from attn_pass.targets.base import Offer, Setting
from attn_pass.targets.flex.blocks import share
from attn_pass.targets.problem import mask_bytes_read, problem_of


def rates(device: Device, attention: Attention) -> dict[str, float | str]:
    """The device's name and where its rates come "from"; peaks for the attention's dtype, "gflops" and "gbytes".

    They are those of a matrix product and of memory, in 1e9 a second.
    """
    return {
        "device": device.name,
        "from": device.rates_from,
        "gflops": device.matmul(attention.compute_dtype),
        "gbytes": device.memory_gbytes,
    }


def as_left(attention: Attention, written: AsWritten, setting: Setting, microseconds: float) -> dict[str, float]:
    """ "flops", "bytes" and "us" of the site as it is written: a call's fused kernel, or products around a softmax.

    FLOPs are those of the two products, of the keys that a row keeps as far as positions say which; symbolic sizes
    are at their hint. Between products and softmax the scores are written and read twice
    (`attn_pass.devices.roofline.unfused`); shared keys and values are copied out where there is more than one query
    row, by the program or by the product, which is counted once. Of a mask the tensors it is made of are read; what
    positions say is computed with the softmax.
    """
    problem = problem_of(attention, setting.hint, written.copied_bytes)
    flops = problem.flops * _kept_share(attention, setting)
    if setting.kernel_as_written is not None:
        return _point(flops, replace(problem, mask_elements=written.mask_elements).moved_bytes, microseconds)
    scores = problem.dtype.itemsize * problem.scores
    if problem.q_len == 1:
        return _point(flops, problem.operand_bytes + 3 * scores, microseconds)
    shared = problem.expanded_kv_bytes - (problem.operand_bytes - problem.query_bytes)
    copies = 2 * problem.expanded_kv_bytes if shared > 0 else 0
    mask = mask_bytes_read(attention, setting.hint)
    moved = problem.operand_bytes + 4 * scores + max(copies, 2 * problem.copied_bytes) + mask
    return _point(flops, moved, microseconds)


def as_taken(offer: Offer, setting: Setting) -> dict[str, float]:
    """The same for an offer; without "flops" and "bytes" if it is several kernels."""
    if offer.moved is None:
        return {"us": digits(offer.microseconds)}
    flops = problem_of(offer.attention, setting.hint).flops * _kept_share(offer.attention, setting)
    return _point(flops, offer.moved, offer.microseconds)


_PARTS = 64  # of either length: as fine as shares are told


def _kept_share(attention: Attention, setting: Setting) -> float:
    """The share of the scores that positions keep, in blocks of a 64th of either length; 1 where they say nothing."""
    parts = attention.mask.structure.parts
    lengths = setting.hint(attention.q_len), setting.hint(attention.kv_len)
    return 1.0 if not parts or 0 in lengths else _share(parts, lengths)


@lru_cache(maxsize=256)
def _share(parts: tuple[Part, ...], lengths: tuple[int, int]) -> float:
    """The same for all layers of a model, and asked for twice at each site."""
    return share(parts, *lengths, (-(-lengths[0] // _PARTS), -(-lengths[1] // _PARTS)))


def _point(flops: float, moved: int, microseconds: float) -> dict[str, float]:
    return {"flops": flops, "bytes": moved, "us": digits(microseconds)}
