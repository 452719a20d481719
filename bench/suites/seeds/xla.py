"""Seed S1 (pytorch/xla#9250): flash attention of PyTorch/XLA against JAX's, and how the difference was measured.

Reported for (1, 5, 16384, 128) in bfloat16: JAX 2.5 ms, torch_xla's flash_attention 3.0, call_jax 2.6, with the kernel
the same. The cause given: ``sync()`` and ``wait_device_ops()`` in every iteration, which time tracing and execution one
after the other, where a program that only calls ``sync()`` traces its next step while the device works. How the half
millisecond divides between that and the kernel is not known: torch_xla also takes other tiles and copies its operands.

Three parts, each a table, or a note of what it needs: `correctness` (JAX on the CPU), `overlap`
(torch_xla, on its CPU device or a TPU), `tiles` (libtpu, no TPU). `python -m bench xla` runs what is installed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from attn_pass.devices.tpu.kernels import Blocks, PallasCall, forward
from attn_pass.devices.tpu.rules import FLASH, GENERATIONS, Sizes, blocks_for
from bench.harness import environment
from bench.harness.console import plain_console, show_table
from bench.harness.document import Column, Document, Table, read
from bench.harness.process import Task, in_child
from bench.suites.seeds import tpu_aot

SHAPE = (1, 5, 16384, 128)
TITLE = "Seed S1: attention of PyTorch/XLA and of JAX"
REPORTED = " ".join(__doc__.split("\n\n")[1].removeprefix("Reported ").split()).rstrip(".")
REPORTED_MS: Mapping[str, float] = {"JAX": 2.5, "torch_xla flash_attention": 3.0, "call_jax": 2.6}
LIMIT_S = 900.0
REPORTED_TILES = Blocks(4096, 1024)


# ---------------------------------------------------------------- correctness


def correctness(shape: tuple[int, int, int, int] = (1, 5, 512, 128)) -> Table:
    """JAX's kernels, interpreted on the CPU, against float64: the largest error, at a length that takes seconds."""
    part = Table(f"the kernels interpreted, against float64, {shape}", ())
    if find_spec("jax") is None:
        part.notes = ["needs jax: make setup installs it"]
        return part
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax
    import numpy as np

    draw = np.random.default_rng(0)
    query, key, value = (draw.standard_normal(shape) for _ in range(3))
    scale = shape[-1] ** -0.5
    for name, kind, lower, upper in (
        ("flash", "flash", None, None),
        ("flash, causal", "flash", None, 0),
        ("splash, a window of 128", "splash", -127, 0),
    ):
        distance = torch.arange(shape[2]) - torch.arange(shape[2])[:, None]
        keep = (distance >= (-shape[2] if lower is None else lower)) & (
            distance <= (shape[2] if upper is None else upper)
        )
        for dtype in ("float32", "bfloat16"):
            given = [jax.numpy.asarray(x, dtype) for x in (query, key, value)]
            call = PallasCall(kind, scale, Blocks(256, 256), lower, upper, interpret=True)
            result = np.asarray(jax.jit(forward(call))(*given), np.float64)
            wide = [torch.tensor(np.asarray(x, np.float64)) for x in given]
            exact = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=keep, scale=scale)
            error = float(np.abs(result - exact.numpy()).max())
            part.rows.append({"kernel": name, "dtype": dtype, "largest_error": float(f"{error:.2g}")})
    return part


# ---------------------------------------------------------------- tracing and execution, overlapped or not


@dataclass(frozen=True)
class Timing:
    """How a step is measured."""

    steps: int = 20
    calls: int = 8  # attentions in a step, one after the other
    rounds: int = 12  # of which the fastest counts


CPU_SHAPES = ((1, 2, 64, 64), (1, 2, 256, 64), (1, 2, 512, 64))


