"""Weights of a loaded package: it lists the constants the stock package lists, and takes new values as it does."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config
from torch.export import ExportedProgram

import attn_pass

LENGTH, HEADS, DIM = 12, 2, 16
FUSED = {"choose": "fused", "on_error": "raise"}
X = torch.randn(2, LENGTH, DIM, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def quiet_torch() -> Iterator[None]:
    with config.patch(force_disable_caches=True, compile_threads=1):
        yield


class Model(nn.Module):
    """Tied weights, buffers that a state dict holds and does not hold, and plain attributes that are tensors."""

    def __init__(self, seed: int, persistent: bool, before: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.q, self.k, self.v = (nn.Linear(DIM, DIM, bias=n > 0) for n in range(3))
        self.out = nn.Linear(DIM, DIM, bias=False)
        self.out.weight = self.q.weight
        keep = torch.ones(32, 32, dtype=torch.bool).tril().triu(-before if before else -32)
        self.register_buffer("keep", keep, persistent=persistent)
        self.register_buffer("gain", torch.randn(DIM))
        self.register_buffer("offset", torch.randn(DIM), persistent=False)
        self.shift = torch.randn(DIM)  # a tensor of the module that is neither

    def forward(self, x: Tensor) -> Tensor:
        n = x.size(1)
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = (q @ k.mT * 0.3).masked_fill(~self.keep[:n, :n], float("-inf"))
        x = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.out(x * self.gain) + x * self.offset + self.shift


class MaskUsedTwice(Model):
    """Something else reads the mask, too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.keep[0, :DIM]


def exported(model: nn.Module, strict: bool = False, decomposed: bool = False) -> ExportedProgram:
    with torch.no_grad():
        program = torch.export.export(model.eval(), (X,), strict=strict)
        return program.run_decompositions() if decomposed else program


def package(program: ExportedProgram, path: Path, **options: Any) -> Any:
    """Ours, loaded."""
    attn_pass.aot_compile(program, package_path=path, options={**FUSED, **options})
    return torch._inductor.aoti_load_package(str(path))


def stock_package(program: ExportedProgram, path: Path) -> Any:
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    return torch._inductor.aoti_load_package(str(path))


def tensors(model: nn.Module) -> dict[str, Tensor]:
    held = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    return {name: value.detach().clone() for name, value in held.items()}


def update(loaded: Any, model: nn.Module) -> None:
    """All that it lists and the model has by that name; attributes have other names (``_tensor_constant0``)."""
    named = tensors(model)
    loaded.load_constants({n: named[n] for n in loaded.get_constant_fqns() if n in named}, check_full_update=False)


def close(result: Tensor, model: nn.Module) -> None:
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(X.double())
    torch.testing.assert_close(result.double(), exact, atol=3e-5, rtol=1e-5)


def test_weights_are_updated_as_in_a_stock_package(tmp_path: Path) -> None:
    """A mask that a state dict holds is a weight like others: nothing is concluded from its values."""
    model = Model(1, persistent=True)
    program = exported(model, strict=True, decomposed=True)
    stock, ours = stock_package(program, tmp_path / "stock.pt2"), package(program, tmp_path / "ours.pt2")
    report = attn_pass.package_report(tmp_path / "ours.pt2")
    (site,) = report.sites
    assert (site.target, site.mask) == ("cpu_kernel", "dense") and report.fixed_constants == ()
    assert sorted(ours.get_constant_fqns()) == sorted(stock.get_constant_fqns())
    assert {"k.weight", "k.bias", "keep", "gain", "offset"} <= set(ours.get_constant_fqns())
    close(ours(X), model)
    other = Model(2, persistent=True, before=3)  # another mask, too
    other.shift = model.shift
    for loaded in (stock, ours):
        update(loaded, other)
        close(loaded(X), other)


