"""The calibrations in the cache, one for each device and the versions it was measured with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from attn_pass.devices.calibration import Calibration, with_calibration
from attn_pass.devices.device import Device
from attn_pass.devices.registry import facts
from attn_pass.tuning import disk_cache


def applied(device: Device) -> Device:
    """The device as it was measured on this machine, if it was; as it is, if not."""
    measured = load(device)
    return device if measured is None else with_calibration(device, measured)


def load(device: Device) -> Calibration | None:
    """What was measured of this device with these versions; None if nothing was, or the record is not to be read."""
    record = disk_cache.load(_key(device))
    if not isinstance(record, Mapping):
        return None
    try:
        measured = Calibration(**record)
    except (TypeError, ValueError):
        return None
    return measured if measured.facts == facts(device) else None


def save(measured: Calibration) -> bool:
    """Keeps it in the cache for the device and the versions it names; whether that could be written."""
    return disk_cache.save(disk_cache.key_of([_KIND, measured.facts]), asdict(measured))


def forget(device: Device) -> bool:
    """Drops what was measured of this device with these versions; False if nothing was."""
    return disk_cache.drop(_key(device))


_KIND = "calibration 1"  # the number changes with what the fields mean


def _key(device: Device) -> str:
    return disk_cache.key_of([_KIND, facts(device)])
