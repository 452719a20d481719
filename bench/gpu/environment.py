"""The environment of a run: the GPU, or with ``--dry`` the CPU with stand-ins for the kernels; how programs compile.

Nothing here needs more than torch, triton and attn_pass with what it depends on: the machine may have nothing else.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import attn_pass
from attn_pass.devices import registry
from attn_pass.devices.cuda import facts as cuda_facts
from attn_pass.devices.device import Device
from attn_pass.measuring.timing import compiled
from attn_pass.options import LEAVE
from bench.harness.environment import device_name, versions

Program = Callable[..., Tensor]
_MUCH = 4 << 30
NAMED = "H200"  # the device decided for where there is none


@dataclass(frozen=True)
class Environment:
    """The device of a run, and how thorough the run is."""

    device: str = "cuda"
    quick: bool = False
    processes: int = 1  # that share the device

    @property
    def dry(self) -> bool:
        """No GPU: kernels are stand-ins, shapes tiny, and times mean nothing."""
        return self.device == "cpu"

    @property
    def options(self) -> dict[str, Any]:
        """What the pass is told besides a case's own options."""
        return {"device": NAMED} if self.dry else {}

    @property
    def decided_for(self) -> Device:
        """The device as the pass sees it."""
        return registry.by_name(NAMED) if self.dry else cuda_facts.cuda_here()

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
        """Random numbers on the device."""
        return torch.randn(*shape, device=self.device, dtype=torch.float32).to(dtype).requires_grad_(grad)

    def wait(self) -> None:
        """Until the device is done; raises what went wrong on it."""
        if not self.dry:
            torch.cuda.synchronize()

    def forget(self) -> None:
        """Drops compiled code and cached memory between two cases."""
        torch._dynamo.reset()
        if not self.dry:
            if torch.cuda.memory_allocated() > _MUCH:
                gc.collect()  # what failed compiles hold in cycles
            torch.cuda.empty_cache()


def stock(env: Environment, program: Program, *, dynamic: bool = False, **settings: Any) -> Program:
    """Compiled as torch does; in a dry run only traced."""
    sizes = None if dynamic else False
    return compiled(program, dynamic=sizes, backend="aot_eager" if env.dry else "inductor", **settings)


def passed(
    env: Environment, program: Program, *, eager: bool = False, dynamic: bool = False, **options: Any
) -> Program:
    """Compiled with the pass: by Inductor, or with ``eager`` and in a dry run only traced."""
    options = {**env.options, **options}
    sizes = None if dynamic else False
    if eager or env.dry:
        return compiled(program, dynamic=sizes, backend=attn_pass.wrap("aot_eager", **options))
    return compiled(program, dynamic=sizes, backend=attn_pass.backend, options=options)


def decision_row(report: attn_pass.Report) -> dict[str, Any]:
    """What the pass did with a program of one site: the form it took, the microseconds it predicted, and why."""
    if not report.sites:
        return {"took": "no site", "predicted_us": None, "reason": ""}
    site = report.sites[-1]
    took = site.taken or LEAVE
    return {"took": took, "predicted_us": site.predicted_us.get(took), "reason": site.reason}


def facts(env: Environment) -> dict[str, Any]:
    """What the numbers of a run hold for."""
    known: dict[str, Any] = {"device": device_name(env.device), **versions(), "dry": env.dry}
    if env.dry:
        known["note"] = "a dry run: kernels are stand-ins on the CPU, shapes tiny, and times mean nothing"
    try:
        import triton

        known["triton"] = triton.__version__
    except ImportError:
        known["triton"] = "none"
    if not env.dry:
        properties = torch.cuda.get_device_properties()
        known |= {
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
        }
    return known


def one_line(values: Mapping[str, Any]) -> str:
    """``name value, name value``, for a head line."""
    return ", ".join(f"{name} {value}" for name, value in values.items())
