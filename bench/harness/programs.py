"""`Program`: a model to measure as its users write it, and what is needed to judge the numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

Tensors = tuple[torch.Tensor, ...]
Built = tuple[nn.Module, Tensors]
Extra = Callable[[nn.Module, Tensors, Path], Callable[..., Any]]


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
    answer in float64 where running the module on doubles would not; `dtype` is that of the products where the first
    input has another. `extra` are ways of its own, by name: given the module, the inputs and a folder, each makes
    something to call.
    """

    name: str
    make: Callable[[str], Built]
    by_hand: Callable[[str], nn.Module] | None = None
    hand: str = ""
    dynamic_shapes: Any = None
    kept: float = 1.0
    others: Sequence[Callable[[str], Tensors]] = ()
    reference: Callable[..., torch.Tensor] | None = None
    tolerance: float = 1e-5
    dtype: torch.dtype | None = None
    reported: str = ""
    extra: Mapping[str, Extra] = field(default_factory=dict)

    def exact(self, device: str, inputs: Tensors) -> torch.Tensor:
        """The answer in float64."""
        if self.reference is not None:
            return self.reference(*inputs)
        module, _ = self.make(device)
        found: torch.Tensor = module.double()(*(x.double() if x.is_floating_point() else x for x in inputs))
        return found


@dataclass(frozen=True)
class Setting:
    """Where and how long a bench measures. `quick` cuts sizes and ways, never the checks; `folder` holds cases."""

    device: str = "cpu"
    threads: int = 2
    rounds: int = 15
    block_s: float = 0.02
    quick: bool = False
    folder: str = ""

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
