"""This machine's CPU in numbers."""

from __future__ import annotations

import os
from functools import cache

import torch

from attn_pass.devices.catalog import processor
from attn_pass.devices.cpu.kernel import source
from attn_pass.devices.device import Device


def cpu() -> Device:
    """This machine's CPU, with as many cores as torch uses threads of those this process may run on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return processor(max(1, min(cores, torch.get_num_threads())), instruction_set())


def instruction_set() -> str:
    """What the CPU kernel runs on here; "amx" and "avx512_fp16" where products of torch's own have more."""
    return detected()


@cache
def detected() -> str:
    """The same, asked of the processor: tests of decisions put another in its place."""
    if torch.cpu._is_amx_tile_supported():
        return "amx"
    name = source.of_this_machine()[0].name
    return "avx512_fp16" if name == "avx512" and source.processor_says("avx512_fp16") else name