def overlap(timing: Timing = Timing()) -> Table:
    """Milliseconds an attention takes in steps that are only synchronised, and that are also waited for.

    On a TPU with the reported shape and tiles, beside JAX itself. On torch_xla's CPU device with small ones, whose
    kernel is what XLA makes of ``jax.nn.dot_product_attention``: the figures say what waiting costs, nothing of TPUs.
    """
    part = Table("tracing and execution: overlapped, and waited for in every step", ())
    if find_spec("torch_xla") is None:
        part.notes = ["needs torch_xla: make test-xla installs it in .venv-xla"]
        return part
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    on_tpu = os.environ["PJRT_DEVICE"] == "TPU"
    if on_tpu:
        part.rows.append(_of_jax(SHAPE, timing))
    for shape in (SHAPE,) if on_tpu else CPU_SHAPES:
        part.rows += _of_torch_xla(shape, timing, on_tpu)
    part.notes.append(
        "Milliseconds an attention, of steps of several; tracing alone is in them once. Waited for in every step it is "
        "added to execution; otherwise the next step is traced meanwhile. Reported on a TPU, for (1, 5, 16384, 128): "
        "JAX 2.5 ms, torch_xla's flash_attention 3.0, call_jax 2.6."
    )
    if not on_tpu:
        part.notes[0] += (
            " These are of torch_xla's CPU device and other shapes, and say nothing of a TPU; other work on the "
            "machine moves them by tens of percent."
        )
    return part


def _of_torch_xla(shape: tuple[int, ...], timing: Timing, on_tpu: bool) -> list[dict[str, Any]]:
    import torch_xla
    from torch_xla.core import xla_model

    rows = []
    drawn = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if on_tpu else torch.float32
    given = [torch.randn(shape, generator=drawn).to(dtype).to("xla") for _ in range(3)]
    for name, attend in _ways(on_tpu).items():
        row: dict[str, Any] = {"attention": name, "shape": shape, "tracing_ms": _tracing(attend, given, timing)}

        def step(attend: Callable[..., Any] = attend) -> None:
            out = given[0]
            for _ in range(timing.calls):
                out = attend(out, *given[1:])
            torch_xla.sync()

        row |= _milliseconds(step, xla_model.wait_device_ops, timing)
        row["waiting_costs"] = f"{row['sync_and_wait_ms'] / row['sync_only_ms'] - 1:+.0%}"
        if name in REPORTED_MS and on_tpu:
            row["reported_ms"] = REPORTED_MS[name]
        rows.append(row)
    return rows


def _ways(on_tpu: bool) -> dict[str, Callable[..., Any]]:
    """Attentions by name, on XLA tensors."""
    scale = SHAPE[-1] ** -0.5
    if not on_tpu:
        from torch_xla.core import xla_builder

        return {
            "F.scaled_dot_product_attention": torch.nn.functional.scaled_dot_product_attention,
            "call_jax": lambda *given: xla_builder.call_jax(_jax_attention, given),
        }
    from torch_xla.experimental.custom_kernel import flash_attention

    from attn_pass.devices.tpu import torch_xla as adapter

    tiles = blocks_for(FLASH, "TPU v6e", Sizes(SHAPE[2], SHAPE[2], SHAPE[3], 2))
    assert tiles is not None
    ways: dict[str, Callable[..., Any]] = {
        "torch_xla flash_attention": lambda q, k, v: flash_attention(q, k, v, sm_scale=scale)
    }
    for name, blocks in (("call_jax", REPORTED_TILES), ("call_jax, the tiles of attn_pass", tiles)):
        call = PallasCall("flash", scale, blocks)
        ways[name] = lambda q, k, v, call=call: adapter.run(call, False, (q, k, v), None, None)
    return ways


def _jax_attention(query: Any, key: Any, value: Any) -> Any:
    import jax

    swapped = (x.swapaxes(1, 2) for x in (query, key, value))
    return jax.nn.dot_product_attention(*swapped).swapaxes(1, 2)


def _milliseconds(step: Callable[[], None], wait: Callable[[], None], timing: Timing) -> dict[str, float]:
    """Of one attention both ways, in turns, so that what else the machine does meets both; the fastest round counts."""
    for _ in range(3):
        step()
        wait()
    ways = {"sync_only_ms": False, "sync_and_wait_ms": True}
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(timing.rounds):
        for column, waits in ways.items():
            began = time.perf_counter()
            for _ in range(timing.steps):
                step()
                if waits:
                    wait()
            wait()
            best[column] = min(best[column], time.perf_counter() - began)
    return {column: round(1e3 * seconds / timing.steps / timing.calls, 3) for column, seconds in best.items()}


def _tracing(attend: Callable[..., Any], given: Sequence[Any], timing: Timing) -> float:
    """Of one attention, in Python: nothing is executed."""
    import torch_xla
    from torch_xla.core import xla_model

    best = float("inf")
    for _ in range(timing.rounds):
        began = time.perf_counter()
        out = given[0]
        for _ in range(timing.calls):
            out = attend(out, *given[1:])
        best = min(best, time.perf_counter() - began)
        torch_xla.sync()
        xla_model.wait_device_ops()
    return round(1e3 * best / timing.calls, 3)


