"""Training steps, the pass against stock: `python -m bench training [--json FILE] [--only NAME]`.

A step is a forward and a backward with gradients of every input that wants one. Beside what the pass does by itself,
the form it has for training is taken wherever there is one (``choose="fused"``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import attn_pass
from attn_pass.measuring.timing import compiled
from bench.harness.programs import Built, Function, Program, Setting, Tensors
from bench.suites.spellings import by_hand, call, causal

TITLE = "Training steps"
FUSED = "compile, attn_pass, fused"
LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class Form:
    """A program, the shape (B, H, L, D) of its operands, and what else it takes."""

    name: str
    run: Callable[..., Tensor]
    shape: tuple[int, int, int, int] = (4, 8, 512, 64)
    rest: Callable[[tuple[int, int, int, int]], Tensors] = lambda shape: ()

    def make(self, device: str) -> Built:
        """Operands that want gradients, and the rest."""
        torch.manual_seed(0)
        inputs = (*(torch.randn(self.shape, requires_grad=True) for _ in range(3)), *self.rest(self.shape))
        return Function(self.run), tuple(x.detach().to(device).requires_grad_(x.requires_grad) for x in inputs)


def padding(shape: tuple[int, int, int, int]) -> Tensors:
    """An additive mask that cuts a quarter of the last sequence, and all of none."""
    mask = torch.zeros(shape[0], 1, 1, shape[2])
    mask[-1, ..., -shape[2] // 4 :] = LOWEST
    return (mask,)


def learned(shape: tuple[int, int, int, int]) -> Tensors:
    """A bias of every head that wants a gradient."""
    return (torch.randn(1, shape[1], shape[2], shape[2], requires_grad=True),)


def soft_capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Gemma's scores, causal."""
    keep = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).tril()
    scores = 50.0 * torch.tanh(q @ k.transpose(-1, -2) * q.size(-1) ** -0.5 / 50.0)
    return torch.softmax(scores.masked_fill(~keep, LOWEST), -1) @ v


LONG = (1, 8, 2048, 64)
FORMS = (
    Form("by hand", by_hand),
    Form("causal by hand", partial(causal, fill=LOWEST)),
    Form("causal by hand, long", partial(causal, fill=LOWEST), LONG),
    Form("causal, soft cap (Gemma)", soft_capped, LONG),
    Form("call", call),
    Form("padded (BERT)", by_hand, rest=padding),
    Form("padded, long", by_hand, LONG, padding),
    Form("learned bias (T5)", by_hand, rest=learned),
    Form("learned bias, long", by_hand, LONG, learned),
    Form("learned bias of windows (Swin)", by_hand, (64, 4, 49, 32), learned),
)


def _fused(module: nn.Module, inputs: Tensors, folder: Path) -> Callable[..., Tensor]:
    return compiled(module, backend=attn_pass.backend, options={"choose": "fused"})


def programs(setting: Setting) -> list[Program]:
    """Every form; the first in quick runs."""
    return [
        Program(
            f"{form.name}, {'x'.join(map(str, form.shape))}",
            partial(Form.make, form),
            trains=True,
            extra={FUSED: _fused},
        )
        for form in (FORMS[:1] if setting.quick else FORMS)
    ]
