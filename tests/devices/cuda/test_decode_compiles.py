"""The decode kernels as Inductor passes them to Triton and ptxas, for GPUs that are not present: they fit, and are
fast.

Signature, constants, divisibility and strides are those in the code that Inductor writes (`lowered_decode.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from forked import ask
from once import once

triton = pytest.importorskip("triton")

from attn_pass.compat import TORCH_VERSION  # noqa: E402
from attn_pass.devices.cuda.decode_operator import Room, Tiles, tiles_for  # noqa: E402

NVIDIA = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
KIB = 1 << 10
SHARED = {80: 163 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB}  # of a block (CUDA C++ programming guide)
LARGE = "large tiles"  # on every GPU; the other programs on Hopper
# Bytes on the stack, which are ptxas's choice: Triton 3.6's keeps to 128 registers there and puts one of 64 rows aside;
# with 3.8 and 3.9 one or two kernels of the large tiles do.
SPILLED = {((3, 6), 100): 8, ((3, 8), 90): 8, ((3, 8), 100): 8, ((3, 9), 89): 8, ((3, 9), 90): 40}
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
inductor = pytest.mark.skipif(not (NVIDIA / "cuobjdump").exists(), reason="this Triton has no tools for NVIDIA")


@cache
def lowered(capability: int) -> dict[str, dict[str, Any]]:
    """Each program's code, launches and kernels on that GPU."""
    jobs = {str(c): () if c == 90 else (LARGE,) for c in SHARED}
    script = Path(__file__).with_name("lowered_decode.py")
    document: dict[str, dict[str, dict[str, Any]]] = json.loads(once("decode on GPUs", lambda: ask(script, jobs)))
    return document[str(capability)]


def kernels(capability: int, function: str, program: str | None = None) -> Iterator[dict[str, Any]]:
    for name, graph in lowered(capability).items():
        for binaries in graph["kernels"].values() if program in (None, name) else ():
            yield from (binary for binary in binaries if binary["function"] == function)


@inductor
@pytest.mark.parametrize("capability", list(SHARED))
def test_they_fit(capability: int) -> None:
    """Shared memory within what a block may have, no register spilled, products on the tensor cores."""
    tight = list(kernels(capability, "attend"))
    asked = {(k["constants"]["DIM"], k["constants"]["MASK"]) for k in kernels(capability, "attend", LARGE)}
    assert asked == {(128, 1), (128, 2), (256, 0), (256, 1), (256, 2)}
    assert len(tight) >= (20 if capability == 90 else 6)
    spilled = SPILLED.get((VERSION, capability), 0)
    for kernel in tight:
        assert kernel["shared"] <= SHARED[capability] and kernel["spilled"] <= spilled, kernel["constants"]
        assert re.search(r"wgmma\.mma_async|tcgen05\.mma|mma\.sync", kernel["ptx"])
        # A Python float, whatever a launch in eager mode makes of it; narrowed since torch 2.15.
        assert kernel["signature"]["scale"] == ("fp64" if TORCH_VERSION < (2, 15) else "fp32")
    joins = [kernel["spilled"] for kernel in kernels(capability, "join")]
    assert joins and not any(joins)


@inductor
@pytest.mark.parametrize(
    "program", ["query made in the graph", "dynamic", "dynamic, a mask of one row", "lengths", "sink"]
)
def test_keys_and_values_are_copied_sixteen_bytes_at_a_time_ahead_of_their_use(program: str) -> None:
    (kernel,) = kernels(90, "attend", program)
    copies = re.findall(r"cp\.async\.c[a-z.]+[0-9. a-zA-Z:_]*\[.*?\], \[.*?\], (0x[0-9a-f]+)", kernel["ptx"])
    assert kernel["stages"] > 1 and copies.count("0x10") >= 16
    assert set(copies) <= {"0x10", "0x4"} if kernel["constants"]["MASK"] else set(copies) == {"0x10"}


@inductor
def test_a_mask_is_read_ahead_of_the_product_and_once_for_rows_that_share_it() -> None:
    of_one_row = [k for k in kernels(90, "attend", "shapes") if k["constants"]["ONE_MASK_ROW"]]
    assert len(of_one_row) == 3 and {k["constants"]["MASK"] for k in of_one_row} == {2}
    for kernel in of_one_row:
        product = re.search(r"wgmma\.mma_async|mma\.sync", kernel["ptx"])
        assert product is not None
        loads = [match.start() for match in re.finditer(r"ld\.global\.b(8|16) ", kernel["ptx"])]
        assert loads and max(loads) < product.start(), kernel["constants"]
    (dynamic,) = kernels(90, "attend", "dynamic, a mask of one row")
    assert dynamic["constants"]["ONE_MASK_ROW"] and dynamic["constants"]["MASK"] == 1


