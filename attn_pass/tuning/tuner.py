"""Measures instead of predicting: the best offers for one attention, compiled and timed in a separate process."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

from attn_pass.compat import changed_settings
from attn_pass.devices.registry import facts, families
from attn_pass.graph.cut import CannotExtract
from attn_pass.graph.effects import Effects
from attn_pass.graph.extract import Program, extract
from attn_pass.graph.values import Sizes, tensor_value
from attn_pass.model.dtype_name import dtype_name
from attn_pass.options import LEAVE, Options
from attn_pass.planner.choose import Measured, Timings
from attn_pass.report.places import source_line
from attn_pass.report.progress import progress
from attn_pass.targets.base import Setting
from attn_pass.tuning import disk_cache

_SECONDS = 2.0  # of timing, if the forms are hard to distinguish
_LIMIT_SECONDS = 300.0  # for a site: starting the process and compiling every form included


@dataclass(frozen=True)
class TuningSite:
    """Where an attention is: what is needed to make a program of it."""

    result: Node
    sources: Sequence[Node]
    computed: Sequence[Node]  # of these what a program makes itself, from no inputs: it is what it is, not random
    sizes: Sizes
    effects: Effects
    known: Mapping[Node, torch.Tensor]
    needs_grad: Callable[[Node], bool]
    setting: Setting


class Tuner:
    """Times forms of an attention; remembers what it found on disk, by device, versions and program."""

    def __init__(self, options: Options) -> None:
        self._options = replace(options, tune=False, rules=(), choose="cheapest", on_error="raise", verify="off")

    def __call__(self, site: TuningSite, labels: Sequence[str]) -> Measured | str:
        """Microseconds of each form and of `LEAVE`, or why nothing was measured."""
        device, value = site.setting.device, tensor_value(site.result)
        if not device.is_here or value is None or value.device.type != device.type:
            return f"tune=True: no {device.name} here to measure on, so the prediction decides"
        try:
            program = _program(site)
        except CannotExtract as error:
            return f"tune=True: not measured, {error}; the prediction decides"
        job = self._job(site, program, [LEAVE, *labels])
        code = [disk_cache.package_sources(), *(family.sources() for family in families())]
        key = disk_cache.key_of([job, _digests(program), facts(site.setting.device), code])
        result = _checked(disk_cache.load(key))
        if result is None:
            with progress() as tell:
                where = source_line(site.result.meta)
                tell(f"measuring {', '.join(labels)} and the site as written, {where}")
                answer = _run(job, program)
            if isinstance(answer, str):
                return f"tune=True: not measured, {answer}; the prediction decides"
            result = answer
            if LEAVE in result["us"] and len(result["us"]) > 1:  # else what failed may be there next time
                disk_cache.save(key, result)
        medians = {label: statistics.median(samples) for label, samples in result["us"].items()}
        if LEAVE not in medians or len(medians) < 2:
            failed = next(iter(result["failed"].values()), "nothing else compiled")
            return f"tune=True: not measured, {failed}; the prediction decides"
        return Timings(medians, {label: _spread(samples) for label, samples in result["us"].items()})

    def _job(self, site: TuningSite, program: Program, labels: Sequence[str]) -> dict[str, Any]:
        autocast = site.setting.autocast
        inputs = [{k: v for k, v in vars(i).items() if k != "value"} for i in program.inputs]
        return {
            "text": program.text,
            "inputs": inputs,
            "options": asdict(self._options),
            "labels": list(labels),
            "threads": torch.get_num_threads(),
            "autocast": None if autocast is None else [site.setting.device.type, dtype_name(autocast)],
            "backends": site.setting.allowed_backends,
            "deterministic": site.setting.deterministic,
            "precision": torch.get_float32_matmul_precision(),
            "grad": any(i.requires_grad for i in program.inputs),
            "inductor": changed_settings(),
            "seconds": _SECONDS,
            "megabytes": _half_the_memory(),
            "values": "",
        }


def _program(site: TuningSite) -> Program:
    """The site as a program: what it computes from no inputs, such as a causal mask, in it wherever that can be."""
    inputs = [node for node in site.sources if node not in set(site.computed)]
    try:
        return extract(site.result, inputs, site.sizes, site.effects, site.known, site.needs_grad)
    except CannotExtract:
        return extract(site.result, site.sources, site.sizes, site.effects, site.known, site.needs_grad)


def _spread(samples: Sequence[float]) -> float:
    """Half of what lies between the 10th and the 90th percentile, as a share of the median."""
    if len(samples) == 1:
        return 0.0
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    return (tenths[8] - tenths[0]) / 2 / statistics.median(samples)


def _run(job: dict[str, Any], program: Program) -> dict[str, Any] | str:
    """What the worker process found, or why it found nothing."""
    values = {str(n): i.value for n, i in enumerate(program.inputs) if i.value is not None}
    with tempfile.TemporaryDirectory() as folder:
        if values:
            job = {**job, "values": str(Path(folder) / "values.pt")}
            torch.save(values, job["values"])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        command = [sys.executable, "-m", "attn_pass.tuning.worker"]
        try:
            done = subprocess.run(
                command, input=json.dumps(job), capture_output=True, text=True, env=environment, timeout=_LIMIT_SECONDS
            )
        except subprocess.TimeoutExpired:
            return f"it took more than {_LIMIT_SECONDS:.0f} s"
        except OSError as error:
            return f"no worker process could be started ({error})"
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [""])[-1][:200]
        return f"the worker process ended with {done.returncode} ({last})"
    try:
        result = _checked(json.loads(done.stdout.strip().splitlines()[-1]))
    except (IndexError, ValueError):
        result = None
    return "the worker process returned an invalid result" if result is None else result


def _checked(result: Any) -> dict[str, Any] | None:
    """What a worker found, if it is of the form one writes: it came from a disk or a pipe."""
    if not isinstance(result, dict) or not all(isinstance(result.get(name), dict) for name in ("us", "failed")):
        return None
    samples = [s for times in result["us"].values() for s in (times if isinstance(times, list) and times else [None])]
    return result if all(isinstance(s, (int, float)) for s in samples) else None


def _digests(program: Program) -> list[str]:
    """The contents of the tensors whose values are known to the program."""
    dense = [i.value.detach().cpu().contiguous() for i in program.inputs if i.value is not None]
    return [hashlib.sha256(ctypes.string_at(t.data_ptr(), t.nbytes)).hexdigest() for t in dense]


def _half_the_memory() -> int:
    """Megabytes: half of what the machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 21 if hasattr(os, "sysconf") else 8192
