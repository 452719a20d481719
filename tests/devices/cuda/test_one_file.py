"""A CUDA kernel is one file and one line: a copy of the package with both decides, emits, and documents it."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import attn_pass
from attn_pass.devices.cuda.kernels import KERNELS

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
LINE = '    "flex_flash",\n'


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What `one_file.py` prints where the package has the file of `toy_kernel.py`, and a line for it."""
    tree = tmp_path_factory.mktemp("tree")
    package = tree / "attn_pass"
    shutil.copytree(Path(attn_pass.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(HERE / "toy_kernel.py", package / "devices" / "cuda")
    kernels = package / "devices" / "cuda" / "kernels.py"
    text = kernels.read_text()
    assert text.count(LINE) == 1
    kernels.write_text(text.replace(LINE, f'{LINE}    "toy_kernel",\n'))
    paths = (tree, ROOT / "tests" / "support", ROOT / "docs")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, str(HERE / "one_file.py")]
    done = subprocess.run(command, env=environment, cwd=tree, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_what_it_emits_is_the_attention(seen: Any) -> None:
    assert seen["emitted"] == ["toy"] * 6


def test_it_wins_by_its_own_share_where_it_has_one(seen: Any) -> None:
    assert seen["H200"]["target"] == "toy" and seen["H200"]["us"] > 0
    assert seen["A100"]["target"] != "toy" and seen["A100"]["refusal"] == "there is no such kernel on A100"
    assert "toy" in seen["kernels"]["H200"] and "toy" not in seen["kernels"]["A100"]


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("window", "the toy kernel takes no mask but a causal one"),
        ("bfloat16", "bfloat16 has no fused kernel"),
        ("training", "the toy kernel has neither dropout nor a backward"),
    ],
)
def test_it_says_why_not(seen: Any, case: str, reason: str) -> None:
    assert seen[case]["target"] != "toy" and seen[case]["refusal"] == reason


def test_torch_s_own_call_knows_nothing_of_it(seen: Any) -> None:
    assert seen["order"] == ["cudnn", "flash", "efficient"]


def test_it_is_calibrated_at_the_points_of_prefill_alone(seen: Any) -> None:
    assert seen["points"] == [12, True] and seen["bare"] == [2, 2, 8, 16]


def test_the_tables_of_the_documentation_name_it(seen: Any) -> None:
    assert seen["usage"].endswith('`"flex_flash"`, `"toy"` |')
    assert len(seen["rules"]) == 7 and any("| mask | yes | toy.cu |" in row for row in seen["rules"])
    assert seen["rewrites"] is True


SHARED = ("cost", "facts", "family", "kernel", "own_check", "points", "sweep", "torch_kernel")


@pytest.mark.parametrize("name", SHARED)
def test_what_kernels_share_names_none_of_them(name: str) -> None:
    """Else a kernel that took another's place would be one file, one line, and a search for its name."""
    source = (Path(attn_pass.__file__).parent / "devices" / "cuda" / f"{name}.py").read_text()
    said = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    assert not said & {kernel.name for kernel in KERNELS}
