"""This machine's CPU in numbers."""

from __future__ import annotations

import os

import torch

from attn_pass.devices.catalog import processor
from attn_pass.devices.device import Device


def cpu() -> Device:
    """This machine's CPU, with as many cores as torch uses threads of those this process may run on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return processor(max(1, min(cores, torch.get_num_threads())))
