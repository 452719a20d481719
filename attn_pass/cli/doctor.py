"""`attn-pass doctor`: what of its world is installed here, and what every target says to a plain attention."""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import torch

from attn_pass.entries.explain import explain
from attn_pass.hardware import calibration, catalog
from attn_pass.hardware import device as hardware
from attn_pass.targets import all_targets


@dataclass(frozen=True)
class Package:
    """What a package of this world is for here, and how to get it."""

    name: str
    purpose: str
    install: str


PACKAGES: tuple[Package, ...] = (
    Package("torch", "torch.compile and AOTInductor", "pip install torch"),
    Package("triton", "the targets decode and flex on CUDA", "comes with torch for CUDA: pip install triton"),
    Package("flash-attn", "the target flash_attn, and its calls", "pip install flash-attn --no-build-isolation"),
    Package(
        "torch-npu", "the targets for Ascend NPUs", "pip install torch-npu of torch's version, beside the vendor's CANN"
    ),
    Package("torch-xla", "the targets for TPUs, through torch_xla", "pip install torch-xla with its torch"),
    Package("jax", "the kernels of the targets for TPUs", "pip install jax"),
    Package("libtpu", "the compiler of the targets for TPUs", "pip install libtpu"),
    Package("depyf", "readable bytecode and Inductor output", "pip install depyf"),
    Package("jinja2", "reports as HTML", "pip install jinja2"),
)


@dataclass(frozen=True)
class Finding:
    """One line: what was looked for, what was found ("" for nothing), and what there is to say."""

    what: str
    found: str
    note: str


def packages() -> Iterator[Finding]:
    """Of every package its version, or how to get it."""
    for package in PACKAGES:
        try:
            found = importlib.metadata.version(package.name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(package.name, "", f"{package.purpose}: {package.install}")
        else:
            yield Finding(package.name, found, package.purpose)


def machine() -> Iterator[Finding]:
    """The devices, cuDNN, and the compiler that Inductor needs for the CPU."""
    compiler = next((name for name in ("g++", "clang++", "c++") if shutil.which(name)), "")
    yield Finding("C++ compiler", compiler, "Inductor's code for the CPU, and every AOTInductor package")
    yield Finding("CPU", torch.backends.cpu.get_cpu_capability(), f"{torch.get_num_threads()} threads")
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(number)
            yield Finding(f"cuda:{number}", torch.cuda.get_device_name(number), f"compute capability {major}.{minor}")
        yield Finding("cuDNN", str(torch.backends.cudnn.version() or ""), "the target cudnn")
    else:
        yield Finding("CUDA device", "", "torch sees none; decide for one with device='H200'")


def calibrations() -> Iterator[Finding]:
    """Of every device whether it was calibrated with the versions that are installed, when, and how well."""
    for name in devices():
        device = hardware.cpu() if name == "cpu" else catalog.cuda_here(torch.device(name))
        found = calibration.load(device)
        what = f"calibration of {name}"
        if found is None:
            yield Finding(what, "", f"rates of {_source(device)}; measure: attn-pass calibrate --device {name}")
        else:
            versions = ", ".join(f"{key} {value}" for key, value in found.facts.items() if key != "device")
            note = f"{found.facts['device']}; {versions}; readings {found.spread:.0%} apart"
            yield Finding(what, found.date or "of an unknown date", note)


def _source(device: hardware.Device) -> str:
    return "the machine they were fitted on" if device.is_measured else "data sheets and published figures"


def targets(device: str) -> Iterator[Finding]:
    """What every target says to causal attention of (2, 4, 256, 64) in half precision, written by hand, on a device."""
    q, k, v = (torch.zeros(2, 4, 256, 64, dtype=torch.bfloat16, device=device) for _ in range(3))
    with torch.no_grad():
        (site,) = explain(_causal, q, k, v).sites
    for target in all_targets():
        offers = [us for name, us in site.predicted_us.items() if name.split(" (")[0] == target.name]
        if offers:
            yield Finding(target.name, "offers", f"{min(offers):.0f} us predicted")
        else:
            yield Finding(target.name, "", site.refusals.get(target.name, "makes no offer for this form"))


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    keep = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).tril()
    return torch.softmax((q @ k.mT * 0.125).masked_fill(~keep, float("-inf")), -1) @ v


def devices() -> list[str]:
    """Those torch can put a tensor on, the CPU first."""
    return ["cpu", *(["cuda:0"] if torch.cuda.is_available() else [])]


def diagnosis() -> dict[str, list[dict[str, Any]]]:
    """Everything, ready for JSON: "packages", "machine", and what the targets say on each device."""
    found = {"packages": packages(), "machine": chain(machine(), calibrations())}
    found |= {f"what the targets say to causal attention on {device}": targets(device) for device in devices()}
    return {title: [asdict(finding) for finding in findings] for title, findings in found.items()}
