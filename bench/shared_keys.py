"""Seed S4's call and every way to compile it: many one-token queries against one shared K and V.

q is (1000, 4, 1, 32), k and v are (1, 4, 2048, 32), the batch of q is dynamic from 1 to 2048. Because k and v have to
be broadcast over the batch, no fused kernel takes the call as it stands; folding the batch into the query length is
the same function, and one they do take (pytorch/pytorch#151287).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

BATCH, HEADS, KV_LEN, HEAD_DIM = 1000, 4, 2048, 32
MAX_BATCH = 2048
# Where the answer is checked: the batch of the report, an odd one, and the smallest, which export may specialise on.
CHECKED_BATCHES = (BATCH, 7, 1)
# Largest error against float64 that counts as right, relative to the largest output.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
REPORTED = "reported with torch 2.5.1 for 1000 calls: FX graph 11.03 s, AOTInductor 11.29 s, decomposed 4.44 s"

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Runner = Callable[..., torch.Tensor]


class SharedKeys(nn.Module):
    """The call as users write it: q (B, H, 1, D), k and v (1, H, S, D); in bfloat16 autocast if `half`."""

    def __init__(self, device: str = "cpu", half: bool = False) -> None:
        super().__init__()
        self.device = device
        self.half_precision = half

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if not self.half_precision:
            return self.attend(q, k, v)
        with torch.autocast(self.device, dtype=torch.bfloat16):
            return self.attend(q, k, v)


class Folded(SharedKeys):
    """The same function as a specialist writes it: q folded to (1, H, B, D), attended once and unfolded."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query.permute(2, 1, 0, 3), key, value).permute(2, 1, 0, 3)


def make_inputs(batch: int = BATCH, device: str = "cpu") -> Inputs:
    """Random float32 q (batch, 4, 1, 32), k and v (1, 4, 2048, 32); the same batch gives the same numbers."""
    generator = torch.Generator().manual_seed(batch)
    shapes = ((batch, HEADS, 1, HEAD_DIM), (1, HEADS, KV_LEN, HEAD_DIM), (1, HEADS, KV_LEN, HEAD_DIM))
    q, k, v = (torch.randn(shape, generator=generator).to(device) for shape in shapes)
    return q, k, v


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The attention in float64, spelled out, a few queries at a time because the broadcast copies of k are large."""
    k64, v64 = k.double(), v.double()
    chunks = [((chunk.double() @ k64.mT) / math.sqrt(HEAD_DIM)).softmax(-1) @ v64 for chunk in q.split(50)]
    return torch.cat(chunks)


# ---- the ways to run it ----


@dataclass(frozen=True)
class Setting:
    """Where and how a run happens; `folder` holds the packages while it lasts."""

    folder: Path
    device: str = "cpu"
    half: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.half else torch.float32

    def module(self, kind: type[SharedKeys] = SharedKeys) -> SharedKeys:
        return kind(self.device, self.half).eval()


def dynamic_shapes() -> dict[str, Any]:
    return {"q": {0: torch.export.Dim("batch", min=1, max=MAX_BATCH)}, "k": None, "v": None}


def _export(setting: Setting, kind: type[SharedKeys] = SharedKeys) -> torch.export.ExportedProgram:
    return torch.export.export(
        setting.module(kind), make_inputs(device=setting.device), dynamic_shapes=dynamic_shapes()
    )


def package(program: torch.export.ExportedProgram, path: Path) -> Path:
    return Path(torch._inductor.aoti_compile_and_package(program, package_path=str(path)))


def _stock_package(setting: Setting) -> Path:
    return package(_export(setting), setting.folder / "stock.pt2")


def _decomposed_package(setting: Setting) -> Path:
    return package(_export(setting).run_decompositions(), setting.folder / "decomposed.pt2")


def _folded_package(setting: Setting) -> Path:
    return package(_export(setting, Folded), setting.folder / "folded.pt2")


def _pass_package(setting: Setting) -> Path:
    import attn_pass

    path = setting.folder / "attn_pass.pt2"
    attn_pass.aot_compile(
        setting.module(),
        make_inputs(device=setting.device),
        dynamic_shapes=dynamic_shapes(),
        package_path=str(path),
    )
    return path


def _eager(setting: Setting) -> Runner:
    return setting.module()


def _stock_compile(setting: Setting) -> Runner:
    return torch.compile(setting.module())


def _pass_compile(setting: Setting) -> Runner:
    import attn_pass

    return torch.compile(setting.module(), backend=attn_pass.backend)


@dataclass(frozen=True)
class Way:
    """A way to run it: `package` makes a .pt2 file, or else `callable` makes something that runs here."""

    name: str
    package: Callable[[Setting], Path] | None = None
    callable: Callable[[Setting], Runner] | None = None


EAGER = Way("eager", callable=_eager)
STOCK_COMPILE = Way("torch.compile, stock", callable=_stock_compile)
PASS_COMPILE = Way("torch.compile, attn_pass", callable=_pass_compile)
STOCK = Way("AOTInductor, stock", package=_stock_package)
# Built by nobody: it is the stock package, loaded and timed once more.
STOCK_AGAIN = Way("AOTInductor, stock (A/A)", package=_stock_package)
DECOMPOSED = Way("AOTInductor, decomposed", package=_decomposed_package)
PASS = Way("AOTInductor, attn_pass", package=_pass_package)
FOLDED = Way("AOTInductor, folded by hand", package=_folded_package)

PACKAGES: tuple[Way, ...] = (STOCK, STOCK_AGAIN, DECOMPOSED, PASS)
ALL: tuple[Way, ...] = (EAGER, STOCK_COMPILE, PASS_COMPILE, STOCK, STOCK_AGAIN, DECOMPOSED, PASS, FOLDED)
