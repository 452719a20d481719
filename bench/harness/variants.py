"""The variants of a program: eager, compiled and packaged, by stock and by the pass, and the form written by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import attn_pass
from attn_pass.measuring.timing import Candidate, compiled
from bench.harness.programs import Program, Tensors

EAGER = "eager"
STOCK, STOCK_AGAIN, PASS, HAND = "compile, stock", "compile, stock (A/A)", "compile, attn_pass", "compile, by hand"
STOCK_FROZEN, PASS_FROZEN = "compile, stock, frozen", "compile, attn_pass, frozen"
STOCK_FROZEN_AGAIN = "compile, stock, frozen (A/A)"
PACKAGE, PACKAGE_AGAIN = "AOTInductor, stock", "AOTInductor, stock (A/A)"
DECOMPOSED, PACKAGE_PASS = "AOTInductor, decomposed", "AOTInductor, attn_pass"
PACKAGE_HAND = "AOTInductor, by hand"
PACKAGE_FROZEN, PACKAGE_PASS_FROZEN = "AOTInductor, stock, frozen", "AOTInductor, attn_pass, frozen"
PACKAGE_FROZEN_AGAIN = "AOTInductor, stock, frozen (A/A)"
IN_ORT, IN_ORT_AGAIN, IN_ORT_PASS = "ONNX Runtime, stock", "ONNX Runtime, stock (A/A)", "ONNX Runtime, attn_pass"
IN_OPENVINO, IN_OPENVINO_AGAIN, IN_OPENVINO_PASS = "OpenVINO, stock", "OpenVINO, stock (A/A)", "OpenVINO, attn_pass"

COMPILED = (EAGER, STOCK, STOCK_AGAIN, PASS, HAND)
FROZEN = (STOCK_FROZEN, STOCK_FROZEN_AGAIN, PASS_FROZEN)
"""With Inductor's ``freezing``, which folds weights into the code and packs those of linear layers."""
PACKAGED = (PACKAGE, PACKAGE_AGAIN, DECOMPOSED, PACKAGE_PASS)
PACKAGED_FROZEN = (PACKAGE_FROZEN, PACKAGE_FROZEN_AGAIN, PACKAGE_PASS_FROZEN)

AGAIN: Mapping[str, str] = {
    STOCK: STOCK_AGAIN,
    STOCK_FROZEN: STOCK_FROZEN_AGAIN,
    PACKAGE: PACKAGE_AGAIN,
    PACKAGE_FROZEN: PACKAGE_FROZEN_AGAIN,
    IN_ORT: IN_ORT_AGAIN,
    IN_OPENVINO: IN_OPENVINO_AGAIN,
}
"""The same code measured twice: the difference is noise."""


def base_of(way: str, ways: Collection[str]) -> str:
    """What one of these ways is compared with: stock with the same settings, of the same system, or torch.compile."""
    system = way.partition(",")[0]
    base = f"{system}, stock, frozen"
    if way != base and base in ways and way.endswith((", frozen", ", frozen (A/A)")):
        return base
    return f"{system}, stock" if f"{system}, stock" in ways else STOCK


@dataclass
class Workshop:
    """One program being built in every way, in this process; packages are built once."""

    program: Program
    device: str
    folder: Path
    packages: dict[str, tuple[Path, float]] = field(default_factory=dict)
    reports: dict[str, attn_pass.Report] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.module, self.inputs = self.program.make(self.device)

    def build(self, way: str) -> Candidate:
        """Ready to run and warmed up by one call."""
        if way.startswith("AOTInductor"):
            path, seconds = self._package(_ONCE.get(way, way))
            run = torch._inductor.aoti_load_package(str(path))
            run(*self.inputs)
            return Candidate(way, run, seconds, path.stat().st_size)
        began = time.perf_counter()
        extra = self.program.extra.get(way)
        # A compiled function compiles in its first call; a frozen one, and a program for a runtime, as it is made.
        with attn_pass.record() as report:
            made = _CALLABLES[way](self) if extra is None else extra(self.module, self.inputs, self.folder)
            run = self.program.call(made, self.module)
            run(*self.inputs)
        first, began = time.perf_counter() - began, time.perf_counter()
        run(*self.inputs)
        if report.sites:
            self.reports[way] = report
        seconds = 0.0 if way == EAGER else max(0.0, first - (time.perf_counter() - began))
        return Candidate(way, run, seconds, None, getattr(made, "took", None))

    def by_hand(self) -> nn.Module:
        assert self.program.by_hand is not None
        return self.program.by_hand(self.device)

    def _package(self, way: str) -> tuple[Path, float]:
        if way not in self.packages:
            began = time.perf_counter()
            path = self.folder / f"{_FILES[way]}.pt2"
            with attn_pass.record() as report:
                module = self.by_hand() if way == PACKAGE_HAND else self.module
                with torch._inductor.config.patch(freezing=way in PACKAGED_FROZEN), torch.no_grad():
                    package(way, module, self.inputs, self.program.dynamic_shapes, path)
            if way in (PACKAGE_PASS, PACKAGE_PASS_FROZEN):
                self.reports[way] = report
            self.packages[way] = path, time.perf_counter() - began
        return self.packages[way]


_CALLABLES: Mapping[str, Callable[[Workshop], Callable[..., Any]]] = {
    EAGER: lambda shop: shop.module,
    STOCK: lambda shop: compiled(shop.module),
    STOCK_AGAIN: lambda shop: compiled(shop.module),
    PASS: lambda shop: compiled(shop.module, backend=attn_pass.backend),
    **{way: lambda shop: frozen(compiled(shop.module), shop.inputs) for way in (STOCK_FROZEN, STOCK_FROZEN_AGAIN)},
    PASS_FROZEN: lambda shop: frozen(compiled(shop.module, backend=attn_pass.backend), shop.inputs),
    HAND: lambda shop: compiled(shop.by_hand()),
}
_ONCE = {again: way for way, again in AGAIN.items()}
_FILES = {
    PACKAGE: "stock",
    DECOMPOSED: "decomposed",
    PACKAGE_PASS: "attn_pass",
    PACKAGE_HAND: "by_hand",
    PACKAGE_FROZEN: "stock_frozen",
    PACKAGE_PASS_FROZEN: "attn_pass_frozen",
}


def frozen(run: Callable[..., Any], inputs: Tensors) -> Callable[..., Any]:
    """Compiled with ``freezing``. As an option of one compile it does nothing: Dynamo asks for it too (torch 2.13)."""
    with torch._inductor.config.patch(freezing=True), torch.no_grad():
        run(*inputs)
    return run


def package(way: str, module: nn.Module, inputs: Tensors, shapes: Any, path: Path) -> None:
    """Exports the module and compiles it into a package at `path`, one of the ways of AOTInductor."""
    if way in (PACKAGE_PASS, PACKAGE_PASS_FROZEN):
        attn_pass.aot_compile(module, inputs, dynamic_shapes=shapes, package_path=path)
        return
    program = torch.export.export(module, inputs, dynamic_shapes=shapes)
    if way == DECOMPOSED:
        program = program.run_decompositions()
    torch._inductor.aoti_compile_and_package(program, package_path=str(path))
