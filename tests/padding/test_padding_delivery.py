"""Regions in packages and exported programs, and what is compiled where the compiler cannot lower one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from padded_encoders import E, Encoder, L, compiled_once, first, ids, masks, mean
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

import attn_pass
from attn_pass.compat import PACKS_ANY_ROWS
from attn_pass.devices.cpu.kernel import build
from attn_pass.errors import AttnPassWarning
from attn_pass.padding.rewrite import Rewrite

pytestmark = pytest.mark.skipif(bool(build.missing()), reason="no compiler for the CPU kernel")
OWN = {"choose": "fused", "targets": ("cpu_kernel",)}


class Broken:
    """A compiler that fails on packed rows, and on more if it is told to."""

    def __init__(self, on: str = "offsets") -> None:
        self.on, self.seen = on, 0

    def __call__(self, gm: GraphModule, inputs: Any) -> Any:
        self.seen += 1
        if any("attn_pass" in str(n.target) and (self.on == "all" or self.on in n.kwargs) for n in gm.graph.nodes):
            raise RuntimeError("no such sizes here")
        return gm.forward


def test_what_cannot_be_lowered_is_compiled_without_the_region_alone() -> None:
    model, words, mask, broken = Encoder(first, layers=1).eval(), ids(), masks()[0], Broken()
    compiled = torch.compile(model, backend=attn_pass.wrap(broken, **OWN))
    with torch.no_grad(), attn_pass.record() as report, pytest.warns(AttnPassWarning, match="without packed rows"):
        torch.testing.assert_close(compiled(words, mask), model(words, mask), rtol=1e-4, atol=1e-5)
    assert [site.target for site in report.sites] == ["cpu_kernel"] and broken.seen == 2
    (region,) = report.regions
    assert region.outcome == "left" and "no such sizes here" in region.reason


def test_where_that_does_not_help_the_target_is_dropped_too() -> None:
    model, words, mask, broken = Encoder(first, layers=1).eval(), ids(), masks()[0], Broken("all")
    compiled = torch.compile(model, backend=attn_pass.wrap(broken, **OWN))
    with torch.no_grad(), attn_pass.record() as report, pytest.warns(AttnPassWarning):
        torch.testing.assert_close(compiled(words, mask), model(words, mask), rtol=1e-4, atol=1e-5)
    assert [site.outcome for site in report.sites] == ["left"] and broken.seen == 3
    assert [region.outcome for region in report.regions] == ["left"]


def test_an_exported_program_has_no_kernel_and_no_region() -> None:
    with torch.no_grad():
        program = torch.export.export(Encoder(first, layers=1).eval(), (ids(), masks()[0]))
    assert attn_pass.rewrite(program).regions == []


def test_a_package_for_any_batch(tmp_path: Path) -> None:
    model, words, batch = Encoder(mean, layers=1).eval(), ids(), torch.export.Dim("batch", min=2, max=64)
    shapes = ({0: batch}, {0: batch})
    with torch.no_grad():
        path = attn_pass.aot_compile(
            model, (words, masks()[0]), dynamic_shapes=shapes, package_path=tmp_path / "m.pt2", options=OWN
        )
        (region,) = attn_pass.package_report(path).regions
        assert region.outcome == "packed" and region.rows[1] == L
        run = torch._inductor.aoti_load_package(path)
        for mask in (*masks(), masks()[0].repeat(2, 1)[:7]):
            given = words.repeat(2, 1)[: len(mask)]
            torch.testing.assert_close(run(given, mask), model(given, mask), rtol=1e-4, atol=1e-5)


def test_training_compiled_by_inductor() -> None:
    """One program for every batch: forward and backward know the number of rows at run time only."""
    torch._dynamo.reset()
    model, words = Encoder(mean, layers=1, eager=False).eval(), ids()
    compiled = torch.compile(model, backend=attn_pass.wrap("inductor", on_error="raise", **OWN))
    with attn_pass.record() as report, torch._dynamo.config.patch(error_on_recompile=True):
        for mask in masks()[::2]:
            gradients = []
            for run in (compiled, model):
                model.zero_grad()
                (run(words, mask) ** 2).sum().backward()
                gradients.append([x.grad.clone() for x in model.parameters() if x.grad is not None])
            for one, other in zip(*gradients, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    assert [region.outcome for region in report.regions] == ["packed"]


def test_a_region_whose_number_of_rows_torch_asks_for_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(self: object) -> None:
        raise GuardOnDataDependentSymNode(sympy.Symbol("u0"), "Could not guard on Eq(u0, 0)")

    monkeypatch.setattr(Rewrite, "apply", apply)
    compiled = torch.compile(Encoder(first, layers=1).eval(), backend=attn_pass.wrap("eager", on_error="raise", **OWN))
    with torch.no_grad(), attn_pass.record() as report:
        compiled(ids(), masks()[0])
    assert "the number of rows at compile time" in report.regions[0].reason


class PackedLate(Encoder):
    """A convolution over positions comes first: the rows that three products read are packed, not computed."""

    def __init__(self) -> None:
        super().__init__(first, layers=1)
        self.mixed = nn.Conv1d(E, E, 3, padding=1)

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        x = self.mixed(self.words(ids).transpose(1, 2)).transpose(1, 2).contiguous()
        return self.after(self, self.layers[0](x, mask.bool()), mask)


@pytest.mark.skipif(not PACKS_ANY_ROWS, reason="torch packs no weights where the number of rows is not known")
def test_frozen_products_read_rows_that_were_packed() -> None:
    """Inductor sorts the strides of what several of them read (torch 2.13): it must know that none is 0."""
    with torch._inductor.config.patch(freezing=True):
        (region,) = compiled_once(PackedLate().eval())
    assert region.outcome == "packed", region.reason
