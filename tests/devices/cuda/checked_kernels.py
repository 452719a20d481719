"""The self-check of the decode kernel, and of copies with one error each, under Triton's interpreter.

Prints what it says of each as JSON. A process of its own, see `bench.gpu.interpreted`.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch

if __name__ == "__main__":
    import bench.gpu.interpreted  # noqa: F401  # first: it tells Triton to interpret

from attn_pass.devices.cuda import decode_operator, decode_triton, self_check

Results = tuple[torch.Tensor, torch.Tensor]
RIGHT = "as it is"
MISTAKES = {
    "scale": ("tl.cast(scale, tl.float32) * 1.4426950408889634", "tl.cast(scale, tl.float32)"),
    "heads of a group": ("head = kv_head * GROUPS + row // q_len", "head = kv_head * GROUPS + row % GROUPS"),
    "boolean masks": ("kept & (given != 0)", "kept & (given == 0)"),
    "row of a mask": ("kv_head64 * GROUPS * m1 + keys64 * m3", "kv_head64 * GROUPS * m1 + (keys64 + 1) * m3"),
    "rows of a mask": ("at[:, None] * m2", "head[:, None] * m2"),
    "base of added masks": ("bias * 1.4426950408889634", "bias"),
    "end of the window": ("distance <= window", "distance < window"),
    "start of the window": ("tl.maximum(end - q_len - window, read_from)", "tl.maximum(end - window, read_from)"),
    "last key": ("inside = keys < read_to", "inside = keys <= read_to"),
    "valid keys": ("end = tl.load(lengths + batch64 * l0)", "end = tl.load(lengths) + 1"),
    "the first valid key": ("tl.maximum(tl.load(starts + batch64 * s0), 0)", "tl.load(starts + batch64 * s0) + 1"),
    "rows that keep none": (
        "(keeps_none[:, None] & inside[None, :] & real[:, None])",
        "(keeps_none[:, None] & inside[None, :] & (row < 0)[:, None])",
    ),
    "alignment of causal masks": ("at[:, None] + (end - q_len)", "at[:, None] + (kv_len - q_len)"),
    "empty rows": ("divisor = tl.where(whole == 0.0, 1.0, whole)", "divisor = whole"),
    "weights of splits": ("* tl.exp2(part - base[:, None])", ""),
    "base of the logarithm": ("(top + tl.log2(total)) * 0.6931471805599453", "top + tl.log2(total)"),
    "empty rows of one split": ("divisor = tl.where(total == 0.0, 1.0, total)", "divisor = total"),
    "logarithms of one split": ("tl.store(tops + place, logarithm(top, divisor)", "tl.store(tops + place, (top)"),
}


def with_mistake(right: str, wrong: str) -> ModuleType:
    """The kernels' module with a part of its text replaced."""
    text = Path(decode_triton.__file__).read_text()
    assert text.count(right) == 1, right
    path = Path(tempfile.mkdtemp()) / "kernels.py"
    path.write_text(text.replace(right, wrong))
    spec = importlib.util.spec_from_file_location("kernels", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(inputs: decode_operator.Inputs) -> Results:
    tiles, splits = decode_operator.numbers_for(inputs, decode_operator.Room(), cores=64)
    out, lse = decode_operator.launched(inputs, tiles, splits, with_lse=True, wrap=lambda kernel: kernel)
    assert lse is not None
    return out, lse


if __name__ == "__main__":
    first = {RIGHT: self_check.first_difference(run, torch.device("cpu"))}
    for name, mistake in MISTAKES.items():
        module = with_mistake(*mistake)
        decode_operator.attend, decode_operator.join = module.attend, module.join
        first[name] = self_check.first_difference(run, torch.device("cpu"))
    sys.stdout.write(json.dumps(first) + "\n")
