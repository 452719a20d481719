"""Attentions and settings as the rows of the targets' tables see them, with a test's changes to a plain one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from kernel_calls import FP32, H200, call

from attn_pass.devices.device import Device
from attn_pass.model.attention import Attention, Source
from attn_pass.model.expression import Load
from attn_pass.model.index import Index, axis_index
from attn_pass.model.mask import Keep, Mask
from attn_pass.model.structure import Structure, row_index
from attn_pass.targets.base import Setting
from attn_pass.targets.constraints import Attended

OF_CALL = frozenset(call.__kwdefaults__) - {"mask", "by_head", "device", "torch_version"}
OF_SETTING = frozenset(field.name for field in fields(Setting)) - {"device"}
OF_MASK = frozenset(field.name for field in fields(Mask)) - {"structure", "never_empty"}

MASK_TENSOR = 3
"""The source that a bias or a mask reads; those before it are query, key and value."""
READ = Load(MASK_TENSOR, ())
HIDDEN = Keep(READ, float("-inf"))
CPU_TENSOR = Source(MASK_TENSOR, (), FP32, torch.device("cpu"))


def attention(**given: Any) -> Attention:
    """An attention of the arguments of `call`, of fields of the mask and of the attention itself, and of

    Args:
        given: as said; ``parts``: a mask that these say, with ``fill`` where they do not hold; ``packed``: the heads of
            a group as rows; ``shared``: one set of keys and values for the batch; ``unknown_heads``: batch and heads
            swap places; ``strides`` of keys and values; ``opaque``: the mask hides more, known at run time alone;
            ``read_shape`` of what a bias, mask or score reads, and ``learned``: it needs a gradient.
    """
    made = call(**{n: given.pop(n) for n in OF_CALL & given.keys()}).attention
    tensor = replace(CPU_TENSOR, needs_grad=given.pop("learned", False))
    made = replace(made, sources=(*made.sources, tensor))
    if (parts := given.pop("parts", None)) is not None:
        structure = Structure(axis_index(made.keys), row_index(made.rows), tuple(parts))
        keep = Keep(structure.condition(), given.pop("fill", float("-inf")))
        made = replace(made, mask=replace(made.mask, keep=keep, structure=structure))
    for name, changed in CHANGES.items():
        if (value := given.pop(name, None)) is not None:
            made = changed(made, value)
    made = replace(made, mask=replace(made.mask, **{n: given.pop(n) for n in OF_MASK & given.keys()}))
    return replace(made, **given)


def _packed(a: Attention, _: bool) -> Attention:
    return a.regrouped(batch=a.batch, heads=a.heads[:1], rows=(*a.heads[1:], *a.rows))


def _swapped(a: Attention, _: bool) -> Attention:
    return a.regrouped(batch=a.heads[:1], heads=(*a.batch, *a.heads[1:]))


def _shared(a: Attention, _: bool) -> Attention:
    key, value = (replace(load, index=(0, *load.index[1:])) for load in (a.key, a.value))
    return replace(a, key=key, value=value)


def _laid(a: Attention, strides: tuple[Index, ...]) -> Attention:
    """With these strides of keys and values."""
    one = (1,) * len(strides)
    return replace(a, sources=tuple(replace(s, strides=strides, shape=one) if s.id in (1, 2) else s for s in a.sources))


def _opaque(a: Attention, text: str) -> Attention:
    """With a mask of which more is known at run time alone."""
    return replace(a, mask=replace(a.mask, structure=a.mask.structure.and_opaque(text)))


def _read(a: Attention, shape: tuple[Index, ...]) -> Attention:
    return replace(a, sources=(*a.sources[:MASK_TENSOR], replace(a.sources[MASK_TENSOR], shape=shape)))


CHANGES: dict[str, Callable[[Attention, Any], Attention]] = {
    "opaque": _opaque,
    "read_shape": _read,
    "packed": _packed,
    "shared": _shared,
    "unknown_heads": _swapped,
    "strides": _laid,
}


def case(device: Device = H200, **given: Any) -> Attended:
    """An attention in a setting, under ``torch.compile`` if nothing else is said."""
    of_setting = {n: given.pop(n) for n in OF_SETTING & given.keys()}
    return Attended(attention(**given), Setting(device, **{"program": "compile", **of_setting}))
