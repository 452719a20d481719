"""Checks the decode kernel on the GPU that is present: tiny cases against the reference, once per machine.

Triton compiles the kernel for a GPU, driver and version that may never have been tested. The first offer on a device
therefore runs the kernel on seven shapes that go through every branch, and a kernel that gives wrong numbers, or
raises, is not used there. The result is cached on disk, keyed by everything it depends on, including the kernel's own
source.
"""

from __future__ import annotations

import hashlib
import platform
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

from attn_pass.devices.cuda.decode_operator import Inputs, decode_with_lse, reference_with_lse
from attn_pass.errors import first_line
from attn_pass.report.json_schema import fits
from attn_pass.tuning import disk_cache

Run = Callable[[Inputs], tuple[Tensor, Tensor]]

_FILES = ("decode_operator.py", "decode_triton.py", "self_check.py")
_DRIVER = Path("/proc/driver/nvidia/version")
_OF_RESULT = {torch.float16: 4e-3, torch.bfloat16: 3e-2}  # numbers of about 1; the weights are rounded to the dtype
_OF_LSE = 1e-3
_SCALE = 0.3
_LOCK = threading.Lock()
_KNOWN: dict[str, str | None] = {}


@dataclass(frozen=True)
class Case:
    """One call: sizes, and what else it is given."""

    name: str
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    dim: int
    dtype: torch.dtype
    mask: str = ""
    causal: bool = False
    window: int = -1
    lengths: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    mean: bool = False


CASES = (
    Case("grouped heads", 8, 2, 1, 700, 128, torch.bfloat16),
    Case("a boolean mask of one row", 4, 1, 2, 600, 64, torch.float16, mask="one row"),
    Case("an added mask with a fully masked row", 4, 2, 3, 520, 80, torch.bfloat16, mask="rows"),
    Case("one split, with a fully masked row", 4, 2, 3, 120, 64, torch.bfloat16, mask="rows"),
    Case("a window", 4, 4, 5, 900, 32, torch.float16, causal=True, window=130),
    Case("lengths, causal", 6, 2, 4, 640, 64, torch.float16, causal=True, lengths=(530, 0)),
    Case(
        "a range, and the mean without one",
        4,
        2,
        2,
        640,
        64,
        torch.bfloat16,
        lengths=(530, 9),
        starts=(70, 9),
        mean=True,
    ),
)


def failure(device: torch.device) -> str | None:
    """What is wrong with the kernel on this device, in words; None where nothing is, or where no such GPU is here.

    Threads of a process wait for each other; processes that start together may each check once.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        return None
    key = disk_cache.key_of({"check": "decode", **_facts(device)})
    with _LOCK:
        if key not in _KNOWN:
            record = disk_cache.load(key)
            if not isinstance(record, dict) or not fits(record.get("failure", 0), str | None):
                record, lasts = _record(device)
                if lasts:
                    disk_cache.save(key, record)
            _KNOWN[key] = record["failure"]
        return _KNOWN[key]


def _record(device: torch.device) -> tuple[dict[str, str | None], bool]:
    """The outcome on this device, and whether it holds another time.

    From a thread of its own: the one that asks is in the middle of a compile, with modes and autocast.
    """
    outcome: list[tuple[str | None, bool]] = []

    def work() -> None:
        try:
            outcome.append((first_difference(operator, device), True))
        except torch.OutOfMemoryError as error:  # there may be enough memory another time
            outcome.append((first_line(error), False))
        except Exception as error:
            outcome.append((f"{type(error).__name__}: {first_line(error)}", True))

    thread = threading.Thread(target=work, name="attn_pass self-check")
    thread.start()
    thread.join()
    ((failed, lasts),) = outcome
    return {"failure": failed}, lasts


def operator(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The operator, as it is launched on the inputs' device."""
    i = inputs
    of_range = (i.causal, i.window, i.lengths, i.starts, i.mean)
    out, lse = decode_with_lse(i.query, i.key, i.value, i.mask, i.scale, *of_range)
    return out, lse


def first_difference(run: Run, device: torch.device) -> str | None:
    """The first case that ``run`` does not compute as the reference does on the CPU; None if it does all."""
    for case in CASES:
        inputs = inputs_of(case)
        right, right_lse = reference_with_lse(inputs)
        if device.type == "cuda":
            with torch.cuda.device(device):
                out, lse = run(_moved(inputs, device))
        else:
            out, lse = run(inputs)
        for part, result, expected, allowed in (
            ("result", out, right, _OF_RESULT[case.dtype]),
            ("log-sum-exp", lse, right_lse, _OF_LSE),
        ):
            apart = _largest_difference(result.cpu().double(), expected.double())
            if not apart <= allowed:
                return f"{case.name}: the {part} is off by {apart:.2g}, where {allowed:g} is rounding"
    return None


def _largest_difference(result: Tensor, expected: Tensor) -> float:
    difference = torch.where(result == expected, 0.0, (result - expected).abs() / expected.abs().clamp(min=1.0))
    return float(difference.nan_to_num(nan=torch.inf).max())


def inputs_of(case: Case) -> Inputs:
    """Two batch rows of random numbers, the same in every process; NaN where no valid key lies."""
    numbers = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers, dtype=torch.float32).to(case.dtype)

    query = random(2, case.heads, case.q_len, case.dim)
    key, value = (random(2, case.kv_heads, case.kv_len, case.dim) for _ in range(2))
    mask = None
    if case.mask == "one row":
        mask = torch.rand((2, 1, 1, case.kv_len), generator=numbers) < 0.7
    elif case.mask:
        mask = random(2, case.heads, case.q_len, case.kv_len)
        mask[:, 1, 1] = -torch.inf
    inputs = Inputs(query, key, value, mask, _SCALE, case.causal, case.window)
    if not case.lengths:
        return inputs
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    starts = torch.tensor(case.starts, dtype=torch.int32) if case.starts else torch.zeros_like(lengths)
    at = torch.arange(case.kv_len)
    valid = (at >= starts[:, None]) & (at < lengths[:, None])
    beyond = ~(valid | (case.mean & ~valid.any(-1, keepdim=True)))[:, None, :, None]
    key, value = (torch.where(beyond, torch.nan, x) for x in (key, value))
    return replace(
        inputs, key=key, value=value, lengths=lengths, starts=starts if case.starts else None, mean=case.mean
    )


def _moved(inputs: Inputs, device: torch.device) -> Inputs:
    tensors = (inputs.mask, inputs.lengths, inputs.starts)
    mask, lengths, starts = (None if x is None else x.to(device) for x in tensors)
    query, key, value = (x.to(device) for x in (inputs.query, inputs.key, inputs.value))
    return replace(inputs, query=query, key=key, value=value, mask=mask, lengths=lengths, starts=starts)


def _facts(device: torch.device) -> dict[str, str]:
    """All that decides what the kernel computes."""
    facts = {"torch": torch.__version__, "triton": _triton(), "kernel": _digest(), "device": platform.machine()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "driver": _driver(),
        }
    return facts


@lru_cache(maxsize=1)
def _digest() -> str:
    text = "".join((Path(__file__).parent / name).read_text() for name in _FILES)
    return hashlib.sha256(text.encode()).hexdigest()


def _triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


def _driver() -> str:
    try:
        return _DRIVER.read_text().splitlines()[0]
    except (OSError, IndexError):  # no such file, on Windows for one
        return str(torch.version.cuda)
