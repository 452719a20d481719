"""What Inductor's caches have to know besides a graph: this package's sources, the options, torch and the devices."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import torch

from attn_pass.devices.registry import families
from attn_pass.options import Options


def identity(options: Options) -> str:
    """A hash of all that a decision depends on besides the graph."""
    facts = (_sources(), repr(options), str(torch.__version__), _devices())
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _devices() -> tuple[str, ...]:
    """What the choice of a kernel may depend on: hardware, and what was measured of it on this machine."""
    return tuple(fact for family in families() for fact in family.identity())


@functools.cache
def _sources() -> str:
    """A hash of this package's source files."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(p for kind in ("*.py", "*.hpp") for p in root.rglob(kind)):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()
