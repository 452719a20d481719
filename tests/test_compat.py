"""compat: the error when torch is too old, and that the answers fit the installed torch."""

from __future__ import annotations

import pytest
import torch

from attn_pass import compat
from attn_pass.errors import VersionError


def test_version_is_the_installed_one() -> None:
    assert str(torch.__version__).startswith("{}.{}.".format(*compat.TORCH_VERSION))


@pytest.mark.parametrize(
    ("text", "version"), [("2.13.0+cpu", (2, 13)), ("2.14.0a0+git12ab", (2, 14)), ("2.9.1", (2, 9)), ("3.0", (3, 0))]
)
def test_versions_are_read(text: str, version: tuple[int, int]) -> None:
    assert compat._parsed(text) == version


def test_an_unreadable_version_is_an_error() -> None:
    with pytest.raises(VersionError, match="'main'"):
        compat._parsed("main")


def test_an_old_torch_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "TORCH_VERSION", (2, 9))
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    with pytest.raises(VersionError) as caught:
        compat.require_inductor("backend")
    message = str(caught.value)
    assert message.startswith("attn_pass.backend needs torch 2.11 or newer; found 2.9.1.")
    assert "Upgrade torch" in message and "attn_pass.wrap" in message


@pytest.mark.parametrize("version", [(2, 11), (2, 13), (3, 0)])
def test_a_new_torch_passes(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]) -> None:
    monkeypatch.setattr(compat, "TORCH_VERSION", version)
    compat.require_inductor("backend")


@pytest.mark.skipif(compat.TORCH_VERSION == (2, 12), reason="2.12 was not read")
def test_slots_and_timing_are_those_of_the_version() -> None:
    assert compat.pre_grad_slot_takes_list() == (compat.TORCH_VERSION >= (2, 13))
    assert compat.has_pre_grad_timing() == (compat.TORCH_VERSION >= (2, 13))
