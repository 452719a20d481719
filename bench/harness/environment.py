"""The conditions of a run: the device by name, the versions, the command line.

Nothing here needs more than torch: the GPU's benches (`bench.gpu`) run where there may be nothing else.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from attn_pass.report.units import counted


def device_name(device: str) -> str:
    """The processor in words, with the number of cores this process may use."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        name = models[0].split(":", 1)[1].strip() if models else name
    # Virtual machines name processors of several generations alike.
    if torch.cpu._is_amx_tile_supported():
        name += " with AMX"
    elif not torch.cpu._is_avx512_supported():
        name += " without AVX-512"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {counted(cores or 1, 'core')}"


def versions() -> dict[str, str]:
    ours, of = installed("attn-pass").get("attn-pass", ""), commit()
    name = f"{ours} ({of})" if ours and of else ours or of or "not installed"
    return {"python": platform.python_version(), "torch": torch.__version__, "attn_pass": name}


def commit() -> str:
    """The commit that this runs from, with a plus sign where files were changed since; "" outside a checkout."""
    with suppress(OSError, subprocess.CalledProcessError):
        asked = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
        said = subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
        return said.stdout.strip()
    return ""


def installed(*packages: str) -> dict[str, str]:
    """The versions of those that are there."""
    versions = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def named_only(words: Iterable[str]) -> list[str]:
    """Words of a command line without the folders; a shard such as 2/6 is none, nor is a model such as ViT-B/16."""
    return [Path(word).name if os.sep in word and Path(word).parent.is_dir() else word for word in words]


def command() -> str:
    """The command line, with folders cut off: a result file says what was run, not where."""
    script = Path(sys.argv[0])
    module = script.parent.name if script.stem == "__main__" else script.stem
    return " ".join(["python -m", module if module == "bench" else f"bench.{module}", *named_only(sys.argv[1:])])


def no_notices(*more: type[Warning]) -> None:
    """Silences what the libraries announce of versions to come: none of it is about what is measured."""
    for category in (FutureWarning, DeprecationWarning, *more):
        warnings.filterwarnings("ignore", category=category)
    warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
