"""A decode step as a package whose cache is its state: buffers that are written in place, from Python and from C++."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cpp_runner import run_package
from torch import Tensor, nn

import attn_pass

CACHE, HEADS, DIM = 70, 2, 16


class Step(nn.Module):
    """A token asks all tokens before it. The cache and the position are buffers, counted up by every call."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(32, 3 * HEADS * DIM), nn.Linear(HEADS * DIM, 32)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, HEADS, CACHE, DIM))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, HEADS, DIM)).transpose(1, 3).unbind(2)
        at = self.position.clone()
        self.keys.index_copy_(2, at, key)  # type: ignore[operator]
        self.values.index_copy_(2, at, value)  # type: ignore[operator]
        self.position.add_(1)  # type: ignore[operator]
        keep = (torch.arange(CACHE) <= at)[None, None, None]
        result = F.scaled_dot_product_attention(query, self.keys, self.values, attn_mask=keep)  # type: ignore[arg-type]
        return self.out(result.transpose(1, 2).flatten(2))


@pytest.fixture(scope="module")
def model() -> Step:
    torch.manual_seed(0)
    return Step().eval()


@pytest.fixture(scope="module")
def package(model: Step, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("package") / "step.pt2"
    quick = {"aot_inductor.compile_wrapper_opt_level": "O0"}
    options = {"choose": "fused", "targets": ("cpu_kernel",), "on_error": "raise", **quick}
    attn_pass.aot_compile(model, (torch.randn(1, 1, 32),), package_path=path, options=options)
    assert [site.target for site in attn_pass.package_report(path).sites] == ["cpu_kernel"]
    assert not bool(model.position.any()), "the model is as it was"  # type: ignore[operator]
    return path


@pytest.fixture(scope="module")
def every_token(model: Step) -> tuple[list[Tensor], list[Tensor]]:
    """One token for every position, and what eager says to each."""
    model, tokens = copy.deepcopy(model), [torch.randn(1, 1, 32) for _ in range(CACHE)]
    with torch.no_grad():
        return tokens, [model(x) for x in tokens]


def test_from_the_first_position_to_the_last(package: Path, every_token: tuple[list[Tensor], list[Tensor]]) -> None:
    run = torch._inductor.aoti_load_package(str(package))
    for token, wanted in zip(*every_token):
        torch.testing.assert_close(run(token), wanted, atol=1e-5, rtol=1e-5)


def test_each_loaded_package_has_a_cache_of_its_own(
    package: Path, every_token: tuple[list[Tensor], list[Tensor]]
) -> None:
    first, second = (torch._inductor.aoti_load_package(str(package)) for _ in range(2))
    for token, wanted in list(zip(*every_token))[:3]:
        for run in (first, second):
            torch.testing.assert_close(run(token), wanted, atol=1e-5, rtol=1e-5)


def test_nothing_copies_the_cache(package: Path) -> None:
    """No buffer of the cache's size is allocated: the update and the attention work on the package's own."""
    with zipfile.ZipFile(package) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".wrapper.cpp"))
        code = archive.read(name).decode()
    shapes = dict(re.findall(r"int64_t (\w+)\[\] = \{([^}]*)\}", code))
    allocated = re.findall(r"aoti_torch_empty_strided\(\d+, (\w+),", code)
    elements = [[int(n) for n in re.findall(r"(\d+)L", shapes[name])] for name in allocated]
    assert elements and all(torch.Size(sizes).numel() < HEADS * CACHE * DIM for sizes in elements)


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_from_cpp(package: Path, every_token: tuple[list[Tensor], list[Tensor]], tmp_path: Path) -> None:
    """One package after all tokens, and another after the first alone, which has a cache of its own."""
    tokens, results = every_token
    again = Path(shutil.copy(package, tmp_path / "again.pt2"))
    arguments = []
    for number, (token, path) in enumerate([*((token, package) for token in tokens), (tokens[0], again)]):
        torch.save([token.clone()], tmp_path / f"{number}_in.pt")
        arguments += [path, tmp_path / f"{number}_in.pt", tmp_path / f"{number}_out.pt"]
    done = subprocess.run([run_package(), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for number, wanted in enumerate([*results, results[0]]):
        (result,) = torch.load(tmp_path / f"{number}_out.pt", weights_only=False)
        torch.testing.assert_close(result, wanted, atol=1e-5, rtol=1e-5)
