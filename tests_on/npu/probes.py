"""What is asked of the real torch_npu: each function runs in a process of its own that has it loaded, and prints JSON.

`python probes.py NAME[:NUMBER] ...`, with the environment of `stub_libraries.environment`.
"""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
import torch_npu  # noqa: F401  registers the operators and the device
from npu_schemas import SCHEMAS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import attn_pass
from attn_pass.devices.npu.rules import DispatchedCall, dispatched
from attn_pass.devices.registry import device_for

HALF, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
MATH = "_scaled_dot_product_attention_math"


class Recorded(TorchDispatchMode):
    """The operators that were reached, with their arguments by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema.arguments
        named = {a.name: a.default_value for a in schema if a.has_default_value()}  # which the dispatcher leaves out
        named |= dict(zip((a.name for a in schema), args)) | (kwargs or {})
        self.seen.append((func._schema.name, named))
        return func(*args, **(kwargs or {}))


def fake() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


def empty(*shape: int, dtype: torch.dtype = HALF, grad: bool = False) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="npu", requires_grad=grad)


# ---------------------------------------------------------------- probes


def schemas() -> Any:
    """The operators as they print themselves."""
    return {name: str(getattr(torch.ops.npu, name).default._schema) for name in SCHEMAS}


def shapes() -> Any:
    """The shapes and dtypes of results, by the wheel's own fake kernels."""
    from cases import SHAPES

    found = {}
    with fake():
        for name, (operator, shape, more) in SHAPES.items():
            tensors = [empty(*s, dtype=HALF) for s in shape]
            results = getattr(torch.ops.npu, operator).default(*tensors, **more)
            found[name] = [[list(r.shape), str(r.dtype)] for r in results if isinstance(r, torch.Tensor)]
    return found


def _configurations(step: int) -> Iterator[tuple[Any, ...]]:
    every = itertools.product(
        (HALF, BF16, FP32, FP64),
        ((8, 8), (8, 2)),
        (40, 64, 65, 256, 512, 520),
        (None, 64),
        (4, 3),
        ("none", "boolean", "additive"),
        (False, True),
        (False, True),
    )
    for number, one in enumerate(every):
        if number % step == 0 and not (one[5] != "none" and one[6]):  # torch refuses a mask beside is_causal
            yield one


def dispatch(step: int = 1) -> Any:
    """What torch's own call ends in, beside what attn_pass says it does."""
    family = device_for(torch.device("npu")).generation
    wrong: list[str] = []
    count, operators = 0, set()
    with fake():
        for one in _configurations(step):
            dtype, (heads, kv_heads), dim, value_dim, rank, mask, causal, grad = one
            value_dim = value_dim or dim
            if rank == 3:
                sizes, kv_sizes, heads, kv_heads = (2, 128), (2, 128), 2, 2
            else:
                sizes, kv_sizes = (2, heads, 128), (2, kv_heads, 128)
            q = empty(*sizes, dim, dtype=dtype, grad=grad)
            k, v = empty(*kv_sizes, dim, dtype=dtype, grad=grad), empty(*kv_sizes, value_dim, dtype=dtype, grad=grad)
            given = {"none": None, "boolean": torch.empty(128, 128, dtype=torch.bool, device="npu")}
            given["additive"] = torch.empty(128, 128, dtype=dtype, device="npu")
            gqa = {"enable_gqa": True} if heads != kv_heads else {}
            with Recorded() as mode, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                F.scaled_dot_product_attention(q, k, v, attn_mask=given[mask], is_causal=causal, **gqa)
            found = next((n.partition("::")[2] for n, _ in mode.seen if n.startswith("npu::npu_")), "")
            said = dispatched(DispatchedCall(dtype, rank, heads, kv_heads, (dim, dim, value_dim), mask), family)
            count += 1
            operators.add(found)
            if found != said:
                wrong.append(f"{one}: {found or 'unfused'}, said {said or 'unfused'}")
    return {"count": count, "wrong": wrong, "operators": sorted(operators), "generation": family}