def test_a_mask_that_was_relied_on_is_fixed(tmp_path: Path) -> None:
    """It is listed, is in the package no more, and cannot be loaded; what was not relied on can."""
    model = Model(1, persistent=False)
    ours = package(exported(model), tmp_path / "ours.pt2")
    report = attn_pass.package_report(tmp_path / "ours.pt2")
    (site,) = report.sites
    assert site.mask == "causal" and site.fixed == ("keep",) and report.fixed_constants == ("keep",)
    assert "buffer keep keeps the values it has now" in site.assumptions
    assert "constants whose values are compiled in: keep" in str(report).splitlines()
    held = set(ours.get_constant_fqns())
    assert "keep" not in held and {"k.weight", "k.bias", "v.weight", "gain", "offset"} <= held
    with pytest.raises(Exception, match="Constant not found: keep"):
        ours.load_constants({"keep": model.keep}, check_full_update=False)
    other = Model(2, persistent=False)
    other.shift = model.shift
    update(ours, other)
    close(ours(X), other)


def test_a_fixed_mask_that_something_else_reads_stays_in_the_package(tmp_path: Path) -> None:
    model = MaskUsedTwice(1, persistent=True)
    ours = package(exported(model), tmp_path / "ours.pt2", assume_constant_buffers=True)
    assert attn_pass.package_report(tmp_path / "ours.pt2").fixed_constants == ("keep",)
    assert "keep" in ours.get_constant_fqns()
    close(ours(X), model)
    changed = torch.zeros_like(model.keep)
    ours.load_constants({"keep": changed}, check_full_update=False)
    with torch.no_grad():
        want = Model.forward(model, X) + changed[0, :DIM]  # the attention of the compile, the sum of what was loaded
    torch.testing.assert_close(ours(X), want, atol=3e-5, rtol=1e-5)


# ---- what is listed, without a compile ----


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize(
    ("persistent", "options", "fixed"),
    [
        (True, {}, ()),
        (True, {"assume_constant_buffers": True}, ("keep",)),
        (False, {}, ("keep",)),
        (False, {"targets": ()}, ()),
    ],
)
def test_what_is_fixed(
    strict: bool, decomposed: bool, persistent: bool, options: dict[str, Any], fixed: tuple[str, ...]
) -> None:
    """A site that is left relies on nothing."""
    program = exported(Model(1, persistent), strict, decomposed)
    report = attn_pass.rewrite(program, choose="fused", **options)
    assert report.fixed_constants == fixed and report.to_dict()["fixed_constants"] == list(fixed)
    assert len(report.rewritten) == (0 if "targets" in options else 1)


class Scaled(nn.Module):
    """The scale is a tensor of the module; the fill is written in the program."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.tensor(0.3)

    def forward(self, x: Tensor) -> Tensor:
        keep = torch.ones(x.size(1), x.size(1), dtype=torch.bool).tril()
        return torch.where(keep, x @ x.mT * self.scale, torch.tensor(float("-inf"))).softmax(-1) @ x


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("decomposed", [False, True])
def test_numbers_of_a_module_are_listed_and_those_of_the_text_are_not(strict: bool, decomposed: bool) -> None:
    program = exported(Nested(), strict, decomposed)
    report = attn_pass.rewrite(program, choose="fused", on_error="raise")
    (site,) = report.sites
    assert site.outcome == "rewritten" and site.mask == "causal"
    assert report.fixed_constants == ("inner.scale",)
    torch.testing.assert_close(program.module()(X), Nested()(X))


def test_two_sites_that_rely_on_one_buffer_list_it_once() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("keep", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = (x @ x.mT).masked_fill(~self.keep, float("-inf")).softmax(-1) @ x
            return x

    report = attn_pass.rewrite(exported(Two()), choose="fused")
    assert [site.fixed for site in report.sites] == [("keep",), ("keep",)] and report.fixed_constants == ("keep",)
    report.mark_left("for a reason")
    assert report.fixed_constants == ()
