"""Projections of frozen programs through Inductor: torch.compile with ``freezing``, and packages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from projected import B, E, L, Projected
from torch._inductor.utils import run_and_get_code

import attn_pass

pytestmark = pytest.mark.slow


def test_frozen_code_holds_one_weight() -> None:
    model, x = Projected().eval(), torch.randn(B, L, E)
    torch._dynamo.reset()
    with torch.no_grad(), torch._inductor.config.patch(freezing=True), attn_pass.record() as report:
        run = torch.compile(model, backend=attn_pass.backend, options={"choose": "fused", "on_error": "raise"})
        wanted = model(x)
        got, (code,) = run_and_get_code(run, x)
    torch.testing.assert_close(got, wanted)
    assert [r.outcome for r in report.projections] == ["joined"]
    assert f"({3 * E}, {E})" in code and "fused_cat" not in code and "aten.cat" not in code


def test_a_frozen_package(tmp_path: Path) -> None:
    model, x = Projected((True, False, True)).eval(), torch.randn(B, L, E)
    path = str(tmp_path / "model.pt2")
    with attn_pass.record() as report:
        attn_pass.aot_compile(
            model,
            (x,),
            package_path=path,
            inductor_configs={"freezing": True},
            options={"choose": "fused", "on_error": "raise"},
        )
    assert [r.outcome for r in report.projections] == ["joined"]
    package = torch._inductor.aoti_load_package(path)
    torch.testing.assert_close(package(x), model(x))


def test_a_package_keeps_names_of_weights(tmp_path: Path) -> None:
    model, x = Projected().eval(), torch.randn(B, L, E)
    with attn_pass.record() as report:
        path = attn_pass.aot_compile(model, (x,), package_path=str(tmp_path / "model.pt2"), options={"choose": "fused"})
    (record,) = report.projections
    assert record.outcome == "left" and record.reason.startswith("the package keeps every weight under its own name")
    names = torch._inductor.aoti_load_package(path).get_constant_fqns()
    assert {"q.weight", "k.weight", "v.weight"} <= set(names)