def _of_jax(shape: Sequence[int], timing: Timing) -> dict[str, Any]:
    """JAX itself, in a process of its own: two frameworks do not share a TPU."""
    (row,) = in_child(Task({"stage": "JAX"}, _time_jax, (tuple(shape), timing)), LIMIT_S)
    return row


def _time_jax(shape: tuple[int, ...], timing: Timing) -> Iterator[dict[str, Any]]:
    import jax
    import numpy as np

    draw = np.random.default_rng(0)
    given = [jax.numpy.asarray(draw.standard_normal(shape), "bfloat16") for _ in range(3)]
    attend = jax.jit(forward(PallasCall("flash", shape[-1] ** -0.5, REPORTED_TILES)))
    last: list[Any] = [given[0]]

    def step() -> None:
        for _ in range(timing.calls):
            last[0] = attend(last[0], *given[1:])

    times = _milliseconds(step, lambda: last[0].block_until_ready(), timing)
    yield {"attention": "JAX", "shape": shape, "reported_ms": REPORTED_MS["JAX"], **times}


# ---------------------------------------------------------------- tiles


TILES = ((512, 512), (1024, 1024), (2048, 1024), (4096, 512), (4096, 1024))


def tiles(choices: Sequence[tuple[int, int]] = TILES) -> Table:
    """Which tiles of the reported shape the compiler of each TPU generation has on-chip memory for. Nothing is run."""
    part = Table(f"tiles of {SHAPE} bfloat16 that fit in on-chip memory", ())
    if not tpu_aot.is_possible():
        part.notes = [tpu_aot.INSTALL]
        return part
    tpu_aot.prepare()
    size = Sizes(SHAPE[2], SHAPE[2], SHAPE[3], 2)
    taken = {name: blocks_for(FLASH, name, size) for name in GENERATIONS}
    for rows, keys in choices:
        row: dict[str, Any] = {"block_q": rows, "block_k": keys}
        for name in GENERATIONS:
            call = PallasCall("flash", SHAPE[3] ** -0.5, Blocks(rows, keys))
            try:
                tpu_aot.compiled(name, forward(call), [(SHAPE, "bfloat16")] * 3)
                fits = "fits"
            except Exception as error:
                words = tpu_aot.first_words(error)
                fits = "does not fit" if "memory" in words else f"refused: {words}"
            row[name] = fits + (", taken" if taken[name] == Blocks(rows, keys) else "")
        part.rows.append(row)
    part.notes.append(
        "Compiled, not run. The reported tiles are 4096 x 1024; which TPU they were measured on was not said. "
        "'taken': the tiles attn_pass gives the shape."
    )
    return part


# ---------------------------------------------------------------- results


PARTS: Mapping[str, Callable[[], Table]] = {"correctness": correctness, "overlap": overlap, "tiles": tiles}


def measured(name: str) -> Table:
    """A part, with what it was measured with among its notes; without rows where something is missing."""
    table = PARTS[name]()
    fields = list(dict.fromkeys(field for row in table.rows for field in row))
    table.columns = [Column(field.replace("_", " "), field) for field in fields]
    table.name = name
    if table.rows:
        versions = environment.versions() | environment.installed("torch", "torch_xla", "jax", "jaxlib", "libtpu")
        known = ", ".join(f"{package} {number}" for package, number in versions.items())
        table.notes.append(f"`python -m bench xla {name}`, {environment.device_name('cpu')}, {known}")
    return table


def save(table: Table, folder: Path) -> None:
    """Puts a part beside those that other environments measured."""
    path = folder / "s1-xla.json"
    made = read(path) if path.exists() else Document(TITLE, {"reported": REPORTED})
    kept = {other.name: other for other in made.tables} | {table.name: table}
    made.tables = [kept[name] for name in PARTS if name in kept]
    made.write(path)


def main(
    parts: Annotated[list[str] | None, typer.Argument(help=f"Some of {', '.join(PARTS)}.")] = None,
    folder: Annotated[Path | None, typer.Option("--save", help="Add the parts to the results in this folder.")] = None,
) -> None:
    """Seed S1 on XLA: the parts whose packages are installed."""
    if unknown := [name for name in parts or () if name not in PARTS]:
        raise typer.BadParameter(f"no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}")
    for name in parts or list(PARTS):
        table = measured(name)
        show_table(plain_console(), table)
        if folder is not None and table.rows:
            save(table, folder)
