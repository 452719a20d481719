"""What flex emits for CUDA as Inductor's Triton kernels, rendered and compiled for an H200 that need not be there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attn_pass.compat import TORCH_VERSION

pytest.importorskip("triton")
FOLDER = Path(__file__).parent
SHARED = 227 << 10  # bytes a thread block may have on an H200


@pytest.mark.slow
@pytest.mark.skipif(TORCH_VERSION < (2, 13), reason="written for the Inductor of torch 2.13")
def test_the_templates_compile() -> None:
    path = os.pathsep.join([str(FOLDER), str(FOLDER.parent), *(p for p in sys.path if p)])
    done = subprocess.run(
        [sys.executable, str(FOLDER / "rendered.py")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    decoding = ("one query", "few queries, half precision")
    for name, kernels in found.items():
        forward = "triton_flex_decoding" if name in decoding else "triton_flex_attention"
        assert kernels[0]["template"] == forward, name
        assert [k["template"] for k in kernels[1:]] in ([], ["triton_flex_attention_backward"]), name
        assert all(k["shared"] <= SHARED for k in kernels), name
    assert sum(len(kernels) for kernels in found.values()) == 10 + 7
