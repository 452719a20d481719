"""A package run by a C++ program, without Python: the numbers are eager's, and the report is in the package."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import NEG_INF, randn
from cpp_runner import run_package
from torch import Tensor, nn
from torch.export import Dim
from torch.utils.cpp_extension import library_paths

import attn_pass

if shutil.which("g++") is None:
    pytest.skip("there is no g++", allow_module_level=True)


class Plain(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * 0.2).softmax(-1) @ v


class Causal(nn.Module):
    """With weights of its own, and any length."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 4, 8)).unbind(-3)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        keep = torch.ones(x.size(1), x.size(1), dtype=torch.bool).tril()
        return ((q @ k.mT).masked_fill(~keep, NEG_INF).softmax(-1) @ v).transpose(1, 2).flatten(2)


class SharedKeys(nn.Module):
    """Seed S4 (pytorch #151287)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class CappedWindow(nn.Module):
    """FlexAttention's C++ template with a block mask."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = torch.arange(q.size(2))[:, None], torch.arange(k.size(2))
        scores = 20 * torch.tanh(q @ k.mT * 0.2 / 20)
        return scores.masked_fill((j > i) | (j < i - 40), NEG_INF).softmax(-1) @ v


class Decode(nn.Module):
    """One token's query of eight heads over a cache of two."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(4, 1) for x in (k, v))
        return (q @ k.mT * 0.2).softmax(-1) @ v


def three(q: tuple[int, ...], k: tuple[int, ...]) -> tuple[Tensor, ...]:
    return randn(*q, seed=1), randn(*k, seed=2), randn(*k, seed=3)


BATCH, KEYS = Dim("batch", min=1, max=2048), Dim("keys", min=2, max=4096)
LENGTH, ROWS = Dim("length", min=2, max=1024), Dim("rows", min=2, max=1024)
# The model, example inputs, dynamic shapes, other inputs, and the target that its rule names with its poor cases.
CASES: dict[str, tuple[nn.Module, tuple[Tensor, ...], Any, tuple[Tensor, ...], tuple[str, list[str]]]] = {
    "plain": (
        Plain(),
        three((2, 4, 20, 16), (2, 4, 30, 16)),
        (None, None, None),
        three((2, 4, 20, 16), (2, 4, 30, 16)),
        ("sdpa", []),
    ),
    "causal": (Causal(), (randn(2, 40, 32),), ({1: LENGTH},), (randn(2, 77, 32),), ("sdpa", [])),
    "S4": (
        SharedKeys(),
        three((100, 4, 1, 32), (1, 4, 256, 32)),
        ({0: BATCH}, None, None),
        three((37, 4, 1, 32), (1, 4, 256, 32)),
        ("cpu_kernel", ["shared_kv"]),
    ),
    "capped window": (
        CappedWindow(),
        three((1, 2, 200, 32), (1, 2, 200, 32)),
        ({2: ROWS}, {2: ROWS}, {2: ROWS}),
        three((1, 2, 333, 32), (1, 2, 333, 32)),
        ("flex", []),
    ),
    "decode": (
        Decode(),
        three((2, 8, 1, 32), (2, 2, 100, 32)),
        (None, {2: KEYS}, {2: KEYS}),
        three((2, 8, 1, 32), (2, 2, 257, 32)),
        ("sdpa", ["grouped_heads"]),
    ),
}


class Together(nn.Module):
    """All of them, in one package: a compile each would take a minute of a core."""

    def __init__(self) -> None:
        super().__init__()
        self.models = nn.ModuleList(model for model, *_ in CASES.values())

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        rest, results = list(inputs), []
        for model, (_, examples, *_) in zip(self.models, CASES.values()):
            results.append(model(*rest[: len(examples)]))
            rest = rest[len(examples) :]
        return tuple(results)


def together(part: int) -> tuple[Any, ...]:
    """One part of every case: the inputs of `Together`, or their dynamic shapes."""
    return tuple(x for case in CASES.values() for x in case[part])  # type: ignore[union-attr, misc]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("package") / "together.pt2"
    rules = {f"models.{i}": target for i, (*_, (target, _)) in enumerate(CASES.values())}
    options = {"choose": "fused", "on_error": "raise", "rules": rules}
    model = Together().eval()
    attn_pass.aot_compile(model, together(1), dynamic_shapes=(together(2),), package_path=path, options=options)
    sites = attn_pass.package_report(path).sites
    assert [(site.target, list(site.poor_cases)) for site in sites] == [becomes for *_, becomes in CASES.values()]
    return path


def test_no_library_is_python_s() -> None:
    (libraries,) = library_paths()[:1]
    needs = subprocess.run(["ldd", str(run_package())], capture_output=True, text=True, check=True).stdout
    assert "libtorch_cpu" in needs and "python" not in needs.replace(str(libraries), "")


def test_the_numbers_are_eager_s(package: Path, tmp_path: Path) -> None:
    """Run twice as it was loaded, with the inputs it was exported for and with others; and loaded once more."""
    again = Path(shutil.copy(package, tmp_path / "again.pt2"))
    runs = [(package, 1), (package, 3), (again, 3)]
    arguments = []
    for number, (path, part) in enumerate(runs):
        torch.save([x.clone() for x in together(part)], tmp_path / f"{number}_in.pt")
        arguments += [str(path), str(tmp_path / f"{number}_in.pt"), str(tmp_path / f"{number}_out.pt")]
    done = subprocess.run([run_package(), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    model = Together().double()
    for number, (_, part) in enumerate(runs):
        loaded = torch.load(tmp_path / f"{number}_out.pt", weights_only=False)
        with torch.no_grad():
            wanted = model(*(x.double() for x in together(part)))
        for result, want in zip(loaded, wanted, strict=True):
            torch.testing.assert_close(result.double(), want, atol=2e-5, rtol=2e-5)


def test_it_prints_what_was_done(package: Path) -> None:
    done = subprocess.run([run_package(), "--report", package], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert [site["poor_cases"] for site in report["sites"]] == [cases for *_, (_, cases) in CASES.values()]
