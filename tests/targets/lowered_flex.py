"""Inductor's code for FlexAttention as the pass emits it for a GPU, every Triton template compiled, as JSON.

    python lowered_flex.py '{"CAPABILITY": ["PROGRAM", ...], ...}'

Processes of their own, see `faked_gpu`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from faked_gpu import GPUS, compiled, lowered_graphs, on_gpu
from flex_programs import CASES, LOWEST, masked, softcap, window
from forked import answer
from torch.nn.attention import flex_attention
from triton.runtime.cache import triton_key

import attn_pass
from attn_pass.targets import looking

Tensor = torch.Tensor
HALF = [x.to(torch.bfloat16) for x in CASES["window and soft cap"][1]]


def padded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, fill: float = float("-inf")) -> Tensor:
    return (q @ k.mT * 0.25).masked_fill(~mask, fill).softmax(-1) @ v


def filled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return padded(q, k, v, mask, LOWEST)


def padding(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


PROGRAMS: dict[str, tuple[Callable[..., Any], Sequence[Tensor], bool]] = {
    # A backward takes the compiler longest: those of a score function, captured tensors, groups and odd sizes.
    **{name: (*CASES[name], True) for name in ("window and soft cap", "documents", "grouped heads", "odd sizes")},
    **{name: (*CASES[name], False) for name in ("prefix", "alibi", "one query", "dense bias")},
    "half precision": (masked(window, cap=True), HALF, True),
    "few queries, half precision": (softcap, [HALF[0][:, :, :9], *HALF[1:]], False),
    # Lists that are made of the mask: of each batch entry, or of each head too; in the place of full blocks where a
    # number masks.
    "padding": (padded, [*CASES["window"][1], padding(2, 1, 1, 300)], True),
    "padding of rows and heads, half precision": (padded, [*HALF, padding(2, 2, 300, 300)], True),
    "padding, filled": (filled, [*CASES["window"][1], padding(2, 1, 1, 300)], False),
    "few queries, padding": (
        filled,
        [CASES["window"][1][0][:, :, :9], *CASES["window"][1][1:], padding(2, 1, 1, 300)],
        False,
    ),
}


def by_pass(capability: int) -> Callable[[Callable[..., Any]], Any]:
    options: dict[str, Any] = {"targets": ("flex",), "choose": "fused", "on_error": "raise"}
    return lambda inner: attn_pass.wrap(inner, device=GPUS[capability][0], **options)


def fakes(inputs: Sequence[Tensor], grad: bool) -> list[Tensor]:
    """Fake tensors like these; query, key and value may want gradients."""
    made = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in inputs]
    return [x.requires_grad_(grad and n < 3 and x.is_floating_point()) for n, x in enumerate(made)]


def options_on_gpu(*operands_and_options: Any) -> Any:
    """What torch gives the kernel beside its operands: it decides by their device."""
    return APPLY(*on_gpu(operands_and_options[:3]), *operands_and_options[3:])


APPLY = flex_attention._apply_kernel_options


def templates(capability: int, name: str) -> list[tuple[str, str]]:
    """The Triton templates of a program, the forward's first."""
    fn, inputs, grad = PROGRAMS[name]
    with (
        torch.set_grad_enabled(grad),
        mock.patch.object(flex_attention, "_apply_kernel_options", options_on_gpu),
        mock.patch.object(looking, "pays", lambda *_: True),
    ):
        graphs = lowered_graphs(capability, fn, lambda: fakes(inputs, grad), by_pass(capability))
    texts = [text for graph in graphs for text in graph.kernels.values()]
    return [text for text in texts if "@triton_heuristics.template" in text[1]]


def on(capability: str, programs: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """The templates of these programs, compiled for the GPU of that capability."""
    lowered: dict[str, list[dict[str, Any]]] = {}
    for name in programs or list(PROGRAMS):
        lowered[name] = []
        for function, text in templates(int(capability), name):
            facts = compiled(int(capability), function, text)
            # A backward reads what the forward wrote: without it, it would read memory that nobody did.
            writes = {"writes_lse": "OUTPUT_LOGSUMEXP : tl.constexpr = True" in text}
            lowered[name] += [{key: value for key, value in (f | writes).items() if key != "ptx"} for f in facts]
    return lowered


if __name__ == "__main__":
    triton_key()  # once for all of its children: it reads all of Triton
    answer(on)
