"""What is handed to the kernels of Intel's, AMD's and Apple's GPUs, asked as strictly as torch asks (`gpu_checks`).

The calls are those of graphs that were rewritten for such a device and run here, with the operands, strides and dtypes
that torch gives them on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from against_eager import randn
from gpu_checks import CHECKS, Handed, handed_over, taken_by, why_not
from kernel_calls import BF16, FP16, FP32, FP64, call
from torch import Tensor

from attn_pass.compat import TORCH_VERSION
from attn_pass.devices import registry
from attn_pass.devices.mps.family import GATE
from attn_pass.devices.rocm import gates
from attn_pass.targets.torch_call import picked_by_torch

pytestmark = pytest.mark.skipif(TORCH_VERSION < (2, 13), reason="the checks are those of torch 2.13")


@pytest.fixture(autouse=True)
def no_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    for gate in (gates.EXPERIMENTAL_GATE, gates.CK_GATE, GATE):
        monkeypatch.delenv(gate, raising=False)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.125).softmax(-1) @ v


def negative(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * -0.125).softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keep = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).tril()
    return (q @ k.mT * 0.125).masked_fill(~keep, float("-inf")).softmax(-1) @ v


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = torch.arange(q.size(-2))[:, None], torch.arange(k.size(-2))
    return (q @ k.mT * 0.125).masked_fill((i - j).abs() > 3, float("-inf")).softmax(-1) @ v


def heads_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def keys_stored_as_columns(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k * 0.125).softmax(-1) @ v


def shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(q, *(x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v)))


def added(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT * 0.125 + bias).softmax(-1) @ v


def added_in_float32(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT * 0.125 + bias).softmax(-1).to(v.dtype) @ v


def shared_and_added(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return added(q, *(x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v)), bias)


def added_columns(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return added(q, k, v, bias.mT)


def hidden(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (q @ k.mT * 0.125).masked_fill(~keep, float("-inf")).softmax(-1) @ v


def hidden_columns(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return hidden(q, k, v, keep.mT)


def lowered(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (q @ k.mT * 0.125).masked_fill(~keep, torch.finfo(q.dtype).min).softmax(-1) @ v


def sloped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = torch.arange(q.size(-2))[:, None], torch.arange(k.size(-2))
    slopes = 0.5 ** torch.arange(1, q.size(1) + 1, dtype=q.dtype)
    return (q @ k.mT * 0.125 - slopes[:, None, None] * (i - j).abs().to(q.dtype)).softmax(-1) @ v


@dataclass(frozen=True)
class Case:
    """A program, and the shapes of its query, key and value; ``rest``: what it takes besides, in a dtype."""

    program: Callable[..., Tensor]
    query: tuple[int, ...] = (2, 4, 16, 64)
    key: tuple[int, ...] = (2, 4, 16, 64)
    value: tuple[int, ...] = (2, 4, 16, 64)
    rest: Callable[[torch.dtype], list[Tensor]] = lambda dtype: []

    def inputs(self, dtype: torch.dtype) -> list[Tensor]:
        """Of one dtype, but for masks."""
        shapes = (self.query, self.key, self.value)
        return [*(randn(*shape, seed=n).to(dtype) for n, shape in enumerate(shapes)), *self.rest(dtype)]


def same(*shape: int) -> dict[str, tuple[int, ...]]:
    return {"query": shape, "key": shape, "value": shape}


def keys_of(*shape: int) -> dict[str, tuple[int, ...]]:
    return {"key": shape, "value": shape}


def kept(*shape: int) -> Callable[[torch.dtype], list[Tensor]]:
    """A mask that keeps the first key, and so one of every row."""

    def made(dtype: torch.dtype) -> list[Tensor]:
        keep = randn(*shape, seed=7) > 0
        keep[..., 0] = True
        return [keep]

    return made


def bias(*shape: int) -> Callable[[torch.dtype], list[Tensor]]:
    return lambda dtype: [randn(*shape, seed=8).to(dtype)]


def _kept_columns(dtype: torch.dtype) -> list[Tensor]:
    keep = randn(16, 16, seed=7) > 0
    keep[0] = True
    return [keep]


CASES = {
    "no mask": Case(plain),
    "causal": Case(causal),
    "causal, more keys": Case(causal, **keys_of(2, 4, 24, 64)),
    "a negative scale": Case(negative),
    "one row": Case(plain, query=(2, 4, 1, 64), **keys_of(2, 4, 24, 64)),
    "a few rows": Case(plain, query=(2, 4, 5, 64), **keys_of(2, 4, 24, 64)),
    "one sentence": Case(plain, **same(1, 4, 16, 64)),
    "no batch": Case(plain, **same(4, 16, 64)),
    "heads last": Case(heads_last, **same(2, 16, 4, 64)),
    "keys stored as columns": Case(keys_stored_as_columns, key=(2, 4, 64, 16)),
    "a head dim of 20": Case(plain, **same(2, 4, 16, 20)),
    "a head dim of 1": Case(plain, **same(2, 4, 16, 1)),
    "a head dim of 72": Case(plain, **same(2, 4, 16, 72)),
    "narrow values": Case(plain, value=(2, 4, 16, 32)),
    "wide values": Case(plain, value=(2, 4, 16, 128)),
    "grouped heads": Case(shared, **keys_of(2, 2, 16, 64)),
    "one key head": Case(shared, **keys_of(2, 1, 16, 64)),
    "grouped heads, a bias for all": Case(shared_and_added, **keys_of(2, 2, 16, 64), rest=bias(16, 16)),
    "grouped heads, a bias of each": Case(shared_and_added, **keys_of(2, 2, 16, 64), rest=bias(4, 16, 16)),
    "padding": Case(hidden, rest=kept(2, 1, 1, 16)),
    "padding by a number": Case(lowered, rest=kept(2, 1, 1, 16)),
    "rows that keep nothing": Case(lowered, rest=lambda dtype: [randn(2, 1, 16, 1, seed=7) > 0]),
    "a condition stored as columns": Case(hidden_columns, rest=_kept_columns),
    "a bias of each head": Case(added, rest=bias(1, 4, 16, 16)),
    "a bias of each key": Case(added, rest=bias(2, 1, 1, 16)),
    "a bias of each row": Case(added, rest=bias(1, 1, 16, 1)),
    "a bias stored as columns": Case(added_columns, rest=bias(16, 16)),
    "a bias in float32": Case(added_in_float32, rest=lambda dtype: bias(16, 16)(FP32)),
    "a window": Case(window),
    "slopes": Case(sloped),
}


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_takes_what_it_is_handed(name: str, dtype: torch.dtype) -> None:
    inputs = CASES[name].inputs(dtype)
    expected = CASES[name].program(*(x.double() if x.is_floating_point() else x for x in inputs))
    close = {"atol": 2e-6, "rtol": 1e-5} if dtype == FP32 else {"atol": 3e-2, "rtol": 3e-2}
    found = handed_over(CASES[name].program, inputs, CHECKS)
    assert list(found) == list(CHECKS)
    for device, handed in found.items():
        assert len(handed.calls) == (handed.site.target == "sdpa"), (device, handed.site.reason)
        for call_made in handed.calls:
            assert taken_by(device, call_made), (device, why_not(device, call_made))
        assert handed.result is not None
        torch.testing.assert_close(handed.result.double(), expected, **close, msg=lambda m, of=device: f"{of}: {m}")


def test_every_kernel_is_handed_something() -> None:
    """Else what is said above says nothing."""
    taken = set()
    for name, dtype in product(("no mask", "one row"), (BF16, FP32)):
        for device, handed in handed_over(CASES[name].program, CASES[name].inputs(dtype), CHECKS).items():
            taken.update(taken_by(device, call_made) for call_made in handed.calls)
    assert taken == {kernel for kernels in CHECKS.values() for kernel in kernels}


# ---------------------------------------------------------------- the tables against the checks

LENGTHS = ((1, 16), (4, 3), (8, 8), (9, 9), (9, 16), (8, 0), (9, 0))
DIMS = (
    (1, None),
    (20, None),
    (64, None),
    (72, None),
    (64, 32),
    (96, None),
    (256, None),
    (512, None),
    (520, None),
    (577, None),
)


def made(given: dict[str, Any]) -> Handed:
    """The call with tensors of the same sizes, without memory."""
    batch, heads, rows, keys, dim = 2, 4, given["q_len"], given["kv_len"], given["dim"]
    shapes = ((heads, rows, dim), *((heads // given["groups"], keys, d) for d in (dim, given["value_dim"] or dim)))
    operands = [
        torch.empty(batch, *shape, dtype=given["dtype"], device="meta", requires_grad=given["grad"]) for shape in shapes
    ]
    mask = None
    if given["mask"] in ("boolean", "additive"):
        dtype = torch.bool if given["mask"] == "boolean" else given["dtype"]
        mask = torch.empty(1, 1, rows, keys, dtype=dtype, device="meta")
    return Handed(*operands, mask, given["dropout"], given["mask"] == "causal", 0.3, given["groups"] > 1)


@pytest.mark.parametrize("device", CHECKS)
def test_the_rules_name_the_kernel_that_torch_picks(device: str) -> None:
    """Those of the rules that torch checks itself, over sizes, dtypes, masks, groups, dropout and gradients."""
    names = ("q_len", "kv_len", "dim", "value_dim", "dtype", "mask", "groups", "dropout", "grad")
    masks, dtypes = ("none", "causal", "boolean", "additive"), (FP32, FP64, BF16)
    choices = product(LENGTHS, DIMS, dtypes, masks, (1, 2), (0.0, 0.1), (False, True))
    of = registry.by_name(device)
    for lengths, dims, *rest in choices:
        given = dict(zip(names, (*lengths, *dims, *rest)))
        with torch.set_grad_enabled(given["grad"]):
            handed = made(given)
            assert picked_by_torch(call(device=of, **given)) == taken_by(device, handed), (
                given,
                why_not(device, handed),
            )
