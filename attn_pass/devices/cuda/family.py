"""The family of NVIDIA's GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module

import torch

from attn_pass.devices import calibration_store
from attn_pass.devices.base import Family, Finder, OnReading
from attn_pass.devices.calibration import Calibration
from attn_pass.devices.cuda import cost, facts, flash_attn_calls, own_check, sweep
from attn_pass.devices.cuda.clock import EventClock
from attn_pass.devices.cuda.cudnn import BEHIND, is_put_behind
from attn_pass.devices.cuda.kernels import KERNELS, named
from attn_pass.devices.cuda.libraries import LIBRARY
from attn_pass.devices.device import Device
from attn_pass.devices.roofline import Problem
from attn_pass.errors import OptionError
from attn_pass.model.attention import AsWritten, Attention
from attn_pass.model.structure import Band
from attn_pass.targets.base import Setting, Target
from attn_pass.targets.kernel_rules import KernelCall
from attn_pass.targets.torch_call import is_padded, picked_as_written


class Cuda(Family):
    """NVIDIA's GPUs. Torch calls AMD's cuda as well, where it is built for them: they are a family of their own."""

    name = "cuda"
    types = ("cuda",)
    names = tuple(sheet.name for sheet in facts.SHEETS)
    kernel_rules = {kernel.name: kernel.rules for kernel in KERNELS if kernel.rules is not None}
    flex_template = "triton"
    masks_in_compute_dtype = True
    # Their layouts, padded head dims and masks are those of one kernel: chosen when the program was decomposed.
    settled_kernels = {kernel.settled: kernel.name for kernel in KERNELS if kernel.settled is not None}
    # flash-attn's and xFormers'; flash_attn_with_kvcache is none of them: it writes its cache.
    reading_functions = (
        *("flash_attn_func", "flash_attn_varlen_func", "flash_attn_qkvpacked_func"),
        *("memory_efficient_attention", "flash_attention"),
    )
    same_call = {LIBRARY: LIBRARY}
    widens_unfused_half = True
    encoder_kernel_calls_sdpa = True
    takes_composites = True
    clock = EventClock()
    calibrated = "CUDA devices"
    packages = (
        ("triton", "the targets decode and flex on CUDA", "comes with torch for CUDA: pip install triton"),
        *(kernel.package for kernel in KERNELS if kernel.package is not None),
    )

    def claims(self, kind: str) -> bool:
        """Unless torch is built for ROCm."""
        return super().claims(kind) and torch.version.hip is None

    def here(self, at: torch.device) -> Device:
        """The GPU of this process, with what was measured of it; one without kernels where there is none."""
        if torch.cuda.is_available():
            return calibration_store.applied(facts.cuda_here(at))
        return facts.default()

    def by_name(self, name: str) -> Device | None:
        """A GPU of the table of data sheets."""
        return facts.by_name(name)

    def facts(self, device: Device) -> str:
        """The GPU's name, CUDA's version and cuDNN's."""
        return f"{device.name}, CUDA {torch.version.cuda}, cuDNN {device.cudnn}"

    def identity(self) -> Iterator[str]:
        """Name and capability of every GPU that is here, and what was measured of it."""
        for number in _numbers():
            yield f"{torch.cuda.get_device_name(number)} {torch.cuda.get_device_capability(number)}"
            yield repr(calibration_store.load(facts.cuda_here(torch.device("cuda", number))))

    def present(self) -> Sequence[str]:
        """The first GPU."""
        return ("cuda:0",) if _numbers() else ()

    def uncalibrated(self, at: torch.device) -> Device:
        """The GPU as its row of the catalogue has it."""
        if not torch.cuda.is_available():
            raise OptionError(f"torch sees no CUDA device, so {at} cannot be calibrated; for the CPU give cpu")
        return facts.cuda_here(at)

    def measure(
        self, device: Device, at: torch.device, seconds: float, on_reading: OnReading
    ) -> tuple[Calibration, dict[str, str]]:
        """Products, copies, launches, and every attention kernel of a sweep."""
        with torch.cuda.device(at):  # the events of a clock are on the current device
            swept = sweep.sweep(device, at, seconds, on_reading)
        return replace(sweep.fitted(device, swept), spread=swept.spread), swept.failed

    def limit_memory(self, megabytes: int) -> None:
        """To half of the GPU's memory: the host's is mapped for it and says nothing."""
        torch.cuda.set_per_process_memory_fraction(0.5)

    def import_operators(self, text: str) -> None:
        """flash-attn's."""
        if f"torch.ops.{LIBRARY}." in text:
            import_module(LIBRARY)

    def machine(self) -> Iterator[tuple[str, str, str]]:
        """The GPUs and cuDNN, and which of torch's kernels its call may not use or tries last."""
        if torch.version.hip is not None:
            return
        off = [k.name for k in KERNELS if k.rules is not None and not k.is_usable()]
        closed = f"; switched off, or not in this build of torch: {', '.join(off)}" if off else ""
        for number in _numbers():
            major, minor = torch.cuda.get_device_capability(number)
            yield f"cuda:{number}", torch.cuda.get_device_name(number), f"compute capability {major}.{minor}{closed}"
        if torch.cuda.is_available():
            last = f"; torch's call tries it last, as {BEHIND} is 1" if is_put_behind() else ""
            yield "cuDNN", str(torch.backends.cudnn.version() or ""), f"the target cudnn{last}"
        else:
            why = "torch sees none" if torch.version.cuda is not None else "torch is not built for CUDA"
            yield "CUDA device", "", f"{why}; decide for one with device='H200'"

    def targets(self) -> Sequence[Target]:
        """Torch's kernels, the libraries', FlexAttention's FLASH backend, and the split-KV kernel of our own."""
        return KERNELS

    def finders(self) -> Sequence[Finder]:
        """Calls of the package flash-attn."""
        return (flash_attn_calls.find,)

    def order(self, device: Device) -> tuple[str, ...]:
        """Torch's kernels that stand before the unfused form, which takes everything."""
        there = (kernel for kernel in KERNELS if kernel.name in device.kernels and kernel.rules is not None)
        return tuple(kernel.name for kernel in there if kernel.is_tried(device))

    def takes_head_dims(self, kernel: str, call: KernelCall) -> bool:
        """Where torch's call pads head dims for a kernel, to a multiple of 8, it does not make them equal."""
        own = named(kernel)
        pads = own is not None and own.padded_by_torch
        return call.head_dims[0] == call.head_dims[1] if pads else is_padded(kernel, call)

    def refused_by_torch(self, kernel: str, call: KernelCall, multiple: int) -> bool:
        """What torch's own ``can_use_*_attention`` says, where the GPU is here."""
        return own_check.refuses(kernel, call, multiple)

    def stock_kernel(
        self, attention: Attention, written: AsWritten, device: Device, *, deterministic: bool
    ) -> str | None:
        """What torch's own call picks."""
        return picked_as_written(attention, written, device, deterministic=deterministic)

    def kernel_cost(self, kernel: str, attention: Attention, problem: Problem, setting: Setting) -> float:
        """Torch's kernels and the libraries'; a call of another device's operator as any fused kernel."""
        own = named(kernel)
        if own is None:
            return super().kernel_cost(kernel, attention, problem, setting)
        growing = not all(isinstance(n, int) for n in (attention.q_len, attention.kv_len))
        return own.microseconds(setting.device, problem, growing=growing)

    def keeps_flex(self, attention: Attention) -> str:
        """Inductor compiles a kernel around mask and scores: what torch's own take as a flag may be worth another."""
        if attention.not_affine or attention.mask.bias is not None:
            return "FlexAttention's own kernel computes such scores on CUDA devices: the call stays"
        if all(isinstance(part, Band) for part in attention.mask.structure.parts):
            return ""
        return "FlexAttention's own kernel takes such a mask on CUDA devices: the call stays"

    def flex_cost(
        self, device: Device, problem: Problem, share: float, *, splits_keys: bool, as_written: bool = False
    ) -> float:
        """FlexAttention's Triton kernels."""
        return cost.flex(device, problem, share, splits_keys=splits_keys)

    def unfused_cost(self, attention: Attention, problem: Problem, setting: Setting) -> float:
        """What is elementwise is part of the softmax's kernel."""
        return cost.unfused(setting.device, problem) + self.scaling_cost(problem, setting)


def _numbers() -> range:
    of_nvidia = torch.cuda.is_available() and torch.version.hip is None
    return range(torch.cuda.device_count() if of_nvidia else 0)


FAMILY = Cuda()
