"""A worker process that compiles one attention in several forms and times them: ``python -m attn_pass.tuning.worker``.

Reads a job as JSON from its standard input and writes the result to its standard output. The timings of the forms are
interleaved, so that load on the machine disturbs all of them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import operator
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_pass.devices.registry import families, of_type
from attn_pass.entries.inductor import compile_with_inductor
from attn_pass.entries.known import known_buffers
from attn_pass.entries.transaction import decide
from attn_pass.errors import RewriteError, cause_of
from attn_pass.graph.cut import Input
from attn_pass.graph.values import KNOWN_TENSORS
from attn_pass.options import LEAVE, Options
from attn_pass.planner.choose import only
from attn_pass.report.record import Report
from attn_pass.tuning.clock import order_of

Run = Callable[[], Any]
_BLOCK = 0.005  # seconds a form runs before the next one's turn
_ROUNDS = (7, 60)
_NOISE = 0.03  # two forms closer than this are the same


def backend_for(label: str, options: Options, values: Sequence[torch.Tensor] = ()) -> Callable[..., Any]:
    """A torch.compile backend that gives every attention the form with this label, or compiles it as it is.

    ``values`` are the inputs that keep the values they have.

    Raises (from the compile):
        RewriteError: nothing in the graph takes this form.
    """

    def compile_as(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        known = known_buffers(gm, example_inputs, options)
        names = (n.name for n in gm.graph.nodes if n.op == "placeholder")
        buffers = {n: ("a buffer", x) for n, x in zip(names, example_inputs) if any(x is v for v in values)}
        known[KNOWN_TENSORS] = {**known[KNOWN_TENSORS], **buffers}
        report = Report()
        if label != LEAVE:
            report = decide(gm, options, "compile", "inductor", lambda: known, measure=only(label)).report
            if not report.rewritten:
                raise RewriteError(f"no target offers the form {label}")
        return compile_with_inductor(gm, example_inputs, options, report)

    return compile_as


def interleaved(runs: Mapping[str, Run], seconds: float) -> dict[str, list[float]]:
    """Microseconds per call of each form, in interleaved blocks, until the fastest two are distinct or time is up."""
    from torch.utils.benchmark import Timer

    threads = torch.get_num_threads()
    timers = {name: Timer("run()", globals={"run": run}, num_threads=threads) for name, run in runs.items()}
    calls = {}
    for name, timer in timers.items():
        timer.timeit(1)
        calls[name] = max(1, int(_BLOCK / max(timer.timeit(1).mean, 1e-7)))
    samples: dict[str, list[float]] = {name: [] for name in runs}
    end = time.monotonic() + seconds
    for number in range(_ROUNDS[1]):
        for name in order_of(number, timers):
            samples[name].append(timers[name].timeit(calls[name]).mean * 1e6)
        if number + 1 >= _ROUNDS[0] and (time.monotonic() > end or _are_distinct(samples)):
            break
    return samples


def _are_distinct(samples: Mapping[str, Sequence[float]]) -> bool:
    """Whether the fastest is clearly faster than all others, or too near to them for it to matter."""
    spans = sorted((statistics.quantiles(s, n=4) for s in samples.values()), key=lambda q: q[1])
    best = spans[0]
    return all(best[2] < other[0] or other[2] < best[1] * (1 + _NOISE) for other in spans[1:])


def _inputs(job: Mapping[str, Any]) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Random tensors as they lie in memory, and those that are known."""
    torch.manual_seed(0)
    values = torch.load(job["values"], weights_only=True) if job["values"] else {}
    inputs = []
    for number, spec in enumerate(job["inputs"]):
        value = values.get(str(number))
        inputs.append(_random(spec) if value is None else value)
    return inputs, values


def _random(spec: Mapping[str, Any]) -> torch.Tensor:
    layout = Input(**spec)
    dtype, device = getattr(torch, layout.dtype), layout.device
    if dtype == torch.bool:
        flat = torch.rand(layout.memory, device=device) < 0.9
    elif dtype.is_floating_point or dtype.is_complex:
        flat = torch.randn(layout.memory, dtype=torch.float32, device=device).to(dtype)
    else:
        flat = torch.zeros(layout.memory, dtype=dtype, device=device)  # the one value that is an index of every table
    return layout.in_memory(flat).requires_grad_(layout.requires_grad)


def _program(text: str) -> Callable[..., Any]:
    """The function the text defines, new each time, so that torch.compile shares nothing between two of them."""
    namespace: dict[str, Any] = {
        "torch": torch,
        "math": math,
        "inf": math.inf,
        "nan": math.nan,
        "NoneType": type(None),
        "device": torch.device,
        "operator": operator,
        "_operator": operator,
    }
    for family in families():
        family.import_operators(text)
    exec(compile(text, "<attention>", "exec"), namespace)  # text that attn_pass itself wrote
    return functools.partial(namespace["forward"], None)


@contextlib.contextmanager
def _surroundings(job: Mapping[str, Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(job["grad"]))
        if job["autocast"]:
            kind, dtype = job["autocast"]
            stack.enter_context(torch.autocast(kind, dtype=getattr(torch, dtype)))
        if job["backends"] is not None:
            stack.enter_context(sdpa_kernel([SDPBackend.__members__[name] for name in job["backends"]]))
        torch.use_deterministic_algorithms(job["deterministic"])  # of a process of its own
        torch.set_float32_matmul_precision(job["precision"])
        yield


def run_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Compiles and times every form of a job: ``{"us": {label: [samples]}, "failed": {label: reason}}``."""
    from torch._inductor import config

    torch.set_num_threads(job["threads"])
    inputs, values = _inputs(job)
    options = Options(**job["options"])
    failed: dict[str, str] = {}
    runs: dict[str, Run] = {}

    with _surroundings(job), config.patch({**job["inductor"], "compile_threads": 1}):
        for label in job["labels"]:
            backend = backend_for(label, options, list(values.values()))
            compiled = torch.compile(_program(job["text"]), backend=backend, dynamic=False)
            run = functools.partial(_step, compiled, inputs, job["grad"])
            try:
                run()
                runs[label] = run
            except Exception as error:
                failed[label] = cause_of(error)
        samples = interleaved(runs, job["seconds"]) if len(runs) > 1 else {}
    return {"us": samples, "failed": failed}


def _step(compiled: Callable[..., Any], inputs: Sequence[torch.Tensor], grad: bool) -> Any:
    """One call, and its backward if gradients are needed."""
    (result,) = compiled(*inputs)
    if grad and result.requires_grad:
        leaves = [x for x in inputs if x.requires_grad]
        return torch.autograd.grad(result, leaves, torch.ones_like(result), allow_unused=True)
    return result


def main() -> None:
    """Runs the job on the standard input."""
    job = json.load(sys.stdin)
    device = torch.device(next((i["device"] for i in job["inputs"]), "cpu"))
    of_type(device.type).limit_memory(job["megabytes"])
    with contextlib.redirect_stdout(sys.stderr):
        result = run_job(job)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
