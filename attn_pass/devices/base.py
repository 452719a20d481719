"""`Family`: a kind of device, and the answers to all questions about it. A new family overrides what differs.

A family is found by the type of a tensor's device (`attn_pass.devices.registry`). Packages register their own by the
entry point ``attn_pass.devices``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from attn_pass.devices import roofline
from attn_pass.devices.calibration import Calibration
from attn_pass.devices.catalog import unknown
from attn_pass.devices.device import Device
from attn_pass.devices.roofline import Problem
from attn_pass.model.attention import AsWritten, Attention
from attn_pass.model.expression import Apply, walk
from attn_pass.targets.base import Setting, Target
from attn_pass.targets.kernel_rules import Call, KernelRules
from attn_pass.tuning.clock import Clock, Reading

Finder = Callable[[Any], Iterable[Any]]
"""From an `attn_pass.reading.reader.Reader` to the `attn_pass.patterns.base.Site`s of a graph."""

OnReading = Callable[[str, Reading], None]
"""Hears every reading of a calibration, by name."""

_TRANSCENDENTAL = ("tanh", "exp", "sigmoid", "log")


class Family:
    """What is true where nobody says otherwise: a device with no fused kernel, on which attention is left as it is.

    Attributes:
        name: of the family, "cuda".
        types: of `torch.device`, whose tensors are this family's.
        names: of its devices that need not be here to be decided for (`Options.device`).
        kernel_rules: torch's own fused kernels there, by name, in the order torch's call tries them.
        forms: of the targets that are no kernel's but forms of torch's call and of products, those that serve here too:
            "local", "recompute", "decomposed". What they take is measured there.
        flex_template: Inductor's template for FlexAttention there, as `attn_pass.targets.flex` names it; "" for none.
        most_general: the targets that take most there; where none offers, the first one's refusal says most.
        masks_in_compute_dtype: kernels read an additive mask in the dtype of their operands, not in float32.
        takes_any_mask_strides: torch's kernels read a mask whose rows overlap in memory.
        logarithm_of_torch_call: the operator that torch's call ends in gives the log-sum-exp as well, with any mask.
        same_call: a kernel that programs call by themselves, to the target that writes the same call.
        widens_unfused_half: torch's call without a fused kernel computes half precision in float32.
        merges_equal_calls: a compiler there may take two calls that draw dropout for one.
        keeps_inductors_patterns_off: a softmax that is left there is shielded from Inductor's own attention patterns.
            Where this project has no rules, what Inductor does is left to it.
        encoder_kernel_calls_sdpa: torch's fused kernel of an encoder's attention there calls torch's own attention
            where it takes no mask; elsewhere it writes the attention out.
        takes_composites: calls of torch's modules and libraries that are no attention of ours are taken apart there.
        clock: how long a call there takes.
        calibrated: what of it ``attn-pass calibrate`` measures, in words: "CUDA devices"; "" for nothing.
        packages: (name, purpose, how to install) of what serves the family, for ``attn-pass doctor``.
    """

    name = ""
    types: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    kernel_rules: Mapping[str, KernelRules] = {}
    forms: frozenset[str] = frozenset()
    flex_template = ""
    most_general: tuple[str, ...] = ("sdpa",)
    masks_in_compute_dtype = False
    takes_any_mask_strides = False
    logarithm_of_torch_call = False
    same_call: Mapping[str, str] = {}
    widens_unfused_half = False
    merges_equal_calls = False
    keeps_inductors_patterns_off = False
    encoder_kernel_calls_sdpa = False
    takes_composites = False
    clock: Clock = Clock()
    calibrated = ""
    packages: tuple[tuple[str, str, str], ...] = ()

    # ------------------------------------------------------------ devices

    def here(self, at: torch.device) -> Device:
        """The device of this process, with what was measured of it; with no kernels where there is none."""
        return unknown(at.type)

    def by_name(self, name: str) -> Device | None:
        """A device that need not be here; None where the name is none of this family's."""
        return None

    def facts(self, device: Device) -> str:
        """The hardware and the libraries that a measurement on it holds for."""
        return device.name

    def identity(self) -> Iterator[str]:
        """What a choice may depend on besides options and versions: hardware, and what was measured of it."""
        return iter(())

    def sources(self) -> str:
        """A hash of sources that are written into generated code, which a graph says nothing of; "" without such."""
        return ""

    def before_inductor(self) -> None:
        """What Inductor has to know of this family's operators before it compiles a graph with them."""

    def inductor_patches(self, target: str) -> Mapping[str, Any]:
        """Inductor config patches that a graph with what this target emits needs there."""
        return {}

    def machine(self) -> Iterator[tuple[str, str, str]]:
        """(What, found, what there is to say) of this machine, for ``attn-pass doctor``."""
        return iter(())

    # ------------------------------------------------------------ measuring

    def present(self) -> Sequence[str]:
        """Its devices of this process, as torch names them: those that can be measured and that doctor looks at."""
        return ()

    def uncalibrated(self, at: torch.device) -> Device:
        """The device of this process as the catalogue has it, where it is `calibrated`.

        Raises:
            OptionError: there is none here.
        """
        raise NotImplementedError(f"{self.name} devices are not calibrated")

    def measure(
        self, device: Device, at: torch.device, seconds: float, on_reading: OnReading
    ) -> tuple[Calibration, dict[str, str]]:
        """What bare kernels reach on an `uncalibrated` device, with the readings' spread; what failed, and why."""
        raise NotImplementedError(f"{self.name} devices are not calibrated")

    def limit_memory(self, megabytes: int) -> None:
        """Caps what this process may take, so that a form which does not fit fails and not the machine."""
        with contextlib.suppress(ImportError, ValueError, OSError):
            import resource

            resource.setrlimit(resource.RLIMIT_DATA, (megabytes << 20, megabytes << 20))

    def import_operators(self, text: str) -> None:
        """Imports the libraries whose operators a program in text calls, which registers them."""

    # ------------------------------------------------------------ what an attention can become, and be written as

    def targets(self) -> Sequence[Target]:
        """The targets for this family alone."""
        return ()

    def finders(self) -> Sequence[Finder]:
        """What finds calls of this family's own operators and libraries in a graph."""
        return ()

    def order(self, device: Device) -> tuple[str, ...]:
        """The fused kernels torch's own call tries on this device, first to last."""
        return tuple(k for k in self.kernel_rules if k in device.kernels)

    def takes_head_dims(self, kernel: str, call: Call) -> bool:
        """Whether torch's own call hands the kernel these head dims, by padding them if need be."""
        return True

    def refused_by_torch(self, kernel: str, call: Call, multiple: int) -> bool:
        """Whether torch's own check of a kernel refuses the call, where the device is here to ask."""
        return False

    def stock_kernel(
        self, attention: Attention, written: AsWritten, device: Device, *, deterministic: bool
    ) -> str | None:
        """The fused kernel a call of torch's ends in if nothing is done; None where none does."""
        return None

    def keeps_flex(self, attention: Attention) -> str:
        """Why a program's own call of FlexAttention stays, whatever is offered; "" where there is a choice."""
        return f"no rule for FlexAttention on {self.name} devices yet"

    # ------------------------------------------------------------ costs, in microseconds

    def kernel_cost(self, kernel: str, attention: Attention, problem: Problem, setting: Setting) -> float:
        """One of the family's kernels, or a library's."""
        return roofline.fused(setting.device, problem)

    def flex_cost(
        self, device: Device, problem: Problem, share: float, *, splits_keys: bool, as_written: bool = False
    ) -> float:
        """FlexAttention, of whose blocks this share is computed; ``as_written`` where the program calls it itself."""
        return roofline.flex(device, problem, share, as_written=as_written)

    def mask_cost(self, device: Device, problem: Problem, written: AsWritten) -> float:
        """What torch's own call does to its mask before the kernel it ends in."""
        return 0.0

    def unfused_cost(self, attention: Attention, problem: Problem, setting: Setting) -> float:
        """Products and softmax as stock compiles them, without the copies around them."""
        calls = sum(isinstance(e, Apply) and e.op in _TRANSCENDENTAL for e in walk(attention.modified))
        return (
            self.scaling_cost(problem, setting)
            + roofline.transcendental(setting.device, problem, calls)
            + roofline.unfused(setting.device, problem)
        )

    def scaling_cost(self, problem: Problem, setting: Setting) -> float:
        """What torch's call without a fused kernel takes to scale its operands; nothing where it is written by hand."""
        return 0.0 if setting.eager_form else roofline.traffic(setting.device, 2 * problem.operand_bytes)

    def as_computed_unfused(self, problem: Problem, setting: Setting) -> Problem:
        """The problem in the dtype that torch's call without a fused kernel computes in."""
        widened = self.widens_unfused_half and not setting.eager_form
        return replace(problem, dtype=torch.float32) if widened else problem
