"""What is measured: a model with its inputs, as one call that may go backward, and the same in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from attn_pass.entries.mistakes import hint, warn_swallowed
from attn_pass.entries.uncompiled import own_compile_off, uncompiled
from attn_pass.errors import CaptureError, in_one_line

Call = Callable[..., Any]

NOT_REPEATABLE = "draws random numbers (.eval() turns dropout off), or keeps state between calls"


@dataclass(frozen=True)
class Subject:
    """A model or function and its inputs.

    Attributes:
        model: what is called with ``args`` and ``kwargs``.
        trains: each call goes backward, too, from the outputs to the parameters and inputs that need gradients.
    """

    model: Call
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    trains: bool

    @property
    def name(self) -> str:
        """The class of a module, the name of a function."""
        if isinstance(self.model, torch.nn.Module):
            return type(self.model).__name__
        return str(getattr(self.model, "__name__", type(self.model).__name__))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The input tensors, and one parameter of a model without any."""
        inputs = tensors_of((self.args, dict(self.kwargs)))
        return tuple(inputs) or tuple(self.parameters[:1]) or (torch.zeros(()),)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Those of the module, and the inputs that need gradients."""
        own = list(self.model.parameters()) if isinstance(self.model, torch.nn.Module) else []
        tensors = tensors_of((self.args, dict(self.kwargs)))
        return [t for t in (*own, *tensors) if t.requires_grad]

    def step(self, function: Call) -> Call:
        """The measured call of a compiled form: its outputs, after a backward where the subject trains."""

        def forward(*_: Any) -> Any:
            return function(*self.args, **self.kwargs)

        def backward(*_: Any) -> Any:
            for parameter in self.parameters:
                parameter.grad = None
            outputs = function(*self.args, **self.kwargs)
            _backward(outputs)
            return outputs

        return backward if self.trains else forward

    def results(self, function: Call, seed: int = 0) -> list[torch.Tensor]:
        """Outputs and gradients of one call, copied; random numbers are drawn with the seed."""
        torch.manual_seed(seed)
        outputs = [t.detach().clone() for t in tensors_of(self.step(function)())]
        if not self.trains:
            return outputs
        gradients = [p.grad for p in self.parameters]
        return outputs + [g.detach().clone() for g in gradients if g is not None]

    def in_float64(self) -> Subject | None:
        """A copy whose parameters, buffers and inputs are float64; None if it cannot be copied."""
        try:
            model = copy.deepcopy(self.model).double() if isinstance(self.model, torch.nn.Module) else self.model
            args, kwargs = pytree.tree_map_only(torch.Tensor, _widened, (self.args, dict(self.kwargs)))
        except Exception:
            return None
        return Subject(model, args, kwargs, self.trains)

    def in_float64_results(self) -> list[torch.Tensor] | None:
        """Results in float64; None where the model does not run so, or names narrower types itself."""
        wide = self.in_float64()
        if wide is None:
            return None
        try:
            results = wide.results(wide.model)
        except Exception:
            return None
        return results if all(t.dtype == torch.float64 or not t.is_floating_point() for t in results) else None


def subject_of(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], trains: bool | None, entry: str
) -> Subject:
    """The subject, after a call that shows that it runs; of a model that is compiled already, what was compiled.

    ``trains`` is by default whether gradients are on and something needs them, and a module is in training mode.

    Raises:
        CaptureError: the model cannot be called, or fails on these inputs.
    """
    model = uncompiled(model) if callable(model) else model
    if not callable(model):
        kind = type(model).__name__
        raise CaptureError(f"{entry} takes a module or a function, got {kind}; call {entry}(model, *inputs)")
    subject = Subject(model, args, kwargs, False)
    if trains is None:
        trains = torch.is_grad_enabled() and bool(subject.parameters) and getattr(model, "training", True)
    subject = Subject(model, args, kwargs, trains)
    try:
        with own_compile_off(model):
            subject.step(model)()
    except Exception as error:
        raise CaptureError(
            f"{subject.name} does not run eagerly with these inputs: {in_one_line(error)}{hint(entry, args, kwargs)}\n"
            f"{entry} takes them as the model does, {entry}(model, *args, **kwargs)"
        ) from error
    warn_swallowed(entry, model, kwargs)
    return subject


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Every tensor of a nested value, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _backward(outputs: Any) -> None:
    reached: Sequence[torch.Tensor] = [t for t in tensors_of(outputs) if t.requires_grad and t.is_floating_point()]
    torch.autograd.backward(reached, [torch.ones_like(t) for t in reached])


def _widened(x: torch.Tensor) -> torch.Tensor:
    if not x.is_floating_point():
        return x
    return x.detach().double().requires_grad_(x.requires_grad)
