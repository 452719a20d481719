"""Common forms at common sizes, the pass against stock Inductor: `python -m bench.forms [--json FILE] [--rounds N]`.

One interleaved run a form: stock twice (the A/A column is the noise), the pass, eager. What the pass chose is in the
last column; "left" means stock's code runs, so that its ratio is noise too.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table

import attn_pass
from bench.machine import command, device_name, in_turns, percentile_10, relative_error, versions

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Form:
    """A program and its inputs."""

    name: str
    run: Callable[..., torch.Tensor]
    inputs: Callable[[], Tensors]


def _r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def _qkv(batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int, dim: int) -> Tensors:
    return _r(batch, heads, q_len, dim), _r(batch, kv_heads, kv_len, dim), _r(batch, kv_heads, kv_len, dim)


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.size(-1)), -1) @ v


def with_bias(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * q.size(-1) ** -0.5 + bias, -1) @ v


def causal_by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    keep = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril()
    return torch.softmax((q @ k.transpose(-1, -2) / 8.0).masked_fill(~keep, float("-inf")), -1) @ v


def repeated_kv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    groups = q.size(1) // k.size(1)
    k, v = (
        t[:, :, None].expand(-1, -1, groups, -1, -1).reshape(q.size(0), q.size(1), t.size(2), t.size(3)) for t in (k, v)
    )
    return torch.softmax(q @ k.transpose(-1, -2) / 8.0, -1) @ v


def grouped_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def heads_last(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()


FORMS: tuple[Form, ...] = (
    Form("by hand (1, 8, 1024, 64)", by_hand, lambda: _qkv(1, 8, 8, 1024, 1024, 64)),
    Form("by hand, tiny (2, 4, 16, 16)", by_hand, lambda: _qkv(2, 4, 4, 16, 16, 16)),
    Form("by hand, ViT (8, 12, 197, 64)", by_hand, lambda: _qkv(8, 12, 12, 197, 197, 64)),
    Form("by hand, cross (2, 8, 1024 x 77, 40)", by_hand, lambda: _qkv(2, 8, 8, 1024, 77, 40)),
    Form("by hand, decode (4, 8, 1 x 2048, 64)", by_hand, lambda: _qkv(4, 8, 8, 1, 2048, 64)),
    Form("by hand, padding mask (4, 8, 256, 64)", with_bias, lambda: (*_qkv(4, 8, 8, 256, 256, 64), _r(4, 1, 1, 256))),
    Form("by hand, bias (4, 8, 256, 64)", with_bias, lambda: (*_qkv(4, 8, 8, 256, 256, 64), _r(1, 8, 256, 256))),
    Form("by hand, causal (1, 8, 1024, 64)", causal_by_hand, lambda: _qkv(1, 8, 8, 1024, 1024, 64)),
    Form("by hand, repeated K/V (1, 32/8, 512, 64)", repeated_kv, lambda: _qkv(1, 32, 8, 512, 512, 64)),
    Form("by hand, repeated K/V, decode (4, 32/8, 1 x 4096, 64)", repeated_kv, lambda: _qkv(4, 32, 8, 1, 4096, 64)),
    Form(
        "by hand, repeated K/V, decode, bfloat16 (4, 32/8, 1 x 4096, 64)",
        repeated_kv,
        lambda: tuple(t.bfloat16() for t in _qkv(4, 32, 8, 1, 4096, 64)),
    ),
    Form("call (2, 8, 512, 64)", call, lambda: _qkv(2, 8, 8, 512, 512, 64)),
    Form("call, rank 3 (16, 256, 64)", call, lambda: (_r(16, 256, 64), _r(16, 256, 64), _r(16, 256, 64))),
    Form("call, value dim 128 (2, 8, 256, 64)", call, lambda: (*_qkv(2, 8, 8, 256, 256, 64)[:2], _r(2, 8, 256, 128))),
    Form("call, decode (2, 8, 1 x 2048, 64)", call, lambda: _qkv(2, 8, 8, 1, 2048, 64)),
    Form("call, grouped (2, 8/2, 256, 64)", grouped_call, lambda: _qkv(2, 8, 2, 256, 256, 64)),
    Form("call, grouped decode (2, 32/4, 1 x 2048, 64)", grouped_call, lambda: _qkv(2, 32, 4, 1, 2048, 64)),
    Form(
        "call, shared K/V (1000, 4, 1 x 2048, 32)",
        call,
        lambda: (_r(1000, 4, 1, 32), _r(1, 4, 2048, 32), _r(1, 4, 2048, 32)),
    ),
    Form(
        "call, heads last with copies (4, 256, 8, 64)", heads_last, lambda: tuple(_r(4, 256, 8, 64) for _ in range(3))
    ),
)


def compiled(form: Form, **settings: Any) -> Callable[..., torch.Tensor]:
    """A compiled copy of the form, so that none shares code with another."""

    def copy(*args: torch.Tensor) -> torch.Tensor:
        return form.run(*args)

    copy.__code__ = copy.__code__.replace()
    return torch.compile(copy, dynamic=False, **settings)


def measure(form: Form, rounds: int) -> dict[str, Any]:
    """Times one form; microseconds, median and 10th percentile."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    inputs = form.inputs()
    with torch.no_grad(), attn_pass.record() as report:
        want = form.run(*(t.double() if t.is_floating_point() else t for t in inputs))
        candidates = {
            "eager": form.run,
            "stock": compiled(form),
            "stock again": compiled(form),
            "attn_pass": compiled(form, backend=attn_pass.backend),
        }
        error = relative_error(candidates["attn_pass"](*inputs), want)
        samples = in_turns(candidates, inputs, rounds, seconds=0.02, least=3)
    median = {name: statistics.median(values) for name, values in samples.items()}
    site = report.sites[0]
    chose = (
        site.outcome
        if site.outcome == "left"
        else f"{site.target} {'(' + ', '.join(site.poor_cases) + ')' if site.poor_cases else ''}"
    )
    return {
        "form": form.name,
        "median_us": median,
        "p10_us": {n: percentile_10(v) for n, v in samples.items()},
        "stock_over_pass": median["stock"] / median["attn_pass"],
        "p10_stock_over_pass": percentile_10(samples["stock"]) / percentile_10(samples["attn_pass"]),
        "a_a": median["stock"] / median["stock again"],
        "eager_over_pass": median["eager"] / median["attn_pass"],
        "error": error,
        "chose": chose.strip(),
        "predicted_us": site.predicted_us,
    }


