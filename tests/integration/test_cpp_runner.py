"""Packages run by a C++ program, without Python: the numbers are eager's, and the report is in the package."""

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
from torch import Tensor, nn
from torch.export import Dim
from torch.utils.cpp_extension import include_paths, library_paths

import attn_pass

if shutil.which("g++") is None:
    pytest.skip("there is no g++", allow_module_level=True)

SOURCE = Path(__file__).parents[2] / "examples" / "cpp" / "run_package.cpp"


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


BATCH, LENGTH, KEYS = Dim("batch", min=1, max=2048), Dim("length", min=2, max=1024), Dim("keys", min=2, max=4096)
# The model, example inputs, dynamic shapes, other inputs, and what it has to become.
CASES: dict[str, tuple[nn.Module, tuple[Tensor, ...], Any, tuple[Tensor, ...], str]] = {
    "plain": (Plain(), three((2, 4, 20, 16), (2, 4, 30, 16)), None, three((2, 4, 20, 16), (2, 4, 30, 16)), "sdpa"),
    "causal": (Causal(), (randn(2, 40, 32),), ({1: LENGTH},), (randn(2, 77, 32),), "sdpa"),
    "S4": (
        SharedKeys(),
        three((100, 4, 1, 32), (1, 4, 256, 32)),
        ({0: BATCH}, None, None),
        three((37, 4, 1, 32), (1, 4, 256, 32)),
        "cpu_kernel",
    ),
    "capped window": (
        CappedWindow(),
        three((1, 2, 200, 32), (1, 2, 200, 32)),
        ({2: LENGTH}, {2: LENGTH}, {2: LENGTH}),
        three((1, 2, 333, 32), (1, 2, 333, 32)),
        "cpu_kernel",
    ),
    "decode": (
        Decode(),
        three((2, 8, 1, 32), (2, 2, 100, 32)),
        (None, {2: KEYS}, {2: KEYS}),
        three((2, 8, 1, 32), (2, 2, 257, 32)),
        "sdpa",
    ),
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, built against the torch that is installed; of its libraries none is Python's."""
    built = tmp_path_factory.mktemp("cpp") / "run_package"
    (libraries,) = library_paths()[:1]
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    command = ["g++", "-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", str(SOURCE), "-o", str(built)]
    command += [f"-I{path}" for path in include_paths()]
    command += [f"-L{libraries}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{libraries}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    needs = subprocess.run(["ldd", str(built)], capture_output=True, text=True, check=True).stdout
    assert "libtorch_cpu" in needs and "python" not in needs.replace(str(libraries), "")
    return built


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("packages")
    made = {}
    for name, (model, inputs, shapes, _, target) in CASES.items():
        path = folder / f"{name.replace(' ', '_')}.pt2"
        # The wrapper's C++ has nothing to do with attention.
        quick = {"aot_inductor.compile_wrapper_opt_level": "O0"}
        options = {"choose": "fused", "on_error": "raise", **quick}
        attn_pass.aot_compile(model.eval(), inputs, dynamic_shapes=shapes, package_path=path, options=options)
        (site,) = attn_pass.package_report(path).sites
        assert site.target == target, name
        made[name] = path
    return made


def test_the_numbers_are_eager_s(program: Path, packages: dict[str, Path], tmp_path: Path) -> None:
    arguments = []
    for name, path in packages.items():
        for number, at in enumerate((1, 3)):
            stem = tmp_path / f"{path.stem}_{number}"
            torch.save([x.clone() for x in CASES[name][at]], f"{stem}_in.pt")  # type: ignore[union-attr]
            arguments += [str(path), f"{stem}_in.pt", f"{stem}_out.pt"]
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, path in packages.items():
        model = CASES[name][0].double()
        for number, at in enumerate((1, 3)):
            (loaded,) = torch.load(tmp_path / f"{path.stem}_{number}_out.pt", weights_only=False)
            with torch.no_grad():
                want = model(*(x.double() for x in CASES[name][at]))  # type: ignore[union-attr]
            torch.testing.assert_close(loaded.double(), want, atol=2e-5, rtol=2e-5)


def test_it_prints_what_was_done(program: Path, packages: dict[str, Path]) -> None:
    done = subprocess.run([program, "--report", packages["S4"]], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert [site["poor_cases"] for site in report["sites"]] == [["shared_kv"]]
