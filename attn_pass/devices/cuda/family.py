"""The family of NVIDIA's GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from attn_pass.devices import calibration
from attn_pass.devices.base import Family, Finder
from attn_pass.devices.cuda import cost, facts, flash_attn_calls, own_check
from attn_pass.devices.cuda.cudnn import Cudnn
from attn_pass.devices.cuda.decode import Decode
from attn_pass.devices.cuda.efficient import Efficient
from attn_pass.devices.cuda.flash import Flash
from attn_pass.devices.cuda.flash_attn import FlashAttn
from attn_pass.devices.cuda.flash_attn_3 import FlashAttn3
from attn_pass.devices.cuda.flex_flash import FlexFlash
from attn_pass.devices.cuda.libraries import LIBRARY, LIBRARY_3
from attn_pass.devices.cuda.rules.cudnn import CUDNN
from attn_pass.devices.cuda.rules.efficient import EFFICIENT
from attn_pass.devices.cuda.rules.flash import FLASH
from attn_pass.devices.device import Device
from attn_pass.devices.roofline import Problem
from attn_pass.model.attention import AsWritten, Attention
from attn_pass.model.structure import Band
from attn_pass.targets.base import Setting, Target
from attn_pass.targets.kernel_rules import Call
from attn_pass.targets.torch_call import is_padded, picked_by_torch


class Cuda(Family):
    """NVIDIA's GPUs; of AMD's, which torch calls cuda as well, no kernel is known."""

    name = "cuda"
    types = ("cuda",)
    names = tuple(sheet.name for sheet in facts.SHEETS)
    kernel_rules = {"flash": FLASH, "cudnn": CUDNN, "efficient": EFFICIENT}
    flex_template = "triton"
    masks_in_compute_dtype = True
    same_call = {LIBRARY: LIBRARY}
    widens_unfused_half = True
    takes_composites = True
    packages = (
        ("triton", "the targets decode and flex on CUDA", "comes with torch for CUDA: pip install triton"),
        ("flash-attn", "the target flash_attn, and its calls", "pip install flash-attn --no-build-isolation"),
    )

    def here(self, at: torch.device) -> Device:
        """The GPU of this process, with what was measured of it; one without kernels where there is none."""
        if torch.cuda.is_available():
            return calibration.applied(facts.cuda_here(at))
        device = facts.by_name(facts.DEFAULT)
        assert device is not None
        return replace(device, kernels=())

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
            yield repr(calibration.load(facts.cuda_here(torch.device("cuda", number))))

    def machine(self) -> Iterator[tuple[str, str, str]]:
        """The GPUs and cuDNN."""
        for number in _numbers():
            major, minor = torch.cuda.get_device_capability(number)
            yield f"cuda:{number}", torch.cuda.get_device_name(number), f"compute capability {major}.{minor}"
        if torch.cuda.is_available():
            yield "cuDNN", str(torch.backends.cudnn.version() or ""), "the target cudnn"
        else:
            yield "CUDA device", "", "torch sees none; decide for one with device='H200'"

    def targets(self) -> Sequence[Target]:
        """Torch's kernels, the libraries', FlexAttention's FLASH backend, and the split-KV kernel of our own."""
        return (Cudnn(), Flash(), Efficient(), Decode(), FlashAttn(), FlashAttn3(), FlexFlash())

    def finders(self) -> Sequence[Finder]:
        """Calls of the package flash-attn."""
        return (flash_attn_calls.find,)

    def order(self, device: Device) -> tuple[str, ...]:
        """cuDNN stands behind the unfused form, which takes everything, unless it is moved to the front.

        ``check_prefer_cudnn_attention`` does that above cuDNN 9.15.0, on compute capability 9 and 10.
        """
        kernels = [k for k in device.kernels if k in self.kernel_rules and k != "cudnn"]
        behind = device.is_here and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1"
        if "cudnn" in device.kernels and device.cudnn > 91500 and device.capability[0] in (9, 10) and not behind:
            kernels.insert(0, "cudnn")
        return tuple(kernels)

    def takes_head_dims(self, kernel: str, call: Call) -> bool:
        """Torch's call pads head dims for the flash kernel, to a multiple of 8, and does not make them equal."""
        return call.head_dims[0] == call.head_dims[1] if kernel == "flash" else is_padded(kernel, call)

    def refused_by_torch(self, kernel: str, call: Call, multiple: int) -> bool:
        """What torch's own ``can_use_*_attention`` says, where the GPU is here."""
        return own_check.refuses(kernel, call, multiple)

    def stock_kernel(
        self, attention: Attention, written: AsWritten, device: Device, *, deterministic: bool
    ) -> str | None:
        """What torch's own call picks."""
        if not written.plain:
            return None
        mask = "causal" if written.causal else written.mask
        return picked_by_torch(Call(attention, mask, device, written.mask_needs_grad, deterministic))

    def kernel_cost(self, kernel: str, attention: Attention, problem: Problem, setting: Setting) -> float:
        """Torch's kernels and the libraries'; a call of another device's operator as any fused kernel."""
        library = kernel in (LIBRARY, LIBRARY_3)
        if not library and kernel not in cost.SHAPES:
            return super().kernel_cost(kernel, attention, problem, setting)
        if library:
            own = "flash" if kernel == LIBRARY else kernel
            return cost.torch_kernel(setting.device, own, problem) + cost.PYTHON_US
        growing = not all(isinstance(n, int) for n in (attention.q_len, attention.kv_len))
        return cost.torch_kernel(setting.device, kernel, problem, growing=growing)

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
    return range(torch.cuda.device_count() if torch.cuda.is_available() else 0)


FAMILY = Cuda()
