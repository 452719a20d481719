"""The adapter for torch_xla (2.9, its last release): the kernels through ``torch_xla.core.xla_builder.call_jax``.

Needs the packages torch_xla, jax and flax; flax because torch_xla's own bridge to JAX imports it without declaring it.
torch_xla's ``flash_attention`` is not used: it pads keys without masking them, has a scale of 1 unless one is passed,
and on a tensor that is not on an XLA device returns uninitialised memory.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn_pass.devices.tpu.kernels import PallasCall, packed
from attn_pass.errors import VersionError

_PLATFORM: ContextVar[str | None] = ContextVar("attn_pass_xla_platform", default=None)
_INSTALL = "pip install torch==2.9.0 'torch_xla[pallas]==2.9.0' flax==0.11.2"


@contextmanager
def lowered_for_tpu() -> Iterator[None]:
    """Inside it the kernels are lowered for a TPU wherever the tensors are, and what is traced cannot run here.

    For ``torch_xla.stablehlo.exported_program_to_stablehlo`` on a machine without a TPU: the StableHLO then holds the
    kernel as a ``tpu_custom_call``, not what it is on the CPU.
    """
    token = _PLATFORM.set("TPU")
    try:
        yield
    finally:
        _PLATFORM.reset(token)


def run(call: PallasCall, back: bool, tensors: tuple[Tensor, ...], bias: Tensor | None, kept: Tensor | None) -> Any:
    """The kernel on XLA tensors; interpreted, slowly, where torch_xla's device is the CPU.

    Raises:
        VersionError: a package is missing.
        RuntimeError: the device is neither a TPU nor the CPU.
    """
    builder = _builder()
    here = hardware()
    if _PLATFORM.get() is None and here not in ("TPU", "CPU"):
        raise RuntimeError(
            f"the Pallas kernels are for TPUs, and torch_xla runs on {here} here; leave out the option device=..."
        )
    lowered = _PLATFORM.get() == "TPU" and here != "TPU"
    call = replace(call, interpret=here == "CPU" and not lowered, precision=_precision(tensors[0].dtype))
    function = packed(call, back, bias is not None, kept is not None)
    arrays = (*tensors, *(x for x in (bias, kept) if x is not None))
    if lowered:
        return _lowered(builder, function, arrays, 1 if not back else 3 + (bias is not None))
    return builder.call_jax(function, arrays)


def hardware() -> str:
    """ "TPU", "CPU", or what else torch_xla runs on."""
    return str(importlib.import_module("torch_xla.runtime").device_type())


def _precision(dtype: torch.dtype) -> str:
    """Of products, as torch_xla computes the program's own."""
    if dtype != torch.float32:
        return "default"
    precision = getattr(importlib.import_module("torch_xla.backends"), "get_mat_mul_precision", lambda: "default")()
    return "default" if precision == "default" else "highest"


def _builder() -> Any:
    try:
        for name in ("jax", "flax"):
            importlib.import_module(name)
        builder = importlib.import_module("torch_xla.core.xla_builder")
    except ImportError as error:
        raise VersionError(
            f"attention for XLA devices needs {error.name}, which is not installed; {_INSTALL}"
        ) from error
    if not hasattr(builder, "call_jax"):
        raise VersionError(f"torch_xla {_version()} has no call_jax, which came with 2.7; {_INSTALL}")
    return builder


def _version() -> str:
    return str(getattr(importlib.import_module("torch_xla"), "__version__", "of unknown version"))


def _lowered(builder: Any, function: Any, arrays: tuple[Tensor, ...], results: int) -> Any:
    """What ``call_jax`` does, with the TPU as platform."""
    import jax

    names = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.bool: "bool"}
    shapes = [jax.ShapeDtypeStruct(tuple(x.shape), jax.numpy.dtype(names[x.dtype])) for x in arrays]
    traced = jax.jit(function, keep_unused=True).trace(*shapes)
    hlo = traced.lower(lowering_platforms=("tpu",)).compiler_ir("hlo").as_serialized_hlo_module_proto()
    computation = builder.computation_from_module_proto(function.__name__, hlo)
    results_of_call = builder.xla_computation_as_func(computation, function.__name__)(list(arrays))
    return results_of_call[0] if results == 1 and isinstance(results_of_call, (list, tuple)) else results_of_call
