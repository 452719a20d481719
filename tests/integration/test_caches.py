"""Torch's caches stay on and correct: their keys, and equal reports on a hit and on a miss. In separate processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch._inductor.runtime.cache_dir_utils

import attn_pass

SCRIPT = """
import json, os, sys
import torch
import torch._inductor.compile_fx
import attn_pass
from torch._dynamo.utils import counters

def attend(q, k, v):
    return (q @ k.mT * 0.25).softmax(-1) @ v

def run(entry, options):
    options = {"targets": ["sdpa"], **options}
    torch._dynamo.reset()
    counters.clear()
    with attn_pass.record() as report:
        if entry == "backend":
            compiled = torch.compile(attend, backend=attn_pass.backend, options={"choose": "fused", **options})
            found = compiled(*inputs)
        else:
            with attn_pass.enabled(choose="fused", **options):
                found = torch.compile(attend)(*inputs)
        found.sum().backward()
    torch.testing.assert_close(found, attend(*inputs))
    inductor, autograd = counters["inductor"], counters["aot_autograd"]
    return {
        "hits": inductor["fxgraph_cache_hit"] + autograd["autograd_cache_hit"],
        "misses": inductor["fxgraph_cache_miss"] + autograd["autograd_cache_miss"],
        "bypasses": inductor["fxgraph_cache_bypass"] + autograd["autograd_cache_bypass"],
        "report": report.to_json(),
    }

for runs in json.loads(sys.argv[1]):
    if os.fork():  # a process for each, which the imports are part of
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
        continue
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, 33, 16, requires_grad=True) for _ in range(3)]
    print(json.dumps([run(entry, options) for entry, options in runs]), flush=True)
    os._exit(0)
"""
ENTRIES = ("backend", "enabled")
Runs = list[tuple[str, dict[str, Any]]]


def in_processes(folder: Path, *processes: Runs, source: Path | None = None) -> list[list[dict[str, Any]]]:
    """What each of new processes with the folder's cache tells of entries with options, one after the other."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    _share_precompiled_headers(folder / "cache")
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([*([str(source)] if source else []), *filter(None, sys.path)])
    command = [sys.executable, str(script), json.dumps(processes)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()[-len(processes) :]]


def _share_precompiled_headers(cache: Path) -> None:
    """Torch's headers, which take the compiler seven seconds, are no result of the pass."""
    common = Path(torch._inductor.runtime.cache_dir_utils.cache_dir(), "precompiled_headers")
    common.mkdir(parents=True, exist_ok=True)
    cache.mkdir(exist_ok=True)
    if not (cache / common.name).exists():
        (cache / common.name).symlink_to(common)


def sites(run: dict[str, Any]) -> list[tuple[Any, ...]]:
    reported = json.loads(run["report"])
    return [(s["outcome"], s["target"], s["reason"], s["mask"], s["predicted_us"]) for s in reported["sites"]]


@pytest.mark.slow
def test_another_process_hits_and_tells_the_same(tmp_path: Path) -> None:
    """With the same pass; one with other sources, or with other options, gets nothing of the first."""
    plain: Runs = [(entry, {}) for entry in ENTRIES]
    without: Runs = [(entry, {"targets": []}) for entry in ENTRIES]
    (firsts,) = in_processes(tmp_path, plain)
    copied = tmp_path / "changed"
    shutil.copytree(tmp_path / "cache", copied / "cache", symlinks=True)  # before there is a graph as it was written
    ((*others, backend, enabled),) = in_processes(tmp_path, [*without, *plain])
    for first in firsts:
        assert first["misses"] and not first["bypasses"]
        assert [s[:2] for s in sites(first)] == [("rewritten", "sdpa")]
    for again, first in zip((backend, enabled), firsts):
        assert again["hits"] and not again["misses"] and not again["bypasses"]
        assert sites(again) == sites(first)
    for other in others:
        assert sites(other)[0][0] == "left"
    assert others[0]["misses"]

    # Inductor's caches are asked for the graph as it was rewritten, so a pass that rewrites otherwise misses.
    shutil.copytree(Path(attn_pass.__file__).parent, copied / "attn_pass")
    with (copied / "attn_pass" / "targets" / "sdpa.py").open("a") as file:
        file.write("\nSdpa.consider = lambda self, *_: Refusal('sdpa', 'changed')\n")
    ((changed,),) = in_processes(copied, [("enabled", {})], source=copied)
    assert changed["misses"] and sites(changed)[0][1] != "sdpa"
