"""`Family`: a kind of device, and the answers to all questions about it. A new family overrides what differs.

A family is found by the type of a tensor's device (`attn_pass.devices.registry`). Packages register their own by the
entry point ``attn_pass.devices``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.fx import Graph

from attn_pass.devices import roofline
from attn_pass.devices.calibration import Calibration
from attn_pass.devices.device import Device
from attn_pass.devices.processors import unknown
from attn_pass.devices.roofline import Problem
from attn_pass.graph.values import Sizes
from attn_pass.model.attention import AsWritten, Attention
from attn_pass.model.expression import Apply, walk
from attn_pass.targets.base import Setting, Target
from attn_pass.targets.kernel_rules import KernelCall, KernelRules
from attn_pass.tuning.clock import Clock, Reading

Finder = Callable[[Any], Iterable[Any]]
"""From an `attn_pass.reading.reader.Reader` to the `attn_pass.patterns.base.Site`s of a graph."""

OnReading = Callable[[str, Reading], None]
"""Receives every reading of a calibration, by name."""


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer in inference.

    Attributes:
        dtype: of its operands and its result; under autocast operands are cast to it first.
        rows: how many rows are multiplied, by the sizes' hints.
        features: how many features each has.
        width: how many the result has.
        has_bias: a bias is added.
        has_static_rows: their number is known when it is compiled.
        by_columns: the weight is stored transposed, (features, width).
        is_constant: the weight becomes a constant of the compiled code, which Inductor packs itself (``freezing``).
        is_packaged: and so in a package, where Inductor has oneDNN multiply it.
        is_plain: the weight is a parameter, a constant or an input, and no operand is cast.
    """

    dtype: torch.dtype
    rows: int
    features: int
    width: int
    has_bias: bool
    has_static_rows: bool
    by_columns: bool
    is_constant: bool
    is_packaged: bool = False
    is_plain: bool = True


class FasterLinear(NamedTuple):
    """A call that is faster than torch's for a linear layer.

    ``operator`` takes (input, weight, bias or None, activation) and returns a contiguous result; ``library`` is whose
    code it is, ``reason`` why it is faster, and ``activations`` those that it applies: "gelu", "gelu, tanh", "silu" and
    "none", which is the default.
    """

    operator: Any
    library: str
    reason: str
    activations: Sequence[str] = ("none",)


_TRANSCENDENTAL = ("tanh", "exp", "sigmoid", "log")


