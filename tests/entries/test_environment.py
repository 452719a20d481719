"""Faults of the environment are told as such: the rewrite is not blamed, and nothing is compiled twice to find out."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_engine as toy
from torch._inductor import exc

import attn_pass
from attn_pass.entries import dynamo
from attn_pass.entries.environment import environment_fault
from attn_pass.entries.hook import RewritePass
from attn_pass.errors import AttnPassWarning, EnvironmentFault
from attn_pass.options import make_options
from attn_pass.tuning import disk_cache

pytestmark = pytest.mark.usefixtures("quiet_torch")

NO_COMPILER = exc.InvalidCxxCompiler()
CACHE = "/gone/file/torchinductor"
READ_ONLY = PermissionError(errno.EACCES, "Permission denied", "/somewhere/torchinductor")


def model(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) + 1


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (NO_COMPILER, "no C++ compiler works here"),
        (FileNotFoundError(errno.ENOENT, "No such file", "/usr/bin/clang++"), "no C++ compiler works here"),
        (READ_ONLY, "/somewhere/torchinductor cannot be written (Permission denied)"),
        (OSError(errno.ENOSPC, "No space left on device"), "cannot be written (No space left on device)"),
        (FileNotFoundError(errno.ENOENT, "No such file", "/data/weights.pt"), ""),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "/data/weights.pt/0"), ""),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", f"{CACHE}/ab"), "cannot be written (Not a directory)"),
        (FileNotFoundError(errno.ENOENT, "No such file", "/gone"), "/gone cannot be written (No such file)"),
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"), "(or TMPDIR)"),
        (PermissionError(errno.EACCES, "Permission denied", "/opt/my-cxx"), "(CXX is '/opt/my-cxx')"),
        (exc.CppCompileError(["g++"], "a.cpp:1: fatal error: Python.h: No such file or directory"), "python3-dev"),
        (exc.CppCompileError(["g++"], "a.cpp:1: error: 'tmp0' was not declared in this scope"), ""),
        (RuntimeError("g++ says that this is no C++"), ""),
    ],
)
def test_what_is_a_fault_of_the_environment(error: Exception, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", CACHE)
    monkeypatch.setenv("CXX", "/opt/my-cxx")
    assert told in environment_fault(error) and bool(environment_fault(error)) == bool(told)
    outer = RuntimeError("from the compiler")
    outer.__cause__ = error
    assert environment_fault(outer) == environment_fault(error)


@pytest.mark.parametrize("error", [NO_COMPILER, READ_ONLY], ids=["compiler", "folder"])
def test_the_rewrite_is_not_blamed(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.use(monkeypatch, toy.capped())
    compiles = []

    def refuse(*given: Any) -> Any:
        compiles.append(given)
        raise error

    monkeypatch.setattr(dynamo, "compile_under", refuse)
    with warnings.catch_warnings(record=True) as caught, pytest.raises(Exception) as raised:
        warnings.simplefilter("always")
        torch.compile(model, backend=attn_pass.backend)(torch.ones(3))
    assert len(compiles) == 1 and not [w for w in caught if issubclass(w.category, AttnPassWarning)]
    inner = getattr(raised.value, "inner_exception", raised.value)
    assert isinstance(inner, EnvironmentFault) and "no rewrite is at fault" in str(inner)


def by_check(backend: Callable[..., Any], path: Path) -> None:
    attn_pass.check(TwoSites(), torch.randn(1, 2, 8, 8), backend=backend)


def by_check_of_what_draws(backend: Callable[..., Any], path: Path) -> None:
    attn_pass.check(lambda x: TwoSites()(x) + torch.rand_like(x), torch.randn(1, 2, 8, 8), backend=backend)


def by_package(backend: Callable[..., Any], path: Path) -> None:
    attn_pass.aot_compile(torch.nn.ReLU(), (torch.randn(3),), package_path=path / "model.pt2")


@pytest.mark.parametrize("entry", [by_check, by_check_of_what_draws, by_package])
def test_each_entry_tells_the_environment(
    entry: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any, **named: Any) -> Any:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", refuse)
    with pytest.raises(EnvironmentFault, match="no C\\+\\+ compiler works here"):
        entry(refuse, tmp_path)


def test_a_broken_compiler_ends_the_command(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import torch\n\ndef model():\n    return torch.nn.ReLU(), torch.randn(3)\n")
    environment = os.environ | {"CXX": "/nonexistent", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "attn_pass", "check", f"{tmp_path / 'mine.py'}:model"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and "(CXX is '/nonexistent')" in ended.stderr, ended.stderr


def test_a_cache_that_cannot_be_written_is_one_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(disk_cache.VARIABLE, str(tmp_path / "file" / "folder"))
    disk_cache._warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(3):
            disk_cache.save("key", number)
    assert len(caught) == 1 and disk_cache.VARIABLE in str(caught[0].message)
    assert disk_cache.load("key") is None


def test_the_cache_is_in_the_folder_of_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(disk_cache.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert disk_cache.folder() == tmp_path / "attn_pass"


# ---- a device that is not the tensors' ----


class TwoSites(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x @ x.mT).softmax(-1) @ x
        return (x @ x.mT).softmax(-1) @ x


def by_aot_compile(x: torch.Tensor, path: Path, device: str) -> None:
    attn_pass.aot_compile(TwoSites(), (x,), package_path=path, options={"device": device, "choose": "fused"})


def by_rewrite(x: torch.Tensor, path: Path, device: str) -> None:
    attn_pass.rewrite(torch.export.export(TwoSites(), (x,)), device=device, choose="fused")


def by_wrap(x: torch.Tensor, path: Path, device: str) -> None:
    def left_alone(gm: Any, inputs: Any) -> Any:  # what is emitted for a GPU does not run here
        return lambda *given: (given[0],)

    torch.compile(TwoSites(), backend=attn_pass.wrap(left_alone, choose="fused", device=device))(x)


def by_hook(x: torch.Tensor, path: Path, device: str) -> None:
    gm = torch.export.export(TwoSites(), (x,)).module()
    assert isinstance(gm, torch.fx.GraphModule)
    RewritePass(make_options(device=device, choose="fused"))(gm.graph)


@pytest.mark.parametrize("entry", [by_aot_compile, by_rewrite, by_wrap, by_hook])
def test_a_device_that_the_tensors_are_not_on_is_one_warning(
    entry: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(device: str) -> list[str]:
        torch._dynamo.reset()
        with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", AttnPassWarning)
            entry(torch.randn(1, 2, 64, 64), tmp_path / "model.pt2", device)
        return [str(w.message) for w in caught if issubclass(w.category, AttnPassWarning)]

    packaged = lambda program, *, package_path, inductor_configs: package_path
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", packaged)
    (words,) = told("H200")
    assert words.startswith("attn_pass decided for 'H200'") and "tensors are on cpu" in words
    assert told("cpu") == []


@pytest.mark.parametrize("command", ["explain FILE:model", "check FILE:model", "bench FILE:model", "doctor"])
def test_a_folder_that_torch_cannot_make_is_a_sentence(command: str, tmp_path: Path) -> None:
    """Torch makes its folder while it is imported, before anything compiles."""
    (tmp_path / "file").touch()
    (tmp_path / "m.py").write_text("import torch\n\ndef model():\n    return torch.relu, (torch.ones(3),)\n")
    arguments = command.replace("FILE", str(tmp_path / "m.py")).split()
    ended = subprocess.run(
        [sys.executable, "-m", "attn_pass", *arguments],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "file" / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2 and "Traceback" not in ended.stderr, ended.stderr
    assert "the compiler's folder" in ended.stderr and "set the environment variable TORCHINDUCTOR" in ended.stderr
