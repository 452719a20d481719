"""Results of attn_pass with the kernel in `toy_kernel.py`: run by `test_one_file.py` in a copy that has the file."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from against_eager import qkv, same
from build import docstrings
from decisions import rules
from named import targets
from torch import Tensor

import attn_pass
from attn_pass.devices import registry
from attn_pass.devices.cuda.points import call
from attn_pass.devices.cuda.sweep import attention_points

FP16 = torch.float16


def by_hand(causal: bool = False, window: int | None = None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores, all_keys = q @ k.mT * 0.3, torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device)
        if causal:
            scores = scores.masked_fill(~all_keys.tril(), float("-inf"))
        if window is not None:
            scores = scores.masked_fill(~all_keys.triu(-window), float("-inf"))
        return scores.softmax(-1) @ v

    return program


def emitted() -> list[str | None]:
    """The targets of programs that are executed and compared with float64: odd head dims, one row, a causal mask."""
    sizes = ({}, {"q_len": 31, "kv_len": 67, "dim": 20}, {"q_len": 1, "kv_len": 5}, {"heads": 1, "batch": 1})
    targets = []
    with torch.no_grad():
        for causal in (False, True):
            for of in sizes:
                if causal and "q_len" in of:
                    continue
                inputs = qkv(**of, dtype=FP16)
                report = same(by_hand(causal), *inputs, rewritten=1, device="H200", targets=("toy",))
                targets.append(report.sites[0].target)
    return targets


def decided(device: str, dtype: torch.dtype = FP16, grad: bool = False, **mask: bool | int) -> dict[str, object]:
    """What a long prefill becomes where every target is asked, and the kernel's refusal."""
    with torch.device("meta"), torch.set_grad_enabled(grad):
        inputs = [torch.empty(4, 32, 2048, 128, dtype=dtype, requires_grad=grad) for _ in range(3)]
        program = by_hand(**mask)  # type: ignore[arg-type]
        (site,) = attn_pass.explain(program, *inputs, attn_pass_options={"device": device}).sites
    return {"target": site.target, "refusal": site.refusals.get("toy"), "us": site.predicted_us.get("toy")}


def seen() -> dict[str, object]:
    h200 = registry.by_name("H200")
    points = [p for p in attention_points(h200) if p.kernel == "toy"]
    q, k, v = qkv(dtype=FP16)
    return {
        "emitted": emitted(),
        "H200": decided("H200"),
        "A100": decided("A100"),
        "window": decided("H200", window=300),
        "bfloat16": decided("H200", torch.bfloat16),
        "training": decided("H200", grad=True),
        "kernels": {name: registry.by_name(name).kernels for name in ("H200", "A100")},
        "order": registry.family_of(h200).order(h200),
        "points": [len(points), all(p.predicted_us(h200) > 0 for p in points)],
        "bare": tuple(call("toy", q, k, v, True).shape),
        "usage": next(row for row in targets() if row.startswith("| cuda |")),
        "rules": [row for row in rules() if row.startswith("| `toy` |")],
        "rewrites": "### `toy`\n\nA kernel for CUDA devices in one file" in docstrings("targets"),
    }


if __name__ == "__main__":
    print(json.dumps(seen()))
