"""`attn-pass doctor`: which packages are installed, and what every target answers for a plain attention."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import torch

from attn_pass.devices import calibration_store
from attn_pass.devices.registry import families, of_type
from attn_pass.entries.explain import explain
from attn_pass.errors import own_version
from attn_pass.report.units import duration
from attn_pass.targets.registry import all_targets


@dataclass(frozen=True)
class Package:
    """A package: its purpose for attn_pass, and how to install it."""

    name: str
    purpose: str
    install: str


_ANYWHERE = (
    Package("depyf", "readable bytecode and Inductor output", "pip install depyf"),
    Package("pydot", "drawings of graphs", "pip install pydot"),
    Package("ai-edge-model-explorer", "graphs in Model Explorer", "pip install ai-edge-model-explorer"),
)


def known_packages() -> Iterator[Package]:
    """torch, what each family of devices is served by, and what helps on any."""
    yield Package("torch", "torch.compile and AOTInductor", "pip install torch")
    yield from (Package(*row) for family in families() for row in family.packages)
    yield from _ANYWHERE


@dataclass(frozen=True)
class Finding:
    """One line: what was looked for, what was found ("" for nothing), and what there is to say."""

    what: str
    found: str
    note: str


def packages() -> Iterator[Finding]:
    """Of every package its version, or how to get it."""
    yield Finding("attn_pass", own_version(), "this package")
    for package in known_packages():
        try:
            version = importlib.metadata.version(package.name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(package.name, "", f"{package.purpose}: {package.install}")
        else:
            yield Finding(package.name, version, package.purpose)


def machine() -> Iterator[Finding]:
    """The devices that each family finds on this machine."""
    return (Finding(*finding) for family in families() for finding in family.machine())


def calibrations() -> Iterator[Finding]:
    """Whether, when and how precisely every device was calibrated with the installed versions."""
    for name in devices():
        at = torch.device(name)
        device = of_type(at.type).here(at)
        stored = calibration_store.load(device)
        what = f"calibration of {name}"
        if stored is None:
            yield Finding(what, "", f"rates: {device.rates_from}; measure: attn-pass calibrate --device {name}")
        else:
            versions = ", ".join(f"{key} {value}" for key, value in stored.facts.items() if key != "device")
            note = f"{stored.facts['device']}; {versions}; readings differ by {stored.spread:.0%}"
            yield Finding(what, stored.date or "of an unknown date", note)


def targets(device: str) -> Iterator[Finding]:
    """The answers of all targets for hand-written causal attention of (2, 4, 256, 64) in bfloat16 on a device."""
    q, k, v = (torch.zeros(2, 4, 256, 64, dtype=torch.bfloat16, device=device) for _ in range(3))
    with torch.no_grad():
        (site,) = explain(_causal, q, k, v).sites
    for target in all_targets():
        offers = [us for name, us in site.predicted_us.items() if name.split(" (")[0] == target.name]
        if offers:
            yield Finding(target.name, "offers", f"{duration(min(offers))} predicted")
        else:
            yield Finding(target.name, "", site.refusals.get(target.name, "makes no offer for this form"))


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    keep = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).tril()
    return torch.softmax((q @ k.mT * 0.125).masked_fill(~keep, float("-inf")), -1) @ v


def devices() -> list[str]:
    """Those torch can put a tensor on, the CPU first."""
    return [name for family in reversed(families()) for name in family.present()]


def diagnosis() -> dict[str, list[dict[str, Any]]]:
    """All findings, ready for JSON: "packages", "machine", and the answers of the targets on each device."""
    sections = {"packages": packages(), "machine": chain(machine(), calibrations())}
    sections |= {f"what the targets offer for causal attention on {device}": targets(device) for device in devices()}
    return {title: [asdict(finding) for finding in findings] for title, findings in sections.items()}
