"""Every example runs in its small form, gives the output it claims, and equals eager."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
HELPERS, ELSEWHERE = {"side_by_side", "without_torchvision"}, {"context_parallel": "needs two CUDA devices"}
# The library an example needs, sites it has, and what its report says of one.
RUN = {
    "huggingface": ("transformers", 2, "rewritten to cpu_kernel"),
    "timm_vit": ("timm", 2, "rewritten to sdpa"),
    "diffusers_block": ("diffusers", 2, "rewritten to cpu_kernel"),
    "training": ("torch", 1, "causal"),
    "aotinductor": ("torch", 1, "shared_kv"),
}


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*RUN, *HELPERS, *ELSEWHERE}


@pytest.mark.parametrize("name", list(RUN))
def test_an_example(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    library, sites, reported = RUN[name]
    pytest.importorskip(library) if library != "timm" else None
    torch._dynamo.reset()
    quick = torch._inductor.config.patch({"aot_inductor.compile_wrapper_opt_level": "O0"})
    with main_of(name, monkeypatch) as main, quick:
        folder: dict[str, Any] = {"folder": tmp_path} if name == "aotinductor" else {}
        error = main(small=True, **folder)
    printed = capsys.readouterr().out
    assert error <= 1e-5
    assert f"{sites} attention site" in printed and f"{sites} rewritten" in printed and reported in printed
    assert "error against eager" in printed


@contextmanager
def main_of(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., float]]:
    """The example's main function."""
    if name == "timm_vit" and find_spec("timm") is None:
        pytest.skip("timm is not installed")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module(name).main


def test_an_error_is_seen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    compare = importlib.import_module("side_by_side").compare
    x = torch.randn(3, 4)
    assert compare({"eager": lambda: x, "other": lambda: x}, rounds=1) == 0
    assert compare({"eager": lambda: x, "other": lambda: x + 0.1}, rounds=1) > 1e-2
    with pytest.raises(ValueError):
        compare({"eager": lambda: [x, x], "other": lambda: x}, rounds=1)
    capsys.readouterr()
