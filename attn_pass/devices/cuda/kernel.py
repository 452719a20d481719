"""What the family needs to know about a kernel besides its target: declared in the kernel's own file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor
from torch._ops import OpOverload

from attn_pass.devices import roofline
from attn_pass.devices.cuda import cost
from attn_pass.devices.cuda.cost import Shape
from attn_pass.devices.device import Device, Shares
from attn_pass.devices.roofline import Problem
from attn_pass.targets.base import Target
from attn_pass.targets.kernel_rules import KernelRules

Generation = Literal["ampere", "ada", "hopper", "blackwell", "H200"]
"""Of GPUs; and one that was measured by itself, by its name."""
Sweep = Literal["prefill", "decoding", "float32", "launch"]
"""Calls of ``attn-pass calibrate``: many rows and few in half precision, many in float32, and one that does no work."""


class CudaKernel(Target):
    """A kernel on NVIDIA's GPUs. A line in `attn_pass.devices.cuda.kernels` registers its file.

    Attributes:
        shares: the shares of a GPU's rates that it reaches, by generation; other generations do not have the kernel.
        measured: the GPUs on which this project measured them, by name.
        shape: its tile sizes, for the cost model; None for a kernel with its own cost function.
        rules: for one of torch's kernels, the constraints of torch's call and of its operator.
        settled: for one of torch's kernels, its operator in a decomposed program, where the call stays.
        torch_check: the function of `torch.backends.cuda` that checks whether torch's own call may use the kernel.
        padded_by_torch: torch's own call pads head dims for it.
        is_listed: `Device.kernels` names it; one of a library, or of Inductor, looks for that itself.
        sweeps: the points of ``attn-pass calibrate`` that it is measured at.
        flex_wide: what FlexAttention's Triton template reaches of it with head dims over 128, in small tiles.
        takes_groups: several query heads may share a KV head without copies.
        package: (name, purpose, how to install) of the package that provides it, for ``attn-pass doctor``.
    """

    name = ""
    shares: Mapping[Generation, Shares] = {}
    measured: tuple[str, ...] = ()
    shape: Shape | None = None
    rules: KernelRules | None = None
    settled: OpOverload | None = None
    torch_check = ""
    padded_by_torch = False
    is_listed = True
    sweeps: tuple[Sweep, ...] = ()
    flex_wide: float | None = None
    takes_groups = True
    package: tuple[str, str, str] | None = None

    def is_usable(self) -> bool:
        """Whether this build of torch has it, and it is not switched off."""
        return True

    def is_tried(self, device: Device) -> bool:
        """Whether torch's own call tries a kernel with `rules`, in the order of the list, before the unfused form."""
        return True

    def shares_with(self, flash: str, shares: Shares) -> Shares:
        """Its shares where torch's operators have another FlashAttention behind them: "FA2", "FA3", "FA4"."""
        return shares

    def microseconds(self, device: Device, problem: Problem, *, growing: bool = False) -> float:
        """What a call takes; ``growing``: a length is not known when compiled."""
        if self.shape is None:
            return roofline.fused(device, problem)
        return cost.fused(device, device.shares[self.name], self.shape, problem, growing=growing)

    def bare(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """The kernel called directly on (B, H, L, D), with the usual scale, for `sweeps`."""
        raise NotImplementedError(f"{self.name} is in no sweep")
