"""Faults of the environment are told as such: the rewrite is not blamed, and nothing is compiled twice to find out."""

from __future__ import annotations

import errno
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
from attn_pass.errors import AttnPassWarning, EnvironmentFault, OptionError
from attn_pass.options import make_options
from attn_pass.tuning import disk_cache

pytestmark = pytest.mark.usefixtures("quiet_torch")

NO_COMPILER = exc.InvalidCxxCompiler()
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
        (RuntimeError("g++ says that this is no C++"), ""),
    ],
)
def test_what_is_a_fault_of_the_environment(error: Exception, told: str) -> None:
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
    assert isinstance(inner, EnvironmentFault) and "is not at fault" in str(inner)


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


# ---- natural mistakes ----


def test_a_backend_that_is_called_by_hand_says_how_it_is_used() -> None:
    with pytest.raises(OptionError, match=r"backend=attn_pass\.wrap\('inductor', choose="):
        attn_pass.backend(choose="fused")
    with pytest.raises(OptionError, match="is the backend itself"):
        attn_pass.backend("aot_eager")  # type: ignore[arg-type]


def test_wrap_without_a_backend_says_how_it_is_used() -> None:
    with pytest.raises(Exception, match=r"backend=attn_pass\.wrap\('aot_eager'\)"):
        torch.compile(model, backend=attn_pass.wrap)(torch.ones(3))


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"choose": "fused"}, 'attn_pass_options={"choose": ...}'),
        ({"options": {"choose": "fused"}}, "attn_pass_options={...}"),
        ({"dynamic": True}, "attn_pass_dynamic=True"),
    ],
)
def test_an_option_that_went_to_the_model_is_told(given: dict[str, Any], hint: str) -> None:
    with pytest.raises(attn_pass.CaptureError) as raised:
        attn_pass.explain(model, torch.ones(3), **given)
    assert hint in str(raised.value)


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
