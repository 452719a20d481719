"""Bytes that one call moves: counted operator by operator, by Inductor for its kernels, and by a model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import attn_pass
from attn_pass.measuring.timing import compiled, tensors
from bench.harness import variants as w
from bench.harness.document import Row
from bench.harness.floors import extent

HALF = 2  # bytes
FEW = 4  # heads that Inductor compiles for: what its kernels move grows with the heads, and CPUs are slow in half


class Traffic(TorchDispatchMode):
    """Counts what every operator reads and writes; a view moves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.read = self.written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not _is_view(func, (args, kwargs), out):
            self.read += _bytes((args, kwargs))
            self.written += _bytes(out)
        return out


def _bytes(values: Any) -> int:
    return sum(map(extent, tensors(values)))


def _is_view(func: Any, inputs: Any, outputs: Any) -> bool:
    """By the storages, since the schema of ``_unsafe_view`` does not say it."""
    if func._schema.is_mutable:
        return False
    given = {StorageWeakRef(x.untyped_storage()) for x in tensors(inputs)}
    return any(StorageWeakRef(x.untyped_storage()) in given for x in tensors(outputs))


def unfused_model(batch: int, heads: int, length: int, dim: int) -> tuple[int, int]:
    """Reads and writes of product, scale, mask, softmax, product, each on its own, in half precision."""
    scores = batch * heads * length * length * HALF
    operand = batch * heads * length * dim * HALF
    mask = length * length
    return 3 * operand + 4 * scores + 2 * mask, 4 * scores + 2 * mask + operand


def fused_model(batch: int, heads: int, length: int, dim: int) -> tuple[int, int]:
    """Query, key and value in, the result out."""
    operand = batch * heads * length * dim * HALF
    return 3 * operand, operand


def count(program: Callable[..., Any], shape: tuple[int, int, int, int]) -> Iterator[Row]:
    """Rows with ``what``, ``read``, ``written``, ``together``, ``less`` and ``how``, of q, k, v in float16."""
    with FakeTensorMode():
        q, k, v = (torch.empty(shape, dtype=torch.float16) for _ in range(3))
        with Traffic() as counted:
            program(q, k, v)
    unfused = counted.read + counted.written
    batch, heads, length, dim = shape
    few = (1, min(heads, FEW), length, dim)
    times = batch * heads // few[1]
    given = tuple(torch.randn(few, dtype=torch.float16) for _ in range(3))

    def row(what: str, how: str, together: int, read: int | None = None, written: int | None = None) -> Row:
        less = 1 - together / unfused
        return {"what": what, "read": read, "written": written, "together": together, "less": less, "how": how}

    each = "inputs and outputs of every operator"
    yield row("eager, unfused", each, unfused, counted.read, counted.written)
    model = unfused_model(*shape)
    yield row("unfused, model", "product, scale, mask, softmax, product", sum(model), *model)
    by_inductor = f"Inductor's count over its kernels, for {few[1]} heads, times {times}"
    yield row(w.STOCK, by_inductor, times * inductor_bytes(compiled(program), given))
    passed = compiled(program, backend=attn_pass.backend)
    yield row(w.PASS, by_inductor, times * inductor_bytes(passed, given))
    model = fused_model(*shape)
    yield row("fused, model", "q, k, v in, the result out", sum(model), *model)


def inductor_bytes(run: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> int:
    """What the generated code reads and writes, extern kernels by their operands."""
    from torch._inductor import metrics

    metrics.reset()
    with _metrics_on(), torch._inductor.config.patch(force_disable_caches=True):
        run(*inputs)
    return int(metrics.num_bytes_accessed)


@contextmanager
def _metrics_on() -> Iterator[None]:
    """Inductor counts only where somebody listens."""
    from torch._inductor.compile_fx import inductor_metrics_log as log

    before, spread = log.level, log.propagate
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.setLevel(before)
        log.propagate = spread
