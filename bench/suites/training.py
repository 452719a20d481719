"""Training steps, the pass against stock: `python -m bench training [--json FILE] [--only NAME]`.

A step is a forward and a backward with gradients of every input that wants one. Beside what the pass does by itself,
the form it has for training is taken wherever there is one (``choose="fused"``). Where a form draws dropout, no error
can be told: each variant draws numbers of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import attn_pass
from attn_pass.measuring.timing import compiled
from attn_pass.model.dtype_name import dtype_name
from bench.harness.programs import Built, Function, Program, Setting, Tensors
from bench.suites.masks import relative_bias
from bench.suites.spellings import by_hand, call, causal

TITLE = "Training steps"
FUSED = "compile, attn_pass, fused"
LOWEST = torch.finfo(torch.float32).min


class WithTable(nn.Module):
    """An attention beside T5's bias, whose table (32, H) is trained."""

    def __init__(self, run: Callable[..., Tensor], heads: int) -> None:
        super().__init__()
        self.run, self.table = run, nn.Parameter(torch.randn(32, heads))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        return self.run(q, k, v, relative_bias(q.size(-2), k.size(-2), self.table), *rest)


@dataclass(frozen=True)
class Form:
    """A program, the shape (B, H, L, D) of its operands, and what else it takes."""

    name: str
    run: Callable[..., Tensor]  # or, with `table`, of the bias that one makes and what else there is
    shape: tuple[int, int, int, int] = (4, 8, 512, 64)
    rest: Callable[[tuple[int, int, int, int]], Tensors] = lambda shape: ()
    dtype: torch.dtype = torch.float32
    draws: bool = False
    table: bool = False

    def make(self, device: str) -> Built:
        """Operands that want gradients, and the rest."""
        torch.manual_seed(0)
        inputs = (*(torch.randn(self.shape, requires_grad=True) for _ in range(3)), *self.rest(self.shape))
        lowest = torch.finfo(self.dtype).min
        made = (
            x.to(device) if x.dtype == torch.bool else x.detach().clamp(lowest).to(device, self.dtype) for x in inputs
        )
        module = WithTable(self.run, self.shape[1]).to(device, self.dtype) if self.table else Function(self.run)
        return module, tuple(x.requires_grad_(of.requires_grad) for x, of in zip(made, inputs))

    @property
    def title(self) -> str:
        """With shape and dtype."""
        dtype = "" if self.dtype == torch.float32 else f", {dtype_name(self.dtype)}"
        return f"{self.name}, {'x'.join(map(str, self.shape))}{dtype}"


def padding(shape: tuple[int, int, int, int]) -> Tensors:
    """An additive mask that cuts a quarter of the last sequence, and all of none."""
    mask = torch.zeros(shape[0], 1, 1, shape[2])
    mask[-1, ..., -shape[2] // 4 :] = LOWEST
    return (mask,)


def learned(shape: tuple[int, int, int, int]) -> Tensors:
    """A bias of every head that wants a gradient."""
    return (torch.randn(1, shape[1], shape[2], shape[2], requires_grad=True),)


def keeping(shape: tuple[int, int, int, int]) -> Tensors:
    """The same mask as a boolean one, true where a key is kept."""
    return (padding(shape)[0] == 0,)


def encoder(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, keep: Tensor) -> Tensor:
    """T5's, which adds bias and mask first."""
    mask = torch.where(keep, 0.0, max(torch.finfo(q.dtype).min, LOWEST)).to(q.dtype)
    return torch.softmax(q @ k.transpose(-1, -2) * q.size(-1) ** -0.5 + (bias + mask), -1) @ v


def decoder(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """The same where every row keeps the keys up to its own."""
    keep = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).tril()
    return encoder(q, k, v, bias, keep)


def filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal, masked with the lowest number of the dtype."""
    return causal(q, k, v, fill=torch.finfo(q.dtype).min)


def soft_capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Gemma's scores, causal."""
    keep = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).tril()
    scores = 50.0 * torch.tanh(q @ k.transpose(-1, -2) * q.size(-1) ** -0.5 / 50.0)
    return torch.softmax(scores.masked_fill(~keep, torch.finfo(q.dtype).min), -1) @ v


def dropped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """BERT as it is trained."""
    weights = torch.softmax(q @ k.transpose(-1, -2) * q.size(-1) ** -0.5 + mask, -1)
    return torch.nn.functional.dropout(weights, 0.1) @ v


LONG = (1, 8, 2048, 64)
FORMS = (
    Form("by hand", by_hand),
    Form("causal by hand", filled),
    Form("causal by hand, long", filled, LONG),
    Form("causal, soft cap (Gemma)", soft_capped, LONG),
    Form("call", call),
    Form("padded (BERT)", by_hand, rest=padding),
    Form("padded, long", by_hand, LONG, padding),
    Form("padded, dropout 0.1 (BERT)", dropped, rest=padding, draws=True),
    Form("padded, dropout 0.1, long", dropped, LONG, padding, draws=True),
    Form("learned bias", by_hand, rest=learned),
    Form("learned bias, long", by_hand, LONG, learned),
    Form("T5 encoder, padded", encoder, rest=keeping, table=True),
    Form("T5 encoder, padded, long", encoder, LONG, keeping, table=True),
    Form("T5 decoder, long", decoder, LONG, table=True),
    Form("learned bias of windows (Swin)", by_hand, (64, 4, 49, 32), learned),
)
IN_BFLOAT16 = (
    *("by hand", "causal by hand, long", "causal, soft cap (Gemma)", "padded, dropout 0.1 (BERT)"),
    *("learned bias, long", "T5 encoder, padded, long", "T5 decoder, long"),
)
FORMS += tuple(replace(form, dtype=torch.bfloat16) for form in FORMS if form.name in IN_BFLOAT16)


def _fused(module: nn.Module, inputs: Tensors, folder: Path) -> Callable[..., Tensor]:
    return compiled(module, backend=attn_pass.backend, options={"choose": "fused"})


def programs(setting: Setting) -> list[Program]:
    """Every form; the first in quick runs."""
    return [
        Program(
            form.title,
            partial(Form.make, form),
            trains=True,
            draws=form.draws,
            # Each number of a table is a sum over millions of scores: eager's own error is 4e-5.
            tolerance=None if form.dtype != torch.float32 else 1e-4 if form.table else 1e-5,
            extra={FUSED: _fused},
        )
        for form in (FORMS[:1] if setting.quick else FORMS)
    ]
