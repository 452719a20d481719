"""What the numbers of a run hold for: the device by name, the versions, the command line.

Nothing here needs more than torch: the GPU's benches (`bench.gpu`) run where there may be nothing else.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import torch


def device_name(device: str) -> str:
    """The processor in words, with the number of cores this process may use."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    try:
        models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        name = models[0].split(":", 1)[1].strip() if models else name
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    try:
        ours = version("attn-pass")
    except PackageNotFoundError:
        ours = "not installed"
    return {"python": platform.python_version(), "torch": torch.__version__, "attn_pass": ours}


def command() -> str:
    """The command line, with folders cut off: a result file says what was run, not where."""
    words = [Path(word).name if os.sep in word else word for word in sys.argv[1:]]
    script = Path(sys.argv[0])
    module = script.parent.name if script.stem == "__main__" else script.stem
    return " ".join(["python -m", module if module == "bench" else f"bench.{module}", *words])
