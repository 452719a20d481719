"""Programs with dropout whose sites the CPU kernel takes: it draws other numbers than eager.

So they are compared twice. Once each call that was made, with what its seed drops, against float64: that is the kernel.
And once program against program, with the same dropped in both, chosen by the key alone (`SameKeys`): that is the
rewrite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import fuzz_paths  # noqa: F401
import torch
import torch.nn.functional as F
from kernel_reference import reference
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attn_pass.devices.cpu.kernel.gradients import FORWARD, NAMES

_DIFFERENTIABLE = ("query", "key", "value", "bias", "sink")
_PERIOD = 5  # two of so many keys are dropped


class SameKeys(TorchFunctionMode):
    """Dropout drops keys, the same for all rows, heads and sequences, in eager's functions and in the kernel's calls.

    A weight that is dropped, and then times its value, is the weight times a value that is dropped. ``first`` is how
    many keys lie before those that the kernel is given: where a mask keeps a range of keys it may get these alone.
    ``axis`` is that of the keys in the weights that eager drops some of.
    """

    def __init__(self, first: int = 0, axis: int = -1) -> None:
        super().__init__()
        self.first, self.axis = first, axis
        self.most, self.fewest = 0, 1 << 30  # keys of a row in eager, and of a call

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention and kwargs.get("dropout_p"):
            query, key, value, *rest = args
            self.most = max(self.most, value.shape[-2])
            value = value * _left(value.shape[-2], kwargs.pop("dropout_p"), value).unsqueeze(-1)
            return func(query, key, value, *rest, **kwargs)
        if func is FORWARD:
            given = dict(zip(NAMES, args, strict=False)) | kwargs
            if probability := given.get("dropout"):
                value = given["value"]
                self.fewest = min(self.fewest, value.shape[-2])
                given["value"] = value * _left(value.shape[-2], probability, value, self.first).unsqueeze(-1)
                return func(**{name: x for name, x in given.items() if name not in ("dropout", "seed")})
        return func(*args, **kwargs)

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        assert not inplace
        if not training or not p:
            return x
        keys = x.shape[self.axis]
        self.most = max(self.most, keys)
        left = _left(keys, p, x)
        return x * (left if self.axis == -1 else left[:, None])


def _left(keys: int, probability: float, like: Tensor, first: int = 0) -> Tensor:
    """What each key's weights are multiplied by."""
    left = (torch.arange(first, first + keys) * 3 % _PERIOD > 1).to(like.dtype)
    return left / (1 - probability)


@dataclass
class Calls(TorchFunctionMode):
    """Keeps the kernel's calls with dropout."""

    made: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is FORWARD:
            given = dict(zip(NAMES, args, strict=False)) | (kwargs or {})
            if given.get("dropout"):
                self.made.append({name: _detached(x) for name, x in given.items() if x is not None})
        return func(*args, **(kwargs or {}))


def _detached(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return [_detached(entry) for entry in x]
    return x.detach().clone() if isinstance(x, Tensor) else x


Compare = Callable[[Tensor, Tensor, Tensor], str]


def faults_of_call(given: dict[str, Any], with_gradients: bool, compare: Compare) -> list[str]:
    """What is wrong of a call's result and gradients; ``compare`` takes ours, eager's and float64's."""
    ours, eager, exact = (
        _step(call, given, with_gradients, dtype)
        for call, dtype in (
            (FORWARD, None),
            (partial(reference, to=given["query"].dtype), None),
            (reference, torch.float64),
        )
    )
    faults = [f"the {name} of a call: {compare(x, eager[name], exact[name])}" for name, x in ours.items()]
    return [fault for fault in faults if not fault.endswith(": ")]


def _step(
    call: Callable[..., Any], given: dict[str, Any], with_gradients: bool, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """The result of a call and the gradients of its operands, by name."""
    leaves = {name: given[name] for name in _DIFFERENTIABLE if name in given}
    leaves = {name: x.to(dtype or x.dtype).requires_grad_(with_gradients) for name, x in leaves.items()}
    out = call(**{**given, **leaves})[0]
    results = {"result": out.detach()}
    if with_gradients:
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(7))
        found = torch.autograd.grad(out, list(leaves.values()), upstream.to(given["query"].dtype).to(out.dtype))
        results |= dict(zip((f"gradient of {name}" for name in leaves), found, strict=True))
    return results