def arguments() -> Any:
    """What torch_npu itself sends for the plain, the causal and the masked call, as plain values."""
    found = {}
    with fake():
        q, k = empty(2, 8, 128, 64), empty(2, 2, 256, 64)
        hidden = torch.empty(2, 1, 128, 256, dtype=torch.bool, device="npu")
        for name, more in {"plain": {}, "causal": {"is_causal": True}, "masked": {"attn_mask": hidden}}.items():
            with Recorded() as mode:
                F.scaled_dot_product_attention(q, k, k, enable_gqa=True, **more)
            ((_, given),) = [s for s in mode.seen if s[0].startswith("npu::npu_")]
            mask = given.get("atten_mask")
            plain = {n: v for n, v in given.items() if isinstance(v, (int, float, str))}
            found[name] = {**plain, "mask": None if mask is None else list(mask.shape)}
            found[name]["made"] = [n.partition("::")[2] for n, _ in mode.seen]
    return found


class Layers(torch.nn.Module):
    """Two hand-written layers over one matrix of 0 and the lowest number."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = torch.full((q.size(2), k.size(2)), torch.finfo(q.dtype).min, dtype=q.dtype, device=q.device).triu(1)
        for _ in range(2):
            groups = q.size(1) // k.size(1)
            keys, values = (x.repeat_interleave(groups, 1) for x in (k, v))
            q = (q @ keys.mT * 0.125 + mask).softmax(-1) @ values
        return q


class Called(torch.nn.Module):
    """Two of torch's own calls; the softmax of a 950 cannot be traced over stubs."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        groups = q.size(1) // k.size(1)
        for _ in range(2):
            keys, values = (x.repeat_interleave(groups, 1) for x in (k, v))
            q = F.scaled_dot_product_attention(q, keys, values, is_causal=True)
        return q


def _calls(graph: torch.fx.Graph) -> list[str]:
    return [str(n.target) for n in graph.nodes if n.op == "call_function"]


def rewriting(by_hand: int) -> Any:
    """An exported program on the device ``npu``, rewritten: reports, operators, and the one mask."""
    found: dict[str, Any] = {}
    with fake(), torch.no_grad():
        inputs = (empty(2, 8, 128, 64), empty(2, 2, 128, 64), empty(2, 2, 128, 64))
        program = torch.export.export(Layers() if by_hand else Called(), inputs)
    report = attn_pass.rewrite(program, choose="fused", on_error="raise")
    found["targets"] = [s.target for s in report.sites]
    found["reasons"] = [s.reason for s in report.sites]
    found["calls"] = _calls(program.graph)
    found["device"] = device_for(torch.device("npu")).name
    return found


def joint() -> Any:
    """Dynamo's graph of a training step rewritten by `attn_pass.wrap`, and what AOTAutograd makes of it."""
    from functorch.compile import aot_function, make_boxed_func

    found: dict[str, Any] = {}

    def keep(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        found["rewritten"] = _calls(gm.graph)
        found["graph"] = gm
        return gm.forward

    backend = attn_pass.wrap(keep, on_error="raise")
    mode = fake()
    with mode:
        inputs = [empty(2, 8, 128, 64, dtype=FP32, grad=True)]
        inputs += [empty(2, 2, 128, 64, dtype=FP32, grad=True) for _ in range(2)]
        with attn_pass.record() as report:
            torch.compile(Layers(), backend=backend)(*inputs)
        gm = found.pop("graph")

        def kept(name: str) -> Any:
            def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
                found[name] = _calls(graph.graph)
                return make_boxed_func(graph.forward)

            return compiler

        traced = aot_function(lambda *x: gm(*x), fw_compiler=kept("forward"), bw_compiler=kept("backward"))
        out = traced(*inputs)
        (out[0] if isinstance(out, (tuple, list)) else out).sum().backward()
    found["targets"] = [s.target for s in report.sites]
    return found


def device() -> Any:
    """What attn_pass makes of the name the runtime gives."""
    here = device_for(torch.device("npu"))
    wrapped = repr(attn_pass.wrap("npu"))  # torchair's backend, by the name torch_npu registers
    return {"name": here.name, "generation": here.generation, "kernels": here.kernels, "wrapped": wrapped}


if __name__ == "__main__":
    results = {}
    for asked in sys.argv[1:]:
        name, *numbers = asked.split(":")
        results[asked] = globals()[name](*map(int, numbers))
    print("\n" + json.dumps(results))
