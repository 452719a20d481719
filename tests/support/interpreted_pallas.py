"""The operators for TPUs on CPU tensors through JAX: the library's own Pallas kernels, interpreted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from attn_pass.devices.tpu import kernels, operators


def to_jax(tensor: Tensor) -> Any:
    import jax.numpy as jnp

    if tensor.dtype == torch.bfloat16:
        return jnp.asarray(tensor.detach().float().numpy()).astype(jnp.bfloat16)
    return jnp.asarray(tensor.detach().contiguous().numpy())


def to_torch(array: Any, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.array(array, np.float64)).to(dtype)


def run(
    call: kernels.PallasCall, back: bool, tensors: tuple[Tensor, ...], bias: Tensor | None, kept: Tensor | None
) -> Any:
    """In the place of `operators.elsewhere`."""
    import jax

    function = kernels.packed(replace(call, interpret=True), back, bias is not None, kept is not None)
    given = (*tensors, *(x for x in (bias, kept) if x is not None))
    result = jax.jit(function)(*map(to_jax, given))
    if not back:
        return to_torch(result, tensors[0].dtype)
    return tuple(to_torch(g, t.dtype) for g, t in zip(result, given[1:]))


@contextmanager
def interpreted() -> Iterator[list[kernels.PallasCall]]:
    """Inside it the operators run JAX's kernels; yields the calls that were made."""
    calls: list[kernels.PallasCall] = []

    def seen(call: kernels.PallasCall, *rest: Any) -> Any:
        calls.append(call)
        return run(call, *rest)

    with mock.patch.object(operators, "elsewhere", seen):
        yield calls
