"""The time of `verify="graph"`: `python -m bench verify-time [--json FILE]`.

Seconds a site beside the same capture without it, at sizes of known models; nothing is compiled.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import attn_pass
from bench.harness.command import Json, started
from bench.harness.document import Column
from bench.suites.spellings import by_hand, causal, grouped_call

Tensor = torch.Tensor
COLUMNS = (
    Column("site", "site"),
    Column("s without", "without", ".2f"),
    Column("s with", "median", ".2f"),
    Column("s of verification", "extra", ".2f"),
    Column("error", "error", ".0e"),
    Column("said", "said"),
)


def padded(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return by_hand(q, k, v, (1.0 - keep[:, None, None].to(q.dtype)) * torch.finfo(q.dtype).min)


@dataclass(frozen=True)
class Site:
    """A program and the shapes of its operands."""

    name: str
    run: Callable[..., Tensor]
    query: tuple[int, ...]
    key: tuple[int, ...]
    grad: bool = False
    mask: tuple[int, ...] = ()

    def inputs(self) -> list[Tensor]:
        made = [torch.randn(*s).requires_grad_(self.grad) for s in (self.query, self.key, self.key)]
        return made + ([torch.ones(*self.mask, dtype=torch.int64)] if self.mask else [])


SITES = (
    Site("GPT-2, 1 x 12 x 1024 x 64, causal", causal, (1, 12, 1024, 64), (1, 12, 1024, 64)),
    Site("GPT-2, the same in training", causal, (1, 12, 512, 64), (1, 12, 512, 64), grad=True),
    Site("BERT, 4 x 12 x 384 x 64, padded", padded, (4, 12, 384, 64), (4, 12, 384, 64), mask=(4, 384)),
    Site("ViT, 8 x 12 x 197 x 64", by_hand, (8, 12, 197, 64), (8, 12, 197, 64)),
    Site("Llama, decoding 4 x 32/8 x 1 of 4096 x 64", grouped_call, (4, 32, 1, 64), (4, 8, 4096, 64)),
    Site("diffusion, 2 x 8 x 4096 x 40", by_hand, (2, 8, 4096, 40), (2, 8, 4096, 40)),
    Site("long, 1 x 16 x 16384 x 64, causal", causal, (1, 16, 16384, 64), (1, 16, 16384, 64)),
)


def _capture(site: Site, inputs: list[Tensor], verify: str) -> tuple[float, attn_pass.SiteReport]:
    """Seconds the pass takes for the site, and what it says; only the graph is traced, nothing computes."""
    torch._dynamo.reset()
    options: dict[str, Any] = {"verify": verify, "choose": "fused", "on_error": "raise"}
    seen: list[float] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        began = time.perf_counter()
        attn_pass.wrap(lambda graph, _: graph.forward, **options)(gm, example_inputs)
        seen.append(time.perf_counter() - began)
        return lambda *_: (inputs[0].new_zeros(()),)

    with attn_pass.record() as report, torch.set_grad_enabled(site.grad):
        torch.compile(site.run, backend=backend, dynamic=False)(*inputs)
    return seen[0], report.sites[0]


def main(json_file: Json = None) -> None:
    """Measure the time of `verify="graph"` per site, at sizes of known models."""
    recorder = started("What verification takes", json_file, threads=2)
    rows = recorder.table('verify="graph", a site', COLUMNS).rows
    for site in SITES:
        inputs = site.inputs()
        without, _ = _capture(site, inputs, "off")
        outcome, told = _capture(site, inputs, "graph")
        rows.append(
            {
                "site": site.name,
                "without": without,
                "median": outcome,
                "extra": outcome - without,
                "error": told.verified_error,
                "said": told.not_verified or f"{told.target}, verified",
                "status": "ok",
            }
        )
    recorder.finish()