@inductor
def test_a_query_made_in_the_graph_is_written_once_and_nothing_else() -> None:
    graph = lowered(90)["query made in the graph"]
    names = [name for name, _ in graph["calls"]]
    assert [graph["kernels"][n][0]["function"] for n in names[1:]] == ["attend", "join"]
    (_, of_query), (_, of_attend), _ = graph["calls"]
    (made,) = {a for a in of_query if a.startswith("buf")}
    assert sum(made in a for a in of_attend) == 1


@inductor
@pytest.mark.parametrize(("program", "logarithms"), [("dynamic", 0), ("lengths", 1), ("sink", 1)])
def test_logarithms_are_computed_if_they_are_needed(program: str, logarithms: int) -> None:
    """Beside three buffers for the splits, and those of the result, and of what is made before or after."""
    dtypes = [dtype for _, dtype in lowered(90)[program]["allocated"]]
    assert dtypes.count("float32") == 3 + logarithms
    assert dtypes.count("bfloat16") == len(dtypes) - dtypes.count("float32") <= 2


def _copies(graph: dict[str, Any]) -> list[str]:
    """Lines of the generated code that copy, but for those that name a file: a checkout may lie in any folder."""
    lines = (line for line in graph["code"].splitlines() if "File:" not in line and "path:" not in line.lower())
    return [line for line in lines if ".copy_(" in line or "clone" in line]


@inductor
@pytest.mark.parametrize("program", ["shapes", "query made in the graph", "dynamic", "lengths", "sink", "a cache"])
def test_no_operand_is_copied(program: str) -> None:
    """A kernel whose analysis fails counts as one that writes all it is given, and everything is cloned for it."""
    graph = lowered(90)[program]
    of_attend = [a for name, a in graph["calls"] if graph["kernels"][name][0]["function"] == "attend"]
    assert of_attend and all("arg" in a for arguments in of_attend for a in arguments[1:3])
    pointwise = [name for name, _ in graph["calls"] if name.startswith("triton_")]
    made = {"query made in the graph": 1, "dynamic": 1, "sink": 1, "a cache": 2}  # the two numbers of its range
    assert len(pointwise) == made.get(program, 0)
    assert not _copies(graph)


@inductor
def test_a_mask_that_is_passed_in_is_looked_at_once_for_all_layers() -> None:
    graph = lowered(90)["a mask passed in"]
    functions = [graph["kernels"][name][0]["function"] for name, _ in graph["calls"]]
    looking = functions[: functions.index("attend")]
    assert functions[len(looking) :] == ["attend", "join"] * 2
    assert 1 <= len(looking) <= 3 and all(name.startswith(("triton_red", "triton_per")) for name in looking)
    (mask,) = (a for a in graph["calls"][0][1] if a.startswith("arg"))
    attended = [a for (_, a), function in zip(graph["calls"], functions) if function == "attend"]
    assert all(any(mask in argument for argument in arguments) for arguments in attended)
    assert not _copies(graph)


def room(capability: int) -> Room:
    return Room(SHARED[capability], capability // 10)


@inductor
def test_two_blocks_fit_a_multiprocessor_where_the_splits_are_counted_for_two() -> None:
    tight = [k for k in kernels(90, "attend", "shapes") if k["constants"]["DIM"] <= 128 and not k["constants"]["MASK"]]
    assert len(tight) == 4
    for kernel in tight:
        assert 2 * (kernel["shared"] + KIB) <= 228 * KIB


def test_four_warps_where_their_registers_hold_the_result_and_a_block_of_the_mask() -> None:
    warps = {
        (rows, dim, mask): tiles_for(rows, dim, dim, mask, room(90)).warps
        for rows, dim in ((32, 128), (64, 128), (32, 256), (64, 256))
        for mask in (0, 4)
    }
    assert {case for case, number in warps.items() if number == 8} == {
        *((64, 128, 4), (32, 256, 4), (64, 256, 0), (64, 256, 4))
    }
    assert tiles_for(32, 256, 256, 4, room(90), one_mask_row=True).warps == 4
    assert tiles_for(64, 128, 128, 0, room(80)).warps == 8


def test_tiles_are_smaller_where_there_is_little_shared_memory() -> None:
    assert tiles_for(64, 128, 128, 0, room(90)) == Tiles(64, 64, 3, 4)
    assert tiles_for(64, 256, 256, 0, room(90)) == Tiles(64, 64, 2, 8)
    assert tiles_for(64, 256, 256, 0, room(100)) == Tiles(64, 32, 2, 8)
    assert tiles_for(64, 256, 256, 0, room(89)).rows == 32
    assert tiles_for(1, 64, 64, 0, room(89)) == Tiles(16, 64, 3, 4)
    assert tiles_for(64, 128, 128, 4, room(80)).stages < tiles_for(64, 128, 128, 0, room(80)).stages
    one_row = tiles_for(64, 128, 128, 4, room(80), one_mask_row=True)
    assert one_row == tiles_for(64, 128, 128, 0, room(80))