class Family:
    """The defaults: a device without fused kernels, on which every attention is left unchanged.

    Attributes:
        name: the family's name, "cuda".
        types: the types of `torch.device` whose tensors belong to this family.
        names: devices of the family that need not be present (`Options.device`).
        kernel_rules: torch's own fused kernels there, by name, in the order in which torch's call tries them.
        forms: the common targets (forms of torch's call and of products) that are offered there too:
            "local", "recompute", "decomposed". Their costs were measured there.
        flex_template: Inductor's template for FlexAttention there, as `attn_pass.targets.flex` names it; "" for none.
        most_general: the targets that accept most; if none makes an offer, the first one's refusal is the reason.
        masks_in_compute_dtype: kernels read an additive mask in the dtype of their operands, not in float32.
        takes_any_mask_strides: torch's kernels read a mask whose rows overlap in memory.
        kernel_with_logarithm: the operator that torch's call dispatches to, if it takes any mask and also gives the
            log-sum-exp: from ``(query, key, value, dropout_p, is_causal, *, attn_mask, scale)`` to both.
        decomposed_calls: torch's operators that stand for its call in decomposed programs, with the names of their
            arguments; the attention is the first result, the log-sum-exp the second.
        settled_kernels: such operators that stay where they are, and the kernels that they are.
        fused_operators: torch's fused operators there, as they stand in a traced graph, and the kernels that they are.
        reading_functions: attention functions of libraries for such devices, by name, that write nothing.
        same_call: from a kernel that programs call directly to the target that emits the same call.
        widens_unfused_half: torch's call without a fused kernel computes half precision in float32.
        merges_equal_calls: a compiler may merge two calls with dropout.
        keeps_inductors_patterns_off: a softmax that is left is shielded from Inductor's own attention patterns.
            On devices without rules in this project Inductor keeps its patterns.
        encoder_kernel_calls_sdpa: torch's fused kernel of an encoder's attention there calls torch's own attention
            where it takes no mask; elsewhere it writes the attention out.
        joins_projections: several products with one input take longer there than one, by measurements.
        broadcasts_masks: torch's call takes a mask there that has one row or one key for all.
        joins_sinks: a sink becomes a key of zeros in torch's call, whose mask it is added by.
        takes_unequal_head_dims: torch's call takes values of another size than the keys there, without padding.
        drops_unread_inputs: an input that nothing reads is none of the compiled program's, whose callers count them.
        is_runtime: it is no device but a runtime that programs are exported to (`Options.runtime`).
        dynamo_backends: the backends of torch.compile that hand graphs to this runtime.
        backend_traces_again: its backends of torch.compile trace graphs themselves, with real tensors.
        takes_composites: calls of torch's modules and of libraries that hide attention are expanded.
        caution: how many times its predicted time an offer is taken to need where the rates are those of another device
            and were not calibrated; but for torch's own call, in which stock's own patterns end as well.
        clock: times a call.
        calibrated: the devices that ``attn-pass calibrate`` measures, in words: "CUDA devices"; "" for none.
        packages: (name, purpose, how to install) of packages that the family uses, for ``attn-pass doctor``.
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
    kernel_with_logarithm: Any = None
    decomposed_calls: Mapping[Any, tuple[str, ...]] = {}
    settled_kernels: Mapping[Any, str] = {}
    fused_operators: Mapping[str, str] = {}
    reading_functions: tuple[str, ...] = ()
    same_call: Mapping[str, str] = {}
    widens_unfused_half = False
    merges_equal_calls = False
    keeps_inductors_patterns_off = False
    encoder_kernel_calls_sdpa = False
    joins_projections = False
    broadcasts_masks = True
    joins_sinks = False
    takes_unequal_head_dims = False
    drops_unread_inputs = False
    is_runtime = False
    dynamo_backends: tuple[str, ...] = ()
    backend_traces_again = False
    takes_composites = False
    caution = 1.0
    clock: Clock = Clock()
    calibrated = ""
    packages: tuple[tuple[str, str, str], ...] = ()

    # ------------------------------------------------------------ devices

    def claims(self, kind: str) -> bool:
        """Whether tensors on devices of this type belong to the family, with this build of torch."""
        return kind in self.types

    def here(self, at: torch.device) -> Device:
        """The device of this process, with its calibration; without kernels if there is none."""
        return unknown(at.type)

    def by_name(self, name: str) -> Device | None:
        """A device that need not be present; None if the name is not of this family."""
        return None

    def facts(self, device: Device) -> str:
        """The hardware and the libraries that a measurement on the device is valid for."""
        return device.name

    def identity(self) -> Iterator[str]:
        """All that a choice may depend on besides options and versions: hardware and its calibration."""
        return iter(())

    def sources(self) -> str:
        """A hash of sources that become part of generated code but not of the graph; "" without such."""
        return ""

    packs_rows = ""
    """The target whose attentions run on packed rows, without padding; "" for none."""

    def attention_of_packed_rows(self) -> Sequence[Any]:
        """The operators that compute attention over packed rows (``offsets``), of those that a graph may have calls of.

        The attention is an operator's result, or the first of its results.
        """
        return ()

    def before_inductor(self) -> None:
        """Registers this family's operators with Inductor before it compiles a graph with them."""

    def faster_linear(self, layer: LinearLayer) -> FasterLinear | None:
        """The call that was measured to be faster for a linear layer than torch's; None for none."""
        return None

    def new_rows_us(self, device: Device, layer: LinearLayer, *, chooses: bool) -> float:
        """Microseconds that a product takes once more for every number of rows that it has not had before.

        ``chooses`` says that `faster_linear` decides what multiplies the layer.
        """
        return 0.0

    def linear_gflops(self, device: Device, layer: LinearLayer, *, chooses: bool) -> float:
        """GFLOP/s at which a linear layer of many rows is multiplied; ``chooses`` as for `new_rows_us`."""
        return device.matmul(layer.dtype)

    def settle_operands(self, graph: Graph, sizes: Sizes) -> bool:
        """Last edits of a rewritten graph that Inductor compiles, to what its calls read; whether there were any."""
        return False

    def inductor_patches(self, target: str) -> Mapping[str, Any]:
        """Inductor config patches that a graph with this target's code needs."""
        return {}

    def machine(self) -> Iterator[tuple[str, str, str]]:
        """Rows (what, found, note) about this machine, for ``attn-pass doctor``."""
        return iter(())

    # ------------------------------------------------------------ measuring

    def present(self) -> Sequence[str]:
        """The devices of this process, as torch names them: those that can be measured and that doctor lists."""
        return ()

    def uncalibrated(self, at: torch.device) -> Device:
        """The device of this process with the catalogue's rates, if the family is `calibrated`.

        Raises:
            OptionError: there is none here.
        """
        raise NotImplementedError(f"{self.name} devices are not calibrated")

    def measure(
        self, device: Device, at: torch.device, seconds: float, on_reading: OnReading
    ) -> tuple[Calibration, dict[str, str]]:
        """The rates of bare kernels on an `uncalibrated` device, with the readings' spread; and the failures."""
        raise NotImplementedError(f"{self.name} devices are not calibrated")

    def limit_memory(self, megabytes: int) -> None:
        """Limits the memory of this process, so that a form that does not fit fails instead of the machine."""
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
        """The finders of calls of this family's own operators and libraries in a graph."""
        return ()

    def order(self, device: Device) -> tuple[str, ...]:
        """The fused kernels torch's own call tries on this device, first to last."""
        return tuple(k for k in self.kernel_rules if k in device.kernels)

    def takes_head_dims(self, kernel: str, call: KernelCall) -> bool:
        """Whether torch's own call passes these head dims to the kernel, padded if necessary."""
        return True

    def refused_by_torch(self, kernel: str, call: KernelCall, multiple: int) -> bool:
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
