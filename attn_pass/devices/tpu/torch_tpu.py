"""The adapter for torch_tpu (0.2, torch 2.11 and newer), experimental: the kernels as operators of its ``jax_op``.

``torch.tpu.pallas.jax_op`` makes an operator of a JAX function with annotated arguments. One is made for each kernel
that a program calls, and kept. Without a TPU an operator can be made and traced, and its module for the TPU can be
looked at; nothing can be run. Not verified on hardware.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor

from attn_pass.devices.tpu.kernels import PallasCall, packed
from attn_pass.errors import VersionError

_INSTALL = "pip install torch_tpu jax"


def run(call: PallasCall, back: bool, tensors: tuple[Tensor, ...], bias: Tensor | None, kept: Tensor | None) -> Any:
    """The kernel on torch_tpu's tensors.

    Raises:
        VersionError: torch_tpu or jax is not installed, or has no ``jax_op``.
    """
    arrays = (*tensors, *(x for x in (bias, kept) if x is not None))
    return operator(call, back, bias is not None, kept is not None)(*arrays)


@functools.cache
def operator(call: PallasCall, back: bool, biased: bool, masked: bool) -> Callable[..., Any]:
    """The operator of a kernel: its arrays in the order of `attn_pass.devices.tpu.kernels.packed`."""
    try:
        jax = importlib.import_module("jax")
        importlib.import_module("torch_tpu")
        jax_op = importlib.import_module("torch").tpu.pallas.jax_op
    except (ImportError, AttributeError) as error:
        raise VersionError(
            f"attention on torch_tpu's devices needs torch_tpu, with its jax_op, and jax ({error}); {_INSTALL}"
        ) from error
    function = packed(call, back, biased, masked)
    names = [*(("grad",) if back else ()), "query", "key", "value"]
    names += ["bias"] * biased + ["kept"] * masked
    of = inspect.Parameter
    result = tuple[(jax.Array,) * (3 + biased)] if back else jax.Array  # type: ignore[misc]

    def attention(*arrays: Any) -> Any:
        return function(*arrays)

    attention.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [of(n, of.POSITIONAL_OR_KEYWORD, annotation=jax.Array) for n in names], return_annotation=result
    )
    digest = hashlib.sha256(repr((call, back, biased, masked)).encode()).hexdigest()[:12]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that jax_op is experimental
        jax_operator: Callable[..., Any] = jax_op(f"attn_pass_tpu::{call.kind}{'_backward' * back}_{digest}", attention)
    return jax_operator
