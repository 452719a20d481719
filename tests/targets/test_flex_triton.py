"""FlexAttention as the pass emits it for a GPU that is not present: Inductor's Triton templates, compiled as usual.

What the templates are given is in the code that Inductor writes (`lowered_flex.py`).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forked import ask
from once import once

triton = pytest.importorskip("triton")

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
SHARED = {89: 99 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes a thread block may have
IN_HALF = ("half precision", "few queries, half precision")  # on every GPU; the others on Hopper alone
IN_INFERENCE = (
    *("prefix", "alibi", "one query", "dense bias", "few queries, half precision"),
    *("padding, filled", "few queries, padding"),
)
# Bytes on the stack, in tiles of torch's own: for float32 with bounds checked on both sides, and in a backward.
SPILLED = {(90, "odd sizes"): 312, (100, "half precision"): 600}
DECODING = ("one query", IN_HALF[1], "few queries, padding")


@pytest.mark.slow
@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this Triton has no tools for NVIDIA")
@pytest.mark.parametrize("capability", list(SHARED))
def test_the_templates_compile(capability: int) -> None:
    """Forward, backward and the one for few queries: within the shared memory of a block, registers not spilled."""
    jobs = {str(c): () if c == 90 else IN_HALF for c in SHARED}
    script = Path(__file__).with_name("lowered_flex.py")
    document = json.loads(once("FlexAttention on GPUs", lambda: ask(script, jobs)))[str(capability)]
    assert len(document) == (14 if capability == 90 else len(IN_HALF))
    for name, kernels in document.items():
        backward = [k["function"].startswith("triton_tem_") and "DELTA" in str(k["signature"]) for k in kernels]
        assert backward == ([False] if name in IN_INFERENCE else [False, True]), name
        # Few queries are shared out by their keys: beside the result the maxima and sums of each part are written.
        assert {"arg_M", "arg_L"} <= kernels[0]["signature"].keys() if name in DECODING else True, name
        assert name in DECODING or {"arg_LSE", "arg_KV_IDX"} <= kernels[0]["signature"].keys(), name
        assert all(
            k["shared"] <= SHARED[capability] and k["spilled"] <= SPILLED.get((capability, name), 0) for k in kernels
        ), name
        assert all(k["writes_lse"] == (name not in IN_INFERENCE) for k in kernels[:1] if name not in DECODING), name
        half = "half precision" in name
        assert kernels[0]["signature"]["arg_Q"] == ("*bf16" if half else "*fp32"), name
