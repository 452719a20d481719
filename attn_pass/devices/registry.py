"""Which family a device belongs to: those of this package, by name, and those that other packages register."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import torch

from attn_pass.devices.base import Family
from attn_pass.devices.catalog import without_maker
from attn_pass.devices.device import Device
from attn_pass.errors import AttnPassWarning, cause_of
from attn_pass.graph.writes import only_read

GROUP = "attn_pass.devices"
"""The entry-point group third parties register families in."""

# Loaded on demand, so that code that queries a device depends on none of them.
_BUILT_IN = (
    *(f"attn_pass.devices.{name}.family" for name in ("cuda", "xpu", "rocm", "mps", "npu", "tpu", "cpu")),
    *(f"attn_pass.devices.runtimes.{name}" for name in ("onnx", "openvino", "executorch", "tensorrt")),
)
_NONE = Family()


@lru_cache(maxsize=1)
def families() -> tuple[Family, ...]:
    """Every family: the built-in ones, then those of installed packages."""
    built_in = (import_module(name).FAMILY for name in _BUILT_IN)
    every = (*built_in, *installed_in(GROUP))
    only_read(name for family in every for name in family.reading_functions)
    return every


def installed_in(group: str) -> Iterator[Any]:
    """What installed packages register in a group of entry points; one that fails is left out, with a warning."""
    for entry in entry_points(group=group):
        try:
            yield entry.load()()
        except Exception as error:
            warnings.warn(
                f"attn_pass: {entry.name!r}, which an installed package registers in {group!r}, is left out: it could "
                f"not be loaded ({cause_of(error)})",
                AttnPassWarning,
                stacklevel=2,
            )


def decomposed_calls() -> dict[Any, tuple[str, ...]]:
    """The kernels of every family that stand for torch's call in decomposed programs, with their arguments' names."""
    return {operator: names for family in families() for operator, names in family.decomposed_calls.items()}


def settled_kernels() -> dict[Any, str]:
    """The kernels of every family that stay where a decomposed program has them, by their operators."""
    return {operator: name for family in families() for operator, name in family.settled_kernels.items()}


def family_of(device: Device) -> Family:
    """The family of a device; one that knows nothing where no family claims its type."""
    named = (f for f in families() if f.name == device.family)
    return next(named, _NONE) if device.family else of_type(device.type)


def of_type(kind: str) -> Family:
    """The family of a `torch.device`'s type, in this build of torch."""
    return _claiming(kind, families(), torch.version.hip)


@lru_cache
def _claiming(kind: str, among: tuple[Family, ...], hip: str | None) -> Family:
    """Asked about thirty times a site. Which family claims ``cuda`` depends on ``hip``."""
    return next((family for family in among if family.claims(kind)), _NONE)


def names() -> tuple[str, ...]:
    """The devices that need not be here, as the field writes them: "H200", "MI300X", "M4"."""
    return tuple(name for family in families() for name in family.names)


def kinds() -> tuple[str, ...]:
    """The types of devices that a family claims, as torch names them, the CPU first."""
    here = [kind for family in reversed(families()) if not family.is_runtime for kind in family.types]
    return tuple(dict.fromkeys(here))


def is_known(name: str) -> bool:
    """Whether a device can be decided for by this name."""
    return named(name) is not None


def by_name(name: str) -> Device:
    """A device that need not be here: "H200", "v5e", "Ascend 910B", "Ascend910B3".

    Raises:
        KeyError: no family knows it.
    """
    device = named(name)
    if device is None:
        raise KeyError(name)
    return device


def named(name: str) -> Device | None:
    """A device that need not be here, with or without its maker's name; None where no family knows the name."""
    known = (family.by_name(each) for each in (name, without_maker(name)) if each for family in families())
    return next((device for device in known if device is not None), None)


def runtimes() -> tuple[str, ...]:
    """The runtimes that programs are exported to, by name."""
    return tuple(family.name for family in families() if family.is_runtime)


def runtime_of(backend: str) -> str | None:
    """The runtime that a backend of torch.compile hands graphs to; None for one that is no runtime."""
    return next((f.name for f in families() if f.is_runtime and backend in f.dynamo_backends), None)


def device_for(tensors: torch.device, asked: str | None = None, runtime: str | None = None) -> Device:
    """The device to decide for: a runtime's, the requested one, or the one of the tensors, with its calibration.

    ``asked`` is a device as torch names it or one that `is_known`. A device that is not present has no kernels, unless
    it is requested by name.
    """
    if runtime is not None:
        return of_type(runtime).here(tensors)
    if asked is None:
        return of_type(tensors.type).here(tensors)
    return named(asked) or _device_at(torch.device(asked))


def _device_at(at: torch.device) -> Device:
    family = of_type(at.type)
    device = family.here(at)
    return device if device.is_here or not family.names else by_name(family.names[0])


def facts(device: Device) -> dict[str, str]:
    """What a measurement on this device holds for: the hardware by name, and the versions that compile for it."""
    return {"device": family_of(device).facts(device), "torch": torch.__version__}