def markdown(rows: list[dict[str, Any]], rounds: int) -> str:
    """The table as committed in docs/results."""
    lines = [
        f"Device: {device_name('cpu')}; {', '.join(f'{n} {v}' for n, v in versions().items())}; {rounds} interleaved "
        f"rounds; `{command()}`. Error: largest against float64, relative. A/A: stock against itself.",
        "",
        "| form | stock us | pass us | stock / pass | of 10th percentiles | A/A | eager / pass | error | chose |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['form']} | {row['median_us']['stock']:.0f} | {row['median_us']['attn_pass']:.0f} | "
            f"{row['stock_over_pass']:.2f} | {row['p10_stock_over_pass']:.2f} | {row['a_a']:.2f} | "
            f"{row['eager_over_pass']:.2f} | {row['error']:.0e} | {row['chose']} |"
        )
    return "\n".join(lines) + "\n"


def measure_all(forms: tuple[Form, ...], rounds: int, only: str, console: Console) -> list[dict[str, Any]]:
    """Times the forms whose names hold ``only``, with two threads, and prints a line for each."""
    torch.set_num_threads(2)
    rows = []
    for form in forms:
        if only in form.name:
            row = measure(form, rounds)
            console.print(
                f"{form.name}: {row['stock_over_pass']:.2f} (A/A {row['a_a']:.2f}), {row['chose']}, "
                f"{row['error']:.0e}, {row['median_us']['attn_pass']:.0f} us"
            )
            rows.append(row)
    return rows


def save(json_file: Path, title: str, rows: list[dict[str, Any]], rounds: int) -> None:
    """Writes the rows to a file, and the table beside it."""
    json_file.write_text(json.dumps(rows, indent=1) + "\n")
    json_file.with_suffix(".md").write_text(f"# {title}\n\n" + markdown(rows, rounds))


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write FILE and FILE with .md.")] = None,
    rounds: int = 15,
    only: str = "",
) -> None:
    """Measures every form and prints the table."""
    console = Console(width=160)
    rows = measure_all(FORMS, rounds, only, console)
    table = Table("form", "stock us", "pass us", "stock / pass", "p10", "A/A", "eager / pass", "error", "chose")
    for line in markdown(rows, rounds).splitlines()[4:]:
        table.add_row(*(cell.strip() for cell in line.strip("|").split("|")))
    console.print(table)
    if json_file is not None:
        save(json_file, "Common forms on the CPU", rows, rounds)


if __name__ == "__main__":
    typer.run(main)
