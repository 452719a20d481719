"""Compiling for TPUs without one: JAX's ahead-of-time compiler, with libtpu, for the generations by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

TOPOLOGIES: Mapping[str, str] = {
    "TPU v5e": "v5e:2x2",
    "TPU v5p": "v5p:2x2x1",
    "TPU v6e": "v6e:2x2",
    "TPU7x": "tpu7x:2x2x1",
}
# Without the first libtpu asks a metadata server, half a minute for each question; the type may stay the same for all.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nothing is opened, so several may compile at once
}
INSTALL = "needs jax and libtpu: make test-tpu-aot installs them in .venv-tpu"


def is_possible() -> bool:
    """Whether what it takes is installed."""
    return find_spec("jax") is not None and find_spec("libtpu") is not None


def prepare() -> None:
    """Sets the environment; before JAX is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@cache
def _place(generation: str) -> Any:
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    described = topologies.get_topology_desc(TOPOLOGIES[generation], platform="tpu")
    return SingleDeviceSharding(described.devices[0])


@dataclass(frozen=True)
class Compiled:
    """What the compiler made: how many kernels, and the megabytes it keeps beside arguments and results."""

    kernels: int
    scratch_mb: float


def compiled(
    generation: str, function: Callable[..., Any], arrays: Sequence[tuple[tuple[int, ...], str] | None]
) -> Compiled:
    """Compiles a JAX function for a generation, from shapes and dtypes; None is an argument that is None.

    Raises:
        Exception: the compiler's, where it refuses.
    """
    import jax
    from jax import numpy as jnp

    place = _place(generation)
    given = [None if a is None else jax.ShapeDtypeStruct(a[0], jnp.dtype(a[1]), sharding=place) for a in arrays]
    lowered = jax.jit(function).lower(*given)
    kernels = lowered.as_text().count("tpu_custom_call")
    memory = lowered.compile().memory_analysis()
    return Compiled(kernels, getattr(memory, "temp_size_in_bytes", 0) / 1e6)


def first_words(error: Exception, most: int = 160) -> str:
    """What the compiler said, on one line."""
    text = " ".join(str(error).split())
    start = text.find("Ran out of memory")
    return text[max(start, 0) :][:most]
