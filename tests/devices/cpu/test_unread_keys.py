"""Keys that no row keeps are not read: behind the last one that may be, the cache's memory cannot be read at all."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import torch
from against_eager import NEG_INF, qkv, same
from torch import Tensor

import attn_pass
from attn_pass.devices.cpu.kernel import build

LOWEST = torch.finfo(torch.float32).min

# Keys and values end with pages that nobody may read; prefetching them is no reading.
PROGRAM = """
import ctypes, mmap, os
import torch
from attn_pass.devices.cpu.kernel import operator

child = os.fork()
if child:
    _, status = os.waitpid(child, 0)
    print("with one panel less:", os.waitstatus_to_exitcode(status), flush=True)
VALID = 128 if child else 64

def cache(keys=1024, dim=64):
    memory = mmap.mmap(-1, keys * dim * 4)
    held = torch.frombuffer(memory, dtype=torch.float32)
    held.copy_(torch.randn(keys * dim))
    start = held.data_ptr() + VALID * dim * 4
    assert start % mmap.PAGESIZE == 0
    length = ctypes.c_size_t((keys - VALID) * dim * 4)
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start), length, 0) == 0
    return held.view(1, 1, keys, dim)

def given(rows):
    kept = (keys <= 100).expand(1, 1, rows, -1)
    below = keys <= torch.arange(101 - rows, 101)[:, None]
    yield "an end", {"ends": torch.tensor([101])}, kept
    yield "a number", {"end": 101}, kept
    yield "causal from a position", {"shift": torch.tensor([101 - rows]), "after": 0}, below
    yield "a boolean mask", {"keep": kept}, kept
    yield "a boolean mask of each row", {"keep": below[None, None]}, below
    if rows <= 8:  # many rows pack all keys beside a mask that is added
        yield "an added mask", {"bias": torch.zeros(1024).masked_fill(~kept, float("-inf"))}, kept

torch.manual_seed(0)
keys, k, v = torch.arange(1024), cache(), cache()
for rows in (1, 3, 8, 40, 100):  # a few, many, more than one task has
    q = torch.randn(1, 2, rows, 64)
    for name, bounds, kept in given(rows):
        out = operator.OPERATOR(q, k, v, 0.125, **bounds)
        valid = (t[:, :, :101].expand(1, 2, 101, 64) for t in (k, v))
        known = torch.nn.functional.scaled_dot_product_attention(q, *valid, attn_mask=kept[..., :101])
        torch.testing.assert_close(out, known, atol=1e-5, rtol=1e-5)
        print(rows, name, flush=True)
print("done")
"""


@pytest.mark.skipif(bool(build.missing()), reason="no compiler")
def test_what_no_row_keeps_is_not_read() -> None:
    """The check can fail: in a process with one panel less there are keys to be read in those pages."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    told, *cases, last = done.stdout.splitlines()
    assert last == "done" and len(cases) == 28, (done.returncode, done.stdout, done.stderr[-2000:])
    assert told == f"with one panel less: {-signal.SIGSEGV}"


# ---------------------------------------------------------------- an added mask that is an input of the graph


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    out = q
    for _ in range(2):  # layers
        out = torch.nn.functional.scaled_dot_product_attention(out, k, v, attn_mask=mask)
    return out


def added(kept: Tensor, number: float) -> Tensor:
    return torch.zeros(kept.shape).masked_fill(~kept, number)


def nodes(*inputs: Tensor) -> list[torch.fx.Node]:
    found: list[torch.fx.Node] = []

    def seen(gm: torch.fx.GraphModule, _: object) -> object:
        found.extend(gm.graph.nodes)
        return gm

    torch._dynamo.reset()
    backend = attn_pass.wrap(seen, choose="fused", targets=("cpu_kernel",), on_error="raise")
    with torch.no_grad():
        torch.compile(attend, backend=backend)(*inputs)
    return found


KEPT = {
    "a position": torch.arange(70) <= 11,
    "left padding": torch.arange(70) >= torch.tensor([3, 60])[:, None, None, None],
    "a ring": (torch.arange(70) - 50) % 70 < 40,
    "rows": torch.arange(70) <= torch.tensor([4, 30, 2])[:, None],
    "a row with nothing valid": torch.arange(70) < torch.tensor([0, 5, 70])[:, None],
}


