"""This machine's CPU in numbers."""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from functools import cache

import torch

from attn_pass.devices.cpu.kernel import source
from attn_pass.devices.device import Device
from attn_pass.devices.processors import processor

_ARM = ("aarch64", "arm64")
_PROCESSORS = {"Graviton4": (96, 430.0), "Graviton3": (64, 245.0)}  # cores, and 80 % of the memory's rate in GB/s
NAMES = tuple(_PROCESSORS)
"""Processors that need not be here: ARM's, with rates of data sheets."""


def by_name(name: str) -> Device | None:
    """A processor of the table, on all of its cores."""
    known = next((n for n in NAMES if n.lower() == name.lower().replace(" ", "")), None)
    if known is None:
        return None
    cores, memory = _PROCESSORS[known]
    return replace(processor(cores, "neon"), name=known, memory_gbytes=memory, is_here=False)


def cpu() -> Device:
    """This machine's CPU, with as many cores as torch uses threads of those this process may run on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return processor(max(1, min(cores, torch.get_num_threads())), instruction_set())


def instruction_set() -> str:
    """What the CPU kernel and torch's products run on here.

    With "amx" both multiply bfloat16 in tiles, the kernel in inference with many rows. "avx512_fp16" and "neon" have
    more for torch's products alone.
    """
    return detected()


@cache
def detected() -> str:
    """The same, asked of the processor: tests of decisions put another in its place."""
    if platform.machine().lower() in _ARM:
        return "neon"
    if source.has_tiles():
        return "amx"
    name = source.of_this_machine(False)[0].name
    return "avx512_fp16" if name == "avx512" and source.processor_has("avx512_fp16") else name


@cache
def is_amd() -> bool:
    """Whether AMD made the processor, by what Linux says."""
    return source.processor_has("AuthenticAMD")
