"""The decode kernels as AOTInductor's C++ launches them: it hands over what they were compiled to take.

The driver reads each argument through a pointer, in as many bytes as the binary says: one too few, or one of another
size, and it reads other memory of the process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from forked import ask
from once import once

from attn_pass.compat import TORCH_VERSION

triton = pytest.importorskip("triton")

NVIDIA = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
pytestmark = pytest.mark.skipif(not (NVIDIA / "cuobjdump").exists(), reason="this Triton has no tools for NVIDIA")


@cache
def launches() -> Mapping[str, Mapping[str, Mapping[str, list[Any]]]]:
    """Of each program each launch: the bytes of what is given and of what is taken."""
    script = Path(__file__).with_name("packaged_decode.py")
    document = json.loads(once("decode in packages", lambda: ask(script, {"all": ()})))["all"]
    assert isinstance(document, dict)
    return document


@pytest.mark.parametrize("program", ["any number of keys", "all given", "any batch"])
def test_every_argument_is_the_parameter_of_its_place(program: str) -> None:
    kernels = launches()[program]
    assert {name.split("_")[0] for name in kernels} == {"attend", "join"}
    for name, launch in kernels.items():
        assert launch["given"] == launch["taken"], name
        assert len(launch["taken"]) > 5, name


def test_what_is_none_is_no_argument() -> None:
    """Mask, lengths, starts and logarithms are parameters only where they are tensors."""
    none, given = launches()["any number of keys"], launches()["all given"]
    # Operands, partial results, the scale, two scratches; partial results, the result, two scratches.
    pointers = 3 + 3 + (TORCH_VERSION < (2, 15)) + 2  # the scale is float64 before 2.15
    assert _wide(none, "attend") == [pointers] and _wide(none, "join") == [3 + 1 + 2]
    # Lengths and starts, and the mask; logarithms of the one of them.
    assert sorted(_wide(given, "attend")) == [pointers + 1, pointers + 2] and sorted(_wide(given, "join")) == [6, 6 + 1]


def _wide(program: Mapping[str, Mapping[str, list[Any]]], function: str) -> list[int]:
    """Of each launch of that kernel the number of parameters of eight bytes: all pointers, and a scale in float64."""
    return [launch["taken"].count(8) for name, launch in program.items() if name.startswith(function)]
