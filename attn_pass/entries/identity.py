"""What Inductor's caches have to know besides a graph: this package's sources, the options, torch and the devices."""

from __future__ import annotations

import hashlib

import torch

from attn_pass.devices.registry import families
from attn_pass.options import Options
from attn_pass.tuning.disk_cache import package_sources


def identity(options: Options) -> str:
    """A hash of all that a decision depends on besides the graph."""
    facts = (package_sources(), repr(options), str(torch.__version__), _devices())
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _devices() -> tuple[str, ...]:
    """What the choice of a kernel may depend on: hardware, and what was measured of it on this machine."""
    return tuple(fact for family in families() for fact in family.identity())
