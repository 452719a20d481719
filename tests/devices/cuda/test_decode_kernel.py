"""`attn_pass::decode`: the kernel under Triton's interpreter, the operator traced, exported and packaged on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from against_eager import qkv

pytest.importorskip("triton")

from attn_pass.compat import TORCH_VERSION
from attn_pass.devices.cuda.decode_operator import decode, decode_with_lse, splits_for
from bench.gpu import decode_cases


@lru_cache(maxsize=1)
def _interpreted() -> dict[str, dict[str, float]]:
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu.interpreted"], capture_output=True, text=True, check=False, cwd=root
    )
    assert done.returncode == 0, done.stderr[-2000:]
    document: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return document


def test_the_kernel_is_right_on_every_case() -> None:
    """Against float64; the weights are rounded to half precision before the second product, as fused kernels do."""
    errors = _interpreted()
    assert len(errors) > 40
    wrong = {n: row for n, row in errors.items() if not row["kernel"] <= 2 * row["plain"] + 1e-4}
    assert not wrong
    assert not {n: row for n, row in errors.items() if not max(row["lse, kernel"], row["lse, plain"]) <= 2e-6}
    assert sum(row["one mask row"] for row in errors.values()) >= 5
    assert max(row["splits"] for row in errors.values()) > 32 and min(row["splits"] for row in errors.values()) == 1


def test_splits_fill_the_device_and_no_more() -> None:
    assert splits_for(programs=8, kv_len=131072, cores=132) == 33
    assert splits_for(programs=8, kv_len=1000, cores=132) == 4
    assert splits_for(programs=1000, kv_len=131072, cores=132) == 1
    assert splits_for(programs=1, kv_len=1, cores=132) == 1


def test_it_is_the_same_function_on_the_cpu() -> None:
    """The operators off CUDA, on each case, against float64."""
    for case in decode_cases.CASES:
        q, k, v, mask = decode_cases.inputs_of(case)
        of_batch = decode_cases.lengths_of(case), decode_cases.starts_of(case)
        given = (q, k, v, mask, case.scale, case.causal, case.window, *of_batch, case.mean)
        out, lse = decode_with_lse(*given)
        right, right_lse = decode_cases.exact_with_lse(q, k, v, mask, case)
        assert decode_cases.error(out, right) <= (1e-2 if case.dtype == torch.bfloat16 else 2e-3), case.name
        assert decode_cases.error_of_lse(lse, right_lse) <= 2e-6, case.name
        assert torch.equal(decode(*given), out) and out.dtype == case.dtype and lse.dtype == torch.float32


class Step(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.ops.attn_pass.decode(q, k, v, None, 0.125, True, 50)


def _inputs(kv_len: int = 90) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return qkv(2, 4, 3, kv_len, 64, kv_heads=2, dtype=torch.float16)


def test_the_operator_is_well_formed() -> None:
    q, k, v = _inputs()
    torch.library.opcheck(decode, (q, k, v, None, 0.125, True, 50))
    mask = torch.rand(2, 1, 3, 90) < 0.8
    torch.library.opcheck(decode, (q, k, v, mask, 0.125))
    lengths = torch.tensor([40, 0], dtype=torch.int32)
    torch.library.opcheck(decode, (q, k, v, mask, 0.125, True, -1, lengths))
    torch.library.opcheck(decode_with_lse, (q, k, v, None, 0.125, True, 50, lengths))


def test_it_compiles_for_any_number_of_keys() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(Step(), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for kv_len in (90, 300, 7):
            q, k, v = _inputs(kv_len)
            torch._dynamo.mark_dynamic(k, 2)
            torch._dynamo.mark_dynamic(v, 2)
            torch.testing.assert_close(compiled(q, k, v), Step()(q, k, v))


@pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="its export guards the sizes of a dynamic repeat_interleave")
def test_it_is_exported_and_packaged(tmp_path: Path) -> None:
    keys = torch.export.Dim("keys", min=4, max=4096)
    inputs = _inputs()
    program = torch.export.export(Step(), inputs, dynamic_shapes=({}, {2: keys}, {2: keys}))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "decode.pt2"))
    run = torch._inductor.aoti_load_package(package)
    for kv_len in (90, 257):
        q, k, v = _inputs(kv_len)
        torch.testing.assert_close(run(q, k, v), Step()(q, k, v), atol=2e-3, rtol=2e-3)
