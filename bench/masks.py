"""Structured masks and score functions, the pass against stock Inductor: `python -m bench.masks [--json FILE]`.

Each form is written as users write it by hand. One interleaved run a form, stock twice (the A/A column is the noise).
`--memory` measures the peak memory of one call in a process of its own instead.
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console

import attn_pass
from bench.forms import Form, Tensors, compiled, measure_all, save

NEG_INF = float("-inf")
LENGTH = 2048


def _qkv(q_len: int = LENGTH, kv_len: int = LENGTH, heads: int = 8) -> Tensors:
    return torch.randn(1, heads, q_len, 64), torch.randn(1, heads, kv_len, 64), torch.randn(1, heads, kv_len, 64)


def _scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))


def _where(scores: torch.Tensor, keep: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(scores.masked_fill(~keep, NEG_INF), -1) @ v


def _positions(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(scores.size(-2))[:, None], torch.arange(scores.size(-1))[None, :]


def softcap_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = 30.0 * torch.tanh(_scores(q, k) / 30.0)
    i, j = _positions(scores)
    return _where(scores, j <= i, v)


def window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = _scores(q, k)
    i, j = _positions(scores)
    return _where(scores, (j <= i) & (i - j < 256), v)


def dense_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    mask = torch.full((q.size(-2), k.size(-2)), torch.finfo(torch.float32).min).triu(1)[None, None]
    return torch.softmax(_scores(q, k) + mask, -1, dtype=torch.float32).to(q.dtype) @ v


def llama(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As transformers writes it: scaled by a multiplication, the mask of lowest numbers added."""
    mask = torch.full((q.size(-2), k.size(-2)), torch.finfo(torch.float32).min)
    mask = mask * (torch.arange(k.size(-2)) > torch.arange(q.size(-2)).reshape(-1, 1))
    weights = torch.matmul(q, k.transpose(2, 3)) * 0.125 + mask[None, None].expand(q.size(0), 1, -1, -1)
    weights = torch.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    weights = F.dropout(weights, p=0.0, training=False)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


def alibi(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    slopes = 2.0 ** -torch.arange(1, q.size(1) + 1, dtype=q.dtype)
    scores = _scores(q, k)
    i, j = _positions(scores)
    return _where(scores + slopes[:, None, None] * (j - i), j <= i, v)


def prefix(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = _scores(q, k)
    i, j = _positions(scores)
    return _where(scores, (j <= i) | (j < 512), v)


def document(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    scores = _scores(q, k)
    i, j = _positions(scores)
    return _where(scores, (ids[:, None, :, None] == ids[:, None, None, :]) & (j <= i), v)


def t5(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-1, -2)
    i, j = _positions(scores)
    distance = j - i
    bucket = (distance > 0).long() * 16
    distance = distance.abs()
    large = 8 + (torch.log(distance.float().clamp(min=1) / 8) / math.log(128 / 8) * 8).long()
    bucket = bucket + torch.where(distance < 8, distance, large.clamp(max=15))
    return torch.softmax(scores + F.embedding(bucket, table).permute(2, 0, 1)[None], -1) @ v


def bottom_right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = _scores(q, k)
    i, j = _positions(scores)
    return _where(scores, j <= i + k.size(-2) - q.size(-2), v)


def _documents() -> Tensors:
    return (*_qkv(), torch.arange(LENGTH)[None] // 300)


FORMS: tuple[Form, ...] = (
    Form("soft cap and causal (1, 8, 2048, 64)", softcap_causal, _qkv),
    Form("sliding window 256 (1, 8, 2048, 64)", window, _qkv),
    Form("dense causal, finfo.min (1, 8, 2048, 64)", dense_causal, _qkv),
    Form("causal as in transformers, finfo.min (1, 8, 2048, 64)", llama, _qkv),
    Form("ALiBi, causal (1, 8, 2048, 64)", alibi, _qkv),
    Form("prefix of 512 (1, 8, 2048, 64)", prefix, _qkv),
    Form("documents, causal (1, 8, 2048, 64)", document, _documents),
    Form("T5 bias (1, 8, 2048, 64)", t5, lambda: (*_qkv(), torch.randn(32, 8))),
    Form("bottom-right causal (1, 8, 64 x 2112, 64)", bottom_right, lambda: _qkv(64, 2112)),
)


def _peak(form: Form, how: str, length: int) -> None:
    """Prints the peak resident megabytes of this process after one call."""
    torch.set_num_threads(2)
    run: Callable[..., Any] = form.run
    inputs = _qkv(length, length, 12)
    if how == "stock":
        run = compiled(form)
    elif how == "attn_pass":
        run = compiled(form, backend=attn_pass.backend)
    with torch.no_grad():
        run(*inputs)
    print(json.dumps({"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))


def memory(length: int = 4096) -> list[dict[str, Any]]:
    """What one call of hand-written causal attention, 12 heads, adds to the peak of a process.

    Each in a process of its own, less the peak of one that compiles and calls the same for 16 positions.
    """
    rows = []
    number = [form.run for form in FORMS].index(llama)
    for how in ("eager", "stock", "attn_pass"):
        peaks = []
        for positions in (16, length):
            code = f"from bench import masks; masks._peak(masks.FORMS[{number}], {how!r}, {positions})"
            out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
            peaks.append(json.loads(out.splitlines()[-1])["peak_mb"])
        rows.append({"how": how, "peak_mb": peaks[1], "small_mb": peaks[0], "added_mb": peaks[1] - peaks[0]})
    return rows


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write FILE and FILE with .md.")] = None,
    rounds: int = 15,
    only: str = "",
    peak: Annotated[bool, typer.Option("--memory", help="Measure peak memory only.")] = False,
) -> None:
    """Measures every form and prints the table."""
    console = Console(width=160)
    if peak:
        console.print(memory())
        return
    rows = measure_all(FORMS, rounds, only, console)
    if json_file is not None:
        save(json_file, "Masks and score functions on the CPU", rows, rounds)


if __name__ == "__main__":
    typer.run(main)
