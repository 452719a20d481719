"""`Program`: a model to measure, as its users write it, and the data needed to judge its numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

Tensors = tuple[torch.Tensor, ...]
Built = tuple[nn.Module, Tensors]
Extra = Callable[[nn.Module, Tensors, Path], Callable[..., Any]]


def doubled(inputs: Tensors, dtype: torch.dtype = torch.float64) -> Tensors:
    """The inputs in a wider dtype, as leaves that want a gradient where they did."""
    return tuple(x.detach().to(dtype).requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs)


def normal(seed: int, *shapes: tuple[int, ...]) -> Tensors:
    """Random numbers in these shapes, the same on every call."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.run(*tensors)


@dataclass(frozen=True)
class Program:
    """A model by name.

    `make(device)` returns the module and its inputs, the same numbers on every call. `by_hand` makes the best form a
    specialist writes, for the same inputs; `hand` says what it is. `kept` is the share of the scores that the masks
    keep, which is all a floor may count. `others` are more inputs the answers are checked on; `reference` computes the
    answer in float64 where running the module on doubles would not; without `float64`, which may take too long, it is
    computed in float32. `tolerance` is relative to the largest value; None: 3 times that of eager or stock, in half
    precision after many layers, or over many steps; in float32 at least 1e-5. `dtype` is that of the products where the
    first input has another. `trains`: a call is a forward and a backward, its answer the gradients of the inputs that
    want one. `extra` are variants of its own, by name: given the module, the inputs and a folder, each makes something
    to call. `without` are ways that it is not measured in: in one process with the others they need more memory than
    there is. `draws`: answers are random, and are compared with nothing. `facts` are said by all its rows.
    """

    name: str
    make: Callable[[str], Built]
    by_hand: Callable[[str], nn.Module] | None = None
    hand: str = ""
    dynamic_shapes: Any = None
    kept: float = 1.0
    others: Sequence[Callable[[str], Tensors]] = ()
    reference: Callable[..., torch.Tensor] | None = None
    tolerance: float | None = 1e-5
    dtype: torch.dtype | None = None
    reported: str = ""
    float64: bool = True
    trains: bool = False
    extra: Mapping[str, Extra] = field(default_factory=dict)
    without: Collection[str] = ()
    draws: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)

    def exact(self, device: str, inputs: Tensors) -> Any:
        """The answer in float64, or eager's."""
        if self.reference is not None:
            return self.reference(*inputs)
        module, _ = self.make(device)
        exact = torch.float64 if self.float64 else torch.float32
        module = module.to(exact)
        return self.call(module, module)(*doubled(inputs, exact))

    def call(self, run: Callable[..., Any], module: nn.Module | None = None) -> Callable[..., Any]:
        """What one call is: the program itself, or a training step of it; ``run`` was made of ``module``."""
        return step(run, [] if module is None else list(module.parameters())) if self.trains else run

    def answer(self, call: Callable[..., Any], inputs: Tensors) -> Any:
        """What is compared with `exact`: what a call returns."""
        return call(*inputs)


def of_function(
    name: str, function: Callable[..., Any], inputs: Callable[..., Tensors], by_hand: Any = None, **settings: Any
) -> Program:
    """The program of a function, and perhaps of the function that a specialist writes for the same inputs."""
    hand = None if by_hand is None else lambda device: Function(by_hand)
    return Program(name, lambda device: (Function(function), inputs(device=device)), hand, **settings)


def step(run: Callable[..., Any], parameters: Sequence[nn.Parameter]) -> Callable[..., Any]:
    """The gradients of the inputs that want one and of parameters, for one and the same gradient of the result."""
    seeds: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

    def stepped(*inputs: torch.Tensor) -> Tensors:
        with torch.enable_grad():
            out = run(*inputs)
        of = out.shape, out.dtype
        if of not in seeds:  # drawn once: a call is the step alone
            seeds[of] = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
        return torch.autograd.grad(out, [*(x for x in inputs if x.requires_grad), *parameters], seeds[of])

    return stepped


@dataclass(frozen=True)
class Setting:
    """Where and how long a bench measures. `quick` cuts sizes and ways, never the checks; `folder` holds cases.

    `layers` is how many a model has, where a suite lets that be chosen; 0: as many as it has.
    """

    device: str = "cpu"
    threads: int = 2
    rounds: int = 15
    block_s: float = 0.02
    quick: bool = False
    folder: str = ""
    layers: int = 0

    @property
    def on_cpu(self) -> bool:
        return not self.device.startswith("cuda")

    @property
    def tolerance(self) -> float:
        """The relative error allowed in float32, which a CPU computes, or in half precision."""
        return 1e-5 if self.on_cpu else 5e-3


def program_of(module: str, name: str, setting: Setting) -> Program:
    """The program of that name; a process of its own finds it so, because functions do not travel."""
    programs: Sequence[Program] = import_module(module).programs(setting)
    return next(program for program in programs if program.name == name)
