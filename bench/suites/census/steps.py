"""Training steps of the models that `speed.py` times: a forward, and the gradients of all parameters.

Float32, attention as the libraries write it by default, in training mode with every dropout at 0. The loss is the sum
of the mean squares of what the model returns. Gradients are compared with eager's, of which the largest counts as 1.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.suites.census.dataset import SEED, Census, Subject, same_tensors
from bench.suites.census.rows import Row
from bench.suites.census.sdpa import build_with_sdpa
from bench.suites.census.speed import enlarge, keep_calls_of_timm, timed_row

FACTS = {"bench": "speed", "stage": "float32, calls, a training step"}


def measure(census: Census, name: str) -> Iterator[Row]:
    """One row."""
    if name.startswith("hf/"):
        enlarge(importlib.import_module("zoo_hf"))
    build_with_sdpa()
    if name.startswith("timm/"):
        keep_calls_of_timm(census)
    yield timed_row(census, name, Trained.of, dropout=0.0)


class Trained(Subject):
    """A model in training mode; what it gives are the loss and its gradients."""

    unit = 1.0

    @classmethod
    def of(cls, subject: Subject) -> Trained:
        """The same model, which is no longer in eval mode."""
        subject.model.train()
        trained = cls(**{field.name: getattr(subject, field.name) for field in fields(subject)})
        first, second = map(partial(trained.run, trained.model), (SEED, SEED + 1))
        trained.deterministic = same_tensors(first, second)
        trained.unit = max((float(gradient.abs().max()) for gradient in first[1:]), default=1.0) or 1.0
        return trained

    def run(self, function: Callable[..., Any], seed: int = SEED) -> list[Tensor]:
        """The loss, and the gradients of the parameters that it depends on, in units of eager's largest."""
        torch.manual_seed(seed)
        loss, *gradients = self._step(function)
        return [loss, *(gradient / self.unit for gradient in gradients)]

    def call(self, function: Callable[..., Any]) -> Callable[[], Any]:
        """A whole step."""
        return partial(self._step, function)

    @torch.enable_grad()  # type: ignore[untyped-decorator]
    def _step(self, function: Callable[..., Any]) -> list[Tensor]:
        outputs = self.census.counting.tensors(function(*self.args, **self.kwargs))
        loss = torch.stack([out.square().mean() for out in outputs if out.requires_grad]).sum()
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        return [loss.detach(), *(gradient for gradient in gradients if gradient is not None)]