@pytest.mark.parametrize("number", [LOWEST, NEG_INF, -1e17, -1e9, -5.0])
@pytest.mark.parametrize("name", KEPT)
def test_a_mask_of_numbers_is_inspected(name: str, number: float) -> None:
    kept = KEPT[name]
    if number == NEG_INF and "nothing" in name:
        pytest.skip("a call gives NaN there, and what fused kernels give is the contract's")
    mask = added(kept, number)
    mask = mask if mask.dim() == 4 else mask.view(1, 1, -1, 70)
    q, k, v = qkv(2, 4, 3, 70, 64, kv_heads=4)
    with torch.no_grad():
        same(attend, q * 3, k * 3, v, mask, rewritten=2, targets=("cpu_kernel",))


def test_a_mask_of_numbers_is_inspected_once_for_all_layers() -> None:
    found = nodes(*qkv(2, 4, 1, 70, 64), added(KEPT["a position"], LOWEST).expand(2, 1, 1, 70))
    calls = [n for n in found if "attn_pass.attention" in str(n.target)]
    assert len(calls) == 2 and calls[0].kwargs["keep"] is calls[1].kwargs["keep"]


def is_inspected_once(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> None:
    """The program is right, and both of its layers are told the same keys."""
    with torch.no_grad():
        same(attend, q * 3, k * 3, v, mask, rewritten=2, targets=("cpu_kernel",))
    calls = [n for n in nodes(q, k, v, mask) if "attn_pass.attention" in str(n.target)]
    assert len(calls) == 2 and calls[0].kwargs["keep"] is calls[1].kwargs["keep"]


@pytest.mark.parametrize("number", [LOWEST, -1e9])
@pytest.mark.parametrize("name", [n for n in KEPT if "rows" not in n and "row with" not in n])
def test_a_mask_of_numbers_beside_many_rows_is_inspected(name: str, number: float) -> None:
    """A chunk of a prompt over a cache, whose mask is made once for all layers."""
    rows = torch.arange(70) <= torch.arange(20)[:, None] + 9
    mask = added(KEPT[name] & rows, number)
    mask = mask if mask.dim() == 4 else mask[None, None]
    is_inspected_once(*qkv(2, 8, 20, 70, 64, kv_heads=8), mask)


@pytest.mark.parametrize("number", [LOWEST, NEG_INF, -1e9, -5.0])
@pytest.mark.parametrize("name", [n for n in KEPT if n != "rows" and "row with" not in n])
def test_a_mask_of_numbers_that_is_the_same_for_all_rows_is_inspected(name: str, number: float) -> None:
    """As padding is: an element of it belongs to the products of all rows, so that few heads suffice."""
    mask = added(KEPT[name], number).view(-1, 1, 1, 70)
    is_inspected_once(*qkv(2, 4, 40, 70, 64, kv_heads=4), mask)


@pytest.mark.parametrize("number", [LOWEST, NEG_INF, -1e17, -1e9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_mask_of_numbers_keeps(number: float, dtype: torch.dtype) -> None:
    """What is as low as the highest of its row is kept, and what is compared with NaN."""
    graphs: list[torch.fx.GraphModule] = []

    def seen(gm: torch.fx.GraphModule, _: object) -> object:
        graphs.append(gm)
        return gm

    kept = torch.arange(70) < torch.tensor([[40], [0], [70], [9]])
    mask = added(kept, number).to(dtype)
    mask[3, 20] = torch.nan
    inputs = (*(x.to(dtype) for x in qkv(4, 4, 40, 70, 64, kv_heads=4)), mask[:, None, None, :])
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(attend, backend=attn_pass.wrap(seen, choose="fused", targets=("cpu_kernel",)))(*inputs)
    run = torch.fx.Interpreter(graphs[0], garbage_collect_values=False)
    run.run(*inputs)
    (keep,) = {n.kwargs["keep"] for n in graphs[0].graph.nodes if "attn_pass.attention" in str(n.target)}
    wanted = kept.clone()
    wanted[[1, 3]] = True
    assert torch.equal(run.env[keep].view(4, 70), wanted)


WHOLE = {
    "many rows of few heads": (20, 4, 64, torch.zeros(1, 1, 20, 70)),
    "many rows of each head": (20, 16, 64, torch.zeros(1, 16, 20, 70)),
    "the same for all rows, of which there are few": (40, 4, 64, torch.zeros(1, 1, 1, 70)),
    "large beside the keys": (16, 1, 16, torch.zeros(1, 1, 16, 70)),
    "large in each head": (4, 4, 16, torch.zeros(1, 4, 4, 70)),
}


@pytest.mark.parametrize("name", WHOLE)
def test_where_a_mask_is_not_inspected(name: str) -> None:
    q_len, heads, dim, mask = WHOLE[name]
    calls = [n for n in nodes(*qkv(1, heads, q_len, 70, dim), mask) if "attn_pass.attention" in str(n.target)]
    assert calls and not any("keep" in n.kwargs for n in calls)
