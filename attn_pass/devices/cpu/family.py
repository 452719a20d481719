"""The CPU's family."""

from __future__ import annotations

import platform
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch.fx import Graph

from attn_pass.devices import calibration_store
from attn_pass.devices.base import Family, FasterLinear, LinearLayer, OnReading
from attn_pass.devices.calibration import Calibration
from attn_pass.devices.cpu import probes
from attn_pass.devices.cpu.computed_once import compute_once
from attn_pass.devices.cpu.cpu_kernel import CpuKernel
from attn_pass.devices.cpu.facts import NAMES, by_name, cpu, instruction_set, is_amd
from attn_pass.devices.cpu.flash_rules import CPU_FLASH
from attn_pass.devices.cpu.kernel import build, source
from attn_pass.devices.cpu.linear.rules import faster_linear, linear_gflops, new_rows_us
from attn_pass.devices.device import Device
from attn_pass.devices.registry import facts
from attn_pass.graph.values import Sizes
from attn_pass.model.attention import AsWritten, Attention
from attn_pass.report.units import counted
from attn_pass.targets.base import Target

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Cpu(Family):
    """The machine's own processor: measured, and always here."""

    name = "cpu"
    types = ("cpu",)
    names = NAMES
    kernel_rules = {"cpu flash": CPU_FLASH}
    fused_operators = {_FLASH.__name__: "cpu flash"}
    kernel_with_logarithm = _FLASH.default
    decomposed_calls = {_FLASH.default: ("query", "key", "value", "dropout_p", "is_causal", "attn_mask", "scale")}
    forms = frozenset(("local", "recompute", "decomposed"))
    flex_template = "cpp"
    takes_any_mask_strides = True
    keeps_inductors_patterns_off = True
    takes_composites = True
    packs_rows = "cpu_kernel"
    joins_projections = True
    caution = 1.25
    calibrated = "the CPU"

    def here(self, at: torch.device) -> Device:
        """This machine's CPU, with what was measured of it."""
        return calibration_store.applied(cpu())

    def by_name(self, name: str) -> Device | None:
        """An ARM processor of the table."""
        return by_name(name)

    def facts(self, device: Device) -> str:
        """The processor's architecture, maker, and the instructions that kernels and products use."""
        maker = ", AMD" if is_amd() else ""
        return f"{device.name}, {platform.machine()}{maker}, {instruction_set()}"

    def identity(self) -> Iterator[str]:
        """The vector unit, and what was measured."""
        yield torch.backends.cpu.get_cpu_capability()
        yield instruction_set()
        yield "AMD" if is_amd() else ""
        yield repr(calibration_store.load(cpu()))

    def sources(self) -> str:
        """Of the kernel, in C++."""
        return source.identity()

    def before_inductor(self) -> None:
        """The lowerings of operators that a graph may have calls of; importing them registers them."""
        if "attn_pass.devices.cpu.kernel.operator" in sys.modules:
            import_module("attn_pass.devices.cpu.kernel.gradient_template")
        if "attn_pass.devices.cpu.linear.onednn_call" in sys.modules:
            import_module("attn_pass.devices.cpu.linear.onednn_template")
        if "attn_pass.devices.cpu.linear.kernel_call" in sys.modules:
            import_module("attn_pass.devices.cpu.linear.kernel_template")

    def faster_linear(self, layer: LinearLayer) -> FasterLinear | None:
        """By the CPU kernel or oneDNN, on processors where that was measured."""
        return faster_linear(layer)

    def new_rows_us(self, device: Device, layer: LinearLayer, *, chooses: bool) -> float:
        """OneDNN's, which makes code for each number of rows."""
        return new_rows_us(device, layer, chooses=chooses)

    def linear_gflops(self, device: Device, layer: LinearLayer, *, chooses: bool) -> float:
        """That of float32 where the CPU kernel widens a type that torch multiplies slowly."""
        return linear_gflops(device, layer, chooses=chooses)

    def settle_operands(self, graph: Graph, sizes: Sizes) -> bool:
        """Parts of masks that are broadcast are computed once."""
        operator = sys.modules.get("attn_pass.devices.cpu.kernel.operator")
        with_logarithm = () if operator is None else (operator.WITH_LSE,)
        return compute_once(graph, (*self.attention_of_packed_rows(), *with_logarithm), sizes)

    def attention_of_packed_rows(self) -> Sequence[Any]:
        """The kernel of our own, in inference and in training."""
        modules = {"operator": "OPERATOR", "gradients": "FORWARD"}
        loaded = ((sys.modules.get(f"attn_pass.devices.cpu.kernel.{m}"), name) for m, name in modules.items())
        return [getattr(module, name) for module, name in loaded if module is not None]

    def inductor_patches(self, target: str) -> Mapping[str, Any]:
        """No fusion into FlexAttention's C++ template.

        With max-autotune or without, it lets Inductor fuse what follows into it and then raises NotImplementedError
        (torch 2.13.0).
        """
        return {"epilogue_fusion": False} if target == "flex" else {}

    def present(self) -> Sequence[str]:
        """It is always here."""
        return ("cpu",)

    def uncalibrated(self, at: torch.device) -> Device:
        """This machine's CPU, as it is fitted."""
        return cpu()

    def measure(
        self, device: Device, at: torch.device, seconds: float, on_reading: OnReading
    ) -> tuple[Calibration, dict[str, str]]:
        """Every probe."""
        readings = []
        for probe, reading in probes.readings(seconds):
            on_reading(probe.name, reading)
            readings.append((probe, reading))
        spread = statistics.median(reading.spread for _, reading in readings)
        return Calibration(facts(device), **probes.fitted(readings), spread=spread), {}

    def machine(self) -> Iterator[tuple[str, str, str]]:
        """The compiler that Inductor needs, which is tried, and the vector unit."""
        use, fault = "Inductor's code for the CPU and every AOTInductor package", build.fault()
        yield "C++ compiler", "" if fault else build.compiler(), f"{fault}; needed for {use}" if fault else use
        yield "CPU", torch.backends.cpu.get_cpu_capability(), counted(torch.get_num_threads(), "thread")

    def targets(self) -> Sequence[Target]:
        """The kernel of our own."""
        return (CpuKernel(),)

    def stock_kernel(
        self, attention: Attention, written: AsWritten, device: Device, *, deterministic: bool
    ) -> str | None:
        """Torch's one fused kernel, where the call was seen to reach it."""
        return "cpu flash" if written.fused else None

    def keeps_flex(self, attention: Attention) -> str:
        """There is a choice: Inductor's template for CPUs was slower than other kernels wherever it was measured."""
        return ""


FAMILY = Cpu()
