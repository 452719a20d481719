"""One calibration from sweep to cache: the measurements, compared with the cost model's numbers for the device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timezone
from typing import Any

import torch

from attn_pass.devices import calibration_store
from attn_pass.devices.base import OnReading
from attn_pass.devices.calibration import Calibration, with_calibration
from attn_pass.devices.device import Device
from attn_pass.devices.registry import families, of_type
from attn_pass.errors import OptionError
from attn_pass.options import unknown_name
from attn_pass.tuning import disk_cache

BUSY = 0.25  # the median spread from which on a machine is too busy for its readings to be kept


@dataclass(frozen=True)
class Outcome:
    """What a calibration found; ``kept`` says whether it lies in the cache."""

    device: Device  # as the catalogue has it
    measured: Calibration
    spread: float  # the median of how far the blocks of one reading are apart
    seconds: float
    kept: bool
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def is_busy(self) -> bool:
        """Whether the readings are too far from themselves to be relied on."""
        return self.spread > BUSY


def calibrate(at: torch.device, seconds: float, on_reading: OnReading, *, keep_if_busy: bool = False) -> Outcome:
    """Measures a device and keeps the result in the cache, unless the machine was too busy.

    Args:
        at: a device of this process.
        seconds: about how long to measure.
        on_reading: is called with every reading, by name.
        keep_if_busy: keep it however far the readings are apart.

    Raises:
        OptionError: no such device is here, or it is one that is not calibrated.
    """
    device = named(at)
    began = time.monotonic()
    measured, failed = of_type(at.type).measure(device, at, seconds, on_reading)
    spread = measured.spread
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    measured = replace(measured, date=now, spread=round(spread, 3))
    keep = keep_if_busy or spread <= BUSY
    if keep:
        keep = calibration_store.save(measured)
    return Outcome(device, measured, spread, time.monotonic() - began, keep, failed)


def device_named(name: str) -> torch.device:
    """The device of a name as torch has it; for an empty name the first GPU, or the CPU where there is none.

    Raises:
        OptionError: torch knows no such device.
    """
    present = [here for family in families() for here in family.present()]
    try:
        return torch.device(name or present[0])
    except RuntimeError:
        raise unknown_name("device", name, present) from None


def forget(at: torch.device) -> bool:
    """Drops what was measured of a device with the versions that are installed; False if nothing was.

    Raises:
        OptionError: as `calibrate`.
    """
    return calibration_store.forget(named(at))


def named(at: torch.device) -> Device:
    """The device as the catalogue has it, without any calibration.

    Raises:
        OptionError: as `calibrate`.
    """
    family = of_type(at.type)
    if not family.calibrated:
        measured = " and ".join(f.calibrated for f in families() if f.calibrated)
        raise OptionError(f"{at} is not calibrated: attn-pass calibrate measures {measured}")
    return family.uncalibrated(at)


def changes(outcome: Outcome) -> Iterator[tuple[str, float | None, float]]:
    """Every measured number: its name, its built-in value (None if there is none), and the measurement."""
    before, after = outcome.device, with_calibration(outcome.device, outcome.measured)
    for name in (f.name for f in fields(Calibration)):
        value = getattr(outcome.measured, name)
        if name == "shares":
            for kernel, reached in value.items():
                known = before.shares.get(kernel)
                for share, number in reached.items():
                    yield f"{kernel}, {share}", None if known is None else getattr(known, share), number
        elif name.endswith("_gflops"):
            for dtype, number in value.items():
                yield f"{name}, {dtype}", getattr(before, name).get(getattr(torch, dtype)), number
        elif isinstance(value, float) and hasattr(after, name):
            yield name, getattr(before, name), value


def summary_lines(outcome: Outcome) -> list[str]:
    """What there is to say beside the numbers, in sentences."""
    name = outcome.measured.facts["device"]
    apart = f"readings of one kernel are {outcome.spread:.0%} apart (the median of all)"
    took = f"Measured {name} in {outcome.seconds:.0f} s; {apart}."
    if outcome.kept and not outcome.is_busy:
        return [
            took,
            "Kept: attn_pass chooses by these numbers from now on; --forget drops them.",
        ]
    if not outcome.is_busy:
        return [took, f"It could not be stored; set {disk_cache.VARIABLE} to a folder that can be written."]
    busy = f"The machine was busy: more than {BUSY:.0%} apart says that something else ran."
    if outcome.kept:
        return [took, f"{busy} Kept all the same, because of --keep-if-busy."]
    return [took, f"{busy} Nothing was kept: run it again on an idle machine, or keep it with --keep-if-busy."]


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Everything, ready for JSON."""
    rows = [{"name": name, "taken_for": before, "measured": measured} for name, before, measured in changes(outcome)]
    return {
        "facts": outcome.measured.facts,
        "date": outcome.measured.date,
        "spread": outcome.spread,
        "busy": outcome.is_busy,
        "kept": outcome.kept,
        "seconds": round(outcome.seconds, 1),
        "constants": rows,
        "failed": outcome.failed,
    }
